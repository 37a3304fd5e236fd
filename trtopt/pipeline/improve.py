"""Better numbers for the 8-bit nodes of a plan: each step is kept only where the error at the outputs falls."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from trtopt.graph.shapes import infer_in_place
from trtopt.pipeline.calibrate import Observer
from trtopt.pipeline.lowered import Improved
from trtopt.pipeline.output_error import OutputError, decibels, fitted
from trtopt.precision.decide import plan_for
from trtopt.precision.observe.channel_stats import channel_stats, product_inputs
from trtopt.precision.plan import PrecisionPlan, QuantizedOp
from trtopt.precision.ptq.refine import Refined, refine
from trtopt.precision.ptq.scaling import Scaled, equalize, smooth
from trtopt.precision.regions import Problem, find_candidates
from trtopt.report.schema.steps import StepRecord
from trtopt.support.precision import Precision

SMALLEST_SAMPLES = 16
"""With fewer samples, what fits them need not fit others: channels that hardly show in them get scales of their own."""

_STAGE = "PRECISION"
_METHODS = ("percentile", "max")
"""Calibration methods tried for all tensors alike."""
_SLOWER = 1.001
"""A network this much slower is slower; below it are roundings of the prediction."""

Price = Callable[[Problem, PrecisionPlan], float]
"""What a form of the model costs with a plan, in microseconds."""


def improve(problem: Problem, plan: PrecisionPlan, observer: Observer, price: Price | None = None) -> Improved:
    """Equalize channels, then round weights and correct biases, for the 8-bit nodes of ``plan``.

    Nothing is tried on synthetic samples: they say nothing about errors. What is fitted to samples is judged on others.

    Args:
        problem: The model the plan is for.
        plan: The plan; which nodes are 8-bit, and their types, stay.
        observer: Observes FP32 forms of the model.
        price: Prices a form; one with more nodes that costs more is not kept. None to keep it whatever it costs.

    Raises:
        InvalidModelError: ONNX Runtime cannot run the model.
    """
    nodes = frozenset(op.node for op in plan.quantized if op.dtype == Precision.INT8 and op.other is None)
    if not nodes or observer.samples.source == "synthetic":
        return Improved(problem, plan)
    count = sum(1 for _ in observer.samples)
    if count < SMALLEST_SAMPLES:
        text = f"{count} samples are too few to improve 8-bit numbers by: {SMALLEST_SAMPLES} or more are needed"
        observer.clock.warn("improve", text)
        return Improved(problem, plan)
    with observer.clock.stage("improve"):
        judge = OutputError(problem.model, observer.samples)
        tried = _Trials(judge, observer, Improved(problem, plan), price)
        if not problem.imported:  # given ranges are those of the tensors as they are
            began = time.perf_counter()
            tried.scaled("equalize", equalize(problem.model, nodes), began)
            _smooth(tried, nodes, observer, problem.fuses_quantizers)
            if problem.method == "auto":
                tried.methods(_METHODS)
        return _refined(tried.best, judge, observer)


class _Trials:
    """Changes tried one upon the other; each is kept if the error at the outputs falls."""

    def __init__(self, judge: OutputError, observer: Observer, start: Improved, price: Price | None) -> None:
        self._judge, self._observer, self.best, self._price = judge, observer, start, price
        self._error = judge.of(start.problem.model, start.plan)

    def scaled(self, name: str, found: Scaled, began: float) -> bool:
        """Another FP32 form of the model, with the ranges that it has; whether it is kept."""
        if not found.changes:
            return False
        calibration = self._observer.observe(found.model, is_variant=True)
        if calibration is not None:
            problem = replace(self.best.problem, model=found.model, stats=calibration.table.stats)
            return self._try(name, problem, began, found)
        return False

    def methods(self, names: Sequence[str]) -> None:
        """One calibration method for all tensors instead of the best of each: the error of a tensor is not that of the
        network."""
        for name in names:
            self._try(f"ranges-{name}", replace(self.best.problem, method=name), time.perf_counter(), None)

    def _try(self, name: str, problem: Problem, began: float, scaled: Scaled | None) -> bool:
        before = self._error
        plan = transferred(self.best.plan, problem)
        lost = len(self.best.plan.quantized) - len(plan.quantized)
        error = self._judge.of(problem.model, plan) if not lost else math.inf
        kept = error < before
        text = f"output SQNR {decibels(before):.2f} -> {decibels(error):.2f} dB{'' if kept else ': not kept'}"
        if kept and not self._is_free(problem, plan):
            kept, text = False, f"{text}: not kept, the network is slower with it"
        if lost:
            text = f"not kept: {lost} of its nodes would be too heavy-tailed for 8-bit"
        changes = scaled.changes if scaled is not None else len(plan.quantized)
        refusals = scaled.refusals if scaled is not None else ()
        step = StepRecord(name, _STAGE, changes if kept else 0, time.perf_counter() - began, refusals, (text,))
        if kept:
            self.best, self._error = Improved(problem, plan, self.best.steps), error
        self.best = replace(self.best, steps=(*self.best.steps, step))
        return kept

    def _is_free(self, problem: Problem, plan: PrecisionPlan) -> bool:
        """Whether a form costs no more than the best so far; one with as many nodes does not."""
        best = self.best.problem
        if self._price is None or len(problem.model.graph) == len(best.model.graph):
            return True
        return self._price(problem, plan) <= self._price(best, self.best.plan) * _SLOWER


def transferred(plan: PrecisionPlan, problem: Problem) -> PrecisionPlan:
    """The same 8-bit nodes on another FP32 form of the model, with its ranges.

    Nodes keep their type, granularity and residuals; a multiplication per channel goes where one scale has become good
    enough.
    """
    dtypes = tuple(dict.fromkeys(op.dtype for op in plan.quantized))
    candidates = find_candidates(problem, dtypes)
    ops = [_like(op, candidates.ops.get(op.node, ())) for op in plan.quantized]
    return plan_for(problem, plan.requested, tuple(op for op in ops if op is not None), plan.refused)


def _like(op: QuantizedOp, forms: Sequence[QuantizedOp]) -> QuantizedOp | None:
    mine = [form for form in forms if form.dtype == op.dtype]
    same = [form for form in mine if (form.multiply, form.weight_axis) == (op.multiply, op.weight_axis)]
    return next((replace(form, skips=op.skips) for form in same or mine), None)


def _smooth(tried: _Trials, nodes: frozenset[str], observer: Observer, multiply: bool) -> None:
    """Migration with multiplications in front of quantizers, whose kernels take them in, where ``multiply``; where that
    is not kept, without them."""
    began = time.perf_counter()
    model = tried.best.problem.model.clone()
    infer_in_place(model)
    stats = channel_stats(model, fitted(observer.samples), product_inputs(model, nodes), observer.clock.listen)
    found = smooth(model, nodes, stats, multiply=multiply)
    multiplied = len(found.model.graph) > len(model.graph)
    if not tried.scaled("smooth", found, began) and multiplied:
        began = time.perf_counter()
        tried.scaled("smooth-folded", smooth(model, nodes, stats), began)


def _refined(improved: Improved, judge: OutputError, observer: Observer) -> Improved:
    base = improved.problem.model
    began = time.perf_counter()
    found = refine(
        base,
        improved.plan,
        observer.samples,
        lambda plan, samples: judge.of(base, plan, samples),
        on_event=observer.clock.listen,
    )
    step = _refinement(found, time.perf_counter() - began)
    return replace(improved, plan=found.plan, steps=(*improved.steps, step))


def _refinement(found: Refined, seconds: float) -> StepRecord:
    changes = len({*found.plan.rounded, *found.plan.bias})
    tried = [f"{trial.name}: output SQNR {decibels(trial.error):.2f} dB" for trial in found.trials]
    details = tuple(tried) + ((f"kept: {found.kept}",) if tried else (found.reason,))
    return StepRecord("round-weights", _STAGE, changes, seconds, details=details)
