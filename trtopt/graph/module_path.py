"""The module of PyTorch that a node was exported from."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping

import onnx_ir as ir

from trtopt.report.schema.layers import NodeName

_SCOPES = "pkg.torch.onnx.name_scopes"
"""Where ``torch.onnx.export(dynamo=True)`` writes the paths of the modules around a node, outermost first, and the name
of the operation: ``['', 'layer1', 'layer1.0', 'layer1.0.conv1', 'conv2d_3']``."""
_NAMESPACE = "namespace"
"""The same with the classes: ``: Net/layer1: torch.nn.Sequential/layer1.0: Block/conv2d_3: aten.conv2d.default``."""
_NO_MODULE = "_empty_nn_module_stack"
"""What torch writes for sizes, which no module computes, begins so."""
_WEIGHT = re.compile(r"(.+)\.weight(?:_\w+)?")


def module_of(node_name: str) -> str:
    """The path of the module a node was exported from, from the name that ``dynamo=False`` gives it.

    ``/layer1/layer1.0/conv1/Conv`` is the operator Conv of ``layer1.0.conv1``: a segment is repeated by the next one,
    with a dot, where a container holds it. The second call of a module has ``_1`` behind its name, which a name alone
    cannot tell from a module that is called so.

    Returns:
        Empty for the outermost module, and for names without a path (``Conv_0``, ``node_conv2d_1``).
    """
    if not node_name.startswith("/"):
        return ""
    segments = node_name[1:].split("/")[:-1]
    following = [*segments, ""][1:]
    kept = [part for part, after in zip(segments, following, strict=True) if not after.startswith(f"{part}.")]
    return ".".join(part for part in kept if part)


def module_of_node(node: ir.Node) -> str:
    """The path of the module a node was exported from: of its metadata, else of its name; empty where neither tells.

    A convolution into which a normalization was folded has the metadata of the normalization: the module beside it
    that has the weight is its own.
    """
    scopes = _scopes(node.metadata_props.get(_SCOPES, "")) or _namespace(node.metadata_props.get(_NAMESPACE, ""))
    found = scopes[-2] if len(scopes) > 1 else module_of(node.name or "")
    found = "" if found.startswith(_NO_MODULE) else found
    weight = (
        _WEIGHT.fullmatch(str(node.inputs[1].name)) if len(node.inputs) > 1 and node.inputs[1] is not None else None
    )
    if weight is None or (found and _parent(weight[1]) != _parent(found)):
        return found
    return weight[1]


def names_of(model: ir.Model, rewritten: ir.Model | None = None) -> dict[str, NodeName]:
    """The modules and operators of the nodes that come from one, by the nodes' names.

    Args:
        model: The model as it was exported.
        rewritten: What was made of it. A node without a module of its own has that of the node that made its output
            before, else that of the node whose output it reads.

    Example:
        >>> names_of(model)["node_conv2d_3"].module
        'layer1.0.conv1'
    """
    of_value: dict[str, str] = {}
    found: dict[str, NodeName] = {}
    for graph in (model.graph,) if rewritten is None else (model.graph, rewritten.graph):
        for node in graph:
            known = found.get(node.name or "")
            module = known.module if known is not None else module_of_node(node) or _inherited(node, of_value)
            of_value |= {str(value.name): module for value in node.outputs}
            if module and node.name:
                found[node.name] = NodeName(module, node.op_type)
    return found


def _inherited(node: ir.Node, of_value: Mapping[str, str]) -> str:
    names = (value.name for value in (*node.outputs, *node.inputs) if value is not None)
    return next((module for name in names if (module := of_value.get(str(name)))), "")


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


def _scopes(text: str) -> list[str]:
    """The list of texts that a metadata property holds in Python's notation; empty if it does not."""
    if not text:
        return []
    try:
        found = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return []
    return found if isinstance(found, list) and all(isinstance(item, str) for item in found) else []


def _namespace(text: str) -> list[str]:
    """The paths of ``PATH: CLASS/PATH: CLASS/...``."""
    return [part.partition(": ")[0] for part in text.split("/")] if ": " in text else []
