"""The accuracy of graphs as searches ask for it, and what they have to hold."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from types import TracebackType

import onnx_ir as ir

from trtopt.accuracy.compare import MemoizedRunner, is_class_like
from trtopt.accuracy.gate import drop_of
from trtopt.config import AccuracyBudget, BuildConfig
from trtopt.events import ignore
from trtopt.pipeline.verify import Verification, verify
from trtopt.precision.fp16.to_fp32 import to_fp32
from trtopt.precision.search.space import Budget, Evaluation, aim_for
from trtopt.report.schema.build import AccuracyRecord
from trtopt.support._script import script_hash
from trtopt.support.clock import Clock
from trtopt.support.ort_session import OrtSession


class Gauge:
    """Measures the accuracy of a graph as verification does, and says what it must hold.

    Args:
        job: The verification; its optimized graph is exchanged.
        allowed: What may be lost.
    """

    def __init__(self, job: Verification, allowed: AccuracyBudget) -> None:
        self._job, self._allowed = replace(job, tensors=False), allowed
        self._session: OrtSession | None = None
        self._known: MemoizedRunner | None = None

    def __enter__(self) -> Gauge:
        """Load the reference, which is run once for all comparisons."""
        self._session = OrtSession(to_fp32(self._job.reference), self._job.watched)
        self._known = MemoizedRunner(self._session)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            self._session.close()
        self._session = self._known = None

    @property
    def _reference(self) -> MemoizedRunner:
        if self._known is None:
            raise ValueError("the gauge is not open")
        return self._known

    @property
    def identity(self) -> tuple[str, ...] | None:
        """What answers depend on: the samples, the metric and its code, what it says of the FP32 model.

        None where that cannot be told in another run.
        """
        metric = self._job.metric
        if metric is None:
            return (self._job.samples.sha256,)
        if metric.from_python:
            return None
        return self._job.samples.sha256, metric.name, script_hash(metric.name), repr(metric.baseline)

    def measure(self, model: ir.Model) -> AccuracyRecord:
        """The accuracy of an optimized graph.

        Raises:
            UsageError: The metric's function fails, or gives no finite number.
        """
        return verify(replace(self._job, optimized=model), Clock(ignore), self._reference)

    def budget(self) -> Budget:
        """What a point has to hold; the search aims lower by what chance may cost on samples it has not seen."""
        metric, drop = self._job.metric, self._allowed.largest_drop
        name = metric.name if metric is not None else "1 - top-1 agreement, else 1 - cosine"
        aim = aim_for(drop, self._answers()) if drop < 1 and self._is_share() else None
        return Budget(self._allowed, name, aim)

    def _is_share(self) -> bool:
        """Whether the drop is a share of answers (a user's metric is taken for one); a cosine is not."""
        if self._job.metric is not None:
            return True
        first = next(iter(self._job.samples))
        return any(is_class_like(array) for array in self._reference.run(first))

    def _answers(self) -> int:
        """How many answers the metric counts: the entries of the samples it runs."""
        metric = self._job.metric
        if metric is not None and metric.function is not None:
            return metric.answers
        return sum(
            max((len(array) for array in feeds.values() if array.ndim), default=1) for feeds in self._job.samples
        )


def gauge_for(job: Verification, config: BuildConfig, allowed: AccuracyBudget) -> Gauge | None:
    """The gauge of a build that has a budget and 8-bit regions to choose; None for others."""
    chooses = config.precision is not None and config.precision.is_quantized and not config.keep_all_int8
    return Gauge(job, allowed) if chooses and allowed.is_given else None


def accuracy_drop(record: AccuracyRecord) -> Evaluation:
    """What the budget bounds, as gates do: the metric's drop, else 1 - agreement or 1 - cosine of the worst output."""
    judged = [found for name, found in record.outputs.items() if name not in record.host_outputs]
    broken = any(found.nonfinite for found in record.outputs.values())
    error = _largest(10 ** (-found.sqnr_db / 10) for found in judged)
    if record.metric is not None:
        drop = 0.0 if record.metric.name == "sqnr" else record.metric.drop
    else:
        drop = _largest(drop_of(found)[1] for found in judged)
    return Evaluation(math.inf if broken else drop, error)


def _largest(values: Iterable[float]) -> float:
    """The largest; infinite where one cannot be said, as of an output whose size differs."""
    return max((math.inf if math.isnan(value) else value for value in values), default=0.0)
