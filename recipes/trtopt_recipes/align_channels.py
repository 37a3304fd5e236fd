"""Channel counts that the compiler or its kernels do not like."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import onnx_ir as ir

from trtopt.graph import edit
from trtopt.graph.channels.groups import ChannelGroup, groups_of
from trtopt.graph.channels.padding import pad_group, why_not_finite
from trtopt.graph.channels.rules import Dim, Param, size_of
from trtopt.rewrite.protocol import Findings, Match, Refusal, Stage, Target

_CONVS = ("Conv", "ConvTranspose")
_PRODUCTS = (*_CONVS, "Gemm", "MatMul")
_RTX = "tensorrt-rtx"
_MOST_GROWTH = 0.5
"""Share of zeros beyond which nothing is offered."""
_MOST_GROWTH_OF_ALTERNATIVES = 0.125
"""That of sizes beyond the next multiple."""
_TOO_MANY = "the next multiple that kernels want is more than half again as many"
_PADDED_KEY = "trtopt.channels"
"""Key in the ``metadata_props`` of a node that makes channels: the number they were padded to."""
_TYPES = {ir.DataType.FLOAT16: "fp16", ir.DataType.BFLOAT16: "bf16"}
_MULTIPLES = {"fp16": 8, "bf16": 8, "int8": 16, "fp32": 4, "tf32": 4}
"""What TensorRT's Tensor Core kernels and vectorized formats (HWC8 of FP16, CHW32 of INT8) come in."""
_LARGER_MULTIPLES = {8: (16, 32, 64), 16: (32, 64), 4: ()}


@dataclass(frozen=True)
class MisalignedChannels:
    """Adds channels of zeros where a channel count is no multiple of what the kernels want.

    Rewrite:
        W2 f(W1 x + b1) = [W2 0] f([W1; 0] x + [b1; 0]): the group of channels that W1 makes gets channels of zeros,
        in every constant that has an entry per channel, and the weights that consume them ignore the new ones.
    Requires:
        Every value the channels flow through keeps them apart: residual additions, concatenations, pooling,
        activations, batch norm, depthwise and grouped convolutions; constant weights at both ends.
    Why faster:
        TensorRT for RTX copies the input of each FP16 convolution with an odd number of channels into one with an even
        number, in a kernel of its own: a chain 64 -> 61 -> 61 -> 64 of 28x28 maps moves 10.99 MB, with 62 channels
        7.93 MB. Around a transposed convolution that is not grouped it copies to a multiple of 8 and back, in FP32 too:
        64 -> 61 -> 61 -> 64 moves 27.8 MB in 7 kernels, with 64 channels 20.1 MB in 5. TensorRT's Tensor Core kernels
        work on multiples of 8 (FP16), 16 or 32 (INT8) channels.
    Numerics:
        The same sums plus zeros. New channels hold zeros, or small numbers after an activation such as a sigmoid.
    Refuses when:
        The channels reach an input or output of the network, an operator that mixes them (normalization or softmax
        over channels, a reshape that splits them, a product of two activations) or one without a rule; weights are
        not constants; a zero would become infinite; the backend pads them without a kernel, or the count is even and
        the backend pads nothing.
    """

    name: str = "misaligned-channels"
    stage: Stage = Stage.ALIGN
    lossless: bool = True

    def find(self, model: ir.Model, target: Target) -> Findings:
        """Groups of channels, in the order in which they are made."""
        order = {node: number for number, node in enumerate(edit.all_nodes(model.graph))}
        places: list[_Place] = []
        refusals: list[tuple[ir.Node, str]] = []
        for group in groups_of(_seeds(order)):
            named = _makers(group) or _consumers(group)
            if not named or group.size < 2:
                continue
            node = min(named, key=order.__getitem__)
            wants, reason = _wanted(group, target)
            sizes = _sizes(group, wants, target) if wants else []
            if wants:
                reason = _why_not(group, model.graph) or ("" if sizes else _TOO_MANY)
            if sizes and not reason:
                consumers = set(_consumers(group)).intersection(want.node for want in wants)
                places.append(_Place(node, group, sizes, consumers))
            elif reason and not _is_padded(group):
                refusals.append((node, reason))
        found = sorted(_joined(places), key=lambda joined: order[joined[0].node])
        refusals.sort(key=lambda item: order[item[0]])
        matches = tuple(match for joined in found for match in _matches(joined))
        return Findings(matches, tuple(Refusal(str(node.name), reason) for node, reason in refusals))

    def rewrite(self, model: ir.Model, match: Match) -> Refusal | None:
        """Pad one group, or those that meet in one sum."""
        sizes = [int(size) for size in match.choice.split("+")]
        places = list(zip(match.nodes, sizes, strict=False))
        if any(self._group(model, node, size) is None for node, size in places):
            return Refusal(match.label, f"it can be padded to {match.choice} channels no longer")
        for node, size in places:
            # Traced anew each time: one group's padding moves the others where they are concatenated.
            group = self._group(model, node, size)
            if group is not None:
                pad_group(model, group, size - group.size, self.name)
                for maker in _makers(group):
                    maker.metadata_props[_PADDED_KEY] = str(size)
                for dim in group.outputs:
                    _cut_off(model, dim, group.size, self.name)
        return None

    def _group(self, model: ir.Model, node: ir.Node, size: int) -> ChannelGroup | None:
        """The group that ``node`` makes, where it can get this size."""
        for group in groups_of((_output(node),)):
            if node in _makers(group) and not _why_not(group, model.graph) and group.size < size <= 2 * group.size:
                return group
        return None


class _Want(NamedTuple):
    """A size the kernels of one node would have a multiple of, and which it is."""

    node: ir.Node
    size: int
    multiple: int


@dataclass(frozen=True, eq=False)
class _Place:
    """A group that can be padded: what makes it, to which sizes, and which of its consumers want that."""

    node: ir.Node
    group: ChannelGroup
    sizes: list[int]
    consumers: set[ir.Node]


def _joined(places: list[_Place]) -> list[list[_Place]]:
    """Groups that meet in the sum of one node: only together do they make it a multiple."""
    found: list[list[_Place]] = []
    owner: dict[ir.Node, list[_Place]] = {}
    for place in places:
        together = [place]
        for other in {id(owner[node]): owner[node] for node in place.consumers if node in owner}.values():
            together = other + together
            found.remove(other)
        found.append(together)
        owner.update((node, together) for each in together for node in each.consumers)
    return found


def _matches(places: list[_Place]) -> Iterator[Match]:
    first = [place.node for place in places]
    nodes = (*first, *dict.fromkeys(node for place in places for node in place.group.nodes if node not in first))
    if len(places) > 1:
        yield Match(nodes, choice="+".join(str(place.sizes[0]) for place in places))
        return
    for size in places[0].sizes:
        yield Match(nodes, choice=str(size))


def _seeds(nodes: Iterable[ir.Node]) -> Iterator[Dim]:
    """Where matrix products read or make channels in numbers that may be misaligned."""
    for node in nodes:
        weights = edit.constant_tensor_of(edit.input_of(node, 1)) if edit.is_op(node, *_PRODUCTS) else None
        data = node.inputs[0] if weights is not None else None
        if weights is None or data is None or len(weights.shape) < 2:
            continue
        output = _output(node)
        source = Dim(data, output.axis)
        in_parts = edit.int_attribute(node, "group", 1) > 1 and edit.dims_of(weights)[1] % 8
        if (size_of(source) or 0) % 8 or in_parts:
            yield source
        if (size_of(output) or 0) % 8:
            yield output


def _output(node: ir.Node) -> Dim:
    """The channels a product makes."""
    shape = node.outputs[0].shape
    return Dim(node.outputs[0], len(shape) - 1 if node.op_type == "MatMul" and shape is not None else 1)


def _makers(group: ChannelGroup) -> list[ir.Node]:
    """The products that make the channels."""
    return [param.node for param in group.params if param.kind == "makes" and param.node.op_type in _PRODUCTS]


def _consumers(group: ChannelGroup) -> list[ir.Node]:
    """The products that sum over the channels."""
    return [param.node for param in group.params if param.kind == "sums"]


def _why_not(group: ChannelGroup, main: ir.Graph) -> str:
    """Why a group cannot get more channels; empty if it can."""
    if group.reason:
        return group.reason
    if not _makers(group):
        return "no product with constant weights makes its channels"
    if group.outputs and not _is_head(group, main):
        return f"{group.outputs[0].value.name} is an output of the network"
    return why_not_finite(group)


def _is_head(group: ChannelGroup, main: ir.Graph) -> bool:
    """Whether the channels are an output of the network as a product makes it, and nothing else."""
    (first, *others) = group.spans
    whole = first.start == 0 and first.stop == size_of(first.dim) and first.each == 1
    return whole and not others and len(group.nodes) == 1 and group.nodes[0].graph is main


def _is_padded(group: ChannelGroup) -> bool:
    """Whether the group got its size here: then there is nothing to say about it."""
    return any(maker.metadata_props.get(_PADDED_KEY) == str(group.size) for maker in _makers(group))


def _sizes(group: ChannelGroup, wants: list[_Want], target: Target) -> list[int]:
    """The sizes to offer, the best first; none where so many zeros cannot pay."""
    multiples = {want.multiple: None for want in sorted(wants, key=lambda want: -want.multiple)}
    sizes = [_up(group.size, multiple) for multiple in multiples]
    if target.backend != _RTX:
        larger = _LARGER_MULTIPLES[wants[0].multiple]
        limit = group.size * (1 + _MOST_GROWTH_OF_ALTERNATIVES)
        sizes += [size for size in (_up(group.size, multiple) for multiple in larger) if size <= limit]
    return [size for size in dict.fromkeys(sizes) if group.size < size <= group.size * (1 + _MOST_GROWTH)]


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _wanted(group: ChannelGroup, target: Target) -> tuple[list[_Want], str]:
    """Which nodes want another size of the group; where none does, why although the size looks misaligned."""
    dtype = group.spans[0].dim.value.dtype or ir.DataType.FLOAT
    precision = target.precision or _TYPES.get(dtype, "fp32")
    products = [param for param in group.params if param.index == 1 and param.kind in ("sums", "makes")]
    if target.backend != _RTX:
        multiple = _MULTIPLES.get(precision, 8)
        wants = [_Want(p.node, _total(p), multiple) for p in products if p.node.op_type in _PRODUCTS]
        return _misaligned(group, wants), ""
    deconvs = [p for p in products if p.node.op_type == "ConvTranspose" and edit.int_attribute(p.node, "group", 1) == 1]
    convs = [p for p in products if p.node.op_type == "Conv" and p.kind == "sums"]
    if target.compute_capability == "7.5":
        depthwise = [p for p in group.params if p.index == 1 and p.kind == "each" and p.node.op_type == "Conv"]
        wants = _misaligned(group, [_Want(p.node, _total(p), 8) for p in depthwise])
        free = group.size % 8 and convs
        return wants, "for this GPU the compiler pads to a multiple of 8 without a kernel" if free else ""
    wants = [_Want(p.node, _total(p), 8) for p in deconvs]
    if precision in ("fp16", "bf16"):
        wants += [_Want(p.node, _total(p), 2) for p in convs]
    found = _misaligned(group, wants)
    return found, "" if found else _free_on_rtx(group, precision, [_total(conv) for conv in convs])


def _misaligned(group: ChannelGroup, wants: list[_Want]) -> list[_Want]:
    return [want for want in wants if want.size % want.multiple and group.size % want.multiple]


def _free_on_rtx(group: ChannelGroup, precision: str, convs: list[int]) -> str:
    """Why a size that looks misaligned costs nothing, as the compiler's kernel lists show it."""
    if not convs:
        if group.outputs and group.size % 2:
            return "an odd output is cut from an even one by the compiler: a Slice in the graph costs the same kernel"
        if group.size % 2 and _makers(group) and any(edit.is_op(node, "Gemm", "MatMul") for node in _consumers(group)):
            return "the compiler pads odd matrix products inside their weights, without a kernel"
        return ""
    if precision in ("fp32", "tf32"):
        return "the compiler adds no padding kernel to FP32 convolutions" if any(total % 2 for total in convs) else ""
    if precision == "int8":
        uneven = any(total % 4 for total in convs)
        return "the kernel that quantizes pads to a multiple of 4 on its way" if uneven else ""
    even = group.size % 8 and group.size % 2 == 0 and _makers(group)
    return "it is even already: TensorRT for RTX pads nothing, and more channels only cost bytes" if even else ""


def _total(param: Param) -> int:
    """The size of the matrix product, per group of a grouped convolution."""
    return (size_of(param.dim) or 0) // (edit.int_attribute(param.node, "group", 1) if param.kind == "sums" else 1)


def _cut_off(model: ir.Model, dim: Dim, size: int, recipe: str) -> None:
    """Give the caller the first channels of a padded output, under its name."""
    value, node = dim.value, dim.value.producer()
    if node is None or value.shape is None:
        raise ValueError(f"no node makes {value.name}")
    splice, shape = edit.Splice(model, node, recipe), list(value.shape)
    shape[dim.axis] = size
    numbers = {"start": 0, "end": size, "axis": dim.axis}
    bounds = [splice.ints([number], value, what) for what, number in numbers.items()]
    cut = splice.restore(value, "Slice", [user for user, _ in value.uses()], *bounds)
    cut.shape = ir.Shape(shape)
