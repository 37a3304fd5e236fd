"""How inferences of an engine are timed, and what is reported of their times."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from trtopt.profiling.measured import RunLimits, RunTimes


@dataclass(frozen=True)
class TimingOptions:
    """How inferences are timed.

    Attributes:
        limits: How many are made.
        streams: Contexts of the engine that run at once, each with a stream of its own.
        transfers: Whether inputs are copied to the GPU and outputs from it with each inference.
        graph: Whether they are timed with a CUDA graph too, where one can be captured.
    """

    limits: RunLimits = field(default_factory=lambda: RunLimits(max_runs=1_000_000))
    streams: int = 1
    transfers: bool = False
    graph: bool = True


DEFAULT_TIMING = TimingOptions()
"""One inference at a time, without and with a CUDA graph, until the median stands still."""


COLUMNS = (
    *("startEnqMs", "endEnqMs", "startH2dMs", "endH2dMs"),
    *("startComputeMs", "endComputeMs", "startD2hMs", "endD2hMs"),
)
"""Of a trace: milliseconds since timing began, on the host's clock for the first two, on the device for the others. The
names are those of trtexec's ``--exportTimes`` (samples/common/sampleReporting.cpp of TensorRT)."""

PERCENTILES = (90, 95, 99)
"""Beside the median, those that trtexec reports by default."""


def percentile(values: np.ndarray, percent: float) -> float:
    """A percentile as trtexec takes it: a value that was measured, the largest after so many percent are left out.

    The rule, in single precision, is that of ``findPercentile`` in samples/common/sampleReporting.cpp of TensorRT.

    Example:
        >>> percentile(np.arange(100.0), 90)
        89.0
    """
    left_out = int((np.float32(1) - np.float32(percent) / np.float32(100)) * np.float32(len(values)))
    return float(np.sort(values)[max(len(values) - 1 - left_out, 0)])


@dataclass(frozen=True)
class InferenceTiming:
    """Inferences without profiling.

    Attributes:
        device: What each took on the device, transfers left out.
        trace: A row for each of them, float64 [inferences, 8], with the columns :data:`COLUMNS`.
        transfers: Whether inputs and outputs were transferred.
    """

    device: RunTimes
    trace: np.ndarray
    transfers: bool = False

    def span_us(self, start: str, end: str) -> np.ndarray:
        """Microseconds from one column to another, float64 [inferences]."""
        spans: np.ndarray = (self.trace[:, COLUMNS.index(end)] - self.trace[:, COLUMNS.index(start)]) * 1e3
        return spans

    @property
    def host_us(self) -> float:
        """Median time on the host to enqueue one."""
        return float(np.median(self.span_us("startEnqMs", "endEnqMs")))

    @property
    def per_second(self) -> float:
        """Inferences over the time from the start of the first to the end of the last."""
        ends = self.trace[:, COLUMNS.index("endD2hMs")].max() - self.trace[:, COLUMNS.index("startH2dMs")].min()
        return float(len(self.trace) / ends * 1e3) if ends > 0 else 0.0

    def figures(self) -> dict[str, float]:
        """What is reported of it, by name; without transfers the latency is the time on the device."""
        found = {"device_us": self.device.median_us, "device_spread_us": self.device.spread_us}
        found |= _percentiles("device", np.array(self.device.us))
        found |= {"host_us": self.host_us, "per_second": self.per_second, "inferences": len(self.trace)}
        if self.transfers:
            latency = self.span_us("startH2dMs", "endD2hMs")
            found["h2d_us"] = float(np.median(self.span_us("startH2dMs", "endH2dMs")))
            found["d2h_us"] = float(np.median(self.span_us("startD2hMs", "endD2hMs")))
            found |= {"latency_us": float(np.median(latency)), **_percentiles("latency", latency)}
        return found


def _percentiles(name: str, us: np.ndarray) -> dict[str, float]:
    return {f"{name}_p{percent}_us": percentile(us, percent) for percent in PERCENTILES}
