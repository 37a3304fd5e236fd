"""What a measurement gives, whoever took it: runs repeated until their median stands still, layers with their times."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from trtopt.report.schema.build import OutputAccuracy
from trtopt.report.schema.layers import LayerInfo
from trtopt.report.schema.profile import ProfileSource
from trtopt.roofline.work import Work

_PARTS = 4
"""The runs are cut into this many parts of equal length, and the first is left out: what is still settling (clocks that
rise, caches that fill) leaves the figures as the runs become more, however long it took."""
_GROWTH = 1.25
"""Runs at a look over those at the look before: looking costs a sort, which should not stand between all runs."""


@dataclass(frozen=True)
class RunLimits:
    """When to stop.

    Attributes:
        warm_up_runs: Runs before the first that counts, at least, unless they take longer than ``max_seconds``.
        warm_up_seconds: Seconds before the first run that counts, at least.
        min_runs: Runs that count, at least; 4 or more.
        min_seconds: Seconds for the runs that count, at least, unless there are ``max_runs`` before.
        max_runs: Runs that count, at most.
        max_seconds: Seconds for the runs that count, at most; one run is always made.
        tolerance: Largest difference of the parts' medians, as a share of the median of all of them.
        fixed: Whether the runs end as soon as there are ``min_runs`` and ``min_seconds`` of them, and all count: as
            trtexec measures.
    """

    warm_up_runs: int = 5
    warm_up_seconds: float = 0.2
    min_runs: int = 16
    min_seconds: float = 0.3
    max_runs: int = 5000
    max_seconds: float = 10.0
    tolerance: float = 0.02
    fixed: bool = False


@dataclass(frozen=True)
class RunTimes:
    """Times of one thing, repeated.

    Attributes:
        us: Microseconds of the runs that count, in order: the first quarter after the warm-up is left out, unless the
            limits are fixed.
        stable: Whether the medians of the three quarters agree, and there were as many runs as asked for.
    """

    us: tuple[float, ...]
    stable: bool

    @property
    def median_us(self) -> float:
        """The median."""
        return statistics.median(self.us)

    @property
    def spread_us(self) -> float:
        """The median absolute deviation from the median."""
        return spread(self.us)


def spread(values: Sequence[float]) -> float:
    """Median absolute deviation from the median of one or more ``values``, in their unit."""
    middle = statistics.median(values)
    return statistics.median(abs(value - middle) for value in values)


def until_stable(
    run: Callable[[], float], limits: RunLimits = RunLimits(), clock: Callable[[], float] = time.perf_counter
) -> RunTimes:
    """Repeat ``run`` until the medians of the last three quarters of its times agree, or a limit is reached; as often
    as was asked for where the limits are fixed.

    Medians, so that single slow runs (the system's) do not count; three of them over growing parts, so that a drift
    shows and so that noise does not prevent an end, since it averages out as the parts grow. A network that jumps
    between two times for long stretches is not stable; one that alternates is, and its spread says so.

    Args:
        run: Runs once and returns what it took, in microseconds.
        limits: When to stop.
        clock: Seconds that have passed, for the limits.
    """
    start = clock()
    count = 0
    while count < limits.warm_up_runs or clock() - start < limits.warm_up_seconds:
        run()
        count += 1
        if clock() - start >= limits.max_seconds:
            break
    times: list[float] = []
    start = clock()
    look = max(limits.min_runs, _PARTS)
    while True:
        times.append(run())
        if limits.fixed:
            if len(times) >= limits.min_runs and clock() - start >= limits.min_seconds:
                return RunTimes(tuple(times), stable=len(times) < _PARTS or _agree(times, limits.tolerance))
            continue
        if len(times) >= look:
            if clock() - start >= limits.min_seconds and _agree(times, limits.tolerance):
                return RunTimes(_kept(times), stable=True)
            look = math.ceil(len(times) * _GROWTH)
        if len(times) >= limits.max_runs or clock() - start >= limits.max_seconds:
            enough = len(times) >= max(limits.min_runs, _PARTS)
            return RunTimes(_kept(times), stable=enough and _agree(times, limits.tolerance))


def timed(call: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> Callable[[], float]:
    """``call`` as something that returns the microseconds it took by ``clock`` (seconds)."""

    def run() -> float:
        start = clock()
        call()
        return (clock() - start) * 1e6

    return run


def _kept(times: Sequence[float]) -> tuple[float, ...]:
    return tuple(times[len(times) // _PARTS :])


def _agree(times: Sequence[float], tolerance: float) -> bool:
    part = len(times) // _PARTS
    medians = [statistics.median(times[len(times) - part * back :][:part]) for back in range(1, _PARTS)]
    return max(medians) - min(medians) <= tolerance * statistics.median(medians)


@dataclass(frozen=True)
class MeasuredLayer:
    """A layer and its times, in microseconds of one inference.

    Attributes:
        info: The layer; its name is unique in its list (``NAME #2`` for a second one of that name).
        op: The ONNX operator that does the work, or the compiler's layer type.
        work: What it has to do; None where that is not known, or nothing runs.
        measured_us: Mean; 0 for what runs nothing.
        median_us: Median; None where only the mean is known.
        spread_us: Median absolute deviation of the runs; None where the runs are not known.
        sparse_weights: Whether the engine says that its weights are 2:4; None where it says nothing.
    """

    info: LayerInfo
    op: str
    work: Work | None
    measured_us: float
    median_us: float | None = None
    spread_us: float | None = None
    sparse_weights: bool | None = None


@dataclass(frozen=True)
class Measurement:
    """A measured network.

    Attributes:
        source: Where it comes from.
        layers: In the order they run; none is left out.
        end_to_end_us: Median time of one inference without profiling, on the device; None where it is not known.
        end_to_end_spread_us: Median absolute deviation of that.
        host_us: Median time on the host to enqueue one inference; None where it is not known.
        accuracy: By output, against the FP32 reference in the same run; None where the network did not run here.
        warnings: What the reader should know.
    """

    source: ProfileSource
    layers: tuple[MeasuredLayer, ...]
    end_to_end_us: float | None = None
    end_to_end_spread_us: float | None = None
    host_us: float | None = None
    accuracy: Mapping[str, OutputAccuracy] | None = None
    warnings: tuple[str, ...] = ()
