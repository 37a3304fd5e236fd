"""Nodes and weights that nothing uses."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from trtopt.graph.edit import all_graphs, remove_node, subgraphs_of
from trtopt.rewrite.protocol import Findings, Match, Refusal, Stage, Target


@dataclass(frozen=True)
class DeadNode:
    """Removes nodes and initializers that no output of the model depends on.

    Rewrite:
        A node none of whose outputs is used, in a graph or by a graph around or inside it, is dropped; so is a
        constant nothing reads.
    Requires:
        No output is a graph output. ONNX operators have no side effects.
    Why faster:
        Nothing is computed in vain, and the file is smaller.
    Numerics:
        Exact.
    Refuses when:
        Never.
    """

    name: str = "dead-node"
    stage: Stage = Stage.CLEAN
    lossless: bool = True

    def find(self, model: ir.Model, target: Target) -> Findings:
        """Dead nodes, users before what they use; then constants nothing reads."""
        dead: set[ir.Node] = set()
        order: list[ir.Node] = []
        _collect(model.graph, dead, order)
        matches = [Match((node,)) for node in order]
        for graph in all_graphs(model.graph):
            for value in graph.initializers.values():
                used = any(node not in dead for node, _ in value.uses())
                if not used and not value.is_graph_output() and not value.is_graph_input():
                    matches.append(Match((), (value,)))
        return Findings(tuple(matches))

    def rewrite(self, model: ir.Model, match: Match) -> Refusal | None:
        """Remove one node or one constant."""
        for node in match.nodes:
            remove_node(node)
        for value in match.values:
            if value.graph is not None:
                value.graph.initializers.pop(str(value.name))
        return None


def _collect(graph: ir.Graph, dead: set[ir.Node], order: list[ir.Node]) -> None:
    """Add the dead nodes of ``graph``, last first; the nodes nested in a dead one go with it."""
    for node in reversed(graph):
        if all(_is_unused(value, dead) for value in node.outputs):
            dead.add(node)
            dead.update(inner for subgraph in subgraphs_of(node) for g in all_graphs(subgraph) for inner in g)
            order.append(node)
            continue
        for subgraph in subgraphs_of(node):
            _collect(subgraph, dead, order)


def _is_unused(value: ir.Value, dead: set[ir.Node]) -> bool:
    return not value.is_graph_output() and all(node in dead for node, _ in value.uses())
