"""Many kernels at once: the arrays that the model computes with.

Predicting one layer, a network, or the thousands of rows the constants are fitted to is the same code.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from trtopt.hardware.spec import GpuSpec
from trtopt.roofline.attention import Attentions, AttentionTimes, attention_times
from trtopt.roofline.constants import Constants, sustained_share
from trtopt.roofline.gemm import Array, Chip, Products, TileChoice, choose, cold_share, memory_time
from trtopt.roofline.peaks import L2_PORT_BYTES, cuda_core_rate, peak_rate, sparse_speed
from trtopt.roofline.quantized import MainLoop, main_loop_share
from trtopt.roofline.row_times import RowArrays
from trtopt.roofline.work import Work
from trtopt.support.precision import ELEMENT_BYTES, Precision

WINOGRAD_SAVING: dict[tuple[int, ...], float] = {(3, 3): 4.0, (5, 5): 6.25}
"""Multiplications of a direct convolution for each of Winograd's F(4x4, r x r), by its kernel: 16 r^2 / (r + 3)^2
(Lavin and Gray, CVPR 2016)."""

_WINOGRAD_CHANNELS = 16
"""Input channels from which on the transforms of Winograd's algorithm are worth it."""

_VECTOR_BYTES = 16
"""Bytes that a thread loads at once."""

_PACKED_FP16 = 2.0
"""CUDA cores take two FP16 numbers at a time."""


@dataclass(frozen=True)
class Times:
    """Predicted times without the launch; each field an array [kernels], in microseconds.

    Attributes:
        math: Arithmetic alone, without the time in which SMs are idle.
        memory: Memory alone.
        total: Both together, never below :attr:`bound`.
        least_math: What no arithmetic can beat on this GPU: flop over peak, with the algorithm's saving; over twice
            the peak where the weight is 2:4.
        least_memory: What no memory can beat in one step: bytes over the DRAM bandwidth for what exceeds the L2 cache,
            over the L2 bandwidth for the rest.
        choice: Tile and split of the kernels that are matrix products; None when none is.
        product: Index of each kernel in ``choice``, -1 for those that are no products.
    """

    math: Array
    memory: Array
    total: Array
    least_math: Array
    least_memory: Array
    choice: TileChoice | None
    product: np.ndarray[tuple[int], np.dtype[np.intp]]

    @property
    def bound(self) -> Array:
        """What no kernel can beat on this GPU. The bytes of one step count: a recurrent layer may keep its weights on
        the chip."""
        return np.maximum(self.least_math, self.least_memory)


@dataclass(frozen=True)
class Batch:
    """Kernels on one GPU.

    Attributes:
        works: What they have to do.
        chip: The GPU, as its datasheet has it.
        sustained_share: Share of its clock that it sustains within its power limit.
        fp32_rate: Peak flop per microsecond of its CUDA cores.
        flop: All arithmetic, [kernels].
        moved: Bytes to move per step, [kernels].
        cold: Share of them that the inference before cannot have left in the L2 cache, [kernels].
        steps: Sequential steps, [kernels].
        rate: Peak flop per microsecond for the type of the operands, [kernels].
        saving: Factor by which an algorithm may undercut the flop, [kernels].
        speed: Factor on the rate where zeros of a 2:4 weight are skipped, [kernels].
        product: Index of each kernel among the products, -1 for those that are none, [kernels].
        sizes: m, n, k, batch of the product of one step, and taps, [products] each.
        compute_capability: Of the GPU.
        rows: What normalizations, softmax and reductions do per row, [kernels] each.
    """

    works: tuple[Work, ...]
    chip: Chip
    sustained_share: float
    fp32_rate: float
    flop: Array
    moved: Array
    cold: Array
    steps: Array
    rate: Array
    saving: Array
    speed: Array
    product: np.ndarray[tuple[int], np.dtype[np.intp]]
    sizes: tuple[Array, Array, Array, Array, Array]
    compute_capability: str
    rows: RowArrays

    @staticmethod
    def of(works: Sequence[Work], gpu: GpuSpec, *, warm: bool = False, sustained: bool = True) -> Batch:
        """The arrays of ``works``.

        Args:
            works: What the kernels have to do.
            gpu: The GPU.
            sustained: Whether they are part of a load without a pause, which a low-power card slows its clock for.

        Raises:
            UsageError: The GPU has no units for the type of one of them, or for its 2:4 weight.
        """
        gemms = [(work.gemm, work) for work in works if work.gemm is not None and _is_product(work)]
        is_product = np.array([_is_product(work) for work in works], dtype=bool)
        return Batch(
            works=tuple(works),
            chip=Chip(gpu.sm, gpu.clock_tensor_mhz, gpu.bandwidth_gbs * 1e3, gpu.l2_mib * 2**20, warm),
            sustained_share=sustained_share(gpu) if sustained else 1.0,
            fp32_rate=cuda_core_rate(gpu),
            flop=_array(work.flop for work in works),
            moved=_array(_moved_per_step(work) for work in works),
            cold=_cold(works, gpu),
            steps=_array(work.steps for work in works),
            rate=_array(peak_rate(gpu, work.dtype, work.accumulate_fp16) for work in works),
            saving=_array(_winograd_saving(work) for work in works),
            speed=_array(sparse_speed(gpu, work.dtype) if work.sparse else 1.0 for work in works),
            product=np.where(is_product, np.cumsum(is_product) - 1, -1),
            sizes=(
                _array(gemm.m for gemm, _ in gemms),
                _array(gemm.n for gemm, _ in gemms),
                _array(gemm.k for gemm, _ in gemms),
                _array(gemm.batch for gemm, _ in gemms),
                _array(_taps(work) for _, work in gemms),
            ),
            compute_capability=gpu.compute_capability,
            rows=RowArrays.of(
                [(work.rows, ELEMENT_BYTES[work.dtype]) for work in works], gpu.sm, gpu.compute_capability
            ),
        )

    def predict(self, c: Constants) -> Times:
        """The times of all kernels."""
        share = _array(_bandwidth_share(work, c) for work in self.works)
        moved = self.moved + self.rows.reread(self.chip.l2_bytes, c)
        memory = memory_time(moved / share, self._slowed(), c, self.cold) * self.steps
        memory = (memory**c.norm + (self._waiting(c) * self.steps) ** c.norm) ** (1 / c.norm)
        memory += self.rows.between(self._slowed(), c) * self.steps
        arithmetic = self.flop / (self.fp32_rate * self.sustained_share * c.cuda_core_share)
        total = (arithmetic**c.norm + memory**c.norm) ** (1 / c.norm)
        chosen = None
        rows = self.product >= 0
        if rows.any():
            chosen, beside = self._products(rows, c)
            steps = self.steps[rows]
            arithmetic[rows], memory[rows] = chosen.math * steps + beside, chosen.memory * steps
            total[rows] = chosen.time * steps + beside
        least_math, least_memory = self._least(rows)
        fused = np.array([work.attention is not None for work in self.works], dtype=bool)
        if fused.any():
            found, steps = self._attentions(fused, c), self.steps[fused]
            arithmetic[fused], memory[fused] = found.math * steps, found.memory * steps
            total[fused], least_math[fused] = found.time * steps, found.least_math * steps
        total = np.maximum(total, np.maximum(least_math, least_memory))
        return Times(arithmetic, memory, total, least_math, least_memory, chosen, self.product)

    def _attentions(self, rows: np.ndarray[tuple[int], np.dtype[np.bool_]], c: Constants) -> AttentionTimes:
        works = [work for work in self.works if work.attention is not None]
        found = Attentions.of(works, self.moved[rows], self.rate[rows], self.cold[rows])
        slowed = replace(found, rate=found.rate * self.sustained_share)
        times = attention_times(slowed, self._slowed(), c, self.compute_capability)
        return replace(times, least_math=times.least_math * self.sustained_share)

    def _waiting(self, c: Constants) -> Array:
        """What rows wait for, and no less than all that they read takes from the L2 cache."""
        chip, rows = self._slowed(), self.rows
        again = rows.again()
        cached = np.where(again > 0, self.moved + again, 0.0) / (c.l2_bytes_per_clock * chip.clock * chip.sm)
        return np.maximum(rows.waiting(chip.clock, c), cached)

    def _slowed(self) -> Chip:
        """The GPU at the clock it sustains."""
        return replace(self.chip, clock=self.chip.clock * self.sustained_share)

    def _products(self, rows: np.ndarray[tuple[int], np.dtype[np.bool_]], c: Constants) -> tuple[TileChoice, Array]:
        """The choice for each product, and the time of what a recurrent layer does before its first step."""
        works = [work for work in self.works if _is_product(work)]
        m, n, k, batch, taps = self.sizes
        element = _array(ELEMENT_BYTES[work.dtype] for work in works)
        per_tap = np.where([work.dtype == Precision.FP32 for work in works], 1.0, c.tap_bytes / element)
        padded = np.where(taps > 1, taps * np.ceil(k / taps / per_tap) * per_tap, k)
        family = _array(_family_share(work, c) for work in works)
        gain = np.where(self.saving[rows] > 1, c.winograd_gain, 1.0)
        flop, steps, rate = self.flop[rows], self.steps[rows], self.rate[rows] * self.sustained_share
        own = 2 * m * n * k * batch
        recurrent = np.array([work.kind == "recurrent" for work in works], dtype=bool)
        beside = np.where(recurrent, np.maximum(flop - own * steps, 0.0) / (rate * c.peak_share), 0.0)
        extra = np.where(recurrent, 1.0, np.maximum(flop / (own * steps), 1.0))
        speed = self.speed[rows]
        products = Products(
            m,
            n,
            padded,
            batch,
            element,
            self.moved[rows],
            self.cold[rows],
            rate,
            family * gain,
            extra,
            speed,
            MainLoop.of(works),
        )
        return choose(products, self._slowed(), c), beside

    def _least(self, rows: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> tuple[Array, Array]:
        arithmetic = np.where(
            rows, self.flop / (self.rate * self.saving * self.speed), self.flop / (self.fp32_rate * _PACKED_FP16)
        )
        cached = np.minimum(self.moved, self.chip.l2_bytes)
        memory = (self.moved - cached) / self.chip.bandwidth + cached / (L2_PORT_BYTES * self.chip.clock * self.chip.sm)
        return arithmetic, memory


def _cold(works: Sequence[Work], gpu: GpuSpec) -> Array:
    """A kernel in a loop reads its constants again in the next step, not in the next inference."""
    once = _array(work.weight_bytes + work.network_bytes for work in works)
    inference = _array(work.inference_bytes if work.steps == 1 else 0 for work in works)
    moved = _array(work.moved_bytes for work in works)
    return cold_share(once, moved, inference, gpu.l2_mib * 2**20, gpu.compute_capability)


def _is_product(work: Work) -> bool:
    """Whether a kernel is timed as tiles of a matrix product."""
    return work.gemm is not None and work.kind != "depthwise" and work.attention is None


def _array(values: Iterable[float]) -> Array:
    return np.fromiter(values, dtype=np.float64)


def _family_share(work: Work, c: Constants) -> float:
    """Rate of a family of kernels. A convolution of very few channels is padded to whole vectors instead."""
    share = main_loop_share(work, c) * (c.conv_share if work.kind == "conv" else 1.0)
    vectors = work.gemm is None or work.gemm.k // _taps(work) * ELEMENT_BYTES[work.dtype] >= _VECTOR_BYTES
    if work.dtype != Precision.FP32 and vectors and work.alignment_bytes < _VECTOR_BYTES:
        share *= c.misaligned_share
    return share


def _bandwidth_share(work: Work, c: Constants) -> float:
    if work.kind == "memory" and not work.pooled:
        return c.stream_share / c.dram_share
    if work.kind != "layout":
        return c.pointwise_share
    return c.narrow_share if work.alignment_bytes < _VECTOR_BYTES else c.layout_share


def _moved_per_step(work: Work) -> float:
    """A recurrent layer reads the weights of its recurrent product in every step, those of the hoisted one once."""
    if work.kind != "recurrent" or work.gemm is None:
        return work.moved_bytes / work.steps
    every = min(work.gemm.k * work.gemm.n * work.gemm.batch * ELEMENT_BYTES[work.dtype], work.weight_bytes)
    return every + (work.bytes - every) / work.steps


def _taps(work: Work) -> int:
    """Taps that k counts; those of a transposed convolution are columns."""
    window = work.window
    return math.prod(window.kernel) if window is not None and work.kind == "conv" and not window.transposed else 1


def _winograd_saving(work: Work) -> float:
    """Stride-1 convolutions with kernels of 3x3 and 5x5 on CUDA cores; Tensor Cores are faster without."""
    window = work.window
    if work.dtype != Precision.FP32 or window is None or work.gemm is None or work.kind != "conv":
        return 1.0
    plain = set(window.stride) == {1} and set(window.dilation) == {1} and window.group == 1 and not window.transposed
    worth_it = plain and work.gemm.k >= math.prod(window.kernel) * _WINOGRAD_CHANNELS
    return WINOGRAD_SAVING.get(window.kernel, 1.0) if worth_it else 1.0
