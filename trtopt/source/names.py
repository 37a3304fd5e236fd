"""A unique name for every node and value."""

from __future__ import annotations

import re

import onnx_ir as ir

from trtopt.graph.edit import all_graphs

_UNSAFE = re.compile(r"[\x00-\x1f\x7f\[\]]")
"""TensorRT writes node names into its layer list between brackets, one layer per line."""


def name_everything(model: ir.Model) -> int:
    """Give every node and every value of ``model`` a name no other has, in place; the number of names that changed.

    Names that are unique and readable stay. A node without a name gets TensorRT's own: ``node_of_`` and its first
    output. The names of the model's inputs and outputs never change. Node and value names are independent.
    """
    changed = 0
    fixed = {str(value.name) for value in (*model.graph.inputs, *model.graph.outputs)}
    wanted = {str(value.name) for value in _values(model) if value.name}
    taken = set(fixed)
    for value in _values(model):
        if value.name in fixed and _is_border(value, model.graph):
            continue
        name = _free(_clean(str(value.name or "value")), taken, wanted)
        if name != value.name:
            value.name = name
            changed += 1
    wanted = {str(node.name) for graph in all_graphs(model.graph) for node in graph if node.name}
    taken = set()
    for graph in all_graphs(model.graph):
        for node in graph:
            name = _free(_clean(node.name or f"node_of_{_first_output(node)}"), taken, wanted)
            if name != node.name:
                node.name = name
                changed += 1
    return changed


def _values(model: ir.Model) -> list[ir.Value]:
    """Values that need a name: outputs left out of a node have none and keep none."""
    values: dict[ir.Value, None] = {}
    for graph in all_graphs(model.graph):
        values.update(dict.fromkeys((*graph.inputs, *graph.initializers.values())))
        for node in graph:
            values.update(dict.fromkeys(v for v in node.outputs if v.name or v.uses() or v.is_graph_output()))
    return list(values)


def _is_border(value: ir.Value, graph: ir.Graph) -> bool:
    return value.graph is graph and (value.is_graph_input() or value.is_graph_output())


def _first_output(node: ir.Node) -> str:
    return next((str(value.name) for value in node.outputs if value.name), node.op_type)


def _clean(name: str) -> str:
    return _UNSAFE.sub("_", name)


def _free(base: str, taken: set[str], wanted: set[str]) -> str:
    """``base`` the first time; then the first numbered form that nothing has or is about to keep."""
    name, number = base, 0
    while name in taken or (number > 0 and name in wanted):
        number += 1
        name = f"{base}_{number}"
    taken.add(name)
    return name
