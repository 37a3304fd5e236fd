"""Casts, as the precision rewrites insert them."""

from __future__ import annotations

import onnx_ir as ir

from trtopt.graph import edit

CAST_PREFIX = "trtopt/cast/"
"""Names of inserted Cast nodes start with it."""


def cast_node(value: ir.Value, dtype: ir.DataType, names: edit.Names, output: str) -> ir.Node:
    """A Cast of ``value`` to ``dtype``, not yet in a graph. ``output`` is taken as it is: ask ``names`` for it."""
    name = names.node(f"{CAST_PREFIX}{output}")
    node = edit.new_node("Cast", [value], name=name, output=output, attributes={"to": int(dtype)}, like=value)
    node.outputs[0].type = ir.TensorType(dtype)
    return node


def insert_behind(graph: ir.Graph, value: ir.Value, nodes: list[ir.Node]) -> None:
    """Put ``nodes`` right behind the producer of ``value``, or first in the graph when it has none there."""
    producer = value.producer()
    if producer is not None and producer.graph is graph:
        graph.insert_after(producer, nodes)
    elif len(graph) == 0:
        graph.extend(nodes)
    else:
        graph.insert_before(graph[0], nodes)
