"""``If`` nodes whose condition is a constant."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from trtopt.graph.edit import Names, can_replace, constant_of, graph_of, is_op, remove_node, replace_value, subgraphs_of


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

    Args:
        node: The ``If`` node; it is removed.
        branch: One of its branches. Names of its nodes and values are unique in the model.
        names: The names taken in the model.

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
