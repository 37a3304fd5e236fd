"""The metric of a saved model as its users run the file."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np

from trtopt.accuracy.compare import ConvertingRunner, as_whole
from trtopt.config import AccuracyBudget
from trtopt.errors import InvalidModelError, TrtoptError
from trtopt.pipeline.saved import LOADS
from trtopt.pipeline.verify import Verification, metric_of
from trtopt.report.schema.build import BuildReport
from trtopt.support._lazy import require
from trtopt.support.clock import Clock
from trtopt.support.ort_session import Feeds


def with_saved_metric(
    report: BuildReport, path: Path, job: Verification, budget: AccuracyBudget, clock: Clock
) -> BuildReport:
    """The report with the metric of a saved model as ONNX Runtime runs the file, by its defaults, on the CPU.

    Its kernels round in other places than an engine: they compute FP16 in FP32, and keep what lies between two of them
    in FP32. Where values lie near the edges of 8-bit steps, outputs move by as much as the 8 bits move them. The report
    as it is where the file does not run, and for metrics that compare with FP32.

    Args:
        report: Of the build; its ``saved`` says that the file loads.
        path: The saved model.
        job: How the model was verified.
        budget: What may be lost. A warning says where the file loses more: it is the engine's arithmetic that is gated.
        clock: Times and warnings.
    """
    record, metric = report.accuracy, job.metric
    if report.saved != LOADS or record is None or record.metric is None or metric is None or not metric.runs_the_model:
        return report
    try:
        file = _File(path)
        runner = file if job.feeds is None else ConvertingRunner(file, job.feeds)
        with clock.stage("measure saved model"), as_whole(runner, job.host) as whole:
            found = metric_of(metric, job, job.batched(whole), record.outputs)
    except TrtoptError as error:
        return replace(report, saved=f"{LOADS}; {metric.name} is not measured on it: {error.what}")
    if not budget.allows(found.drop):
        loses = f"a drop of {found.drop:.4g}, more than the {budget.words()}"
        clock.warn("gate", f"metric {metric.name} of the saved model in ONNX Runtime: {found.optimized:.4g}, {loses}")
    accuracy = replace(record, saved_metric=found)
    return replace(report, accuracy=accuracy, warnings=tuple(clock.warnings))


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
