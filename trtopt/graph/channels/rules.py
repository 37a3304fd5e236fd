"""What operators say about channels: those that compute (products, norms, pooling), and those that move elements."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from typing import Literal, NamedTuple

import numpy as np
import onnx_ir as ir

from trtopt.graph import edit


class Dim(NamedTuple):
    """One axis of one value; the axis counts from 0."""

    value: ir.Value
    axis: int


class Link(NamedTuple):
    """``length`` elements of one dim are the same channels as ``other_length`` elements of another.

    The lengths differ where a channel covers several elements on one side: Flatten makes H*W of each.
    """

    first: Dim
    second: Dim
    length: int
    other_length: int
    start: int = 0
    other_start: int = 0


@dataclass(frozen=True)
class Param:
    """A constant input of a node that has one entry per element of ``dim`` along ``axis``.

    Attributes:
        axis: The axis of the constant.
        dim: The channels.
        kind: ``makes``: rows of weights (or bias) that compute the channel; ``sums``: columns that consume it;
            ``each``: applied channel by channel.
        fill: The entry that a channel of zeros gets, so that it stays finite.
        blocks: ``axis`` holds the first of this many equal parts of ``dim``; the parts are alike.
    """

    node: ir.Node
    index: int
    axis: int
    dim: Dim
    kind: Literal["makes", "sums", "each"]
    fill: float = 0.0
    blocks: int = 1


@dataclass(frozen=True)
class Count:
    """A number in a node that says where channels of ``dim`` begin or end: sizes, starts, ends, group counts.

    Attributes:
        place: The index of its constant input, or the name of its attribute.
        number: The element of ``dim`` it stands for.
    """

    node: ir.Node
    place: int | str
    position: int
    dim: Dim
    number: int


class Block(NamedTuple):
    """Why these channels have to stay as they are; ``length`` None means the whole dim."""

    dim: Dim
    reason: str
    start: int = 0
    length: int | None = None


class Role(NamedTuple):
    """What one node says about one of its dims."""

    links: tuple[Link, ...] = ()
    params: tuple[Param, ...] = ()
    counts: tuple[Count, ...] = ()
    blocks: tuple[Block, ...] = ()


def refused(dim: Dim, reason: str) -> Role:
    """A role that keeps ``dim`` as it is."""
    return Role(blocks=(Block(dim, reason),))


def size_of(dim: Dim) -> int | None:
    """Elements along the axis; None where that is not a known number."""
    shape = dim.value.shape
    if shape is None or dim.axis >= len(shape):
        return None
    size = shape[dim.axis]
    return size if isinstance(size, int) else None


def rank_of(value: ir.Value | None) -> int:
    """How many axes; 0 where that is not known."""
    return 0 if value is None or value.shape is None else len(value.shape)


def same(node: ir.Node, first: ir.Value, second: ir.Value, axis: int) -> Role:
    """The channels of both values are the same ones."""
    one, two = Dim(first, axis), Dim(second, axis)
    size = size_of(one)
    if size is None or size_of(two) != size:
        return refused(one, f"the sizes around {node.name} are not known")
    return Role((Link(one, two, size, size),))


Rule = Callable[[ir.Node, Dim], Role]
"""What a node says about a dim of one of its inputs or outputs."""


def reads_elsewhere(node: ir.Node, value: ir.Value) -> bool:
    """Whether a node reads ``value`` as another input than its first, the data."""
    return any(each is value for each in node.inputs[1:])


def _constant_dims(node: ir.Node, index: int) -> tuple[int, ...] | None:
    tensor = edit.constant_tensor_of(edit.input_of(node, index))
    return None if tensor is None else edit.dims_of(tensor)


def _weights(node: ir.Node, dim: Dim) -> tuple[tuple[int, ...], Role | None]:
    """The shape of the weights; a refusal where a node's operands are not what they mostly are."""
    dims = _constant_dims(node, 1)
    if dims is None:
        return (), refused(dim, f"the weights of {node.name} are not constants")
    if reads_elsewhere(node, dim.value):
        return (), refused(dim, f"{node.name} reads it as weights")
    return dims, None


def conv(node: ir.Node, dim: Dim) -> Role:
    """Conv and ConvTranspose: dense, grouped, depthwise."""
    dims, refusal = _weights(node, dim)
    if refusal:
        return refusal
    if dim.axis != 1:
        return refused(dim, f"{node.name} convolves along it")
    data = node.inputs[0]
    groups, transposed = edit.int_attribute(node, "group", 1), node.op_type == "ConvTranspose"
    if data is None or len(dims) < 3:
        return refused(dim, f"{node.name} has no data")
    source, target = Dim(data, 1), Dim(node.outputs[0], 1)
    channels = dims[0] if transposed else dims[1] * groups
    outputs = dims[1] * groups if transposed else dims[0]
    bias = () if edit.input_of(node, 2) is None else (Param(node, 2, 0, target, "makes"),)
    if bias and edit.constant_tensor_of(edit.input_of(node, 2)) is None:
        return refused(dim, f"the bias of {node.name} is not a constant")
    if groups > 1 and channels == groups and outputs % groups == 0:
        return _depthwise(node, source, target, (groups, outputs), bias)
    if dim == source:
        columns = Param(node, 1, 0, source, "sums") if transposed else Param(node, 1, 1, source, "sums", blocks=groups)
        return Role(_alike_parts(source, groups, channels), (columns,))
    rows = Param(node, 1, 1, target, "makes", blocks=groups) if transposed else Param(node, 1, 0, target, "makes")
    return Role(_alike_parts(target, groups, outputs), (rows, *bias))


def _depthwise(node: ir.Node, source: Dim, target: Dim, sizes: tuple[int, int], bias: tuple[Param, ...]) -> Role:
    """One channel a group: adding a channel adds a group."""
    groups, outputs = sizes
    rows = Param(node, 1, 0, source if node.op_type == "ConvTranspose" else target, "each")
    return Role(
        (Link(source, target, groups, outputs),),
        (rows, *(replace(each, kind="each") for each in bias)),
        (Count(node, "group", -1, source, groups),),
    )


def _alike_parts(dim: Dim, parts: int, size: int) -> tuple[Link, ...]:
    """The groups of a convolution have equal sizes, so what is added to one is added to all."""
    each = size // parts
    return tuple(Link(dim, dim, each, each, 0, index * each) for index in range(1, parts))


def gemm(node: ir.Node, dim: Dim) -> Role:
    """Gemm with constant weights."""
    dims, refusal = _weights(node, dim)
    data = node.inputs[0]
    if refusal or data is None:
        return refusal or refused(dim, f"{node.name} has no data")
    if edit.int_attribute(node, "transA", 0) or dim.axis != 1:
        return refused(dim, f"{node.name} has it as rows")
    transposed = edit.int_attribute(node, "transB", 0)
    target = Dim(node.outputs[0], 1)
    if dim == Dim(data, 1):
        return Role(params=(Param(node, 1, transposed, dim, "sums"),))
    rows = Param(node, 1, 1 - transposed, target, "makes")
    if edit.input_of(node, 2) is None:
        return Role(params=(rows,))
    shape = _constant_dims(node, 2)
    if shape is None:
        return refused(dim, f"the bias of {node.name} is not a constant")
    if not shape or shape[-1] != dims[1 - transposed]:
        return refused(dim, f"the bias of {node.name} is one number for all channels")
    return Role(params=(rows, Param(node, 2, len(shape) - 1, target, "makes")))


def matmul(node: ir.Node, dim: Dim) -> Role:
    """MatMul with constant weights on the right."""
    data, out = node.inputs[0], node.outputs[0]
    shape = _constant_dims(node, 1)
    rank = rank_of(data)
    if shape is None or data is None:
        return refused(dim, f"{node.name} multiplies two activations, as attention does")
    if reads_elsewhere(node, dim.value) or len(shape) != 2 or rank < 2:
        return refused(dim, f"{node.name} is not a product with one matrix of weights")
    if dim.axis != rank - 1:
        return same(node, data, out, dim.axis)
    if dim.value is data:
        return Role(params=(Param(node, 1, 0, dim, "sums"),))
    return Role(params=(Param(node, 1, 1, dim, "makes"),))


def embedding(node: ir.Node, dim: Dim) -> Role:
    """Gather of rows of a constant table."""
    table = _constant_dims(node, 0)
    indices = edit.dims_of_value(edit.input_of(node, 1))
    axis = dim.axis - len(indices or ()) + 1
    is_table = table is not None and indices is not None and edit.int_attribute(node, "axis", 0) == 0
    if not is_table or dim.value is not node.outputs[0] or axis < 1:
        return refused(dim, f"{node.name} (Gather) picks entries of it")
    return Role(params=(Param(node, 0, axis, dim, "makes"),))


def elementwise(node: ir.Node, dim: Dim) -> Role:
    """Operators that broadcast: constants along the channels get an entry for each new one."""
    out = node.outputs[0]
    back = rank_of(dim.value) - dim.axis
    target = Dim(out, rank_of(out) - back)
    size = size_of(target)
    if size is None or size_of(dim) != size:
        return refused(dim, f"{node.name} repeats it")
    links, params = [], []
    for index, operand in enumerate(node.inputs):
        if operand is None:
            continue
        if operand.shape is None:
            return refused(dim, f"the sizes around {node.name} are not known")
        axis = rank_of(operand) - back
        found = 1 if axis < 0 else size_of(Dim(operand, axis))
        if found == 1:
            continue
        if found != size:
            return refused(dim, f"the sizes around {node.name} are not known")
        if edit.constant_tensor_of(operand) is not None:
            fill = 1.0 if node.op_type == "Div" and index == 1 else 0.0
            params.append(Param(node, index, axis, target, "each", fill))
        else:
            links.append(Link(Dim(operand, axis), target, size, size))
    return Role(tuple(links), tuple(params))


def unary(node: ir.Node, dim: Dim) -> Role:
    """Operators that map each element by itself."""
    data = node.inputs[0]
    if data is None or reads_elsewhere(node, dim.value) or dim.value in node.outputs[1:]:
        return refused(dim, f"{node.name} ({node.op_type}) uses it in another way")
    return same(node, data, node.outputs[0], dim.axis)


def pool(node: ir.Node, dim: Dim) -> Role:
    """Pooling over space."""
    if dim.axis != 1:
        return refused(dim, f"{node.name} pools along it")
    if any(value.uses() or value.is_graph_output() for value in node.outputs[1:]):
        return refused(dim, f"{node.name} counts positions across channels")
    return unary(node, dim)


def channel_norm(node: ir.Node, dim: Dim) -> Role:
    """BatchNormalization and InstanceNormalization: statistics of one channel each."""
    if dim.axis != 1 or dim.value in node.outputs[1:]:
        return refused(dim, f"{node.name} normalizes along it")
    last = 5 if node.op_type == "BatchNormalization" else 3
    if any(edit.constant_tensor_of(edit.input_of(node, index)) is None for index in range(1, last)):
        return refused(dim, f"the scales of {node.name} are not constants")
    if node.op_type == "BatchNormalization" and edit.int_attribute(node, "training_mode", 0):
        return refused(dim, f"{node.name} is in training mode")
    if edit.float_attribute(node, "epsilon", 1e-5) <= 0:
        return refused(dim, f"{node.name} divides by the deviation, which zeros have none of")
    through = unary(node, dim)
    target = Dim(node.outputs[0], 1)
    params = (Param(node, index, 0, target, "each", float(index == 4)) for index in range(1, last))
    return through if through.blocks else through._replace(params=tuple(params))


def layer_norm(node: ir.Node, dim: Dim) -> Role:
    """Normalizations over the last axes: their means count every element."""
    rank = rank_of(node.inputs[0])
    default = 1 if node.op_type == "MeanVarianceNormalization" else -1
    axis = edit.int_attribute(node, "axis", default) % max(rank, 1)
    if node.op_type in ("LayerNormalization", "RMSNormalization") and dim.axis < axis:
        is_data = dim.value is node.inputs[0]
        return same(node, dim.value, node.outputs[0], dim.axis) if is_data else unary(node, dim)
    return refused(dim, f"{node.name} ({node.op_type}) normalizes over it: zeros would change mean and variance")


def softmax(node: ir.Node, dim: Dim) -> Role:
    """Softmax over another axis leaves channels alone."""
    rank = rank_of(node.inputs[0])
    axis = edit.int_attribute(node, "axis", -1) % max(rank, 1)
    if axis == dim.axis:
        return refused(dim, f"{node.name} ({node.op_type}) sums over it: the exponential of a zero is not zero")
    return unary(node, dim)


def reduced_axes(node: ir.Node) -> set[int] | None:
    """The axes that a reduction names, counted from 0; None where they are not known."""
    axes, rank = edit.axes_of(node), rank_of(node.inputs[0])
    return {axis % rank for axis in axes} if axes and rank else None


def reduce(node: ir.Node, dim: Dim) -> Role:
    """Reductions over other axes."""
    data = node.inputs[0]
    rank = rank_of(data)
    reduced = reduced_axes(node)
    if reduced is None or data is None or reads_elsewhere(node, dim.value):
        return refused(dim, f"{node.name} ({node.op_type}) may reduce over it")
    kept = [axis for axis in range(rank) if axis not in reduced]
    keep = edit.int_attribute(node, "keepdims", 1)
    before = dim.axis if dim.value is data or keep else kept[dim.axis]
    if before in reduced:
        return refused(dim, f"{node.name} ({node.op_type}) reduces over it")
    after = before if keep else kept.index(before)
    size = size_of(Dim(data, before))
    if size is None:
        return refused(dim, f"the sizes around {node.name} are not known")
    return Role((Link(Dim(data, before), Dim(node.outputs[0], after), size, size),))


def quantize(node: ir.Node, dim: Dim) -> Role:
    """Q and DQ with one scale."""
    if (
        any(len(_constant_dims(node, index) or ()) for index in (1, 2))
        or edit.constant_tensor_of(node.inputs[1]) is None
    ):
        return refused(dim, f"{node.name} has a scale per channel")
    return unary(node, dim)


def unknown(node: ir.Node, dim: Dim) -> Role:
    """An operator without a rule."""
    return refused(dim, f"{node.name} is an operator channels are not followed through: {node.op_type}")


Dims = tuple[int | str | None, ...]


def concat(node: ir.Node, dim: Dim) -> Role:
    """Along the channels, each input is a span of the output; along another axis, all have the same channels."""
    out = node.outputs[0]
    rank = rank_of(out)
    if not rank:
        return refused(dim, f"the sizes around {node.name} are not known")
    along = edit.int_attribute(node, "axis", 0) % rank == dim.axis
    links: list[Link] = []
    params: list[Param] = []
    blocks: list[Block] = []
    start = 0
    target = Dim(out, dim.axis)
    for index, value in enumerate(node.inputs):
        size = None if value is None else size_of(Dim(value, dim.axis))
        if value is None or size is None:
            return refused(dim, f"the sizes around {node.name} are not known")
        if edit.constant_tensor_of(value) is None:
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
    along = edit.int_attribute(node, "axis", 0) % rank == dim.axis
    if along and edit.input_of(node, 1) is not None and edit.constant_tensor_of(edit.input_of(node, 1)) is None:
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
    starts, ends, listed, steps = (edit.constant_of(edit.input_of(node, index)) for index in range(1, 5))
    rank = rank_of(data)
    if edit.input_of(node, 3) is None and starts is not None:
        listed = np.arange(len(starts))
    if listed is None or data is None or not rank or reads_elsewhere(node, dim.value):
        return refused(dim, f"{node.name} (Slice) may cut it")
    axes = [int(axis) % rank for axis in listed]
    if dim.axis not in axes:
        return same(node, data, out, dim.axis)
    if starts is None or ends is None or (edit.input_of(node, 4) is not None and steps is None):
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
    perm = edit.ints_attribute(node, "perm") or tuple(reversed(range(rank)))
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
        (
            pair
            for pair in _axis_pairs(edit.dims_of_value(data) or (), edit.dims_of_value(out) or ())
            if _has(pair, node, dim)
        ),
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
    shape = edit.constant_of(edit.input_of(node, 1))
    if shape is None:
        return refused(dim, f"the new shape of {node.name} is computed")
    entry = int(shape[after])
    zero_copies = not edit.int_attribute(node, "allowzero", 0)
    copied = zero_copies and before < len(shape) and int(shape[before]) == 0 and before != after
    if copied or (entry == 0 and (before != after or ratio != 1)):
        return refused(dim, f"the new shape of {node.name} copies it to another place")
    counts = (Count(node, 1, after, target, entry),) if entry > 0 else ()
    return Role((link,), (), counts)


def _has(pair: tuple[int, int, int], node: ir.Node, dim: Dim) -> bool:
    return dim.axis == (pair[0] if dim.value is node.inputs[0] else pair[1])


def _axis_pairs(before: Dims, after: Dims) -> list[tuple[int, int, int]]:
    """Axes of two shapes of the same elements that count the same: (axis, other axis, elements of it per channel)."""
    pairs = []
    for axis, size in enumerate(before):
        for other, other_size in enumerate(after):
            if not isinstance(size, int) or not isinstance(other_size, int) or size < 2 or other_size % size:
                continue
            ratio = other_size // size
            merged = next(
                (m for m in range(axis + 1, len(before) + 1) if volume(before[axis + 1 : m]) == (ratio, ())), 0
            )
            if not merged:
                continue
            behind = volume(before[merged:]), volume(after[other + 1 :])
            ahead = volume(before[:axis]), volume(after[:other])
            if any(left is not None and left == right for left, right in (behind, ahead)):
                pairs.append((axis, other, ratio))
                break
    return pairs


def volume(dims: Dims) -> tuple[int, tuple[str, ...]] | None:
    """The product of sizes, symbols apart; None where one is unknown."""
    if any(dim is None for dim in dims):
        return None
    numbers = prod(dim for dim in dims if isinstance(dim, int))
    return numbers, tuple(sorted(dim for dim in dims if isinstance(dim, str)))


def pad(node: ir.Node, dim: Dim) -> Role:
    """Pad of other axes."""
    data = node.inputs[0]
    pads = edit.constant_of(edit.input_of(node, 1))
    rank = rank_of(data)
    if pads is None or data is None or len(pads) != 2 * rank or edit.input_of(node, 3) is not None:
        return refused(dim, f"{node.name} (Pad) may pad it")
    if pads[dim.axis] or pads[dim.axis + rank]:
        return refused(dim, f"{node.name} (Pad) pads it")
    return unary(node, dim)


def resize(node: ir.Node, dim: Dim) -> Role:
    """Resize of other axes."""
    through = unary(node, dim)
    crops = edit.string_attribute(node, "coordinate_transformation_mode", "half_pixel") == "tf_crop_and_resize"
    axes = edit.ints_attribute(node, "axes")
    if through.blocks or crops:
        return through if through.blocks else refused(dim, f"{node.name} (Resize) crops")
    position = dim.axis if axes is None else (list(axes).index(dim.axis) if dim.axis in axes else None)
    sizes = edit.constant_of(edit.input_of(node, 3))
    if edit.input_of(node, 3) is None:
        scales = edit.constant_of(edit.input_of(node, 2))
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
    start, end = edit.int_attribute(node, "start", 0), edit.int_attribute(node, "end", rank)
    start, end = (n + rank if n < 0 else n for n in (start, end))
    if not start <= dim.axis < end:
        return Role()
    out = node.outputs[0]
    if out.is_graph_output():
        return refused(dim, reason)
    for user, _ in out.uses():
        picked = edit.constant_of(edit.input_of(user, 1)) if user.domain == "" and user.op_type == "Gather" else None
        if picked is None or dim.axis - start in {int(i) % (end - start) for i in picked.reshape(-1)}:
            return refused(dim, reason)
    return Role()
