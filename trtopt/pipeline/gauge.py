"""The accuracy of graphs as searches and gates ask for it, and of the files that are saved of them."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType

import numpy as np
import onnx_ir as ir

from trtopt.accuracy.compare import ConvertingRunner, MemoizedRunner, as_whole, is_class_like, leads, margins
from trtopt.accuracy.metric import drop_of
from trtopt.accuracy.scores import held_by
from trtopt.config import AccuracyBudget, BuildConfig
from trtopt.errors import InvalidModelError, TrtoptError
from trtopt.events import ignore
from trtopt.graph.skeleton import content_hash
from trtopt.pipeline.saved import LOADS, computes_wrong, tried_in_onnxruntime
from trtopt.pipeline.verify import CLEAR_DB, Verification, emulation_of, floor_record, metric_of, reference_of, verify
from trtopt.precision.fp16.repair import smallest_sqnr_db
from trtopt.precision.observe.stream import FEW_ROWS, Samples, SomeFirst, SomeSamples
from trtopt.precision.plan import FP16
from trtopt.precision.search.space import Budget, Evaluation, aim_for
from trtopt.report.schema.build import AccuracyRecord, OutputAccuracy
from trtopt.source.save import save_model
from trtopt.support._lazy import require
from trtopt.support._script import script_hash
from trtopt.support.clock import Clock
from trtopt.support.ort_session import Feeds
from trtopt.support.precision import Precision
from trtopt.support.temporary import TemporaryFolder

_LEAST_ROWS = FEW_ROWS // 2
"""Entries that a point of a search is run on at least: by their error points compare that change as many answers."""
_MOST_FLIPS = 0.1
"""Answers that may be expected to differ on samples that were not run, where a point holds by those that were."""


@dataclass(frozen=True)
class _Order:
    """Samples in the order in which a point of a search runs them.

    Attributes:
        samples: The samples.
        leads: By output that holds scores, how far the best score is ahead of the second in FP32, an array per sample.
        sizes: By output, the root mean square of its scores.
    """

    samples: Samples
    leads: Mapping[str, list[np.ndarray]] = field(default_factory=dict)
    sizes: Mapping[str, float] = field(default_factory=dict)

    def flips(self, name: str, found: OutputAccuracy, count: int) -> tuple[float, int]:
        """How many answers of an output are expected to differ behind the first ``count`` samples, and how many it has;
        infinite where nobody knows how near its scores are.

        The errors of two scores are taken as normal and independent. The point that is chosen is run on all samples.
        """
        if name not in self.leads:
            return math.inf, 1
        noise = max(self.sizes[name], found.held_against or 0.0) * 10 ** (-found.sqnr_db / 20)
        rest = np.concatenate([np.zeros(0), *self.leads[name][count:]])
        expected = sum(math.erfc(lead / (2 * noise)) / 2 for lead in rest) if noise > 0 else 0.0
        return expected, sum(array.size for array in self.leads[name])


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
        found = self._job.samples.sha256, metric.name, script_hash(metric.name), repr(metric.baseline)
        return (*found, "and the saved model") if self._job.saves else found

    def measure(self, model: ir.Model) -> AccuracyRecord:
        """The accuracy of an optimized graph. Raises UsageError where the metric's function fails."""
        return self._measured(replace(self._job, optimized=model))

    def _measured(self, job: Verification) -> AccuracyRecord:
        key = content_hash(job.optimized)
        if key not in self._records:
            record = verify(job, self._clock)
            metric = record.metric
            if metric is not None and self._allowed.drop is not None and self._allowed.allows(metric.drop):
                record = with_saved_metric(record, job.optimized, self._job, self._clock)
            self._records[key] = record
        return self._records[key]

    def evaluate(self, model: ir.Model) -> Evaluation:
        """What a point of a search costs: by :meth:`measure`, but on a few samples where these settle whether it holds.
        Raises UsageError where the metric's function fails."""
        known = self.known(model)
        if known is not None or self._job.metric is not None:
            return accuracy_drop(self.measure(model))
        order, shares = self._hardest_first, list[float]()

        def settles(outputs: Mapping[str, OutputAccuracy], share: float, rows: int) -> bool:
            is_settled = self._settles(outputs, share, rows, order)
            shares.extend([share] * is_settled)
            return is_settled

        job = replace(self._job, optimized=model, samples=order.samples)
        record, share = verify(replace(job, settles=settles), Clock(ignore)), min(shares, default=1.0)
        if share == 1:
            self._records[content_hash(model)] = record
            return accuracy_drop(record)
        # As if none of the others differed: points compare, whatever they ran.
        outputs = {name: _agreeing(item, share) for name, item in record.outputs.items()}
        return replace(accuracy_drop(replace(record, outputs=outputs)), is_partial=True)

    @functools.cached_property
    def _hardest_first(self) -> _Order:
        """The samples, in front those whose answers are the first to change: whose best scores in FP32 are nearest to
        each other. The reference is run on all of them for this, as it is for the point that is chosen. Without scores
        those in front are spread evenly."""
        samples = self._job.samples
        held = held_by(self._job.reference, (str(value.name) for value in self._job.reference.graph.outputs))
        if samples.source == "synthetic":
            return _Order(samples)
        some = SomeSamples(samples, FEW_ROWS)
        nearest, ahead, squares = list[float](), dict[str, list[np.ndarray]](), dict[str, list[float]]()
        if "scores" not in held.values():
            return _Order(SomeFirst(samples, some.indices))
        with reference_of(self._job) as reference:
            for feeds in samples:
                run = zip(reference.output_names, reference.run(feeds), strict=True)
                scores = {name: array for name, array in run if held.get(name) == "scores" and is_class_like(array)}
                nearest.append(min((_margin(array) for array in scores.values()), default=math.inf))
                for name, array in scores.items():
                    finite = array[np.isfinite(array)].astype(np.float64)
                    squares.setdefault(name, []).append(float(np.square(finite).mean()) if finite.size else 0.0)
                    ahead.setdefault(name, []).append(leads(array).ravel())
        first = sorted(range(len(nearest)), key=nearest.__getitem__)[: some.most]
        order = first + sorted(set(range(len(nearest))) - set(first))
        complete = (name for name, arrays in ahead.items() if len(arrays) == len(order))
        known = {name: [ahead[name][index] for index in order] for name in complete}
        sizes = {name: math.sqrt(float(np.mean(squares[name]))) for name in known}
        return _Order(SomeFirst(samples, first), known, sizes)

    def _settles(
        self, outputs: Mapping[str, OutputAccuracy], share: float, rows: int, order: _Order | None = None
    ) -> bool:
        """Whether the samples so far show that a point holds the budget, or cannot hold it any more.

        It cannot where its answers differ too often even if none of the others did, or its noise is twice what is
        allowed. It does where a tenth of that is left over, and scores are as near as in FP16, or so much nearer to
        those of FP32 than the best two of the samples in ``order`` that were not run are to each other, that no more
        answers differ. A few rows show the first of these only.
        """
        if rows < _LEAST_ROWS:
            return False
        job = self._job
        computed = () if job.host is None else job.host.own_outputs
        own, ranked = job.parted(outputs)
        floor = floor_record(job, own, ranked)
        record = AccuracyRecord(0, job.source, "onnx-only", own, host_outputs=computed, floor=floor, ranked=ranked)
        found, budget = accuracy_drop(record), self.budget()
        least = replace(
            found,
            drop=found.drop * share,
            disagreement=found.disagreement * share,
            noise=found.noise / 2 if rows >= FEW_ROWS else 0.0,
            error=found.error / 2 if rows >= FEW_ROWS else 0.0,
        )
        if not budget.holds(least) or rows < FEW_ROWS:
            return not budget.holds(least)
        worst = {name: _at_worst(name, item, share, order) for name, item in outputs.items()}
        if any(item is None for item in worst.values()):
            return False
        own, ranked = job.parted({name: item for name, item in worst.items() if item is not None})
        return budget.holds(accuracy_drop(replace(record, outputs=own, ranked=ranked)))

    def holds_clearly(self, model: ir.Model) -> bool:
        """Whether an optimized graph holds the budget with ten times its noise on a few samples, and on all with twice
        its drop and twice as many answers that differ."""
        job, noise = replace(self._job, optimized=model), 10 ** (CLEAR_DB / 20)
        with emulation_of(job) as runner:
            job = replace(job, emulated=MemoizedRunner(runner))
            some = SomeSamples(job.samples, FEW_ROWS)
            few = replace(job, samples=some, metric=None, noise=noise, settles=self._settles)
            if not self.budget().holds(accuracy_drop(verify(few, Clock(ignore)))):
                return False
            found = accuracy_drop(self._measured(job))
        return self.budget().holds(replace(found, drop=2 * found.drop, disagreement=2 * found.disagreement))

    def is_clear(self, model: ir.Model) -> bool:
        """Whether a 16-bit graph is far above its bound, with the same answers throughout."""
        return self._job.is_clear(self.measure(model).outputs)

    def known(self, model: ir.Model) -> AccuracyRecord | None:
        """What :meth:`measure` found for an equal graph; None where it was not asked."""
        return self._records.get(content_hash(model))

    @property
    def is_advice(self) -> bool:
        """Whether missing the budget fails no build."""
        return self._allowed.is_advice

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
            held = held_by(self._job.reference, reference.output_names)
            outputs = zip(reference.output_names, reference.run(first), strict=True)
            return any(held[name] != "values" and is_class_like(array) for name, array in outputs)

    def _answers(self) -> int:
        """How many answers the metric counts: the entries of the samples it runs."""
        metric = self._job.metric
        if metric is not None and metric.function is not None:
            return metric.answers
        return sum(
            max((len(array) for array in feeds.values() if array.ndim), default=1) for feeds in self._job.samples
        )


def _agreeing(found: OutputAccuracy, share: float, flips: float = 0.0) -> OutputAccuracy:
    """An output as if of the samples that were not run no more than a share of answers differed; ``share`` were run."""
    if found.top1_agreement is None or not found.has_scores:
        return found
    return replace(found, top1_agreement=1 - (1 - found.top1_agreement) * share - flips)


def _at_worst(name: str, found: OutputAccuracy, share: float, order: _Order | None) -> OutputAccuracy | None:
    """An output with ten times its noise, and the answers that may differ on the samples that were not run; None where
    these are in doubt."""
    ten = 10 ** (CLEAR_DB / 10)
    worst = replace(found, sqnr_db=found.sqnr_db - CLEAR_DB, cosine=1 - ten * (1 - found.cosine))
    if found.top1_agreement is None or not found.has_scores:
        return worst
    if found.top1_agreement == 1.0 and found.sqnr_db >= smallest_sqnr_db(FP16) + CLEAR_DB:
        return worst
    if order is None:
        return None
    count = round(share * (order.samples.count or 0))
    flips, answers = order.flips(name, found, count)
    return _agreeing(worst, share, flips / answers) if flips <= _MOST_FLIPS else None


def _margin(scores: np.ndarray) -> float:
    """The mean of :func:`~trtopt.accuracy.compare.margins` over the answers of a sample; infinite where there are
    none."""
    found = margins(scores)
    found = found[np.isfinite(found)]
    return float(found.mean()) if found.size else math.inf


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
    compared = {**record.outputs, **record.ranked}
    broken = any(found.nonfinite for found in compared.values())
    error = _largest(10 ** (-found.sqnr_db / 10) for found in judged)
    if record.worst_metric is not None:
        drop = 0.0 if record.worst_metric.name == "sqnr" else record.worst_metric.drop
    else:
        drop = _largest(drop_of(found)[1] for found in judged)
    bounds = {} if record.floor is None else record.floor.outputs
    bounded = [(bounds.get(name), found) for name, found in compared.items() if name not in record.host_outputs]
    disagreement = _largest(1 - (found.top1_agreement or 0.0) for bound, found in bounded if bound == "agreement")
    noise = _largest(10 ** (-found.sqnr_db / 10) for bound, found in bounded if bound == "sqnr")
    return Evaluation(math.inf if broken else drop, error, disagreement, noise)


def _largest(values: Iterable[float]) -> float:
    """The largest; infinite where one cannot be said, as of an output whose size differs."""
    return max((math.inf if math.isnan(value) else value for value in values), default=0.0)


def with_saved_metric(record: AccuracyRecord, model: ir.Model, job: Verification, clock: Clock) -> AccuracyRecord:
    """The record with the metric of a model that is saved as ONNX Runtime runs its file, by its defaults, on the CPU.

    Its kernels add up in another order than those of an engine. Where values lie near the edges of 8-bit steps, the
    least difference moves outputs by as much as the 8 bits move them. The record as it is where nothing is saved, the
    file does not run, and for metrics that compare with FP32.

    Args:
        record: Of the model, as an engine rounds it.
        model: What is saved.
        job: How the model was verified.
        clock: Times.
    """
    metric = job.metric
    if metric is None or not metric.runs_the_model or not job.saves or (record.saved_metric and job.feeds is None):
        return record
    record = replace(record, saved_metric=None)
    if computes_wrong(model):
        return record
    with TemporaryFolder("saved-") as folder, clock.stage("measure saved model"):
        files = save_model(model, Path(folder) / "saved.onnx")
        if tried_in_onnxruntime(files) != LOADS:
            return record
        try:
            file = _File(files[0])
            runner = file if job.feeds is None else ConvertingRunner(file, job.feeds)
            with as_whole(runner, job.host) as whole:
                found = metric_of(metric, job, job.batched(whole), record.outputs)
        except TrtoptError as error:
            note = f"the metric {metric.name} is not measured on the saved model: {error.what}"
            return replace(record, notes=(*record.notes, note))
    return replace(record, saved_metric=found)


class _File:
    """A saved model as its users run it: by ONNX Runtime's defaults, on the CPU. Raises InvalidModelError."""

    def __init__(self, path: Path) -> None:
        ort = require("onnxruntime", "cpu", "run models on the CPU")
        options = ort.SessionOptions()
        options.log_severity_level = 4
        self._session = ort.InferenceSession(os.fspath(path), options, providers=["CPUExecutionProvider"])
        self._inputs = {item.name for item in self._session.get_inputs()}
        self.output_names = tuple(item.name for item in self._session.get_outputs())

    def run(self, feeds: Feeds) -> list[np.ndarray]:
        """Outputs in the order of ``output_names``."""
        try:
            found: list[np.ndarray] = self._session.run(
                None, {name: array for name, array in feeds.items() if name in self._inputs}
            )
        except Exception as error:
            what = f"ONNX Runtime does not run the saved model: {' '.join(str(error).split())[:300]}"
            raise InvalidModelError(what, where="the saved model", remedy="run the engine") from error
        return found
