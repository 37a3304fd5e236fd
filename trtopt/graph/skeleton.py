"""Models as protobufs: without their weights for ONNX's C++ code, with all of them inside, or as a hash of all."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator

import onnx
import onnx_ir as ir

from trtopt.graph.edit import all_graphs, dims_of, is_op

KEPT_BYTES = 4096
"""Constants up to this size stay: shapes, axes and scales, which inference reads."""

_OMITTED = "omitted"

_INITIALIZERS_ALONE = 4
"""The first IR version whose initializers need not be inputs too."""


def skeleton(model: ir.Model) -> onnx.ModelProto:
    """``model`` as a protobuf whose large constants have their type and shape and no data.

    They are written as external tensors: that keeps them constants (also in nested graphs, which cannot have inputs),
    and ONNX's shape inference reads their type and shape only. ``model`` is without them while it is written: no other
    thread may read it then.
    """
    restore = _strip(model)
    try:
        return ir.to_proto(model)
    finally:
        restore()


def flat_skeleton(model: ir.Model, described: Iterable[ir.Value]) -> onnx.ModelProto:
    """As :func:`skeleton`, of a model without functions and nested graphs, with types and shapes of ``described``
    values only.

    Most of the time of :func:`skeleton` goes to values whose shapes are about to be inferred, and to what inference
    does not read. ``model`` stays as it is, so that other threads may read it.
    """
    graph = model.graph
    proto = onnx.ModelProto(ir_version=max(model.ir_version, _INITIALIZERS_ALONE))
    for domain, version in graph.opset_imports.items():
        proto.opset_import.add(domain=domain, version=version)
    proto.graph.name = graph.name or ""
    for values, made in (
        (graph.inputs, proto.graph.input),
        (graph.outputs, proto.graph.output),
        (described, proto.graph.value_info),
    ):
        for value in values:
            ir.serde.serialize_value_into(made.add(), value)
    for value in graph.initializers.values():
        tensor = value.const_value
        if tensor is not None and tensor.nbytes > KEPT_BYTES:
            held = proto.graph.initializer.add(
                name=value.name,
                data_type=tensor.dtype,
                dims=dims_of(tensor),
                data_location=onnx.TensorProto.EXTERNAL,
            )
            held.external_data.add(key="location", value=_OMITTED)
        elif tensor is not None:
            ir.serde.serialize_tensor_into(proto.graph.initializer.add(), tensor)
    light = {
        node: ir.AttrTensor("value", _without_data(node, tensor))
        for node, tensor in _constant_nodes(graph)
        if tensor.nbytes > KEPT_BYTES
    }
    for node in graph:
        made_node = proto.graph.node.add(
            op_type=node.op_type,
            domain=node.domain,
            name=node.name or "",
            input=["" if value is None else value.name or "" for value in node.inputs],
            output=[value.name or "" for value in node.outputs],
        )
        for attribute in node.attributes.data.values():
            ir.serde.serialize_attribute_into(made_node.attribute.add(), light.get(node, attribute))
    return proto


def _without_data(owner: ir.Value | ir.Node, tensor: ir.TensorProtocol) -> ir.ExternalTensor:
    """What stands for a large constant."""
    name = (owner.name if isinstance(owner, ir.Value) else tensor.name) or "value"
    return ir.ExternalTensor(_OMITTED, 0, tensor.nbytes, tensor.dtype, shape=ir.Shape(dims_of(tensor)), name=name)


def _strip(model: ir.Model) -> Callable[[], None]:
    """Take the data of large constants out of ``model``, in place; the function that is returned puts them back."""
    large = list(_large_constants(model))
    for owner, tensor in large:
        _put(owner, _without_data(owner, tensor))

    def restore() -> None:
        for owner, tensor in large:
            _put(owner, tensor)

    return restore


def _put(owner: ir.Value | ir.Node, tensor: ir.TensorProtocol) -> None:
    """Make a tensor that of an initializer or of a Constant node."""
    if isinstance(owner, ir.Value):
        owner.const_value = tensor
    else:
        owner.attributes["value"] = ir.AttrTensor("value", tensor)


def content_hash(model: ir.Model) -> str:
    """A hash, hex, of all that ``model`` computes with: its graph and its weights."""
    digest = hashlib.sha256(skeleton(model.clone()).SerializeToString(deterministic=True))
    for _, tensor in _large_constants(model):
        digest.update(tensor.tobytes())
    return digest.hexdigest()


def _large_constants(model: ir.Model) -> Iterator[tuple[ir.Value | ir.Node, ir.TensorProtocol]]:
    """Initializers and Constant nodes with tensors that a skeleton leaves out."""
    for graph in [*all_graphs(model.graph), *(g for f in model.functions.values() for g in all_graphs(f.graph))]:
        yield from ((owner, tensor) for owner, tensor in _constants(graph) if tensor.nbytes > KEPT_BYTES)


def _constants(graph: ir.Graph) -> Iterator[tuple[ir.Value | ir.Node, ir.TensorProtocol]]:
    for value in list(graph.initializers.values()):
        if value.const_value is not None:
            yield value, value.const_value
    yield from _constant_nodes(graph)


def _constant_nodes(graph: ir.Graph) -> Iterator[tuple[ir.Node, ir.TensorProtocol]]:
    for node in graph:
        attribute = node.attributes.get("value") if is_op(node, "Constant") else None
        if attribute is not None and not attribute.is_ref():
            yield node, attribute.as_tensor()


def embed(model: ir.Model, *, initializers: bool = True) -> None:
    """Make memory-mapped tensors of ``model`` ordinary ones, in place, so that its protobuf holds their data.

    A protobuf that still names weight files can be read only beside those files.

    Args:
        model: A clone the caller owns; the mapped files themselves are not copied here.
        initializers: False leaves initializers as they are, and embeds the constants in node attributes only.
    """
    for graph in all_graphs(model.graph):
        for owner, tensor in _constants(graph):
            if isinstance(tensor, ir.ExternalTensor) and (initializers or isinstance(owner, ir.Node)):
                _put(owner, ir.Tensor(tensor.numpy(), dtype=tensor.dtype, name=tensor.name))
