"""One run of ``trtopt build`` or ``trtopt optimize``: its stages, in order."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from trtopt.accuracy.gate import gate
from trtopt.config import AccuracyBudget, BuildConfig
from trtopt.errors import EngineBuildError
from trtopt.graph.artifact import ModelArtifact
from trtopt.judge.judges import judge_for
from trtopt.judge.memo import PriceFile
from trtopt.judge.protocol import OpenJudge
from trtopt.judge.target import BuildTarget
from trtopt.pipeline import network_io
from trtopt.pipeline.compile import Compilation, compile_engine, trim_cache
from trtopt.pipeline.gauge import gauge_for
from trtopt.pipeline.host import Cut, cut, host_path
from trtopt.pipeline.inputs import BuildInputs, Sources, read_files, read_inputs
from trtopt.pipeline.lower import Lowering, lower
from trtopt.pipeline.lowered import Lowered, blamed
from trtopt.pipeline.outputs import Results, write
from trtopt.pipeline.own_qdq import OwnQdq, canonicalized, own_qdq
from trtopt.pipeline.report import Built, Stages, effective, report_of
from trtopt.pipeline.rewrite import rewrite
from trtopt.pipeline.search import missed
from trtopt.pipeline.settings import BuildSettings, Outputs, described, prunes, settle
from trtopt.pipeline.sparse import SparseJob, Sparsified, as_made, sparsify
from trtopt.pipeline.verify import Verification, verify, verify_engine
from trtopt.report.schema.build import BuildReport, PrecisionRecord
from trtopt.rewrite.driver import Rewritten
from trtopt.support.clock import Clock
from trtopt.support.files import check_outputs


def run_build(path: Path, config: BuildConfig, sources: Sources, clock: Clock, *, make_engine: bool) -> BuildReport:
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
    parts, outputs = _without_host_part(settings, inputs, clock)
    target = settings.target.with_profiles(parts.profiles(inputs.profiles))
    own = _after_recipes(settings, parts, target, clock)
    plain = _verification(settings, inputs, parts, own)
    pruned = _pruned(settings, inputs, target, plain, own, clock)
    budget = settings.budget_after(pruned.is_pruned)
    lowering = _lowering(settings, inputs, target, own, plain, budget, clock)
    built = _build(settings, pruned.artifact, target, lowering, plain, budget, clock)
    for failure in built.failures if config.allow_accuracy_loss else ():
        clock.warn("gate", failure)
    sparsity = as_made(pruned.record, settings.precision, built.final.lowered.quantized, built.engine)
    report = report_of(settings, Stages(inputs.loaded, parts, own, sparsity, budget, built, outputs), clock)
    host = None if parts.host is None else parts.host.model
    samples = (inputs.calibration, inputs.check)
    with clock.stage("write"):
        results = Results(report, built.engine, built.final.lowered, host, samples, settings.files)
        write(results, outputs.places, effective(config, budget), settings.signer)
    trim_cache(config, clock)
    return report


def _without_host_part(settings: BuildSettings, inputs: BuildInputs, clock: Clock) -> tuple[Cut, Outputs]:
    """The model without what its compiler refuses; where something is cut off, its file joins the outputs."""
    target, outputs = settings.target, settings.outputs
    artifact = canonicalized(inputs.loaded, target.backend.name, clock)
    with clock.stage("cut"):
        shapes = target.with_profiles(inputs.profiles).shapes
        parts = cut(artifact, target.backend, shapes, clock, plugins=bool(settings.config.plugins))
    if parts.host is None:
        return parts, outputs
    path = host_path(outputs.main, target.backend)
    check_outputs(
        {"the part of the model for the host": outputs.with_host(path).places["host"]},
        {**read_files(settings, inputs.loaded), **described(outputs.places)},
    )
    return parts, outputs.with_host(path)


def _after_recipes(settings: BuildSettings, parts: Cut, target: BuildTarget, clock: Clock) -> OwnQdq:
    """The model after its recipes; without its own Q/DQ where that does not pay."""
    config, open_judge = settings.config, _open_judge(settings, clock)

    def with_recipes(artifact: ModelArtifact) -> Rewritten:
        with clock.stage("rewrite"):
            return rewrite(artifact, target, settings.judged_in, config, open_judge, clock.listen)

    return own_qdq(parts.artifact, with_recipes, target, settings.precision, config, clock, open_judge)


def _open_judge(settings: BuildSettings, clock: Clock) -> OpenJudge:
    target, config = settings.target, settings.config
    prices = partial(PriceFile, folder=config.cache_dir, on_event=clock.listen, plugins=config.plugins)
    return partial(judge_for, target.backend, target.gpu, plugins=config.plugins, prices=prices)


def _verification(settings: BuildSettings, inputs: BuildInputs, parts: Cut, own: OwnQdq) -> Verification:
    """What the model as it is after its recipes is compared with."""
    return Verification(
        inputs.loaded.model,
        own.rewritten.artifact.model,
        inputs.check,
        inputs.source,
        inputs.metric,
        settings.config.compare_tensors,
        parts.host,
    )


def _pruned(
    settings: BuildSettings, inputs: BuildInputs, target: BuildTarget, plain: Verification, own: OwnQdq, clock: Clock
) -> Sparsified:
    """The model with what gains by it pruned, where that was asked for."""
    artifact = own.rewritten.artifact
    if not prunes(settings.config):
        return Sparsified(artifact, None)
    job = SparseJob(target, settings.precision, inputs.calibration, plain, settings.config, settings.budget)
    return sparsify(artifact, job, clock)


def _lowering(
    settings: BuildSettings,
    inputs: BuildInputs,
    target: BuildTarget,
    own: OwnQdq,
    plain: Verification,
    budget: AccuracyBudget,
    clock: Clock,
) -> Lowering | None:
    """What the model is lowered to; None where it keeps the types it has."""
    if settings.precision is None:
        return None
    return Lowering(
        settings.precision,
        target,
        inputs.calibration,
        settings.config,
        _open_judge(settings, clock),
        inputs.ranges,
        own.ranges,
        gauge_for(plain, settings.config, budget),
    )


def _build(
    settings: BuildSettings,
    artifact: ModelArtifact,
    target: BuildTarget,
    lowering: Lowering | None,
    plain: Verification,
    budget: AccuracyBudget,
    clock: Clock,
) -> Built:
    """The model lowered, verified and built; where the compiler cannot build an 8-bit node, without it."""
    config = settings.config
    while True:
        lowered = Lowered(artifact, None, PrecisionRecord("as-is"))
        if lowering is not None:
            lowered = lower(artifact, lowering, clock)
        final = network_io.change(lowered, target.profiles, settings.io, plain.reference, plain.host)
        job = replace(plain, optimized=final.compared, feeds=final.feeds)
        accuracy = verify(job, clock)
        failures = missed(lowered.search) + gate(accuracy, budget)
        if not settings.make_engine or (failures and not config.allow_accuracy_loss):
            return Built(final, accuracy, None, failures)
        compilation = Compilation(target.with_profiles(final.profiles), settings.uses_tf32, settings.cache)
        try:
            engine = compile_engine(final.lowered.artifact, compilation, settings.builder_config(), clock)
        except EngineBuildError as error:
            lowering = _without_refused(lowering, lowered, error, clock)
            if lowering is None:
                raise
            continue
        accuracy = verify_engine(accuracy, job, engine.data, target.backend, clock)
        return Built(final, accuracy, engine, missed(lowered.search) + gate(accuracy, budget))


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
