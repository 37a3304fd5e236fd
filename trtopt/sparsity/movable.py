"""Which channels that layers read may get another order, and which have to get the same one."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import onnx_ir as ir

from trtopt.graph.channels.groups import ChannelGroup
from trtopt.graph.channels.links import Dim, Param
from trtopt.graph.channels.orders import orderable_groups
from trtopt.graph.edit import constant_of
from trtopt.sparsity.pattern import is_sparse


@dataclass(frozen=True, eq=False)
class Channels:
    """Groups of channels that get one order, or stay.

    Attributes:
        groups: One group; several of one size where they share weights.
        reason: Why they have to stay as they are; empty where they may move.
    """

    groups: tuple[ChannelGroup, ...]
    reason: str

    @property
    def size(self) -> int:
        """How many channels each group has."""
        return self.groups[0].size


def channels_read(nodes: Collection[ir.Node]) -> list[Channels]:
    """The channels that some Conv, Gemm and MatMul read, each group once, those of the first node first.

    Args:
        nodes: Nodes with constant weights, in a model with inferred shapes.
    """
    dims = [dim for node in nodes if (dim := channels_dim(node)) is not None]
    groups = list(orderable_groups(dims))
    reasons = [_why_not(group) for group in groups]
    leader = list(range(len(groups)))
    for (value, _, _), members in _shared(groups).items():
        indices = [index for index, _ in members]
        apart = set(value.uses()) - {use for _, use in members}
        if apart:
            other = min(str(user.name) for user, _ in apart)
            reason = f"{value.name} is shared with {other}, whose channels cannot move with them"
            for index in indices:
                reasons[index] = reasons[index] or reason
        joined = {leader[index] for index in indices}
        leader = [min(joined) if each in joined else each for each in leader]
    found = []
    for first in dict.fromkeys(leader):
        members_of = [index for index, each in enumerate(leader) if each == first]
        reason = next((reasons[index] for index in members_of if reasons[index]), "")
        found.append(Channels(tuple(groups[index] for index in members_of), reason))
    return found


def channels_dim(node: ir.Node) -> Dim | None:
    """The axis of its data input that a Conv, Gemm or MatMul sums over; None where the input's rank is not known."""
    data = node.inputs[0]
    if data is None or data.shape is None:
        return None
    return Dim(data, len(data.shape) - 1 if node.op_type == "MatMul" else 1)


def _why_not(group: ChannelGroup) -> str:
    """Why one group cannot get another order; empty if it can."""
    if group.reason:
        return group.reason
    if group.outputs:
        return f"{group.outputs[0].value.name} leaves the network"
    for param in group.params:
        array = constant_of(param.node.inputs[param.index]) if param.kind == "sums" else None
        if array is not None and is_sparse(array, param.axis) and array.any():
            return f"the weight of {param.node.name} is 2:4 as it is"
    return ""


_Layout = tuple[tuple[int, int, int], ...]
_Use = tuple[ir.Node, int]


def _shared(groups: list[ChannelGroup]) -> dict[tuple[ir.Value, int, _Layout], list[tuple[int, _Use]]]:
    """Weights that several nodes read: for an axis and where on it channels are, the groups and nodes that say so.

    Small constants are left out: they are copied where two nodes need them in two orders.
    """
    found: dict[tuple[ir.Value, int, _Layout], list[tuple[int, _Use]]] = {}
    for index, group in enumerate(groups):
        for param in group.params:
            value = param.node.inputs[param.index]
            if value is None or param.kind == "each" or len(value.uses()) < 2 or len(value.shape or ()) < 2:
                continue
            key = (value, param.axis, _layout(group, param))
            found.setdefault(key, []).append((index, (param.node, param.index)))
    return found


def _layout(group: ChannelGroup, param: Param) -> _Layout:
    return tuple((span.start, span.stop, span.each) for span in group.spans_of(param.dim))
