"""Metrics of a whole model, by name or ``FILE.py:FUNCTION``; gates, in words."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from trtopt.accuracy import detection
from trtopt.accuracy.compare import MemoizedRunner, Runner, is_class_like
from trtopt.accuracy.labelled import LABELS, MEASURES, Labels, Measure, needs, no_scores
from trtopt.config.base import METRICS
from trtopt.config.budget import AccuracyBudget, Floor
from trtopt.errors import InvalidModelError, TrtoptError, UsageError
from trtopt.report.schema.build import AccuracyRecord, FloorRecord, MetricRecord, OutputAccuracy
from trtopt.support._script import is_script, load_function, script_line
from trtopt.support.ort_session import Feeds

Run = Callable[[Feeds], list[np.ndarray]]
"""Runs one sample; outputs in graph order."""


@dataclass(frozen=True)
class Metric:
    """A metric that was checked and can be measured. Higher is better.

    Attributes:
        name: As the user gave it; ``FILE:FUNCTION`` for a Python function.
        function: The user's function; None for the built-in ones.
        labelled: What compares outputs with labels; None before :meth:`on_reference`, and where nothing does.
        boxes: The value of ``--boxes``; None to find the form.
        note: What was assumed of the outputs, in one line.
        baseline: What the FP32 model has; None before :meth:`on_reference`.
        answers: Entries of the different samples that the user's function ran the FP32 model on; 0 for the others.
        from_python: Whether a Python caller gave the function: its name and file do not tell what it computes with.
    """

    name: str
    function: Callable[[Run], object] | None = None
    labelled: Measure | None = None
    boxes: str | None = None
    note: str = ""
    baseline: float | None = None
    answers: int = 0
    from_python: bool = False

    @property
    def needs_labels(self) -> bool:
        """Whether it compares with labels."""
        return self.function is None and (self.name in MEASURES or self.name in detection.NAMES)

    @property
    def runs_the_model(self) -> bool:
        """Whether it runs the model itself; others are taken from the comparison with FP32."""
        return self.function is not None or self.labelled is not None

    def on_reference(self, reference: Runner, samples: Iterable[Feeds], labels: Labels | None) -> Metric:
        """The metric with its baseline: what is wrong with it, or with its labels, shows here.

        Args:
            reference: The FP32 model.
            samples: For the built-in metrics; not a one-shot iterator.
            labels: Of the samples, in their order, for metrics that compare with them.

        Raises:
            UsageError: The user's function fails, gives the model what it does not take, or returns no number; the
                labels do not fit the outputs; no output holds scores.
        """
        if self.function is not None:
            counted = MemoizedRunner(reference)
            return replace(self, baseline=self._call(_Fussy(counted)), answers=counted.rows)
        if self.needs_labels:
            there, note = _there(self.name, labels), ""
            measure = MEASURES.get(self.name)
            if measure is None or (self.name == "recall" and detection.are_boxes(there)):
                measure, note = detection.fitted(self.name, self.boxes, reference, samples, there)
            return replace(self, labelled=measure, note=note, baseline=measure(reference, samples, there))
        if self.name == "agreement":
            outputs = reference.run(next(iter(samples)))
            if not any(is_class_like(output) for output in outputs):
                raise no_scores("agreement", ", ".join(reference.output_names))
            return replace(self, baseline=1.0)
        return replace(self, baseline=math.inf)

    def measure(
        self,
        optimized: Runner,
        samples: Iterable[Feeds],
        labels: Labels | None,
        compared: Mapping[str, OutputAccuracy],
    ) -> MetricRecord:
        """The metric of an optimized model, beside that of the FP32 one.

        Metrics of labels are in :mod:`trtopt.accuracy.labelled`; ``agreement`` is the top-1 agreement of the first
        output that has one (1 for the baseline); ``sqnr`` the lowest of the outputs, in dB (infinite for the baseline).

        Args:
            optimized: The emulation, or the engine.
            samples: Not a one-shot iterator.
            labels: As in :meth:`on_reference`.
            compared: The comparison of the two models, by output name.

        Raises:
            UsageError: As :meth:`on_reference`.
            ValueError: The metric has no baseline.
        """
        if self.baseline is None:
            raise ValueError(f"the metric {self.name} has no baseline")
        if self.function is not None:
            after = self._call(optimized)
        elif self.labelled is not None:
            after = self.labelled(optimized, samples, _there(self.name, labels))
        elif self.name == "agreement":
            after = _agreement(compared)
        else:
            after = float(np.min([accuracy.sqnr_db for accuracy in compared.values()]))
        return MetricRecord(self.name, self.baseline, after, self.baseline - after)

    def _call(self, runner: Runner) -> float:
        """The user's function on one model."""
        if self.function is None:
            raise ValueError("a built-in metric has no function")
        try:
            value = self.function(lambda feeds: runner.run(feeds))
        except _RefusedFeedsError as error:
            raise UsageError(
                f"--metric: the model does not take what the function feeds it: {error}",
                where=script_line(error, Path(self.name.rpartition(":")[0])),
                remedy="run(feeds) takes a dict of arrays by input name, in the inputs' shapes and types",
            ) from error
        except TrtoptError:
            raise
        except (Exception, SystemExit) as error:
            raise UsageError(
                f"--metric: the function failed: {type(error).__name__}: {error}",
                where=script_line(error, Path(self.name.rpartition(":")[0])),
                remedy="it is called as f(run); run(feeds) returns the outputs in graph order",
            ) from error
        if not isinstance(value, (float, int, np.floating, np.integer)) or not math.isfinite(value):
            raise UsageError(
                f"--metric: the function returned {value!r}", where=self.name, remedy="return a finite number"
            )
        return float(value)


class _RefusedFeedsError(Exception):
    """The reference does not run on what a user's function feeds it; the text says why."""


class _Fussy:
    """The reference as a user's function sees it: what it cannot run is the function's fault, not the model's."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.output_names = runner.output_names

    def run(self, feeds: Feeds) -> list[np.ndarray]:
        """Outputs in the order of ``output_names``."""
        if not isinstance(feeds, Mapping) or not all(isinstance(value, np.ndarray) for value in feeds.values()):
            kinds = {name: type(value).__name__ for name, value in feeds.items()} if isinstance(feeds, Mapping) else ""
            raise _RefusedFeedsError(f"no dict of numpy arrays: {kinds or type(feeds).__name__}")
        try:
            return self._runner.run(feeds)
        except InvalidModelError as error:
            raise _RefusedFeedsError(f"{error.what}; it was {error.where}") from error


def python_metric(function: Callable[[Run], object]) -> Metric:
    """The metric of a Python caller's own function, named after the place it is defined at."""
    code = getattr(function, "__code__", None)
    file = code.co_filename if code is not None else type(function).__module__
    return Metric(
        f"{file}:{getattr(function, '__qualname__', type(function).__qualname__)}", function, from_python=True
    )


def load_metric(text: str, *, has_labels: bool, max_drop: float | None = None, boxes: str | None = None) -> Metric:
    """Check ``--metric`` before any work is done.

    Args:
        text: ``FILE.py:FUNCTION`` or one of :data:`~trtopt.config.base.METRICS`.
        has_labels: Whether the evaluation samples carry labels.
        max_drop: The value of ``--max-accuracy-drop``.
        boxes: The value of ``--boxes``.

    Raises:
        UsageError: The metric is unknown or its file does not load; it needs labels, and there are none; ``sqnr`` with
            a largest drop, which is infinite for every change.
    """
    if is_script(text):
        return Metric(text, load_function(text, "--metric"))
    if text not in METRICS:
        raise UsageError(
            f"--metric: unknown metric {text!r}",
            where="--metric",
            remedy=f"give FILE.py:FUNCTION, {', '.join(METRICS[:-1])} or {METRICS[-1]}",
        )
    if text == "sqnr" and max_drop is not None:
        raise UsageError(
            "--max-accuracy-drop cannot bound the metric sqnr: the baseline's SQNR is infinite",
            where="--metric sqnr",
            remedy="use --min-sqnr-db X",
        )
    metric = Metric(text, boxes=boxes)
    if metric.needs_labels and not has_labels:
        _there(text, None)
    return metric


def _there(name: str, labels: Labels | None) -> Labels:
    if labels is None:
        raise needs(
            name,
            "labels, and the evaluation samples have none",
            "put pictures into a sub-folder for each class, name labels with --labels, save those of arrays in the "
            f".npz under {LABELS}, or use --metric agreement",
        )
    return labels


def _agreement(compared: Mapping[str, OutputAccuracy]) -> float:
    for accuracy in compared.values():
        if accuracy.top1_agreement is not None:
            return accuracy.top1_agreement
    raise no_scores("agreement", ", ".join(compared))


_SAVED = " of the saved model in ONNX Runtime"


_NOT_FINITE = "{} values are NaN or infinite where the reference is finite"


def gate(record: AccuracyRecord, budget: AccuracyBudget) -> tuple[str, ...]:
    """The gates that failed, one sentence each; the caller decides between an error and a warning.

    Always: no output is NaN or infinite where the reference is finite. ``--min-sqnr-db X``: each output's SQNR is at
    least X. ``--atol`` and ``--rtol``: no value is beyond both. The floor of the record: each output keeps its bound of
    it, and so does what outputs are selected from. ``--max-accuracy-drop X``: with a metric, baseline - optimized <= X;
    without one, X bounds 1 - top-1 agreement of each output that holds scores, else 1 - cosine.
    A saved model passes the metric's gate as ONNX Runtime runs it, too.
    An engine that ran passes the same gates: its own metric, or its outputs where the metric could not be measured on
    it. Outputs that the host computes pass the first gate and the metric's; for the others the tensors it computes them
    from stand in, since a rounding may change which boxes are chosen, and their order.

    Args:
        record: The verification.
        budget: What those options say.
    """
    sources = [("output", record.outputs, record.metric)]
    if record.engine is not None:
        sources.append(("engine output", record.engine, record.engine_metric))
    failures: list[str] = []
    floor = None if budget.is_advice else record.floor
    for name, accuracy in record.ranked.items():
        where = f"{name}, from which outputs are selected"
        failures += [f"{where}: {_NOT_FINITE.format(accuracy.nonfinite)}"] if accuracy.nonfinite else []
        failures += _floor_failures(where, name, accuracy, floor)
    for kind, outputs, metric in sources:
        for name, accuracy in outputs.items():
            where = f"{kind} {name}"
            if accuracy.nonfinite:
                failures.append(f"{where}: {_NOT_FINITE.format(accuracy.nonfinite)}")
            elif name not in record.host_outputs:
                failures += _output_failures(where, accuracy, budget, metric is not None)
                failures += _floor_failures(where, name, accuracy, floor)
    metrics = {"": record.metric, " of the engine": record.engine_metric, _SAVED: record.saved_metric}
    for suffix, metric in metrics.items():
        if metric is not None and not budget.allows(metric.drop):
            failures.append(
                f"metric {metric.name}{suffix}: {metric.optimized:.4g} against {metric.baseline:.4g}, a drop of "
                f"{metric.drop:.4g}, more than the {budget.words()}"
            )
    return tuple(failures)


def _output_failures(where: str, accuracy: OutputAccuracy, budget: AccuracyBudget, has_metric: bool) -> list[str]:
    failures, found = [], accuracy.tolerance
    if found is not None and found.beyond:
        failures.append(
            f"{where}: {found.beyond} of {found.values} values differ by more than {found.atol:g} of --atol and "
            f"{found.rtol:g} of --rtol, the largest by {accuracy.max_abs:.3g}"
        )
    if not budget.allows_sqnr(accuracy.sqnr_db):
        failures.append(
            f"{where}: SQNR {accuracy.sqnr_db:.1f} dB, less than the {budget.sqnr_db:g} dB of --min-sqnr-db"
            + (", its default on random data" if budget.is_default and budget.drop is None else "")
        )
    measure, drop = drop_of(accuracy)
    if not has_metric and not budget.allows(drop):
        failures.append(f"{where}: 1 - {measure} = {drop:.4g}, more than the {budget.words()}")
    return failures


def _floor_failures(where: str, name: str, accuracy: OutputAccuracy, floor: FloorRecord | None) -> list[str]:
    bound = None if floor is None else floor.outputs.get(name)
    if floor is None or bound is None:
        return []
    least = Floor(floor.agreement, floor.sqnr_db)
    agreement = accuracy.top1_agreement or 0.0
    if bound == "agreement" and least.excess(1 - agreement, 0.0) > 1:
        return [f"{where}: top-1 agreement {agreement:.4g}, less than the {least.agreement:g} of --min-agreement"]
    if bound == "sqnr" and not AccuracyBudget(sqnr_db=least.sqnr_db).allows_sqnr(accuracy.sqnr_db):
        return [f"{where}: SQNR {accuracy.sqnr_db:.1f} dB, less than the {least.sqnr_db:g} dB of --min-sqnr-db"]
    return []


def drop_of(accuracy: OutputAccuracy) -> tuple[str, float]:
    """What bounds the drop of an output without a metric, and its value: 1 - agreement of scores, else 1 - cosine."""
    if accuracy.top1_agreement is not None and accuracy.has_scores:
        return "top-1 agreement", 1.0 - accuracy.top1_agreement
    return "cosine", 1.0 - accuracy.cosine
