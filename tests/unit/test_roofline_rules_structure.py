"""How the graph is written: each rule fires on it, and not on the near miss."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx
import pytest
from advice import Net, findings, subject_of

from trtopt.roofline.layer import layer_time
from trtopt.roofline.work import Gemm


def us(net: Net, *names: str) -> float:
    """The predicted time of the layers named."""
    return sum(row.predicted_us for row in subject_of(net).rows if row.name in names)


def test_transposes_around_convolutions_cost_their_time() -> None:
    net = Net()
    x = net.op("Transpose", net.input("x", 8, 56, 56, 64), perm=[0, 3, 1, 2], name="in")
    x = net.conv(net.op("Relu", net.conv(x, 64, 64)), 64, 64)
    net.output(net.op("Transpose", x, perm=[0, 2, 3, 1], name="out"))
    (found,) = findings("layout-transpose", net)
    assert set(found.nodes) == {"in", "out"}
    assert found.gain_us == pytest.approx(us(net, "in", "out"))


def test_transposes_of_attention_heads_are_no_layout_change() -> None:
    net = Net()
    x = net.op("Transpose", net.input("x", 8, 128, 12, 64), perm=[0, 2, 3, 1])
    y = net.op("Softmax", net.op("Transpose", net.input("y", 8, 64, 12, 128), perm=[0, 3, 1, 2]), axis=-1)
    assert not findings("layout-transpose", net.output(x, y))


def test_an_image_in_planes_is_a_hint_and_a_sequence_is_not() -> None:
    net = Net()
    net.output(net.conv(net.input("x", 32, 3, 224, 224), 3, 64, kernel=7, stride=2, name="stem"))
    (found,) = findings("io-layout", net)
    assert (found.severity, found.gain_us, found.nodes) == ("hint", 0.0, ("stem",))
    assert not findings("io-layout", net, base="fp32")
    net = Net()
    assert not findings("io-layout", net.output(net.linear(net.input("x", 8, 128, 768), 768, 768)))


def normalized(op: str, *, after_conv: bool) -> Net:
    net = Net()
    x = net.input("x", 8, 64, 112, 112)
    x = net.conv(x, 64, 64) if after_conv else net.op("MaxPool", x, kernel_shape=[2, 2], strides=[2, 2])
    ones = [net.weight(64) for _ in range(2 if op == "InstanceNormalization" else 4)]
    return net.output(net.conv(net.op("Relu", net.op(op, x, *ones, name="norm")), 64, 64))


def test_instance_normalization_and_a_batch_normalization_before_its_convolution_cost_a_kernel() -> None:
    for op, after_conv in (("InstanceNormalization", True), ("BatchNormalization", False)):
        net = normalized(op, after_conv=after_conv)
        (found,) = findings("normalization", net)
        assert "norm" in found.nodes and op in found.message
        layer = next(layer for layer in subject_of(net).layers if "norm" in layer.onnx_nodes)
        assert found.gain_us == pytest.approx(us(net, layer.name))
        assert found.gain_us > 0.05


def test_a_group_normalization_written_as_an_instance_normalization_of_rows_is_no_finding() -> None:
    for channels, groups, expected in ((64, 8, 0), (64, 64, 1)):
        net = Net()
        x = net.conv(net.input("x", 8, channels, 28, 28), channels, channels)
        rows = net.op("Reshape", x, net.ints(0, groups, -1))
        norm = net.op("InstanceNormalization", rows, net.weight(groups), net.weight(groups), name="norm")
        y = net.op("Reshape", norm, net.ints(8, channels, 28, 28))
        assert len(findings("normalization", net.output(net.conv(y, channels, channels)))) == expected


def test_a_batch_normalization_that_folds_and_a_layer_normalization_are_no_finding() -> None:
    assert not findings("normalization", normalized("BatchNormalization", after_conv=True))
    net = Net()
    x = net.op("LayerNormalization", net.input("x", 64, 128, 768), net.weight(768), net.weight(768))
    assert not findings("normalization", net.output(net.linear(x, 768, 768)))


def block(columns: tuple[int, ...], *, sources: int = 1) -> Net:
    """Products of one tensor (or of several), each going its own way."""
    net = Net()
    inputs = [net.op("Relu", net.input(f"x{index}", 512, 768)) for index in range(sources)]
    ends = [
        net.op("Softmax", net.linear(inputs[index % sources], 768, n, name=f"part{index}"))
        for index, n in enumerate(columns)
    ]
    return net.output(*ends)


def test_three_products_of_one_tensor_win_what_one_product_of_all_columns_is_faster_by() -> None:
    net = block((768, 768, 768))
    (found,) = findings("qkv", net)
    assert {"part0", "part1", "part2"} <= set(found.nodes)
    assert "768 + 768 + 768 columns" in found.message and "2304 columns" in found.remedy
    subject = subject_of(net)
    work = next(layer.work for layer in subject.layers if layer.name == "part0")
    if work is None:
        raise AssertionError
    merged = dataclasses.replace(
        work, gemm=Gemm(512, 2304, 768), flop=3 * work.flop, weight_bytes=3 * work.weight_bytes,
        write_bytes=3 * work.write_bytes,
    )  # fmt: skip
    expected = us(net, "part0", "part1", "part2") - layer_time(merged, subject.gpu).predicted_us
    assert expected > 0.05
    assert found.gain_us == pytest.approx(expected)


def test_equal_blocks_are_one_finding() -> None:
    net = Net()
    x = net.input("x", 512, 768)
    for _ in range(6):
        parts = [net.op("Softmax", net.linear(x, 768, 768)) for _ in range(3)]
        x = net.op("Softmax", net.linear(net.op("Add", net.op("Add", parts[0], parts[1]), parts[2]), 768, 768))
    (found,) = findings("qkv", net.output(x))
    assert "in 6 places" in found.message
    assert found.gain_us == pytest.approx(6 * findings("qkv", block((768, 768, 768)))[0].gain_us, rel=0.01)


def test_products_of_different_tensors_and_a_single_one_are_no_finding() -> None:
    assert not findings("qkv", block((768, 768, 768), sources=3))
    assert not findings("qkv", block((2304,)))


def test_products_in_the_two_branches_of_an_if_are_not_merged() -> None:
    def branch(name: str) -> onnx.GraphProto:
        product = onnx.helper.make_node("MatMul", ["x", f"{name}_w"], [f"{name}_y"], name=name)
        weight = onnx.numpy_helper.from_array(np.zeros((768, 768), np.float32), f"{name}_w")
        output = onnx.helper.make_tensor_value_info(f"{name}_y", onnx.TensorProto.FLOAT, [512, 768])
        return onnx.helper.make_graph([product], name, [], [output], [weight])

    net = Net()
    data, choice = net.input("x", 512, 768), net.input("c", dtype=onnx.TensorProto.BOOL)
    net.op("If", choice, then_branch=branch("a"), else_branch=branch("b"), name="if")
    assert not findings("qkv", net.output("if", net.op("Relu", data)))


def test_products_of_two_activations_cannot_be_merged() -> None:
    net = Net()
    x = net.op("Relu", net.input("x", 8, 128, 128))
    ends = [net.op("Softmax", net.op("MatMul", x, net.input(name, 8, 128, 128))) for name in "abc"]
    assert not findings("qkv", net.output(*ends))


def test_a_weight_input_that_is_transposed_at_run_time_is_found() -> None:
    net = Net()
    turned = net.op("Transpose", net.input("lora", 768, 512), perm=[1, 0], name="turn")
    net.output(net.op("MatMul", net.input("x", 64, 512), turned))
    (found,) = findings("weight-layout", net)
    assert found.nodes == ("turn",)


def test_a_quantized_weight_transposed_after_dequantizing_is_found() -> None:
    net = Net()
    scale, zero = net.weight(), net.weight(dtype=np.int8)
    wide = net.op("DequantizeLinear", net.weight(768, 512, dtype=np.int8), scale, zero)
    turned = net.op("Transpose", wide, perm=[1, 0], name="turn")
    (found,) = findings("weight-layout", net.output(net.op("MatMul", net.input("x", 64, 512), turned)))
    assert found.nodes == ("turn",)


def test_constant_weights_and_transposed_keys_are_no_finding() -> None:
    net = Net()
    x = net.input("x", 64, 512)
    y = net.op("Gemm", x, net.weight(768, 512), transB=1)
    z = net.op("MatMul", x, net.op("Transpose", net.weight(768, 512), perm=[1, 0]))
    keys = net.op("Transpose", net.input("k", 8, 128, 64), perm=[0, 2, 1])
    scores = net.op("MatMul", net.input("q", 8, 128, 64), keys)
    assert not findings("weight-layout", net.output(y, z, scores))
