"""What the L2 still holds when a network reads it again: single kernels against kernels of an inference."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal

import numpy as np
import pytest
from advice import Net, subject_of
from kernels import product, recurrence, stream
from test_engine_work import count, kernel, parse, tensor

from trtopt.hardware.spec import GpuSpec, find_gpu
from trtopt.profiling.engine_layers import LayerTime, join_times
from trtopt.roofline.gemm import cold_share
from trtopt.roofline.layer import layer_time, predict
from trtopt.roofline.work import Layer, in_network

L4 = find_gpu("L4")
WIDTH = 1024


def decoder(depth: int) -> tuple[Layer, ...]:
    """One token through products of 2 MiB each."""
    layers = [Layer(f"product {index}", "MatMul", (), product(1, WIDTH, WIDTH)) for index in range(depth)]
    return in_network(layers, depth * 2 * WIDTH**2)


def busy_us(layers: tuple[Layer, ...], gpu: GpuSpec) -> float:
    """Microseconds of all kernels without their launches."""
    return sum(row.predicted_us - row.latency_us for row in predict(layers, gpu)[0])


def test_weights_that_exceed_the_l2_together_take_no_less_than_the_datasheets_bandwidth_allows() -> None:
    moved = 27 * 2 * WIDTH**2
    assert moved > 1.1 * L4.l2_mib * 2**20
    assert busy_us(decoder(27), L4) >= moved / (L4.bandwidth_gbs * 1e3)


def test_weights_that_fit_together_stay_in_the_l2_as_those_of_a_kernel_alone() -> None:
    alone = layer_time(product(1, WIDTH, WIDTH), L4)
    assert busy_us(decoder(16), L4) == pytest.approx(16 * (alone.predicted_us - alone.latency_us), rel=1e-3)


def test_the_same_network_is_cold_on_one_gpu_and_warm_on_another() -> None:
    slow, large = find_gpu("RTX 3090"), find_gpu("RTX 5090")
    layers = decoder(27)
    alone = tuple(Layer(each.name, each.op, (), product(1, WIDTH, WIDTH)) for each in layers)
    assert busy_us(layers, large) == pytest.approx(busy_us(alone, large), rel=1e-3)
    assert busy_us(layers, slow) > busy_us(alone, slow)


def test_what_a_kernel_before_wrote_stays_where_it_is() -> None:
    alone = stream(4 << 20)
    inner, outer = (replace(alone, inference_bytes=1 << 30, network_share=share) for share in (0.0, 1.0))
    kept, lost = (layer_time(work, L4).memory_us for work in (inner, outer))
    assert kept == layer_time(alone, L4).memory_us
    assert lost > 2 * kept


def test_the_weights_of_a_loop_stay_from_step_to_step() -> None:
    work = recurrence(64, 1, 512)
    assert layer_time(replace(work, inference_bytes=1 << 30), L4) == layer_time(work, L4)


@pytest.mark.parametrize(("compute_capability", "held"), [("8.9", 1.05), ("9.0", 0.75)])
def test_the_edge_is_where_the_least_recently_used_has_gone(compute_capability: str, held: float) -> None:
    touched = np.array([0, 0.9, 1.1, 1e6]) * held * 2**25
    moved = np.full(4, 100.0)
    share = cold_share(np.array([60.0] * 4), moved, touched, 2**25, compute_capability)
    assert share[0] == 0
    assert share[1] < 0.05 * 0.6
    assert share[2] > 0.9 * 0.6
    assert share[3] == pytest.approx(0.6)


def caching() -> Net:
    """Two layers that share one weight, and a cache that is read and written longer."""
    net = Net()
    x, past, weight = net.input("x", 1, 1, 64), net.input("past", 1, 255, 64), net.weight(64, 64)
    y = net.op("Relu", net.op("MatMul", net.op("Relu", net.op("MatMul", x, weight)), weight))
    return net.output(net.op("Concat", past, y, axis=1, name="present"))


def test_of_a_graph_constants_inputs_and_outputs_count_once() -> None:
    works = {layer.name: layer.work for layer in subject_of(caching()).layers if layer.work is not None}
    present = works["present"]
    assert present.network_share == 1.0
    assert present.read_bytes == 255 * 64 * 2
    # one weight, 255 rows in and out, the token in, its row of the cache out, and the token between the two products
    assert {work.inference_bytes for work in works.values()} == {(64 * 64 + 2 * 255 * 64 + 64 + 64 + 64) * 2}


def test_of_an_engine_constants_inputs_and_outputs_count_once() -> None:
    model = parse(
        "g (float16[8, 64] x) => (float16[8, 64] y) <float16[64, 64] w> { h = MatMul(x, w) y = MatMul(h, w) }"
    )
    tokens = {name: tensor(name, 8, 64) for name in ("x_myl0", "h", "y")}
    weight = (tensor("w", 64, 64),)
    first = kernel("first", "h", [tokens["x_myl0"]], [tokens["h"]], weight, kind="gemm")
    second = kernel("second", "y", [tokens["h"]], [tokens["y"]], weight, kind="gemm")
    works = [layer.work for layer in count(model, first, second).layers]
    assert [work and work.network_share for work in works] == [0.5, 0.5]
    assert {work and work.inference_bytes for work in works} == {(64 * 64 + 8 * 64 * 3) * 2}


def test_measured_layers_are_those_of_one_inference() -> None:
    def entry(name: str, reads: str, writes: str) -> dict[str, object]:
        ends = {"Inputs": reads, "Outputs": writes}
        tensors = {
            key: [{"Name": each, "Dimensions": [8, 64, 16, 16], "Format/Datatype": "Row major linear FP16 format"}]
            for key, each in ends.items()
        }
        return {"Name": name, "LayerType": "PointWise", **tensors}

    entries = [entry("a", "x", "h"), entry("b", "h", "y")]
    layers, _ = join_times(entries, [LayerTime("a", Decimal(1)), LayerTime("b", Decimal(1))])
    size = 8 * 64 * 16 * 16 * 2
    found = [layer.work for layer in layers if layer.work is not None]
    assert [(work.network_share, work.inference_bytes) for work in found] == [(0.5, 3 * size)] * 2
