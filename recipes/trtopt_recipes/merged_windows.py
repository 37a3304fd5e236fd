"""Attention in windows that have an axis of their own."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from trtopt.graph import edit
from trtopt.graph.attention import Attention, attention_of
from trtopt.graph.channels.rules import volume
from trtopt.graph.cost import POINTWISE
from trtopt.graph.permute import inputs_along
from trtopt.rewrite.protocol import Findings, Match, Refusal, Stage, Target

_NONE = 1 << 10
_AXES = 4
"""Axes of the attention that recipes look for: batch, heads, tokens, size."""

_BROADCAST = edit.BROADCAST | {"PRelu"}
_ELEMENTWISE = _BROADCAST | POINTWISE - {"QuantizeLinear"} | {"Cast", "Identity"}
_NORMS = ("LayerNormalization", "RMSNormalization")

_Size = int | str | None


class _Place(NamedTuple):
    """Where two axes of a value are.

    Attributes:
        outer: The one that the other is merged into.
        inner: The other; or, ``within``, the axis of tokens that it is the last part of.
    """

    outer: int
    inner: int
    within: bool = False

    @property
    def gone(self) -> int:
        """The axis that is left out when they are merged; one behind all others where none is."""
        return _NONE if self.within else self.inner


@dataclass(frozen=True)
class MergedWindows:
    """Computes attention in windows on [batch * windows, heads, tokens, size], and what lies between on such tokens.

    Rewrite:
        Attention of [batch, heads, windows, tokens, size], or with its axes in another order, treats the entries of
        the batch and the windows alike, as normalizations, products with a weight and element-wise operators do. The
        two axes become one in a region of such operators; a Reshape merges them where a value enters the region, and
        splits them where one leaves it. Likewise where blocks take every n-th token as a window (Hiera): tokens are
        brought into the order of windows once, in front of several blocks, and back behind them.
    Requires:
        Opset 13. All axes but one are known where values enter and leave; the heads are split or merged in between, and
        no operand there is the same for all of the one axis and not of the other (a mask per window). More attentions
        than values that are transposed where they enter or leave.
    Why faster:
        The recipes for attention look for four axes, and the compiler of TensorRT for RTX lets attention of four read
        its parts in place: of five it copies each of them before, and the result behind. Batch 8, FP16, by a plain
        roofline of an L4: NesT of five blocks 64 -> 59 kernels and 2429 -> 2092 us, Hiera-T 63 -> 57 and 2940 -> 2662.
    Numerics:
        Exact: the same sums.
    Refuses when:
        Never: where the axes cannot be merged there is no match.
    """

    name: str = "merged-windows"
    stage: Stage = Stage.FOLD
    lossless: bool = True

    def find(self, model: ir.Model, target: Target) -> Findings:
        """Regions around attention of more than four axes, each named after its Softmax."""
        opset = model.graph.opset_imports.get("", 1)
        matches, taken, found = list[Match](), set[ir.Node](), _Found()
        for node in model.graph if opset >= 13 else ():
            attention = attention_of(node, opset) if edit.is_op(node, "Softmax") else None
            dims = () if attention is None else _dims(attention.scores.outputs[0])
            if attention is None or len(dims) <= _AXES or 0 in dims or node in taken:
                continue
            places = [_Place(*pair) for pair in itertools.permutations(range(len(dims) - 2), 2)]
            regions = [(at, region) for at in places if (region := _region(attention, at, found)) is not None]
            best = max(regions, key=lambda item: (item[1].gain(), len(item[1].nodes)), default=None)
            if best is not None and taken.isdisjoint(best[1].nodes):
                taken.update(best[1].nodes)
                others = (each for each in best[1].nodes if each is not node)
                matches.append(Match((node, *others), choice=f"{best[0].outer} {best[0].inner}"))
        return Findings(tuple(matches))

    def rewrite(self, model: ir.Model, match: Match) -> Refusal | None:
        """Merge the two axes in one region."""
        outer, inner = (int(axis) for axis in match.choice.split())
        attention = attention_of(match.nodes[0], model.graph.opset_imports.get("", 1))
        region = None if attention is None else _region(attention, _Place(outer, inner), {})
        if region is None:
            return Refusal(match.label, "it has changed since it was found")
        splice = edit.Splice(model, match.nodes[0], self.name)
        for node in region.nodes:
            _merge(node, region, splice)
            edit.tag(node, self.name)
        for value, place in region.entries():
            merged = _entered(value, place, region.windows, splice)
            for user, index in value.uses():
                if index in region.nodes.get(user, ()):
                    user.replace_input_with(index, merged)
        for value in region.outputs():
            if region.leaves(value):
                _leave(value, region, splice)
            value.shape = None
        return None


@dataclass
class _Region:
    """Nodes that work on each entry of two axes alike.

    Attributes:
        windows: The length of the axis that is merged into the other.
        places: Where the axes are in values.
        nodes: And in the inputs of each node, by index; inputs that are left out do not have them.
    """

    windows: _Size
    places: dict[ir.Value, _Place]
    nodes: dict[ir.Node, dict[int, _Place]] = field(default_factory=dict)

    def entries(self) -> Iterator[tuple[ir.Value, _Place]]:
        """Values from outside."""
        return ((value, place) for value, place in self.places.items() if value.producer() not in self.nodes)

    def outputs(self) -> Iterator[ir.Value]:
        """Values that nodes of the region make."""
        return (value for value in self.places if value.producer() in self.nodes)

    def leaves(self, value: ir.Value) -> bool:
        """Whether something else reads a value."""
        return value.is_graph_output() or any(user not in self.nodes for user, _ in value.uses())

    def ports(self, node: ir.Node) -> Iterator[ir.Value]:
        """The values of a node that have the axes."""
        yield from node.outputs
        yield from (value for index in self.nodes[node] if (value := node.inputs[index]) is not None)

    def gain(self) -> int:
        """How many more attentions there are than values that have to be transposed where they enter or leave."""
        attentions = sum(edit.is_op(node, "Softmax") and len(_dims(node.outputs[0])) > _AXES for node in self.nodes)
        return attentions - sum(map(self._cost, self.places))

    def _cost(self, value: ir.Value) -> int:
        """1 for a value that enters or leaves, and is transposed for it, more than any saves where it cannot be."""
        place = self.places[value]
        is_read = any(index in self.nodes.get(user, ()) for user, index in value.uses())
        if not (self.leaves(value) if value.producer() in self.nodes else is_read):
            return 0
        if not _merged(_dims(value), place, self.windows):
            return _NONE
        is_free = place.inner == place.outer + 1 and not place.within
        return 0 if is_free or edit.constant_tensor_of(value) is not None else 1

    def shrink(self) -> None:
        """Leave out nodes where no more values have to be transposed for it, until none of those that have to is
        beside one."""
        queue = [node for node in self.nodes if any(map(self._cost, self.ports(node)))]
        while queue:
            node = queue.pop()
            if node not in self.nodes:
                continue
            ports, given = list(dict.fromkeys(self.ports(node))), self.nodes[node]
            before = sum(map(self._cost, ports))
            del self.nodes[node]
            if not before or sum(map(self._cost, ports)) > before:
                self.nodes[node] = given
                continue
            beside = [each for value in ports for each in (value.producer(), *(user for user, _ in value.uses()))]
            queue += [each for each in beside if each is not None and each in self.nodes]

    def around(self, start: ir.Node) -> _Region:
        """The nodes that are connected with one of them."""
        found, queue = dict.fromkeys([start]), [start]
        while queue:
            for value in self.ports(queue.pop()):
                for node in (value.producer(), *(user for user, _ in value.uses())):
                    if node in self.nodes and node not in found and value in self.ports(node):
                        found[node] = None
                        queue.append(node)
        nodes = {node: self.nodes[node] for node in self.nodes if node in found}
        ports = {value: self.places[value] for node in nodes for value in self.ports(node)}
        return _Region(self.windows, ports, nodes)


_Found = dict[tuple[ir.Value, _Place], _Region]
"""Regions by their values and where the axes are in these: that of one attention is often that of others."""


def _region(attention: Attention, place: _Place, found: _Found) -> _Region | None:
    """The region around attention that two axes of the scores are to be merged in; None where there is none."""
    start = attention.scores.outputs[0]
    if (start, place) not in found:
        region = _spread(start, place)
        region.shrink()
        found.update(dict.fromkeys(region.places.items(), region))
    region = found[start, place]
    if not region.nodes.keys() >= set(attention.nodes):
        return None
    region = region.around(attention.scores)
    splits = any(perm[:-2] != tuple(range(len(perm) - 2)) for perm in map(_perm_of, region.nodes))
    return region if splits and region.gain() > 0 else None


def _spread(start: ir.Value, place: _Place) -> _Region:
    """All nodes that two axes of a value can be followed through; none where they would be at two places of a value, or
    a node would read a value as what has the axes and as what has not."""
    region, queue = _Region(_dims(start)[place.inner], {start: place}), [start]
    maker = start.producer()
    graph = None if maker is None else maker.graph
    while queue:
        value = queue.pop()
        for node in dict.fromkeys([value.producer(), *(user for user, _ in value.uses())]):
            if node is None or node in region.nodes or node.graph is not graph:
                continue
            found = _carried(node, value, region)
            if found is None:
                continue
            made, given = found
            ports = [(output, made) for output in node.outputs]
            ports += [(source, at) for index, at in given.items() if (source := node.inputs[index]) is not None]
            if any(region.places.get(port, at) != at for port, at in ports):
                region.nodes.clear()
                return region
            region.nodes[node] = given
            queue += [port for port, _ in ports if port not in region.places]
            region.places.update(ports)
    if any(index not in region.nodes.get(user, (index,)) for value in region.places for user, index in value.uses()):
        region.nodes.clear()
    return region


def _perm_of(node: ir.Node) -> tuple[int, ...]:
    return (edit.ints_attribute(node, "perm") or ()) if edit.is_op(node, "Transpose") else ()


def _carried(node: ir.Node, value: ir.Value, region: _Region) -> tuple[_Place, dict[int, _Place]] | None:
    """Where the axes are in what a node makes, and in its inputs, by where they are in ``value``, one of both; None
    where it does more than to treat their entries alike."""
    place, output, is_made = region.places[value], node.outputs[0], value.producer() is node
    if output.shape is None or any(port.shape is None for port in node.inputs if port is not None):
        return None
    if edit.is_op(node, "Reshape") and region.windows != 1:
        return _reshaped(node, value, region)
    along = [_along(node, axis) for axis in range(len(output.shape))]
    indices = [index for index, port in enumerate(node.inputs) if port is value]
    if is_made:
        pairs = [place[:2]]
    else:
        ends = [[axis for axis, given in enumerate(along) if given.get(indices[0]) == each] for each in place[:2]]
        pairs = [(outer, inner) for outer in ends[0] for inner in ends[1]]
    for outer, inner in pairs:
        first, second = along[outer], along[inner]
        given = {i: _Place(axis, second[i], place.within) for i, axis in first.items() if i in second}
        others = [index for index in second if index not in first and not _is_one(node, index, second[index])]
        is_same = is_made or all(given.get(index, place) == place for index in indices)
        made = _Place(outer, inner, place.within)
        is_apart = all(at.outer != at.inner for at in (made, *given.values()))
        if given and len(given) == len(first) and not others and is_same and is_apart:
            return None if _are_rows_of_many(node, made) else (made, given)
    return None


def _are_rows_of_many(node: ir.Node, made: _Place) -> bool:
    """Whether a product would be left without its axis of rows, and another, of the right operand, in its place."""
    rows = len(_dims(node.outputs[0])) - 2
    return edit.is_op(node, "MatMul") and made.gone == rows and len(_dims(node.inputs[1])) > 2


def _reshaped(node: ir.Node, value: ir.Value, region: _Region) -> tuple[_Place, dict[int, _Place]] | None:
    """As :func:`_carried`, for a Reshape: it keeps the order of elements, so that as many lie behind an entry."""
    source, output = node.inputs[0], node.outputs[0]
    if source is None or not isinstance(region.windows, int):
        return None
    pairs = [(made, given[0]) for made in range(len(_dims(output))) if 0 in (given := inputs_along(node, made))]
    outer = dict(pairs if value is output else [pair[::-1] for pair in pairs]).get(region.places[value].outer)
    other, behind = source if value is output else output, volume(_dims(value)[region.places[value].inner + 1 :])
    dims = _dims(other)
    inner = [
        axis for axis, dim in enumerate(dims) if volume(dims[axis + 1 :]) == behind and _holds(dim, region.windows)
    ]
    if outer is None or behind is None or len(inner) != 1 or inner[0] <= outer:
        return None
    place = _Place(outer, inner[0], dims[inner[0]] != region.windows)
    made, at = (region.places[value], place) if value is output else (place, region.places[value])
    return (made, {0: at}) if at.outer < at.inner and _merged(_dims(output), made, region.windows) else None


def _holds(dim: _Size, windows: int) -> bool:
    return isinstance(dim, int) and dim % windows == 0


def _along(node: ir.Node, axis: int) -> dict[int, int]:
    """As :func:`inputs_along`, also for an axis of length 1."""
    found, shape = inputs_along(node, axis), node.outputs[0].shape or ()
    if found or shape[axis] != 1 or node.domain != "":
        return found
    ranks = [0 if value is None or value.shape is None else len(value.shape) for value in node.inputs]
    if edit.is_op(node, "MatMul"):
        is_other = axis >= len(shape) - 2 or min(ranks) < 2
    elif edit.is_op(node, *_NORMS):
        is_other = axis >= edit.int_attribute(node, "axis", -1) % len(shape) or any(v.uses() for v in node.outputs[1:])
    else:
        is_other = node.op_type not in _ELEMENTWISE
    ends = {index: rank - len(shape) + axis for index, rank in enumerate(ranks)}
    return {} if is_other else {index: end for index, end in ends.items() if end >= 0}


def _is_one(node: ir.Node, index: int, axis: int) -> bool:
    value = node.inputs[index]
    return value is not None and value.shape is not None and value.shape[axis] == 1


def _dims(value: ir.Value | None) -> tuple[_Size, ...]:
    return () if value is None else edit.dims_of_value(value) or ()


def _merged(dims: Sequence[_Size], place: _Place, windows: _Size) -> list[int]:
    """The dimensions for a Reshape that merges two axes; empty where more than one is not known."""
    apart, pair = _apart(dims, place, windows), (dims[place.outer], windows)
    whole = pair[0] * pair[1] if isinstance(pair[0], int) and isinstance(pair[1], int) else -1
    gone = place.inner + place.within
    sizes = [whole if axis == place.outer else size for axis, size in enumerate(apart) if axis != gone]
    return sizes if apart.count(-1) <= 1 and 0 not in sizes else []


def _apart(dims: Sequence[_Size], place: _Place, windows: _Size) -> list[int]:
    """The dimensions with windows that are within an axis behind it; -1 for what is not known."""
    found = list(dims)
    if place.within and isinstance(windows, int) and isinstance(dim := dims[place.inner], int):
        found[place.inner : place.inner + 1] = [dim // windows, windows]
    return [size if isinstance(size, int) else -1 for size in found]


def _order(rank: int, place: _Place) -> list[int]:
    """The order of axes with windows, which have one of their own, right behind the axis that they are merged into."""
    inner = place.inner + place.within
    others = [axis for axis in range(rank) if axis != inner]
    at = others.index(place.outer) + 1
    return [*others[:at], inner, *others[at:]]


def _entered(value: ir.Value, place: _Place, windows: _Size, splice: edit.Splice) -> ir.Value:
    """A value from outside with the axes merged."""
    dims, found = _dims(value), value
    apart, merged = _apart(dims, place, windows), _merged(dims, place, windows)
    order = _order(len(apart), place)
    steps: list[tuple[str, list[int]]] = [("Reshape", apart)] if place.within else []
    steps += [("Transpose", order)] if order != sorted(order) else []
    for kind, numbers in (*steps, ("Reshape", merged)):
        if kind == "Transpose":
            found = splice.behind(found, kind, attributes={"perm": numbers})
        else:
            found = splice.behind(found, kind, splice.ints(numbers, value, "shape"))
        found.shape = None
    return found


def _leave(value: ir.Value, region: _Region, splice: edit.Splice) -> None:
    """Give a value with the axes apart to what reads it outside."""
    place, dims, shape = region.places[value], _dims(value), value.shape
    apart = _apart(dims, place, region.windows)
    order = _order(len(apart), place)
    made = splice.restore(value, "Reshape", region.nodes, splice.ints([apart[axis] for axis in order], value, "shape"))
    if order != sorted(order):
        back = [order.index(axis) for axis in range(len(order))]
        made.shape = None
        made = splice.restore(made, "Transpose", (), attributes={"perm": back})
    if place.within:
        made.shape = None
        sizes = [size if isinstance(size, int) else -1 for size in dims]
        made = splice.restore(made, "Reshape", (), splice.ints(sizes, value, "shape"))
    made.shape = None if shape is None else shape.copy()


def _merge(node: ir.Node, region: _Region, splice: edit.Splice) -> None:
    """Write one node for merged axes; its inputs that have them will be merged."""
    given, output = region.nodes[node], node.outputs[0]
    made, before, dims = region.places[output], _dims(node.inputs[0]), _dims(output)
    source = given[0].gone if 0 in given else _NONE
    if edit.is_op(node, "MatMul", *_BROADCAST, *_NORMS):
        matrix = 2 if edit.is_op(node, "MatMul") else 0
        for index, value in enumerate(node.inputs):
            axis = len(_dims(value)) - len(dims) + made.gone
            if value is not None and index not in given and 0 <= axis < len(_dims(value)) - matrix:
                node.replace_input_with(index, _without(value, axis, splice, node))
    if edit.is_op(node, "Reshape"):
        node.replace_input_with(1, splice.ints(_merged(dims, made, region.windows), output, "shape"))
        node.attributes.pop("allowzero", None)
    elif edit.is_op(node, "Transpose"):
        perm = edit.ints_attribute(node, "perm") or tuple(reversed(range(len(dims))))
        node.attributes["perm"] = ir.AttrInt64s("perm", [_less(axis, source) for axis in perm if axis != source])
    elif edit.is_op(node, "Squeeze"):
        _set_axes(node, 1, [_less(axis % len(before), source) for axis in edit.axes_of(node) or ()], splice)
    elif edit.is_op(node, "Unsqueeze"):
        _set_axes(node, 1, [_less(axis % len(dims), made.gone) for axis in edit.axes_of(node) or ()], splice)
    elif edit.is_op(node, "Slice") or node.op_type.startswith("Reduce"):
        index = 3 if edit.is_op(node, "Slice") else 1
        array = edit.constant_of(edit.input_of(node, index))
        axes = edit.ints_attribute(node, "axes") or () if array is None else array.ravel().tolist()
        _set_axes(node, index, [_less(axis % len(before), source) for axis in axes], splice)
    elif "axis" in node.attributes or edit.is_op(node, "Gather", "Split"):
        axis = edit.int_attribute(node, "axis", 0) % len(before)
        node.attributes["axis"] = ir.AttrInt64("axis", _less(axis, source))


def _less(axis: int, gone: int) -> int:
    """An axis, counted without one that is gone."""
    return axis - (axis > gone)


def _set_axes(node: ir.Node, index: int, axes: Sequence[int], splice: edit.Splice) -> None:
    if "axes" in node.attributes:
        node.attributes["axes"] = ir.AttrInt64s("axes", axes)
    elif (old := edit.constant_of(edit.input_of(node, index))) is not None:
        array = np.asarray(axes, old.dtype)
        node.replace_input_with(index, splice.constant(array, node.outputs[0], "axes"))


def _without(value: ir.Value, axis: int, splice: edit.Splice, node: ir.Node) -> ir.Value:
    """An operand without an axis of length 1."""
    array = edit.constant_of(value)
    if array is not None:
        return splice.constant(array.squeeze(axis), value, "merged")
    axes = splice.ints([axis], value, "axes")
    return splice.fresh("Squeeze", value, axes, like=value, before=node)
