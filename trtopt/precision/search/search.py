"""The fastest precision within an accuracy budget: which regions stay 8-bit. Pure: who evaluates is handed in.

The loop is that of NNCF's accuracy control (``quantize_with_accuracy_control``), with two changes. An evaluation is a
pass over all samples, so regions are taken back in steps that double until the budget holds, and the last step is
halved until no fewer will do: about three times the logarithm of the number of regions, instead of one evaluation for
each. And regions are ranked by their error per microsecond, not by their error. There are no random numbers: equal
answers give equal results.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from trtopt.config.budget import ROUNDING, Floor
from trtopt.events import Event, OnEvent, ignore
from trtopt.precision.search.space import Budget, Evaluation, Form, Mix, Move, Oracle, Space
from trtopt.report.schema.decisions import Action, ParetoPoint, SearchRecord, SearchStep
from trtopt.report.text.format import count, some
from trtopt.support.halving import fewest
from trtopt.support.precision import Precision

_CHANCE = 1.02
"""How much the error of a few samples may rise with regions taken back: errors of regions cancel in part."""


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
        tried: The evaluated points, in order.
        ranked: The regions' errors by the point where they were asked for.
        won: The types in which regions were won back.
        stopped_early: Whether more points were to be evaluated than may be.
        aim: The largest drop the search goes on from.
    """

    space: Space
    budget: Budget
    oracle: Oracle
    tried: dict[Mix, Tried] = field(default_factory=dict)
    ranked: dict[Mix, Mapping[str, float]] = field(default_factory=dict)
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

    def cost(self, mix: Mix) -> tuple[float, float, float, float, float]:
        """The better of two points that hold is the smaller."""
        return (self.time_us(mix), self.estimate_us(mix), *self.order(mix))

    def order(self, mix: Mix) -> tuple[float, float, float]:
        """The better an evaluated point keeps the budget, the smaller."""
        return self.budget.order(self.tried[mix].found)

    def is_nearer(self, mix: Mix, state: Mix) -> bool:
        """Whether a point outside of the budget is nearer to it than another. Where a few samples refused it, how many
        answers changed is chance, and the error on these decides; what it rises by then may be, too."""
        found = self.tried[mix].found
        if found.is_partial:
            return found.error <= self.tried[state].found.error * _CHANCE
        return self.order(mix) < self.order(state)

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

    def best(self) -> tuple[Mix, bool]:
        """The point to choose, and whether it is within the budget."""
        priced = self.priced()
        within = [mix for mix in priced if self.holds(mix)]
        within = within or [mix for mix in priced if self.budget.holds(self.tried[mix].found)]
        if within:
            return min(within, key=self.cost), True
        return min(self.tried, key=lambda mix: (self.order(mix), self.estimate_us(mix))), False

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
                self.tried[mix].found.disagreement,
                self.tried[mix].found.noise,
                self.holds(mix),
            )
        return tuple(points.values())


def conclude(trials: Trials, start: Mix, sixteen: Mix) -> SearchResult:
    """Price the points that matter, take the fastest within the budget, and tell how it went."""
    chosen, is_within = trials.best()
    found = trials.tried[chosen].found
    saved = {region.name: region.saved_us for region in trials.space.regions}
    before, after = start.types, chosen.types
    floor = trials.budget.allowed.floor or Floor()
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
            tried.found.disagreement,
            tried.found.noise,
        )
        for mix, tried in trials.tried.items()
    ]
    record = SearchRecord(
        budget=trials.budget.drop,
        aim=trials.aim,
        metric=trials.budget.metric,
        reached=is_within,
        drop=found.drop,
        error=found.error,
        predicted_us=trials.time_us(chosen),
        plain_us=trials.time_us(sixteen),
        evaluations=len(steps),
        rankings=len(trials.ranked),
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
        floor_agreement=floor.agreement,
        floor_sqnr_db=floor.sqnr_db,
        disagreement=found.disagreement,
        noise=found.noise,
    )
    return SearchResult(chosen, found, is_within, record)


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


TASK = "search"
MOST_EVALUATIONS = 40
MOST_SECONDS = 120.0
"""What a search may take before it only brings the budget within reach, and wins nothing back."""
_MISSES = 6
"""Regions in a row that could not be won back, after which those that save less are not tried."""
_MISLED = 4
"""Steps that were undone, after which rankings are not asked for the next one."""

_Errors = dict[tuple[str, Form], float]


def search_budget(
    space: Space,
    budget: Budget,
    oracle: Oracle,
    *,
    narrow: Precision = Precision.FP16,
    most: int = MOST_EVALUATIONS,
    seconds: float = MOST_SECONDS,
    on_event: OnEvent = ignore,
) -> SearchResult:
    """The fastest point within the budget, starting from every region in the type that saves most.

    One evaluation where all that pays is within the budget. If even 16-bit everywhere is not, the closest point is
    returned after two, and ``reached`` is false.
    """
    search = _Search(Trials(space, budget, oracle), most, seconds, on_event)
    start, sixteen = space.fastest(narrow), Mix(narrow)
    with search.task():
        if not search.try_point(start, "start"):
            search.retreat(start)
        elif search.trials.time_us(start) >= search.trials.time_us(sixteen):
            # What the regions save by themselves does not add up.
            search.try_point(sixteen, "16-bit")
        search.finish(narrow)
        return conclude(search.trials, start, sixteen)


def search_auto(
    space: Space,
    budget: Budget,
    oracle: Oracle,
    *,
    narrows: Sequence[Precision] = (Precision.FP16, Precision.BF16),
    most: int = MOST_EVALUATIONS,
    seconds: float = MOST_SECONDS,
    on_event: OnEvent = ignore,
) -> SearchResult:
    """The fastest point within the budget over 16-bit types, 8-bit types and their mixes.

    Evaluated are each 16-bit type alone, every region in the type that saves most, every region in one 8-bit type for
    each of them, the regions that are fastest together, and, where nothing that holds is as fast as the first of these
    8-bit points, what lies between that and 16-bit, as in :func:`search_budget`. Mixes are made with the first of the
    16-bit types that is within the budget: ``narrows`` are those of the target, the preferred one first. ``most``
    evaluations are 7 or more.
    """
    search = _Search(Trials(space, budget, oracle), most, seconds, on_event)
    with search.task():
        held = search.first_held([Mix(narrow) for narrow in narrows])
        narrow = held.narrow if held else narrows[0]
        start = space.fastest(narrow)
        if held:
            reached = search.try_point(start, "start")
            alone = [space.pure(narrow, dtype) for dtype in space.dtypes()]
            for mix in (*alone, Mix.of(narrow, space.together)):
                search.try_point(mix, "alternative")
            if not reached and not search.overtakes(start):
                search.take_back(start)
            search.finish(narrow)
        return conclude(search.trials, start, Mix(narrow))


@dataclass
class _Search:
    """The moves of a search; what they found is in ``trials``. Points run on all samples once a few let pass what did
    not hold."""

    trials: Trials
    most: int
    seconds: float
    on_event: OnEvent
    errors: _Errors = field(default_factory=dict)
    runs_all: bool = False
    _began: float = field(default_factory=time.monotonic)

    @contextmanager
    def task(self) -> Iterator[None]:
        """Progress from start to end."""
        self.on_event(Event("start", TASK, total=self.most))
        yield
        self.on_event(Event("end", TASK))

    def try_point(self, mix: Mix, action: Action) -> bool:
        """Evaluate a point by itself; whether it holds."""
        return self._try(mix, action, tuple(mix.types))

    def first_held(self, sixteens: Sequence[Mix]) -> Mix | None:
        """The first of the 16-bit points that holds; where none does, the search aims at the budget itself."""
        held = [mix for mix in sixteens if self.try_point(mix, "16-bit")]
        if not held:
            self.trials.relax()
            held = [mix for mix in sixteens if self.trials.holds(mix)]
        return held[0] if held else None

    def retreat(self, start: Mix) -> None:
        """Take regions back from a point outside of the budget, where 16-bit is within."""
        if self.first_held([Mix(start.narrow)]) and not self.trials.holds(start):
            self.take_back(start)

    def overtakes(self, start: Mix) -> bool:
        """Whether an 8-bit point that holds is as fast as one that does not: what lies between that and 16-bit should
        be slower, and is not worth its rankings."""
        trials = self.trials
        times = (trials.time_us(mix) for mix in trials.tried if mix.quantized and trials.holds(mix))
        return min(times, default=math.inf) <= trials.time_us(start)

    def take_back(self, start: Mix) -> None:
        """From a point outside of the budget to one within, by moves to 16-bit.

        A step that does not help is undone, and the regions ranked anew where they stand; directly after a ranking it
        is tolerated. Steps double, so that the budget is reached in a logarithmic number of them. Where rankings do not
        tell (errors of FP8 and INT8 that cancel), the way that the last one gives is halved: its end is 16-bit.
        """
        tried, space = self.trials.tried, self.trials.space
        state = ranked = start
        self.errors = self._ranked(start)
        way = space.ways_down(state, self.errors)
        size, undone = 1, 0
        while way and self._left():
            if undone == _MISLED:
                self._take_fewer(state, way, self._left)
                return
            taken = way[:size]
            trial = state.moved(taken)
            if self._try(trial, "take back", _regions(taken)):
                self._take_fewer(state, taken, self._has_time)
                return
            if self.trials.is_nearer(trial, state) or ranked == state:
                tried[trial].kept = True
                state, way, size = trial, way[size:], 2 * size
            else:
                ranked, self.errors = state, self._ranked_again(state)
                way, size, undone = space.ways_down(state, self.errors), 1, undone + 1

    def _take_fewer(self, state: Mix, taken: Sequence[Move], may_ask: Callable[[], bool]) -> None:
        """Find the fewest of these moves that will do, by halving."""

        def holds(number: int) -> bool:
            return self._try(state.moved(taken[:number]), "take fewer back", _regions(taken[:number]))

        fewest(len(taken), holds, may_ask)

    def finish(self, narrow: Precision) -> None:
        """Win back, until what a few samples said of the best point holds on all of them; where it does not, regions
        are taken back from there, and points run on all samples."""
        self.win_back(narrow)
        while True:
            best, is_within = self.trials.best()
            tried = self.trials.tried[best]
            if not is_within or not tried.found.is_partial:
                return
            tried.found = self.trials.oracle.confirm(best)
            if not self.trials.holds(best):
                self.runs_all = True
                self.retreat(best)
                self.win_back(narrow)

    def win_back(self, narrow: Precision) -> None:
        """From the point that holds and should be the fastest to faster ones, most microseconds first.

        Regions that add more error than one that was refused come last. What lies between a point that holds and the
        one where each region saves most by itself should be no faster than both, and is not tried where that is slower.
        """
        trials, end = self.trials, self.trials.space.fastest(narrow)
        within = [mix for mix in trials.tried if mix.narrow == narrow and trials.holds(mix)]
        if not within or (end in trials.tried and self.overtakes(end)):
            return
        state = max(within, key=trials.space.saved_us)
        refused: set[Move] = set()
        size, misses = 1, 0
        while misses < _MISSES:
            ways = [move for move, _ in trials.space.ways_up(state) if move not in refused]
            least = min((self._error(move) for move in refused), default=math.inf)
            moves = _one_each(sorted(ways, key=lambda move: self._error(move) >= least))[:size]
            if not moves or not self._has_time():
                return
            known = len(trials.tried)
            trial = state.moved(moves)
            if self._try(trial, "win back", _regions(moves)):
                trials.won.update((move.region, move.dtype) for move in moves)
                state, size, misses = trial, 2 * size, 0
            elif len(moves) > 1:
                size = 1
            else:
                refused.add(moves[0])
                misses += len(trials.tried) - known

    def _error(self, move: Move) -> float:
        """What the region adds in its new type, as it was last ranked."""
        return 0.0 if move.dtype is None else self.errors.get((move.region, move.dtype), 0.0)

    def _try(self, mix: Mix, action: Action, regions: tuple[str, ...]) -> bool:
        """Evaluate a point, once; whether it holds."""
        trials = self.trials
        if mix not in trials.tried:
            what = f"{action}, {count(len(regions), 'region')}: {some(regions, 2)}" if regions else action
            self.on_event(Event("detail", TASK, text=what))
            found = (trials.oracle.confirm if self.runs_all else trials.oracle.evaluate)(mix)
            trials.tried[mix] = Tried(action, regions, found)
            trials.tried[mix].kept = holds = trials.holds(mix)
            self.on_event(Event("advance", TASK))
            bound = f"{trials.aim:.4g}" if trials.aim < math.inf else "what is allowed"
            text = f"{what}: drop {found.drop:.4g}, {'within' if holds else 'more than'} {bound}"
            self.on_event(Event("detail", TASK, text=text))
        return trials.holds(mix)

    def _left(self) -> bool:
        """Whether another point may be evaluated; asked when there is one to evaluate."""
        if len(self.trials.tried) >= self.most:
            self.trials.stopped_early = True
        return not self.trials.stopped_early

    def _has_time(self) -> bool:
        """Whether another point may be evaluated though one within the budget is known."""
        if time.monotonic() - self._began > self.seconds:
            self.trials.stopped_early = True
        return self._left()

    def _rank(self, mix: Mix) -> _Errors:
        ranked = self.trials.ranked
        if mix not in ranked:
            self.on_event(Event("detail", TASK, text=f"ranking {count(len(mix.quantized), 'region')}"))
            ranked[mix] = self.trials.oracle.rank(mix)
        errors = ranked[mix]
        # A region whose error cannot be said is the first to go.
        return {(name, dtype): math.inf if math.isnan(errors[name]) else errors[name] for name, dtype in mix.quantized}

    def _ranked(self, start: Mix) -> _Errors:
        """The error of every region of ``start`` in each of its types."""
        errors = self._rank(start)
        for dtype in self.trials.space.dtypes():
            pure = self.trials.space.pure(start.narrow, dtype)
            if any(item not in errors for item in pure.quantized):
                errors = {**self._rank(pure), **errors}
        return errors

    def _ranked_again(self, state: Mix) -> _Errors:
        """The errors where the search stands; those of a region's other types change in the same ratio."""
        now = self._rank(state)
        result = dict(self.errors)
        for (name, dtype), error in now.items():
            before = self.errors[name, dtype]
            ratio = error / before if 0 < before < math.inf else 1.0
            result.update({key: value * ratio for key, value in self.errors.items() if key[0] == name and value})
            result[name, dtype] = error
        return result


def _regions(moves: Sequence[Move]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(move.region for move in moves))


def _one_each(moves: Iterable[Move]) -> list[Move]:
    """The first move of each region."""
    found: dict[str, Move] = {}
    for move in moves:
        found.setdefault(move.region, move)
    return list(found.values())
