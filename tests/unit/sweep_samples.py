"""Rows and reports of sweeps for tests."""

from __future__ import annotations

from typing import Any

from trtopt.report.schema.sweep import Failure, Result, SweepReport, SweepRow, cost_per_million, with_front

PRICES = {"L4": 0.72, "A10": 0.36}


def result(**changes: Any) -> Result:
    """A result; by default within any limit."""
    fields: dict[str, Any] = {
        **{"model_sha256": "0" * 64, "seconds": 1.5, "measure": "top1", "drop": 0.0, "verified": "onnx-only"},
        **{"latency_us": 1000.0, "latency": "predicted", "batch": 1, "engine": "model.rtx.engine"},
        **{"engine_bytes": 1000, "engine_sha256": "1" * 64, "kernels": 3},
    }
    return Result(**{**fields, **changes})


def row(key: str, gpu: str = "L4", precision: str = "fp16", model: str = "net", **changes: Any) -> SweepRow:
    """A job that was built."""
    found = result(**changes)
    price = PRICES.get(gpu)
    cost = None if price is None or found.latency_us is None else cost_per_million(found.latency_us, found.batch, price)
    varied = {"model": model, "gpu": gpu, "precision": precision}
    return SweepRow(key, varied, model, gpu, precision, "done", found, engine=f"/store/{key}", attempts=1, cost=cost)


def failed(key: str, gpu: str = "V100") -> SweepRow:
    """A job that failed."""
    failure = Failure("It cannot be built", "V100", "name another GPU", 4)
    varied = {"model": "net", "gpu": gpu, "precision": "fp16"}
    return SweepRow(key, varied, "net", gpu, "fp16", "failed", None, failure, attempts=1)


def report(*rows: SweepRow, **changes: Any) -> SweepReport:
    """A sweep of these rows."""
    fields: dict[str, Any] = {
        **{"name": "sweep", "store": "/store", "executor": "local", "seconds": 3.0, "currency": "EUR"},
        **{"prices": PRICES, "environment": {"trtopt": "0.1.0"}},
    }
    return SweepReport(rows=with_front(rows), **{**fields, **changes})
