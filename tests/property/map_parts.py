"""Maps of tokens: attention between their positions, channels first, and the neighbours of each."""

from __future__ import annotations

import numpy as np
from image_parts import conv
from net_builder import NetBuilder, Value
from token_parts import layer_norm, linear


def map_attention(b: NetBuilder, x: Value) -> Value:
    """On tokens [N, S, D], as a map of one column."""
    n, s, d = x.shape[0], x.dim(1), x.width
    picture = b.reshape(b.transpose(x, 0, 2, 1), n, d, s, 1)
    for _ in range(b.size(1, 2)):
        picture = _non_local(b, picture)
    return b.transpose(b.reshape(picture, n, d, s), 0, 2, 1)


def map_positions(b: NetBuilder, x: Value) -> Value:
    """Attention on tokens that become a map, with what its rows and its columns add to the scores."""
    n, s, d = x.shape[0], x.dim(1), x.width
    high, wide, heads, size = b.size(2, 4), b.size(2, 4), b.size(1, 2), b.size(3, 6)
    count = high * wide
    picture = b.transpose(linear(b, b.transpose(x, 0, 2, 1), count), 0, 2, 1)
    q, k, v = (
        b.transpose(b.reshape(linear(b, picture, heads * size), n, count, heads, size), 0, 2, 1, 3) for _ in range(3)
    )
    spots = b.reshape(q, n, heads, high, wide, size)
    if b.chance():
        q = b.binary("Mul", q, b.scalar(size**-0.5))
    scores = _product(b, q, _turned(b, k))
    added = []
    for axis, length in ((-1, high), (-2, wide)):
        term = b.op("MatMul", [spots.name, b.weight((size, length), size)], (n, heads, high, wide, length))
        shape = (n, heads, high, wide, *((high, 1) if axis == -1 else (1, wide)))
        added.append(b.op("Unsqueeze", [term.name, b.ints(axis)], shape))
    whole = (n, heads, high, wide, high, wide)
    if b.chance(0.8):
        total = b.reshape(scores, *whole)
        for term in added:
            total = b.op("Add", [total.name, term.name], whole)
        total = b.reshape(total, *scores.shape)
    else:
        bias = b.op("Add", [term.name for term in added], whole)
        total = b.binary("Add", scores, b.reshape(bias, *scores.shape))
    mixed = b.transpose(_product(b, b.unary("Softmax", total, axis=-1), v), 0, 2, 1, 3)
    y = linear(b, b.reshape(mixed, n, count, heads * size), d)
    return b.binary("Add", x, b.transpose(linear(b, b.transpose(y, 0, 2, 1), s), 0, 2, 1))


def neighbours(b: NetBuilder, x: Value) -> Value:
    """The largest, or the mean, of what convolutions make of the neighbours of each token, as networks on points."""
    n, s, d = x.shape[0], x.dim(1), x.width
    count = b.size(2, 5)
    index = b.const(b.rng.integers(0, s, (s, count)), np.int64)
    rows = b.transpose(b.op("Gather", [x.name, index], (n, s, count, d), axis=1), 0, 3, 1, 2)
    made = conv(b, rows, d)
    if b.chance(0.8):
        made = b.unary("LeakyRelu", made, alpha=0.2)
    kind = "ReduceMax" if b.opset >= 18 and b.chance(0.8) else "ReduceMean"
    return b.transpose(b.reduce(kind, made, b.pick((3,), (-1,)), keep=False), 0, 2, 1)


def few_entries(b: NetBuilder, x: Value) -> Value:
    """Branches that are stacked, weighted and summed, as in selective kernels; or pieces of a product, as in maxout."""
    n, s, d = x.shape[0], x.dim(1), x.width
    count, keep = b.size(2, 5), b.chance(0.4)
    extreme = b.pick("ReduceMax", "ReduceMin") if b.opset >= 18 else "ReduceSum"
    kind = b.pick(extreme, "ReduceSum", "ReduceMean")
    if b.chance():
        made = b.reshape(linear(b, x, count * d), n, s, *b.pick((count, d), (d, count)))
        axis = 2 if made.width == d else 3
        y = b.reduce(kind, made, b.pick((axis,), (axis - 4,)), keep)
        return b.reshape(y, n, s, d)
    parts = [b.unary(b.pick("Relu", "Tanh"), linear(b, x, d)) for _ in range(count)]
    shape = (n, 1, s, d)
    stack = b.op(
        "Concat",
        [b.op("Unsqueeze", [part.name, b.ints(1)], shape).name for part in parts],
        (n, count, s, d),
        axis=b.pick(1, -3),
    )
    y = b.reduce(kind, stack, (1,), keep)
    if b.chance(0.7):
        gate = b.reduce("ReduceMean", y, (1 + keep,), keep=True)
        weight = b.unary("Sigmoid", gate if keep else b.op("Unsqueeze", [gate.name, b.ints(1)], (n, 1, 1, d)))
        y = b.reduce(kind, b.binary("Mul", stack, weight), (1,), keep)
    return b.reshape(y, n, s, d)


def reduced_map(b: NetBuilder, x: Value) -> Value:
    """Normalized tokens that a product reads, and as a map a convolution that makes fewer tokens, as keys are made."""
    n, s, d = x.shape[0], x.dim(1), x.width
    high, wide, cut = b.size(2, 4), b.size(2, 4), b.size(1, 2)
    tokens = layer_norm(b, b.transpose(linear(b, b.transpose(x, 0, 2, 1), high * wide), 0, 2, 1))
    y = tokens
    for kind in b.pick((), ("Mul", "Add"), ("Mul", "Add"), ("Sub",), ("Div",)):
        y = b.binary(kind, y, b.vector(b.pick((d,), (1, 1, d), (1, d)), positive=kind == "Div"))
    if b.chance():
        picture = b.reshape(b.transpose(y, 0, 2, 1), n, d, high, wide)
    else:
        picture = b.transpose(b.reshape(y, n, high, wide, d), 0, 3, 1, 2)
    inputs = [picture.name, b.weight((d, d, cut, cut), d * cut * cut), b.vector((d,))]
    few = b.op("Conv", inputs[: b.size(2, 3)], [n, d, high // cut, wide // cut], strides=[cut, cut])
    keys = b.transpose(b.reshape(few, n, d, (high // cut) * (wide // cut)), 0, 2, 1)
    if b.chance(0.7):
        keys = layer_norm(b, keys)
    mixed = b.binary("Add", linear(b, tokens, d), b.reduce("ReduceMean", linear(b, keys, d), (1,), keep=True))
    return b.binary("Add", x, b.transpose(linear(b, b.transpose(mixed, 0, 2, 1), s), 0, 2, 1))


def _non_local(b: NetBuilder, x: Value) -> Value:
    n, heads, size, wide = x.shape[0], b.pick(1, 1, 2), b.size(2, 5), b.size(2, 8)
    made = [conv(b, x, heads * each) for each in (size, size, wide)]
    if b.chance(0.3):
        made[0] = b.unary("Relu", made[0])
    if b.chance(0.3) and x.dim(2) % 2 == 0:
        pool = {"kernel_shape": [2, 1], "strides": [2, 1]}
        made[1:] = [b.op("MaxPool", [y.name], [*y.shape[:2], y.dim(2) // 2, 1], **pool) for y in made[1:]]
    lead = () if heads == 1 and b.chance() else (heads,)
    q, k, v = (b.reshape(y, n, *lead, y.channels // heads, y.dim(2)) for y in made)
    if b.chance(0.4):
        q = b.binary("Mul", q, b.scalar(size**-0.5))
    y = _mixed(b, q, k, v)
    y = b.reshape(y, n, heads * wide, x.dim(2), 1)
    if heads * wide != x.channels or b.chance():
        y = conv(b, y, x.channels)
    if b.chance():
        y = b.binary("Mul", y, b.scalar(0.7))
    return b.binary("Add", x, y)


def _mixed(b: NetBuilder, q: Value, k: Value, v: Value) -> Value:
    """What attention makes of channels-first operands, channels first, with either operand of each product first."""
    if b.chance(0.3):
        scores = _product(b, _turned(b, k), q)  # [keys, queries]
        weights = b.unary("Softmax", scores, axis=-2)
        return _product(b, v, weights)
    weights = b.unary("Softmax", _product(b, _turned(b, q), k), axis=-1)
    if b.chance():
        return _product(b, v, _turned(b, weights))
    return _turned(b, _product(b, weights, _turned(b, v)))


def _product(b: NetBuilder, first: Value, second: Value) -> Value:
    return b.op("MatMul", [first.name, second.name], (*first.shape[:-1], second.shape[-1]))


def _turned(b: NetBuilder, x: Value) -> Value:
    last = len(x.shape) - 1
    return b.transpose(x, *range(last - 1), last, last - 1)
