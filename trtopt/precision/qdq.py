"""Write INT8 into the graph: symmetric Q/DQ at the inputs of the planned nodes, weights stored as INT8."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from trtopt.graph import edit
from trtopt.precision.casts import insert_behind
from trtopt.precision.plan import NarrowType, PrecisionPlan, QuantizedOp
from trtopt.precision.ranges import LEVELS


@dataclass(frozen=True)
class QuantizedModel:
    """The model with Q/DQ, still FP32 elsewhere, and the nodes among the new ones that must stay FP32."""

    model: ir.Model
    wide: frozenset[str]


def quantize(model: ir.Model, plan: PrecisionPlan) -> QuantizedModel:
    """A clone of ``model`` with the plan's Q/DQ.

    One Quantize/Dequantize pair per quantized tensor, shared by its readers; the residual branch of a block keeps
    reading the unquantized tensor, so that conv + bias + add + activation still fuse. Scales are rounded to the plan's
    narrow type before weights are quantized with them, so that storing them narrow changes nothing.

    Args:
        model: A widened model, nodes named.
        plan: Names nodes and tensors of ``model``.
    """
    clone = model.clone()
    writer = _QdqWriter(clone, plan)
    nodes = {node.name: node for node in clone.graph}
    for op in plan.quantized:
        writer.quantize(nodes[op.node], op)
    writer.drop_unused()
    return QuantizedModel(clone, frozenset(writer.wide))


def activation_scale(amax: float, narrow: NarrowType | None) -> np.float32:
    """``amax / 127`` as the narrow type stores it, never smaller than asked for."""
    return np.float32(_round_up(np.array(max(amax, 1e-30) / LEVELS, np.float32), narrow))


def quantize_weight(weight: np.ndarray, axis: int | None, narrow: NarrowType | None) -> tuple[np.ndarray, np.ndarray]:
    """INT8 values and their scales.

    Args:
        weight: Any shape, float.
        axis: The axis with a scale per index; None for one scale.
        narrow: The type the scales will be stored in; None for FP32.

    Returns:
        ``(values, scales)``: int8 of the weight's shape; float32, scalar or of the axis' length. ``values * scales``
        is within half a scale of the weight.
    """
    exact = np.asarray(weight, np.float32)
    others = tuple(index for index in range(exact.ndim) if axis is None or index != axis)
    amax = np.abs(exact).max(axis=others)
    scales = _round_up(np.maximum(amax, np.float32(1e-30)) / np.float32(LEVELS), narrow)
    shape = [1] * exact.ndim
    if axis is not None:
        shape[axis] = -1
    values = np.clip(np.rint(exact / scales.reshape(shape)), -LEVELS, LEVELS).astype(np.int8)
    return values, scales


@dataclass(frozen=True)
class ScaledWeight:
    """A convolution's weight as INT8 with one scale, and what its output channels are multiplied with.

    Attributes:
        values: int8, the weight's shape.
        scale: float32 scalar.
        ratios: float32, one per output channel, at most 1.
    """

    values: np.ndarray
    scale: np.ndarray
    ratios: np.ndarray


_SMALLEST_RATIOS = (2.0**-10, 2.0**-6, 2.0**-4, 2.0**-2)


def scale_channels(weight: np.ndarray, amax: float, narrow: NarrowType | None) -> ScaledWeight | None:
    """Quantize a convolution's weight per output channel, with the scales' ratios kept apart.

    A channel with small weights is quantized with a scale of its own and so comes out larger than it is; the bound on
    that is ``amax`` times the L1 norm of the channel as the convolution sees it. Ratios are kept from becoming smaller
    than needed to stay below the narrow type's largest number.

    Args:
        weight: ``[K, C / groups, ...]``, float.
        amax: The largest magnitude of the quantized input.
        narrow: The type of the output and of the ratios.

    Returns:
        None when no useful ratios keep the output in range.
    """
    exact = np.asarray(weight, np.float32)
    rows = exact.reshape(exact.shape[0], -1)
    scales = np.abs(rows).max(axis=1) / np.float32(LEVELS)
    scale = _round_up(np.maximum(scales.max(), np.float32(1e-30)), narrow)
    for smallest in _SMALLEST_RATIOS:
        ratios = _round_up(np.maximum(scales / scale, np.float32(smallest)), narrow)
        values = np.clip(np.rint(rows / (scale * ratios)[:, None]), -LEVELS, LEVELS)
        largest = amax * float(np.abs(values).sum(axis=1).max()) * float(scale)
        if narrow is None or largest <= narrow.largest:
            return ScaledWeight(values.astype(np.int8).reshape(exact.shape), scale, ratios)
    return None


def _round_up(scales: np.ndarray, narrow: NarrowType | None) -> np.ndarray:
    """Scales as the narrow type holds them, one step up where rounding made them smaller; zeros become its smallest."""
    exact = np.asarray(scales, np.float32)
    if narrow is None:
        return exact
    kind = narrow.dtype.numpy()
    stored = exact.astype(kind)
    low = stored.astype(np.float32) < exact
    bits = stored.view(np.uint16) + low.astype(np.uint16)
    return np.asarray(bits, np.uint16).view(kind).astype(np.float32)


class _QdqWriter:
    def __init__(self, model: ir.Model, plan: PrecisionPlan) -> None:
        self._graph = model.graph
        self._plan = plan
        self._names = edit.Names(model)
        self._activations: dict[tuple[str, bool], ir.Value] = {}
        self._weights: dict[tuple[ir.Value, int | None, bool], ir.Value] = {}
        quantized = {op.node for op in plan.quantized}
        self._readers = {node.name for node in self._graph if node.name not in quantized}
        self._zero: ir.Value | None = None
        self._dropped: list[ir.Value] = []
        self.wide: set[str] = set()

    def quantize(self, node: ir.Node, op: QuantizedOp) -> None:
        """Put Q/DQ at the node's data input and weight."""
        data, weight = node.inputs[0], node.inputs[1]
        if data is None or weight is None:
            raise ValueError(f"{node.name} has no data input or weight")
        is_wide = op.node in self._plan.wide
        node.replace_input_with(0, self._activation(data, op.activation_amax, is_wide))
        if not (op.multiply and self._scaled_conv(node, weight, op, is_wide)):
            axis = None if op.multiply else op.weight_axis
            node.replace_input_with(1, self._weight(weight, axis, is_wide, node))

    def _activation(self, value: ir.Value, amax: float, wide: bool) -> ir.Value:
        name = str(value.name)
        if (name, wide) in self._activations:
            return self._activations[name, wide]
        scale = self._constant(f"{name}_scale", np.array(activation_scale(amax, self._type(wide)), np.float32))
        quantized = self._node("QuantizeLinear", [value, scale, self._zero_point()], f"{name}_int8", value)
        quantized.outputs[0].type = ir.TensorType(ir.DataType.INT8)
        inputs = [quantized.outputs[0], scale, self._zero_point()]
        dequantized = self._node("DequantizeLinear", inputs, f"{name}_dequantized", value)
        insert_behind(self._graph, value, [quantized, dequantized])
        if self._stays_fp32(value):
            self.wide.add(str(quantized.name))
        if wide:
            self.wide.add(str(dequantized.name))
        self._activations[name, wide] = dequantized.outputs[0]
        return dequantized.outputs[0]

    def _type(self, wide: bool) -> NarrowType | None:
        """The type that the scales of a node are stored in; None for FP32."""
        return None if wide else self._plan.narrow

    def _stays_fp32(self, value: ir.Value) -> bool:
        """Whether nobody but the quantizer wants ``value`` narrow, so that quantizing from FP32 saves a Cast."""
        producer = value.producer()
        if producer is not None and producer.name not in self._plan.wide:
            return False
        return not any(node.name in self._readers and node.name not in self._plan.wide for node, _ in value.uses())

    def _weight(self, value: ir.Value, axis: int | None, wide: bool, node: ir.Node) -> ir.Value:
        key = (value, axis, wide)
        if key in self._weights:
            return self._weights[key]
        exact = edit.constant_of(value)
        if exact is None:
            raise ValueError(f"the weight {value.name} of {node.name} is not constant")
        values, scales = quantize_weight(exact, axis, self._type(wide))
        output = f"{value.name}_dequantized"
        inputs = [self._constant(f"{value.name}_int8", values), self._constant(f"{value.name}_scale", scales)]
        dequantize = self._node("DequantizeLinear", inputs, output, value)
        if axis is not None:
            dequantize.attributes["axis"] = ir.AttrInt64("axis", axis)
        self._graph.insert_before(node, dequantize)
        if wide:
            self.wide.add(str(dequantize.name))
        self._weights[key] = dequantize.outputs[0]
        return dequantize.outputs[0]

    def _scaled_conv(self, node: ir.Node, weight: ir.Value, op: QuantizedOp, wide: bool) -> bool:
        """Scales per channel as one scale and a multiplication behind the convolution, which takes over its bias.

        False when the product before the multiplication could overflow the narrow type, or the bias is computed.
        """
        exact = edit.constant_of(weight)
        if exact is None:
            raise ValueError(f"the weight {weight.name} of {node.name} is not constant")
        bias = node.inputs[2] if len(node.inputs) > 2 else None
        offset = edit.constant_of(bias)
        scaled = scale_channels(exact, op.activation_amax, self._type(wide))
        if scaled is None or (bias is not None and offset is None):
            return False
        base = str(node.outputs[0].name)
        inputs = [
            self._constant(f"{base}_weight_int8", scaled.values),
            self._constant(f"{base}_weight_scale", scaled.scale),
        ]
        dequantize = self._node("DequantizeLinear", inputs, f"{base}_weight", weight)
        self._graph.insert_before(node, dequantize)
        node.replace_input_with(1, dequantize.outputs[0])
        node.resize_inputs(2)
        chain = self._behind(node, scaled.ratios, offset, exact.ndim)
        if wide:
            self.wide.update(str(item.name) for item in (dequantize, *chain))
        self._dropped += [weight] if bias is None else [weight, bias]
        return True

    def _behind(self, node: ir.Node, ratios: np.ndarray, bias: np.ndarray | None, rank: int) -> list[ir.Node]:
        """Multiply a convolution's output channels and add its bias; the result takes over name and readers."""
        output = node.outputs[0]
        base, readers = str(output.name), list(output.uses())
        output.name = self._names.value(f"{base}_unscaled")
        column = [1, -1] + [1] * (rank - 2)
        ratio = self._constant(f"{base}_ratio", ratios.reshape(column))
        chain = [self._node("Mul", [output, ratio], f"{base}_scaled", output)]
        if bias is not None:
            offset = self._constant(f"{base}_bias", np.asarray(bias, np.float32).reshape(column))
            chain.append(self._node("Add", [chain[0].outputs[0], offset], f"{base}_biased", output))
        last = chain[-1].outputs[0]
        last.name = base
        for reader, index in readers:
            reader.replace_input_with(index, last)
        for position, value in enumerate(self._graph.outputs):
            if value is output:
                self._graph.outputs[position] = last
        self._graph.insert_after(node, chain)
        return chain

    def _zero_point(self) -> ir.Value:
        """The one INT8 zero point of the graph; without it, the output type would be UINT8."""
        if self._zero is None:
            self._zero = self._constant("int8_zero_point", np.array(0, np.int8))
        return self._zero

    def _node(self, op_type: str, inputs: list[ir.Value], output: str, like: ir.Value) -> ir.Node:
        output = self._names.value(output)
        name = self._names.node(f"trtopt/{op_type}/{output}")
        return edit.new_node(op_type, inputs, name=name, output=output, like=like)

    def _constant(self, name: str, array: np.ndarray) -> ir.Value:
        return edit.add_initializer(self._graph, self._names.value(name), array)

    def drop_unused(self) -> None:
        """Weights that only the INT8 form needs leave the graph."""
        for value in [*(key[0] for key in self._weights), *self._dropped]:
            if not value.uses() and not value.is_graph_output() and value.is_initializer():
                self._graph.initializers.pop(str(value.name), None)
