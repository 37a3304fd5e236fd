"""Normalization, softmax and reductions: passes over rows, rows in flight, partial sums, strided rows."""

from __future__ import annotations

import dataclasses

import pytest
from advice import Net, subject_of
from kernels import product, stream

from trtopt.hardware.spec import find_gpu
from trtopt.roofline.batch import Batch
from trtopt.roofline.constants import constants_for
from trtopt.roofline.layer import layer_time, layer_times
from trtopt.roofline.rows import HELD_ELEMENTS, RowSizes, fused
from trtopt.roofline.work import Work

A100, T4 = find_gpu("A100-PCIe-40GB"), find_gpu("T4")


def row_kernel(count: int, length: int, **more: int) -> Work:
    return dataclasses.replace(stream(4 * count * length), rows=RowSizes(count, length, **more))


def us(work: Work, gpu: str = "A100-SXM4-80GB") -> float:
    return layer_time(work, find_gpu(gpu)).predicted_us


def rows_in(op: str, *shape: int, axes: tuple[int, ...] | None = None, **attributes: int) -> RowSizes | None:
    net = Net()
    inputs = [net.input("x", *shape)]
    if axes is not None:
        inputs.append(net.ints(*axes))
    if op.endswith("Normalization"):
        inputs += [net.weight(shape[-1] if op == "LayerNormalization" else shape[1]) for _ in range(2)]
    (layer,) = subject_of(net.output(net.op(op, *inputs, **attributes))).layers
    assert layer.work is not None
    return layer.work.rows


@pytest.mark.parametrize("gpu", ["T4", "RTX-3060-Laptop", "A100-SXM4-80GB", "GB200-per-GPU"])
def test_a_row_that_no_block_holds_is_read_again(gpu: str) -> None:
    held, long = row_kernel(4096, HELD_ELEMENTS, passes=3), row_kernel(4096, 2 * HELD_ELEMENTS, passes=3)
    assert fused(held.rows or RowSizes(0, 0), 2).reads == 1
    assert fused(long.rows or RowSizes(0, 0), 2).reads == 3
    assert us(long, gpu) > 2.1 * us(held, gpu)


def test_what_is_read_again_is_in_the_cache_while_the_rows_in_flight_fit() -> None:
    """216 rows at a time on an A100: of 64 KiB each they are 14 MB of its L2 cache of 40 MB; of 256 KiB, 57 MB."""
    short, long = row_kernel(8192, 32768), row_kernel(2048, 4 * 32768)
    assert us(long) > 1.3 * us(short)
    assert us(short) < 1.3 * us(row_kernel(8192, 32768, passes=1))


def test_a_norm_costs_no_more_than_a_stream_while_its_rows_are_held() -> None:
    work = row_kernel(16384, 4096)
    assert us(work) == pytest.approx(us(dataclasses.replace(work, rows=None)), rel=0.05)


@pytest.mark.parametrize("gpu", ["T4", "A100-SXM4-80GB", "H100-SXM5-80GB"])
def test_an_instance_norm_costs_more_than_a_relu_of_its_size(gpu: str) -> None:
    for pixels in (56 * 56, 224 * 224):
        rows = row_kernel(32 * 64, pixels, inner=64)
        assert us(rows, gpu) > 1.15 * us(dataclasses.replace(rows, rows=None), gpu)


def test_a_strided_row_is_held_only_with_its_neighbours() -> None:
    """A line of 128 bytes holds 64 FP16 elements, each of another row."""
    assert fused(RowSizes(4096, 256, inner=4096), 2).reads == 1
    assert fused(RowSizes(4096, 512, inner=4096), 2).reads == 2
    assert fused(RowSizes(4096, 512, inner=4), 2).reads == 1


def test_neighbours_of_a_strided_row_and_rows_shorter_than_a_warp_share_it() -> None:
    """As many rows of as many elements, contiguous or not, take as many threads; none takes 32 for 4 elements."""
    for length in (4, 16, 64, 256):
        beside, alone = fused(RowSizes(4096, length, inner=4096), 2), fused(RowSizes(4096, 64 * length), 2)
        assert 64 * beside.threads == alone.threads
    assert fused(RowSizes(4096, 4), 2).threads == 4
    assert fused(RowSizes(4096, 64), 2).threads == 32


def test_a_reduction_whose_threads_hold_a_row_each_is_an_element_wise_kernel() -> None:
    assert rows_in("ReduceMax", 8, 4, 128, axes=(1,), keepdims=0) is None
    assert rows_in("ReduceSum", 8, 16, 32, axes=(1,), keepdims=0) is None
    assert rows_in("ReduceMax", 8, 17, 128, axes=(1,), keepdims=0) == RowSizes(1024, 17, 128, 1)
    assert rows_in("ReduceMax", 8, 128, 4, axes=(2,), keepdims=0) == RowSizes(1024, 4, 1, 1)
    held = row_kernel(1 << 20, 17, inner=1024, passes=1)
    assert us(held) < 1.1 * us(dataclasses.replace(held, rows=None))


def test_few_long_rows_are_shared_among_blocks() -> None:
    """One row of 64 Mi elements in one block would take milliseconds; beside the stream, a second kernel adds up."""
    work = row_kernel(1, 1 << 26, passes=1)
    alone = dataclasses.replace(work, rows=None)
    assert us(alone) < us(work) < 1.5 * us(alone)
    assert us(row_kernel(4, 1 << 16, passes=1)) > us(row_kernel(256, 1 << 10, passes=1))


@pytest.mark.parametrize("gpu", ["T4", "RTX-4090", "A100-SXM4-80GB", "GB200-per-GPU"])
@pytest.mark.parametrize(("count", "length"), [(1, 7), (3, 1 << 22), (131072, 128), (512, 1 << 17)])
def test_rows_are_never_below_the_bound_nor_below_the_stream(gpu: str, count: int, length: int) -> None:
    work = row_kernel(count, length)
    for each in (work, dataclasses.replace(work, rows=None)):
        times = Batch.of([each], find_gpu(gpu)).predict(constants_for(find_gpu(gpu)))
        assert times.total[0] >= times.bound[0]
    assert us(work, gpu) >= us(dataclasses.replace(work, rows=None), gpu)


def test_an_element_wise_kernel_reaches_the_share_of_the_dram_measured_on_its_architecture() -> None:
    """NeuSight's large rows: 0.87 to 0.90 of the datasheet's bandwidth on A100, 0.73 to 0.78 on T4."""
    for gpu, low, high in ((A100, 0.85, 0.9), (T4, 0.72, 0.78)):
        moved = 4 << 30
        share = moved / gpu.bandwidth_gbs / 1e3 / layer_time(stream(moved), gpu).predicted_us
        assert low < share < high
    pooled = dataclasses.replace(stream(1 << 28), pooled=True)
    assert us(pooled) > us(stream(1 << 28))


def test_a_low_power_card_keeps_its_clock_for_single_kernels() -> None:
    work, c = product(4096, 4096, 4096), constants_for(T4)
    repeated, profiled = (layer_times([work], T4, c, timing=how)[0] for how in ("repeated", "profile"))
    assert profiled.predicted_us > 1.5 * repeated.predicted_us
    (alone,) = layer_times([stream(4096)], A100, constants_for(A100), timing="events")
    in_graph, whole = us(stream(4096), "A100-PCIe-40GB"), constants_for(A100).launch_cycles / A100.clock_tensor_mhz
    assert alone.predicted_us - in_graph == pytest.approx(constants_for(A100).event_us + whole)


def test_the_rows_of_operators() -> None:
    assert rows_in("Softmax", 2, 3, 8, 16, axis=-1) == RowSizes(48, 16, 1, 3)
    assert rows_in("Softmax", 2, 3, 4, 4, axis=1) == RowSizes(32, 3, 16, 3)
    assert rows_in("LayerNormalization", 4, 8, 16, axis=-1) == RowSizes(32, 16, 1, 2)
    assert rows_in("InstanceNormalization", 2, 8, 4, 4) == RowSizes(16, 16, 8, 2)
    assert rows_in("ReduceMean", 4, 8, 16, axes=(-1,), keepdims=0) == RowSizes(32, 16, 1, 1)
    assert rows_in("ReduceMean", 4, 8, 16, axes=(1,), keepdims=0) == RowSizes(64, 8, 16, 1)
    assert rows_in("GlobalAveragePool", 2, 8, 4, 4) == RowSizes(16, 16, 8, 1)
    assert rows_in("Relu", 4, 8) is None
