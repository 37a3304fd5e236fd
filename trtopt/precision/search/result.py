"""What a search found: the fastest point within the budget, the Pareto front, and the record of how it went."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from trtopt.config.budget import ROUNDING
from trtopt.precision.search.space import Budget, Evaluation, Form, Mix, Oracle, Space
from trtopt.report.schema.decisions import Action, ParetoPoint, SearchRecord, SearchStep
from trtopt.support.precision import Precision


@dataclass(frozen=True)
class SearchResult:
    """The end of a search.

    Attributes:
        mix: The fastest point within the budget; the most accurate one that was tried where none is.
        evaluation: Its accuracy.
        reached: Whether it is within the budget.
        record: How it went, for the report.
    """

    mix: Mix
    evaluation: Evaluation
    reached: bool
    record: SearchRecord


@dataclass
class Tried:
    """A point that was evaluated: why, the regions it changed, and whether the search went on from it."""

    action: Action
    regions: tuple[str, ...]
    found: Evaluation
    kept: bool = False


@dataclass
class Trials:
    """What a search tried.

    Attributes:
        space: The regions.
        budget: What has to hold.
        oracle: Evaluates and prices.
        tried: The evaluated points, in order.
        rankings: How often the regions were ranked.
        won: The types in which regions were won back.
        stopped_early: Whether more points were to be evaluated than may be.
        aim: The largest drop the search goes on from.
    """

    space: Space
    budget: Budget
    oracle: Oracle
    tried: dict[Mix, Tried] = field(default_factory=dict)
    rankings: int = 0
    won: dict[str, Form | None] = field(default_factory=dict)
    stopped_early: bool = False
    aim: float = field(init=False)
    _times: dict[Mix, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.aim = self.budget.drop if self.budget.aim is None else min(self.budget.aim, self.budget.drop)

    def time_us(self, mix: Mix) -> float:
        """The judge's price, asked once."""
        if mix not in self._times:
            self._times[mix] = self.oracle.time_us(mix)
        return self._times[mix]

    def holds(self, mix: Mix) -> bool:
        """Whether an evaluated point is within the budget, and its expected drop within what the search aims at."""
        return self.budget.holds(self.tried[mix].found) and self.expected()[mix] <= self.aim + ROUNDING

    def expected(self) -> dict[Mix, float]:
        """The drop of each point without what chance may have done to it.

        Of forty points some hold the budget by luck, and a search finds those. A larger error at the outputs means a
        larger drop, chance apart: so the drops are smoothed to rise with the error, in the least squares sense
        (isotonic regression; R. Barlow et al., "Statistical inference under order restrictions", Wiley, 1972). Points
        of equal error, and 16-bit, which is not one of many, are left as they are.
        """
        points = [(tried.found, mix) for mix, tried in self.tried.items()]
        finite = [(found, mix) for found, mix in points if mix.quantized and math.isfinite(found.drop)]
        finite.sort(key=lambda item: (item[0].error, item[0].drop))
        blocks: list[tuple[float, list[Mix]]] = []
        for found, mix in finite:
            total, members = found.drop, [mix]
            while blocks and blocks[-1][0] / len(blocks[-1][1]) > total / len(members):
                before, others = blocks.pop()
                total, members = before + total, others + members
            blocks.append((total, members))
        smooth = {mix: total / len(members) for total, members in blocks for mix in members}
        return {mix: smooth.get(mix, found.drop) for found, mix in points}

    def relax(self) -> None:
        """Aim at the budget itself."""
        self.aim = self.budget.drop

    def estimate_us(self, mix: Mix) -> float:
        """What the point should take, by the price of 16-bit and what its regions save by themselves."""
        plain = self.time_us(Mix(mix.narrow))
        return (plain if plain < math.inf else 0.0) - self.space.saved_us(mix)

    def cost(self, mix: Mix) -> tuple[float, float, float, float]:
        """The better of two points that hold is the smaller."""
        return (self.time_us(mix), self.estimate_us(mix), *self.tried[mix].found.order)

    def priced(self) -> list[Mix]:
        """The points worth a price: those that a search starts from, and those than which none should be faster and
        more accurate, of all points, of those within the budget, and of those that hold."""
        drops = {mix: tried.found.drop for mix, tried in self.tried.items()}
        estimates = {mix: self.estimate_us(mix) for mix in self.tried}
        within = {mix: drop for mix, drop in drops.items() if self.budget.holds(self.tried[mix].found)}
        held = {mix: drop for mix, drop in drops.items() if self.holds(mix)}
        chosen = {*_front(estimates, drops), *_front(estimates, within), *_front(estimates, held)}
        chosen.update(mix for mix, tried in self.tried.items() if tried.action in ("16-bit", "start", "alternative"))
        return [mix for mix in self.tried if mix in chosen]

    def pareto(self, chosen: Mix) -> tuple[ParetoPoint, ...]:
        """The Pareto front of the priced points, and the chosen one; the fastest first."""
        times = {mix: time for mix in self.priced() if (time := self.time_us(mix)) < math.inf}
        front = {*_front(times, {mix: self.tried[mix].found.drop for mix in times}), chosen}
        points: dict[str, ParetoPoint] = {}
        for mix in sorted((mix for mix in self.tried if mix in front), key=self.cost):
            name = _unused(name_of(mix, self.space), points)
            points[name] = ParetoPoint(
                name,
                _counts(mix, self.space),
                self.space.flop_share(mix),
                self.time_us(mix),
                self.tried[mix].found.drop,
                self.tried[mix].found.error,
                self.budget.metric,
                mix == chosen,
                self.budget.holds(self.tried[mix].found),
            )
        return tuple(points.values())


def conclude(trials: Trials, start: Mix, sixteen: Mix) -> SearchResult:
    """Price the points that matter, take the fastest within the budget, and tell how it went."""
    priced = trials.priced()
    within = [mix for mix in priced if trials.holds(mix)]
    within = within or [mix for mix in priced if trials.budget.holds(trials.tried[mix].found)]
    if within:
        chosen = min(within, key=trials.cost)
    else:
        chosen = min(trials.tried, key=lambda mix: (trials.tried[mix].found.order, trials.estimate_us(mix)))
    found = trials.tried[chosen].found
    saved = {region.name: region.saved_us for region in trials.space.regions}
    before, after = start.types, chosen.types
    steps = [
        SearchStep(
            tried.action,
            name_of(mix, trials.space),
            tried.regions,
            tried.found.drop,
            tried.found.error,
            trials.budget.holds(tried.found),
            trials.holds(mix),
            tried.kept,
        )
        for mix, tried in trials.tried.items()
    ]
    record = SearchRecord(
        budget=trials.budget.drop,
        aim=trials.aim,
        metric=trials.budget.metric,
        reached=bool(within),
        drop=found.drop,
        error=found.error,
        predicted_us=trials.time_us(chosen),
        plain_us=trials.time_us(sixteen),
        evaluations=len(steps),
        rankings=trials.rankings,
        steps=tuple(steps),
        pareto=trials.pareto(chosen),
        regions=len(trials.space.regions),
        types={name: str(dtype) for name, dtype in after.items()},
        reverted=tuple(
            name for name in saved if name in before and saved[name](after.get(name)) < saved[name](before[name])
        ),
        won_back=tuple(name for name, dtype in trials.won.items() if after.get(name) == dtype),
        min_sqnr_db=trials.budget.allowed.sqnr_db,
        is_default_budget=trials.budget.allowed.is_default,
        stopped_early=trials.stopped_early,
    )
    return SearchResult(chosen, found, bool(within), record)


def name_of(mix: Mix, space: Space) -> str:
    """``fp16``; ``int8`` where every region that may have it does and no other is 8-bit; else how many have which."""
    if not mix.quantized:
        return mix.narrow
    counts = {dtype: count for dtype in space.dtypes() if (count := list(mix.types.values()).count(dtype))}
    total = len(space.regions)
    only = next(iter(counts))
    if len(counts) == 1 and mix == space.pure(mix.narrow, only):
        text = str(only)
    elif len(counts) == 1:
        text = f"{only} {counts[only]}/{total}"
    else:
        text = " + ".join(f"{dtype} {count}/{total}" for dtype, count in counts.items())
    return text if mix.narrow == Precision.FP16 else f"{text}, {mix.narrow}"


def _counts(mix: Mix, space: Space) -> dict[str, int]:
    values = list(mix.types.values())
    counts = {str(dtype): values.count(dtype) for dtype in space.dtypes()}
    return {**counts, mix.narrow: len(space.regions) - len(values)}


def _unused(name: str, taken: Mapping[str, ParetoPoint]) -> str:
    number, found = 1, name
    while found in taken:
        number += 1
        found = f"{name} ({number})"
    return found


def _front(times: Mapping[Mix, float], drops: Mapping[Mix, float]) -> list[Mix]:
    """The points of ``drops`` than which none is as good in both and better in one; of equal points the first."""
    found: list[Mix] = []
    lowest = math.inf
    for mix in sorted(drops, key=lambda point: (times[point], drops[point])):
        if drops[mix] < lowest or not found:
            found.append(mix)
            lowest = drops[mix]
    return found
