"""Maps of tokens: attention between their positions, channels first, and the neighbours of each."""

from __future__ import annotations

import numpy as np
from image_parts import conv
from net_builder import NetBuilder, Value


def map_attention(b: NetBuilder, x: Value) -> Value:
    """On tokens [N, S, D], as a map of one column."""
    n, s, d = x.shape[0], x.dim(1), x.width
    picture = b.reshape(b.transpose(x, 0, 2, 1), n, d, s, 1)
    for _ in range(b.size(1, 2)):
        picture = _non_local(b, picture)
    return b.transpose(b.reshape(picture, n, d, s), 0, 2, 1)


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
