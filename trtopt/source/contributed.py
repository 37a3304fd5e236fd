"""Operators of ONNX Runtime (domain com.microsoft) in operators of ONNX.

Their meaning is that of ONNX Runtime 1.31 (docs/ContribOperators.md and its kernels for CPUs): tests compare the two.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx_ir as ir

from trtopt.graph import edit
from trtopt.source.attention import Heads, attend, joined, split
from trtopt.source.written import Writer, WritingError, rank_of, width_of


def gelu(w: Writer) -> None:
    """``Gelu``, and ``BiasGelu`` with a bias before it."""
    w.replace(w.op("Gelu", _biased(w, w.needed(0), w.input(1))))


def fast_gelu(w: Writer) -> None:
    """``FastGelu``: by tanh."""
    w.replace(w.op("Gelu", _biased(w, w.needed(0), w.input(1)), approximate="tanh"))


def quick_gelu(w: Writer) -> None:
    """``QuickGelu``: x * sigmoid(alpha * x)."""
    x = w.needed(0)
    w.replace(w.op("Mul", x, w.op("Sigmoid", w.op("Mul", x, w.number(w.float_of("alpha", 1.702), x)))))


def fused_matmul(w: Writer) -> None:
    """``FusedMatMul``: a product with the last two axes of its operands transposed, and a factor."""
    a, b = w.needed(0), w.needed(1)
    if w.int_of("transBatchA", 0) or w.int_of("transBatchB", 0):
        raise WritingError("it transposes its batch")
    operands = [_swapped(w, value) if w.int_of(name, 0) else value for value, name in ((a, "transA"), (b, "transB"))]
    alpha, product = w.float_of("alpha", 1.0), w.op("MatMul", *operands)
    w.replace(product if alpha == 1.0 else w.op("Mul", product, w.number(alpha, a)))


def _swapped(w: Writer, value: ir.Value) -> ir.Value:
    if value.shape is None:
        raise WritingError(f"the rank of {value.name} is not known")
    axes = list(range(len(value.shape)))
    return w.transpose(value, *axes[:-2], axes[-1], axes[-2])


def _biased(w: Writer, value: ir.Value, bias: ir.Value | None) -> ir.Value:
    return value if bias is None else w.op("Add", value, bias)


def _rms_norm(w: Writer, x: ir.Value, gain: ir.Value) -> ir.Value:
    """x / sqrt(mean(x^2) + epsilon) * gain, over the last axis, as exporters write it."""
    mean = w.op("ReduceMean", w.op("Mul", x, x), w.ints(-1), keepdims=1)
    root = w.op("Sqrt", w.op("Add", mean, w.number(w.float_of("epsilon", 1e-5), x)))
    return w.op("Mul", w.op("Div", x, root), gain)


def simplified_norm(w: Writer) -> None:
    """``SimplifiedLayerNormalization``, which ONNX Runtime has in the default domain."""
    if w.int_of("axis", -1) not in (-1, rank_of(w.needed(0), 0) - 1):
        raise WritingError("it normalizes several axes")
    w.replace(_rms_norm(w, w.needed(0), w.needed(1)))


def skip_simplified_norm(w: Writer) -> None:
    """``SkipSimplifiedLayerNormalization``: of a sum, which is its last output."""
    total = _biased(w, w.op("Add", w.needed(0), w.needed(1)), w.input(3))
    w.replace(_rms_norm(w, total, w.needed(2)), None, None, total)


def skip_norm(w: Writer) -> None:
    """``SkipLayerNormalization``: of a sum, which is its last output."""
    total = _biased(w, w.op("Add", w.needed(0), w.needed(1)), w.input(4))
    found = w.op("LayerNormalization", total, w.needed(2), w.input(3), axis=-1, epsilon=w.float_of("epsilon", 1e-12))
    w.replace(found, None, None, total)


def gather_blocks(w: Writer) -> None:
    """``GatherBlockQuantized``: slices of a table in blocks of 4 or 8 bits; the table becomes a wide one."""
    numbers, scales = (edit.constant_of(w.needed(index)) for index in (0, 2))
    zero, bits = w.input(3), w.int_of("bits", 4)
    points = None if zero is None else edit.constant_of(zero)
    if numbers is None or scales is None or bits not in (4, 8) or (zero is not None and points is None):
        raise WritingError("its table, scales or zero points are computed, or have neither 4 nor 8 bits")
    centre = 0.0
    if numbers.dtype == np.uint8:
        centre = float(1 << (bits - 1))
        if bits == 4:
            numbers, points = _nibbles(numbers), None if points is None else _nibbles(points)
    axis, block = w.int_of("quantize_axis", 1) % numbers.ndim, w.int_of("block_size", 128)
    shape = numbers.shape

    def spread(blocks: np.ndarray) -> np.ndarray:
        found = np.repeat(blocks.astype(np.float32), block, axis=axis)[tuple(slice(size) for size in shape)]
        if found.shape != shape:
            raise WritingError("the sizes of its scales or zero points do not fit its table and block_size")
        return found

    table = (numbers.astype(np.float32) - (centre if points is None else spread(points))) * spread(scales)
    wide = w.op("Constant", value=ir.tensor(table.astype(scales.dtype)))
    w.replace(w.op("Gather", wide, w.needed(1), axis=w.int_of("gather_axis", 0)))


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """Two numbers of four bits for each byte of the last axis, the low one first."""
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)


def rotary(w: Writer) -> None:
    """``RotaryEmbedding`` of ONNX Runtime: input, position_ids, cos_cache, sin_cache."""
    x, places, cos, sin = (w.needed(index) for index in range(4))
    if w.int_of("is_packed_batching", 0) or w.float_of("scale", 1.0) != 1.0:
        raise WritingError("its batch is packed, or its positions are scaled")
    if rank_of(places, 2) == 1:  # the position of the first token
        tokens = w.length(x, -2)
        places = w.op("Add", w.op("Range", w.scalar(0), tokens, w.scalar(1)), places)
    _turn(w, x, (cos, sin), places)


def standard_rotary(w: Writer) -> None:
    """``RotaryEmbedding`` of ONNX: X, cos_cache, sin_cache, position_ids; without the last, angles of each token.

    Compilers write it in the same operators, but repeat no angles [1, tokens, half] to the batch, as torch has them.
    """
    _turn(w, w.needed(0), (w.needed(1), w.needed(2)), w.input(3))


def _turn(w: Writer, x: ir.Value, tables: tuple[ir.Value, ir.Value], places: ir.Value | None) -> None:
    flat, heads, turned = rank_of(x, 4) == 3, w.int_of("num_heads", 0), w.int_of("rotary_embedding_dim", 0)
    if flat:
        size = width_of(x) // heads if heads else turned or 2 * width_of(tables[0])
        heads = heads or width_of(x) // size
        x = split(w, x, heads, size)
    else:
        size = width_of(x)
    found = rotated(w, x, tables, places, (turned or size, size), bool(w.int_of("interleaved", 0)))
    w.replace(joined(w, found, heads, size) if flat else found)


def rotated(
    w: Writer,
    x: ir.Value,
    tables: tuple[ir.Value, ir.Value],
    places: ir.Value | None,
    sizes: tuple[int, int],
    interleaved: bool,
) -> ir.Value:
    """Heads [batch, heads, tokens, size] turned by their positions [batch, tokens] or [tokens].

    Args:
        tables: Cosines and sines [positions, half of what is turned]; without positions [batch or 1, tokens, half].
        sizes: How much of a head is turned, from its beginning on, and the size of a head.
    """
    turned, size = sizes
    angles = tables if places is None else tuple(w.op("Gather", table, places, axis=0) for table in tables)
    cos, sin = (w.op("Unsqueeze", table, w.ints(-3)) for table in angles)
    part, rest = (x, None) if turned == size else w.ops("Split", 2, x, w.ints(turned, size - turned), axis=-1)
    if interleaved:
        pairs = w.reshape(part, 0, 0, 0, turned // 2, 2)
        first, second = (w.op("Squeeze", each, w.ints(-1)) for each in w.ops("Split", 2, pairs, axis=-1, num_outputs=2))
    else:
        first, second = w.ops("Split", 2, part, axis=-1, num_outputs=2)
    real = w.op("Sub", w.op("Mul", first, cos), w.op("Mul", second, sin))
    imaginary = w.op("Add", w.op("Mul", first, sin), w.op("Mul", second, cos))
    if interleaved:
        both = (w.op("Unsqueeze", each, w.ints(-1)) for each in (real, imaginary))
        found = w.reshape(w.op("Concat", *both, axis=-1), 0, 0, 0, turned)
    else:
        found = w.op("Concat", real, imaginary, axis=-1)
    return found if rest is None else w.op("Concat", found, rest, axis=-1)


def multi_head(w: Writer) -> None:
    """``MultiHeadAttention``: query, key, value, bias, key_padding_mask, attention_bias, past_key, past_value."""
    query, key, value, bias = (w.input(index) for index in range(4))
    heads = w.int_of("num_heads", 0)
    if query is None or key is None or value is None or rank_of(query, 3) != 3 or heads < 1:
        raise WritingError("its operands are packed")
    if any(w.input(index) is not None for index in (8, 9)) or len(w.node.outputs) > 3:
        raise WritingError("its cache is shared, or its scores are read")
    is_split = rank_of(key, 3) == 4  # an encoder's keys, [batch, heads, tokens, size]
    size = width_of(query) // heads
    value_size = width_of(value) // (1 if is_split else heads)
    if bias is not None:
        parts = w.ops("Split", 3, bias, w.ints(heads * size, heads * size, heads * value_size), axis=0)
        query = w.op("Add", query, parts[0])
        if not is_split:
            key, value = w.op("Add", key, parts[1]), w.op("Add", value, parts[2])
    query = split(w, query, heads, size)
    if not is_split:
        key, value = split(w, key, heads, size), split(w, value, heads, value_size)
    past, offset = (w.input(6), w.input(7)), None
    if past[0] is not None and past[1] is not None:
        key, value = w.op("Concat", past[0], key, axis=2), w.op("Concat", past[1], value, axis=2)
        offset = w.length(past[0], 2)
    found = _attended(w, Heads(query, key, value, (heads, heads), (size, value_size), offset=offset), w.input(4))
    w.replace(joined(w, found, heads, value_size), key, value)


def _attended(w: Writer, heads: Heads, padding: ir.Value | None) -> ir.Value:
    """Attention with what both operators have: a scale, a mask of keys, a bias of the scores, maybe causal."""
    masks = tuple(item for item in (_padding(w, padding), w.input(5)) if item is not None)
    scale, causal = w.float_of("scale", 0.0) or None, bool(w.int_of("unidirectional", 0))
    return attend(w, replace(heads, scale=scale, causal=causal, masks=masks))


def _padding(w: Writer, mask: ir.Value | None) -> ir.Value | None:
    """A mask of keys, INT32 [batch, keys] or [batch, queries, keys], as bool over [batch, heads, queries, keys]."""
    if mask is None:
        return None
    axes = {2: (1, 2), 3: (1,)}.get(rank_of(mask, 0))
    if axes is None:
        raise WritingError("its mask counts keys")
    found = w.op("Unsqueeze", w.op("Cast", mask, to=int(ir.DataType.BOOL)), w.ints(*axes))
    found.type = ir.TensorType(ir.DataType.BOOL)
    return found


def fused_attention(w: Writer) -> None:
    """``Attention``: input, one weight of queries, keys and values, its bias, mask_index, past, attention_bias."""
    x, weight, bias, past = w.needed(0), w.needed(1), w.input(2), w.input(4)
    heads = w.int_of("num_heads", 0)
    if (
        heads < 1
        or edit.ints_attribute(w.node, "qkv_hidden_sizes")
        or w.int_of("do_rotary", 0)
        or w.input(6) is not None
    ):
        raise WritingError("its heads have several sizes or are turned, or its cache is shared")
    width = width_of(weight) // 3
    parts = w.ops("Split", 3, _biased(w, w.op("MatMul", x, weight), bias), axis=-1, num_outputs=3)
    query, key, value = (split(w, part, heads, width // heads) for part in parts)
    offset, present = None, None
    if past is not None:
        before = [w.op("Squeeze", item, w.ints(0)) for item in w.ops("Split", 2, past, axis=0, num_outputs=2)]
        key, value = w.op("Concat", before[0], key, axis=2), w.op("Concat", before[1], value, axis=2)
        offset = w.length(before[0], 2)
    if len(w.node.outputs) > 1:
        present = w.op("Concat", *(w.op("Unsqueeze", item, w.ints(0)) for item in (key, value)), axis=0)
    found = _attended(
        w, Heads(query, key, value, (heads, heads), (width // heads, width // heads), offset=offset), w.input(3)
    )
    w.replace(joined(w, found, heads, width // heads), present)


def group_query(w: Writer) -> None:
    """``GroupQueryAttention``: query, key, value, past_key, past_value, seqlens_k, total_sequence_length, cos_cache,
    sin_cache, position_ids, attention_bias.

    The tokens of a batch are taken to be as many in each sample: new keys stand behind all of the past.
    """
    query, key, value = (w.input(index) for index in range(3))
    heads, few = w.int_of("num_heads", 0), w.int_of("kv_num_heads", 0)
    if query is None or heads < 1 or few < 1:
        raise WritingError("the numbers of its heads are not known")
    if w.input(11) is not None or w.int_of("smooth_softmax", 0) > 0 or w.int_of("kv_cache_bit_width", 0):
        raise WritingError("its softmax has a sink, or its cache is quantized")
    if key is None or value is None:
        size = width_of(query) // (heads + 2 * few)
        query, key, value = w.ops("Split", 3, query, w.ints(heads * size, few * size, few * size), axis=-1)
    else:
        size = width_of(query) // heads
    query, key, value = split(w, query, heads, size), split(w, key, few, size), split(w, value, few, size)
    past, offset = (w.input(3), w.input(4)), w.scalar(0)
    if past[0] is not None:
        offset = w.length(past[0], 2)
    if w.int_of("do_rotary", 0):
        places = w.input(9)
        if places is None:
            places = w.op("Add", w.op("Range", w.scalar(0), w.length(query, 2), w.scalar(1)), offset)
        tables = w.needed(7), w.needed(8)
        interleaved = bool(w.int_of("rotary_interleaved", 0))
        turned = 2 * width_of(tables[0])
        query, key = (rotated(w, item, tables, places, (turned, size), interleaved) for item in (query, key))
    if past[0] is not None and past[1] is not None:
        key, value = w.op("Concat", past[0], key, axis=2), w.op("Concat", past[1], value, axis=2)
    lengths = w.op("Cast", w.needed(5), to=int(ir.DataType.INT64))
    window = w.int_of("local_window_size", -1)
    bias = w.input(10)
    found = attend(
        w,
        Heads(
            query,
            key,
            value,
            (heads, few),
            (size, size),
            scale=w.float_of("scale", 0.0) or None,
            offset=offset,
            causal=True,
            window=(window - 1 if window > 0 else None, None),
            length=w.reshape(w.op("Add", lengths, w.scalar(1)), -1, 1, 1, 1),
            masks=() if bias is None else (bias,),
            softcap=w.float_of("softcap", 0.0),
        ),
    )
    w.replace(joined(w, found, heads, size), key, value)
