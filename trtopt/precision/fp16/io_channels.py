"""An image input with more channels than the network reads: zeros in the weights of the first convolutions."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from trtopt.errors import UsageError
from trtopt.graph import edit

_PLAIN = frozenset({"Cast", "QuantizeLinear", "DequantizeLinear"})
_ARITHMETIC = {"Mul": 1.0, "Div": 1.0, "Add": 0.0, "Sub": 0.0}
"""Operators with constants per channel, and what the constant of a new channel is."""


def pad_channels(value: ir.Value, missing: int, names: edit.Names, where: str) -> None:
    """Give ``value``, an input [N, C, H, W], ``missing`` more channels that change nothing.

    Between the input and the convolutions may stand casts, Q/DQ, and arithmetic with constants that are scalars or one
    per channel. Weights used elsewhere too are left to their other users.

    Raises:
        UsageError: Something else reads the input.
    """
    channels = _channels(value)
    pending = [value]
    while pending:
        item = pending.pop()
        _widen_shape(item, missing)
        if item.is_graph_output():
            raise _refused(f"{item.name} is an output too", where)
        for node, index in list(item.uses()):
            if edit.is_op(node, "Conv") and index == 0 and edit.int_attribute(node, "group", 1) == 1:
                _pad_weight(node, missing, names, where)
            elif node.op_type in _PLAIN and index == 0:
                _pad_constants(node, channels, missing, 1.0, names, where)
                pending.append(node.outputs[0])
            elif edit.is_op(node, *_ARITHMETIC) and any(
                edit.constant_of(operand) is not None for operand in node.inputs
            ):
                _pad_constants(node, channels, missing, _ARITHMETIC[node.op_type], names, where)
                pending.append(node.outputs[0])
            else:
                raise _refused(f"{node.op_type} {node.name} reads it", where)


def _channels(value: ir.Value) -> int:
    dim = value.shape[1] if value.shape is not None else None
    if not isinstance(dim, int):
        raise ValueError(f"{value.name} has no static channels")
    return dim


def _widen_shape(value: ir.Value, missing: int) -> None:
    if value.shape is not None:
        dims = list(value.shape)
        value.shape = ir.Shape([dims[0], _channels(value) + missing, *dims[2:]])


def _pad_weight(node: ir.Node, missing: int, names: edit.Names, where: str) -> None:
    """Zeros along the input channels of a convolution's weight, behind DequantizeLinear where it is quantized."""
    holder, weight = node, node.inputs[1]
    producer = weight.producer() if weight is not None else None
    if producer is not None and edit.is_op(producer, "DequantizeLinear"):
        holder, weight = _own_copy(node, producer, names), producer.inputs[0]
    array = edit.constant_of(weight)
    if array is None or node.graph is None:
        raise _refused(f"the weights of Conv {node.name} are not constants", where)
    zero = np.zeros((), array.dtype)
    if holder is not node:
        point = edit.constant_of(edit.input_of(holder, 2))
        scale = edit.constant_of(edit.input_of(holder, 1))
        if scale is None or (scale.size > 1 and edit.int_attribute(holder, "axis", 1) % array.ndim != 0):
            raise _refused(f"the weights of Conv {node.name} have scales per input channel", where)
        if point is not None and point.astype(np.float64).any():
            raise _refused(f"the weights of Conv {node.name} have a zero point", where)
    filled = np.concatenate([array, np.broadcast_to(zero, (array.shape[0], missing, *array.shape[2:]))], axis=1)
    made = edit.add_initializer(node.graph, names.value(f"{node.outputs[0].name}_weight"), filled.astype(array.dtype))
    holder.replace_input_with(0 if holder is not node else 1, made)
    if holder is not node:
        _set_shape(holder.outputs[0], filled.shape)


def _own_copy(node: ir.Node, dequantize: ir.Node, names: edit.Names) -> ir.Node:
    """The DequantizeLinear of a weight, for ``node`` alone."""
    value = dequantize.outputs[0]
    if len(value.uses()) == 1 or node.graph is None:
        return dequantize
    label = names.value(f"{value.name}_wide")
    copy = ir.node(
        "DequantizeLinear", list(dequantize.inputs), attributes=dict(dequantize.attributes), name=names.node(label)
    )
    copy.outputs[0].name, copy.outputs[0].type = label, value.type
    node.graph.insert_before(node, copy)
    node.replace_input_with(1, copy.outputs[0])
    return copy


def _set_shape(value: ir.Value, shape: tuple[int, ...]) -> None:
    value.shape = ir.Shape(shape)


def _pad_constants(node: ir.Node, channels: int, missing: int, fill: float, names: edit.Names, where: str) -> None:
    """Give the constants of ``node`` an entry for each new channel; those that hold one number stay."""
    for index, value in enumerate(node.inputs):
        array = edit.constant_of(value)
        if array is None or array.size == 1 or node.graph is None:
            continue
        axis = 0 if node.op_type in _PLAIN else array.ndim - 3
        if axis < 0 or array.shape[axis] not in (1, channels):
            raise _refused(f"a constant of {node.op_type} {node.name} is not one per channel", where)
        if array.shape[axis] == channels:
            more = np.full((*array.shape[:axis], missing, *array.shape[axis + 1 :]), fill if index < 2 else 0)
            filled = np.concatenate([array, more.astype(array.dtype)], axis=axis)
            name = names.value(f"{node.outputs[0].name}_constant")
            node.replace_input_with(index, edit.add_initializer(node.graph, name, filled))


def _refused(reason: str, where: str) -> UsageError:
    return UsageError(
        f"The channels of the input cannot be filled up: {reason}",
        where=where,
        remedy="only convolutions ignore channels of zeros; write hwc, which keeps the channels",
    )
