"""The time of kernels with 2:4 weights."""

from __future__ import annotations

import dataclasses

import pytest
from drawn_cases import given
from hypothesis import assume
from hypothesis import strategies as st
from kernels import combinations, convolution, product, stream, works

from trtopt.errors import UsageError
from trtopt.hardware.spec import GpuSpec, find_gpu
from trtopt.roofline.batch import Batch
from trtopt.roofline.constants import constants_for
from trtopt.roofline.layer import layer_time
from trtopt.roofline.peaks import SPARSE_TYPES, peak_rate
from trtopt.roofline.work import Window, Work, sparse_share, sparse_work
from trtopt.support.precision import Precision

A100 = find_gpu("A100")
SPARSE = [(gpu, dtype) for gpu, dtype in combinations() if gpu.sparse_2_4 and dtype in SPARSE_TYPES]


@pytest.mark.parametrize(("dtype", "sixteenths"), [("fp16", 9), ("bf16", 9), ("int8", 10), ("fp8", 10)])
def test_two_of_four_weights_and_two_bits_each(dtype: Precision, sixteenths: int) -> None:
    dense = product(64, 512, 256, dtype)
    sparse = sparse_work(dense)
    assert 16 * sparse_share(dtype) == sixteenths
    assert 16 * sparse.weight_bytes == sixteenths * dense.weight_bytes
    assert dataclasses.replace(sparse, sparse=False, weight_bytes=dense.weight_bytes) == dense


def test_a_bias_is_not_compressed() -> None:
    dense = product(64, 512, 256)
    biased = dataclasses.replace(dense, weight_bytes=dense.weight_bytes + 1024)
    assert sparse_work(biased).weight_bytes == sparse_work(dense).weight_bytes + 1024


def test_work_without_a_product_has_no_weight() -> None:
    with pytest.raises(ValueError, match="no weight"):
        sparse_work(stream(4096))


@given(st.data(), st.sampled_from(SPARSE), many=300)
def test_no_sparse_kernel_is_below_its_bound_or_slower_than_dense(
    data: st.DataObject, chip: tuple[GpuSpec, Precision]
) -> None:
    """Flop over twice the peak, and the bytes."""
    gpu, dtype = chip
    dense = data.draw(works(dtype))
    assume(dense.kind in ("gemm", "conv"))
    sparse = sparse_work(dense)
    times = Batch.of((dense, sparse), gpu).predict(constants_for(gpu))
    assert times.total[1] >= times.bound[1] >= dense.flop / (2 * peak_rate(gpu, dtype, dense.accumulate_fp16)) * 0.999
    assert times.least_math[1] == pytest.approx(times.least_math[0] / 2)
    assert times.total[1] <= times.total[0] * (1 + 1e-12)
    assert times.memory[1] <= times.memory[0]


def test_a_large_product_gains_and_a_stream_of_activations_does_not() -> None:
    def gain(work: Work) -> float:
        dense, sparse = (layer_time(item, A100) for item in (work, sparse_work(work)))
        assert dense.latency_us == sparse.latency_us
        return 1 - sparse.predicted_us / dense.predicted_us

    assert gain(product(8192, 4096, 4096)) > 0.15
    assert gain(product(64, 64, 64)) < 0.03
    assert gain(convolution(64, 64, 112, Window((1, 1), (1, 1), (1, 1)))) < 0.05


@pytest.mark.parametrize(("gpu", "dtype"), [("T4", "fp16"), ("V100", "fp16"), ("A100", "fp32"), ("A100", "tf32")])
def test_a_gpu_without_such_tensor_cores_is_refused(gpu: str, dtype: Precision) -> None:
    with pytest.raises(UsageError, match=f"no Tensor Cores for 2:4 weights in {dtype}"):
        layer_time(sparse_work(product(64, 64, 64, dtype)), find_gpu(gpu))
