"""Transposes around operators that could work in the other layout."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import onnx_ir as ir

from trtopt.graph import edit
from trtopt.graph.cost import POINTWISE
from trtopt.graph.permute import Perm, can_permute, data_inputs, inverse, keeps_rank, permute
from trtopt.rewrite.protocol import Findings, Match, Refusal, Stage, Target

_MOST_USES = 100
"""Values used more often stay as they are: each step of the search looks at all uses of a value."""

_LESS = 8
"""How many times fewer elements more Transposes have to move to be written for fewer: small ones fuse."""

_SPREADING = frozenset(POINTWISE) | edit.BROADCAST | {"Softmax", "LogSoftmax"}
"""Operators whose result may be larger than what they read, and is never a part of it."""


@dataclass(frozen=True)
class TransposePush:
    """Lets regions of layout-independent operators work in the layout around them, where that removes Transposes.

    Rewrite:
        f(Transpose(x)) = Transpose(f'(x)) for element-wise operators, activations, Concat, Split, Pad, Slice, Softmax
        and reductions, f' being f with its axes and constants permuted. A region of such operators is turned around
        as a whole: Transposes that enter it, and their inverses that leave it, disappear; where it meets something
        that stays in the old layout, a Transpose is written. Likewise where small tensors can be transposed in place
        of what is broadcast from them (scores of pairs, a sum per pair of a number of each).
    Requires:
        Constant axes, pads and broadcast operands; known ranks.
    Why faster:
        Each Transpose that does not fuse is a kernel that reads and writes the whole tensor, and separates a
        convolution from its bias and activation. Exports from TensorFlow have one on each side of every convolution.
        Dense graph attention of two layers (128 nodes, 8 heads of 32, batch 8, FP16), whose scores have their heads
        last: 15 kernels and 152 us -> 14 and 115 by a plain roofline of an L4.
    Numerics:
        Exact but for the order of summation in reductions.
    Refuses when:
        The number of Transposes would not fall, or the tensors they move would become larger, and an eighth of the
        elements is not enough: no match.
    """

    name: str = "transpose-push"
    stage: Stage = Stage.FOLD
    lossless: bool = True

    def find(self, model: ir.Model, target: Target) -> Findings:
        """Regions worth turning around, each named after its first node."""
        matches: list[Match] = []
        opset = model.graph.opset_imports.get("", 1)
        for graph in edit.all_graphs(model.graph):
            taken: set[ir.Node] = set()
            transposes = [node for node in graph if _perm_of(node) is not None]
            for perm, by_size in _layouts(transposes):
                for match in _regions(_Layout(graph, perm, opset, by_size), transposes):
                    if taken.isdisjoint(match.nodes):
                        taken.update(match.nodes)
                        matches.append(match)
        return Findings(tuple(matches))

    def rewrite(self, model: ir.Model, match: Match) -> Refusal | None:
        """Turn one region around."""
        perm = tuple(int(axis) for axis in match.choice.split())
        region = [node for node in match.nodes if not edit.is_op(node, "Transpose")]
        writer = _Writer(model, perm, region, self.name)
        for node in region:
            writer.enter(node)
        for node in region:
            writer.leave(node)
        for node in match.nodes:
            value = node.outputs[0]
            idle = not value.uses() and not value.is_graph_output()
            if idle and edit.is_op(node, "Transpose") and node.graph is not None:
                edit.remove_node(node)
        return None


def _perm_of(node: ir.Node) -> Perm | None:
    return (
        edit.ints_attribute(node, "perm")
        if edit.is_op(node, "Transpose") and edit.input_of(node, 0) is not None
        else None
    )


def _layouts(transposes: list[ir.Node]) -> Iterator[tuple[Perm, bool]]:
    """The permutations of regions, to be judged by the Transposes that go, then by the elements that these move."""
    perms = [perm for perm in map(_perm_of, transposes) if perm is not None and perm != tuple(sorted(perm))]
    yield from ((perm, False) for perm in dict.fromkeys(perms))
    yield from ((perm, True) for perm in dict.fromkeys(inverse(perm) for perm in perms if inverse(perm) != perm))


@dataclass
class _Layout:
    """One graph, one permutation, whether elements count or Transposes, and which nodes can be turned around.

    Where the permutation is its own inverse, both sides of a Transpose are the same tensor in the two layouts, and
    count as one value with two faces.
    """

    graph: ir.Graph
    perm: Perm
    opset: int
    by_size: bool = False
    back: Perm = ()
    _turning: dict[ir.Node, bool] = field(default_factory=dict)
    _hubs: dict[ir.Value, bool] = field(default_factory=dict)
    _values: dict[ir.Node, list[ir.Value]] = field(default_factory=dict)
    _reading: dict[ir.Node, tuple[int, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.back = inverse(self.perm)

    def turns(self, node: ir.Node | None) -> bool:
        """Whether ``node`` is of this graph and can be turned around."""
        if node is None or node.graph is not self.graph:
            return False
        if node not in self._turning:
            values = [value for value in (*node.inputs, *node.outputs) if value is not None]
            hub = any(self._is_hub(value) for value in values)
            self._turning[node] = not hub and can_permute(node, self.perm, self.opset)
        return self._turning[node]

    def _is_hub(self, value: ir.Value) -> bool:
        if value not in self._hubs:
            self._hubs[value] = not value.is_initializer() and len(value.uses()) > _MOST_USES
        return self._hubs[value]

    def reading(self, node: ir.Node) -> tuple[int, ...]:
        """The inputs that a node that turns reads as data."""
        if node not in self._reading:
            self._reading[node] = tuple(data_inputs(node, len(self.perm)))
        return self._reading[node]

    def is_origin(self, value: ir.Value) -> bool:
        """Whether ``value`` has the other layout to begin with: a Transpose makes it."""
        return self.perm != self.back and self._is_permuted(value)

    def _is_permuted(self, value: ir.Value) -> bool:
        node = value.producer()
        return node is not None and node.graph is self.graph and _perm_of(node) == self.perm

    def _face(self, value: ir.Value) -> ir.Value:
        """The value that stands for both sides of a Transpose."""
        node = value.producer()
        source = node.inputs[0] if node is not None and self.perm == self.back and self._is_permuted(value) else None
        return value if source is None else source

    def faces(self, value: ir.Value) -> Iterator[tuple[ir.Value, bool]]:
        """A value, and the same in the other layout."""
        yield value, False
        if self.perm == self.back:
            for user in dict.fromkeys(user for user, _ in value.uses()):
                if user.graph is self.graph and _perm_of(user) == self.perm:
                    yield user.outputs[0], True

    def makes(self, value: ir.Value) -> bool:
        """Whether a node that turns makes ``value``, in the layout."""
        node = value.producer()
        return node is not None and self.turns(node) and keeps_rank(node)

    def _inputs(self, node: ir.Node) -> list[ir.Value]:
        """The values a node that turns takes in the layout."""
        found = [node.inputs[index] for index in self.reading(node)]
        return list(dict.fromkeys(self._face(value) for value in found if value is not None))

    def values(self, node: ir.Node) -> list[ir.Value]:
        """The values of a node that turns, which have the layout."""
        if node not in self._values:
            self._values[node] = [*self._inputs(node), *(node.outputs if keeps_rank(node) else ())]
        return self._values[node]

    def neighbours(self, node: ir.Node) -> Iterator[ir.Node]:
        """Nodes that turn and share a value with ``node``."""
        for value in self.values(node):
            producer = value.producer()
            if producer is not None and self.makes(value):
                yield producer
            for face, _ in self.faces(value):
                for user, index in face.uses():
                    if self.turns(user) and index in self.reading(user):
                        yield user

    def is_back(self, node: ir.Node, value: ir.Value) -> bool:
        """Whether ``node`` undoes the permutation of ``value``, and its output can be replaced."""
        if node.graph is not self.graph or _perm_of(node) != self.back:
            return False
        if not node.outputs[0].is_graph_output():
            return True
        return _first_output(value, self.back) is node

    def cost(self, value: ir.Value, turned: set[ir.Node]) -> tuple[int, int]:
        """Transposes, and elements moved, that it takes to have ``value`` in the layouts its users want.

        Where elements count they come first, and a Transpose that only moves axes of one element is none.
        """
        native = value.producer() in turned if self.makes(value) else self.is_origin(value)
        if all(wanted == native for wanted in self._wanted(value, turned)):
            return 0, 0
        size = 1
        for dim in edit.static_shape(value) or (value.shape or ()):
            size *= dim if isinstance(dim, int) else 1
        if not self.by_size:
            return 1, size
        long = [axis for axis, dim in zip(self.perm, value.shape or (), strict=False) if dim != 1]
        return (0, 0) if long == sorted(long) and value.shape is not None else (size, 1)

    def _wanted(self, value: ir.Value, turned: set[ir.Node]) -> Iterator[bool]:
        """For each use of ``value``, whether it wants the other layout."""
        for face, swapped in self.faces(value):
            if face.is_graph_output():
                yield swapped
            for user, index in face.uses():
                if self.turns(user):
                    yield (user in turned and index in self.reading(user)) != swapped
                elif swapped or self.perm != self.back or not self.is_back(user, face):
                    yield self.is_back(user, face) != swapped


def _first_output(value: ir.Value, perm: Perm) -> ir.Node | None:
    """The first Transpose of ``value`` by ``perm`` that makes a graph output; only one can give ``value`` its name."""
    for user, _ in value.uses():
        if _perm_of(user) == perm and user.outputs[0].is_graph_output():
            return user
    return None


def _regions(layout: _Layout, transposes: list[ir.Node]) -> Iterator[Match]:
    """Regions of which it pays to turn all nodes."""
    seeds: list[ir.Node] = []
    for node in transposes:
        if _perm_of(node) == layout.perm:
            users = node.outputs[0].uses()
            seeds += [user for user, index in users if layout.turns(user) and index in layout.reading(user)]
        source = node.inputs[0]
        producer = source.producer() if source is not None and layout.makes(source) else None
        if _perm_of(node) == layout.back and producer is not None:
            seeds.append(producer)
    position = {node: index for index, node in enumerate(layout.graph)} if seeds else {}
    everything = {node for group in _connected(layout, seeds, None) for node in group}
    turned = _without_ends(layout, everything, position)
    for group in _connected(layout, sorted(turned, key=position.__getitem__), turned):
        values = dict.fromkeys(value for node in group for value in layout.values(node))
        before, after = (_total(layout, values, nodes) for nodes in (set(), set(group)))
        if _pays(layout, group, before, after):
            nodes = sorted(group, key=position.__getitem__)
            yield Match((*nodes, *_gone(layout, values)), choice=" ".join(str(axis) for axis in layout.perm))


def _pays(layout: _Layout, group: list[ir.Node], before: tuple[int, int], after: tuple[int, int]) -> bool:
    """Whether Transposes go, and do not move more for that; or, by size, whether they move far less."""
    if not layout.by_size:
        return after[0] < before[0] and after[1] <= before[1]
    return 0 < after[0] * _LESS <= before[0] and all(node.op_type in _SPREADING for node in group)


def _total(layout: _Layout, values: Iterable[ir.Value], turned: set[ir.Node]) -> tuple[int, int]:
    costs = [layout.cost(value, turned) for value in values]
    return sum(count for count, _ in costs), sum(size for _, size in costs)


def _connected(layout: _Layout, seeds: Iterable[ir.Node], within: set[ir.Node] | None) -> Iterator[list[ir.Node]]:
    """Groups of nodes that share values."""
    seen: set[ir.Node] = set()
    for seed in seeds:
        if seed in seen:
            continue
        seen.add(seed)
        group, stack = [], [seed]
        while stack:
            node = stack.pop()
            group.append(node)
            for other in layout.neighbours(node):
                if other not in seen and (within is None or other in within):
                    seen.add(other)
                    stack.append(other)
        yield group


def _without_ends(layout: _Layout, nodes: set[ir.Node], position: dict[ir.Node, int]) -> set[ir.Node]:
    """``nodes`` without those better left alone.

    They are taken back one by one, first where the cost falls, then where it stays the same.
    """
    turned = set(nodes)
    for strictly in (True, False):
        costs = {value: layout.cost(value, turned) for value in {v for node in turned for v in layout.values(node)}}
        # A node all of whose values cost nothing cannot do better.
        costly = {node for node in turned if any(costs[value][0] for value in layout.values(node))}
        queue = sorted(costly, key=position.__getitem__)
        while queue:
            node = queue.pop()
            if node not in turned:
                continue
            values = layout.values(node)
            kept = _total(layout, values, turned)
            turned.discard(node)
            left = _total(layout, values, turned)
            if left > kept or (strictly and left == kept):
                turned.add(node)
            else:
                queue += [other for other in layout.neighbours(node) if other in turned]
    return turned


def _gone(layout: _Layout, values: Iterable[ir.Value]) -> Iterator[ir.Node]:
    """The Transposes around a region that may disappear."""
    found: dict[ir.Node, None] = {}
    for value in values:
        producer = value.producer()
        if producer is not None and layout.is_origin(value):
            found[producer] = None
        found.update((user, None) for user, _ in value.uses() if layout.is_back(user, value))
    return iter(found)


class _Writer:
    """Turns the nodes of one region, in graph order."""

    def __init__(self, model: ir.Model, perm: Perm, region: list[ir.Node], recipe: str) -> None:
        self._perm, self._back = perm, inverse(perm)
        self._splice = edit.Splice(model, region[0], recipe)
        self._region, self._recipe = frozenset(region), recipe
        self._entries: dict[ir.Value, ir.Value] = {}

    def enter(self, node: ir.Node) -> None:
        """Give a node its data in the other layout, and its attributes for it."""
        for index in data_inputs(node, len(self._perm)):
            value = node.inputs[index]
            if value is not None and value.producer() not in self._region:
                node.replace_input_with(index, self._entry(value, node))
        permute(node, self._perm, self._splice.names)
        edit.tag(node, self._recipe)

    def _entry(self, value: ir.Value, node: ir.Node) -> ir.Value:
        """A value from outside in the other layout."""
        producer, graph = value.producer(), edit.graph_of(node)
        if producer is not None and producer.graph is graph and _perm_of(producer) == self._perm:
            origin = producer.inputs[0]
            if origin is not None and origin.producer() not in self._region:
                return origin
        if value not in self._entries:
            back = self._ways_back(value, graph)
            self._entries[value] = made = self._splice.behind(value, "Transpose", attributes={"perm": self._back})
            made.shape = None if value.shape is None else ir.Shape([value.shape[axis] for axis in self._back])
            self._drop(back, made)
        return self._entries[value]

    def leave(self, node: ir.Node) -> None:
        """Give the outputs of a node to those that want the old layout, and those that want the new one."""
        if not keeps_rank(node) or node.graph is None:
            return
        for value in node.outputs:
            old, back = value.shape, self._ways_back(value, node.graph)
            self._splice.restore(value, "Transpose", {*self._region, *back}, attributes={"perm": self._perm})
            if old is not None:
                value.shape = ir.Shape([old[axis] for axis in self._back])
            self._drop(back, value)

    def _drop(self, back: list[ir.Node], turned: ir.Value) -> None:
        """Replace Transposes by the value that has their layout now."""
        for node in back:
            old = node.outputs[0]
            if not edit.can_replace(old, turned):
                continue
            name, was_output = str(old.name), old.is_graph_output()
            edit.replace_value(old, turned)
            if not was_output and not turned.is_graph_output():
                old.name, turned.name = self._splice.names.value(f"{name}_replaced"), name

    def _ways_back(self, value: ir.Value, graph: ir.Graph) -> list[ir.Node]:
        """Transposes that undo the permutation of ``value``, of which one may make a graph output."""
        first = _first_output(value, self._back)
        users = dict.fromkeys(user for user, _ in value.uses())
        return [
            user
            for user in users
            if user.graph is graph and _perm_of(user) == self._back
            if user is first or not user.outputs[0].is_graph_output()
        ]
