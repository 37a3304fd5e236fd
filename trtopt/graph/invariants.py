"""What must hold for a graph after every edit."""

from __future__ import annotations

import itertools

import onnx_ir as ir

from trtopt.graph.edit import subgraphs_of


class InvariantError(RuntimeError):
    """An edit left the graph broken: a bug of the code that made the edit, never of the user's model."""


Signature = tuple[tuple[tuple[str, str, str], ...], ...]
"""A model's inputs, then its outputs: name, dtype and shape of each, in order."""


def signature(model: ir.Model) -> Signature:
    """What callers of the model see."""
    return tuple(tuple(map(_describe, values)) for values in (model.graph.inputs, model.graph.outputs))


def check(model: ir.Model, expected: Signature | None = None) -> None:
    """Check that the model is well formed: sorted, no dangling input, unique names, outputs produced.

    Raises:
        InvariantError: It names what is broken.
    """
    names: set[str] = set()
    nodes: set[str] = set()
    _check_graph(model.graph, frozenset(), names, nodes)
    for value in model.graph.outputs:
        if value.is_initializer() and value.is_graph_input():
            raise InvariantError(f"{value.name} is graph input, output and initializer at once")
    if expected is not None and (found := signature(model)) != expected:
        raise InvariantError(f"inputs or outputs changed: {_difference(expected, found)}")


def _check_graph(graph: ir.Graph, outer: frozenset[ir.Value], names: set[str], nodes: set[str]) -> None:
    known: set[ir.Value] = set(outer)
    for value in (*graph.inputs, *(v for v in graph.initializers.values() if not v.is_graph_input())):
        _claim(value.name, names, "value")
        known.add(value)
    for node in graph:
        if node.graph is not graph:
            raise InvariantError(f"node {node.name} does not know its graph")
        _claim(node.name, nodes, "node")
        for used in node.inputs:
            if used is not None and used not in known:
                raise InvariantError(f"input {used.name} of node {node.name} is not defined before it")
        for subgraph in subgraphs_of(node):
            _check_graph(subgraph, frozenset(known), names, nodes)
        for value in node.outputs:
            if value.name:
                _claim(value.name, names, "value")
            known.add(value)
    for value in graph.outputs:
        if value not in known:
            raise InvariantError(f"graph output {value.name} is not produced in graph {graph.name}")


def _claim(name: str | None, taken: set[str], what: str) -> None:
    if not name:
        raise InvariantError(f"a {what} has no name")
    if name in taken:
        raise InvariantError(f"two {what}s are named {name}")
    taken.add(name)


def _describe(value: ir.Value) -> tuple[str, str, str]:
    dims = "?" if value.shape is None else ",".join(str(dim) for dim in value.shape)
    return str(value.name), str(value.dtype), dims


def _difference(expected: Signature, found: Signature) -> str:
    before, after = (tuple(itertools.chain(*each)) for each in (expected, found))
    if len(before) != len(after):
        return f"{len(before)} before, {len(after)} after"
    return "; ".join(f"{old} became {new}" for old, new in zip(before, after, strict=True) if old != new)
