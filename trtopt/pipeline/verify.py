"""The optimized graph, and its engine, compared with FP32; and the accuracy of graphs as searches ask for it."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Literal

import numpy as np
import onnx_ir as ir

from trtopt.accuracy.batches import BatchRunner, RowsRunner
from trtopt.accuracy.compare import (
    ConvertingRunner,
    HostPart,
    Runner,
    SelectedOutputs,
    as_whole,
    compare,
    compare_tensors,
    first_bad,
    is_class_like,
    is_float,
    sums_of,
)
from trtopt.accuracy.emulation import fp32_emulation
from trtopt.accuracy.metric import Metric, drop_of
from trtopt.accuracy.recorded import Recorded, RecordedRunner
from trtopt.accuracy.reference import Reference
from trtopt.accuracy.scores import held_by
from trtopt.config import AccuracyBudget, BuildConfig, Floor, Tolerances
from trtopt.engine.backend import Backend, RuntimeOptions
from trtopt.engine.profiles import Profiles
from trtopt.engine.run import EngineSession, can_run
from trtopt.errors import TargetError, UsageError
from trtopt.events import Event, ignore
from trtopt.graph.artifact import input_spec
from trtopt.graph.skeleton import content_hash
from trtopt.graph.states import find_states
from trtopt.precision.fp16.repair import smallest_sqnr_db
from trtopt.precision.fp16.to_fp32 import to_fp32
from trtopt.precision.observe.batches import BatchedSamples, FixedAxes, fixed_axes
from trtopt.precision.observe.stream import FEW_ROWS, Samples, SomeSamples
from trtopt.precision.plan import FP16
from trtopt.precision.search.space import Budget, Evaluation, aim_for
from trtopt.report.schema.build import AccuracyRecord, FloorRecord, MetricRecord, OutputAccuracy
from trtopt.rewrite.host_part import sizes_vary
from trtopt.support._script import script_hash
from trtopt.support.clock import Clock
from trtopt.support.ort_session import Feeds, OrtSession
from trtopt.support.precision import Precision

SYNTHETIC_SECONDS = 20.0
"""What the samples of a verification may take where nobody gave them: random data says little of accuracy."""

FEW_SAMPLES = 32
"""With fewer, a single sample moves the agreement by more than the floor leaves."""


CLEAR_DB = 10.0
"""How far above its bound an output is without a doubt: a tenth of the noise allowed."""


@dataclass(frozen=True)
class Verification:
    """What verification compares with what, and how.

    Attributes:
        reference: The model as loaded; its FP32 form is the reference.
        optimized: The optimized graph; its FP32 emulation is run.
        samples: The samples.
        source: Where they come from: ``eval``, ``calibration`` or ``synthetic``.
        metric: The user's metric, if any.
        tensors: Whether intermediate tensors are compared too.
        host: What of the model the host runs behind ``optimized``, if any.
        axes: The axes that have one size in ``optimized`` only, if any.
        feeds: Turns a sample into what the engine takes, where that differs from the model as loaded.
        floor: What the outputs have to keep; None where nothing is asked of them.
        most_seconds: How long synthetic samples may be run; those that are left then are left out.
        bound_db: What every output has to keep where a few rows may be enough; None runs every sample.
        tolerances: How far single values may be off; None where nobody said.
        recorded: Outputs that take the place of the reference's own, if any.
        fp32: The FP32 outputs of ``reference``; forms of one verification (:func:`dataclasses.replace`) share them.
        noise: How many times the optimized graph's errors are compared; 1 as they are.
        settles: Told the outputs so far and the share of the samples that they are of; whether they are enough.
    """

    reference: ir.Model
    optimized: ir.Model
    samples: Samples
    source: str
    metric: Metric | None
    tensors: bool
    host: HostPart | None = None
    axes: FixedAxes | None = None
    feeds: Callable[[Feeds], Feeds] | None = None
    floor: Floor | None = None
    most_seconds: float = SYNTHETIC_SECONDS
    bound_db: float | None = None
    tolerances: Tolerances | None = None
    recorded: Recorded | None = None
    fp32: Reference = field(default=None, repr=False)  # type: ignore[assignment]
    noise: float = 1.0
    settles: Callable[[Mapping[str, OutputAccuracy], float], bool] | None = None

    def __post_init__(self) -> None:
        if self.fp32 is None:
            object.__setattr__(self, "fp32", Reference(self.reference, self.watched))

    @property
    def watched(self) -> tuple[str, ...] | None:
        """The values of the reference that are compared; None for its outputs."""
        return None if self.host is None else self.host.watched

    def is_clear(self, outputs: Mapping[str, OutputAccuracy]) -> bool:
        """Whether every output is far above ``bound_db``, with the same answers throughout."""
        if self.bound_db is None:
            return False
        clear = self.bound_db + CLEAR_DB
        return all(item.sqnr_db >= clear and item.top1_agreement in (None, 1.0) for item in outputs.values())

    def batched(self, runner: Runner) -> Runner:
        """A runner that takes any number of rows."""
        return runner if self.axes is None else BatchRunner(runner, self.axes)


@contextmanager
def reference_of(job: Verification) -> Iterator[Runner]:
    """What outputs are compared with: the model in FP32, or what was recorded."""
    with job.fp32 as known:
        runner = job.batched(known)
        yield runner if job.recorded is None else RecordedRunner(runner, job.recorded)


@contextmanager
def emulation_of(job: Verification) -> Iterator[Runner]:
    """The optimized graph as an engine rounds it."""
    with (
        OrtSession(fp32_emulation(job.optimized), keep_qdq=True) as session,
        as_whole(session, job.host) as whole,
    ):
        yield job.batched(whole)


@contextmanager
def engine_of(job: Verification, engine: bytes, backend: Backend, options: RuntimeOptions) -> Iterator[Runner]:
    """An engine of the optimized graph."""
    with (
        EngineSession(engine, backend, options) as session,
        as_whole(session if job.feeds is None else ConvertingRunner(session, job.feeds), job.host) as whole,
    ):
        yield _in_profiles(job.batched(whole), job.reference, session.profiles)


def _in_profiles(runner: Runner, model: ir.Model, profiles: Profiles) -> Runner:
    """An engine that takes any number of rows, where its profiles take a range of them: samples are single rows.

    As it is where the values of a shape tensor may go with the rows, or inputs count different rows.
    """
    inputs = [input_spec(value) for value in model.graph.inputs]
    known = [spec for spec in inputs if spec.name in profiles]
    ranges = {spec.name: profiles[spec.name] for spec in known if isinstance(next(iter(spec.shape), None), str)}
    rows = {spec.shape[0] for spec in known if spec.name in ranges}
    if any(spec.is_static for spec in known) or len(rows) != 1 or (len(ranges) > 1 and "?" in rows):
        return runner
    low = max(min(each.min[0] for each in found) for found in ranges.values())
    high = min(max(each.max[0] for each in found) for found in ranges.values())
    return RowsRunner(runner, lambda rows: fixed_axes(model, inputs, {name: {0: rows} for name in ranges}), low, high)


def with_baseline(metric: Metric, loaded: ir.Model, samples: Samples, clock: Clock) -> Metric:
    """The metric with what the model as loaded has in FP32: a wrong metric ends the run before the work.

    Raises:
        UsageError: The metric fails, or does not fit the model or the samples.
    """
    with clock.stage("measure FP32"), OrtSession(to_fp32(loaded)) as reference:
        return metric.on_reference(reference, samples, samples.labels)


def verify(job: Verification, clock: Clock) -> AccuracyRecord:
    """Compare the optimized graph's FP32 emulation with the reference on every sample."""
    samples, total = _Counted(job), job.samples.count
    computed = () if job.host is None else job.host.own_outputs
    with clock.stage("verify"), reference_of(job) as first, emulation_of(job) as second:
        clock.listen(Event("start", "verify", total=total))
        compared = second if job.noise == 1 else _Amplified(first, second, job.noise)
        outputs = _compared(job, (first, compared), samples, "verify", clock)
        metric = None if job.metric is None else metric_of(job.metric, job, second, outputs)
        clock.listen(Event("end", "verify"))
    tensors, entry = None, None
    if job.tensors:
        with clock.stage("compare tensors"):
            whole = job.samples if job.axes is None else BatchedSamples(job.samples, job.axes, filled=True)
            chosen = itertools.islice(whole, samples.count)
            reference, emulation = to_fp32(job.reference), fp32_emulation(job.optimized)
            tensors = compare_tensors(reference, emulation, chosen, on_event=clock.listen)
            entry = first_bad(emulation, tensors)
    return AccuracyRecord(
        samples.rows,
        job.source,
        "onnx-only",
        outputs,
        metric=metric,
        tensors=tensors,
        first_bad=entry,
        host_outputs=computed,
        floor=_floor_record(job, outputs),
        notes=_notes(job, samples, outputs),
        selections=tuple(name for name, holds in held_by(job.reference, outputs).items() if holds == "selection"),
    )


def _compared(
    job: Verification, runners: tuple[Runner, Runner], samples: _Counted, task: str, clock: Clock
) -> dict[str, OutputAccuracy]:
    return compare(
        *runners,
        samples,
        advance=lambda: clock.listen(Event("advance", task)),
        varying=sizes_vary(job.reference),
        enough=samples.are_enough,
        sums=sums_of(job.tolerances, {str(state.output.name) for state in find_states(job.reference)}),
    )


class _Amplified:
    """A runner whose float outputs are off by ``factor`` times as much as those of another."""

    def __init__(self, reference: Runner, runner: Runner, factor: float) -> None:
        self.output_names = runner.output_names
        self._reference, self._runner, self._factor = reference, runner, factor

    def run(self, feeds: Feeds) -> list[np.ndarray]:
        exact = dict(zip(self._reference.output_names, self._reference.run(feeds), strict=True))
        outputs = zip(self.output_names, self._runner.run(feeds), strict=True)
        return [self._amplified(exact.get(name), output) for name, output in outputs]

    def _amplified(self, exact: np.ndarray | None, output: np.ndarray) -> np.ndarray:
        if exact is None or not is_float(output) or exact.shape != output.shape:
            return output
        with np.errstate(over="ignore", invalid="ignore"):
            return np.asarray(exact + self._factor * (output - exact), output.dtype)


class _Counted:
    """The samples of a verification, counted as they are read, and their rows; synthetic ones end when their time is
    over, those of 16 bits where few leave no doubt."""

    def __init__(self, job: Verification) -> None:
        self._samples, self._is_clear, self._settles = job.samples, job.is_clear, job.settles
        self._seconds = job.most_seconds if job.samples.source == "synthetic" else math.inf
        self.count = self.rows = 0

    def __iter__(self) -> Iterator[Feeds]:
        began, self.count, self.rows = time.perf_counter(), 0, 0
        for feeds, rows in self._samples.with_rows():
            spent = time.perf_counter() - began
            if self.count and spent * (self.count + 1) / self.count > self._seconds:
                return
            self.count += 1
            self.rows += rows
            yield feeds

    def are_enough(self, outputs: Mapping[str, OutputAccuracy]) -> bool:
        """Whether those read so far show that every output is far above its bound, with the same answers throughout,
        or settle what is asked."""
        if self.rows < FEW_ROWS:
            return False
        if self._settles is not None and self._samples.count:
            return self._settles(outputs, self.count / self._samples.count)
        return self._is_clear(outputs)


def _floor_record(job: Verification, outputs: Mapping[str, OutputAccuracy]) -> FloorRecord | None:
    """The floor, and by which of its bounds each output is judged."""
    if job.floor is None:
        return None
    judged: dict[str, Literal["agreement", "sqnr", "none"]] = {}
    for name, holds in held_by(job.reference, outputs).items():
        has_top1 = outputs[name].top1_agreement is not None
        judged[name] = "none" if holds == "selection" else "agreement" if holds == "scores" and has_top1 else "sqnr"
    return FloorRecord(job.floor.agreement, job.floor.sqnr_db, judged)


def _notes(job: Verification, ran: _Counted, outputs: Mapping[str, OutputAccuracy]) -> tuple[str, ...]:
    """What the number of samples leaves open, and what nobody checked."""
    notes, unit = [], "batches" if job.axes is not None and (job.axes.rows or 1) > 1 else "samples"
    if job.recorded is not None:
        notes.append(f"compared with the outputs of {job.recorded.runner} ({job.recorded.where}), not with FP32 here")
    if job.bound_db is not None and ran.count < (job.samples.count or ran.count):
        clear = job.bound_db + CLEAR_DB
        notes.append(f"{ran.count} of {job.samples.count} {unit} were run: every output keeps {clear:g} dB on them")
    elif job.samples.source == "synthetic":
        notes.append("random data: nothing was checked on real data; give samples with --calib or --eval")
        total = job.samples.count or ran.count
        if ran.count < total:
            notes.append(f"{ran.count} of {total} synthetic {unit} were run: they may take {job.most_seconds:g} s")
    elif ran.rows < FEW_SAMPLES and any(found.top1_agreement is not None for found in outputs.values()):
        notes.append(f"{ran.rows} sample{'s' if ran.rows > 1 else ''}: one that disagrees is {100 / ran.rows:.0f} %")
    for name, found in outputs.items():
        if found.ties:
            notes.append(
                f"{name}: {found.ties} tokens whose two best scores differ by less than 1 % of their range do "
                "not count in its agreement"
            )
    return tuple(notes)


def metric_of(
    metric: Metric, job: Verification, optimized: Runner, outputs: Mapping[str, OutputAccuracy]
) -> MetricRecord:
    """The metric of ``optimized``, which is compared with the reference in ``outputs``."""
    whole = tuple(outputs) if job.host is None else job.host.outputs
    computed = () if job.host is None else job.host.own_outputs
    judged = {name: found for name, found in outputs.items() if name not in computed}
    return metric.measure(SelectedOutputs(optimized, whole), job.samples, job.samples.labels, judged)


def verify_engine(
    record: AccuracyRecord, job: Verification, engine: bytes, backend: Backend, options: RuntimeOptions, clock: Clock
) -> AccuracyRecord:
    """Add the engine's own outputs, and the metric on them, where it can run; else return ``record`` as it is.

    So too, with a warning, where there is no memory for it beside the build, or it does not take a sample: it is made.

    Raises:
        EngineBuildError: The engine fails to run.
    """
    if not can_run(backend, engine):
        return record
    watched = None
    clock.listen(Event("start", "verify engine", total=job.samples.count))
    try:
        with (
            clock.stage("verify engine"),
            reference_of(job) as first,
            engine_of(job, engine, backend, options) as runner,
        ):
            watched = _Watched(runner)
            outputs = _compared(job, (first, watched), _Counted(job), "verify engine", clock)
            metric = None if job.metric is None else _measured_on_engine(job.metric, job, runner, outputs, clock)
    except (TargetError, UsageError) as error:
        if isinstance(error, UsageError) and (watched is None or error is not watched.refused):
            raise
        clock.warn("verify engine", f"the engine itself is not verified: {error.what} ({error.where})")
        return record
    finally:
        clock.listen(Event("end", "verify engine"))
    return replace(record, verified="engine", engine=outputs, engine_metric=metric)


class _Watched:
    """An engine that keeps its refusal of what it was fed, which a metric may wrap in an error of its own."""

    def __init__(self, engine: Runner) -> None:
        self.output_names, self._engine = engine.output_names, engine
        self.refused: UsageError | None = None

    def run(self, feeds: Feeds) -> list[np.ndarray]:
        try:
            return self._engine.run(feeds)
        except UsageError as error:
            self.refused = error
            raise


def _measured_on_engine(
    metric: Metric, job: Verification, engine: Runner, outputs: Mapping[str, OutputAccuracy], clock: Clock
) -> MetricRecord | None:
    """The metric of an engine; None, with a warning, where the engine does not take what the metric feeds it.

    Raises:
        UsageError: The metric itself fails, or is no number.
    """
    run = _Watched(engine)
    try:
        return metric_of(metric, job, run, outputs)
    except UsageError:
        if run.refused is None:
            raise
        what = f"the metric {metric.name} cannot be measured on the engine: {run.refused.what}"
        clock.warn("verify engine", f"{what}; its outputs are judged in its place")
        return None


class Gauge:
    """Measures the accuracy of a graph as ``job`` verifies it (its optimized graph is exchanged); ``allowed`` may be
    lost."""

    def __init__(self, job: Verification, allowed: AccuracyBudget, clock: Clock | None = None) -> None:
        self._job, self._allowed, self._clock = replace(job, tensors=False), allowed, clock or Clock(ignore)
        self._records: dict[str, AccuracyRecord] = {}
        self._budget: Budget | None = None

    def __enter__(self) -> Gauge:
        """Keep the reference open, which is run once for all comparisons."""
        self._job.fp32.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._job.fp32.__exit__(kind, error, trace)

    @property
    def identity(self) -> tuple[str, ...] | None:
        """What answers depend on: the samples, the metric and its code, what it says of the FP32 model.

        None where that cannot be told in another run.
        """
        metric = self._job.metric
        if self._job.recorded is not None:
            return None
        if metric is None:
            return (self._job.samples.sha256,)
        if metric.from_python:
            return None
        return self._job.samples.sha256, metric.name, script_hash(metric.name), repr(metric.baseline)

    def measure(self, model: ir.Model) -> AccuracyRecord:
        """The accuracy of an optimized graph. Raises UsageError where the metric's function fails."""
        key = content_hash(model)
        if key not in self._records:
            self._records[key] = verify(replace(self._job, optimized=model), self._clock)
        return self._records[key]

    def evaluate(self, model: ir.Model) -> Evaluation:
        """What a point of a search costs: by :meth:`measure`, but on a few samples where these settle whether it holds.
        Raises UsageError where the metric's function fails."""
        known = self.known(model)
        if known is not None:
            return accuracy_drop(known)
        shares: list[float] = []

        def settles(outputs: Mapping[str, OutputAccuracy], share: float) -> bool:
            is_settled = self._settles(outputs, share)
            shares.extend([share] * is_settled)
            return is_settled

        job = replace(self._job, optimized=model)
        record = verify(job if job.metric is not None else replace(job, settles=settles), Clock(ignore))
        is_partial = any(share < 1 for share in shares)
        if not is_partial:
            self._records[content_hash(model)] = record
        return replace(accuracy_drop(record), is_partial=is_partial)

    def _settles(self, outputs: Mapping[str, OutputAccuracy], share: float) -> bool:
        """Whether the samples so far show that a point holds the budget, or cannot hold it any more.

        It cannot where its answers differ too often even if none of the others did, or its noise is twice what is
        allowed. It does where a tenth of that is left over, and scores are as near as in FP16.
        """
        job = self._job
        computed = () if job.host is None else job.host.own_outputs
        record = AccuracyRecord(
            0, job.source, "onnx-only", dict(outputs), host_outputs=computed, floor=_floor_record(job, outputs)
        )
        found, budget = accuracy_drop(record), self.budget()
        least = replace(
            found,
            drop=found.drop * share,
            disagreement=found.disagreement * share,
            noise=found.noise / 2,
            error=found.error / 2,
        )
        if not budget.holds(least):
            return True
        scores = [item for item in outputs.values() if item.top1_agreement is not None]
        near = smallest_sqnr_db(FP16) + CLEAR_DB
        if any(item.top1_agreement != 1.0 or not item.sqnr_db >= near for item in scores):
            return False
        ten = 10 ** (CLEAR_DB / 10)
        most = replace(found, drop=found.drop * ten, noise=found.noise * ten, error=found.error * ten)
        return budget.holds(most)

    def holds_clearly(self, model: ir.Model) -> bool:
        """Whether an optimized graph holds the budget with ten times its noise on a few samples, and on all with twice
        its drop and twice as many answers that differ."""
        few, noise = SomeSamples(self._job.samples, FEW_ROWS), 10 ** (CLEAR_DB / 20)
        loud = verify(replace(self._job, optimized=model, samples=few, metric=None, noise=noise), Clock(ignore))
        if not self.budget().holds(accuracy_drop(loud)):
            return False
        found = accuracy_drop(self.measure(model))
        return self.budget().holds(replace(found, drop=2 * found.drop, disagreement=2 * found.disagreement))

    def is_clear(self, model: ir.Model) -> bool:
        """Whether a 16-bit graph is far above its bound, with the same answers throughout."""
        return self._job.is_clear(self.measure(model).outputs)

    def known(self, model: ir.Model) -> AccuracyRecord | None:
        """What :meth:`measure` found for an equal graph; None where it was not asked."""
        return self._records.get(content_hash(model))

    @property
    def is_floor(self) -> bool:
        """Whether the floor is all there is to hold."""
        return not self._allowed.is_given

    def keeps_floor(self, model: ir.Model) -> bool:
        """Whether the outputs of an optimized graph keep the floor."""
        return self.budget().holds(accuracy_drop(self.measure(model)))

    def budget(self) -> Budget:
        """What a point has to hold; the search aims lower by what chance may cost on samples it has not seen."""
        if self._budget is None:
            self._budget = self._made_budget()
        return self._budget

    def _made_budget(self) -> Budget:
        metric, drop = self._job.metric, self._allowed.largest_drop
        name = metric.name if metric is not None else "1 - top-1 agreement, else 1 - cosine"
        aim = aim_for(drop, self._answers()) if drop < 1 and self._is_share() else None
        return Budget(self._allowed, name, aim)

    def _is_share(self) -> bool:
        """Whether the drop is a share of answers (a user's metric is taken for one); a cosine is not, nor are dB."""
        if self._job.metric is not None:
            return self._job.metric.name != "psnr"
        first = next(iter(self._job.samples))
        with self._job.fp32 as reference:
            return any(is_class_like(array) for array in reference.run(first))

    def _answers(self) -> int:
        """How many answers the metric counts: the entries of the samples it runs."""
        metric = self._job.metric
        if metric is not None and metric.function is not None:
            return metric.answers
        return sum(
            max((len(array) for array in feeds.values() if array.ndim), default=1) for feeds in self._job.samples
        )


def gauge_for(
    job: Verification, config: BuildConfig, allowed: AccuracyBudget, precision: Precision, clock: Clock
) -> Gauge | None:
    """The gauge of a build that has a budget and 8-bit regions to choose, or of 16 bits where a few samples may be
    enough; None for others."""
    if not precision.is_quantized:
        return Gauge(job, allowed, clock) if job.bound_db is not None and not job.tensors else None
    chooses = config.precision is not None and config.precision.is_quantized and not config.keep_all_int8
    return Gauge(job, allowed) if chooses and (allowed.is_given or allowed.floor is not None) else None


def weights_gauge(job: Verification, config: BuildConfig, allowed: AccuracyBudget) -> Gauge | None:
    """The gauge of narrow weights; None where there is no budget, or loss is allowed."""
    bounded = (allowed.is_given or allowed.floor is not None) and not config.allow_accuracy_loss
    return Gauge(job, allowed) if bounded and not config.keep_all_weights else None


def accuracy_drop(record: AccuracyRecord) -> Evaluation:
    """What the budget bounds, as gates do: the metric's drop, else 1 - agreement or 1 - cosine of the worst output."""
    judged = [found for name, found in record.outputs.items() if name not in record.host_outputs]
    broken = any(found.nonfinite for found in record.outputs.values())
    error = _largest(10 ** (-found.sqnr_db / 10) for found in judged)
    if record.metric is not None:
        drop = 0.0 if record.metric.name == "sqnr" else record.metric.drop
    else:
        drop = _largest(drop_of(found)[1] for found in judged)
    bounds = {} if record.floor is None else record.floor.outputs
    bounded = [(bounds.get(name), found) for name, found in record.outputs.items() if name not in record.host_outputs]
    disagreement = _largest(1 - (found.top1_agreement or 0.0) for bound, found in bounded if bound == "agreement")
    noise = _largest(10 ** (-found.sqnr_db / 10) for bound, found in bounded if bound == "sqnr")
    return Evaluation(math.inf if broken else drop, error, disagreement, noise)


def _largest(values: Iterable[float]) -> float:
    """The largest; infinite where one cannot be said, as of an output whose size differs."""
    return max((math.inf if math.isnan(value) else value for value in values), default=0.0)
