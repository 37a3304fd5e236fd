"""Arithmetic of ONNX nodes. Conventions: 1 multiply-add = 2 flop."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import onnx_ir as ir

from trtopt.graph.edit import (
    all_nodes,
    constant_tensor_of,
    input_of,
    int_attribute,
    is_op,
    string_attribute,
)

Shapes = Mapping[str, tuple[int, ...]]
"""Static shapes by value name (see :func:`trtopt.graph.shapes.static_shapes`)."""

_FREE = frozenset(
    {
        "Constant", "ConstantOfShape", "Identity", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Shape", "Size",
        "If", "Loop", "Scan",
    }
)  # fmt: skip
"""No arithmetic of their own: views, constants, and control flow, whose nested nodes are counted."""

_GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}


def flop_by_node(model: ir.Model, shapes: Shapes) -> dict[str, int]:
    """Floating-point operations of every node, nested graphs included (a loop's body once).

    Convolutions, matrix products and recurrent layers count their multiply-adds and bias additions; every other
    operator counts one per output element.

    Args:
        model: The model; every node has a unique name.
        shapes: Static shapes by value name.

    Returns:
        Flop by node name; a node whose shapes are not known is absent.
    """
    result: dict[str, int] = {}
    for node in all_nodes(model.graph):
        count = _COUNTS.get(node.op_type, _elementwise) if node.domain == "" else _elementwise
        flop = count(node, shapes)
        if flop is not None:
            result[str(node.name)] = flop
    return result


def is_eligible_for_int8(node: ir.Node) -> bool:
    """Whether a node can run in INT8 for a gain: Conv, Gemm, MatMul with constant weights, not depthwise.

    Weights behind a DequantizeLinear count as constant. A convolution is depthwise when each group has one input
    channel.
    """
    if not is_op(node, "Conv", "Gemm", "MatMul"):
        return False
    weight = constant_weight(node)
    if weight is None:
        return False
    return not (node.op_type == "Conv" and int_attribute(node, "group", 1) > 1 and weight.shape[1] == 1)


def constant_weight(node: ir.Node) -> ir.TensorProtocol | None:
    """The constant weight of a Conv, ConvTranspose, Gemm or MatMul (its second input), through DequantizeLinear."""
    value = input_of(node, 1)
    producer = None if value is None else value.producer()
    while producer is not None and is_op(producer, "DequantizeLinear", "QuantizeLinear"):
        value = producer.inputs[0]
        producer = None if value is None else value.producer()
    return constant_tensor_of(value)


def _shape(node: ir.Node, index: int, shapes: Shapes) -> tuple[int, ...] | None:
    value = input_of(node, index)
    return None if value is None else shapes.get(str(value.name))


def _out_shape(node: ir.Node, shapes: Shapes) -> tuple[int, ...] | None:
    """The shape of the first output that is there."""
    value = next((value for value in node.outputs if value.name), None)
    return None if value is None else shapes.get(str(value.name))


def _elementwise(node: ir.Node, shapes: Shapes) -> int | None:
    if node.domain == "" and node.op_type in _FREE:
        return 0
    found = [shapes.get(str(value.name)) for value in node.outputs if value.name]
    return None if None in found else sum(math.prod(shape) for shape in found if shape is not None)


def _conv(node: ir.Node, shapes: Shapes) -> int | None:
    """Every output element is a sum over the kernel and the input channels of its group."""
    weight, out = _shape(node, 1, shapes), _out_shape(node, shapes)
    if weight is None or out is None:
        return None
    bias = math.prod(out) if input_of(node, 2) is not None else 0
    return 2 * math.prod(out) * math.prod(weight[1:]) + bias


def _conv_transpose(node: ir.Node, shapes: Shapes) -> int | None:
    """Every input element goes to the kernel times the output channels of its group."""
    data, weight, out = _shape(node, 0, shapes), _shape(node, 1, shapes), _out_shape(node, shapes)
    if data is None or weight is None or out is None:
        return None
    bias = math.prod(out) if input_of(node, 2) is not None else 0
    return 2 * math.prod(data) * math.prod(weight[1:]) + bias


def _gemm(node: ir.Node, shapes: Shapes) -> int | None:
    left, out = _shape(node, 0, shapes), _out_shape(node, shapes)
    if left is None or out is None:
        return None
    inner = left[0 if int_attribute(node, "transA", 0) else 1]
    bias = math.prod(out) if input_of(node, 2) is not None else 0
    return 2 * math.prod(out) * inner + bias


def _matmul(node: ir.Node, shapes: Shapes) -> int | None:
    left, out = _shape(node, 0, shapes), _out_shape(node, shapes)
    return None if not left or out is None else 2 * math.prod(out) * left[-1]


def _einsum(node: ir.Node, shapes: Shapes) -> int | None:
    """Two operands: a multiply-add per point of the space of all indices; with ``...`` the broadcast part is dense."""
    found = [_shape(node, index, shapes) for index in range(len(node.inputs))]
    equation = string_attribute(node, "equation", "").replace(" ", "").split("->")[0].split(",")
    if len(found) != 2 or any(shape is None for shape in found):
        return _elementwise(node, shapes)
    sizes: dict[str, int] = {}
    for term, shape in zip(equation, found, strict=True):
        labels = _labels(term, len(shape or ()))
        sizes.update((label, max(size, sizes.get(label, 1))) for label, size in zip(labels, shape or (), strict=True))
    return 2 * math.prod(sizes.values())


def _labels(term: str, rank: int) -> list[str]:
    """One label per axis; those of an ellipsis are counted from the right so that operands share them."""
    before, ellipsis, after = term.partition("...")
    if not ellipsis:
        return list(term)
    hidden = rank - len(before) - len(after)
    return [*before, *(f".{hidden - index}" for index in range(hidden)), *after]


def _recurrent(node: ir.Node, shapes: Shapes) -> int | None:
    """X is [sequence, batch, inputs] (batch first with layout 1), W [directions, gates * hidden, inputs]."""
    data, weight = _shape(node, 0, shapes), _shape(node, 1, shapes)
    if data is None or weight is None:
        return None
    steps = data[0] * data[1]
    directions, rows, inputs = weight
    hidden = rows // _GATES[node.op_type]
    return 2 * steps * directions * rows * (inputs + hidden)


_COUNTS: dict[str, Callable[[ir.Node, Shapes], int | None]] = {
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "Gemm": _gemm,
    "MatMul": _matmul,
    "Einsum": _einsum,
    "LSTM": _recurrent,
    "GRU": _recurrent,
    "RNN": _recurrent,
}
