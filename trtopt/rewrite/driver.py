"""Runs recipes and settles which stay: what changes a result, or makes the whole slower, is taken back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import onnx_ir as ir

from trtopt.errors import RecipeError, TrtoptError
from trtopt.events import Event, OnEvent, ignore
from trtopt.graph.artifact import ModelArtifact
from trtopt.judge.form import optimum
from trtopt.report.schema.steps import Cost, Refusal, StepRecord
from trtopt.rewrite.equal import difference
from trtopt.rewrite.protocol import Recipe, Target
from trtopt.rewrite.registry import broken_packs, select
from trtopt.rewrite.sweeps import Judging, Sweeper, Tally

__all__ = ["Judging", "Rewritten", "apply", "run"]

_SLOWER = 1.001
"""A whole network this much slower than without a recipe is slower; below it are roundings of the prediction."""


@dataclass(frozen=True)
class Rewritten:
    """A model after its recipes.

    Attributes:
        before: What the model costs without recipes; None where nobody judged, or could.
        after: What it costs with them.
    """

    artifact: ModelArtifact
    judge: str = "none"
    before: Cost | None = None
    after: Cost | None = None


def run(
    artifact: ModelArtifact,
    *,
    recipes: str = "all",
    strict: bool = False,
    target: Target | None = None,
    judging: Judging | None = None,
    on_event: OnEvent = ignore,
) -> Rewritten:
    """Apply recipes to a fixpoint.

    A recipe works on a clone; when it raises, or leaves the graph broken or with other inputs and outputs, the clone
    is dropped, the failure is recorded as a refusal, and the recipe is not tried again. Recipes from stage FUSE on are
    judged place by place; those of every stage that make the whole slower are taken back. Without a judge, whatever is
    found is rewritten.

    Args:
        recipes: ``all``, ``none``, or names separated by commas.
        strict: Raise where a recipe or a pack fails instead of going on without it.
        target: What the graph is prepared for.
        on_event: Told of each recipe tried.

    Raises:
        UsageError: An unknown recipe.
        RecipeError: A recipe or a pack failed, with ``strict``.
    """
    chosen = select(recipes)
    broken = broken_packs() if recipes != "none" else ()
    if strict and broken:
        raise RecipeError(broken[0].reason, where=broken[0].node, remedy="reinstall or uninstall the pack")
    for refusal in broken:
        on_event(Event("warning", "rewrite", text=f"{refusal.node}: {refusal.reason}"))
        artifact = artifact.with_step(artifact.model, StepRecord(refusal.node, "PACK", 0, 0.0, (refusal,)))
    return apply(artifact, chosen, strict=strict, target=target or Target(), judging=judging, on_event=on_event)


def apply(
    artifact: ModelArtifact,
    recipes: tuple[Recipe, ...],
    *,
    strict: bool = False,
    target: Target,
    judging: Judging | None = None,
    on_event: OnEvent = ignore,
) -> Rewritten:
    """Apply these recipe objects, in this order, as :func:`run` does for names."""
    sweeper = Sweeper(target, strict, judging, on_event)
    try:
        return _Settler(sweeper, artifact).settle(recipes)
    finally:
        if sweeper.place_judge is not None:
            sweeper.place_judge.close()


@dataclass(frozen=True)
class _Attempt:
    """A model after some recipes.

    Attributes:
        off: Where the model computes something else than the original; empty where it does not.
        cost: What the whole costs; None where nobody can say, or it computes something else.
    """

    recipes: tuple[Recipe, ...]
    model: ir.Model
    tallies: Mapping[str, Tally]
    off: str
    cost: Cost | None

    @property
    def changing(self) -> list[Recipe]:
        """The recipes that changed something."""
        return [recipe for recipe in self.recipes if self.tallies[recipe.name].changes]

    @property
    def microseconds(self) -> float:
        return float("inf") if self.cost is None else self.cost.predicted_us


class _Settler:
    """Finds the recipes that may stay."""

    def __init__(self, sweeper: Sweeper, artifact: ModelArtifact) -> None:
        self.sweeper, self.artifact = sweeper, artifact

    def settle(self, recipes: tuple[Recipe, ...]) -> Rewritten:
        """Apply recipes; where the whole computes something else with them, or is slower, apply them again without the
        one to blame."""
        listen, judging = self.sweeper.on_event, self.sweeper.judging
        listen(Event("start", "rewrite"))
        original = self._begun(self.artifact.model) if recipes else None
        dropped: dict[str, Refusal] = {}
        attempt = self._right(self._attempt(recipes), dropped)
        before = self._cost(original)
        if before is not None:
            attempt = self._fast(attempt, before, dropped)
        listen(Event("end", "rewrite"))
        tallies = {**attempt.tallies, **{name: Tally(refusals=(refusal,)) for name, refusal in dropped.items()}}
        judge = judging.judge.name if judging is not None else "none"
        artifact = _with_steps(self.artifact, attempt.model, recipes, tallies)
        return Rewritten(artifact, judge, before, attempt.cost if recipes else None)

    def _attempt(self, recipes: tuple[Recipe, ...]) -> _Attempt:
        model, tallies = self.sweeper.sweep(self.artifact.model, recipes)
        form = self._begun(model)
        off = self._off(model)
        return _Attempt(recipes, model, tallies, off, None if off else self._cost(form))

    def _without(self, attempt: _Attempt, recipe: Recipe) -> tuple[Recipe, ...]:
        return tuple(other for other in attempt.recipes if other is not recipe)

    def _right(self, attempt: _Attempt, dropped: dict[str, Refusal]) -> _Attempt:
        """Without the recipes that change what is computed. Raises RecipeError: there is one, with ``strict``."""
        while attempt.off:
            wrong = self._culprit(attempt)
            reason = f"taken back: the outputs differ with it, {attempt.off}"
            if self.sweeper.strict:
                raise RecipeError(
                    f"The outputs differ with it, {attempt.off}",
                    where=f"recipe {wrong.name}",
                    remedy="leave the recipe out with --recipes, and report the model to the recipe's author",
                )
            dropped[wrong.name] = Refusal(wrong.name, reason)
            attempt = self._attempt(self._without(attempt, wrong))
        return attempt

    def _culprit(self, attempt: _Attempt) -> Recipe:
        """The recipe that is wrong by itself; else one without which the others are right; else the last."""
        for recipe in attempt.changing:
            if self._attempt((recipe,)).off:
                return recipe
        for recipe in reversed(attempt.changing):
            if not self._attempt(self._without(attempt, recipe)).off:
                return recipe
        return attempt.changing[-1]

    def _fast(self, attempt: _Attempt, before: Cost, dropped: dict[str, Refusal]) -> _Attempt:
        """Without the recipes that make the whole slower than it was; without any where leaving one out helps no
        more."""
        while attempt.microseconds > before.predicted_us * _SLOWER:
            better = self._clear(attempt, before) or self._faster(attempt)
            if better is None:
                return self._untouched(attempt, before, dropped)
            other, recipe = better
            reason = f"the whole network is slower with it: {_change(other.cost, attempt)}"
            dropped[recipe.name] = Refusal(recipe.name, reason)
            attempt = other
        return attempt

    def _untouched(self, attempt: _Attempt, before: Cost, dropped: dict[str, Refusal]) -> _Attempt:
        """The model without recipes."""
        reason = f"the whole network is slower with what is left of the recipes: {_change(before, attempt)}"
        for recipe in attempt.changing:
            dropped[recipe.name] = Refusal(recipe.name, reason)
        left = tuple(recipe for recipe in attempt.recipes if recipe not in attempt.changing)
        return replace(attempt, recipes=left, model=self.artifact.model, off="", cost=before)

    def _clear(self, attempt: _Attempt, before: Cost) -> tuple[_Attempt, Recipe] | None:
        """The model without the recipe that is clearly to blame, and that recipe: the first ones up to it are slower
        than none, those before it are not, and leaving it out wins back at least half of what the whole lost. None
        where there is no such recipe. Halving asks for a few models where :meth:`_faster` asks for one per recipe."""
        fast, slow = 0, len(attempt.changing)
        while slow - fast > 1:
            middle = (fast + slow) // 2
            first = self._priced(tuple(attempt.changing[:middle]))
            if first.microseconds > before.predicted_us * _SLOWER:
                slow = middle
            else:
                fast = middle
        recipe = attempt.changing[fast]
        other = self._priced(self._without(attempt, recipe))
        enough = other.microseconds < attempt.microseconds
        enough = enough and 2 * other.microseconds <= before.predicted_us + attempt.microseconds
        return (other, recipe) if enough and not self._off(other.model) else None

    def _priced(self, recipes: tuple[Recipe, ...]) -> _Attempt:
        """An attempt of which only the price is known."""
        model, tallies = self.sweeper.sweep(self.artifact.model, recipes)
        return _Attempt(recipes, model, tallies, "", self._cost(self._begun(model)))

    def _faster(self, attempt: _Attempt) -> tuple[_Attempt, Recipe] | None:
        """The fastest way to leave one recipe out, and that recipe; None where each is as slow or computes something
        else. What is computed is compared last, since that takes longest."""
        found = [(self._priced(self._without(attempt, recipe)), recipe) for recipe in attempt.changing]
        for other, recipe in sorted(found, key=lambda item: item[0].microseconds):
            if other.microseconds >= attempt.microseconds:
                return None
            if not self._off(other.model):
                return other, recipe
        return None

    def _off(self, model: ir.Model) -> str:
        """Where the whole computes something else than the original, in words; empty where it does not."""
        original, judging = self.artifact.model, self.sweeper.judging
        if judging is None or model is original:
            return ""
        return difference(original, model, optimum(judging.profiles))

    def _begun(self, model: ir.Model) -> ir.Model | None:
        """The model as it is judged, whose price is found beside other work; None where nobody can say."""
        place_judge = self.sweeper.place_judge
        if place_judge is None:
            return None
        try:
            form = self.sweeper.judged_form(model)[0]
        except TrtoptError as error:
            self._unknown(error)
            return None
        place_judge.begin(form)
        return form

    def _cost(self, form: ir.Model | None) -> Cost | None:
        """What the whole costs; None where nobody can say."""
        place_judge = self.sweeper.place_judge
        if place_judge is None or form is None:
            return None
        try:
            return place_judge.price(form).total
        except TrtoptError as error:
            self._unknown(error)
            return None

    def _unknown(self, error: TrtoptError) -> None:
        text = f"the network as a whole cannot be judged: {error.what}"
        self.sweeper.on_event(Event("warning", "rewrite", text=text))


def _change(before: Cost | None, attempt: _Attempt) -> str:
    return f"{before.predicted_us if before else 0:.1f} -> {attempt.microseconds:.1f} us"


def _with_steps(
    artifact: ModelArtifact, model: ir.Model, recipes: tuple[Recipe, ...], tallies: Mapping[str, Tally]
) -> ModelArtifact:
    for recipe in recipes:
        tally = tallies[recipe.name]
        if tally.changes or tally.refusals:
            step = StepRecord(recipe.name, recipe.stage.name, tally.changes, tally.seconds, tally.refusals)
            artifact = artifact.with_step(model, replace(step, regions=tally.kept + tally.refused))
    return artifact
