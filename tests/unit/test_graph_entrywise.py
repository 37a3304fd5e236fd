"""Which inputs of an operator have an axis of its output."""

from __future__ import annotations

from pathlib import Path

import onnx
import onnx.parser
import pytest

from trtopt.graph.permute import inputs_along
from trtopt.source.onnx_file import load

DYNAMIC = "g (float[N, S, 8] x, float[N, S, 8] a, float[S, 8] b, float[T, 8] c, float[N, 1, 8] d, float[8] e)"
STATIC = (
    "g (float[2, 6, 8] x, float[2, 6, 8] a, float[6, 1] b, float[2, 3, 6, 4] h, float[2, 3, 4, 6] k, float[8, 6] m, "
    "float[6, 9] c, float[9] e, float[6, 6, 4] s)"
)
CONSTANTS = (
    "<int64[4] split = {0, 0, 2, 4}, int64[4] rest = {2, 6, -1, 4}, int64[2] merged = {12, 8}, int64[4] ones = "
    "{1, 2, 6, 8}, int64[4] copied = {1, 0, 6, 4}, int64[4] written = {1, 6, 6, 4}, int64[1] first = {0}, "
    "int64 zero = {0}, int64[1] second = {1}, int64[1] last = {-1}, float[8] w = {1, 1, 1, 1, 1, 1, 1, 1}>"
)


def found(folder: Path, header: str, body: str, axis: int) -> dict[int, int]:
    text = f'<ir_version: 9, opset_import: ["" : 20]> {header} => (y) {CONSTANTS} {{ {body} }}'
    onnx.save(onnx.parser.parse_model(text), folder / "m.onnx")
    (node,) = (node for node in load(folder / "m.onnx").model.graph if node.op_type not in ("Constant", "Shape"))
    return inputs_along(node, axis)


@pytest.mark.parametrize(
    ("body", "axis", "expected"),
    [
        ("y = Add(x, a)", 1, {0: 1, 1: 1}),
        ("y = Mul(b, x)", 1, {0: 0, 1: 1}),
        ("y = Add(x, b)", 0, {0: 0}),
        ("y = Cast <to = 10> (x)", 0, {0: 0}),
        ("y = MatMul(x, m)", 1, {0: 1}),
        ("y = MatMul(x, m)", 0, {0: 0}),
        ("y = MatMul(x, m)", 2, {}),
        ("y = MatMul(h, k)", 2, {0: 2}),
        ("y = MatMul(h, k)", 3, {}),
        ("y = MatMul(h, k)", 0, {0: 0, 1: 0}),
        ("y = MatMul(m, c)", 0, {0: 0}),
        ("y = MatMul(x, w)", 1, {}),
        ("y = Gemm <transB = 1> (c, c)", 1, {}),
        ("y = Gemm <transB = 1> (c, c, b)", 0, {0: 0, 2: 0}),
        ("y = Gemm <transA = 1> (c, c, e)", 0, {0: 1}),
        ("y = Transpose <perm = [2, 0, 1]> (x)", 2, {0: 1}),
        ("y = Transpose(x)", 0, {0: 2}),
        ("y = Softmax(x)", 1, {0: 1}),
        ("y = Softmax <axis = -2> (x)", 1, {}),
        ("y = LayerNormalization(x, w)", 1, {0: 1}),
        ("y = LayerNormalization <axis = 1> (x, a)", 1, {}),
        ("y = LayerNormalization <axis = 1> (x, a)", 0, {0: 0, 1: 0}),
        ("y = Concat <axis = 2> (x, a)", 1, {0: 1, 1: 1}),
        ("y = Concat <axis = 1> (x, a)", 1, {}),
        ("y = Slice(x, first, second, last)", 1, {0: 1}),
        ("y = Slice(x, first, second, last)", 2, {}),
        ("y = ReduceMean(x, last)", 1, {0: 1}),
        ("y = ReduceMean(x, second)", 1, {}),
        ("y = ReduceMean <keepdims = 0> (x, last)", 1, {0: 1}),
        ("y = ReduceMean <keepdims = 0> (x, second)", 1, {0: 2}),
        ("y = Gather <axis = 2> (x, zero)", 1, {0: 1}),
        ("y = Gather <axis = 1> (x, zero)", 1, {0: 2}),
        ("y = Gather <axis = 1> (x, first)", 1, {}),
        ("y = Gather <axis = 1> (x, first)", 2, {0: 2}),
        ("y = ReduceMean(x)", 1, {}),
        ("y = Unsqueeze(b, first)", 1, {0: 0}),
        ("y = Unsqueeze(b, second)", 2, {0: 1}),
        ("y = Unsqueeze(b, second)", 1, {}),
        ("y = Squeeze(b, last)", 0, {0: 0}),
        ("y = Reshape(x, split)", 1, {0: 1}),
        ("y = Reshape(x, rest)", 1, {0: 1}),
        ("y = Reshape(x, merged)", 0, {}),
        ("y = Reshape(s, copied)", 2, {}),
        ("y = Reshape(s, written)", 2, {0: 1}),
        ("y = Reshape(x, ones)", 2, {0: 1}),
        ("y = Unsqueeze(x, first)", 2, {0: 1}),
        ("y = Flatten <axis = 2> (x)", 0, {}),
        ("y = CumSum(x, second)", 0, {}),
    ],
)
def test_where_the_sizes_are_known(body: str, axis: int, expected: dict[int, int], tmp_path: Path) -> None:
    assert found(tmp_path, STATIC, body, axis) == expected


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("y = Add(x, a)", {0: 1, 1: 1}),
        ("y = Add(x, b)", {0: 1, 1: 0}),
        ("y = Add(x, d)", {0: 1}),
        ("y = Add(x, e)", {0: 1}),
        ("y = Add(x, c)", {}),
        ("y = Reshape(x, split)", {0: 1}),
        ("y = Squeeze(x)", {}),
    ],
)
def test_a_dimension_without_a_number_is_told_by_its_name(body: str, expected: dict[int, int], tmp_path: Path) -> None:
    assert found(tmp_path, DYNAMIC, body, 1) == expected
