"""Evaluation of single nodes whose inputs are constants, and of ``If`` nodes whose condition is one."""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from trtopt.graph import edit
from trtopt.graph.edit import Names, can_replace, constant_of, graph_of, is_op, remove_node, replace_value, subgraphs_of

MAX_GROWTH_BYTES = 16 << 20
"""A folded constant may be this large, or as large as twice the constants it is made from."""

_LISTED = 64
"""Numbers of a constant that may be part of a shape."""

_SHAPE_BYTES = 1 << 16
"""Constants evaluated for the sake of shapes alone stay this small."""

RANDOM = frozenset(
    {"RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Multinomial", "Bernoulli"}
)
"""Operators that give other numbers each time."""
_KEPT = frozenset({"QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "Constant", "Dropout"})
"""Not folded: quantized weights must stay quantized; Dropout has a recipe of its own; a Constant is folded already."""

_DIFFERENT = frozenset(
    """
    Attention AveragePool ConvTranspose DFT GRU GridSample LRN LSTM LpNormalization LpPool MaxPool MaxUnpool
    QLinearMatMul RNN Resize STFT Unique
    """.split()
)
"""Operators whose reference implementation and ONNX Runtime disagree (onnx 1.23, QLinearMatMul 1.19): on ONNX's own
test cases, or in what those leave out: uneven pads, rounding up, clipping, lengths of sequences, LRN's window, negative
numbers in a norm, Unique without sorting."""

_COSTLY = frozenset({"Col2Im", "Conv", "ConvInteger", "DeformConv", "QLinearConv"})
"""Operators whose reference implementation takes far more memory or time than their inputs and outputs are large: of
10 GB for a convolution of one megabyte with a kernel of 99 x 99, 13 s for a Col2Im of nine."""

_PER_ELEMENT = frozenset({"GatherND", "ScatterElements", "ScatterND", "Scatter"})
"""Operators that it computes in Python, element by element: 1 to 3 s for a million."""

_MOST_BYTES_PER_ELEMENT = 1 << 20

_BOUNDED_BY_INPUT = frozenset({"NonZero", "Compress"})
"""Operators whose output shape depends on data and is at most rank times 8 bytes per input element."""


_NEVER = RANDOM | _KEPT | _DIFFERENT | _COSTLY


class FoldError(ValueError):
    """A node with constant inputs cannot be evaluated; the message says why."""


def can_fold(node: ir.Node, known: Container[ir.Value] = ()) -> bool:
    """Whether ``node`` computes a constant: every input is one, or it asks for a static shape or dimension.

    Values in ``known`` count as constants although they are not yet.
    """
    if node.domain != "" or node.op_type in _NEVER or edit.subgraphs_of(node):
        return False
    if any(attribute.is_ref() for attribute in node.attributes.values()):
        return False
    if edit.is_op(node, "Shape", "Size") and edit.static_shape(node.inputs[0]) is not None:
        return True
    if _static_part_of_shape(node) is not None:
        return True
    return all(value is None or value in known or edit.constant_tensor_of(value) is not None for value in node.inputs)


def evaluate(node: ir.Node, opset: int, limit_bytes: int = MAX_GROWTH_BYTES) -> list[np.ndarray]:
    """The outputs of a node for which :func:`can_fold` holds, by ONNX's reference implementation.

    Args:
        limit_bytes: An output may be this large, or as large as twice the node's constant inputs.

    Returns:
        One array per output, of the output's dtype.

    Raises:
        FoldError: The result would be too large, or its size is not known beforehand, or the evaluation fails.
    """
    part = _static_part_of_shape(node)
    if part is not None:
        return [part]
    if edit.is_op(node, "Shape", "Size"):
        return [_shape_or_size(node)]
    if edit.is_op(node, "GatherElements"):
        return [_gathered_elements(node)]
    if edit.is_op(node, "GatherND") and not edit.int_attribute(node, "batch_dims", 0):
        return [_gathered_nd(node, limit_bytes)]
    tensors = [edit.constant_tensor_of(value) for value in node.inputs]
    allowed = max(limit_bytes, 2 * sum(tensor.nbytes for tensor in tensors if tensor is not None))
    if node.op_type in _PER_ELEMENT:
        allowed = min(allowed, _MOST_BYTES_PER_ELEMENT)
    proto = _one_node_model(node, tensors, opset)
    arrays = {
        info.name: t.numpy() for info, t in zip(proto.graph.input, (t for t in tensors if t is not None), strict=True)
    }
    expected = _output_bytes(node, tensors, proto)
    if expected is None or expected > allowed:
        size = "of unknown size" if expected is None else f"of {expected} bytes"
        raise FoldError(f"the constant would be {size}, the limit is {allowed}")
    try:
        with np.errstate(all="ignore"):
            from onnx.reference import ReferenceEvaluator  # slow to import, and rarely needed

            results = ReferenceEvaluator(proto).run(None, arrays)
    except Exception as error:
        raise FoldError(f"ONNX's reference implementation fails: {' '.join(str(error).split())[:200]}") from error
    return [_as_array(result, value) for result, value in zip(results, _used_outputs(node), strict=True)]


def _gathered_elements(node: ir.Node) -> np.ndarray:
    """What a GatherElements gives; the reference implementation fails where data is longer than the indices."""
    data, indices = (constant_of(value) for value in node.inputs)
    if data is None or indices is None:
        raise FoldError("an input is not a constant")
    axis = edit.int_attribute(node, "axis", 0) % data.ndim
    part = data[tuple(slice(None) if i == axis else slice(size) for i, size in enumerate(indices.shape))]
    size = data.shape[axis]
    if ((indices < -size) | (indices >= size)).any():
        raise FoldError("an index is out of range")
    return np.take_along_axis(part, indices % size, axis)


def _gathered_nd(node: ir.Node, limit_bytes: int) -> np.ndarray:
    """What a GatherND without batch dimensions gives; the reference implementation takes 1 to 3 s for a million."""
    data, indices = (constant_of(value) for value in node.inputs)
    if data is None or indices is None:
        raise FoldError("an input is not a constant")
    depth = indices.shape[-1] if indices.ndim else 0
    if not 0 < depth <= data.ndim:
        raise FoldError(f"indices of shape {list(indices.shape)} into {data.ndim} axes")
    size = math.prod(indices.shape[:-1]) * math.prod(data.shape[depth:]) * data.itemsize
    if size > max(limit_bytes, 2 * (data.nbytes + indices.nbytes)):
        raise FoldError(f"the constant would be of {size} bytes, the limit is {limit_bytes}")
    sizes = np.asarray(data.shape[:depth])
    if ((indices < -sizes) | (indices >= sizes)).any():
        raise FoldError("an index is out of range")
    found: np.ndarray = data[tuple(np.moveaxis(indices, -1, 0))]
    return found


def excess(node: ir.Node, limit_bytes: int) -> str:
    """Why the constant a node computes would be too large, judged by inferred shapes alone; empty when it may do."""
    if edit.is_op(node, "Shape", "Size"):
        return ""
    sizes = [_inferred_bytes(value) for value in _used_outputs(node)]
    largest = max((size for size in sizes if size is not None), default=0)
    allowed = max(limit_bytes, 2 * sum(_inferred_bytes(value) or 0 for value in node.inputs if value is not None))
    return f"the constant would be of {largest} bytes, the limit is {allowed}" if largest > allowed else ""


def constants_from(model: ir.Model, node: ir.Node, arrays: Sequence[np.ndarray]) -> list[ir.Node]:
    """Replace a node by the constants it computes: ``arrays``, its used outputs, from :func:`evaluate`.

    Each becomes an initializer under the name of the output it replaces; where that output is a graph output, which a
    node must produce, it becomes a ``Constant`` node. Those are returned.
    """
    graph = edit.graph_of(node)
    made = []
    for value, array in zip(_used_outputs(node), arrays, strict=True):
        name = str(value.name)
        value.name = f"{name}__folded"
        if value.is_graph_output():
            label = edit.Names(model).node(f"{node.name}_constant")
            new = ir.node("Constant", [], attributes={"value": ir.tensor(array, name=name)}, name=label)
            new.outputs[0].name = name
            new.outputs[0].type, new.outputs[0].shape = value.type, value.shape
            graph.insert_before(node, new)
            made.append(new)
            value.replace_all_uses_with(new.outputs[0], replace_graph_outputs=True)
        else:
            value.replace_all_uses_with(edit.add_initializer(graph, name, array))
    edit.remove_node(node)
    return made


def fold_shapes(model: ir.Model) -> int:
    """Evaluate, in place, nodes whose inputs are small constants or static shapes; the number of nodes evaluated.

    Meant for clones on which shapes are studied: nodes that cannot be evaluated are left as they are.
    """
    opset = model.graph.opset_imports[""]
    folded = 0
    for graph in edit.all_graphs(model.graph):
        for node in list(graph):
            tensors = () if edit.is_op(node, "Shape", "Size") else map(edit.constant_tensor_of, node.inputs)
            if not can_fold(node) or any(tensor is not None and tensor.nbytes > _SHAPE_BYTES for tensor in tensors):
                continue
            try:
                arrays = evaluate(node, opset, _SHAPE_BYTES)
            except FoldError:
                continue
            constants_from(model, node, arrays)
            folded += 1
    return folded


def _inferred_bytes(value: ir.Value) -> int | None:
    shape = edit.static_shape(value)
    if shape is None or value.dtype is None:
        return None
    return int(np.prod(shape, dtype=np.float64) * value.dtype.itemsize)


def _used_outputs(node: ir.Node) -> list[ir.Value]:
    return [value for value in node.outputs if value.name]


def _shape_or_size(node: ir.Node) -> np.ndarray:
    shape = edit.static_shape(node.inputs[0])
    if shape is None:
        tensor = edit.constant_tensor_of(node.inputs[0])
        if tensor is None:
            raise FoldError("the shape is not static")
        shape = edit.dims_of(tensor)
    if node.op_type == "Size":
        return np.asarray(np.prod(shape, dtype=np.int64))
    return np.asarray(shape[_range_of(node)], dtype=np.int64)


def _range_of(shape: ir.Node) -> slice:
    """The dimensions that a Shape node gives."""
    end = shape.attributes.get("end")
    return slice(edit.int_attribute(shape, "start", 0), None if end is None else end.as_int())


def _static_part_of_shape(node: ir.Node) -> np.ndarray | None:
    """The dimensions that a Shape, or a Gather or Slice of one, picks, where those are static."""
    if edit.is_op(node, "Shape"):
        picked = _dims_of_shape(node)
    elif edit.is_op(node, "Gather", "Slice") and node.inputs[0] is not None:
        dims = _listed(node.inputs[0])
        picked = None if dims is None else _gathered(node, dims) if edit.is_op(node, "Gather") else _sliced(node, dims)
    else:
        return None
    if picked is None or any(dim is None for dim in picked.reshape(-1)):
        return None
    return picked.astype(np.int64)


def _dims_of_shape(shape: ir.Node) -> np.ndarray | None:
    """The dimensions a Shape node gives, None where one is not static; None where not even the rank is known."""
    value = shape.inputs[0]
    if value is None or value.shape is None:
        return None
    dims = [dim if isinstance(dim, int) else None for dim in value.shape]
    return np.asarray(dims[_range_of(shape)], dtype=object)


def _listed(value: ir.Value) -> np.ndarray | None:
    """The dimensions that a Shape, or a Concat of such and of constants, lists, None where one is not static."""
    node = value.producer()
    if node is None or edit.is_op(node, "Shape"):
        return None if node is None else _dims_of_shape(node)
    if not edit.is_op(node, "Concat") or edit.int_attribute(node, "axis", 0) != 0:
        return None
    parts: list[np.ndarray] = []
    for part in node.inputs:
        tensor = edit.constant_tensor_of(part)
        maker = edit.maker_of(part)
        if (
            tensor is not None
            and tensor.dtype is ir.DataType.INT64
            and len(tensor.shape) == 1
            and tensor.size <= _LISTED
        ):
            parts.append(tensor.numpy().astype(object))
        elif edit.is_op(maker, "Shape") and (dims := _dims_of_shape(maker)) is not None:
            parts.append(dims)
        else:
            return None
    return np.concatenate(parts)


def _gathered(node: ir.Node, dims: np.ndarray) -> np.ndarray | None:
    indices = edit.constant_tensor_of(node.inputs[1])
    if indices is None:
        return None
    at = indices.numpy()
    in_range = bool(((at >= -len(dims)) & (at < len(dims))).all())
    return np.asarray(dims[at], dtype=object) if in_range else None


def _sliced(node: ir.Node, dims: np.ndarray) -> np.ndarray | None:
    tensors = [edit.constant_tensor_of(value) for value in node.inputs[1:]]
    if len(tensors) < 2 or any(tensor is None for tensor in tensors):
        return None
    numbers = [int(tensor.numpy().reshape(-1)[0]) for tensor in tensors if tensor is not None]
    start, end, *_ = numbers
    return dims[start : end : numbers[3] if len(numbers) > 3 else 1]


def _one_node_model(node: ir.Node, tensors: Sequence[ir.TensorProtocol | None], opset: int) -> onnx.ModelProto:
    """A model of this one node, its constants as inputs ``0``, ``1``, ... and its outputs under their own names."""
    proto = ir.to_proto(node)
    names = ["" if tensor is None else str(index) for index, tensor in enumerate(tensors)]
    del proto.input[:]
    proto.input.extend(names)
    inputs = [
        onnx.helper.make_tensor_value_info(name, int(tensor.dtype), edit.dims_of(tensor))
        for name, tensor in zip(names, tensors, strict=True)
        if tensor is not None
    ]
    outputs = [
        onnx.ValueInfoProto(name=value.name, type=ir.serde.serialize_type(value.type) if value.type else None)
        for value in _used_outputs(node)
    ]
    graph = onnx.helper.make_graph([proto], "fold", inputs, outputs)
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", opset)], ir_version=10)


def _output_bytes(node: ir.Node, tensors: Sequence[ir.TensorProtocol | None], proto: onnx.ModelProto) -> int | None:
    """Bytes of the node's largest output; None when its size cannot be known before it is computed."""
    if node.op_type in _BOUNDED_BY_INPUT:
        return max(8 * len(t.shape) * math.prod(edit.dims_of(t)) for t in tensors if t is not None)
    shapes = [edit.static_shape(value) for value in _used_outputs(node)]
    if None in shapes:
        with_data = onnx.ModelProto()
        with_data.CopyFrom(proto)
        for name, tensor in zip(proto.graph.node[0].input, tensors, strict=True):
            if tensor is not None and tensor.nbytes <= _SHAPE_BYTES:
                with_data.graph.initializer.append(onnx.numpy_helper.from_array(tensor.numpy(), name))
        inferred = _inferred_outputs(with_data)
        if inferred is None:
            return None
        shapes = inferred
    sizes = [np.prod(shape, dtype=np.float64) for shape in shapes if shape is not None]
    widths = [value.dtype.itemsize if value.dtype else 8 for value in _used_outputs(node)]
    return int(max(size * width for size, width in zip(sizes, widths, strict=True)))


def _inferred_outputs(proto: onnx.ModelProto) -> list[tuple[int, ...] | None] | None:
    try:
        inferred = onnx.shape_inference.infer_shapes(proto, strict_mode=True, data_prop=True)
    except Exception as error:
        raise FoldError(f"its shape cannot be inferred: {' '.join(str(error).split())[:200]}") from error
    shapes: list[tuple[int, ...] | None] = []
    for info in inferred.graph.output:
        dims = info.type.tensor_type.shape.dim
        if not info.type.tensor_type.HasField("shape") or any(not dim.HasField("dim_value") for dim in dims):
            return None
        shapes.append(tuple(dim.dim_value for dim in dims))
    return shapes


def _as_array(result: Any, value: ir.Value) -> np.ndarray:
    if not isinstance(result, (np.ndarray, np.generic)):
        raise FoldError(f"{value.name} is not a tensor")
    array = np.asarray(result)
    shape = edit.static_shape(value)
    if shape is not None and array.shape != shape:
        raise FoldError(f"{value.name} evaluates to the shape {array.shape}, not {shape}")
    if value.dtype is not None and ir.DataType.from_numpy(array.dtype) != value.dtype:
        raise FoldError(f"{value.name} evaluates to {array.dtype}, its type is {value.dtype}")
    return np.ascontiguousarray(array).reshape(array.shape)


def constant_branch(node: ir.Node) -> ir.Graph | None:
    """The branch an ``If`` node always takes; None where the condition is not a constant."""
    if not is_op(node, "If"):
        return None
    condition = constant_of(node.inputs[0])
    if condition is None or condition.size != 1:
        return None
    return node.attributes["then_branch" if bool(condition.reshape(-1)[0]) else "else_branch"].as_graph()


def inline_branch(node: ir.Node, branch: ir.Graph, names: Names) -> list[ir.Node]:
    """Put the nodes of ``branch`` in place of the ``If`` node that holds it, in place.

    Names of its nodes and values are unique in the model.

    Returns:
        The nodes that moved into the graph around the ``If`` node, and the ``Identity`` nodes added for its outputs.
    """
    graph = graph_of(node)
    results = list(branch.outputs)
    branch.outputs.clear()
    for value in list(branch.initializers.values()):
        branch.initializers.pop(str(value.name))
        graph.register_initializer(value)
    moved = list(branch)
    branch.remove(moved)
    graph.insert_before(node, moved)
    for old, new in zip(node.outputs, results, strict=True):
        if not can_replace(old, new):
            identity = ir.node("Identity", [new], name=names.node(f"{old.name}_identity"))
            identity.outputs[0].name = names.value(f"{old.name}_identity")
            identity.outputs[0].type, identity.outputs[0].shape = old.type, old.shape
            graph.insert_before(node, identity)
            moved.append(identity)
            new = identity.outputs[0]
        replace_value(old, new)
    remove_node(node)
    return moved


def constant_branches(graph: ir.Graph) -> Iterator[tuple[ir.Node, ir.Graph]]:
    """``If`` nodes with a constant condition and the branch each takes; of nested ones the outermost.

    Nested ones may go with a branch that is dropped; look again after inlining.
    """
    for node in graph:
        branch = constant_branch(node)
        if branch is not None:
            yield node, branch
        else:
            for subgraph in subgraphs_of(node):
                yield from constant_branches(subgraph)
