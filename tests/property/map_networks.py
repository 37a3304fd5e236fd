"""Small random networks [N, C, H, W] of open batch, height and width, with shapes computed as exporters do."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
from activation_parts import cheap_activation
from net_builder import NetBuilder, Value
from onnx import TensorProto, helper

CHANNELS = 8
_OPEN: tuple[int | str, ...] = ("N", CHANNELS, "H", "W")


def map_network(seed: int) -> onnx.ModelProto:
    """The network of a seed: its input ``x`` is [N, 8, H, W] of any sizes from 4 x 4 on."""
    b = NetBuilder(np.random.default_rng(seed), 17)
    x = y = Value("x", _OPEN)
    for _ in range(b.size(2, 4)):
        y = b.pick(*_PARTS)(b, y)
    if b.chance(0.4):  # a classifier
        y = b.op("Flatten", [b.op("GlobalAveragePool", [y.name]).name], axis=1)
        y = Value(b.op("Gemm", [y.name, b.weight((CHANNELS, 5), CHANNELS), b.vector((5,))]).name, ("N", 5))
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, list(x.shape))]
    output = helper.make_tensor_value_info(y.name, TensorProto.FLOAT, [None] * len(y.shape))
    graph = helper.make_graph(b.nodes, "maps", inputs, [output], b.constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", b.opset)], ir_version=9)


def _conv(b: NetBuilder, x: Value, stride: int = 1, groups: int = 1) -> Value:
    kernel = 3 if groups > 1 or stride > 1 else b.pick(1, 3)
    weight = b.weight((CHANNELS, CHANNELS // groups, kernel, kernel), CHANNELS // groups * kernel**2)
    attributes = {"pads": [kernel // 2] * 4, "strides": [stride] * 2, "group": groups}
    return Value(b.op("Conv", [x.name, weight, b.vector((CHANNELS,))], **attributes).name, x.shape)


def _block(b: NetBuilder, x: Value) -> Value:
    y = cheap_activation(b, _conv(b, x, groups=b.pick(1, 1, CHANNELS)))
    return b.binary("Add", _conv(b, y), x) if b.chance() else y


def _sizes(b: NetBuilder, x: Value, low: int, high: int) -> str:
    """Some of the shape of ``x``, as a tensor."""
    shape = b.op("Shape", [x.name]).name
    if b.chance():
        return b.op("Slice", [shape, b.ints(low), b.ints(high)]).name
    each = [b.op("Gather", [shape, b.const(axis, np.int64)]).name for axis in range(low, high)]
    return b.op("Concat", [b.op("Unsqueeze", [name, b.ints(0)]).name for name in each], axis=0).name


def _up_and_down(b: NetBuilder, x: Value) -> Value:
    """Half the size, and back to that of ``x``, to which it is added."""
    y = cheap_activation(b, _conv(b, x, stride=2))
    sizes = b.op(
        "Concat", [b.op("Slice", [b.op("Shape", [y.name]).name, b.ints(0), b.ints(2)]).name, _sizes(b, x, 2, 4)]
    )
    b.nodes[-1].attribute.append(helper.make_attribute("axis", 0))
    mode = b.pick("nearest", "linear")
    how = {"mode": mode, "coordinate_transformation_mode": "asymmetric" if mode == "nearest" else "half_pixel"}
    if mode == "nearest":
        how["nearest_mode"] = "floor"
    y = b.op("Resize", [y.name, "", "", sizes.name], x.shape, **how)
    return b.binary("Add", y, x)


def _group_norm(b: NetBuilder, x: Value) -> Value:
    """As exporters write it: around InstanceNormalization of groups."""
    groups = b.pick(2, 4)
    grouped = b.op("Reshape", [x.name, b.ints(0, groups, -1)])
    ones, zeros = b.const(np.ones(groups)), b.const(np.zeros(groups))
    y = b.op("InstanceNormalization", [grouped.name, ones, zeros], epsilon=1e-5)
    y = b.op("Reshape", [y.name, b.op("Shape", [x.name]).name], x.shape)
    y = b.binary("Add", b.binary("Mul", y, b.vector((CHANNELS, 1, 1))), b.vector((CHANNELS, 1, 1)))
    return b.binary("Mul", y, b.unary("Sigmoid", y)) if b.chance() else y


def _tokens(b: NetBuilder, x: Value) -> Value:
    """Attention of the pixels, or a product of theirs, and back to a map."""
    size = b.op("Concat", [_sizes(b, x, 0, 1), b.ints(CHANNELS, -1)], axis=0).name
    flat = b.op("Reshape", [x.name, size])
    y = b.op("Transpose", [flat.name], perm=[0, 2, 1])
    if b.chance():
        q = b.op("MatMul", [y.name, b.weight((CHANNELS, CHANNELS), CHANNELS)])
        weights = b.op("Softmax", [b.op("MatMul", [q.name, flat.name]).name], axis=-1)
        y = b.op("MatMul", [weights.name, y.name])
    y = b.op("MatMul", [y.name, b.weight((CHANNELS, CHANNELS), CHANNELS)])
    y = b.op("Add", [y.name, b.vector((CHANNELS,))])
    y = b.op("Transpose", [y.name], perm=[0, 2, 1])
    back = b.op("Concat", [_sizes(b, x, 0, 1), b.ints(CHANNELS), _sizes(b, x, 2, 4)], axis=0).name
    return b.binary("Add", b.op("Reshape", [y.name, back], x.shape), x)


def _gate(b: NetBuilder, x: Value) -> Value:
    """Channels weighted by what the whole map holds."""
    y = b.op("GlobalAveragePool", [x.name]) if b.chance() else b.op("ReduceMean", [x.name], axes=[2, 3], keepdims=1)
    gate = b.op("Sigmoid", [_conv(b, Value(y.name, x.shape)).name])
    return b.op("Mul", [x.name, gate.name], x.shape)


def _joined(b: NetBuilder, x: Value) -> Value:
    y = b.op("Concat", [x.name, cheap_activation(b, _conv(b, x)).name], axis=1)
    weight = b.weight((CHANNELS, 2 * CHANNELS, 1, 1), 2 * CHANNELS)
    return Value(b.op("Conv", [y.name, weight]).name, x.shape)


def _positions(b: NetBuilder, x: Value) -> Value:
    """A constant map of one channel, repeated over the batch and the size."""
    shape = b.op("Concat", [_sizes(b, x, 0, 1), b.ints(1), _sizes(b, x, 2, 4)], axis=0).name
    added = b.op("Expand", [b.const(b.rng.standard_normal((1, 1, 1, 1))), shape])
    return Value(b.op("Add", [x.name, added.name]).name, x.shape)


_PARTS: tuple[Callable[[NetBuilder, Value], Value], ...] = (
    _block,
    _block,
    _up_and_down,
    _group_norm,
    _tokens,
    _gate,
    _joined,
    _positions,
)
