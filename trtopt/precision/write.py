"""A precision plan written into a graph, and the borders of a piece of one."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx_ir as ir

from trtopt.graph import edit
from trtopt.precision.fp16.cast_to_half import cast_to_half
from trtopt.precision.plan import PrecisionPlan
from trtopt.precision.qdq.write_qdq import quantize

HALF_TYPES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def apply_plan(base: ir.Model, plan: PrecisionPlan) -> ir.Model:
    """Write a precision plan into (a clone of) the widened model it was made for."""
    model, wide = base, frozenset(plan.wide)
    if plan.quantized:
        quantized = quantize(base, plan)
        model, wide = quantized.model, wide | quantized.wide
    return model if plan.narrow is None else cast_to_half(model, plan.narrow, wide, plan.bfloat)


def cast_borders(model: ir.Model, narrow: ir.DataType) -> ir.Model:
    """Give the inputs and outputs of a piece of a network the type they have inside an engine.

    An input takes the type that all its readers cast it to, a quantizer the narrow type; an output that of what is cast
    to FP32 last.
    """
    graph = model.graph
    for value in list(graph.inputs):
        _narrow_input(model, value, narrow)
    for index, value in enumerate(graph.outputs):
        cast = value.producer()
        source = cast.inputs[0] if cast is not None and edit.is_op(cast, "Cast") else None
        if cast is None or source is None or source.producer() is None or source.is_graph_output():
            continue
        if value.dtype is ir.DataType.FLOAT and source.dtype in HALF_TYPES:
            graph.outputs[index] = source
            if not value.uses() and not value.is_graph_output():
                edit.remove_node(cast)
    return model


def _narrow_input(model: ir.Model, value: ir.Value, narrow: ir.DataType) -> None:
    users = [node for node, _ in value.uses()]
    casts = [node for node in users if edit.is_op(node, "Cast")]
    quantizers = [node for node in users if edit.is_op(node, "QuantizeLinear") and node.inputs[0] is value]
    types = {edit.int_attribute(node, "to", 0) for node in casts} | ({int(narrow)} if quantizers else set())
    if len(types) != 1 or len(casts) + len(quantizers) != len(users) or value.is_graph_output():
        return
    if any(node.outputs[0].is_graph_output() for node in casts) or value.dtype is not ir.DataType.FLOAT:
        return
    value.type = ir.TensorType(ir.DataType(types.pop()))
    for node in casts:
        node.outputs[0].replace_all_uses_with(value)
        edit.remove_node(node)
    names = edit.Names(model)
    for node in quantizers:
        scale = edit.constant_of(node.inputs[1])
        if scale is not None:
            kind = value.dtype.numpy()
            with np.errstate(over="ignore"):  # the piece is priced, not run: any scale above zero will do
                stored = np.maximum(np.asarray(scale, kind), np.asarray(ml_dtypes.finfo(kind).smallest_subnormal, kind))
            name = names.value(f"{node.outputs[0].name}_border_scale")
            node.replace_input_with(1, edit.add_initializer(model.graph, name, np.asarray(stored)))
