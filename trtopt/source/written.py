"""Nodes that stand in place of one, and what is known of a value before shapes are inferred."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from trtopt.graph import edit

_DEEPEST = 64
"""Nodes that are walked back to find a type or a width."""


class WritingError(ValueError):
    """A node cannot be written in other operators; the message says why."""


class Writer:
    """Writes nodes in front of ``node``, which they replace in the end.

    Example:
        ``w = Writer(node)``; ``w.replace(w.op("Gelu", w.op("Add", *node.inputs)))``.
    """

    def __init__(self, node: ir.Node) -> None:
        self.node, self._made = node, list[ir.Node]()
        self._base = str(node.outputs[0].name or node.name or node.op_type)

    def input(self, index: int) -> ir.Value | None:
        """An input of the node; None where it is left out."""
        return edit.input_of(self.node, index)

    def needed(self, index: int) -> ir.Value:
        """An input of the node; raises :class:`WritingError` where it is left out."""
        value = self.input(index)
        if value is None:
            raise WritingError(f"input {index} is missing")
        return value

    def op(self, op_type: str, *inputs: ir.Value | None, **attributes: Any) -> ir.Value:
        """The output of a new node of ONNX."""
        return self.ops(op_type, 1, *inputs, **attributes)[0]

    def ops(self, op_type: str, count: int, *inputs: ir.Value | None, **attributes: Any) -> tuple[ir.Value, ...]:
        """The outputs of a new node of ONNX."""
        name = f"{self._base}/{op_type}_{len(self._made)}"
        new = ir.node(op_type, list(inputs), attributes=attributes, num_outputs=count, name=name)
        for at, value in enumerate(new.outputs):
            value.name = f"{name}_{at}"
        edit.graph_of(self.node).insert_before(self.node, new)
        self._made.append(new)
        return tuple(new.outputs)

    def take_back(self) -> None:
        """Remove what was written."""
        edit.graph_of(self.node).remove(self._made[::-1], safe=True)

    def ints(self, *numbers: int) -> ir.Value:
        """A constant vector of INT64."""
        return self.op("Constant", value=ir.tensor(np.array(numbers, np.int64)))

    def scalar(self, number: int) -> ir.Value:
        """A constant INT64 scalar."""
        return self.op("Constant", value=ir.tensor(np.array(number, np.int64)))

    def number(self, number: float, like: ir.Value) -> ir.Value:
        """A constant scalar of the type of ``like``."""
        kind = float_type_of(like)
        array = np.array(np.clip(number, float(np.finfo(np.float32).min), float(np.finfo(np.float32).max)), np.float32)
        if kind is not ir.DataType.FLOAT:
            array = np.clip(array, float(kind.min), float(kind.max))
        return self.op("Constant", value=ir.tensor(array.astype(kind.numpy())))

    def reshape(self, value: ir.Value, *dims: int) -> ir.Value:
        """A Reshape; 0 keeps a dimension, -1 is the rest."""
        return self.op("Reshape", value, self.ints(*dims))

    def transpose(self, value: ir.Value, *perm: int) -> ir.Value:
        return self.op("Transpose", value, perm=list(perm))

    def length(self, value: ir.Value, axis: int) -> ir.Value:
        """The size of one axis, an INT64 scalar."""
        size = self.op("Shape", value, start=axis, end=axis + 1)
        return self.op("Squeeze", size, self.ints(0))

    def int_of(self, name: str, default: int) -> int:
        return edit.int_attribute(self.node, name, default)

    def float_of(self, name: str, default: float) -> float:
        return edit.float_attribute(self.node, name, default)

    def replace(self, *values: ir.Value | None) -> None:
        """Let ``values`` take the places of the node's outputs, and remove the node.

        Raises:
            WritingError: An output that is read has no value.
        """
        outputs = list(self.node.outputs)
        pairs = [(old, values[at] if at < len(values) else None) for at, old in enumerate(outputs)]
        for old, new in pairs:
            if new is None and (old.uses() or old.is_graph_output()):
                raise WritingError(f"its output {old.name} is read")
        for old, new in pairs:
            if new is None:
                continue
            if new.is_graph_output() or new.producer() is None:  # it has a name of its own
                new = self.op("Identity", new)
            new.name, new.type, new.shape = old.name, old.type, old.shape
            old.replace_all_uses_with(new, replace_graph_outputs=True)
        edit.graph_of(self.node).remove(self.node, safe=True)


def float_type_of(value: ir.Value) -> ir.DataType:
    """The type of a floating-point value; where it is not known, that of what it is computed from.

    Raises:
        WritingError: Nothing tells.
    """
    front = [value]
    for _ in range(_DEEPEST):
        following: list[ir.Value] = []
        for item in front:
            if item.dtype is not None and item.dtype.is_floating_point():
                return item.dtype
            producer = item.producer()
            following += [] if producer is None else [found for found in producer.inputs if found is not None]
        front = following
    raise WritingError(f"the type of {value.name} is not known")


def rank_of(value: ir.Value, default: int) -> int:
    """The rank of a value; ``default`` where it is not known, as behind operators that ONNX does not know."""
    return default if value.shape is None else len(value.shape)


def width_of(value: ir.Value) -> int:
    """The size of the last axis of a value; where it is not known, by the weights that it is computed with.

    Raises:
        WritingError: Nothing tells.
    """
    found: ir.Value | None = value
    for _ in range(_DEEPEST):
        if found is None:
            break
        if found.shape is not None and len(found.shape) and isinstance(found.shape[-1], int):
            return int(found.shape[-1])
        node = found.producer()
        if node is None:
            break
        weights = [edit.static_shape(item) for item in node.inputs[1:] if item is not None]
        if node.op_type == "MatMul" and weights and weights[0]:
            return weights[0][-1]
        vectors = [shape[0] for shape in weights if shape and len(shape) == 1 and shape[0] > 1]
        if vectors and node.op_type in ("Add", "Mul", "LayerNormalization", "RMSNormalization", "BiasGelu"):
            return vectors[0]
        found = node.inputs[0] if node.inputs else None
    raise WritingError(f"the size of the last axis of {value.name} is not known")
