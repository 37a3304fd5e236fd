"""Sigmoid behind a matrix product: SiLU, quick GELU, gates."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from trtopt.graph.attention import only_user
from trtopt.graph.edit import Splice, all_nodes, constant_tensor_of, input_of, is_op
from trtopt.rewrite.protocol import Findings, Match, Refusal, Stage, Target


@dataclass(frozen=True)
class SigmoidAfterProduct:
    """Writes the sigmoid behind a matrix product as exponential and reciprocal.

    Rewrite:
        Sigmoid(s) = 1 / (1 + exp(-s)).
    Requires:
        FP32. s is a product with a constant weight, with or without a bias and a scale, as in SiLU, s sigmoid(s), and
        in quick GELU, z sigmoid(1.702 z).
    Why faster:
        TensorRT for RTX computes what follows a product in the product's kernel, exponentials too, but no sigmoid,
        tanh or SiLU: that is a kernel of its own, which reads and writes the widest activation of a transformer. 3 -> 2
        kernels and 20.2 -> 10.1 MB for the first half of a feed-forward part of 512 and 2048 features, batch 8, 77
        tokens.
    Numerics:
        Within rounding of FP32. Where exp(-s) overflows, s < -88, the result is 0, and below 1e-38 with a sigmoid. For
        FP16 its exponential, sum and reciprocal stay FP32 where their ranges ask for it, inside that kernel.
    Refuses when:
        The target is TensorRT, whose products take a sigmoid.
    """

    name: str = "sigmoid-after-product"
    stage: Stage = Stage.FUSE
    lossless: bool = True

    def find(self, model: ir.Model, target: Target) -> Findings:
        """The sigmoids behind products, each with what lies between and what it is multiplied by."""
        matches, refusals = [], []
        for node in all_nodes(model.graph):
            between = _behind_product(node) if is_op(node, "Sigmoid") else None
            if between is None:
                continue
            if target.backend == "tensorrt":
                refusals.append(Refusal(str(node.name), "TensorRT has the sigmoid in the kernel of the product"))
                continue
            user = only_user(node.outputs[0])
            matches.append(Match((node, *between, *([] if user is None else [user]))))
        return Findings(tuple(matches), tuple(refusals))

    def rewrite(self, model: ir.Model, match: Match) -> Refusal | None:
        """Rewrite one sigmoid."""
        node = match.nodes[0]
        splice = Splice(model, node, self.name)
        power = splice.op("Exp", splice.op("Neg", node.inputs[0]))
        splice.replace(node, "Reciprocal", [splice.op("Add", power, splice.number(1))])
        return None


def _behind_product(sigmoid: ir.Node) -> tuple[ir.Node, ...] | None:
    """What ``sigmoid`` reads, up to the product with a constant weight; None where there is none in this graph."""
    if sigmoid.outputs[0].dtype != ir.DataType.FLOAT:
        return None
    nodes: list[ir.Node] = []
    value = sigmoid.inputs[0]
    for kind in ("Mul", "Add"):
        node = value.producer() if value is not None else None
        if node is not None and is_op(node, kind):
            operands = [operand for operand in node.inputs if constant_tensor_of(operand) is None]
            if len(operands) != 1 or node.graph is not sigmoid.graph:
                return None
            nodes.append(node)
            value = operands[0]
    product = value.producer() if value is not None else None
    is_product = product is not None and is_op(product, "MatMul", "Gemm") and product.graph is sigmoid.graph
    if product is None or not is_product or constant_tensor_of(input_of(product, 1)) is None:
        return None
    return (*nodes, product)
