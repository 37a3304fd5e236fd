"""Nodes that hand their input through."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from trtopt.graph.edit import all_nodes, can_replace, constant_of, input_of, is_op, remove_node, replace_value
from trtopt.rewrite.protocol import Findings, Match, Refusal, Stage, Target


@dataclass(frozen=True)
class Identity:
    """Removes Identity and inference-mode Dropout.

    Rewrite:
        y = Identity(x), y = Dropout(x): every use of y becomes a use of x.
    Requires:
        Dropout outside training mode, with its mask unused. Where y is a graph output, a node of the same graph
        computes x, and x is not a graph output itself: x then takes the name of y.
    Why faster:
        The compiler sees the pattern on both sides of the node as one, and needs no copy.
    Numerics:
        Exact.
    Refuses when:
        Dropout is in training mode or its mask is used.
    """

    name: str = "identity"
    stage: Stage = Stage.CLEAN
    lossless: bool = True

    def find(self, model: ir.Model, target: Target) -> Findings:
        """Identity and Dropout nodes that can go."""
        matches, refusals = [], []
        for node in all_nodes(model.graph):
            if not is_op(node, "Identity", "Dropout"):
                continue
            reason = _why_kept(node)
            if reason:
                refusals.append(Refusal(str(node.name), reason))
            elif _is_removable(node):
                matches.append(Match((node,)))
        return Findings(tuple(matches), tuple(refusals))

    def rewrite(self, model: ir.Model, match: Match) -> Refusal | None:
        """Remove one node."""
        node = match.nodes[0]
        source = node.inputs[0]
        if source is None or not _is_removable(node):
            return Refusal(match.label, "its input became a graph output")
        replace_value(node.outputs[0], source)
        remove_node(node)
        return None


def _is_removable(node: ir.Node) -> bool:
    return node.inputs[0] is not None and can_replace(node.outputs[0], node.inputs[0])


def _why_kept(node: ir.Node) -> str:
    if node.op_type == "Identity":
        return ""
    if any(value.uses() or value.is_graph_output() for value in node.outputs[1:]):
        return "the mask of Dropout is used"
    training = input_of(node, 2)
    if training is None:
        return ""
    mode = constant_of(training)
    return "" if mode is not None and not bool(mode.reshape(-1)[0]) else "Dropout may be in training mode"
