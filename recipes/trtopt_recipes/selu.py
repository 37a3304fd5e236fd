"""Selu as a scaled Elu."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from trtopt.graph.edit import NARROW_FLOATS, Splice, all_nodes, float_attribute, is_op
from trtopt.rewrite.protocol import Findings, Match, Refusal, Stage, Target

_ALPHA, _GAMMA = 1.6732632423543772, 1.0507009873554805
"""ONNX's defaults."""


@dataclass(frozen=True)
class Selu:
    """Writes Selu as Elu and a multiplication, which fuse into the convolution or GEMM before it.

    Rewrite:
        Selu(x) = gamma * Elu(x) with Elu's alpha = Selu's alpha.
    Requires:
        A float type of 16 or 32 bits.
    Why faster:
        TensorRT runs Selu in a kernel of its own behind the convolution or GEMM, and Elu as part of theirs (2 kernels
        become 1, activations halve).
    Numerics:
        The same function; ONNX defines Selu as this product.
    Refuses when:
        Never. Integers, double and unknown types are no match.
    """

    name: str = "selu"
    stage: Stage = Stage.FUSE
    lossless: bool = True

    def find(self, model: ir.Model, target: Target) -> Findings:
        """Selu nodes."""
        nodes = [node for node in all_nodes(model.graph) if is_op(node, "Selu")]
        return Findings(tuple(Match((node,)) for node in nodes if node.outputs[0].dtype in NARROW_FLOATS))

    def rewrite(self, model: ir.Model, match: Match) -> Refusal | None:
        """Replace one node."""
        (node,) = match.nodes
        splice = Splice(model, node, self.name)
        elu = splice.op("Elu", node.inputs[0], attributes={"alpha": float_attribute(node, "alpha", _ALPHA)})
        splice.finish(splice.op("Mul", elu, splice.number(float_attribute(node, "gamma", _GAMMA))))
        return None
