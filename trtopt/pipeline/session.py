"""One run of ``trtopt build`` or ``trtopt optimize``: its stages, in order, and its report."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from trtopt.accuracy.metric import gate
from trtopt.config import BuildConfig
from trtopt.engine.achieved import achieved_precision
from trtopt.engine.build import EngineArtifact
from trtopt.engine.layers import layers_of_profile
from trtopt.engine.manifest import manifest_path
from trtopt.engine.sizes import sized
from trtopt.engine.work import layers_of_engine
from trtopt.errors import EngineBuildError
from trtopt.graph import cost
from trtopt.graph.artifact import ModelArtifact
from trtopt.graph.shapes import static_shapes
from trtopt.hardware.spec import supports
from trtopt.judge.judges import judge_for
from trtopt.judge.protocol import PriceFile
from trtopt.judge.target import BuildTarget
from trtopt.pipeline import network_io
from trtopt.pipeline.compile import Compilation, compile_engine, trim_cache
from trtopt.pipeline.guard import OwnQdq, canonicalized, own_qdq, rewrite
from trtopt.pipeline.host import Cut, at_path, cut, host_path
from trtopt.pipeline.lower import Lowered, Lowering, blamed, lower
from trtopt.pipeline.manifest import Results, write
from trtopt.pipeline.network_io import FinalModel
from trtopt.pipeline.search import missed
from trtopt.pipeline.settings import (
    BuildInputs,
    BuildSettings,
    DataSources,
    Outputs,
    described,
    prunes,
    read_files,
    read_inputs,
    settle,
)
from trtopt.pipeline.sparse import SparseJob, Sparsified, as_made, sparsify
from trtopt.pipeline.verify import Verification, gauge_for, verify, verify_engine
from trtopt.report.schema.analysis import EngineAnalysis, totals_of
from trtopt.report.schema.build import AccuracyRecord, BuildReport, EngineRecord, PrecisionRecord
from trtopt.report.schema.decisions import SparsityRecord
from trtopt.report.schema.steps import RewritingRecord
from trtopt.report.schema.write import environment
from trtopt.rewrite.driver import Rewritten
from trtopt.roofline.layer import predict
from trtopt.support.clock import Clock
from trtopt.support.files import check_outputs
from trtopt.support.precision import Precision


def run_build(path: Path, config: BuildConfig, sources: DataSources, clock: Clock, *, make_engine: bool) -> BuildReport:
    """Make an engine of a model, or the optimized model alone.

    Args:
        path: The ONNX file.
        config: The options.
        sources: Samples and metric, where they are not those that the options name.
        clock: Times, warnings and progress.
        make_engine: Whether an engine is built.

    Raises:
        TrtoptError: See the subclasses in :mod:`trtopt.errors`.
    """
    settings = settle(path, config, sources.calib, clock, make_engine=make_engine)
    inputs = read_inputs(settings, sources, clock)
    return _Run(settings.checked_on(inputs.check), inputs, clock).run()


@dataclass(frozen=True)
class _Built:
    """What came of a lowered model, with the gates that failed; no engine where none was asked for, or a gate
    failed."""

    lowered: Lowered
    final: FinalModel
    accuracy: AccuracyRecord
    engine: EngineArtifact | None
    failures: tuple[str, ...]


class _Run:
    """The stages of a run; what one gives stays for those behind it."""

    def __init__(self, settings: BuildSettings, inputs: BuildInputs, clock: Clock) -> None:
        self._settings, self._config, self._inputs, self._clock = settings, settings.config, inputs, clock
        config, target = settings.config, settings.target
        prices = partial(PriceFile, folder=config.cache_dir, on_event=clock.listen, plugins=config.plugins)
        self._open_judge = partial(judge_for, target.backend, target.gpu, plugins=config.plugins, prices=prices)

    def run(self) -> BuildReport:
        """All stages."""
        settings, inputs, config, clock = self._settings, self._inputs, self._config, self._clock
        self._parts, self._outputs = self._without_host_part()
        self._target = settings.target.with_profiles(self._parts.profiles(inputs.profiles))
        self._own = self._after_recipes()
        loaded, artifact, host = inputs.loaded.model, self._own.rewritten.artifact, self._parts.host
        self._plain = Verification(
            loaded,
            artifact.model,
            inputs.check,
            inputs.source,
            inputs.metric,
            config.compare_tensors,
            host,
            inputs.axes,
            floor=settings.budget.floor,
        )
        pruned = Sparsified(artifact, None)
        if prunes(config):
            job = SparseJob(self._target, settings.precision, inputs.calibration, self._plain, config, settings.budget)
            pruned = sparsify(artifact, job, clock)
        self._budget = settings.budget_after(pruned.is_pruned)
        built = self._build(pruned.artifact)
        for failure in built.failures if config.allow_accuracy_loss else ():
            clock.warn("gate", failure)
        sparsity = as_made(pruned.record, settings.precision, built.lowered.quantized, built.engine)
        effective = replace(config, max_accuracy_drop=self._budget.drop)
        report = self._report(built, effective, sparsity)
        with clock.stage("write"):
            samples = (inputs.calibration, inputs.check)
            part = None if host is None else host.model
            model, eight_bit = built.final.artifact.model, tuple(built.lowered.quantized)
            backend = self._target.backend
            results = Results(report, built.engine, model, eight_bit, part, samples, settings.files, backend)
            report = write(results, self._outputs.places, effective, settings.signer)
        trim_cache(config, clock)
        return report

    def _without_host_part(self) -> tuple[Cut, Outputs]:
        """The model without what its compiler refuses; where something is cut off, its file joins the outputs."""
        target, outputs, loaded = self._settings.target, self._settings.outputs, self._inputs.loaded
        artifact = canonicalized(self._inputs.fixed, target.backend.name, self._clock)
        with self._clock.stage("cut"):
            shapes = target.with_profiles(self._inputs.profiles).shapes
            parts = cut(artifact, target.backend, shapes, self._clock, plugins=bool(self._config.plugins))
        if parts.host is None:
            return parts, outputs
        path = host_path(outputs.main, target.backend)
        check_outputs(
            {"the part of the model for the host": outputs.with_host(path).places["host"]},
            {**read_files(self._settings, loaded), **described(outputs.places)},
        )
        return parts, outputs.with_host(path)

    def _after_recipes(self) -> OwnQdq:
        """The model after its recipes; without its own Q/DQ where that does not pay."""
        settings, config, target, clock = self._settings, self._config, self._target, self._clock

        def with_recipes(artifact: ModelArtifact) -> Rewritten:
            with clock.stage("rewrite"):
                return rewrite(artifact, target, settings.judged_in, config, self._open_judge, clock.listen)

        return own_qdq(self._parts.artifact, with_recipes, target, settings.precision, config, clock, self._open_judge)

    def _build(self, artifact: ModelArtifact) -> _Built:
        """The model lowered, verified and built; where the compiler cannot build an 8-bit node, without it."""
        settings, config, target, clock = self._settings, self._config, self._target, self._clock
        lowering, gauge = None, gauge_for(self._plain, config, self._budget)
        if settings.precision is not None:
            lowering = Lowering(
                settings.precision,
                target,
                self._inputs.calibration,
                config,
                self._open_judge,
                self._inputs.ranges,
                self._own.ranges,
                gauge,
                saved=not settings.make_engine or config.save_onnx is not None,
            )
        while True:
            lowered = Lowered(artifact, None, PrecisionRecord("as-is"))
            if lowering is not None:
                lowered = lower(artifact, lowering, clock)
            final = network_io.change(
                lowered.artifact, target.profiles, settings.io, self._inputs.fixed.model, self._plain.host
            )
            job = replace(self._plain, optimized=final.compared, feeds=final.feeds)
            known = None if gauge is None or job.tensors else gauge.known(final.compared)
            accuracy = verify(job, clock) if known is None else known
            failures = missed(lowered.search) + gate(accuracy, self._budget)
            if not settings.make_engine or (failures and not config.allow_accuracy_loss):
                return _Built(lowered, final, accuracy, None, failures)
            compilation = Compilation(target.with_profiles(final.profiles), settings.uses_tf32, settings.cache)
            try:
                engine = compile_engine(final.artifact, compilation, settings.builder_config(), clock)
            except EngineBuildError as error:
                lowering = _without_refused(lowering, lowered, error, clock)
                if lowering is None:
                    raise
                continue
            accuracy = verify_engine(accuracy, job, engine.data, target.backend, clock)
            return _Built(lowered, final, accuracy, engine, missed(lowered.search) + gate(accuracy, self._budget))

    def _report(self, built: _Built, effective: BuildConfig, sparsity: SparsityRecord | None) -> BuildReport:
        own, lowered, clock = self._own, built.lowered, self._clock
        is_written = not built.failures or self._config.allow_accuracy_loss
        target = self._settings.target.with_profiles(built.final.profiles)
        capability = "8.0 and later" if target.gpu is None else target.gpu.compute_capability
        analysis = self._predicted(built, target)
        return BuildReport(
            model=self._inputs.loaded.to_json_dict(),
            gpu={"name": target.gpu_name, "compute_capability": capability} | _calibration(target),
            steps=built.final.artifact.steps,
            calibration=lowered.calibration,
            precision=_precision(built, target, analysis),
            accuracy=built.accuracy,
            judge=own.rewritten.judge if lowered.judge == "none" else lowered.judge,
            rewriting=RewritingRecord(own.rewritten.before, own.rewritten.after),
            warnings=tuple(clock.warnings),
            engine=self._engine(built.engine, is_written=is_written),
            config=dataclasses.asdict(effective),
            environment=environment(),
            seconds={name: round(value, 4) for name, value in clock.seconds.items()},
            gate_failures=built.failures,
            analysis=analysis,
            host=at_path(self._parts.record, self._outputs.named.get("host") if is_written else None),
            network_io=built.final.records,
            guard=(*own.guard, *lowered.guard),
            sixteen_bit=own.sixteen_bit or lowered.sixteen_bit,
            search=lowered.search,
            sparsity=sparsity,
        )

    def _predicted(self, built: _Built, target: BuildTarget) -> EngineAnalysis | None:
        """The predicted time of an engine's layers; None without an engine, and for a target that is not one chip."""
        if built.engine is None or target.gpu is None:
            return None
        model = built.final.artifact.model
        tf32 = self._settings.uses_tf32 and supports(target.gpu, Precision.TF32)
        with self._clock.stage("predict"):
            shapes = static_shapes(model, target.shapes)
            layers = sized(layers_of_profile(built.engine.record.layers), model, shapes) or built.engine.sized_layers
            work = layers_of_engine(layers, model, shapes, tf32=tf32)
            rows, uncosted = predict(work.layers, target.gpu)
        return EngineAnalysis(target.gpu.name, rows, totals_of(rows), uncosted)

    def _engine(self, engine: EngineArtifact | None, *, is_written: bool) -> EngineRecord | None:
        if engine is None or not is_written:
            return None if engine is None else engine.record
        path = self._outputs.named["engine"]
        return replace(engine.record, path=str(path), manifest=str(manifest_path(path)))


def _calibration(target: BuildTarget) -> dict[str, object]:
    """The field of the report's GPU that says that its predictions are calibrated, where they are."""
    found = None if target.gpu is None else target.gpu.calibration
    return {} if found is None else {"calibration": dataclasses.asdict(found)}


def _precision(built: _Built, target: BuildTarget, analysis: EngineAnalysis | None) -> PrecisionRecord:
    """The precision record, with what the engine's layers say when there is an engine."""
    if built.engine is None:
        return built.lowered.record
    model = built.final.artifact.model
    flop = cost.flop_by_node(model, static_shapes(model, target.shapes))
    achieved = achieved_precision(built.engine.record.layers, flop, analysis.layers if analysis else ())
    return replace(built.lowered.record, achieved=achieved)


def _without_refused(
    lowering: Lowering | None, lowered: Lowered, error: EngineBuildError, clock: Clock
) -> Lowering | None:
    """What is lowered to next without the 8-bit nodes that the compiler refused; None where nothing is left to try."""
    if lowering is None:
        return None
    blocked = blamed(lowered, error)
    is_new = lowering.config.keep_all_int8 and bool(lowered.quantized) and not lowering.failed
    if not (blocked or is_new):
        return None
    for node, reason in blocked.items():
        clock.warn("build engine", f"{node} goes back to 16-bit: {reason}")
    return replace(lowering, blocked={**lowering.blocked, **blocked}, failed=lowering.failed or not blocked)
