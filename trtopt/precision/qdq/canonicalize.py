"""Q/DQ nodes that a model brings along: what their scales and zero points say, and new ones in their place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import ml_dtypes
import numpy as np
import onnx_ir as ir

from trtopt.graph import edit
from trtopt.report.schema.steps import Refusal

INTEGERS = (ir.DataType.INT8, ir.DataType.UINT8)
"""8-bit integers."""

FP8 = {ir.DataType.FLOAT8E4M3FN: 448.0, ir.DataType.FLOAT8E5M2: 57344.0}
"""The floating 8-bit types, with their largest numbers."""

EIGHT_BITS = (*INTEGERS, *FP8)
"""The types of quantized activations."""

_SHOWN = 5


@dataclass(frozen=True)
class Quantizer:
    """How a QuantizeLinear or DequantizeLinear maps numbers: ``x = (q - zero) * scale``.

    Attributes:
        scale: float32, scalar or one per index of ``axis``.
        zero: int32, of the scale's shape; 0 where the type is no integer.
        dtype: The 8-bit (or other) type of ``q``.
        axis: The axis with a scale per index; None for one scale.
    """

    scale: np.ndarray
    zero: np.ndarray
    dtype: ir.DataType
    axis: int | None

    @property
    def is_symmetric(self) -> bool:
        """Whether the compilers take it: the zero point is 0, and the type not one of unsigned integers."""
        return self.dtype is not ir.DataType.UINT8 and not self.zero.any()

    def column(self, rank: int) -> tuple[np.ndarray, np.ndarray]:
        """Scale and zero point, shaped to act on a tensor of ``rank`` axes."""
        if self.axis is None:
            return self.scale, self.zero
        shape = [1] * rank
        shape[self.axis] = -1
        return self.scale.reshape(shape), self.zero.reshape(shape)

    def equals(self, other: Quantizer) -> bool:
        """Whether both map numbers alike."""
        return (
            self.dtype is other.dtype
            and self.axis == other.axis
            and np.array_equal(self.scale, other.scale)
            and np.array_equal(self.zero, other.zero)
        )


def quantizer_of(node: ir.Node) -> Quantizer | None:
    """The mapping of a Q or DQ node; None where it is computed at run time, or in blocks."""
    scale, zero = edit.constant_of(node.inputs[1]), edit.input_of(node, 2)
    value = node.outputs[0] if node.op_type == "QuantizeLinear" else node.inputs[0]
    if scale is None or value is None or edit.int_attribute(node, "block_size", 0):
        return None
    points = edit.constant_of(zero)
    if zero is not None and points is None:
        return None
    dtype = _type(node, value, zero)
    exact = np.asarray(scale, np.float32)
    whole = np.zeros(exact.shape, np.int32)
    if points is not None and dtype.is_integer():
        whole = np.broadcast_to(np.asarray(points).astype(np.int32), exact.shape)
    if exact.size == 1:
        return Quantizer(exact.reshape(()), whole.reshape(()), dtype, None)
    if exact.ndim != 1:
        return None
    data = node.inputs[0]
    axis = edit.int_attribute(node, "axis", 1)
    if axis < 0:
        if data is None or data.shape is None:
            return None
        axis += len(data.shape)
    return Quantizer(exact, whole, dtype, axis)


def _type(node: ir.Node, value: ir.Value, zero: ir.Value | None) -> ir.DataType:
    """The quantized type: that of the zero point, of the value, of the attribute, or UINT8."""
    if zero is not None and zero.dtype is not None:
        return zero.dtype
    if value.dtype is not None:
        return value.dtype
    named = edit.int_attribute(node, "output_dtype", 0)
    return ir.DataType(named) if named else ir.DataType.UINT8


def limits(dtype: ir.DataType) -> tuple[float, float]:
    """The lowest and highest of a type of integers."""
    size = 2.0**dtype.bitwidth
    return (-size / 2, size / 2 - 1) if dtype.is_signed() else (0.0, size - 1)


def dequantized(values: np.ndarray, how: Quantizer, dtype: ir.DataType = ir.DataType.FLOAT) -> np.ndarray:
    """The numbers that quantized ``values`` stand for, in a floating type; what it cannot hold becomes its largest."""
    scale, zero = how.column(values.ndim)
    exact = (values.astype(np.float64) - zero) * scale
    largest = float(ml_dtypes.finfo(dtype.numpy()).max)
    return np.asarray(np.clip(exact, -largest, largest).astype(dtype.numpy()))


def existing_nodes(model: ir.Model) -> frozenset[str]:
    """The products of a mended model that compute in 8 bits already: both their operands are dequantized."""
    found = set()
    for node in model.graph:
        if edit.is_op(node, "Conv", "Gemm", "MatMul"):
            makers = [edit.maker_of(value) for value in node.inputs[:2]]
            if all(edit.is_op(maker, "DequantizeLinear") for maker in makers):
                found.add(str(node.name))
    return frozenset(found)


@dataclass
class QdqEditor:
    """A clone of a model whose Q/DQ is being mended, in place, and what was done so far, in words and numbers.

    ``warnings`` are those of the ``details`` that cost accuracy; ``refusals`` what was found and left as it is.
    """

    model: ir.Model
    backend: str
    names: edit.Names
    details: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
    changes: int = 0

    @property
    def graph(self) -> ir.Graph:
        """The main graph; those nested in it are left alone."""
        return self.model.graph

    def say(self, places: Sequence[str], what: str, *, costs_accuracy: bool = False) -> None:
        """Note a change made at ``places``: ``what`` follows their number."""
        if places:
            shown = ", ".join(places[:_SHOWN]) + (", ..." if len(places) > _SHOWN else "")
            self.details.append(f"{len(places)} {what}: {shown}")
            self.warnings += self.details[-1:] if costs_accuracy else []
            self.changes += len(places)

    def leave(self, node: ir.Node, reason: str) -> None:
        """Note a node that is left as it is."""
        self.refusals.append(Refusal(str(node.name), reason))

    def nodes(self, *op_types: str) -> list[ir.Node]:
        """The nodes of these operators of ONNX, in order."""
        return [node for node in self.graph if edit.is_op(node, *op_types)]

    def constant(self, name: str, array: np.ndarray) -> ir.Value:
        """A new constant of the graph."""
        return edit.add_initializer(self.graph, self.names.value(name), np.asarray(array))

    def node(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        output: str,
        like: ir.Value,
        dtype: ir.DataType | None = None,
    ) -> ir.Node:
        """A new node with one output of the shape of ``like``, and its type or ``dtype``; not in the graph yet."""
        output = self.names.value(output)
        name = self.names.node(f"trtopt/{op_type}/{output}")
        node = edit.new_node(op_type, inputs, name=name, output=output, like=like)
        if dtype is not None:
            node.outputs[0].type = ir.TensorType(dtype)
        return node

    def quantize(self, value: ir.Value, how: Quantizer) -> ir.Node:
        """A QuantizeLinear of ``value``, not in the graph yet."""
        inputs = [value, *self.parameters(str(value.name), how, value.dtype)]
        return self._mapped("QuantizeLinear", inputs, f"{value.name}_quantized", value, how, how.dtype)

    def dequantize(self, value: ir.Value, how: Quantizer, dtype: ir.DataType | None = None) -> ir.Node:
        """A DequantizeLinear of ``value`` to ``dtype`` (FP32), not in the graph yet."""
        to = dtype or ir.DataType.FLOAT
        inputs = [value, *self.parameters(str(value.name), how, to)]
        return self._mapped("DequantizeLinear", inputs, f"{value.name}_dequantized", value, how, to)

    def parameters(self, name: str, how: Quantizer, dtype: ir.DataType | None) -> list[ir.Value]:
        """Scale and zero point as constants of the graph, the scale of the floating type ``dtype`` (FP32)."""
        floating = dtype if dtype is not None and dtype.is_floating_point() else ir.DataType.FLOAT
        scale = self.constant(f"{name}_scale", how.scale.astype(floating.numpy()))
        return [scale, self.constant(f"{name}_zero_point", how.zero.astype(how.dtype.numpy()))]

    def _mapped(
        self, op_type: str, inputs: list[ir.Value], output: str, like: ir.Value, how: Quantizer, dtype: ir.DataType
    ) -> ir.Node:
        node = self.node(op_type, inputs, output, like, dtype)
        if how.axis is not None:
            node.attributes["axis"] = ir.AttrInt64("axis", how.axis)
        return node

    def replace(self, node: ir.Node, new: ir.Node) -> None:
        """Put ``new`` in the place of ``node``, whose output's name and readers its output takes over."""
        self.graph.insert_before(node, new)
        self.take_over(node.outputs[0], new.outputs[0])
        edit.remove_node(node)

    def take_over(self, old: ir.Value, new: ir.Value) -> None:
        """Let ``new`` have the name, readers and place among the outputs of ``old``, which gets another name."""
        name = str(old.name)
        old.name = self.names.value(f"{name}_before")
        new.name = name
        old.replace_all_uses_with(new, replace_graph_outputs=True)

    def drop_unused(self) -> None:
        """Q/DQ that nothing reads any more leaves the graph, and constants that only it read."""
        for node in reversed(list(self.graph)):
            idle = not any(value.uses() or value.is_graph_output() for value in node.outputs)
            if idle and edit.is_op(node, "QuantizeLinear", "DequantizeLinear", "Identity", "Constant"):
                edit.remove_node(node)
        for name, value in list(self.graph.initializers.items()):
            if not value.uses() and not value.is_graph_output() and not value.is_graph_input():
                del self.graph.initializers[name]
