"""Channels through operators that move: Concat, Split, Slice, Transpose, Reshape, Pad, Resize."""

from __future__ import annotations

from math import prod

import numpy as np
import onnx_ir as ir

from trtopt.graph.channels.links import (
    Block,
    Count,
    Dim,
    Link,
    Param,
    Role,
    dims_of_value,
    rank_of,
    refused,
    same,
    size_of,
)
from trtopt.graph.channels.rules import reads_elsewhere, unary
from trtopt.graph.edit import constant_of, constant_tensor_of, input_of, int_attribute, ints_attribute, string_attribute

_Dims = tuple[int | str | None, ...]


def concat(node: ir.Node, dim: Dim) -> Role:
    """Along the channels, each input is a span of the output; along another axis, all have the same channels."""
    out = node.outputs[0]
    rank = rank_of(out)
    if not rank:
        return refused(dim, f"the sizes around {node.name} are not known")
    along = int_attribute(node, "axis", 0) % rank == dim.axis
    links: list[Link] = []
    params: list[Param] = []
    blocks: list[Block] = []
    start = 0
    target = Dim(out, dim.axis)
    for index, value in enumerate(node.inputs):
        size = None if value is None else size_of(Dim(value, dim.axis))
        if value is None or size is None:
            return refused(dim, f"the sizes around {node.name} are not known")
        if constant_tensor_of(value) is None:
            links.append(Link(Dim(value, dim.axis), target, size, size, 0, start))
        elif along:
            blocks.append(Block(target, f"{node.name} takes it from a constant", start, size))
        else:
            params.append(Param(node, index, dim.axis, target, "each"))
        start += size if along else 0
    return Role(tuple(links), tuple(params), (), tuple(blocks))


def split(node: ir.Node, dim: Dim) -> Role:
    """Each output is a span of the input."""
    data = node.inputs[0]
    rank = rank_of(data)
    if not rank or data is None or reads_elsewhere(node, dim.value):
        return refused(dim, f"the sizes around {node.name} are not known")
    along = int_attribute(node, "axis", 0) % rank == dim.axis
    if along and input_of(node, 1) is not None and constant_tensor_of(input_of(node, 1)) is None:
        return refused(dim, f"{node.name} computes where to split")
    place: int | str = "split" if "split" in node.attributes else 1
    links, counts, start = [], [], 0
    for index, out in enumerate(node.outputs):
        size = size_of(Dim(out, dim.axis))
        if size is None:
            return refused(dim, f"the sizes around {node.name} are not known")
        links.append(Link(Dim(data, dim.axis), Dim(out, dim.axis), size, size, start))
        if along:
            counts.append(Count(node, place, index, Dim(out, dim.axis), size))
            start += size
    return Role(tuple(links), (), tuple(counts))


def slice_(node: ir.Node, dim: Dim) -> Role:
    """A constant slice with step 1 along the channels is a span of them."""
    data, out = node.inputs[0], node.outputs[0]
    starts, ends, listed, steps = (constant_of(input_of(node, index)) for index in range(1, 5))
    rank = rank_of(data)
    if input_of(node, 3) is None and starts is not None:
        listed = np.arange(len(starts))
    if listed is None or data is None or not rank or reads_elsewhere(node, dim.value):
        return refused(dim, f"{node.name} (Slice) may cut it")
    axes = [int(axis) % rank for axis in listed]
    if dim.axis not in axes:
        return same(node, data, out, dim.axis)
    if starts is None or ends is None or (input_of(node, 4) is not None and steps is None):
        return refused(dim, f"{node.name} (Slice) may cut it")
    source, target = Dim(data, dim.axis), Dim(out, dim.axis)
    position = axes.index(dim.axis)
    total, size = size_of(source), size_of(target)
    step = 1 if steps is None else int(steps[position])
    if step != 1 or total is None or size is None:
        return refused(dim, f"{node.name} (Slice) takes every n-th channel")
    begin, end = (min(max(int(n) + (total if n < 0 else 0), 0), total) for n in (starts[position], ends[position]))
    if end - begin != size or not size:
        return refused(dim, f"{node.name} (Slice) cuts it in a way that is not followed")
    counts = (Count(node, 1, position, source, begin), Count(node, 2, position, source, end))
    return Role((Link(source, target, size, size, begin),), (), counts)


def transpose(node: ir.Node, dim: Dim) -> Role:
    """The same channels on another axis."""
    data, out = node.inputs[0], node.outputs[0]
    rank = rank_of(data)
    perm = ints_attribute(node, "perm") or tuple(reversed(range(rank)))
    if data is None or len(perm) != rank:
        return refused(dim, f"the sizes around {node.name} are not known")
    before = dim.axis if dim.value is data else perm[dim.axis]
    size = size_of(Dim(data, before))
    if size is None:
        return refused(dim, f"the sizes around {node.name} are not known")
    return Role((Link(Dim(data, before), Dim(out, perm.index(before)), size, size),))


def reshape(node: ir.Node, dim: Dim) -> Role:
    """Reshape, Flatten, Squeeze, Unsqueeze that keep the channel axis, or merge it with those after it."""
    data, out = node.inputs[0], node.outputs[0]
    if data is None or reads_elsewhere(node, dim.value):
        return refused(dim, f"{node.name} reads its shape from it")
    pair = next(
        (pair for pair in _axis_pairs(dims_of_value(data) or (), dims_of_value(out) or ()) if _has(pair, node, dim)),
        None,
    )
    if pair is None:
        return refused(dim, f"{node.name} ({node.op_type}) splits it, or merges it with what is before it")
    before, after, ratio = pair
    source, target = Dim(data, before), Dim(out, after)
    size = size_of(source)
    if size is None:
        return refused(dim, f"the sizes around {node.name} are not known")
    link = Link(source, target, size, size * ratio)
    if node.op_type != "Reshape":
        return Role((link,))
    shape = constant_of(input_of(node, 1))
    if shape is None:
        return refused(dim, f"the new shape of {node.name} is computed")
    entry = int(shape[after])
    zero_copies = not int_attribute(node, "allowzero", 0)
    copied = zero_copies and before < len(shape) and int(shape[before]) == 0 and before != after
    if copied or (entry == 0 and (before != after or ratio != 1)):
        return refused(dim, f"the new shape of {node.name} copies it to another place")
    counts = (Count(node, 1, after, target, entry),) if entry > 0 else ()
    return Role((link,), (), counts)


def _has(pair: tuple[int, int, int], node: ir.Node, dim: Dim) -> bool:
    return dim.axis == (pair[0] if dim.value is node.inputs[0] else pair[1])


def _axis_pairs(before: _Dims, after: _Dims) -> list[tuple[int, int, int]]:
    """Axes of two shapes of the same elements that count the same: (axis, other axis, elements of it per channel)."""
    pairs = []
    for axis, size in enumerate(before):
        for other, other_size in enumerate(after):
            if not isinstance(size, int) or not isinstance(other_size, int) or size < 2 or other_size % size:
                continue
            ratio = other_size // size
            merged = next(
                (m for m in range(axis + 1, len(before) + 1) if _volume(before[axis + 1 : m]) == (ratio, ())), 0
            )
            if not merged:
                continue
            behind = _volume(before[merged:]), _volume(after[other + 1 :])
            ahead = _volume(before[:axis]), _volume(after[:other])
            if any(left is not None and left == right for left, right in (behind, ahead)):
                pairs.append((axis, other, ratio))
                break
    return pairs


def _volume(dims: _Dims) -> tuple[int, tuple[str, ...]] | None:
    """The product of sizes, symbols apart; None where one is unknown."""
    if any(dim is None for dim in dims):
        return None
    numbers = prod(dim for dim in dims if isinstance(dim, int))
    return numbers, tuple(sorted(dim for dim in dims if isinstance(dim, str)))


def pad(node: ir.Node, dim: Dim) -> Role:
    """Pad of other axes."""
    data = node.inputs[0]
    pads = constant_of(input_of(node, 1))
    rank = rank_of(data)
    if pads is None or data is None or len(pads) != 2 * rank or input_of(node, 3) is not None:
        return refused(dim, f"{node.name} (Pad) may pad it")
    if pads[dim.axis] or pads[dim.axis + rank]:
        return refused(dim, f"{node.name} (Pad) pads it")
    return unary(node, dim)


def resize(node: ir.Node, dim: Dim) -> Role:
    """Resize of other axes."""
    through = unary(node, dim)
    crops = string_attribute(node, "coordinate_transformation_mode", "half_pixel") == "tf_crop_and_resize"
    axes = ints_attribute(node, "axes")
    if through.blocks or crops:
        return through if through.blocks else refused(dim, f"{node.name} (Resize) crops")
    position = dim.axis if axes is None else (list(axes).index(dim.axis) if dim.axis in axes else None)
    sizes = constant_of(input_of(node, 3))
    if input_of(node, 3) is None:
        scales = constant_of(input_of(node, 2))
        constant = scales is not None and (position is None or float(scales[position]) == 1.0)
        return through if constant else refused(dim, f"{node.name} (Resize) may scale it")
    if position is None:
        return through
    if sizes is None:
        return refused(dim, f"the new size of {node.name} is computed")
    return through._replace(counts=(Count(node, 3, position, Dim(node.outputs[0], dim.axis), int(sizes[position])),))


def shape_of(node: ir.Node, dim: Dim) -> Role:
    """Shape is harmless where nobody takes the channels out of it."""
    reason = f"{node.name} (Shape) reads its size"
    rank = rank_of(node.inputs[0])
    start, end = int_attribute(node, "start", 0), int_attribute(node, "end", rank)
    start, end = (n + rank if n < 0 else n for n in (start, end))
    if not start <= dim.axis < end:
        return Role()
    out = node.outputs[0]
    if out.is_graph_output():
        return refused(dim, reason)
    for user, _ in out.uses():
        picked = constant_of(input_of(user, 1)) if user.domain == "" and user.op_type == "Gather" else None
        if picked is None or dim.axis - start in {int(i) % (end - start) for i in picked.reshape(-1)}:
            return refused(dim, reason)
    return Role()
