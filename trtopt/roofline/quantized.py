"""What products of 8-bit and 4-bit operands, and of narrow weights, do otherwise than those of 16 bits.

========================  ===========================================================================================
INT8 operands             nothing
FP8, a scale per tensor   the main loop reaches ``fp8_share`` of what one of 16 bits does of its peak; where a sum is
                          split, a block takes the time of 4096 elements of k at least
FP8, a scale per block    ``block_share`` of that: sums are scaled on CUDA cores after each block; tiles of 128
                          columns at least, as the weight's blocks are; a sum is not split
FP4, a scale per block    ``fp8_share``; tiles of 128 rows and 64 columns at least; a sum is not split
narrow weights            they reach an SM as they are; each tile turns its own into 16 bits, ``dequant_cycles`` an
                          element; two blocks share a sum at most. From 16 rows on, tiles of 128 columns at least, and
                          split sums as those of FP8
========================  ===========================================================================================

That sums are not split, and how large tiles of FP4 are (128 rows: the instruction on Blackwell), was read off products
with few tiles and a long k in the kernels of TensorRT-LLM (see benchmarks/predictor/quantized_rows.py): their time is
that of one block over all of k.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trtopt.roofline.constants import Constants
from trtopt.roofline.work import Work
from trtopt.support.precision import ELEMENT_BYTES, Precision

Array = npt.NDArray[np.float64]

_FLOATS = (Precision.FP4, Precision.FP8)
"""Types of operands whose main loops stay behind those of 16 bits; INT8 on an A100 does not."""

_COLUMNS_FP4, _COLUMNS_FP8, _ROWS = 64.0, 128.0, 128.0
"""Least tile of a kernel whose operands have a scale per block."""

_LEAST_PART = 4096.0
"""Elements of k whose time a block takes at least where a sum of FP8 or with narrow weights is split: read off the
products of RTX PRO 6000 and of A100."""

_NARROW_SPLIT = 2.0
"""Blocks that share a tile's sum at most where weights are turned into another type."""

_NARROW_ROWS, _NARROW_COLUMNS = 16, 128.0
"""Rows from which on such products are tiles of Tensor Cores, and columns of these at least: the tiles that
TensorRT-LLM has of them are 16, 32, 64 and 128 x 128 (cutlass_heuristic.cpp), and below 16 rows it tries a kernel that
has none (weightOnlyQuantMatmulPlugin.cpp; weightOnlyBatchedGemv)."""


@dataclass(frozen=True)
class MainLoop:
    """What the main loops of products are bound to; each field an array [products].

    Attributes:
        weight_bytes: Bytes of an element of the weight on its way to an SM.
        dequantized: 1 where each tile turns the weight into another type.
        least_m, least_n: The smallest tile there is.
        most_split: Blocks that may share a tile's sum.
        least_part: Elements of k whose time each of these takes at least.
    """

    weight_bytes: Array
    dequantized: Array
    least_m: Array
    least_n: Array
    most_split: Array
    least_part: Array

    @staticmethod
    def of(works: Sequence[Work]) -> MainLoop:
        """Those of ``works``, all of which have a product."""
        narrow = np.array([0 < work.weight_bits < 8 * ELEMENT_BYTES[work.dtype] for work in works], dtype=bool)
        blocked = np.array([work.scale_block > 0 for work in works], dtype=bool)
        fp4, fp8 = (np.array([work.dtype == each for work in works], dtype=bool) for each in _FLOATS)
        operand = np.array([ELEMENT_BYTES[work.dtype] for work in works], dtype=np.float64)
        bits = np.array([work.weight_bits for work in works], dtype=np.float64)
        rows = np.array([work.gemm.m if work.gemm else 0 for work in works])
        tiled = narrow & (rows >= _NARROW_ROWS)
        columns = (fp4 & blocked, fp8 & blocked, tiled)
        return MainLoop(
            weight_bytes=np.where(narrow, bits / 8, operand),
            dequantized=np.where(narrow, 1.0, 0.0),
            least_m=np.where(fp4 & blocked, _ROWS, 0.0),
            least_n=np.select(columns, (_COLUMNS_FP4, _COLUMNS_FP8, _NARROW_COLUMNS), 0.0),
            most_split=np.where(narrow, _NARROW_SPLIT, np.where(blocked, 1.0, np.inf)),
            least_part=np.where((fp8 & ~blocked) | tiled, _LEAST_PART, 0.0),
        )


def main_loop_share(work: Work, c: Constants) -> float:
    """Factor on the rate of a product by the type of its operands."""
    if work.dtype not in _FLOATS or work.kind == "attention":
        return 1.0
    in_software = work.scale_block > 0 and work.dtype == Precision.FP8
    return c.fp8_share * (c.block_share if in_software else 1.0)
