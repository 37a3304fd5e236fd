"""Attention in windows of a map [N, H, W, C], as Swin-like networks are exported, with its residual."""

from __future__ import annotations

from net_builder import NetBuilder, Value
from token_parts import linear


def window_block(b: NetBuilder, x: Value) -> Value:
    """Windows, rolled or not, with the normalization before or behind them, or none."""
    n, height, width, channels = x.shape
    form, rolls = b.size(0, 2), [(axis, b.size(1, 2)) for axis in (1, 2) if b.chance()]
    y = _norm(b, x) if form == 0 else x
    for axis, by in rolls:
        y = _rolled(b, y, axis, by)
    rows, columns = b.pick(1, 2), b.pick(1, 2, 3)
    high, wide = x.dim(1) // rows, x.dim(2) // columns
    y = b.reshape(y, n, rows, high, columns, wide, channels)
    y = _reshaped(b, b.transpose(y, 0, 1, 3, 2, 4, 5), -1, high * wide, channels)
    y = _attention(b, y)
    y = _reshaped(b, y, -1, rows, columns, high, wide, channels)
    y = _reshaped(b, b.transpose(y, 0, 1, 3, 2, 4, 5), -1, height, width, channels)
    for axis, by in reversed(rolls):
        y = _rolled(b, y, axis, x.dim(axis) - by if b.chance(0.9) else by)
    y = _norm(b, y) if form == 1 else y
    return b.binary("Add", x, Value(y.name, x.shape))


def _reshaped(b: NetBuilder, x: Value, *shape: int | str) -> Value:
    """Reshape to constants with the batch left to be found."""
    target = b.ints(*(dim if isinstance(dim, int) else -1 for dim in shape))
    return b.op("Reshape", [x.name, target], shape)


def _norm(b: NetBuilder, x: Value) -> Value:
    inputs = [x.name, b.vector((x.width,)), b.vector((x.width,))]
    return b.op("LayerNormalization", inputs, x.shape, axis=-1, epsilon=1e-2)


def _rolled(b: NetBuilder, x: Value, axis: int, by: int) -> Value:
    parts = [b.op("Slice", [x.name, b.ints(lo), b.ints(hi), b.ints(axis)]).name for lo, hi in ((by, 99), (0, by))]
    return b.op("Concat", parts, x.shape, axis=axis)


def _attention(b: NetBuilder, x: Value) -> Value:
    """Tokens [M, S, C]: one product for queries, keys and values, or three."""
    (m, s, width), heads, size = x.shape, b.size(1, 3), b.size(2, 6)
    if b.chance(0.7):
        order = b.pick((3, heads, size), (heads, 3, size))
        parts = _reshaped(b, linear(b, x, 3 * heads * size), m, s, *order)
        axis = order.index(3, 0 if order[0] == 3 else 1) + 2
        other = 5 - axis
        parts = b.transpose(parts, axis, 0, other, 1, 4)
        q, k, v = (
            b.op("Gather", [parts.name, b.const(index, "int64")], (m, heads, s, size), axis=0) for index in range(3)
        )
    else:
        q, k, v = (
            b.transpose(_reshaped(b, linear(b, x, heads * size), m, s, heads, size), 0, 2, 1, 3) for _ in range(3)
        )
    if b.opset == 18 and size % 2 == 0:  # positions; in one opset, so that no other draw changes
        q, k = _rolled(b, q, 3, size // 2), _rolled(b, k, 3, size // 2)
    if b.chance(0.4):
        q, k = _divided(b, q), _divided(b, k)
    scores = b.op("MatMul", [q.name, b.transpose(k, 0, 1, 3, 2).name], (m, heads, s, s))
    weights = b.unary("Softmax", b.binary("Mul", scores, b.scalar(2.0)), axis=-1)
    mixed = b.transpose(b.op("MatMul", [weights.name, v.name], (m, heads, s, size)), 0, 2, 1, 3)
    return linear(b, _reshaped(b, mixed, m, s, heads * size), width)


def _divided(b: NetBuilder, x: Value) -> Value:
    """Rows divided by their lengths, which a bound keeps from 0."""
    squares = b.reduce("ReduceSum", b.binary("Mul", x, x), (-1,), keep=True)
    length = b.unary("Sqrt", b.op("Add", [squares.name, b.const(1e-2)], squares.shape))
    return b.binary("Div", x, length)


def windows_apart(b: NetBuilder, x: Value) -> Value:
    """Attention of [N, S, D] in windows that have an axis of their own, before the heads or behind them."""
    (n, s, width), windows, heads, size = x.shape, b.size(1, 3), b.size(1, 3), b.size(2, 5)
    inner = heads * size
    y = _reshaped(b, linear(b, x, windows * inner), n, s, windows, inner)
    y = b.transpose(y, 0, 2, 1, 3)
    z = _norm(b, y) if b.chance() else y
    parts = _reshaped(b, linear(b, z, 3 * inner), n, windows, s, 3, heads, size)
    places = b.pick((3, 0, 4, 1, 2, 5), (3, 0, 1, 4, 2, 5))
    parts = b.transpose(parts, *places)
    lead = parts.shape[1:4]
    q, k, v = (b.op("Gather", [parts.name, b.const(i, "int64")], (*lead, s, size), axis=0) for i in range(3))
    keys = b.transpose(k, 0, 1, 2, 4, 3)
    scores = b.binary("Mul", b.op("MatMul", [q.name, keys.name], (*lead, s, s)), b.scalar(size**-0.5))
    if b.chance(0.4):
        dims = b.pick(
            (s, s), (1, 1, s, s), (1, *(1 if dim == windows else dim for dim in lead[1:]), s, s), (*lead[1:], 1, 1)
        )
        scores = b.binary("Add", scores, b.vector(dims))
    weights = b.unary("Softmax", scores, axis=-1)
    mixed = b.op("MatMul", [weights.name, v.name], (*lead, s, size))
    at = places.index(4) - 1
    order = (0, 3 - at, 3, *b.pick((at, 4), (4, at)))
    mixed = _reshaped(b, b.transpose(mixed, *order), n, windows, s, inner)
    mixed = b.binary("Add", y, linear(b, mixed, inner))
    back = _reshaped(b, b.transpose(mixed, 0, 2, 1, 3), n, s, windows * inner)
    return linear(b, back, int(width)) if b.chance() else back
