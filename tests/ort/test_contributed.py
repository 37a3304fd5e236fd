"""Operators of ONNX Runtime written in those of ONNX compute what its kernels compute."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import numpy_helper
from test_attention_written import check, floats, kinds_when_equal
from test_source_opset import run_file

from trtopt.source.onnx_file import load
from trtopt.source.save import save_model
from trtopt.support.ort_session import OrtSession

_ANGLES = np.arange(32)[:, None] / 10.0 ** np.arange(8)[None]
COS, SIN = np.cos(_ANGLES).astype(np.float32), np.sin(_ANGLES).astype(np.float32)
PAST = "float[B, 2, P, 16] pk, float[B, 2, P, 16] pv"
PRESENT = "float[B, 2, T, 16] nk, float[B, 2, T, 16] nv"


@pytest.mark.parametrize(
    "node",
    [
        "y = com.microsoft.Gelu(x)",
        "y = com.microsoft.FastGelu(x, b)",
        "y = com.microsoft.BiasGelu(x, b)",
        "y = com.microsoft.QuickGelu<alpha = 1.5>(x)",
        "y = com.microsoft.FusedMatMul<transB = 1, alpha = 0.5>(x, x)",
        "y = SimplifiedLayerNormalization<epsilon = 0.01>(x, b)",
        "y = com.microsoft.SkipLayerNormalization(x, x, b, b, b)",
        "y, _, _, s = com.microsoft.SkipLayerNormalization<epsilon = 0.01>(x, x, b) z = Add(y, s)",
        "y, _, _, s = com.microsoft.SkipSimplifiedLayerNormalization(x, x, b, b) z = Add(y, s)",
    ],
)
def test_of_tokens(tmp_path: Path, node: str) -> None:
    node, name = node.replace("_, _", ", "), "z" if "z =" in node else "y"
    text = f"g (float[B, S, 8] x, float[8] b) => (float[B, S, M] {name}) {{ {node} }}"
    kinds = check(tmp_path, text, opset=21, x=floats(2, 3, 8), b=floats(8))
    assert "com.microsoft" not in " ".join(kinds) and "SkipLayerNormalization" not in kinds


@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize(("shape", "turned"), [("B, S, 64", 0), ("B, 4, S, 16", 0), ("B, S, 64", 8)])
@pytest.mark.parametrize("first", [True, False])
def test_rotary_embedding(tmp_path: Path, interleaved: int, shape: str, turned: int, first: bool) -> None:
    places = "int64[1] p" if first else "int64[B, S] p"
    text = f"""g (float[{shape}] x, {places}, float[M, K] c, float[M, K] s) => (float[{shape}] y)
      {{ y = com.microsoft.RotaryEmbedding<interleaved = {interleaved}, num_heads = 4, rotary_embedding_dim = {turned}>
         (x, p, c, s) }}"""
    if not turned and shape == "B, 4, S, 16":
        text = text.replace(", num_heads = 4, rotary_embedding_dim = 0", "")
    sizes = {"B": 2, "S": 3}
    x = floats(*(sizes.get(item) or int(item) for item in shape.split(", ")))
    half = (turned or 16) // 2
    given = np.array([5]) if first else np.array([[1, 2, 3], [4, 5, 6]])
    kinds = check(tmp_path, text, opset=21, x=x, p=given, c=COS[:, :half].copy(), s=SIN[:, :half].copy())
    assert "RotaryEmbedding" not in kinds


def _standard_rotary(shape: str, turned: int, interleaved: int, places: bool) -> str:
    heads = ", num_heads = 4" if shape == "B, S, 64" else ""
    inputs, operands = ("int64[B, S] p, float[M, K] c, float[M, K] s", "x, c, s, p")
    if not places:
        inputs, operands = "float[C, S, K] c, float[C, S, K] s", "x, c, s"
    return f"""g (float[{shape}] x, {inputs}) => (float[{shape}] y) {{
      y = RotaryEmbedding<interleaved = {interleaved}{heads}, rotary_embedding_dim = {turned}>({operands}) }}"""


@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize(
    ("shape", "turned"), [("B, S, 64", 0), ("B, 4, S, 16", 0), ("B, S, 64", 8), ("B, 4, S, 16", 8)]
)
@pytest.mark.parametrize("places", [True, False])
def test_rotary_embedding_of_onnx(tmp_path: Path, interleaved: int, shape: str, turned: int, places: bool) -> None:
    half = (turned or 16) // 2
    x, given = floats(*((2, 3, 64) if shape == "B, S, 64" else (2, 4, 3, 16))), np.array([[1, 2, 3], [4, 5, 6]])
    cos, sin = COS[:, :half].copy(), SIN[:, :half].copy()
    feeds = {"c": cos, "s": sin, "p": given} if places else {"c": cos[given], "s": sin[given]}
    kinds = check(tmp_path, _standard_rotary(shape, turned, interleaved, places), opset=23, x=x, **feeds)
    assert "RotaryEmbedding" not in kinds


@pytest.mark.parametrize("shape", ["B, S, 64", "B, 4, S, 16"])
def test_angles_of_one_row_turn_every_row(tmp_path: Path, shape: str) -> None:
    """As torch writes it: neither ONNX Runtime nor the compiler repeats them to the batch."""
    text = _standard_rotary(shape, 0, 0, places=False)
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 23]> {text}')
    onnx.save(model, tmp_path / "before.onnx")
    save_model(load(tmp_path / "before.onnx").model, tmp_path / "after.onnx")
    x = floats(*((2, 3, 64) if shape == "B, S, 64" else (2, 4, 3, 16)))
    tables = {"c": COS[None, :3, :8].copy(), "s": SIN[None, :3, :8].copy()}
    repeated = {name: np.repeat(table, 2, axis=0) for name, table in tables.items()}
    (expected,) = run_file(tmp_path / "before.onnx", {"x": x, **repeated})
    (found,) = run_file(tmp_path / "after.onnx", {"x": x, **tables})
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(("tokens", "past"), [(1, 5), (3, 0), (4, 3)])
@pytest.mark.parametrize("attributes", ["", "scale = 0.3, softcap = 5.0", "local_window_size = 3"])
@pytest.mark.parametrize("rotary", [0, 1])
def test_group_query_attention(tmp_path: Path, tokens: int, past: int, attributes: str, rotary: int) -> None:
    more = f", {attributes}" if attributes else ""
    text = f"""g (float[B, S, 64] q, float[B, S, 32] k, float[B, S, 32] v, {PAST}, int32[B] n, int32 t, float[M, 8] c,
      float[M, 8] s) => (float[B, S, 64] y, {PRESENT})
      {{ y, nk, nv = com.microsoft.GroupQueryAttention<num_heads = 4, kv_num_heads = 2, do_rotary = {rotary}{more}>
         (q, k, v, pk, pv, n, t, c, s) }}"""
    total, batch = tokens + past, 1 if tokens > 1 and past else 2  # its kernel takes no more
    shapes = {"q": (batch, tokens, 64), "k": (batch, tokens, 32), "v": (batch, tokens, 32)}
    feeds = {name: floats(*shape) for name, shape in shapes.items()} | {"c": COS, "s": SIN}
    caches = {"pk": floats(batch, 2, past, 16), "pv": floats(batch, 2, past, 16)}
    lengths = {"n": np.full(batch, total - 1, np.int32), "t": np.array(total, np.int32)}
    assert "GroupQueryAttention" not in check(tmp_path, text, opset=21, **feeds, **caches, **lengths)


def test_group_query_attention_of_one_operand(tmp_path: Path) -> None:
    text = f"""g (float[B, S, 128] q, {PAST}, int32[B] n, int32 t) => (float[B, S, 64] y, {PRESENT})
      {{ y, nk, nv = com.microsoft.GroupQueryAttention<num_heads = 4, kv_num_heads = 2>(q, , , pk, pv, n, t) }}"""
    lengths = {"n": np.full(2, 5, np.int32), "t": np.array(6, np.int32)}
    check(tmp_path, text, opset=21, q=floats(2, 1, 128), pk=floats(2, 2, 5, 16), pv=floats(2, 2, 5, 16), **lengths)


@pytest.mark.parametrize("past", [None, 0, 5])
@pytest.mark.parametrize("causal", [0, 1])
def test_multi_head_attention(tmp_path: Path, past: int | None, causal: int) -> None:
    inputs, outputs = (f", {PAST}", f", {PRESENT}") if past is not None else ("", "")
    given, made = ("(q, k, v, b, , , pk, pv)", "y, nk, nv") if past is not None else ("(q, k, v, b)", "y")
    text = f"""g (float[B, S, 32] q, float[B, S, 32] k, float[B, S, 32] v, float[96] b{inputs})
      => (float[B, S, 32] y{outputs})
      {{ {made} = com.microsoft.MultiHeadAttention<num_heads = 2, unidirectional = {causal}>{given} }}"""
    feeds = {"q": floats(2, 3, 32), "k": floats(2, 3, 32), "v": floats(2, 3, 32), "b": floats(96)}
    caches = {} if past is None else {"pk": floats(2, 2, past, 16), "pv": floats(2, 2, past, 16)}
    check(tmp_path, text, opset=21, **feeds, **caches)


def test_multi_head_attention_to_an_encoder_with_a_mask(tmp_path: Path) -> None:
    text = """g (float[B, S, 32] q, float[B, 2, L, 16] k, float[B, 2, L, 16] v, int32[B, L] m, float[B, 2, S, L] a)
      => (float[B, S, 32] y) { y = com.microsoft.MultiHeadAttention<num_heads = 2>(q, k, v, , m, a) }"""
    mask = np.array([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]], np.int32)
    feeds = {"q": floats(2, 3, 32), "k": floats(2, 2, 5, 16), "v": floats(2, 2, 5, 16), "a": floats(2, 2, 3, 5)}
    check(tmp_path, text, opset=21, **feeds, m=mask)


@pytest.mark.parametrize("causal", [0, 1])
def test_attention_with_one_weight(tmp_path: Path, causal: int) -> None:
    text = f"""g (float[B, S, 24] x, float[24, 96] w, float[96] b, int32[B, S] m) => (float[B, S, 32] y)
      {{ y = com.microsoft.Attention<num_heads = 2, unidirectional = {causal}>(x, w, b, m) }}"""
    mask = np.array([[1, 1, 0], [1, 1, 1]], np.int32)
    check(tmp_path, text, opset=21, x=floats(2, 3, 24), w=floats(24, 96) / 5, b=floats(96), m=mask)


def test_attention_with_a_stacked_past(tmp_path: Path) -> None:
    text = """g (float[B, S, 24] x, float[24, 96] w, float[96] b, float[2, B, 2, P, 16] p)
      => (float[B, S, 32] y, float[2, B, 2, T, 16] n)
      { y, n = com.microsoft.Attention<num_heads = 2, unidirectional = 1>(x, w, b, , p) }"""
    check(tmp_path, text, opset=21, x=floats(2, 3, 24), w=floats(24, 96) / 5, b=floats(96), p=floats(2, 2, 2, 4, 16))


@pytest.mark.parametrize("kind", ["int4", "uint4", "uint8", "uint8 of 8 bits"])
@pytest.mark.parametrize("with_points", [False, True])
def test_rows_of_a_table_in_blocks(tmp_path: Path, kind: str, with_points: bool) -> None:
    rng = np.random.default_rng(0)
    bits = 8 if kind.endswith("bits") else 4
    shape, blocks = ((12, 40), (12, 3)) if kind in ("int4", "uint4") else ((12, 40 * bits // 8), (12, 3))

    def numbers(name: str, dims: tuple[int, ...]) -> onnx.TensorProto:
        if kind.startswith("uint8"):
            return numpy_helper.from_array(rng.integers(0, 256, dims, np.uint8), name)
        dtype = ml_dtypes.int4 if kind == "int4" else ml_dtypes.uint4
        return numpy_helper.from_array(rng.integers(-8 if kind == "int4" else 0, 8, dims).astype(dtype), name)

    points = (12, 2) if kind == "uint8" else blocks
    tensors = [numbers("t", shape), numpy_helper.from_array(np.abs(floats(*blocks)), "s")]
    tensors += [numbers("z", points)] * with_points
    text = f"""<ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1]> g (int64[B, S] i) => (float[B, S, 40] y)
      {{ y = com.microsoft.GatherBlockQuantized<bits = {bits}, block_size = 16>(i, i, s) }}"""
    model = onnx.parser.parse_model(text)
    model.graph.node[0].input[:] = ["t", "i", "s", "z"][: 3 + with_points]
    model.graph.initializer.extend(tensors)
    ids = np.array([[0, 11, 3], [-1, 5, 5]])
    assert kinds_when_equal(tmp_path, model, i=ids).count("Gather") == 1


@pytest.mark.parametrize(("prefix", "opset"), [("TRT_FP8", 21), ("TRT_FP8", 17), ("", 21)])
def test_quantizers_of_the_domain_of_tensorrt_are_those_of_onnx(tmp_path: Path, prefix: str, opset: int) -> None:
    """Model Optimizer's exporter of PyTorch writes them, and says that E4M3 are bytes."""
    zero, given = (", z", "float8e4m3fn z = {0}") if not prefix else ("", "")
    body = f"""<float s = {{0.25}}{", " + given if given else ""}>
      {{ q = trt.{prefix}QuantizeLinear(x, s{zero}) y = trt.{prefix}DequantizeLinear(q, s{zero}) }}"""
    opsets = f'"" : {opset}, "trt" : 1'
    text = f"<ir_version: 10, opset_import: [{opsets}]> g (float[2, 8] x) => (float[2, 8] y) {body}"
    proto = onnx.parser.parse_model(text)
    proto.graph.value_info.append(onnx.helper.make_tensor_value_info("q", onnx.TensorProto.UINT8, [2, 8]))
    onnx.save(proto, tmp_path / "m.onnx")
    model, x = load(tmp_path / "m.onnx").model, floats(2, 8)
    assert {(node.domain, node.op_type) for node in model.graph} == {("", "QuantizeLinear"), ("", "DequantizeLinear")}
    with OrtSession(model) as session:
        found = session.run({"x": x})[0]
    expected = (x / 0.25).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * 0.25
    np.testing.assert_array_equal(found, expected)
