"""Recipes applied to a model, judged for its backend and GPU."""

from __future__ import annotations

from functools import partial

from trtopt.config import BuildConfig
from trtopt.engine.backend import TENSORRT_RTX
from trtopt.events import OnEvent
from trtopt.graph.artifact import ModelArtifact
from trtopt.judge.protocol import OpenJudge
from trtopt.judge.target import BuildTarget, nearest_target
from trtopt.precision.fp16.network_io import parse_io
from trtopt.rewrite import driver
from trtopt.rewrite.protocol import Target
from trtopt.support.precision import Precision


def rewrite(
    artifact: ModelArtifact,
    target: BuildTarget,
    precision: Precision | None,
    config: BuildConfig,
    open_judge: OpenJudge,
    on_event: OnEvent,
) -> driver.Rewritten:
    """Apply the recipes of ``config``, judged for a target at its shapes.

    Args:
        artifact: The model.
        target: For whom.
        precision: The precision they are judged in; None for the types the model has.
        config: The options.
        open_judge: Opens the target's judge.
        on_event: Told of progress.

    Raises:
        MissingDependencyError: TensorRT for RTX has to judge and is not installed.
        UsageError: An unknown recipe, or wrong shapes.
        RecipeError: A recipe or a pack failed, with ``strict_recipes``.
    """
    gpu = target.gpu
    lowered_for = nearest_target(gpu) if gpu is not None and target.backend == TENSORRT_RTX else gpu
    capability = lowered_for.compute_capability if lowered_for is not None else None
    run = partial(
        driver.run,
        artifact,
        recipes=config.recipes,
        strict=config.strict_recipes,
        target=Target(target.backend.name, precision, capability),
        on_event=on_event,
    )
    if config.recipes == "none":
        return run()
    with open_judge(precision, io=parse_io(config.io)) as judge:
        return run(judging=driver.Judging(judge, target.shapes))
