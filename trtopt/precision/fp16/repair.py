"""16 bits that are right: the nodes whose rounding the network's outputs do not bear go back to FP32.

What :mod:`trtopt.precision.fp16.hazards` finds is local: a range, a constant, a sum. Whether an error matters at the
outputs (a difference of two large numbers, a sine of a large argument, twenty small branches on a large residual) shows
when the plan is run.

Two searches find the nodes. *Leave one in*: roundings are independent of each other, so their noise adds up, and the
noise of a group of nodes is that of the network in which these alone are 16-bit. Groups are halved, the worst first,
until what is left is small enough. *Leave one out*: some errors only appear jointly, such as a small energy that is
rounded away and the logarithm of what is left. Where the first search gives up with many nodes in FP32, the second
finds the shortest stretch of the graph that has to be, by halving from either end. It comes first where the bound is
missed by little: then almost any nodes help, and the first search would weigh all of them. What the outputs do not need
is left out of what either has found.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import onnx_ir as ir

from trtopt.precision.fp16.cast_to_half import why_fp32
from trtopt.precision.observe.ranges import ranking_readers
from trtopt.precision.plan import BF16, FP16, WEIGHTED, NarrowType, PrecisionPlan
from trtopt.support.halving import fewest

SMALLEST_SQNR_DB = 40.0
"""Signal to noise at the outputs that an FP16 network must keep. Trained networks that FP16 does not harm keep 43 dB
(a detector whose head multiplies and exponentiates) to 68 dB, see benchmarks/accuracy; INT8 keeps 15 to 40."""

MOST_EVALUATIONS = 64
"""Plans tried at most: a few culprits in a network of a thousand nodes take 20 to 40."""

MOST_LEFT_OUT = 96
"""Parts of a set that are tried in 16 bits again."""

_FEW, _PART = 16, 0.05
"""A number and a share of the nodes; where more go back, the second search looks for fewer."""

_NEAR = 2.0
"""Noise over the noise allowed up to which the second search comes first."""

_SHARE = 0.5
"""What the groups left in 16 bits may add up to the next time, of what would be allowed if the sum were exact."""

_JOINT = 1000.0
"""Noise of groups together over the sum of their noise: at most their number where errors add up as amplitudes do;
beyond, they appear jointly."""

_SMALL_DB, _JUMPS = 30.0, 4.0
"""Small noise adds up: where groups by themselves make more than so many times the noise of all, the outputs jump. A
mask of ``sigmoid(x) > 0.5`` has flipped, and any rounding before it does the same."""

_FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def smallest_sqnr_db(narrow: NarrowType) -> float:
    """The bound for a type: each bit of precision less than FP16 has costs 6 dB (22 dB for BF16)."""
    return SMALLEST_SQNR_DB - 20 * math.log10(narrow.precision / FP16.precision)


@dataclass(frozen=True)
class Damage:
    """What a plan does to the outputs.

    Attributes:
        excess: Noise over the noise allowed, of the output that fares worst: good up to 1, infinite when something is
            infinite or NaN that is not in FP32.
        output: The name of that output.
        sqnr_db: Its signal to noise.
    """

    excess: float
    output: str = ""
    sqnr_db: float = math.inf

    @property
    def is_allowed(self) -> bool:
        """Whether every output is within the bound."""
        return self.excess <= 1.0

    def __str__(self) -> str:
        if math.isinf(self.excess):
            return f"{self.output} becomes infinite or NaN"
        return f"{self.output} keeps {self.sqnr_db:.1f} dB"


@dataclass(frozen=True)
class Repaired:
    """A plan within the bound, and what the plan given and this one do; the one given where nothing helped.

    ``fallbacks`` are the nodes put back to FP32, with the reason; they are in ``plan.wide`` too. ``others`` are other
    plans within the bound. ``few`` and ``all`` say what another plan does to a few samples and to all, with a bound
    that others should bear too.
    """

    plan: PrecisionPlan
    before: Damage
    after: Damage
    fallbacks: Mapping[str, str] = field(default_factory=dict)
    others: tuple[PrecisionPlan, ...] = ()
    few: Callable[[PrecisionPlan], Damage] | None = None
    all: Callable[[PrecisionPlan], Damage] | None = None


def repair(
    base: ir.Model,
    plan: PrecisionPlan,
    damage_of: Callable[[PrecisionPlan], Damage],
    most: int = MOST_EVALUATIONS,
) -> Repaired:
    """Put nodes back to FP32 until ``damage_of`` the plan is allowed.

    Costs one evaluation when it is allowed from the start. *Leave one in* ends after about ``most`` evaluations, with
    whole groups in FP32 where there was no time to look into them; *leave one out* takes twice the logarithm of the
    number of nodes. Up to :data:`MOST_LEFT_OUT` more for each of the two leave out what is not needed. Of what they
    find, the fewest nodes go back, and the result is never worse than the plan given. What the plan quantizes is left
    out while 16-bit types are judged.
    """
    search = _Search(base, plan, damage_of, most)
    before = search.damage(())
    if before.is_allowed or not search.nodes:
        return Repaired(plan, before, before)
    sets = search.sets(before)
    if not sets:
        return Repaired(plan, before, before)
    first, *others = (widened(base, plan, back) for back in sets)
    fallbacks = {name: reason for name, reason in first.wide.items() if name not in plan.wide}
    return Repaired(first, before, search.damage(sets[0]), fallbacks, tuple(others))


def widened(base: ir.Model, plan: PrecisionPlan, wide: Mapping[str, str]) -> PrecisionPlan:
    """``plan`` with more nodes in FP32 (by name, with the reason), and with them who ranks their results."""
    more = {
        name: wide[str(node.name)]
        for node in base.graph
        if node.name in wide
        for name in (str(node.name), *ranking_readers(node))
    }
    bfloat = {name: reason for name, reason in plan.bfloat.items() if name not in more}
    return replace(plan, wide={**plan.wide, **more}, bfloat=bfloat)


def alone(
    base: ir.Model, plan: PrecisionPlan, damage_of: Callable[[PrecisionPlan], Damage]
) -> Callable[[Collection[str]], Damage]:
    """What happens when of all 16-bit nodes only some, by name, are 16-bit."""
    return _Search(base, plan, damage_of, 0).alone


@dataclass(order=True)
class _Group:
    """Nodes that are still 16-bit; the heap gives the worst first, then the first in the order of the search."""

    rank: float
    start: int
    nodes: tuple[str, ...] = field(compare=False)
    damage: Damage = field(compare=False)


class _Search:
    def __init__(
        self, base: ir.Model, plan: PrecisionPlan, damage_of: Callable[[PrecisionPlan], Damage], most: int
    ) -> None:
        self._plan = replace(plan, quantized=(), rounded={}, bias={})
        self._damage_of, self._most = damage_of, most
        self._kinds = {str(node.name): _kind(node) for node in base.graph if _rounds(node, plan)}
        self._light = {str(node.name) for node in base.graph if node.op_type not in WEIGHTED}
        self._groups: list[_Group] = []
        self._known: dict[frozenset[str], Damage] = {}
        self._base = base
        self.nodes = _by_kind(self._kinds)
        self.back: dict[str, str] = {}
        self.gave_up = self.jumps = False
        self._back_alone = 0.0
        self.evaluations = 0

    def damage(self, wide: Iterable[str]) -> Damage:
        """What the plan does with these nodes in FP32 too."""
        chosen = frozenset(wide)
        if chosen not in self._known:
            self.evaluations += 1
            self._known[chosen] = self._damage_of(widened(self._base, self._plan, dict.fromkeys(chosen, "")))
        return self._known[chosen]

    def sets(self, before: Damage) -> list[dict[str, str]]:
        """Nodes that go back to FP32, the fewest first; none where nothing helps."""
        stretch = self.stretch(before) if before.excess <= _NEAR else {}
        if self._are_few(stretch) and self.damage(stretch).is_allowed:
            return [self.without_spare(stretch)]
        self._most += self.evaluations - 1  # a long stretch takes nothing from the first search
        after = self.run(before)
        if self.jumps or after.excess >= before.excess:
            return []
        if not self.gave_up or not after.is_allowed or self._are_few(self.back):
            return [self.back]
        return sorted((self.without_spare(back) for back in (self.back, stretch or self.stretch(before))), key=len)

    def _are_few(self, back: Collection[str]) -> bool:
        return len(back) <= max(_FEW, _PART * len(self.nodes))

    def run(self, before: Damage) -> Damage:
        """Fill ``back``; the damage that is left."""
        self._push(0, self.nodes, before)
        target, after = 1.0, before
        while self._groups:
            most = _JUMPS * before.excess if before.sqnr_db > _SMALL_DB else math.inf
            self._reduce(target, most)
            self.jumps = self._parts() > most
            if self.jumps:
                return before
            if self.evaluations >= self._most:
                self._fall_back_rest()
            after = self.damage(self.back)
            if after.is_allowed:
                break
            left = self._left()
            if after.excess > _JOINT * left:  # no group does harm by itself, all together do
                self._fall_back_rest()
                return self.damage(self.back)
            # The noise of the groups adds up to more than estimated: allow them less in proportion.
            target = min(target, left) * _SHARE / min(after.excess, 2.0**40)
        return after

    def _reduce(self, target: float, most: float) -> None:
        """Halve or put back groups until the rest adds up to ``target``, or to more than ``most``."""
        while self._groups and target < self._left() and self._parts() <= most:
            group = heapq.heappop(self._groups)
            if len(group.nodes) == 1 or self.evaluations + 2 > self._most:
                self.gave_up |= len(group.nodes) > 1
                self._fall_back(group)
                continue
            middle = self._middle(group.nodes)
            halves = [(group.start, group.nodes[:middle]), (group.start + middle, group.nodes[middle:])]
            found = [(start, nodes, self.alone(nodes)) for start, nodes in halves]
            if self._is_one_kind(group.nodes) and all(damage.excess > target / 4 for _, _, damage in found):
                self._fall_back(group)
                continue
            for start, nodes, damage in found:
                self._push(start, nodes, damage)

    def stretch(self, before: Damage) -> dict[str, str]:
        """The shortest stretch of the graph that has to be FP32; all of it in FP32 is allowed."""
        nodes = tuple(self._kinds)
        end = fewest(len(nodes), lambda count: self.damage(nodes[:count]).is_allowed)
        size = fewest(end, lambda count: self.damage(nodes[end - count : end]).is_allowed)
        return dict.fromkeys(
            nodes[end - size : end],
            f"put back to FP32 with what lies between {nodes[end - size]} and {nodes[end - 1]}: else {before}",
        )

    def without_spare(self, back: Mapping[str, str]) -> dict[str, str]:
        """A set of nodes without the parts that are not needed beside the others: halves, quarters, and so on."""
        names, size, left = list(back), len(back) // 2, MOST_LEFT_OUT
        while size:
            start = 0
            while start < len(names) and left:
                rest = [*names[:start], *names[start + size :]]
                left -= 1
                if self.damage(rest).is_allowed:
                    names = rest
                else:
                    start += size
            size //= 2
        return {name: back[name] for name in names}

    def _middle(self, nodes: Sequence[str]) -> int:
        """Where to part a group: between two kinds, as near to its middle as possible."""
        borders = [
            index for index in range(1, len(nodes)) if self._kinds[nodes[index - 1]] != self._kinds[nodes[index]]
        ]
        half = len(nodes) // 2
        return min(borders, key=lambda index: abs(index - half), default=half)

    def _left(self) -> float:
        return sum(group.damage.excess for group in self._groups)

    def _parts(self) -> float:
        """The noise of all parts that the nodes were divided into, each by itself."""
        return self._left() + self._back_alone

    def alone(self, nodes: Collection[str]) -> Damage:
        """What happens when of all nodes only these are 16-bit."""
        chosen = frozenset(nodes)
        return self.damage(name for name in self.nodes if name not in chosen)

    def _push(self, start: int, nodes: tuple[str, ...], damage: Damage) -> None:
        heapq.heappush(self._groups, _Group(-damage.excess, start, nodes, damage))

    def _is_one_kind(self, nodes: Sequence[str]) -> bool:
        """Whether a group is the same light operator in many places, all of which are likely to need the same."""
        return len({self._kinds[name] for name in nodes}) == 1 and all(name in self._light for name in nodes)

    def _fall_back(self, group: _Group) -> None:
        self._back_alone += group.damage.excess
        count = len(group.nodes)
        which = "it" if count == 1 else f"it and {count - 1} more"
        for name in group.nodes:
            kind = BF16 if name in self._plan.bfloat else self._plan.narrow
            narrow = "16 bits" if kind is None else kind.name
            self.back[name] = f"put back to FP32: with only {which} in {narrow}, {group.damage}"

    def _fall_back_rest(self) -> None:
        self.gave_up |= bool(self._groups)
        for group in self._groups:
            self._fall_back(group)
        self._groups = []


def _rounds(node: ir.Node, plan: PrecisionPlan) -> bool:
    """Whether the plan runs ``node`` in 16 bits."""
    kind = BF16 if node.name in plan.bfloat else plan.narrow
    if kind is None or node.name in plan.wide or why_fp32(node, kind) is not None:
        return False
    return any(value is not None and value.dtype in _FLOATS for value in (*node.inputs, *node.outputs))


def _kind(node: ir.Node) -> str:
    """Operator, who makes its inputs and who reads its outputs: equal for the same place of repeated blocks."""
    makers = [_operator(value.producer()) if value is not None else "" for value in node.inputs]
    readers = sorted(user.op_type for value in node.outputs for user, _ in value.uses())
    return f"{node.op_type}({', '.join(makers)}) > {' '.join(readers)}"


def _operator(node: ir.Node | None) -> str:
    return "" if node is None else node.op_type


def _by_kind(kinds: Mapping[str, str]) -> tuple[str, ...]:
    """Names with those of one kind next to each other, so that what a block repeats falls into one group."""
    first: dict[str, int] = {}
    for kind in kinds.values():
        first.setdefault(kind, len(first))
    return tuple(sorted(kinds, key=lambda name: first[kinds[name]]))
