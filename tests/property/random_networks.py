"""Small random networks from a seed: valid for ONNX Runtime, with numbers of sane scale."""

from __future__ import annotations

import numpy as np
import onnx
from activation_parts import activation
from dialect_parts import dialect_attention
from image_parts import IMAGE_PARTS, branches, excited, global_pool, mixed_convs, one_axis, scaled
from map_parts import few_entries, map_attention, map_positions, neighbours, reduced_map
from net_builder import NetBuilder, Value
from odd_parts import ODD_PARTS
from token_parts import (
    TOKEN_PARTS,
    adapted,
    assigned,
    contracted,
    cropped,
    edges,
    experts,
    interaction,
    last_axes,
    layer_norm,
    linear,
    mixer,
    normalized_attention,
    packed_keys,
    relative_scores,
    repeated_bias,
    selected,
    stacked,
    turned_attention,
    vocabulary,
    waves_to_pixels,
)
from window_parts import window_block, windows_apart

OPSETS = (13, 17, 17, 17, 18, 21)
DIALECTS = 10_000
"""Seeds from here on give attention as exporters spell it."""
WINDOWS = 20_000
"""Seeds from here on give attention in windows of a map."""
_MOST_ELEMENTS = 20_000
_RARE_EVERY = 20
_CYCLE = (stacked, normalized_attention, repeated_bias, waves_to_pixels, excited, mixer, excited)
RARE_PARTS = (
    *_CYCLE, *_CYCLE[:6], adapted, adapted, adapted, mixer, mixer, waves_to_pixels, *(vocabulary,) * 4,
    *(contracted,) * 3, *(experts,) * 2, *(cropped,) * 3, *(mixed_convs,) * 4, *(one_axis,) * 4,
    *(relative_scores,) * 3,
    *(turned_attention,) * 3,
    *(assigned,) * 2,
    *(map_attention,) * 3,
    edges,
    neighbours,
    interaction,
    *(map_positions,) * 3,
    *(few_entries,) * 4,
    *(windows_apart,) * 3,
    *(reduced_map,) * 4,
    *(scaled,) * 2,
    *(packed_keys,) * 2,
)  # fmt: skip


def random_network(seed: int) -> onnx.ModelProto:
    """The network of a seed: a few parts in a row, a head, one to three outputs.

    Its input ``x`` is [N, C, H, W] or [N, S, D]; its batch is fixed or dynamic.
    """
    rng = np.random.default_rng(seed)
    b = NetBuilder(rng, int(rng.choice(OPSETS)))
    batch: int | str = b.pick("N", "N", 1, 2)
    if seed >= WINDOWS:
        return _window_network(b, batch)
    if seed >= DIALECTS:
        return _dialect_network(b, batch)
    if seed % _RARE_EVERY == _RARE_EVERY - 1:
        return _rare_network(b, batch, seed // _RARE_EVERY)
    image = b.chance(0.65)
    if image:
        x = Value("x", (batch, b.pick(3, b.size(1, 12)), b.size(5, 16), b.size(5, 16)))
    else:
        x = Value("x", (batch, b.size(2, 9), b.size(4, 16)))
    y, seen = x, []
    for _ in range(b.size(2, 5)):
        y = _part(b, y)
        seen.append(y)
    if image:
        y = _image_head(b, y)
    elif b.chance(0.3):
        y = linear(b, b.reduce("ReduceMean", y, (1,), keep=b.chance()), b.size(2, 11))
    elif b.chance(0.4):
        y = linear(b, selected(b, y), b.size(2, 11))
    outputs = [_named(b, y)]
    if b.chance(0.25):
        outputs.append(b.pick(*seen))
    if b.chance(0.2):
        outputs.append(_named(b, b.unary("LeakyRelu", b.pick(*seen))))
    inputs = [x]
    outputs = list({value.name: value for value in outputs}.values())
    return b.model(inputs, outputs)


def _dialect_network(b: NetBuilder, batch: int | str) -> onnx.ModelProto:
    x = Value("x", (batch, b.size(2, 6), b.size(4, 16)))
    y = dialect_attention(b, x)
    if b.chance():
        y = dialect_attention(b, layer_norm(b, y))
    return b.model([x], [_named(b, y)])


def _window_network(b: NetBuilder, batch: int | str) -> onnx.ModelProto:
    b.opset = max(b.opset, 17)
    x = Value("x", (batch, b.pick(4, 6), b.pick(6, 12), b.size(4, 12)))
    y = window_block(b, x)
    return b.model([x], [_named(b, window_block(b, y) if b.chance() else y)])


def _rare_network(b: NetBuilder, batch: int | str, number: int) -> onnx.ModelProto:
    """Patterns that need several choices in a row to fall right."""
    b.opset = max(b.opset, 17)
    x = Value("x", (batch, b.size(2, 6), b.size(16, 32)))  # wide, so that a bias is small beside a sum
    y = RARE_PARTS[number % len(RARE_PARTS)](b, x)
    return b.model([x], [_named(b, _part(b, y) if b.chance() else y)])


def _part(b: NetBuilder, x: Value) -> Value:
    if b.chance(0.3):
        x = b.pick(*ODD_PARTS)(b, x)
    if len(x.shape) == 3:
        return b.pick(*TOKEN_PARTS)(b, x)  # type: ignore[no-any-return]
    y: Value = last_axes(b, x) if b.chance(0.12) else b.pick(*IMAGE_PARTS)(b, x)
    if y.dim(2) * y.dim(3) * y.channels > _MOST_ELEMENTS:
        y = b.op("MaxPool", [y.name], [*y.shape[:2], y.dim(2) // 2, y.dim(3) // 2], kernel_shape=[2, 2], strides=[2, 2])
    return y


def _named(b: NetBuilder, y: Value) -> Value:
    """An output is made by a node of its own now and then, so that the value before it is free."""
    return b.unary("Identity", y) if b.chance(0.2) else y


def _image_head(b: NetBuilder, y: Value) -> Value:
    """A classifier, tokens for a transformer, a detector's two branches, or the map itself."""
    form = b.size(0, 4)
    n, c = y.shape[0], y.channels
    if form == 0:
        return y
    if form == 1:
        return activation(b, branches(b, y))
    if form == 2:  # patches
        s = y.dim(2) * y.dim(3)
        if s <= 100 and c >= 4:
            tokens = b.transpose(b.reshape(y, n, c, s), 0, 2, 1)
            return linear(b, layer_norm(b, TOKEN_PARTS[b.size(0, 4)](b, tokens)), b.size(2, 8))
    pooled = global_pool(b, y)
    if form == 3 and b.chance():
        flat = b.op("Squeeze", [pooled.name, b.ints(2, 3)], [n, c])
    else:
        flat = b.op("Flatten", [pooled.name], [n, c], axis=1)
    classes = b.size(2, 11)
    if b.chance():
        return linear(b, flat, classes)
    transposed = b.size(0, 1)
    weight = b.weight((classes, c) if transposed else (c, classes), c)
    y = b.op("Gemm", [flat.name, weight, b.vector((classes,))], [n, classes], transB=transposed, alpha=b.pick(1.0, 0.5))
    return b.unary("Softmax", y, axis=-1) if b.chance(0.3) else y
