"""Recipes over a model until none finds anything: clone, find, judge, rewrite, check, commit or roll back.

Whether a rewrite pays is tried on a subgraph, checked on numbers, and judged before and after.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import onnx_ir as ir

from trtopt.engine.request import ShapeProfile
from trtopt.errors import RecipeError, TrtoptError
from trtopt.events import Event, OnEvent, ignore
from trtopt.graph import invariants
from trtopt.graph.edit import shared_names
from trtopt.graph.shapes import at_shapes, infer_in_place
from trtopt.judge.form import best_shapes, judged_form, only_at_optimum, profile_of
from trtopt.judge.protocol import Judge, Priced, Prices, grows, least_gain, no_gain
from trtopt.judge.subgraph import CutError, Cutter, structure_key
from trtopt.report.schema.steps import Cost, Refusal, RegionRecord
from trtopt.rewrite.equal import difference
from trtopt.rewrite.protocol import Findings, Match, Recipe, Stage, Target

_UNSEEN = "it is not found as it is judged"


@dataclass(frozen=True)
class Verdict:
    """What was found for one place.

    Attributes:
        choice: The alternative that is best; empty where there is one way.
        before: Cost of the subgraph around the place; None where it was not judged.
        after: That of the same subgraph with the rewrite.
        place_us: The time of the kernels that compute the place.
    """

    choice: str
    kept: bool
    reason: str = ""
    before: Cost | None = None
    after: Cost | None = None
    place_us: float = 0.0

    @property
    def saved_us(self) -> float:
        return self.before.predicted_us - self.after.predicted_us if self.before and self.after else 0.0

    @property
    def gain(self) -> float:
        """Share of the place's time won."""
        return self.saved_us / self.place_us if self.place_us else 0.0


@dataclass
class PlaceJudge:
    """Judges places, each structure once; ``verdicts`` are those found before by the same judge."""

    judge: Judge
    target: Target
    on_event: OnEvent = ignore
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    _prices: Prices = field(init=False)

    def __post_init__(self) -> None:
        self._prices = Prices(self.judge)

    def verdict(self, recipe: Recipe, matches: Sequence[Match], model: ir.Model, cutter: Cutter) -> Verdict:
        """The best way to rewrite one place, if any pays.

        Args:
            matches: Its alternatives at this place; they agree in their first node.
            model: The whole model as it is judged, whose subgraphs ``cutter`` cuts.
        """
        names = {str(node.name) for match in matches for node in match.nodes}
        try:
            key = self._key(recipe, matches, cutter.subgraph(names, across_stored=False))
            if key not in self.verdicts:
                self.verdicts[key] = self._found(recipe, matches, model, cutter.subgraph(names))
        except CutError as error:
            return Verdict(matches[0].choice, False, f"it cannot be judged: {error}")
        return self.verdicts[key]

    def _found(self, recipe: Recipe, matches: Sequence[Match], model: ir.Model, subgraph: ir.Model) -> Verdict:
        """The verdict on a place by a subgraph around it, by the whole model where that is needed."""
        verdict = None
        if len(subgraph.graph) < len(model.graph):
            infer_in_place(subgraph)
            verdict = self._judged(recipe, matches, subgraph, inner=True)
        if verdict is None:  # it is all, or the subgraph does not show enough of the graph for the recipe
            verdict = self._judged(recipe, matches, model, inner=False)
        return verdict or Verdict(matches[0].choice, False, _UNSEEN)

    def begin(self, model: ir.Model, *, inner: bool = False) -> None:
        """Begin to price a model beside other work."""
        self._prices.begin(model, inner=inner)

    def close(self) -> None:
        """End what was begun and nobody waits for; before the judge is closed."""
        self._prices.close()

    def price(self, model: ir.Model, *, inner: bool = False) -> Priced:
        """As :meth:`Judge.price`, asked once for models of equal structure."""
        return self._prices.price(model, inner=inner)

    def _key(self, recipe: Recipe, matches: Sequence[Match], subgraph: ir.Model) -> str:
        places = {str(node.name): index for index, node in enumerate(subgraph.graph.all_nodes())}
        ways = [(match.choice, sorted(places.get(str(node.name), -1) for node in match.nodes)) for match in matches]
        return hashlib.sha256(f"{recipe!r} {ways} {structure_key(subgraph)}".encode()).hexdigest()

    def _judged(self, recipe: Recipe, matches: Sequence[Match], subgraph: ir.Model, *, inner: bool) -> Verdict | None:
        """The verdict from one subgraph, at the optimum of its profile where it can be priced only so; None where the
        recipe finds nothing in it. It and the first form are priced at once."""
        label, wanted = matches[0].label, {match.choice for match in matches}
        there = [m for m in recipe.find(subgraph, self.target).matches if m.label == label and m.choice in wanted]
        if not there:
            return None
        self.begin(subgraph, inner=inner)
        forms = [(match, self._rewritten(recipe, match, subgraph)) for match in there]
        for _, form in forms:
            if not isinstance(form, Refusal):
                self.begin(form, inner=inner)
        try:
            before = self.price(subgraph, inner=inner)
        except TrtoptError as error:
            if inner and profile_of(subgraph) is not None:
                self.on_event(Event("warning", "rewrite", text=f"{only_at_optimum(subgraph)}: {error.what}"))
                return self._judged(recipe, matches, at_shapes(subgraph, best_shapes(subgraph)), inner=True)
            return Verdict(matches[0].choice, False, f"it cannot be judged: {error.what}")
        tried = [(self._tried(match, form, before, inner), form) for match, form in forms]
        return _best(tried, subgraph)

    def _rewritten(self, recipe: Recipe, match: Match, subgraph: ir.Model) -> ir.Model | Refusal:
        """A clone of a subgraph in which one place is rewritten."""
        clone = subgraph.clone()
        same = [
            m for m in recipe.find(clone, self.target).matches if (m.label, m.choice) == (match.label, match.choice)
        ]
        refused = recipe.rewrite(clone, same[0])
        if refused is not None:
            return refused
        invariants.check(clone, invariants.signature(subgraph))
        infer_in_place(clone)
        return clone

    def _tried(self, match: Match, form: ir.Model | Refusal, whole: Priced, inner: bool) -> Verdict:
        """Whether a form of a subgraph pays."""
        names = {str(node.name) for node in match.nodes}
        before, place = whole.total, whole.share(names)
        if isinstance(form, Refusal):
            return Verdict(match.choice, False, form.reason, before)
        try:
            after = self.price(form, inner=inner).total
        except TrtoptError as error:
            return Verdict(match.choice, False, f"the result cannot be judged: {error.what}", before)
        place_us = (place if place.kernels else before).predicted_us
        verdict = Verdict(match.choice, True, "", before, after, place_us)
        # A launch less is nothing that the model of times may err in: there any gain will do.
        only_less = after.kernels < before.kernels and not grows(before, after)
        if verdict.gain < (0.0 if only_less else least_gain(before, after)):
            return Verdict(match.choice, False, no_gain(before, after), before, after)
        return verdict


def _best(tried: Sequence[tuple[Verdict, ir.Model | Refusal]], subgraph: ir.Model) -> Verdict:
    """The verdict that saves most of those whose form computes what ``subgraph`` does; forms that do not pay, or less
    than one that holds, are not run."""
    refused = [verdict for verdict, _ in tried if not verdict.kept]
    for verdict, form in sorted(tried, key=lambda item: -item[0].saved_us):
        if not verdict.kept or isinstance(form, Refusal):
            continue
        off = difference(subgraph, form, best_shapes(subgraph))
        if not off:
            return verdict
        refused.append(Verdict(verdict.choice, False, f"the results differ: {off}", verdict.before))
    return max(refused, key=lambda verdict: verdict.saved_us)


_MAX_SWEEPS = 20
"""Rounds over all recipes. Real models need two to four; more means that two recipes undo each other."""


@dataclass(frozen=True)
class Judging:
    """Who judges, and where.

    Attributes:
        profiles: The shapes the engine takes; none for a model whose inputs are all static. The first one judges; a
            rewrite that is none at its sizes, or costs the same (the last token, where there is one), is judged by the
            second.
        verdicts: What was found of places by then, and is found now, for runs with other recipes on the same model.
    """

    judge: Judge
    profiles: tuple[ShapeProfile, ...]
    verdicts: dict[str, Verdict] = field(default_factory=dict)


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
        strict: Raise where a recipe fails instead of rolling it back.
        judging: Who judges recipes from stage FUSE on; None applies whatever they find.
        on_event: Told of each recipe tried.
    """

    target: Target
    strict: bool
    judging: Judging | None
    on_event: OnEvent
    place_judge: PlaceJudge | None = field(init=False, default=None)
    _forms: tuple[ir.Model, dict[int, tuple[ir.Model, Cutter]]] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.judging is not None:
            self.place_judge = PlaceJudge(self.judging.judge, self.target, self.on_event, self.judging.verdicts)

    def sweep(self, model: ir.Model, recipes: tuple[Recipe, ...]) -> tuple[ir.Model, dict[str, Tally]]:
        """The model after the recipes, and what each did. Raises RecipeError: a recipe failed, with ``strict``.

        What is judged waits until the stages before it find nothing more: exporters differ in how many rounds it takes
        to one form, and a recipe that matches an earlier one takes the place of a better one.
        """
        tallies = {recipe.name: Tally() for recipe in recipes}
        for _ in range(_MAX_SWEEPS):
            changed: set[str] = set()
            is_settled = True
            for recipe in recipes:
                tally = tallies[recipe.name]
                if tally.failed or (recipe.stage >= Stage.FUSE and not is_settled):
                    continue
                began = time.perf_counter()
                try:
                    outcome = self._guarded(recipe, model)
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
                    is_settled &= recipe.stage >= Stage.FUSE
                self.on_event(Event("advance", "rewrite", text=recipe.name))
            if not changed:
                break
        else:
            busy = ", ".join(name for name in tallies if name in changed)
            text = f"after {_MAX_SWEEPS} sweeps these recipes still find changes, perhaps each other's: {busy}"
            self.on_event(Event("warning", "rewrite", text=text))
        return model, tallies

    def _guarded(self, recipe: Recipe, model: ir.Model) -> _Outcome:
        """As :meth:`_apply_once`; whatever the recipe raises becomes a RecipeError."""
        try:
            return self._apply_once(recipe, model)
        except (Exception, SystemExit) as error:
            raise RecipeError(
                f"{type(error).__name__}: {' '.join(str(error).split())[:400]}",
                where=f"recipe {recipe.name}",
                remedy="leave the recipe out with --recipes, and report the model to the recipe's author",
            ) from error

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
        if self.place_judge is None or recipe.stage < Stage.FUSE:
            return {(label, matches[0].choice) for label, matches in places.items()}, ()
        verdicts: dict[int, tuple[Verdict, list[str]]] = {}
        for label, matches in places.items():
            verdict = self._verdict(self.place_judge, recipe, matches, model)
            verdicts.setdefault(id(verdict), (verdict, []))[1].append(label)
        wanted = {(label, verdict.choice) for verdict, labels in verdicts.values() for label in labels if verdict.kept}
        return wanted, tuple(
            RegionRecord(tuple(labels), verdict.choice, verdict.kept, verdict.reason, verdict.before, verdict.after)
            for verdict, labels in verdicts.values()
        )

    def _verdict(self, judge: PlaceJudge, recipe: Recipe, matches: Sequence[Match], model: ir.Model) -> Verdict:
        """The verdict on one place by the first profile; by the second one where the rewrite changes nothing there."""
        count = len(self.judging.profiles) if self.judging is not None else 0
        for at in range(min(max(count, 1), 2)):
            verdict = judge.verdict(recipe, matches, *self.judged_form(model, at))
            if verdict.reason != _UNSEEN and (verdict.after is None or verdict.after != verdict.before):
                break
        return verdict

    def judged_form(self, model: ir.Model, at: int = 0) -> tuple[ir.Model, Cutter]:
        """``model`` as it is judged, by its profile number ``at``; remembered for the last model asked about."""
        if self._forms is None or self._forms[0] is not model:
            self._forms = model, {}
        forms = self._forms[1]
        if at not in forms:
            form = judged_form(model, self.judging.profiles[at:] if self.judging is not None else ())
            forms[at] = form, Cutter(form)
        return forms[at]
