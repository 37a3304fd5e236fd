"""Statistics of tensors over all samples, collected array by array.

The absolute values are counted in fixed bins taken from the bits of the 32-bit float: the exponent and the first 10
bits of the mantissa, 1024 bins per power of two. Fixed bins need no first batch to set a range, count every element,
and merge exactly: the table does not depend on the order of the samples or on their batches. Near the largest value
a bin is at most 1/1024 of it, 8 to 16 bins per INT8 level.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

MANTISSA_BITS = 10
_SHIFT = 23 - MANTISSA_BITS
_BINS = 1 << (8 + MANTISSA_BITS)
"""Bins of the absolute value."""

_ALL_ONES = np.uint32(0xFFFFFFFF)
_WITHOUT_SIGN = np.uint32(0x7FFFFFFF)
_FINITE_BINS = 255 << MANTISSA_BITS
"""Bins from this one on hold infinity and NaN (exponent bits all ones)."""

_ONE = np.int64(1)
_CHUNK = 1 << 15
"""Elements per pass: the int64 indices of a chunk (256 KiB) stay in the second-level cache."""


@dataclass(frozen=True, eq=False)
class TensorStats:
    """Statistics of one tensor over all samples.

    Attributes:
        count: Elements seen, finite or not.
        minimum: Smallest finite value; 0 when there is none.
        maximum: Largest finite value; 0 when there is none.
        zeros: Elements equal to zero (``|x| < 2^-136``, the first bin); None without a histogram.
        nonfinite: Elements that are NaN or infinite.
        smallest_nonzero: Smallest finite ``|x| > 0``; with a histogram, the lower edge of its bin, at most 0.1 % less.
            0 when there is none.
        bins: int32, ascending indices of the non-empty bins of finite ``|x| > 0``; None without a histogram.
        counts: int64, elements in each of ``bins``.
    """

    count: int
    minimum: float
    maximum: float
    zeros: int | None
    nonfinite: int
    smallest_nonzero: float
    bins: np.ndarray | None = None
    counts: np.ndarray | None = None

    @property
    def absmax(self) -> float:
        """The largest finite ``|x|``."""
        return max(abs(self.minimum), abs(self.maximum))

    @property
    def has_histogram(self) -> bool:
        """Whether the histogram was taken, or only the ranges."""
        return self.bins is not None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TensorStats):
            return NotImplemented
        if self.scalars() != other.scalars() or self.has_histogram != other.has_histogram:
            return False
        return not self.has_histogram or (
            np.array_equal(self.bins, other.bins) and np.array_equal(self.counts, other.counts)  # type: ignore[arg-type]
        )

    def times_power(self, exponent: int) -> TensorStats:
        """The statistics of the same tensor times two to the power of ``exponent``, in FP32's normal range."""
        factor = 2.0**exponent
        bins = None if self.bins is None else self.bins + np.int32(exponent << MANTISSA_BITS)
        return replace(
            self,
            minimum=self.minimum * factor,
            maximum=self.maximum * factor,
            smallest_nonzero=self.smallest_nonzero * factor,
            bins=bins,
        )

    def scalars(self) -> tuple[int | float | None, ...]:
        """Every field but the histogram, in order."""
        return (
            self.count,
            self.minimum,
            self.maximum,
            self.zeros,
            self.nonfinite,
            self.smallest_nonzero,
        )


def bin_edges(bins: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Lower and upper edges (float64) of bins of ``|x|``."""
    index = bins.astype(np.uint32)
    low = (index << np.uint32(_SHIFT)).view(np.float32).astype(np.float64)
    high = ((index + np.uint32(1)) << np.uint32(_SHIFT)).view(np.float32).astype(np.float64)
    return low, np.where(np.isfinite(high), high, 2.0**128)


class StatsBuilder:
    """Collects the statistics of one tensor, array by array. Not thread-safe.

    Args:
        histogram: Count the values in bins; otherwise only the ranges.
    """

    def __init__(self, histogram: bool) -> None:
        # Pages that no value falls into are never touched: a tensor takes some 0.2 MiB of the 2 MiB. (From 4 MiB on,
        # numpy asks for huge pages, and it would take all of it.) The last bin is that of -0.0.
        self._bins = np.zeros(_BINS + 1, np.int64) if histogram else None
        self._count = self._nonfinite = 0
        self._minimum = np.inf
        self._maximum = -np.inf
        # |x| in bits without the sign, minus one: zero wraps to the largest number and so never is the smallest.
        self._smallest = _ALL_ONES

    def update(self, array: np.ndarray) -> None:
        """Count every element of ``array`` (any floating dtype; converted to float32)."""
        flat = np.ascontiguousarray(array, dtype=np.float32).reshape(-1)
        index = np.empty(min(_CHUNK, flat.size), np.int64)
        scratch = np.empty(min(_CHUNK, flat.size), np.uint32)
        for start in range(0, flat.size, _CHUNK):
            chunk = flat[start : start + _CHUNK]
            bits = chunk.view(np.uint32)
            nonnegative = self._range(chunk)
            if self._bins is None:
                self._small(bits, scratch[: chunk.size])
                continue
            if not nonnegative:
                bits = np.bitwise_and(bits, _WITHOUT_SIGN, out=scratch[: chunk.size])
            np.right_shift(bits, np.uint32(_SHIFT), out=index[: chunk.size])
            np.add.at(self._bins, index[: chunk.size], _ONE)
        self._count += flat.size

    def _range(self, chunk: np.ndarray) -> bool:
        """Update minimum and maximum; whether all elements are finite and none is below zero."""
        low, high = float(chunk.min()), float(chunk.max())
        all_finite = math.isfinite(low) and math.isfinite(high)
        if not all_finite:
            finite = chunk[np.isfinite(chunk)]
            self._nonfinite += chunk.size - finite.size
            if not finite.size:
                return False
            low, high = float(finite.min()), float(finite.max())
        self._minimum = min(self._minimum, low)
        self._maximum = max(self._maximum, high)
        return all_finite and low >= 0

    def _small(self, bits: np.ndarray, scratch: np.ndarray) -> None:
        """The smallest that is not zero, by the bits without the sign, minus one."""
        np.left_shift(bits, np.uint32(1), out=scratch)
        np.subtract(scratch, np.uint32(1), out=scratch)
        self._smallest = min(self._smallest, scratch.min())

    def finish(self) -> TensorStats:
        """The statistics so far."""
        minimum, maximum = (self._minimum, self._maximum) if self._minimum <= self._maximum else (0.0, 0.0)
        zeros = bins = counts = None
        if self._bins is None:
            smallest = float(np.uint32((int(self._smallest) + 1) % (1 << 32) >> 1).view(np.float32))
            smallest = smallest if np.isfinite(smallest) else 0.0
        else:
            zeros = int(self._bins[0] + self._bins[_BINS])
            absolute = self._bins[:_FINITE_BINS].copy()
            absolute[0] = 0
            bins = np.flatnonzero(absolute).astype(np.int32)
            counts = absolute[bins]
            smallest = float(bin_edges(bins)[0][0]) if bins.size else 0.0
        return TensorStats(
            count=self._count,
            minimum=minimum,
            maximum=maximum,
            zeros=zeros,
            nonfinite=self._nonfinite,
            smallest_nonzero=smallest,
            bins=bins,
            counts=counts,
        )
