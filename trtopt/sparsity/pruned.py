"""Pruned weights, and a model with them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import onnx_ir as ir

from trtopt.graph import edit
from trtopt.precision.ptq.bias import add_bias
from trtopt.sparsity.layers import Candidate
from trtopt.sparsity.pattern import best_mask, kept_share

Method = Literal["was sparse", "magnitude", "recovered"]
"""Where a weight comes from: it was 2:4; the smaller two of each four are zero; or those that stay were fitted too."""


@dataclass(frozen=True)
class PrunedLayer:
    """A 2:4 weight.

    Attributes:
        weight: The name of its value.
        nodes: The nodes that read it.
        method: Where it comes from.
        values: Its new content, of the type and shape it had.
        kept: The share of the dense weight's magnitude where the new one is not zero, 0..1.
        bias: By node, what its output channels get in addition: float32 ``[channels]``.
        errors: Noise over signal of its outputs in the pruned network with magnitude pruning, and with ``values``, on
            samples kept from the fit; None where it was not fitted.
    """

    weight: str
    nodes: tuple[str, ...]
    method: Method
    values: np.ndarray
    kept: float
    bias: dict[str, np.ndarray] = field(default_factory=dict)
    errors: tuple[float, float] | None = None


def by_magnitude(model: ir.Model, candidate: Candidate) -> PrunedLayer:
    """A weight without the smaller two of each four; as it is where it is 2:4.

    Args:
        model: The model that the candidate was found in.
        candidate: The weight.
    """
    weight = edit.constant_of(next(node.inputs[1] for node in model.graph if node.name == candidate.nodes[0]))
    if weight is None:
        raise ValueError(f"{candidate.weight} is not constant")
    if candidate.sparse:
        return PrunedLayer(candidate.weight, candidate.nodes, "was sparse", weight, 1.0)
    mask = best_mask(np.abs(weight), candidate.axis)
    values = np.where(mask, weight, weight.dtype.type(0))
    return PrunedLayer(candidate.weight, candidate.nodes, "magnitude", values, kept_share(weight, mask))


def write(model: ir.Model, layers: Iterable[PrunedLayer]) -> ir.Model:
    """A clone of a model with pruned weights and their biases; a part of the model gets what belongs to its nodes.

    Args:
        model: The model that the layers were found in, or a part of it.
        layers: Any of them.
    """
    clone = model.clone()
    nodes, names = {str(node.name): node for node in clone.graph}, edit.Names(clone)
    unused: list[ir.Value] = []
    for layer in layers:
        for name in layer.nodes:
            if name in nodes:
                _put(edit.input_of(nodes[name], 1), layer.values)
                if name in layer.bias:
                    unused += add_bias(clone.graph, nodes[name], layer.bias[name], names)
    for value in unused:
        if value.is_initializer() and not (value.uses() or value.is_graph_input() or value.is_graph_output()):
            clone.graph.initializers.pop(str(value.name), None)
    return clone


def _put(weight: ir.Value | None, values: np.ndarray) -> None:
    """Replace the content of an initializer or a Constant node; all who read it get it."""
    if weight is None:
        raise ValueError("a pruned node has no weight")
    tensor = ir.tensor(values, name=weight.name)
    producer = weight.producer()
    if producer is None:
        weight.const_value = tensor
    else:
        producer.attributes["value"] = ir.AttrTensor("value", tensor)
