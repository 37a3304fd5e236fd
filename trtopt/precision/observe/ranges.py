"""The ranges of tensors: the table of statistics, INT8 ranges chosen from histograms, and magnitudes through operators.

INT8 is symmetric with the levels -127..127: ``scale = amax / 127``. The methods see the density of ``|x|`` as
constant within each bin of the histogram, which makes the quantization error a closed form.
"""

from __future__ import annotations

import io
import json
import math
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx_ir as ir

from trtopt.graph import edit
from trtopt.precision.observe.statistics import TensorStats, bin_edges
from trtopt.report.text.format import some
from trtopt.support.json_text import check_text
from trtopt.support.memo import once_per_array

LEVELS = 127
"""The largest INT8 level of a symmetric scale (TensorRT clips at -128, Q/DQ weights and TensorRT's own use -127)."""

METHODS = ("max", "percentile", "entropy", "mse")
"""Methods that give a range, in the order in which ``auto`` prefers them when their errors are equal."""

PERCENTILE = 99.99

_KL_LEVELS = 128
_KL_BINS_PER_LEVEL = 8
_GRID = 24
_REFINE = 7
_REFINEMENTS = 2


class _Moments:
    """Integrals of the density of ``|x|`` from 0 to any point: its count, first and second moment."""

    def __init__(self, stats: TensorStats) -> None:
        if stats.bins is None or stats.counts is None:
            raise ValueError("INT8 ranges need the histogram of the tensor")
        low, high = bin_edges(stats.bins)
        self.absmax = stats.absmax
        # The exact largest value is known: the top bin ends there. A bin of no width would have no density.
        if high.size:
            high[-1] = max(self.absmax, np.nextafter(low[-1], np.inf))
        self.low, self.width, self.counts = low, high - low, stats.counts.astype(np.float64)
        means = (self.counts * self._mean(order, np.ones_like(low), slice(None)) for order in range(3))
        self.sums = [np.concatenate(([0.0], np.cumsum(values))) for values in means]
        self.total = float(stats.count - stats.nonfinite)

    def _mean(self, order: int, part: np.ndarray, index: slice | np.ndarray) -> np.ndarray:
        """Integral of ``x^order`` over the first ``part`` of the bins, over their width."""
        low = self.low[index]
        if order == 0:
            return part
        end = low + part * self.width[index]
        mean = (low + end) / 2 if order == 1 else (low * low + low * end + end * end) / 3
        return np.asarray(part * mean)

    def at(self, points: np.ndarray, orders: int = 3) -> list[np.ndarray]:
        """The first ``orders`` of the integrals, from just above 0 to each of ``points``."""
        index = np.searchsorted(self.low, points, side="right") - 1
        inside = np.maximum(index, 0)
        part = np.clip((points - self.low[inside]) / self.width[inside], 0.0, 1.0)
        before = [sums[inside] for sums in self.sums[:orders]]
        return [
            np.where(index < 0, 0.0, start + self.counts[inside] * self._mean(order, part, inside))
            for order, start in enumerate(before)
        ]

    def quantile(self, share: float) -> float:
        """The value that ``share`` of the elements, zeros included, do not exceed (an upper bin edge)."""
        return self._upper_edge(share * self.total - (self.total - float(self.sums[0][-1])))

    def median_nonzero(self) -> float:
        """The median of the elements that are not zero."""
        return self._upper_edge(0.5 * float(self.sums[0][-1]))

    def _upper_edge(self, below: float) -> float:
        index = min(int(np.searchsorted(self.sums[0][1:], below)), self.low.size - 1)
        return min(float(self.low[index] + self.width[index]), self.absmax)


def quantization_error(stats: TensorStats, amax: float) -> float:
    """Mean squared error of rounding the tensor to symmetric INT8 with the range ``amax``, in its unit squared.

    Raises:
        ValueError: The tensor has no histogram.
    """
    moments = _Moments(stats)
    return float(_squared_errors(moments, np.array([amax]))[0]) if moments.low.size else 0.0


def int8_sqnr_db(stats: TensorStats, amax: float) -> float:
    """Signal to noise of the tensor in symmetric INT8 with the range ``amax``, in dB; infinite without noise.

    Raises:
        ValueError: The tensor has no histogram.
    """
    moments = _Moments(stats)
    power = float(moments.sums[2][-1]) / moments.total if moments.total else 0.0
    noise = quantization_error(stats, amax)
    return 10 * math.log10(power / noise) if power > 0 and noise > 0 else math.inf


def _squared_errors(moments: _Moments, candidates: np.ndarray) -> np.ndarray:
    """Mean squared error for each range in ``candidates``.

    Between two rounding boundaries ``(k - 1/2) s`` and ``(k + 1/2) s`` the error is ``(x - k s)^2``, which the moments
    integrate exactly; the last level also takes everything above.
    """
    level = np.arange(LEVELS + 1)
    edges = (level[1:] - 0.5) * candidates[:, None] / LEVELS
    values = level * candidates[:, None] / LEVELS
    ends = [float(sums[-1]) for sums in moments.sums]
    parts = []
    for order, inner in enumerate(moments.at(edges)):
        outer = np.zeros((len(candidates), 1))
        parts.append(np.diff(np.concatenate((outer, inner, outer + ends[order]), axis=1)))
    error = (parts[2] - 2 * values * parts[1] + values * values * parts[0]).sum(axis=1)
    result: np.ndarray = np.maximum(error, 0.0) / moments.total
    return result


def _divergences(moments: _Moments, candidates: np.ndarray) -> np.ndarray:
    """Kullback-Leibler divergence of the histogram from its form in 128 levels, for each range.

    As in TensorRT's entropy calibration (Migacz, "8-bit inference with TensorRT", GTC 2017): the reference is the
    clipped histogram with everything above the range put into its last bin; the quantized form spreads the count of
    each level evenly over the level's non-empty bins, without what was clipped. The bins are a fixed number per level
    of the range under test (the original has bins of one width, so that small ranges have one bin per level and always
    fit). Zeros are left out: INT8 represents them exactly, and a ReLU's would drown the rest.
    """
    bins = _KL_LEVELS * _KL_BINS_PER_LEVEL
    edges = np.arange(1, bins + 1) * candidates[:, None] / bins
    below = moments.at(edges, orders=1)[0]
    inside = np.diff(np.concatenate((np.zeros((len(candidates), 1)), below), axis=1))
    inside = np.maximum(inside, 0.0)
    total = float(moments.sums[0][-1])
    reference = inside.copy()
    reference[:, -1] += total - below[:, -1]
    levels = inside.reshape(len(candidates), _KL_LEVELS, _KL_BINS_PER_LEVEL)
    filled = levels > 0
    spread = levels.sum(axis=2, keepdims=True) / np.maximum(filled.sum(axis=2, keepdims=True), 1)
    quantized = np.where(filled, spread, 0.0).reshape(len(candidates), bins)
    kept = np.maximum(below[:, -1:], np.finfo(np.float64).tiny)
    # Where only clipped values fall, the quantized form has no mass: a share of one element stands for it.
    ratio = np.where(reference > 0, (reference / total) / np.maximum(quantized / kept, 1e-3 / total), 1.0)
    result: np.ndarray = (reference / total * np.log(ratio)).sum(axis=1)
    return result


def _search(moments: _Moments, cost: Callable[[_Moments, np.ndarray], np.ndarray]) -> float:
    """The range of least ``cost``: a geometric grid from the median of the non-zeros to the maximum, then refined."""
    low = moments.median_nonzero()
    candidates = np.geomspace(low, moments.absmax, _GRID) if low < moments.absmax else np.array([moments.absmax])
    for _ in range(_REFINEMENTS):
        costs = cost(moments, candidates)
        best = int(len(costs) - 1 - np.argmin(costs[::-1]))
        if len(candidates) == 1:
            break
        left, right = candidates[max(best - 1, 0)], candidates[min(best + 1, len(candidates) - 1)]
        candidates = np.union1d(np.geomspace(left, right, _REFINE), candidates[best])
    costs = cost(moments, candidates)
    return float(candidates[len(costs) - 1 - np.argmin(costs[::-1])])


def choose_amax(stats: TensorStats, method: str) -> tuple[float, str]:
    """The INT8 range of a tensor by one of ``METHODS`` or ``auto``, and the method; 0 where it was always zero.

    ``max`` is the largest ``|x|``; ``percentile`` the 99.99th percentile of ``|x|``; ``entropy`` minimises the
    Kullback-Leibler divergence; ``mse`` the squared quantization error; ``auto`` takes the one of these four with the
    least squared quantization error.

    Raises:
        ValueError: The tensor has no histogram, or the method is unknown.
    """
    if method not in (*METHODS, "auto"):
        raise ValueError(f"unknown calibration method {method!r}")
    moments = _Moments(stats)
    if not moments.low.size:
        return 0.0, "max"
    if method != "auto":
        return _amax(moments, method), method
    found = np.array([_amax(moments, name) for name in METHODS])
    best = int(np.argmin(_squared_errors(moments, found)))
    return float(found[best]), METHODS[best]


def _amax(moments: _Moments, method: str) -> float:
    if method == "max":
        return moments.absmax
    if method == "percentile":
        return moments.quantile(PERCENTILE / 100)
    return _search(moments, _divergences if method == "entropy" else _squared_errors)


@dataclass(frozen=True)
class RangeTable:
    """Statistics by tensor name, over all samples."""

    stats: Mapping[str, TensorStats]

    def __post_init__(self) -> None:
        object.__setattr__(self, "stats", MappingProxyType(dict(self.stats)))

    def covers(self, histogram: Collection[str], ranges: Collection[str]) -> bool:
        """Whether every tensor of ``histogram`` has one here, and every tensor of ``ranges`` is here."""
        return all(name in self.stats and self.stats[name].has_histogram for name in histogram) and all(
            name in self.stats for name in ranges
        )

    def to_bytes(self) -> bytes:
        """The table as an ``.npz`` without pickles; the same table always gives the same bytes."""
        names = sorted(self.stats)
        histograms = [name for name in names if self.stats[name].has_histogram]
        header = {
            "tensors": {name: self.stats[name].scalars() for name in names},
            "histograms": {name: len(self.stats[name].bins) for name in histograms},  # type: ignore[arg-type]
        }
        empty = np.zeros(0, np.int64)
        arrays: dict[str, np.ndarray] = {
            "header": np.frombuffer(json.dumps(header).encode(), np.uint8),
            "bins": np.concatenate([empty, *(self.stats[name].bins for name in histograms)]).astype(np.int32),
            "counts": np.concatenate([empty, *(self.stats[name].counts for name in histograms)]),
        }
        buffer = io.BytesIO()
        # At level 1 the 14 MB of a ViT-B become 3.2 in 0.07 s of one core; numpy's level takes 0.5 s for 3.0.
        with zipfile.ZipFile(buffer, "w") as archive:
            for name, array in arrays.items():
                np.lib.format.write_array(file := io.BytesIO(), array, allow_pickle=False)
                archive.writestr(zipfile.ZipInfo(f"{name}.npy"), file.getvalue(), zipfile.ZIP_DEFLATED, 1)
        return buffer.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes) -> RangeTable:
        """Read what :meth:`to_bytes` wrote.

        Raises:
            ValueError: The data is damaged or inconsistent.
        """
        try:
            with np.load(io.BytesIO(data), allow_pickle=False) as archive:
                text = archive["header"].tobytes()
                header = json.loads(text)  # which may hold infinities
                check_text(text, header)
                bins, counts = archive["bins"], archive["counts"]
            lengths = header["histograms"]
            if sum(lengths.values()) != len(bins) or len(bins) != len(counts):
                raise ValueError("the histograms are incomplete")
            ends = dict(zip(lengths, np.cumsum(list(lengths.values())).tolist(), strict=True))
            stats = {}
            for name, scalars in header["tensors"].items():
                part = slice(ends[name] - lengths[name], ends[name]) if name in lengths else None
                histogram = (None, None) if part is None else (bins[part], counts[part])
                stats[name] = TensorStats(*_numbers(scalars), *histogram)
            return cls(stats)
        except (KeyError, TypeError, AttributeError, OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            raise ValueError(f"not a table of statistics: {error}") from error


def _numbers(scalars: Any) -> Iterator[Any]:
    """The fields of a tensor's statistics but its histogram; the fourth is missing where that is.

    Raises:
        ValueError: One is of another kind.
    """
    number = (int, float)
    kinds: list[Any] = [int, number, number, (int, type(None)), int, number]
    for value, kind in zip(scalars, kinds, strict=True):
        if not isinstance(value, kind) or isinstance(value, bool):
            raise ValueError(f"{value!r} among the statistics of a tensor")
        yield value


@once_per_array
def finite_range(array: np.ndarray) -> tuple[float, float]:
    """Lowest and highest finite element, (0, 0) without any."""
    if array.size == 0:
        return 0.0, 0.0
    low, high = float(array.min()), float(array.max())
    if np.isfinite(low) and np.isfinite(high):
        return low, high
    finite = array[np.isfinite(array)]
    return (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)


LARGEST_SANE = 1e6
"""Pixels reach 255, 16-bit audio 32768, activations of trained networks thousands; beyond are fill values, counters
and samples without their normalisation."""

SMALLEST_SANE = 1e-6
"""A tensor that stays below is normalised twice, or empty but for noise."""

LARGEST_TAIL = 254.0
"""Largest ``|x|`` over the 99.99th percentile. From here on 99.99 % of the values are less than half a step of an INT8
range that spans them all (127 steps), and become 0. The largest seen in five trained networks is 6.3 (MiniLM)."""

_QUANTILE = 0.9999
_FEWEST = 256
"""A tensor of fewer elements, over all samples, may be constant: a sampling rate, a threshold."""

_SHOWN = 5


def range_warnings(stats: Mapping[str, TensorStats], inputs: Collection[str] = ()) -> list[str]:
    """What is suspicious in calibration statistics, one line per kind, the tensors named.

    Tensors with a histogram (INT8 will take its scale from them) and inputs of the network are looked at. Others may be
    what they like: a mask is constant, or reaches -3.4e38. Thresholds are this module's constants.

    Returns:
        Texts for the user; empty when nothing is suspicious.
    """
    found: dict[str, list[str]] = {}
    for name, each in stats.items():
        if each.has_histogram or name in inputs:
            label = f"input {name}" if name in inputs else name
            for kind, number in _suspicions(each):
                found.setdefault(kind, []).append(f"{label}{number}")
    return [f"{some(names, _SHOWN)}: {kind}" for kind, names in found.items()]


def _suspicions(stats: TensorStats) -> Iterator[tuple[str, str]]:
    """What is wrong and what that means, and the number that shows it."""
    if stats.count == stats.nonfinite:
        return  # calibration warns of these itself
    largest = stats.absmax
    if largest == 0:
        yield "0 in every sample, so that the samples do not show its range; check how the samples are made", ""
    elif stats.minimum == stats.maximum and stats.count >= _FEWEST:
        text = "the same number in every element of every sample; check how the samples are made"
        yield text, f" ({stats.minimum:.3g})"
    elif largest > LARGEST_SANE:
        yield "values this large are fill values or data without normalisation", f" (up to {largest:.3g})"
    elif largest < SMALLEST_SANE:
        yield "values this small are data normalised twice, or noise", f" (up to {largest:.3g})"
    else:
        tail = _tail(stats)
        if tail > LARGEST_TAIL:
            text = "a few values far beyond the others: outliers in the samples set the range, or INT8 does not suit it"
            yield text, f" (largest is {tail:.3g} times the 99.99th percentile)"


def _tail(stats: TensorStats) -> float:
    """The largest ``|x|`` over the 99.99th percentile of those above zero; 1 without a histogram."""
    if stats.bins is None or stats.counts is None or not stats.bins.size:
        return 1.0
    total = np.cumsum(stats.counts)
    index = int(np.searchsorted(total, _QUANTILE * total[-1]))
    _, high = bin_edges(stats.bins[index : index + 1])
    return stats.absmax / float(high[0])


LAYOUT_OPS = frozenset(
    "Reshape Transpose Squeeze Unsqueeze Flatten Identity Slice Split Gather GatherElements GatherND Expand Dropout "
    "DepthToSpace SpaceToDepth Tile ReverseSequence".split()
)
"""Operators that move their first input's values without changing them."""


@dataclass(frozen=True)
class ValueRange:
    """The finite values of a tensor: the lowest, the highest, and the smallest magnitude that is not zero.

    ``smallest`` is None when all are zero or nothing is known of it.
    """

    low: float
    high: float
    smallest: float | None

    @property
    def largest(self) -> float:
        """The largest magnitude."""
        return max(abs(self.low), abs(self.high))


class ValueRanges:
    """Spans of values. Everything is computed once per value.

    Args:
        stats: Observed statistics by tensor name.
        shapes: Static shapes by tensor name, at the largest input shapes.
    """

    def __init__(self, stats: Mapping[str, TensorStats], shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._stats = stats
        self._shapes = shapes
        self._constants: dict[ir.Value, np.ndarray | None] = {}
        self._ranges: dict[ir.Value, ValueRange | None] = {}

    def shape(self, value: ir.Value) -> tuple[int, ...] | None:
        """The largest shape of ``value``; None when it depends on data."""
        return self._shapes.get(str(value.name))

    def constant(self, value: ir.Value | None) -> np.ndarray | None:
        """The FP32 constant that ``value`` is, or whose values reach it through layout operators; else None."""
        if value is None or not is_float(value):
            return None
        if value not in self._constants:
            found = edit.constant_of(value)
            node = value.producer()
            if found is None and node is not None and node.op_type in LAYOUT_OPS:
                found = self.constant(node.inputs[0])
            self._constants[value] = found
        return self._constants[value]

    def of(self, value: ir.Value | None) -> ValueRange | None:
        """The span of ``value``; None when it was not observed."""
        if value is None:
            return None
        if value not in self._ranges:
            self._ranges[value] = None  # ends the recursion between an unobserved value and its activation
            self._ranges[value] = self._find(value)
        return self._ranges[value]

    def _find(self, value: ir.Value) -> ValueRange | None:
        constant = self.constant(value)
        if constant is not None:
            return _constant_range(constant)
        found = self._stats.get(str(value.name))
        if found is not None:
            return ValueRange(found.minimum, found.maximum, found.smallest_nonzero or None)
        node = value.producer()
        if node is not None and node.op_type in LAYOUT_OPS:
            return self.of(node.inputs[0])
        return self._before_activation(value)

    def _before_activation(self, value: ir.Value) -> ValueRange | None:
        """A value that only a ReLU or Clip reads: what they let through is as large as what they were given.

        What they cut off may be anything, and may overflow: the result is the same.
        """
        uses = list(value.uses())
        if len(uses) != 1 or value.is_graph_output() or uses[0][1] != 0:
            return None
        reader = uses[0][0]
        behind = self.of(reader.outputs[0]) if reader.op_type in ("Relu", "Clip") else None
        return None if behind is None else ValueRange(behind.low, behind.high, None)


def is_float(value: ir.Value) -> bool:
    """Whether ``value`` is an FP32 tensor (the only float type of a widened model)."""
    return value.dtype is ir.DataType.FLOAT


def ranking_readers(node: ir.Node) -> list[str]:
    """Names of the nodes that only compare or rank what ``node`` computes.

    They gain nothing from a narrow operand, and rounding it makes ties: they take the type of whoever computes it.
    """
    found = []
    for value in node.outputs:
        for user, _ in value.uses():
            floats = any(is_float(output) for output in user.outputs)
            if user.graph is node.graph and is_float(value) and (not floats or user.op_type == "TopK"):
                found.append(str(user.name))
    return found


def _constant_range(array: np.ndarray) -> ValueRange:
    low, high = finite_range(array)
    if array.size > 1 << 16:
        return ValueRange(low, high, None)  # weights; the smallest magnitude matters of operands of a division, say
    absolute = np.abs(array[np.isfinite(array)])
    nonzero = absolute[absolute > 0]
    return ValueRange(low, high, float(nonzero.min()) if nonzero.size else None)
