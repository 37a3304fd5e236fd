"""Tiles and waves."""

from __future__ import annotations

import math

from drawn_cases import given
from hypothesis import strategies as st
from kernels import sizes

from trtopt.roofline.gemm import tiling
from trtopt.roofline.work import Gemm

tiles = st.tuples(st.sampled_from([16, 64, 128, 256]), st.sampled_from([32, 64, 128, 256]))


@given(sizes, sizes, st.integers(1, 16), tiles, st.integers(1, 200), st.integers(1, 32))
def test_blocks_cover_the_output_and_waves_hold_the_blocks(
    m: int, n: int, batch: int, tile: tuple[int, int], sm: int, split: int
) -> None:
    found = tiling(Gemm(m, n, 64, batch), tile, sm, split)
    covered = found.tiles / split * tile[0] * tile[1]
    assert covered >= m * n * batch
    assert math.isclose(found.tile_efficiency, m * n * batch / covered)
    assert (found.waves - 1) * sm < found.tiles <= found.waves * sm
    assert math.isclose(found.wave_efficiency, found.tiles / (found.waves * sm))


def test_a_split_sum_has_more_blocks_and_the_same_useful_share() -> None:
    whole, split = (tiling(Gemm(100, 100, 4096), (64, 64), 80, parts) for parts in (1, 8))
    assert (whole.tiles, split.tiles) == (4, 32)
    assert whole.tile_efficiency == split.tile_efficiency


def test_every_product_of_a_batch_has_its_own_tiles() -> None:
    """Two products of 100 rows need two tiles of 128, one of 200 rows needs two, and four of 50 need four."""
    assert [tiling(Gemm(200 // batch, 64, 64, batch), (128, 64), 80).tiles for batch in (1, 2, 4)] == [2, 2, 4]
