"""Keeps 8-bit where it makes the engine faster: every region is judged against 16-bit, on the subgraph around it.

Whether a region pays depends on its neighbours: a quantizer is free where a fused kernel writes it, and a convolution
whose scales per channel are a multiplication needs a quantizer behind it to take that in. So regions are judged with
their neighbours as they stand, in rounds until nothing changes, once from everything in 8-bit and once from nothing;
the whole network decides between the two, takes back regions that it is faster without, and decides against 16-bit.
"""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import onnx_ir as ir

from trtopt.errors import EngineBuildError, TrtoptError
from trtopt.events import Event, OnEvent
from trtopt.graph.shapes import at_shapes, infer_in_place
from trtopt.judge.form import best_shapes, only_at_optimum, profile_of
from trtopt.judge.protocol import (
    LEAST_GAIN,
    Judge,
    Priced,
    PriceFile,
    Prices,
    Question,
    changes,
    grows,
    least_gain,
    no_gain,
)
from trtopt.judge.subgraph import CutError, Cutter, additions, between, structure_key
from trtopt.precision.decide import plan_for
from trtopt.precision.observe.ranges import int8_sqnr_db
from trtopt.precision.plan import NarrowType, PrecisionPlan, QuantizedOp
from trtopt.precision.regions import Candidates, Problem, Region
from trtopt.precision.write import apply_plan, cast_borders
from trtopt.report.schema.steps import Cost
from trtopt.support.halving import fewest
from trtopt.support.precision import EIGHT_BIT_TYPES, Precision

Choice = Mapping[str, QuantizedOp]
"""The 8-bit nodes and their forms; the others are 16-bit."""

_ROUNDS = 4
_UNCACHED = 0.5
"""Share of the bytes a region adds that its gain has to pay from memory, all of them on the whole network: what lies
between two kernels is priced as the cache holds it, and whether it does depends on what else runs."""
_RESIDUAL_GAIN = 0.25
"""Share of the least gain that a residual in 8 bits has to win."""
_RESIDUAL_SQNR_DB = 30.0
"""Signal to noise in INT8 that a residual has to keep: its error does not average out, as that of a product does."""
_AHEAD = 3
"""Regions that are priced ahead once most of them stay as they are."""
_SINGLES = 4
"""Regions of at most so many nodes are also tried with one of them in 8-bit."""
_TRUE_CLAIM = 0.75
"""Share of what regions claim together that the whole network has to gain, for none of them to be doubted."""
_TRIALS = 12
"""Prices of the whole network that are spent on doubted regions."""
_CLEARLY = 0.001
"""Share of the whole network's time that leaving regions out has to win: less is rounding of the prediction."""


@dataclass(frozen=True)
class RegionVerdict:
    """What was found for one region.

    Attributes:
        region: The region.
        kept: The 8-bit nodes and their forms; empty where none is.
        reason: Why not.
        before: The cost of the subgraph of the network around the region, which is 16-bit; None where it could not be
            judged.
        after: That of the same subgraph with the region in 8-bit.
        region_us: The time of the kernels of it that compute the region in 16-bit.
        options: The verdicts of all forms that pay, one per type.
    """

    region: Region
    kept: Choice
    reason: str = ""
    before: Cost | None = None
    after: Cost | None = None
    options: tuple[RegionVerdict, ...] = ()
    region_us: float = 0.0

    @property
    def saved_us(self) -> float:
        """Microseconds that 8-bit wins."""
        return self.before.predicted_us - self.after.predicted_us if self.before and self.after else 0.0


_Found = tuple[Choice, tuple[RegionVerdict, ...], Cost | None]


@dataclass(frozen=True)
class Guarded:
    """What stays in 8-bit, a verdict per region in graph order, and the whole network's cost in 16-bit and with it;
    None where nobody can say."""

    choice: Choice
    verdicts: tuple[RegionVerdict, ...]
    before: Cost | None
    after: Cost | None


@dataclass
class Guard:
    """Judges the regions of one model.

    Attributes:
        form: The model as it is judged; the same node names.
        judge: Says what a graph with its precision written costs.
        file: Prices of other runs with this judge; None for none.
        memory_gbs: Memory bandwidth of the GPU in GB/s.
    """

    problem: Problem
    candidates: Candidates
    form: ir.Model
    judge: Judge
    on_event: OnEvent
    file: PriceFile | None = None
    memory_gbs: float = math.inf
    _prices: Prices = field(init=False)
    _following: Sequence[Region] = ()
    _subgraphs: dict[str, Subgraph | str] = field(default_factory=dict)
    _forms_now: Candidates = field(init=False)
    _wide: Mapping[str, str] = field(init=False)
    _wide_quantized: Mapping[Precision, Mapping[str, str]] = field(init=False)

    def __post_init__(self) -> None:
        self._prices = Prices(self.judge, self.file)
        self._forms_now = self.candidates
        self._cutter = Cutter(self.form)
        self._additions = additions(self.form) if self.problem.fuses_quantizers else {}
        self._all = subgraph_of(self.form)
        self._wide = plan_for(self.problem, Precision.AUTO).wide
        each = {dtype: self.candidates.of_types((dtype,)).all.values() for dtype in EIGHT_BIT_TYPES}
        self._wide_quantized = {
            dtype: plan_for(self.problem, Precision.AUTO, tuple(ops)).wide for dtype, ops in each.items()
        }

    def close(self) -> None:
        """End what was begun and nobody waits for; before the judge is closed."""
        self._prices.close()

    def choose(self) -> Guarded:
        """The choice that is fastest, with a verdict on every region.

        Where there are several types, regions are judged with all of them and with each alone: what is best beside
        neighbours of one type need not be best beside those of another.
        """
        types = tuple(dict.fromkeys(op.dtype for forms in self.candidates.ops.values() for op in forms))
        ways = [types, *([dtype] for dtype in types if len(types) > 1)]
        self.on_event(Event("start", "guard", total=len(ways) * len(self.candidates.regions)))
        before = self.whole({})
        found = [self._best(self.candidates.of_types(way)) for way in ways]
        choice, verdicts, after = min(found, key=lambda item: _time(item[2]))
        alone = zip(ways[1:], found[1:], strict=True)
        out = {pair for way, each in alone for pair in self._slowing(way[0], each, before)}
        verdicts = tuple(_with_options(same, out) for same in zip(verdicts, *(item[1] for item in found), strict=True))
        if before is not None and after is not None:
            choice, verdicts, after = self._trimmed(choice, verdicts, before, after)
        if before is not None and choice and self._gains_too_little(before, after):
            choice, verdicts, after = self._leaner(choice, verdicts, before, after)
        self.on_event(Event("end", "guard"))
        return Guarded(choice, verdicts, before, after)

    def _best(self, forms: Candidates) -> _Found:
        """The fastest choice among some of the forms."""
        self._forms_now = forms
        choice, verdicts, after = self._built(*self._settled({}))
        if _time(self.whole(forms.all)) < _time(after):
            # Some regions pay only together.
            other = self._built(*self._settled(forms.all))
            if _time(other[2]) < _time(after):
                choice, verdicts, after = other
        return choice, verdicts, after

    def _built(self, choice: Choice, verdicts: tuple[RegionVerdict, ...]) -> _Found:
        """The choice without what the whole network cannot be built with, though its subgraphs can."""
        after = self.whole(choice)
        out = self.culprits(choice) if after is None else {}
        if not out:
            return choice, verdicts, after
        kept = {node: op for node, op in choice.items() if node not in out}
        return kept, tuple(_without(verdict, out) for verdict in verdicts), self.whole(kept)

    def _slowing(self, dtype: Precision, found: _Found, before: Cost | None) -> list[tuple[Precision, str]]:
        """What a search need not try in a type with which the whole network is slower: what it is faster without."""
        choice, verdicts, after = found
        if before and after and after.predicted_us >= before.predicted_us:
            kept = self._trimmed(choice, verdicts, before, after)[0]
            return [(dtype, node) for node in choice if node not in kept]
        return []

    def _trimmed(
        self, choice: Choice, verdicts: tuple[RegionVerdict, ...], before: Cost, after: Cost
    ) -> tuple[Choice, tuple[RegionVerdict, ...], Cost]:
        """The choice without regions that the whole network is faster without, where it does not gain what they claim.

        Those that claim least are tried first, half of all at once, then each half that had to stay by halves.
        """
        kept = sorted((verdict for verdict in verdicts if verdict.kept), key=lambda verdict: verdict.saved_us)
        claimed = sum(verdict.saved_us for verdict in kept)
        if len(kept) < 2 or before.predicted_us - after.predicted_us >= _TRUE_CLAIM * claimed:
            return choice, verdicts, after
        waiting, out = deque(_halves(kept)), dict[str, str]()
        for _ in range(_TRIALS):
            if not waiting:
                break
            block = waiting.popleft()
            names = _nodes(block)
            fewer = _less(choice, names)
            if waiting and fewer:  # most blocks stay
                self._prices.start([self._whole_question(_less(choice, _nodes(waiting[0])))])
            cost = self.whole(fewer) if fewer else before
            if cost is not None and cost.predicted_us < after.predicted_us * (1 - _CLEARLY):
                text = f"{after.predicted_us:.1f} -> {cost.predicted_us:.1f} us"
                out.update(dict.fromkeys(names, f"the whole network is faster without it: {text}"))
                choice, after = fewer, cost
            elif len(block) > 1:
                waiting.extend(_halves(block))
        return choice, tuple(_without(verdict, out) for verdict in verdicts), after

    def culprits(self, choice: Choice) -> dict[str, str]:
        """The nodes of a choice that the compiler cannot build in 8-bit, with the reason.

        First those whose subgraph of the network fails by itself, then beside its neighbours, then the whole network's.
        """
        regions = [region for region in self.candidates.regions if any(node in choice for node in region.nodes)]
        parts = [{node: choice[node] for node in region.nodes if node in choice} for region in regions]
        found: dict[str, str] = {}
        for alone in (True, False):
            for region, part in zip(regions, parts, strict=True):
                subgraph = self._subgraph(region)
                others = {} if alone else {node: op for node, op in choice.items() if node not in found}
                if isinstance(subgraph, str) or found.keys() & part.keys():
                    continue
                error = self._failure(self._question(subgraph, {**others, **part}))
                if error and not self._failure(self._question(subgraph, {})):
                    found.update(dict.fromkeys(part, error))
        return self._of_whole(parts, found)

    def _of_whole(self, parts: Sequence[Choice], found: dict[str, str]) -> dict[str, str]:
        """The same, with the regions without which the whole network can be built."""

        def error(count: int) -> str:
            ops = {node: op for part in left[:count] for node, op in part.items()}
            return self._failure(self._whole_question(ops))

        left = [part for part in parts if not found.keys() & part.keys()]
        if not error(len(left)) or error(0):
            return found
        while reason := error(len(left)):
            broken = fewest(len(left), lambda number: bool(error(number)))
            found.update(dict.fromkeys(left.pop(broken - 1), reason))
        return found

    def _failure(self, question: Question) -> str:
        """Why the compiler cannot build it; empty where it can."""
        try:
            self._prices.answer(question)
        except EngineBuildError as error:
            return f"it cannot be built in 8-bit: {error.what}"
        except TrtoptError:
            return ""
        return ""

    def _leaner(
        self, choice: Choice, verdicts: Sequence[RegionVerdict], before: Cost, after: Cost | None
    ) -> tuple[Choice, tuple[RegionVerdict, ...], Cost]:
        """The choice without the regions that add kernels or bytes; nothing where that gains too little, too."""
        reason = "the whole network cannot be judged with it"
        if after is not None:
            added_us = self.memory_us(after.bytes - before.bytes)
            least = f"the whole network gains less than {least_gain(before, after):.1%}"
            least += f", with {added_us:.1f} us for the bytes that it adds" if added_us else ""
            reason = f"{least}: {before.predicted_us:.1f} -> {after.predicted_us:.1f} us"
        out = _nodes(
            [v for v in verdicts if v.kept and (v.before is None or v.after is None or grows(v.before, v.after))]
        )
        fewer = _less(choice, out) if after is not None and out else {}
        cost = self.whole(fewer) if fewer else None
        if cost is None or self._gains_too_little(before, cost):
            fewer, cost, out = {}, before, set(choice)
        return fewer, tuple(_without(verdict, dict.fromkeys(out, reason)) for verdict in verdicts), cost

    def _settled(self, start: Choice) -> tuple[Choice, tuple[RegionVerdict, ...]]:
        """Rounds over the regions until none changes."""
        state = dict(start)
        verdicts: dict[str, RegionVerdict] = {}
        for number in range(_ROUNDS):
            changed = False
            regions = self.candidates.regions
            for index, region in enumerate(regions):
                self._following = regions[index + 1 : index + 1 + (_AHEAD if number else 1)]
                verdict = self._judged(region, state, again=number > 0)
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

    def _judged(self, region: Region, state: Choice, *, again: bool) -> RegionVerdict:
        """The best form of one region beside its neighbours as they stand; ``again``, the form that it has where that
        still pays."""
        subgraph = self._subgraph(region)
        if isinstance(subgraph, str):
            return RegionVerdict(region, {}, f"it cannot be judged: {subgraph}")
        if not self._types(region):
            return RegionVerdict(region, {}, "the table keeps it out of this type")
        others = self._begin(region, state, again=again)
        for following in self._following if again else ():  # most regions stay as they are by then
            self._begin(following, state, again=True)
        try:
            whole = self._price(subgraph, others)
        except TrtoptError as error:
            if profile_of(subgraph.model) is None:
                return RegionVerdict(region, {}, f"it cannot be judged: {error.what}")
            self.on_event(Event("warning", "guard", text=f"{only_at_optimum(subgraph.model)}: {error.what}"))
            self._subgraphs[region.name] = subgraph_of(
                at_shapes(subgraph.model, best_shapes(subgraph.model)), self.problem.ends
            )
            return self._judged(region, state, again=again)
        now = {node: state[node] for node in region.nodes if node in state}
        if again and now and len(self._types(region)) == 1:
            kept = self._tried(region, now, subgraph, others, whole)
            if kept.kept:
                kept = self._better(kept, self._residual_form(region, now), subgraph, others, whole)
                kept = self._better(kept, _result_form(kept.kept, now), subgraph, others, whole)
                return replace(kept, options=(kept,))
        found = [self._of_type(region, dtype, subgraph, others, whole) for dtype in self._types(region)]
        if not any(verdict.kept for verdict in found) and 1 < len(region.nodes) <= _SINGLES:
            forms = [{node: op} for node in region.nodes for op in self._forms_now.ops.get(node, ())[-1:]]
            found += [self._tried(region, form, subgraph, others, whole) for form in forms]
        paying = sorted((verdict for verdict in found if verdict.kept), key=_rank)
        best = {next(iter(verdict.kept.values())).dtype: verdict for verdict in paying}
        return replace(max(found, key=_rank), options=tuple(best.values()))

    def _begin(self, region: Region, state: Choice, *, again: bool = False) -> Choice:
        """Begin to price a region in 16-bit and in the form that is tried first; the neighbours beside which it is
        judged."""
        others = {node: op for node, op in state.items() if node not in region.nodes}
        subgraph = self._subgraph(region)
        if not isinstance(subgraph, str):
            now = {node: op for node, op in state.items() if node in region.nodes}
            forms = [now] if again and now else [self._forms(region, dtype)[-1] for dtype in self._types(region)]
            forms += [quantized for form in forms if (quantized := self._residual_form(region, form))]
            forms += [written for form in forms if (written := _result_form(form, form))]
            self._prices.start([self._question(subgraph, {**others, **form}) for form in ({}, *forms)])
        return others

    def _of_type(
        self, region: Region, dtype: Precision, subgraph: Subgraph, others: Choice, whole: Priced
    ) -> RegionVerdict:
        """The best form of a type: the coarsest is the fastest; where it pays, a more accurate one may cost some."""
        fine, coarse = self._forms(region, dtype)
        best = self._tried(region, coarse, subgraph, others, whole)
        for following in self._following if len(self._types(region)) == 1 else ():
            self._begin(following, {**others, **best.kept})  # most regions stay as found so far
        form = coarse
        if fine != coarse and (best.kept or not any(op.multiply for op in fine.values())):
            accurate = self._tried(region, fine, subgraph, others, whole)
            if accurate.kept and (not best.kept or accurate.saved_us >= best.saved_us - _least(best)):
                best, form = accurate, fine
        best = self._better(best, self._residual_form(region, form), subgraph, others, whole)
        return self._better(best, _result_form(best.kept or coarse, coarse), subgraph, others, whole)

    def _better(
        self, best: RegionVerdict, form: Choice, subgraph: Subgraph, others: Choice, whole: Priced
    ) -> RegionVerdict:
        """The better of a verdict, and that on another form, if there is one."""
        if not form:
            return best
        other = self._tried(best.region, form, subgraph, others, whole)
        is_better = not best.kept or other.saved_us >= best.saved_us + _RESIDUAL_GAIN * _least(best)
        return other if other.kept and is_better else best

    def _residual_form(self, region: Region, form: Choice) -> Choice:
        """A form where additions that read the region's tensor as a residual read it quantized; none where there are
        none, where they do already, or where it keeps too little of the tensor."""
        additions = self._additions.get(region.name, ())
        stats = self.problem.stats.get(region.name)
        if not additions or not form or any(op.skips for op in form.values()) or stats is None:
            return {}
        amax = next(iter(form.values())).activation_amax
        if not stats.has_histogram or int8_sqnr_db(stats, amax) < _RESIDUAL_SQNR_DB:
            return {}
        return {node: replace(op, skips=additions) for node, op in form.items()}

    def _forms(self, region: Region, dtype: Precision) -> tuple[Choice, Choice]:
        """The most accurate form of a type, and the coarsest."""
        ops = {
            node: [op for op in self._forms_now.ops[node] if op.dtype == dtype]
            for node in region.nodes
            if node in self._forms_now.ops
        }
        ops = {node: forms for node, forms in ops.items() if forms}
        return {node: forms[0] for node, forms in ops.items()}, {node: forms[-1] for node, forms in ops.items()}

    def _types(self, region: Region) -> tuple[Precision, ...]:
        ops = (op for node in region.nodes for op in self._forms_now.ops.get(node, ()))
        return tuple(dict.fromkeys(op.dtype for op in ops))

    def _tried(self, region: Region, form: Choice, subgraph: Subgraph, others: Choice, whole: Priced) -> RegionVerdict:
        before, share = whole.total, whole.share(region.nodes)
        try:
            after = self._price(subgraph, {**others, **form}).total
        except TrtoptError as error:
            return RegionVerdict(region, {}, f"it cannot be built in 8-bit: {error.what}", before)
        region_us = (share if share.kernels else before).predicted_us
        found = RegionVerdict(region, form, "", before, after, region_us=region_us)
        if found.saved_us <= 0 or found.saved_us < _least(found):
            return replace(found, kept={}, reason=no_gain(before, after))
        added_us = _UNCACHED * self.memory_us(after.bytes - before.bytes)
        if found.saved_us - added_us < _least(found):
            text = f"it pays in the cache only: half of the bytes it adds take {added_us:.1f} us from memory"
            return replace(found, kept={}, reason=f"{text}; {changes(before, after)}")
        return found

    def _gains_too_little(self, before: Cost, after: Cost | None) -> bool:
        """Whether 8-bit is not worth it on the whole network."""
        added_us = 0.0 if after is None else self.memory_us(after.bytes - before.bytes)
        least = LEAST_GAIN if after is None else least_gain(before, after)
        return _time(after) + added_us > before.predicted_us * (1 - least)

    def memory_us(self, added: int) -> float:
        """The microseconds that memory takes for bytes that are added; 0 where there are fewer."""
        return max(added, 0) / (self.memory_gbs * 1e3)

    def _subgraph(self, region: Region) -> Subgraph | str:
        if region.name not in self._subgraphs:
            try:
                skips = self._additions.get(region.name, ())
                nodes = [*region.nodes, *skips, *between(self.form, region.nodes, skips)]
                model = self._cutter.subgraph(nodes, across_stored=False)
            except CutError as error:
                self._subgraphs[region.name] = str(error)
            else:
                infer_in_place(model)
                self._subgraphs[region.name] = subgraph_of(model, self.problem.ends)
        return self._subgraphs[region.name]

    def _price(self, subgraph: Subgraph, choice: Choice) -> Priced:
        return self._prices.answer(self._question(subgraph, choice))

    def _question(self, subgraph: Subgraph, choice: Choice) -> Question:
        """What a subgraph costs; its precision is written only where its like was not priced yet."""
        ops = [choice[name] for name in subgraph.names if name in choice]
        chosen = {op.node for op in ops}
        wide = {
            name: wides[name]
            for name in subgraph.names
            if name in (wides := self._wide_quantized[choice[name].dtype] if name in chosen else self._wide)
        }
        fused, ends = self.problem.fuses_quantizers, self.problem.own_ends(subgraph.model)
        plan = PrecisionPlan(Precision.AUTO, self.problem.narrow, wide, tuple(ops), fused_quantizers=fused, ends=ends)
        return Question(
            f"{subgraph_key(subgraph, plan)} inner",
            subgraph.names,
            lambda: cast_borders(apply_plan(subgraph.model, plan), self.problem.narrow.dtype, self.problem.ends),
            inner=True,
        )

    def whole(self, choice: Choice, narrow: NarrowType | None = None) -> Cost | None:
        """What the whole network costs, with ``narrow`` as its 16-bit type; None where nobody can say."""
        try:
            return self._prices.answer(self._whole_question(choice, narrow)).total
        except TrtoptError as error:
            self.on_event(Event("warning", "guard", text=f"the network as a whole cannot be judged: {error.what}"))
            return None

    def price_of(self, form: ir.Model, plan: PrecisionPlan) -> Cost | None:
        """What another FP32 model, as it is judged, costs with a plan; None where nobody can say."""
        subgraph = subgraph_of(form)
        question = Question(subgraph_key(subgraph, plan), subgraph.names, lambda: apply_plan(form, plan), inner=False)
        try:
            return self._prices.answer(question).total
        except TrtoptError:
            return None

    def _whole_question(self, choice: Choice, narrow: NarrowType | None = None) -> Question:
        problem = self.problem if narrow is None else replace(self.problem, narrow=narrow)
        plan = plan_for(problem, Precision.AUTO, tuple(choice.values()))
        return Question(
            subgraph_key(self._all, plan), self._all.names, lambda: apply_plan(self.form, plan), inner=False
        )


def _result_form(form: Choice, coarse: Choice) -> Choice:
    """A form where the products that may write 8 bits do, with one scale as in ``coarse``; none where no more can."""
    able = {node: coarse[node] for node, op in form.items() if not op.writes and coarse[node].result_amax > 0}
    written = {node: replace(op, skips=form[node].skips, writes=True) for node, op in able.items()}
    return {**form, **written} if written else {}


def _nodes(verdicts: Sequence[RegionVerdict]) -> set[str]:
    return {node for verdict in verdicts for node in verdict.kept}


def _less(choice: Choice, names: Collection[str]) -> Choice:
    return {node: op for node, op in choice.items() if node not in names}


def _halves(verdicts: Sequence[RegionVerdict]) -> tuple[Sequence[RegionVerdict], Sequence[RegionVerdict]]:
    half = len(verdicts) // 2
    return verdicts[:half], verdicts[half:]


def _without(verdict: RegionVerdict, out: Mapping[str, str]) -> RegionVerdict:
    reasons = [out[node] for node in verdict.kept if node in out]
    kept = {node: op for node, op in verdict.kept.items() if node not in out}
    return replace(verdict, kept=kept, reason=reasons[0], options=()) if reasons else verdict


def _with_options(same: Sequence[RegionVerdict], out: Collection[tuple[Precision, str]]) -> RegionVerdict:
    """The first of several verdicts on one region, with the best options of all but those that are ``out``."""
    best: dict[Precision, RegionVerdict] = {}
    for option in (option for verdict in same for option in verdict.options):
        dtype = next(iter(option.kept.values())).dtype
        is_out = any((dtype, node) in out for node in option.kept)
        if not is_out and (dtype not in best or option.saved_us > best[dtype].saved_us):
            best[dtype] = option
    return replace(same[0], options=tuple(best.values()))


def _least(verdict: RegionVerdict) -> float:
    """The least gain of a region, in microseconds."""
    return LEAST_GAIN * verdict.region_us


def _time(cost: Cost | None) -> float:
    return float("inf") if cost is None else cost.predicted_us


def _rank(verdict: RegionVerdict) -> tuple[bool, bool, float]:
    """What pays before what does not, what could be priced before what could not, the fastest first."""
    return bool(verdict.kept), verdict.after is not None, verdict.saved_us


@dataclass(frozen=True)
class Subgraph:
    """The network around a region, FP32; ``key`` is that of its structure."""

    model: ir.Model
    key: str
    names: tuple[str, ...]


def subgraph_of(model: ir.Model, ends: Collection[str] = ()) -> Subgraph:
    """A subgraph; ``ends`` are the names of the outputs of the network itself, which stay FP32."""
    places = [index for index, value in enumerate(model.graph.outputs) if value.name in ends]
    return Subgraph(model, f"{structure_key(model)} {places}", tuple(str(node.name) for node in model.graph))


def subgraph_key(subgraph: Subgraph, plan: PrecisionPlan) -> str:
    """Equal for subgraphs of equal structure with equal types."""
    places = {name: index for index, name in enumerate(subgraph.names)}
    forms = sorted(
        (
            places[op.node],
            op.dtype,
            str(op.weight_axis),
            op.multiply,
            op.ends,
            op.writes,
            sorted(places[n] for n in op.skips if n in places),
        )
        for op in plan.quantized
    )
    types = [sorted(places[name] for name in names if name in places) for names in (plan.wide, plan.bfloat, plan.ends)]
    narrow = plan.narrow.name if plan.narrow is not None else ""
    return hashlib.sha256(f"{subgraph.key} {narrow} {plan.fused_quantizers} {forms} {types}".encode()).hexdigest()
