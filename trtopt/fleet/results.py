"""What the report of a build says of a job, as a row of the sweep's report."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from trtopt.accuracy.metric import drop_of
from trtopt.engine.backend import BACKENDS
from trtopt.errors import UsageError
from trtopt.fleet.plan import Job
from trtopt.fleet.store import Entry
from trtopt.fleet.task import PROFILE, REPORT
from trtopt.report.schema.build import AccuracyRecord, BuildReport
from trtopt.report.schema.profile import ProfileReport
from trtopt.report.schema.read import read_profile, read_report
from trtopt.report.schema.sweep import Result, Status, SweepRow, cost_per_million


def result_of(folder: Path, seconds: float) -> Result:
    """What a finished job left in a folder.

    Raises:
        UsageError: Its report is not there, or wrong.
    """
    report = read_report(folder / REPORT)
    if not isinstance(report, BuildReport):
        raise UsageError("The report is not that of a build", where=str(folder / REPORT), remedy="run the job again")
    measured = read_profile(folder / PROFILE) if (folder / PROFILE).exists() else None
    engine = report.engine
    written = bool(engine is not None and (folder / f"model{BACKENDS[engine.backend].suffix}").exists())
    measure, drop = _drop(report.accuracy)
    latency = _measured_us(measured)
    if latency is None and report.analysis is not None:
        latency = report.analysis.totals.predicted_us
    return Result(
        model_sha256=str(report.model["sha256"]),
        seconds=round(seconds, 3),
        measure=measure,
        drop=drop,
        verified="" if report.accuracy is None else report.accuracy.verified,
        latency_us=latency,
        latency="predicted" if measured is None else "measured",
        batch=_batch(report),
        engine=f"model{BACKENDS[engine.backend].suffix}" if engine is not None and written else "",
        engine_bytes=0 if engine is None else engine.bytes,
        engine_sha256="" if engine is None else engine.sha256,
        kernels=0 if engine is None else engine.kernels,
        failures=() if written else report.gate_failures,
    )


def row_of(job: Job, key: str, entry: Entry | None, price: float | None, location: str) -> SweepRow:
    """A row with what the store has of a job.

    Args:
        job: The job.
        key: Its key.
        entry: What the store has; None where it has nothing.
        price: Of an hour of its GPU; None where nobody said.
        location: Path or URL of its engine.
    """
    found = None if entry is None else entry.result
    status: Status = "failed" if found is None else ("gate" if found.failures else "done")
    cost = None
    if found is not None and found.engine and price is not None and found.latency_us is not None:
        cost = cost_per_million(found.latency_us, found.batch, price)
    engine = location if found is not None and found.engine else ""
    return SweepRow(key, job.varied, job.model, job.gpu, job.precision, status, found, engine=engine, cost=cost)


def _drop(accuracy: AccuracyRecord | None) -> tuple[str, float | None]:
    """What accuracy is measured by, and its drop; the engine's own outputs count where it ran."""
    if accuracy is None:
        return "", None
    metric = accuracy.product_metric
    if metric is not None and math.isfinite(metric.drop):
        return metric.name.replace("\\", "/").rpartition("/")[2], metric.drop
    outputs = accuracy.engine or accuracy.outputs
    found = [drop_of(item) for name, item in outputs.items() if name not in accuracy.host_outputs]
    if not found:
        return "", None
    measure, drop = max(found, key=lambda item: math.inf if math.isnan(item[1]) else item[1])
    return measure, drop if math.isfinite(drop) else None


def _measured_us(report: ProfileReport | None) -> float | None:
    if report is None:
        return None
    return report.totals.measured_us if report.totals.end_to_end_us is None else report.totals.end_to_end_us


def _batch(report: BuildReport) -> int:
    """The first dimension of the first input at the optimum; 1 where it has none."""
    inputs = report.model["inputs"]
    first: dict[str, Any] = inputs[0] if inputs else {"name": ""}
    profiles = () if report.engine is None else report.engine.profiles
    shape = profiles[0].get(str(first["name"]), {}).get("opt") if profiles else None
    shape = shape or first.get("shape") or [1]
    return shape[0] if isinstance(shape[0], int) and shape[0] > 0 else 1
