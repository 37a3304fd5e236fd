"""Applies recipes to a model until none finds anything, and undoes those that fail."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import onnx_ir as ir

from trtopt.errors import RecipeError
from trtopt.events import Event, OnEvent, ignore
from trtopt.graph import invariants
from trtopt.graph.artifact import ModelArtifact
from trtopt.graph.shapes import infer_shapes
from trtopt.report.records import Refusal, StepRecord
from trtopt.rewrite.protocol import Recipe, Target
from trtopt.rewrite.registry import select

_T = TypeVar("_T")

_MAX_SWEEPS = 20
"""Rounds over all recipes. Real models need two to four; more means that two recipes undo each other."""


@dataclass
class _Tally:
    """What one recipe did over all sweeps."""

    changes: int = 0
    seconds: float = 0.0
    refusals: tuple[Refusal, ...] = ()
    failed: bool = False


@dataclass(frozen=True)
class _Outcome:
    model: ir.Model | None
    changes: int
    refusals: tuple[Refusal, ...]


def run(
    artifact: ModelArtifact,
    *,
    recipes: str = "all",
    strict: bool = False,
    target: Target | None = None,
    on_event: OnEvent = ignore,
) -> ModelArtifact:
    """Apply recipes to a fixpoint.

    A recipe works on a clone; when it raises, or leaves the graph broken or with other inputs and outputs, the clone
    is dropped, the failure is recorded as a refusal, and the recipe is not tried again.

    Args:
        artifact: The model; not changed.
        recipes: ``all``, ``none``, or names separated by commas.
        strict: Raise where a recipe fails instead of rolling it back.
        target: What the graph is prepared for.
        on_event: Told of each recipe tried.

    Returns:
        A new artifact with one step per recipe that changed or refused something.

    Raises:
        UsageError: An unknown recipe.
        RecipeError: A recipe failed, with ``strict``.
    """
    return apply(artifact, select(recipes), strict=strict, target=target or Target(), on_event=on_event)


def apply(
    artifact: ModelArtifact,
    recipes: tuple[Recipe, ...],
    *,
    strict: bool = False,
    target: Target,
    on_event: OnEvent = ignore,
) -> ModelArtifact:
    """Apply these recipe objects, in this order, as :func:`run` does for names."""
    tallies = {recipe.name: _Tally() for recipe in recipes}
    model = artifact.model
    on_event(Event("start", "rewrite"))
    for _ in range(_MAX_SWEEPS):
        changes = 0
        for recipe in recipes:
            tally = tallies[recipe.name]
            if tally.failed:
                continue
            began = time.perf_counter()
            try:
                outcome = _apply_once(recipe, model, target)
            except RecipeError as error:
                if strict:
                    raise
                tally.failed = True
                outcome = _Outcome(None, 0, (Refusal("", f"rolled back: {error.what}"),))
            tally.seconds += time.perf_counter() - began
            # Those of the last sweep stand: what was not possible at first may be once other recipes ran.
            tally.refusals = outcome.refusals
            if outcome.model is not None:
                model = outcome.model
                tally.changes += outcome.changes
                changes += outcome.changes
            on_event(Event("advance", "rewrite", text=recipe.name))
        if not changes:
            break
    else:
        on_event(Event("warning", "rewrite", text=f"recipes still find changes after {_MAX_SWEEPS} sweeps"))
    on_event(Event("end", "rewrite"))
    return _with_steps(artifact, model, recipes, tallies)


def _apply_once(recipe: Recipe, model: ir.Model, target: Target) -> _Outcome:
    """Rewrite all matches of one recipe on a clone.

    Raises:
        RecipeError: The recipe raised, or left the graph broken.
    """
    findings = _guarded(recipe, lambda: recipe.find(model, target))
    if not findings.matches:
        return _Outcome(None, 0, findings.refusals)
    clone = model.clone()
    expected = invariants.signature(model)

    def rewrite() -> _Outcome:
        found = recipe.find(clone, target)
        refused = [recipe.rewrite(clone, match) for match in found.matches]
        changes = refused.count(None)
        refusals = (*found.refusals, *(item for item in refused if item is not None))
        if not changes:
            return _Outcome(None, 0, refusals)
        invariants.check(clone, expected)
        return _Outcome(infer_shapes(clone), changes, refusals)

    return _guarded(recipe, rewrite)


def _guarded(recipe: Recipe, action: Callable[[], _T]) -> _T:
    try:
        return action()
    except Exception as error:
        raise RecipeError(
            f"{type(error).__name__}: {' '.join(str(error).split())[:400]}",
            where=f"recipe {recipe.name}",
            remedy="leave the recipe out with --recipes, and report the model to the recipe's author",
        ) from error


def _with_steps(
    artifact: ModelArtifact, model: ir.Model, recipes: tuple[Recipe, ...], tallies: dict[str, _Tally]
) -> ModelArtifact:
    for recipe in recipes:
        tally = tallies[recipe.name]
        if tally.changes or tally.refusals:
            step = StepRecord(recipe.name, recipe.stage.name, tally.changes, tally.seconds, tally.refusals)
            artifact = artifact.with_step(model, step)
    return artifact
