"""FP8 in the graph, as ONNX Runtime computes it: saturated, rounded to nearest, weights by reference."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest

from trtopt.accuracy.emulation import fp32_emulation
from trtopt.graph import edit
from trtopt.graph.shapes import infer_shapes
from trtopt.precision.plan import FP16, Operand, PrecisionPlan, QuantizedOp
from trtopt.precision.write import activation_scale, apply_plan, quantize_weight
from trtopt.support.ort_session import OrtSession
from trtopt.support.precision import Precision

RNG = np.random.default_rng(0)


def model(text: str, **weights: np.ndarray) -> ir.Model:
    found = ir.from_onnx_text(f'<ir_version: 10, opset_import: ["" : 21]>\n{text}')
    for name, array in weights.items():
        edit.add_initializer(found.graph, name, np.asarray(array, np.float32))
        for node in found.graph:
            for index, value in enumerate(node.inputs):
                if value is not None and value.name == name:
                    node.replace_input_with(index, found.graph.initializers[name])
    found = infer_shapes(ir.from_proto(ir.to_proto(found)))
    for node in found.graph:
        node.name = str(node.outputs[0].name)
    return found


def run(source: ir.Model, ops: tuple[QuantizedOp, ...], **feeds: np.ndarray) -> np.ndarray:
    with OrtSession(
        fp32_emulation(apply_plan(source, PrecisionPlan(Precision.FP8, FP16, {}, ops))), keep_qdq=True
    ) as session:
        return session.run(feeds)[0]


def fp8(array: np.ndarray, amax: float) -> np.ndarray:
    """What a tensor becomes: in units of its scale, saturated, to the nearest FP8, and back in FP16."""
    scale = activation_scale(amax, FP16, "fp8")
    steps = np.clip(array / scale, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    return (steps.astype(np.float32) * scale).astype(np.float16).astype(np.float32)


@pytest.mark.parametrize("axis", [None, 1])
def test_a_product_in_fp8_is_that_of_the_rounded_operands(axis: int | None) -> None:
    weight = RNG.standard_normal((64, 48)).astype(np.float32)  # 3 kB: handed over by reference
    source = model("g (float[8,64] x) => (float[8,48] y) { y = MatMul(x, w) }", w=weight)
    x = (RNG.standard_normal((8, 64)) * 2).astype(np.float32)
    found = run(source, (QuantizedOp("y", "x", 3.0, axis, "max", dtype="fp8"),), x=x)
    values, scales = quantize_weight(weight, axis, FP16, "fp8")
    assert np.abs(x).max() > 3  # some saturate
    stored = (values.astype(np.float32) * scales).astype(np.float16).astype(np.float32)
    np.testing.assert_allclose(found, fp8(x, 3.0) @ stored, rtol=2e-3, atol=2e-3)


def test_the_activation_before_a_quantizer_is_not_lost() -> None:
    """ONNX Runtime takes the FP8 zero point for the lowest UINT8 and removes the ReLU before it, unless told not to."""
    text = """g (float[1,4,6,6] x) => (float[1,4,6,6] y) { c = Conv(x, w) r = Relu(c) y = Conv(r, w) }"""
    weight = np.eye(4).reshape(4, 4, 1, 1)
    x = RNG.standard_normal((1, 4, 6, 6)).astype(np.float32)
    found = run(model(text, w=weight), (QuantizedOp("y", "r", 4.0, None, "max", dtype="fp8"),), x=x)
    assert found.min() == 0
    np.testing.assert_allclose(found, fp8(np.maximum(x.astype(np.float16), 0), 4.0), rtol=2e-3)


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_the_products_of_attention_read_both_operands_in_8_bits(dtype: str) -> None:
    text = "g (float[2,8,16] q, float[2,16,8] k) => (float[2,8,8] s) { s = MatMul(q, k) }"
    q, k = (RNG.uniform(-1, 1, shape).astype(np.float32) for shape in ((2, 8, 16), (2, 16, 8)))
    op = QuantizedOp("s", "q", 1.0, None, "max", dtype=dtype, other=Operand("k", 0.5, "max"))  # type: ignore[arg-type]
    found = run(model(text), (op,), q=q, k=k)
    if dtype == "fp8":
        expected = fp8(q, 1.0) @ fp8(k, 0.5)
    else:
        parts = []
        for array, amax in ((q, 1.0), (k, 0.5)):
            scale = activation_scale(amax, FP16)
            parts.append((np.clip(np.rint(array / scale), -128, 127) * scale).astype(np.float16).astype(np.float32))
        expected = parts[0] @ parts[1]
    np.testing.assert_allclose(found, expected, rtol=2e-3, atol=2e-3)
