"""What a search over precisions chooses from, the order in which it gives 8-bit up, and the answers it has had."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

from trtopt.cache.folder import SEARCH, Lines
from trtopt.config.budget import ROUNDING, AccuracyBudget
from trtopt.events import OnEvent
from trtopt.support.precision import Precision

Form: TypeAlias = Precision | Literal["2:4", "weights"]
"""What a region may be instead of 16-bit and dense: of an 8-bit type, 2:4, or of narrow weights. A search over layers
to prune, or over weights to store, is the same search; "8-bit" in these modules stands for that then."""

Errors = Mapping[tuple[str, Form], float]
"""The error that a region adds in an 8-bit type, by region and type."""


@dataclass(frozen=True)
class RegionOption:
    """An 8-bit type a region may have, and the predicted microseconds it saves against 16-bit, by itself."""

    dtype: Form
    saved_us: float


@dataclass(frozen=True)
class SearchRegion:
    """Nodes that change their type together.

    Attributes:
        name: Its name, of which there is one.
        options: The 8-bit types that pay, one or more.
        flop: Its arithmetic, for the shares in the report.
    """

    name: str
    options: tuple[RegionOption, ...]
    flop: int = 0

    def saved_us(self, dtype: Form | None) -> float:
        """Microseconds saved in a type of its options; None is 16-bit."""
        return next((option.saved_us for option in self.options if option.dtype == dtype), 0.0)


@dataclass(frozen=True)
class Mix:
    """A point of the search: the 8-bit regions with their types, in the order of their names; the others are
    ``narrow``."""

    narrow: Precision
    quantized: tuple[tuple[str, Form], ...] = ()

    @classmethod
    def of(cls, narrow: Precision, types: Mapping[str, Form]) -> Mix:
        """The point with these 8-bit regions."""
        return cls(narrow, tuple(sorted(types.items())))

    @property
    def types(self) -> dict[str, Form]:
        """The 8-bit regions and their type."""
        return dict(self.quantized)

    def moved(self, moves: Iterable[Move]) -> Mix:
        """The point after some moves."""
        types: dict[str, Form | None] = {**self.types}
        types.update((move.region, move.dtype) for move in moves)
        return Mix.of(self.narrow, {region: dtype for region, dtype in types.items() if dtype is not None})


@dataclass(frozen=True)
class Move:
    """A region gets another type; None is 16-bit."""

    region: str
    dtype: Form | None


@dataclass(frozen=True)
class Evaluation:
    """What a point costs in accuracy.

    Attributes:
        drop: What the budget bounds: baseline minus optimized metric, or 1 - agreement; infinite where an output is not
            finite. NaN counts as infinite.
        error: Noise power over signal power of the least accurate output: it tells points of equal drop apart, since a
            metric over few samples has plateaus. NaN counts as infinite.
        disagreement: 1 - top-1 agreement of the worst output that holds scores, which a floor bounds.
        noise: Noise power over signal power of the worst of the other outputs, likewise.
        is_partial: Whether only as many samples were run as settle whether a budget holds.
    """

    drop: float
    error: float
    disagreement: float = 0.0
    noise: float = 0.0
    is_partial: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        for name in ("drop", "error", "disagreement", "noise"):
            if math.isnan(getattr(self, name)):
                object.__setattr__(self, name, math.inf)

    @property
    def order(self) -> tuple[float, float]:
        """The more accurate, the smaller."""
        return self.drop, self.error


@dataclass(frozen=True)
class Budget:
    """What a point has to hold.

    Attributes:
        allowed: What may be lost.
        metric: What the drop is measured by, for the report.
        aim: The drop the search aims at, where 16-bit can hold it: see :func:`aim_for`; None for the budget itself.
    """

    allowed: AccuracyBudget
    metric: str
    aim: float | None = None

    @property
    def drop(self) -> float:
        """The largest drop; infinite where there is no bound."""
        return self.allowed.largest_drop

    def holds(self, found: Evaluation) -> bool:
        """Whether a point is within the budget."""
        within = found.drop <= self.drop + ROUNDING and found.error <= self.allowed.largest_error
        return within and self.floor_excess(found) <= 1

    def floor_excess(self, found: Evaluation) -> float:
        """How far a point is below the floor, as a factor; 1 where it holds or there is none."""
        floor = self.allowed.floor
        return 1.0 if floor is None else floor.excess(found.disagreement, found.noise)

    def order(self, found: Evaluation) -> tuple[float, float, float]:
        """The nearer to the floor, then the more accurate, the smaller."""
        return self.floor_excess(found), *found.order


def aim_for(drop: float, samples: int) -> float:
    """The budget less one standard error, for a drop that is a share of ``samples`` answers that turn wrong.

    A search ends close to what it is allowed, and the drop on other samples differs by chance: aimed at the budget
    itself, it would be missed there in every second case. The standard error of a share p over n samples is
    sqrt(p (1 - p) / n): 0.0044 of a budget of 0.01 with 500 samples, 0.0010 with 10 000. At least half of the budget is
    left: so few samples that this is not enough cannot tell a good point from a bad one.

    Args:
        drop: The budget.
        samples: Answers that the metric counts.
    """
    share = min(max(drop, 0.0), 1.0)
    return max(drop - math.sqrt(share * (1 - share) / max(samples, 1)), drop / 2)


class Oracle(Protocol):
    """Who knows what a point costs. Equal questions have equal answers."""

    def evaluate(self, mix: Mix) -> Evaluation:
        """The point's accuracy, over all samples; the expensive question."""
        ...

    def confirm(self, mix: Mix) -> Evaluation:
        """The same, where :meth:`evaluate` was settled by a few samples, over all of them."""
        ...

    def time_us(self, mix: Mix) -> float:
        """The judge's price of the whole network in microseconds; infinite where it cannot be built."""
        ...

    def rank(self, mix: Mix) -> Mapping[str, float]:
        """For each 8-bit region of ``mix``, the error it adds there; in any unit, the same for all."""
        ...


@dataclass(frozen=True)
class Space:
    """All points.

    Attributes:
        regions: The regions that pay in 8-bit, in graph order.
        eligible_flop: Arithmetic of all layers that could be 8-bit, regions or not; the regions' own if it is less.
        together: The regions and types with which the whole network was found fastest, accuracy apart: what the regions
            save by themselves does not add up.
    """

    regions: tuple[SearchRegion, ...]
    eligible_flop: int = 0
    together: Mapping[str, Form] = field(default_factory=dict)
    _by_name: Mapping[str, SearchRegion] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_by_name", {region.name: region for region in self.regions})

    def fastest(self, narrow: Precision) -> Mix:
        """Every region in the type that saves most; the first of equals."""
        types = {r.name: max(r.options, key=lambda option: option.saved_us).dtype for r in self.regions if r.options}
        return Mix.of(narrow, types)

    def pure(self, narrow: Precision, dtype: Form) -> Mix:
        """Every region that may have ``dtype`` in it."""
        return Mix.of(narrow, {r.name: dtype for r in self.regions if any(o.dtype == dtype for o in r.options)})

    def dtypes(self) -> tuple[Form, ...]:
        """The 8-bit types among the options."""
        return tuple(dict.fromkeys(option.dtype for region in self.regions for option in region.options))

    def saved_us(self, mix: Mix) -> float:
        """The sum of what the regions save by themselves: an estimate of what the whole network saves."""
        return math.fsum(self._by_name[name].saved_us(dtype) for name, dtype in mix.quantized)

    def flop_share(self, mix: Mix) -> dict[str, float]:
        """Share of the eligible flop by 8-bit type."""
        total = max(self.eligible_flop, sum(region.flop for region in self.regions))
        done: dict[str, int] = dict.fromkeys(self.dtypes(), 0)
        for name, dtype in mix.quantized:
            done[dtype] += self._by_name[name].flop
        return {dtype: flop / total if total else 0.0 for dtype, flop in done.items()}

    def ways_down(self, mix: Mix, errors: Errors) -> list[Move]:
        """The moves from ``mix`` to 16-bit everywhere, the most error per microsecond first.

        A region with several types goes down the lower convex hull of its points (microseconds saved, error), so that
        every prefix is the greedy solution of the multiple-choice knapsack over its regions (P. Sinha and A. Zoltners,
        "The multiple-choice knapsack problem", Operations Research 27(3), 1979).

        Args:
            mix: Where the way starts.
            errors: Of every region of ``mix``, in the types it may have.
        """
        waiting: list[tuple[float, float, int, int]] = []
        stairs: list[list[tuple[float, float, Move]]] = []
        types = mix.types
        for region in self.regions:
            if region.name in types:
                stairs.append(_stairs(region, types[region.name], errors))
                self._push(waiting, stairs, len(stairs) - 1, 0)
        moves = []
        while waiting:
            _, _, index, number = heapq.heappop(waiting)
            moves.append(stairs[index][number][2])
            self._push(waiting, stairs, index, number + 1)
        return moves

    @staticmethod
    def _push(
        waiting: list[tuple[float, float, int, int]],
        stairs: Sequence[Sequence[tuple[float, float, Move]]],
        index: int,
        number: int,
    ) -> None:
        """The next step of a region; a later one never overtakes it."""
        if number < len(stairs[index]):
            efficiency, error, _ = stairs[index][number]
            heapq.heappush(waiting, (-efficiency, -error, index, number))

    def ways_up(self, mix: Mix) -> list[tuple[Move, float]]:
        """The moves of single regions that save time, and the microseconds; the most first."""
        types, found = mix.types, []
        for region in self.regions:
            now = region.saved_us(types.get(region.name))
            options = ((option.dtype, option.saved_us - now) for option in region.options)
            found += [(Move(region.name, dtype), gain) for dtype, gain in options if gain > 0]
        return sorted(found, key=lambda item: -item[1])


def _stairs(region: SearchRegion, dtype: Form, errors: Errors) -> list[tuple[float, float, Move]]:
    """Error per microsecond, error, and move of each step from ``dtype`` down to 16-bit."""
    levels: list[tuple[float, float, Form | None]] = [
        (option.saved_us, max(errors.get((region.name, option.dtype), math.inf), 0.0), option.dtype)
        for option in region.options
    ]
    saved, error, _ = next(level for level in levels if level[2] == dtype)
    levels.append((0.0, 0.0, None))
    found = []
    at: Form | None = dtype
    while at is not None:
        lower = [level for level in levels if level[2] is None or (0.0 < level[0] <= saved and level[1] < error)]
        next_saved, next_error, at = max(
            lower, key=lambda level: (_efficiency(error - level[1], saved - level[0]), saved - level[0])
        )
        gain = error - next_error
        found.append((_efficiency(gain, saved - next_saved), gain, Move(region.name, at)))
        saved, error = next_saved, next_error
    return found


def _efficiency(error: float, microseconds: float) -> float:
    """Error that goes per microsecond that is lost; infinite where none is."""
    return error / microseconds if microseconds > 0 else math.inf


@dataclass
class Checkpoint:
    """An oracle that asks another one, and remembers in a file what it said.

    Answers do not depend on the budget, so that a search with another one finds them again; those that do, of a few
    samples that settle it, are not kept.

    Attributes:
        key: A hash of what the answers depend on: the model and the samples, the metric, the regions with their nodes
            and types, the options, the backend, its version, the GPU, the code.
        folder: Where the cache lies; None for ``~/.cache/trtopt``, which need not be writable.
        reused: Answers taken from the file.
    """

    oracle: Oracle
    key: str
    folder: str | Path | None
    on_event: OnEvent
    path: Path = field(init=False)
    reused: int = 0
    _known: dict[tuple[str, Mix], Any] = field(default_factory=dict)
    _from_file: set[tuple[str, Mix]] = field(default_factory=set)
    _lines: Lines = field(init=False)

    def __post_init__(self) -> None:
        self._lines = Lines(SEARCH, self.folder, self.on_event, self.key, synced=True)
        self.path = self._lines.path(self.key)
        self._known.update(item for record in self._lines.load() if (item := _answer_of(record)) is not None)
        self._from_file = set(self._known)

    def evaluate(self, mix: Mix) -> Evaluation:
        if ("evaluate", mix) not in self._known:
            found = self.oracle.evaluate(mix)
            if found.is_partial:
                return found
            self._add("evaluate", mix, _figures(found))
        return self.confirm(mix)

    def confirm(self, mix: Mix) -> Evaluation:
        known = self._answer("evaluate", mix, lambda: _figures(self.oracle.confirm(mix)))
        return Evaluation(*(_number(item) for item in known))

    def time_us(self, mix: Mix) -> float:
        return _number(self._answer("time_us", mix, lambda: _plain(self.oracle.time_us(mix))))

    def rank(self, mix: Mix) -> Mapping[str, float]:
        found = self._answer(
            "rank", mix, lambda: {name: _plain(error) for name, error in self.oracle.rank(mix).items()}
        )
        return {name: _number(error) for name, error in found.items()}

    def _answer(self, question: str, mix: Mix, ask: Callable[[], Any]) -> Any:
        key = question, mix
        if key in self._from_file:
            self._from_file.remove(key)
            self.reused += 1
        if key not in self._known:
            self._add(question, mix, ask())
        return self._known[key]

    def _add(self, question: str, mix: Mix, answer: Any) -> None:
        self._known[question, mix] = answer
        self._lines.add({"ask": question, "narrow": mix.narrow, "types": mix.types, "answer": answer})


def _answer_of(item: Mapping[str, Any]) -> tuple[tuple[str, Mix], Any] | None:
    """A question and its answer; None for what is neither."""
    try:
        question, answer = str(item["ask"]), item["answer"]
        mix = Mix.of(item["narrow"], {str(name): dtype for name, dtype in item["types"].items()})
        hash(mix)
        if question == "evaluate":
            Evaluation(*(_number(item) for item in answer))
        elif question == "time_us":
            _number(answer)
        else:
            [_number(error) for error in answer.values()]
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        return None
    return (question, mix), answer


def _figures(found: Evaluation) -> list[float | None]:
    return [_plain(item) for item in (found.drop, found.error, found.disagreement, found.noise)]


def _plain(number: float) -> float | None:
    """JSON has no infinity; a number that is not finite is worse than all others."""
    return float(number) if math.isfinite(number) else None


def _number(value: float | None) -> float:
    return math.inf if value is None else float(value)
