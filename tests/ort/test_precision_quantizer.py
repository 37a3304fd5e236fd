"""The quantizer written as arithmetic computes what QuantizeLinear computes, in ONNX Runtime."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from trtopt.graph import edit
from trtopt.graph.shapes import infer_shapes
from trtopt.precision.plan import FP16, NarrowType, PrecisionPlan, QuantizedOp
from trtopt.precision.write import activation_scale, apply_plan
from trtopt.support.precision import Precision

onnxruntime = pytest.importorskip("onnxruntime")

RNG = np.random.default_rng(0)
SIZE = 4096


def quantizing(fused: bool, amax: float, narrow: NarrowType | None) -> ir.Model:
    """x -> two products; what is between them is quantized, and its INT8 form is the output."""
    text = f'<ir_version: 10, opset_import: ["" : 21]>\ng (float[{SIZE},1] x) => (float[{SIZE},1] y)'
    source = ir.from_onnx_text(f"{text} <float[1,1] one = {{1.0}}> {{ a = MatMul(x, one) y = MatMul(a, one) }}")
    source = infer_shapes(source)
    for node in source.graph:
        node.name = str(node.outputs[0].name)
    op = QuantizedOp("y", "a", amax, None, "max")
    model = apply_plan(source, PrecisionPlan(Precision.INT8, narrow, {}, (op,), fused_quantizers=fused))
    eight = next(node for node in model.graph if node.outputs[0].dtype is ir.DataType.INT8)
    assert eight.op_type == ("Cast" if fused else "QuantizeLinear")
    assert any(node.op_type == "Min" for node in model.graph) is fused
    model.graph.outputs[:] = [eight.outputs[0]]
    eight.outputs[0].shape = ir.Shape([SIZE, 1])
    for node in reversed(list(model.graph)):
        if not any(value.uses() or value.is_graph_output() for value in node.outputs):
            edit.remove_node(node)
    return model


def both(values: np.ndarray, amax: float, narrow: NarrowType | None) -> tuple[np.ndarray, np.ndarray]:
    # ONNX Runtime computes FP16 products in FP32: what they read has to be FP16 already.
    stored = values.astype(np.float32) if narrow is None else narrow.round(values)
    x = np.resize(stored, (SIZE, 1))
    options = onnxruntime.SessionOptions()  # all optimizations would turn the division into a multiplication
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.log_severity_level = 3
    found = []
    for fused in (True, False):
        model = quantizing(fused, amax, narrow)
        session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), options)
        found.append(session.run(None, {"x": x})[0])
    assert found[0].dtype == found[1].dtype == np.int8
    return found[0], found[1]


AMAX = [1.0, 127.0, 3.7e-4, 0.1, 6.0, 33.3, 6.1e4 / 2]


@pytest.mark.parametrize("amax", AMAX)
@pytest.mark.parametrize("narrow", [None, FP16], ids=["fp32", "fp16"])
def test_random_numbers_and_numbers_beyond_the_range(amax: float, narrow: NarrowType | None) -> None:
    values = RNG.uniform(-2.0, 2.0, SIZE) * amax
    arithmetic, operator = both(values, amax, narrow)
    operator = np.maximum(operator, -127)  # QuantizeLinear has -128 too: for numbers beyond the range alone
    np.testing.assert_array_equal(arithmetic, operator)
    assert {-127, 127} <= set(arithmetic.ravel().tolist())


@pytest.mark.parametrize("amax", AMAX)
@pytest.mark.parametrize("narrow", [None, FP16], ids=["fp32", "fp16"])
def test_ties_go_to_the_even_number(amax: float, narrow: NarrowType | None) -> None:
    scale = activation_scale(amax, narrow)
    values = (np.arange(-127, 128) + 0.5).astype(np.float32) * scale
    arithmetic, operator = both(values, amax, narrow)
    np.testing.assert_array_equal(arithmetic, np.maximum(operator, -127))


def test_ties_where_the_division_is_exact() -> None:
    arithmetic, operator = both(np.arange(-126.5, 127.0), 127.0, FP16)
    expected = np.resize(np.rint(np.arange(-126.5, 127.0)), (SIZE, 1))
    np.testing.assert_array_equal(arithmetic, expected)
    np.testing.assert_array_equal(operator, expected)


def test_extremes_saturate() -> None:
    values = np.array([0.0, -0.0, 1e-30, -1e-30, 6e4, -6e4, np.inf, -np.inf])
    arithmetic, _ = both(values, 1.0, FP16)
    assert arithmetic.ravel()[:8].tolist() == [0, 0, 0, 0, 127, -127, 127, -127]
