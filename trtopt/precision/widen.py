"""The FP32 form of a model, from which every precision starts and against which every precision is verified."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from trtopt.graph import edit
from trtopt.precision.casts import cast_node, insert_behind

_NARROW = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE)


def widen(model: ir.Model) -> ir.Model:
    """A clone of ``model`` that computes in FP32 what it stores in FP16, BF16 or FP64.

    Graph inputs and outputs keep their types, with a Cast behind or before them. Weights are converted one by one.
    A model that is FP32 already is returned as it is.
    """
    if not _has_narrow(model):
        return model
    clone = model.clone()
    for graph in edit.all_graphs(clone.graph):
        _widen_initializers(graph)
        for node in graph:
            _widen_attributes(node)
        for node in graph:
            for value in node.outputs:
                if value.dtype in _NARROW:
                    value.type = ir.TensorType(ir.DataType.FLOAT)
    main = clone.graph
    for graph in edit.all_graphs(main):
        if graph is not main:
            for value in graph.inputs:
                if value.dtype in _NARROW:
                    value.type = ir.TensorType(ir.DataType.FLOAT)
    names = edit.Names(clone)
    for value in main.inputs:
        if value.dtype in _NARROW:
            _cast_input(main, value, names)
    for position, value in enumerate(main.outputs):
        declared = model.graph.outputs[position].dtype
        if declared in _NARROW and value.dtype is not declared:
            _cast_output(main, position, declared, names)
    return clone


def _has_narrow(model: ir.Model) -> bool:
    for graph in edit.all_graphs(model.graph):
        values = [*graph.inputs, *graph.initializers.values(), *(v for node in graph for v in node.outputs)]
        if any(value.dtype in _NARROW for value in values):
            return True
    return False


def _widen_initializers(graph: ir.Graph) -> None:
    for name, value in list(graph.initializers.items()):
        tensor = value.const_value
        if tensor is None or tensor.dtype not in _NARROW:
            continue
        value.const_value = ir.Tensor(tensor.numpy().astype(np.float32), name=name)
        value.type = ir.TensorType(ir.DataType.FLOAT)


def _widen_attributes(node: ir.Node) -> None:
    """Types that an operator takes from an attribute: Cast's ``to``, a generator's ``dtype``, a constant's value."""
    for name in ("to", "dtype", "output_dtype"):
        attribute = node.attributes.get(name)
        if attribute is not None and attribute.type == ir.AttributeType.INT and attribute.as_int() in _NARROW:
            node.attributes[name] = ir.AttrInt64(name, int(ir.DataType.FLOAT))
    for name, attribute in list(node.attributes.items()):
        if attribute.type == ir.AttributeType.TENSOR and attribute.as_tensor().dtype in _NARROW:
            wide = ir.Tensor(attribute.as_tensor().numpy().astype(np.float32))
            node.attributes[name] = ir.AttrTensor(name, wide)


def _cast_input(graph: ir.Graph, value: ir.Value, names: edit.Names) -> None:
    uses = list(value.uses())
    cast = cast_node(value, ir.DataType.FLOAT, names, names.value(f"{value.name}_fp32"))
    insert_behind(graph, value, [cast])
    for node, index in uses:
        node.replace_input_with(index, cast.outputs[0])


def _cast_output(graph: ir.Graph, position: int, dtype: ir.DataType, names: edit.Names) -> None:
    """Give the output back its declared type; the Cast takes over the output's name."""
    value = graph.outputs[position]
    name = str(value.name)
    value.name = names.value(f"{name}_fp32")
    cast = cast_node(value, dtype, names, name)
    graph.append(cast)
    graph.outputs[position] = cast.outputs[0]
