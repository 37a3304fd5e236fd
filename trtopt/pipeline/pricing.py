"""Prices of models as they would ship: with the compiler's settings and the profiles of the engine that is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import onnx_ir as ir

from trtopt.config import BuildConfig
from trtopt.engine.backend import TENSORRT_RTX, installed_version
from trtopt.engine.build import CompilerPool, EngineArtifact
from trtopt.engine.layers import layers_of_profile
from trtopt.engine.options import SEARCH, key_of
from trtopt.engine.request import ShapeProfile
from trtopt.engine.sizes import sized
from trtopt.errors import EngineBuildError, LayerListError, TrtoptError
from trtopt.graph.artifact import ModelArtifact
from trtopt.graph.shapes import static_shapes
from trtopt.hardware.spec import DEFAULT_GPU, GpuSpec, find_gpu
from trtopt.judge.form import judged_form
from trtopt.judge.judges import priced_layers
from trtopt.judge.protocol import OpenJudge, Priced, PriceFile
from trtopt.judge.subgraph import named_key, structure_key
from trtopt.judge.target import BuildTarget, nearest_target
from trtopt.pipeline.compile import Compilation, engine_request
from trtopt.report.schema.steps import Cost
from trtopt.support.clock import Clock
from trtopt.support.precision import Precision
from trtopt.support.temporary import TemporaryFolder

STAGE = "price"

Compiled = tuple[ir.Model, tuple[ShapeProfile, ...]]
"""A model as the compiler gets it, and its profiles."""


@dataclass
class Pricer:
    """What models cost as engines with the settings of one run; each is asked once, beside other work.

    Attributes:
        name: How reports name the judge.
    """

    name: str
    _ask: Callable[[ir.Model, tuple[ShapeProfile, ...]], Cost]
    _pool: ThreadPoolExecutor
    _clock: Clock

    def start(self, make: Callable[[], Compiled]) -> Future[Cost]:
        """Begin to make and price a model; what fails is said where the result is asked for."""
        return self._pool.submit(lambda: self._ask(*make()))

    def result(self, future: Future[Cost], what: str, *, refusals: bool = False) -> Cost | None:
        """A price; None, with a warning, where nobody can say.

        Args:
            future: From :meth:`start`.
            what: What is priced, in words.
            refusals: Whether the compiler's refusal is raised (EngineBuildError) and not a warning.
        """
        try:
            with self._clock.stage(STAGE):
                return future.result()
        except TrtoptError as error:
            if refusals and isinstance(error, EngineBuildError) and not isinstance(error, LayerListError):
                raise
            self._clock.warn(STAGE, f"{what} cannot be priced: {error.what}")
            return None


@contextmanager
def pricer_for(
    target: BuildTarget,
    tf32: bool,
    config: BuildConfig,
    open_judge: OpenJudge,
    compiler: CompilerPool,
    clock: Clock,
) -> Iterator[Pricer | None]:
    """The pricer of one run: the compiler of TensorRT for RTX, or the model of TensorRT's fusions; None where the
    compiler is not installed."""
    if target.backend != TENSORRT_RTX:
        with open_judge(Precision.TF32 if tf32 else None) as judge, _one_thread() as pool:

            def by_model(model: ir.Model, profiles: tuple[ShapeProfile, ...]) -> Cost:
                return judge.price(judged_form(model, profiles), inner=False).total

            yield Pricer(judge.name, by_model, pool, clock)
        return
    version = installed_version(TENSORRT_RTX)
    if not version:
        clock.warn(STAGE, f"what ships is not held against plain: {TENSORRT_RTX.name}, its judge, is not installed")
        yield None
        return
    name = f"compiler:{TENSORRT_RTX.name} {version}"
    with _one_thread() as pool:
        yield Pricer(name, _Compilations(compiler, name, target, tf32, config, clock), pool, clock)


@contextmanager
def _one_thread() -> Iterator[ThreadPoolExecutor]:
    """A thread that is idle before what it uses is closed; what waits for it then is dropped."""
    pool = ThreadPoolExecutor(1)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


class _Compilations:
    """Prices by compiling; those of earlier runs are in a file."""

    def __init__(
        self, compiler: CompilerPool, name: str, target: BuildTarget, tf32: bool, config: BuildConfig, clock: Clock
    ) -> None:
        gpu = target.gpu if target.gpu is None else nearest_target(target.gpu)
        self._compiler = compiler
        self._config = replace(config, builder=tuple(item for item in config.builder if key_of(item) != SEARCH))
        self._job, self._chip = Compilation(replace(target, gpu=gpu), tf32), chip_of(target)
        asked = (name, "as shipped", repr((target.gpu, gpu, tf32)), repr((config.builder, config.io)))
        self._file = PriceFile(asked, config.cache_dir, clock.listen, config.plugins)
        self._known = self._file.load()

    def __call__(self, model: ir.Model, profiles: tuple[ShapeProfile, ...]) -> Cost:
        ends = [str(value.name) for value in (*model.graph.inputs, *model.graph.outputs)]
        key = f"{structure_key(model)} {ends} {[profile.to_json_dict() for profile in profiles]}"
        if key not in self._known:
            self._known[key] = Priced(self._price(model, profiles), ())
            self._file.add(key, self._known[key])
        return self._known[key].total

    def _price(self, model: ir.Model, profiles: tuple[ShapeProfile, ...]) -> Cost:
        job = replace(self._job, target=self._job.target.with_profiles(profiles))
        with TemporaryFolder() as folder:
            request = engine_request(ModelArtifact(model, None, ""), job, self._config, Path(folder))
            request = replace(request, key=named_key(model))
            shapes = static_shapes(model, job.target.shapes)
            if not profiles or profiles[0].is_static:
                layers = full = layers_of_profile(self._compiler.layers(request))
            else:
                found, static = self._compiler.ranged(request)
                layers = layers_of_profile(found)
                full = sized(layers, model, shapes, profiles, static) or static
        return priced_layers(layers, full, model, shapes, self._chip, tf32=job.tf32).total


def chip_of(target: BuildTarget) -> GpuSpec:
    """The GPU whose time is predicted."""
    return target.gpu or find_gpu(DEFAULT_GPU)


def cost_of_engine(engine: EngineArtifact, model: ir.Model, target: BuildTarget, *, tf32: bool) -> Cost:
    """What an engine of a model costs, counted as :class:`Pricer` counts."""
    shapes = static_shapes(model, target.shapes)
    layers = layers_of_profile(engine.record.layers or ())
    full = sized(layers, model, shapes, target.profiles, engine.sized_layers) or engine.sized_layers
    return priced_layers(layers, full, model, shapes, chip_of(target), tf32=tf32).total
