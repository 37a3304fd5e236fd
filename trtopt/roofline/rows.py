"""Kernels that reduce rows: normalization, softmax, reductions.

Such a kernel reads a row once if a thread block can hold it, and once per pass if not. What later passes read again is
in the L2 cache as long as the rows that all blocks work on fit there; else it comes from the DRAM again. Beside what it
moves, a row has loads that wait for one another, so that few rows, or short loads, do not keep the memory busy
(Little's law). NVIDIA, "Memory-Limited Layers User's Guide": time is that of the passes over memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

HELD_ELEMENTS = 16384
"""The longest row that a thread block holds in its registers: 16 values for each of its 1024 threads. cuDNN reads
rows of that length once (RMS norm on GB200 at 6.1 TB/s, counted with one read)."""

HELD_PER_THREAD = 16
WARP = 32
_MOST_THREADS = 1024
_LINE_BYTES = 128


@dataclass(frozen=True)
class RowKernel:
    """How a given kernel walks over a row.

    Attributes:
        threads: Threads per row; below 1 where each works on several rows.
        loads: Loads of a thread that wait for one another, over all passes.
        reads: How often it reads its row.
        idles: Whether a block starts its next row only when all of its threads are done with the last one
            (``row_cycles``).
        apart: Whether each pass is a kernel of its own, over all rows.
    """

    threads: float
    loads: float
    reads: int
    idles: bool = False
    apart: bool = False


@dataclass(frozen=True)
class RowSizes:
    """The rows that a kernel reduces.

    Attributes:
        count: How many.
        length: Elements of a row.
        inner: Elements of other rows that lie between two of a row: 1 where a row is contiguous.
        passes: How often a kernel that cannot hold a row reads it: once per reduction, and once more if it writes
            whole rows.
        kernel: How the kernel walks; None for the fused kernel of a compiler (:func:`fused`).
    """

    count: int
    length: int
    inner: int = 1
    passes: int = 2
    kernel: RowKernel | None = None


def fused(rows: RowSizes, element_bytes: float) -> RowKernel:
    """The walk of a compiler's kernel: persistent while a block can hold the row.

    A block that reads rows which are not contiguous in whole lines of the cache works on the neighbours too, and holds
    that much less of each. If that is not enough, the sums of many blocks make a row's, and each pass is a kernel
    (TensorRT has several kernels for an instance norm, whose rows are a channel's pixels, channels last).

    The lanes of a warp stand beside each other in memory: on neighbours where rows are not contiguous, on several rows
    where these are shorter than a warp (PyTorch, ``Reduce.cuh``: the fastest dimension is along ``block.x``, reduced or
    not, and a thread has all inputs of an output it does not share; ``PersistentSoftmax.cuh``: 2 to 32 lanes a row).
    """
    beside = max(min(rows.inner, int(_LINE_BYTES / element_bytes)), 1)
    held = rows.length * beside
    if held <= HELD_ELEMENTS:
        threads = 1 << math.ceil(math.log2(max(held / HELD_PER_THREAD, WARP)))
        return RowKernel(threads / max(beside, WARP // max(rows.length, 1)), 1, 1)
    threads = max(_MOST_THREADS // beside, 1)
    return RowKernel(threads, _loads(rows, threads), rows.passes, apart=beside > 1)


def _loads(rows: RowSizes, threads: int) -> int:
    """Loads that wait for one another where each thread has as many under way as it holds."""
    return rows.passes * math.ceil(rows.length / (threads * HELD_PER_THREAD))
