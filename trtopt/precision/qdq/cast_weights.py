"""Weights that a model keeps as integers behind a Cast and a multiplication, as exports of torchao do, brought to the
form both compilers read: DequantizeLinear, which they take into the kernel of the product.

As they stand a compiler refuses them (TensorRT for RTX 1.7.1: "Quantized constant is only allowed before DQ"), or they
are folded to wide weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import onnx_ir as ir

from trtopt.graph import edit
from trtopt.precision.qdq.canonicalize import QdqEditor

_INTEGERS = (ir.DataType.INT8, ir.DataType.UINT8, ir.DataType.INT4, ir.DataType.UINT4)
_FLOATS = (ir.DataType.FLOAT8E4M3FN, ir.DataType.FLOAT8E5M2)
_SMALLEST_BLOCK = 16


@dataclass(frozen=True)
class _Stored:
    """Numbers of a narrow type and what they are multiplied with, of one shape: float32 both."""

    numbers: np.ndarray
    scale: np.ndarray
    is_integer: bool


def has_cast_weights(model: ir.Model) -> bool:
    """Whether a product of the main graph reads a weight of this kind."""
    return any(edit.is_op(node, "MatMul") and _stored(edit.input_of(node, 1)) is not None for node in model.graph)


def expand_cast_weights(work: QdqEditor) -> None:
    """Write such weights of MatMul as DequantizeLinear, with a scale per column or in blocks along the sum.

    A scale behind the product (INT8 weights of torchao) joins the others. FP8 weights, which not every GPU reads, and
    scales that fit neither form become wide constants of the same values.
    """
    narrow, wide = list[str](), list[str]()
    for node in work.nodes("MatMul"):
        value = edit.input_of(node, 1)
        found = _stored(value)
        if value is None or found is None or found.numbers.ndim != 2 or value.dtype is None:
            continue
        found = _with_scale_behind(work, node, found)
        inputs = _dequantized(work, value, found) if found.is_integer else None
        if inputs is None:
            exact = (found.numbers * found.scale).astype(value.dtype.numpy())
            node.replace_input_with(1, work.constant(f"{value.name}_wide", exact))
        else:
            work.graph.insert_before(node, inputs)
            node.replace_input_with(1, inputs.outputs[0])
        (wide if inputs is None else narrow).append(str(node.name))
        _remove(value)
    work.say(narrow, "integer weights behind a Cast are read by DequantizeLinear")
    work.say(wide, "narrow weights behind a Cast are stored wide, with the same values")


def _remove(value: ir.Value) -> None:
    """Remove the nodes that only make a value which nothing reads any more."""
    node = value.producer()
    if node is not None and not value.uses() and not value.is_graph_output():
        sources = [source for source in node.inputs if source is not None]
        edit.remove_node(node)
        for source in sources:
            _remove(source)


def _stored(value: ir.Value | None, depth: int = 8) -> _Stored | None:
    """What stands behind a value that is computed from one narrow constant in few steps; None where something else
    does."""
    node = edit.maker_of(value)
    if not depth or not edit.is_op(node, "Cast", "Identity", "Mul", "Reshape", "Sub", "Transpose"):
        return None
    source, *others = node.inputs
    other = edit.constant_of(others[0]) if others else None
    if edit.is_op(node, "Mul") and other is None:
        source, other = others[0], edit.constant_of(source)
    array = edit.constant_of(source) if source is not None and source.dtype in (*_INTEGERS, *_FLOATS) else None
    if source is not None and array is not None:
        found: _Stored | None = _Stored(
            array.astype(np.float32), np.ones(array.shape, np.float32), source.dtype in _INTEGERS
        )
    else:
        found = _stored(source, depth - 1)
    return None if found is None else _moved(found, node, other)


def _moved(found: _Stored, node: ir.Node, other: np.ndarray | None) -> _Stored | None:
    """The same behind ``node``, whose other operand is ``other``; None where that is no such form."""
    numbers, scale = found.numbers, found.scale
    if edit.is_op(node, "Cast", "Identity"):
        return found
    if edit.is_op(node, "Reshape"):
        shape = edit.static_shape(node.outputs[0])
        return None if shape is None else _Stored(numbers.reshape(shape), scale.reshape(shape), found.is_integer)
    if edit.is_op(node, "Transpose"):
        perm = edit.ints_attribute(node, "perm")
        return _Stored(numbers.transpose(perm), scale.transpose(perm), found.is_integer)
    fits = other is not None and other.dtype.kind == "f" and other.ndim <= scale.ndim
    if (
        other is None
        or not fits
        or any(a not in (1, b) for a, b in zip(other.shape[::-1], scale.shape[::-1], strict=False))
    ):
        return None
    if edit.is_op(node, "Mul"):
        return _Stored(numbers, scale * other.astype(np.float32), found.is_integer)
    if edit.is_op(node, "Sub") and np.all(scale == 1) and np.all(other == np.rint(other)):
        return _Stored(numbers - other.astype(np.float32), scale, found.is_integer)
    return None


def _with_scale_behind(work: QdqEditor, node: ir.Node, found: _Stored) -> _Stored:
    """With the factor per column that the product is multiplied with, which leaves the graph."""
    behind = edit.only_user(node.outputs[0])
    if not edit.is_op(behind, "Mul"):
        return found
    factors = [edit.constant_of(value) for value in behind.inputs if value is not node.outputs[0]]
    factor = factors[0] if len(factors) == 1 else None
    columns = found.numbers.shape[1]
    if factor is None or factor.shape[-1:] != (columns,) or factor.size != columns:
        return found
    work.take_over(behind.outputs[0], node.outputs[0])
    edit.remove_node(behind)
    return _Stored(found.numbers, found.scale * factor.reshape(1, columns).astype(np.float32), found.is_integer)


def _dequantized(work: QdqEditor, value: ir.Value, found: _Stored) -> ir.Node | None:
    """A DequantizeLinear of numbers ``[K, N]``, not in the graph yet; None where no scales of its own fit them."""
    numbers, scale = found.numbers, found.scale
    low, high = numbers.min(initial=0), numbers.max(initial=0)
    if low < -128 or high > 127 or not np.all(scale > 0):
        return None
    changes = np.flatnonzero((scale[1:] != scale[:-1]).any(axis=1)) + 1
    block = math.gcd(len(scale), *(int(row) for row in changes)) if changes.size else 0
    if changes.size and block < _SMALLEST_BLOCK:
        return None
    narrow = np.int8 if not block or low < -8 or high > 7 else ml_dtypes.int4
    dtype = value.dtype or ir.DataType.FLOAT
    rows = scale[::block] if block else scale[0]
    inputs = [
        work.constant(f"{value.name}_numbers", np.ascontiguousarray(numbers.astype(narrow))),
        work.constant(f"{value.name}_scale", np.ascontiguousarray(rows.astype(dtype.numpy()))),
    ]
    made = work.node("DequantizeLinear", inputs, f"{value.name}_dequantized", value)
    made.attributes["axis"] = ir.AttrInt64("axis", 0 if block else 1)
    if block:
        made.attributes["block_size"] = ir.AttrInt64("block_size", block)
    return made
