"""Operators without a kernel of their own: ONNX defines them by others, and ONNX Runtime runs those."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import onnx
import onnx.defs
import onnx_ir as ir
import onnx_ir.passes.common as common_passes

from trtopt.graph.edit import all_nodes, subgraphs_of
from trtopt.source.opset import convert

_DOMAIN = "trtopt.expanded"


def expand(model: ir.Model, names: Collection[str]) -> int:
    """Put the definition that ONNX gives of an operator in the place of nodes of the default domain, in place.

    Args:
        model: The model; every node has a unique name.
        names: The nodes to replace; those whose operator has no definition by others stay. Their parts are called
            ``NAME_0``, ``NAME_1``, ...

    Returns:
        The number of nodes replaced.
    """
    opset = model.graph.opset_imports[""]
    for node in all_nodes(model.graph):
        body = _definition(node, opset) if node.name in names else None
        if body is None:
            continue
        function = ir.serde.deserialize_function(body)
        for name, attribute in _defaults(node, opset).items():
            node.attributes.setdefault(name, attribute)
        convert(function.graph, body.opset_import[0].version, opset)
        function.opset_imports[""] = opset
        for index, part in enumerate(all_nodes(function.graph)):
            part.name = f"{node.name}_{index}"
        function.domain = node.domain = _DOMAIN
        function.name = node.op_type = str(node.name)
        model.functions[function.identifier()] = function
    count = len(model.functions)
    if count:
        model.graph.opset_imports[_DOMAIN] = 1
        common_passes.InlinePass()(model)
        model.functions.clear()
        del model.graph.opset_imports[_DOMAIN]
    return count


def _definition(node: ir.Node, opset: int) -> onnx.FunctionProto | None:
    """The operator's definition by others, for this node; None without one, and for one that maps a nested graph."""
    if node.domain != "" or subgraphs_of(node) or not onnx.defs.has(node.op_type, opset, node.domain):
        return None
    schema: Any = onnx.defs.get_schema(node.op_type, opset, node.domain)
    body = onnx.FunctionProto()
    if schema.has_function:
        body.ParseFromString(schema.get_function_with_opset_version(_newest(schema.function_opset_versions, opset)))
        return body
    if not schema.has_context_dependent_function:
        return None
    version = _newest(schema.context_dependent_function_opset_versions, opset)
    types = [_type(value) for value in node.inputs]
    found = schema.get_context_dependent_function_with_opset_version(
        version, ir.serde.serialize_node(node).SerializeToString(), types
    )
    body.ParseFromString(found)
    return body if body.node else None


def _defaults(node: ir.Node, opset: int) -> dict[str, ir.Attr]:
    """What the attributes of a node's operator are where the node does not say; definitions refer to all of them."""
    attributes = onnx.defs.get_schema(node.op_type, opset, node.domain).attributes
    found = {name: attribute.default_value for name, attribute in attributes.items()}
    return {name: ir.serde.deserialize_attribute(value) for name, value in found.items() if value.name}


def _newest(versions: Sequence[int], opset: int) -> int:
    """The version of a definition that a model of ``opset`` uses."""
    return max(version for version in versions if version <= opset)


def _type(value: ir.Value | None) -> bytes:
    """A value's type as a serialised ``TypeProto``; empty where the input is left out."""
    proto = onnx.TypeProto()
    if value is not None and value.dtype is not None:
        proto.tensor_type.elem_type = int(value.dtype)
    serialized: bytes = proto.SerializeToString()
    return serialized
