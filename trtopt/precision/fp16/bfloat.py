"""BF16 beside FP16: products whose values need the range of FP32 but not its precision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import onnx_ir as ir

from trtopt.precision.fp16.hazards import loses_weights, overflows, wide_nodes
from trtopt.precision.observe.value_ranges import Spans
from trtopt.precision.plan import BF16, FP16, PrecisionPlan

_DOTS = frozenset(["Conv", "Gemm", "MatMul"])


def with_bfloat(base: ir.Model, plan: PrecisionPlan, spans: Spans) -> PrecisionPlan:
    """``plan`` with the products that FP16 cannot hold, and BF16 can, in BF16 instead of FP32.

    Only products with constant weights move. What lies between them is computed in FP32 inside the same kernel, and
    TensorRT for RTX takes the casts into the products' kernels (a feed-forward block of a transformer whose
    activations reach 2e5 keeps its number of kernels). Attention's own products stay FP32: scores as large as these
    lose whole units in BF16 before their softmax. Whether eight bits are enough for the others the outputs have to say:
    :func:`trtopt.precision.fp16.repair.repair` puts back to FP32 what they do not bear.

    Args:
        base: The widened model.
        plan: A plan whose 16-bit type is FP16; any other is returned as it is.
        spans: What is known of the model's tensors.
    """
    if plan.narrow is not FP16:
        return plan
    quantized = {op.node for op in plan.quantized}
    heavy = {str(node.name) for node in base.graph if _is_slow(node, plan.wide, spans)} - quantized
    if not heavy:
        return plan
    heavy -= wide_nodes(base, spans, BF16, quantized).keys()
    # Some are FP32 only because of others that are BF16 now.
    freed = wide_nodes(base, spans, FP16, quantized).keys() - wide_nodes(base, spans, FP16, quantized, heavy).keys()
    wide = {name: reason for name, reason in plan.wide.items() if name not in heavy | freed}
    reasons = {name: f"BF16 holds what FP16 does not: {plan.wide[name]}" for name in sorted(heavy - freed)}
    return replace(plan, wide=wide, bfloat={**plan.bfloat, **reasons})


def _is_slow(node: ir.Node, wide: Mapping[str, str], spans: Spans) -> bool:
    """Whether ``node`` is a product with constant weights that the compiler would run in FP32.

    Between a Cast from FP16 and one to FP16 it runs an FP32 product in FP16 (with sums in FP32), which is as fast and
    keeps three bits more; weights that do not fit FP16 it would break (see ``hazards``).
    """
    if node.op_type not in _DOTS or str(node.name) not in wide or len(node.inputs) < 2:
        return False
    left, right = (spans.constant(value) for value in node.inputs[:2])
    weight, data = (right, node.inputs[0]) if right is not None else (left, node.inputs[1])
    if weight is None or data is None:
        return False
    if overflows(weight, FP16) or loses_weights(weight, FP16):
        return True
    maker = data.producer()
    readers = [user for user, _ in node.outputs[0].uses()]
    neighbours = [*readers, *([] if maker is None else [maker])]
    return node.outputs[0].is_graph_output() or any(str(other.name) in wide for other in neighbours)
