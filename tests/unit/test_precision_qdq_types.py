"""FP8, quantized residuals and products of two activations, as Q/DQ is written for them."""

from __future__ import annotations

import numpy as np
import onnx.checker
import onnx_ir as ir
import pytest
from drawn_cases import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from trtopt.graph import edit, invariants
from trtopt.graph.shapes import infer_shapes
from trtopt.precision.plan import BF16, FP16, NarrowType, Operand, PrecisionPlan, QuantizedOp
from trtopt.precision.write import activation_scale, apply_plan, quantize_weight
from trtopt.support.precision import Precision

RNG = np.random.default_rng(0)
FP8 = ir.DataType.FLOAT8E4M3FN


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


def typed(source: ir.Model, *ops: QuantizedOp, **kept: str) -> ir.Model:
    found = apply_plan(source, PrecisionPlan(Precision.FP8, FP16, kept, ops))
    invariants.check(found, invariants.signature(source))
    onnx.checker.check_model(ir.to_proto(found), full_check=True)
    return found


def op(
    node: str, tensor: str, dtype: Precision = Precision.FP8, axis: int | None = None, **more: object
) -> QuantizedOp:
    return QuantizedOp(node, tensor, 1.0, axis, "max", dtype=dtype, **more)  # type: ignore[arg-type]


def of(found: ir.Model, kind: str) -> list[ir.Node]:
    return [node for node in found.graph if node.op_type == kind]


weights = arrays.arrays(
    np.float32,
    arrays.array_shapes(min_dims=2, max_dims=4, max_side=5),
    elements=st.floats(-100, 100, width=32, allow_subnormal=False),
)


@given(weights, st.sampled_from([None, 0, 1]), st.sampled_from([FP16, BF16, None]), many=150)
def test_fp8_weights_are_within_a_sixteenth_of_themselves(
    weight: np.ndarray, axis: int | None, narrow: NarrowType | None
) -> None:
    values, scales = quantize_weight(weight, axis, narrow, "fp8")
    assert values.dtype == FP8.numpy() and values.shape == weight.shape
    shape = [-1 if index == axis else 1 for index in range(weight.ndim)]
    column = scales.reshape(shape if axis is not None else []).astype(np.float64)
    restored = values.astype(np.float64) * column
    assert np.isfinite(restored).all()
    bound = np.maximum(np.abs(weight) / 16, column * 2.0**-10)
    assert (np.abs(restored - weight) <= bound * (1 + 1e-5)).all()


@given(st.floats(0.01, 6e4), st.sampled_from([FP16, BF16, None]))
def test_an_fp8_scale_covers_the_range(amax: float, narrow: NarrowType | None) -> None:
    scale = float(activation_scale(amax, narrow, "fp8"))
    assert scale * 448 >= amax * (1 - 1e-6)
    assert narrow is None or narrow.round(np.array(scale)) == np.float32(scale)


def test_fp8_is_written_with_its_zero_point_and_fp16_scales() -> None:
    source = model("g (float[4,32] x) => (float[4,16] y) { r = Relu(x) y = MatMul(r, w) }", w=np.eye(32, 16))
    found = typed(source, op("y", "r"))
    (quantize,) = of(found, "QuantizeLinear")
    assert quantize.outputs[0].dtype is FP8
    assert [value.dtype for value in quantize.inputs] == [ir.DataType.FLOAT16, ir.DataType.FLOAT16, FP8]
    weight = next(node for node in of(found, "DequantizeLinear") if edit.constant_of(node.inputs[0]) is not None)
    assert weight.inputs[0].dtype is FP8 and weight.outputs[0].dtype is ir.DataType.FLOAT16
    restored = edit.constant_of(weight.inputs[0]).astype(np.float32) * edit.constant_of(weight.inputs[1])
    np.testing.assert_allclose(restored, np.eye(32, 16), rtol=1e-3)
    assert "w" not in found.graph.initializers


def test_a_tensor_and_a_weight_in_both_8_bit_types_are_stored_in_both() -> None:
    source = model(
        "g (float[4,16] x) => (float[4,16] y) { r = Relu(x) a = MatMul(r, w) b = MatMul(r, w) y = Add(a, b) }",
        w=np.eye(16),
    )
    found = typed(source, op("a", "r", "int8"), op("b", "r", "fp8"))
    assert {node.outputs[0].dtype for node in of(found, "QuantizeLinear")} == {ir.DataType.INT8, FP8}
    stored = {value.dtype for value in found.graph.initializers.values() if value.const_value.size == 256}
    assert stored == {ir.DataType.INT8, FP8}


def test_a_multiplication_per_channel_is_refused_in_fp8() -> None:
    source = model("g (float[1,8,4,4] x) => (float[1,8,4,4] y) { y = Conv(x, w) }", w=np.ones((8, 8, 1, 1)))
    with pytest.raises(ValueError, match="FP8 needs none"):
        typed(source, op("y", "x", axis=0, multiply=True))


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_both_operands_of_attentions_products_are_quantized(dtype: Precision) -> None:
    source = model(
        """g (float[2,4,8,16] q, float[2,4,16,8] k, float[2,4,8,16] v) => (float[2,4,8,16] y)
        { s = MatMul(q, k) p = Softmax(s) y = MatMul(p, v) }"""
    )
    found = typed(
        source,
        op("s", "q", dtype, other=Operand("k", 2.0, "max")),
        op("y", "p", dtype, other=Operand("v", 3.0, "max")),
        p="its scores",
    )
    for name in "sy":
        product = next(node for node in found.graph if node.name == name)
        assert [value.producer().op_type for value in product.inputs] == ["DequantizeLinear"] * 2
    scales = {
        str(node.outputs[0].name): float(edit.constant_of(node.inputs[1])) for node in of(found, "QuantizeLinear")
    }
    largest = {"int8": 127, "fp8": 448}[dtype]
    expected = {f"q_{dtype}": 1.0, f"k_{dtype}": 2.0, f"p_{dtype}": 1.0, f"v_{dtype}": 3.0}
    assert {name: scale * largest for name, scale in scales.items()} == pytest.approx(expected, rel=1e-3)


def test_a_tensor_times_itself_is_quantized_once() -> None:
    source = model("g (float[2,8,8] x) => (float[2,8,8] y) { r = Relu(x) y = MatMul(r, r) }")
    found = typed(source, op("y", "r", "int8", other=Operand("r", 1.0, "max")))
    assert len(of(found, "QuantizeLinear")) == 1


def test_an_addition_reads_the_quantized_residual_and_nothing_else() -> None:
    source = model(
        """g (float[1,8,6,6] x) => (float[1,8,6,6] y) { t = Relu(x) c = Conv(t, w) d = Conv(c, w) a = Add(d, t)
        e = Add(t, x) y = Mul(a, e) }""",
        w=np.eye(8).reshape(8, 8, 1, 1),
    )
    found = typed(source, op("c", "t", "int8", 0, skips=("a",)), op("d", "c", "int8", 0))
    nodes = {node.name: node for node in found.graph}
    assert nodes["a"].inputs[1].producer() is nodes["c"].inputs[0].producer()
    assert nodes["a"].inputs[1].producer().op_type == "DequantizeLinear"
    assert nodes["a"].inputs[0].producer().op_type == "Conv"
    assert nodes["e"].inputs[0].producer().op_type == "Relu"
    assert len(of(found, "QuantizeLinear")) == 2


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_what_comes_in_bf16_is_quantized_from_fp32(dtype: Precision) -> None:
    """It comes so because FP16 does not hold it."""
    source = model(
        "g (float[2,16] x) => (float[2,16] y) { a = MatMul(x, u) y = MatMul(a, v) }",
        u=RNG.standard_normal((16, 16)),
        v=RNG.standard_normal((16, 16)),
    )
    plan = PrecisionPlan(Precision.INT8, FP16, quantized=(op("y", "a", dtype),), bfloat={"a": "too large"})
    found = apply_plan(source, plan)
    onnx.checker.check_model(ir.to_proto(found), full_check=True)
    (quantizer,) = of(found, "QuantizeLinear")
    read = quantizer.inputs[0]
    assert read is not None and read.dtype is ir.DataType.FLOAT
    cast = read.producer()
    assert cast is not None and cast.inputs[0] is not None and cast.inputs[0].dtype is ir.DataType.BFLOAT16
