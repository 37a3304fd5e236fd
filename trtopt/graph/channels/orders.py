"""Channels in another order: what operators have to be for that, and the constants that change.

A group is put in order where every operator treats its channels alike and by themselves, or all at once without
regard to their order: a sum, a mean, a norm or a softmax over channels is the same in any order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import onnx_ir as ir

from trtopt.graph.channels import moves, rules
from trtopt.graph.channels.groups import REDUCTIONS, RULES, ChannelGroup, groups_of
from trtopt.graph.channels.links import Dim, Link, Param, Role, dims_of_value, rank_of, refused, size_of
from trtopt.graph.edit import (
    Names,
    add_initializer,
    constant_of,
    constant_tensor_of,
    dims_of,
    input_of,
    int_attribute,
    string_attribute,
)


def orderable_groups(seeds: Iterable[Dim]) -> Iterator[ChannelGroup]:
    """The groups around dims, with reasons against another order; outputs are not a reason yet."""
    return groups_of(seeds, _RULES)


def entries(group: ChannelGroup, order: np.ndarray, param: Param) -> np.ndarray:
    """Which entries of a constant, along its axis, come first, second, ...

    Args:
        group: The group.
        order: int64 ``[group.size]``: the channels that come first, second, ...
        param: One of the group's constants.
    """
    found = np.arange((size_of(param.dim) or 0) // param.blocks)
    for span in group.spans_of(param.dim):
        if span.stop <= len(found):
            channels = order[:, None] * span.each + np.arange(span.each)
            found[span.start : span.stop] = span.start + channels.reshape(-1)
    return found


def put_in_order(model: ir.Model, orders: Iterable[tuple[ChannelGroup, np.ndarray]]) -> None:
    """Put channels in another order wherever they are; the network computes what it did.

    Every constant that changes is a new one, named after the output of the node that reads it; nodes that share one
    and need the same share the new one. What nothing reads any longer is removed.

    Args:
        model: Edited.
        orders: Groups of this model without a reason and without outputs, each with the channels that come first,
            second, ...: int64 ``[group.size]``.
    """
    takes: dict[tuple[ir.Node, int], list[tuple[int, np.ndarray]]] = {}
    for group, order in orders:
        for param in group.params:
            takes.setdefault((param.node, param.index), []).append((param.axis, entries(group, order, param)))
    names = Names(model)
    done: dict[tuple[object, ...], ir.Value] = {}
    for (node, index), found in takes.items():
        old, array = node.inputs[index], constant_of(node.inputs[index])
        if array is None or old is None or node.graph is None:
            raise ValueError(f"input {index} of {node.name} is not a constant")
        key = (old, node.graph, *((axis, taken.tobytes()) for axis, taken in found))
        if key not in done:
            for axis, taken in found:
                array = np.take(array, taken, axis=axis)
            done[key] = add_initializer(node.graph, names.value(f"{node.outputs[0].name}_ordered_{index}"), array)
        node.replace_input_with(index, done[key])
        _remove_unused(old)


def _remove_unused(constant: ir.Value) -> None:
    if constant.uses() or constant.is_graph_input() or constant.is_graph_output():
        return
    producer, graph = constant.producer(), constant.graph
    if producer is not None and producer.graph is not None:
        producer.graph.remove(producer, safe=True)
    elif graph is not None:
        graph.initializers.pop(str(constant.name), None)


def _layer_norm(node: ir.Node, dim: Dim) -> Role:
    """LayerNormalization and RMSNormalization: over the channels, scale and bias go with them."""
    rank = rank_of(node.inputs[0])
    if dim.axis < int_attribute(node, "axis", -1) % max(rank, 1):
        return rules.layer_norm(node, dim)
    through = rules.unary(node, dim)
    params = []
    for index in (1, 2):
        value = input_of(node, index)
        axis = dim.axis - rank + rank_of(value)
        if value is None or axis < 0:
            continue
        tensor = constant_tensor_of(value)
        if tensor is None:
            return refused(dim, f"the scales of {node.name} are not constants")
        if dims_of(tensor)[axis] > 1:
            params.append(Param(node, index, axis, Dim(node.outputs[0], dim.axis), "each"))
    return through if through.blocks else through._replace(params=tuple(params))


def _reduce(node: ir.Node, dim: Dim) -> Role:
    """A reduction over the channels ends them."""
    axes = rules.reduced_axes(node)
    ends = axes is not None and dim.axis in axes and dim.value is node.inputs[0]
    return Role() if ends else rules.reduce(node, dim)


def _gather(node: ir.Node, dim: Dim) -> Role:
    """Rows of a constant table, or positions along another axis."""
    data, out, picked = node.inputs[0], node.outputs[0], dims_of_value(input_of(node, 1))
    if data is None or constant_tensor_of(data) is not None:
        return rules.embedding(node, dim)
    rank = rank_of(data)
    if picked is None or not rank or rules.reads_elsewhere(node, dim.value):
        return refused(dim, f"{node.name} (Gather) picks entries with it")
    axis, more = int_attribute(node, "axis", 0) % rank, len(picked) - 1
    kept = [each for each in range(rank) if each != axis]
    moved = [each if each < axis else each + more for each in kept]
    pairs = {before if dim.value is data else after: (before, after) for before, after in zip(kept, moved, strict=True)}
    if dim.axis not in pairs:
        return refused(dim, f"{node.name} (Gather) picks entries of it")
    before, after = pairs[dim.axis]
    size = size_of(Dim(data, before))
    if size is None:
        return refused(dim, f"the sizes around {node.name} are not known")
    return Role((Link(Dim(data, before), Dim(out, after), size, size),))


def _expand(node: ir.Node, dim: Dim) -> Role:
    """What is repeated along other axes keeps its channels; what is repeated along the channels has any order."""
    data, out = node.inputs[0], node.outputs[0]
    more = rank_of(out) - rank_of(data)
    target = Dim(out, dim.axis if dim.value is out else dim.axis + more)
    size = size_of(target)
    found = 1 if target.axis < more or data is None else size_of(Dim(data, target.axis - more))
    if data is None or size is None or rules.reads_elsewhere(node, dim.value):
        return refused(dim, f"{node.name} (Expand) uses it in another way")
    if found == 1 and dim.value is out:
        return Role()
    if found != size:
        return refused(dim, f"{node.name} repeats it")
    return _or_constant(node, Role((Link(Dim(data, target.axis - more), target, size, size),)))


def _slice(node: ir.Node, dim: Dim) -> Role:
    return _or_constant(node, moves.slice_(node, dim))


def _or_constant(node: ir.Node, role: Role) -> Role:
    """Where the data is a constant that is not cut along the channels, it is put in order like any other."""
    data = node.inputs[0]
    if constant_tensor_of(data) is None or not role.links:
        return role
    ((source, target, length, _, _, _),) = role.links
    if size_of(source) != length:
        return refused(target, f"{node.name} takes it from a constant")
    return Role(params=(Param(node, 0, source.axis, target, "each"),))


def _pad(node: ir.Node, dim: Dim) -> Role:
    """Channels of one number beside the others are channels of their own."""
    data, out = node.inputs[0], node.outputs[0]
    pads, rank = constant_of(input_of(node, 1)), rank_of(data)
    constant = string_attribute(node, "mode", "constant") == "constant"
    if pads is None or data is None or len(pads) != 2 * rank or input_of(node, 3) is not None or not constant:
        return moves.pad(node, dim)
    start, end = int(pads[dim.axis]), int(pads[dim.axis + rank])
    size = size_of(Dim(data, dim.axis))
    if start < 0 or end < 0 or size is None or rules.reads_elsewhere(node, dim.value):
        return moves.pad(node, dim)
    return Role((Link(Dim(data, dim.axis), Dim(out, dim.axis), size, size, 0, start),))


def _shape(node: ir.Node, dim: Dim) -> Role:
    """No size changes."""
    return Role()


def _neighbours(node: ir.Node, dim: Dim) -> Role:
    return refused(dim, f"{node.name} ({node.op_type}) reads neighbouring channels")


_RULES = {
    **RULES,
    **dict.fromkeys(REDUCTIONS, _reduce),
    **dict.fromkeys(("LayerNormalization", "RMSNormalization"), _layer_norm),
    **dict.fromkeys(("GroupNormalization", "LRN"), _neighbours),
    **dict.fromkeys(
        ("Softmax", "LogSoftmax", "LpNormalization", "MeanVarianceNormalization", "Log", "Reciprocal"),
        rules.unary,
    ),
    "Expand": _expand,
    "Gather": _gather,
    "Pad": _pad,
    "Shape": _shape,
    "Slice": _slice,
}
