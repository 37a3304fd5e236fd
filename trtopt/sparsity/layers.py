"""Which layers of a model can be pruned to 2:4, and why the others cannot."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from trtopt.graph import edit
from trtopt.precision.ptq.layer_inputs import layer_of
from trtopt.sparsity.pattern import is_sparse, reduction_axis, why_not

_PRUNED = ("Conv", "Gemm", "MatMul")
"""Operators that TensorRT has sparse kernels for (its documentation, "Structured Sparsity")."""

_FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE)


@dataclass(frozen=True)
class Candidate:
    """A weight that can be pruned.

    Attributes:
        weight: The name of its value.
        nodes: The names of the nodes that read it, all as a weight, in the order of the graph.
        axis: Its reduction axis.
        sparse: Whether it is 2:4 as it is.
    """

    weight: str
    nodes: tuple[str, ...]
    axis: int
    sparse: bool


@dataclass(frozen=True)
class Candidates:
    """What can be pruned in a model.

    Attributes:
        layers: The weights that can, in the order of the graph.
        refused: By the names of the other Conv, Gemm and MatMul: why not.
    """

    layers: tuple[Candidate, ...]
    refused: dict[str, str]


def candidates(model: ir.Model) -> Candidates:
    """Find the weights of Conv, Gemm and MatMul that can be 2:4.

    Args:
        model: A model whose nodes are named; nodes of nested graphs are refused. Not changed.
    """
    readers: dict[ir.Value, list[ir.Node]] = {}
    refused: dict[str, str] = {}
    for node in edit.all_nodes(model.graph):
        if not edit.is_op(node, *_PRUNED):
            continue
        reason = _why_not(node, model.graph)
        weight = edit.input_of(node, 1)
        if reason or weight is None:
            refused[str(node.name)] = reason
        else:
            readers.setdefault(weight, []).append(node)
    found = []
    for weight, nodes in readers.items():
        reason = _why_not_shared(weight, nodes)
        if reason:
            refused.update((str(node.name), reason) for node in nodes)
        else:
            found.append(_candidate(weight, nodes))
    return Candidates(tuple(found), refused)


def _why_not(node: ir.Node, main: ir.Graph) -> str:
    """Why a node's weight cannot be pruned, whoever else reads it; empty where it can."""
    if node.graph is not main:
        return "it is inside of a nested graph"
    layer = layer_of(node)
    if isinstance(layer, str):
        return layer
    value = edit.input_of(node, 1)
    if value is not None and value.is_graph_input():
        return "its weight is an input of the network with a default"
    tensor = edit.constant_tensor_of(value)
    if tensor is not None and tensor.dtype not in _FLOATS:
        return f"its weight is {tensor.dtype.name}"
    return why_not(layer.weight.shape, reduction_axis(node), layer.groups)


def _why_not_shared(weight: ir.Value, nodes: list[ir.Node]) -> str:
    """Why a weight that all of ``nodes`` could prune cannot be pruned for all of its readers."""
    others = [user for user, index in weight.uses() if index != 1 or user not in nodes]
    if others:
        return f"its weight is read by {others[0].op_type} {others[0].name} too"
    if weight.is_graph_output():
        return "its weight is an output of the network"
    if len({reduction_axis(node) for node in nodes}) > 1:
        return "nodes that share its weight sum over different axes of it"
    if len({edit.int_attribute(node, "group", 1) for node in nodes}) > 1:
        return "nodes that share its weight have different numbers of groups"
    array = edit.constant_of(weight)
    if array is not None and not np.isfinite(array).all():
        return "its weight holds values that are not finite"
    return ""


def _candidate(weight: ir.Value, nodes: list[ir.Node]) -> Candidate:
    axis, array = reduction_axis(nodes[0]), edit.constant_of(weight)
    if array is None:
        raise ValueError(f"{weight.name} is not constant")
    names = tuple(str(node.name) for node in nodes)
    return Candidate(str(weight.name), names, axis, is_sparse(array, axis))
