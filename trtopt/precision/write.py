"""A precision plan written into a graph: 16-bit types, symmetric Q/DQ at the inputs of 8-bit nodes, 8-bit weights."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import onnx_ir as ir

from trtopt.graph import edit
from trtopt.graph.edit import insert_behind
from trtopt.precision.bias import add_bias
from trtopt.precision.fp16.cast_to_half import cast_to_half
from trtopt.precision.observe.ranges import LEVELS
from trtopt.precision.plan import NarrowType, PrecisionPlan, QuantizedOp
from trtopt.precision.qdq.apart import biases_apart, fp8_apart
from trtopt.precision.qdq.arithmetic import fusible, write_arithmetic
from trtopt.precision.qdq.ends import dequantized_apart
from trtopt.support.memo import once_per_array
from trtopt.support.precision import Precision

LARGEST: dict[Precision, float] = {
    Precision.INT8: float(LEVELS),
    Precision.FP8: float(ml_dtypes.finfo(ml_dtypes.float8_e4m3fn).max),
}
"""The value that a range's bound is stored as: 127, and 448, the largest number of FP8 E4M3 (it has no infinity)."""

_TYPES: dict[Precision, ir.DataType] = {Precision.INT8: ir.DataType.INT8, Precision.FP8: ir.DataType.FLOAT8E4M3FN}


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
    """
    clone = model.clone()
    writer = _QdqWriter(clone, plan)
    nodes = {node.name: node for node in clone.graph}
    places = {node.name: place for place, node in enumerate(clone.graph)}
    # In graph order: a weight that several nodes share is dequantized before the first of them.
    for op in sorted(plan.quantized, key=lambda op: places[op.node]):
        if op.node in plan.bias:
            writer.add_bias(nodes[op.node], plan.bias[op.node])
        writer.quantize(nodes[op.node], op)
    fused = _fused_quantizers(clone, plan)
    for op in plan.quantized:
        writer.quantize_residuals([nodes[name] for name in op.skips if name in nodes], op)
    writer.drop_unused()
    return QuantizedModel(clone, fused | writer.wide)


def _fused_quantizers(model: ir.Model, plan: PrecisionPlan) -> frozenset[str]:
    """Write the quantizers that the compiler fuses so as arithmetic, in place; the names of the new nodes."""
    if not plan.fused_quantizers:
        return frozenset()
    return write_arithmetic(model, fusible(model))


def activation_scale(amax: float, narrow: NarrowType | None, dtype: Precision = Precision.INT8) -> np.float32:
    """``amax / 127`` (FP8: ``amax / 448``) as the narrow type stores it, never smaller than asked for."""
    return np.float32(_round_up(np.array(max(amax, 1e-30) / LARGEST[dtype], np.float32), narrow))


def eight_bit(
    weight: np.ndarray, axis: int | None, narrow: NarrowType | None, dtype: Precision = Precision.INT8
) -> tuple[np.ndarray, np.ndarray]:
    """8-bit values and their scales.

    Args:
        weight: Any shape, float.
        axis: The axis with a scale per index; None for one scale.
        narrow: The type the scales will be stored in; None for FP32.
        dtype: The 8-bit type.

    Returns:
        ``(values, scales)``: int8 or float8_e4m3fn of the weight's shape; float32, scalar or of the axis' length.
        ``values * scales`` is within half a scale of the weight in INT8; in FP8 within a sixteenth of each value, or
        2^-10 scales where that is more.
    """
    exact = np.asarray(weight, np.float32)
    others = tuple(index for index in range(exact.ndim) if axis is None or index != axis)
    amax = np.abs(exact).max(axis=others)
    scales = _round_up(np.maximum(amax, np.float32(1e-30)) / np.float32(LARGEST[dtype]), narrow)
    shape = [1] * exact.ndim
    if axis is not None:
        shape[axis] = -1
    return _rounded(exact / scales.reshape(shape), dtype), scales


quantize_weight = once_per_array(eight_bit)
""":func:`eight_bit`, found once for each constant of a model; nobody writes into the result."""


def _rounded(steps: np.ndarray, dtype: Precision) -> np.ndarray:
    """Values in units of their scale, to the nearest of the 8-bit type (ties to even), saturated."""
    kept = np.clip(steps, -LARGEST[dtype], LARGEST[dtype])
    stored = np.rint(kept).astype(np.int8) if dtype == Precision.INT8 else kept.astype(ml_dtypes.float8_e4m3fn)
    return np.asarray(stored)


@dataclass(frozen=True)
class ScaledWeight:
    """A convolution's weight as INT8 with one float32 scale, and what its output channels are multiplied with.

    ``ratios`` are float32, one per output channel, at most 1.
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


def even_channels(weight: np.ndarray, axis: int) -> tuple[np.ndarray, np.ndarray]:
    """A product's weight whose output channels with large elements are divided by a power of two, and these powers.

    A channel of usual size stays as it is, so that no result becomes larger than it was.

    Args:
        weight: ``[K, N]``, or with ``axis`` 0 ``[N, K]``.
        axis: That of the output channels.
    """
    exact = np.asarray(weight, np.float32)
    largest = np.abs(exact).max(axis=tuple(index for index in range(exact.ndim) if index != axis))
    usual = np.median(largest[largest > 0]) if largest.any() else 1.0
    powers = np.exp2(np.rint(np.log2(np.maximum(largest / usual, 1)))).astype(np.float32)
    shape = [1] * exact.ndim
    shape[axis] = -1
    return exact / powers.reshape(shape), powers


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
        self._activations: dict[tuple[str, bool, Precision], ir.Value] = {}
        self._weights: dict[tuple[ir.Value, int | None, bool, Precision, str], ir.Value] = {}
        self._quantized = {op.node for op in plan.quantized}
        self._readers = {node.name for node in self._graph if node.name not in self._quantized}
        self._zeros: dict[Precision, ir.Value] = {}
        self._dropped: list[ir.Value] = []
        self.wide: set[str] = set()

    def add_bias(self, node: ir.Node, bias: np.ndarray) -> None:
        """Add the plan's bias to the node's output channels."""
        self._dropped += add_bias(self._graph, node, bias, self._names)

    def quantize(self, node: ir.Node, op: QuantizedOp) -> None:
        """Put Q/DQ at the node's data input and weight."""
        data, weight = node.inputs[0], node.inputs[1]
        if data is None or weight is None:
            raise ValueError(f"{node.name} has no data input or weight")
        if op.multiply and op.dtype != Precision.INT8:
            raise ValueError(f"{node.name}: a multiplication per channel is for INT8; FP8 needs none")
        powers: np.ndarray | None = None
        is_wide = op.node in self._plan.wide
        ends = op.ends and op.node not in self._plan.bias and not is_wide
        if ends:
            self.wide.add(op.node)
        node.replace_input_with(0, self._activation(data, op.activation_amax, op.dtype, is_wide, ends))
        if op.other is not None:
            node.replace_input_with(1, self._activation(weight, op.other.amax, op.dtype, is_wide))
        elif op.multiply and op.writes and not is_wide:
            powers = self._even_weight(node, weight, op)
        elif not (op.multiply and edit.is_op(node, "Conv") and self._scaled_conv(node, weight, op, is_wide)):
            node.replace_input_with(1, self._weight(weight, op, is_wide, node, ends))
        if op.writes and not (is_wide or ends):
            self._write_8_bits(node, op, powers)

    def _even_weight(self, node: ir.Node, weight: ir.Value, op: QuantizedOp) -> np.ndarray:
        """Give a product its weight with one scale and even channels; what its result is to be multiplied with."""
        exact = edit.constant_of(weight)
        if exact is None or op.weight_axis is None:
            raise ValueError(f"the weight {weight.name} of {node.name} has no channels")
        even, powers = even_channels(exact, op.weight_axis)
        base = str(node.outputs[0].name)
        values, scale = eight_bit(even, None, self._type(wide=False))
        inputs = [self._constant(f"{base}_weight_int8", values), self._constant(f"{base}_weight_scale", scale)]
        dequantize = self._node("DequantizeLinear", inputs, f"{base}_weight", weight)
        self._graph.insert_before(node, dequantize)
        node.replace_input_with(1, dequantize.outputs[0])
        self._dropped.append(weight)
        return powers

    def _write_8_bits(self, node: ir.Node, op: QuantizedOp, powers: np.ndarray | None) -> None:
        """Quantize what a node computes; what reads it reads it dequantized and multiplied by the powers, under its
        name."""
        value, number = node.outputs[0], activation_scale(op.result_amax, self._type(wide=False), op.dtype)
        base = str(value.name)
        scale, zero = self._constant(f"{base}_result_scale", np.array(number, np.float32)), self._zero_point(op.dtype)
        quantizer = self._node("QuantizeLinear", [value, scale, zero], f"{base}_result_{op.dtype}", value)
        quantizer.outputs[0].type = ir.TensorType(_TYPES[op.dtype])
        dequantize = self._node("DequantizeLinear", [quantizer.outputs[0], scale, zero], f"{base}_result", value)
        chain = [quantizer, dequantize]
        if powers is not None:
            ratio = self._constant(f"{base}_ratio", powers)
            chain.append(self._node("Mul", [dequantize.outputs[0], ratio], f"{base}_scaled", value))
        edit.chain_behind(value, chain, self._names, "written")

    def quantize_residuals(self, additions: list[ir.Node], op: QuantizedOp) -> None:
        """Let additions read the quantized form of the tensor that ``op`` reads."""
        for node in additions:
            for index, value in enumerate(node.inputs):
                if value is not None and value.name == op.activation:
                    wide = node.name in self._plan.wide
                    quantized = self._activation(value, op.activation_amax, op.dtype, wide)
                    node.replace_input_with(index, quantized)

    def _activation(self, value: ir.Value, amax: float, dtype: Precision, wide: bool, ends: bool = False) -> ir.Value:
        name = str(value.name)
        key = (name, wide or ends, dtype)
        if key in self._activations:
            return self._activations[key]
        number = activation_scale(amax, self._type(wide), dtype)
        scale = self._constant(f"{name}_scale", np.array(number, np.float32))
        zero = self._zero_point(dtype)
        quantizer = self._node("QuantizeLinear", [value, scale, zero], f"{name}_{dtype}", value)
        quantizer.outputs[0].type = ir.TensorType(_TYPES[dtype])
        dequantized = self._node("DequantizeLinear", [quantizer.outputs[0], scale, zero], f"{name}_dequantized", value)
        insert_behind(self._graph, value, [quantizer, dequantized])
        if self._stays_fp32(value):
            self.wide.add(str(quantizer.name))
        if wide or ends:
            self.wide.add(str(dequantized.name))
        self._activations[key] = dequantized.outputs[0]
        return dequantized.outputs[0]

    def _type(self, wide: bool) -> NarrowType | None:
        """The type that the scales of a node are stored in; None for FP32."""
        return None if wide else self._plan.narrow

    def _stays_fp32(self, value: ir.Value) -> bool:
        """Whether ``value`` is quantized from FP32: the narrow type does not hold what comes in BF16, and where nobody
        but the quantizer wants it narrow, that saves a Cast."""
        producer = value.producer()
        if producer is not None and producer.name in self._plan.bfloat:
            return True
        if producer is not None and producer.name not in self._plan.wide:
            return False
        return not any(node.name in self._readers and node.name not in self._plan.wide for node, _ in value.uses())

    def _weight(self, value: ir.Value, op: QuantizedOp, wide: bool, node: ir.Node, ends: bool = False) -> ir.Value:
        axis = None if op.multiply and edit.is_op(node, "Conv") else op.weight_axis
        key = (value, axis, wide or ends, op.dtype, op.node if op.node in self._plan.rounded else "")
        if key in self._weights:
            return self._weights[key]
        exact = edit.array_of(value)
        values, scales = quantize_weight(exact, axis, self._type(wide), op.dtype)
        values = self._plan.rounded.get(op.node, values)
        output = f"{value.name}_dequantized"
        inputs = [self._constant(f"{value.name}_{op.dtype}", values), self._constant(f"{value.name}_scale", scales)]
        dequantize = self._node("DequantizeLinear", inputs, output, value)
        if axis is not None:
            dequantize.attributes["axis"] = ir.AttrInt64("axis", axis)
        self._graph.insert_before(node, dequantize)
        if wide or ends:
            self.wide.add(str(dequantize.name))
        self._weights[key] = dequantize.outputs[0]
        return dequantize.outputs[0]

    def _scaled_conv(self, node: ir.Node, weight: ir.Value, op: QuantizedOp, wide: bool) -> bool:
        """Scales per channel as one scale and a multiplication behind the convolution, which takes over its bias.

        False when the product before the multiplication could overflow the narrow type, or the bias is computed.
        """
        exact = edit.array_of(weight)
        bias = node.inputs[2] if len(node.inputs) > 2 else None
        offset = edit.constant_of(bias)
        scaled = scale_channels(exact, op.activation_amax, self._type(wide))
        if scaled is None or (bias is not None and offset is None):
            return False
        base = str(node.outputs[0].name)
        inputs = [
            self._constant(f"{base}_weight_int8", self._plan.rounded.get(op.node, scaled.values)),
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
        base = str(output.name)
        column = [1, -1] + [1] * (rank - 2)
        ratio = self._constant(f"{base}_ratio", ratios.reshape(column))
        chain = [self._node("Mul", [output, ratio], f"{base}_scaled", output)]
        if bias is not None:
            offset = self._constant(f"{base}_bias", np.asarray(bias, np.float32).reshape(column))
            chain.append(self._node("Add", [chain[0].outputs[0], offset], f"{base}_biased", output))
        edit.chain_behind(output, chain, self._names, "unscaled")
        return chain

    def _zero_point(self, dtype: Precision) -> ir.Value:
        """The one zero point of an 8-bit type in the graph; without it, the output type would be UINT8."""
        if dtype not in self._zeros:
            self._zeros[dtype] = self._constant(f"{dtype}_zero_point", np.zeros((), _TYPES[dtype].numpy()))
        return self._zeros[dtype]

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


HALF_TYPES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def apply_plan(base: ir.Model, plan: PrecisionPlan) -> ir.Model:
    """Write a precision plan into (a clone of) the widened model it was made for."""
    model, wide = base, frozenset(plan.wide)
    if plan.quantized or (plan.fused_quantizers and fusible(base)):
        quantized = quantize(base, plan)
        model, wide = quantized.model, wide | quantized.wide
    if plan.ends:
        model, apart = dequantized_apart(model, plan.ends)
        wide |= apart
    if plan.narrow is not None:
        model = cast_to_half(model, plan.narrow, wide, plan.bfloat)
        biases_apart(model)
    if plan.quantized and plan.fused_quantizers:
        fp8_apart(model)
    return model


def cast_borders(model: ir.Model, narrow: ir.DataType, ends: Collection[str] = ()) -> ir.Model:
    """Give the inputs and outputs of a subgraph of a network the type they have inside an engine.

    An input takes the type that all its readers cast it to, a quantizer the narrow type; an output that of what is cast
    to FP32 last, but for ``ends``, those of the network itself.
    """
    graph = model.graph
    for value in list(graph.inputs):
        _narrow_input(model, value, narrow)
    for index, value in enumerate(graph.outputs):
        cast = value.producer()
        source = cast.inputs[0] if edit.is_op(cast, "Cast") else None
        if (
            value.name in ends
            or cast is None
            or source is None
            or source.producer() is None
            or source.is_graph_output()
        ):
            continue
        if value.dtype is ir.DataType.FLOAT and source.dtype in HALF_TYPES:
            graph.outputs[index] = source
            if not value.uses() and not value.is_graph_output():
                edit.remove_node(cast)
    return model


def _narrow_input(model: ir.Model, value: ir.Value, narrow: ir.DataType) -> None:
    users = [node for node, _ in value.uses()]
    casts = [node for node in users if edit.is_op(node, "Cast")]
    quantizers = [node for node in users if edit.is_op(node, "QuantizeLinear") and node.inputs[0] is value]
    types = {edit.int_attribute(node, "to", 0) for node in casts} | ({int(narrow)} if quantizers else set())
    if len(types) != 1 or len(casts) + len(quantizers) != len(users) or value.is_graph_output():
        return
    if any(node.outputs[0].is_graph_output() for node in casts) or value.dtype is not ir.DataType.FLOAT:
        return
    value.type = ir.TensorType(ir.DataType(types.pop()))
    for node in casts:
        node.outputs[0].replace_all_uses_with(value)
        edit.remove_node(node)
    names = edit.Names(model)
    for node in quantizers:
        scale = edit.constant_of(node.inputs[1])
        if scale is not None:
            kind = value.dtype.numpy()
            with np.errstate(over="ignore"):  # the subgraph is priced, not run: any scale above zero will do
                stored = np.maximum(np.asarray(scale, kind), np.asarray(ml_dtypes.finfo(kind).smallest_subnormal, kind))
            name = names.value(f"{node.outputs[0].name}_border_scale")
            node.replace_input_with(1, edit.add_initializer(model.graph, name, np.asarray(stored)))
