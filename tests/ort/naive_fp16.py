"""A naive FP16 caster: every FP32 tensor becomes FP16, whatever its values. What verification must not let pass."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common as passes

FLOAT, HALF = ir.DataType.FLOAT, ir.DataType.FLOAT16


def naive_fp16(model: ir.Model) -> ir.Model:
    """``model`` with each FP32 tensor of its main graph in FP16 and casts at its FP32 inputs and outputs."""
    model = model.clone()
    graph = model.graph
    for node in graph:
        for attribute in list(node.attributes.values()):
            if attribute.type == ir.AttributeType.TENSOR and attribute.as_tensor().dtype == FLOAT:
                node.attributes[attribute.name] = ir.AttrTensor(attribute.name, _half(attribute.as_tensor()))
            elif attribute.name in ("to", "dtype") and attribute.value == int(FLOAT):
                node.attributes[attribute.name] = ir.AttrInt64(attribute.name, int(HALF))
        for value in node.outputs:
            if value.dtype == FLOAT:
                value.type = ir.TensorType(HALF)
    for value in graph.initializers.values():
        if value.dtype == FLOAT:
            value.const_value = _half(value.const_value)
            value.type = ir.TensorType(HALF)
    for value in graph.inputs:
        if value.dtype == FLOAT:
            users = value.uses()
            cast = ir.node("Cast", [value], {"to": HALF})
            graph.insert_before(graph[0], cast)
            for user, index in users:
                user.replace_input_with(index, cast.outputs[0])
    for index, value in enumerate(list(graph.outputs)):
        if value.dtype == HALF:
            name = value.name
            value.name = f"{name}_half"
            cast = ir.node("Cast", [value], {"to": FLOAT})
            cast.outputs[0].name = name
            cast.outputs[0].type = ir.TensorType(FLOAT)
            graph.append(cast)
            graph.outputs[index] = cast.outputs[0]
    return passes.ShapeInferencePass()(model).model


def _half(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    with np.errstate(over="ignore"):
        return ir.tensor(tensor.numpy().astype(np.float16), name=tensor.name)
