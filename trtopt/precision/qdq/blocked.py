"""Weights in blocks that a model brings along, brought to the form both compilers read: signed numbers without zero
point behind a DequantizeLinear with ``block_size``.

ONNX Runtime's ``MatMulNBits`` (com.microsoft) holds unsigned numbers ``[N, K / block, block * bits / 8]``, the first in
the low bits, with the zero point ``2^(bits - 1)`` where none is given (its contrib operator documentation).
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx_ir as ir

from trtopt.errors import InvalidModelError
from trtopt.graph import edit
from trtopt.precision.qdq.canonicalize import QdqEditor
from trtopt.support.dequantize import MXFP8

NBITS = "MatMulNBits"

_UNSIGNED = (ir.DataType.UINT4, ir.DataType.UINT8)


def expand_blocked(work: QdqEditor) -> None:
    """Write MatMulNBits as DequantizeLinear and MatMul, and dequantized constants in blocks without zero points.

    Raises:
        InvalidModelError: A form of MatMulNBits that has no such equal.
    """
    done = []
    for node in list(work.graph):
        if node.op_type == NBITS and node.domain == "com.microsoft":
            done.append(str(node.name))
            _expand(work, node)
    work.say(done, f"{NBITS} written as DequantizeLinear and MatMul")
    done = [name for node in work.nodes("DequantizeLinear") if (name := _without_zero_point(work, node))]
    work.say(done, "weights in blocks have no zero point now")
    done = [str(node.name) for node in list(work.graph) if _with_floating_scale(work, node)]
    work.say(done, "scales that are powers of two (E8M0) are stored as floating numbers")
    work.drop_unused()


def _expand(work: QdqEditor, node: ir.Node) -> None:
    depth, columns, bits, block = (edit.int_attribute(node, name, 0) for name in ("K", "N", "bits", "block_size"))
    bits = bits or 4
    packed, scales = (edit.constant_of(edit.input_of(node, index)) for index in (1, 2))
    data, bias, result = node.inputs[0], edit.input_of(node, 5), node.outputs[0]
    if data is None or packed is None or scales is None or bits not in (4, 8) or min(depth, columns, block) < 1:
        raise _unknown(node, "its weight is computed, or has neither 4 nor 8 bits")
    if depth % block or edit.input_of(node, 4) is not None:
        raise _unknown(node, f"{depth} inputs are no multiple of its block of {block}, or are in an order of their own")
    count = depth // block
    if packed.size != columns * depth * bits // 8 or scales.size != columns * count:
        raise _unknown(node, "the sizes of its weight and scales do not fit K, N and block_size")
    zero = _zero_points(node, bits, columns, count)
    numbers = _unpacked(packed.reshape(columns, -1), bits).reshape(columns, count, block)
    signed = (numbers - zero[:, :, None]).reshape(columns, depth).T
    of_block = np.ascontiguousarray(scales.reshape(columns, count).T)
    made = _weight(work, str(node.name), signed, of_block)
    exact = np.float32(signed) * np.repeat(of_block, block, axis=0)
    read = made[0].outputs[0] if made else work.constant(f"{node.name}_wide", exact.astype(scales.dtype))
    made.append(work.node("MatMul", [data, read], f"{result.name}_product", result))
    if bias is not None:
        made.append(work.node("Add", [made[-1].outputs[0], bias], f"{result.name}_biased", result))
    for item in made[:-1]:
        work.graph.insert_before(node, item)
    name, product = node.name, next(item for item in made if item.op_type == "MatMul")
    work.replace(node, made[-1])
    product.name = name


def _weight(work: QdqEditor, name: str, signed: np.ndarray, scales: np.ndarray) -> list[ir.Node]:
    """The DequantizeLinear of numbers ``[K, N]``; none where zero points leave numbers that eight bits do not hold, or
    the compilers read no such scales: TensorRT for RTX 1.7.1 wants those of INT8 positive, and ONNX Runtime gives a
    block the sign of its largest number, -128, whose opposite is no INT8."""
    if not _fits(signed, 8) or (not _fits(signed, 4) and np.any(scales <= 0)):
        return []
    stored = _stored(signed)
    weight, scale = work.constant(f"{name}_weight", stored), work.constant(f"{name}_scale", scales)
    made = work.node("DequantizeLinear", [weight, scale], f"{name}_dequantized", weight, scale.dtype)
    _in_blocks(made, 0, len(signed) // len(scales))
    return [made]


def _zero_points(node: ir.Node, bits: int, columns: int, count: int) -> np.ndarray:
    """int32 ``[columns, count]``."""
    value = edit.input_of(node, 3)
    if value is None:
        return np.full((columns, count), 1 << (bits - 1), np.int32)
    found = edit.constant_of(value)
    if found is None or found.dtype != np.uint8 or found.size != columns * -(-count * bits // 8):
        raise _unknown(node, "its zero points are computed, or no packed integers")
    return _unpacked(found.reshape(columns, -1), bits)[:, :count]


def _unpacked(packed: np.ndarray, bits: int) -> np.ndarray:
    """Unsigned numbers, the first in the low bits: int32 ``[rows, bytes * 8 / bits]``."""
    numbers = packed.astype(np.int32)
    if bits == 8:
        return numbers
    return np.stack([numbers & 15, numbers >> 4], axis=-1).reshape(len(packed), -1)


def _without_zero_point(work: QdqEditor, node: ir.Node) -> str:
    """Store the constant behind a DequantizeLinear in blocks without zero point; its name, empty where it has none."""
    block, zero = edit.int_attribute(node, "block_size", 0), edit.input_of(node, 2)
    value, points = node.inputs[0], edit.constant_of(zero)
    numbers = edit.constant_of(value)
    if not block or value is None or numbers is None or (zero is not None and points is None):
        return ""
    if value.dtype is None or not value.dtype.is_integer() or (points is None and value.dtype not in _UNSIGNED):
        return ""
    signed, axis = numbers.astype(np.int32), edit.int_attribute(node, "axis", 1)
    if points is not None:
        spread = np.repeat(points.astype(np.int32), block, axis=axis)
        signed = signed - spread.take(np.arange(signed.shape[axis]), axis=axis)
    if not _fits(signed, 8):
        work.leave(node, "its zero points leave numbers that eight bits do not hold")
        return ""
    scale, result = node.inputs[1], node.outputs[0]
    inputs = [work.constant(f"{value.name}_symmetric", _stored(signed)), scale]
    new = work.node("DequantizeLinear", inputs, f"{result.name}_symmetric", result)
    _in_blocks(new, axis, block)
    work.replace(node, new)
    return str(value.name)


def _with_floating_scale(work: QdqEditor, node: ir.Node) -> bool:
    """Store E8M0 scales in the type of the result, which the compilers read; whether there were any.

    TensorRT for RTX 1.7.1 reads no initializer of that type. Model Optimizer writes them as bytes, for an operator of
    TensorRT's own.
    """
    is_own = node.op_type == MXFP8 and node.domain == "trt"
    if not (is_own or edit.is_op(node, "DequantizeLinear")) or len(node.inputs) < 2:
        return False
    value, scale = node.inputs[0], edit.constant_of(node.inputs[1])
    if value is None or scale is None:
        return False
    powers = scale.view(ml_dtypes.float8_e8m0fnu) if is_own and scale.dtype == np.uint8 else scale
    if powers.dtype != ml_dtypes.float8_e8m0fnu:
        return False
    result, block = node.outputs[0], edit.int_attribute(node, "block_size", 32)
    dtype = result.dtype or ir.DataType(edit.int_attribute(node, "output_dtype", int(ir.DataType.FLOAT)))
    stored = work.constant(f"{result.name}_scale", powers.astype(np.float32).astype(dtype.numpy()))
    new = work.node("DequantizeLinear", [value, stored], f"{result.name}_dequantized", value, dtype)
    axis = edit.int_attribute(node, "axis", -1 if is_own else 1)
    _in_blocks(new, axis % powers.ndim, block)
    work.replace(node, new)
    return True


def _stored(signed: np.ndarray) -> np.ndarray:
    """In four bits where they hold it, else in eight."""
    return np.ascontiguousarray(signed.astype(ml_dtypes.int4 if _fits(signed, 4) else np.int8))


def _fits(signed: np.ndarray, bits: int) -> bool:
    """Whether signed integers of so many bits hold the numbers."""
    half = 1 << (bits - 1)
    return bool(signed.min(initial=0) >= -half and signed.max(initial=0) < half)


def _in_blocks(node: ir.Node, axis: int, block: int) -> None:
    node.attributes["axis"] = ir.AttrInt64("axis", axis)
    node.attributes["block_size"] = ir.AttrInt64("block_size", block)


def _unknown(node: ir.Node, why: str) -> InvalidModelError:
    return InvalidModelError(
        f"{NBITS} cannot be written as DequantizeLinear: {why}",
        where=f"node {node.name}",
        remedy="quantize with a block that divides the inputs and without reordering, or give the model before it was "
        "quantized and --int4 --calib SAMPLES",
    )
