"""Tiles and waves of a matrix product, and what their quantization wastes.

As NVIDIA's "Matrix Multiplication Background User's Guide" counts them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from trtopt.roofline.work import Gemm


@dataclass(frozen=True)
class Tiling:
    """How a product is spread over a GPU.

    Attributes:
        tile_m: Output rows of a thread block.
        tile_n: Output columns of a thread block.
        tiles: Thread blocks (tiles, times the blocks that share one tile's sum).
        waves: Rounds over the GPU, one block per SM at a time.
        tile_efficiency: Share of the tiles' elements that are elements of the output.
        wave_efficiency: ``tiles / (waves * sm)``.
    """

    tile_m: int
    tile_n: int
    tiles: int
    waves: int
    tile_efficiency: float
    wave_efficiency: float


def tiling(gemm: Gemm, tile: tuple[int, int], sm: int, split: int = 1) -> Tiling:
    """The tiles and waves of a product for one tile size.

    Args:
        gemm: The product.
        tile: Output rows and columns of a thread block.
        sm: Streaming multiprocessors.
        split: Blocks that share one tile's sum.
    """
    rows, columns = math.ceil(gemm.m / tile[0]), math.ceil(gemm.n / tile[1])
    tiles = rows * columns * gemm.batch * split
    waves = math.ceil(tiles / sm)
    useful = gemm.m * gemm.n / (rows * tile[0] * columns * tile[1])
    return Tiling(tile[0], tile[1], tiles, waves, useful, tiles / (waves * sm))
