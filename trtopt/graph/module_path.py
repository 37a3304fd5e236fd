"""The module of PyTorch that a node was exported from."""

from __future__ import annotations

import ast

import onnx_ir as ir

_SCOPES = "pkg.torch.onnx.name_scopes"
"""Where ``torch.onnx.export(dynamo=True)`` writes the paths of the modules around a node, outermost first, and the name
of the operation: ``['', 'layer1', 'layer1.0', 'layer1.0.conv1', 'conv2d_3']``."""


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
    """The path of the module a node was exported from: of its metadata, else of its name; empty where neither tells."""
    scopes = _scopes(node.metadata_props.get(_SCOPES, ""))
    return scopes[-2] if len(scopes) > 1 else module_of(node.name or "")


def _scopes(text: str) -> list[str]:
    """The list of texts that a metadata property holds in Python's notation; empty if it does not."""
    try:
        found = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return []
    return found if isinstance(found, list) and all(isinstance(item, str) for item in found) else []
