"""What kernels that reduce rows wait for and read again, as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trtopt.roofline.constants import Constants
from trtopt.roofline.gemm import Chip
from trtopt.roofline.rows import RowSizes, fused

Array = NDArray[np.float64]

_THREADS = {"7.5": 1024, **dict.fromkeys(("8.6", "8.7", "8.9", "11.0", "12.0", "12.1"), 1536)}
_USUAL_THREADS = 2048
"""Resident threads per SM by compute capability (CUDA C++ Programming Guide, "Technical Specifications per Compute
Capability")."""

_SHARPNESS = 7
"""How sharply reads miss the L2 cache as the rows in flight outgrow it. Layer norm and softmax of A100 and T4 go from a
seventh to six sevenths of misses while these rows grow by 1.7."""


@dataclass(frozen=True)
class RowArrays:
    """Rows of many kernels on one GPU, [kernels] each; ``count`` is 0 for kernels without rows.

    Attributes:
        count: Rows.
        row_bytes: Bytes of a row.
        reads: How often it is read.
        loads: Loads that wait for one another.
        idles: 1 where a block is idle between rows.
        apart: 1 where each pass is a kernel.
        in_flight: Rows that the GPU works on at a time, at most.
    """

    count: Array
    row_bytes: Array
    reads: Array
    loads: Array
    idles: Array
    apart: Array
    in_flight: Array

    @staticmethod
    def of(found: Sequence[tuple[RowSizes | None, float]], sm: int, compute_capability: str) -> RowArrays:
        """The arrays of kernels: the rows of each, and the bytes of an element."""
        resident = _THREADS.get(compute_capability, _USUAL_THREADS)
        table = np.zeros((7, len(found)))
        for at, (rows, size) in enumerate(found):
            if rows is not None:
                walk = rows.kernel or fused(rows, size)
                flight = sm * max(resident // walk.threads, 1)
                done = walk.reads, walk.loads, walk.idles, walk.apart, flight
                table[:, at] = rows.count, rows.length * size, *done
        return RowArrays(*table)

    def again(self) -> Array:
        """Bytes that are read again, from wherever, [kernels]."""
        return np.maximum(self.reads - 1, 0) * self.count * self.row_bytes

    def reread(self, l2_bytes: float, c: Constants) -> Array:
        """Those that come from the DRAM again, [kernels]."""
        flight = np.where(self.apart > 0, self.count, np.minimum(self.count, self.in_flight)) * self.row_bytes
        missed = 1 / (1 + (c.reread_share * l2_bytes / np.maximum(flight, 1.0)) ** _SHARPNESS)
        return self.again() * missed

    def between(self, chip: Chip, c: Constants) -> Array:
        """Microseconds of the later kernels where each pass is one: their starts, and what they read from the L2 cache,
        which no other pass hides, [kernels]."""
        cached = (self.again() - self.reread(chip.l2_bytes, c)) / (c.l2_bytes_per_clock * chip.clock * chip.sm)
        return self.apart * ((self.reads - 1) * c.split_us + cached)

    def waiting(self, clock: float, c: Constants) -> Array:
        """Microseconds of the loads of all rows, one after the other in each place, [kernels].

        Few long rows may be shared among blocks instead, whose partial sums a second kernel adds.
        """
        cycles = self.idles * c.row_cycles + c.row_load_cycles * (self.loads + 1)
        places = np.maximum(self.in_flight, 1.0)
        alone = np.maximum(self.count / places, 1.0) * cycles / clock
        shared = self.count / places * cycles / clock + 2 * c.row_load_cycles / clock + c.split_us
        return np.where(self.count > 0, np.minimum(alone, shared), 0.0)
