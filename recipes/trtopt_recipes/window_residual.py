"""Blocks that work on windows of a map, and the residual around them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from trtopt.graph import edit
from trtopt.rewrite.protocol import Findings, Match, Refusal, Stage, Target

_STAND_INS = (2, 3)
"""Batches with which moves are followed where it is dynamic."""

_Rows = np.ndarray
_Move = Callable[[_Rows], _Rows]


@dataclass(frozen=True)
class _Step:
    """What moves whole rows: one node, or the two Slices and the Concat of a roll.

    Attributes:
        nodes: Those that read the data first, the one that makes the output last.
        move: What it makes of row numbers [..., 1].
    """

    nodes: tuple[ir.Node, ...]
    move: _Move

    @property
    def source(self) -> ir.Value | None:
        """What it moves."""
        return self.nodes[0].inputs[0]

    @property
    def output(self) -> ir.Value:
        """The rows in their new order."""
        return self.nodes[-1].outputs[0]

    def read(self, value: ir.Value) -> None:
        """Move ``value`` instead."""
        for node in self.nodes[: max(len(self.nodes) - 1, 1)]:
            node.replace_input_with(0, value)


@dataclass(frozen=True)
class _Plan:
    """One residual around windows.

    Attributes:
        add: Adds what the windows give to ``residual``.
        before: Nodes that treat every row alike, from ``residual`` to the moves into windows.
        into: The moves into windows.
        back: The moves back.
        after: Nodes that treat every row alike, from those to ``add``.
    """

    add: ir.Node
    residual: ir.Value
    before: tuple[ir.Node, ...]
    into: tuple[_Step, ...]
    back: tuple[_Step, ...]
    after: tuple[ir.Node, ...]

    @property
    def nodes(self) -> tuple[ir.Node, ...]:
        """All of them, ``add`` first."""
        moves = (node for step in (*self.into, *self.back) for node in step.nodes)
        return (self.add, *self.before, *moves, *self.after)


@dataclass(frozen=True)
class WindowResidual:
    """Adds the residual around windows in the windows, and cuts them before the normalization.

    Rewrite:
        x + back(f(into(norm(x)))) = back(w + f(norm(w))) with w = into(x): a normalization over the features treats
        every token alike, wherever it lies; likewise x + norm(back(f(into(x)))), as in Swin V2.
    Requires:
        Reshape, Transpose and rolls (two Slices and a Concat) that move tokens and leave their features together;
        the moves back undo those into windows, for every batch. Between them and the residual only normalizations over
        the last axis, and additions and products with constants per feature.
    Why faster:
        A kernel of TensorRT for RTX reads in any order and normalizes, but does not normalize and write in another:
        where windows are cut behind a normalization, this one takes two kernels with an FP32 tensor between them. The
        projections of attention then read the normalization, so that it can carry their biases (normalized-qkv-bias).
        Swin-T of eight blocks, batch 8, with merged-projection and batch-first-attention: 81 -> 72 kernels and 770 ->
        625 MB; 3372 -> 2746 us by a plain roofline of an L4.
    Numerics:
        Exact: the same sums of the same numbers.
    Refuses when:
        The moves back do not undo the others. No match where windows are padded, a value between is used elsewhere, or
        more than the first dimension is dynamic.
    """

    name: str = "window-residual"
    stage: Stage = Stage.FUSE
    lossless: bool = True

    def find(self, model: ir.Model, target: Target) -> Findings:
        """Additions of what windows give to what they were cut from."""
        matches, refusals = [], []
        for node in edit.all_nodes(model.graph):
            found = _plan(node)
            if isinstance(found, Refusal):
                refusals.append(found)
            elif found is not None:
                matches.append(Match(found.nodes))
        return Findings(tuple(matches), tuple(refusals))

    def rewrite(self, model: ir.Model, match: Match) -> Refusal | None:
        """Turn one residual around."""
        plan = _plan(match.nodes[0])
        if not isinstance(plan, _Plan):
            return Refusal(match.label, "it has changed since it was found")
        windows = plan.into[-1].output
        _put(plan.before, windows, windows)
        plan.into[0].read(plan.residual)
        given = plan.back[0].source
        if given is None:
            raise ValueError("the moves back read nothing")
        ends = plan.back[-1].output
        _put(plan.after, given, ends)
        for index, value in enumerate(plan.add.inputs):
            plan.add.replace_input_with(index, windows if value is plan.residual else given if value is ends else value)
        total = plan.add.outputs[0]
        edit.replace_value(total, ends)
        plan.back[0].read(total)
        total.shape = None if windows.shape is None else windows.shape.copy()
        edit.tag(plan.add, self.name)
        edit.graph_of(plan.add).sort()
        return None


def _put(nodes: tuple[ir.Node, ...], source: ir.Value, old: ir.Value) -> None:
    """Let a chain read ``source``, and what read ``old`` read the end of the chain."""
    if not nodes:
        return
    last = nodes[-1].outputs[0]
    readers = [(node, index) for node, index in old.uses() if node is not nodes[0]]
    for node in nodes:
        node.outputs[0].shape = None if source.shape is None else source.shape.copy()
    nodes[0].replace_input_with(_data_index(nodes[0]), source)
    for node, index in readers:
        node.replace_input_with(index, last)


def _plan(add: ir.Node) -> _Plan | Refusal | None:
    """What to turn around at an Add; a refusal where its moves do not undo each other, None where it is no residual."""
    if not edit.is_op(add, "Add") or not isinstance(add.graph, ir.Graph) or add.inputs[0] is add.inputs[1]:
        return None
    for residual, given in (add.inputs, add.inputs[::-1]):
        if residual is None or given is None or not _is_alike(residual, given):
            continue
        after = _rowwise_before(given)
        start = edit.input_of(after[0], _data_index(after[0])) if after else given
        back = _moves_to(start)
        if start is None or not _reorders(back):
            continue
        for user in dict.fromkeys(user for user, _ in residual.uses()):
            before, into = _into_windows(residual, user)
            if user is add or not _reorders(into) or not _is_alike(into[-1].output, back[0].source):
                continue
            if _undoes(residual, (*into, *back)):
                return _Plan(add, residual, before, into, back, after)
            return Refusal(str(add.name), f"{back[0].nodes[0].name} and what follows do not undo the moves before them")
    return None


def _into_windows(residual: ir.Value, user: ir.Node) -> tuple[tuple[ir.Node, ...], tuple[_Step, ...]]:
    """From what is added, over ``user``: nodes that treat every row alike, then moves."""
    before: list[ir.Node] = []
    value, node = residual, user
    while _is_rowwise(node) and node.inputs[_data_index(node)] is value:
        before.append(node)
        value, following = node.outputs[0], edit.only_user(node.outputs[0])
        if following is None:
            break
        node = following
    into: list[_Step] = []
    while (step := _step_from(value, node if value is residual else None)) is not None:
        into.append(step)
        value = step.output
    return tuple(before), tuple(into) if into and not into[-1].output.is_graph_output() else ()


def _rowwise_before(value: ir.Value) -> tuple[ir.Node, ...]:
    """Nodes that treat every row alike, up to the one that makes ``value``."""
    found: list[ir.Node] = []
    current: ir.Value | None = value
    while current is not None and (node := current.producer()) is not None:
        if edit.only_user(current) is None or not _is_rowwise(node):
            break
        found.insert(0, node)
        current = node.inputs[_data_index(node)]
    return tuple(found)


def _moves_to(value: ir.Value | None) -> tuple[_Step, ...]:
    """The moves that make ``value``, each read by the next alone."""
    found: list[_Step] = []
    while value is not None and (node := value.producer()) is not None:
        step, readers = _step_at(node), {user for user, _ in value.uses()}
        is_alone = readers <= set(found[0].nodes) if found else len(readers) == 1
        if step is None or value.is_graph_output() or not is_alone:
            break
        found.insert(0, step)
        value = step.source
    return tuple(found)


def _step_from(value: ir.Value, first: ir.Node | None) -> _Step | None:
    """The move that alone reads ``value``, or that ``first`` is part of."""
    users = [first] if first is not None else list(dict.fromkeys(user for user, _ in value.uses()))
    if value.is_graph_output() and first is None:
        return None
    if edit.is_op(users[0] if users else None, "Slice"):
        joined = edit.only_user(users[0].outputs[0])
        step = None if joined is None else _step_at(joined)
    else:
        step = _step_at(users[0]) if len(users) == 1 else None
    if step is None or step.source is not value:
        return None
    return step if first is not None or set(users) <= set(step.nodes) else None


def _step_at(node: ir.Node) -> _Step | None:
    """The move that ends with ``node``, if it leaves the last axis as it is."""
    source = edit.input_of(node, 0)
    if edit.is_op(node, "Concat"):
        return _roll(node)
    width = _width(source)
    if source is None or width is None or width != _width(node.outputs[0]):
        return None
    if edit.is_op(node, "Transpose"):
        perm = edit.ints_attribute(node, "perm")
        if perm is None or perm[-1] != len(perm) - 1:
            return None
        return _Step((node,), lambda rows: rows.transpose(perm))
    shape = edit.constant_of(edit.input_of(node, 1)) if edit.is_op(node, "Reshape") else None
    if shape is None:
        return None
    dims, copies = [int(dim) for dim in shape], not edit.int_attribute(node, "allowzero", 0)

    def reshaped(rows: _Rows) -> _Rows:
        known = [rows.shape[axis] if dim == 0 and copies else dim for axis, dim in enumerate(dims)]
        return rows.reshape([*known[:-1], 1])

    return _Step((node,), reshaped)


def _roll(concat: ir.Node) -> _Step | None:
    """A Concat of the end and the start of one value, along an axis before the last."""
    slices = [edit.maker_of(value) for value in concat.inputs]
    rank = 0 if concat.outputs[0].shape is None else len(concat.outputs[0].shape)
    axis = edit.int_attribute(concat, "axis", 0)
    if len(slices) != 2 or rank < 2 or axis % rank == rank - 1:
        return None
    axis, parts = axis % rank, []
    for part in slices:
        if not edit.is_op(part, "Slice") or edit.only_user(part.outputs[0]) is not concat:
            return None
        operands = [edit.constant_of(edit.input_of(part, index)) for index in (1, 2, 3)]
        steps = edit.constant_of(edit.input_of(part, 4))
        if any(array is None or array.size != 1 for array in operands) or (steps is not None and (steps != 1).any()):
            return None
        if edit.input_of(part, 4) is not None and steps is None:
            return None
        start, end, along = (int(array.ravel()[0]) for array in operands if array is not None)
        if along % rank != axis:
            return None
        parts.append(slice(start, end))
    first, second = (node for node in slices if node is not None)
    source, size = first.inputs[0], concat.outputs[0].shape
    if source is None or source is not second.inputs[0] or size is None or not isinstance(size[axis], int):
        return None
    lead = (slice(None),) * axis
    return _Step(
        (first, second, concat), lambda rows: np.concatenate([rows[(*lead, part)] for part in parts], axis=axis)
    )


def _is_rowwise(node: ir.Node | None) -> bool:
    """Whether ``node`` treats every row of the last axis alike, whatever axes there are before it."""
    if node is None or any(value.uses() or value.is_graph_output() for value in node.outputs[1:]):
        return False
    output = node.outputs[0]
    if edit.is_op(node, "LayerNormalization", "RMSNormalization"):
        rank = 0 if output.shape is None else len(output.shape)
        scales = [edit.constant_of(value) for value in node.inputs[1:] if value is not None]
        is_plain = all(array is not None and array.ndim == 1 for array in scales)
        return is_plain and edit.int_attribute(node, "axis", -1) in (-1, rank - 1)
    return edit.is_op(node, "Add", "Mul") and _data_index(node) >= 0 and not output.is_graph_output()


def _data_index(node: ir.Node) -> int:
    """Which input of a node that treats rows alike holds them; -1 where the other is no constant per feature."""
    if not edit.is_op(node, "Add", "Mul"):
        return 0
    constants = [edit.constant_of(value) for value in node.inputs]
    for index in (0, 1):
        other = constants[1 - index]
        if constants[index] is None and other is not None and other.ndim < 2 and _width(node.inputs[index]) is not None:
            return index if other.size in (1, _width(node.inputs[index])) else -1
    return -1


def _width(value: ir.Value | None) -> int | None:
    """The size of the last axis, where there are others."""
    if value is None or value.shape is None or len(value.shape) < 2 or not isinstance(value.shape[-1], int):
        return None
    return value.shape[-1]


def _reorders(steps: tuple[_Step, ...]) -> bool:
    """Whether more than a Reshape is among them."""
    return any(not edit.is_op(step.nodes[-1], "Reshape") for step in steps)


def _is_alike(one: ir.Value, other: ir.Value | None) -> bool:
    """Whether shapes agree; of two first dimensions that are dynamic nothing is asked: the Add needs them equal."""
    if other is None or one.shape is None or other.shape is None or len(one.shape) != len(other.shape):
        return False
    pairs = enumerate(zip(one.shape, other.shape, strict=True))
    return all(a == b if axis or isinstance(a, int) or isinstance(b, int) else True for axis, (a, b) in pairs)


def _undoes(value: ir.Value, steps: tuple[_Step, ...]) -> bool:
    """Whether rows that go through all steps come back to where they were."""
    dims = () if value.shape is None else tuple(value.shape)[:-1]
    if not all(isinstance(dim, int) for dim in dims[1:]):
        return False
    for batch in _STAND_INS if not isinstance(dims[0], int) else (dims[0],):
        shape = (batch, *(dim for dim in dims[1:] if isinstance(dim, int)), 1)
        rows = start = np.arange(math.prod(shape)).reshape(shape)
        try:
            for step in steps:
                rows = step.move(rows)
        except (ValueError, IndexError):
            return False
        if rows.shape != start.shape or (rows != start).any():
            return False
    return True
