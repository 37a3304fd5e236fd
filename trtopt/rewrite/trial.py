"""Whether a rewrite pays: tried on a piece of the graph, checked on numbers, and judged before and after."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import onnx_ir as ir

from trtopt.errors import TrtoptError
from trtopt.graph import invariants
from trtopt.graph.shapes import infer_in_place
from trtopt.judge.protocol import LEAST_GAIN, Judge, Priced, Prices, changed_cost, no_gain
from trtopt.judge.subgraph import CutError, Cutter, structure_key
from trtopt.report.schema.steps import Cost
from trtopt.rewrite.equal import difference
from trtopt.rewrite.protocol import Match, Recipe, Target


@dataclass(frozen=True)
class Verdict:
    """What was found for one place.

    Attributes:
        choice: The alternative that is best; empty where there is one way.
        kept: Whether it pays.
        reason: Why not.
        before: Cost of the kernels that compute the place; None where it was not judged.
        after: That, changed by what the rewrite changes in the piece around it.
    """

    choice: str
    kept: bool
    reason: str = ""
    before: Cost | None = None
    after: Cost | None = None

    @property
    def saved_us(self) -> float:
        """Microseconds won."""
        return self.before.predicted_us - self.after.predicted_us if self.before and self.after else 0.0

    @property
    def gain(self) -> float:
        """Share of the time won."""
        if self.before is None or self.after is None or not self.before.predicted_us:
            return 0.0
        return 1.0 - self.after.predicted_us / self.before.predicted_us


@dataclass
class Trial:
    """Judges places, each structure once.

    Attributes:
        judge: Says what a piece costs.
        target: What recipes are told.
    """

    judge: Judge
    target: Target
    _verdicts: dict[str, Verdict] = field(default_factory=dict)
    _prices: Prices = field(init=False)

    def __post_init__(self) -> None:
        self._prices = Prices(self.judge)

    def verdict(self, recipe: Recipe, matches: Sequence[Match], model: ir.Model, cutter: Cutter) -> Verdict:
        """The best way to rewrite one place, if any pays.

        Args:
            recipe: The recipe.
            matches: Its alternatives at this place; they agree in their first node.
            model: The whole model with static shapes, whose pieces ``cutter`` cuts.
            cutter: See there.
        """
        names = {str(node.name) for match in matches for node in match.nodes}
        try:
            subgraph = cutter.subgraph(names)
        except CutError as error:
            return Verdict(matches[0].choice, False, f"it cannot be judged: {error}")
        key = self._key(recipe, matches, subgraph)
        if key not in self._verdicts:
            verdict = None
            if len(subgraph.graph) < len(model.graph):
                infer_in_place(subgraph)
                verdict = self._judged(recipe, matches, subgraph, inner=True)
            if verdict is None:  # it is all, or the piece does not show enough of the graph for the recipe
                verdict = self._judged(recipe, matches, model, inner=False)
            self._verdicts[key] = verdict or Verdict(matches[0].choice, False, "it is not found at static shapes")
        return self._verdicts[key]

    def price(self, model: ir.Model, *, inner: bool = False) -> Priced:
        """As :meth:`Judge.price`, asked once for models of equal structure."""
        return self._prices.price(model, inner=inner)

    def _key(self, recipe: Recipe, matches: Sequence[Match], subgraph: ir.Model) -> str:
        places = {str(node.name): index for index, node in enumerate(subgraph.graph.all_nodes())}
        ways = [(match.choice, sorted(places.get(str(node.name), -1) for node in match.nodes)) for match in matches]
        return hashlib.sha256(f"{recipe!r} {ways} {structure_key(subgraph)}".encode()).hexdigest()

    def _judged(self, recipe: Recipe, matches: Sequence[Match], subgraph: ir.Model, *, inner: bool) -> Verdict | None:
        """The verdict from one piece; None where the recipe finds nothing in it."""
        label, wanted = matches[0].label, {match.choice for match in matches}
        there = [m for m in recipe.find(subgraph, self.target).matches if m.label == label and m.choice in wanted]
        if not there:
            return None
        try:
            before = self.price(subgraph, inner=inner)
        except TrtoptError as error:
            return Verdict(matches[0].choice, False, f"it cannot be judged: {error.what}")
        tried = [self._tried(recipe, match, subgraph, before, inner) for match in there]
        return max(tried, key=lambda verdict: (verdict.kept, verdict.saved_us))

    def _tried(self, recipe: Recipe, match: Match, subgraph: ir.Model, whole: Priced, inner: bool) -> Verdict:
        names = {str(node.name) for node in match.nodes}
        before = whole.share(names)
        if not before.kernels:
            before = whole.total
        clone = subgraph.clone()
        same = [
            m for m in recipe.find(clone, self.target).matches if (m.label, m.choice) == (match.label, match.choice)
        ]
        refused = recipe.rewrite(clone, same[0])
        if refused is not None:
            return Verdict(match.choice, False, refused.reason, before)
        invariants.check(clone, invariants.signature(subgraph))
        infer_in_place(clone)
        off = difference(subgraph, clone)
        if off:
            return Verdict(match.choice, False, f"the results differ: {off}", before)
        try:
            after = changed_cost(before, whole.total, self.price(clone, inner=inner).total)
        except TrtoptError as error:
            return Verdict(match.choice, False, f"the result cannot be judged: {error.what}", before)
        verdict = Verdict(match.choice, True, "", before, after)
        if verdict.gain >= LEAST_GAIN:
            return verdict
        return Verdict(match.choice, False, no_gain(before, after), before, after)
