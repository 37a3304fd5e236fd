"""Softmax of scores that their largest was subtracted from."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from trtopt.graph import edit
from trtopt.graph.attention import is_over_last
from trtopt.rewrite.protocol import Findings, Match, Refusal, Stage, Target


@dataclass(frozen=True)
class ShiftedScores:
    """Leaves it to softmax to subtract the largest score.

    Rewrite:
        softmax(c (s - max(s))) = softmax(c s), with a number c or without: a number that is added to a whole row
        changes nothing.
    Requires:
        Softmax and the maximum over the last axis; c a constant of one element.
    Why faster:
        With scores that are used once, the recipes for attention find it: LayoutLMv3 of two layers, batch 4, FP16, 44
        -> 27 kernels and 1029 -> 935 us by a plain roofline of an L4.
    Numerics:
        The same real numbers; scores times c are as large as they are: the precision stage sees what would leave the
        range of FP16.
    Refuses when:
        Never: where the difference is used elsewhere or is an output, there is no match.
    """

    name: str = "shifted-scores"
    stage: Stage = Stage.CLEAN
    lossless: bool = True

    def find(self, model: ir.Model, target: Target) -> Findings:
        """Differences before softmax."""
        opset = model.graph.opset_imports.get("", 1)
        found = (_difference(node, opset) for node in edit.all_nodes(model.graph) if edit.is_op(node, "Softmax"))
        return Findings(tuple(Match((node,)) for node in found if node is not None))

    def rewrite(self, model: ir.Model, match: Match) -> Refusal | None:
        """Remove one difference; its maximum is left to dead-node."""
        (node,) = match.nodes
        scores = node.inputs[0]
        if scores is None:
            return Refusal(match.label, "it has changed since it was found")
        edit.replace_value(node.outputs[0], scores)
        edit.remove_node(node)
        return None


def _difference(softmax: ir.Node, opset: int) -> ir.Node | None:
    """The Sub of the largest score before a Softmax over the last axis."""
    value = softmax.inputs[0]
    rank = 0 if value is None or value.shape is None else len(value.shape)
    if not rank or not is_over_last(softmax, opset):
        return None
    node = edit.only_maker(value)
    if edit.is_op(node, "Mul", "Div"):
        factors = [edit.constant_tensor_of(each) for each in node.inputs]
        data = [each for each, factor in zip(node.inputs, factors, strict=True) if factor is None or factor.size != 1]
        is_divided = node.op_type == "Mul" or factors[0] is None
        node = edit.only_maker(data[0]) if len(data) == 1 and is_divided else None
    if not edit.is_op(node, "Sub") or node.inputs[1] is None:
        return None
    largest, over = node.inputs[1].producer(), []
    if edit.is_op(largest, "Unsqueeze") and largest.inputs[0] is not None:
        over.append(edit.axes_of(largest))
        largest = largest.inputs[0].producer()
    if not edit.is_op(largest, "ReduceMax") or largest.inputs[0] is not node.inputs[0]:
        return None
    over.append(edit.axes_of(largest))
    keeps = edit.int_attribute(largest, "keepdims", 1) == len(over) % 2
    return node if keeps and all([axis % rank for axis in axes or ()] == [rank - 1] for axes in over) else None
