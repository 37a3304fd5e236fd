"""The stages of a build, in order. Each takes artifacts and gives artifacts; ``api`` strings them together."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import onnx_ir as ir

from trtopt.accuracy.compare import Runner, compare, compare_tensors, first_bad
from trtopt.accuracy.emulation import fp32_twin
from trtopt.accuracy.metric import Metric
from trtopt.accuracy.whole import Fed, HostPart, Selected, as_whole
from trtopt.cache.folder import DEFAULT_BYTES, cache_folder, make_cache_folder, prune
from trtopt.config import BuildConfig
from trtopt.engine.backend import Backend
from trtopt.engine.build import EngineArtifact, build_engine
from trtopt.engine.cache import EngineCache
from trtopt.engine.profiles import Profile
from trtopt.engine.request import BuildRequest
from trtopt.engine.run import EngineSession, can_run
from trtopt.engine.work import layers_of_engine
from trtopt.errors import UsageError
from trtopt.events import Event
from trtopt.graph import cost, edit
from trtopt.graph.artifact import ModelArtifact
from trtopt.graph.shapes import static_shapes
from trtopt.hardware.spec import GpuSpec
from trtopt.precision.fp16.network_io import formats, parse_io
from trtopt.precision.fp16.to_fp32 import widen
from trtopt.precision.observe.samples import Samples
from trtopt.report.schema.analysis import EngineAnalysis, totals_of
from trtopt.report.schema.build import AccuracyRecord, MetricRecord, OutputAccuracy
from trtopt.rewrite.host_part import sizes_vary
from trtopt.roofline.layer import predict
from trtopt.source.save import save_model
from trtopt.support.clock import Clock
from trtopt.support.files import TEMPORARY
from trtopt.support.ort_session import Feeds, OrtSession


@dataclass(frozen=True)
class Verification:
    """What verification compares with what, and how.

    Attributes:
        reference: The model as loaded; its FP32 form is the reference.
        optimized: The optimized graph; its FP32 twin is run.
        samples: The samples.
        source: Where they come from: ``eval``, ``calibration`` or ``synthetic``.
        metric: The user's metric, if any.
        tensors: Whether intermediate tensors are compared too.
        host: What of the model the host runs behind ``optimized``, if any.
        feeds: Turns a sample into what the engine takes, where that differs from the model as loaded.
    """

    reference: ir.Model
    optimized: ir.Model
    samples: Samples
    source: str
    metric: Metric | None
    tensors: bool
    host: HostPart | None = None
    feeds: Callable[[Feeds], Feeds] | None = None

    @property
    def watched(self) -> tuple[str, ...] | None:
        """The values of the reference that are compared; None for its outputs."""
        return None if self.host is None else self.host.watched


def with_baseline(metric: Metric, loaded: ir.Model, samples: Samples, clock: Clock) -> Metric:
    """The metric with what the model as loaded has in FP32: a wrong metric ends the run before the work.

    Raises:
        UsageError: The metric fails, or does not fit the model or the samples.
        InvalidModelError: ONNX Runtime cannot load the model.
    """
    with clock.stage("measure FP32"), OrtSession(widen(loaded)) as reference:
        return metric.on_reference(reference, samples, samples.labels)


def verify(job: Verification, clock: Clock, known: Runner | None = None) -> AccuracyRecord:
    """Compare the optimized graph's FP32 twin with the FP32 reference on every sample.

    Args:
        job: What is compared.
        clock: Times the stage.
        known: The reference, where a caller compares many graphs with it.
    """
    reference, twin = widen(job.reference), fp32_twin(job.optimized)
    total = job.samples.count
    computed = () if job.host is None else job.host.own_outputs
    with (
        clock.stage("verify"),
        nullcontext(known) if known is not None else OrtSession(reference, job.watched) as before,
        OrtSession(twin, keep_qdq=True) as engine,
        as_whole(engine, job.host) as after,
    ):
        clock.listen(Event("start", "verify", total=total))
        outputs = compare(before, after, job.samples, on_event=clock.listen, varying=sizes_vary(job.reference))
        metric = None if job.metric is None else _measured(job.metric, job, after, outputs)
        clock.listen(Event("end", "verify"))
    tensors, entry = None, None
    if job.tensors:
        with clock.stage("compare tensors"):
            tensors = compare_tensors(reference, twin, job.samples, on_event=clock.listen)
            entry = first_bad(twin, tensors)
    count = total if total is not None else sum(1 for _ in job.samples)
    return AccuracyRecord(
        count,
        job.source,
        "onnx-only",
        outputs,
        metric=metric,
        tensors=tensors,
        first_bad=entry,
        host_outputs=computed,
    )


def _measured(
    metric: Metric, job: Verification, optimized: Runner, outputs: Mapping[str, OutputAccuracy]
) -> MetricRecord:
    """The metric of ``optimized``, which is compared with the reference in ``outputs``."""
    whole = tuple(outputs) if job.host is None else job.host.outputs
    computed = () if job.host is None else job.host.own_outputs
    judged = {name: found for name, found in outputs.items() if name not in computed}
    return metric.measure(Selected(optimized, whole), job.samples, job.samples.labels, judged)


def verify_engine(
    record: AccuracyRecord, job: Verification, engine: EngineArtifact, backend: Backend, clock: Clock
) -> AccuracyRecord:
    """Add the engine's own outputs, and the metric on them, where it can run; else return ``record`` as it is."""
    if not can_run(backend, engine.data):
        return record
    with (
        clock.stage("verify engine"),
        OrtSession(widen(job.reference), job.watched) as before,
        EngineSession(engine.data, backend) as run,
        as_whole(run if job.feeds is None else Fed(run, job.feeds), job.host) as after,
    ):
        clock.listen(Event("start", "verify engine", total=job.samples.count))
        outputs = compare(
            before,
            after,
            job.samples,
            on_event=clock.listen,
            task="verify engine",
            varying=sizes_vary(job.reference),
        )
        metric = None if job.metric is None else _measured_on_engine(job.metric, job, after, outputs, clock)
        clock.listen(Event("end", "verify engine"))
    return replace(record, verified="engine", engine=outputs, engine_metric=metric)


def _measured_on_engine(
    metric: Metric, job: Verification, engine: Runner, outputs: Mapping[str, OutputAccuracy], clock: Clock
) -> MetricRecord | None:
    """The metric of an engine; None, with a warning, where the engine does not take what the metric feeds it."""
    try:
        return _measured(metric, job, engine, outputs)
    except UsageError as error:
        what = f"the metric {metric.name} cannot be measured on the engine: {error.what}"
        clock.warn("verify engine", f"{what}; its outputs are judged in its place")
        return None


@dataclass(frozen=True)
class Compilation:
    """How an engine is compiled.

    Attributes:
        backend: The compiler.
        gpu: The target; None for portable.
        profiles: One optimization profile or more; none for a model whose inputs are all static.
        tf32: Whether FP32 layers may use TF32 Tensor Cores.
        cache: Where engines are kept; None to build anew.
    """

    backend: Backend
    gpu: GpuSpec | None
    profiles: tuple[Profile, ...]
    tf32: bool
    cache: EngineCache | None = None


def engine_cache(config: BuildConfig, clock: Clock, make_engine: bool) -> EngineCache | None:
    """Where engines are kept; None where none is made, or the user wants none kept.

    Raises:
        UsageError: The folder was asked for, is not there and cannot be made.
    """
    if config.cache_dir is not None:
        make_cache_folder(config.cache_dir)
    if config.no_cache or not make_engine:
        return None
    folder = Path(config.cache_dir) if config.cache_dir else None
    return EngineCache(folder, clock.listen, max_bytes=cache_bytes(config))


def trim_cache(config: BuildConfig, clock: Clock) -> None:
    """Keep the cache within its bound: what was used longest ago goes first. A run without it leaves it alone."""
    if config.no_cache:
        return
    folder = cache_folder(config.cache_dir)
    try:
        stuck = prune(folder, max_bytes=cache_bytes(config)).stuck
    except OSError as error:
        clock.warn("cache", f"the cache {folder} cannot be read ({error.strerror}): it may outgrow its bound")
        return
    if stuck:
        clock.warn("cache", f"the cache {folder} is above its bound, and {len(stuck)} files of it cannot be removed")


def cache_bytes(config: BuildConfig) -> int:
    """What the cache may take."""
    return DEFAULT_BYTES if config.cache_gb is None else int(config.cache_gb * 1e9)


def engine_request(artifact: ModelArtifact, job: Compilation, config: BuildConfig, folder: Path) -> BuildRequest:
    """What the compiler is asked for a model, which is written into ``folder``, where nothing else lies."""
    path = folder / "model.onnx"
    # An export of today differs from that of yesterday in its notes, and its engine does not.
    save_model(artifact.model, path, notes=False)
    return BuildRequest(
        onnx=path,
        weights=tuple(sorted(set(folder.iterdir()) - {path})),
        backend=job.backend,
        gpu=job.gpu,
        nodes=tuple(str(node.name) for node in edit.all_nodes(artifact.model.graph)),
        profiles=job.profiles,
        tf32=job.tf32,
        builder=config.builder,
        plugins=tuple(Path(item) for item in config.plugins),
        timing_cache=Path(config.timing_cache) if config.timing_cache else None,
        error_on_timing_cache_miss=config.error_on_timing_cache_miss,
        formats=formats(parse_io(config.io)),
        name=str(artifact.path),
    )


def compile_engine(artifact: ModelArtifact, job: Compilation, config: BuildConfig, clock: Clock) -> EngineArtifact:
    """Build the engine of an optimized model, or take it from the cache."""
    with clock.stage("build engine"), tempfile.TemporaryDirectory(prefix=TEMPORARY) as folder:
        return build_engine(engine_request(artifact, job, config, Path(folder)), clock.listen, job.cache)


def flop_of(model: ir.Model, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """Flop by node name at the given input shapes."""
    return cost.flop_by_node(model, static_shapes(model, shapes))


def predict_engine(
    model: ir.Model,
    engine: EngineArtifact,
    gpu: GpuSpec,
    shapes: Mapping[str, tuple[int, ...]],
    tf32: bool,
    clock: Clock,
) -> EngineAnalysis:
    """Predict the time of an engine's layers.

    Args:
        model: The model that was compiled.
        engine: Its engine.
        gpu: The GPU to predict for.
        shapes: Input shapes: those of the first profile's optimum.
        tf32: Whether FP32 products may use TF32 Tensor Cores.
        clock: Times the stage.
    """
    with clock.stage("predict"):
        work = layers_of_engine(engine.sized_layers, model, static_shapes(model, shapes), tf32=tf32)
        rows, uncosted = predict(work.layers, gpu)
    return EngineAnalysis(gpu.name, rows, totals_of(rows), uncosted)
