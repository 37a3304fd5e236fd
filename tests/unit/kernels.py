"""Kernels to predict, and how to draw them."""

from __future__ import annotations

import math
from functools import cache

from hypothesis import strategies as st

from trtopt.hardware.spec import GpuSpec, all_gpus, supports
from trtopt.roofline.work import AttentionSizes, Gemm, Window, Work, alignment_of
from trtopt.support.precision import ELEMENT_BYTES, MATH_TYPES, Precision

DTYPES: tuple[Precision, ...] = MATH_TYPES


@cache
def combinations() -> tuple[tuple[GpuSpec, Precision], ...]:
    """Every GPU of the table with every type it has units for."""
    return tuple((gpu, dtype) for gpu in all_gpus() for dtype in DTYPES if supports(gpu, dtype))


def product(
    m: int, n: int, k: int, dtype: Precision = Precision.FP16, *, batch: int = 1, aligned: bool = False
) -> Work:
    """A matrix product; ``aligned`` leaves out what the sizes say about alignment."""
    size, gemm = ELEMENT_BYTES[dtype], Gemm(m, n, k, batch)
    alignment = 128 if aligned else alignment_of(n, k, dtype=dtype)
    reads, weights, writes = (int(count * batch * size) for count in (m * k, k * n, m * n))
    return Work("gemm", gemm.flop, reads, weights, writes, dtype, gemm=gemm, alignment_bytes=alignment)


def convolution(
    channels: int, outputs: int, pixels: int, window: Window, dtype: Precision = Precision.FP16, *, batch: int = 8
) -> Work:
    """A convolution of square maps of ``pixels`` by ``pixels`` that divides them by its stride."""
    size, out = ELEMENT_BYTES[dtype], batch * math.prod(math.ceil(pixels / stride) for stride in window.stride)
    gemm = Gemm(out, outputs // window.group, channels // window.group * math.prod(window.kernel), window.group)
    weights = gemm.n * gemm.k * window.group
    return Work(
        "depthwise" if window.group == channels > 1 else "conv",
        gemm.flop,
        int(batch * channels * pixels**2 * size),
        int(weights * size),
        int(out * outputs * size),
        dtype,
        gemm=gemm,
        window=window,
        alignment_bytes=alignment_of(channels, outputs, dtype=dtype),
    )


def stream(moved: int, dtype: Precision = Precision.FP16, *, flop: int | None = None) -> Work:
    """A kernel that reads and writes half of ``moved`` bytes each, one operation per element read."""
    count = int(moved / 2 / ELEMENT_BYTES[dtype]) if flop is None else flop
    return Work("memory", count, moved // 2, 0, moved - moved // 2, dtype)


def attention(sizes: AttentionSizes, dtype: Precision = Precision.FP16) -> Work:
    """An attention that reads Q, K and V once and writes its result once."""
    element = ELEMENT_BYTES[dtype]
    rows, width = sizes.heads * sizes.queries, sizes.size + sizes.value_size
    return Work(
        "attention",
        2 * rows * sizes.keys * width,
        int((rows * sizes.size + sizes.kv_heads * sizes.keys * width) * element),
        0,
        int(rows * sizes.value_size * element),
        dtype,
        gemm=Gemm(sizes.queries, sizes.keys, sizes.size, sizes.heads),
        attention=sizes,
    )


def recurrence(steps: int, batch: int, hidden: int, dtype: Precision = Precision.FP16) -> Work:
    """An LSTM: the products of all inputs at once, and a recurrent one per step."""
    size, gemm = ELEMENT_BYTES[dtype], Gemm(batch, 4 * hidden, hidden)
    moved, weights = int(steps * batch * hidden * size), int(8 * hidden * hidden * size)
    return Work("recurrent", 2 * steps * gemm.flop, moved, weights, moved, dtype, gemm=gemm, steps=steps)


sizes = st.floats(0, 14).map(lambda power: max(1, round(2**power)))
"""1 to 16384, all magnitudes alike."""


@st.composite
def works(draw: st.DrawFn, dtype: Precision) -> Work:
    """A kernel of any kind in one type."""
    kind = draw(st.sampled_from(["gemm", "conv", "depthwise", "memory", "recurrent"]))
    if kind == "gemm":
        return product(draw(sizes), draw(sizes), draw(sizes), dtype, batch=draw(st.integers(1, 64)))
    if kind == "memory":
        return stream(draw(st.integers(1, 2**34)), dtype)
    if kind == "recurrent":
        return recurrence(draw(st.integers(1, 64)), draw(st.integers(1, 256)), draw(st.integers(1, 2048)), dtype)
    kernel, stride = draw(st.sampled_from([1, 3, 5, 7])), draw(st.sampled_from([1, 2, 4]))
    channels, pixels = draw(st.integers(1, 1024)), draw(st.integers(1, 256))
    group = channels if kind == "depthwise" else 1
    outputs = channels if kind == "depthwise" else draw(st.integers(1, 1024))
    window = Window((kernel, kernel), (stride, stride), (1, 1), group)
    return convolution(channels, outputs, pixels, window, dtype, batch=draw(st.integers(1, 32)))
