"""The recipes around attention leave fewer kernels in blocks of a vision transformer: [8, 197, 768], 12 heads."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest

from trtopt.engine.backend import TENSORRT_RTX
from trtopt.graph.artifact import ModelArtifact
from trtopt.hardware.spec import find_gpu
from trtopt.judge.judges import judge_for
from trtopt.report.schema.steps import Cost
from trtopt.rewrite.driver import run
from trtopt.rewrite.protocol import Target
from trtopt.source.onnx_file import load
from trtopt.support.precision import Precision

pytest.importorskip("tensorrt_rtx", reason="TensorRT for RTX is not installed")

_NORM = "LayerNormalization(x, scale, offset)"
_PROJECTION = (
    "{0}0 = MatMul(n, w{0}) {0}1 = Add({0}0, b{0}) {0}2 = Reshape({0}1, heads) "
    "{0}3 = Transpose <perm = [0, 2, {1}]> ({0}2)"
)
_ATTENTION = (
    " ".join(_PROJECTION.format(*each) for each in (("q", "1, 3"), ("k", "3, 1"), ("v", "1, 3")))
    + " s = MatMul(q3, k3) t = Mul(s, size) p = Softmax <axis = -1> (t) o0 = MatMul(p, v3) "
    "o1 = Transpose <perm = [0, 2, 1, 3]> (o0) o2 = Reshape(o1, flat) o3 = MatMul(o2, wo) o4 = Add(o3, bo) "
    "r = Add({}, o4)"
)
_MLP = "m1 = MatMul(m0, wu) m2 = Add(m1, bu) m3 = Gelu(m2) m4 = MatMul(m3, wd) m5 = Add(m4, bd) "
_PRE = f"n = {_NORM} {_ATTENTION.format('x')} m0 = {_NORM.replace('x', 'r')} {_MLP} y = Add(r, m5)"
_POST = f"n = {_NORM} {_ATTENTION.format('n')} m0 = {_NORM.replace('x', 'r')} {_MLP} y = Add(m0, m5)"

_ROTATION = (
    "{0}0 = MatMul(n, w{0}) {0}1 = Add({0}0, b{0}) {0}2 = Reshape({0}1, heads) "
    "{0}4 = Transpose <perm = [0, 2, 1, 3]> ({0}2) {0}5, {0}6 = Split <axis = 3, num_outputs = 2> ({0}4) "
    "{0}7 = Neg({0}6) {0}8 = Concat <axis = 3> ({0}7, {0}5) {0}9 = Mul({0}8, sin) {0}3 = Add({0}4, {0}9)"
)
_NORMALIZED = (
    "{0}0 = MatMul(n, w{0}) {0}2 = Reshape({0}0, heads) {0}4 = LayerNormalization({0}2, one) "
    "{0}3 = Transpose <perm = [0, 2, {1}]> ({0}4)"
)


def turned(form: str, scores: str = "s = MatMul(q3, k3) t = Mul(s, size)") -> str:
    """A block whose queries and keys go through more than a product."""
    keys = form.format("k", "3, 1")
    if form is _ROTATION:
        keys = keys.replace("k3 = ", "m7 = ") + " k3 = Transpose <perm = [0, 1, 3, 2]> (m7)"
    body = f"{form.format('q', '1, 3')} {keys} {_ATTENTION[_ATTENTION.index('v0 =') :].format('x')}"
    body = body.replace("s = MatMul(q3, k3) t = Mul(s, size)", scores)
    return f"n = {_NORM} {body} m0 = {_NORM.replace('x', 'r')} {_MLP} y = Add(r, m5)"


def blocks(folder: Path, body: str, count: int = 3, size: int = 64) -> ModelArtifact:
    text, last = "", "x"
    for index in range(count):
        named = re.sub(r"\b(y|n|r|s|t|p|[qkv][0-9]|o[0-4]|m[0-9])\b", rf"\1_{index}", body)
        text, last = text + re.sub(r"\bx\b", last, named) + " ", f"y_{index}"
    model = onnx.parser.parse_model(
        '<ir_version: 9, opset_import: ["" : 20]> g (float[8, 197, 768] x) => (float[8, 197, 768] y) '
        f"<int64[4] heads = {{0, 0, 12, {size}}}, int64[3] flat = {{0, 0, {12 * size}}}, "
        f"float size = {{{size**-0.5}}}> {{" + text + f"y = LayerNormalization({last}, scale, offset) }}"
    )
    rng = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {
        **{f"w{name}": (768, 12 * size) for name in ("q" if "wkv" in body else "qkv")},
        **({"wkv": (768, 24 * size)} if "wkv" in body else {}),
        **{f"b{name}": (12 * size,) for name in "qkv"},
        "wo": (12 * size, 768),
        **{f"w{name}": (768, 3072) for name in ("ug" if "wg" in body else "u")},
        "wd": (3072, 768),
    }
    shapes.update({**{f"b{name}": (768,) for name in "od"}, "bu": (3072,), "scale": (768,), "offset": (768,)})
    shapes.update({"one": (size,)} if "one" in body else {"sin": (197, size)} if "sin" in body else {})
    for name, shape in shapes.items():
        array = rng.standard_normal(shape, dtype=np.float32) * 0.03 + (name == "scale")
        model.graph.initializer.append(onnx.numpy_helper.from_array(array.astype(np.float32), name))
    onnx.save(model, folder / "m.onnx")
    return load(folder / "m.onnx")


def costs(artifact: ModelArtifact, *recipes: str) -> list[Cost]:
    """The cost without recipes, and with each."""
    target, found = Target("tensorrt-rtx", "fp16"), []
    with judge_for(TENSORRT_RTX, find_gpu("L4"), Precision.FP16) as judge:
        for names in ("none", *recipes):
            model = run(artifact, recipes=names, strict=True, target=target).artifact.model
            found.append(judge.price(model, inner=True).total)
    return found


@pytest.fixture(scope="module")
def pre_norm(tmp_path_factory: pytest.TempPathFactory) -> list[Cost]:
    """Without recipes; with the biases moved, carried, and carried with the tokens first."""
    both = "normalized-qkv-bias,batch-first-attention"
    return costs(blocks(tmp_path_factory.mktemp("pre"), _PRE), "qkv-bias", "normalized-qkv-bias", both)


def test_biases_behind_a_normalization_cost_no_kernel(pre_norm: list[Cost]) -> None:
    plain, moved, carried, _ = pre_norm
    assert moved.kernels <= plain.kernels - 4
    assert carried.kernels <= moved.kernels - 3
    assert carried.bytes < moved.bytes < plain.bytes
    assert carried.predicted_us < plain.predicted_us


def test_where_a_residual_needs_the_normalized_value_it_is_restored_in_a_kernel_that_exists(tmp_path: Path) -> None:
    plain, moved, carried = costs(blocks(tmp_path, _POST), "qkv-bias", "normalized-qkv-bias")
    assert moved.kernels <= plain.kernels - 4
    assert moved.syncs < plain.syncs
    assert carried.kernels < moved.kernels
    assert carried.predicted_us < moved.predicted_us


def test_tokens_first_saves_the_kernels_at_the_borders(pre_norm: list[Cost]) -> None:
    _, _, carried, turned = pre_norm
    assert turned.kernels <= carried.kernels - 2
    assert turned.syncs == 0
    assert turned.bytes < carried.bytes
    assert turned.predicted_us < carried.predicted_us


def test_tokens_that_each_attention_turns_stay_first(tmp_path: Path) -> None:
    """As torch's MultiheadAttention with the batch first: each block turns its tokens and turns them back."""
    body = _PRE.replace("(n, w", "(m8, w").replace("q0 =", "m8 = Transpose <perm = [1, 0, 2]> (n) q0 =", 1)
    body = body.replace("[0, 2, 1, 3]> (o0)", "[2, 0, 1, 3]> (o0)").replace("[0, 2, 1, 3]", "[1, 2, 0, 3]")
    body = body.replace("[0, 2, 3, 1]", "[1, 2, 3, 0]")
    body = body.replace("Add(x, o4)", "Add(x, m9)").replace("r = ", "m9 = Transpose <perm = [1, 0, 2]> (o4) r = ")
    plain, turned = costs(blocks(tmp_path, body), "batch-first-attention")
    assert turned.kernels <= plain.kernels - 3
    assert turned.bytes < 0.9 * plain.bytes and turned.predicted_us < plain.predicted_us


def test_heads_that_are_no_multiple_of_eight_are_read_in_place(tmp_path: Path) -> None:
    """The kernels go that pad queries, keys and values and cut the result, four per block."""
    artifact = blocks(tmp_path, _PRE, count=2, size=36)
    _, narrow, wide = costs(artifact, "normalized-qkv-bias", "aligned-heads,normalized-qkv-bias")
    assert wide.kernels <= narrow.kernels - 2 * 4 and wide.bytes < 0.95 * narrow.bytes


def test_values_beside_rotated_queries_and_keys_are_read_in_place(tmp_path: Path) -> None:
    first = "batch-first-attention"  # by itself each block turns its tokens at both ends
    _, plain, moved = costs(blocks(tmp_path, turned(_ROTATION), count=2), first, f"qkv-bias,{first}")
    assert moved.kernels <= plain.kernels - 2
    assert moved.bytes < plain.bytes and moved.predicted_us < plain.predicted_us


def test_normalized_keys_that_are_not_scaled_are_written_where_attention_reads_them(tmp_path: Path) -> None:
    scores = "q9 = Mul(q3, half) k9 = Mul(k3, half) t = MatMul(q9, k9)".replace("half", "size")
    plain, scaled = costs(blocks(tmp_path, turned(_NORMALIZED, scores), count=2), "scaled-keys")
    assert scaled.kernels <= plain.kernels - 2
    assert scaled.bytes < plain.bytes and scaled.predicted_us < plain.predicted_us


def test_keys_packed_with_values_that_are_not_scaled_are_written_where_attention_reads_them(tmp_path: Path) -> None:
    """Keys and values by one projection, queries by another, as torch's attention is exported."""
    body = _PRE.replace("k0 = MatMul(n, wk)", "m9 = MatMul(n, wkv) k0, v0 = Split <axis = 2, num_outputs = 2> (m9)")
    body = body.replace("v0 = MatMul(n, wv) ", "")
    body = body.replace(
        "s = MatMul(q3, k3) t = Mul(s, size)", "q9 = Mul(q3, size) k9 = Mul(k3, size) t = MatMul(q9, k9)"
    )
    plain, scaled = costs(blocks(tmp_path, body, count=2), "scaled-keys")
    assert scaled.kernels <= plain.kernels - 2
    assert scaled.bytes < plain.bytes and scaled.predicted_us < plain.predicted_us


def test_capped_scores_are_capped_inside_the_kernel_of_attention(tmp_path: Path) -> None:
    capped = _PRE.replace("t = Mul(s, size)", "m6 = Mul(s, size) m7 = Tanh(m6) t = Div(m7, size)")
    plain, fused = costs(blocks(tmp_path, capped, count=2), "capped-scores")
    assert fused.kernels <= plain.kernels - 2 * 2
    assert fused.bytes < 0.8 * plain.bytes and fused.predicted_us < plain.predicted_us


def test_gated_gelu_is_in_the_kernel_of_a_product(tmp_path: Path) -> None:
    gated = _PRE.replace(
        "m2 = Add(m1, bu) m3 = Gelu(m2)", 'm6 = Gelu <approximate = "tanh"> (m1) m2 = MatMul(m0, wg) m3 = Mul(m6, m2)'
    )
    plain, fused = costs(blocks(tmp_path, gated, count=2), "sigmoid-after-product")
    assert fused.bytes < plain.bytes and fused.predicted_us < plain.predicted_us
