"""Branches that are always taken."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from trtopt.graph.edit import Names, tag
from trtopt.graph.fold import constant_branch, constant_branches, inline_branch
from trtopt.rewrite.protocol import Findings, Match, Refusal, Stage, Target


@dataclass(frozen=True)
class ConstantBranch:
    """Replaces an If whose condition is a constant by the branch it takes.

    Rewrite:
        y = If(constant, then, else) becomes the nodes of the branch taken.
    Requires:
        The condition is an initializer or a Constant of one element.
    Why faster:
        The branch fuses with what is around it; a condition at run time is a synchronization, and keeps shapes dynamic.
    Numerics:
        Exact.
    Refuses when:
        Never.
    """

    name: str = "constant-branch"
    stage: Stage = Stage.FOLD
    lossless: bool = True

    def find(self, model: ir.Model, target: Target) -> Findings:
        """If nodes with a constant condition; of nested ones the outermost, as it may drop the others."""
        return Findings(tuple(Match((node,)) for node, _ in constant_branches(model.graph)))

    def rewrite(self, model: ir.Model, match: Match) -> Refusal | None:
        """Inline the branch taken."""
        node = match.nodes[0]
        branch = constant_branch(node)
        if branch is None or node.graph is None:
            return Refusal(match.label, "its condition is not a constant")
        for moved in inline_branch(node, branch, Names(model)):
            tag(moved, self.name)
        return None
