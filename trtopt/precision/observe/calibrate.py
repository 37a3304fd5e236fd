"""Streaming calibration: the FP32 graph is run sample by sample, and the statistics of its tensors are updated.

Measured on ResNet-50 (two cores, 9.1 million counted elements per sample): inference takes 36 ms of one core.
``numpy.add.at`` with int64 indices counts an element in 0.8 to 1.1 ns, in place; ``numpy.bincount`` in 1.0 to 1.6 ns
and an array of all bins per call; a sort in 1.3 to 2.4 ns. ``add.at`` holds Python's lock, and two threads that count
at the same time hand it to and fro at each pass over a chunk, which costs more than the counting. So two workers run
samples, each on half of the cores, and count in turn: the cores stay busy without a queue, and memory holds the
observed tensors of two samples, whatever their number. (A third worker gains nothing and holds a third sample.)
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import onnx_ir as ir

from trtopt.events import Event, OnEvent, ignore
from trtopt.hardware.cpu import available_threads
from trtopt.precision.observe.feeds import Sample
from trtopt.precision.observe.ranges import RangeTable
from trtopt.precision.observe.samples import Samples
from trtopt.precision.observe.statistics import StatsBuilder
from trtopt.precision.observe.statistics_cache import CacheFile
from trtopt.support.ort_session import OrtSession
from trtopt.support.threads import in_threads

_TASK = "calibrate"
_WORKERS = 2
"""Samples in flight, where there are several cores."""


@dataclass(frozen=True)
class Calibration:
    """What calibration found.

    Attributes:
        table: Statistics by tensor name.
        source: ``user`` or ``synthetic``.
        samples: Samples run.
        seconds: Wall time of this run; 0 when the table came from the cache.
        peak_rss_bytes: Peak resident memory of the process so far; 0 where the system does not tell.
        cached: Whether the table came from the cache.
    """

    table: RangeTable
    source: Literal["user", "synthetic"]
    samples: int
    seconds: float
    peak_rss_bytes: int
    cached: bool = False


def collect(
    model: ir.Model,
    samples: Samples,
    *,
    histogram: Collection[str],
    ranges: Collection[str] = (),
    on_event: OnEvent = ignore,
) -> Calibration:
    """Run the samples through the FP32 graph and collect statistics of its tensors.

    Every element of every sample is counted, and memory does not grow with the number of samples. The table does not
    depend on the order of the samples or on how they are batched (as long as ONNX Runtime's results do not).

    Args:
        model: The graph, in FP32.
        samples: The samples.
        histogram: Names of floating tensors of the main graph whose histogram is wanted (INT8 ranges).
        ranges: Names of those of which the ranges are enough: a third of the time of a histogram.
        on_event: Told of progress, and warned of tensors that are NaN or infinite in the FP32 reference.

    Raises:
        ValueError: A name is not a floating tensor of the main graph.
        UsageError: A sample is bad.
        InvalidModelError: ONNX Runtime cannot load or run the model.
        MissingDependencyError: ONNX Runtime is not installed.
    """
    started = time.perf_counter()
    wanted = dict.fromkeys(histogram, True) | dict.fromkeys(set(ranges) - set(histogram), False)
    inputs = _check_names(model, wanted)
    builders = {name: StatsBuilder(full) for name, full in wanted.items()}
    computed = [name for name in wanted if name not in inputs]
    cores, counting = available_threads(), threading.Lock()
    workers = _WORKERS if cores > 1 else 1
    on_event(Event("start", _TASK, total=samples.count))
    with contextlib.ExitStack() as stack:
        session = (
            stack.enter_context(OrtSession(model, computed, threads=max(1, cores // workers))) if computed else None
        )

        def work(_: int, sample: Sample) -> None:
            outputs = session.run(sample) if session is not None else []
            with counting:
                for name in builders.keys() & sample.keys():
                    builders[name].update(sample[name])
                for name in reversed(computed):
                    builders[name].update(outputs.pop())  # each output is released as soon as it is counted
                on_event(Event("advance", _TASK))

        count = in_threads(samples, work, workers, _TASK)
    table = RangeTable({name: builder.finish() for name, builder in builders.items()})
    on_event(Event("end", _TASK))
    _warn_nonfinite(table, on_event)
    return Calibration(table, samples.source, count, time.perf_counter() - started, peak_rss_bytes())


def cached_collect(
    model: ir.Model,
    samples: Samples,
    cache: CacheFile,
    *,
    histogram: Collection[str],
    ranges: Collection[str] = (),
    on_event: OnEvent = ignore,
) -> Calibration:
    """As :func:`collect`, unless the statistics of this model and these samples are in the cache.

    One file serves all options: when it lacks a tensor, its tensors and the wanted ones are collected together, so
    that going back to earlier options finds theirs again. A file that is damaged or of another model is replaced.

    Args:
        model: The graph, in FP32.
        samples: The samples.
        cache: Where the statistics of this model and these samples are kept.
        histogram: See :func:`collect`.
        ranges: See :func:`collect`.
        on_event: Progress, and warnings.

    Raises:
        UsageError: A sample is bad, or the cache cannot be written where it was asked for.
        InvalidModelError: ONNX Runtime cannot load or run the model.
        MissingDependencyError: ONNX Runtime is not installed.
    """
    known = cache.load()
    if known is not None:
        table, count = known
        if table.covers(histogram, ranges):
            return Calibration(table, samples.source, count, 0.0, peak_rss_bytes(), cached=True)
        stats = table.stats
        histogram = {*histogram, *(name for name in stats if stats[name].has_histogram)}
        ranges = {*ranges, *stats}
    found = collect(model, samples, histogram=histogram, ranges=ranges, on_event=on_event)
    cache.store(found.table, found.samples)
    return found


def _check_names(model: ir.Model, wanted: Mapping[str, bool]) -> frozenset[str]:
    """The names of the graph's inputs, once all of ``wanted`` are known to be floating tensors of the main graph."""
    inputs = {str(value.name): value for value in model.graph.inputs if value.name not in model.graph.initializers}
    values = dict(inputs)
    values.update((str(value.name), value) for node in model.graph for value in node.outputs)
    for name in wanted:
        value = values.get(name)
        if value is None or (value.dtype is not None and not value.dtype.is_floating_point()):
            raise ValueError(f"{name!r} is not a floating tensor that the main graph computes")
    return frozenset(inputs)


def _warn_nonfinite(table: RangeTable, on_event: OnEvent) -> None:
    broken = [name for name, stats in table.stats.items() if stats.nonfinite]
    if broken:
        share = table.stats[broken[0]]
        on_event(
            Event(
                "warning",
                _TASK,
                text=f"{len(broken)} tensors hold NaN or infinity in the FP32 reference, the first {broken[0]} "
                f"({share.nonfinite} of {share.count} elements): the model or the samples are at fault",
            )
        )


def peak_rss_bytes() -> int:
    """Peak resident memory of this process; 0 where the system does not tell (Windows).

    On Linux the kernel's own figure for this program: ``getrusage`` starts a new program at its parent's peak.
    """
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    try:
        import resource
    except ImportError:
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
