"""Transposes of transposes."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from trtopt.graph import edit
from trtopt.rewrite.protocol import Findings, Match, Refusal, Stage, Target

_LONGEST = 8
"""Longer chains take several rounds."""


@dataclass(frozen=True)
class TransposePair:
    """Merges consecutive Transposes, and removes those that undo each other.

    Rewrite:
        Transpose_q(Transpose_p(x)) = Transpose_r(x) with r[i] = p[q[i]], and x itself where r moves nothing.
    Requires:
        The Transposes between are used once, or the chain ends where it began (those used elsewhere then stay).
    Why faster:
        A Transpose is a copy of the whole tensor unless the compiler fuses it; two that cancel are none.
    Numerics:
        Exact.
    Refuses when:
        Never: a chain that merging does not shorten is no match.
    """

    name: str = "transpose-pair"
    stage: Stage = Stage.CLEAN
    lossless: bool = True

    def find(self, model: ir.Model, target: Target) -> Findings:
        """Chains of Transposes, each named after its last node."""
        matches = []
        ends: set[ir.Node] = set()
        for node in edit.all_nodes(model.graph):
            chain = _chain(node)
            # What one match removes is not part of another.
            if len(chain) > 1 and ends.isdisjoint(chain):
                ends.add(node)
                matches.append(Match(tuple(chain)))
        return Findings(tuple(matches))

    def rewrite(self, model: ir.Model, match: Match) -> Refusal | None:
        """Replace one chain by one Transpose or none."""
        last, source, perm = match.nodes[0], match.nodes[-1].inputs[0], _composed(match.nodes)
        if source is None or perm is None:
            return Refusal(match.label, "it has no permutation")
        if perm != tuple(sorted(perm)):
            splice = edit.Splice(model, last, self.name)
            splice.finish(splice.op("Transpose", source, attributes={"perm": perm}))
        elif edit.can_replace(last.outputs[0], source):
            edit.replace_value(last.outputs[0], source)
            edit.remove_node(last)
        else:
            return Refusal(match.label, "its input became a graph output")
        for item in match.nodes[1:]:
            if item.outputs[0].uses() or item.outputs[0].is_graph_output():
                break
            edit.remove_node(item)
        return None


def _chain(last: ir.Node) -> list[ir.Node]:
    """Transposes to merge, ``last`` first; shorter than two where there is nothing to gain."""
    if not _is_transpose(last):
        return []
    found, single = [last], 1
    while len(found) < _LONGEST:
        value = found[-1].inputs[0]
        node = edit.maker_of(value)
        if value is None or node is None or node.graph is not last.graph or not _is_transpose(node):
            break
        if len(value.uses()) == 1 and not value.is_graph_output() and single == len(found):
            single += 1
        found.append(node)
    for length in range(len(found), 1, -1):
        perm, source = _composed(found[:length]), found[length - 1].inputs[0]
        if perm == tuple(sorted(perm or ())) and source is not None and edit.can_replace(last.outputs[0], source):
            return found[:length]
    moves = _composed(found[:single]) != tuple(range(len(edit.ints_attribute(last, "perm") or ())))
    return found[:single] if moves and not _continues(last) else []


def _is_transpose(node: ir.Node) -> bool:
    return (
        edit.is_op(node, "Transpose")
        and edit.input_of(node, 0) is not None
        and edit.ints_attribute(node, "perm") is not None
    )


def _continues(node: ir.Node) -> bool:
    """Whether a longer chain ends with the only user of ``node``."""
    value = node.outputs[0]
    users = [user for user, _ in value.uses()]
    return len(users) == 1 and not value.is_graph_output() and users[0].graph is node.graph and _is_transpose(users[0])


def _composed(chain: tuple[ir.Node, ...] | list[ir.Node]) -> tuple[int, ...] | None:
    """The permutation of the whole chain, last node first."""
    perm: tuple[int, ...] | None = None
    for node in chain:
        step = edit.ints_attribute(node, "perm")
        if step is None:
            return None
        perm = step if perm is None else tuple(step[axis] for axis in perm)
    return perm
