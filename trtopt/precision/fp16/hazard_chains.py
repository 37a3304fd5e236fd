"""Hazards that concern several nodes: what lies between a cause and the operator that suffers from it.

See :mod:`trtopt.precision.fp16.hazards`, which finds those of single nodes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import onnx_ir as ir

from trtopt.graph import edit
from trtopt.precision.fp16.half_constants import WEIGHT_ERROR, loses_weights, overflows
from trtopt.precision.observe.ranges import finite_range
from trtopt.precision.observe.value_ranges import LAYOUT_OPS, Spans, is_float, ranking_readers
from trtopt.precision.plan import NarrowType

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

_DOTS = frozenset(["Conv", "ConvTranspose", "Gemm", "MatMul"])


def keep_connected(
    model: ir.Model, spans: Spans, narrow: NarrowType, reasons: dict[str, str], bfloat: Collection[str]
) -> None:
    """Add to ``reasons`` (by node name, found node by node) the nodes that stay FP32 because of others.

    ``bfloat`` names nodes that will be BF16 instead.
    """
    _keep_masks(model, spans, narrow, reasons)
    _keep_floors(model, spans, narrow, reasons)
    _keep_small_operands(model, spans, narrow, reasons)
    _keep_steps(model, spans, narrow, reasons)
    products = [node for node in model.graph if node.op_type in _DOTS and node.name in reasons]
    _keep_behind_weights([node for node in products if node.name not in bfloat], spans, narrow, reasons)


def keep_ranking(model: ir.Model, reasons: dict[str, str]) -> None:
    """Add the nodes that only compare or rank what is computed in FP32."""
    for node in model.graph:
        if str(node.name) in reasons:
            for reader in ranking_readers(node):
                reasons.setdefault(reader, f"ranks or compares what {node.name} computes in FP32: rounding makes ties")


def _keep_masks(model: ir.Model, spans: Spans, narrow: NarrowType, reasons: dict[str, str]) -> None:
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
        elif node.op_type in _MASK_CARRIERS and any(overflows(spans.constant(value), narrow) for value in node.inputs):
            masked.update(node.outputs)


def _keep_floors(model: ir.Model, spans: Spans, narrow: NarrowType, reasons: dict[str, str]) -> None:
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
        if carried or (node.op_type in _FLOORS and any(_is_lost_floor(value, spans, narrow) for value in node.inputs)):
            floored.update(node.outputs)


def _keep_back(value: ir.Value | None, among: set[ir.Value], reason: str, reasons: dict[str, str]) -> None:
    """Keep the producers of ``value`` as far back as values are in ``among``."""
    stack, seen = [value], {value}
    while stack:
        current = stack.pop()
        node = current.producer() if current is not None else None
        if node is None:
            continue
        reasons.setdefault(str(node.name), reason)
        fresh = [item for item in node.inputs if item in among and item not in seen]
        seen.update(fresh)
        stack.extend(fresh)


def _is_lost_floor(value: ir.Value | None, spans: Spans, narrow: NarrowType) -> bool:
    constant = spans.constant(value)
    if constant is None or constant.size == 0:
        return False
    largest = max(map(abs, finite_range(constant)))
    return largest > 0 and abs(float(narrow.round(np.array(largest))) - largest) > WEIGHT_ERROR * largest


def _keep_small_operands(model: ir.Model, spans: Spans, narrow: NarrowType, reasons: dict[str, str]) -> None:
    """Small operands of a logarithm or division: it stays wide, and so does whoever computes them."""
    for node in model.graph:
        operand = _sensitive_operand(node)
        if operand is None or edit.constant_of(operand) is not None:
            continue
        smallest = _small(operand, spans, narrow)
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
            fresh = [item for item in fresh if _small(item, spans, narrow) is not None]
            small.update(fresh)
            stack.extend(fresh)
        _keep_back(operand, small, reason, reasons)


def _small(value: ir.Value, spans: Spans, narrow: NarrowType) -> float | None:
    """The smallest magnitude seen in ``value`` if the type does not hold it with full precision, else None."""
    span = spans.of(value) if is_float(value) else None
    smallest = span.smallest if span is not None else None
    return smallest if smallest is not None and smallest < narrow.smallest_normal else None


def _sensitive_operand(node: ir.Node) -> ir.Value | None:
    index = _SENSITIVE.get(node.op_type)
    if index is None or index >= len(node.inputs) or (node.op_type == "Pow" and not _has_negative_power(node)):
        return None
    return node.inputs[index]


def _has_negative_power(node: ir.Node) -> bool:
    exponent = edit.constant_of(node.inputs[1])
    return exponent is None or bool((exponent < 0).any())


def _keep_steps(model: ir.Model, spans: Spans, narrow: NarrowType, reasons: dict[str, str]) -> None:
    """The operand of a sine or a floor is computed in FP32 where its rounding error is no small part of a step."""
    for node in model.graph:
        operand = _step_operand(node)
        span = spans.of(operand)
        if operand is None or span is None or span.largest * narrow.precision <= _LARGEST_ERROR:
            continue
        reason = (
            f"{node.op_type} of values up to {span.largest:.3g}: their rounding error in {narrow.name} counts as it is"
        )
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
    if node.op_type not in _DOTS:
        return False
    weights = [edit.constant_tensor_of(value) for value in node.inputs[:2]]
    return not any(weight is not None and weight.size <= _SMALL_PRODUCT for weight in weights)


def _keep_behind_weights(
    products: Sequence[ir.Node], spans: Spans, narrow: NarrowType, reasons: dict[str, str]
) -> None:
    """Who reads a product that is FP32 for its weights stays FP32 too.

    TensorRT for RTX 1.7.1 runs an FP32 convolution or matrix product between a Cast from FP16 and one to FP16 in FP16,
    its weights rounded, whether they fit or not (seen in the layers it lists: a weight of 1e5 becomes Half). Any
    other operator in FP32 between the product and the Cast keeps it from that, and is part of the same kernel.
    """
    for node in products:
        weights = [spans.constant(value) for value in node.inputs[:2]]
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
