"""Which layers of a model can be pruned to 2:4, why the others cannot, and a model with pruned weights.

The 2:4 pattern of Sparse Tensor Cores: of each 4 consecutive weights of a sum, at most 2 are not zero.

The weights of a sum are those of one output channel along the reduction axis: K of a matrix product; the input channels
of a group, for each kernel position by itself, of a convolution (TensorRT documentation, "Structured Sparsity": "for
each output channel and for each spatial pixel in the kernel weights, every four input channels must have at least two
zeros").
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import onnx_ir as ir

from trtopt.graph import edit
from trtopt.precision.bias import add_bias
from trtopt.precision.ptq.layer_walk import layer_of

GROUP = 4
"""Consecutive weights that share a choice."""

KEPT = 2
"""Of which this many may differ from zero."""


def reduction_axis(node: ir.Node) -> int:
    """The axis of a weight (input 1) along which a Conv, Gemm or MatMul sums: 0 or 1."""
    return 1 if node.op_type == "Conv" or edit.int_attribute(node, "transB", 0) else 0


def best_mask(saliency: np.ndarray, axis: int) -> np.ndarray:
    """The two of each four that matter most: bool, True where the weight stays. Of equals the first ones stay.

    Args:
        saliency: What each weight is worth, of the weight's shape; not NaN. Magnitudes give the mask closest to the
            weight.
        axis: The weight's reduction axis.

    Raises:
        ValueError: The size of the axis is not a multiple of 4.
    """
    fours = _fours(saliency, axis)
    mask = np.empty(fours.shape, bool)
    for index in range(GROUP):
        better = np.zeros(fours.shape[:-1], np.int8)
        for other in range(GROUP):
            if other != index:
                wins = np.greater_equal if other < index else np.greater
                better += wins(fours[..., other], fours[..., index])
        mask[..., index] = better < KEPT
    return np.ascontiguousarray(np.moveaxis(mask.reshape(np.moveaxis(saliency, axis, -1).shape), -1, axis))


def is_sparse(weight: np.ndarray, axis: int) -> bool:
    """Whether a weight is 2:4 along its reduction axis; one whose axis is not a multiple of 4 is not."""
    return not weight.shape[axis] % GROUP and bool((np.count_nonzero(_fours(weight, axis), axis=-1) <= KEPT).all())


def kept_share(weight: np.ndarray, mask: np.ndarray) -> float:
    """The share of a weight's magnitude, sum of |w|, that a mask keeps: 0..1, and 1 for a weight of zeros."""
    magnitude = np.abs(np.asarray(weight, np.float64))
    total = float(magnitude.sum())
    return float(magnitude.sum(where=mask)) / total if total else 1.0


def why_not(shape: tuple[int, ...], axis: int, groups: int = 1) -> str:
    """Why a weight of this shape cannot be 2:4; empty where it can."""
    size = shape[axis]
    if not math.prod(shape):
        return "its weight is empty"
    if size % GROUP == 0:
        return ""
    if groups > 1:
        return f"each of its {groups} groups reads {size} channels: no multiple of {GROUP}"
    return f"it sums over {size} channels: no multiple of {GROUP}"


def _fours(array: np.ndarray, axis: int) -> np.ndarray:
    """``[..., 4]``: the array with its axis last, and cut into fours."""
    if array.shape[axis] % GROUP:
        raise ValueError(f"an axis of {array.shape[axis]} is no multiple of {GROUP}")
    last = np.moveaxis(array, axis, -1)
    return last.reshape(*last.shape[:-1], -1, GROUP)


_PRUNED = ("Conv", "Gemm", "MatMul")
"""Operators that TensorRT has sparse kernels for (its documentation, "Structured Sparsity")."""

_FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE)


@dataclass(frozen=True)
class SparseCandidate:
    """A weight that can be pruned, and the nodes that read it, all as a weight, in the order of the graph.

    ``axis`` is its reduction axis; ``sparse`` says whether it is 2:4 as it is.
    """

    weight: str
    nodes: tuple[str, ...]
    axis: int
    sparse: bool


@dataclass(frozen=True)
class SparseCandidates:
    """The weights of a model that can be pruned, in the order of the graph; why the other Conv, Gemm and MatMul
    cannot."""

    layers: tuple[SparseCandidate, ...]
    refused: dict[str, str]


def candidates(model: ir.Model) -> SparseCandidates:
    """Find the weights of Conv, Gemm and MatMul that can be 2:4; nodes of nested graphs are refused."""
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
    return SparseCandidates(tuple(found), refused)


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


def _candidate(weight: ir.Value, nodes: list[ir.Node]) -> SparseCandidate:
    axis, array = reduction_axis(nodes[0]), edit.constant_of(weight)
    if array is None:
        raise ValueError(f"{weight.name} is not constant")
    names = tuple(str(node.name) for node in nodes)
    return SparseCandidate(str(weight.name), names, axis, is_sparse(array, axis))


Method = Literal["was sparse", "magnitude", "recovered"]
"""Where a weight comes from: it was 2:4; the smaller two of each four are zero; or those that stay were fitted too."""


@dataclass(frozen=True)
class PrunedWeight:
    """A 2:4 weight.

    Attributes:
        weight: The name of its value.
        nodes: The nodes that read it.
        method: Where it comes from.
        values: Its new content, of the type and shape it had.
        kept: The share of the dense weight's magnitude where the new one is not zero, 0..1.
        bias: By node, what its output channels get in addition: float32 ``[channels]``.
        errors: Noise over signal of its outputs in the pruned network with magnitude pruning, and with ``values``, on
            samples kept from the fit; None where it was not fitted.
    """

    weight: str
    nodes: tuple[str, ...]
    method: Method
    values: np.ndarray
    kept: float
    bias: dict[str, np.ndarray] = field(default_factory=dict)
    errors: tuple[float, float] | None = None


def by_magnitude(model: ir.Model, candidate: SparseCandidate) -> PrunedWeight:
    """A weight without the smaller two of each four; as it is where it is 2:4."""
    weight = edit.constant_of(next(node.inputs[1] for node in model.graph if node.name == candidate.nodes[0]))
    if weight is None:
        raise ValueError(f"{candidate.weight} is not constant")
    if candidate.sparse:
        return PrunedWeight(candidate.weight, candidate.nodes, "was sparse", weight, 1.0)
    mask = best_mask(np.abs(weight), candidate.axis)
    values = np.where(mask, weight, weight.dtype.type(0))
    return PrunedWeight(candidate.weight, candidate.nodes, "magnitude", values, kept_share(weight, mask))


def with_pruned(model: ir.Model, layers: Iterable[PrunedWeight]) -> ir.Model:
    """A clone of a model with pruned weights and their biases; a part of the model gets what belongs to its nodes."""
    clone = model.clone()
    nodes, names = {str(node.name): node for node in clone.graph}, edit.Names(clone)
    unused: list[ir.Value] = []
    for layer in layers:
        for name in layer.nodes:
            if name in nodes:
                _put(edit.input_of(nodes[name], 1), layer.values)
                if name in layer.bias:
                    unused += add_bias(clone.graph, nodes[name], layer.bias[name], names)
    for value in unused:
        if value.is_initializer() and not (value.uses() or value.is_graph_input() or value.is_graph_output()):
            clone.graph.initializers.pop(str(value.name), None)
    return clone


def _put(weight: ir.Value | None, values: np.ndarray) -> None:
    """Replace the content of an initializer or a Constant node; all who read it get it."""
    if weight is None:
        raise ValueError("a pruned node has no weight")
    tensor = ir.tensor(values, name=weight.name)
    producer = weight.producer()
    if producer is None:
        weight.const_value = tensor
    else:
        producer.attributes["value"] = ir.AttrTensor("value", tensor)
