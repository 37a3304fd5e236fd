"""Heads of attention whose size the fused kernel pads by copies."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from trtopt.graph import edit
from trtopt.graph.attention import attention_of
from trtopt.graph.edit import constant_of
from trtopt.graph.views import is_pass, scaled_by
from trtopt.rewrite.protocol import Findings, Match, Refusal, Stage, Target

_STEP = 8
"""The fused kernel reads rows of whole 16 bytes in FP16."""

_LEAST = 16
"""The smallest head that the fused kernel reads in place; one of 8 is computed by two products and a softmax."""

_SMALLEST = 4
"""Heads below were not tried: most of what is computed would be zeros."""

_MOST = 4
"""How many times as large as it is a head becomes at most."""

_Change = tuple[ir.Node, int, np.ndarray]
"""A node, one of its inputs, and the constant that becomes that input."""


@dataclass(frozen=True)
class AlignedHeads:
    """Gives attention heads of a size that the fused kernel reads in place.

    Rewrite:
        softmax(Q K^T) V W with zeros appended to each head of Q and K, and to each head of V, up to one size: the
        weights and biases of the projections get columns of zeros, W gets rows of zeros.
    Requires:
        Heads of at least 4 whose size is below 16 or no multiple of 8, or another for values than for queries, a
        quarter of it or more; queries, keys and values by a product with
        constant weights each, and a product with constant weights behind; only scales, transposes and reshapes of
        constant shape between. For TensorRT for RTX in 16 or 8 bits.
    Why faster:
        The compiler pads the heads itself, by a kernel each for queries, keys and values, and cuts the result by
        another. A block of 144 features in 4 heads of 36, without biases (32 x 256 tokens, L4, FP16, second judge):
        444 -> 365 us; 3 heads of 60: 168 -> 135; 4 of 33: 195 -> 168; 8 of 4, which become 16: 234 -> 100. It fuses
        attention only where values have heads of the size of queries: 8 heads of 64 with values of 32, 300 tokens, 12
        kernels and 85 MB -> 7 and 34.
    Numerics:
        Exact: terms of zero are added. The scale stays that of the size before.
    Refuses when:
        Queries, keys or values are rotated, normalized or pooled behind their products, or used elsewhere.
    """

    name: str = "aligned-heads"
    stage: Stage = Stage.FOLD
    lossless: bool = True

    def find(self, model: ir.Model, target: Target) -> Findings:
        """Attention whose heads are padded."""
        if target.backend != "tensorrt-rtx" or target.precision in ("fp32", "tf32"):
            return Findings()
        matches, refusals = [], []
        opset = model.opset_imports.get("", 0)
        for softmax in edit.all_nodes(model.graph):
            found = _changes(softmax, opset) if edit.is_op(softmax, "Softmax") else None
            if isinstance(found, str):
                refusals.append(Refusal(str(softmax.name), found))
            elif found:
                matches.append(Match((softmax, *dict.fromkeys(node for node, _, _ in found))))
        return Findings(tuple(matches), tuple(refusals))

    def rewrite(self, model: ir.Model, match: Match) -> Refusal | None:
        """Widen the weights, and the shapes that name the size."""
        found = _changes(match.nodes[0], model.opset_imports.get("", 0))
        if found is None or isinstance(found, str):
            return Refusal(match.label, found or "it has changed since it was found")
        for node, index, array in found:
            old = node.inputs[index]
            if old is None:
                raise ValueError(f"node {node.name} has no input {index}")
            node.replace_input_with(index, edit.Splice(model, node, self.name).constant(array, old, "wide"))
            edit.tag(node, self.name)
        return None


def _changes(softmax: ir.Node, opset: int) -> list[_Change] | str | None:
    """The constants that become wider around a softmax; why they cannot; None where no head is padded."""
    attention = attention_of(softmax, opset)
    if attention is None:
        return None
    query, key = attention.scores.inputs
    value = attention.mix.inputs[1]
    size, value_size = _last(query), _last(value)
    if query is None or key is None or value is None or key.shape is None or min(size, value_size) < _SMALLEST:
        return None
    changes: list[_Change] = []
    wide = max(wide_head(size), wide_head(value_size))
    if wide > _MOST * min(size, value_size):
        return None
    paths = []
    if wide != size:
        paths += [("queries", _before(query, -1, size, wide)), ("keys", _before(key, -2, size, wide))]
    if wide != value_size:
        paths += [("values", _before(value, -1, value_size, wide))]
        paths += [("results", _behind(attention.mix.outputs[0], value_size, wide))]
    for name, path in paths:
        if path is None:
            between = "behind" if name == "results" else "before"
            return f"the {name} have no product with constant weights right {between} attention"
        changes += path
    return changes


def wide_head(size: int) -> int:
    """The least size of head that the fused kernel reads in place and that holds this one."""
    return max(_LEAST, -(-size // _STEP) * _STEP)


def _last(value: ir.Value | None) -> int:
    """The size of the last axis; 0 where it is not known."""
    last = value.shape[-1] if value is not None and value.shape else 0
    return last if isinstance(last, int) else 0


def _padded(array: np.ndarray, axis: int, size: int, wide: int) -> np.ndarray:
    """An array in which each ``size`` elements along an axis are followed by zeros, up to ``wide``."""
    lead, tail = array.shape[:axis], array.shape[axis + 1 :]
    groups = array.reshape(*lead, -1, size, *tail)
    room = [(0, wide - size if place == axis + 1 else 0) for place in range(groups.ndim)]
    return np.pad(groups, room).reshape(*lead, -1, *tail)


def _reshaped(node: ir.Node, size: int, wide: int) -> list[_Change] | None:
    """The change of a Reshape's shape whose last entry has ``size`` in it; none where that is inferred."""
    shape, last = constant_of(node.inputs[1]), _last(node.outputs[0])
    if shape is None or not last or last % size or shape[-1] not in (last, -1):
        return None
    entries = np.array([*shape[:-1], last // size * wide], np.int64)
    return [] if shape[-1] == -1 else [(node, 1, entries)]


def _scaled(node: ir.Node) -> ir.Value | None:
    """What a node hands on times one number, with as many axes; None where it does something else."""
    if is_pass(node):
        return node.inputs[0]
    data, number = scaled_by(node) or (None, np.zeros(0))
    return data if number.size == 1 and data is not None and number.ndim <= len(data.shape or ()) else None


def _weight(node: ir.Node, columns: bool, size: int, wide: int) -> _Change | None:
    """The wider weight of a product over its last axis, with more columns or more rows."""
    if not edit.is_op(node, "MatMul", "Gemm") or edit.int_attribute(node, "transA", 0):
        return None
    tensor = edit.constant_tensor_of(node.inputs[1])
    if tensor is None or len(tensor.shape) != 2:
        return None
    turned = edit.is_op(node, "Gemm") and edit.int_attribute(node, "transB", 0) == 1
    return (node, 1, _padded(tensor.numpy(), int(columns != turned), size, wide))


def _bias(node: ir.Node, index: int, size: int, wide: int) -> _Change | None:
    bias, width = constant_of(edit.input_of(node, index)), _last(node.outputs[0])
    if bias is None or bias.ndim == 0 or bias.shape[-1] != width or bias.size != width:
        return None
    return (node, index, _padded(bias, bias.ndim - 1, size, wide))


def _before(value: ir.Value, axis: int, size: int, wide: int) -> list[_Change] | None:
    """What changes for an operand of attention to have ``wide`` elements along an axis instead of ``size``."""
    changes: list[_Change] = []
    axis += len(value.shape or ())
    while (node := value.producer()) is not None and edit.only_user(value) is not None and value.shape is not None:
        source, is_last = _scaled(node), axis == len(value.shape) - 1
        if source is None and edit.is_op(node, "Transpose"):
            perm = edit.ints_attribute(node, "perm") or tuple(reversed(range(len(value.shape))))
            source, axis = node.inputs[0], perm[axis]
        elif source is None and not is_last:
            return None
        elif source is None and edit.is_op(node, "Reshape"):
            reshaped, source = _reshaped(node, size, wide), node.inputs[0]
            if reshaped is None or source is None or source.shape is None or not _last(source) or _last(source) % size:
                return None
            changes += reshaped
            axis = len(source.shape) - 1
        elif source is None and edit.is_op(node, "Add"):
            index = 1 if edit.constant_tensor_of(node.inputs[1]) is not None else 0
            bias, source = _bias(node, index, size, wide), node.inputs[1 - index]
            if bias is None or source is None or bias[2].ndim > len(source.shape or ()):
                return None
            changes.append(bias)
        elif source is None:
            weight = _weight(node, True, size, wide)
            bias = _bias(node, 2, size, wide) if edit.input_of(node, 2) is not None else None
            if weight is None or (bias is None and edit.input_of(node, 2) is not None):
                return None
            return [*changes, weight, *([bias] if bias is not None else [])]
        if source is None:
            return None
        value = source
    return None


def _behind(value: ir.Value, size: int, wide: int) -> list[_Change] | None:
    """What changes for the product behind attention to take heads of ``wide`` elements instead of ``size``."""
    changes: list[_Change] = []
    axis = len(value.shape or ()) - 1
    while (node := edit.only_user(value)) is not None and value.shape is not None:
        is_last = axis == len(value.shape) - 1
        if edit.is_op(node, "Transpose"):
            axis = (edit.ints_attribute(node, "perm") or tuple(reversed(range(len(value.shape))))).index(axis)
        elif edit.is_op(node, "Reshape") and is_last and node.outputs[0].shape is not None:
            reshaped = _reshaped(node, size, wide)
            if reshaped is None:
                return None
            changes += reshaped
            axis = len(node.outputs[0].shape) - 1
        elif _scaled(node) is not value:
            weight = _weight(node, False, size, wide) if is_last and node.inputs[0] is value else None
            return None if weight is None else [*changes, weight]
        value = node.outputs[0]
    return None
