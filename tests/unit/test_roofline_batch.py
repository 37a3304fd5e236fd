"""Many kernels at once: physical bounds, and what each kind of kernel is charged."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from drawn_cases import given
from hypothesis import strategies as st
from kernels import combinations, convolution, product, recurrence, stream, works

from trtopt.errors import UsageError
from trtopt.hardware.spec import GpuSpec, find_gpu
from trtopt.roofline.batch import WINOGRAD_SAVING, Batch, Times
from trtopt.roofline.constants import constants_for
from trtopt.roofline.peaks import cuda_core_rate, peak_rate
from trtopt.roofline.work import Gemm, Window, Work
from trtopt.support.precision import Precision

A100, V100 = find_gpu("A100"), find_gpu("V100")
PLAIN = Window((3, 3), (1, 1), (1, 1))


def predict(*found: Work, gpu: GpuSpec = A100) -> Times:
    return Batch.of(found, gpu).predict(constants_for(gpu))


@given(st.data(), st.sampled_from(combinations()), many=300)
def test_no_kernel_is_faster_than_its_physical_bound(data: st.DataObject, chip: tuple[GpuSpec, Precision]) -> None:
    """Flop over peak, with Winograd's factor; bytes over the DRAM bandwidth, over the L2's for what fits into it."""
    gpu, dtype = chip
    work = data.draw(works(dtype))
    times = predict(work, gpu=gpu)
    rate = 2 * cuda_core_rate(gpu) if times.product[0] < 0 else peak_rate(gpu, dtype)
    step = work.moved_bytes / work.steps if work.kind != "recurrent" else work.weight_bytes / 2
    l2 = gpu.l2_mib * 2**20
    assert times.total[0] >= times.bound[0] > 0
    saving = WINOGRAD_SAVING.get(work.window.kernel, 1) if work.window and dtype == "fp32" else 1
    assert times.total[0] >= 0.999 * work.flop / rate / saving
    assert times.total[0] >= 0.999 * (step - l2) / (gpu.bandwidth_gbs * 1e3)
    assert times.total[0] >= 0.999 * min(step, l2) / (64 * gpu.sm * gpu.clock_tensor_mhz)


@given(st.data(), st.sampled_from(combinations()))
def test_kernels_do_not_depend_on_their_neighbours(data: st.DataObject, chip: tuple[GpuSpec, Precision]) -> None:
    gpu, dtype = chip
    found = data.draw(st.lists(works(dtype), min_size=2, max_size=6))
    together = predict(*found, gpu=gpu)
    for index, work in enumerate(found):
        alone = predict(work, gpu=gpu)
        for field in ("math", "memory", "total", "least_math", "least_memory"):
            assert getattr(together, field)[index] == pytest.approx(getattr(alone, field)[0], rel=1e-12), field


@given(st.sampled_from(combinations()), st.integers(1, 2**33), st.integers(0, 2**33))
def test_memory_work_takes_longer_with_more_bytes(chip: tuple[GpuSpec, Precision], moved: int, more: int) -> None:
    gpu, dtype = chip
    total = predict(stream(moved, dtype), stream(moved + more, dtype), gpu=gpu).total
    assert total[1] >= total[0] * (1 - 1e-12)


def test_no_kernels_take_no_time() -> None:
    assert len(predict().total) == 0


def test_the_bound_of_a_large_product_is_its_flop_over_the_peak() -> None:
    work = product(8192, 8192, 8192)
    assert predict(work).bound[0] == pytest.approx(2 * 8192**3 / 312e6)


def test_the_bound_of_a_stream_is_l2_for_what_fits_and_dram_for_the_rest() -> None:
    l2 = 40 * 2**20
    least = predict(stream(l2 // 2), stream(10 * l2)).bound
    assert least[0] == pytest.approx(l2 / 2 / (64 * 108 * 1410))
    assert least[1] == pytest.approx(9 * l2 / 2039e3 + l2 / (64 * 108 * 1410))


WINDOWS = {
    "3x3": PLAIN,
    "strided": Window((3, 3), (2, 2), (1, 1)),
    "dilated": Window((3, 3), (1, 1), (2, 2)),
    "grouped": Window((3, 3), (1, 1), (1, 1), 2),
    "transposed": Window((3, 3), (1, 1), (1, 1), transposed=True),
    "5x5": Window((5, 5), (1, 1), (1, 1)),
    "7x7": Window((7, 7), (1, 1), (1, 1)),
    "3x5": Window((3, 5), (1, 1), (1, 1)),
    "1x1": Window((1, 1), (1, 1), (1, 1)),
}


@pytest.mark.parametrize(("name", "dtype"), [(name, "fp32") for name in WINDOWS] + [("3x3", "tf32"), ("3x3", "fp16")])
def test_winograd_saves_on_plain_3x3_and_5x5_convolutions_of_cuda_cores_only(name: str, dtype: Precision) -> None:
    """F(4x4, r x r) takes (4 + r - 1)^2 products for 16 r^2 of the direct one."""
    work = convolution(256, 256, 56, WINDOWS[name], dtype)
    saving = Batch.of((work,), A100).saving[0]
    expected = {"3x3": 16 * 9 / 36, "5x5": 16 * 25 / 64}
    assert saving == (expected.get(name, 1.0) if dtype == "fp32" else 1.0)


def test_winograd_is_not_worth_it_for_the_channels_of_an_image() -> None:
    assert Batch.of((convolution(3, 64, 224, PLAIN, "fp32"),), V100).saving[0] == 1.0


def test_winograd_makes_a_convolution_faster_than_its_flop_over_the_peak() -> None:
    """DeepBench measured up to 2.35 times the direct peak on a V100."""
    work = convolution(256, 256, 56, PLAIN, "fp32")
    direct = work.flop / peak_rate(V100, "fp32")
    assert 1.2 < direct / predict(work, gpu=V100).total[0] < 2.6


@pytest.mark.parametrize(
    ("kernel", "stride", "share"), [(1, 1, 1.0), (1, 2, 1 / 4), (1, 4, 1 / 16), (3, 2, 1.0), (2, 4, 1 / 4)]
)
def test_a_strided_convolution_reads_what_its_kernel_reaches(kernel: int, stride: int, share: float) -> None:
    work = convolution(64, 64, 64, Window((kernel, kernel), (stride, stride), (1, 1)))
    moved = Batch.of((work,), A100).moved[0]
    assert moved == pytest.approx(work.read_bytes * share + work.weight_bytes + work.write_bytes)


def test_sums_in_fp16_make_geforce_twice_as_fast_and_an_a100_no_faster() -> None:
    work = product(8192, 8192, 8192)
    fast = dataclasses.replace(work, accumulate_fp16=True)
    geforce, server = (predict(work, fast, gpu=find_gpu(name)).total for name in ("RTX 4090", "A100"))
    assert geforce[0] / geforce[1] == pytest.approx(2, rel=0.05)
    assert server[0] == server[1]


def test_rows_that_are_no_multiples_of_16_bytes_cost_tensor_cores_time() -> None:
    aligned, odd = product(4096, 4096, 4096), product(4096, 4095, 4096)
    total = predict(aligned, odd).total
    assert total[1] > 1.02 * total[0]  # one column less, and yet slower
    single = predict(product(4096, 4096, 4096, "fp32"), product(4096, 4095, 4096, "fp32")).total
    assert single[1] == pytest.approx(single[0], rel=0.01)


def test_a_recurrent_layer_goes_step_by_step_and_reads_its_weights_in_each() -> None:
    short, long = (recurrence(steps, 8, 1024) for steps in (10, 100))
    batch = Batch.of((short, long), A100)
    every, states = 4 * 1024 * 1024 * 2, 2 * 8 * 1024 * 2  # the input's weights, as large, are read once
    assert list(batch.moved) == [every + every / 10 + states, every + every / 100 + states]
    times = batch.predict(constants_for(A100))
    assert 9 * times.total[0] < times.total[1] < 10 * times.total[0]
    at_once = product(8 * 100, 4096, 2048)
    assert times.total[1] > 5 * predict(at_once).total[0]


def test_arithmetic_fused_into_a_product_takes_time_of_its_own() -> None:
    work = product(4096, 4096, 4096)
    total = predict(work, dataclasses.replace(work, flop=2 * work.flop)).total
    assert total[1] > 1.8 * total[0]


def test_a_transposed_convolution_takes_no_longer_than_the_same_product() -> None:
    """Its taps are columns: k is the input channels, which nothing pads per tap."""
    gemm = Gemm(64 * 64, 16 * 16, 16)
    bytes_ = (gemm.m * gemm.k * 2, gemm.n * gemm.k * 2, 4 * gemm.m * 16 * 2)
    plain = Work("gemm", gemm.flop, *bytes_, dtype="fp16", gemm=gemm)
    upsampling = dataclasses.replace(plain, kind="conv", window=Window((4, 4), (2, 2), (1, 1), transposed=True))
    total = predict(plain, upsampling).total
    assert total[0] <= total[1] <= total[0] / constants_for(A100).conv_share


def test_a_residual_beside_a_strided_convolution_is_read_whole() -> None:
    """As in a ResNet's downsampling: a 1x1 convolution of stride 2 reads a quarter of its input."""
    alone = convolution(256, 512, 56, Window((1, 1), (2, 2), (1, 1)))
    residual = dataclasses.replace(alone, read_bytes=alone.read_bytes + alone.write_bytes)
    assert alone.moved_bytes == alone.read_bytes / 4 + alone.weight_bytes + alone.write_bytes
    assert residual.moved_bytes == alone.moved_bytes + alone.write_bytes


def test_depthwise_convolutions_are_bound_by_memory_and_not_by_tensor_cores() -> None:
    work = convolution(256, 256, 56, Window((3, 3), (1, 1), (1, 1), 256))
    times = predict(work)
    assert work.kind == "depthwise"
    assert times.product[0] == -1
    assert times.choice is None
    assert times.memory[0] > times.math[0]


def test_a_type_the_gpu_lacks_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="no units for fp8"):
        Batch.of((product(64, 64, 64), product(64, 64, 64, "fp8")), A100)


def test_products_and_streams_keep_their_places() -> None:
    times = predict(stream(1024), product(64, 64, 64), stream(2048), product(128, 64, 64))
    assert np.array_equal(times.product, [-1, 0, -1, 1])
    assert times.choice is not None and len(times.choice.time) == 2
