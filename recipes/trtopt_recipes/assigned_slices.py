"""Tensors that are made empty, and assigned slice by slice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from trtopt.graph import edit
from trtopt.graph.permute import Perm
from trtopt.rewrite.protocol import Findings, Match, Refusal, Stage, Target

_MOST_ROWS = 1 << 16
_OTHER = "the slices that are assigned are neither every n-th entry nor one behind the other"


@dataclass(frozen=True)
class AssignedSlices:
    """Joins slices that are assigned to a tensor one after the other.

    Rewrite:
        y[..., 0::2] = a; y[..., 1::2] = b, exported as ScatterND(ScatterND(y, [0, 2, ...], a), [1, 3, ...], b) of
        transposed tensors, becomes Reshape(Concat(Unsqueeze(a), Unsqueeze(b))), and y[:, :n] = a; y[:, n:] = b
        becomes Concat(a, b). The Transposes that bring the axis to the front are left out where each slice has one.
    Requires:
        Constant indices of the first axis that cover it, each slice whole: every n-th entry, or runs of neighbours.
        Behind the axis at most one size that has to be computed. What is between is used once.
    Why faster:
        The compiler fills and copies a tensor, and writes each slice into it in a kernel of its own; a Concat is
        computed with what makes the slices. Diffusers' Wan rotates queries and keys so (two blocks, FP16, L4, second
        judge: 3010 -> 2362 us).
    Numerics:
        Exact.
    Refuses when:
        The slices cover the axis in another order, or overlap.
    """

    name: str = "assigned-slices"
    stage: Stage = Stage.CLEAN
    lossless: bool = True

    def find(self, model: ir.Model, target: Target) -> Findings:
        """Chains of ScatterND that cover the first axis, each the last node of one first."""
        chains = [chain for node in edit.all_nodes(model.graph) if (chain := _chain(node))]
        plans = [(Match(chain), _plan(chain)) for chain in chains]
        return Findings.of([(match, plan if isinstance(plan, str) else "") for match, plan in plans])

    def rewrite(self, model: ir.Model, match: Match) -> Refusal | None:
        """Join the slices of one tensor."""
        last, plan = match.nodes[0], _plan(match.nodes)
        if isinstance(plan, str) or last.graph is None:
            return Refusal(match.label, plan if isinstance(plan, str) else "it is gone by now")
        splice, joined = edit.Splice(model, last, self.name), list(plan.slices)
        if plan.shape:
            axis = splice.ints([plan.axis + 1], last.outputs[0], "axis")
            joined = [splice.fresh("Unsqueeze", value, axis, like=value) for value in joined]
        axes = {"axis": plan.axis + bool(plan.shape)}
        value = splice.fresh("Concat", *joined, attributes=axes)
        if plan.shape:
            shape = splice.ints(plan.shape, last.outputs[0], "shape")
            value = splice.fresh("Reshape", value, shape)
        splice.finish(splice.fresh("Transpose", value, attributes={"perm": plan.perm}) if plan.perm else value)
        for node in match.nodes[1:]:
            edit.remove_node(node)
        return None


@dataclass(frozen=True)
class _Plan:
    """What is joined along which axis; the shape of entries that alternate; how the result is transposed behind."""

    slices: tuple[ir.Value, ...]
    axis: int
    shape: tuple[int, ...]
    perm: Perm


def _chain(last: ir.Node) -> tuple[ir.Node, ...]:
    """The ScatterNDs that write to one tensor, the last first; empty where another one follows."""
    if not _is_assignment(last):
        return ()
    user = edit.only_user(last.outputs[0])
    if user is not None and _is_assignment(user) and user.inputs[0] is last.outputs[0]:
        return ()
    chain, value = [last], last.inputs[0]
    while value is not None and (node := value.producer()) is not None and _is_assignment(node):
        if edit.only_user(value) is None or node.graph is not last.graph:
            break
        chain.append(node)
        value = node.inputs[0]
    return tuple(chain)


def _is_assignment(node: ir.Node) -> bool:
    """Whether a ScatterND writes whole rows whose indices are constant."""
    if not edit.is_op(node, "ScatterND") or edit.string_attribute(node, "reduction", "none") != "none":
        return False
    indices = edit.constant_tensor_of(edit.input_of(node, 1))
    return indices is not None and len(indices.shape) == 2 and indices.shape[1] == 1


def _plan(chain: Sequence[ir.Node]) -> _Plan | str:
    """How the slices of a chain are joined, or why they are not."""
    made = chain[0].outputs[0]
    rows = None if made.shape is None else made.shape[0]
    slices = [node.inputs[2] for node in reversed(chain)]
    if made.shape is None or not isinstance(rows, int) or rows > _MOST_ROWS or None in slices:
        return "the length of the axis is not known"
    values = [value for value in slices if value is not None]
    indices = [_rows_of(node, rows) for node in reversed(chain)]
    order = sorted(range(len(indices)), key=lambda each: int(indices[each][0]))
    ranges, joined = [indices[each] for each in order], [values[each] for each in order]
    perm = _common_perm(joined)
    axis = perm[0] if perm else 0
    bare = tuple(_bare(value) for value in joined) if perm else tuple(joined)
    if np.array_equal(np.concatenate(ranges), np.arange(rows)):
        return _Plan(bare, axis, (), perm)
    if any(not np.array_equal(each, np.arange(at, rows, len(ranges))) for at, each in enumerate(ranges)):
        return _OTHER
    if rows % len(ranges):
        return _OTHER
    dims = list(made.shape) if not perm else [made.shape[perm.index(each)] for each in range(len(perm))]
    behind = [dim if isinstance(dim, int) else -1 for dim in dims[axis + 1 :]]
    if behind.count(-1) > 1 or 0 in behind:
        return "more than one size behind the axis has to be computed"
    return _Plan(bare, axis, (*[0] * axis, rows, *behind), perm)


def _rows_of(node: ir.Node, rows: int) -> np.ndarray:
    indices = edit.constant_of(node.inputs[1])
    return np.zeros(1, np.int64) if indices is None or not indices.size else indices.ravel() % rows


def _common_perm(values: Sequence[ir.Value]) -> Perm:
    """How all values are transposed; empty where one is not, or another way."""
    makers = [value.producer() for value in values]
    perms = {edit.ints_attribute(node, "perm") if edit.is_op(node, "Transpose") else None for node in makers if node}
    return (perms.pop() or ()) if len(perms) == 1 and None not in makers else ()


def _bare(value: ir.Value) -> ir.Value:
    node = value.producer()
    source = None if node is None else node.inputs[0]
    return value if source is None else source
