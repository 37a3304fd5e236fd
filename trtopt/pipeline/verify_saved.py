"""The metric of a saved model as its users run the file."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import onnx_ir as ir

from trtopt.accuracy.compare import ConvertingRunner, as_whole
from trtopt.errors import InvalidModelError, TrtoptError
from trtopt.pipeline.saved import LOADS, computes_wrong, is_refused, tried_in_onnxruntime
from trtopt.pipeline.verify import Verification, metric_of
from trtopt.report.schema.build import AccuracyRecord
from trtopt.source.save import save_model
from trtopt.support._lazy import require
from trtopt.support.clock import Clock
from trtopt.support.ort_session import Feeds


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
    if computes_wrong(model) or is_refused(model):
        return record
    with TemporaryDirectory() as folder, clock.stage("measure saved model"):
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
