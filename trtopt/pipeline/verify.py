"""The optimized graph, and its engine, compared with FP32."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
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
    is_float,
    sums_of,
)
from trtopt.accuracy.emulation import fp32_emulation
from trtopt.accuracy.labelled import counted_otherwise
from trtopt.accuracy.metric import Metric
from trtopt.accuracy.recorded import Recorded, RecordedRunner
from trtopt.accuracy.reference import Reference
from trtopt.accuracy.scores import held_by, ranked_in
from trtopt.config import RANDOM_FLOOR, Floor, Tolerances
from trtopt.engine.backend import Backend, RuntimeOptions
from trtopt.engine.profiles import Profiles
from trtopt.engine.run import EngineSession, can_run
from trtopt.errors import TargetError, UsageError
from trtopt.events import Event
from trtopt.graph.artifact import input_spec
from trtopt.graph.edit import dims_of_value
from trtopt.graph.states import find_states
from trtopt.precision.fp16.to_fp32 import to_fp32
from trtopt.precision.observe.batches import BatchedSamples, FixedAxes, fixed_axes
from trtopt.precision.observe.stream import FEW_ROWS, Samples
from trtopt.report.schema.build import AccuracyRecord, FloorRecord, MetricRecord, OutputAccuracy
from trtopt.rewrite.host_part import sizes_vary
from trtopt.support.clock import Clock
from trtopt.support.ort_session import Feeds, OrtSession

SYNTHETIC_SECONDS = 20.0
"""What the samples of a verification may take where nobody gave them: random data says little of accuracy."""

FEW_SAMPLES = 32
"""With fewer, a single sample moves the agreement by more than the floor leaves."""


_LOW = 0.1
"""Of top-1 in FP32: below, labels may be counted otherwise."""

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
        saves: Whether the optimized graph is written to a file.
        ranked: Tensors that a selection ranks or takes, which are compared beside the outputs; of models whose rows
            are run one by one and that the engine computes whole.
        emulated: What runs the optimized graph as an engine rounds it, where it is there already; None opens it.
        settles: Told the outputs so far, the share of the samples that they are of, and their rows; whether they are
            enough.
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
    saves: bool = False
    ranked: tuple[str, ...] = ()
    emulated: Runner | None = None
    settles: Callable[[Mapping[str, OutputAccuracy], float, int], bool] | None = None

    def __post_init__(self) -> None:
        if self.fp32 is None:
            object.__setattr__(self, "fp32", Reference(self.reference, self.watched))

    @property
    def watched(self) -> tuple[str, ...] | None:
        """The values of the reference that are compared; None for its outputs."""
        if self.host is not None:
            return self.host.watched
        return self.compared_in(self.reference) if self.ranked else None

    def compared_in(self, model: ir.Model) -> tuple[str, ...]:
        """What is compared of those that a graph computes: the outputs, and what they are selected from."""
        there = {str(value.name) for node in model.graph for value in node.outputs} if self.ranked else ()
        return (*(str(value.name) for value in self.reference.graph.outputs), *(n for n in self.ranked if n in there))

    def parted(
        self, compared: Mapping[str, OutputAccuracy]
    ) -> tuple[dict[str, OutputAccuracy], dict[str, OutputAccuracy]]:
        """The outputs, and what they are selected from."""
        ranked = {name: found for name, found in compared.items() if name in self.ranked}
        return {name: found for name, found in compared.items() if name not in ranked}, ranked

    def is_clear(self, outputs: Mapping[str, OutputAccuracy]) -> bool:
        """Whether every output is far above ``bound_db``, with the same answers throughout."""
        if self.bound_db is None:
            return False
        clear = self.bound_db + CLEAR_DB
        return all(item.sqnr_db >= clear and item.top1_agreement in (None, 1.0) for item in outputs.values())

    def batched(self, runner: Runner) -> Runner:
        """A runner that takes any number of rows."""
        return runner if self.axes is None else BatchRunner(runner, self.axes)


def ranked_of(loaded: ir.Model, rewritten: ir.Model, axes: FixedAxes | None) -> tuple[str, ...]:
    """What selections rank or take (:func:`~trtopt.accuracy.scores.ranked_in`); where rows are run in batches of one
    size, only what begins with the rows."""
    names = ranked_in(loaded, rewritten)
    if axes is None or axes.rows is None:
        return names
    values = (value for node in loaded.graph for value in node.outputs)
    first = {str(value.name): dims[0] for value in values if (dims := dims_of_value(value))}
    rows = {dims[0] for value in loaded.graph.inputs if (dims := dims_of_value(value)) and value.name in axes.counting}
    return tuple(name for name in names if first.get(name) in rows)


@contextmanager
def reference_of(job: Verification) -> Iterator[Runner]:
    """What outputs are compared with: the model in FP32, or what was recorded."""
    with job.fp32 as known:
        runner = job.batched(known)
        yield runner if job.recorded is None else RecordedRunner(runner, job.recorded)


@contextmanager
def emulation_of(job: Verification) -> Iterator[Runner]:
    """The optimized graph as an engine rounds it."""
    if job.emulated is not None:
        yield job.emulated
        return
    emulated = fp32_emulation(job.optimized)
    names = job.compared_in(emulated) if job.ranked else None
    with (
        OrtSession(emulated, names, keep_qdq=True) as session,
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
        found = metric.on_reference(reference, samples, samples.labels)
        if found.name in ("top1", "top5") and isinstance(samples.labels, np.ndarray) and (found.baseline or 0) < _LOW:
            return replace(found, note=counted_otherwise(reference, samples, samples.labels))
        return found


def verify(job: Verification, clock: Clock) -> AccuracyRecord:
    """Compare the optimized graph's FP32 emulation with the reference on every sample."""
    samples, total = _Counted(job), job.samples.count
    computed = () if job.host is None else job.host.own_outputs
    with clock.stage("verify"), reference_of(job) as first, emulation_of(job) as second:
        clock.listen(Event("start", "verify", total=total))
        compared = second if job.noise == 1 else _Amplified(first, second, job.noise)
        exact = SelectedOutputs(first, second.output_names) if job.ranked else first
        outputs, ranked = job.parted(_compared(job, (exact, compared), samples, "verify", clock))
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
        floor=floor_record(job, outputs, ranked),
        ranked=ranked,
        notes=_notes(job, samples, outputs),
        selections=tuple(name for name, holds in held_by(job.reference, outputs).items() if holds == "selection"),
    )


def _compared(
    job: Verification, runners: tuple[Runner, Runner], samples: _Counted, task: str, clock: Clock
) -> dict[str, OutputAccuracy]:
    values = (value for node in job.reference.graph for value in node.outputs)
    compared = [value for value in values if value.is_graph_output() or value.name in job.ranked]
    held = held_by(job.reference, (str(output.name) for output in job.reference.graph.outputs))
    return compare(
        *runners,
        samples,
        advance=lambda: clock.listen(Event("advance", task)),
        varying=sizes_vary(job.reference),
        enough=samples.are_enough,
        sums=sums_of(
            job.tolerances,
            {str(state.output.name) for state in find_states(job.reference)},
            compared,
            job.ranked,
            {name for name, holds in held.items() if holds == "values"},
        ),
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
        if self._settles is not None and self._samples.count:
            return self._settles(outputs, self.count / self._samples.count, self.rows)
        return self.rows >= FEW_ROWS and self._is_clear(outputs)


def floor_record(
    job: Verification, outputs: Mapping[str, OutputAccuracy], ranked: Mapping[str, OutputAccuracy]
) -> FloorRecord | None:
    """The floor, and by which of its bounds each output, and what outputs are selected from, is judged."""
    if job.floor is None:
        return None
    judged: dict[str, Literal["agreement", "sqnr", "none"]] = {}
    for name, holds in held_by(job.reference, outputs).items():
        has_top1 = outputs[name].top1_agreement is not None and job.floor != RANDOM_FLOOR
        judged[name] = "none" if holds == "selection" else "agreement" if holds == "scores" and has_top1 else "sqnr"
    return FloorRecord(job.floor.agreement, job.floor.sqnr_db, {**judged, **dict.fromkeys(ranked, "sqnr")})


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
        if found.held_against is not None:
            notes.append(
                f"{name}: probabilities below {found.held_against:g}, which show little of it; its error is held "
                "against that"
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
            exact = SelectedOutputs(first, watched.output_names) if job.ranked else first
            outputs = _compared(job, (exact, watched), _Counted(job), "verify engine", clock)
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
