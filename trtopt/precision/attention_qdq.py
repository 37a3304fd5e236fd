"""8-bit attention: the two products of activations around a softmax that a backend's fused kernel takes in 8 bits.

All four operands change together: queries, keys, probabilities and values. With fewer of them quantized there is no
fused kernel, and the scores are written to memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import onnx_ir as ir

from trtopt.graph import edit
from trtopt.graph.attention import attention_of, only_user
from trtopt.precision import rules
from trtopt.report.schema.steps import Refusal
from trtopt.support.precision import Precision

_MOVES = frozenset({"Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})


@dataclass(frozen=True)
class AttentionProducts:
    """The two products of one attention.

    Attributes:
        scores: Queries times keys.
        mix: Probabilities times values.
        readers: Names of the nodes that read the result, behind operators that only move it; none for an output of the
            network.
    """

    scores: ir.Node
    mix: ir.Node
    readers: frozenset[str]

    @property
    def operands(self) -> tuple[str, ...]:
        """The tensors that are quantized: queries, keys, probabilities, values."""
        return tuple(str(value.name) for node in (self.scores, self.mix) for value in node.inputs if value is not None)


def attention_products(
    model: ir.Model, backend: str, dtype: Precision, shapes: Mapping[str, tuple[int, ...]] | None = None
) -> tuple[list[AttentionProducts], list[Refusal]]:
    """The attentions that the backend's table sends to ``dtype``, and the refusals of the products of the others.

    Args:
        model: Nodes named.
        backend: ``tensorrt-rtx`` or ``tensorrt``.
        dtype: The 8-bit type.
        shapes: Static shapes by tensor name; without them, sizes that the model leaves open are taken to fit.
    """
    found, refused = [], []
    opset = model.graph.opset_imports.get("", 0)
    for node in model.graph:
        if not edit.is_op(node, "Softmax"):
            continue
        attention = attention_of(node, opset)
        if attention is None or any(_is_dequantized(value) for value in attention.scores.inputs):
            continue
        reason = _why_not(attention.scores, attention.mix, backend, dtype, shapes or {})
        if any(edit.is_op(step, "Tanh") for step in attention.between):
            reason = "no fused kernel squashes scores before softmax"
        if reason:
            refused += [Refusal(str(product.name), reason) for product in (attention.scores, attention.mix)]
        else:
            found.append(AttentionProducts(attention.scores, attention.mix, _readers(attention.mix)))
    return found, refused


def _why_not(
    scores: ir.Node, mix: ir.Node, backend: str, dtype: Precision, shapes: Mapping[str, tuple[int, ...]]
) -> str:
    """Why the table leaves this attention out; empty where it does not."""
    head, head_of_values = _size(scores.inputs[0], -1, shapes), _size(mix.inputs[1], -1, shapes)
    if head is not None and head_of_values is not None and head != head_of_values:
        return "no fused kernel has values of another size than queries"
    queries = _size(scores.outputs[0], -2, shapes)
    keys = _size(scores.outputs[0], -1, shapes)
    verdict = rules.attention_placement(head, queries, keys, backend, dtype)
    return "" if verdict.granularity is not None else verdict.reason


def _size(value: ir.Value | None, axis: int, shapes: Mapping[str, tuple[int, ...]]) -> int | None:
    if value is None:
        return None
    known = shapes.get(str(value.name))
    if known is None and value.shape is not None:
        size = list(value.shape)[axis] if len(value.shape) >= -axis else None
        return size if isinstance(size, int) else None
    return known[axis] if known is not None and len(known) >= -axis else None


def _readers(mix: ir.Node) -> frozenset[str]:
    value = mix.outputs[0]
    while (node := only_user(value)) is not None and node.op_type in _MOVES:
        value = node.outputs[0]
    return frozenset() if value.is_graph_output() else frozenset(str(node.name) for node, _ in value.uses())


def _is_dequantized(value: ir.Value | None) -> bool:
    producer = value.producer() if value is not None else None
    return producer is not None and producer.op_type == "DequantizeLinear"
