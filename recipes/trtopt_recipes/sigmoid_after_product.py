"""Sigmoid behind a matrix product: SiLU, quick GELU, gates, GEGLU."""

from __future__ import annotations

import math
from dataclasses import dataclass

import onnx_ir as ir

from trtopt.graph.edit import (
    Splice,
    all_nodes,
    constant_tensor_of,
    input_of,
    is_op,
    maker_of,
    only_user,
    string_attribute,
)
from trtopt.rewrite.protocol import Findings, Match, Refusal, Stage, Target

_LINEAR = -2 * math.sqrt(2 / math.pi)
_CUBIC = 0.044715 * _LINEAR
"""Of GELU by tanh, x / (1 + exp(linear x + cubic x^3))."""


@dataclass(frozen=True)
class SigmoidAfterProduct:
    """Writes the sigmoid behind a matrix product as exponential and reciprocal.

    Rewrite:
        Sigmoid(s) = 1 / (1 + exp(-s)); Gelu(s) by tanh, which multiplies another product (GEGLU), is
        s / (1 + exp(-2 sqrt(2 / pi) (s + 0.044715 s^3))).
    Requires:
        FP32. s is a product with a constant weight, or a part of one, with or without a bias and a scale, as in SiLU,
        s sigmoid(s), and in quick GELU, z sigmoid(1.702 z); in GEGLU without.
    Why faster:
        TensorRT for RTX computes what follows a product in the product's kernel, exponentials too, but no sigmoid,
        tanh or SiLU: that is a kernel of its own, which reads and writes the widest activation of a transformer. 3 -> 2
        kernels and 20.2 -> 10.1 MB for the first half of a feed-forward part of 512 and 2048 features, batch 8, 77
        tokens. GEGLU's two products become one, with the tanh in a kernel of its own: 33.6 -> 26.2 MB for a whole
        feed-forward part of 1024 tokens, 512 and 2048 features.
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
        places = []
        for node in all_nodes(model.graph):
            between = _behind_product(node, node.inputs[0]) if is_op(node, "Sigmoid") else _gated(node)
            if between is None:
                continue
            user = only_user(node.outputs[0])
            nodes = dict.fromkeys((node, *between, *([] if user is None else [user])))
            is_fused = target.backend == "tensorrt"
            reason = "TensorRT has the activation in the kernel of the product" if is_fused else ""
            places.append((Match(tuple(nodes)), reason))
        return Findings.of(places)

    def rewrite(self, model: ir.Model, match: Match) -> Refusal | None:
        """Rewrite one activation."""
        node = match.nodes[0]
        value, splice = node.inputs[0], Splice(model, node, self.name)
        if is_op(node, "Sigmoid"):
            power = splice.op("Neg", value)
        else:
            square = splice.op("Mul", splice.op("Mul", value, value), splice.number(_CUBIC))
            power = splice.op("Mul", splice.op("Add", square, splice.number(_LINEAR)), value)
        total = splice.op("Add", splice.op("Exp", power), splice.number(1))
        if is_op(node, "Sigmoid"):
            splice.replace(node, "Reciprocal", [total])
        else:
            splice.replace(node, "Mul", [value, splice.op("Reciprocal", total)])
        return None


def _gated(gelu: ir.Node) -> tuple[ir.Node, ...] | None:
    """The products, without a bias, that a GELU by tanh and what it multiplies are; None where they are none."""
    if not is_op(gelu, "Gelu") or string_attribute(gelu, "approximate", "none") != "tanh":
        return None
    gate = only_user(gelu.outputs[0])
    if not is_op(gate, "Mul"):
        return None
    others = [value for value in gate.inputs if value is not gelu.outputs[0]]
    both = [_behind_product(gelu, value) for value in (gelu.inputs[0], *others)]
    nodes = tuple(node for found in both for node in found or ())
    return nodes if len(both) == 2 and None not in both and not any(is_op(node, "Add") for node in nodes) else None


def _behind_product(sigmoid: ir.Node, value: ir.Value | None) -> tuple[ir.Node, ...] | None:
    """The nodes that make ``value``, up to the product with a constant weight; None where there is none in the graph
    of ``sigmoid``."""
    if sigmoid.outputs[0].dtype != ir.DataType.FLOAT:
        return None
    nodes: list[ir.Node] = []
    for kinds in (("Mul",), ("Slice", "Split"), ("Add",)):
        node = maker_of(value)
        if is_op(node, *kinds):
            operands = [item for item in node.inputs if item is not None and constant_tensor_of(item) is None]
            if len(operands) != 1 or node.graph is not sigmoid.graph:
                return None
            nodes.append(node)
            value = operands[0]
    product = maker_of(value)
    is_product = is_op(product, "MatMul", "Gemm") and product.graph is sigmoid.graph
    if product is None or not is_product or constant_tensor_of(input_of(product, 1)) is None:
        return None
    return (*nodes, product)
