"""What no engine of a graph can do without: a price below it means that a compiler's list hides work."""

from __future__ import annotations

import math

import onnx_ir as ir

from trtopt.graph.cost import flop_by_node
from trtopt.graph.edit import constant_tensor_of, is_op
from trtopt.graph.products import GATES, PRODUCTS, Shapes
from trtopt.hardware.spec import GpuSpec, supports
from trtopt.report.schema.steps import Cost
from trtopt.roofline.peaks import peak_rate
from trtopt.support.precision import Precision

_TYPES = (Precision.INT8, Precision.FP8, Precision.FP16, Precision.FP32)
_SPARSE = 2
"""How much of a product's arithmetic and of its weight 2:4 sparsity leaves out at most, as a divisor."""


def at_least(cost: Cost, model: ir.Model, shapes: Shapes, gpu: GpuSpec) -> Cost:
    """The cost, not below the arithmetic of the products at the GPU's peak and the bytes of their weights.

    Args:
        cost: What the kernels of an engine were found to cost.
        model: The model it was made of.
        shapes: Static shapes of its values, by name.
        gpu: The GPU.
    """
    flop, moved = 0, 0.0
    flops = flop_by_node(model, shapes)
    for node in model.graph:
        if not is_op(node, *PRODUCTS) or is_op(node, *GATES) or node.inputs[0] is None:
            continue
        if _stored(node.inputs[0]) is None:  # else the compiler computes it once and for all
            flop += flops.get(str(node.name), 0)
            weight = _stored(node.inputs[1]) if len(node.inputs) > 1 else None
            moved += math.prod(weight.shape.numpy()) * min(weight.dtype.bitwidth, 8) / 8 if weight is not None else 0
    rate = max(peak_rate(gpu, dtype) for dtype in _TYPES if supports(gpu, dtype))
    least_us, least_bytes = flop / rate / _SPARSE, int(moved) // _SPARSE
    return Cost(cost.kernels, cost.syncs, max(cost.bytes, least_bytes), max(cost.predicted_us, least_us))


def _stored(value: ir.Value | None) -> ir.TensorProtocol | None:
    """The constant behind a value, quantized or cast or not."""
    while value is not None and constant_tensor_of(value) is None:
        node = value.producer()
        value = node.inputs[0] if is_op(node, "DequantizeLinear", "Cast") else None
    return constant_tensor_of(value)
