"""Group and instance normalization, in the form that one kernel computes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from trtopt.graph import edit
from trtopt.graph.conv import per_channel
from trtopt.graph.dims import Dimensions
from trtopt.rewrite.protocol import Findings, Match, Refusal, Stage, Target


@dataclass(frozen=True)
class GroupNorm:
    """Writes group and instance normalization as the compiler's fused kernel knows them.

    Rewrite:
        With one group, Reshape, InstanceNormalization, Reshape, Mul, Add and GroupNormalization become
        LayerNormalization(x, gamma, beta) from axis 1 on, gamma and beta of [C, 1, 1]. With several, and of rank 3,
        GroupNormalization, and InstanceNormalization of rank 4 and more, become Reshape, InstanceNormalization with
        ones and zeros, Reshape, Mul, Add.
    Requires:
        Constant gamma and beta; provably the same shape before and after.
    Why faster:
        TensorRT for RTX has one kernel for each of these forms and a ReLU or SiLU behind it. One group of 64 x 56 x 56,
        batch 8, FP16: 3 kernels that move 32.4 MB, as they keep FP32 differences between them, become 1 of 6.4 MB.
        InstanceNormalization: 3 kernels of 22.5 MB become 1 of 6.7 MB, as its operator wants another layout. Over one
        axis neither form has a kernel, and LayerNormalization is copied twice more: there it is conv-1d's.
    Numerics:
        The same sums in another order.
    Refuses when:
        Gamma or beta are computed.
    """

    name: str = "group-norm"
    stage: Stage = Stage.FOLD
    lossless: bool = True

    def find(self, model: ir.Model, target: Target) -> Findings:
        """Normalizations in another form; matches are named after them."""
        matches, refusals = [], []
        for node, norm in _norms(model):
            if norm is None:
                refusals.append(Refusal(str(node.name), "its scale or bias is not a constant"))
            else:
                matches.append(Match(norm.nodes if norm.split is None else (*norm.nodes, norm.split)))
        return Findings(tuple(matches), tuple(refusals))

    def rewrite(self, model: ir.Model, match: Match) -> Refusal | None:
        """Rewrite one normalization."""
        norm = next((norm for node, norm in _norms(model) if node is match.nodes[0]), None)
        if norm is None:
            return Refusal(match.label, "it was changed by a rewrite before")
        if norm.groups == 1 and len(norm.dims) > 3:
            as_layer_norm(model, norm, self.name)
            return None
        splice = edit.Splice(model, norm.nodes[-1], self.name)
        scale, bias = _factors(splice, norm)
        value = _grouped(splice, norm, norm.nodes[-1].outputs[0], dtype_of(norm.x))
        splice.finish(splice.op("Add", splice.op("Mul", value, scale), bias))
        return None


@dataclass(frozen=True)
class Norm:
    """A normalization of ``x`` over groups of channels, with factors and terms per channel.

    The first of ``nodes`` normalizes, the last one makes the result; ``split`` is the Reshape to rows before them.
    """

    nodes: tuple[ir.Node, ...]
    x: ir.Value
    dims: tuple[object, ...]
    groups: int
    epsilon: float
    scale: np.ndarray
    bias: np.ndarray
    split: ir.Node | None = None


def dtype_of(value: ir.Value) -> np.dtype:
    """The type of a normalized tensor, FP32 where it is not known."""
    return value.dtype.numpy() if value.dtype is not None else np.dtype(np.float32)


def as_layer_norm(model: ir.Model, norm: Norm, recipe: str) -> ir.Node:
    """Write a normalization of one group as one over all axes but the first; the new node."""
    splice = edit.Splice(model, norm.nodes[-1], recipe)
    attributes = {"axis": 1, "epsilon": norm.epsilon}
    value = splice.op("LayerNormalization", norm.x, *_factors(splice, norm), attributes=attributes)
    node = value.producer()
    splice.finish(value)
    for each in reversed(norm.nodes[:-1]):
        edit.remove_node(each)
    if norm.split is not None and not norm.split.outputs[0].uses():
        edit.remove_node(norm.split)
    if node is None:
        raise ValueError("a new node has its output")
    return node


def _factors(splice: edit.Splice, norm: Norm) -> tuple[ir.Value, ir.Value]:
    """The factors and terms per channel as constants."""
    shape = (-1, *[1] * (len(norm.dims) - 2))
    scale, bias = (
        splice.constant(array.astype(dtype_of(norm.x)).reshape(shape), norm.nodes[-1].outputs[0], suffix)
        for array, suffix in ((norm.scale, "scale"), (norm.bias, "bias"))
    )
    return scale, bias


def _grouped(splice: edit.Splice, norm: Norm, output: ir.Value, dtype: np.dtype) -> ir.Value:
    """The normalized tensor, as InstanceNormalization of one row per group gives it."""
    rows = splice.ints([0, norm.groups, -1], output, "rows")
    one, zero = (
        splice.constant(np.full(norm.groups, number, dtype), output, name)
        for number, name in ((1, "ones"), (0, "zeros"))
    )
    split = splice.fresh("Reshape", norm.x, rows)
    value = splice.fresh("InstanceNormalization", split, one, zero, attributes={"epsilon": norm.epsilon})
    spatial = norm.dims[2:]
    if all(isinstance(dim, int) for dim in spatial):
        back = splice.ints([0, norm.scale.size, *spatial], output, "shape")
    else:
        back = splice.op("Shape", norm.x)
        back.type, back.shape = ir.TensorType(ir.DataType.INT64), ir.Shape([len(norm.dims)])
    return splice.op("Reshape", value, back)


def _norms(model: ir.Model) -> Iterator[tuple[ir.Node, Norm | None]]:
    """Normalizations to rewrite; without what they compute where their parameters are not constants."""
    nodes = [n for n in edit.all_nodes(model.graph) if edit.is_op(n, "InstanceNormalization", "GroupNormalization")]
    known = Dimensions(model) if nodes else None
    for node in nodes:
        x = node.inputs[0]
        dims = known.of(x) if known is not None else None
        if known is None or x is None or dims is None or len(dims) < 3 or x.dtype not in edit.NARROW_FLOATS:
            continue
        scale, bias = (edit.constant_of(edit.input_of(node, index)) for index in (1, 2))
        epsilon = edit.float_attribute(node, "epsilon", 1e-5)
        if edit.is_op(node, "InstanceNormalization") and len(dims) == 3:
            norm = one_group(node, known)
            if norm is not None and len(norm.dims) > 3:
                yield node, norm
            continue
        channels = dims[1]
        groups = edit.int_attribute(node, "num_groups", 0) or channels
        if scale is None or bias is None or not isinstance(channels, int) or not isinstance(groups, int):
            yield node, None
            continue
        factors, terms = (np.broadcast_to(array.astype(np.float64), channels) for array in (scale, bias))
        yield node, Norm((node,), x, dims, groups, epsilon, factors, terms)


def one_group(node: ir.Node, known: Dimensions) -> Norm | None:
    """The normalization of [N, 1, C H W] between two reshapes, and a factor and a term per channel behind it."""
    scale, bias = (edit.constant_of(edit.input_of(node, index)) for index in (1, 2))
    if scale is None or bias is None or scale.size != 1:
        return None
    first = edit.maker_of(node.inputs[0])
    last = edit.only_user(node.outputs[0])
    if not edit.is_op(first, "Reshape") or not edit.is_op(last, "Reshape"):
        return None
    x, rows = first.inputs[0], known.of(first.outputs[0])
    dims = known.of(x)
    if x is None or dims is None or rows is None or len(dims) < 3 or not isinstance(dims[1], int):
        return None
    if rows[:2] != (dims[0], 1) or known.of(last.outputs[0]) != dims or last.inputs[0] is not node.outputs[0]:
        return None
    channels, nodes = dims[1], [node, last]
    factors, terms = np.full(channels, scale.item(), np.float64), np.full(channels, bias.item(), np.float64)
    for op_type in ("Mul", "Add"):
        value = nodes[-1].outputs[0]
        user = edit.only_user(value)
        array = _other_constant(user, value, op_type)
        given = None if array is None else per_channel(array, channels, len(dims))
        if user is None or given is None:
            continue
        nodes.append(user)
        factors, terms = (factors * given, terms * given) if op_type == "Mul" else (factors, terms + given)
    split = None if first.outputs[0].is_graph_output() else first
    return Norm(tuple(nodes), x, dims, 1, edit.float_attribute(node, "epsilon", 1e-5), factors, terms, split)


def _other_constant(user: ir.Node | None, value: ir.Value, op_type: str) -> np.ndarray | None:
    if not edit.is_op(user, op_type):
        return None
    return edit.constant_of(user.inputs[1] if user.inputs[0] is value else user.inputs[0])
