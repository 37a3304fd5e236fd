"""Plans run on samples and made better.

16-bit nodes are put back to FP32 until the outputs are within the bound (see ``precision.fp16.repair``). Better numbers
for 8-bit nodes are kept only where the error at the outputs falls.
"""

from __future__ import annotations

import copy
import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import onnx_ir as ir

from trtopt.accuracy.compare import Accumulator, decibels, is_class_like, is_float
from trtopt.accuracy.emulation import fp32_emulation
from trtopt.accuracy.scores import least_size
from trtopt.events import Event, OnEvent, ignore
from trtopt.graph import edit
from trtopt.graph.shapes import infer_in_place
from trtopt.pipeline.calibrate import Observer
from trtopt.precision.decide import transferred
from trtopt.precision.fp16.repair import Damage, Repaired, repair, smallest_sqnr_db
from trtopt.precision.observe.calibrate import channel_stats, product_inputs
from trtopt.precision.observe.feeds import Sample
from trtopt.precision.observe.stream import entries, up_to
from trtopt.precision.plan import PrecisionPlan
from trtopt.precision.ptq.refine import refine, spread_samples
from trtopt.precision.ptq.scaling import Scaled, equalize, smooth
from trtopt.precision.qdq.existing import without_qdq
from trtopt.precision.regions import Problem
from trtopt.precision.write import apply_plan
from trtopt.report.schema.steps import StepRecord
from trtopt.support.nms_plugins import PLUGINS
from trtopt.support.ort_session import Feeds, OrtSession
from trtopt.support.precision import Precision

_SELECTIONS = frozenset(
    "ArgMax ArgMin TopK NonMaxSuppression NonZero Unique Multinomial Bernoulli RandomNormal RandomNormalLike "
    "RandomUniform RandomUniformLike".split()
).union(PLUGINS)
"""Operators whose result jumps: two scores that rounding makes equal change places, and what is behind them with it."""

_MOST_SAMPLES, _FIRST = 8, 2
"""Samples that the result of a repair is checked on, and those that its search runs, 20 to 60 times."""

_MARGIN_DB = 0.5
"""Decibels that the search keeps above the bound, for the samples that it does not see."""

_SHOWS = 0.1
"""Share of the elements of an output behind a selection that more exact ranks have to put right."""

_SMALLEST_CENTRED = 1e-8
"""Share of a tensor's power that may be left without the mean of its last axis: below, it says nothing."""


@dataclass(frozen=True)
class _Watched:
    """A value that is compared.

    ``centred`` scores are ranked: what is left without the mean of the last axis is compared. Of ``finite_only``
    values, which lie behind a selection, only NaN and infinity count. ``least``: of :func:`least_size`.
    """

    name: str
    centred: bool = False
    finite_only: bool = False
    least: float = 0.0


def repaired(
    base: ir.Model,
    plan: PrecisionPlan,
    samples: Iterable[Feeds],
    *,
    min_sqnr_db: float | None = None,
    on_event: OnEvent = ignore,
) -> Repaired:
    """``plan`` with nodes put back to FP32 until its 16-bit part is within the bound on a few samples.

    Where all is well this costs two sessions and at most eight samples. What the plan quantizes is left out, so that
    one call serves every choice of 8-bit nodes.

    Args:
        base: The widened model.
        plan: Its plan.
        samples: The first eight are used, or as many as give 256 MiB of outputs.
        min_sqnr_db: A higher bound for the outputs than the type's own, in dB.
        on_event: Told of each plan that is run.

    Raises:
        InvalidModelError: ONNX Runtime cannot run the model.
    """
    if plan.narrow is None or not _watched(base):
        return Repaired(plan, Damage(0.0), Damage(0.0))
    bound = max(smallest_sqnr_db(plan.narrow), min_sqnr_db if min_sqnr_db is not None else -math.inf)
    on_event(Event("start", "check precision"))
    runner = PlanRunner(base, samples, bound, on_event)
    found = _repaired(base, plan, runner)
    on_event(Event("end", "check precision"))
    return replace(found, few=runner.on_first(), all=runner.on_first(runner.count))


def _repaired(base: ir.Model, plan: PrecisionPlan, runner: PlanRunner) -> Repaired:
    """The search on the first samples, which costs a third; on all of them where these do not bear what it finds."""
    before = runner(plan)
    if before.is_allowed or not runner.can_gain(plan, before):
        return Repaired(plan, before, before)
    if runner.count > _FIRST:
        found = repair(base, plan, runner.on_first())
        if found.plan is plan and not found.before.is_allowed:
            return Repaired(plan, before, before)
        after = runner(found.plan)
        if after.is_allowed:
            others = tuple(other for other in found.others if runner(other).is_allowed)
            return replace(found, before=before, after=after, others=others)
    return repair(base, plan, runner)


class PlanRunner:
    """Runs plans of one widened model against its FP32 outputs.

    Every output has to keep ``bound`` dB of signal to noise; samples as in :func:`repaired`.
    """

    def __init__(self, base: ir.Model, samples: Iterable[Feeds], bound: float, on_event: OnEvent = ignore) -> None:
        # Behind the quantizers that it came with the error of the 16-bit types is drowned: a rounding that moves a
        # value over a border between two levels is an error of a whole level (ResNet-20 keeps 59 dB in FP16, and 32 dB
        # with Q/DQ at every convolution).
        quantized = any(node.op_type == "QuantizeLinear" for node in base.graph)
        self._base, self._bound, self._on_event = without_qdq(base) if quantized else base, bound, on_event
        self._watched = _watched(base)
        self._names = [item.name for item in self._watched]
        with OrtSession(self._base, self._names, brief=True) as session:
            runs = ((feeds, session.run(feeds)) for feeds in up_to(samples, _MOST_SAMPLES))
            self._expected = list(_bounded(runs, lambda run: run[1]))

    @property
    def count(self) -> int:
        """How many samples it runs."""
        return len(self._expected)

    def on_first(self, count: int = _FIRST) -> PlanRunner:
        """The same on the first samples only, with a bound that the others should bear too."""
        found = copy.copy(self)
        found._expected, found._bound = self._expected[:count], self._bound + _MARGIN_DB
        return found

    def __call__(self, plan: PrecisionPlan) -> Damage:
        """What ``plan`` does to the outputs."""
        sums = [Accumulator(least=item.least) for item in self._watched]
        emulated = fp32_emulation(apply_plan(self._base, plan))
        with OrtSession(emulated, self._names, keep_qdq=True, brief=True) as session:
            for feeds, expected in self._expected:
                for item, total, reference, output in zip(
                    self._watched, sums, expected, session.run(feeds), strict=True
                ):
                    _add(item, total, reference, output)
                if any(total.nonfinite for total in sums):
                    break
        self._on_event(Event("advance", "check precision"))
        found = [self._damage(item, total) for item, total in zip(self._watched, sums, strict=True)]
        return max(found, key=lambda damage: damage.excess, default=Damage(0.0))

    def can_gain(self, plan: PrecisionPlan, damage: Damage) -> bool:
        """Whether a repair can show: where only what a selection ranks is damaged, more of what lies behind it has to
        be right with ranks as exact as the bound asks; equal ranks change places with any rounding."""
        ranked = [item.name for item in self._watched if item.centred]
        behind = [item.name for item in self._watched if item.finite_only]
        if damage.output not in ranked or math.isinf(damage.excess) or not behind:
            return True
        rng = np.random.default_rng(0)
        now, bounded = fp32_emulation(apply_plan(self._base, plan)), _from_values(self._base, ranked)
        right = np.zeros((2, len(behind)))
        with OrtSession(now, behind, keep_qdq=True) as first, OrtSession(bounded, behind) as second:
            for feeds, expected in self._expected:
                exact = dict(zip(self._names, expected, strict=True))
                ranks = {_given(name): _noisy(exact[name], self._bound, rng) for name in ranked}
                runs = first.run(feeds), second.run({**feeds, **ranks})
                right += [
                    [_right(exact[name], output) for name, output in zip(behind, run, strict=True)] for run in runs
                ]
        return bool((right[1] - right[0] > _SHOWS * len(self._expected)).any())

    def _damage(self, item: _Watched, total: Accumulator) -> Damage:
        if total.nonfinite:
            return Damage(math.inf, item.name, math.nan)
        if item.finite_only or total.size == 0.0 or total.noise == 0.0:
            return Damage(0.0, item.name)
        sqnr = 10 * math.log10(total.size / total.noise)
        return Damage(10 ** ((self._bound - sqnr) / 10), item.name, sqnr)


def _right(exact: np.ndarray, output: np.ndarray) -> float:
    """Share of the elements that are off by less than a tenth of the tensor's size."""
    if exact.shape != output.shape or not exact.size:
        return 0.0
    first, second = exact.astype(np.float64), output.astype(np.float64)
    size = math.sqrt(float(np.square(first).mean()))
    return float((np.abs(first - second) <= size / 10).mean())


def _given(name: str) -> str:
    """The input that stands for a value."""
    return f"{name}/given"


def _from_values(base: ir.Model, names: Sequence[str]) -> ir.Model:
    """A clone that reads some of its values from inputs."""
    clone = base.clone()
    values = {value.name: value for node in clone.graph for value in node.outputs}
    for name in names:
        given = ir.Value(name=_given(name), type=values[name].type, shape=values[name].shape)
        values[name].replace_all_uses_with(given)
        clone.graph.inputs.append(given)
    return clone


def _noisy(exact: np.ndarray, bound_db: float, rng: np.random.Generator) -> np.ndarray:
    """Ranks with noise of ``bound_db`` below what tells them apart; those that are not finite stay."""
    finite = exact[np.isfinite(exact)].astype(np.float64)
    spread = float(finite.std()) if finite.size else 0.0
    noise = rng.standard_normal(exact.shape) * spread * 10 ** (-bound_db / 20)
    return np.asarray(exact + noise, exact.dtype)


def _add(item: _Watched, total: Accumulator, reference: np.ndarray, output: np.ndarray) -> None:
    if item.finite_only:
        if is_float(output):
            total.nonfinite += int(np.isnan(output).any() and not np.isnan(reference).any())
        return
    if item.centred and reference.ndim and reference.shape == output.shape:
        exact = reference.astype(np.float64)
        mean = np.where(np.isfinite(exact), exact, 0.0).mean(axis=-1, keepdims=True)
        left = np.nan_to_num(exact - mean, posinf=0.0, neginf=0.0)
        if float(np.square(left).sum()) > _SMALLEST_CENTRED * float(np.square(mean).sum()) * reference.shape[-1]:
            reference, output = exact - mean, output - mean
    total.update(reference, output)


def _watched(base: ir.Model) -> list[_Watched]:
    """What stands for the network's outputs.

    An output behind a selection (the first hundred boxes by score) jumps with the least rounding, however good the
    scores are; the scores are compared instead.
    """
    behind: set[ir.Value] = set()
    ranked: dict[str, _Watched] = {}
    for node in base.graph:
        inputs = [value for value in node.inputs if value is not None]
        if any(value in behind for value in edit.values_read(node)):
            behind.update(node.outputs)
        elif node.op_type in _SELECTIONS:
            behind.update(node.outputs)
            for value in inputs:
                if value.dtype is ir.DataType.FLOAT and value.producer() is not None:
                    ranked[str(value.name)] = _Watched(str(value.name), centred=True)
    outputs = [
        _Watched(str(value.name), finite_only=value in behind, least=least_size(value))
        for value in base.graph.outputs
        if value.producer() is not None
    ]
    named = {item.name for item in outputs if not item.finite_only}
    return [*outputs, *(item for name, item in ranked.items() if name not in named)]


JUDGED_SAMPLES = 16
"""Samples that errors are compared on: the noise of quantization is a sum over all elements, and steady."""

_SCREENED = 8
"""Samples that a change has to be better on before it is measured on more: both are run on the same ones."""

_HELD_OUT = 4
_MOST_BYTES = 1 << 28
"""Of samples that are held, and of reference outputs."""

_T = TypeVar("_T")


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
        self._own = list(_bounded(up_to(samples, JUDGED_SAMPLES), lambda feeds: feeds.values()))
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
                self._known[id(samples)] = list(_bounded((session.run(feeds) for feeds in samples), iter))
        return self._known[id(samples)]


def _bounded(items: Iterable[_T], arrays: Callable[[_T], Iterable[np.ndarray]]) -> Iterator[_T]:
    held = 0
    for item in items:
        yield item
        held += sum(array.nbytes for array in arrays(item))
        if held > _MOST_BYTES:
            return


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
                tried.method(_METHOD)
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

    def method(self, name: str) -> None:
        """One calibration method for all tensors instead of the best of each: the error of a tensor is not that of the
        network."""
        began = time.perf_counter()
        tried = self._trial(replace(self.best.problem, method=name), self._screened)
        self._decide(f"ranges-{name}", tried, self._screened, began)

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
