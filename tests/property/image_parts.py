"""Pieces of convolutional networks: each takes feature maps [N, C, H, W] and gives others."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from activation_parts import activation, cheap_activation
from net_builder import NetBuilder, Value


def conv(
    b: NetBuilder, x: Value, c_out: int, kernel: int = 1, stride: int = 1, groups: int = 1, *, bias: bool | None = None
) -> Value:
    """Padded to keep the size (but for the stride)."""
    assert c_out % groups == 0 and x.channels % groups == 0
    fan_in = x.channels // groups * kernel**2
    inputs = [x.name, b.weight((c_out, x.channels // groups, kernel, kernel), fan_in)]
    if b.chance(0.7) if bias is None else bias:
        inputs.append(b.vector((c_out,)))
    sizes = [-(-x.dim(axis) // stride) for axis in (2, 3)]
    attributes = {"strides": [stride] * 2} if stride > 1 or b.chance() else {}
    if groups > 1:
        attributes["group"] = groups  # type: ignore[assignment]
    if b.chance():
        attributes["kernel_shape"] = [kernel] * 2
    pads = [kernel // 2] * 4
    return b.op("Conv", inputs, [x.shape[0], c_out, *sizes], pads=pads, **attributes)


def norm(b: NetBuilder, x: Value) -> Value:
    """Batch norm, or what is left of one: a multiplication, an addition."""
    c = x.channels
    if b.chance(0.6):
        inputs = [x.name, b.vector((c,)), b.vector((c,)), b.vector((c,)), b.vector((c,), positive=True)]
        return b.op("BatchNormalization", inputs, x.shape, epsilon=b.pick(1e-5, 1e-3))
    for kind in b.pick(("Mul", "Add"), ("Add",), ("Mul",), ("Sub", "Div"), ("Add", "Mul")):
        shape = b.pick((c, 1, 1), (1, c, 1, 1), (1, 1, 1), (1,), ())
        x = b.binary(kind, x, b.vector(shape, positive=kind == "Div"))
    return x


def conv_block(b: NetBuilder, x: Value) -> Value:
    """Conv, perhaps norm, perhaps activation, in an order."""
    c_out = b.pick(b.size(1, 20), x.channels)
    groups = b.pick(1, 1, 1, 1, np.gcd(x.channels, c_out))
    if b.chance(0.15):
        x = norm(b, x)
    x = conv(b, x, c_out, b.pick(1, 3, 3, 5), b.pick(1, 1, 1, 2), int(groups))
    if b.chance(0.5):
        x = norm(b, x)
    return activation(b, x) if b.chance(0.8) else x


def residual(b: NetBuilder, x: Value) -> Value:
    c, width = x.channels, b.size(1, 20)
    y = cheap_activation(b, conv(b, x, width, b.pick(1, 3)))
    if b.chance():
        y = cheap_activation(b, conv(b, y, width, 3, groups=b.pick(1, width)))
    y = conv(b, y, c, b.pick(1, 3))
    if b.chance(0.3):
        y = norm(b, y)
    return cheap_activation(b, b.binary("Add", y, x))


def branches(b: NetBuilder, x: Value) -> Value:
    """Convolutions of one input, joined: parallel ones of a kernel size among them."""
    kernel = b.pick(1, 3)
    same_width = b.chance()
    count, width = b.size(2, 3), b.size(1, 12)
    made = [conv(b, x, width if same_width else b.size(1, 12), b.pick(kernel, kernel, 1, 3)) for _ in range(count)]
    made = [cheap_activation(b, each) for each in made]
    if same_width and b.chance():
        total = made[0]
        for each in made[1:]:
            total = b.binary(b.pick("Add", "Mul", "Sub", "Max"), total, each)
        return total
    if b.chance(0.3):
        made.append(x)
    return concat(b, made)


def concat(b: NetBuilder, parts: Sequence[Value]) -> Value:
    first = parts[0]
    shape = (first.shape[0], sum(part.channels for part in parts), *first.shape[2:])
    return b.op("Concat", [part.name for part in parts], shape, axis=1)


def split_branch(b: NetBuilder, x: Value) -> Value:
    """C2f: half of a convolution's channels pass through more layers, and all are joined."""
    left, right = b.size(1, 9), b.size(1, 9)
    if b.chance():
        right = left
    y = conv(b, x, left + right, b.pick(1, 3))
    y = activation(b, y) if b.chance() else y
    if b.chance(0.3):  # as two slices
        bounds = ((0, left), (left, left + right))
        parts = [
            b.op("Slice", [y.name, b.ints(low), b.ints(high), b.ints(1)], [x.shape[0], high - low, *y.shape[2:]])
            for low, high in bounds
        ]
    else:
        parts = b.split(y, [left, right])
    inner = cheap_activation(b, conv(b, parts[1], right, 3))
    if b.chance():
        inner = b.binary("Add", inner, parts[1])
    joined = [parts[0], parts[1], inner] if b.chance() else [parts[0], inner]
    return conv_after(b, concat(b, joined))


def conv_after(b: NetBuilder, x: Value) -> Value:
    return cheap_activation(b, conv(b, x, b.size(1, 16), b.pick(1, 3)))


def padded_conv(b: NetBuilder, x: Value) -> Value:
    """Pad, then a convolution without padding or with some."""
    pads = [0, 0, *(b.size(0, 2) for _ in range(2)), 0, 0, *(b.size(0, 2) for _ in range(2))]
    sizes = [x.dim(axis) + pads[axis] + pads[axis + 4] for axis in (2, 3)]
    inputs = [x.name, b.ints(*pads)]
    mode = {"mode": "reflect"} if b.chance(0.15) and min(x.dim(2), x.dim(3)) > 2 else {}
    if not mode and b.chance(0.6):
        inputs.append(b.const(b.pick(0.0, 0.0, 0.0, 1.5)))
    y = b.op("Pad", inputs, [*x.shape[:2], *sizes], **mode)
    return cheap_activation(b, conv(b, y, b.size(1, 12), 3, b.pick(1, 2)))


def pooled(b: NetBuilder, x: Value) -> Value:
    """A convolution, then pooling, then an activation, each but the pooling now and then left out."""
    if min(x.dim(2), x.dim(3)) < 4:
        return activation(b, x)
    if b.chance(0.6):
        x = conv(b, x, b.size(1, 12), b.pick(1, 1, 3))
    y = _pool(b, x)
    return cheap_activation(b, y) if b.chance(0.6) else y


def _pool(b: NetBuilder, x: Value) -> Value:
    kind = b.pick("MaxPool", "AveragePool")
    if b.chance():
        shape = [*x.shape[:2], x.dim(2) // 2, x.dim(3) // 2]
        return b.op(kind, [x.name], shape, kernel_shape=[2, 2], strides=[2, 2])
    counted = {"count_include_pad": b.size(0, 1)} if kind == "AveragePool" else {}
    sizes = [(x.dim(axis) + 2 - 3) // 2 + 1 for axis in (2, 3)]
    return b.op(kind, [x.name], [*x.shape[:2], *sizes], kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4, **counted)


def global_pool(b: NetBuilder, x: Value) -> Value:
    """[N, C, 1, 1], in one of its forms."""
    shape = (*x.shape[:2], 1, 1)
    form = b.size(0, 3)
    if form == 0:
        return b.reduce("ReduceMean", x, b.pick((2, 3), (-2, -1)), keep=True)
    if form == 1:
        return b.op("AveragePool", [x.name], shape, kernel_shape=[x.dim(2), x.dim(3)])
    return b.op("GlobalMaxPool" if form == 2 and b.chance(0.3) else "GlobalAveragePool", [x.name], shape)


def squeeze_excite(b: NetBuilder, x: Value) -> Value:
    y = b.unary("Relu", conv(b, global_pool(b, x), b.size(1, 6)))
    y = b.unary("Sigmoid", conv(b, y, x.channels))
    return b.op("Mul", [x.name, y.name], x.shape)


def excited(b: NetBuilder, x: Value) -> Value:
    """Tokens as a map whose channels are weighted before a 1x1 convolution."""
    y = squeeze_excite(b, b.op("Unsqueeze", [x.name, b.ints(3)], (*x.shape, 1)))
    return conv(b, y, b.size(2, 12))


def scaled(b: NetBuilder, x: Value) -> Value:
    """Tokens as a map: residual blocks whose residual is scaled, one number a channel or one for all."""
    y = b.op("Unsqueeze", [x.name, b.ints(3)], (*x.shape, 1))
    c = y.channels
    for _ in range(b.size(1, 3)):
        made = conv(b, cheap_activation(b, y), c, b.pick(1, 3))
        factor = b.vector(b.pick((c, 1, 1), (1, c, 1, 1), (1,), ()), positive=True)
        parts = [b.binary(b.pick("Mul", "Mul", "Div"), y, factor), made]
        y = b.binary("Add", *(reversed(parts) if b.chance() else parts))
    return y


def mixed_convs(b: NetBuilder, x: Value) -> Value:
    """Tokens as a map whose parts are convolved on their own, by kernels of several sizes, and joined."""
    y = b.op("Unsqueeze", [x.name, b.ints(3)], (*x.shape, 1))
    width, stride = b.size(1, 4), b.pick(1, 1, 2)
    depthwise = b.chance(0.6)
    sizes = [b.size(1, 4) if depthwise else width for _ in range(b.size(2, 3))]
    parts = b.split(conv(b, y, sum(sizes)), sizes)
    kernels = [b.pick(1, 3, 5) for _ in parts]
    made = [
        conv(b, part, part.channels, kernel, stride, part.channels if depthwise else 1)
        for part, kernel in zip(parts, kernels, strict=True)
    ]
    return norm(b, concat(b, made))


def one_axis(b: NetBuilder, x: Value) -> Value:
    """Convolutions over the last axis, each normalized in groups of channels, with an activation."""
    y = x
    for _ in range(b.size(1, 2)):
        c = 2 * b.size(1, 4)
        y = b.op("Conv", [y.name, b.weight((c, y.dim(1), 3), y.dim(1) * 3)], [x.shape[0], c, x.dim(2)], pads=[1, 1])
        y = cheap_activation(b, _group_norm(b, cheap_activation(b, y) if b.chance(0.3) else y))
    return b.binary("Add", y, x) if b.chance(0.3) and y.dim(1) == x.dim(1) else y


def _group_norm(b: NetBuilder, x: Value) -> Value:
    """Of one group, of two, of a channel each as rows or as the operator does it."""
    c, form = x.dim(1), b.size(0, 3)
    groups = (1, 2, c, c)[form]
    inputs = [b.vector((groups,), positive=True), b.vector((groups,))]
    if form == 3:
        return b.op("InstanceNormalization", [x.name, *inputs], x.shape)
    y = b.op("Reshape", [x.name, b.ints(0, groups, -1)], (x.shape[0], groups, c // groups * x.dim(2)))
    y = b.op("InstanceNormalization", [y.name, *inputs], y.shape)
    back = b.op("Shape", [x.name]).name if b.chance() else b.ints(0, c, x.dim(2))
    y = b.op("Reshape", [y.name, back], x.shape)
    return b.binary("Add", b.binary("Mul", y, b.vector((c, 1))), b.vector((c, 1))) if b.chance(0.8) else y


def transposed(b: NetBuilder, x: Value) -> Value:
    """ConvTranspose that doubles or keeps the size, then an addition or a norm."""
    if x.dim(2) > 10:
        return pooled(b, x)
    stride = b.size(1, 2)
    c_out, (kernel, pad) = b.size(1, 10), b.pick((2, 0), (4, 1), (3, 0)) if stride == 2 else (3, 1)
    weight = b.weight((x.channels, c_out, kernel, kernel), x.channels * kernel)
    inputs = [x.name, weight] + ([b.vector((c_out,))] if b.chance() else [])
    sizes = [(x.dim(axis) - 1) * stride + kernel - 2 * pad for axis in (2, 3)]
    y = b.op("ConvTranspose", inputs, [x.shape[0], c_out, *sizes], strides=[stride] * 2, pads=[pad] * 4)
    return cheap_activation(b, norm(b, y) if b.chance() else y)


def resized(b: NetBuilder, x: Value) -> Value:
    if x.dim(2) > 10:
        return pooled(b, x)
    scales = b.const([1, 1, 2, 2])
    shape = [*x.shape[:2], x.dim(2) * 2, x.dim(3) * 2]
    nearest = {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    modes = nearest if b.chance() else {"mode": "linear", "coordinate_transformation_mode": "half_pixel"}
    y = b.op("Resize", [x.name, "", scales], shape, **modes)
    return conv(b, y, b.size(1, 8), 3 if x.channels % 2 else 1) if b.chance(0.7) else y


def rep_vgg(b: NetBuilder, x: Value) -> Value:
    """3x3 and 1x1 branches, perhaps the identity and a norm on each, summed."""
    c = x.channels if b.chance() else b.size(1, 12)
    made = [conv(b, x, c, 3), conv(b, x, c, 1)]
    if c == x.channels and b.chance(0.7):
        made.append(x)
    if b.chance():
        made = [norm(b, each) for each in made]
    total = made[0]
    for each in made[1:]:
        total = b.binary("Add", total, each)
    return cheap_activation(b, total)


def pointwise_chain(b: NetBuilder, x: Value) -> Value:
    """1x1 convolutions with nothing between them, perhaps before or after a 3x3."""
    if b.chance(0.3):
        x = conv(b, x, b.size(1, 16), 3)
    x = conv(b, conv(b, x, b.size(1, 16)), b.size(1, 16))
    return conv(b, x, b.size(1, 16), 3) if b.chance(0.3) else cheap_activation(b, x)


def depthwise_separable(b: NetBuilder, x: Value) -> Value:
    """An inverted residual."""
    width = b.size(2, 20)
    y = cheap_activation(b, norm(b, conv(b, x, width)))
    y = cheap_activation(b, norm(b, conv(b, y, width, 3, groups=width)))
    y = norm(b, conv(b, y, x.channels))
    return b.binary("Add", y, x) if b.chance() else y


def grouped(b: NetBuilder, x: Value) -> Value:
    """Convolutions in groups of odd and even width, perhaps with a channel shuffle between."""
    groups = b.size(2, 4)
    per_group = b.size(1, 5)
    y = conv(b, x, groups * per_group)
    y = conv(b, y, groups * b.pick(per_group, b.size(1, 4)), 3, groups=groups)
    if b.chance():
        per_group = y.channels // groups
        shape = (y.shape[0], groups, per_group, *y.shape[2:])
        moved = b.transpose(b.reshape(y, *shape), 0, 2, 1, 3, 4)
        y = b.reshape(moved, *y.shape)
    return conv_after(b, y)


def instance_norm(b: NetBuilder, x: Value) -> Value:
    if min(x.dim(2), x.dim(3)) < 4:
        return activation(b, x)
    inputs = [x.name, b.vector((x.channels,)), b.vector((x.channels,))]
    return activation(b, b.op("InstanceNormalization", inputs, x.shape, epsilon=1e-2))


def shared_conv(b: NetBuilder, x: Value) -> Value:
    """One weight in two layers, of which one is followed by a norm."""
    c = x.channels
    shared = b.const(b.rng.standard_normal((c, c, 1, 1)) / np.sqrt(c))
    first = b.op("Conv", [x.name, shared], x.shape)
    second = b.op("Conv", [cheap_activation(b, norm(b, first)).name, shared], x.shape)
    return b.binary("Add", second, first) if b.chance() else second


IMAGE_PARTS = (
    *(conv_block, conv_block, conv_block, residual, residual, branches, split_branch, padded_conv, pooled),
    *(squeeze_excite, transposed, resized, rep_vgg, pointwise_chain, depthwise_separable, grouped, instance_norm),
    shared_conv,
)
