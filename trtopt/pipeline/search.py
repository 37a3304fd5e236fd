"""The fastest choice of 8-bit regions within an accuracy budget: what the search asks, answered by real runs."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from trtopt.accuracy.compare import decibels
from trtopt.accuracy.segments import SegmentedModel
from trtopt.accuracy.sensitivity import Sampling, sensitivity
from trtopt.cache.code import code_hash, entry_key
from trtopt.config import AccuracyBudget
from trtopt.graph import cost
from trtopt.graph.skeleton import content_hash
from trtopt.judge.selection import Guard, Guarded, RegionVerdict
from trtopt.judge.target import BuildTarget
from trtopt.pipeline.calibrate import Observer
from trtopt.pipeline.gauge import Gauge, accuracy_drop
from trtopt.pipeline.improve import Improved, OutputErrorMeter, judged
from trtopt.precision.decide import plan_for, transferred
from trtopt.precision.observe.stream import FEW_ROWS
from trtopt.precision.plan import BF16, PrecisionPlan, QuantizedOp
from trtopt.precision.qdq.canonicalize import existing_nodes
from trtopt.precision.regions import Problem, find_candidates
from trtopt.precision.search.search import SearchResult, search_auto, search_budget
from trtopt.precision.search.space import Checkpoint, Evaluation, Form, Mix, RegionOption, SearchRegion, Space
from trtopt.precision.write import apply_plan
from trtopt.report.schema.decisions import SearchRecord
from trtopt.report.schema.steps import StepRecord
from trtopt.report.text.decisions import miss_text
from trtopt.support.precision import Precision

_RANKING_RUNS, _LEAST_RUNS = 64, 2
"""Runs of a ranking, shared among the regions, and the least of each: where there are many, an order is enough, and
what it misleads to is undone."""


def missed(found: SearchRecord | None, budget: AccuracyBudget) -> tuple[str, ...]:
    """The gate's sentence where a search did not reach the budget."""
    return () if found is None or found.reached or budget.is_advice else (miss_text(found),)


class RegionOracle:
    """Answers the search about mixes of regions, by running and pricing them.

    ``improved`` has the FP32 form that plans are for, and the plan of what pays by ``guarded``.
    """

    def __init__(self, improved: Improved, guard: Guard, guarded: Guarded, gauge: Gauge, observer: Observer) -> None:
        self.improved = improved
        self._guard, self._gauge, self._observer = guard, gauge, observer
        self.base = improved.problem.model
        chosen = (verdict for verdict in guarded.verdicts if verdict.options or verdict.kept)
        self._verdicts = {verdict.region.name: verdict for verdict in chosen}
        self._options = {name: _best_of_types(verdict) for name, verdict in self._verdicts.items()}
        options = [verdict for forms in self._options.values() for verdict in forms.values()]
        dtypes = dict.fromkeys(op.dtype for verdict in options for op in verdict.kept.values())
        self._forms = find_candidates(improved.problem, tuple(dtypes)).ops

    @property
    def identity(self) -> str:
        """What the answers depend on besides the regions: the graph, the judge, the ranges, the improved numbers."""
        plan, problem = self.improved.plan, self.improved.problem
        digest, fallbacks = hashlib.sha256(content_hash(self.base).encode()), sorted(problem.fallbacks.items())
        numbers = plan.wide, plan.quantized, sorted(self._forms.items()), fallbacks
        known = (self._guard.judge.name, problem.takes_bfloat, *numbers)
        digest.update(repr(known).encode())
        for values in (plan.rounded, plan.bias):
            for node in sorted(values):
                digest.update(f"{node} ".encode() + values[node].tobytes())
        return digest.hexdigest()

    def space(self, flop: Mapping[str, int]) -> Space:
        """The regions that pay, with the types that do."""
        eligible = sum(flop.get(str(node.name), 0) for node in self.base.graph if cost.is_eligible_for_int8(node))
        return Space(
            tuple(
                SearchRegion(
                    name,
                    tuple(RegionOption(dtype, option.saved_us) for dtype, option in self._options[name].items()),
                    sum(flop.get(node, 0) for node in verdict.region.nodes),
                )
                for name, verdict in self._verdicts.items()
            ),
            eligible,
            {name: _dtype_of(verdict) for name, verdict in self._verdicts.items() if verdict.kept},
        )

    def ops(self, mix: Mix) -> tuple[QuantizedOp, ...]:
        """The 8-bit nodes of a mix."""
        best = {op.node: op for op in self.improved.plan.quantized}
        found = [
            self._form(op, best.get(op.node))
            for name, dtype in mix.quantized
            for op in self._options[name][dtype].kept.values()
        ]
        return tuple(op for op in found if op is not None)

    def _form(self, op: QuantizedOp, best: QuantizedOp | None) -> QuantizedOp | None:
        if best is not None and best.dtype == op.dtype:
            return best
        forms = [form for form in self._forms.get(op.node, ()) if form.dtype == op.dtype]
        forms = [replace(form, skips=op.skips, writes=op.writes and form.result_amax > 0) for form in forms]
        same = (form for form in forms if (form.weight_axis, form.multiply) == (op.weight_axis, op.multiply))
        return next(same, next(iter(forms), None))

    def plan(self, mix: Mix) -> PrecisionPlan:
        """The plan of a mix, with the improved numbers of its nodes."""
        known, problem = self.improved.plan, self.improved.problem
        if mix.narrow == Precision.BF16:
            problem = replace(problem, narrow=BF16)
        plan = plan_for(problem, known.requested, self.ops(mix), known.refused)
        # Their values are in units of scales that the 16-bit type rounded, or FP32 did not.
        same = {
            op.node
            for op in plan.quantized
            if op in known.quantized
            and mix.narrow == Precision.FP16
            and (op.node in plan.wide) == (op.node in known.wide)
        }
        return replace(
            plan,
            rounded={node: values for node, values in known.rounded.items() if node in same},
            bias={node: values for node, values in known.bias.items() if node in same},
        )

    def evaluate(self, mix: Mix) -> Evaluation:
        """See :class:`~trtopt.precision.search.space.Oracle`."""
        return self._gauge.evaluate(apply_plan(self.base, self.plan(mix)))

    def confirm(self, mix: Mix) -> Evaluation:
        """See :class:`~trtopt.precision.search.space.Oracle`."""
        return accuracy_drop(self._gauge.measure(apply_plan(self.base, self.plan(mix))))

    def time_us(self, mix: Mix) -> float:
        """See :class:`~trtopt.precision.search.space.Oracle`."""
        found = self._guard.whole({op.node: op for op in self.ops(mix)}, BF16 if mix.narrow == Precision.BF16 else None)
        return math.inf if found is None else found.predicted_us

    def rank(self, mix: Mix) -> Mapping[str, float]:
        """See :class:`~trtopt.precision.search.space.Oracle`: how much the error falls when a region is taken back."""
        base, plan = self.base, self.plan(mix)
        skips = {op.node: op.skips for op in plan.quantized}
        regions = {
            name: [item for node in self._nodes(name, dtype) for item in (node, *skips.get(node, ()))]
            for name, dtype in mix.quantized
        }
        nodes = [node for group in regions.values() for node in group]
        exact = replace(plan, narrow=None, wide={}, bfloat={}, fused_quantizers=False, rounded={})
        with SegmentedModel(base, apply_plan(base, exact), nodes) as model:
            some, listen = self._observer.few(FEW_ROWS).samples, self._observer.clock.listen
            each = Sampling(max(_RANKING_RUNS // len(regions), _LEAST_RUNS))
            found = sensitivity(model, regions, some, always=nodes, sampling=each, on_event=listen)
        return {name: max(-item.change, 0.0) for name, item in found.regions.items()}

    def _nodes(self, name: str, dtype: Form) -> list[str]:
        return list(self._options[name][dtype].kept)


def _best_of_types(verdict: RegionVerdict) -> dict[Form, RegionVerdict]:
    """The form of each type that saves most; of the type that the guard chose, its choice."""
    found: dict[Form, RegionVerdict] = {}
    for option in sorted(verdict.options, key=lambda item: item.saved_us):
        found[_dtype_of(option)] = option
    return {**found, _dtype_of(verdict): verdict} if verdict.kept else found


def _dtype_of(verdict: RegionVerdict) -> Precision:
    return next(op.dtype for op in verdict.kept.values())


def search(
    oracle: RegionOracle,
    gauge: Gauge,
    flop: Mapping[str, int],
    observer: Observer,
    target: BuildTarget,
    *,
    takes_bfloat: bool,
) -> SearchResult:
    """The fastest mix within the budget; resumed from where a killed run was, but with a Python caller's metric.

    ``takes_bfloat``: ``--auto`` may choose BF16 as its 16-bit type.

    Raises:
        UsageError: The metric fails.
    """
    config, listen = observer.config, observer.clock.listen
    space = oracle.space(flop)
    identity, checkpoint = gauge.identity, None
    if identity is not None:
        key = entry_key(
            __name__,
            code_hash("trtopt.judge"),
            *identity,
            observer.identity,
            oracle.identity,
            target.name,
            repr(target.shapes),
            repr(space),
        )
        checkpoint = Checkpoint(oracle, key, config.cache_dir, listen)
    asked = checkpoint or oracle
    narrows: Sequence[Precision] = (Precision.FP16, Precision.BF16) if takes_bfloat else (Precision.FP16,)
    if observer.precision == Precision.AUTO:
        found = search_auto(space, gauge.budget(), asked, narrows=narrows, on_event=listen)
    else:
        found = search_budget(space, gauge.budget(), asked, on_event=listen)
    resumed = checkpoint.reused if checkpoint else 0
    return replace(found, record=replace(found.record, resumed=resumed, own_qdq=bool(existing_nodes(oracle.base))))


@dataclass(frozen=True)
class Settled:
    """What ships after a search: the FP32 form and its plan, the search's record, and the step that chose the
    numbers."""

    problem: Problem
    plan: PrecisionPlan
    record: SearchRecord
    steps: tuple[StepRecord, ...] = ()


def settled(found: SearchResult, oracle: RegionOracle, start: Problem, gauge: Gauge, observer: Observer) -> Settled:
    """The numbers of what a search chose: the improved ones, or those that ``start`` has, if the outputs are better.

    Improvements were judged with all regions that pay; fewer of them may be better off without. What is judged is the
    whole plan, on samples that nothing was fitted to; the numbers change only where the budget still holds.
    """
    improved, plan, began = oracle.improved, oracle.plan(found.mix), time.perf_counter()
    best = Settled(improved.problem, plan, found.record)
    is_plain = improved.problem is start and not (plan.rounded or plan.bias)
    if not plan.quantized or is_plain or len(plan.quantized) == len(improved.plan.quantized):
        return best
    plain = transferred(plan, start if plan.narrow is None else replace(start, narrow=plan.narrow))
    judge = improved.judge or OutputErrorMeter(start.model, judged(observer.samples))
    errors = [judge.of(improved.problem.model, plan), judge.of(start.model, plain)]
    text = f"output SQNR {decibels(errors[0]):.2f} dB, without improved numbers {decibels(errors[1]):.2f}"
    details = f"{text} dB on {judge.count} samples, of the regions that ship"
    is_same = len(plain.quantized) == len(plan.quantized)
    if is_same and errors[1] < errors[0]:
        evaluation = accuracy_drop(gauge.measure(apply_plan(start.model, plain)))
        if gauge.budget().holds(evaluation) or not found.reached:
            best = Settled(start, plain, _with_evaluation(found.record, evaluation))
    step = StepRecord(
        "judge-numbers", "PRECISION", int(best.plan is plain), time.perf_counter() - began, (), (details,)
    )
    return replace(best, steps=(step,))


def _with_evaluation(record: SearchRecord, found: Evaluation) -> SearchRecord:
    figures = {name: getattr(found, name) for name in ("drop", "error", "disagreement", "noise")}
    pareto = tuple(replace(point, **figures) if point.chosen else point for point in record.pareto)
    return replace(record, pareto=pareto, **figures)
