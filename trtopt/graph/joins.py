"""Where branches that begin at values meet again."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import onnx_ir as ir

LIMIT = 64
"""Nodes looked at: more than the branches of known blocks have."""


def nodes_until(starts: Iterable[ir.Value], is_end: Callable[[ir.Node], bool]) -> tuple[ir.Node, ...]:
    """The nodes on every path from ``starts`` to the nearest nodes that satisfy ``is_end``, those included.

    A piece of the graph that holds them shows what the tensors are used for, instead of ending where they branch.

    Returns:
        The nodes; none where no end is reached, or more than :data:`LIMIT` nodes lie on the way.
    """
    came_from: dict[ir.Node, list[ir.Node | None]] = {}
    ends: list[ir.Node] = []
    front = list(starts)
    while front:
        value = front.pop(0)
        for user, _ in value.uses():
            if user in came_from:
                came_from[user].append(value.producer())
                continue
            came_from[user] = [value.producer()]
            if len(came_from) > LIMIT:
                return ()
            if is_end(user):
                ends.append(user)
            else:
                front += user.outputs
    kept: set[ir.Node | None] = set()
    stack: list[ir.Node | None] = [*ends]
    while stack:
        node = stack.pop()
        if node is not None and node in came_from and node not in kept:
            kept.add(node)
            stack += came_from[node]
    return tuple(node for node in came_from if node in kept)
