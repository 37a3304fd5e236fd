"""Which outputs hold scores of classes, by the graph: those are bounded by agreement, others by SQNR."""

from __future__ import annotations

import numpy as np
import onnx.parser
import onnx_ir as ir
import pytest
from onnx import numpy_helper

from trtopt.accuracy.scores import LEAST_PROBABILITY, held_by, least_size


@pytest.mark.parametrize(
    ("body", "holds"),
    [
        ("y = MatMul(x, w)", "scores"),
        ("h = MatMul(x, w) b = Add(h, v) y = Softmax(b)", "scores"),
        ("h = MatMul(x, w) y = Sigmoid(h)", "scores"),
        ("s = Softmax(x) y = Squeeze(s)", "scores"),
        ("h = MatMul(x, w) y = Add(h, x)", "values"),
        ("h = MatMul(x, w) y = LayerNormalization(h, v)", "values"),
        ("h = MatMul(x, w) y = Tanh(h)", "values"),
        ("h = MatMul(x, w) y = Concat <axis = 1> (h, x)", "values"),
        ("h = MatMul(x, w) y, i = TopK(h, k)", "selection"),
        ("h = MatMul(x, w) i = ArgMax(h) c = Cast <to = 1> (i) y = Identity(c)", "values"),
        ("h = MatMul(x, w) i = ArgMax <axis = 1, keepdims = 0> (h) y = Gather(h, i)", "selection"),
    ],
)
def test_an_output_by_its_graph(body: str, holds: str) -> None:
    assert _held(body, "float[N, 4] x", "float[N, 4] y") == holds


def test_a_sigmoid_per_position_gives_boxes() -> None:
    assert _held("h = MatMul(x, w) y = Sigmoid(h)", "float[N, 100, 4] x", "float[N, 100, 4] y") == "values"


def test_a_class_that_was_chosen_is_an_answer() -> None:
    assert _held("h = MatMul(x, w) y = ArgMax <axis = 1> (h)", "float[N, 4] x", "int64[N, 1] y") == "scores"


@pytest.mark.parametrize(
    ("body", "least"),
    [
        ("y = Sigmoid(x)", LEAST_PROBABILITY),
        ("s = Sigmoid(x) t = Transpose(s) y = Identity(t)", LEAST_PROBABILITY),
        ("s = Sigmoid(x) t = HardSigmoid(x) y = Concat <axis = 1> (s, t)", LEAST_PROBABILITY),
        ("s = Sigmoid(x) y = Concat <axis = 1> (s, x)", 0.0),
        ("s = Sigmoid(x) y = Mul(s, x)", 0.0),
        ("y = Softmax(x)", 0.0),
        ("y = Identity(x)", 0.0),
    ],
)
def test_probabilities_have_a_least_size(body: str, least: float) -> None:
    model = _parsed(body, "float[4, 4] x", "float[4, N] y")
    assert least_size(model.graph.outputs[0]) == least


def _held(body: str, inputs: str, output: str) -> str:
    return held_by(_parsed(body, inputs, output), ["y"])["y"]


def _parsed(body: str, inputs: str, output: str) -> ir.Model:
    found = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> g ({inputs}) => ({output}) {{ {body} }}')
    weights = {"w": np.ones((4, 4), np.float32), "v": np.ones(4, np.float32), "k": np.asarray([2], np.int64)}
    found.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in weights.items())
    return ir.serde.deserialize_model(found)
