"""From observed ranges to a plan. Pure: no runtime, milliseconds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from trtopt.graph import cost, edit
from trtopt.precision import ranges, rules
from trtopt.precision.hazards import wide_nodes
from trtopt.precision.plan import BF16, FP16, PrecisionPlan, QuantizedOp
from trtopt.precision.qdq import quantize_weight
from trtopt.precision.ranges import TensorStats
from trtopt.precision.spans import LAYOUT_OPS, Spans, is_float
from trtopt.report.records import Refusal

_FUSED_ACTIVATIONS = frozenset({"Relu", "Clip"})
_WEIGHTED = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})


@dataclass(frozen=True)
class Wanted:
    """Tensors to observe: full histograms for INT8 scales, ranges for the 16-bit decision."""

    histogram: frozenset[str]
    ranges: frozenset[str]


def wanted_tensors(model: ir.Model, precision: str, backend: str) -> Wanted:
    """What :func:`decide` needs to know about ``model`` (widened, nodes named).

    Left out: the outputs of operators that only move values, and what a fused kernel never stores.
    """
    if precision in ("fp32", "tf32"):
        return Wanted(frozenset(), frozenset())
    histogram = set()
    if precision == "int8":
        histogram = {str(node.inputs[0].name) for node in _candidates(model, backend)[0] if node.inputs[0] is not None}
    values = [value for value in model.graph.inputs if is_float(value)]
    for node in model.graph:
        if node.op_type not in LAYOUT_OPS:
            values += [value for value in node.outputs if is_float(value) and value.name and not _is_fused_away(value)]
    names = {str(value.name) for value in values if edit.constant_of(value) is None}
    return Wanted(frozenset(histogram), frozenset(names - histogram))


def int8_nodes(model: ir.Model, backend: str) -> frozenset[str]:
    """The nodes that the backend's table sends to INT8, before anything was observed.

    Args:
        model: Nodes named.
        backend: ``tensorrt-rtx`` or ``tensorrt``.
    """
    return frozenset(str(node.name) for node in _candidates(model, backend)[0])


def decide(
    model: ir.Model,
    precision: str,
    backend: str,
    stats: Mapping[str, TensorStats],
    shapes: Mapping[str, tuple[int, ...]],
    method: str = "auto",
) -> PrecisionPlan:
    """The plan for one model.

    Args:
        model: A widened model, nodes named.
        precision: One of ``config.PRECISIONS``.
        backend: ``tensorrt-rtx`` or ``tensorrt``: whose INT8 table applies.
        stats: What was observed of :func:`wanted_tensors`.
        shapes: Static shapes by tensor name, at the largest input shapes.
        method: How INT8 ranges are chosen from histograms.
    """
    if precision in ("fp32", "tf32"):
        return PrecisionPlan(precision)
    narrow = BF16 if precision == "bf16" else FP16
    spans = Spans(stats, shapes)
    if precision != "int8":
        return PrecisionPlan(precision, narrow, wide_nodes(model, spans, narrow))
    nodes, refused = _candidates(model, backend)
    quantized = []
    amax: dict[str, tuple[float, str]] = {}
    for node in nodes:
        op = _quantized_op(node, backend, stats, method, amax)
        if isinstance(op, Refusal):
            refused.append(op)
            continue
        quantized.append(op)
    left_out = _left_out(model, quantized, stats, cost.flop_by_node(model, shapes))
    refused += left_out.values()
    quantized = [op for op in quantized if op.node not in left_out]
    wide = wide_nodes(model, spans, narrow, frozenset(op.node for op in quantized))
    for op in quantized:
        scale = ranges.scale(op.activation_amax)
        if scale < narrow.smallest_normal:
            wide.setdefault(op.node, f"its INT8 scale {scale:.2g} is too small for {narrow.name}")
    return PrecisionPlan(precision, narrow, wide, tuple(quantized), tuple(refused))


def int8_flop_share(model: ir.Model, plan: PrecisionPlan, flop: Mapping[str, int]) -> float:
    """Share of the flop of eligible nodes (``cost.is_eligible_for_int8``) that the plan makes INT8; 0 without any."""
    eligible = {str(node.name) for node in model.graph if cost.is_eligible_for_int8(node)}
    total = sum(flop.get(name, 0) for name in eligible)
    done = sum(flop.get(op.node, 0) for op in plan.quantized if op.node in eligible)
    return done / total if total else 0.0


def _candidates(model: ir.Model, backend: str) -> tuple[list[ir.Node], list[Refusal]]:
    """Nodes with a constant weight that the backend's table sends to INT8, and the refusals of the others."""
    nodes, refused = [], []
    for node in model.graph:
        if node.op_type not in _WEIGHTED or len(node.inputs) < 2:
            continue
        weight = edit.constant_of(node.inputs[1])
        if weight is None:
            if not _is_dequantized(node.inputs[1]):
                refused.append(Refusal(str(node.name), "no constant weight: attention and other products stay 16-bit"))
            continue
        if weight.ndim < 2 or edit.constant_of(node.inputs[0]) is not None or _is_dequantized(node.inputs[0]):
            continue
        verdict = rules.placement(node, backend)
        if verdict.granularity is None:
            refused.append(Refusal(str(node.name), verdict.reason))
        else:
            nodes.append(node)
    return nodes, refused


def _is_dequantized(value: ir.Value | None) -> bool:
    producer = value.producer() if value is not None else None
    return producer is not None and producer.op_type == "DequantizeLinear"


def _quantized_op(
    node: ir.Node,
    backend: str,
    stats: Mapping[str, TensorStats],
    method: str,
    known: dict[str, tuple[float, str]],
) -> QuantizedOp | Refusal:
    name, activation = str(node.name), str(node.inputs[0].name)  # type: ignore[union-attr]
    found = stats.get(activation)
    weight = edit.constant_of(node.inputs[1])
    if weight is not None and not np.isfinite(np.abs(weight).max(initial=0)):
        return Refusal(name, f"its weight {node.inputs[1].name} holds NaN or infinity")  # type: ignore[union-attr]
    if found is None:
        return Refusal(name, f"{activation} was not observed")
    if found.nonfinite:
        return Refusal(name, f"{activation} holds NaN or infinity in the FP32 reference")
    if activation not in known:
        known[activation] = ranges.choose_amax(found, method)
    amax, chosen = known[activation]
    if amax <= 0:
        return Refusal(name, f"{activation} was zero in every sample")
    granularity = rules.placement(node, backend).granularity
    if granularity == "per-channel":
        return QuantizedOp(name, activation, amax, _channel_axis(node), chosen)
    multiply = node.op_type == "Conv" and _weight_sqnr_db(node) < rules.SMALLEST_WEIGHT_SQNR_DB
    return QuantizedOp(name, activation, amax, 0 if multiply else None, chosen, multiply)


def _left_out(
    model: ir.Model, ops: Sequence[QuantizedOp], stats: Mapping[str, TensorStats], flop: Mapping[str, int]
) -> dict[str, Refusal]:
    """Nodes whose input is too heavy-tailed for INT8, the worst first, as far as their share of the flop allows."""
    quality = {op.node: ranges.int8_sqnr_db(stats[op.activation], op.activation_amax) for op in ops}
    activation = {op.node: op.activation for op in ops}
    eligible = [str(node.name) for node in model.graph if cost.is_eligible_for_int8(node)]
    budget = rules.LARGEST_SHARE_LEFT_OUT * sum(flop.get(name, 0) for name in eligible)
    found = {}
    for name in sorted(quality, key=lambda node: quality[node]):
        if quality[name] >= rules.SMALLEST_INPUT_SQNR_DB:
            break
        if flop.get(name, 0) > budget:
            continue
        budget -= flop.get(name, 0)
        reason = f"{activation[name]} keeps only {quality[name]:.1f} dB in INT8: too heavy-tailed"
        found[name] = Refusal(name, reason)
    return found


def _weight_sqnr_db(node: ir.Node) -> float:
    """Signal to noise of the node's weight in INT8 with one scale, in dB."""
    weight = np.asarray(edit.constant_of(node.inputs[1]), np.float32)
    values, scales = quantize_weight(weight, None, None)
    noise = float(np.square(values * scales - weight).sum())
    power = float(np.square(weight).sum())
    return 10 * math.log10(power / noise) if power > 0 and noise > 0 else math.inf


def _channel_axis(node: ir.Node) -> int | None:
    """The weight's output-channel axis."""
    weight = edit.constant_of(node.inputs[1])
    if node.op_type == "Conv":
        return 0
    if node.op_type == "ConvTranspose":
        return 1
    if node.op_type == "Gemm":
        return 0 if edit.int_attribute(node, "transB", 0) else 1
    return 1 if weight is not None and weight.ndim == 2 else None


def _is_fused_away(value: ir.Value) -> bool:
    """Whether nothing is lost by not observing ``value``.

    Its only reader is a ReLU or Clip, which turn an overflow into what it would have become anyway or show it; or it is
    a weighted sum whose only reader adds a bias or a residual in the same kernel: the sum is observed behind it, and
    the dot product bounded by its weights.
    """
    producer, uses = value.producer(), list(value.uses())
    if producer is None or len(uses) != 1 or value.is_graph_output():
        return False
    reader = uses[0][0].op_type
    if reader in _FUSED_ACTIVATIONS:
        return True
    return reader == "Add" and producer.op_type in _WEIGHTED and edit.constant_of(producer.inputs[1]) is not None
