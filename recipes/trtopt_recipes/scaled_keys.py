"""Keys of attention that are scaled behind a rotation or a normalization."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from trtopt.graph import edit
from trtopt.graph.attention import attentions_of
from trtopt.graph.views import is_move, scaled_by
from trtopt.rewrite.protocol import Findings, Match, Refusal, Stage, Target

_SMALLEST = 2.0**-14
"""The smallest number that FP16 holds with all its digits."""

_Scale = tuple[ir.Node, ir.Value, np.ndarray]
"""A Mul by one number, what it multiplies, and the number."""


@dataclass(frozen=True)
class ScaledKeys:
    """Scales queries by what their keys are scaled by.

    Rewrite:
        (a q) (b k)^T = (a b q) k^T: exports of torch's attention scale both by the root of the scale.
    Requires:
        Keys that one number, at most 1, multiplies right behind their Transpose, or before it, and in which more than
        moves lies between their projection and that: a rotation, a normalization. Or keys that are a part of a product
        which the queries are no part of: keys and values of one projection. Otherwise the compiler does it.
    Why faster:
        Behind a rotation or a normalization the compiler of TensorRT for RTX writes scaled keys in one kernel and
        copies them for attention in another; keys that are not scaled are written where attention reads them. Flux
        (L4, FP16, second judge) 1046 -> 973 us, AuraFlow 1140 -> 1113. So it does with keys and values of one
        projection: the speech encoder of Granite 3207 -> 3072 us (predicted 2652 -> 2610), attention alone 122 -> 105.
    Numerics:
        The same real numbers; the scale is rounded once.
    Refuses when:
        Never: scaled keys that are read elsewhere, and scales that vanish in FP16, are no match.
    """

    name: str = "scaled-keys"
    stage: Stage = Stage.FUSE
    lossless: bool = True

    def find(self, model: ir.Model, target: Target) -> Findings:
        """Attentions whose keys are scaled."""
        pairs = [(found, _scaled_keys(found.scores)) for found in attentions_of(model)]
        return Findings(tuple(Match((at.scores, scale[0], *at.nodes[2:])) for at, scale in pairs if scale is not None))

    def rewrite(self, model: ir.Model, match: Match) -> Refusal | None:
        """Scale the queries of one attention."""
        scores, keys = match.nodes[0], _scaled_keys(match.nodes[0])
        if keys is None:
            return Refusal(match.label, "it has changed since it was found")
        queries, (mul, source, number) = scores.inputs[0], keys
        splice, own = edit.Splice(model, scores, self.name), _scaled(queries)
        product = number if own is None else np.asarray(own[2] * number, own[2].dtype)
        factor = splice.constant(product, mul.outputs[0], "scale")
        scaled = splice.op("Mul", queries if own is None else own[1], factor, like=queries)
        scores.replace_input_with(0, scaled)
        edit.replace_value(mul.outputs[0], source)
        for node in (mul, *([own[0]] if own is not None else [])):
            edit.remove_node(node)
        return None


def _scaled_keys(scores: ir.Node) -> _Scale | None:
    """What scales the keys of a product behind more than moves; None where nothing does, or queries cannot take it."""
    value = scores.inputs[1]
    while edit.is_op(turn := edit.only_maker(value), "Transpose"):
        value = turn.inputs[0]
    found, own = _scaled(value), _scaled(scores.inputs[0])
    if (
        found is None
        or not _SMALLEST <= found[2].item() * (1 if own is None else own[2].item()) <= found[2].item() <= 1
    ):
        return None
    projection, is_part = _projected(found[1])
    queries = scores.inputs[0] if own is None else own[1]
    if projection is None or (is_part and queries is not None and _projected(queries)[0] is not projection):
        return found
    return None


def _projected(value: ir.Value) -> tuple[ir.Value | None, bool]:
    """The input, or product without the constant that is added to it, that a value is moved from, and whether the value
    is a part of that; None where more than moves lies between."""
    is_part = False
    while (node := value.producer()) is not None and not edit.is_op(node, "MatMul", "Gemm"):
        data = [item for item in node.inputs if item is not None and edit.constant_tensor_of(item) is None]
        if not data or not (is_move(node) or (edit.is_op(node, "Add") and len(data) == 1)):
            return None, is_part
        is_part, value = is_part or edit.is_op(node, "Split", "Slice", "Gather"), data[0]
    return value, is_part


def _scaled(value: ir.Value | None) -> _Scale | None:
    """How a value that is used once is something else times one number."""
    node = edit.only_maker(value)
    found = scaled_by(node) if edit.is_op(node, "Mul") else None
    if node is None or found is None or found[1].size != 1 or found[1].ndim > 1:
        return None
    return node, found[0], found[1].reshape(())
