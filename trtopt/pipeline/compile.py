"""The engine with the builder options that are fastest on this GPU, where the user asks for a search.

Building and timing engines of TensorRT was never run: both need the GPU. What is decided from the times is in
:mod:`trtopt.engine.option_search`, which needs none.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from trtopt.cache.code import entry_key
from trtopt.config import BuildConfig
from trtopt.engine.backend import Backend, installed_version
from trtopt.engine.build import EngineArtifact, build_engine, cache_key, check_options
from trtopt.engine.option_search import Answer, Measured, Options, remembered, search_options
from trtopt.engine.options import SEARCH, key_of
from trtopt.engine.request import BuildRequest
from trtopt.engine.run import why_not_run
from trtopt.engine.timing_cache import timing_for
from trtopt.errors import TargetError
from trtopt.events import Event
from trtopt.graph.artifact import ModelArtifact
from trtopt.hardware.probe import probe
from trtopt.pipeline.stages import Compilation, engine_request
from trtopt.pipeline.stages import compile_engine as compile_as_asked
from trtopt.profiling.gpu import time_engine
from trtopt.report.schema.build import EngineRecord
from trtopt.support.clock import Clock
from trtopt.support.files import TEMPORARY


def check_search(config: BuildConfig, backend: Backend) -> None:
    """Check before the work that engines can be timed, where a search over builder options is asked for.

    Raises:
        UsageError: A builder option is wrong.
        TargetError: Engines cannot run here.
    """
    searched = check_options(config.builder, config.plugins, backend).search
    reason = why_not_run(backend) if searched else ""
    if reason:
        raise TargetError(
            f"The search over builder options times engines, and none can run here: {reason}",
            where=f"--builder {SEARCH}={searched[SEARCH]}",
            remedy=f"leave {SEARCH} out, or build where engines run: {backend.install}",
        )


def compile_engine(artifact: ModelArtifact, job: Compilation, config: BuildConfig, clock: Clock) -> EngineArtifact:
    """As :func:`.stages.compile_engine`; with ``--builder search=N`` the fastest of at most N engines."""
    builds = check_options(config.builder, config.plugins, job.backend).search.get(SEARCH)
    if builds is None:
        return compile_as_asked(artifact, job, config, clock)
    with clock.stage("build engine"), tempfile.TemporaryDirectory(prefix=TEMPORARY) as folder:
        request = engine_request(artifact, job, config, Path(folder))
        own = tuple(item for item in config.builder if key_of(item) != SEARCH)
        return fastest(replace(request, builder=own), builds, job, clock)


def builder_of(items: Sequence[str], engine: EngineRecord) -> tuple[str, ...]:
    """The builder options of an engine: those asked for, and what a search chose in place of itself."""
    chosen = [item for trial in engine.builder_search if trial.chosen for item in trial.options]
    return (*(item for item in items if key_of(item) != SEARCH), *chosen) if engine.builder_search else tuple(items)


def fastest(request: BuildRequest, builds: int, job: Compilation, clock: Clock) -> EngineArtifact:
    """The fastest of at most ``builds`` engines of a request, with what was compared in its record."""
    version = installed_version(request.backend)
    cache = job.cache if version else None

    def with_options(options: Options) -> BuildRequest:
        return replace(request, builder=(*request.builder, *options))

    def measure(options: Options) -> Answer[EngineArtifact]:
        engine = build_engine(with_options(options), clock.listen, cache)
        found = time_engine(engine.data, request.backend).device
        record = engine.record
        measured = Measured(found.median_us, found.spread_us, found.stable, record.build_seconds, record.sha256)
        return Answer(measured, engine)

    def times_key(options: Options) -> str:
        asked, gpu = with_options(options), probe()
        timing = timing_for(asked, version, cache)
        return entry_key(
            "trtopt.profiling.gpu", cache_key(asked, version, timing.decides), gpu.name, gpu.driver, version
        )

    def ask(options: Options) -> Answer[EngineArtifact]:
        text = f"builder options: {', '.join(options) or 'as asked for'}"
        clock.listen(Event("detail", "build engine", text=text))
        return remembered(cache, times_key(options), lambda: measure(options), refusals=bool(options))

    found = search_options(builds, {key_of(item) for item in request.builder}, ask)
    engine = found.best.engine or build_engine(with_options(found.options), clock.listen, cache)
    if engine.record.sha256 != found.best.measured.sha256:
        text = "the engine that was timed is not in the cache any more: it was built again, and may differ from it"
        clock.warn("build engine", text)
    return replace(engine, record=replace(engine.record, builder_search=found.trials))
