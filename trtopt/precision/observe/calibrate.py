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
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir

from trtopt.cache.code import entry_key
from trtopt.cache.folder import CALIBRATION, FORMATS, Blobs
from trtopt.errors import UsageError
from trtopt.events import Event, OnEvent, ignore
from trtopt.graph import edit
from trtopt.hardware.cpu import available_threads
from trtopt.precision.observe.feeds import Sample
from trtopt.precision.observe.ranges import RangeTable
from trtopt.precision.observe.statistics import StatsBuilder
from trtopt.precision.observe.stream import Samples
from trtopt.support.files import check_writable, open_file
from trtopt.support.ort_session import Feeds, OrtSession
from trtopt.support.threads import in_threads

_MAX_BYTES = 4 << 30
_START = f'{{"format": "{FORMATS[CALIBRATION][:6]}'.encode()
"""How every file starts that :meth:`CacheFile.store` wrote, of this version or another."""


class CacheFile:
    """The cache file of one model and one set of samples, by their hashes.

    It lies in ``folder`` (made when missing; None for ``~/.cache/trtopt``), or is ``file``.

    Raises:
        UsageError: The explicit file cannot be written.
    """

    def __init__(
        self, model_key: str, samples_key: str, *, folder: str | Path | None, file: Path | None, on_event: OnEvent
    ) -> None:
        self._key = entry_key("trtopt.precision.observe.calibrate", model_key, samples_key)
        words = ("calibrate", "calibration cache", "calibrating anew")
        self._blobs = Blobs(CALIBRATION, folder, on_event, words, _MAX_BYTES, file)
        if file is not None:
            check_own(file)
            check_writable(file)

    def load(self) -> tuple[RangeTable, int] | None:
        """The table and the number of samples it was made from, or None when there is none; says why if the file is
        there."""
        return self._blobs.load(self._key, _table_of)

    def store(self, table: RangeTable, samples: int) -> None:
        """Write them, whole or not at all; where that fails, the samples were run and a warning is enough."""
        self._blobs.store(self._key, [f"{samples}\n".encode(), table.to_bytes()])


def _table_of(content: memoryview) -> tuple[RangeTable, int]:
    samples, _, table = bytes(content).partition(b"\n")
    return RangeTable.from_bytes(table), int(samples)


def check_own(file: Path) -> None:
    """Refuse a file that is not one of ours, so that it is never written over.

    Raises:
        UsageError: The file holds something, and that is no statistics of trtopt, not even damaged ones.
    """
    try:
        with open_file(file, "The calibration cache") as opened:
            start = opened.read(len(_START))
    except UsageError:
        return  # check_writable says what is wrong with it
    if start and start != _START:
        raise UsageError(
            "The calibration cache is neither a file of trtopt's statistics nor a calibration cache of TensorRT",
            where=str(file),
            remedy="name another file for --calib-cache; this one was left as it is",
        )


_TASK = "calibrate"
_WORKERS = 2
"""Samples in flight, where there are several cores."""


@dataclass(frozen=True)
class Calibration:
    """What calibration found.

    Attributes:
        table: Statistics by tensor name.
        samples: The caller's samples that were run, however they were joined to batches.
        seconds: Wall time of this run; 0 when the table came from the cache.
        peak_rss_bytes: Peak resident memory of the process so far; 0 where the system does not tell.
        cached: Whether the table came from the cache.
    """

    table: RangeTable
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

        rows = 0

        def work(_: int, taken: tuple[Sample, int]) -> None:
            nonlocal rows
            sample, held = taken
            outputs = session.run(sample) if session is not None else []
            with counting:
                rows += held
                for name in builders.keys() & sample.keys():
                    builders[name].update(sample[name])
                for name in reversed(computed):
                    builders[name].update(outputs.pop())  # each output is released as soon as it is counted
                on_event(Event("advance", _TASK))

        in_threads(samples.with_rows(), work, workers, _TASK)
    table = RangeTable({name: builder.finish() for name, builder in builders.items()})
    on_event(Event("end", _TASK))
    _warn_nonfinite(model, table, on_event)
    return Calibration(table, rows, time.perf_counter() - started, peak_rss_bytes())


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

    Raises:
        UsageError: As :func:`collect`, or the cache cannot be written where it was asked for.
    """
    known = cache.load()
    if known is not None:
        table, count = known
        if table.covers(histogram, ranges):
            return Calibration(table, count, 0.0, peak_rss_bytes(), cached=True)
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


def _warn_nonfinite(model: ir.Model, table: RangeTable, on_event: OnEvent) -> None:
    """Say which tensors are not finite. It need not be a fault: relative positions (T5) take the logarithm of zero,
    cast it to an integer and leave that out."""
    broken = {name for name, stats in table.stats.items() if stats.nonfinite}
    if not broken:
        return
    made = [(str(value.name), node) for node in model.graph for value in node.outputs if value.name in broken]
    first, maker = made[0] if made else (min(broken), None)
    share = table.stats[first]
    where = first if maker is None else f"{first} ({maker.op_type})"
    ends = sorted({node.op_type for node in model.graph if _is_end(node, broken)})
    leaks = any(_leaks(value, table, broken) for node in model.graph for value in node.outputs)
    why = "the model or the samples are at fault" if leaks or not ends else f"they end in {' and '.join(ends)}"
    text = f"{len(broken)} tensors hold NaN or infinity in the FP32 reference, the first {where}: {share.nonfinite} of "
    on_event(Event("warning", _TASK, text=f"{text}{share.count} elements; {why}"))


def _is_end(node: ir.Node, broken: Collection[str]) -> bool:
    """Whether a node reads what is not finite, and what it makes holds no such number."""
    reads = any(value is not None and value.name in broken for value in node.inputs)
    return reads and not any(value.name in broken for value in node.outputs)


def _leaks(value: ir.Value, table: RangeTable, broken: Collection[str]) -> bool:
    """Whether what is not finite reaches an output, or a floating tensor that was not observed."""
    if value.name in broken:
        return value.is_graph_output()
    node = value.producer()
    reads = node is not None and any(given is not None and given.name in broken for given in node.inputs)
    is_floating = value.dtype is None or value.dtype.is_floating_point()
    return reads and is_floating and value.name not in table.stats


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


_CHANNELS_TASK = "channels"
_AXES_ARE_AN_INPUT = 18
"""From this opset on, ReduceMax and its like take their axes as an input."""


@dataclass(frozen=True, eq=False)
class ChannelStats:
    """The largest magnitude and the mean square of each channel of a tensor over all samples, float32
    ``[channels]``."""

    absmax: np.ndarray
    mean_square: np.ndarray


def product_inputs(model: ir.Model, nodes: Collection[str]) -> dict[str, int]:
    """The data inputs of products, with the axis that counts the channels; negative axes count from the end."""
    found = {}
    for node in model.graph:
        data = node.inputs[0] if node.name in nodes else None
        if data is not None and edit.constant_tensor_of(data) is None:
            found[str(data.name)] = 1 if node.op_type in ("Conv", "ConvTranspose") else -1
    return found


def channel_stats(
    model: ir.Model, samples: Iterable[Feeds], tensors: Mapping[str, int], on_event: OnEvent = ignore
) -> dict[str, ChannelStats]:
    """Run samples and observe channels; tensors that held NaN or infinity are left out.

    The graph itself reduces each tensor, so that memory holds no more of them than inference does, whatever the number
    of samples.

    Args:
        model: A widened model.
        samples: The samples.
        tensors: Floating tensors of the main graph, by name, with the axis that counts the channels.
        on_event: Told of progress.

    Raises:
        UsageError: A sample is bad.
        InvalidModelError: ONNX Runtime cannot load or run the model.
    """
    observed = model.clone()
    outputs = _observe(observed, tensors)
    sums: dict[str, list[np.ndarray]] = {}
    on_event(Event("start", _CHANNELS_TASK))
    if outputs:
        with OrtSession(observed) as session:
            for feeds in samples:
                got = dict(zip(session.output_names, session.run(feeds), strict=True))
                for name, (low, high, square, shape) in outputs.items():
                    _add_channels(sums, name, [got[low], got[high], got[square]], int(np.prod(got[shape])))
                on_event(Event("advance", _CHANNELS_TASK))
    on_event(Event("end", _CHANNELS_TASK))
    found = {}
    for tensor, (absmax, total, count) in sums.items():
        if np.isfinite(absmax).all() and np.isfinite(total).all():
            mean = total / np.maximum(count / max(absmax.size, 1), 1)
            found[tensor] = ChannelStats(absmax.astype(np.float32), mean.astype(np.float32))
    return found


def _add_channels(sums: dict[str, list[np.ndarray]], name: str, got: list[np.ndarray], elements: int) -> None:
    low, high, square = (array.astype(np.float64) for array in got)
    absmax = np.maximum(np.abs(low), np.abs(high))
    if name not in sums:
        sums[name] = [absmax, square, np.asarray(float(elements))]
        return
    known = sums[name]
    sums[name] = [np.maximum(known[0], absmax), known[1] + square, known[2] + elements]


def _observe(model: ir.Model, tensors: Mapping[str, int]) -> dict[str, tuple[str, str, str, str]]:
    """Make reductions of tensors the outputs of ``model``: names of the smallest, the largest, the sum of squares, the
    shape. Tensors whose rank is not known are left out."""
    graph, names = model.graph, edit.Names(model)
    values = {value.name: value for value in graph.inputs}
    values.update((value.name, value) for node in graph for value in node.outputs)
    opset = graph.opset_imports.get("", 0)
    found = {}
    results: list[ir.Value] = []
    for tensor, axis in tensors.items():
        value = values[tensor]
        if value.shape is None or not len(value.shape):
            continue
        rank = len(value.shape)
        axes = [other for other in range(rank) if other != axis % rank]
        made = [_reduced(graph, names, value, kind, axes, opset) for kind in ("Min", "Max", "SumSquare")]
        shape = edit.new_node("Shape", [value], name=names.node(f"{tensor}/shape"), output=names.value(f"{tensor}/s"))
        shape.outputs[0].type = ir.TensorType(ir.DataType.INT64)
        graph.append(shape)
        made.append(shape.outputs[0])
        results.extend(made)
        low, high, square, dims = (str(item.name) for item in made)
        found[tensor] = (low, high, square, dims)
    graph.outputs[:] = results
    return found


def _reduced(graph: ir.Graph, names: edit.Names, value: ir.Value, kind: str, axes: list[int], opset: int) -> ir.Value:
    name = f"{value.name}/{kind}"
    inputs: list[ir.Value | None] = [value]
    node = edit.new_node(f"Reduce{kind}", inputs, name=names.node(name), output=names.value(name))
    node.attributes["keepdims"] = ir.AttrInt64("keepdims", 0)
    if opset >= _AXES_ARE_AN_INPUT:
        node.resize_inputs(2)
        node.replace_input_with(1, edit.add_initializer(graph, names.value(f"{name}/axes"), np.asarray(axes, np.int64)))
    else:
        node.attributes["axes"] = ir.AttrInt64s("axes", axes)
    node.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
    graph.append(node)
    return node.outputs[0]
