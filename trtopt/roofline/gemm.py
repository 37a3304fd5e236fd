"""The time of matrix products on a GPU: tiles, waves, split-K, and what they move.

One thread block computes a tile of the output. The tile and the number of blocks that share a tile's sum (split-K) are
chosen as a good library would: the pair with the shortest predicted time. For a tile of ``area`` elements, with ``k``
the length of its part of the sum:

    block  = 2 area k / (speed rate area_share) + 2 area fill / rate + steps of k x a floor
    busy   = rounds over the SMs x block, rounds between T / SMs and its ceiling
    move   = bytes / bandwidth + ramp                                     DRAM, or L2 for what stays there
    time   = (busy^p + move^p)^(1/p) + cost of the split

where area_share rises with the area, and speed is 2 for a 2:4 weight and else 1. What kernels of 8-bit and 4-bit
operands do otherwise is in :mod:`trtopt.roofline.quantized`.

Arrays broadcast over [products, tiles, splits], so that fitting the constants and predicting with them is one code.
The shape of the model follows NVIDIA's "Matrix Multiplication Background User's Guide" (tiles, waves, their
quantization) and NeuSight (ASPLOS 2025: utilisation rises with the number of waves); its constants are fitted, see
:mod:`trtopt.roofline.constants`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trtopt.roofline.constants import Constants
from trtopt.roofline.peaks import L2_PORT_BYTES
from trtopt.roofline.quantized import MainLoop
from trtopt.roofline.work import Gemm

Array = npt.NDArray[np.float64]

TILES = (
    (256, 128), (128, 256), (128, 128), (256, 64), (64, 256), (128, 64), (64, 128), (64, 64), (256, 32), (32, 256),
    (128, 32), (32, 128), (64, 32), (32, 64), (16, 128), (16, 64), (16, 32),
)  # fmt: skip
"""Output tiles (rows, columns). Kernels of 96 and 192 exist too; with them, A100 is predicted worse."""

SPLITS = (1, 2, 3, 4, 6, 8, 16, 32)
"""Blocks that may share one tile's sum; fewer, where whole steps of k leave the last ones nothing to do."""

_MOST_SPLIT_ROUNDS = 2
"""A sum is split only while the blocks make no more than this many rounds: it is there to fill the GPU."""

_K_STEP_BYTES = 64
"""Bytes of k in one step of a block's main loop."""


@dataclass(frozen=True)
class Chip:
    """What the model needs of a GPU.

    Attributes:
        sm: Streaming multiprocessors.
        clock: Cycles per microsecond.
        bandwidth: DRAM bytes per microsecond.
        l2_bytes: Size of the L2 cache.
        warm: Whether all that a kernel reads was read just before, as when one kernel is timed again and again: what
            fits into the L2 cache then comes from there.
    """

    sm: int
    clock: float
    bandwidth: float
    l2_bytes: float
    warm: bool = False


@dataclass(frozen=True)
class Products:
    """Matrix products, one per row; each field an array [products].

    Attributes:
        m, n, k, batch: Sizes.
        element_bytes: Of the operands.
        bytes: All that is moved to and from memory.
        cold: Share of it that the L2 cannot hold (:func:`cold_share`).
        rate: The datasheet's flop per microsecond of the whole GPU for the type of the operands.
        share: Factor on that rate for the family of kernels, Winograd's saving included.
        extra: Arithmetic of the kernel, over that of the product: what is fused into it (1 when nothing is).
        speed: Factor on the rate of the main loop: above 1 where Tensor Cores skip the zeros of a 2:4 weight.
        loop: What their main loops are bound to by the types of the operands.
    """

    m: Array
    n: Array
    k: Array
    batch: Array
    element_bytes: Array
    bytes: Array
    cold: Array
    rate: Array
    share: Array
    extra: Array
    speed: Array
    loop: MainLoop


@dataclass(frozen=True)
class TileChoice:
    """The best kernel of each product; each field an array [products], times in microseconds without the launch.

    Attributes:
        time: Arithmetic and memory together.
        math: Arithmetic alone, as long as it would take with a block on every SM all the time.
        memory: Memory alone.
        tile: Index into :data:`TILES`.
        split: Blocks that share one tile's sum.
    """

    time: Array
    math: Array
    memory: Array
    tile: npt.NDArray[np.intp]
    split: npt.NDArray[np.intp]


def choose(products: Products, chip: Chip, c: Constants) -> TileChoice:
    """Time every tile and split of every product, and take the best of each."""
    tile_m, tile_n = (np.array([tile[axis] for tile in TILES], dtype=np.float64)[None, :, None] for axis in (0, 1))
    split = np.array(SPLITS, dtype=np.float64)[None, None, :]
    m, n, k, batch = (_rows(values) for values in (products.m, products.n, products.k, products.batch))
    element, rate, share = _rows(products.element_bytes), _rows(products.rate), _rows(products.share)
    step = _K_STEP_BYTES / element
    part = np.ceil(k / split / step) * step
    split = np.ceil(k / part)
    blocks = np.ceil(m / tile_m) * np.ceil(n / tile_n) * batch * split
    ideal = 2 * m * n * k * batch / (rate * share)
    slow_down = 1 + c.power * np.log1p(ideal / c.power_us)
    full_rounds = blocks / chip.sm
    rounds = (1 - c.wave_smoothing) * np.ceil(full_rounds) + c.wave_smoothing * np.maximum(full_rounds, 1.0)
    summed = np.where(split > 1, np.maximum(part, _rows(products.loop.least_part)), part)
    busy = rounds * _block_time(summed, products, (tile_m, tile_n), chip, c) * slow_down * _rows(products.extra)
    memory = _rows(memory_time(products.bytes, chip, c, products.cold))
    reduced = c.split_traffic * split * m * n * batch * 4 / (L2_PORT_BYTES * chip.clock * chip.sm)
    time = (busy**c.norm + memory**c.norm) ** (1 / c.norm) + np.where(split > 1, c.split_us + reduced, 0.0)
    time = np.where((split == 1) | (blocks <= _MOST_SPLIT_ROUNDS * chip.sm), time, np.inf)
    time = np.where(_exists(products.loop, tile_m, tile_n, split), time, np.inf)
    best = time.reshape(len(time), -1).argmin(axis=1)
    at_tile, at_split = np.unravel_index(best, (len(TILES), len(SPLITS)))
    picked = (np.arange(len(time)), at_tile, at_split)
    math = busy[picked] * (full_rounds / rounds)[picked]
    return TileChoice(time[picked], math, memory[:, 0, 0], at_tile, split[picked[0], 0, at_split].astype(np.intp))


def _exists(loop: MainLoop, tile_m: Array, tile_n: Array, split: Array) -> npt.NDArray[np.bool_]:
    """Which pairs of tile and split there is a kernel for."""
    large = (tile_m >= _rows(loop.least_m)) & (tile_n >= _rows(loop.least_n))
    return np.asarray(large & ((split == 1) | (split <= _rows(loop.most_split))))


def _block_time(part: Array, products: Products, tile: tuple[Array, Array], chip: Chip, c: Constants) -> Array:
    """Time of one block: its main loop, and what fills and drains it."""
    element, share = _rows(products.element_bytes), _rows(products.share)
    rate = _rows(products.rate) / chip.sm
    area = tile[0] * tile[1]
    math = 2 * area * part * (area + c.half_area) / (rate * _rows(products.speed) * share * c.peak_share * area)
    loop = products.loop
    math = math + _rows(loop.dequantized) * tile[1] * part * c.dequant_cycles / chip.clock
    load = (tile[0] * element + tile[1] * _rows(loop.weight_bytes)) * part / (c.sm_bytes_per_clock * chip.clock)
    steps = part * element / _K_STEP_BYTES * c.step_cycles / chip.clock
    return np.maximum(math, load) + steps + 2 * area * c.fill_bytes / element / rate


_L2_IN_TWO = ("8.0", "9.0", "10.0", "10.3")
"""Compute capabilities of GPUs whose L2 cache is in two parts, each for half of the SMs (NVIDIA A100 and H100
architecture white papers), so that some of what both read stands there twice."""

_HELD_IN_TWO, _HELD_IN_ONE = 0.75, 1.05
_EDGE = 32
"""How much of such a cache holds different bytes, how much another one, and how sharp the edge is. From the products
that :mod:`trtopt.roofline.constants` is fitted to, which take turns with others that have weights of their own, rows of
8 to 64: RTX PRO 6000 reads weights at 1.8 times the DRAM's bandwidth as long as all of them take up to 1.03 of the
cache and at 0.9 from 1.08 on; H100 at up to 1.7 times to 0.75, and as slowly as all larger ones from 0.80 on. A100's
rows show no edge."""


def held_share(compute_capability: str) -> float:
    """Share of the L2 cache of a GPU that holds different bytes."""
    return _HELD_IN_TWO if compute_capability in _L2_IN_TWO else _HELD_IN_ONE


def cold_share(once: Array, moved: Array, inference: Array, l2_bytes: float, compute_capability: str) -> Array:
    """Share of what kernels move that has left the L2 cache since the inference before: of what each inference reads
    or writes once, as long as all that it touches exceeds the cache, since the least recently used goes first.

    Args:
        once: Constants, inputs and outputs of the network that each kernel moves, in bytes, [kernels].
        moved: All that each moves, in bytes, [kernels].
        inference: What one inference touches, in bytes; 0 for a kernel alone, [kernels].
        l2_bytes: Size of the L2 cache.
        compute_capability: Of the GPU.
    """
    held = l2_bytes * held_share(compute_capability)
    left = 1 - 1 / (1 + np.minimum(inference / held, 2.0) ** _EDGE)
    found: Array = np.minimum(once / np.maximum(moved, 1.0), 1.0) * left
    return found


def memory_time(moved: Array, chip: Chip, c: Constants, cold: Array | float = 0.0) -> Array:
    """Microseconds to move bytes: L2 for what fits into its usable share, DRAM else, with a ramp for small sizes.

    The residency falls off with the third power of the size, so that no size is a cliff; with the eighth where a kernel
    reads again what it read before: the least recently used goes first, so that little is left beyond the cache's size.
    ``cold`` is the share that is never there.
    """
    dram = c.dram_share * chip.bandwidth
    share, sharpness = (1.0, 8) if chip.warm else (c.l2_share, 3)
    resident = (1 - cold) / (1 + (moved / (share * chip.l2_bytes)) ** sharpness)
    l2 = c.l2_bytes_per_clock * chip.clock * chip.sm
    return moved * ((1 - resident) / dram + resident / l2) + c.ramp_us * moved / (moved + c.ramp_us * dram)


def _rows(values: Array) -> Array:
    return np.asarray(values)[:, None, None]


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
    """The tiles and waves of a product for one tile size."""
    rows, columns = math.ceil(gemm.m / tile[0]), math.ceil(gemm.n / tile[1])
    tiles = rows * columns * gemm.batch * split
    waves = math.ceil(tiles / sm)
    useful = gemm.m * gemm.n / (rows * tile[0] * columns * tile[1])
    return Tiling(tile[0], tile[1], tiles, waves, useful, tiles / (waves * sm))
