"""Small decoders with caches of keys and values, grown by Concat or updated in place."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser

VOCABULARY, HEADS, KEY_HEADS, SIZE, PLACES = 50, 4, 2, 8, 32
WIDTH, KEY_WIDTH = HEADS * SIZE, KEY_HEADS * SIZE

_BODY = """
 e = Gather(table, input_ids) pe = Gather(places, position_ids) x = Add(e, pe)
 n = LayerNormalization(x, gain, shift)
 q3 = MatMul(n, wq) k3 = MatMul(n, wk) v3 = MatMul(n, wv)
 q4 = Reshape(q3, heads) k4 = Reshape(k3, key_heads) v4 = Reshape(v3, key_heads)
 q = Transpose<perm = [0, 2, 1, 3]>(q4) k = Transpose<perm = [0, 2, 1, 3]>(k4) v = Transpose<perm = [0, 2, 1, 3]>(v4)
 {attention}
 at = Transpose<perm = [0, 2, 1, 3]>(a) a3 = Reshape(at, flat)
 o = MatMul(a3, wo) y = Add(o, x)
 h = MatMul(y, w1) g = Gelu<approximate = "tanh">(h) m = MatMul(g, w2) z = Add(y, m)
 logits = MatMul(z, head)
"""

_CONCAT = """decoder (int64[B, S] input_ids, int64[B, S] position_ids, {t}[B, {kv}, P, {d}] past_k,
  {t}[B, {kv}, P, {d}] past_v)
 => ({t}[B, S, {v}] logits, {t}[B, {kv}, T, {d}] present_k, {t}[B, {kv}, T, {d}] present_v)"""
_SCATTER = """decoder (int64[B, S] input_ids, int64[B, S] position_ids, {t}[B, {kv}, {n}, {d}] past_k,
  {t}[B, {kv}, {n}, {d}] past_v, int64[B] start, int64[B] used)
 => ({t}[B, S, {v}] logits, {t}[B, {kv}, {n}, {d}] present_k, {t}[B, {kv}, {n}, {d}] present_v)"""


def _save(path: Path, head: str, attention: str, dtype: str, opset: int) -> Path:
    sizes = {"t": dtype, "kv": KEY_HEADS, "d": SIZE, "v": VOCABULARY, "n": PLACES}
    text = (
        f'<ir_version: 10, opset_import: ["" : {opset}]> {head.format(**sizes)} {{{_BODY.format(attention=attention)}}}'
    )
    model = onnx.parser.parse_model(text)
    rng = np.random.default_rng(0)
    weights = {"table": (VOCABULARY, WIDTH), "places": (2 * PLACES, WIDTH), "wq": (WIDTH, WIDTH), "wo": (WIDTH, WIDTH)}
    weights |= {"wk": (WIDTH, KEY_WIDTH), "wv": (WIDTH, KEY_WIDTH), "w1": (WIDTH, 64), "w2": (64, WIDTH)}
    weights |= {"head": (WIDTH, VOCABULARY)}
    kind = np.float16 if dtype == "float16" else np.float32
    arrays = {name: (rng.standard_normal(shape) / np.sqrt(shape[0])).astype(kind) for name, shape in weights.items()}
    arrays |= {"gain": np.ones(WIDTH, kind), "shift": np.zeros(WIDTH, kind)}
    arrays["table"] *= np.sqrt(VOCABULARY).astype(kind)
    shapes = {"heads": [0, 0, HEADS, SIZE], "key_heads": [0, 0, KEY_HEADS, SIZE], "flat": [0, 0, WIDTH]}
    arrays |= {name: np.array(shape, np.int64) for name, shape in shapes.items()}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in arrays.items())
    onnx.save(model, path)
    return path


def concat_decoder(path: Path, dtype: str = "float") -> Path:
    """A decoder whose cache grows: [B, 2, P, 8] in, [B, 2, P + S, 8] out."""
    attention = "a, present_k, present_v = Attention<is_causal = 1>(q, k, v, , past_k, past_v)"
    return _save(path, _CONCAT, attention, dtype, 23)


def scatter_decoder(path: Path, dtype: str = "float") -> Path:
    """A decoder whose cache of 32 tokens is updated in place, from ``start`` on; ``used`` counts with the new ones."""
    attention = """present_k = TensorScatter<axis = 2>(past_k, k, start)
 present_v = TensorScatter<axis = 2>(past_v, v, start)
 a = Attention<is_causal = 1>(q, present_k, present_v, , , , used)"""
    return _save(path, _SCATTER, attention, dtype, 24)


def scatter_shapes(batch: int, tokens: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the inputs of :func:`scatter_decoder`."""
    cache = (batch, KEY_HEADS, PLACES, SIZE)
    ids = (batch, tokens)
    return {
        "input_ids": ids,
        "position_ids": ids,
        "past_k": cache,
        "past_v": cache,
        "start": (batch,),
        "used": (batch,),
    }


def concat_shapes(batch: int, tokens: int, past: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the inputs of :func:`concat_decoder`."""
    cache = (batch, KEY_HEADS, past, SIZE)
    return {"input_ids": (batch, tokens), "position_ids": (batch, tokens), "past_k": cache, "past_v": cache}
