"""Where 2:4 pays: the table, row by row, and the totals."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir
import pytest
from advice import Net
from onnx import TensorProto, helper, numpy_helper

from trtopt.graph.shapes import infer_shapes, static_shapes
from trtopt.hardware.spec import find_gpu
from trtopt.judge.protocol import LEAST_GAIN
from trtopt.report.schema.analysis import SparseLayer, Sparsity
from trtopt.roofline.layer import layer_time
from trtopt.roofline.node_work import GraphTypes
from trtopt.roofline.onnx_layers import layers_of_graph
from trtopt.roofline.work import sparse_work
from trtopt.sparsity.eligibility import RULES, eligibility, weights_of
from trtopt.sparsity.layers import best_mask
from trtopt.support.precision import Precision


def judged(
    net: Net | ir.Model, *, gpu: str = "A100", base: Precision = Precision.FP16, backend: str = "tensorrt"
) -> Sparsity:
    model = net.model() if isinstance(net, Net) else net
    layers = layers_of_graph(model, static_shapes(model, {}), GraphTypes(base))
    return eligibility(weights_of(model, backend), layers, find_gpu(gpu), backend)


def verdict(net: Net | ir.Model, node: str, **options: str) -> SparseLayer:
    found = judged(net, **options)  # type: ignore[arg-type]
    (row,) = [row for row in found.layers if node in row.nodes]
    return row


def linear(*, rows: int = 4096, k: int = 1024, n: int = 1024) -> Net:
    net = Net()
    return net.output(net.linear(net.input("x", rows, k), k, n, name="product"))


def convolution(*, channels: int = 256, kernel: int = 3, group: int = 1, pixels: int = 56) -> Net:
    net = Net()
    x = net.input("x", 8, channels, pixels, pixels)
    return net.output(net.conv(x, channels, channels, kernel=kernel, group=group, name="conv"))


def test_the_last_row_of_a_table_speaks_of_every_node() -> None:
    assert all(rules[-1].applies == "always" for rules in RULES.values())


@pytest.mark.parametrize(("net", "node"), [(linear(), "product"), (convolution(), "conv")], ids=["product", "conv"])
def test_large_layers_pay_by_what_the_model_predicts(net: Net, node: str) -> None:
    model = net.model()
    layers = layers_of_graph(model, static_shapes(model, {}), GraphTypes(Precision.FP16))
    (work,) = [layer.work for layer in layers if layer.name == node and layer.work is not None]
    row = verdict(net, node)
    assert row.eligible and "tactic" in row.reason
    assert row.dense_us == pytest.approx(layer_time(work, find_gpu("A100")).predicted_us)
    assert row.sparse_us == pytest.approx(layer_time(sparse_work(work), find_gpu("A100")).predicted_us)
    assert row.sparse_us < (1 - LEAST_GAIN) * row.dense_us


@pytest.mark.parametrize(
    ("net", "node", "options", "reason"),
    [
        (linear(), "product", {"gpu": "T4"}, "no Sparse Tensor Cores"),
        (linear(), "product", {"base": "fp32"}, "CUDA cores"),
        (linear(), "product", {"base": "tf32"}, "one of two weights"),
        (linear(), "product", {"base": "bf16"}, "names FP16 and INT8"),
        (linear(), "product", {"backend": "tensorrt-rtx"}, "TensorRT for RTX ignores"),
        (linear(k=1028), "product", {}, "no multiples of 16"),
        (linear(n=1000), "product", {}, "no multiples of 16"),
        (linear(k=1030), "product", {}, "no multiple of 4"),
        (linear(n=240), "product", {}, "below 256 channels"),
        (linear(k=240), "product", {}, "below 256 channels"),
        (linear(rows=8, k=4096, n=4096), "product", {}, "bytes it moves"),
        (convolution(channels=128), "conv", {}, "below 256 channels"),
        (convolution(group=4), "conv", {}, "grouped"),
        (convolution(group=256), "conv", {}, "no multiple of 4"),
    ],
)
def test_what_cannot_gain_stays_dense_with_a_reason(net: Net, node: str, options: dict[str, str], reason: str) -> None:
    row = verdict(net, node, **options)
    assert not row.eligible
    assert reason in row.reason
    assert row.sparse_us == row.dense_us > 0


def test_a_3x3_convolution_counts_its_taps_as_input_channels() -> None:
    net = Net()
    x = net.input("x", 8, 64, 56, 56)
    net.output(net.op("Conv", x, net.weight(256, 64, 3, 3), name="conv", pads=[1, 1, 1, 1]))
    assert verdict(net, "conv").eligible


def test_a_gain_below_two_percent_is_none() -> None:
    """One image of 7 x 7: the time is that of the launch and of blocks that wait for their operands."""
    row = verdict(linear(rows=49, k=256, n=256), "product", gpu="H100")
    assert not row.eligible
    assert row.reason.startswith("its predicted gain is") and row.reason.endswith("less than 2.0 %")


def test_the_types_that_are_not_named_are_refused_before_sizes_are_looked_at() -> None:
    assert "INT8" in verdict(linear(n=240), "product", base="bf16").reason


def test_products_of_activations_and_depthwise_convolutions_are_listed_with_their_time() -> None:
    net = Net()
    x = net.input("x", 512, 512)
    net.output(net.op("MatMul", x, net.op("Relu", x), name="scores"))
    row = verdict(net, "scores")
    assert (row.weight, row.eligible, row.reason) == ("", False, "its weight is not constant")
    assert row.sparse_us == row.dense_us > 0


def test_the_total_is_all_layers_less_what_the_eligible_ones_gain() -> None:
    net = Net()
    h = net.linear(net.input("x", 4096, 1024), 1024, 1024, name="large")
    h = net.linear(net.op("Softmax", h, name="softmax"), 1024, 64, name="small")
    found = judged(net.output(h))
    rows = {row.nodes[0]: row for row in found.layers}
    gain = rows["large"].dense_us - rows["large"].sparse_us
    assert rows["large"].eligible and not rows["small"].eligible
    assert found.dense_us > rows["large"].dense_us + rows["small"].dense_us
    assert found.dense_us - found.sparse_us == pytest.approx(gain)
    assert "1.12 to 1.31" in found.note and "No sparse kernel was measured" in found.note


def test_a_prediction_beyond_what_is_attested_says_so() -> None:
    note = "beyond that"
    wide = judged(linear(rows=8192, k=4096, n=4096), gpu="RTX-4090")
    assert (wide.dense_us > 1.31 * wide.sparse_us) == (note in wide.note)
    assert wide.dense_us > 1.31 * wide.sparse_us
    assert note not in judged(linear(), backend="tensorrt-rtx").note


def test_a_weight_that_two_nodes_read_is_one_row_with_the_time_of_both() -> None:
    net = Net()
    weight = net.weight(1024, 1024)
    first = net.op("MatMul", net.input("x", 4096, 1024), weight, name="first")
    net.output(net.op("MatMul", net.op("Softmax", first), weight, name="second"))
    row = verdict(net, "first")
    assert row.nodes == ("first", "second") and row.eligible
    alone = verdict(linear(), "product")
    assert row.dense_us == pytest.approx(2 * alone.dense_us, rel=0.01)
    assert row.sparse_us == pytest.approx(2 * alone.sparse_us, rel=0.01)


def quantized(weight: np.ndarray, zero: int, *, dtype: type = np.int8, stored: bool = True) -> ir.Model:
    """x [4096, 512] times a weight [512, 512], both through Q/DQ; ``stored`` in 8 bits, or quantized in the graph."""
    arrays = {"scale": np.float32(0.5), "x_zero": np.int8(0), "zero": dtype(zero)}
    arrays["w"] = weight.astype(dtype) if stored else (weight.astype(np.float32) - zero) / 2
    inner = "w" if stored else "w8"
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "scale", "x_zero"], ["q"], "q"),
        helper.make_node("DequantizeLinear", ["q", "scale", "x_zero"], ["d"], "d"),
        *([] if stored else [helper.make_node("QuantizeLinear", ["w", "scale", "zero"], ["w8"], "w8")]),
        helper.make_node("DequantizeLinear", [inner, "scale", "zero"], ["wd"], "wd"),
        helper.make_node("MatMul", ["d", "wd"], ["y"], "product"),
    ]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [4096, 512]) for name in "xy"]
    weights = [numpy_helper.from_array(np.asarray(array), name) for name, array in arrays.items()]
    graph = helper.make_graph(nodes, "quantized", ends[:1], ends[1:], weights)
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    return infer_shapes(ir.from_proto(proto))


def integers(*, sparse: bool) -> np.ndarray:
    """INT8 numbers [512, 512], none zero but those that 2:4 along K takes."""
    rng = np.random.default_rng(0)
    dense = rng.integers(1, 128, (512, 512)) * rng.choice([-1, 1], (512, 512))
    return np.where(best_mask(np.abs(dense), 0), dense, 0) if sparse else dense


@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize(("zero", "dtype"), [(0, np.int8), (128, np.uint8)])
def test_a_quantized_weight_is_2_4_by_its_integers(sparse: bool, stored: bool, zero: int, dtype: type) -> None:
    weight = integers(sparse=sparse)
    row = verdict(quantized(weight + zero, zero, dtype=dtype, stored=stored), "product")
    assert row.is_sparse is sparse
    assert row.eligible and "INT8" in row.reason


def test_2_4_weights_are_told_from_others_and_judged_alike() -> None:
    dense = linear().model()
    pruned = linear().model()
    rng = np.random.default_rng(0)
    values = rng.standard_normal((1024, 1024)).astype(np.float32)
    for model, array in ((dense, values), (pruned, values * best_mask(np.abs(values), 0))):
        (weight,) = model.graph.initializers.values()
        weight.const_value = ir.tensor(array)
    rows = [verdict(model, "product") for model in (dense, pruned)]
    assert [row.is_sparse for row in rows] == [False, True]
    assert dataclasses.replace(rows[0], is_sparse=True) == rows[1]


def test_one_four_with_three_weights_is_not_2_4() -> None:
    model = linear().model()
    values = np.zeros((1024, 1024), np.float32)
    values[:2] = 1
    (weight,) = model.graph.initializers.values()
    weight.const_value = ir.tensor(values.copy())
    assert verdict(model, "product").is_sparse
    values[2, 700] = 1e-30
    weight.const_value = ir.tensor(values)
    assert not verdict(model, "product").is_sparse
