"""What a 16-bit float would break: the nodes that must stay FP32, each with its reason.

Decided from the observed ranges, from constants, and from bounds on the sums a kernel forms inside; then for what lies
between a cause and the operator that suffers from it. Where nothing was observed (inside subgraphs), nodes stay FP32.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import onnx_ir as ir

from trtopt.graph import edit
from trtopt.precision.fp16.cast_to_half import why_fp32
from trtopt.precision.fp16.heads import score_nodes
from trtopt.precision.fp16.pixels import pixel_nodes
from trtopt.precision.observe.ranges import LAYOUT_OPS, ValueRange, ValueRanges, finite_range, is_float, ranking_readers
from trtopt.precision.observe.statistics import TensorStats
from trtopt.precision.plan import WEIGHTED, NarrowType
from trtopt.support.memo import once_per_array

HEADROOM = 2.0
"""Observed magnitudes may be exceeded by this factor on data not seen."""

LONGEST_RUNNING_SUM = 2.0**-3
"""Terms of a running sum, times the type's precision: 128 terms in FP16, 16 in BF16. Each of its results is one of its
operands: if the kernel keeps it in 16 bits, equal terms are lost by an eighth and more beyond."""

_RELATIVE_OPS = frozenset(["Mul", "Div", "Pow", "BatchNormalization", "Max", "Min", "Clip", "Where"])
"""Operators in which every entry of a constant counts by itself; elsewhere the tensor counts as a whole."""

_SCALED = frozenset(["Mul", "BatchNormalization"])
"""Operators that scale by a constant: an entry that is lost makes its result 0, which a CPU shows too."""

_BOUNDS = frozenset(["Clip", "Max", "Min"])
"""Operators for which a constant too large is a bound no narrow value reaches."""

_MEANS = frozenset(["ReduceMean", "GlobalAveragePool", "AveragePool"])
_SUMS = _MEANS | {"ReduceSum", "ReduceL1", "ReduceLogSum", "CumSum"}
_SQUARES = frozenset(
    "ReduceL2 ReduceSumSquare LayerNormalization InstanceNormalization GroupNormalization LpNormalization LRN "
    "RMSNormalization MeanVarianceNormalization GlobalLpPool LpPool".split()
)


_FP32_INSIDE = frozenset(["LayerNormalization", "RMSNormalization", "ReduceL2", "LpNormalization", "LRN"])
"""Operators that square and sum in FP32 whatever their type, epsilon included: ONNX says so of the first two
(``stash_type`` 1), and TensorRT for RTX 1.7.1 casts to FP32 before the squares and back behind them, as its layers of
LayerNormalization (``CastMeanSubMulMeanAddSqrtDivMulCast``), ReduceL2, LpNormalization and LRN show. Of instance and
group normalization only a workspace in FP32 is seen, which does not show in what a thread adds up."""


def wide_nodes(
    model: ir.Model,
    ranges: ValueRanges,
    narrow: NarrowType,
    integer: Collection[str] = frozenset(),
    bfloat: Collection[str] = frozenset(),
) -> dict[str, str]:
    """Nodes of the main graph that must stay FP32, by name, with the first reason found; the others get ``narrow``.

    ``integer`` nodes will run in INT8, where sums are exact; ``bfloat`` nodes in BF16 if they do not fit ``narrow``,
    and are among the result.
    """
    reasons: dict[str, str] = {}
    for node in model.graph:
        found = next(_node_hazards(node, ranges, narrow, node.name in integer), None)
        if found is not None:
            reasons[str(node.name)] = found
    keep_connected(model, ranges, narrow, reasons, bfloat)
    kept = score_nodes(model, integer) | pixel_nodes(model) | reasons
    keep_ranking(model, kept)
    return kept


UNSEEN = 64.0
"""Values of samples that were not run are at most so many times larger, or smaller, than those of a few that were."""


def are_settled(
    model: ir.Model, stats: Mapping[str, TensorStats], shapes: Mapping[str, tuple[int, ...]], narrow: NarrowType
) -> bool:
    """Whether :func:`wide_nodes` are the same for values :data:`UNSEEN` times as far out as those observed."""
    if any(item.nonfinite for item in stats.values()):
        return False
    beyond = {
        name: replace(
            item,
            minimum=item.minimum * UNSEEN,
            maximum=item.maximum * UNSEEN,
            smallest_nonzero=item.smallest_nonzero / UNSEEN,
        )
        for name, item in stats.items()
    }
    seen, unseen = (wide_nodes(model, ValueRanges(table, shapes), narrow).keys() for table in (stats, beyond))
    return seen == unseen


_SMALL = re.compile(r"values no larger than |weights as small as |entries as small as |reads .*, whose weights ")


def shows_on_a_cpu(reason: str) -> bool:
    """Whether a hazard is that of small numbers, whose rounding an FP32 emulation has as the engine has it: what they
    do to the outputs is measured, unlike an overflow inside a kernel."""
    return _SMALL.match(reason) is not None


def _node_hazards(node: ir.Node, ranges: ValueRanges, narrow: NarrowType, integer: bool) -> Iterator[str]:
    reason = why_fp32(node, narrow)
    if reason is not None:
        yield reason
    for value in [*node.outputs, *node.inputs]:
        yield from _range_hazards(value, ranges, narrow)
    yield from _constant_hazards(node, ranges, narrow)
    yield from _growth_hazards(node, ranges, narrow)
    yield from _sum_hazards(node, ranges, narrow)
    if node.op_type in WEIGHTED and not (integer and ranges.of(node.outputs[0]) is not None):
        yield from _dot_hazards(node, ranges, narrow)
    epsilon = node.attributes.get("epsilon")
    if epsilon is None or node.op_type in _FP32_INSIDE:
        return
    if epsilon.as_float() > 0 and narrow.round(np.array(epsilon.as_float())) == 0:
        yield f"epsilon {epsilon.as_float():.1e} is 0 in {narrow.name}"


def _is_lost_in_sums(value: ir.Value, ranges: ValueRanges, narrow: NarrowType) -> bool:
    """Whether all that reads a small value adds it to one whose own rounding is eight times as coarse, and more."""
    sums = [ranges.of(user.outputs[0]) if user.op_type in ("Add", "Sub", "Sum") else None for user, _ in value.uses()]
    coarse = 16 * narrow.smallest_normal
    return bool(sums) and not value.is_graph_output() and all(item and item.largest >= coarse for item in sums)


def _range_hazards(value: ir.Value | None, ranges: ValueRanges, narrow: NarrowType) -> Iterator[str]:
    if value is None or not is_float(value) or edit.constant_tensor_of(value) is not None:
        return
    bounds = ranges.of(value)
    if bounds is None:
        return
    if bounds.largest * HEADROOM > narrow.largest:
        yield f"values up to {bounds.largest:.3g} in {value.name} (the limit of {narrow.name} is {narrow.largest:.5g})"
    if 0 < bounds.largest < 4 * narrow.smallest_normal and not _is_lost_in_sums(value, ranges, narrow):
        yield f"values no larger than {bounds.largest:.3g} in {value.name} lose their precision in {narrow.name}"
    if bounds.largest > narrow.largest_exact_integer and _holds_integers(value):
        exact = narrow.largest_exact_integer
        yield (
            f"integers up to {bounds.largest:.0f} in {value.name}: {narrow.name} holds each of them only up to {exact}"
        )


def _holds_integers(value: ir.Value) -> bool:
    """Indices and positions that pass as floats; rounding them to a neighbour is an error of a whole step."""
    if any(user.op_type == "Cast" and _is_integer(user.outputs[0]) for user, _ in value.uses()):
        return True
    node = value.producer()
    while node is not None and node.op_type in LAYOUT_OPS:
        source = node.inputs[0]
        node = edit.maker_of(source)
    return node is not None and (node.op_type == "Range" or (node.op_type == "Cast" and _is_integer(node.inputs[0])))


def _is_integer(value: ir.Value | None) -> bool:
    return value is not None and value.dtype is not None and value.dtype.is_integer()


def _constant_hazards(node: ir.Node, ranges: ValueRanges, narrow: NarrowType) -> Iterator[str]:
    for index, value in enumerate(node.inputs):
        constant = ranges.constant(value)
        if value is None or constant is None or constant.size == 0:
            continue
        low, high = finite_range(constant)
        largest = max(abs(low), abs(high))
        if largest > narrow.largest and node.op_type not in _BOUNDS:
            extreme = high if high == largest else low
            yield f"constant {extreme:.3g} in {value.name} overflows {narrow.name}"
        elif largest > narrow.largest or _is_bias(node, index, constant, ranges, narrow):
            continue  # what a bias loses is small beside the sum it is added to
        elif constant.size > 1 and (node.op_type not in _RELATIVE_OPS or _is_looked_up(value)):
            if loses_weights(constant, narrow):
                yield f"weights as small as {largest:.3g} in {value.name} underflow {narrow.name}"
        else:
            lost = lost_entries(constant, narrow)
            if lost.size and not _floors_own_norm(node):
                smallest = f"{float(lost[np.abs(lost).argmin()]):.3g} in {value.name}"
                if constant.size > 1 and node.op_type in _SCALED:
                    yield f"entries as small as {smallest} underflow {narrow.name}"
                else:
                    yield f"constant {smallest} underflows {narrow.name}"


def _is_looked_up(value: ir.Value) -> bool:
    """Whether a value is rows of a table, such as embeddings: activations, of which some are always next to zero."""
    node = value.producer()
    while node is not None and node.op_type in LAYOUT_OPS and node.op_type != "Gather":
        node = edit.maker_of(node.inputs[0])
    return node is not None and node.op_type == "Gather" and edit.constant_of(node.inputs[1]) is None


def _is_bias(node: ir.Node, index: int, constant: np.ndarray, ranges: ValueRanges, narrow: NarrowType) -> bool:
    """Whether a constant is added to a sum of products, or to what gives larger numbers than it could spoil; a single
    number may be a floor that no sample reaches."""
    if node.op_type in WEIGHTED:
        return index == 2
    if node.op_type not in ("Add", "Sub") or constant.size == 1:
        return False
    result = ranges.of(node.outputs[0])
    return result is None or result.largest >= 16 * narrow.smallest_normal


def _growth_hazards(node: ir.Node, ranges: ValueRanges, narrow: NarrowType) -> Iterator[str]:
    """Operators that turn the headroom of their operand into more than that of their result."""
    bounds = ranges.of(node.inputs[0]) if node.inputs else None
    if bounds is None:
        return
    limit = math.log(narrow.largest)
    power = _power(node)
    if node.op_type == "Exp" and bounds.high * HEADROOM > limit:
        yield f"exponentials of values up to {bounds.high:.3g} may overflow {narrow.name}"
    elif node.op_type == "ReduceLogSumExp" and bounds.high * HEADROOM + math.log(reduced(node, ranges) or 1) > limit:
        yield f"a sum of exponentials of values up to {bounds.high:.3g} inside the kernel may overflow {narrow.name}"
    elif power > 1 and bounds.largest > 0 and power * math.log(bounds.largest * HEADROOM) > limit:
        yield f"values up to {bounds.largest:.3g} to the power of {power:.3g} may overflow {narrow.name}"


def _power(node: ir.Node) -> float:
    """The constant power that ``node`` raises its first input to; 1 where it does not."""
    if node.op_type == "Mul":
        return 2.0 if node.inputs[0] is node.inputs[1] else 1.0
    exponent = edit.constant_of(node.inputs[1]) if node.op_type == "Pow" else None
    return float(exponent.max()) if exponent is not None and exponent.size else 1.0


def _sum_hazards(node: ir.Node, ranges: ValueRanges, narrow: NarrowType) -> Iterator[str]:
    """Bounds on sums formed inside a kernel, which nothing outside it can observe."""
    bounds = ranges.of(node.inputs[0]) if node.inputs else None
    if bounds is None or node.op_type in _FP32_INSIDE:
        return
    if node.op_type in _SUMS or node.op_type in _SQUARES:
        count = reduced(node, ranges)
        term = bounds.largest**2 if node.op_type in _SQUARES else bounds.largest
        if count is None:
            yield "a sum inside the kernel whose number of terms depends on data"
        elif min(count * term, _observed_sum(node, count, bounds, ranges)) > narrow.largest:
            yield f"a sum of {count} terms up to {term:.3g} inside the kernel may overflow {narrow.name}"
        elif node.op_type == "CumSum" and count * narrow.precision > LONGEST_RUNNING_SUM:
            yield f"a running sum of {count} terms: the last ones are small beside it in {narrow.name}"
    elif node.op_type in ("Softmax", "LogSoftmax"):
        count = reduced(node, ranges)
        if count is not None and count > narrow.largest:
            yield f"a sum of {count} exponentials inside the kernel may overflow {narrow.name}"


def _observed_sum(node: ir.Node, count: int, bounds: ValueRange, ranges: ValueRanges) -> float:
    """Terms of one sign make no partial sum larger than the whole, which the result shows; infinity without it."""
    result = ranges.of(node.outputs[0])
    if result is None or bounds.low < 0 < bounds.high or node.op_type not in _MEANS | {"ReduceSum", "CumSum"}:
        return math.inf
    return HEADROOM * result.largest * (count if node.op_type in _MEANS else 1)


def _dot_hazards(node: ir.Node, ranges: ValueRanges, narrow: NarrowType) -> Iterator[str]:
    """Bounds on the partial sums of a dot product with constant weights."""
    left = node.op_type == "MatMul" and edit.constant_of(node.inputs[0]) is not None
    weight = ranges.constant(node.inputs[0 if left else 1])
    bounds = ranges.of(node.inputs[1 if left else 0])
    if weight is None or weight.ndim < 2 or weight.size == 0 or bounds is None:
        return
    axes = _summed_axes(node, weight, left)
    terms = math.prod(weight.shape[axis] for axis in axes)
    low, high = finite_range(weight)
    if terms * bounds.largest * max(abs(low), abs(high)) <= narrow.largest:
        return
    exact = np.asarray(weight, np.float32)
    total, absolute = exact.sum(axis=axes), np.abs(exact).sum(axis=axes)
    positive, negative = (absolute + total) / 2, (absolute - total) / 2
    top, bottom = max(bounds.high, 0.0), max(-bounds.low, 0.0)
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


def reduced(node: ir.Node, ranges: ValueRanges) -> int | None:
    """How many elements one output element of a reduction sums; None when the shape does not tell."""
    if node.op_type in ("AveragePool", "LpPool"):
        return math.prod(node.attributes["kernel_shape"].as_ints())
    if node.op_type == "LRN":
        return edit.int_attribute(node, "size", 1)
    dims = ranges.shape(node.inputs[0]) if node.inputs[0] is not None else None
    if dims is None:
        return None
    if node.op_type in ("GlobalAveragePool", "GlobalLpPool", "InstanceNormalization"):
        return math.prod(dims[2:])
    if node.op_type == "MeanVarianceNormalization":
        return math.prod(dims[axis] for axis in edit.axes_of(node) or (0, 2, 3))
    if node.op_type == "GroupNormalization":
        return math.prod(dims[1:]) // edit.int_attribute(node, "num_groups", 1)
    if node.op_type in ("LayerNormalization", "RMSNormalization"):
        return math.prod(dims[edit.int_attribute(node, "axis", -1) % len(dims) :])
    if node.op_type in ("Softmax", "LogSoftmax", "LpNormalization"):
        return dims[edit.int_attribute(node, "axis", -1)] if dims else 1
    if node.op_type == "CumSum":
        return max(dims, default=1)
    axes = edit.axes_of(node)
    return math.prod(dims[axis] for axis in axes) if axes else math.prod(dims)


_SENSITIVE = {"Log": 0, "Reciprocal": 0, "Div": 1, "Pow": 0}
"""Operators (Pow with a negative exponent) that make a small operand large, and which operand."""

_FLOORS = frozenset({"Add", "Max", "Clip", "Sub", "Where"})

_MASK_CARRIERS = LAYOUT_OPS | frozenset(["Add", "Sub", "Mul", "Where", "Cast", "Concat"])
"""Operators through which a mask reaches its softmax."""

_CARRIERS = LAYOUT_OPS | frozenset(
    "Sqrt Abs Neg Mul Div Relu Add Sub Max Min Clip Where Concat ReduceSum ReduceMean ReduceMax ReduceMin ReduceL1 "
    "ReduceL2 ReduceSumSquare Pow Sum Mean".split()
)
"""Operators whose small results stand on the precision of their small operands."""

_STEPS = {"Sin": 0, "Cos": 0, "Tan": 0, "Floor": 0, "Ceil": 0, "Round": 0, "Mod": 0}
"""Operators for which the absolute error of an operand counts, and which: a period is as long at 1000 as at 1."""

_LARGEST_ERROR = 2.0**-6
"""Error (largest value times the type's precision, at most twice the rounding error) that such an operand may have. A
sine of values up to 16 in FP16 keeps 45 dB."""

_STEP_CARRIERS = LAYOUT_OPS | frozenset(["Mul", "Div", "Add", "Sub", "Neg", "Concat", "Cast", "MatMul", "Gemm"])
"""Operators that hand the relative error of their operands on."""

_SMALL_PRODUCT = 2**16
"""Largest number of weights of a product among them (positions times frequencies): a layer of a network is larger."""


def keep_connected(
    model: ir.Model, ranges: ValueRanges, narrow: NarrowType, reasons: dict[str, str], bfloat: Collection[str]
) -> None:
    """Add to ``reasons`` (by node name, found node by node) the nodes that stay FP32 because of others; ``bfloat``
    apart."""
    _keep_masks(model, ranges, narrow, reasons)
    _keep_floors(model, ranges, narrow, reasons)
    _keep_small_operands(model, ranges, narrow, reasons)
    _keep_steps(model, ranges, narrow, reasons)
    products = [node for node in model.graph if node.op_type in WEIGHTED and node.name in reasons]
    _keep_behind_weights([node for node in products if node.name not in bfloat], ranges, narrow, reasons)


def keep_ranking(model: ir.Model, reasons: dict[str, str]) -> None:
    """Add the nodes that only compare or rank what is computed in FP32."""
    for node in model.graph:
        if str(node.name) in reasons:
            for reader in ranking_readers(node):
                reasons.setdefault(reader, f"ranks or compares what {node.name} computes in FP32: rounding makes ties")


def _keep_masks(model: ir.Model, ranges: ValueRanges, narrow: NarrowType, reasons: dict[str, str]) -> None:
    """What a mask too large for the type (-3.4e38) may be added to stays wide up to its softmax.

    Samples without a masked position do not show it; with one, a row that is masked throughout would become NaN.
    """
    reason = f"behind a mask too large for {narrow.name}"
    masked: set[ir.Value] = set()
    for node in model.graph:
        if any(value in masked for value in node.inputs):
            reasons.setdefault(str(node.name), reason)
            if node.op_type in _MASK_CARRIERS:
                masked.update(node.outputs)
        elif node.op_type in _MASK_CARRIERS and any(overflows(ranges.constant(value), narrow) for value in node.inputs):
            masked.update(node.outputs)


def _keep_floors(model: ir.Model, ranges: ValueRanges, narrow: NarrowType, reasons: dict[str, str]) -> None:
    """A floor too small for the type (x + 1e-10, max(x, 1e-10)) protects a later logarithm or division.

    Everything from the floor to that operator stays wide, whatever was observed: a sample that reaches the floor may
    come later.
    """
    reason = f"between a floor too small for {narrow.name} and what it protects"
    floored: set[ir.Value] = set()
    for node in model.graph:
        operand = _sensitive_operand(node)
        if operand in floored:
            reasons.setdefault(str(node.name), reason)
            _keep_back(operand, floored, reason, reasons)
        carried = node.op_type in _CARRIERS and any(value in floored for value in node.inputs)
        lost = node.op_type in _FLOORS and any(_is_lost_floor(value, ranges, narrow) for value in node.inputs)
        if carried or (lost and not _floors_own_norm(node)):
            floored.update(node.outputs)


def _floors_own_norm(node: ir.Node) -> bool:
    """Whether ``node`` is a floor under a norm that divides nothing but what it is the norm of (x / max(|x|, 1e-12)).

    Any floor above zero does, and :mod:`trtopt.precision.fp16.cast_to_half` writes one: the norm, which the kernel sums
    in FP32, is zero only where every x is.
    """
    norms = [value.producer() for value in node.inputs if value is not None]
    norm = next((maker for maker in norms if maker is not None and maker.op_type == "ReduceL2"), None)
    if norm is None or node.op_type not in ("Max", "Clip"):
        return False
    front = [node.outputs[0]]
    while front:
        value = front.pop()
        if value.is_graph_output():
            return False
        for reader, index in value.uses():
            if reader.op_type in LAYOUT_OPS and index == 0:
                front += reader.outputs
            elif reader.op_type != "Div" or index != 1 or reader.inputs[0] is not norm.inputs[0]:
                return False
    return True


def _keep_back(value: ir.Value | None, among: set[ir.Value], reason: str, reasons: dict[str, str]) -> None:
    """Keep the producers of ``value`` as far back as values are in ``among``."""
    stack, seen = [value], {value}
    while stack:
        current = stack.pop()
        node = edit.maker_of(current)
        if node is None:
            continue
        reasons.setdefault(str(node.name), reason)
        fresh = [item for item in node.inputs if item in among and item not in seen]
        seen.update(fresh)
        stack.extend(fresh)


def _is_lost_floor(value: ir.Value | None, ranges: ValueRanges, narrow: NarrowType) -> bool:
    constant = ranges.constant(value)
    if constant is None or constant.size == 0:
        return False
    largest = max(map(abs, finite_range(constant)))
    return largest > 0 and abs(float(narrow.round(np.array(largest))) - largest) > WEIGHT_ERROR * largest


def _keep_small_operands(model: ir.Model, ranges: ValueRanges, narrow: NarrowType, reasons: dict[str, str]) -> None:
    """Small operands of a logarithm or division: it stays wide, and so does whoever computes them."""
    for node in model.graph:
        operand = _sensitive_operand(node)
        if operand is None or edit.constant_of(operand) is not None:
            continue
        smallest = _small(operand, ranges, narrow)
        if smallest is None:
            continue
        reason = f"values as small as {smallest:.3g} in {operand.name} feed {node.op_type}"
        reasons.setdefault(str(node.name), reason)
        small, stack = {operand}, [operand]
        while stack:
            producer = stack.pop().producer()
            if producer is None or producer.op_type not in _CARRIERS:
                continue
            fresh = [item for item in producer.inputs if item is not None and item not in small]
            fresh = [item for item in fresh if _small(item, ranges, narrow) is not None]
            small.update(fresh)
            stack.extend(fresh)
        _keep_back(operand, small, reason, reasons)


def _small(value: ir.Value, ranges: ValueRanges, narrow: NarrowType) -> float | None:
    """The smallest magnitude seen in ``value`` if the type does not hold it with full precision, else None."""
    bounds = ranges.of(value) if is_float(value) else None
    smallest = bounds.smallest if bounds is not None else None
    return smallest if smallest is not None and smallest < narrow.smallest_normal else None


def _sensitive_operand(node: ir.Node) -> ir.Value | None:
    index = _SENSITIVE.get(node.op_type)
    if index is None or index >= len(node.inputs) or (node.op_type == "Pow" and not _has_negative_power(node)):
        return None
    return node.inputs[index]


def _has_negative_power(node: ir.Node) -> bool:
    exponent = edit.constant_of(node.inputs[1])
    return exponent is None or bool((exponent < 0).any())


def _keep_steps(model: ir.Model, ranges: ValueRanges, narrow: NarrowType, reasons: dict[str, str]) -> None:
    """The operand of a sine or a floor is computed in FP32 where its rounding error is no small part of a step."""
    for node in model.graph:
        operand = _step_operand(node)
        bounds = ranges.of(operand)
        if operand is None or bounds is None or bounds.largest * narrow.precision <= _LARGEST_ERROR:
            continue
        values = f"{node.op_type} of values up to {bounds.largest:.3g}"
        reason = f"{values}: their rounding error in {narrow.name} counts as it is"
        reasons.setdefault(str(node.name), reason)
        stack, seen = [operand], {operand}
        while stack:
            maker = stack.pop().producer()
            if maker is None or maker.op_type not in _STEP_CARRIERS or _is_large_product(maker):
                continue
            reasons.setdefault(str(maker.name), f"computes the operand of a {reason}")
            fresh = [value for value in maker.inputs if value is not None and is_float(value) and value not in seen]
            seen.update(fresh)
            stack.extend(fresh)


def _step_operand(node: ir.Node) -> ir.Value | None:
    """What ``node`` reads with absolute precision, if it does."""
    index = _STEPS.get(node.op_type)
    if node.op_type == "Cast" and (node.outputs[0].dtype or ir.DataType.FLOAT).is_integer():
        index = 0
    value = node.inputs[index] if index is not None else None
    return value if value is not None and is_float(value) and edit.constant_of(value) is None else None


def _is_large_product(node: ir.Node) -> bool:
    if node.op_type not in WEIGHTED:
        return False
    weights = [edit.constant_tensor_of(value) for value in node.inputs[:2]]
    return not any(weight is not None and weight.size <= _SMALL_PRODUCT for weight in weights)


def _keep_behind_weights(
    products: Sequence[ir.Node], ranges: ValueRanges, narrow: NarrowType, reasons: dict[str, str]
) -> None:
    """Who reads a product that is FP32 for its weights stays FP32 too.

    TensorRT for RTX 1.7.1 runs an FP32 convolution or matrix product between a Cast from FP16 and one to FP16 in FP16,
    its weights rounded, whether they fit or not (seen in the layers it lists: a weight of 1e5 becomes Half). Any
    other operator in FP32 between the product and the Cast keeps it from that, and is part of the same kernel.
    """
    for node in products:
        weights = [ranges.constant(value) for value in node.inputs[:2]]
        if not any(
            weight is not None and (overflows(weight, narrow) or loses_weights(weight, narrow)) for weight in weights
        ):
            continue
        stack = list(node.outputs)
        while stack:
            for reader, _ in stack.pop().uses():
                reason = f"reads {node.name}, whose weights {narrow.name} does not hold: a Cast there would round them"
                reasons.setdefault(str(reader.name), reason)
                if reader.op_type in LAYOUT_OPS:
                    stack.extend(reader.outputs)


WEIGHT_ERROR = 1e-2
"""Largest relative error (L2) that rounding a weight tensor may cause; normal values cost 2e-4."""


def overflows(constant: np.ndarray | None, narrow: NarrowType) -> bool:
    """Whether a finite entry is too large for the type."""
    return constant is not None and constant.size > 0 and max(map(abs, finite_range(constant))) > narrow.largest


@once_per_array
def loses_weights(weights: np.ndarray, narrow: NarrowType) -> bool:
    """Whether rounding changes the tensor by more than ``WEIGHT_ERROR`` of its norm.

    An element is off by at most half the type's precision, or half its smallest number: where that bound suffices,
    nothing needs to be rounded.
    """
    flat = np.asarray(weights, np.float32).reshape(-1)
    norm = float(np.linalg.norm(flat))
    if not math.isfinite(norm):
        flat = flat[np.isfinite(flat)].astype(np.float64)
        norm = float(np.linalg.norm(flat))
    bound = narrow.smallest_normal * narrow.precision / 2 * math.sqrt(flat.size) + narrow.precision / 2 * norm
    if bound <= WEIGHT_ERROR * norm:
        return False
    return norm > 0 and float(np.linalg.norm(narrow.round(flat) - flat)) > WEIGHT_ERROR * norm


def lost_entries(constant: np.ndarray, narrow: NarrowType) -> np.ndarray:
    """The entries that rounding changes by more than ``WEIGHT_ERROR`` of themselves."""
    exact = np.asarray(constant, np.float32)
    nonzero = exact[np.isfinite(exact) & (exact != 0) & (np.abs(exact) <= narrow.largest)]
    return np.asarray(nonzero[np.abs(narrow.round(nonzero) - nonzero) > WEIGHT_ERROR * np.abs(nonzero)])
