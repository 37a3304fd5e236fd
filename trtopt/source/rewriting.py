"""Operators of ONNX Runtime, and fused ones of ONNX, in operators that every stage and every compiler knows."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from trtopt.graph import edit
from trtopt.graph.shapes import infer_in_place
from trtopt.source import attention
from trtopt.source.written import Writer, WritingError

_Rule = Callable[[Writer], None]

_RULES: dict[tuple[str, str], _Rule] = {
    ("", "Attention"): attention.standard,
}
"""By domain and operator."""


def write_out(model: ir.Model) -> list[str]:
    """Replace the nodes that have a rule, in place; what was replaced, in words.

    A node that its rule cannot write stays as it is: whether a backend takes it is for the backend to say.
    """
    nodes = [node for node in edit.all_nodes(model.graph) if (node.domain, node.op_type) in _RULES]
    if not nodes:
        return []
    infer_in_place(model)
    written, kept = dict[str, int](), list[str]()
    for node in nodes:
        writer = Writer(node)
        try:
            _RULES[node.domain, node.op_type](writer)
        except WritingError as error:
            writer.take_back()
            kept.append(f"{node.op_type} {node.name or node.outputs[0].name} stays: {error}")
            continue
        written[node.op_type] = written.get(node.op_type, 0) + 1
    return [*(f"{count} {op_type} written in other operators" for op_type, count in written.items()), *kept]
