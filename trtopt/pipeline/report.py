"""The report of a run, put together from what its stages gave."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from trtopt.config import AccuracyBudget, BuildConfig
from trtopt.engine.achieved import achieved_precision
from trtopt.engine.build import EngineArtifact
from trtopt.engine.manifest import manifest_path
from trtopt.engine.work import layers_of_engine
from trtopt.graph import cost
from trtopt.graph.artifact import ModelArtifact
from trtopt.graph.shapes import static_shapes
from trtopt.hardware.spec import supports
from trtopt.judge.target import BuildTarget
from trtopt.pipeline.host import Cut, at_path
from trtopt.pipeline.network_io import FinalModel
from trtopt.pipeline.own_qdq import OwnQdq
from trtopt.pipeline.settings import BuildSettings, Outputs
from trtopt.report.schema.analysis import EngineAnalysis, totals_of
from trtopt.report.schema.build import AccuracyRecord, BuildReport, EngineRecord, PrecisionRecord
from trtopt.report.schema.decisions import SparsityRecord
from trtopt.report.schema.steps import RewritingRecord
from trtopt.report.schema.write import environment
from trtopt.roofline.layer import predict
from trtopt.support.clock import Clock
from trtopt.support.precision import Precision


@dataclass(frozen=True)
class Built:
    """What came of a lowered model.

    Attributes:
        final: The model with the inputs and outputs that were asked for, and its shapes.
        accuracy: The verification.
        engine: The engine; None where none was asked for, or a gate failed before it was built.
        failures: The gates that failed.
    """

    final: FinalModel
    accuracy: AccuracyRecord
    engine: EngineArtifact | None
    failures: tuple[str, ...]


@dataclass(frozen=True)
class Stages:
    """What the stages of a run gave.

    Attributes:
        loaded: The model.
        parts: The model without what the compiler refuses.
        own: The model after its recipes, and what its own Q/DQ is worth.
        sparsity: What was pruned; None where nobody asked.
        budget: The accuracy that might be lost.
        built: The lowered model, verified, and its engine.
        outputs: The files to write, the part for the host among them.
    """

    loaded: ModelArtifact
    parts: Cut
    own: OwnQdq
    sparsity: SparsityRecord | None
    budget: AccuracyBudget
    built: Built
    outputs: Outputs


def effective(config: BuildConfig, budget: AccuracyBudget) -> BuildConfig:
    """The options as they took effect."""
    return dataclasses.replace(config, max_accuracy_drop=budget.drop)


def report_of(settings: BuildSettings, stages: Stages, clock: Clock) -> BuildReport:
    """The report.

    Args:
        settings: What was asked for.
        stages: What came of it.
        clock: Times and warnings.
    """
    built, own, outputs = stages.built, stages.own, stages.outputs.named
    lowered, rewritten = built.final.lowered, own.rewritten
    is_written = not built.failures or settings.config.allow_accuracy_loss
    target = settings.target.with_profiles(built.final.profiles)
    analysis = _predicted(settings, built, target, clock)
    return BuildReport(
        model=stages.loaded.to_json_dict(),
        gpu=_gpu(target),
        steps=lowered.artifact.steps,
        calibration=lowered.calibration,
        precision=_precision(built, target, analysis),
        accuracy=built.accuracy,
        judge=rewritten.judge if lowered.judge == "none" else lowered.judge,
        rewriting=RewritingRecord(rewritten.before, rewritten.after),
        warnings=tuple(clock.warnings),
        engine=_engine(settings, built.engine, is_written=is_written),
        config=dataclasses.asdict(effective(settings.config, stages.budget)),
        environment=environment(),
        seconds={name: round(value, 4) for name, value in clock.seconds.items()},
        gate_failures=built.failures,
        analysis=analysis,
        host=at_path(stages.parts.record, outputs.get("host") if is_written else None),
        network_io=built.final.records,
        guard=(*own.guard, *lowered.guard),
        sixteen_bit=own.sixteen_bit or lowered.sixteen_bit,
        search=lowered.search,
        sparsity=stages.sparsity,
    )


def _predicted(settings: BuildSettings, built: Built, target: BuildTarget, clock: Clock) -> EngineAnalysis | None:
    """The predicted time of an engine's layers; None without an engine, and for a target that is not one chip."""
    if built.engine is None or target.gpu is None:
        return None
    model = built.final.lowered.artifact.model
    tf32 = settings.uses_tf32 and supports(target.gpu, Precision.TF32)
    with clock.stage("predict"):
        shapes = static_shapes(model, target.shapes)
        work = layers_of_engine(built.engine.sized_layers, model, shapes, tf32=tf32)
        rows, uncosted = predict(work.layers, target.gpu)
    return EngineAnalysis(target.gpu.name, rows, totals_of(rows), uncosted)


def _precision(built: Built, target: BuildTarget, analysis: EngineAnalysis | None) -> PrecisionRecord:
    """The precision record, with what the engine's layers say when there is an engine."""
    lowered = built.final.lowered
    if built.engine is None:
        return lowered.record
    model = lowered.artifact.model
    flop = cost.flop_by_node(model, static_shapes(model, target.shapes))
    achieved = achieved_precision(built.engine.record.layers, flop, analysis.layers if analysis else ())
    return dataclasses.replace(lowered.record, achieved=achieved)


def _gpu(target: BuildTarget) -> dict[str, Any]:
    capability = "8.0 and later" if target.gpu is None else target.gpu.compute_capability
    return {"name": target.gpu_name, "compute_capability": capability}


def _engine(settings: BuildSettings, engine: EngineArtifact | None, *, is_written: bool) -> EngineRecord | None:
    if engine is None or not is_written:
        return None if engine is None else engine.record
    path = settings.outputs.named["engine"]
    return dataclasses.replace(engine.record, path=str(path), manifest=str(manifest_path(path)))
