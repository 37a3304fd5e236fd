"""Attention in the dialects of exporters: scales, keys, masks and the guard of softmax, each in every spelling."""

from __future__ import annotations

import numpy as np
from net_builder import NetBuilder, Value
from token_parts import linear

INFINITY, LOWEST = -np.inf, float(np.finfo(np.float32).min)
MOST = np.iinfo(np.int64).max


def dialect_attention(b: NetBuilder, x: Value) -> Value:
    """Multi-head attention of tokens [N, S, D] with its residual."""
    (n, s), heads, size = x.shape[:2], b.size(1, 3), b.size(1, 6)
    size += size % 2 if b.opset == 13 else 0  # what is rotated in halves
    q, k, v = (b.transpose(_heads(b, each, heads, size), 0, 2, 1, 3) for each in _projections(b, x, heads * size))
    q, k = (_rotated(b, each) for each in (q, k))
    k, place = _keys(b, k), b.size(0, 3) if b.opset > 13 else 0
    if place == 0:  # the root of the scale on both sides
        q, k = (b.binary("Mul", each, b.scalar(size**-0.25)) for each in (q, k))
    elif place == 1:
        q = b.binary("Mul", q, b.scalar(size**-0.5))
    scores = _product(b, q, k)
    if place == 2:
        scores = b.binary("Mul", scores, b.scalar(size**-0.5))
    if b.opset == 13:  # a softcap
        scores = b.binary("Mul", b.unary("Tanh", b.binary("Div", scores, b.scalar(3.0))), b.scalar(3.0))
    scores = _masked(b, x, scores)
    weights = _guarded(b, b.unary("Softmax", _shifted(b, scores), axis=-1), scores)
    turned = b.transpose(_product(b, weights, v), 0, 2, 1, 3)
    out = linear(b, b.reshape(turned, n, s, heads * size), x.width)
    return b.binary("Add", out, x) if b.chance(0.8) else out


def _product(b: NetBuilder, one: Value, other: Value) -> Value:
    """Of tensors [N, H, ...]; as torch.bmm, with both axes merged meanwhile, in opsets where no other draw changes."""
    shape = (*one.shape[:3], other.shape[3])
    if b.opset % 3:
        return b.op("MatMul", [one.name, other.name], shape)
    flat = [b.op("Reshape", [x.name, b.ints(-1, x.dim(2), x.dim(3))], ("M", *x.shape[2:])) for x in (one, other)]
    made = b.op("MatMul", [x.name for x in flat], ("M", *shape[2:]))
    lead = shape[0] if isinstance(shape[0], int) else -1
    return b.op("Reshape", [made.name, b.ints(lead, one.dim(1), one.dim(2), other.dim(3))], shape)


def _projections(b: NetBuilder, x: Value, width: int) -> list[Value]:
    made = []
    for _ in range(3):
        y = linear(b, x, width, bias=False)
        form = b.size(0, 2)
        made.append(
            y if form == 0 else b.binary("Add", y, b.const(np.zeros(width)) if form == 1 else b.vector((width,)))
        )
    return made


def _heads(b: NetBuilder, x: Value, heads: int, size: int) -> Value:
    shape = (*x.shape[:2], heads, size)
    if b.chance():
        return b.reshape(x, *shape)
    whole = b.op("Shape", [x.name]).name
    lead = b.op("Slice", [whole, b.ints(0), b.ints(2)]).name
    target = b.op("Concat", [lead, b.pick(b.ints(-1), b.ints(heads)), b.ints(size)], axis=0)
    return b.op("Reshape", [x.name, target.name], shape)


def _rotated(b: NetBuilder, x: Value) -> Value:
    """Heads [N, H, S, E] with positions rotated into them, by halves or in pairs, in two opsets."""
    rows, size = x.dim(2), x.dim(3)
    if b.opset not in (13, 18) or size % 2:
        return x
    angles = np.outer(np.arange(rows), 1.0 + np.arange(size // 2))
    pairs = b.opset == 18
    angles = np.repeat(angles, 2, axis=1) if pairs else np.tile(angles, 2)
    shape = (*x.shape[:3], size // 2, 2) if pairs else x.shape
    cut, axis = (b.reshape(x, *shape), 4) if pairs else (x, 3)
    middle = shape[axis] // 2
    first, second = (
        b.op("Slice", [cut.name, b.ints(low), b.ints(high), b.ints(axis)], (*shape[:axis], middle))
        for low, high in ((0, middle), (middle, 2 * middle))
    )
    turned = b.op("Concat", [b.unary("Neg", second).name, first.name], shape, axis=axis)
    turned = b.reshape(turned, *x.shape) if pairs else turned
    sides = (b.binary("Mul", x, b.const(np.cos(angles))), b.binary("Mul", turned, b.const(np.sin(angles))))
    return b.binary("Add", *sides)


def _keys(b: NetBuilder, k: Value) -> Value:
    """Keys [N, H, S, E] with the last two axes exchanged: at once, or with the others merged meanwhile."""
    n, heads, s, e = k.shape
    turned = (n, heads, e, s)
    form = b.size(0, 2)
    if form == 0:
        return b.transpose(k, 0, 1, 3, 2)
    if form == 1:
        merged = b.op("Reshape", [k.name, b.ints(-1, k.dim(2), k.dim(3))], ("M", s, e))
        flat = b.transpose(merged, 0, 2, 1)
        lead = n if isinstance(n, int) else -1
        return b.op("Reshape", [flat.name, b.ints(lead, k.dim(1), k.dim(3), k.dim(2))], turned)
    whole = b.op("Shape", [k.name]).name
    last, row, others = (
        b.op("Slice", [whole, b.ints(low), b.ints(high)]).name for low, high in ((-1, MOST), (-2, -1), (-MOST, -2))
    )
    merged = b.op("Reshape", [k.name, b.op("Concat", [b.ints(-1), row, last], axis=0).name], ("M", s, e))
    flat = b.transpose(merged, 0, 2, 1)
    return b.op("Reshape", [flat.name, b.op("Concat", [others, last, row], axis=0).name], turned)


def _masked(b: NetBuilder, x: Value, scores: Value) -> Value:
    form, lowest = b.size(0, 5), b.pick(INFINITY, LOWEST, -1e9)
    if form == 0:
        return scores
    if form == 1:  # what is masked depends on the tokens: with -inf a row may be masked throughout
        keys = b.op("Greater", [b.reduce("ReduceMean", x, (2,), keep=False).name, b.const(b.pick(-1.0, 0.0, 1.0))])
        if lowest != INFINITY:  # what such a row gives depends on the finite number
            keys = b.op("Or", [keys.name, b.const([[True, *[False] * (x.dim(1) - 1)]], np.bool_)])
        condition = b.op("Unsqueeze", [keys.name, b.ints(1, 2)])
        if b.chance():
            condition = b.op("And", [condition.name, _causal(b, x).name])
    elif form == 2:
        condition = _expanded(b, scores, np.ones((1, 1, scores.dim(2), 1), bool))
    elif form == 3:
        condition = _expanded(b, scores, np.tril(np.ones((1, 1, scores.dim(2), scores.dim(3)), bool)))
    else:
        condition = _causal(b, x)
    masked = b.const(lowest)
    if b.chance(0.4):
        return b.op("Where", [condition.name, scores.name, masked], scores.shape)
    if b.chance(0.3):
        condition = b.op("Not", [condition.name])
        mask = b.op("Where", [condition.name, masked, b.const(0.0)])
    else:
        mask = b.op("Where", [condition.name, b.const(0.0), masked])
    return b.binary("Add", scores, mask)


def _expanded(b: NetBuilder, scores: Value, array: np.ndarray) -> Value:
    """A constant repeated to the batch."""
    whole = b.op("Shape", [scores.name]).name
    first = b.op("Slice", [whole, b.ints(0), b.ints(1)]).name
    target = b.op("Concat", [first, b.ints(1), b.ints(scores.dim(2)), b.ints(scores.dim(3))], axis=0)
    return b.op("Expand", [b.const(array, np.bool_), target.name])


def _causal(b: NetBuilder, x: Value) -> Value:
    """Positions compared: of the length of ``x``, or constants."""
    if b.chance():
        length = b.op("Gather", [b.op("Shape", [x.name]).name, b.const(1, np.int64)], axis=0)
        positions = b.op("Range", [b.const(0, np.int64), length.name, b.const(1, np.int64)]).name
    else:
        positions = b.const(np.arange(x.dim(1)), np.int64)
    keys = b.op("Unsqueeze", [positions, b.ints(0, 1, 2)])
    queries = b.op("Unsqueeze", [positions, b.ints(0, 1, 3)])
    kind, first, second = b.pick(("LessOrEqual", keys, queries), ("GreaterOrEqual", queries, keys))
    condition: Value = b.op(kind, [first.name, second.name])
    return condition


def _shifted(b: NetBuilder, scores: Value) -> Value:
    """Less the largest of each row, as LayoutLMv3 has it; in one opset, so that no other draw changes."""
    if b.opset < 21:
        return scores
    return b.binary("Sub", scores, b.reduce("ReduceMax", scores, (-1,), keep=True))


def _guarded(b: NetBuilder, weights: Value, scores: Value) -> Value:
    form = b.size(0, 3)
    if form == 0:
        return weights
    if form == 1:
        equal = b.op("Equal", [scores.name, b.const(INFINITY)])
        counted = b.op("Cast", [equal.name], scores.shape, to=7)
        attributes = {"axes": [-1], "keepdims": 1} if b.opset < 18 else {"keepdims": 1}
        inputs = [counted.name] if b.opset < 18 else [counted.name, b.ints(-1)]
        condition = b.op("Cast", [b.op("ReduceMin", inputs, **attributes).name], to=9)
    else:
        condition = b.op("IsNaN", [weights.name])
    if b.chance(0.3):
        condition = b.op("Not", [condition.name])
        return b.op("Where", [condition.name, weights.name, b.const(0.0)], weights.shape)
    return b.op("Where", [condition.name, b.const(0.0), weights.name], weights.shape)
