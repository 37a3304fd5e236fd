"""Better numbers for 8-bit nodes, which are kept only where the error at the outputs falls."""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from trtopt.accuracy.compare import Accumulator, decibels, is_class_like
from trtopt.accuracy.emulation import fp32_emulation
from trtopt.accuracy.scores import least_size
from trtopt.graph.shapes import infer_in_place
from trtopt.pipeline.calibrate import Observer
from trtopt.precision.decide import transferred
from trtopt.precision.observe.calibrate import channel_stats, product_inputs
from trtopt.precision.observe.feeds import Sample
from trtopt.precision.observe.stream import bounded, entries, up_to
from trtopt.precision.plan import PrecisionPlan
from trtopt.precision.ptq.refine import refine, spread_samples
from trtopt.precision.ptq.scaling import Scaled, equalize, smooth
from trtopt.precision.regions import Problem
from trtopt.precision.write import apply_plan
from trtopt.report.schema.steps import StepRecord
from trtopt.support.ort_session import Feeds, OrtSession
from trtopt.support.precision import Precision

JUDGED_SAMPLES = 16
"""Samples that errors are compared on: the noise of quantization is a sum over all elements, and steady."""

_SCREENED = 8
"""Samples that a change has to be better on before it is measured on more: both are run on the same ones."""

_HELD_OUT = 4


def fitted(samples: Iterable[Sample]) -> Iterator[Sample]:
    """All samples but every fourth."""
    return (feeds for index, feeds in enumerate(samples) if index % _HELD_OUT)


def held_out(samples: Iterable[Sample]) -> Iterator[Sample]:
    """Every fourth sample: those that :func:`fitted` leaves out."""
    return (feeds for index, feeds in enumerate(samples) if index % _HELD_OUT == 0)


def judged(samples: Iterable[Sample]) -> list[Sample]:
    """Those of :func:`held_out` that errors are compared on: spread over all of them, the first half too."""
    stream = iter(held_out(samples))
    first = next(stream)
    found = spread_samples(itertools.chain([first], stream), -(-JUDGED_SAMPLES // entries(first)))
    return [*found[::2], *found[1::2]]


class OutputErrorMeter:
    """Compares plans with the FP32 outputs of one widened model.

    The first :data:`JUDGED_SAMPLES` of ``samples`` are used where a caller brings none.
    """

    def __init__(self, reference: ir.Model, samples: Iterable[Feeds]) -> None:
        self._reference = reference
        self._own = list(bounded(up_to(samples, JUDGED_SAMPLES), lambda feeds: feeds.values()))
        self._known: dict[int, list[list[np.ndarray]]] = {}

    @property
    def count(self) -> int:
        """How many entries its own samples hold."""
        return sum(entries(feeds) for feeds in self._own)

    def of(self, base: ir.Model, plan: PrecisionPlan) -> float:
        """Noise power over signal power of the worst output; infinite where an output is not finite.

        Args:
            base: The FP32 form of the model that ``plan`` is for.
            plan: The plan.

        Raises:
            InvalidModelError: ONNX Runtime cannot run the model.
        """
        return self.of_model(fp32_emulation(apply_plan(base, plan)))

    def screened(self, base: ir.Model, plan: PrecisionPlan, most: float) -> tuple[float, float]:
        """:meth:`of` on the meter's first samples, and on all of them; the latter infinite, and not measured, where the
        former is ``most`` or more."""
        first, few = math.inf, sum(1 for _ in up_to(self._own, _SCREENED))
        for count, error in enumerate(self._errors(fp32_emulation(apply_plan(base, plan)), self._own), 1):
            if count == few:
                first = error()
                if not first < most:
                    return first, math.inf
        return first, error()

    def of_model(self, model: ir.Model, samples: Sequence[Feeds] | None = None) -> float:
        """The same for an FP32 model with the inputs and outputs of the reference.

        Other ``samples`` than the meter's own are the same object each time, for the reference to be run once.
        """
        last = deque(self._errors(model, self._own if samples is None else samples), maxlen=1)
        return last[0]() if last else 0.0

    def _errors(self, model: ir.Model, samples: Sequence[Feeds]) -> Iterator[Callable[[], float]]:
        """After each sample, what gives the error so far."""
        sums = [Accumulator(least=least_size(output)) for output in self._reference.graph.outputs]
        expected = self._expected(samples)
        with OrtSession(model, keep_qdq=True) as session:
            for feeds, reference in zip(samples, expected, strict=False):
                for total, exact, output in zip(sums, reference, session.run(feeds), strict=True):
                    total.update(*_centred(exact, output))
                yield lambda: max((_noise(total) for total in sums), default=0.0)

    def _expected(self, samples: Sequence[Feeds]) -> list[list[np.ndarray]]:
        """The reference's outputs, as many as memory allows."""
        if id(samples) not in self._known:
            with OrtSession(self._reference) as session:
                self._known[id(samples)] = list(bounded((session.run(feeds) for feeds in samples), iter))
        return self._known[id(samples)]


def _centred(reference: np.ndarray, output: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scores of classes without the mean over the classes, which neither their order nor a softmax sees."""
    if not is_class_like(reference) or reference.shape != output.shape:
        return reference, output
    classes = max(axis for axis, size in enumerate(reference.shape) if axis and size != 1)
    return _without_mean(reference, classes), _without_mean(output, classes)


def _without_mean(array: np.ndarray, axis: int) -> np.ndarray:
    exact = array.astype(np.float64)
    left: np.ndarray = exact - np.where(np.isfinite(exact), exact, 0.0).mean(axis=axis, keepdims=True)
    return left


def _noise(total: Accumulator) -> float:
    if total.nonfinite or total.differs:
        return math.inf
    return total.noise / total.size if total.size else 0.0


SMALLEST_SAMPLES = 16
"""With fewer samples, what fits them need not fit others: channels that hardly show in them get scales of their own."""

_STAGE = "PRECISION"
ENOUGH = "better-numbers"
"""The step that says why nothing was tried."""
_METHOD = "percentile"
"""Calibration method tried for all tensors alike."""
_PROMISING = 0.95
"""Share of the least error that a form may have with ranges of a few samples, for those of all to be observed: 0.2 dB,
about what ranges of more samples change."""
_SLOWER = 1.001
"""A network this much slower is slower; below it are roundings of the prediction."""
_IS_SLOWER = "not kept, the network is slower with it"

Price = Callable[[Problem, PrecisionPlan], float]
"""What a form of the model costs with a plan, in microseconds."""


@dataclass(frozen=True)
class Improved:
    """An improved plan, the FP32 form of the model that it is for, what was tried, and what measured its errors."""

    problem: Problem
    plan: PrecisionPlan
    steps: tuple[StepRecord, ...] = ()
    judge: OutputErrorMeter | None = None


Holds = Callable[[ir.Model], bool]
"""Whether an optimized graph holds what is asked of it, and more than that."""


def improve(
    problem: Problem,
    plan: PrecisionPlan,
    observer: Observer,
    price: Price | None = None,
    holds: Holds | None = None,
) -> Improved:
    """Equalize channels, then round weights and correct biases, for the 8-bit nodes of ``plan``, which stay.

    Nothing is tried on synthetic samples, which say nothing about errors, nor where the plan is good enough by
    ``holds``. Scalings, roundings and biases are fitted to
    other samples than those that judge them; ranges come from all. A form that costs more by ``price``
    is not kept; None keeps it whatever it costs.

    Raises:
        InvalidModelError: ONNX Runtime cannot run the model.
    """
    nodes = frozenset(op.node for op in plan.quantized if op.dtype == Precision.INT8 and op.other is None)
    if not nodes or observer.samples.source == "synthetic":
        return Improved(problem, plan)
    sizes = [entries(sample) for sample in observer.samples]
    if sum(sizes) < SMALLEST_SAMPLES or len(sizes) < _HELD_OUT:
        text = f"{sum(sizes)} samples are too few to improve 8-bit numbers by: {SMALLEST_SAMPLES} or more are needed"
        if sum(sizes) >= SMALLEST_SAMPLES:
            text = f"{len(sizes)} batches are too few to improve 8-bit numbers by: {_HELD_OUT} or more are needed"
        observer.clock.warn("improve", text)
        return Improved(problem, plan)
    with observer.clock.stage("improve"):
        began = time.perf_counter()
        if holds is not None and holds(apply_plan(problem.model, plan)):
            text = "nothing is tried: half of the drop allowed is left, and ten times the noise would hold"
            step = StepRecord(ENOUGH, _STAGE, 0, time.perf_counter() - began, details=(text,))
            return Improved(problem, plan, (step,))
        judge = OutputErrorMeter(problem.model, judged(observer.samples))
        tried = _Trials(judge, observer, Improved(problem, plan, judge=judge), price)
        if not problem.imported:  # given ranges are those of the tensors as they are
            began = time.perf_counter()
            tried.scaled("equalize", equalize(problem.model, nodes), began)
            _smooth(tried, nodes, observer, problem.fuses_quantizers)
            if problem.method == "auto":
                tried.method()
        return _refined(tried, judge, observer)


@dataclass(frozen=True)
class _Trial:
    """A form of the model, the plan for it, how many 8-bit nodes it cannot have, its error on few samples and on all;
    the latter infinite where the former settles it."""

    problem: Problem
    plan: PrecisionPlan
    lost: int
    screened: float
    error: float


class _Trials:
    """Changes tried one upon the other; each is kept if the error at the outputs falls."""

    def __init__(self, judge: OutputErrorMeter, observer: Observer, start: Improved, price: Price | None) -> None:
        self._judge, self._observer, self.best, self._price = judge, observer, start, price
        self._screened, self.error = judge.screened(start.problem.model, start.plan, math.inf)
        self._of_few = self._screened

    def scaled(self, name: str, found: Scaled, began: float) -> None:
        """Another FP32 form of the model, with the ranges that it has.

        What it costs is asked first. The ranges of a few samples tell whether it may be better than the best so far is
        with those of as many; those it gets are of all, since a few do not hold the largest values.
        """
        if not found.changes:
            return
        rough = replace(self.best.problem, model=found.model)
        plan = transferred(self.best.plan, rough)
        if len(plan.quantized) == len(self.best.plan.quantized) and not self._is_free(rough, plan):
            step = StepRecord(name, _STAGE, 0, time.perf_counter() - began, found.refusals, (_IS_SLOWER,))
            self.best = replace(self.best, steps=(*self.best.steps, step))
            return
        least = min(self._screened, self._of_few)
        of_few = self._ranged(found, self._observer.few(SMALLEST_SAMPLES), -math.inf)
        if of_few is None or not of_few.screened < least * _PROMISING:
            tried, least = of_few, least * _PROMISING
        else:
            tried, least = self._ranged(found, self._observer, self._screened), self._screened
        if tried is not None and self._decide(name, tried, least, began, found) and of_few is not None:
            self._of_few = of_few.screened

    def _ranged(self, found: Scaled, observer: Observer, most: float) -> _Trial | None:
        """A form with the ranges of the observer's samples; None where nothing is to be observed."""
        calibration = observer.observe(found.model, is_variant=True)
        if calibration is None:
            return None
        return self._trial(replace(self.best.problem, model=found.model, stats=calibration.table.stats), most)

    def method(self) -> None:
        """One calibration method for all tensors instead of the best of each: the error of a tensor is not that of the
        network."""
        began = time.perf_counter()
        tried = self._trial(replace(self.best.problem, method=_METHOD), self._screened)
        self._decide(f"ranges-{_METHOD}", tried, self._screened, began)

    def _trial(self, problem: Problem, most: float) -> _Trial:
        """A form, measured on more than a few samples where its error on these is below ``most``."""
        plan = transferred(self.best.plan, problem)
        lost = len(self.best.plan.quantized) - len(plan.quantized)
        errors = (math.inf, math.inf) if lost else self._judge.screened(problem.model, plan, most)
        return _Trial(problem, plan, lost, *errors)

    def _decide(self, name: str, tried: _Trial, least: float, began: float, scaled: Scaled | None = None) -> bool:
        """Keep what lowers the error, that on few samples below ``least``, and costs nothing; whether it was kept."""
        before, error, count = self.error, tried.error, self._judge.count
        promises = tried.screened < least
        if not promises:
            before, error, count = self._screened, tried.screened, min(_SCREENED, count)
        kept = promises and error < before
        change = f"{decibels(before):.2f} -> {decibels(error):.2f} dB"
        text = f"output SQNR {change} on {count} samples{'' if kept else ': not kept'}"
        if error < before and not promises:
            text += ", too little to observe all samples for"
        if kept and not self._is_free(tried.problem, tried.plan):
            kept, text = False, f"{text}: {_IS_SLOWER}"
        if tried.lost:
            text = f"not kept: {tried.lost} of its nodes would be too heavy-tailed for 8-bit"
        changes = scaled.changes if scaled is not None else len(tried.plan.quantized)
        refusals = scaled.refusals if scaled is not None else ()
        step = StepRecord(name, _STAGE, changes if kept else 0, time.perf_counter() - began, refusals, (text,))
        if kept:
            self.best = replace(self.best, problem=tried.problem, plan=tried.plan)
            self.error, self._screened = tried.error, tried.screened
        self.best = replace(self.best, steps=(*self.best.steps, step))
        return kept

    def _is_free(self, problem: Problem, plan: PrecisionPlan) -> bool:
        """Whether a form costs no more than the best so far."""
        if self._price is None:
            return True
        return self._price(problem, plan) <= self._price(self.best.problem, self.best.plan) * _SLOWER


def _smooth(tried: _Trials, nodes: frozenset[str], observer: Observer, multiply: bool) -> None:
    """Migration, with multiplications in front of quantizers, whose kernels take them in, where ``multiply``."""
    began = time.perf_counter()
    model = tried.best.problem.model.clone()
    infer_in_place(model)
    some = observer.few(JUDGED_SAMPLES)
    stats = channel_stats(model, fitted(some.samples), product_inputs(model, nodes), observer.clock.listen)
    tried.scaled("smooth", smooth(model, nodes, stats, multiply=multiply), began)


def _refined(tried: _Trials, judge: OutputErrorMeter, observer: Observer) -> Improved:
    improved, base, began = tried.best, tried.best.problem.model, time.perf_counter()
    found = refine(
        base,
        improved.plan,
        fitted(observer.samples),
        lambda plan: judge.of(base, plan),
        error=tried.error,
        on_event=observer.clock.listen,
    )
    seconds = time.perf_counter() - began
    changes = len({*found.plan.rounded, *found.plan.bias})
    texts = [f"{trial.name}: output SQNR {decibels(trial.error):.2f} dB" for trial in found.trials]
    details = tuple(texts) + ((f"kept: {found.kept}",) if texts else (found.reason,))
    step = StepRecord("round-weights", _STAGE, changes, seconds, details=details)
    return replace(improved, plan=found.plan, steps=(*improved.steps, step))
