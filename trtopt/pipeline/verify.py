"""The optimized graph, and its engine, compared with FP32."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace

import onnx_ir as ir

from trtopt.accuracy.compare import Runner, compare, compare_tensors, first_bad
from trtopt.accuracy.emulation import fp32_emulation
from trtopt.accuracy.metric import Metric
from trtopt.accuracy.whole import ConvertingRunner, HostPart, SelectedOutputs, as_whole
from trtopt.engine.backend import Backend
from trtopt.engine.run import EngineSession, can_run
from trtopt.errors import UsageError
from trtopt.events import Event
from trtopt.precision.fp16.to_fp32 import to_fp32
from trtopt.precision.observe.samples import Samples
from trtopt.report.schema.build import AccuracyRecord, MetricRecord, OutputAccuracy
from trtopt.rewrite.host_part import sizes_vary
from trtopt.support.clock import Clock
from trtopt.support.ort_session import Feeds, OrtSession


@dataclass(frozen=True)
class Verification:
    """What verification compares with what, and how.

    Attributes:
        reference: The model as loaded; its FP32 form is the reference.
        optimized: The optimized graph; its FP32 twin is run.
        samples: The samples.
        source: Where they come from: ``eval``, ``calibration`` or ``synthetic``.
        metric: The user's metric, if any.
        tensors: Whether intermediate tensors are compared too.
        host: What of the model the host runs behind ``optimized``, if any.
        feeds: Turns a sample into what the engine takes, where that differs from the model as loaded.
    """

    reference: ir.Model
    optimized: ir.Model
    samples: Samples
    source: str
    metric: Metric | None
    tensors: bool
    host: HostPart | None = None
    feeds: Callable[[Feeds], Feeds] | None = None

    @property
    def watched(self) -> tuple[str, ...] | None:
        """The values of the reference that are compared; None for its outputs."""
        return None if self.host is None else self.host.watched


def with_baseline(metric: Metric, loaded: ir.Model, samples: Samples, clock: Clock) -> Metric:
    """The metric with what the model as loaded has in FP32: a wrong metric ends the run before the work.

    Raises:
        UsageError: The metric fails, or does not fit the model or the samples.
        InvalidModelError: ONNX Runtime cannot load the model.
    """
    with clock.stage("measure FP32"), OrtSession(to_fp32(loaded)) as reference:
        return metric.on_reference(reference, samples, samples.labels)


def verify(job: Verification, clock: Clock, known: Runner | None = None) -> AccuracyRecord:
    """Compare the optimized graph's FP32 twin with the FP32 reference on every sample.

    Args:
        job: What is compared.
        clock: Times the stage.
        known: The reference, where a caller compares many graphs with it.
    """
    reference, emulation = to_fp32(job.reference), fp32_emulation(job.optimized)
    total = job.samples.count
    computed = () if job.host is None else job.host.own_outputs
    with (
        clock.stage("verify"),
        nullcontext(known) if known is not None else OrtSession(reference, job.watched) as before,
        OrtSession(emulation, keep_qdq=True) as engine,
        as_whole(engine, job.host) as after,
    ):
        clock.listen(Event("start", "verify", total=total))
        outputs = compare(before, after, job.samples, on_event=clock.listen, varying=sizes_vary(job.reference))
        metric = None if job.metric is None else _measured(job.metric, job, after, outputs)
        clock.listen(Event("end", "verify"))
    tensors, entry = None, None
    if job.tensors:
        with clock.stage("compare tensors"):
            tensors = compare_tensors(reference, emulation, job.samples, on_event=clock.listen)
            entry = first_bad(emulation, tensors)
    count = total if total is not None else sum(1 for _ in job.samples)
    return AccuracyRecord(
        count,
        job.source,
        "onnx-only",
        outputs,
        metric=metric,
        tensors=tensors,
        first_bad=entry,
        host_outputs=computed,
    )


def _measured(
    metric: Metric, job: Verification, optimized: Runner, outputs: Mapping[str, OutputAccuracy]
) -> MetricRecord:
    """The metric of ``optimized``, which is compared with the reference in ``outputs``."""
    whole = tuple(outputs) if job.host is None else job.host.outputs
    computed = () if job.host is None else job.host.own_outputs
    judged = {name: found for name, found in outputs.items() if name not in computed}
    return metric.measure(SelectedOutputs(optimized, whole), job.samples, job.samples.labels, judged)


def verify_engine(
    record: AccuracyRecord, job: Verification, engine: bytes, backend: Backend, clock: Clock
) -> AccuracyRecord:
    """Add the engine's own outputs, and the metric on them, where it can run; else return ``record`` as it is."""
    if not can_run(backend, engine):
        return record
    with (
        clock.stage("verify engine"),
        OrtSession(to_fp32(job.reference), job.watched) as before,
        EngineSession(engine, backend) as run,
        as_whole(run if job.feeds is None else ConvertingRunner(run, job.feeds), job.host) as after,
    ):
        clock.listen(Event("start", "verify engine", total=job.samples.count))
        outputs = compare(
            before,
            after,
            job.samples,
            on_event=clock.listen,
            task="verify engine",
            varying=sizes_vary(job.reference),
        )
        metric = None if job.metric is None else _measured_on_engine(job.metric, job, after, outputs, clock)
        clock.listen(Event("end", "verify engine"))
    return replace(record, verified="engine", engine=outputs, engine_metric=metric)


def _measured_on_engine(
    metric: Metric, job: Verification, engine: Runner, outputs: Mapping[str, OutputAccuracy], clock: Clock
) -> MetricRecord | None:
    """The metric of an engine; None, with a warning, where the engine does not take what the metric feeds it."""
    try:
        return _measured(metric, job, engine, outputs)
    except UsageError as error:
        what = f"the metric {metric.name} cannot be measured on the engine: {error.what}"
        clock.warn("verify engine", f"{what}; its outputs are judged in its place")
        return None
