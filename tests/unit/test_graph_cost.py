"""Flop of nodes against counts made by hand, and what INT8 is meant for."""

from __future__ import annotations

import onnx.parser
import onnx_ir as ir
import pytest

from trtopt.graph.cost import flop_by_node, is_eligible_for_int8
from trtopt.graph.edit import all_nodes
from trtopt.graph.shapes import infer_shapes, static_shapes

HEADER = '<ir_version: 10, opset_import: ["" : 21]>'


def one_node(graph: str) -> tuple[ir.Model, ir.Node]:
    model = infer_shapes(ir.from_proto(onnx.parser.parse_model(HEADER + graph)))
    node = list(model.graph)[-1]
    node.name = "node"
    return model, node


@pytest.mark.parametrize(
    ("graph", "flop"),
    [
        # 2 * outputs (2*8*6*6) * kernel (3*3) * channels 4; then the bias.
        ("g (float[2, 4, 8, 8] x, float[8, 4, 3, 3] w) => (y) { y = Conv(x, w) }", 2 * 576 * 36),
        (
            "g (float[2, 4, 8, 8] x, float[8, 4, 3, 3] w, float[8] b) => (y) { y = Conv(x, w, b) }",
            2 * 576 * 36 + 576,
        ),
        ("g (float[2, 4, 8, 8] x, float[8, 1, 3, 3] w) => (y) { y = Conv <group = 4> (x, w) }", 2 * 576 * 9),
        # Every input (2*4*5*5) meets 8 output channels times 3x3.
        ("g (float[2, 4, 5, 5] x, float[4, 8, 3, 3] w) => (y) { y = ConvTranspose(x, w) }", 2 * 200 * 72),
        ("g (float[3, 5] x, float[5, 7] w) => (y) { y = Gemm(x, w) }", 2 * 3 * 5 * 7),
        ("g (float[5, 3] x, float[5, 7] w, float[7] b) => (y) { y = Gemm <transA = 1> (x, w, b) }", 2 * 105 + 21),
        ("g (float[2, 3, 5] x, float[5, 7] w) => (y) { y = MatMul(x, w) }", 2 * 2 * 3 * 5 * 7),
        ('g (float[2, 3, 5] x, float[2, 5, 7] w) => (y) { y = Einsum <equation = "bij,bjk->bik"> (x, w) }', 2 * 210),
        ('g (float[2, 3, 5] x, float[5, 7] w) => (y) { y = Einsum <equation = "...j,jk->...k"> (x, w) }', 2 * 210),
        # 3 steps * batch 2 * 4 gates of 4 units * (5 inputs + 4 states).
        (
            "g (float[3, 2, 5] x, float[1, 16, 5] w, float[1, 16, 4] r) => (y) "
            "{ y = LSTM <hidden_size = 4> (x, w, r) }",
            2 * 6 * 16 * 9,
        ),
        ("g (float[2, 3] x) => (y) { y = Relu(x) }", 6),
        ("g (float[2, 3] x) => (y) { y = Identity(x) }", 0),
        ("g (float[2, 6] x) => (y, z) { y, z = Split <axis = 1, num_outputs = 2> (x) }", 0),
        ("g (float[2, 3] x) => (y) { y = Softmax(x) }", 5 * 6),
        ("g (float[2, 3, 4] x) => (y) { y = ReduceSum <keepdims = 0> (x) }", 24),
        # 9 per output element.
        (
            "g (float[1, 2, 4, 4] x) => (y) { y = MaxPool <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (x) }",
            9 * 32,
        ),
        # Two neighbours along each of two axes.
        (
            "g (float[1, 2, 4, 4] x) => (y) <float[4] s = {1.0, 1.0, 2.0, 2.0}> "
            '{ y = Resize <mode = "linear"> (x, , s) }',
            2 * 4 * 128,
        ),
        ("g (float[1, 2, 4, 4] x) => (y) <float[4] s = {1.0, 1.0, 2.0, 2.0}> { y = Resize(x, , s) }", 0),
        # "bhid,bhjd->bhij", then two operands more, contracted from left to right: 2*2*3*4*5, then 2*2*3*5*6.
        (
            "g (float[2, 3, 4] a, float[2, 4, 5] b, float[2, 5, 6] c) => (y) "
            '{ y = Einsum <equation = "bij,bjk,bkl->bil"> (a, b, c) }',
            2 * 2 * 3 * 4 * 5 + 2 * 2 * 3 * 5 * 6,
        ),
        ('g (float[2, 3] x) => (y) { y = Einsum <equation = "ij->ji"> (x) }', 0),
        ('g (float[2, 3] x) => (y) { y = Einsum <equation = "ij->i"> (x) }', 6),
        # Shape arithmetic is done on the host.
        ("g (int64[3] x) => (y) { y = Mul(x, x) }", 0),
    ],
)
def test_flop(graph: str, flop: int) -> None:
    model, _ = one_node(graph)
    assert flop_by_node(model, static_shapes(model, {}))["node"] == flop


def test_nodes_of_unknown_shape_are_absent() -> None:
    model, _ = one_node("g (float[2, 3] x) => (y) { i = NonZero(x) f = Cast <to = 1> (i) y = Relu(f) }")
    assert "node" not in flop_by_node(model, static_shapes(model, {}))


def test_operators_without_a_cost_are_absent_not_zero() -> None:
    model, _ = one_node("g (float[2, 2] x) => (y) { y = Det(x) }")
    assert flop_by_node(model, static_shapes(model, {})) == {}


LOOP = """<ir_version: 10, opset_import: ["" : 21]>
g (float[2, 3] x) => (float[2, 3] y) <int64 trips = {7}, bool go = {1}> {
    y = Loop <body = b (int64 i, bool c, float[2, 3] s) => (bool d, float[2, 3] t) {
        d = Identity(c)
        t = Relu(s)
    }> (trips, go, x)
}"""


def test_the_body_of_a_loop_counts_once_per_iteration() -> None:
    model = infer_shapes(ir.from_proto(onnx.parser.parse_model(LOOP)))
    for index, node in enumerate(all_nodes(model.graph)):
        node.name = f"{node.op_type}{index}"
    flop = flop_by_node(model, static_shapes(model, {}))
    assert {name.rstrip("0123456789"): count for name, count in flop.items()} == {"Loop": 0, "Identity": 0, "Relu": 42}


@pytest.mark.parametrize(
    ("graph", "eligible"),
    [
        ("g (float[1, 4, 8, 8] x) => (y) <float[8, 4, 1, 1] w> { y = Conv(x, w) }", True),
        ("g (float[1, 4, 8, 8] x) => (y) <float[8, 2, 1, 1] w> { y = Conv <group = 2> (x, w) }", True),
        ("g (float[1, 4, 8, 8] x) => (y) <float[8, 1, 1, 1] w> { y = Conv <group = 4> (x, w) }", False),
        ("g (float[1, 1, 8, 8] x) => (y) <float[8, 1, 1, 1] w> { y = Conv(x, w) }", True),
        ("g (float[2, 4] x) => (y) <float[4, 4] w> { y = MatMul(x, w) }", True),
        ("g (float[2, 4] x) => (y) <float[4, 4] w> { y = Gemm(x, w) }", True),
        ("g (float[2, 4] x, float[4, 4] w) => (y) { y = MatMul(x, w) }", False),
        ("g (float[2, 4] x) => (y) <float[2, 4] w> { y = Add(x, w) }", False),
    ],
)
def test_eligibility_for_int8(graph: str, eligible: bool) -> None:
    proto = onnx.parser.parse_model(HEADER + graph)
    for info in proto.graph.value_info:
        dims = [dim.dim_value for dim in info.type.tensor_type.shape.dim]
        count = 1
        for dim in dims:
            count *= dim
        proto.graph.initializer.append(onnx.helper.make_tensor(info.name, 1, dims, [0.0] * count))
    del proto.graph.value_info[:]
    model = ir.from_proto(proto)
    assert is_eligible_for_int8(list(model.graph)[-1]) is eligible


def test_quantized_constant_weights_are_eligible() -> None:
    _, node = one_node(
        "g (float[2, 2] x) => (y) <int8[2, 2] w = {1, 2, 3, 4}, float s = {0.5}> "
        "{ d = DequantizeLinear(w, s) y = MatMul(x, d) }"
    )
    assert is_eligible_for_int8(node)
