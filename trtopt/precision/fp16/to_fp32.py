"""The FP32 form of a model, from which every precision starts and against which every precision is verified."""

from __future__ import annotations

import copy

import numpy as np
import onnx_ir as ir

from trtopt.errors import InvalidModelError
from trtopt.graph import edit

_NARROW = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE)
_TYPE_ATTRIBUTES = ("to", "dtype", "output_dtype", "output_datatype", "stash_type", "softmax_precision", "precision")


def to_fp32(model: ir.Model) -> ir.Model:
    """A clone of ``model`` that computes in FP32 what it stores in FP16, BF16 or FP64.

    Graph inputs and outputs keep their types, with a Cast behind or before them. Weights are converted one by one;
    FP64 numbers beyond FP32 become its largest. A model that is FP32 already is returned as it is.

    Raises:
        InvalidModelError: The bits of such a type are reinterpreted (BitCast).
    """
    if not _has_narrow(model):
        return model
    for node in edit.all_nodes(model.graph):
        _refuse_bit_cast(node)
    clone = model.clone()
    main = clone.graph
    for graph in edit.all_graphs(main):
        _widen_initializers(graph)
        for value in () if graph is main else graph.inputs:
            _widen_type(value)
        for node in graph:
            _widen_node(node)
    names = edit.Names(clone)
    for value in main.inputs:
        if value.dtype in _NARROW:
            edit.cast_for_readers(main, value, ir.DataType.FLOAT, names, "fp32")
    restored: dict[ir.Value, ir.Value] = {}
    for position, value in enumerate(main.outputs):
        declared = model.graph.outputs[position].dtype
        if declared is not None and declared in _NARROW and value.dtype is not declared:
            if value not in restored:
                restored[value] = edit.cast_output(main, value, declared, names, "fp32")
            main.outputs[position] = restored[value]
    return clone


def _has_narrow(model: ir.Model) -> bool:
    for graph in edit.all_graphs(model.graph):
        values = [*graph.inputs, *graph.initializers.values(), *(v for node in graph for v in node.outputs)]
        if any(value.dtype in _NARROW for value in values):
            return True
    return False


def _widen_type(value: ir.Value) -> None:
    """Sequences and optional values keep their kind."""
    if value.dtype in _NARROW:
        value.type = copy.deepcopy(value.type)  # clones share it with the source
        value.dtype = ir.DataType.FLOAT


def _widen_initializers(graph: ir.Graph) -> None:
    for name, value in list(graph.initializers.items()):
        tensor = value.const_value
        if tensor is not None and tensor.dtype in _NARROW and not value.is_graph_input():
            value.const_value = ir.Tensor(_as_fp32(tensor), name=name)
            value.type = ir.TensorType(ir.DataType.FLOAT)


def _as_fp32(tensor: ir.TensorProtocol) -> np.ndarray:
    array = tensor.numpy()
    if tensor.dtype is ir.DataType.DOUBLE:
        # The lowest FP64 number, as a mask, must not become -inf: a row masked throughout would be NaN.
        limit = float(np.finfo(np.float32).max)
        array = np.where(np.isfinite(array), np.clip(array, -limit, limit), array)
    return array.astype(np.float32)


def _refuse_bit_cast(node: ir.Node) -> None:
    values = [value for value in (*node.inputs, *node.outputs) if value is not None]
    if node.op_type == "BitCast" and any(value.dtype in _NARROW for value in values):
        raise InvalidModelError(
            "BitCast reinterprets the bits of a 16-bit or 64-bit float",
            where=f"node {node.name}",
            remedy="replace it with Cast; it has no FP32 equivalent to start from",
        )


def _widen_node(node: ir.Node) -> None:
    """Types of the outputs, and those an operator takes from an attribute: Cast's ``to``, a constant's value."""
    for name in _TYPE_ATTRIBUTES:
        attribute = node.attributes.get(name)
        if attribute is not None and attribute.type == ir.AttributeType.INT and attribute.as_int() in _NARROW:
            node.attributes[name] = ir.AttrInt64(name, int(ir.DataType.FLOAT))
    for name, attribute in list(node.attributes.items()):
        if attribute.type == ir.AttributeType.TENSOR and attribute.as_tensor().dtype in _NARROW:
            node.attributes[name] = ir.AttrTensor(name, ir.Tensor(_as_fp32(attribute.as_tensor())))
    for value in node.outputs:
        _widen_type(value)
