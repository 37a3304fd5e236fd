"""Runs recipes: clone, find, judge, rewrite, check, commit or roll back."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

import onnx_ir as ir

from trtopt.errors import RecipeError, TrtoptError
from trtopt.events import Event, OnEvent, ignore
from trtopt.graph import invariants
from trtopt.graph.artifact import ModelArtifact
from trtopt.graph.edit import shared_names, static_shape
from trtopt.graph.shapes import at_shapes, infer_in_place
from trtopt.report.records import Cost, Refusal, RegionRecord, StepRecord
from trtopt.rewrite.equal import difference, difference_at
from trtopt.rewrite.protocol import Findings, Judge, Match, Recipe, Stage, Target
from trtopt.rewrite.region import Cutter
from trtopt.rewrite.registry import broken_packs, select
from trtopt.rewrite.trial import Trial, Verdict

_T = TypeVar("_T")

_MAX_SWEEPS = 20
"""Rounds over all recipes. Real models need two to four; more means that two recipes undo each other."""

_SLOWER = 1.001
"""A whole network this much slower than without a recipe is slower; below it are roundings of the prediction."""


@dataclass(frozen=True)
class Judging:
    """Who judges, and where.

    Attributes:
        judge: Says what a graph costs.
        shapes: A shape for each input with a dynamic axis.
    """

    judge: Judge
    shapes: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Rewritten:
    """A model after its recipes.

    Attributes:
        artifact: The model, with one step per recipe that changed or refused something.
        judge: Who judged; ``none`` where nobody did.
        before: What the model costs without recipes; None where nobody judged, or could.
        after: What it costs with them.
    """

    artifact: ModelArtifact
    judge: str = "none"
    before: Cost | None = None
    after: Cost | None = None


@dataclass
class _Tally:
    """What one recipe did over all sweeps."""

    changes: int = 0
    seconds: float = 0.0
    refusals: tuple[Refusal, ...] = ()
    kept: tuple[RegionRecord, ...] = ()
    refused: tuple[RegionRecord, ...] = ()
    failed: bool = False

    def add(self, outcome: _Outcome) -> None:
        # Refusals of the last sweep stand: what was not possible at first may be once other recipes ran.
        self.refusals = outcome.refusals
        self.refused = tuple(region for region in outcome.regions if not region.kept)
        self.kept += tuple(region for region in outcome.regions if region.kept)
        self.changes += outcome.changes


@dataclass(frozen=True)
class _Outcome:
    model: ir.Model | None
    changes: int
    refusals: tuple[Refusal, ...]
    regions: tuple[RegionRecord, ...] = ()


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
    judged place by place, and those that make the whole slower are taken back; without a judge, whatever is found is
    rewritten.

    Args:
        artifact: The model; not changed.
        recipes: ``all``, ``none``, or names separated by commas.
        strict: Raise where a recipe or a pack fails instead of going on without it.
        target: What the graph is prepared for.
        judging: Who judges.
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
    return _Run(target, strict, judging, on_event).settle(artifact, recipes)


@dataclass
class _Run:
    """One run of the driver; what was judged is remembered."""

    target: Target
    strict: bool
    judging: Judging | None
    on_event: OnEvent
    trial: Trial | None = field(init=False, default=None)
    _static: tuple[ir.Model, ir.Model, Cutter] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.judging is not None:
            self.trial = Trial(self.judging.judge, self.target)

    def settle(self, artifact: ModelArtifact, recipes: tuple[Recipe, ...]) -> Rewritten:
        """Apply recipes; where the whole computes something else with them, or is slower, apply them again without the
        one to blame."""
        self.on_event(Event("start", "rewrite"))
        before = self._whole(artifact.model) if recipes else None
        dropped: dict[str, Refusal] = {}
        while True:
            left = tuple(recipe for recipe in recipes if recipe.name not in dropped)
            model, tallies = self._sweeps(artifact.model, left)
            off = self._off(artifact.model, model)
            if off:
                last = next(recipe.name for recipe in reversed(left) if tallies[recipe.name].changes)
                dropped[last] = Refusal(last, f"taken back: with the recipes so far the outputs differ, {off}")
                continue
            after = self._whole(model) if before is not None else None
            worst = _least_useful(tallies)
            if before is None or after is None or worst is None:
                break
            if after.predicted_us <= before.predicted_us * _SLOWER:
                break
            reason = f"the whole network is slower: {before.predicted_us:.1f} -> {after.predicted_us:.1f} us"
            dropped[worst] = Refusal(worst, reason)
        for name, refusal in dropped.items():
            tallies[name] = _Tally(refusals=(refusal,))
        self.on_event(Event("end", "rewrite"))
        judge = self.judging.judge.name if self.judging is not None else "none"
        return Rewritten(_with_steps(artifact, model, recipes, tallies), judge, before, after)

    def _sweeps(self, model: ir.Model, recipes: tuple[Recipe, ...]) -> tuple[ir.Model, dict[str, _Tally]]:
        tallies = {recipe.name: _Tally() for recipe in recipes}
        for _ in range(_MAX_SWEEPS):
            changes = 0
            for recipe in recipes:
                tally = tallies[recipe.name]
                if tally.failed:
                    continue
                began = time.perf_counter()
                try:
                    outcome = _guarded(recipe, partial(self._apply_once, recipe, model))
                except RecipeError as error:
                    if self.strict:
                        raise
                    tally.failed = True
                    outcome = _Outcome(None, 0, (Refusal(recipe.name, f"rolled back: {error.what}"),))
                tally.seconds += time.perf_counter() - began
                tally.add(outcome)
                if outcome.model is not None:
                    model = outcome.model
                    changes += outcome.changes
                self.on_event(Event("advance", "rewrite", text=recipe.name))
            if not changes:
                break
        else:
            self.on_event(Event("warning", "rewrite", text=f"recipes still find changes after {_MAX_SWEEPS} sweeps"))
        return model, tallies

    def _apply_once(self, recipe: Recipe, model: ir.Model) -> _Outcome:
        """Rewrite the matches of one recipe that pay, on a clone."""
        findings = recipe.find(model, self.target)
        if not findings.matches:
            return _Outcome(None, 0, findings.refusals)
        wanted, regions = self._judged(recipe, findings, model)
        refusals = findings.refusals + tuple(
            Refusal(node, region.reason) for region in regions if not region.kept for node in region.nodes
        )
        if not wanted:
            return _Outcome(None, 0, refusals, regions)
        clone = model.clone()
        found = [match for match in recipe.find(clone, self.target).matches if (match.label, match.choice) in wanted]
        with shared_names(clone):
            refused = [recipe.rewrite(clone, match) for match in found]
        changes = refused.count(None)
        refusals += tuple(item for item in refused if item is not None)
        if not changes:
            return _Outcome(None, 0, refusals, regions)
        invariants.check(clone, invariants.signature(model))
        infer_in_place(clone)
        return _Outcome(clone, changes, refusals, regions)

    def _judged(
        self, recipe: Recipe, findings: Findings, model: ir.Model
    ) -> tuple[set[tuple[str, str]], tuple[RegionRecord, ...]]:
        """Which places to rewrite and how, as label and choice, and what was found of each structure."""
        places: dict[str, list[Match]] = {}
        for match in findings.matches:
            places.setdefault(match.label, []).append(match)
        if self.trial is None or recipe.stage < Stage.FUSE:
            return {(label, matches[0].choice) for label, matches in places.items()}, ()
        static, cutter = self._static_form(model)
        verdicts: dict[int, tuple[Verdict, list[str]]] = {}
        for label, matches in places.items():
            verdict = self.trial.verdict(recipe, matches, static, cutter)
            verdicts.setdefault(id(verdict), (verdict, []))[1].append(label)
        wanted = {(label, verdict.choice) for verdict, labels in verdicts.values() for label in labels if verdict.kept}
        return wanted, tuple(
            RegionRecord(tuple(labels), verdict.choice, verdict.kept, verdict.reason, verdict.before, verdict.after)
            for verdict, labels in verdicts.values()
        )

    def _static_form(self, model: ir.Model) -> tuple[ir.Model, Cutter]:
        """``model`` at the shapes it is judged at; remembered for the last model asked about."""
        if self._static is None or self._static[0] is not model:
            shapes = self.judging.shapes if self.judging is not None else {}
            static = at_shapes(model, shapes)
            self._static = model, static, Cutter(static)
        return self._static[1], self._static[2]

    def _off(self, original: ir.Model, model: ir.Model) -> str:
        """Where the whole computes something else than the original, in words; empty where it does not."""
        if self.judging is None or model is original:
            return ""
        if all(static_shape(value) is not None for value in original.graph.inputs):
            return difference(original, model)
        return difference_at(original, model, self.judging.shapes)

    def _whole(self, model: ir.Model) -> Cost | None:
        """What the whole model costs; None where nobody can say."""
        if self.trial is None:
            return None
        try:
            return self.trial.price(self._static_form(model)[0]).total
        except TrtoptError as error:
            self.on_event(Event("warning", "rewrite", text=f"the network as a whole cannot be judged: {error.what}"))
            return None


def _guarded(recipe: Recipe, action: Callable[[], _T]) -> _T:
    try:
        return action()
    except Exception as error:
        raise RecipeError(
            f"{type(error).__name__}: {' '.join(str(error).split())[:400]}",
            where=f"recipe {recipe.name}",
            remedy="leave the recipe out with --recipes, and report the model to the recipe's author",
        ) from error


def _least_useful(tallies: Mapping[str, _Tally]) -> str | None:
    """The judged recipe that won the least time; None where none was applied."""
    gains = {}
    for name, tally in tallies.items():
        if tally.kept:
            gains[name] = sum(_saved_us(region) for region in tally.kept)
    return min(gains, key=gains.__getitem__) if gains else None


def _saved_us(region: RegionRecord) -> float:
    if region.before is None or region.after is None:
        return 0.0
    return (region.before.predicted_us - region.after.predicted_us) * len(region.nodes)


def _with_steps(
    artifact: ModelArtifact, model: ir.Model, recipes: tuple[Recipe, ...], tallies: Mapping[str, _Tally]
) -> ModelArtifact:
    for recipe in recipes:
        tally = tallies[recipe.name]
        if tally.changes or tally.refusals:
            step = StepRecord(recipe.name, recipe.stage.name, tally.changes, tally.seconds, tally.refusals)
            artifact = artifact.with_step(model, replace(step, regions=tally.kept + tally.refused))
    return artifact
