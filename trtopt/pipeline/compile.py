"""The engine of an optimized model; with the builder options that are fastest on this GPU where a search is asked for.

Building and timing engines of TensorRT was never run: both need the GPU. What is decided from the times is in
:mod:`trtopt.engine.option_search`, which needs none.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from trtopt.cache.code import entry_key
from trtopt.cache.folder import DEFAULT_BYTES, cache_folder, make_cache_folder, prune
from trtopt.config import BuildConfig
from trtopt.engine.backend import Backend, RuntimeOptions, installed_version
from trtopt.engine.build import EngineArtifact, build_engine, cache_key, check_options
from trtopt.engine.cache import EngineCache, timing_for
from trtopt.engine.option_search import AXES, Answer, EngineTime, Options, remembered, search_options
from trtopt.engine.options import SEARCH, key_of, parse_builder_options, route_axes, with_found
from trtopt.engine.request import BuildRequest
from trtopt.engine.run import why_not_run
from trtopt.errors import TargetError, UsageError
from trtopt.events import Event
from trtopt.graph import edit
from trtopt.graph.artifact import ModelArtifact
from trtopt.hardware.probe import probe
from trtopt.judge.target import BuildTarget
from trtopt.precision.fp16.network_io import formats, parse_io
from trtopt.profiling.inference import time_engine
from trtopt.source.save import write_once
from trtopt.support.clock import Clock
from trtopt.support.temporary import TemporaryFolder


@dataclass(frozen=True)
class Compilation:
    """How an engine is compiled: whether FP32 layers may use TF32, and the cache of engines, None to build anew."""

    target: BuildTarget
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
    _, *weights = write_once(artifact.model, path, notes=False)
    return BuildRequest(
        onnx=path,
        weights=tuple(weights),
        backend=job.target.backend,
        gpu=job.target.gpu,
        nodes=tuple(str(node.name) for node in edit.all_nodes(artifact.model.graph)),
        profiles=job.target.profiles,
        tf32=job.tf32,
        builder=config.builder,
        plugins=tuple(Path(item) for item in config.plugins),
        timing_cache=Path(config.timing_cache) if config.timing_cache else None,
        error_on_timing_cache_miss=config.error_on_timing_cache_miss,
        formats=formats(parse_io(config.io)),
        name=str(artifact.path or "model in memory"),
    )


def as_built(config: BuildConfig, backend: Backend) -> RuntimeOptions:
    """How an engine that was built with these options is loaded."""
    host_code = has_flag(config.builder, backend, "VERSION_COMPATIBLE")
    return RuntimeOptions(host_code, tuple(Path(item) for item in config.plugins))


def has_flag(builder: tuple[str, ...], backend: Backend, name: str) -> bool:
    """Whether builder options set a flag: ``VERSION_COMPATIBLE`` for an engine that brings a runtime of its own,
    ``STRIP_PLAN`` for one without its weights, which does not run before it is refitted."""
    return parse_builder_options(builder, backend, gpu_present=True).flags.get(name, False)


def check_search(config: BuildConfig, backend: Backend) -> None:
    """Check before the work that engines can be timed, where a search over builder options is asked for.

    Raises:
        UsageError: A builder option is wrong.
        TargetError: Engines cannot run here.
    """
    options = check_options(config.builder, config.plugins, backend)
    searched = options.search
    if searched and options.flags.get("STRIP_PLAN", False):
        raise UsageError(
            "The search over builder options times engines, and one without its weights does not run",
            where="--builder strip_plan=true",
            remedy="search without strip_plan, and build again with the options that the report names",
        )
    reason = why_not_run(backend) if searched else ""
    if reason:
        raise TargetError(
            f"The search over builder options times engines, and none can run here: {reason}",
            where=f"--builder {SEARCH}={searched[SEARCH]}",
            remedy=f"leave {SEARCH} out, or build where engines run: {backend.install}",
        )


def compile_engine(artifact: ModelArtifact, job: Compilation, config: BuildConfig, clock: Clock) -> EngineArtifact:
    """The engine of an optimized model, cached or built; with ``--builder search=N`` the fastest of at most N."""
    builds = check_options(config.builder, config.plugins, job.target.backend).search.get(SEARCH)
    with clock.stage("build engine"), TemporaryFolder() as folder:
        request = engine_request(artifact, job, config, Path(folder))
        if builds is None:
            return build_engine(request, clock.listen, job.cache)
        return fastest(request, builds, job, clock)


def fastest(request: BuildRequest, builds: int, job: Compilation, clock: Clock) -> EngineArtifact:
    """The fastest of at most ``builds`` engines of a request, with what was compared in its record."""
    version = installed_version(request.backend)
    cache = job.cache if version else None

    def with_options(options: Options) -> BuildRequest:
        return replace(request, builder=with_found(request.builder, options))

    def measure(options: Options) -> Answer[EngineArtifact]:
        asked = with_options(options)
        engine = build_engine(asked, clock.listen, cache)
        host_code = has_flag(asked.builder, request.backend, "VERSION_COMPATIBLE")
        found = time_engine(engine.data, request.backend, RuntimeOptions(host_code, request.plugins)).device
        record = engine.record
        measured = EngineTime(found.median_us, found.spread_us, found.stable, record.build_seconds, record.sha256)
        return Answer(measured, engine)

    def times_key(options: Options) -> str:
        asked, gpu = with_options(options), probe()
        timing = timing_for(asked, version, cache)
        return entry_key(
            "trtopt.profiling.inference", cache_key(asked, version, timing.decides), gpu.name, gpu.driver, version
        )

    def ask(options: Options) -> Answer[EngineArtifact]:
        text = f"builder options: {', '.join(options) or 'as asked for'}"
        clock.listen(Event("detail", "build engine", text=text))
        return remembered(cache, times_key(options), lambda: measure(options), refusals=bool(options))

    axes = (*AXES, *route_axes(request.builder))
    found = search_options(builds, {key_of(item) for item in request.builder}, ask, axes)
    engine = found.best.engine or build_engine(with_options(found.options), clock.listen, cache)
    if engine.record.sha256 != found.best.measured.sha256:
        text = "the engine that was timed is not in the cache any more: it was built again, and may differ from it"
        clock.warn("build engine", text)
    return replace(engine, record=replace(engine.record, builder_search=found.trials))
