"""What a 16-bit float would break: the nodes that must stay FP32, each with its reason.

Decided from the observed ranges, from constants, and from bounds on the sums a kernel forms inside. Where nothing was
observed (inside subgraphs), nodes stay FP32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from trtopt.graph import edit
from trtopt.precision.plan import NarrowType
from trtopt.precision.ranges import TensorStats

HEADROOM = 2.0
"""Observed magnitudes may be exceeded by this factor on data not seen."""

WEIGHT_ERROR = 1e-2
"""Largest relative error (L2) that rounding a weight tensor may cause; normal values cost 2e-4."""

LAYOUT_OPS = frozenset(
    "Reshape Transpose Squeeze Unsqueeze Flatten Identity Slice Split Gather GatherElements GatherND Expand Dropout "
    "DepthToSpace SpaceToDepth Tile ReverseSequence".split()
)
"""Operators that move their first input's values without changing them."""

_RELATIVE_OPS = frozenset(["Mul", "Div", "Pow", "BatchNormalization", "Max", "Min", "Clip", "Where"])
"""Operators in which every entry of a constant counts by itself; elsewhere the tensor counts as a whole."""

_SUMS = frozenset(["ReduceSum", "ReduceMean", "ReduceL1", "GlobalAveragePool", "AveragePool", "CumSum"])
_SQUARES = frozenset(
    "ReduceL2 ReduceSumSquare LayerNormalization InstanceNormalization GroupNormalization LpNormalization "
    "RMSNormalization MeanVarianceNormalization".split()
)
_SENSITIVE = {"Log": 0, "Reciprocal": 0, "Sqrt": 0, "Div": 1, "Pow": 0}
"""Operators whose result depends on the relative precision of a small operand, and which operand."""

_FLOORS = frozenset({"Add", "Max", "Clip", "Sub", "Where"})


@dataclass(frozen=True)
class Span:
    """Magnitudes of a tensor: the largest, and the smallest that is not zero (None when all are zero)."""

    largest: float
    smallest: float | None


class Spans:
    """Spans of values, from statistics, constants, and through operators that only move values.

    Args:
        stats: Observed statistics by tensor name.
        shapes: Static shapes by tensor name, at the largest input shapes.
    """

    def __init__(self, stats: Mapping[str, TensorStats], shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._stats = stats
        self._shapes = shapes

    def shape(self, value: ir.Value) -> tuple[int, ...] | None:
        """The largest shape of ``value``; None when it depends on data."""
        return self._shapes.get(str(value.name))

    def of(self, value: ir.Value | None) -> Span | None:
        """The span of ``value``; None when it was not observed."""
        if value is None:
            return None
        constant = edit.constant_of(value)
        if constant is not None:
            return _constant_span(constant)
        found = self._stats.get(str(value.name))
        if found is not None:
            return Span(found.absmax, found.smallest_nonzero or None)
        node = value.producer()
        if node is not None and node.op_type in LAYOUT_OPS:
            return self.of(node.inputs[0])
        if node is not None and node.op_type in ("Concat", "Max", "Min", "MaxPool", "Relu", "Pad"):
            return _union([self.of(item) for item in node.inputs if item is not None and is_float(item)])
        return None


def is_float(value: ir.Value) -> bool:
    """Whether ``value`` is an FP32 tensor (the only float type of a widened model)."""
    return value.dtype is ir.DataType.FLOAT


def wide_nodes(model: ir.Model, spans: Spans, narrow: NarrowType) -> dict[str, str]:
    """Nodes of the main graph that must stay FP32, by name, with the first reason found.

    Args:
        model: A widened model (FP32 the only float type), nodes named.
        spans: What is known of the model's tensors.
        narrow: The type the others will have.
    """
    reasons: dict[str, str] = {}
    floored: set[ir.Value] = set()
    for node in model.graph:
        behind_floor = _floor_hazard(node, floored, narrow)
        found = next(_node_hazards(node, spans, narrow), behind_floor)
        if found is not None:
            reasons[str(node.name)] = found
    _keep_small_operands(model, spans, narrow, reasons)
    return reasons


def _node_hazards(node: ir.Node, spans: Spans, narrow: NarrowType) -> Iterator[str]:
    if node.domain not in ("", "ai.onnx"):
        yield f"operator of domain {node.domain}: its 16-bit form is unknown"
    if any(
        attribute.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS) for attribute in node.attributes.values()
    ):
        yield "control flow: ranges inside its subgraphs are not observed"
    for value in [*node.outputs, *node.inputs]:
        yield from _range_hazards(value, spans, narrow)
    yield from _constant_hazards(node, narrow)
    yield from _sum_hazards(node, spans, narrow)
    epsilon = node.attributes.get("epsilon")
    if epsilon is not None and epsilon.as_float() > 0 and narrow.round(np.array(epsilon.as_float())) == 0:
        yield f"epsilon {epsilon.as_float():.1e} is 0 in {narrow.name}"


def _range_hazards(value: ir.Value | None, spans: Spans, narrow: NarrowType) -> Iterator[str]:
    if value is None or not is_float(value) or edit.constant_of(value) is not None:
        return
    span = spans.of(value)
    if span is None:
        return
    if span.largest * HEADROOM > narrow.largest:
        yield f"values up to {span.largest:.3g} in {value.name} (the limit of {narrow.name} is {narrow.largest:.5g})"
    if 0 < span.largest < 4 * narrow.smallest_normal:
        yield f"values no larger than {span.largest:.3g} in {value.name} lose their precision in {narrow.name}"


def _constant_hazards(node: ir.Node, narrow: NarrowType) -> Iterator[str]:
    for value in node.inputs:
        if value is None or not is_float(value):
            continue
        constant = edit.constant_of(value)
        if constant is None or constant.size == 0:
            continue
        with np.errstate(invalid="ignore"):
            exact = np.asarray(constant, np.float32)
            finite = exact[np.isfinite(exact)]
            rounded = narrow.round(finite)
        if not np.isfinite(rounded).all():
            yield f"constant {_extreme(finite):.3g} in {value.name} overflows {narrow.name}"
        elif constant.size > 1 and node.op_type not in _RELATIVE_OPS:
            norm = float(np.linalg.norm(finite))
            if norm > 0 and float(np.linalg.norm(rounded - finite)) > WEIGHT_ERROR * norm:
                yield f"weights as small as {float(np.abs(finite).max()):.3g} in {value.name} underflow {narrow.name}"
        else:
            nonzero = finite[finite != 0]
            lost = nonzero[np.abs(narrow.round(nonzero) - nonzero) > WEIGHT_ERROR * np.abs(nonzero)]
            if lost.size:
                yield f"constant {float(lost[np.abs(lost).argmin()]):.3g} in {value.name} underflows {narrow.name}"


def _sum_hazards(node: ir.Node, spans: Spans, narrow: NarrowType) -> Iterator[str]:
    """Bounds on sums formed inside a kernel, which nothing outside it can observe."""
    span = spans.of(node.inputs[0]) if node.inputs else None
    if span is None:
        return
    if node.op_type in _SUMS or node.op_type in _SQUARES:
        count = _reduced_elements(node, spans)
        term = span.largest**2 if node.op_type in _SQUARES else span.largest
        if count is None:
            yield "a sum inside the kernel whose number of terms depends on data"
        elif count * term > narrow.largest:
            yield f"a sum of {count} terms up to {term:.3g} inside the kernel may overflow {narrow.name}"
    elif node.op_type in ("Softmax", "LogSoftmax"):
        count = _reduced_elements(node, spans)
        if count is not None and count > narrow.largest:
            yield f"a sum of {count} exponentials inside the kernel may overflow {narrow.name}"
    elif node.op_type in ("Conv", "Gemm", "MatMul", "ConvTranspose"):
        bound = _dot_bound(node, span)
        if bound is not None and bound > narrow.largest:
            yield f"a partial sum of the dot product may reach {bound:.3g} ({narrow.name} holds {narrow.largest:.5g})"


def _dot_bound(node: ir.Node, span: Span) -> float | None:
    """max |x| times the largest L1 norm of a weight column; None without a constant weight."""
    weight = edit.constant_of(node.inputs[1])
    if weight is None or weight.ndim < 2:
        return None
    absolute = np.abs(np.asarray(weight, np.float32))
    if node.op_type == "Conv":
        sums = absolute.reshape(absolute.shape[0], -1).sum(axis=1)
    elif node.op_type == "ConvTranspose":
        sums = absolute.sum(axis=(0, *range(2, absolute.ndim)))
    elif node.op_type == "Gemm" and edit.int_attribute(node, "transB", 0):
        sums = absolute.sum(axis=1)
    else:
        sums = absolute.sum(axis=-2)
    return span.largest * float(sums.max(initial=0.0))


def _reduced_elements(node: ir.Node, spans: Spans) -> int | None:
    """How many elements one output element of a reduction sums; None when the shape does not tell."""
    if node.op_type == "AveragePool":
        return math.prod(node.attributes["kernel_shape"].as_ints())
    dims = spans.shape(node.inputs[0]) if node.inputs[0] is not None else None
    if dims is None:
        return None
    if node.op_type in ("GlobalAveragePool", "InstanceNormalization", "MeanVarianceNormalization"):
        return math.prod(dims[2:])
    if node.op_type == "GroupNormalization":
        return math.prod(dims[1:]) // edit.int_attribute(node, "num_groups", 1)
    if node.op_type in ("LayerNormalization", "RMSNormalization"):
        return math.prod(dims[edit.int_attribute(node, "axis", -1) % len(dims) :])
    if node.op_type in ("Softmax", "LogSoftmax", "LpNormalization"):
        return dims[edit.int_attribute(node, "axis", -1)]
    if node.op_type == "CumSum":
        return max(dims, default=1)
    axes = _axes(node)
    return math.prod(dims[axis] for axis in axes) if axes else math.prod(dims)


def _axes(node: ir.Node) -> tuple[int, ...]:
    if "axes" in node.attributes:
        return tuple(node.attributes["axes"].as_ints())
    constant = edit.constant_of(node.inputs[1]) if len(node.inputs) > 1 else None
    return tuple(int(axis) for axis in constant.ravel()) if constant is not None else ()


def _floor_hazard(node: ir.Node, floored: set[ir.Value], narrow: NarrowType) -> str | None:
    """A floor too small for the type (x + 1e-10, max(x, 1e-10)) protects a later log, root or division.

    Everything from the floor up to that operator has to stay wide, whatever was observed: a sample that reaches the
    floor may come later.
    """
    carried = next((value for value in node.inputs if value is not None and value in floored), None)
    if carried is None:
        if node.op_type in _FLOORS and any(_is_lost_floor(value, narrow) for value in node.inputs):
            floored.update(node.outputs)
        return None
    if node.op_type in LAYOUT_OPS or node.op_type == "Sqrt":
        floored.update(node.outputs)
        return f"behind a floor too small for {narrow.name}"
    if node.op_type in _SENSITIVE or node.op_type in ("Mul", "Neg"):
        return f"behind a floor too small for {narrow.name}"
    return None


def _is_lost_floor(value: ir.Value | None, narrow: NarrowType) -> bool:
    constant = edit.constant_of(value) if value is not None and is_float(value) else None
    if constant is None or constant.size != 1:
        return False
    number = float(constant.reshape(-1)[0])
    return number > 0 and abs(float(narrow.round(np.array(number))) - number) > WEIGHT_ERROR * number


def _keep_small_operands(model: ir.Model, spans: Spans, narrow: NarrowType, reasons: dict[str, str]) -> None:
    """Operators sensitive to small operands: they stay wide, and so does whoever computes the operand."""
    for node in model.graph:
        index = _SENSITIVE.get(node.op_type)
        if index is None or index >= len(node.inputs) or (node.op_type == "Pow" and not _negative_power(node)):
            continue
        value = node.inputs[index]
        span = spans.of(value)
        if value is None or not is_float(value) or span is None or span.smallest is None:
            continue
        if span.smallest >= narrow.smallest_normal or edit.constant_of(value) is not None:
            continue
        reason = f"values as small as {span.smallest:.3g} in {value.name} feed {node.op_type}"
        reasons.setdefault(str(node.name), reason)
        producer = value.producer()
        while producer is not None:
            reasons.setdefault(str(producer.name), reason)
            source = producer.inputs[0] if producer.op_type in LAYOUT_OPS else None
            producer = source.producer() if source is not None else None


def _negative_power(node: ir.Node) -> bool:
    exponent = edit.constant_of(node.inputs[1])
    return exponent is None or bool((exponent < 0).any())


def _constant_span(array: np.ndarray) -> Span | None:
    if array.dtype.kind != "f" or array.size == 0:
        return None
    absolute = np.abs(array[np.isfinite(array)])
    nonzero = absolute[absolute > 0]
    return Span(float(absolute.max(initial=0.0)), float(nonzero.min()) if nonzero.size else None)


def _union(spans: list[Span | None]) -> Span | None:
    known = [span for span in spans if span is not None]
    if not known or len(known) != len(spans):
        return None
    smallest = [span.smallest for span in known if span.smallest is not None]
    return Span(max(span.largest for span in known), min(smallest, default=None))


def _extreme(array: np.ndarray) -> float:
    return float(array[np.abs(array).argmax()])
