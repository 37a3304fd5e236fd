"""Keeps 8-bit where it makes the engine faster: every region is judged against 16-bit, on its piece of the network.

Whether a region pays depends on its neighbours: a quantizer is free where a fused kernel writes it, and a convolution
whose scales per channel are a multiplication needs a quantizer behind it to take that in. So regions are judged with
their neighbours as they stand, in rounds until nothing changes, once from everything in 8-bit and once from nothing;
the whole network decides between the two, and against 16-bit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import onnx_ir as ir

from trtopt.errors import TrtoptError
from trtopt.events import Event, OnEvent
from trtopt.graph.shapes import infer_in_place
from trtopt.precision.decide import plan_for
from trtopt.precision.plan import NarrowType, PrecisionPlan, QuantizedOp, QuantizedType
from trtopt.precision.regions import Candidates, Problem, Region
from trtopt.precision.write import apply_plan, narrow_borders
from trtopt.report.records import Cost
from trtopt.rewrite.prices import Prices
from trtopt.rewrite.protocol import Judge, Priced
from trtopt.rewrite.region import CutError, Cutter, structure_key
from trtopt.rewrite.trial import LEAST_GAIN, changed_cost, no_gain

Choice = Mapping[str, QuantizedOp]
"""The 8-bit nodes and their forms; the others are 16-bit."""

_ROUNDS = 4
_SINGLES = 4
"""Regions of at most so many nodes are also tried with one of them in 8-bit."""


@dataclass(frozen=True)
class Verdict:
    """What was found for one region.

    Attributes:
        region: The region.
        kept: The 8-bit nodes and their forms; empty where none is.
        reason: Why not.
        before: The cost of the kernels that compute the region in 16-bit; None where it could not be judged.
        after: That, changed by what 8-bit changes in the piece of the network around it.
        options: The verdicts of all forms that pay, one per type.
    """

    region: Region
    kept: Choice
    reason: str = ""
    before: Cost | None = None
    after: Cost | None = None
    options: tuple[Verdict, ...] = ()

    @property
    def saved_us(self) -> float:
        """Microseconds that 8-bit wins."""
        return self.before.predicted_us - self.after.predicted_us if self.before and self.after else 0.0


@dataclass(frozen=True)
class Guarded:
    """What stays in 8-bit.

    Attributes:
        choice: The 8-bit nodes and their forms.
        verdicts: One per region, in graph order.
        before: The whole network in 16-bit; None where nobody can say what it costs.
        after: The whole network with the choice.
    """

    choice: Choice
    verdicts: tuple[Verdict, ...]
    before: Cost | None
    after: Cost | None


@dataclass(frozen=True)
class _Piece:
    """The network around a region: FP32, static shapes; ``key`` is that of its structure."""

    model: ir.Model
    key: str
    names: tuple[str, ...]


@dataclass
class Guard:
    """Judges the regions of one model.

    Attributes:
        problem: The model and what is known of it.
        candidates: What may become 8-bit.
        static: The model at the shapes it is judged at; the same node names.
        judge: Says what a graph with its precision written costs.
        on_event: Told of each region judged.
    """

    problem: Problem
    candidates: Candidates
    static: ir.Model
    judge: Judge
    on_event: OnEvent
    _prices: Prices = field(init=False)
    _pieces: dict[str, _Piece | str] = field(default_factory=dict)
    _wide: Mapping[str, str] = field(init=False)
    _wide_quantized: Mapping[str, str] = field(init=False)

    def __post_init__(self) -> None:
        self._prices = Prices(self.judge)
        self._cutter = Cutter(self.static, across_stored=False)
        self._wide = plan_for(self.problem, "").wide
        self._wide_quantized = plan_for(self.problem, "", tuple(self.candidates.all.values())).wide

    def choose(self) -> Guarded:
        """The choice that is fastest, with a verdict on every region."""
        regions = self.candidates.regions
        self.on_event(Event("start", "guard", total=len(regions)))
        before = self.whole({})
        choice, verdicts = self._settled({})
        after = self.whole(choice)
        if _time(self.whole(self.candidates.all)) < _time(after):
            # Some regions pay only together.
            other, judged = self._settled(self.candidates.all)
            if _time(self.whole(other)) < _time(after):
                choice, verdicts, after = other, judged, self.whole(other)
        if before is not None and choice and _time(after) > before.predicted_us * (1 - LEAST_GAIN / 10):
            choice, verdicts, after = self._nothing(verdicts, before, after)
        self.on_event(Event("end", "guard"))
        return Guarded(choice, verdicts, before, after)

    def _nothing(
        self, verdicts: Sequence[Verdict], before: Cost, after: Cost | None
    ) -> tuple[Choice, tuple[Verdict, ...], Cost]:
        reason = f"the whole network is not faster: {before.predicted_us:.1f} -> {_time(after):.1f} us"
        return {}, tuple(replace(v, kept={}, reason=reason) if v.kept else v for v in verdicts), before

    def _settled(self, start: Choice) -> tuple[Choice, tuple[Verdict, ...]]:
        """Rounds over the regions until none changes."""
        state = dict(start)
        verdicts: dict[str, Verdict] = {}
        for number in range(_ROUNDS):
            changed = False
            for region in self.candidates.regions:
                verdict = self._judged(region, state)
                verdicts[region.name] = verdict
                now = {node: state[node] for node in region.nodes if node in state}
                if verdict.kept != now:
                    changed = True
                    for node in now:
                        del state[node]
                    state.update(verdict.kept)
                if number == 0:
                    self.on_event(Event("advance", "guard", text=region.name))
            if not changed:
                break
        return state, tuple(verdicts.values())

    def _judged(self, region: Region, state: Choice) -> Verdict:
        """The best form of one region beside its neighbours as they stand."""
        piece = self._piece(region)
        if isinstance(piece, str):
            return Verdict(region, {}, f"it cannot be judged: {piece}")
        others = {node: op for node, op in state.items() if node not in region.nodes}
        try:
            whole = self._price(piece, others)
        except TrtoptError as error:
            return Verdict(region, {}, f"it cannot be judged: {error.what}")
        found = [self._of_type(region, dtype, piece, others, whole) for dtype in self._types(region)]
        if not any(verdict.kept for verdict in found) and 1 < len(region.nodes) <= _SINGLES:
            forms = [{node: op} for node in region.nodes for op in self.candidates.ops[node][-1:]]
            found += [self._tried(region, form, piece, others, whole) for form in forms]
        return replace(max(found, key=_rank), options=tuple(verdict for verdict in found if verdict.kept))

    def _of_type(self, region: Region, dtype: QuantizedType, piece: _Piece, others: Choice, whole: Priced) -> Verdict:
        """The best form of a type: the coarsest is the fastest; where it pays, a more accurate one may cost some."""
        ops = {node: [op for op in self.candidates.ops[node] if op.dtype == dtype] for node in region.nodes}
        coarse = {node: forms[-1] for node, forms in ops.items() if forms}
        fine = {node: forms[0] for node, forms in ops.items() if forms}
        fast = self._tried(region, coarse, piece, others, whole)
        if fine == coarse or (not fast.kept and any(op.multiply for op in fine.values())):
            return fast
        accurate = self._tried(region, fine, piece, others, whole)
        price = LEAST_GAIN * fast.before.predicted_us if fast.before is not None else 0.0
        return accurate if accurate.kept and (not fast.kept or accurate.saved_us >= fast.saved_us - price) else fast

    def _types(self, region: Region) -> Iterable[QuantizedType]:
        return dict.fromkeys(op.dtype for node in region.nodes for op in self.candidates.ops[node])

    def _tried(self, region: Region, form: Choice, piece: _Piece, others: Choice, whole: Priced) -> Verdict:
        before = whole.share(region.nodes)
        if not before.kernels:
            before = whole.total
        try:
            after = changed_cost(before, whole.total, self._price(piece, {**others, **form}).total)
        except TrtoptError as error:
            return Verdict(region, {}, f"it cannot be built in 8-bit: {error.what}", before)
        gain = 1 - after.predicted_us / before.predicted_us if before.predicted_us else 0.0
        if gain >= LEAST_GAIN:
            return Verdict(region, form, "", before, after)
        return Verdict(region, {}, no_gain(before, after), before, after)

    def _piece(self, region: Region) -> _Piece | str:
        if region.name not in self._pieces:
            try:
                model = self._cutter.piece(region.nodes)
            except CutError as error:
                self._pieces[region.name] = str(error)
            else:
                infer_in_place(model)
                names = tuple(str(node.name) for node in model.graph)
                self._pieces[region.name] = _Piece(model, structure_key(model), names)
        return self._pieces[region.name]

    def _price(self, piece: _Piece, choice: Choice) -> Priced:
        """What a piece costs; its precision is written only where its like was not priced yet."""
        ops = [choice[name] for name in piece.names if name in choice]
        chosen = {op.node for op in ops}
        wide = {
            name: wides[name]
            for name in piece.names
            if name in (wides := self._wide_quantized if name in chosen else self._wide)
        }
        places = {name: index for index, name in enumerate(piece.names)}
        forms = [(places[op.node], op.dtype, op.weight_axis, op.multiply) for op in ops]
        text = f"{piece.key} {forms} {sorted(places[name] for name in wide)}"
        plan = PrecisionPlan("", self.problem.narrow, wide, tuple(ops), fused_quantizers=self.problem.fuses_quantizers)
        return self._prices.remembered(
            hashlib.sha256(text.encode()).hexdigest(),
            piece.names,
            lambda: narrow_borders(apply_plan(piece.model, plan), self.problem.narrow.dtype),
            inner=True,
        )

    def whole(self, choice: Choice, narrow: NarrowType | None = None) -> Cost | None:
        """What the whole network costs; None where nobody can say.

        Args:
            choice: The 8-bit nodes and their forms.
            narrow: The 16-bit type, if not that of the problem.
        """
        problem = self.problem if narrow is None else replace(self.problem, narrow=narrow)
        plan = plan_for(problem, "", tuple(choice.values()))
        forms = sorted((op.node, op.dtype, str(op.weight_axis), op.multiply) for op in choice.values())
        names = [str(node.name) for node in self.static.graph]
        key = f"whole {problem.narrow.name} {forms}"
        try:
            found = self._prices.remembered(key, names, lambda: apply_plan(self.static, plan), inner=False)
        except TrtoptError as error:
            self.on_event(Event("warning", "guard", text=f"the network as a whole cannot be judged: {error.what}"))
            return None
        return found.total


def _time(cost: Cost | None) -> float:
    return float("inf") if cost is None else cost.predicted_us


def _rank(verdict: Verdict) -> tuple[bool, bool, float]:
    """What pays before what does not, what could be priced before what could not, the fastest first."""
    return bool(verdict.kept), verdict.after is not None, verdict.saved_us
