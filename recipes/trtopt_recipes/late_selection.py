"""A token taken at the end of a network that computed all of them."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from trtopt.graph import edit
from trtopt.graph.permute import inputs_along
from trtopt.rewrite.protocol import Findings, Match, Refusal, Stage, Target

_END = np.iinfo(np.int64).max
_OPEN = np.iinfo(np.int32).max
"""Exports write "up to the end" as this or more."""

_WHOLE, _BEHIND = "queries and behind attention", "behind attention"

_Reads = dict[tuple[ir.Node, int], int]
"""The axis along which input ``i`` of a node is read selected."""


@dataclass(frozen=True)
class LateSelection:
    """Takes the token that is used before the last block computes the others.

    Rewrite:
        f(x)[:, i] = f(x[:, i]) for operators that work on each entry of the axis by itself: element-wise ones,
        products with a weight, normalisation, softmax and reductions over other axes, Transpose, Reshape that keeps
        the axis. Attention's two products do so in the queries: softmax(Q K^T) V has a row for each row of Q. A Slice
        takes the entries where such a region is entered; keys and values stay whole.
    Requires:
        A Gather of one constant index, or a Slice of at most half of the entries, behind a matrix product.
    Why faster:
        An encoder that hands on its class token needs, of its last block, the keys and values of all tokens, and the
        rest of one: 293.8 -> 259.5 MB and 1252 -> 1036 us (predicted, L4, FP16) for four BERT layers, batch 8, 128
        tokens. The queries' projection, one product with those of keys and values otherwise, becomes a kernel of its
        own, so that a small batch is better selected from behind attention.
    Numerics:
        The same products and sums, of fewer entries. For another size a library may sum in another order: within
        rounding of the type.
    Refuses when:
        What is selected from is an output of the network, or one entry is selected and something else reads it, another
        selection too. No match where several entries are and others are read (the halves of a rotary embedding), nor
        where the index is computed; none beyond an operator that works across entries (convolution, pooling,
        normalisation or softmax over the axis, keys and values of attention).
    """

    name: str = "late-selection"
    stage: Stage = Stage.FUSE
    lossless: bool = True

    def find(self, model: ir.Model, target: Target) -> Findings:
        """Selections behind a product: through attention on the side of its queries, or, instead, behind it alone."""
        matches: list[Match] = []
        refusals: list[Refusal] = []
        for graph in edit.all_graphs(model.graph):
            walk, taken = _Walk(graph), set[ir.Node]()
            for node in graph:
                entries = _entries(node)
                if entries is None:
                    continue
                whole, behind = (walk.region(node, entries, queries=queries) for queries in (True, False))
                if not whole.has_product:
                    made_here = node.metadata_props.get(edit.RECIPE_KEY) == self.name
                    reason = "" if made_here else walk.why_not(node, entries)
                    refusals += [Refusal(str(node.name), reason)] if reason else []
                elif taken.isdisjoint((node, *whole.nodes)):
                    taken.update((node, *whole.nodes))
                    two = behind.has_product and len(behind.nodes) < len(whole.nodes)
                    matches.append(Match((node, *whole.nodes), choice=_WHOLE if two else ""))
                    matches += [Match((node, *behind.nodes), choice=_BEHIND)] if two else []
        return Findings(tuple(matches), tuple(refusals))

    def rewrite(self, model: ir.Model, match: Match) -> Refusal | None:
        """Select where the region of one match is entered."""
        selection = match.nodes[0]
        entries, graph = _entries(selection), selection.graph
        if entries is None or not isinstance(graph, ir.Graph):
            raise ValueError(f"{selection.name} selects nothing")
        region = _Walk(graph).region(selection, entries, queries=match.choice != _BEHIND)
        _Writer(edit.Splice(model, selection, self.name), entries, region).write(selection)
        return None


@dataclass(frozen=True)
class _Entries:
    """A few neighbouring entries of an axis.

    Attributes:
        axis: The axis of the tensor they are selected from.
        start: The first; negative only where the length of the axis is not known.
        stop: Behind the last.
        count: How many they are.
        drops: Whether the axis, then of length 1, disappears.
    """

    axis: int
    start: int
    stop: int
    count: int
    drops: bool


def _entries(node: ir.Node) -> _Entries | None:
    """What a Gather or Slice selects; None where it is not known, or not few of neighbouring entries."""
    source = edit.input_of(node, 0)
    if source is None or source.shape is None or not edit.is_op(node, "Gather", "Slice"):
        return None
    if node.op_type == "Gather":
        index = edit.constant_of(edit.input_of(node, 1))
        if index is None or index.size != 1 or index.ndim > 1:
            return None
        start, drops = int(index.ravel()[0]), index.ndim == 0
        stop, axis, one = _END if start == -1 else start + 1, edit.int_attribute(node, "axis", 0), True
    else:
        operands = [edit.constant_of(value) for value in node.inputs[1:]]
        numbers = [int(array[0]) for array in operands if array is not None and array.size == 1]
        if len(numbers) != len(operands) or len(numbers) < 3 or numbers[3:] not in ([], [1]):
            return None
        (start, stop, axis), drops = numbers[:3], False
        one = (start, stop) == (0, 1) or (start == -1 and stop >= _OPEN)
    axis %= len(source.shape)
    length = source.shape[axis]
    if not isinstance(length, int):
        return _Entries(axis, start, stop, 1, drops) if one else None
    start, stop, _ = slice(start, stop).indices(length)
    return _Entries(axis, start, stop, stop - start, drops) if 0 < 2 * (stop - start) <= length else None


@dataclass(frozen=True)
class _Region:
    """Nodes that can work on the selected entries alone, in graph order, each with the axis of its outputs."""

    nodes: dict[ir.Node, int]
    reads: _Reads

    @property
    def has_product(self) -> bool:
        """Whether it multiplies matrices."""
        return any(edit.is_op(node, "MatMul", "Gemm") for node in self.nodes)


class _Walk:
    """Goes from selections towards the inputs of one graph."""

    def __init__(self, graph: ir.Graph | ir.Function) -> None:
        self._order = tuple(graph)
        self._position = {node: index for index, node in enumerate(self._order)}

    def region(self, selection: ir.Node, entries: _Entries, *, queries: bool = True, alone: bool = True) -> _Region:
        """The nodes before a selection that make nothing but what is selected.

        Args:
            selection: The selection.
            entries: What it selects.
            queries: Whether to go through products of two activations.
            alone: Whether to stop at a node of which something else is read, too.
        """
        nodes: dict[ir.Node, int] = {}
        reads: _Reads = {(selection, 0): entries.axis}
        # The last node first: its readers are known when its turn comes.
        queue = self._makers(selection.inputs[:1])
        while queue:
            node = self._order[-heapq.heappop(queue)]
            axis = None if node in nodes else _agreed(node, reads, alone)
            if axis is None or (not queries and _multiplies_activations(node)):
                continue
            inputs = inputs_along(node, axis)
            if not inputs:
                continue
            nodes[node] = axis
            reads.update(((node, index), along) for index, along in inputs.items())
            for position in self._makers([node.inputs[index] for index in inputs]):
                heapq.heappush(queue, position)
        return _Region(dict(reversed(nodes.items())), reads)

    def _makers(self, values: Sequence[ir.Value | None]) -> list[int]:
        """Places of the nodes of this graph that make values, negative: a heap gives the smallest first."""
        nodes = (value.producer() for value in values if value is not None)
        return [-self._position[node] for node in nodes if node is not None and node in self._position]

    def why_not(self, selection: ir.Node, entries: _Entries) -> str:
        """What else reads what could be selected earlier; empty where no product lies behind it, and for several
        entries whose neighbours are read as well: the halves of a rotary embedding are no late selection."""
        region = self.region(selection, entries, alone=False)
        for value in _values(reversed(region.nodes)) if region.has_product else ():
            if value.is_graph_output():
                return f"{value.name} is an output of the network, too"
            others = [user for user, index in value.uses() if (user, index) not in region.reads]
            if others:
                one = f"{value.name} is read by {others[0].name} ({others[0].op_type}), too"
                return one if entries.count == 1 else ""
        return ""


def _values(nodes: Iterator[ir.Node]) -> Iterator[ir.Value]:
    return (value for node in nodes for value in node.outputs)


def _agreed(node: ir.Node, reads: Mapping[tuple[ir.Node, int], int], alone: bool) -> int | None:
    """The axis along which what a node makes is read selected.

    None where there is none or several, and where it is read otherwise, too, with ``alone``.
    """
    wanted = {reads.get((user, index)) for output in node.outputs for user, index in output.uses()}
    if any(output.is_graph_output() for output in node.outputs):
        wanted.add(None)
    if not alone:
        wanted.discard(None)
    return wanted.pop() if len(wanted) == 1 else None


def _multiplies_activations(node: ir.Node) -> bool:
    return edit.is_op(node, "MatMul") and edit.constant_tensor_of(node.inputs[1]) is None


@dataclass(frozen=True)
class _Writer:
    """Lets a region work on the selected entries."""

    splice: edit.Splice
    entries: _Entries
    region: _Region
    made: dict[tuple[ir.Value, int], ir.Value] = field(default_factory=dict)

    def write(self, selection: ir.Node) -> None:
        """Select where the region is entered, and no more at its end."""
        for node, axis in self.region.nodes.items():
            for index, value in enumerate(node.inputs):
                along = self.region.reads.get((node, index))
                if value is not None and along is not None and value.producer() not in self.region.nodes:
                    node.replace_input_with(index, self._selected(value, along, node))
            for output in node.outputs:
                self._shorten(output, axis)
            if edit.is_op(node, "Reshape"):
                self._set_target(node, axis)
        if self.entries.drops:
            axes = self.splice.constant(np.array([self.entries.axis]), selection.outputs[0], "axes")
            self.splice.finish(self.splice.op("Squeeze", selection.inputs[0], axes))
        else:
            self.splice.bypass(selection)

    def _selected(self, value: ir.Value, axis: int, node: ir.Node) -> ir.Value:
        """The entries of a value from outside that ``node`` reads first."""
        if (value, axis) not in self.made:
            numbers = {"start": self.entries.start, "stop": self.entries.stop, "axis": axis}
            operands = [self.splice.constant(np.array([number]), value, word) for word, number in numbers.items()]
            self.made[value, axis] = self.splice.op("Slice", value, *operands, like=value, before=node)
            self._shorten(self.made[value, axis], axis)
        return self.made[value, axis]

    def _set_target(self, node: ir.Node, axis: int) -> None:
        """Write the number of entries into the shape that a Reshape gives."""
        target = np.array(edit.constant_of(node.inputs[1]))
        target[axis] = self.entries.count
        node.replace_input_with(1, self.splice.constant(target, node.outputs[0], "shape"))

    def _shorten(self, value: ir.Value, axis: int) -> None:
        if value.shape is not None:
            value.shape = ir.Shape(
                [self.entries.count if index == axis else dim for index, dim in enumerate(value.shape)]
            )
