"""Graphs written as text, and the layers they become."""

from __future__ import annotations

import numpy as np
import onnx.parser
import onnx_ir as ir

from trtopt.graph import cost
from trtopt.graph.edit import all_nodes
from trtopt.graph.products import Shapes
from trtopt.graph.shapes import infer_shapes, static_shapes
from trtopt.roofline.node_work import GraphTypes, work_of_node
from trtopt.roofline.onnx_layers import layers_of_graph
from trtopt.roofline.work import Layer, Work
from trtopt.support.precision import Precision

HEADER = '<ir_version: 10, opset_import: ["" : 23]>\n'


def parsed(text: str) -> ir.Model:
    """A model of the text of a graph; values listed in ``<...>`` without a content are constants of zeros."""
    proto = onnx.parser.parse_model(HEADER + text)
    known = {item.name for item in proto.graph.initializer}
    for info in proto.graph.value_info:
        if info.name not in known:
            dims = [dim.dim_value for dim in info.type.tensor_type.shape.dim]
            dtype = onnx.helper.tensor_dtype_to_np_dtype(info.type.tensor_type.elem_type)
            proto.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros(dims, dtype), info.name))
    del proto.graph.value_info[:]
    model = infer_shapes(ir.from_proto(proto))
    for node in all_nodes(model.graph):
        node.name = str(node.outputs[0].name)
    return model


def layers(text: str, precision: GraphTypes | None = None) -> dict[str, Layer]:
    """The layers of a graph by name; a node is called as its first output."""
    model = parsed(text)
    precision = precision or GraphTypes(Precision.FP16)
    found = layers_of_graph(model, static_shapes(model, {}), precision)
    assert len({layer.name for layer in found}) == len(found)
    return {layer.name: layer for layer in found}


def groups(text: str, precision: GraphTypes | None = None) -> list[str]:
    """The nodes of each layer, sorted, as ``a+b+c``."""
    return ["+".join(sorted(layer.onnx_nodes)) for layer in layers(text, precision).values()]


def work(text: str, precision: GraphTypes | None = None) -> Work:
    """The work of the last node of a graph, unfused."""
    model = parsed(text)
    found = work_of_node(list(model.graph)[-1], static_shapes(model, {}), precision or GraphTypes(Precision.FP16))
    assert found is not None
    return found


def only(text: str, precision: GraphTypes | None = None) -> Work:
    """The work of the one layer a graph becomes."""
    (layer,) = layers(text, precision).values()
    assert layer.work is not None
    return layer.work


def flop_of_graph(model: ir.Model, shapes: Shapes) -> int:
    """Flop of all nodes, from the table of operators alone."""
    return sum(cost.flop_by_node(model, shapes).values())
