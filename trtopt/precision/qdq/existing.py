"""Models that hold Q/DQ already, from quantization-aware training or another quantizer: kept, checked and mended."""

from __future__ import annotations

import time
from dataclasses import dataclass

import onnx_ir as ir

from trtopt.errors import InvalidModelError
from trtopt.graph import edit
from trtopt.graph.shapes import infer_in_place
from trtopt.precision.observe.ranges import LEVELS
from trtopt.precision.qdq import forms, qlinear
from trtopt.precision.qdq.canonicalize import INTEGERS, QdqEditor, dequantized, quantizer_of
from trtopt.precision.qdq.placement import pairs, place_qdq
from trtopt.report.schema.steps import StepRecord
from trtopt.support.precision import Precision

STEP = "existing-qdq"
"""Name of the step in reports."""

_OPS = frozenset("QuantizeLinear DequantizeLinear DynamicQuantizeLinear ConvInteger MatMulInteger".split())


@dataclass(frozen=True)
class CanonicalQdq:
    """A model whose Q/DQ the compiler reads and gains by.

    Attributes:
        model: The model.
        step: What was changed.
        warnings: What of that costs accuracy.
    """

    model: ir.Model
    step: StepRecord
    warnings: tuple[str, ...]


def is_quantized(model: ir.Model) -> bool:
    """Whether a model holds Q/DQ or operators on quantized tensors."""
    return any(
        node.op_type in _OPS or node.op_type.startswith("QLinear") or node.op_type == "QGemm"
        for node in edit.all_nodes(model.graph)
    )


def canonicalize_qdq(model: ir.Model, backend: str) -> CanonicalQdq | None:
    """Bring the Q/DQ of a model to the form ``backend`` reads, and to the places where it gains by it.

    What is quantized stays quantized with its own scales. Operators on quantized tensors become Q/DQ; zero points
    become 0; biases and weights are stored as constants; Q/DQ around operators that do not compute in 8 bits is taken
    out. Only the main graph is changed.

    Args:
        model: A model as loaded: opset 21 or later, everything named; not changed.
        backend: ``tensorrt-rtx`` or ``tensorrt``: whose placement rules apply.

    Returns:
        None for a model that is not quantized.

    Raises:
        InvalidModelError: It is quantized in a way that has no equal in Q/DQ: scales computed at run time, arithmetic
            on 8-bit integers, zero points inside nested graphs.
    """
    if not is_quantized(model):
        return None
    start = time.perf_counter()
    clone = model.clone()
    _check_nested(clone)
    work = QdqEditor(clone, backend, edit.Names(clone))
    forms.standard_domain(work)
    qlinear.expand(work)
    if work.changes:
        infer_in_place(clone)
    for mend_form in forms.PASSES:
        mend_form(work)
    place_qdq(work)
    for domain in set(clone.graph.opset_imports) - {"", *(node.domain for node in edit.all_nodes(clone.graph))}:
        del clone.graph.opset_imports[domain]
    if work.changes:
        infer_in_place(clone)
    seconds = time.perf_counter() - start
    step = StepRecord(STEP, "PRECISION", work.changes, seconds, tuple(work.refusals), tuple(work.details))
    return CanonicalQdq(clone, step, tuple(work.warnings))


def _check_nested(model: ir.Model) -> None:
    """Raises InvalidModelError for Q/DQ in nested graphs that needs mending: the compiler would take UINT8 for INT8."""
    for node in edit.all_nodes(model.graph):
        if node.graph is model.graph or not edit.is_op(node, "QuantizeLinear", "DequantizeLinear"):
            continue
        how = quantizer_of(node)
        if how is not None and how.dtype in INTEGERS and not how.is_symmetric:
            raise InvalidModelError(
                f"{node.op_type} inside an If, Loop or Scan has a zero point or is unsigned",
                where=f"node {node.name}",
                remedy="quantize symmetrically (INT8, zero point 0), or leave the branch in FP32",
            )


def existing_ranges(model: ir.Model) -> dict[str, float]:
    """Largest magnitude by tensor name, of the activations that a mended model quantizes to INT8 with one scale."""
    found = {}
    for node in model.graph:
        if edit.is_op(node, "QuantizeLinear") and node.inputs[0] is not None:
            how = quantizer_of(node)
            if how is not None and how.axis is None and how.dtype is ir.DataType.INT8:
                found[str(node.inputs[0].name)] = float(how.scale) * LEVELS
    return found


def existing_nodes(model: ir.Model) -> frozenset[str]:
    """The products of a mended model that compute in 8 bits already: both their operands are dequantized."""
    found = set()
    for node in model.graph:
        if edit.is_op(node, "Conv", "Gemm", "MatMul"):
            makers = [None if value is None else value.producer() for value in node.inputs[:2]]
            if all(edit.is_op(maker, "DequantizeLinear") for maker in makers):
                found.add(str(node.name))
    return frozenset(found)


def existing_types(model: ir.Model) -> frozenset[Precision]:
    """The 8-bit types of the tensors that a mended model dequantizes."""
    hows = [quantizer_of(node) for node in model.graph if edit.is_op(node, "DequantizeLinear")]
    return frozenset(Precision.INT8 if how.dtype.is_integer() else Precision.FP8 for how in hows if how is not None)


def without_qdq(model: ir.Model) -> ir.Model:
    """A clone of a mended model in which products read the tensors themselves, and floating weights.

    Weights that are stored in 8 bits for products of floating tensors stay so, and what is quantized at run time or in
    nested graphs does too.
    """
    clone = model.clone()
    work = QdqEditor(clone, "", edit.Names(clone))
    quantized = existing_nodes(clone)
    for pair in list(pairs(work)):
        result = pair.dequantize.outputs[0]
        if result.dtype is pair.source.dtype and edit.can_replace(result, pair.source):
            edit.replace_value(result, pair.source)
    for node in clone.graph:
        for index, value in enumerate(node.inputs[:2] if node.name in quantized else ()):
            maker = None if value is None else value.producer()
            if value is None or maker is None or not edit.is_op(maker, "DequantizeLinear"):
                continue
            values, how = edit.constant_of(maker.inputs[0]), quantizer_of(maker)
            if values is not None and how is not None:
                exact = dequantized(values, how, value.dtype or ir.DataType.FLOAT)
                node.replace_input_with(index, work.constant(f"{value.name}_wide", exact))
    work.drop_unused()
    return clone
