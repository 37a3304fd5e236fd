"""The plain form: a cast of everything, and nothing else."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest
from onnx import helper, numpy_helper

from trtopt.engine.request import ShapeProfile
from trtopt.pipeline.plain import plain
from trtopt.precision.fp16.network_io import parse_io
from trtopt.support.precision import Precision

_FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def network() -> ir.Model:
    """A normalization whose epsilon is nothing in FP16, a weight beyond it, and an operator that has no FP16 form."""
    nodes = [
        helper.make_node("LayerNormalization", ["x", "scale"], ["n"], name="norm", epsilon=1e-12),
        helper.make_node("MatMul", ["n", "w"], ["m"], name="product"),
        helper.make_node("BlackmanWindow", ["size"], ["window"], name="window"),
        helper.make_node("Mul", ["m", "window"], ["y"], name="windowed"),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", 1, ["batch", 8])],
        [helper.make_tensor_value_info("y", 1, ["batch", 8])],
        [
            numpy_helper.from_array(np.ones(8, np.float32), "scale"),
            numpy_helper.from_array(np.full((8, 8), 1e5, np.float32), "w"),
            numpy_helper.from_array(np.array(8, np.int64), "size"),
        ],
    )
    model = ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10))
    types = {"n": ["batch", 8], "m": ["batch", 8], "window": [8]}
    for node in model.graph:
        for value in node.outputs:
            value.type = ir.TensorType(ir.DataType.FLOAT)
            value.shape = value.shape or ir.Shape(types[str(value.name)])
    return model


def profile(low: int, best: int, high: int) -> ShapeProfile:
    return ShapeProfile({"x": ((low, 8), (best, 8), (high, 8))})


@pytest.mark.parametrize("precision", [Precision.FP16, Precision.INT8, Precision.FP8, Precision.AUTO])
def test_every_float_tensor_between_inputs_and_outputs_is_fp16(precision: Precision) -> None:
    found = plain(network(), precision)
    types = {node.name: node.outputs[0].dtype for node in found.graph}
    assert {types["norm"], types["product"], types["windowed"]} == {ir.DataType.FLOAT16}
    assert [value.dtype for value in (*found.graph.inputs, *found.graph.outputs)] == [ir.DataType.FLOAT] * 2
    weights = [item.dtype for item in found.graph.initializers.values() if item.dtype in _FLOATS]
    assert set(weights) == {ir.DataType.FLOAT16}


def test_an_operator_without_the_type_stays_fp32_between_casts() -> None:
    window = next(node for node in plain(network()).graph if node.name == "window")
    assert window.outputs[0].dtype is ir.DataType.FLOAT
    assert [user.op_type for user, _ in window.outputs[0].uses()] == ["Cast"]


def test_wide_precisions_and_none_leave_the_types() -> None:
    for precision in (Precision.FP32, Precision.TF32, None):
        assert all(
            value.dtype in (None, ir.DataType.FLOAT) for n in plain(network(), precision).graph for value in n.outputs
        )


def test_the_only_shape_is_written_and_a_range_stays() -> None:
    assert plain(network(), profiles=[profile(4, 4, 4)]).graph.inputs[0].shape == (4, 8)
    assert not isinstance(plain(network(), profiles=[profile(1, 4, 8)]).graph.inputs[0].shape[0], int)
    assert not isinstance(plain(network(), profiles=[profile(1, 1, 1), profile(4, 4, 4)]).graph.inputs[0].shape[0], int)


def test_the_types_asked_for_are_at_the_border() -> None:
    found = plain(network(), io=parse_io(["x:fp16:chw"]))
    assert found.graph.inputs[0].dtype is ir.DataType.FLOAT16


def test_what_says_where_a_range_ends_stays_fp32() -> None:
    """Pictures of 2049 columns have a column 2048, and the compiler refuses a Range that 16 bits end."""
    text = """<ir_version: 8, opset_import: ["" : 17]> g (float[1, 1, 1, W] x) => (float[1, 1, 1, W] y)
        <int64 last = {3}, float zero = {0}, float one = {1}>
        { s = Shape (x) n = Gather (s, last) f = Cast <to = 1> (n) r = Range (zero, f, one) y = Add (x, r) }"""
    model = ir.from_proto(onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text)))
    for form in (plain(model), plain(model, Precision.BF16)):
        (end,) = (node for node in form.graph if node.op_type == "Cast" and node.inputs[0].name == "n")
        assert end.attributes.get_int("to") == ir.DataType.FLOAT
        assert end.outputs[0].name == next(node for node in form.graph if node.op_type == "Range").inputs[1].name


def test_what_computes_where_a_range_ends_stays_fp32() -> None:
    """Half of 4097 columns, rounded up, is 2049; in FP16 4097 is 4096."""
    text = """<ir_version: 8, opset_import: ["" : 17]> g (float[1, 1, 1, W] x) => (float[N] y)
        <int64[1] last = {3}, int64[0] scalar = {}, float zero = {0}, float one = {1}, float half = {0.5}>
        { s = Shape (x) n = Gather (s, last) f = Cast <to = 1> (n) h = Mul (f, half) c = Ceil (h)
          e = Reshape (c, scalar) r = Range (zero, e, one) w = Mul (r, half) y = Sin (w) }"""
    proto = onnx.parser.parse_model(text)
    (scalar,) = (item for item in proto.graph.initializer if item.name == "scalar")
    scalar.CopyFrom(numpy_helper.from_array(np.zeros(0, np.int64), "scalar"))
    model = ir.from_proto(onnx.shape_inference.infer_shapes(proto))
    found = {node.op_type: node for node in plain(model).graph if node.op_type in ("Ceil", "Reshape", "Sin")}
    assert all(found[op].inputs[0].dtype == ir.DataType.FLOAT for op in ("Ceil", "Reshape"))
    (end,) = (node for node in plain(model).graph if node.op_type == "Cast" and node.inputs[0].name == "n")
    assert end.attributes.get_int("to") == ir.DataType.FLOAT
    assert found["Sin"].inputs[0].dtype == ir.DataType.FLOAT16
