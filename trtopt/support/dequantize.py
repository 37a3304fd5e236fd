"""DequantizeLinear of constants, computed here: ONNX Runtime has no kernels for FP4, for scales that are powers of two
(E8M0), and for FP8 in blocks.

A stored number is multiplied with its scale in FP32 and rounded to the type of the result once, as the ONNX
specification of DequantizeLinear says: ``y = (x - zero_point) * scale``, the scale of ``x[..., i, ...]`` along the axis
that of the block ``i // block_size``. Four-bit numbers stand two in a byte, the first in the low half, which
``onnx_ir`` unpacks.
"""

from __future__ import annotations

from collections.abc import Mapping

import ml_dtypes
import numpy as np
import onnx_ir as ir

_DOMAINS = ("", "ai.onnx", "trt")
MXFP8 = "TRT_MXFP8DequantizeLinear"
_OPS = ("DequantizeLinear", MXFP8)
"""The second is what Model Optimizer exports for TensorRT: E8M0 scales as the bytes of UINT8."""

_NO_KERNEL = (ir.DataType.FLOAT4E2M1, ir.DataType.FLOAT8E8M0)
_FP8 = (ir.DataType.FLOAT8E4M3FN, ir.DataType.FLOAT8E5M2)


def fold_unknown(model: ir.Model) -> None:
    """Make each DequantizeLinear of constants an Identity of its result, in place, where ONNX Runtime could not run
    one of them."""
    graphs = [model.graph, *model.graph.subgraphs()]
    if not any(_is_unknown(node) for graph in graphs for node in graph):
        return
    known: dict[ir.Value, np.ndarray] = {}
    for graph in graphs:
        for node in graph:
            result = dequantized(node, known) if _is_dequantizer(node) else None
            if result is None:
                continue
            known[node.outputs[0]] = result
            constant = ir.Value(
                name=f"{node.outputs[0].name}_folded",
                type=ir.TensorType(ir.DataType.from_numpy(result.dtype)),
                shape=ir.Shape(result.shape),
                const_value=ir.Tensor(result),
            )
            graph.register_initializer(constant)
            node.resize_inputs(1)
            node.replace_input_with(0, constant)
            node.op_type, node.domain = "Identity", ""
            node.attributes.clear()


def dequantized(node: ir.Node, known: Mapping[ir.Value, np.ndarray] | None = None) -> np.ndarray | None:
    """The result of a DequantizeLinear of constants, float32, float16 or bfloat16; None where an input is computed.

    ``known`` are values that were computed before.
    """
    numbers, scale, zero = (_constant(value, known or {}) for value in (*node.inputs, None, None)[:3])
    if numbers is None or scale is None or (zero is None and len(node.inputs) > 2 and node.inputs[2] is not None):
        return None
    if node.op_type != _OPS[0] and scale.dtype == np.uint8:
        scale = scale.view(ml_dtypes.float8_e8m0fnu)
    axis, block = int_of(node, "axis", 1), int_of(node, "block_size", 0)
    exact = numbers.astype(np.float32)
    if zero is not None:
        exact = exact - _spread(zero, numbers, axis, block)
    kind = ir.DataType(int_of(node, "output_dtype", 0)).numpy() if int_of(node, "output_dtype", 0) else scale.dtype
    if kind == ml_dtypes.float8_e8m0fnu:
        kind = np.dtype(np.float32)
    result: np.ndarray = (exact * _spread(scale, numbers, axis, block)).astype(kind)
    return result


def _spread(scale: np.ndarray, numbers: np.ndarray, axis: int, block: int) -> np.ndarray:
    """Scales (or zero points) as float32 that act on ``numbers``."""
    exact = scale.astype(np.float32)
    if block:
        return np.repeat(exact, block, axis=axis).take(np.arange(numbers.shape[axis]), axis=axis)
    if exact.size == 1:
        return exact.reshape(())
    shape = [1] * numbers.ndim
    shape[axis] = -1
    return exact.reshape(shape)


def _is_unknown(node: ir.Node) -> bool:
    if not _is_dequantizer(node):
        return False
    types = [value.dtype for value in node.inputs if value is not None]
    in_blocks = types[0] in _FP8 and int_of(node, "block_size", 0) > 0
    return node.op_type != _OPS[0] or in_blocks or any(dtype in _NO_KERNEL for dtype in types)


def _is_dequantizer(node: ir.Node) -> bool:
    return node.op_type in _OPS and node.domain in _DOMAINS


def _constant(value: ir.Value | None, known: Mapping[ir.Value, np.ndarray]) -> np.ndarray | None:
    if value is None or value in known:
        return None if value is None else known[value]
    if value.is_initializer():
        return None if value.const_value is None else value.const_value.numpy()
    node = value.producer()
    attribute = None if node is None or node.op_type != "Constant" else node.attributes.get("value")
    return None if attribute is None else attribute.as_tensor().numpy()


def int_of(node: ir.Node, name: str, default: int) -> int:
    """An integer attribute, ``default`` where there is none."""
    attribute = node.attributes.get(name)
    return default if attribute is None or attribute.is_ref() else attribute.as_int()
