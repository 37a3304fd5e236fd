"""A larger kernel takes no less time on any GPU, whatever its shape."""

from __future__ import annotations

import dataclasses
import math

import pytest
from drawn_cases import given
from hypothesis import strategies as st
from kernels import attention, combinations, convolution, product, sizes, stream

from trtopt.hardware.spec import GpuSpec, supports
from trtopt.roofline.constants import constants_for, sustained_share
from trtopt.roofline.layer import layer_times
from trtopt.roofline.rows import RowSizes
from trtopt.roofline.work import AttentionSizes, Window, Work
from trtopt.support.precision import Precision

ATTENTION = [pair for pair in combinations() if pair[1] in (Precision.FP16, Precision.FP8)]
FP16 = [gpu for gpu, dtype in combinations() if dtype == Precision.FP16]
HEADS = (8, 16, 40, 64, 72, 80, 96, 128, 192, 256)
factors = st.sampled_from([1.0, 1.02, 1.1, 1.5, 2.0, 3.0])
"""By how much a size grows, beside 1 that is added."""


def growth(before: Work, after: Work, gpu: GpuSpec) -> float:
    """Time of the second over that of the first."""
    times = layer_times((before, after), gpu, constants_for(gpu))
    assert all(math.isfinite(time.predicted_us) for time in times)
    return times[1].predicted_us / times[0].predicted_us


def grown(size: int, factor: float) -> int:
    return int(size * factor) + 1


@given(st.sampled_from(combinations()), sizes, sizes, sizes, st.integers(1, 64), st.integers(0, 3), factors, many=400)
def test_larger_products_of_the_same_alignment(
    chip: tuple[GpuSpec, Precision], m: int, n: int, k: int, batch: int, which: int, factor: float
) -> None:
    gpu, dtype = chip
    before = [m, n, k, batch]
    after = [grown(size, factor) if index == which else size for index, size in enumerate(before)]
    works = [product(*dims[:3], dtype, batch=dims[3], aligned=True) for dims in (before, after)]
    # A sum that is a little longer may be cut into whole steps with less left over.
    assert growth(works[0], works[1], gpu) > (0.94 if which == 2 else 0.98)


@given(
    st.sampled_from(ATTENTION), sizes, sizes, st.sampled_from(HEADS), st.sampled_from([1, 2, 8, 32, 64]),
    st.sampled_from([1, 1, 4, 8, 40]), st.sampled_from(["no mask", "causal", "window"]),
    st.sampled_from(["keys", "both", "batch", "head"]), factors, many=600,
)  # fmt: skip
def test_larger_attention(
    chip: tuple[GpuSpec, Precision],
    queries: int,
    past: int,
    size: int,
    kv_heads: int,
    group: int,
    mask: str,
    what: str,
    factor: float,
) -> None:
    """More keys, longer sequences, more sequences, larger heads; caches, grouped queries and windows among them."""
    before = AttentionSizes(
        queries, queries + past, size, size, kv_heads * group, kv_heads, mask != "no mask", 512 * (mask == "window")
    )
    after = {
        "keys": {"keys": grown(before.keys, factor)},
        "both": {"queries": grown(queries, factor), "keys": grown(queries, factor) + past},
        "batch": {"heads": 2 * before.heads, "kv_heads": 2 * kv_heads},
        "head": {"size": size + 8, "value_size": size + 8},
    }[what]
    gpu, dtype = chip
    assert growth(attention(before, dtype), attention(dataclasses.replace(before, **after), dtype), gpu) > 0.98


@given(st.sampled_from(ATTENTION), sizes, st.sampled_from(HEADS), st.sampled_from([1, 4, 8]), st.integers(2, 64))
def test_several_queries_take_no_less_than_one(
    chip: tuple[GpuSpec, Precision], keys: int, size: int, group: int, queries: int
) -> None:
    gpu, dtype = chip
    one = AttentionSizes(1, keys + queries, size, size, 8 * group, 8)
    assert growth(attention(one, dtype), attention(dataclasses.replace(one, queries=queries), dtype), gpu) > 0.98


@given(st.sampled_from(FP16), sizes, sizes, st.sampled_from([1, 16, 1000]), st.booleans(), factors, many=400)
def test_more_and_longer_rows(gpu: GpuSpec, count: int, length: int, inner: int, longer: bool, factor: float) -> None:
    def norm(count: int, length: int) -> Work:
        rows = RowSizes(count, length, inner)
        return dataclasses.replace(stream(4 * count * length, flop=8 * count * length), rows=rows)

    after = (count, grown(length, factor)) if longer else (grown(count, factor), length)
    assert growth(norm(count, length), norm(*after), gpu) > 0.98


@pytest.mark.parametrize("kernel", [1, 3])
@given(st.sampled_from(FP16), st.sampled_from([8, 64, 256]), st.integers(1, 200), st.integers(1, 64), factors)
def test_larger_images_and_batches(
    kernel: int, gpu: GpuSpec, channels: int, pixels: int, batch: int, factor: float
) -> None:
    window = Window((kernel, kernel), (1, 1), (1, 1))
    before = convolution(channels, channels, pixels, window, batch=batch)
    for after in (
        convolution(channels, channels, pixels, window, batch=grown(batch, factor)),
        convolution(channels, channels, grown(pixels, factor), window, batch=batch),
    ):
        assert growth(before, after, gpu) > 0.98


def at_least(gpu: GpuSpec, other: GpuSpec) -> bool:
    """Whether a GPU of the same architecture has no less of anything, in each of its SMs either.

    The clock is the one that its power sustains: 72 W for the 58 SMs of an L4 are less for each than 70 W for 48.
    """
    sizes = ("sm", "clock_tensor_mhz", "bandwidth_gbs", "l2_mib", "tdp_w")
    more = all(getattr(gpu, name) >= getattr(other, name) for name in sizes)
    clock, other_clock = (sustained_share(chip) * chip.clock_tensor_mhz for chip in (gpu, other))
    same = gpu.compute_capability == other.compute_capability
    units = other.fma_per_clock_per_sm.items()
    return (
        more
        and same
        and clock >= other_clock
        and all(gpu.fma_per_clock_per_sm.get(name, 0) >= count for name, count in units)
    )


PAIRS = [(less, more) for less in FP16 for more in FP16 if more is not less and at_least(more, less)]


@given(st.sampled_from(PAIRS), st.data(), many=400)
def test_a_gpu_with_more_of_everything_is_not_slower(pair: tuple[GpuSpec, GpuSpec], data: st.DataObject) -> None:
    m, n, k = (data.draw(sizes) for _ in range(3))
    heads = data.draw(st.integers(1, 64))
    rows = RowSizes(m, n)
    work = data.draw(
        st.sampled_from(
            [
                product(m, n, k, aligned=True),
                attention(AttentionSizes(m, k, 64, 64, heads, heads)),
                stream(2 * m * n + 2),
                dataclasses.replace(stream(4 * m * n, flop=8 * m * n), rows=rows),
            ]
        )
    )
    less, more = (layer_times((work,), gpu, constants_for(gpu))[0].predicted_us for gpu in pair)
    assert more < 1.03 * less


@given(st.sampled_from(combinations()), st.data(), many=200)
def test_narrower_types_are_not_slower_on_large_products(chip: tuple[GpuSpec, Precision], data: st.DataObject) -> None:
    gpu, dtype = chip
    m, n, k = (64 * data.draw(st.integers(8, 160)) for _ in range(3))
    if dtype not in (Precision.FP8, Precision.INT8) or not supports(gpu, Precision.FP16):
        return
    narrow, wide = layer_times((product(m, n, k, dtype), product(m, n, k)), gpu, constants_for(gpu))
    assert narrow.predicted_us < 1.02 * wide.predicted_us


@pytest.mark.parametrize("gpu", {gpu.name: gpu for gpu, _ in combinations()}.values(), ids=lambda gpu: gpu.name)
def test_the_smallest_kernel_takes_a_launch_on_every_gpu(gpu: GpuSpec) -> None:
    dtype = Precision.FP16 if supports(gpu, Precision.FP16) else Precision.FP32
    works = (
        product(1, 1, 1, dtype),
        product(1, 1, 3, dtype),
        stream(4, dtype),
        attention(AttentionSizes(1, 1, 8, 8, 1, 1)),
    )
    for time in layer_times(works[: 4 if dtype == Precision.FP16 else 3], gpu, constants_for(gpu)):
        assert 1 < time.latency_us <= time.predicted_us < 30
