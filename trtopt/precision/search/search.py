"""The fastest precision within an accuracy budget: which regions stay 8-bit. Pure: who evaluates is handed in.

The loop is that of NNCF's accuracy control (``quantize_with_accuracy_control``), with two changes. An evaluation is a
pass over all samples, so regions are taken back in steps that double until the budget holds, and the last step is
halved until no fewer will do: about three times the logarithm of the number of regions, instead of one evaluation for
each. And regions are ranked by their error per microsecond, not by their error. There are no random numbers: equal
answers give equal results.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from trtopt.events import Event, OnEvent, ignore
from trtopt.precision.search.result import SearchResult, Trials, Tried, conclude
from trtopt.precision.search.space import Budget, Form, Mix, Move, Oracle, Space
from trtopt.report.schema.decisions import Action
from trtopt.report.text.format import count, some
from trtopt.support.halving import fewest
from trtopt.support.precision import Precision

TASK = "search"
MOST_EVALUATIONS = 40
_MISSES = 6
"""Regions in a row that could not be won back, after which those that save less are not tried."""

_Errors = dict[tuple[str, Form], float]


def search_budget(
    space: Space,
    budget: Budget,
    oracle: Oracle,
    *,
    narrow: Precision = Precision.FP16,
    most: int = MOST_EVALUATIONS,
    on_event: OnEvent = ignore,
) -> SearchResult:
    """The fastest point within the budget, starting from every region in the type that saves most.

    One evaluation where all that pays is within the budget. If even 16-bit everywhere is not, the closest point is
    returned after two, and ``reached`` is false.
    """
    search = _Search(Trials(space, budget, oracle), most, on_event)
    start, sixteen = space.fastest(narrow), Mix(narrow)
    with search.task():
        if not search.try_point(start, "start"):
            if search.first_held([sixteen]) and not search.trials.holds(start):
                search.take_back(start)
        elif search.trials.time_us(start) >= search.trials.time_us(sixteen):
            # What the regions save by themselves does not add up.
            search.try_point(sixteen, "16-bit")
        search.win_back(narrow)
        return conclude(search.trials, start, sixteen)


def search_auto(
    space: Space,
    budget: Budget,
    oracle: Oracle,
    *,
    narrows: Sequence[Precision] = (Precision.FP16, Precision.BF16),
    most: int = MOST_EVALUATIONS,
    on_event: OnEvent = ignore,
) -> SearchResult:
    """The fastest point within the budget over 16-bit types, 8-bit types and their mixes.

    Evaluated are each 16-bit type alone, every region in the type that saves most, every region in one 8-bit type for
    each of them, the regions that are fastest together, and what lies between the fastest of these and 16-bit, as in
    :func:`search_budget`. Mixes are made with the first of the 16-bit types that is within the budget.

    Args:
        space: The regions.
        budget: What has to hold.
        oracle: Evaluates, prices and ranks.
        narrows: The 16-bit types the target has, the preferred one first.
        most: Evaluations at most; 7 or more.
        on_event: Told what is tried, and what came of it.
    """
    search = _Search(Trials(space, budget, oracle), most, on_event)
    with search.task():
        held = search.first_held([Mix(narrow) for narrow in narrows])
        narrow = held.narrow if held else narrows[0]
        start = space.fastest(narrow)
        if held:
            reached = search.try_point(start, "start")
            alone = [space.pure(narrow, dtype) for dtype in space.dtypes()]
            for mix in (*alone, Mix.of(narrow, space.together)):
                search.try_point(mix, "alternative")
            if not reached:
                search.take_back(start)
            search.win_back(narrow)
        return conclude(search.trials, start, Mix(narrow))


@dataclass
class _Search:
    """The moves of a search; what they found is in ``trials``."""

    trials: Trials
    most: int
    on_event: OnEvent
    errors: _Errors = field(default_factory=dict)

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

    def take_back(self, start: Mix) -> None:
        """From a point outside of the budget to one within, by moves to 16-bit.

        A step that does not help is undone, and the regions ranked anew where they stand; directly after a ranking it
        is tolerated. Steps double, so that the budget is reached in a logarithmic number of them.
        """
        tried, space = self.trials.tried, self.trials.space
        state = ranked = start
        self.errors = self._ranked(start)
        way = space.ways_down(state, self.errors)
        size = 1
        while way and self._left():
            taken = way[:size]
            trial = state.moved(taken)
            if self._try(trial, "take back", _regions(taken)):
                self._take_fewer(state, taken)
                return
            if tried[trial].found.order < tried[state].found.order or ranked == state:
                tried[trial].kept = True
                state, way, size = trial, way[size:], 2 * size
            else:
                ranked, self.errors = state, self._ranked_again(state)
                way, size = space.ways_down(state, self.errors), 1

    def _take_fewer(self, state: Mix, taken: Sequence[Move]) -> None:
        """Find the fewest of these moves that will do, by halving."""

        def holds(number: int) -> bool:
            return self._try(state.moved(taken[:number]), "take fewer back", _regions(taken[:number]))

        fewest(len(taken), holds, self._left)

    def win_back(self, narrow: Precision) -> None:
        """From the point that holds and should be the fastest to faster ones, most microseconds first.

        Regions that add more error than one that was refused come last.
        """
        trials = self.trials
        within = [mix for mix in trials.tried if mix.narrow == narrow and trials.holds(mix)]
        if not within:
            return
        state = max(within, key=trials.space.saved_us)
        refused: set[Move] = set()
        size, misses = 1, 0
        while misses < _MISSES:
            ways = [move for move, _ in trials.space.ways_up(state) if move not in refused]
            least = min((self._error(move) for move in refused), default=math.inf)
            moves = _one_each(sorted(ways, key=lambda move: self._error(move) >= least))[:size]
            if not moves or not self._left():
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
            found = trials.oracle.evaluate(mix)
            trials.tried[mix] = Tried(action, regions, found)
            trials.tried[mix].kept = holds = trials.holds(mix)
            self.on_event(Event("advance", TASK))
            text = f"{what}: drop {found.drop:.4g}, {'within' if holds else 'more than'} {trials.aim:.4g}"
            self.on_event(Event("detail", TASK, text=text))
        return trials.holds(mix)

    def _left(self) -> bool:
        """Whether another point may be evaluated; asked when there is one to evaluate."""
        if len(self.trials.tried) >= self.most:
            self.trials.stopped_early = True
        return not self.trials.stopped_early

    def _rank(self, mix: Mix) -> _Errors:
        self.trials.rankings += 1
        self.on_event(Event("detail", TASK, text=f"ranking {count(len(mix.quantized), 'region')}"))
        errors = self.trials.oracle.rank(mix)
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
