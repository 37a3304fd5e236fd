"""Pieces of transformers and recurrent networks: each takes tokens [N, S, D] and gives others."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from activation_parts import activation, gelu
from net_builder import NetBuilder, Value


def linear(b: NetBuilder, x: Value, width: int, *, bias: bool | None = None) -> Value:
    """MatMul, perhaps an addition, of any rank."""
    y = b.op("MatMul", [x.name, b.weight((x.width, width), x.width)], (*x.shape[:-1], width))
    return b.binary("Add", y, b.vector((width,))) if (b.chance(0.8) if bias is None else bias) else y


def layer_norm(b: NetBuilder, x: Value) -> Value:
    """Of the last axis: as an operator, spelled out, or by the root mean square alone."""
    d, epsilon = x.width, 1e-2  # large, so that a nearly constant row does not blow up roundings
    form = b.size(0, 4)
    if form <= 1 and b.opset >= 17:
        bias = [b.vector((d,))] if b.chance(0.8) else []
        return b.op("LayerNormalization", [x.name, b.vector((d,)), *bias], x.shape, axis=-1, epsilon=epsilon)
    centered = x
    if form != 4:
        mean = b.reduce("ReduceMean", x, (-1,), keep=True)
        centered = b.op("Sub", [x.name, mean.name], x.shape)
    square = b.binary("Pow", centered, b.const(2.0)) if b.chance(0.7) else b.binary("Mul", centered, centered)
    variance = b.reduce("ReduceMean", square, (-1,), keep=True)
    # In this order: ONNX Runtime 1.31 fuses the other one with an epsilon of its own, and is wrong.
    raised = b.op("Add", [variance.name, b.const(epsilon)], variance.shape)
    deviation = b.unary("Sqrt", raised)
    if b.chance(0.3):
        y = b.binary("Mul", centered, b.unary("Reciprocal", deviation))
    else:
        y = b.binary("Div", centered, deviation)
    y = b.binary("Mul", y, b.vector((d,)))
    return b.binary("Add", y, b.vector((d,))) if b.chance(0.8) else y


def repeated_bias(b: NetBuilder, x: Value) -> Value:
    """A constant row, repeated to the batch before it is added."""
    whole = b.op("Shape", [x.name])
    n = b.op("Slice", [whole.name, b.ints(0), b.ints(1)])
    shape = b.op("Concat", [n.name, b.ints(1), b.ints(x.width)], axis=0)
    row = b.op("Expand", [b.const(b.rng.standard_normal((1, 1, x.width))), shape.name], (x.shape[0], 1, x.width))
    return b.op("Add", [x.name, row.name], x.shape)


def selected(b: NetBuilder, x: Value) -> Value:
    """One token of [N, S, D]: the first or the last, with its axis or without."""
    if b.chance():
        return b.op("Gather", [x.name, b.const(b.pick(0, -1), np.int64)], (x.shape[0], x.width), axis=1)
    return b.op("Slice", [x.name, b.ints(0), b.ints(1), b.ints(1)], (x.shape[0], 1, x.width))


def attention(b: NetBuilder, x: Value) -> Value:
    """Multi-head attention in the forms of exporters, with its projection and residual."""
    n, s = x.shape[:2]
    heads, size = b.size(1, 3), b.size(1, 6)
    width = heads * size
    y = layer_norm(b, x) if b.chance(0.6) else x
    q, k, v = _projections(b, y, width)
    scale = size**-0.5
    place = b.size(0, 4)
    lead = _leading(b, y) if b.chance(0.25) else []
    parts = [_to_heads(b, each, lead, heads, size) for each in (q, k, v)]
    late = b.chance(0.2)
    q = b.transpose(parts[0], 0, 2, 1, 3)
    if place in (0, 1):
        q = b.binary("Mul", q, b.scalar(scale if place == 0 else scale**0.5))
    k = b.transpose(parts[1], 0, 2, 3, 1) if b.chance() else _twice_turned(b, parts[1])
    if place == 1:
        k = b.binary("Mul", k, b.scalar(scale**0.5))
    scores = b.op("MatMul", [q.name, k.name], [n, heads, s, s])
    if place in (2, 3):
        scores = (
            b.binary("Mul", scores, b.scalar(scale)) if place == 2 else b.binary("Div", scores, b.scalar(1 / scale))
        )
    scores = _masked(b, scores)
    mixed = _mixed(b, scores, b.transpose(parts[2], 0, 2, 1, 3), late)
    turned = b.transpose(mixed, 0, 2, 1, 3)
    joined = _computed(b, turned, [*lead, b.ints(-1)], n, s, width) if lead else b.reshape(turned, n, s, width)
    out = linear(b, joined, x.width)
    return b.binary("Add", out, x) if b.chance(0.8) else out


def _leading(b: NetBuilder, x: Value) -> list[str]:
    """Batch and tokens as exports with dynamic axes read them: of the shape of ``x``, one by one or in a slice."""
    whole = b.op("Shape", [x.name]).name
    if b.chance(0.3):
        return [b.op("Slice", [whole, b.ints(0), b.ints(2)]).name]
    each = [b.op("Gather", [whole, b.const(axis, np.int64)], axis=0).name for axis in range(2)]
    return [b.op("Unsqueeze", [name, b.ints(0)]).name for name in each]


def _to_heads(b: NetBuilder, x: Value, lead: list[str], heads: int, size: int) -> Value:
    if not lead:
        return b.reshape(x, *x.shape[:2], heads, size)
    return _computed(b, x, [*lead, b.pick(b.ints(-1), b.ints(heads)), b.ints(size)], *x.shape[:2], heads, size)


def _computed(b: NetBuilder, x: Value, target: list[str], *shape: int | str) -> Value:
    """Reshape to a shape put together from ``target``."""
    joined = b.op("Concat", target, axis=0)
    return b.op("Reshape", [x.name, joined.name], shape)


def _twice_turned(b: NetBuilder, keys: Value) -> Value:
    return b.transpose(b.transpose(keys, 0, 2, 1, 3), 0, 1, 3, 2)


def _projections(b: NetBuilder, y: Value, width: int) -> tuple[Value, Value, Value]:
    if b.chance(0.2):  # one product, split
        packed = linear(b, y, 3 * width)
        shape = (*y.shape[:2], width)
        parts = b.many("Split", [packed.name, b.ints(width, width, width)], [shape] * 3, axis=2)
        return parts[0], parts[1], parts[2]
    bias = b.pick(None, True, True)
    return linear(b, y, width, bias=bias), linear(b, y, width, bias=bias), linear(b, y, width, bias=bias)


def _masked(b: NetBuilder, scores: Value) -> Value:
    s = scores.dim(-1)
    form = b.size(0, 4)
    if form == 0:
        lowest = float(b.pick(-3.4028234663852886e38, -1e9, -10000.0))
        mask = np.triu(np.full((s, s), lowest, np.float32), 1)
        return b.binary("Add", scores, b.const(mask[None, None]))
    if form == 1:
        allowed = b.const(np.tril(np.ones((1, 1, s, s), bool)), np.bool_)
        masked = b.const(b.pick(np.float32(-3.4028234663852886e38), np.float32(-np.inf)))
        return b.op("Where", [allowed, scores.name, masked], scores.shape)
    return scores


def _mixed(b: NetBuilder, scores: Value, v: Value, late: bool) -> Value:
    """Softmax and its product with the values; the division may come after the product."""
    shape = [*scores.shape[:3], v.width]
    if not late and b.chance(0.8):
        return b.op("MatMul", [b.unary("Softmax", scores, axis=-1).name, v.name], shape)
    highest = b.op("ReduceMax", [scores.name], _kept(scores), **{"axes": [-1], "keepdims": 1}) if b.opset < 18 else None
    shifted = b.op("Sub", [scores.name, highest.name], scores.shape) if highest else b.unary("Tanh", scores)
    weights = b.unary("Exp", shifted)
    total = b.reduce("ReduceSum", weights, (-1,), keep=True)
    if not late:
        return b.op("MatMul", [b.binary("Div", weights, total).name, v.name], shape)
    mixed = b.op("MatMul", [weights.name, v.name], shape)
    return b.binary("Div", mixed, total)


def _kept(scores: Value) -> tuple[int | str, ...]:
    return (*scores.shape[:3], 1)


def mlp(b: NetBuilder, x: Value) -> Value:
    y = layer_norm(b, x) if b.chance(0.6) else x
    hidden = b.size(2, 20)
    y = gelu(b, linear(b, y, hidden)) if b.chance() else activation(b, linear(b, y, hidden))
    y = linear(b, y, x.width)
    if b.chance(0.3):  # layer scale
        y = b.binary("Mul", y, b.vector((x.width,)))
    return b.binary("Add", y, x) if b.chance(0.8) else y


def mixer(b: NetBuilder, x: Value) -> Value:
    """Linear layers over the tokens, in a residual branch."""
    y = b.transpose(layer_norm(b, x) if b.chance(0.7) else x, 0, 2, 1)
    y = gelu(b, linear(b, y, b.size(2, 12)))
    y = b.transpose(linear(b, y, x.dim(1)), 0, 2, 1)
    return b.binary(b.pick("Add", "Mul"), y, x)


def adapted(b: NetBuilder, x: Value) -> Value:
    """A product with an adapter beside it: two thin products, perhaps with a factor."""
    rank, width = b.size(1, x.width // 4), b.size(x.width // 2, 2 * x.width)
    thin = linear(b, linear(b, x, rank, bias=False), width, bias=False)
    thin = b.binary("Mul", thin, b.const(0.5)) if b.chance() else thin
    return b.binary("Add", linear(b, x, width), thin)


def gated(b: NetBuilder, x: Value) -> Value:
    """Parallel products of one input: gate and up, multiplied."""
    hidden, bias = b.size(1, 16), b.chance()
    gate, up = linear(b, x, hidden, bias=bias), linear(b, x, hidden, bias=bias)
    joined = b.binary("Mul", b.binary("Mul", gate, b.unary("Sigmoid", gate)), up)
    return linear(b, joined, x.width)


def parallel(b: NetBuilder, x: Value) -> Value:
    """Products of one input with different widths, each used by itself, joined at the end."""
    made = [activation(b, linear(b, x, b.size(1, 9))) for _ in range(b.size(2, 4))]
    shape = (*x.shape[:-1], sum(each.width for each in made))
    joined = b.op("Concat", [each.name for each in made], shape, axis=-1)
    return linear(b, joined, x.width)


def product_chain(b: NetBuilder, x: Value) -> Value:
    """Products with nothing between them."""
    return linear(b, linear(b, x, b.size(1, 12), bias=b.chance()), b.size(2, 16))


def recurrent(b: NetBuilder, x: Value) -> Value:
    """LSTM, GRU or RNN over the tokens, one or two layers, one or both directions."""
    y, form = b.transpose(x, 1, 0, 2), _recurrent_form(b)
    for _ in range(b.size(1, 2)):
        y = _recurrent_layer(b, y, form if b.chance(0.7) else _recurrent_form(b))
    return b.transpose(y, 1, 0, 2)


def _recurrent_form(b: NetBuilder) -> tuple[str, int, str]:
    direction = b.pick("forward", "forward", "reverse", "bidirectional")
    return b.pick("LSTM", "LSTM", "GRU", "RNN"), b.size(2, 10), direction


def _recurrent_layer(b: NetBuilder, y: Value, form: tuple[str, int, str]) -> Value:
    kind, hidden, direction = form
    gates = {"LSTM": 4, "GRU": 3, "RNN": 1}[kind] * hidden
    count = 2 if direction == "bidirectional" else 1
    inputs = [y.name, b.weight((count, gates, y.width), y.width), b.weight((count, gates, hidden), hidden)]
    if b.chance(0.8):
        inputs.append(b.vector((count, 2 * gates)))
    if not isinstance(y.shape[1], str) and b.chance(0.4):
        inputs += [""] * (5 - len(inputs))
        inputs += [b.vector((count, y.dim(1), hidden)) for _ in range(1 + (kind == "LSTM"))]
    attributes = {"hidden_size": hidden, "direction": direction}
    if kind == "GRU":
        attributes["linear_before_reset"] = b.size(0, 1)
    length, batch = y.shape[0], y.shape[1]
    y = b.op(kind, inputs, [length, count, batch, hidden], **attributes)
    if count == 1:
        return b.op("Squeeze", [y.name, b.ints(1)], [length, batch, hidden])
    moved = b.transpose(y, 0, 2, 1, 3)
    return b.op("Reshape", [moved.name, b.ints(0, 0, -1)], [length, batch, 2 * hidden])


def last_axes(b: NetBuilder, x: Value) -> Value:
    """Rank 4, channels last: [N, C, H, W] to NHWC, norm, two products, a scale, and back (ConvNeXt)."""
    c = x.channels
    y = b.transpose(x, 0, 2, 3, 1)
    y = layer_norm(b, y) if c >= 4 and b.chance(0.8) else y
    y = linear(b, gelu(b, linear(b, y, b.size(2, 20))), c)
    if b.chance():
        y = b.binary("Mul", y, b.vector((c,)))
    y = b.transpose(y, 0, 3, 1, 2)
    return b.binary("Add", y, x) if b.chance(0.8) else y


def stacked(b: NetBuilder, x: Value) -> Value:
    """Recurrent layers of one form, each the input of the next."""
    y = b.transpose(x, 1, 0, 2)
    kind, hidden = b.pick("LSTM", "GRU", "RNN"), b.size(2, 8)
    gates, direction = {"LSTM": 4, "GRU": 3, "RNN": 1}[kind] * hidden, b.pick("forward", "reverse")
    for _ in range(b.size(2, 3)):
        inputs = [y.name, b.weight((1, gates, y.width), y.width), b.weight((1, gates, hidden), hidden)]
        inputs.append(b.vector((1, 2 * gates)))
        shape = [y.shape[0], 1, y.shape[1], hidden]
        whole = b.op(kind, inputs, shape, hidden_size=hidden, direction=direction)
        y = b.op("Squeeze", [whole.name, b.ints(1)], [y.shape[0], y.shape[1], hidden])
    return b.transpose(y, 1, 0, 2)


def normalized_attention(b: NetBuilder, x: Value) -> Value:
    """Attention right behind a normalization, as in a vision transformer."""
    n, s, d = x.shape[0], x.dim(1), x.width
    heads, size = b.size(1, 3), b.size(2, 5)
    y = b.op("LayerNormalization", [x.name, b.vector((d,)), _small(b, d)], x.shape, axis=-1, epsilon=1e-2)
    made = [b.binary("Add", linear(b, y, heads * size, bias=False), _small(b, heads * size)) for _ in range(3)]
    q, k, v = (b.reshape(each, n, s, heads, size) for each in made)
    scores = b.op("MatMul", [b.transpose(q, 0, 2, 1, 3).name, b.transpose(k, 0, 2, 3, 1).name], [n, heads, s, s])
    scores = b.binary("Mul", scores, b.scalar(size**-0.5))
    mixed = _mixed(b, scores, b.transpose(v, 0, 2, 1, 3), late=False)
    out = linear(b, b.reshape(b.transpose(mixed, 0, 2, 1, 3), n, s, heads * size), d)
    return b.binary("Add", out, x)


def _small(b: NetBuilder, width: int) -> str:
    return b.const(b.rng.standard_normal(width) * 0.1)


TOKEN_PARTS = (attention, attention, attention, mlp, mlp, gated, parallel, product_chain, recurrent, recurrent)


def waves_to_pixels(b: NetBuilder, x: Value) -> Value:
    """Residual blocks of a vocoder, [N, C, L], whose channels are then tokens, and the pixels of an image."""
    for _ in range(2):
        y = b.unary("LeakyRelu", x, alpha=b.pick(0.1, 0.2))
        inputs = [y.name, b.weight((x.channels, x.channels, 3), 3 * x.channels), b.vector((x.channels,))]
        x = b.binary("Add", b.op("Conv", inputs, x.shape, pads=[1, 1]), x)
    y = linear(b, b.unary("LeakyRelu", x), b.size(2, 9))
    n, tokens, width = y.shape
    y = b.reshape(b.transpose(y, 0, 2, 1), n, width, tokens, 1)
    weight = b.weight((y.channels, 1, 3, 3), 9)
    return b.op("Conv", [y.name, weight], y.shape, pads=[1] * 4, group=y.channels)


def vocabulary(b: NetBuilder, x: Value) -> Value:
    """Scores over an odd number of words, and the mean of what stands for them."""
    scores = linear(b, x, 2 * b.size(1024, 1100) + 1, bias=b.chance())
    return linear(b, b.op("Softmax", [scores.name], scores.shape, axis=-1), x.width)


def contracted(b: NetBuilder, x: Value) -> Value:
    """Projections as Einsum, BatchNormalization of tokens, a column of zeros beside scores, a sum of joined tensors."""
    n, tokens, _ = x.shape
    heads = b.op("Einsum", [x.name, b.weight((x.width, 2, 4), x.width)], (n, tokens, 2, 4), equation="bsd,dhe->bshe")
    y = b.transpose(b.unary("Tanh", b.reshape(heads, n, tokens, 8)), 0, 2, 1)
    statistics = [b.vector((8,)), b.vector((8,)), b.vector((8,)), b.vector((8,), positive=True)]
    y = b.transpose(b.op("BatchNormalization", [y.name, *statistics], y.shape), 0, 2, 1)
    scores = b.op("MatMul", [y.name, b.transpose(y, 0, 2, 1).name], (n, tokens, tokens))
    scores = b.op("Pad", [scores.name, b.ints(0, 0, 1, 0, 0, 0)], (n, tokens, x.dim(1) + 1))
    first, second = b.unary("Sin", y), b.unary("Sigmoid", y)
    joined = b.op("Concat", [first.name, second.name], (n, tokens, 16), axis=-1)
    summed = b.reduce("ReduceSum", b.binary("Mul", joined, b.vector((16,))), (-1,), keep=True)
    y = b.op("Concat", [scores.name, summed.name], (n, tokens, x.dim(1) + 2), axis=-1)
    return linear(b, y, x.width)


def cropped(b: NetBuilder, x: Value) -> Value:
    """Convolutions over the last axis that pad both sides, or are transposed, and whose ends are cut off."""
    n, c, length = x.shape
    kernel, gap = b.pick(2, 3, 4), b.pick(1, 2)
    pad = gap * (kernel - 1)
    y = x
    for _ in range(b.size(1, 2)):
        weight = b.weight((x.dim(1), x.dim(1), kernel), x.dim(1) * kernel)
        made = b.op("Conv", [y.name, weight], [n, c, x.dim(2) + pad], pads=[pad, pad], dilations=[gap])
        made = b.unary("Tanh", made) if b.chance() else made
        end = b.pick(-pad, x.dim(2))
        y = b.op("Slice", [made.name, b.ints(0), b.ints(end), b.ints(2)], [n, c, length])
        y = b.binary("Add", b.unary("Relu", y), x)
    if b.chance():
        weight = b.weight((x.dim(1), x.dim(1), 4), x.dim(1) * 4)
        y = b.op("ConvTranspose", [y.name, weight], [n, c, 2 * x.dim(2) + 2], strides=[2])
        y = b.op("Slice", [y.name, b.ints(1), b.ints(-1), b.ints(-1)], [n, c, 2 * x.dim(2)])
    return y


def experts(b: NetBuilder, x: Value) -> Value:
    """Two of the experts for each token, whose weights are gathered, one of them as the second operand."""
    width, inner, count = x.width, b.size(3, 9), b.size(2, 4)
    tokens = b.op("Reshape", [x.name, b.ints(-1, width)], ("T", width))
    _, chosen = b.many("TopK", [linear(b, tokens, count).name, b.ints(2)], [("T", 2), ("T", 2)])
    index = b.op("Reshape", [chosen.name, b.ints(-1)], ("R",)).name
    apart = b.op("Unsqueeze", [tokens.name, b.ints(1)], ("T", 1, width))
    twice = b.op("Expand", [apart.name, b.ints(1, 2, 1)], ("T", 2, width))
    rows = b.op("Reshape", [twice.name, b.ints(-1, width, 1)], ("R", width, 1))
    if b.chance():
        column = b.op("Unsqueeze", [index, b.ints(-1)]).name
        up = b.op("GatherND", [b.weight((count, inner, width), width), column])
    else:
        up = b.op("Gather", [b.weight((count, inner, width), width), index])
    hidden = b.unary("Sigmoid", b.op("MatMul", [up.name, rows.name], ("R", inner, 1)))
    down = b.op("Gather", [b.weight((count, inner, width), inner), index])
    made = b.op("MatMul", [b.transpose(hidden, 0, 2, 1).name, down.name], ("R", 1, width))
    pairs = b.op("Reshape", [made.name, b.ints(-1, 2, width)], ("T", 2, width))
    mixed = b.reduce("ReduceSum", pairs, (1,), keep=False)
    whole = b.op("Reshape", [mixed.name, b.ints(-1, x.dim(1), width)], x.shape)
    return b.binary("Add", x, whole)


def turned_attention(b: NetBuilder, x: Value) -> Value:
    """Attention on [tokens, batch, features] between Transposes, as torch's MultiheadAttention with the batch first."""
    n, s, _ = x.shape
    heads, size = b.size(2, 3), b.size(2, 5)
    for _ in range(b.size(1, 2)):
        turned = b.transpose(layer_norm(b, x), 1, 0, 2)
        projected = [linear(b, turned, heads * size) for _ in range(3)]
        mixed = _heads_in_batch(b, projected, size) if b.chance() else _heads_apart(b, projected, heads, size)
        joined = linear(b, b.op("Reshape", [mixed.name, b.ints(0, -1, heads * size)], (s, n, heads * size)), x.width)
        x = b.binary("Add", x, b.transpose(joined, 1, 0, 2))
        x = mlp(b, x) if b.chance() else x
    return x


def _heads_apart(b: NetBuilder, projected: Sequence[Value], heads: int, size: int) -> Value:
    """Attention over [batch, heads, tokens, size], its result [tokens, batch, heads, size]."""
    s, n, _ = projected[0].shape
    q, k, v = (b.reshape(each, s, n, heads, size) for each in projected)
    scores = b.op("MatMul", [b.transpose(q, 1, 2, 0, 3).name, b.transpose(k, 1, 2, 3, 0).name], (n, heads, s, s))
    weights = b.unary("Softmax", b.binary("Mul", scores, b.scalar(size**-0.5)), axis=-1)
    mixed = b.op("MatMul", [weights.name, b.transpose(v, 1, 2, 0, 3).name], (n, heads, s, size))
    return b.transpose(mixed, 2, 0, 1, 3)


def _heads_in_batch(b: NetBuilder, projected: Sequence[Value], size: int) -> Value:
    """Attention over [batch * heads, tokens, size], its result with the tokens first."""
    s = projected[0].shape[0]
    q, k, v = (b.op("Reshape", [each.name, b.ints(s, -1, size)], (s, "R", size)) for each in projected)
    q = b.binary("Mul", b.transpose(q, 1, 0, 2), b.scalar(size**-0.5))
    scores = b.op("MatMul", [q.name, b.transpose(k, 1, 2, 0).name], ("R", s, s))
    weights = b.unary("Softmax", scores, axis=-1)
    return b.transpose(b.op("MatMul", [weights.name, b.transpose(v, 1, 0, 2).name], ("R", s, size)), 1, 0, 2)


def packed_keys(b: NetBuilder, x: Value) -> Value:
    """Attention whose keys and values are one projection, or the queries too; both sides are scaled by one number."""
    n, s, _ = x.shape
    heads, size = b.size(2, 3), b.size(2, 5)
    width, y = heads * size, layer_norm(b, x)
    count = b.pick(2, 2, 2, 3)
    packed = linear(b, y, count * width, bias=b.pick(None, True))
    parts = b.many("Split", [packed.name, b.ints(*(width,) * count)], [(n, s, width)] * count, axis=2)
    projected = parts if count == 3 else [linear(b, y, width), *parts]
    q, k, v = (b.transpose(b.reshape(each, n, s, heads, size), 0, 2, 1, 3) for each in projected)
    root = b.scalar(b.pick(size**-0.25, size**-0.25, 1.5))
    turned = b.transpose(b.binary("Mul", k, root), 0, 1, 3, 2)
    scores = b.op("MatMul", [b.binary("Mul", q, root).name, turned.name], (n, heads, s, s))
    mixed = b.op("MatMul", [b.unary("Softmax", scores, axis=-1).name, v.name], (n, heads, s, size))
    joined = b.reshape(b.transpose(mixed, 0, 2, 1, 3), n, s, width)
    return b.binary("Add", x, linear(b, joined, x.width))


def relative_scores(b: NetBuilder, x: Value) -> Value:
    """Weights of tokens by their distance, of which each row takes those of its own."""
    n, s, d = x.shape[0], x.dim(1), x.width
    span = b.size(1, s)
    apart = np.clip(np.arange(s)[:, None] - np.arange(s), -span, span - 1) + b.pick(0, span)
    index = b.const(apart.reshape(*(1,) * b.size(0, 1), s, s), b.pick(np.int64, np.int32))
    scores = b.op("MatMul", [x.name, b.weight((d, 2 * span), d)], (n, s, 2 * span))
    if b.chance():
        size = b.op("Shape", [x.name], start=0, end=1)
        index = b.op("Expand", [index, b.op("Concat", [size.name, b.ints(s, s)], axis=0).name]).name
    else:
        index = b.op("Expand", [index, b.op("Shape", [b.op("MatMul", [x.name, b.weight((d, s), d)]).name]).name]).name
    y = b.op("GatherElements", [scores.name, index], (n, s, s), axis=b.pick(2, -1))
    if b.chance():
        y = b.transpose(y, 0, 2, 1)
    y = b.op("Softmax", [y.name], y.shape, axis=-1)
    return b.binary("Add", x, b.op("MatMul", [y.name, x.name], x.shape))


def assigned(b: NetBuilder, x: Value) -> Value:
    """A wider tensor of which each slice is assigned: every second or third entry, or one part behind the other."""
    (n, s), d, parts = x.shape[:2], x.width, b.size(2, 3)
    whole = b.op("Concat", [x.name] * parts, (n, s, parts * d), axis=-1)
    y, apart = b.transpose(whole, 2, 1, 0), b.chance(0.4)
    for part in b.rng.permutation(parts):
        rows = np.arange(part * d, (part + 1) * d) if apart else np.arange(part, parts * d, parts)
        piece = b.transpose(b.unary(b.pick("Neg", "Tanh", "Abs"), x), 2, 1, 0)
        y = b.op("ScatterND", [y.name, b.const(rows.reshape(-1, 1), np.int64), piece.name], y.shape)
    return b.binary("Add", x, linear(b, b.transpose(y, 2, 1, 0), d))


def edges(b: NetBuilder, x: Value) -> Value:
    """Messages along the edges of a graph whose nodes are the tokens, summed at the nodes by a product."""
    n, s, d = x.shape[0], x.dim(1), x.width
    count, wide = b.size(s + 1, 3 * s), b.size(2, 8)
    ends = [b.rng.integers(0, s, count) for _ in range(2)]
    if b.chance():
        rows = [b.op("Gather", [x.name, b.const(end, np.int64)], (n, count, d), axis=1) for end in ends]
    else:  # as torch's exporter writes two indices
        turned = b.transpose(x, 1, 0, 2)
        found = [b.op("GatherND", [turned.name, b.const(end[:, None], np.int64)], (count, n, d)) for end in ends]
        rows = [b.transpose(each, 1, 0, 2) for each in found]
    rows = rows if b.chance(0.7) else rows[:1]
    joined = rows[0]
    if len(rows) > 1:
        joined = b.op("Concat", [row.name for row in rows], (n, count, 2 * d), axis=b.pick(2, -1))
    messages = mlp(b, linear(b, joined, wide))
    places = (np.arange(s)[:, None] == ends[1]).astype(np.float32)
    summed = b.op("MatMul", [b.const(places), messages.name], (n, s, wide))
    return b.binary("Add", x, linear(b, summed, d))


def interaction(b: NetBuilder, x: Value) -> Value:
    """The products of all pairs of an odd number of vectors, of which a network for recommendations takes each once."""
    n, d = x.shape[0], x.width
    parts = [x, b.unary(b.pick("Tanh", "Neg"), x)]
    if b.chance(0.8):
        parts.append(b.reduce("ReduceSum", x, (1,), keep=True))
    count = sum(part.dim(1) for part in parts)
    joined = b.op("Concat", [part.name for part in parts], (n, count, d), axis=b.pick(1, -2))
    pairs = b.op("MatMul", [joined.name, b.transpose(joined, 0, 2, 1).name], (n, count, count))
    rows, columns = np.tril_indices(count, -1)
    if b.chance():
        flat = b.reshape(pairs, n, count * count)
        once = b.op(
            "Gather", [flat.name, b.const(rows * count + columns, np.int64)], (n, len(rows)), axis=b.pick(1, -1)
        )
    else:  # as torch's exporter writes two indices
        index = b.const(np.stack([rows, columns], 1), np.int64)
        found = b.op("GatherND", [b.transpose(pairs, 1, 2, 0).name, index], (len(rows), n))
        once = b.transpose(found, 1, 0)
    made = linear(b, once, d)
    return b.binary("Add", x, b.op("Unsqueeze", [made.name, b.ints(1)], (n, 1, d)))
