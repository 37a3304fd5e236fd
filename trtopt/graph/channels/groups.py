"""Channel groups: channels of many values that are the same ones, and the constants that go with them.

A group is what may be permuted, padded or pruned as one: the outputs of some convolutions, everything they flow
through (residual additions, concatenations, pooling, activations, ...) and the weights that consume them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple

import onnx_ir as ir

from trtopt.graph.channels import rules as channel_rules
from trtopt.graph.channels.rules import Block, Count, Dim, Link, Param, Role, Rule, size_of
from trtopt.graph.edit import constant_tensor_of

_MOST_PARTS = 256
"""Parts of one axis. Operators that shuffle channels cut an axis into single ones; nothing is gained there."""

_UNARY = (
    "Abs Cast Ceil Celu Clip Cos Dropout Elu Erf Exp Floor Gelu HardSigmoid HardSwish Identity LeakyRelu Mish Neg "
    "Relu Round Selu Sigmoid Sign Sin Softplus Softsign Sqrt Swish Tanh ThresholdedRelu"
).split()
_BINARY = "Add Sub Mul Div Max Min Pow PRelu Sum Mean Where".split()
_POOLS = "AveragePool GlobalAveragePool GlobalMaxPool MaxPool LpPool GlobalLpPool".split()
_REDUCTIONS = "ReduceMean ReduceSum ReduceMax ReduceMin ReduceL1 ReduceL2 ReduceSumSquare".split()
_NORMS = "LayerNormalization RMSNormalization GroupNormalization LpNormalization MeanVarianceNormalization LRN".split()

_RULES: Mapping[str, Rule] = {
    **dict.fromkeys(_UNARY, channel_rules.unary),
    **dict.fromkeys(_BINARY, channel_rules.elementwise),
    **dict.fromkeys(_POOLS, channel_rules.pool),
    **dict.fromkeys(_REDUCTIONS, channel_rules.reduce),
    **dict.fromkeys(_NORMS, channel_rules.layer_norm),
    **dict.fromkeys(("Conv", "ConvTranspose"), channel_rules.conv),
    **dict.fromkeys(("BatchNormalization", "InstanceNormalization"), channel_rules.channel_norm),
    **dict.fromkeys(("Softmax", "LogSoftmax"), channel_rules.softmax),
    **dict.fromkeys(("QuantizeLinear", "DequantizeLinear"), channel_rules.quantize),
    **dict.fromkeys(("Reshape", "Flatten", "Squeeze", "Unsqueeze"), channel_rules.reshape),
    "Gemm": channel_rules.gemm,
    "MatMul": channel_rules.matmul,
    "Gather": channel_rules.embedding,
    "Concat": channel_rules.concat,
    "Split": channel_rules.split,
    "Slice": channel_rules.slice_,
    "Transpose": channel_rules.transpose,
    "Pad": channel_rules.pad,
    "Resize": channel_rules.resize,
    "Shape": channel_rules.shape_of,
}
"""What operators say about channels that zeros are added to; another operator keeps them as they are."""


class Span(NamedTuple):
    """Elements ``start`` to ``stop`` of a dim, ``each`` of them to a channel."""

    dim: Dim
    start: int
    stop: int
    each: int


@dataclass(frozen=True)
class ChannelGroup:
    """Channels that are the same ones wherever they appear.

    Attributes:
        spans: Where they are; one dim may hold the group more than once.
        nodes: Every node that reads or writes them, the one that made the group known first.
        params: Constants with an entry per channel (of the whole dim, which other groups may share).
        counts: Numbers in nodes that depend on where the channels begin and end.
        reason: Why they have to stay as they are; empty where they may change.
        outputs: Outputs of the network that hold them; not a reason yet.
    """

    size: int
    spans: tuple[Span, ...]
    nodes: tuple[ir.Node, ...]
    params: tuple[Param, ...]
    counts: tuple[Count, ...]
    reason: str
    outputs: tuple[Dim, ...] = ()

    def spans_of(self, dim: Dim) -> tuple[Span, ...]:
        """Where the group is on one dim, in order."""
        return tuple(sorted((span for span in self.spans if span.dim == dim), key=lambda span: span.start))


def groups_of(seeds: Iterable[Dim]) -> Iterator[ChannelGroup]:
    """The groups around dims, each once: those of the first dim, and what is tied to it by a concatenation, first."""
    seen: set[Dim] = set()
    for seed in seeds:
        if seed in seen:
            continue
        component = _Component(seed)
        seen.update(component.dims)
        yield from component.groups()


class _Component:
    """Everything that links reach from one dim."""

    def __init__(self, seed: Dim) -> None:
        self.dims: dict[Dim, None] = {seed: None}
        self.links: list[Link] = []
        self.params: dict[Param, None] = {}
        self.counts: dict[Count, None] = {}
        self.blocks: list[Block] = []
        self.outputs: list[Dim] = []
        self.nodes: dict[Dim, list[ir.Node]] = {}
        self._done: set[tuple[ir.Node, Dim]] = set()
        pending = deque((seed,))
        while pending:
            dim = pending.popleft()
            for new in self._visit(dim):
                if new not in self.dims:
                    self.dims[new] = None
                    pending.append(new)

    def _visit(self, dim: Dim) -> Iterator[Dim]:
        value = dim.value
        producer = value.producer()
        around = [] if producer is None else [producer]
        around.extend(dict.fromkeys(user for user, _ in value.uses()))
        self.nodes[dim] = around
        if size_of(dim) is None:
            self.blocks.append(Block(dim, f"the size of {value.name} is not known"))
            return
        if value.is_graph_output():
            self.outputs.append(dim)
        if producer is None or constant_tensor_of(value) is not None:
            what = "an input, which the caller shapes" if value.is_graph_input() else "a constant"
            self.blocks.append(Block(dim, f"{value.name} is {what}"))
        for node in around:
            if (node, dim) in self._done:
                continue
            rule = _RULES.get(node.op_type, channel_rules.unknown) if node.domain == "" else channel_rules.unknown
            role = rule(node, dim)
            self._done.add((node, dim))
            self._take(node, role)
            for link in role.links:
                yield link.first
                yield link.second

    def _take(self, node: ir.Node, role: Role) -> None:
        self.links.extend(role.links)
        self.params.update(dict.fromkeys(role.params))
        self.counts.update(dict.fromkeys(role.counts))
        self.blocks.extend(role.blocks)
        for link in role.links:
            # One rule says all about its node, whichever end it is asked from; a group inside one dim is asked once.
            if link.first != link.second:
                self._done.update(((node, link.first), (node, link.second)))

    def groups(self) -> Iterator[ChannelGroup]:
        """The groups on these dims."""
        if self._is_one_group():
            yield self._whole()
            return
        each = self._elements_per_channel()
        cuts = None if each is None else self._cuts(each)
        if each is None or cuts is None:
            yield self._refused("its channels are counted in two ways, or cut into too many parts")
            return
        yield from _Parts(self, each, cuts).groups()

    def _is_one_group(self) -> bool:
        """Whether every link is between whole dims of one size: the common case, which needs no cutting."""
        sizes = {size_of(dim) for dim in self.dims}
        whole = all(link.length == link.other_length and link.length in sizes for link in self.links)
        return len(sizes) == 1 and None not in sizes and whole and all(block.length is None for block in self.blocks)

    def _whole(self) -> ChannelGroup:
        return ChannelGroup(
            size_of(next(iter(self.dims))) or 0,
            tuple(Span(dim, 0, size_of(dim) or 0, 1) for dim in self.dims),
            tuple(dict.fromkeys(node for around in self.nodes.values() for node in around)),
            tuple(self.params),
            tuple(self.counts),
            self.blocks[0].reason if self.blocks else "",
            tuple(self.outputs),
        )

    def _refused(self, reason: str) -> ChannelGroup:
        nodes = tuple(self.nodes[next(iter(self.dims))])
        return replace(self._whole(), nodes=nodes, params=(), counts=(), reason=reason, outputs=())

    def _elements_per_channel(self) -> dict[Dim, int] | None:
        """For each dim, how many elements make one channel; None where links disagree or leave one out."""
        links: dict[Dim, list[tuple[Dim, Fraction]]] = {}
        for link in self.links:
            ratio = Fraction(link.other_length, link.length) if link.length else Fraction(1)
            links.setdefault(link.first, []).append((link.second, ratio))
            links.setdefault(link.second, []).append((link.first, 1 / ratio))
        seed = next(iter(self.dims))
        found = {seed: Fraction(1)}
        pending = [seed]
        while pending:
            dim = pending.pop()
            for other, ratio in links.get(dim, ()):
                if other not in found:
                    found[other] = found[dim] * ratio
                    pending.append(other)
                elif found[other] != found[dim] * ratio:
                    return None
        if len(found) < len(self.dims):  # an operator ties two dims to each other and neither to the one asked about
            return None
        least = min(found.values())
        scaled = {dim: value / least for dim, value in found.items()}
        if any(value.denominator != 1 for value in scaled.values()):
            return None
        result = {dim: int(value) for dim, value in scaled.items()}
        return result if all((size_of(dim) or 0) % number == 0 for dim, number in result.items()) else None

    def _cuts(self, each: dict[Dim, int]) -> dict[Dim, list[int]] | None:
        """Where parts of each dim begin and end, in elements; None where they are too many."""
        cuts: dict[Dim, set[int]] = {dim: {0, size_of(dim) or 0} for dim in self.dims}
        by_dim: dict[Dim, list[Link]] = {}
        for block in self.blocks:
            if block.length is not None:
                cuts[block.dim].update((block.start, block.start + block.length))
        for link in self.links:
            cuts[link.first].update((link.start, link.start + link.length))
            cuts[link.second].update((link.other_start, link.other_start + link.other_length))
            by_dim.setdefault(link.first, []).append(link)
            if link.first != link.second:
                by_dim.setdefault(link.second, []).append(link)
        pending = dict.fromkeys(by_dim)
        while pending:
            dim = next(iter(pending))
            del pending[dim]
            for link in by_dim[dim]:
                for changed in _exchange(link, cuts, each):
                    if len(cuts[changed]) > _MOST_PARTS:
                        return None
                    pending[changed] = None
        if any(cut % each[dim] for dim, found in cuts.items() for cut in found):
            return None
        return {dim: sorted(found) for dim, found in cuts.items()}


def _exchange(link: Link, cuts: dict[Dim, set[int]], each: dict[Dim, int]) -> list[Dim]:
    """Make both sides of a link have the same cuts; the dims that got new ones."""
    up, down = each[link.second], each[link.first]
    first, second = cuts[link.first], cuts[link.second]
    to_second = {
        (cut - link.start) * up // down + link.other_start for cut in first if 0 < cut - link.start < link.length
    }
    to_first = {
        (cut - link.other_start) * down // up + link.start
        for cut in second
        if 0 < cut - link.other_start < link.other_length
    }
    changed = [link.second] if not to_second <= second else []
    changed += [link.first] if not to_first <= first else []
    second |= to_second
    first |= to_first
    return changed


class _Parts:
    """The parts of the dims of a component, joined into groups."""

    def __init__(self, component: _Component, each: dict[Dim, int], cuts: dict[Dim, list[int]]) -> None:
        self._component = component
        self._each = each
        self._cuts = cuts
        self._index = {dim: {cut: number for number, cut in enumerate(found)} for dim, found in cuts.items()}
        self._parent: dict[tuple[Dim, int], tuple[Dim, int]] = {}
        for link in component.links:
            self._join(link)

    def _root(self, part: tuple[Dim, int]) -> tuple[Dim, int]:
        root = part
        while (above := self._parent.get(root, root)) != root:
            root = above
        while part != root:
            self._parent[part], part = root, self._parent.get(part, root)
        return root

    def _join(self, link: Link) -> None:
        one = self._index[link.first][link.start]
        two = self._index[link.second][link.other_start]
        stop = self._index[link.first][link.start + link.length]
        for offset in range(stop - one):
            first, second = self._root((link.first, one + offset)), self._root((link.second, two + offset))
            if first != second:
                self._parent[second] = first

    def groups(self) -> Iterator[ChannelGroup]:
        component = self._component
        members: dict[tuple[Dim, int], list[Span]] = {}
        on_dim: dict[Dim, dict[tuple[Dim, int], list[Span]]] = {}
        for dim, cuts in self._cuts.items():
            for number, (start, stop) in enumerate(pairwise(cuts)):
                root, span = self._root((dim, number)), Span(dim, start, stop, self._each[dim])
                members.setdefault(root, []).append(span)
                on_dim.setdefault(dim, {}).setdefault(root, []).append(span)
        reasons: dict[tuple[Dim, int], str] = {}
        for block in component.blocks:
            stop = block.start + (size_of(block.dim) or 0 if block.length is None else block.length)
            for root, spans in on_dim.get(block.dim, {}).items():
                if any(block.start <= span.start < stop for span in spans):
                    reasons.setdefault(root, block.reason)
        outputs = set(component.outputs)
        for root, spans in members.items():
            dims = dict.fromkeys(span.dim for span in spans)
            yield ChannelGroup(
                (spans[0].stop - spans[0].start) // spans[0].each,
                tuple(spans),
                tuple(dict.fromkeys(node for dim in dims for node in component.nodes[dim])),
                tuple(param for param in component.params if root in on_dim.get(param.dim, ())),
                tuple(count for count in component.counts if root in on_dim.get(count.dim, ())),
                reasons.get(root, ""),
                tuple(dim for dim in dims if dim in outputs),
            )
