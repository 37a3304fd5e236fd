"""Nodes that compute the same thing twice, and weights stored twice."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterator
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from trtopt.graph import edit
from trtopt.rewrite.protocol import Findings, Match, Refusal, Stage, Target

_KEPT = frozenset(
    {
        "RandomNormal",
        "RandomNormalLike",
        "RandomUniform",
        "RandomUniformLike",
        "Multinomial",
        "Bernoulli",
        "QuantizeLinear",
        "DequantizeLinear",
    }
)
"""Random operators differ each time; the placement of Q/DQ is the quantizer's decision."""

_COMMUTATIVE = frozenset({"Add", "Mul"})
_SMALL_BYTES = 1 << 12
"""Up to this size the content itself is hashed; of larger tensors, samples first."""

_SAMPLES = 64


@dataclass(frozen=True)
class DuplicateExpression:
    """Merges nodes that compute the same value, and weights with the same content.

    Rewrite:
        Of nodes of one graph with the same operator, attributes and inputs the first stays, and every use of the
        others becomes a use of it; likewise initializers of the same type, shape and content.
    Requires:
        A deterministic operator of the default domain without nested graphs; constants count as the same input when
        their bytes are equal; the inputs of Add and Mul may be swapped. Constants of at least smallest_weight bytes
        are merged, smaller ones only compared.
    Why faster:
        Computed and stored once: two equal branches of convolutions are one kernel less each, and the streams they
        ran on need no waits.
    Numerics:
        Exact.
    Refuses when:
        Both nodes compute graph outputs, which need two names (nothing else is lost by it, so it is not reported).
        Dropout that may be in training mode, random operators, QuantizeLinear and DequantizeLinear do not match.
    """

    name: str = "duplicate-expression"
    stage: Stage = Stage.CLEAN
    lossless: bool = True
    smallest_weight: int = 1024

    def find(self, model: ir.Model, target: Target) -> Findings:
        """Nodes equal to an earlier one, and initializers equal to an earlier one."""
        matches: list[Match] = []
        for graph in edit.all_graphs(model.graph):
            same = _same_initializers(graph)
            for value, first in same.items():
                tensor = value.const_value
                if tensor is not None and tensor.nbytes >= self.smallest_weight and not value.is_graph_output():
                    matches.append(Match((), (value, first)))
            matches += _same_nodes(graph, same, self.smallest_weight)
        return Findings(tuple(matches))

    def rewrite(self, model: ir.Model, match: Match) -> Refusal | None:
        """Merge one node, or one initializer, into the first of its kind."""
        if not match.nodes:
            value, kept = match.values
            value.replace_all_uses_with(kept)
            if value.graph is not None:
                value.graph.initializers.pop(str(value.name))
            return None
        node, first = match.nodes
        for old, new in zip(node.outputs, first.outputs, strict=True):
            if not edit.can_replace(old, new):
                return Refusal(match.label, f"{new.name} became a graph output")
        for old, new in zip(node.outputs, first.outputs, strict=True):
            edit.replace_value(old, new)
        edit.remove_node(node)
        return None


def _same_nodes(graph: ir.Graph, same: dict[ir.Value, ir.Value], smallest: int) -> Iterator[Match]:
    """Nodes of ``graph`` equal to an earlier one, in order; ``same`` maps values to the first equal one."""
    known: dict[Hashable, ir.Node] = {}
    claimed: set[ir.Value] = set()
    for node in graph:
        key = _key(node, same)
        if key is None:
            continue
        first = known.setdefault(key, node)
        if first is node:
            continue
        pairs = list(zip(node.outputs, first.outputs, strict=True))
        same.update(pairs)
        constant = edit.constant_tensor_of(node.outputs[0])
        if constant is not None and constant.nbytes < smallest:
            continue
        outputs = [new for old, new in pairs if old.is_graph_output()]
        if any(new in claimed for new in outputs) or not all(edit.can_replace(old, new) for old, new in pairs):
            continue
        # An output takes over the name of the one graph output it replaces.
        claimed.update(outputs)
        yield Match((node, first))


def _key(node: ir.Node, same: dict[ir.Value, ir.Value]) -> Hashable | None:
    """Equal for nodes that compute the same; None for nodes that are left alone."""
    if node.domain != "" or node.op_type in _KEPT or edit.subgraphs_of(node):
        return None
    if edit.is_op(node, "Dropout") and edit.input_of(node, 2) is not None:
        mode = edit.constant_of(edit.input_of(node, 2))
        if mode is None or bool(mode.reshape(-1)[0]):
            return None
    attributes = []
    for name, attribute in sorted(node.attributes.data.items()):
        if attribute.is_ref():
            return None
        attributes.append((name, _attribute_key(attribute)))
    inputs = [None if value is None else same.get(value, value) for value in node.inputs]
    names = [id(value) for value in inputs]
    if node.op_type in _COMMUTATIVE:
        names.sort()
    return node.op_type, tuple(attributes), tuple(names), tuple(bool(value.name) for value in node.outputs)


def _attribute_key(attribute: ir.Attr) -> Hashable:
    if attribute.type == ir.AttributeType.TENSOR:
        return _content(attribute.as_tensor())
    value = attribute.value
    # By text: 0.0 and -0.0 are equal, and NaN is not equal to itself.
    return str(attribute.type), repr(tuple(value)) if isinstance(value, (list, tuple)) else repr(value)


def _same_initializers(graph: ir.Graph) -> dict[ir.Value, ir.Value]:
    """Initializers with the content of an earlier one, and that one.

    Bytes are read only where type, shape and a few samples agree: a model of gigabytes stays on the disk.
    """
    alike: dict[Hashable, list[ir.Value]] = {}
    for value in graph.initializers.values():
        tensor = edit.constant_tensor_of(value)
        if tensor is not None and not value.is_graph_input():
            alike.setdefault((tensor.dtype, edit.dims_of(tensor)), []).append(value)
    found: dict[ir.Value, ir.Value] = {}
    for values in alike.values():
        for group in _alike_by_samples(values):
            first: dict[Hashable, ir.Value] = {}
            for value in group:
                tensor = edit.constant_tensor_of(value)
                if tensor is not None and (kept := first.setdefault(_content(tensor), value)) is not value:
                    found[value] = kept
    return found


def _alike_by_samples(values: list[ir.Value]) -> Iterator[list[ir.Value]]:
    """``values`` in groups of two or more whose samples agree."""
    if len(values) < 2:
        return
    groups: dict[Hashable, list[ir.Value]] = {}
    for value in values:
        tensor = edit.constant_tensor_of(value)
        if tensor is not None:
            groups.setdefault(_samples(tensor), []).append(value)
    yield from (group for group in groups.values() if len(group) > 1)


def _samples(tensor: ir.TensorProtocol) -> Hashable:
    """A few bytes of a large tensor; nothing of a small one."""
    if tensor.nbytes <= _SMALL_BYTES:
        return None
    flat = tensor.numpy().reshape(-1)
    return flat[:: max(1, flat.size // _SAMPLES)].tobytes()


def _content(tensor: ir.TensorProtocol) -> Hashable:
    array = np.ascontiguousarray(tensor.numpy())  # which makes a scalar one-dimensional
    kind = int(tensor.dtype), edit.dims_of(tensor)
    if array.dtype.kind == "O":
        return kind, repr(array.tolist())
    if array.nbytes <= _SMALL_BYTES:
        return kind, array.tobytes()
    return kind, hashlib.blake2b(array.reshape(-1).view(np.uint8).data).digest()
