"""Attention written out in other operators computes what ONNX Runtime's kernel computes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from test_source_opset import run_file

from trtopt.source.onnx_file import load
from trtopt.source.save import save_model


def floats(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape, dtype=np.float32)


def check(tmp_path: Path, text: str, opset: int = 24, **feeds: np.ndarray) -> list[str]:
    """The operators of the loaded model, whose outputs are those of the file."""
    imports = f'"" : {opset}, "com.microsoft" : 1'
    return kinds_when_equal(
        tmp_path, onnx.parser.parse_model(f"<ir_version: 10, opset_import: [{imports}]> {text}"), **feeds
    )


def kinds_when_equal(tmp_path: Path, model: onnx.ModelProto, **feeds: np.ndarray) -> list[str]:
    """As :func:`check`, of a model."""
    before, after = tmp_path / "before.onnx", tmp_path / "after.onnx"
    onnx.save(model, before)
    save_model(load(before).model, after)
    for expected, found in zip(run_file(before, feeds), run_file(after, feeds), strict=True):
        assert expected.dtype == found.dtype and expected.shape == found.shape
        np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)
    return [node.op_type for node in onnx.load(after).graph.node]


@pytest.mark.parametrize(("tokens", "past"), [(3, 5), (1, 5), (3, 0)])
@pytest.mark.parametrize("attributes", ["is_causal = 1", "softcap = 3.0, scale = 0.3"])
def test_with_a_past(tmp_path: Path, tokens: int, past: int, attributes: str) -> None:
    text = f"""g (float[B, 4, S, 16] q, float[B, 2, S, 16] k, float[B, 2, S, 8] v, float[B, 2, P, 16] pk,
        float[B, 2, P, 8] pv)
        => (float[B, 4, S, 8] y, float[B, 2, T, 16] nk, float[B, 2, T, 8] nv)
        {{ y, nk, nv = Attention<{attributes}>(q, k, v, , pk, pv) }}"""
    feeds = {"q": floats(2, 4, tokens, 16), "k": floats(2, 2, tokens, 16), "v": floats(2, 2, tokens, 8)}
    kinds = check(tmp_path, text, **feeds, pk=floats(2, 2, past, 16), pv=floats(2, 2, past, 8))
    assert "Attention" not in kinds and kinds.count("Concat") == 2


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("causal", [0, 1])
def test_of_a_cache_that_is_filled_in_part(tmp_path: Path, tokens: int, causal: int) -> None:
    text = f"""g (float[B, 4, S, 16] q, float[B, 2, L, 16] k, float[B, 2, L, 16] v, int64[B] n, bool[B, 1, S, L] m)
        => (float[B, 4, S, 16] y) {{ y = Attention<is_causal = {causal}>(q, k, v, m, , , n) }}"""
    mask = floats(2, 1, tokens, 8) > -1
    mask[..., 0] = True
    lengths = np.array([5, 7])
    check(tmp_path, text, q=floats(2, 4, tokens, 16), k=floats(2, 2, 8, 16), v=floats(2, 2, 8, 16), n=lengths, m=mask)


@pytest.mark.parametrize("mask", ["float[S, S] m", "bool[B, 1, S, S] m"])
def test_of_tokens_in_one_row(tmp_path: Path, mask: str) -> None:
    text = f"""g (float[B, S, 64] q, float[B, S, 32] k, float[B, S, 32] v, {mask}) => (float[B, S, 64] y)
        {{ y = Attention<q_num_heads = 4, kv_num_heads = 2>(q, k, v, m) }}"""
    given = floats(5, 5) if mask.startswith("float") else floats(2, 1, 5, 5) > -2
    check(tmp_path, text, opset=23, q=floats(2, 5, 64), k=floats(2, 5, 32), v=floats(2, 5, 32), m=given)


def test_scores_that_are_read_stay_an_attention(tmp_path: Path) -> None:
    text = """g (float[B, 4, S, 16] q, float[B, 4, S, 16] k, float[B, 4, S, 16] v)
        => (float[B, 4, S, 16] y, float[B, 4, S, S] s) { y, , , s = Attention(q, k, v) }"""
    kinds = check(tmp_path, text, opset=23, q=floats(1, 4, 3, 16), k=floats(1, 4, 3, 16), v=floats(1, 4, 3, 16))
    assert kinds == ["Attention"]


def test_heads_that_a_computed_shape_leaves_open_are_counted(tmp_path: Path) -> None:
    """As torch writes them where batch and tokens may be of any size: [batch, tokens, -1, 16]."""
    text = """g (float[B, S, 64] x, float[B, S, 32] k, float[B, S, 8] c, float[B, S, 8] s) => (float[B, S, 64] y) {
        n = Shape<start = 0, end = 2>(x)
        rest = Constant<value_ints = [-1, 16]>()
        shape = Concat<axis = 0>(n, rest)
        xs = Reshape(x, shape)
        ks = Reshape(k, shape)
        heads = Transpose<perm = [0, 2, 1, 3]>(xs)
        turned = RotaryEmbedding(heads, c, s)
        q = Identity(turned)
        kv = Transpose<perm = [0, 2, 1, 3]>(ks)
        a = Attention(q, kv, kv)
        t = Transpose<perm = [0, 2, 1, 3]>(a)
        wide = Constant<value_ints = [64]>()
        back = Concat<axis = 0>(n, wide)
        y = Reshape(t, back) }"""
    feeds = {"x": floats(2, 3, 64), "k": floats(2, 3, 32), "c": floats(2, 3, 8), "s": floats(2, 8, 3).reshape(2, 3, 8)}
    assert "Attention" not in check(tmp_path, text, **feeds)
