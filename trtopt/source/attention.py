"""Attention written out: the fused operators of ONNX and of ONNX Runtime as products, a mask and a softmax.

TensorRT for RTX 1.7.1 has one kernel for either form where it has one at all, and the written form is the safer one:
of ONNX's ``Attention`` it drops ``nonpad_kv_seqlen`` without a word, it does not build it in FP32, and a mask costs
prefill eight kernels more. Heads that share keys are written as exporters do, by Expand, which its kernel takes in. The
meaning of each operator is that of its kernel for CPUs in ONNX Runtime 1.31 (causal masks are aligned at the last
query and the last key), and tests compare the two.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from trtopt.graph import edit
from trtopt.source.written import Writer, WritingError, rank_of, width_of

LOWEST = float(np.finfo(np.float32).min)
"""What a score that is masked gets: saturated in FP16, it still has the weight 0 beside any other."""


@dataclass(frozen=True)
class Heads:
    """What attention is computed of.

    Attributes:
        query: [batch, heads, queries, size].
        key: [batch, key heads, keys, size].
        value: [batch, key heads, keys, value size].
        counts: The numbers of heads of queries and of keys.
        sizes: The sizes of a head of the keys and of the values.
        scale: What the scores are multiplied by; None for one over the root of a key's size.
        offset: The position of the first query among the keys, INT64, broadcast to [batch, 1, 1, 1]; None for 0. The
            last query is at the last key.
        causal: Whether a query sees the keys up to its own position only.
        window: How many keys before its own position a query sees, and how many behind it; None for all.
        length: How many keys of each sample there are, INT64, broadcast to [batch, 1, 1, 1]; None for all.
        masks: Each says which keys are seen (bool), or is added to the scores; broadcast to [batch, heads, queries,
            keys].
        softcap: Scores s become ``softcap * tanh(s / softcap)``; 0 for no change.
    """

    query: ir.Value
    key: ir.Value
    value: ir.Value
    counts: tuple[int, int]
    sizes: tuple[int, int]
    scale: float | None = None
    offset: ir.Value | None = None
    causal: bool = False
    window: tuple[int | None, int | None] = (None, None)
    length: ir.Value | None = None
    masks: tuple[ir.Value, ...] = ()
    softcap: float = 0.0


def attend(w: Writer, heads: Heads) -> ir.Value:
    """softmax(scale * Q K^T + mask) V, [batch, heads, queries, value size].

    Raises:
        WritingError: The heads do not fit each other.
    """
    if min(*heads.counts, *heads.sizes) < 1 or heads.counts[0] % heads.counts[1]:
        raise WritingError(f"{heads.counts[0]} heads of size {heads.sizes[0]} do not share {heads.counts[1]}")
    key, value = (_repeated(w, item, heads, at) for at, item in enumerate((heads.key, heads.value)))
    scale = 1 / math.sqrt(heads.sizes[0]) if heads.scale is None else heads.scale
    query = w.op("Mul", heads.query, w.number(scale, heads.query))
    scores = w.op("MatMul", query, w.transpose(key, 0, 1, 3, 2))
    if heads.softcap:
        cap = w.number(heads.softcap, query)
        scores = w.op("Mul", w.op("Tanh", w.op("Div", scores, cap)), cap)
    seen = _positions(w, heads)
    for mask in heads.masks:
        if mask.dtype is ir.DataType.BOOL:
            seen.append(mask)
        else:
            scores = w.op("Add", scores, mask)
    if seen:
        both = functools.reduce(lambda a, b: w.op("And", a, b), seen)
        scores = w.op("Add", scores, w.op("Where", both, w.number(0.0, query), w.number(LOWEST, query)))
    return w.op("MatMul", w.op("Softmax", scores, axis=-1), value)


def _repeated(w: Writer, value: ir.Value, heads: Heads, at: int) -> ir.Value:
    """Each head of keys as often as queries share it."""
    many, few = heads.counts
    if many == few:
        return value
    copies = w.op("Expand", w.op("Unsqueeze", value, w.ints(2)), w.ints(1, 1, many // few, 1, 1))
    return w.reshape(copies, 0, many, -1, heads.sizes[at])


def _positions(w: Writer, heads: Heads) -> list[ir.Value]:
    """The masks by position, each broadcast to [batch, 1, queries, keys]; none that masks nothing."""
    (before, behind), found = heads.window, list[ir.Value]()
    causal = heads.causal and _axis(heads.query, 2) != 1  # a single query is the last one, and sees all keys before it
    if not (causal or heads.length is not None or before is not None or behind is not None):
        return found
    keys = w.reshape(_range(w, w.length(heads.key, 2)), 1, 1, 1, -1)
    if heads.length is not None:
        found.append(w.op("Less", keys, heads.length))
    if not (causal or before is not None or behind is not None):
        return found
    places = w.reshape(_range(w, w.length(heads.query, 2)), 1, 1, -1, 1)
    if heads.offset is not None:
        places = w.op("Add", places, heads.offset)
    if causal:
        found.append(w.op("LessOrEqual", keys, places))
    if before is not None:
        found.append(w.op("LessOrEqual", w.op("Sub", places, w.scalar(before)), keys))
    if behind is not None:
        found.append(w.op("LessOrEqual", keys, w.op("Add", places, w.scalar(behind))))
    return found


def _range(w: Writer, count: ir.Value) -> ir.Value:
    return w.op("Range", w.scalar(0), count, w.scalar(1))


def split(w: Writer, value: ir.Value, heads: int, size: int) -> ir.Value:
    """[batch, tokens, heads * size] as [batch, heads, tokens, size]."""
    return w.transpose(w.reshape(value, 0, 0, heads, size), 0, 2, 1, 3)


def joined(w: Writer, value: ir.Value, heads: int, size: int) -> ir.Value:
    """[batch, heads, tokens, size] as [batch, tokens, heads * size]."""
    return w.reshape(w.transpose(value, 0, 2, 1, 3), 0, 0, heads * size)


def standard(w: Writer) -> None:
    """``Attention`` of ONNX, opset 23 and later."""
    query, key, value = (w.needed(index) for index in range(3))
    flat = rank_of(query, 3 if w.int_of("q_num_heads", 0) else 4) == 3
    counts = w.int_of("q_num_heads", 0), w.int_of("kv_num_heads", 0)
    if not flat:
        counts = _axis(query, 1), _axis(key, 1)
    if not all(counts) or counts[0] % counts[1]:
        raise WritingError("the numbers of its heads are not known, or do not fit")
    sizes = width_of(key) // (counts[1] if flat else 1), width_of(value) // (counts[1] if flat else 1)
    if flat:
        query = split(w, query, counts[0], width_of(query) // counts[0])
        key, value = (split(w, item, counts[1], size) for item, size in zip((key, value), sizes, strict=True))
    past, offset, length = (w.input(4), w.input(5)), None, w.input(6)
    if past[0] is not None and past[1] is not None:
        key, value = w.op("Concat", past[0], key, axis=2), w.op("Concat", past[1], value, axis=2)
        offset = w.length(past[0], 2)
    causal, mask = bool(w.int_of("is_causal", 0)), w.input(3)
    if length is not None:
        length = w.reshape(length, -1, 1, 1, 1)
        offset = w.op("Sub", length, w.length(query, 2))
    windows = (w.int_of("left_window_size", -1), w.int_of("right_window_size", -1))
    heads = Heads(
        query,
        key,
        value,
        counts,
        sizes,
        scale=w.float_of("scale", 0.0) or None,
        offset=offset,
        causal=causal,
        window=(windows[0] if windows[0] >= 0 else None, windows[1] if windows[1] >= 0 else None),
        length=length,
        masks=() if mask is None else (_as_wide(w, mask, key),),
        softcap=w.float_of("softcap", 0.0),
    )
    if len(w.node.outputs) > 3 and w.node.outputs[3].uses():
        raise WritingError("its scores are read")
    found_values = attend(w, heads)
    result = joined(w, found_values, counts[0], sizes[1]) if flat else found_values
    w.replace(result, key, value)


def _axis(value: ir.Value, axis: int) -> int:
    """The size of an axis; 0 where it is not known."""
    dims = edit.dims_of_value(value)
    found = None if dims is None else dims[axis]
    return found if isinstance(found, int) else 0


def _as_wide(w: Writer, mask: ir.Value, key: ir.Value) -> ir.Value:
    """A mask that is shorter than the keys filled up: what it does not reach is not seen."""
    have, want = edit.dims_of_value(mask), edit.dims_of_value(key)
    if (
        not have
        or not want
        or not isinstance(have[-1], int)
        or not isinstance(want[2], int)
        or have[-1] in (1, want[2])
    ):
        return mask
    pads = w.ints(*[0] * (2 * len(have) - 1), want[2] - have[-1])
    if mask.dtype is ir.DataType.BOOL:
        return w.op("Pad", mask, pads)
    return w.op("Pad", mask, pads, w.number(LOWEST, mask))
