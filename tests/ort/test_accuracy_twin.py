"""The FP32 twin rounds as the strongly typed graph does, and ONNX Runtime takes none of the rounding away."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
from naive_fp16 import naive_fp16

from trtopt.accuracy.compare import compare
from trtopt.accuracy.emulation import EXACT_OPS, fp32_emulation
from trtopt.accuracy.metric import gate
from trtopt.config import AccuracyBudget
from trtopt.errors import InvalidModelError
from trtopt.report.schema.build import AccuracyRecord
from trtopt.support.ort_session import Feeds, OrtSession

HEAD = '<ir_version: 9, opset_import: ["" : 19]>\n'

FP16_TRUTH: dict[str, tuple[str, list[Feeds]]] = {
    "up and down again": (
        """
        g (float[N,4] x) => (float[N,4] y) <float k = {300.0}> {
            a = Mul(x, k) b = Mul(a, k) c = Div(b, k) y = Div(c, k)
        }""",
        [{"x": np.array([[1.0, -2.0, 3.0, 0.5]], np.float32)}],
    ),
    "activations near 1e5": (
        """
        g (float[N,4] x) => (float[N,4] y) <float[4] w = {25000.0, 25000.0, 30000.0, 24000.0}, float s = {0.00001}> {
            a = Mul(x, w) b = Relu(a) y = Mul(b, s)
        }""",
        [{"x": np.array([[4.0, 3.9, -3.5, 4.2]], np.float32)}],
    ),
    "a floor of 1e-10 before a logarithm": (
        """
        g (float[N,4] x) => (float[N,4] y) <float floor = {0.0000000001}> {
            a = Relu(x) b = Max(a, floor) y = Log(b)
        }""",
        [{"x": np.array([[1.0, -1.0, 0.0, 2.0]], np.float32)}],
    ),
    "a mask of -3.4e38": (
        """
        g (float[N,4] x, float[N,4] mask) => (float[N,4] y)
        <float one = {1.0}, float low = {-340000000000000000000000000000000000000.0}> {
            a = Sub(one, mask) b = Mul(a, low) c = Add(x, b) y = Softmax <axis = -1> (c)
        }""",
        [
            {
                "x": np.array([[1.0, -1.0, 0.0, 2.0]], np.float32),
                "mask": np.array([[1.0, 1.0, 1.0, 0.0]], np.float32),
            }
        ],
    ),
}


def model(text: str) -> ir.Model:
    return ir.from_onnx_text(HEAD + text)


def run(graph: ir.Model, feeds: Feeds) -> list[np.ndarray]:
    with OrtSession(graph, keep_qdq=True) as session:
        return session.run(feeds)


@pytest.mark.parametrize("name", FP16_TRUTH)
def test_a_naive_fp16_cast_is_seen_to_fail(name: str) -> None:
    text, samples = FP16_TRUTH[name]
    reference = model(text)
    naive = naive_fp16(reference)
    with OrtSession(reference) as before, OrtSession(fp32_emulation(naive), keep_qdq=True) as after:
        outputs = compare(before, after, samples)
    assert outputs["y"].nonfinite > 0
    record = AccuracyRecord(len(samples), "eval", "onnx-only", outputs)
    assert gate(record, AccuracyBudget())


def test_onnx_runtime_alone_does_not_see_the_overflow_and_the_twin_does() -> None:
    text, samples = FP16_TRUTH["up and down again"]
    naive = naive_fp16(model(text))
    (typed,) = run(naive, samples[0])
    assert np.isfinite(typed).all()
    (rounded,) = run(fp32_emulation(naive), samples[0])
    np.testing.assert_array_equal(np.isinf(rounded), [[True, True, True, False]])  # 0.5*300*300 < 65504


@pytest.mark.parametrize(("onnx_type", "dtype"), [(10, np.float16), (16, ml_dtypes.bfloat16)])
def test_each_tensor_is_rounded_as_numpy_rounds_it(onnx_type: int, dtype: np.dtype) -> None:
    graph = model(
        f"""g (float[N] x, float[N] z) => (float[N] y) {{
            a = Cast <to = {onnx_type}> (x) b = Cast <to = {onnx_type}> (z)
            c = Mul(a, b) d = Add(c, a) e = Sub(d, b) y = Cast <to = 1> (e)
        }}"""
    )
    x, z = (np.random.default_rng(seed).standard_normal(4096).astype(np.float32) for seed in (0, 1))

    def rounded(values: np.ndarray) -> np.ndarray:
        return values.astype(dtype).astype(np.float32)

    a, b = rounded(x), rounded(z)
    expected = rounded(rounded(rounded(a * b) + a) - b)
    np.testing.assert_array_equal(run(fp32_emulation(graph), {"x": x, "z": z})[0], expected)


def test_values_keep_their_names_and_the_source_is_not_changed() -> None:
    naive = naive_fp16(model(FP16_TRUTH["up and down again"][0]))
    before = ir.to_proto(naive).SerializeToString()
    twin = fp32_emulation(naive)
    assert ir.to_proto(naive).SerializeToString() == before
    assert {"a", "b", "c"} <= {value.name for node in twin.graph for value in node.outputs}
    with OrtSession(twin, ["a"], keep_qdq=True) as session:
        (a,) = session.run({"x": np.array([[0.1, 0.2, 0.3, 0.7]], np.float32)})
    np.testing.assert_array_equal(a, a.astype(np.float16).astype(np.float32))


def test_fp16_inputs_and_outputs_keep_their_type() -> None:
    graph = model(
        "g (float16[N] x) => (float16[N] y, float16[N] x2, float16[N] r) { y = Mul(x, x) x2 = Add(y, x) r = Relu(x) }"
    )
    twin = fp32_emulation(graph)
    assert [value.dtype for value in (*twin.graph.inputs, *twin.graph.outputs)] == [ir.DataType.FLOAT16] * 4
    assert [value.name for value in twin.graph.outputs] == ["y", "x2", "r"]
    x = np.array([0.1, 3.0, -7.0], np.float16)
    y, x2, r = run(twin, {"x": x})
    np.testing.assert_array_equal(y, x * x)
    np.testing.assert_array_equal(x2, x * x + x)
    np.testing.assert_array_equal(r, np.maximum(x, 0))


def test_an_output_that_is_an_input_or_a_constant_keeps_its_type() -> None:
    graph = model("g (float16[2] x) => (float16[2] y) { y = Identity(x) }")
    weight = ir.val("w", const_value=ir.tensor(np.array([1.5, 2.5], np.float16), name="w"))
    graph.graph.register_initializer(weight)
    graph.graph.outputs.append(weight)
    y, w = run(fp32_emulation(graph), {"x": np.array([1, 2], np.float16)})
    assert (y.dtype, w.dtype) == (np.float16, np.float16)
    np.testing.assert_array_equal(w, np.array([1.5, 2.5], np.float16))


def test_quantize_saturates_and_fp16_scales_keep_their_rounded_value() -> None:
    graph = model(
        """g (float[N] x) => (float[N] y) <int8 zero = {0}, float scale32 = {0.1}> {
            scale = Cast <to = 10> (scale32) h = Cast <to = 10> (x)
            q = QuantizeLinear(h, scale, zero) d = DequantizeLinear(q, scale, zero) y = Cast <to = 1> (d)
        }"""
    )
    scale = np.float32(np.float16(0.1))
    x = np.array([1e9, -1e9, 0.26, 12.0, -12.9, 0.0], np.float32)
    (y,) = run(fp32_emulation(graph), {"x": x})
    with np.errstate(over="ignore"):
        half = x.astype(np.float16).astype(np.float32)
    steps = np.clip(np.rint(half / scale), -128, 127)
    np.testing.assert_array_equal(y, (steps * scale).astype(np.float16).astype(np.float32))
    assert y[0] == np.float32(np.float16(127 * scale)) and y[1] == np.float32(np.float16(-128 * scale))


def test_qdq_around_a_convolution_is_computed_as_it_stands() -> None:
    """ONNX Runtime would fuse Q/DQ - Conv - Q/DQ into an integer kernel that requantizes without rounding to FP16."""
    rng = np.random.default_rng(3)
    weight = rng.integers(-127, 128, (4, 3, 3, 3)).astype(np.int8)
    graph = model(
        """g (float[1,3,8,8] x, int8[4,3,3,3] w) => (float[1,4,8,8] y)
        <int8 zero = {0}, float sx = {0.02}, float sw = {0.01}, float sy = {0.5}> {
            hx = Cast <to = 10> (x) hsx = Cast <to = 10> (sx) hsw = Cast <to = 10> (sw) hsy = Cast <to = 10> (sy)
            q = QuantizeLinear(hx, hsx, zero) d = DequantizeLinear(q, hsx, zero)
            dw = DequantizeLinear(w, hsw, zero) c = Conv <pads = [1,1,1,1]> (d, dw)
            qy = QuantizeLinear(c, hsy, zero) dy = DequantizeLinear(qy, hsy, zero) y = Cast <to = 1> (dy)
        }"""
    )
    x = rng.standard_normal((1, 3, 8, 8)).astype(np.float32)

    def half(values: np.ndarray) -> np.ndarray:
        return np.asarray(values, np.float32).astype(np.float16).astype(np.float32)

    sx, sw, sy = half(0.02), half(0.01), half(0.5)
    d = half(np.clip(np.rint(half(x) / sx), -128, 127) * sx)
    dw = half(weight.astype(np.float32) * sw)
    padded = np.pad(d, ((0, 0), (0, 0), (1, 1), (1, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(2, 3))
    conv = half(np.einsum("nchwij,ocij->nohw", windows, dw))
    expected = half(np.clip(np.rint(conv / sy), -128, 127) * sy)
    (y,) = run(fp32_emulation(graph), {"x": x, "w": weight})
    steps = np.abs(y - expected) / sy
    assert steps.max() <= 1.0  # sums in another order may fall on the other side of a step
    assert (steps > 0).mean() < 0.02


SUBGRAPHS = {
    "If": """g (float16[4] x, bool c) => (float16[4] y) {
        y = If (c) <
            then_branch = t () => (float16[4] a) { a1 = Mul(x, x) a = Div(a1, x) },
            else_branch = e () => (float16[4] b) { b = Identity(x) }
        >
    }""",
    "Loop": """g (float16[4] x, bool c) => (float16[4] y) <int64 n = {3}> {
        y = Loop (n, c, x) <
            body = b (int64 i, bool p, float16[4] s) => (bool q, float16[4] t) {
                q = Identity(p) u = Mul(s, s) t = Div(u, x)
            }
        >
    }""",
}


@pytest.mark.parametrize("kind", SUBGRAPHS)
def test_tensors_of_subgraphs_are_rounded_too(kind: str) -> None:
    x = np.array([300.0, 2.0, 0.3, 1.1], np.float16)
    (y,) = run(fp32_emulation(model(SUBGRAPHS[kind])), {"x": x, "c": np.array(True)})
    state = x
    with np.errstate(over="ignore"):
        for _ in range(3 if kind == "Loop" else 1):
            state = (state * state) / x
    assert y.dtype == np.float16
    np.testing.assert_array_equal(y, state)
    assert np.isinf(y[0])


def test_constants_and_types_in_attributes_become_fp32() -> None:
    graph = model(
        """g (float16[3] x, int64[1] n, int64[3,3] e0) => (float16[M] y, float16[3] z, float16[3] w) {
            c = ConstantOfShape <value = float[1] {0.1}> (n) h = Cast <to = 10> (c) y = Mul(h, h)
            i = Cast <to = 7> (x) z = CastLike(i, x) m = EyeLike <dtype = 10> (e0) w = MatMul(x, m)
        }"""
    )
    constant = next(node for node in graph.graph if node.op_type == "ConstantOfShape")
    constant.attributes["value"] = ir.AttrTensor("value", ir.tensor(np.array([0.1], np.float16)))
    x = np.array([0.7, 2.5, -3.2], np.float16)
    y, z, w = run(fp32_emulation(graph), {"x": x, "n": np.array([2]), "e0": np.zeros((3, 3), np.int64)})
    np.testing.assert_array_equal(y, np.full(2, np.float16(0.1)) * np.float16(0.1))
    np.testing.assert_array_equal(z, np.array([0, 2, -3], np.float16))
    np.testing.assert_array_equal(w, x)


UNARY = "Abs Ceil Floor Identity Neg Relu Round Sign".split()


@pytest.mark.parametrize(("onnx_type", "dtype"), [(10, np.float16), (16, ml_dtypes.bfloat16)])
@pytest.mark.parametrize("op", UNARY)
def test_operators_without_a_second_rounding_do_not_need_one(op: str, onnx_type: int, dtype: np.dtype) -> None:
    assert op in EXACT_OPS
    bits = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    values = bits[np.isfinite(bits.astype(np.float32))].astype(np.float32)
    (y,) = run(model(f"g (float[N] x) => (float[N] y) {{ y = {op}(x) }}"), {"x": values})
    np.testing.assert_array_equal(y, y.astype(dtype).astype(np.float32))


def test_a_tensor_of_unknown_type_is_refused() -> None:
    graph = ir.from_onnx_text(
        '<ir_version: 9, opset_import: ["" : 19, "custom" : 1]>\n'
        "g (float16[3] x) => (float16[3] y) { a = custom.Thing(x) y = Relu(a) }"
    )
    with pytest.raises(InvalidModelError, match="type of tensor a is unknown"):
        fp32_emulation(graph)


def test_reinterpreted_bits_are_refused() -> None:
    graph = ir.from_onnx_text(
        '<ir_version: 13, opset_import: ["" : 26]>\ng (int16[3] x) => (float16[3] y) { y = BitCast <to = 10> (x) }'
    )
    with pytest.raises(InvalidModelError, match="BitCast"):
        fp32_emulation(graph)
