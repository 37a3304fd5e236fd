"""Early, memory-bound stages: each rule fires there, and not on the near miss."""

from __future__ import annotations

import pytest
from advice import Net, findings, subject_of

from trtopt.roofline.layer import layer_time
from trtopt.roofline.work import Gemm, Window, Work


def us(net: Net, *names: str) -> float:
    """The predicted time of the layers named."""
    return sum(row.predicted_us for row in subject_of(net).rows if row.name in names)


def inverted(c: int, size: int, *, expand: int = 6) -> Net:
    """1x1 expansion, depthwise 3x3, 1x1 projection, at batch 32."""
    net = Net()
    x = net.op("Relu", net.conv(net.input("x", 32, c, size, size), c, expand * c, kernel=1, name="expand"))
    x = net.op("Relu", net.conv(x, expand * c, expand * c, group=expand * c, name="depthwise"))
    return net.output(net.conv(x, expand * c, c, kernel=1, name="project"))


def test_an_early_depthwise_convolution_loses_to_a_dense_one_by_the_predicted_difference() -> None:
    net = inverted(16, 112)
    (found,) = findings("depthwise", net)
    assert found.severity == "warning"
    assert {"expand", "depthwise"} <= set(found.nodes) and "project" not in found.nodes
    pixels = 32 * 112 * 112
    gemm = Gemm(pixels, 96, 16 * 9)
    dense = Work(
        "conv", gemm.flop, pixels * 16 * 2, 96 * 16 * 9 * 2, pixels * 96 * 2, "fp16",
        gemm=gemm, window=Window((3, 3), (1, 1), (1, 1)), alignment_bytes=32,
    )  # fmt: skip
    after = layer_time(dense, subject_of(net).gpu).predicted_us
    assert found.gain_us == pytest.approx(us(net, "expand", "depthwise") - after, rel=1e-4)
    assert "3x3 16 -> 96" in found.remedy


def test_a_late_depthwise_convolution_and_a_dense_one_are_no_finding() -> None:
    assert not findings("depthwise", inverted(512, 7))
    net = Net()
    x = net.conv(net.input("x", 32, 64, 112, 112), 64, 64, kernel=1)
    assert not findings("depthwise", net.output(net.conv(net.op("Relu", x), 64, 64)))


def test_a_depthwise_convolution_whose_neighbours_are_read_elsewhere_is_left_alone() -> None:
    net = Net()
    x = net.input("x", 32, 16, 112, 112)
    wide = net.conv(x, 16, 96, kernel=1, name="expand")
    deep = net.conv(wide, 96, 96, group=96, name="depthwise")
    assert not findings("depthwise", net.output(wide, deep))


def test_a_depthwise_convolution_before_a_1x1_is_found_too() -> None:
    net = Net()
    x = net.conv(net.input("x", 32, 16, 112, 112), 16, 16, group=16, name="depthwise")
    (found,) = findings("depthwise", net.output(net.conv(net.op("Relu", x), 16, 32, kernel=1, name="point")))
    assert {"depthwise", "point"} <= set(found.nodes)
    assert "3x3 16 -> 32" in found.remedy


def pooled(size: int, *, stride: int = 2, shared: bool = False) -> Net:
    """An image, a convolution and a max pool."""
    net = Net()
    x = net.op("Relu", net.conv(net.input("x", 32, 4, 224, 224), 4, 64, kernel=7, stride=224 // size, name="conv"))
    x = net.op("MaxPool", x, kernel_shape=[3, 3], strides=[stride] * 2, pads=[1] * 4, name="pool")
    y = net.conv(x, 64, 64, name="next")
    return net.output(y, "conv") if shared else net.output(y)


def test_pooling_of_a_large_map_loses_to_a_strided_convolution_by_the_predicted_difference() -> None:
    net = pooled(112)
    (found,) = findings("early-pooling", net)
    assert {"conv", "pool"} <= set(found.nodes) and "next" not in found.nodes
    assert "stride 4x4" in found.remedy
    gemm = Gemm(32 * 56 * 56, 64, 4 * 49)
    conv = Work(
        "conv", 0, 32 * 224 * 224 * 4 * 2, 64 * 4 * 49 * 2, 32 * 56 * 56 * 64 * 2, "fp16",
        gemm=gemm, window=Window((7, 7), (4, 4), (1, 1)), alignment_bytes=8,
    )  # fmt: skip
    before = us(net, "conv", "pool")
    assert found.gain_us == pytest.approx(before - layer_time(conv, subject_of(net).gpu).predicted_us, rel=0.05)


def test_pooling_of_a_small_map_at_stride_one_or_of_a_shared_one_is_no_finding() -> None:
    assert findings("early-pooling", pooled(112))
    assert not findings("early-pooling", pooled(14))
    assert not findings("early-pooling", pooled(112, stride=1))
    assert not findings("early-pooling", pooled(112, shared=True))


def excited(size: int, *, gated: bool = True) -> Net:
    """A squeeze-and-excitation on [32, 32, size, size] of a 224x224 image."""
    net = Net()
    x = net.op("Relu", net.conv(net.input("x", 32, 4, 224, 224), 4, 32, stride=224 // size, name="conv"))
    pool = net.op("GlobalAveragePool", x, name="squeeze")
    small = net.op("Relu", net.conv(pool, 32, 8, kernel=1, name="reduce"))
    gate = net.op("Sigmoid", net.conv(small, 8, 32, kernel=1, name="excite"))
    out = net.op("Mul", x, gate, name="scale") if gated else net.op("Add", x, gate, name="scale")
    return net.output(net.conv(out, 32, 32, name="next"))


def test_early_squeeze_and_excitation_costs_the_time_of_its_kernels() -> None:
    net = excited(112)
    (found,) = findings("squeeze-excite", net)
    assert {"squeeze", "reduce", "excite", "scale"} <= set(found.nodes)
    assert not {"conv", "next"} & set(found.nodes)
    assert "32x112x112" in found.message
    assert found.gain_us == pytest.approx(us(net, "squeeze", "reduce", "excite", "scale"))


def test_late_squeeze_and_excitation_and_other_uses_of_a_pool_are_no_finding() -> None:
    assert not findings("squeeze-excite", excited(14))
    assert not findings("squeeze-excite", excited(112, gated=False))


def normalized(size: int, *, axis: int = -1) -> Net:
    """The stem of ConvNeXt on a 224x224 image: a convolution and a layer normalization of its channels."""
    net = Net()
    x = net.conv(net.input("x", 32, 4, 224, 224), 4, 96, stride=224 // size, name="conv")
    x = net.op("Transpose", x, perm=[0, 2, 3, 1], name="last")
    scale = net.weight(96) if axis == -1 else net.weight(size, size, 96)
    x = net.op("LayerNormalization", x, scale, axis=axis, name="norm")
    return net.output(net.op("Transpose", x, perm=[0, 3, 1, 2], name="first"))


def test_a_layer_normalization_of_a_large_map_costs_its_kernel() -> None:
    net = normalized(56)
    (found,) = findings("early-normalization", net)
    assert "norm" in found.nodes and "conv" not in found.nodes and "56x56x96" in found.message
    (row,) = (row for row in subject_of(net).rows if "norm" in row.onnx_nodes)
    assert found.gain_us == pytest.approx(row.predicted_us, rel=1e-4)


def test_a_late_layer_normalization_and_one_of_the_whole_map_are_no_finding() -> None:
    assert not findings("early-normalization", normalized(14))
    assert not findings("early-normalization", normalized(56, axis=1))


def shuffled(op: str, size: int) -> Net:
    net = Net()
    x = net.conv(net.input("x", 8, 4, 224, 224), 4, 64, kernel=3, stride=224 // size, name="conv")
    x = net.op(op, x, blocksize=2, name="shuffle")
    return net.output(net.conv(x, 16 if op == "DepthToSpace" else 256, 32, name="next"))


@pytest.mark.parametrize("op", ["DepthToSpace", "SpaceToDepth"])
def test_a_pixel_shuffle_of_a_large_map_costs_its_kernel_and_one_of_a_small_map_is_no_finding(op: str) -> None:
    (found,) = findings("pixel-shuffle", shuffled(op, 112))
    assert found.nodes == ("shuffle",) and found.gain_us == pytest.approx(us(shuffled(op, 112), "shuffle"), rel=1e-4)
    assert not findings("pixel-shuffle", shuffled(op, 14))
