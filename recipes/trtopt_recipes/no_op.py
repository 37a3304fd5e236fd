"""Nodes that compute their own input."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from trtopt.graph import edit
from trtopt.rewrite.protocol import Findings, Match, Refusal, Stage, Target

_RESHAPES = frozenset({"Reshape", "Flatten", "Squeeze", "Unsqueeze"})
_ONE_INPUT = frozenset({"Concat", "Sum", "Max", "Min", "Mean"})
_NEUTRAL = {"Add": 0, "Sub": 0, "Mul": 1, "Div": 1}
"""By operator: the number that as second operand changes nothing; as first one too where the order is free."""


@dataclass(frozen=True)
class NoOp:
    """Removes casts, reshapes, transposes, pads, slices, additions of zero and the like that change nothing.

    Rewrite:
        y = f(x) with y equal to x: every use of y becomes a use of x.
    Requires:
        Cast to the type x has; Reshape, Flatten, Squeeze, Unsqueeze to the shape x has; Transpose with the axes in
        order; Expand and Tile to the shape x has; Pad by zero everywhere; Slice of everything; Concat, Sum, Max, Min
        or Mean of one input; Add or Sub of zeros, Mul or Div by ones (biases never trained, masks that mask nothing).
        Where y is a graph output, as for the recipe identity.
    Why faster:
        No copy, and no break between what could fuse on both sides. A bias of zeros costs attention what any bias
        does (see qkv-bias).
    Numerics:
        Exact.
    Refuses when:
        Never: what cannot be proven to change nothing does not match.
    """

    name: str = "no-op"
    stage: Stage = Stage.CLEAN
    lossless: bool = True

    def find(self, model: ir.Model, target: Target) -> Findings:
        """Nodes proven to change nothing."""
        return Findings(tuple(Match((node,)) for node in edit.all_nodes(model.graph) if _is_no_op(node)))

    def rewrite(self, model: ir.Model, match: Match) -> Refusal | None:
        """Remove one node."""
        node = match.nodes[0]
        source = node.inputs[_data_index(node)]
        if source is None or not edit.can_replace(node.outputs[0], source):
            return Refusal(match.label, "its input became a graph output")
        edit.replace_value(node.outputs[0], source)
        edit.remove_node(node)
        return None


def _is_no_op(node: ir.Node) -> bool:
    source = edit.input_of(node, _data_index(node))
    if node.domain != "" or source is None or not edit.can_replace(node.outputs[0], source):
        return False
    output = node.outputs[0]
    if node.op_type == "Cast":
        return source.dtype is not None and edit.int_attribute(node, "to", 0) == int(source.dtype)
    if node.op_type == "Transpose":
        perm = edit.ints_attribute(node, "perm")
        return perm is not None and list(perm) == list(range(len(perm)))
    if node.op_type in _RESHAPES:
        return _same_shape(source, output)
    if node.op_type in ("Expand", "Tile"):
        return edit.static_shape(source) is not None and edit.static_shape(source) == edit.static_shape(output)
    if node.op_type in _ONE_INPUT:
        return len(node.inputs) == 1
    if node.op_type == "Pad":
        pads = edit.constant_of(edit.input_of(node, 1))
        return pads is not None and not pads.any()
    if node.op_type in _NEUTRAL:
        return _is_neutral(node, source)
    return node.op_type == "Slice" and _slices_everything(node, source)


def _data_index(node: ir.Node) -> int:
    """Which input a node that changes nothing hands on."""
    return int(edit.is_op(node, "Add", "Mul") and edit.constant_tensor_of(node.inputs[0]) is not None)


def _is_neutral(node: ir.Node, source: ir.Value) -> bool:
    """Whether the other operand is made of one number that changes nothing, and makes nothing larger."""
    other = node.inputs[1 - _data_index(node)]
    tensor = edit.constant_tensor_of(other)
    if tensor is None or source.shape is None or len(tensor.shape) > len(source.shape):
        return False
    dims = list(source.shape)[len(source.shape) - len(tensor.shape) :]
    if any(size not in (1, dim) for size, dim in zip(edit.dims_of(tensor), dims, strict=True)):
        return False
    return bool((tensor.numpy() == _NEUTRAL[node.op_type]).all())


def _same_shape(source: ir.Value, output: ir.Value) -> bool:
    """Equal dimensions, by number or by name; one may be open: as the number of elements is kept, it is equal too.

    A name says nothing that two axes have: exporters call sizes "None" that they do not know.
    """
    if source.shape is None or output.shape is None or len(source.shape) != len(output.shape):
        return False
    pairs = list(zip(source.shape, output.shape, strict=True))
    names = [a.value for a, b in pairs if not isinstance(a, int) and a == b]
    is_named = None not in names and len(set(names)) == len(names)
    known_equal = all(a == b and a != 0 for a, b in pairs if isinstance(a, int) and isinstance(b, int))
    unknown = sum(not (isinstance(a, int) and isinstance(b, int)) for a, b in pairs)
    return known_equal and (unknown <= 1 or (is_named and len(names) == unknown))


def _slices_everything(node: ir.Node, source: ir.Value) -> bool:
    starts, ends = edit.constant_of(edit.input_of(node, 1)), edit.constant_of(edit.input_of(node, 2))
    steps_value = edit.input_of(node, 4)
    steps = edit.constant_of(steps_value)
    if starts is None or ends is None or source.shape is None or (steps_value is not None and steps is None):
        return False
    axes_value = edit.input_of(node, 3)
    axes = np.arange(len(starts)) if axes_value is None else edit.constant_of(axes_value)
    if axes is None or (steps is not None and np.any(steps != 1)):
        return False
    dims = [source.shape[int(axis)] for axis in axes]
    whole = np.iinfo(ends.dtype).max
    return all(
        start == 0 and (end == whole or (isinstance(dim, int) and end >= dim))
        for start, end, dim in zip(starts, ends, dims, strict=True)
    )
