"""The FP32 emulation: a graph that ONNX Runtime computes in FP32 on a CPU, and that rounds as the typed graph does.

ONNX Runtime's CPU provider has few FP16 kernels: it runs FP16 nodes in FP32 and removes the casts between neighbours,
so an activation that overflows FP16 looks fine (``x*300*300/300/300`` comes back finite). The emulation states each
rounding as ``Cast(FP32 -> FP16) -> Cast(FP16 -> FP32)``, which loses precision and is therefore never removed. Sums
inside a kernel stay FP32 in the emulation; the precision plan bounds those from the observed ranges.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common as passes

from trtopt.errors import InvalidModelError
from trtopt.graph import edit
from trtopt.precision.write import HALF_TYPES
from trtopt.support.ort_session import LARGE_BYTES

_COPIES = """
Compress Concat ConcatFromSequence Constant ConstantOfShape DepthToSpace EyeLike Expand Flatten Gather GatherElements
GatherND Identity If Loop OneHot Pad Reshape ReverseSequence Scan SequenceAt SequenceConstruct SequenceEmpty
SequenceErase SequenceInsert Slice SpaceToDepth Split SplitToSequence Squeeze Tile TopK Transpose Trilu Unique Unsqueeze
Where
"""
_SELECTIONS = "Abs Clip GlobalMaxPool Max MaxPool Min Neg ReduceMax ReduceMin Relu Sign"
_INTEGERS = "Ceil Floor Round"

# Copies: each output element is an input element, 0 or 1 (subgraphs round within themselves). Selections: monotone in
# values that are rounded already. Integers: FP16 and BF16 hold every integer up to their precision, and only integers
# above it.
EXACT_OPS = frozenset(f"{_COPIES} {_SELECTIONS} {_INTEGERS}".split())
"""Operators whose outputs are representable in the type of their inputs, so that a second rounding changes nothing."""

_CAST_BYTES = 1 << 20
"""Smaller weights, scales and biases, are stored in FP32 at once."""

_TYPE_ATTRIBUTES = ("to", "dtype", "stash_type", "softmax_precision", "output_datatype", "output_dtype")
_HALF_VALUES = tuple(int(dtype) for dtype in HALF_TYPES)


def fp32_emulation(model: ir.Model) -> ir.Model:
    """A graph of FP32 tensors that rounds wherever ``model`` holds an FP16 or BF16 tensor.

    Every node computes in FP32; each of its FP16 (BF16) outputs then passes a cast to FP16 (BF16) and back, except
    where the operator cannot make a value of more precision (:data:`EXACT_OPS`). FP16 constants become FP32 constants
    of the same (rounded) value, Q/DQ scales among them; weights of more than 1 GiB are cast where they are read. A
    value keeps its name: it stands for the rounded value. Graph inputs and outputs keep their declared types. Subgraphs
    are treated alike.

    Run it with ``OrtSession(keep_qdq=True)``, so that Q/DQ is computed as it stands.

    Args:
        model: The strongly typed graph; it is not changed. Types that are missing are inferred.

    Returns:
        The emulation: a new model that shares all tensors that do not change type.

    Raises:
        InvalidModelError: A tensor's type is unknown, or bits are reinterpreted as FP16.
    """
    emulation = model.clone()
    if emulation.functions:
        passes.InlinePass()(emulation)
    if any(value.dtype is None for value in _node_outputs(emulation.graph)):
        emulation = passes.ShapeInferencePass()(emulation).model
        _require_types(emulation.graph)
    declared = [value.dtype for value in emulation.graph.outputs]
    names = edit.Names(emulation)
    graphs = [emulation.graph, *emulation.graph.subgraphs()]
    is_large = sum(tensor.nbytes for _, tensor in _half_constants(emulation.graph)) > LARGE_BYTES
    for graph in graphs:
        _widen_inputs(graph, names, cast=graph is emulation.graph)
        _widen_constants(graph, names, cast=is_large and graph is emulation.graph)
        for node in list(graph):
            _widen_node(node, names)
    for output, dtype in zip(list(emulation.graph.outputs), declared, strict=True):
        if dtype is not None and dtype in HALF_TYPES and output.dtype not in HALF_TYPES:
            place = list(emulation.graph.outputs).index(output)
            emulation.graph.outputs[place] = edit.cast_output(emulation.graph, output, dtype, names, "fp32")
    return emulation


def _node_outputs(graph: ir.Graph) -> Iterator[ir.Value]:
    """Outputs of all nodes, those of subgraphs included; omitted optional outputs have no name."""
    return (value for node in graph.all_nodes() for value in node.outputs if value.name)


def _require_types(graph: ir.Graph) -> None:
    for value in _node_outputs(graph):
        if value.dtype is None:
            node = value.producer()
            raise InvalidModelError(
                f"The type of tensor {value.name} is unknown",
                where=f"node {node.name} ({node.op_type})" if node else "",
                remedy="verification needs the type of every tensor; operators of custom domains cannot be verified",
            )


def _widen_inputs(graph: ir.Graph, names: edit.Names, *, cast: bool) -> None:
    """Cast the inputs of the main graph to FP32; those of a subgraph receive FP32 already."""
    for value in graph.inputs:
        if value.dtype not in HALF_TYPES:
            continue
        if cast:
            edit.cast_for_readers(graph, value, ir.DataType.FLOAT, names, "fp32")
        else:
            value.type = _float_type(value.type)


def _half_constants(graph: ir.Graph) -> list[tuple[ir.Value, ir.TensorProtocol]]:
    found = [(value, value.const_value) for value in graph.initializers.values() if not value.is_graph_input()]
    return [(value, tensor) for value, tensor in found if tensor is not None and value.dtype in HALF_TYPES]


def _widen_constants(graph: ir.Graph, names: edit.Names, *, cast: bool) -> None:
    """Make FP16 constants FP32; with ``cast``, large ones where they are read, since together they fill the memory."""
    for value, tensor in _half_constants(graph):
        if cast and value.dtype is ir.DataType.FLOAT16 and tensor.nbytes >= _CAST_BYTES:
            edit.cast_for_readers(graph, value, ir.DataType.FLOAT, names, "fp32")
        else:
            value.const_value = _float_tensor(tensor)
            value.type = _float_type(value.type)


def _widen_node(node: ir.Node, names: edit.Names) -> None:
    """Compute ``node`` in FP32 and round its FP16 and BF16 outputs."""
    halves = [value for value in node.outputs if value.name and value.dtype in HALF_TYPES]
    if node.op_type == "BitCast" and halves:
        raise InvalidModelError(
            "BitCast reinterprets bits as FP16 or BF16",
            where=f"node {node.name}",
            remedy="replace it with Cast; it has no FP32 equivalent to verify with",
        )
    if node.op_type == "CastLike" and halves:
        node.op_type = "Cast"
        node.resize_inputs(1)
        node.attributes["to"] = ir.AttrInt64("to", int(halves[0].dtype or ir.DataType.FLOAT))
    is_cast = node.op_type == "Cast" and node.domain == ""
    for attribute in list(node.attributes.values()):
        if attribute.type == ir.AttributeType.TENSOR and attribute.as_tensor().dtype in HALF_TYPES:
            node.attributes[attribute.name] = ir.AttrTensor(attribute.name, _float_tensor(attribute.as_tensor()))
        elif attribute.name in _TYPE_ATTRIBUTES and not is_cast and attribute.value in _HALF_VALUES:
            node.attributes[attribute.name] = ir.AttrInt64(attribute.name, int(ir.DataType.FLOAT))
    for value in halves:
        dtype = value.dtype
        if is_cast:
            _round(value, dtype, names)
            continue
        value.type = _float_type(value.type)
        if node.op_type not in EXACT_OPS or node.domain != "":
            _round(value, dtype, names)


def _round(value: ir.Value, dtype: ir.DataType | None, names: edit.Names) -> None:
    """Send ``value`` through ``dtype`` and back to FP32; the result takes over its name and uses."""
    if dtype is None:
        raise ValueError(f"no type to round {value.name} to")
    chain: list[ir.Node] = []
    if value.dtype != dtype:
        chain.append(edit.cast_node(value, dtype, names, names.value(f"{value.name}_rounded")))
    back = names.value(f"{value.name}_back")
    chain.append(edit.cast_node(chain[0].outputs[0] if chain else value, ir.DataType.FLOAT, names, back))
    edit.chain_behind(value, chain, names, "unrounded")


def _float_type(kind: ir.TypeProtocol | None) -> ir.TypeProtocol:
    """``kind`` with FP32 elements."""
    if isinstance(kind, ir.SequenceType):
        return ir.SequenceType(_float_type(kind.elem_type))
    if isinstance(kind, ir.OptionalType):
        return ir.OptionalType(_float_type(kind.elem_type))
    return ir.TensorType(ir.DataType.FLOAT)


def _float_tensor(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    """The FP32 tensor of the same values, converted when it is read, so that large weights stay memory-mapped."""
    return ir.LazyTensor(
        lambda: ir.tensor(tensor.numpy().astype(np.float32)),
        dtype=ir.DataType.FLOAT,
        shape=ir.Shape(int(dim) for dim in tensor.shape.numpy()),
        name=tensor.name,
    )
