"""What a 16-bit float would break: the nodes that must stay FP32, each with its reason.

Decided from the observed ranges, from constants, and from bounds on the sums a kernel forms inside. Where nothing was
observed (inside subgraphs), nodes stay FP32.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator

import numpy as np
import onnx_ir as ir

from trtopt.graph import edit
from trtopt.precision.fp16.half_constants import loses_weights, lost_entries
from trtopt.precision.fp16.hazard_chains import keep_connected, keep_ranking
from trtopt.precision.fp16.heads import score_nodes
from trtopt.precision.fp16.schemas import why_fp32
from trtopt.precision.observe.ranges import finite_range
from trtopt.precision.observe.value_ranges import LAYOUT_OPS, Span, Spans, is_float
from trtopt.precision.plan import NarrowType

HEADROOM = 2.0
"""Observed magnitudes may be exceeded by this factor on data not seen."""

LONGEST_RUNNING_SUM = 2.0**-3
"""Terms of a running sum, times the type's precision: 128 terms in FP16, 16 in BF16. Each of its results is one of its
operands: if the kernel keeps it in 16 bits, equal terms are lost by an eighth and more beyond."""

_DOTS = frozenset(["Conv", "ConvTranspose", "Gemm", "MatMul"])

_RELATIVE_OPS = frozenset(["Mul", "Div", "Pow", "BatchNormalization", "Max", "Min", "Clip", "Where"])
"""Operators in which every entry of a constant counts by itself; elsewhere the tensor counts as a whole."""

_BOUNDS = frozenset(["Clip", "Max", "Min"])
"""Operators for which a constant too large is a bound no narrow value reaches."""

_MEANS = frozenset(["ReduceMean", "GlobalAveragePool", "AveragePool"])
_SUMS = _MEANS | {"ReduceSum", "ReduceL1", "ReduceLogSum", "CumSum"}
_SQUARES = frozenset(
    "ReduceL2 ReduceSumSquare LayerNormalization InstanceNormalization GroupNormalization LpNormalization LRN "
    "RMSNormalization MeanVarianceNormalization GlobalLpPool LpPool".split()
)


def wide_nodes(
    model: ir.Model,
    spans: Spans,
    narrow: NarrowType,
    integer: Collection[str] = frozenset(),
    bfloat: Collection[str] = frozenset(),
) -> dict[str, str]:
    """Nodes of the main graph that must stay FP32, by name, with the first reason found.

    Args:
        model: A widened model (FP32 the only float type), nodes named.
        spans: What is known of the model's tensors.
        narrow: The type the others will have.
        integer: Names of nodes that will run in INT8, whose sums are exact.
        bfloat: Names of nodes that will run in BF16 if they do not fit ``narrow``; they are among the result.
    """
    reasons: dict[str, str] = {}
    for node in model.graph:
        found = next(_node_hazards(node, spans, narrow, node.name in integer), None)
        if found is not None:
            reasons[str(node.name)] = found
    keep_connected(model, spans, narrow, reasons, bfloat)
    kept = score_nodes(model, integer) | reasons
    keep_ranking(model, kept)
    return kept


def _node_hazards(node: ir.Node, spans: Spans, narrow: NarrowType, integer: bool) -> Iterator[str]:
    reason = why_fp32(node, narrow)
    if reason is not None:
        yield reason
    for value in [*node.outputs, *node.inputs]:
        yield from _range_hazards(value, spans, narrow)
    yield from _constant_hazards(node, spans, narrow)
    yield from _growth_hazards(node, spans, narrow)
    yield from _sum_hazards(node, spans, narrow)
    if node.op_type in _DOTS and not (integer and spans.of(node.outputs[0]) is not None):
        yield from _dot_hazards(node, spans, narrow)
    epsilon = node.attributes.get("epsilon")
    if epsilon is not None and epsilon.as_float() > 0 and narrow.round(np.array(epsilon.as_float())) == 0:
        yield f"epsilon {epsilon.as_float():.1e} is 0 in {narrow.name}"


def _range_hazards(value: ir.Value | None, spans: Spans, narrow: NarrowType) -> Iterator[str]:
    if value is None or not is_float(value) or edit.constant_tensor_of(value) is not None:
        return
    span = spans.of(value)
    if span is None:
        return
    if span.largest * HEADROOM > narrow.largest:
        yield f"values up to {span.largest:.3g} in {value.name} (the limit of {narrow.name} is {narrow.largest:.5g})"
    if 0 < span.largest < 4 * narrow.smallest_normal:
        yield f"values no larger than {span.largest:.3g} in {value.name} lose their precision in {narrow.name}"
    if span.largest > narrow.largest_exact_integer and _holds_integers(value):
        exact = narrow.largest_exact_integer
        yield f"integers up to {span.largest:.0f} in {value.name}: {narrow.name} holds each of them only up to {exact}"


def _holds_integers(value: ir.Value) -> bool:
    """Indices and positions that pass as floats; rounding them to a neighbour is an error of a whole step."""
    if any(user.op_type == "Cast" and _is_integer(user.outputs[0]) for user, _ in value.uses()):
        return True
    node = value.producer()
    while node is not None and node.op_type in LAYOUT_OPS:
        source = node.inputs[0]
        node = source.producer() if source is not None else None
    return node is not None and (node.op_type == "Range" or (node.op_type == "Cast" and _is_integer(node.inputs[0])))


def _is_integer(value: ir.Value | None) -> bool:
    return value is not None and value.dtype is not None and value.dtype.is_integer()


def _constant_hazards(node: ir.Node, spans: Spans, narrow: NarrowType) -> Iterator[str]:
    for index, value in enumerate(node.inputs):
        constant = spans.constant(value)
        if value is None or constant is None or constant.size == 0:
            continue
        low, high = finite_range(constant)
        largest = max(abs(low), abs(high))
        if largest > narrow.largest and node.op_type not in _BOUNDS:
            extreme = high if high == largest else low
            yield f"constant {extreme:.3g} in {value.name} overflows {narrow.name}"
        elif largest > narrow.largest or (node.op_type in _DOTS and index == 2):
            continue  # what a bias loses is small beside the sum it is added to
        elif constant.size > 1 and node.op_type not in _RELATIVE_OPS:
            if loses_weights(constant, narrow):
                yield f"weights as small as {largest:.3g} in {value.name} underflow {narrow.name}"
        else:
            lost = lost_entries(constant, narrow)
            if lost.size:
                yield f"constant {float(lost[np.abs(lost).argmin()]):.3g} in {value.name} underflows {narrow.name}"


def _growth_hazards(node: ir.Node, spans: Spans, narrow: NarrowType) -> Iterator[str]:
    """Operators that turn the headroom of their operand into more than that of their result."""
    span = spans.of(node.inputs[0]) if node.inputs else None
    if span is None:
        return
    limit = math.log(narrow.largest)
    power = _power(node)
    if node.op_type == "Exp" and span.high * HEADROOM > limit:
        yield f"exponentials of values up to {span.high:.3g} may overflow {narrow.name}"
    elif node.op_type == "ReduceLogSumExp" and span.high * HEADROOM + math.log(_reduced(node, spans) or 1) > limit:
        yield f"a sum of exponentials of values up to {span.high:.3g} inside the kernel may overflow {narrow.name}"
    elif power > 1 and span.largest > 0 and power * math.log(span.largest * HEADROOM) > limit:
        yield f"values up to {span.largest:.3g} to the power of {power:.3g} may overflow {narrow.name}"


def _power(node: ir.Node) -> float:
    """The constant power that ``node`` raises its first input to; 1 where it does not."""
    if node.op_type == "Mul":
        return 2.0 if node.inputs[0] is node.inputs[1] else 1.0
    exponent = edit.constant_of(node.inputs[1]) if node.op_type == "Pow" else None
    return float(exponent.max()) if exponent is not None and exponent.size else 1.0


def _sum_hazards(node: ir.Node, spans: Spans, narrow: NarrowType) -> Iterator[str]:
    """Bounds on sums formed inside a kernel, which nothing outside it can observe."""
    span = spans.of(node.inputs[0]) if node.inputs else None
    if span is None:
        return
    if node.op_type in _SUMS or node.op_type in _SQUARES:
        count = _reduced(node, spans)
        term = span.largest**2 if node.op_type in _SQUARES else span.largest
        if count is None:
            yield "a sum inside the kernel whose number of terms depends on data"
        elif min(count * term, _observed_sum(node, count, span, spans)) > narrow.largest:
            yield f"a sum of {count} terms up to {term:.3g} inside the kernel may overflow {narrow.name}"
        elif node.op_type == "CumSum" and count * narrow.precision > LONGEST_RUNNING_SUM:
            yield f"a running sum of {count} terms: the last ones are small beside it in {narrow.name}"
    elif node.op_type in ("Softmax", "LogSoftmax"):
        count = _reduced(node, spans)
        if count is not None and count > narrow.largest:
            yield f"a sum of {count} exponentials inside the kernel may overflow {narrow.name}"


def _observed_sum(node: ir.Node, count: int, span: Span, spans: Spans) -> float:
    """Terms of one sign make no partial sum larger than the whole, which the result shows; infinity without it."""
    result = spans.of(node.outputs[0])
    if result is None or span.low < 0 < span.high or node.op_type not in _MEANS | {"ReduceSum", "CumSum"}:
        return math.inf
    return HEADROOM * result.largest * (count if node.op_type in _MEANS else 1)


def _dot_hazards(node: ir.Node, spans: Spans, narrow: NarrowType) -> Iterator[str]:
    """Bounds on the partial sums of a dot product with constant weights."""
    left = node.op_type == "MatMul" and edit.constant_of(node.inputs[0]) is not None
    weight = spans.constant(node.inputs[0 if left else 1])
    span = spans.of(node.inputs[1 if left else 0])
    if weight is None or weight.ndim < 2 or weight.size == 0 or span is None:
        return
    axes = _summed_axes(node, weight, left)
    terms = math.prod(weight.shape[axis] for axis in axes)
    low, high = finite_range(weight)
    if terms * span.largest * max(abs(low), abs(high)) <= narrow.largest:
        return
    exact = np.asarray(weight, np.float32)
    total, absolute = exact.sum(axis=axes), np.abs(exact).sum(axis=axes)
    positive, negative = (absolute + total) / 2, (absolute - total) / 2
    top, bottom = max(span.high, 0.0), max(-span.low, 0.0)
    with np.errstate(over="ignore"):  # infinite is more than any type holds
        bound = float(np.maximum(top * positive + bottom * negative, top * negative + bottom * positive).max())
    if bound > narrow.largest:
        yield f"a partial sum of the dot product may reach {bound:.3g} ({narrow.name} holds {narrow.largest:.5g})"


def _summed_axes(node: ir.Node, weight: np.ndarray, left: bool) -> tuple[int, ...]:
    """The axes of a weight over which one output element sums."""
    if node.op_type == "Conv":
        return tuple(range(1, weight.ndim))
    if node.op_type == "ConvTranspose":
        return (0, *range(2, weight.ndim))
    if left or (node.op_type == "Gemm" and edit.int_attribute(node, "transB", 0)):
        return (weight.ndim - 1,)
    return (weight.ndim - 2,)


def _reduced(node: ir.Node, spans: Spans) -> int | None:
    """How many elements one output element of a reduction sums; None when the shape does not tell."""
    if node.op_type in ("AveragePool", "LpPool"):
        return math.prod(node.attributes["kernel_shape"].as_ints())
    if node.op_type == "LRN":
        return edit.int_attribute(node, "size", 1)
    dims = spans.shape(node.inputs[0]) if node.inputs[0] is not None else None
    if dims is None:
        return None
    if node.op_type in ("GlobalAveragePool", "GlobalLpPool", "InstanceNormalization"):
        return math.prod(dims[2:])
    if node.op_type == "MeanVarianceNormalization":
        axes = edit.ints_attribute(node, "axes") or (0, 2, 3)
        return math.prod(dims[axis] for axis in axes)
    if node.op_type == "GroupNormalization":
        return math.prod(dims[1:]) // edit.int_attribute(node, "num_groups", 1)
    if node.op_type in ("LayerNormalization", "RMSNormalization"):
        return math.prod(dims[edit.int_attribute(node, "axis", -1) % len(dims) :])
    if node.op_type in ("Softmax", "LogSoftmax", "LpNormalization"):
        return dims[edit.int_attribute(node, "axis", -1)] if dims else 1
    if node.op_type == "CumSum":
        return max(dims, default=1)
    axes = _axes(node)
    return math.prod(dims[axis] for axis in axes) if axes else math.prod(dims)


def _axes(node: ir.Node) -> tuple[int, ...]:
    listed = edit.ints_attribute(node, "axes")
    if listed is not None:
        return listed
    constant = edit.constant_of(node.inputs[1]) if len(node.inputs) > 1 else None
    return tuple(int(axis) for axis in constant.ravel()) if constant is not None else ()
