"""Scores of attention that a tanh keeps within bounds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from trtopt.graph import edit
from trtopt.graph.attention import attentions_of
from trtopt.rewrite.protocol import Findings, Match, Refusal, Stage, Target

_LARGEST = 100.0
"""Of a cap: 50 in Gemma 2, 30 in Grok. The error of a tanh near 0 times it is one of the scores."""


@dataclass(frozen=True)
class CappedScores:
    """Writes the tanh before the softmax of attention as exponential and reciprocal.

    Rewrite:
        tanh(s) = 1 - 2 / (1 + exp(2 s)).
    Requires:
        FP32; scores of attention with a cap of at most 100, softmax(c tanh(Q K^T / c) + mask) V.
    Why faster:
        The fused attention kernel of TensorRT for RTX computes exponentials between Q K^T and softmax, but no tanh:
        scores are written, capped and read again. 12 -> 5 kernels and 57.0 -> 18.5 MB for attention with its
        projections, 8 x 201 tokens, 6 heads of 64.
    Numerics:
        Within rounding of FP32, of 1 and not of s; the cap multiplies that. FP16 rounds the reciprocal, 1/2 where s is
        small, to 2^-12; what the outputs do not bear of that goes back to FP32, in the same kernel.
    Refuses when:
        The target is TensorRT, for which it was not tried.
    """

    name: str = "capped-scores"
    stage: Stage = Stage.FUSE
    lossless: bool = True

    def find(self, model: ir.Model, target: Target) -> Findings:
        """Each tanh between a product of queries and keys and its softmax."""
        places, reason = [], "for TensorRT it was not tried" if target.backend == "tensorrt" else ""
        for nodes in (found.nodes for found in attentions_of(model)):
            for cap in nodes:
                if edit.is_op(cap, "Tanh") and cap.outputs[0].dtype is ir.DataType.FLOAT and _is_small(cap):
                    places.append((Match((cap, *(other for other in nodes if other is not cap))), reason))
        return Findings.of(places)

    def rewrite(self, model: ir.Model, match: Match) -> Refusal | None:
        """Rewrite one tanh."""
        cap = match.nodes[0]
        splice = edit.Splice(model, cap, self.name)
        power = splice.op("Exp", splice.op("Mul", cap.inputs[0], splice.number(2)))
        part = splice.op("Reciprocal", splice.op("Add", power, splice.number(1)))
        splice.replace(cap, "Sub", [splice.number(1), splice.op("Mul", part, splice.number(2))])
        return None


def _is_small(cap: ir.Node) -> bool:
    """Whether at most :data:`_LARGEST` multiplies the tanh right behind it, if anything does."""
    user = edit.only_user(cap.outputs[0])
    if not edit.is_op(user, "Mul", "Div"):
        return user is not None
    factor = next((edit.constant_of(value) for value in user.inputs if value is not cap.outputs[0]), None)
    if factor is None or not factor.size:
        return False
    largest = np.abs(factor.astype(np.float64))
    return bool((largest if user.op_type == "Mul" else 1 / np.maximum(largest, 1e-300)).max() <= _LARGEST)
