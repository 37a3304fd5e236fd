"""Recipes over a model until none finds anything: clone, find, judge, rewrite, check, commit or roll back."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import onnx_ir as ir

from trtopt.errors import RecipeError
from trtopt.events import Event, OnEvent
from trtopt.graph import invariants
from trtopt.graph.edit import shared_names
from trtopt.graph.shapes import at_shapes, infer_in_place
from trtopt.judge.protocol import Judge
from trtopt.judge.subgraph import Cutter
from trtopt.report.schema.steps import Refusal, RegionRecord
from trtopt.rewrite.protocol import Findings, Match, Recipe, Stage, Target
from trtopt.rewrite.trial import Trial, Verdict

_T = TypeVar("_T")

_MAX_SWEEPS = 20
"""Rounds over all recipes. Real models need two to four; more means that two recipes undo each other."""


@dataclass(frozen=True)
class Judging:
    """Who judges, and where.

    Attributes:
        judge: Says what a graph costs.
        shapes: A shape for each input with a dynamic axis.
    """

    judge: Judge
    shapes: Mapping[str, tuple[int, ...]]


@dataclass
class Tally:
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


@dataclass
class Sweeper:
    """Applies recipes; what was judged is remembered from one call to the next.

    Attributes:
        target: What recipes are told.
        strict: Raise where a recipe fails instead of rolling it back.
        judging: Who judges recipes from stage FUSE on; None applies whatever they find.
        on_event: Told of each recipe tried.
    """

    target: Target
    strict: bool
    judging: Judging | None
    on_event: OnEvent
    trial: Trial | None = field(init=False, default=None)
    _static: tuple[ir.Model, ir.Model, Cutter] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.judging is not None:
            self.trial = Trial(self.judging.judge, self.target)

    def sweep(self, model: ir.Model, recipes: tuple[Recipe, ...]) -> tuple[ir.Model, dict[str, Tally]]:
        """The model after the recipes, and what each did.

        Raises:
            RecipeError: A recipe failed, with ``strict``.
        """
        tallies = {recipe.name: Tally() for recipe in recipes}
        for _ in range(_MAX_SWEEPS):
            changed: set[str] = set()
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
                    changed.add(recipe.name)
                self.on_event(Event("advance", "rewrite", text=recipe.name))
            if not changed:
                break
        else:
            busy = ", ".join(name for name in tallies if name in changed)
            text = f"after {_MAX_SWEEPS} sweeps these recipes still find changes, perhaps each other's: {busy}"
            self.on_event(Event("warning", "rewrite", text=text))
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
        static, cutter = self.static_form(model)
        verdicts: dict[int, tuple[Verdict, list[str]]] = {}
        for label, matches in places.items():
            verdict = self.trial.verdict(recipe, matches, static, cutter)
            verdicts.setdefault(id(verdict), (verdict, []))[1].append(label)
        wanted = {(label, verdict.choice) for verdict, labels in verdicts.values() for label in labels if verdict.kept}
        return wanted, tuple(
            RegionRecord(tuple(labels), verdict.choice, verdict.kept, verdict.reason, verdict.before, verdict.after)
            for verdict, labels in verdicts.values()
        )

    def static_form(self, model: ir.Model) -> tuple[ir.Model, Cutter]:
        """``model`` at the shapes it is judged at; remembered for the last model asked about."""
        if self._static is None or self._static[0] is not model:
            shapes = self.judging.shapes if self.judging is not None else {}
            static = at_shapes(model, shapes)
            self._static = model, static, Cutter(static)
        return self._static[1], self._static[2]


def _guarded(recipe: Recipe, action: Callable[[], _T]) -> _T:
    try:
        return action()
    except (Exception, SystemExit) as error:
        raise RecipeError(
            f"{type(error).__name__}: {' '.join(str(error).split())[:400]}",
            where=f"recipe {recipe.name}",
            remedy="leave the recipe out with --recipes, and report the model to the recipe's author",
        ) from error
