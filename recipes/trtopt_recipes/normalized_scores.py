"""Attention whose queries and keys are divided by their norms."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from trtopt.graph import edit
from trtopt.graph.attention import attentions_of
from trtopt.graph.views import is_pass
from trtopt.rewrite.protocol import Findings, Match, Refusal, Stage, Target


@dataclass(frozen=True)
class _Side:
    """An operand of Q K^T that is divided by its norms.

    Attributes:
        div: Divides it by its norms [..., rows, 1].
        norms: These, before they are expanded.
        moves: The Transpose of the last two axes between ``div`` and the product, where there is one.
    """

    div: ir.Node
    norms: ir.Value
    moves: ir.Node | None


@dataclass(frozen=True)
class NormalizedScores:
    """Divides the scores of attention by the norms of queries and keys, instead of these.

    Rewrite:
        (q / |q|) (k / |k|)^T = q k^T / |q| / |k|^T: a number per query divides a row of the scores, one per key a
        column.
    Requires:
        Norms of one number per row of queries and keys, however they are computed (ReduceL2, a bound from below by
        Clip or Max, an Expand), that scale the operands of Q K^T in attention; only a Transpose of the last two axes
        between.
    Why faster:
        The fused attention kernel of TensorRT for RTX divides the scores itself. Normalized queries and keys are
        written for it in kernels that read them again: Swin V2-T of eight blocks, batch 8, 1122 -> 1024 MB and 4876 ->
        4471 us by a plain roofline of an L4.
    Numerics:
        The same real numbers; the division is rounded after the product instead of before it. Scores before it are as
        large as queries and keys are: the precision stage sees what would leave the range of FP16.
    Refuses when:
        Never: where a normalized value is read elsewhere, or is an output, there is no match.
    """

    name: str = "normalized-scores"
    stage: Stage = Stage.FUSE
    lossless: bool = True

    def find(self, model: ir.Model, target: Target) -> Findings:
        """Attentions with queries and keys that are divided by norms."""
        matches = []
        for found in attentions_of(model):
            sides = _sides(found.scores)
            if sides is not None:
                moves = [side.moves for side in sides if side.moves is not None]
                matches.append(Match((found.scores, *(side.div for side in sides), *moves, *found.nodes[2:])))
        return Findings(tuple(matches))

    def rewrite(self, model: ir.Model, match: Match) -> Refusal | None:
        """Divide the scores of one attention."""
        scores = match.nodes[0]
        sides = _sides(scores)
        if sides is None:
            return Refusal(match.label, "it has changed since it was found")
        splice, (queries, keys) = edit.Splice(model, scores, self.name), sides
        for side in sides:
            reader = side.moves or scores
            reader.replace_input_with(0 if side is queries or side.moves is not None else 1, side.div.inputs[0])
        norms = keys.norms
        if keys.moves is not None:
            perm, shape = edit.ints_attribute(keys.moves, "perm") or (), norms.shape
            norms = splice.op("Transpose", norms, attributes={"perm": perm}, like=norms)
            norms.shape = None if shape is None else ir.Shape([shape[axis] for axis in perm])
        splice.restore(splice.restore(scores.outputs[0], "Div", (), queries.norms), "Div", (), norms)
        for side in sides:
            edit.remove_node(side.div)
        edit.graph_of(scores).sort()
        return None


def _sides(scores: ir.Node) -> tuple[_Side, _Side] | None:
    """Both operands of a product; None where one is not divided by norms, or the result is an output."""
    queries, keys = (_side(value) for value in scores.inputs)
    if queries is None or keys is None or queries.moves is not None or scores.outputs[0].is_graph_output():
        return None
    return (queries, keys) if queries.div is not keys.div else None


def _side(value: ir.Value | None) -> _Side | None:
    node, moves = edit.only_maker(value), None
    if edit.is_op(node, "Transpose"):
        perm = edit.ints_attribute(node, "perm") or ()
        rank = len(perm)
        if rank < 2 or perm != (*range(rank - 2), rank - 1, rank - 2):
            return None
        node, moves = edit.only_maker(node.inputs[0]), node
    if not edit.is_op(node, "Div"):
        return None
    data, norms = node.inputs
    while (
        norms is not None and (made := norms.producer()) is not None and (edit.is_op(made, "Expand") or is_pass(made))
    ):
        norms = made.inputs[0]
    if (
        data is None
        or norms is None
        or data.shape is None
        or norms.shape is None
        or edit.constant_of(norms) is not None
    ):
        return None
    same_rank = len(data.shape) == len(norms.shape) and len(data.shape) > 1
    rows = same_rank and all(one == other for one, other in zip(data.shape[1:-1], norms.shape[1:-1], strict=True))
    # Keys that are turned before they are divided have a norm per column.
    per_row = rows and norms.shape[-1] == 1 and data.shape[-1] != 1
    return _Side(node, norms, moves) if per_row and data.dtype == norms.dtype else None
