"""Attention as one kernel: what masks, groups, caches and head sizes do to its time."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from drawn_cases import given
from hypothesis import strategies as st
from kernels import attention

from trtopt.hardware.spec import GpuSpec, find_gpu
from trtopt.roofline.attention import Attentions, exponentials_per_clock, tensor_path
from trtopt.roofline.batch import Batch
from trtopt.roofline.constants import constants_for
from trtopt.roofline.layer import layer_time
from trtopt.roofline.peaks import peak_rate
from trtopt.roofline.work import AttentionSizes
from trtopt.support.precision import Precision

H100, A100, B200 = find_gpu("H100"), find_gpu("A100"), find_gpu("B200")


def square(length: int, heads: int = 256, size: int = 64) -> AttentionSizes:
    return AttentionSizes(length, length, size, size, heads, heads)


def microseconds(sizes: AttentionSizes, gpu: GpuSpec = H100, dtype: Precision = Precision.FP16) -> float:
    return layer_time(attention(sizes, dtype), gpu).predicted_us


def seen(sizes: AttentionSizes) -> float:
    rows = Attentions.of([attention(sizes)], np.ones(1), np.ones(1), np.zeros(1))
    return float(rows.seen[0])


@given(st.integers(1, 40), st.integers(0, 40), st.booleans(), st.integers(0, 50), many=200)
def test_the_pairs_that_a_mask_leaves_are_counted(queries: int, past: int, causal: bool, window: int) -> None:
    keys = queries + past
    window = window if causal else 0
    allowed = [
        (query, key)
        for query in range(queries)
        for key in range(keys)
        if not causal or (key <= query + past and (not window or key > query + past - window))
    ]
    counted = seen(AttentionSizes(queries, keys, 8, 8, 1, 1, causal, window))
    if not window:
        assert counted == len(allowed)
    else:  # a window that reaches before the first key is cut off there, which the closed form leaves out
        assert len(allowed) <= counted <= queries * min(window, keys)


def test_a_causal_mask_halves_a_long_attention() -> None:
    full, causal = square(4096), dataclasses.replace(square(4096), causal=True)
    assert 0.45 < microseconds(causal) / microseconds(full) < 0.65


def test_the_time_with_a_window_grows_with_the_length_only() -> None:
    short, long = (dataclasses.replace(square(length), causal=True, window=256) for length in (4096, 16384))
    assert 3.5 < microseconds(long) / microseconds(short) < 4.5
    assert microseconds(long) < 0.2 * microseconds(dataclasses.replace(long, window=0))


def test_one_query_costs_what_its_cache_moves_and_groups_share_it() -> None:
    own = AttentionSizes(1, 8192, 128, 128, 64 * 32, 64 * 32, True)
    shared = dataclasses.replace(own, kv_heads=64 * 8)
    assert microseconds(own) > attention(own).bytes / (H100.bandwidth_gbs * 1e3)
    assert 3 < microseconds(own) / microseconds(shared) < 5


def test_few_long_streams_are_split() -> None:
    """A single block would take its 131072 keys one after the other."""
    one = AttentionSizes(1, 131072, 128, 128, 1, 1, True)
    in_turn = attention(one).read_bytes / (constants_for(H100).decode_bytes * H100.clock_tensor_mhz)
    assert microseconds(one) < in_turn / 8


def test_the_longest_block_of_a_causal_mask_bounds_few_heads() -> None:
    """One head of 8192 queries has fewer blocks than the GPU has SMs: the last one sees all keys."""
    full, causal = square(8192, heads=1), dataclasses.replace(square(8192, heads=1), causal=True)
    assert microseconds(causal) > 0.8 * microseconds(full)


def test_heads_are_padded_to_what_the_tensor_cores_take() -> None:
    """``wgmma`` takes rows of 128 bytes: 72 elements cost what 128 do; ``mma.sync`` fragments of 32 bytes."""
    assert microseconds(square(4096, size=72)) == pytest.approx(microseconds(square(4096, size=128)), rel=0.05)
    assert microseconds(square(4096, size=72), A100) < 0.8 * microseconds(square(4096, size=128), A100)


def test_exponentials_bound_attention_in_fp8() -> None:
    """At twice the rate of the products, the time falls by much less than half."""
    half, eight = (microseconds(square(8192, size=128), B200, dtype) for dtype in (Precision.FP16, Precision.FP8))
    assert 0.6 < eight / half < 0.95


@pytest.mark.parametrize(("capability", "rate"), [("7.5", 16), ("9.0", 16), ("10.3", 32), ("12.0", 16)])
def test_exponentials_per_clock(capability: str, rate: int) -> None:
    assert exponentials_per_clock(capability) == rate


def test_only_tensor_memory_hides_the_exponentials() -> None:
    assert [tensor_path(each).overlaps for each in ("8.0", "9.0", "10.0", "11.0", "12.0")] == [
        False, False, True, True, False,
    ]  # fmt: skip


@given(
    st.sampled_from([H100, A100, B200, find_gpu("T4"), find_gpu("RTX-4090")]),
    st.integers(1, 5000), st.integers(0, 5000), st.integers(1, 256), st.integers(1, 512), st.integers(1, 8),
    st.booleans(), many=200,
)  # fmt: skip
def test_no_attention_is_faster_than_its_physical_bound(
    gpu: GpuSpec, queries: int, past: int, size: int, kv_heads: int, group: int, causal: bool
) -> None:
    sizes = AttentionSizes(queries, queries + past, size, size, kv_heads * group, kv_heads, causal)
    work = attention(sizes)
    times = Batch.of([work], gpu).predict(constants_for(gpu))
    flop = 4 * seen(sizes) * size * sizes.heads
    beyond = max(work.bytes - gpu.l2_mib * 2**20, 0) / (gpu.bandwidth_gbs * 1e3)
    assert times.total[0] >= times.bound[0] >= max(0.999 * flop / peak_rate(gpu, work.dtype), 0.999 * beyond)
    assert np.isfinite(times.total[0]) and times.math[0] <= times.total[0] * 1.0001
