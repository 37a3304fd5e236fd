"""The choice of tile and split, and the time of memory."""

from __future__ import annotations

import numpy as np
import pytest
from drawn_cases import given
from hypothesis import strategies as st
from kernels import combinations, product, sizes

from trtopt.hardware.spec import GpuSpec, all_gpus, find_gpu
from trtopt.roofline.batch import Batch
from trtopt.roofline.constants import constants_for
from trtopt.roofline.gemm import SPLITS, TILES, Tiling, memory_time
from trtopt.roofline.layer import layer_time
from trtopt.roofline.work import Work
from trtopt.support.precision import Precision

H100 = find_gpu("H100")


def tiling_of(work: Work, gpu: GpuSpec = H100) -> Tiling:
    found = layer_time(work, gpu).tiling
    assert found is not None
    return found


def test_candidates_are_the_tiles_and_splits_that_kernels_have() -> None:
    assert len(set(TILES)) == len(TILES)
    assert TILES[0] == (256, 128)
    assert {(128, 256), (128, 128), (256, 64), (64, 256), (128, 64), (64, 128), (64, 64)} < set(TILES)
    assert all(size & (size - 1) == 0 and 16 <= size <= 256 for tile in TILES for size in tile)
    assert SPLITS[0] == 1
    assert list(SPLITS) == sorted(set(SPLITS))


def test_one_row_beyond_a_tile_costs_a_fraction_and_not_another_wave() -> None:
    """Measured on an H100 with n = k = 4096: 20.5 % more for 257 rows than for 256."""
    full, beyond = (layer_time(product(m, 4096, 4096, "bf16"), H100).predicted_us for m in (256, 257))
    assert 1.03 < beyond / full < 1.4


def test_large_products_take_large_tiles_and_thin_ones_flat_tiles() -> None:
    large, thin = tiling_of(product(8192, 8192, 8192)), tiling_of(product(16, 4096, 4096))
    assert large.tile_m * large.tile_n == 256 * 128
    assert thin.tile_m == 16


def test_a_sum_is_split_only_where_the_output_leaves_the_gpu_empty() -> None:
    for gpu in all_gpus():
        assert tiling_of(product(64, 64, 2**17), gpu).tiles >= min(16, gpu.sm), gpu.name  # 1 without a split
        full = tiling_of(product(8192, 8192, 4096), gpu)
        assert full.tiles * full.tile_m * full.tile_n == 8192 * 8192, gpu.name


def test_a_split_leaves_no_block_without_work() -> None:
    """1433 numbers in FP32 are 90 steps of 16; 32 blocks would take 3 each, so 30 do."""
    for k in (1433, 1434, 1440, 1441):
        split = tiling_of(product(16, 32, k, "fp32"), find_gpu("A100")).tiles
        steps = -(-k // 16)
        assert -(-steps // (-(-steps // split))) == split


@given(st.sampled_from(combinations()), sizes, sizes, sizes)
def test_a_longer_sum_takes_longer_but_for_a_better_split(
    chip: tuple[GpuSpec, Precision], m: int, n: int, k: int
) -> None:
    gpu, dtype = chip
    shorter, longer, double = (product(m, n, length, dtype, aligned=True) for length in (k, k + 64, 2 * k))
    times = Batch.of((shorter, longer, double), gpu).predict(constants_for(gpu)).total
    assert times[1] >= 0.85 * times[0]
    assert times[2] >= 0.98 * times[0]


@pytest.mark.parametrize("gpu", all_gpus(), ids=lambda gpu: gpu.name)
def test_moving_more_takes_longer_between_the_l2_and_the_dram_rate(gpu: GpuSpec) -> None:
    constants = constants_for(gpu)
    chip = Batch.of((), gpu).chip
    moved = np.geomspace(1, 2**36, 500)
    times = memory_time(moved, chip, constants)
    assert (np.diff(times) > 0).all()
    assert (times >= moved / (constants.l2_bytes_per_clock * chip.clock * chip.sm)).all()
    assert times[-1] == pytest.approx(moved[-1] / chip.bandwidth / constants.dram_share, rel=0.01)
