"""FP16 and INT8 rewrites end to end on ONNX Runtime: right where a naive cast fails, and the report says why."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import trtopt
from trtopt.graph.shapes import infer_shapes
from trtopt.precision.fp16.to_fp32 import to_fp32
from trtopt.precision.plan import FP16, PrecisionPlan, QuantizedOp
from trtopt.precision.write import quantize
from trtopt.support.ort_session import OrtSession
from trtopt.support.precision import Precision

HEAD = '<ir_version: 9, opset_import: ["" : 19]>\n'
LOW = "float low = {-340000000000000000000000000000000000000.0}"
MASK = np.array([[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1]], np.float32)
ONES = np.ones((4, 4), np.float32)
X = np.array([[1, -2, 3, 0.5], [0.7, 2, 1, -1], [3, 3, 0.2, 1], [1, 0.1, -0.4, 2]], np.float32)

TRUTH: dict[str, tuple[str, dict[str, np.ndarray], set[str]]] = {
    "up and down again": (
        """(float[N,4] x) => (float[N,4] y) <float k = {300.0}> {
            a = Mul(x, k) b = Mul(a, k) c = Div(b, k) y = Div(c, k) }""",
        {"x": X},
        {"b", "c"},
    ),
    "activations near 1e5": (
        """(float[N,4] x) => (float[N,4] y) <float[4] w = {25000.0, 25000.0, 30000.0, 24000.0}, float s = {0.00001}> {
            a = Mul(x, w) b = Relu(a) y = Mul(b, s) }""",
        {"x": X},
        {"a", "b", "y"},
    ),
    "a floor before a logarithm, by Max": (
        "(float[N,4] x) => (float[N,4] y) <float e = {0.0000000001}> { a = Relu(x) b = Max(a, e) y = Log(b) }",
        {"x": X},
        {"b", "y"},
    ),
    "a floor before a logarithm, by Add": (
        "(float[N,4] x) => (float[N,4] y) <float e = {0.0000000001}> { a = Relu(x) b = Add(a, e) y = Log(b) }",
        {"x": X},
        {"b", "y"},
    ),
    "a floor before a logarithm, by Clip, that no sample reaches": (
        "(float[N,4] x) => (float[N,4] y) <float e = {0.0000000001}> { a = Abs(x) b = Clip(a, e) y = Log(b) }",
        {"x": X},
        {"b", "y"},
    ),
    "a floor before a division": (
        """(float[N,4] x) => (float[N,4] y) <float e = {0.000000000001}, int64[1] t = {1}> {
            q = Mul(x, x) s = ReduceSum(q, t) b = Add(s, e) r = Sqrt(b) y = Div(x, r) }""",
        {"x": X * 1e-3},
        {"b", "r", "y"},
    ),
    "a mask by Mul and Add": (
        f"""(float[N,4] x, float[N,4] m) => (float[N,4] y) <float one = {{1.0}}, {LOW}> {{
            a = Sub(one, m) b = Mul(a, low) c = Add(x, b) y = Softmax(c) }}""",
        {"x": X, "m": MASK},
        {"b", "c", "y"},
    ),
    "a mask by Where": (
        f"""(float[N,4] x, float[N,4] m) => (float[N,4] y) <{LOW}> {{
            k = Cast <to = 9> (m) c = Where(k, x, low) y = Softmax(c) }}""",
        {"x": X, "m": MASK},
        {"c", "y"},
    ),
    "a mask that masks nothing in the samples": (
        f"""(float[N,4] x, float[N,4] m) => (float[N,4] y) <float one = {{1.0}}, {LOW}> {{
            a = Sub(one, m) b = Mul(a, low) c = Add(x, b) y = Softmax(c) }}""",
        {"x": X, "m": ONES},
        {"b"},
    ),
}


@pytest.mark.parametrize("name", TRUTH)
def test_fp16_is_right_and_says_what_stayed_fp32(name: str, tmp_path: Path) -> None:
    text, calib, kept = TRUTH[name]
    proto = onnx.parser.parse_model(f"{HEAD}g {text}")
    for node in proto.graph.node:
        node.name = node.output[0]
    report = trtopt.optimize(
        proto, precision="fp16", calib=calib, output=tmp_path / "o.onnx", backend="tensorrt-rtx", recipes="none"
    )
    outputs = report.accuracy.outputs["y"]
    assert outputs.nonfinite == 0
    assert outputs.sqnr_db > 50, "FP16 keeps 11 bits"
    reasons = {item.node: item.reason for item in report.precision.kept}
    assert kept <= set(reasons) and all(reasons.values())


def model(text: str, **weights: np.ndarray) -> ir.Model:
    proto = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]>\ng {text}')
    proto.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in weights.items())
    for node in proto.graph.node:
        node.name = node.output[0]
    return infer_shapes(ir.from_proto(proto))


def run(source: ir.Model, **feeds: np.ndarray) -> list[np.ndarray]:
    with OrtSession(source, keep_qdq=True) as session:
        return session.run(feeds)


@pytest.mark.parametrize(("kind", "dtype", "bound"), [("float16", np.float16, 2.0**-8), ("double", np.float64, 1e-5)])
def test_a_widened_model_computes_what_the_original_computes(kind: str, dtype: type, bound: float) -> None:
    """Bound: relative to the largest output; the FP16 original rounds each of its six steps by 2^-11."""
    rng = np.random.default_rng(0)
    source = model(
        f"""({kind}[N,8] x, bool c) => ({kind}[N,4] y, {kind}[N,4] z) {{
            a = MatMul(x, w) h = Add(a, b) r = Relu(h)
            y = If (c) < then_branch = t () => ({kind}[N,4] p) {{ p = Mul(r, b) }},
                         else_branch = e () => ({kind}[N,4] q) {{ q = Identity(r) }} > z = Softmax(y) }}""",
        w=rng.standard_normal((8, 4)).astype(dtype),
        b=rng.standard_normal(4).astype(dtype),
    )
    x = rng.standard_normal((16, 8)).astype(dtype)
    for c in (True, False):
        before, after = (run(each, x=x, c=np.array(c)) for each in (source, to_fp32(source)))
        for expected, found in zip(before, after, strict=True):
            assert found.dtype == dtype
            np.testing.assert_allclose(found, expected, rtol=0, atol=bound * float(np.abs(expected).max()))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("readers", ["output", "one", "several"])
def test_the_multiplied_convolution_equals_quantization_per_channel(bias: bool, readers: str) -> None:
    rng = np.random.default_rng(1)
    behind = {"output": "", "one": "y = Relu(c)", "several": "r = Relu(c) y = Add(r, c)"}[readers]
    out = "c" if readers == "output" else "y"
    weights = {"w": (rng.standard_normal((6, 4, 3, 3)) * np.geomspace(1, 0.02, 6).reshape(6, 1, 1, 1)).astype("f4")}
    if bias:
        weights["b"] = rng.standard_normal(6).astype("f4")
    source = model(
        f"(float[2,4,8,8] x) => (float[2,6,6,6] {out}) {{ c = Conv(x, w{', b' if bias else ''}) {behind} }}", **weights
    )
    x = rng.standard_normal((2, 4, 8, 8)).astype("f4")
    found = []
    for multiply in (True, False):
        plan = PrecisionPlan(Precision.INT8, FP16, {}, (QuantizedOp("c", "x", 5.0, 0, "max", multiply),))
        done = quantize(source, plan).model
        assert [value.name for value in done.graph.outputs] == [out]
        assert sum(node.op_type == "Mul" for node in done.graph) == multiply
        assert "w" not in done.graph.initializers
        found.append(run(done, x=x)[0])
    # The two forms round each channel's scale to FP16 on their own: at most one step of 2^-10 apart.
    np.testing.assert_allclose(found[0], found[1], rtol=0, atol=2.0**-9 * float(np.abs(found[1]).max()))
    exact = run(source, x=x)[0]
    noise = float(np.square(found[0] - exact).mean() / np.square(exact).mean())
    assert noise < 1e-3


def test_a_convolution_that_would_overflow_fp16_falls_back_to_one_scale() -> None:
    source = model(
        "(float[1,64,8,8] x) => (float[1,2,8,8] c) { c = Conv <pads = [1,1,1,1]> (x, w) }",
        w=np.stack([np.full((64, 3, 3), 1.0), np.full((64, 3, 3), 1e-3)]).astype("f4"),
    )
    plan = PrecisionPlan(Precision.INT8, FP16, {}, (QuantizedOp("c", "x", 200.0, 0, "max", True),))
    assert [node.op_type for node in quantize(source, plan).model.graph].count("Mul") == 0


def test_a_computed_bias_stays_in_the_convolution() -> None:
    source = model(
        "(float[1,4,8,8] x, float[4] k) => (float[1,4,8,8] c) { b = Neg(k) c = Conv(x, w, b) }",
        w=np.eye(4, dtype="f4").reshape(4, 4, 1, 1),
    )
    plan = PrecisionPlan(Precision.INT8, FP16, {}, (QuantizedOp("c", "x", 1.0, 0, "max", True),))
    done = quantize(source, plan).model
    x, k = np.random.default_rng(2).uniform(-1, 1, (1, 4, 8, 8)).astype("f4"), np.arange(4, dtype="f4")
    np.testing.assert_allclose(run(done, x=x, k=k)[0], run(source, x=x, k=k)[0], rtol=0, atol=0.02)
