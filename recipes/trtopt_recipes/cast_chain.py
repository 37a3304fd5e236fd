"""Casts to a wider type and on to another."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from trtopt.graph.edit import all_nodes, can_replace, holds, int_attribute, is_op, remove_node, replace_value, tag
from trtopt.rewrite.protocol import Findings, Match, Refusal, Stage, Target


@dataclass(frozen=True)
class CastChain:
    """Casts straight to the last type of a chain of Casts.

    Rewrite:
        Cast(Cast(x, wider), T) = Cast(x, T), and x itself where T is its own type.
    Requires:
        The first type of the chain is held by the second without loss: FP16 by FP32, int32 by int64, booleans by all.
        The last is not a string.
    Why faster:
        One conversion less, and none where the chain comes back, so that the operators on both sides are neighbours to
        the other recipes and to the compiler. That of TensorRT for RTX fuses such Casts itself.
    Numerics:
        Exact: the value in the middle is the value itself.
    Refuses when:
        Never: where the middle type loses something (FP32 to FP16 and back), the chain is a rounding and no match.
    """

    name: str = "cast-chain"
    stage: Stage = Stage.CLEAN
    lossless: bool = True

    def find(self, model: ir.Model, target: Target) -> Findings:
        """Casts of a Cast that loses nothing."""
        matches = []
        for node in all_nodes(model.graph):
            inner = _inner(node)
            if inner is not None:
                matches.append(Match((node, inner)))
        return Findings(tuple(matches))

    def rewrite(self, model: ir.Model, match: Match) -> Refusal | None:
        """Skip the Cast in the middle."""
        outer, inner = match.nodes
        source = inner.inputs[0]
        if source is None:
            return Refusal(match.label, "the Cast before it has no input")
        if int_attribute(outer, "to", 0) == source.dtype and can_replace(outer.outputs[0], source):
            replace_value(outer.outputs[0], source)
            remove_node(outer)
        else:
            outer.replace_input_with(0, source)
            tag(outer, self.name)
        if not inner.outputs[0].uses() and not inner.outputs[0].is_graph_output():
            remove_node(inner)
        return None


def _inner(node: ir.Node) -> ir.Node | None:
    """The Cast before a Cast that can be skipped."""
    if not is_op(node, "Cast") or node.inputs[0] is None:
        return None
    if int_attribute(node, "to", 0) == ir.DataType.STRING:  # a number is written differently in each type
        return None
    inner = node.inputs[0].producer()
    if not is_op(inner, "Cast") or inner.inputs[0] is None or inner.inputs[0].dtype is None:
        return None
    source = inner.inputs[0].dtype
    middle = ir.DataType(int_attribute(inner, "to", 0))
    return inner if middle == source or holds(middle, source) else None
