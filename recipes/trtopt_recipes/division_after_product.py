"""Softmax written as exponentials over their sum, divided after the product with the values."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from trtopt.graph.attention import only_user
from trtopt.graph.edit import Splice, all_nodes, constant_of, input_of, int_attribute, ints_attribute, is_op
from trtopt.rewrite.protocol import Findings, Match, Refusal, Stage, Target


@dataclass(frozen=True)
class DivisionAfterProduct:
    """Divides by the sum of the weights before the weights are multiplied by the values.

    Rewrite:
        (E V) / sum(E) = (E / sum(E)) V, the sum over the last axis of E: one divisor per row.
    Requires:
        A ReduceSum over the last axis that keeps it, of the very tensor that the product multiplies; floating point.
    Why faster:
        The fused attention kernel of TensorRT for RTX knows softmax, also as exponentials over their sum, but no
        division after the product: 17 -> 11 kernels and 165 -> 96 MB for two attentions of batch 8, 12 heads of 64 and
        196 tokens.
    Numerics:
        The same number of divisions and products, in the other order; values become smaller, not larger.
    Refuses when:
        The product is used elsewhere or is a graph output.
    """

    name: str = "division-after-product"
    stage: Stage = Stage.FUSE
    lossless: bool = True

    def find(self, model: ir.Model, target: Target) -> Findings:
        """Divisions of a product by the sum over its left operand."""
        matches, refusals = [], []
        for node in all_nodes(model.graph):
            product = _product_of(node)
            if product is None:
                continue
            if only_user(product.outputs[0]) is None:
                refusals.append(Refusal(str(node.name), f"{product.outputs[0].name} is used elsewhere or is an output"))
            elif product.graph is node.graph:
                divisor = node.inputs[1]
                total = divisor.producer() if divisor is not None else None
                matches.append(Match((node, product, *([] if total is None else [total]))))
        return Findings(tuple(matches), tuple(refusals))

    def rewrite(self, model: ir.Model, match: Match) -> Refusal | None:
        """Move one division in front of the product."""
        division, product = match.nodes[:2]
        weights = product.inputs[0]
        splice = Splice(model, division, self.name)
        share = splice.op("Div", weights, division.inputs[1], like=weights)
        splice.replace(division, "MatMul", [share, product.inputs[1]])
        if product.graph is not None:
            product.graph.remove(product, safe=True)
        return None


def _product_of(node: ir.Node) -> ir.Node | None:
    """The product that ``node`` divides by the sum of its left operand, row by row."""
    if not is_op(node, "Div"):
        return None
    product, total = (value.producer() if value is not None else None for value in node.inputs)
    if product is None or total is None or not is_op(product, "MatMul") or not is_op(total, "ReduceSum"):
        return None
    weights, values = product.inputs
    if weights is None or total.inputs[0] is not weights or weights.shape is None or len(weights.shape) < 2:
        return None
    if weights.dtype is None or not weights.dtype.is_floating_point():
        return None
    # A product with a vector lacks the axis that the sum keeps.
    if values is None or values.shape is None or len(values.shape) < 2:
        return None
    return product if int_attribute(total, "keepdims", 1) and _axes(total, len(weights.shape)) == [-1] else None


def _axes(total: ir.Node, rank: int) -> list[int]:
    """The axes of a sum, counted from the end."""
    axes = ints_attribute(total, "axes")
    array = constant_of(input_of(total, 1)) if axes is None else np.asarray(axes)
    return [] if array is None else [int(axis) - rank if axis >= 0 else int(axis) for axis in array.ravel()]
