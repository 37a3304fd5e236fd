"""Selections that always take the same side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from trtopt.graph.dimension import Dim
from trtopt.graph.dims import Dimensions
from trtopt.graph.edit import all_nodes, can_replace, is_op, remove_node, replace_value
from trtopt.graph.scores import Scores
from trtopt.rewrite.protocol import Findings, Match, Refusal, Stage, Target

_BROADCASTING = ("Add", "Div", "Mul", "Sub")


@dataclass(frozen=True)
class SettledSelection:
    """Takes the side that a Where always takes: masks that mask nothing, whatever the batch.

    Rewrite:
        Where(c, a, b) becomes a where c is true everywhere, b where it is false.
    Requires:
        A condition that is provably so: constants, also expanded to the batch, compared positions (Range, integers of
        known bounds), And, Or and Not of such. The side has the dimensions of the result, or every reader is an
        arithmetic operator whose other operand has them.
    Why faster:
        The mask of attention without padding depends on the batch, and is no constant: it is computed, written and
        read by every layer. What is left of it is a constant, of zeros in most exports, which no-op removes.
    Numerics:
        Exact.
    Refuses when:
        Never: what cannot be proven does not match.
    """

    name: str = "settled-selection"
    stage: Stage = Stage.FOLD
    lossless: bool = True

    def find(self, model: ir.Model, target: Target) -> Findings:
        """Where nodes whose condition is settled."""
        scores = Scores()
        nodes = [node for node in all_nodes(model.graph) if is_op(node, "Where")]
        nodes = [node for node in nodes if scores.always(node.inputs[0]) is not None]
        known, all_settled = Dimensions(model) if nodes else None, {node.outputs[0] for node in nodes}
        fitting = [node for node in nodes if known and _fits(node, _side(node, scores), known, all_settled)]
        return Findings(tuple(Match((node,), choice=str(scores.always(node.inputs[0]))) for node in fitting))

    def rewrite(self, model: ir.Model, match: Match) -> Refusal | None:
        """Remove one Where."""
        (node,) = match.nodes
        side = node.inputs[1 if match.choice == "True" else 2]
        if side is None or not can_replace(node.outputs[0], side):
            return Refusal(match.label, "its input became a graph output")
        replace_value(node.outputs[0], side)
        remove_node(node)
        return None


def _side(node: ir.Node, scores: Scores) -> ir.Value | None:
    return node.inputs[1 if scores.always(node.inputs[0]) else 2]


def _fits(node: ir.Node, side: ir.Value | None, known: Dimensions, settled: set[ir.Value]) -> bool:
    """Whether whatever reads ``node`` has the same result with ``side`` in its place."""
    output = node.outputs[0]
    whole, part = known.of(output), known.of(side)
    if side is None or whole is None or part is None or not can_replace(output, side):
        return False
    if part == whole:
        return True
    others = [user.inputs[1 - index] if is_op(user, *_BROADCASTING) else None for user, index in output.uses()]
    return not output.is_graph_output() and all(
        other is not None and other not in settled and _covers(known.of(other) or (), whole) for other in others
    )


def _covers(dims: Sequence[Dim], whole: Sequence[Dim]) -> bool:
    """Whether broadcasting a tensor of ``whole`` to one of ``dims`` leaves ``dims``."""
    behind = dims[len(dims) - len(whole) :] if len(whole) <= len(dims) else ()
    return len(behind) == len(whole) and all(size in (1, dim) for size, dim in zip(whole, behind, strict=True))
