"""PReLU as a maximum and a minimum."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from trtopt.graph.edit import NARROW_FLOATS, Splice, all_nodes, constant_of, is_op
from trtopt.rewrite.protocol import Findings, Match, Refusal, Stage, Target


@dataclass(frozen=True)
class Prelu:
    """Writes PRelu with a maximum and a minimum, which fuse into the convolution or GEMM before it.

    Rewrite:
        PRelu(x, s) = max(x, 0) + s * min(x, 0).
    Requires:
        A float type of 16 or 32 bits. The slope may be any tensor.
    Why faster:
        TensorRT runs PRelu as a comparison and a selection, in a kernel of its own behind the convolution or GEMM; a
        maximum and a minimum become part of theirs (2 kernels become 1, activations halve).
    Numerics:
        The same: one of the two terms is 0.
    Refuses when:
        The slope is a constant that is not finite. Integers, double and unknown types are no match.
    """

    name: str = "prelu"
    stage: Stage = Stage.FUSE
    lossless: bool = True

    def find(self, model: ir.Model, target: Target) -> Findings:
        """PRelu nodes."""
        places = []
        for node in all_nodes(model.graph):
            if not is_op(node, "PRelu") or node.outputs[0].dtype not in NARROW_FLOATS:
                continue
            slope = constant_of(node.inputs[1])
            is_finite = slope is None or np.isfinite(slope.astype(np.float64)).all()
            places.append((Match((node,)), "" if is_finite else "its slope is not finite: times zero it is no zero"))
        return Findings.of(places)

    def rewrite(self, model: ir.Model, match: Match) -> Refusal | None:
        """Replace one node."""
        (node,) = match.nodes
        x, slope = node.inputs
        splice = Splice(model, node, self.name)
        negative = splice.op("Mul", splice.op("Min", x, splice.number(0)), slope)
        splice.finish(splice.op("Add", splice.op("Relu", x), negative))
        return None
