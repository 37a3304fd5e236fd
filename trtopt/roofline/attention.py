"""The time of fused attention on a GPU: blocks of queries that loop over the keys, or one query that streams them.

**Several queries.** A thread block takes a tile of the queries of one head and loops over the keys that one of them
sees, 64 at a time: the score product, the exponentials, the product with V. A causal or windowed mask leaves out the
keys that no query of the tile sees. For a tile of ``t`` queries that sees ``n`` keys, with heads of ``d`` and ``v``
elements, padded to what the Tensor Cores take:

    step   = 2 (d + v) / (rate share (d / 64)^-head_loss) + softmax_share / exponentials per cycle    per query and key
    block  = t n step + block_cycles
    busy   = rounds over the SMs x block, no less than the longest block takes alone
    time   = (busy^p + move^p)^(1/p)                                       Q, K, V and the output once

The two parts of a step add up where the warp that waits for its scores computes their exponentials; fifth-generation
Tensor Cores work beside it (tensor memory), so that the slower part counts.

**One query** (decoding with a cache): a block streams the K and V that a group of query heads shares, or a part of
them; partial results are merged by a second pass. A block pays ``decode_cycles`` and takes ``decode_bytes`` per cycle.

The loop and its order are FlashAttention's (Dao 2023, arXiv:2307.08691; Shah et al. 2024, arXiv:2407.08608), splitting
the keys is flash-decoding (Dao et al. 2023). Constants are fitted, see :mod:`trtopt.roofline.constants`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trtopt.roofline.constants import Constants
from trtopt.roofline.gemm import Array, Chip, memory_time
from trtopt.roofline.work import Work
from trtopt.support.precision import ELEMENT_BYTES

QUERY_TILES = (64, 128)
"""Queries of a block: one or two warp groups of 64 rows."""

_KEY_STEP = 64
"""Keys of one step of the loop."""

_PARTS = (_KEY_STEP, *(_KEY_STEP * round(2 ** (power / 2)) for power in range(2, 37)))
"""Keys of one query that a block may take. The list is the same for every length, so that no query with more keys is
faster."""

_LARGEST_GROUP = 32
"""Query heads that share one reading of K and V; in a larger group each head reads them for itself, from the L2
(TensorRT-LLM's decoding kernels, measured on A100, H100 and RTX PRO 6000)."""

_HEAD_UNIT = 64.0
"""Head size at which ``head_loss`` counts nothing."""


@dataclass(frozen=True)
class TensorPath:
    """How a generation of Tensor Cores takes its operands.

    Attributes:
        gain: Rate of the loop over that of ``mma.sync``, whose operands pass through registers. FlashAttention-2, which
            is written for it, reaches 35 % of an H100, FlashAttention-3 on ``wgmma`` 1.5 to 2 times as much (Shah et
            al. 2024): the lower of both.
        row_bytes: Bytes to which a head is padded: a fragment of ``mma.sync``, or a swizzled row of shared memory.
        overlaps: Whether products run beside the exponentials of the same warps.
    """

    gain: float
    row_bytes: int
    overlaps: bool


_REGISTERS = TensorPath(1.0, 32, False)
_SHARED_MEMORY = TensorPath(1.5, 128, False)
_TENSOR_MEMORY = TensorPath(1.5, 128, True)


def tensor_path(compute_capability: str) -> TensorPath:
    """``mma.sync``; ``wgmma`` on Hopper; ``tcgen05`` on data-centre Blackwell and Thor (PTX ISA 9.0, target notes)."""
    major = compute_capability.split(".")[0]
    return {"9": _SHARED_MEMORY, "10": _TENSOR_MEMORY, "11": _TENSOR_MEMORY}.get(major, _REGISTERS)


def exponentials_per_clock(compute_capability: str) -> float:
    """Exponentials per cycle and SM: 16 (CUDA C++ Programming Guide, throughput of native arithmetic instructions,
    compute capability 7.0 to 12.0); 32 on Blackwell Ultra (NVIDIA, "Inside NVIDIA Blackwell Ultra", 2025)."""
    return 32.0 if compute_capability == "10.3" else 16.0


@dataclass(frozen=True)
class Attentions:
    """Fused attentions, one per row; each field an array [attentions].

    Attributes:
        queries, keys, heads, kv_heads, window: Sizes (:class:`~trtopt.roofline.work.AttentionSizes`).
        causal: 1 where a query sees no later key.
        size, value_size: Elements of a head of Q and K, and of V.
        element_bytes: Of the operands.
        bytes: All that is moved in one step.
        rate: The datasheet's flop per microsecond of the whole GPU for the type of the operands.
        cold: Share of the bytes that the L2 cannot hold (:func:`~trtopt.roofline.gemm.cold_share`).
    """

    queries: Array
    keys: Array
    heads: Array
    kv_heads: Array
    window: Array
    causal: Array
    size: Array
    value_size: Array
    element_bytes: Array
    bytes: Array
    rate: Array
    cold: Array

    @staticmethod
    def of(works: Sequence[Work], moved: Array, rate: Array, cold: Array) -> Attentions:
        """The arrays of works that have an ``attention``, with their bytes, rates and shares that are cold."""
        shapes = [work.attention for work in works if work.attention is not None]
        names = ("queries", "keys", "heads", "kv_heads", "window", "causal", "size", "value_size")
        columns = {name: np.array([getattr(shape, name) for shape in shapes], dtype=np.float64) for name in names}
        element = np.array([ELEMENT_BYTES[work.dtype] for work in works])
        return Attentions(**columns, element_bytes=element, bytes=moved, rate=rate, cold=cold)

    @property
    def seen(self) -> Array:
        """Pairs of a query and a key that the mask leaves, per head."""
        return self._seen(1.0, 1.0)[0]

    def _seen(self, tile: float, step: float) -> tuple[Array, Array]:
        """Keys of all blocks of ``tile`` queries together, and of the longest block, in whole steps."""
        blocks = np.ceil(self.queries / tile)
        offset = np.ceil(np.maximum(self.keys - self.queries, 0.0) / step) * step
        span = np.where(self.window > 0, np.minimum(self.window + tile - 1, self.keys), self.keys)
        most = np.ceil(span / step) * step
        growing = np.where(self.causal > 0, np.clip(np.floor((most - offset) / tile), 0, blocks), 0.0)
        total = growing * offset + tile * growing * (growing + 1) / 2 + (blocks - growing) * most
        return np.minimum(total, blocks * most), most


@dataclass(frozen=True)
class AttentionTimes:
    """Each field an array [attentions], in microseconds without the launch.

    Attributes:
        time: All together.
        math: Products and exponentials, with a block on every SM all the time.
        memory: Memory alone.
        least_math: Flop of the pairs that the mask leaves over the peak.
    """

    time: Array
    math: Array
    memory: Array
    least_math: Array


def attention_times(rows: Attentions, chip: Chip, c: Constants, compute_capability: str) -> AttentionTimes:
    """Time the best tile of each attention, and of one query the best parts of the keys where these are faster."""
    memory = memory_time(rows.bytes, chip, c, rows.cold)
    busy, math = _tiled(rows, chip, c, compute_capability)
    time = (busy**c.norm + memory**c.norm) ** (1 / c.norm)
    single = rows.queries == 1
    if single.any():
        streamed, waited, loaded = _streamed(rows, chip, c, memory)
        single = single & (streamed < time)
        time, busy, memory = (
            np.where(single, one, other) for one, other in ((streamed, time), (waited, busy), (loaded, memory))
        )
    least = 2 * rows.seen * rows.heads * (rows.size + rows.value_size) / rows.rate
    return AttentionTimes(time, np.minimum(math, busy), memory, least)


def fitted_time(works: Sequence[Work], rate: Array, sustained: float, c: Constants, compute_capability: str) -> Array:
    """Microseconds of the products of attentions at the fitted peak, [attentions]: for the pairs that the mask leaves,
    at the rate of an endless tile, or of the loop where that is higher.

    Args:
        works: All have an ``attention``.
        rate: The datasheet's flop per microsecond of the whole GPU for the type of the operands, [attentions].
        sustained: Share of its clock that the GPU sustains.
        c: The constants.
        compute_capability: Of the GPU.
    """
    rows = Attentions.of(works, np.zeros_like(rate), rate, np.zeros_like(rate))
    own = _loop_share(rows, c, tensor_path(compute_capability))
    # One query is bound by what it streams, and no tile is fitted to it: the peak itself bounds its arithmetic.
    share = np.where(rows.queries == 1, 1.0, np.maximum(own, c.peak_share) * sustained)
    return 2 * rows.seen * rows.heads * (rows.size + rows.value_size) / (rate * share)


def _loop_share(rows: Attentions, c: Constants, path: TensorPath) -> Array:
    """Share of the peak that the loop's products reach, by the size of a head as the Tensor Cores take it."""
    unit = path.row_bytes / rows.element_bytes
    size = np.ceil(rows.size / unit) * unit
    found: Array = c.attention_share * path.gain * (size / _HEAD_UNIT) ** -c.head_loss
    return found


def _tiled(rows: Attentions, chip: Chip, c: Constants, compute_capability: str) -> tuple[Array, Array]:
    """Time in which the SMs are busy, and what of it every SM works, of the better tile."""
    path = tensor_path(compute_capability)
    unit = path.row_bytes / rows.element_bytes
    size, value = (np.ceil(each / unit) * unit for each in (rows.size, rows.value_size))
    rate = rows.rate / chip.sm * _loop_share(rows, c, path)
    product, softmax = 2 * (size + value) / rate, 1 / (exponentials_per_clock(compute_capability) * chip.clock)
    step = (product**c.norm + softmax**c.norm) ** (1 / c.norm) if path.overlaps else product + c.softmax_share * softmax
    fill = c.block_cycles / chip.clock
    best = math = np.full_like(rows.queries, np.inf)
    for tile in QUERY_TILES:
        total, longest = rows._seen(tile, _KEY_STEP)
        tiles = np.ceil(rows.queries / tile)
        blocks = tiles * rows.heads
        ideal = total * tile * rows.heads * 2 * (rows.size + rows.value_size) / rows.rate
        per_key = tile * step * (1 + c.power * np.log1p(ideal / c.power_us))
        block = total / tiles * per_key + fill
        share = blocks / chip.sm
        rounds = np.where(rows.causal > 0, np.maximum(share, 1.0), np.ceil(share))
        alone = max(c.lone_block * QUERY_TILES[0] / tile, 1.0)
        busy = np.maximum(rounds * block, alone * longest * per_key + fill)
        math = np.where(busy < best, share * block, math)
        best = np.minimum(busy, best)
    return best, math


def _streamed(rows: Attentions, chip: Chip, c: Constants, memory: Array) -> tuple[Array, Array, Array]:
    """Of one query: all of its time, that in which the SMs are busy, and that of memory and L2."""
    grouped = rows.heads / rows.kv_heads
    shared = (grouped > 1) & (grouped <= _LARGEST_GROUP)
    streams = np.where(shared, rows.kv_heads, rows.heads)
    keys = np.where(rows.window > 0, np.minimum(rows.window, rows.keys), rows.keys)
    bytes_per_key = (rows.size + rows.value_size) * rows.element_bytes
    memory = np.maximum(memory, keys * streams * bytes_per_key / (c.l2_bytes_per_clock * chip.clock * chip.sm))
    fill = c.decode_cycles * np.where(shared, 1.0, c.lone_query_share) / chip.clock
    best = waited = np.full_like(keys, np.inf)
    for most in _PARTS:
        part = np.minimum(np.ceil(keys / _KEY_STEP) * _KEY_STEP, most)
        parts = np.ceil(keys / part)
        busy = np.ceil(streams * parts / chip.sm) * (fill + part * bytes_per_key / (c.decode_bytes * chip.clock))
        merge = np.where(parts > 1, c.split_us + fill / 2, 0.0)
        time = (busy**c.norm + memory**c.norm) ** (1 / c.norm) + merge
        waited = np.where(time < best, busy, waited)
        best = np.minimum(time, best)
    return best, waited, memory
