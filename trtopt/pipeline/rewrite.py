"""Recipes applied to a model, judged for its backend and GPU."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from trtopt.config import BuildConfig
from trtopt.engine.backend import TENSORRT_RTX, Backend
from trtopt.events import OnEvent
from trtopt.graph.artifact import ModelArtifact
from trtopt.hardware.spec import GpuSpec
from trtopt.judge.judges import judge_for
from trtopt.judge.memo import PriceFile
from trtopt.judge.target import nearest_target
from trtopt.precision.fp16.network_io import parse_io
from trtopt.rewrite import driver
from trtopt.rewrite.protocol import Target


def rewrite(
    artifact: ModelArtifact,
    backend: Backend,
    gpu: GpuSpec | None,
    precision: str | None,
    shapes: Mapping[str, tuple[int, ...]],
    config: BuildConfig,
    on_event: OnEvent,
) -> driver.Rewritten:
    """Apply the recipes of ``config``, judged for a backend and GPU (see :func:`judge_for`) at these input shapes.

    Raises:
        MissingDependencyError: TensorRT for RTX has to judge and is not installed.
        UsageError: An unknown recipe, or wrong shapes.
        RecipeError: A recipe or a pack failed, with ``strict_recipes``.
    """
    lowered_for = nearest_target(gpu) if gpu is not None and backend == TENSORRT_RTX else gpu
    run = partial(
        driver.run,
        artifact,
        recipes=config.recipes,
        strict=config.strict_recipes,
        target=Target(backend.name, precision, lowered_for.compute_capability if lowered_for is not None else None),
        on_event=on_event,
    )
    if config.recipes == "none":
        return run()
    prices = partial(PriceFile, folder=config.cache_dir, on_event=on_event, plugins=config.plugins)
    with judge_for(backend, gpu, precision, config.plugins, parse_io(config.io), prices) as judge:
        return run(judging=driver.Judging(judge, shapes))
