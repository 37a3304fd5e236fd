"""From observed ranges to a plan, with BF16 beside FP16 where that holds more. Pure: no runtime, milliseconds."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir

from trtopt.graph import cost, edit
from trtopt.precision.fp16.hazards import loses_weights, overflows, wide_nodes
from trtopt.precision.observe.ranges import LAYOUT_OPS, ValueRanges, is_float
from trtopt.precision.observe.statistics import TensorStats
from trtopt.precision.plan import BF16, FP16, WEIGHTED, PrecisionPlan, QuantizedOp
from trtopt.precision.qdq.canonicalize import existing_nodes
from trtopt.precision.regions import Problem, attention_products, candidate_nodes, find_candidates
from trtopt.precision.rules import may_write_8_bits
from trtopt.precision.write import LARGEST
from trtopt.report.schema.steps import Refusal
from trtopt.support.precision import Precision

_FUSED_ACTIVATIONS = frozenset({"Relu", "Clip"})


@dataclass(frozen=True)
class ObservedTensors:
    """Tensors to observe: full histograms for INT8 scales of what is read in 8 bits and of ``results`` that may be
    written so, ranges for the 16-bit decision."""

    histogram: frozenset[str]
    ranges: frozenset[str]
    results: frozenset[str] = frozenset()


def wanted_tensors(model: ir.Model, precision: Precision, backend: str) -> ObservedTensors:
    """What :func:`decide` needs to know about ``model`` (widened, nodes named).

    Left out: the outputs of operators that only move values, and what a fused kernel never stores.
    """
    if precision.is_wide:
        return ObservedTensors(frozenset(), frozenset())
    nodes = [node for dtype in precision.quantized_types for node in candidate_nodes(model, backend, dtype)[0]]
    histogram = {str(node.inputs[0].name) for node in nodes if node.inputs[0] is not None}
    results: set[str] = set()
    if backend == "tensorrt-rtx" and Precision.INT8 in precision.quantized_types:
        products = candidate_nodes(model, backend, Precision.INT8)[0]
        results = {str(node.outputs[0].name) for node in products if may_write_8_bits(node)}
    for dtype in precision.quantized_types:
        histogram.update(name for item in attention_products(model, backend, dtype)[0] for name in item.operands)
    values = [value for value in model.graph.inputs if is_float(value)]
    for node in model.graph:
        if node.op_type not in LAYOUT_OPS:
            values += [value for value in node.outputs if is_float(value) and value.name and not _is_fused_away(value)]
    names = {str(value.name) for value in values if edit.constant_of(value) is None}
    results -= histogram
    return ObservedTensors(frozenset(histogram), frozenset(names - histogram - results), frozenset(results))


def decide(
    model: ir.Model,
    precision: Precision,
    backend: str,
    stats: Mapping[str, TensorStats],
    shapes: Mapping[str, tuple[int, ...]],
    method: str = "auto",
    ends: Collection[str] = (),
) -> PrecisionPlan:
    """The plan for one model, with every 8-bit node that the backend's table and the ranges allow.

    Args:
        model: A widened model, nodes named.
        precision: The precision asked for.
        backend: ``tensorrt-rtx`` or ``tensorrt``: whose table applies.
        stats: What was observed of :func:`wanted_tensors`.
        shapes: Static shapes by tensor name, at the largest input shapes.
        method: How INT8 ranges are chosen from histograms.
        ends: Outputs that leave the network in FP32 (:func:`trtopt.precision.fp16.states.fp32_outputs`).
    """
    if precision.is_wide:
        return PrecisionPlan(precision)
    problem = Problem(model, backend, stats, shapes, method, BF16 if precision == Precision.BF16 else FP16, ends=ends)
    candidates = find_candidates(problem, precision.quantized_types)
    return plan_for(problem, precision, tuple(candidates.all.values()), candidates.refused)


def plan_for(
    problem: Problem, requested: Precision, ops: Sequence[QuantizedOp] = (), refused: Sequence[Refusal] = ()
) -> PrecisionPlan:
    """The plan in which exactly ``ops`` are 8-bit (one type each): what has to stay FP32 beside them, and why.

    ``refused`` is what the report says of the others.
    """
    integer = frozenset(op.node for op in ops if op.dtype == Precision.INT8)
    ranges = ValueRanges(problem.stats, problem.shapes)
    wide = wide_nodes(problem.model, ranges, problem.narrow, integer)
    for op in ops:
        scale = op.activation_amax / LARGEST[op.dtype]
        if scale < problem.narrow.smallest_normal:
            wide.setdefault(op.node, f"its {op.dtype.upper()} scale {scale:.2g} is too small for {problem.narrow.name}")
    fused, own = problem.fuses_quantizers, problem.own_ends(problem.model)
    plan = PrecisionPlan(requested, problem.narrow, wide, tuple(ops), tuple(refused), fused_quantizers=fused, ends=own)
    if problem.takes_bfloat:
        plan = with_bfloat(problem.model, plan, ranges)
    if not problem.fallbacks:
        return plan
    return replace(
        plan,
        wide={**plan.wide, **problem.fallbacks},
        bfloat={node: reason for node, reason in plan.bfloat.items() if node not in problem.fallbacks},
    )


def int8_flop_share(model: ir.Model, plan: PrecisionPlan, flop: Mapping[str, int]) -> float:
    """Share of the flop of eligible nodes (``cost.is_eligible_for_int8``) that are INT8, or will be; 0 without any."""
    eligible = {str(node.name) for node in model.graph if cost.is_eligible_for_int8(node)}
    total = sum(flop.get(name, 0) for name in eligible)
    done = eligible & ({op.node for op in plan.quantized} | existing_nodes(model))
    return sum(flop.get(name, 0) for name in done) / total if total else 0.0


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
    return reader == "Add" and producer.op_type in WEIGHTED and edit.constant_of(producer.inputs[1]) is not None


_DOTS = frozenset(["Conv", "Gemm", "MatMul"])


def with_bfloat(base: ir.Model, plan: PrecisionPlan, ranges: ValueRanges) -> PrecisionPlan:
    """``plan`` with the products that FP16 cannot hold, and BF16 can, in BF16 instead of FP32.

    Only products with constant weights move. What lies between them is computed in FP32 inside the same kernel, and
    TensorRT for RTX takes the casts into the products' kernels (a feed-forward block of a transformer whose
    activations reach 2e5 keeps its number of kernels). Attention's own products stay FP32: scores as large as these
    lose whole units in BF16 before their softmax. Whether eight bits are enough for the others the outputs have to say:
    :func:`trtopt.precision.fp16.repair.repair` puts back to FP32 what they do not bear. A plan whose 16-bit type is not
    FP16 is returned as it is.
    """
    if plan.narrow is not FP16:
        return plan
    quantized = {op.node for op in plan.quantized}
    heavy = {str(node.name) for node in base.graph if _is_slow(node, plan.wide, ranges)} - quantized
    if not heavy:
        return plan
    heavy -= wide_nodes(base, ranges, BF16, quantized).keys()
    # Some are FP32 only because of others that are BF16 now.
    freed = wide_nodes(base, ranges, FP16, quantized).keys() - wide_nodes(base, ranges, FP16, quantized, heavy).keys()
    wide = {name: reason for name, reason in plan.wide.items() if name not in heavy | freed}
    reasons = {name: f"BF16 holds what FP16 does not: {plan.wide[name]}" for name in sorted(heavy - freed)}
    return replace(plan, wide=wide, bfloat={**plan.bfloat, **reasons})


def _is_slow(node: ir.Node, wide: Mapping[str, str], ranges: ValueRanges) -> bool:
    """Whether ``node`` is a product with constant weights that the compiler would run in FP32.

    Between a Cast from FP16 and one to FP16 it runs an FP32 product in FP16 (with sums in FP32), which is as fast and
    keeps three bits more; weights that do not fit FP16 it would break (see ``hazards``).
    """
    if node.op_type not in _DOTS or str(node.name) not in wide or len(node.inputs) < 2:
        return False
    left, right = (ranges.constant(value) for value in node.inputs[:2])
    weight, data = (right, node.inputs[0]) if right is not None else (left, node.inputs[1])
    if weight is None or data is None:
        return False
    if overflows(weight, FP16) or loses_weights(weight, FP16):
        return True
    maker = data.producer()
    readers = [user for user, _ in node.outputs[0].uses()]
    neighbours = [*readers, *([] if maker is None else [maker])]
    return node.outputs[0].is_graph_output() or any(str(other.name) in wide for other in neighbours)


def transferred(plan: PrecisionPlan, problem: Problem) -> PrecisionPlan:
    """The same 8-bit nodes on another FP32 form of the model, with its ranges.

    Nodes keep their type, granularity and residuals; a multiplication per channel goes where one scale has become good
    enough.
    """
    dtypes = tuple(dict.fromkeys(op.dtype for op in plan.quantized))
    candidates = find_candidates(problem, dtypes)
    ops = [_like(op, candidates.ops.get(op.node, ())) for op in plan.quantized]
    return plan_for(problem, plan.requested, tuple(op for op in ops if op is not None), plan.refused)


def _like(op: QuantizedOp, forms: Sequence[QuantizedOp]) -> QuantizedOp | None:
    mine = [form for form in forms if form.dtype == op.dtype]
    same = [form for form in mine if (form.multiply, form.weight_axis) == (op.multiply, op.weight_axis)]
    writes = op.writes and any(form.result_amax > 0 for form in same)
    return next((replace(form, skips=op.skips, writes=writes) for form in same or mine), None)
