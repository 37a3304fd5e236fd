"""Quantized constants that a model brings along: 8-bit weights as both compilers read them, floating biases."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from trtopt.errors import InvalidModelError
from trtopt.graph import edit
from trtopt.precision.observe.ranges import LEVELS
from trtopt.precision.qdq.canonicalize import (
    EIGHT_BITS,
    FP8,
    INTEGERS,
    Mending,
    Quantizer,
    dequantized,
    limits,
    quantizer_of,
)

_QDQ = ("QuantizeLinear", "DequantizeLinear")

_SMALLEST_SHARE = np.float32(2.0**-10)
"""Of a channel's scale to the largest of its weight. Scales of channels without weights lie below, round to 0 in FP16,
and are refused as 0; raising them to this share costs half of 1/1024 of the other channels' step."""


def check_scales(work: Mending) -> None:
    """Raises InvalidModelError where a constant scale is no number above zero (for a weight's channels, or zero)."""
    for node in work.nodes(*_QDQ):
        how = quantizer_of(node)
        if how is None or (np.isfinite(how.scale).all() and (how.scale > 0).all()):
            continue
        channels = how.axis is not None and np.isfinite(how.scale).all() and (how.scale >= 0).all() and how.scale.any()
        if not channels:
            raise InvalidModelError(
                f"A scale is {how.scale.min():g}: scales are numbers above zero",
                where=f"node {node.name}",
                remedy="calibrate and quantize the model again, or give the FP32 model and --int8 --calib SAMPLES",
            )


def fold_constants(work: Mending) -> None:
    """Biases that are dequantized become floating constants, and weights that are quantized 8-bit constants."""
    biases, weights = [], []
    for node in work.nodes(*_QDQ):
        value = node.inputs[0]
        exact = edit.constant_of(value)
        how = quantizer_of(node)
        if exact is None or how is None or value is None:
            continue
        if node.op_type == "DequantizeLinear" and value.dtype is ir.DataType.INT32:
            _become_constant(work, node, dequantized(exact, how))
            biases.append(str(node.outputs[0].name))
        elif node.op_type == "QuantizeLinear" and how.dtype in EIGHT_BITS:
            _become_constant(work, node, _quantized(exact, how))
            weights.append(str(value.name))
    work.say(biases, "INT32 biases are stored in FP32")
    work.say(weights, "weights that were quantized at run time are stored as they come out")


def _quantized(exact: np.ndarray, how: Quantizer) -> np.ndarray:
    """As QuantizeLinear: divided in FP32, rounded half to even, clipped to the type."""
    scale, zero = how.column(exact.ndim)
    numbers = np.asarray(exact, np.float32)
    ratio = np.divide(numbers, scale, out=np.zeros_like(numbers), where=scale > 0)
    if how.dtype in FP8:
        low, high = -FP8[how.dtype], FP8[how.dtype]
    else:
        low, high = limits(how.dtype)
        ratio = np.rint(ratio) + zero
    return np.asarray(np.clip(ratio, low, high).astype(how.dtype.numpy()))


def _become_constant(work: Mending, node: ir.Node, array: np.ndarray) -> None:
    """Replace a node by a constant; one that is an output of the network stays."""
    value = node.outputs[0]
    if value.is_graph_output():
        return
    constant = work.constant(f"{value.name}_constant", array)
    if value.dtype is not None and value.dtype is not constant.dtype and value.dtype.is_floating_point():
        stored = array.astype(value.dtype.numpy())
        constant.const_value, constant.type = ir.tensor(stored, name=constant.name), ir.TensorType(value.dtype)
    value.replace_all_uses_with(constant)
    edit.remove_node(node)


def transpose_weights(work: Mending) -> None:
    """A transposed 8-bit weight is stored transposed, so that the product reads its DequantizeLinear itself."""
    done = []
    for node in work.nodes("Transpose"):
        dequantize = None if node.inputs[0] is None else node.inputs[0].producer()
        if dequantize is None or not edit.is_op(dequantize, "DequantizeLinear") or node.outputs[0].is_graph_output():
            continue
        values, how = edit.constant_of(dequantize.inputs[0]), quantizer_of(dequantize)
        perm = edit.ints_attribute(node, "perm")
        if values is None or how is None or values.ndim < 2:
            continue
        order = tuple(reversed(range(values.ndim))) if perm is None else perm
        name = str(dequantize.inputs[0].name)  # type: ignore[union-attr]
        weight = work.constant(f"{name}_transposed", np.ascontiguousarray(values.transpose(order)))
        inputs = [weight, *dequantize.inputs[1:]]
        new = work.node("DequantizeLinear", inputs, f"{name}_transposed_dequantized", node.outputs[0])
        if how.axis is not None:
            new.attributes["axis"] = ir.AttrInt64("axis", order.index(how.axis))
        work.replace(node, new)
        done.append(name)
    work.say(done, "transposed weights are stored transposed")
    work.drop_unused()


def make_weights_symmetric(work: Mending) -> None:
    """Weights with a zero point become INT8 without. Exact where they fit, else with a coarser step (up to twice)."""
    done = [name for node in work.nodes("DequantizeLinear") if (name := _symmetric_weight(work, node))]
    work.say(done, "weights with a zero point are symmetric INT8 now")
    work.drop_unused()


def _symmetric_weight(work: Mending, node: ir.Node) -> str:
    """Re-centre the constant behind a DequantizeLinear; its name, empty when there was nothing to do."""
    values, how = edit.constant_of(node.inputs[0]), quantizer_of(node)
    if values is None or how is None or how.dtype not in INTEGERS or how.is_symmetric:
        return ""
    whole = values.astype(np.int32) - how.column(values.ndim)[1]
    step = how.scale
    if whole.max(initial=0) > LEVELS or whole.min(initial=0) < -LEVELS - 1:
        others = tuple(axis for axis in range(whole.ndim) if axis != how.axis)
        excess = np.maximum(np.abs(whole).max(axis=others, keepdims=True) / LEVELS, 1)
        whole = np.rint(whole / excess).astype(np.int32)
        step = how.scale * excess.reshape(how.scale.shape).astype(np.float32)
    new = Quantizer(np.asarray(step, np.float32), np.zeros_like(how.zero), ir.DataType.INT8, how.axis)
    name = str(node.inputs[0].name)  # type: ignore[union-attr]
    weight = work.constant(f"{name}_symmetric", whole.astype(np.int8))
    work.replace(node, work.dequantize(weight, new, node.outputs[0].dtype))
    return name


def raise_scales(work: Mending) -> None:
    """Scales of channels without weights that matter, which FP16 would round to 0, are raised."""
    done = []
    for node in work.nodes("DequantizeLinear"):
        values, how = edit.constant_of(node.inputs[0]), quantizer_of(node)
        if values is None or how is None or how.axis is None or how.dtype is not ir.DataType.INT8:
            continue
        floor = how.scale.max() * _SMALLEST_SHARE
        if (how.scale >= floor).all():
            continue
        new = Quantizer(np.maximum(how.scale, floor), how.zero, how.dtype, how.axis)
        ratio = Quantizer(how.scale / new.scale, how.zero, how.dtype, how.axis).column(values.ndim)[0]
        name = str(node.inputs[0].name)  # type: ignore[union-attr]
        weight = work.constant(f"{name}_raised", np.rint(values * ratio).astype(np.int8))
        work.replace(node, work.dequantize(weight, new, node.outputs[0].dtype))
        done.append(name)
    work.say(done, "weights with nearly empty channels have larger scales there")
    work.drop_unused()
