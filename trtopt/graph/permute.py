"""Operators by their axes: with the axes in another order, or for a few entries of an axis only.

A permutation ``perm`` is that of a Transpose: the node works on ``v = Transpose_perm(w)`` and is to work on ``w``, so
that axis ``i`` of ``v`` is axis ``perm[i]`` of ``w``.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from trtopt.graph import edit
from trtopt.graph.channels.rules import rank_of, reduced_axes, volume
from trtopt.graph.cost import POINTWISE
from trtopt.graph.edit import constant_of, input_of, int_attribute, ints_attribute

Perm = tuple[int, ...]

_UNARY = frozenset(
    """
    Abs BitwiseNot Cast Ceil Celu Clip Cos DequantizeLinear Elu Erf Exp Floor Gelu HardSigmoid HardSwish Identity IsInf
    IsNaN LeakyRelu Log Mish Neg Not QuantizeLinear Reciprocal Relu Round Selu Sigmoid Sign Sin Softplus Softsign Sqrt
    Swish Tan Tanh ThresholdedRelu
    """.split()
)
"""Element by element in the first input; the others hold one number each."""

_BROADCAST = edit.BROADCAST | {"PRelu"}
_REDUCE = frozenset(
    """
    ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare
    """.split()
)
_AXIS_DEFAULTS = {"Concat": 0, "Split": 0, "Softmax": -1, "LogSoftmax": -1, "ArgMax": 0, "ArgMin": 0}
"""Operators whose only axes are in the attribute ``axis``, and its default (Softmax: from opset 13 on)."""


def inverse(perm: Perm) -> Perm:
    """The permutation that undoes ``perm``."""
    return tuple(perm.index(axis) for axis in range(len(perm)))


def data_inputs(node: ir.Node, rank: int) -> list[int]:
    """Which inputs of a node that :func:`can_permute` are tensors of this rank that something computes."""
    count = len(node.inputs) if node.op_type in _BROADCAST or node.op_type == "Concat" else 1
    return [i for i in range(count) if edit.constant_tensor_of(node.inputs[i]) is None and _rank(node, i) == rank]


def can_permute(node: ir.Node, perm: Perm, opset: int) -> bool:
    """Whether ``node`` can work on its data with the axes in another order, giving its output in that order.

    A node that drops axes (``keepdims=0``, Squeeze) counts when the axes that stay keep their order: its output is then
    the same in both.
    """
    rank = len(perm)
    if node.domain != "" or any(attribute.is_ref() for attribute in node.attributes.values()):
        return False
    if node.op_type in _BROADCAST:
        return _broadcasts(node, rank)
    if _rank(node, 0) != rank or edit.constant_tensor_of(node.inputs[0]) is not None:
        return False
    if node.op_type in _UNARY:
        return all(_is_single(value) for value in node.inputs[1:])
    if node.op_type == "Concat":
        # A constant part would have to have the full rank: checked, because it is transposed.
        return all(_rank(node, index) == rank for index in range(len(node.inputs)))
    if node.op_type in ("Softmax", "LogSoftmax"):
        return opset >= 13
    if node.op_type in ("ArgMax", "ArgMin"):
        return edit.int_attribute(node, "keepdims", 1) == 1
    if node.op_type == "Pad":
        axes = edit.input_of(node, 3)
        return edit.constant_of(edit.input_of(node, 1)) is not None and (
            axes is None or edit.constant_of(axes) is not None
        )
    if node.op_type == "Slice":
        axes, starts = edit.input_of(node, 3), edit.static_shape(edit.input_of(node, 1))
        return edit.constant_of(axes) is not None if axes is not None else starts is not None
    if node.op_type in _REDUCE or node.op_type == "Squeeze":
        dropped = _axes(node, rank)
        stay = [perm[axis] for axis in range(rank) if axis not in (dropped or ())]
        return dropped is not None and (keeps_rank(node) or stay == sorted(stay))
    return node.op_type == "Split"


def keeps_rank(node: ir.Node) -> bool:
    """Whether the outputs of a node that :func:`can_permute` have the axes of its data."""
    return node.op_type != "Squeeze" and (node.op_type not in _REDUCE or edit.int_attribute(node, "keepdims", 1) == 1)


def permute(node: ir.Node, perm: Perm, names: edit.Names) -> None:
    """Change attributes and constants of a node that :func:`can_permute`; its data inputs are the caller's."""
    rank = len(perm)
    if node.op_type in _BROADCAST or node.op_type == "Concat":
        for index, value in enumerate(node.inputs):
            array = edit.constant_of(value)
            if array is not None and (array.size > 1 or node.op_type == "Concat"):
                full = array.reshape((1,) * (rank - array.ndim) + array.shape)
                _set_constant(node, index, np.ascontiguousarray(full.transpose(inverse(perm))), names)
    if node.op_type in _AXIS_DEFAULTS:
        axis = edit.int_attribute(node, "axis", _AXIS_DEFAULTS[node.op_type])
        node.attributes["axis"] = ir.AttrInt64("axis", perm[axis % rank])
    elif node.op_type == "Pad":
        _permute_pad(node, perm, names)
    elif node.op_type == "Slice":
        _permute_slice(node, perm, names)
    elif node.op_type in _REDUCE or node.op_type == "Squeeze":
        axes = [perm[axis] for axis in _axes(node, rank) or ()]
        if "axes" in node.attributes:
            node.attributes["axes"] = ir.AttrInt64s("axes", sorted(axes))
        elif edit.input_of(node, 1) is not None:
            _set_constant(node, 1, np.asarray(sorted(axes), np.int64), names)


def _rank(node: ir.Node, index: int) -> int | None:
    value = edit.input_of(node, index)
    return None if value is None or value.shape is None else len(value.shape)


def _is_single(value: ir.Value | None) -> bool:
    """Whether a value is left out, or holds one number."""
    return value is None or (edit.static_shape(value) is not None and set(edit.static_shape(value) or ()) <= {1})


def _broadcasts(node: ir.Node, rank: int) -> bool:
    """Whether each input is data of the full rank, or a constant, or one number; and one of them is data."""
    if edit.is_op(node, "PRelu") and _rank(node, 0) != rank:
        return False
    for index, value in enumerate(node.inputs):
        constant, found = edit.constant_tensor_of(value), _rank(node, index)
        if constant is not None:
            if len(constant.shape) > rank:
                return False
        elif found != rank and not (found is not None and found < rank and _is_single(value)):
            return False
    return bool(data_inputs(node, rank))


def _axes(node: ir.Node, rank: int) -> list[int] | None:
    """The axes a reduction or Squeeze names, from 0 on; None where they are not constants."""
    axes = edit.axes_of(node)
    if axes is None and edit.input_of(node, 1) is not None:
        return None
    if not axes:
        # A reduction over everything; a Squeeze of whatever is one; or nothing at all (noop_with_empty_axes).
        plain = node.op_type in _REDUCE and edit.int_attribute(node, "noop_with_empty_axes", 0) == 0
        return list(range(rank)) if plain else None
    return [axis % rank for axis in axes]


def _permute_pad(node: ir.Node, perm: Perm, names: edit.Names) -> None:
    axes, pads = edit.constant_of(edit.input_of(node, 3)), edit.constant_of(edit.input_of(node, 1))
    rank = len(perm)
    if axes is not None:
        moved = np.asarray([perm[int(axis) % rank] for axis in axes], np.int64)
        _set_constant(node, 3, moved, names)
    elif pads is not None:
        order = list(inverse(perm))
        _set_constant(node, 1, np.ascontiguousarray(pads.reshape(2, rank)[:, order].reshape(-1)), names)


def _permute_slice(node: ir.Node, perm: Perm, names: edit.Names) -> None:
    axes = edit.constant_of(edit.input_of(node, 3))
    if axes is None:
        starts = node.inputs[1]
        dtype = np.int64 if starts is None or starts.dtype is None else starts.dtype.numpy()
        axes = np.arange((edit.static_shape(starts) or (0,))[0], dtype=dtype)
    if len(node.inputs) < 4:
        node.resize_inputs(4)
    # Starts, ends and axes are of one type.
    _set_constant(node, 3, np.asarray([perm[int(axis) % len(perm)] for axis in axes], axes.dtype), names)


def _set_constant(node: ir.Node, index: int, array: np.ndarray, names: edit.Names) -> None:
    name = names.value(f"{node.outputs[0].name}_constant")
    node.replace_input_with(index, edit.add_initializer(edit.graph_of(node), name, array))


_BY_ELEMENT = POINTWISE - {"QuantizeLinear"} | {"Cast", "Identity", "Max", "Min", "Sum"}
_NORMS = frozenset({"LayerNormalization", "RMSNormalization"})
_ALONG = {"Concat": 0, "LogSoftmax": -1, "Softmax": -1, "Split": 0}
"""Operators that work along the axis in their attribute, and its default from opset 13 on."""

_REDUCE_ENTRIES = frozenset({"ReduceL2", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceSum", "ReduceSumSquare"})
_VIEWS = frozenset({"Reshape", "Squeeze", "Unsqueeze"})


def inputs_along(node: ir.Node, axis: int) -> dict[int, int]:
    """The inputs of a node of opset 13 or later that have ``axis`` of its output, and which axis of theirs it is.

    With the same entries taken from each of them, the node makes those entries of its outputs; a Reshape needs another
    shape for it. A matrix product does so for its rows: the right operand of Q K^T or of softmax(Q K^T) V stays whole.
    The axis is one of the first output, counted from 0, and not of length 1.

    Returns:
        The axes by input; empty where an entry of the output depends on others of the input, or that is not known.
    """
    values = [value for value in node.inputs if value is not None]
    unknown = any(value.shape is None for value in (*values, node.outputs[0]))
    if node.domain != "" or unknown or any(attribute.is_ref() for attribute in node.attributes.values()):
        return {}
    kind, rank = node.op_type, rank_of(node.outputs[0])
    if kind in _BY_ELEMENT:
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
    if kind in _REDUCE_ENTRIES:
        axes, count = reduced_axes(node), rank_of(node.inputs[0])
        if axes is None:
            return {}
        kept = [i for i in range(count) if i not in axes or int_attribute(node, "keepdims", 1) == 1]
        return {} if kept[axis] in axes else {0: kept[axis]}
    if kind == "Gather":
        return _of_gather(node, axis)
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


def _of_gather(node: ir.Node, axis: int) -> dict[int, int]:
    """The axis of the data, where it is not one that the indices give."""
    taken = int_attribute(node, "axis", 0) % rank_of(node.inputs[0])
    if axis < taken:
        return {0: axis}
    count = rank_of(node.inputs[1])
    return {0: axis - count + 1} if axis >= taken + count else {}


def _of_view(node: ir.Node, axis: int) -> dict[int, int]:
    """The axis of the input that is as long, with as many elements behind each entry."""
    before, after = node.inputs[0], node.outputs[0]
    target = constant_of(input_of(node, 1))  # a Squeeze without axes drops whatever is 1
    if before is None or before.shape is None or after.shape is None or target is None:
        return {}
    if node.op_type in ("Squeeze", "Unsqueeze"):
        long, short = (before, after) if node.op_type == "Squeeze" else (after, before)
        gone = {int(each) % rank_of(long) for each in target.ravel()}
        kept = [each for each in range(rank_of(long)) if each not in gone]
        if len(kept) != rank_of(short):
            return {}
        return {0: kept[axis]} if node.op_type == "Squeeze" else {0: kept.index(axis)} if axis in kept else {}
    dims, size = edit.dims_of_value(before) or (), volume((edit.dims_of_value(after) or ())[axis + 1 :])
    for index, dim in enumerate(before.shape):
        if size is None or not _same(dim, after.shape[axis]) or volume(dims[index + 1 :]) != size:
            continue
        # A zero copies the length of the input's axis at its place, which another axis of the output must not do.
        copied = index != axis and index < len(target) and target[index] == 0
        return {} if copied else {0: index}
    return {}
