"""Operators that work on each entry of an axis by itself: what they need of their inputs to make a few entries only."""

from __future__ import annotations

import onnx_ir as ir

from trtopt.graph.channels.links import dims_of_value, rank_of
from trtopt.graph.channels.rules import reduced_axes, volume
from trtopt.graph.cost import POINTWISE
from trtopt.graph.edit import constant_of, input_of, int_attribute, ints_attribute

_BROADCAST = POINTWISE - {"QuantizeLinear"} | {"Cast", "Identity", "Max", "Min", "Sum"}
_NORMS = frozenset({"LayerNormalization", "RMSNormalization"})
_ALONG = {"Concat": 0, "LogSoftmax": -1, "Softmax": -1, "Split": 0}
"""Operators that work along the axis in their attribute, and its default from opset 13 on."""

_REDUCE = frozenset({"ReduceL2", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceSum", "ReduceSumSquare"})
_VIEWS = frozenset({"Reshape", "Squeeze", "Unsqueeze"})


def inputs_along(node: ir.Node, axis: int) -> dict[int, int]:
    """The inputs of a node that have ``axis`` of its output, and which axis of theirs it is.

    With the same entries taken from each of them, the node makes those entries of its outputs; a Reshape needs another
    shape for it. A matrix product does so for its rows: the right operand of Q K^T or of softmax(Q K^T) V stays whole.

    Args:
        node: A node of opset 13 or later.
        axis: An axis of its first output, counted from 0, that is not of length 1.

    Returns:
        The axes by input; empty where an entry of the output depends on others of the input, or that is not known.
    """
    values = [value for value in node.inputs if value is not None]
    unknown = any(value.shape is None for value in (*values, node.outputs[0]))
    if node.domain != "" or unknown or any(attribute.is_ref() for attribute in node.attributes.values()):
        return {}
    kind, rank = node.op_type, rank_of(node.outputs[0])
    if kind in _BROADCAST:
        return _broadcast(node, axis)
    if kind in ("MatMul", "Gemm"):
        return _of_product(node, axis)
    if kind in _VIEWS:
        return _of_view(node, axis)
    if kind == "Transpose":
        perm = ints_attribute(node, "perm") or tuple(reversed(range(rank)))
        return {0: perm[axis]}
    if kind in _NORMS:
        plain = not any(value.uses() or value.is_graph_output() for value in node.outputs[1:])
        return _broadcast(node, axis) if plain and axis < int_attribute(node, "axis", -1) % rank else {}
    if kind in _ALONG and int_attribute(node, "axis", _ALONG[kind]) % rank != axis:
        return _broadcast(node, axis) if kind == "Concat" else {0: axis}
    if kind in _REDUCE and int_attribute(node, "keepdims", 1) == 1:
        axes = reduced_axes(node)
        return {0: axis} if axes is not None and axis not in axes else {}
    if kind == "Slice":
        sliced = constant_of(input_of(node, 3))
        return {0: axis} if sliced is not None and axis not in {int(each) % rank for each in sliced} else {}
    return {}


def _same(first: int | ir.SymbolicDim, second: int | ir.SymbolicDim) -> bool:
    """Whether two dimensions are equal whatever the inputs' shapes are."""
    return (isinstance(first, int) or first.value is not None) and first == second


def _broadcast(node: ir.Node, axis: int) -> dict[int, int]:
    """The inputs that have the axis and are not repeated along it; none where one of them may be either."""
    shape, found = node.outputs[0].shape or (), dict[int, int]()
    for index, value in enumerate(node.inputs):
        dims = () if value is None or value.shape is None else value.shape
        at = len(dims) - len(shape) + axis
        if at < 0 or dims[at] == 1:
            continue
        if not _same(dims[at], shape[axis]):
            return {}
        found[index] = at
    return found


def _of_product(node: ir.Node, axis: int) -> dict[int, int]:
    ranks = [rank_of(value) for value in node.inputs if value is not None]
    last = rank_of(node.outputs[0]) - 1
    if min(ranks[:2]) < 2 or axis == last:
        return {}
    if node.op_type == "Gemm":
        bias = input_of(node, 2)
        repeated = bias is None or bias.shape is None or ranks[2] < 2 or bias.shape[0] == 1
        return {0: int_attribute(node, "transA", 0), **({} if repeated else {2: 0})}
    return {0: ranks[0] - 2} if axis == last - 1 else _broadcast(node, axis)


def _of_view(node: ir.Node, axis: int) -> dict[int, int]:
    """The axis of the input that is as long, with as many elements behind each entry."""
    before, after = node.inputs[0], node.outputs[0]
    target = constant_of(input_of(node, 1))  # a Squeeze without axes drops whatever is 1
    if before is None or before.shape is None or after.shape is None or target is None:
        return {}
    dims, size = dims_of_value(before) or (), volume((dims_of_value(after) or ())[axis + 1 :])
    for index, dim in enumerate(before.shape):
        if size is None or not _same(dim, after.shape[axis]) or volume(dims[index + 1 :]) != size:
            continue
        # A zero copies the length of the input's axis at its place, which another axis of the output must not do.
        copied = node.op_type == "Reshape" and index != axis and index < len(target) and target[index] == 0
        return {} if copied else {0: index}
    return {}
