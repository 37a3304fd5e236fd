"""The recipes that ship with trtopt, one per file."""

from __future__ import annotations

from trtopt_recipes.batch_norm import BatchNorm
from trtopt_recipes.constant_branch import ConstantBranch
from trtopt_recipes.constant_expression import ConstantExpression
from trtopt_recipes.dead_node import DeadNode
from trtopt_recipes.identity import Identity
from trtopt_recipes.no_op import NoOp

PACK = (Identity(), NoOp(), DeadNode(), ConstantExpression(), ConstantBranch(), BatchNorm())
"""In canonical order: cheap removals first, so that later recipes see fewer nodes."""
