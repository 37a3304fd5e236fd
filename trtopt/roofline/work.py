"""What a kernel has to do: arithmetic, bytes, and the sizes that decide how well a GPU does it.

The vocabulary between the two sides of the performance model. On one side an ONNX graph or the layers of an engine are
turned into ``Layer``; on the other :mod:`trtopt.roofline.layer` turns a ``Work`` into microseconds on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from trtopt.roofline.rows import RowSizes
from trtopt.support.precision import ELEMENT_BYTES, Precision

Kind = Literal["gemm", "conv", "depthwise", "attention", "recurrent", "layout", "memory", "sync", "copy"]
"""Which kernel does the work: a matrix product; a convolution (also transposed or grouped) as an implicit one; a
convolution with one input channel per group, on CUDA cores; fused attention; a recurrent layer, step by step; a change
of layout (a transposition, a reformat); everything else that is bound by what it moves. And what runs no kernel: a
stream that waits for another, and a copy of a few bytes between host and GPU."""

LARGEST_ALIGNMENT = 128
"""Bytes from which on more alignment is worth nothing: a line of the cache."""


@dataclass(frozen=True)
class Gemm:
    """A matrix product [m, k] x [k, n], ``batch`` times.

    A convolution is one with m = N*P*Q, n = K and k = C*R*S (output pixels, output channels, taps); a grouped one has
    the channels of a group and ``batch`` = groups.
    """

    m: int
    n: int
    k: int
    batch: int = 1

    @property
    def flop(self) -> int:
        """2mnk per product: one multiply-add = 2 flop."""
        return 2 * self.m * self.n * self.k * self.batch


@dataclass(frozen=True)
class Window:
    """What a convolution slides over its input: sizes per spatial axis."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    group: int = 1
    transposed: bool = False

    @property
    def unread_share(self) -> float:
        """Share of the input that is never read: strides beyond the reach of the kernel skip pixels (a 1x1
        convolution of stride 2 reads a quarter of its input)."""
        if self.transposed:
            return 0.0
        pairs = zip(self.kernel, self.stride, strict=True)
        return 1.0 - math.prod(min(1.0, size / step) for size, step in pairs)


@dataclass(frozen=True)
class AttentionSizes:
    """What a fused attention computes: softmax(Q K^T) V, the scores never leaving the chip.

    Attributes:
        queries: Rows of Q per head.
        keys: Rows of K and V per head, those of a cache included.
        size: Elements of a head of Q and K.
        value_size: Elements of a head of V and of the result.
        heads: Query heads, times the batch.
        kv_heads: Heads of K and V, times the batch: fewer where queries share them.
        causal: Whether a query sees no key that comes after it (the last query sees the last key). An arbitrary mask
            that is added to the scores skips nothing.
        window: Keys up to its own that a query sees, with a causal mask; 0: all.
    """

    queries: int
    keys: int
    size: int
    value_size: int
    heads: int
    kv_heads: int
    causal: bool = False
    window: int = 0


@dataclass(frozen=True)
class Work:
    """What one kernel has to do.

    Attributes:
        kind: Which kernel does it.
        flop: All arithmetic, one multiply-add = 2 flop.
        read_bytes: Activations read, each tensor once.
        weight_bytes: Weights and other constants read, each once: those of a recurrent layer too, which are read again
            in every step.
        write_bytes: Activations written, each once.
        dtype: The type of the operands of the arithmetic.
        accumulate_fp16: Whether FP16 products are summed in FP16: a higher peak on GeForce GPUs.
        gemm: The sizes of the (largest) matrix product; None for work bound by memory.
        window: What a convolution slides over its input.
        attention: The sizes of a fused attention; ``gemm`` is then its score product. A linear attention has none.
        steps: Sequential steps, each as large as ``gemm``: the time steps of a recurrent layer.
        alignment_bytes: The largest power of two, at most 128, that divides the length in bytes of the contiguous rows
            the kernel reads and writes (channels, or k and n of a product).
        sparse: Whether the weight of its product is 2:4 and the kernel skips the zeros; ``weight_bytes`` are then those
            of the compressed weight (see :func:`sparse_work`).
        weight_bits: Bits of an element of the weight where it is narrower than the operands of the arithmetic, and
            turned into their type in the main loop (weight-only quantization); 0 where it is as wide.
        scale_block: Elements along k that share a scale (16 in NVFP4, 128 in block FP8); 0 for a scale per tensor or
            channel, or none.
        rows: The rows that a normalization, a softmax or a reduction works on; None for other kernels.
        pooled: Whether windows slide over its input: pooling reads its input more often than a stream does.
        network_share: Share of the activations read and written that are inputs and outputs of the network, caches
            among them.
        inference_bytes: Bytes at different addresses that one inference of its network touches (:func:`in_network`);
            0 for a kernel that runs alone, again and again.
    """

    kind: Kind
    flop: int
    read_bytes: int
    weight_bytes: int
    write_bytes: int
    dtype: Precision
    accumulate_fp16: bool = False
    gemm: Gemm | None = None
    window: Window | None = None
    attention: AttentionSizes | None = None
    steps: int = 1
    alignment_bytes: int = 128
    sparse: bool = False
    weight_bits: int = 0
    scale_block: int = 0
    rows: RowSizes | None = None
    pooled: bool = False
    network_share: float = 0.0
    inference_bytes: int = 0

    @property
    def bytes(self) -> int:
        """Each input, constant and output once."""
        return self.read_bytes + self.weight_bytes + self.write_bytes

    @property
    def network_bytes(self) -> float:
        """Bytes of the network's inputs and outputs that are moved."""
        return (self.read_bytes + self.write_bytes) * self.network_share

    @property
    def distinct_weight_bytes(self) -> int:
        """Of the constants read, those of one step; a recurrent layer's stand once already."""
        return self.weight_bytes if self.kind == "recurrent" else self.weight_bytes // self.steps

    @property
    def moved_bytes(self) -> float:
        """Bytes that have to move: as :attr:`bytes`, without the pixels a strided convolution never reads.

        Only the convolution's own operand has such pixels; a residual that is added to its result is read whole.
        """
        if self.window is None or self.gemm is None:
            return self.bytes
        channels = self.gemm.k // math.prod(self.window.kernel) * self.gemm.batch
        operand = self.gemm.m * math.prod(self.window.stride) * channels * ELEMENT_BYTES[self.dtype]
        return self.bytes - min(operand, self.read_bytes) * self.window.unread_share

    @property
    def arithmetic_intensity(self) -> float:
        """Flop per byte; 0 when nothing is moved."""
        return self.flop / self.bytes if self.bytes else 0.0


@dataclass(frozen=True)
class Layer:
    """A kernel of an engine, or the node or fused nodes of a graph that would become one.

    Attributes:
        name: The layer's name; unique in its list.
        op: The ONNX operator that does the work, or the compiler's layer type.
        onnx_nodes: Names of the ONNX nodes it computes.
        work: What it has to do; None when its cost is not known, which is reported and never counted as zero.
    """

    name: str
    op: str
    onnx_nodes: tuple[str, ...]
    work: Work | None


def in_network(layers: Sequence[Layer], constants: int) -> tuple[Layer, ...]:
    """The kernels of one inference, each with the ``inference_bytes`` of all of them.

    These are the constants, the network's inputs and outputs, and the memory of the tensors between kernels, which
    later ones use again: no less than the kernel with most of them needs.

    Args:
        layers: All kernels of the network.
        constants: Bytes of their different constants; where kernels gather rows of one, what they read counts.
    """
    works = [layer.work for layer in layers if layer.work is not None]
    between = max(((work.read_bytes + work.write_bytes - work.network_bytes) / work.steps for work in works), default=0)
    outside = sum(work.network_bytes / work.steps for work in works)
    touched = round(between + outside) + min(constants, sum(work.distinct_weight_bytes for work in works))
    placed = {work: replace(work, inference_bytes=touched) for work in dict.fromkeys(works)}
    return tuple(
        layer if layer.work is None else Layer(layer.name, layer.op, layer.onnx_nodes, placed[layer.work])
        for layer in layers
    )


def sparse_share(dtype: Precision) -> float:
    """Bytes of a compressed 2:4 weight over those of the dense one: two of four elements are kept, with two bits each
    for their places. 1/2 + 1/(8 bytes per element): 9/16 in FP16 and BF16, 10/16 in INT8 and FP8 (PyTorch's
    ``SparseSemiStructuredTensor`` stores as many)."""
    return 1 / 2 + 1 / (8 * ELEMENT_BYTES[dtype])


def sparse_work(work: Work) -> Work:
    """The work of a product when its weight [k, n] is 2:4 and a sparse kernel computes it.

    The arithmetic counted stays that of the dense product. The weight is compressed; the other constants (a bias),
    what is read and what is written stay.

    Raises:
        ValueError: There is no product.
    """
    if work.gemm is None:
        raise ValueError("work without a product has no weight to be sparse")
    weight = work.gemm.k * work.gemm.n * work.gemm.batch * ELEMENT_BYTES[work.dtype]
    saved = min(weight, work.weight_bytes) * (1 - sparse_share(work.dtype))
    return replace(work, sparse=True, weight_bytes=work.weight_bytes - math.floor(saved))


def alignment_of(*row_lengths: int, dtype: Precision) -> int:
    """The largest power of two, at most 128, that divides every row's length in bytes.

    Args:
        row_lengths: Elements per contiguous row, for each tensor.
        dtype: The element type.
    """
    bits = [round(length * ELEMENT_BYTES[dtype] * 8) for length in row_lengths if length > 0]
    common = math.gcd(LARGEST_ALIGNMENT * 8, *bits)
    return max(common // 8, 1)
