"""Attention in windows that have an axis of their own."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from trtopt.graph import edit
from trtopt.graph.attention import Attention, attention_of
from trtopt.graph.cost import POINTWISE
from trtopt.graph.permute import inputs_along
from trtopt.rewrite.protocol import Findings, Match, Refusal, Stage, Target

_AXES = 4
"""Axes of the attention that recipes look for: batch, heads, tokens, size."""

_BROADCAST = edit.BROADCAST | {"PRelu"}
_ELEMENTWISE = _BROADCAST | POINTWISE - {"QuantizeLinear"} | {"Cast", "Identity"}
_NORMS = ("LayerNormalization", "RMSNormalization")

_Place = tuple[int, int]
"""Two axes of a value, of which the second is merged into the first."""


@dataclass(frozen=True)
class MergedWindows:
    """Computes attention in windows on [batch * windows, heads, tokens, size], and what lies between on such tokens.

    Rewrite:
        Attention of [batch, heads, windows, tokens, size], or with its axes in another order, treats the entries of
        the batch and the windows alike, as normalizations, products with a weight and element-wise operators do. The
        two axes become one in a region of such operators; a Reshape merges them where a value enters the region, and
        splits them where one leaves it.
    Requires:
        Opset 13. The two axes are neighbours, and all others but one known, where values enter and leave; the heads are
        split or merged in between, and no operand there is the same for all of the one axis and not of the other (a
        mask per window).
    Why faster:
        The recipes for attention look for four axes, and the compiler of TensorRT for RTX lets attention of four read
        its parts in place: of five it copies each of them before, and the result behind. NesT of five blocks, batch 8,
        FP16: 64 -> 54 kernels and 2429 -> 2139 us by a plain roofline of an L4.
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
        matches, taken = list[Match](), set[ir.Node]()
        for node in model.graph if opset >= 13 else ():
            attention = attention_of(node, opset) if edit.is_op(node, "Softmax") else None
            shape = None if attention is None else attention.scores.outputs[0].shape
            if attention is None or shape is None or len(shape) <= _AXES or node in taken:
                continue
            places = itertools.permutations(range(len(shape) - 2), 2)
            regions = [(place, region) for place in places if (region := _region(attention, place)) is not None]
            place, region = max(regions, key=lambda item: len(item[1].nodes), default=((0, 0), None))
            if region is not None and taken.isdisjoint(region.nodes):
                taken.update(region.nodes)
                others = (each for each in region.nodes if each is not node)
                matches.append(Match((node, *others), choice=f"{place[0]} {place[1]}"))
        return Findings(tuple(matches))

    def rewrite(self, model: ir.Model, match: Match) -> Refusal | None:
        """Merge the two axes in one region."""
        outer, inner = (int(axis) for axis in match.choice.split())
        attention = attention_of(match.nodes[0], model.graph.opset_imports.get("", 1))
        region = None if attention is None else _region(attention, (outer, inner))
        if region is None:
            return Refusal(match.label, "it has changed since it was found")
        splice = edit.Splice(model, match.nodes[0], self.name)
        for node in region.nodes:
            _merge(node, region, splice)
            edit.tag(node, self.name)
        for value, place in region.entries():
            merged = splice.behind(value, "Reshape", _constant(splice, _merged(_dims(value), place), value))
            merged.shape = None
            for user, index in value.uses():
                if index in region.nodes.get(user, ()):
                    user.replace_input_with(index, merged)
        for value in region.outputs():
            if region.leaves(value):
                shape = [dim if isinstance(dim, int) else -1 for dim in _dims(value)]
                splice.restore(value, "Reshape", region.nodes, _constant(splice, shape, value))
            value.shape = None
        return None


@dataclass
class _Region:
    """Nodes that work on each entry of two axes alike.

    Attributes:
        places: Where the axes are in values.
        nodes: And in the inputs of each node, by index; inputs that are left out do not have them.
    """

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

    def shrink(self) -> None:
        """Leave nodes out until the axes can be merged where values enter, and split where they leave."""
        while True:
            borders = [
                *self.entries(),
                *((value, self.places[value]) for value in self.outputs() if self.leaves(value)),
            ]
            bad = [value for value, at in borders if at[1] != at[0] + 1 or not _merged(_dims(value), at)]
            kept = {n: at for n, at in self.nodes.items() if not any(value in bad for value in self.ports(n))}
            if len(kept) == len(self.nodes):
                return
            self.nodes = kept
            inside = [value for node in kept for value in self.ports(node)]
            self.places = {value: self.places[value] for value in inside}

    def ports(self, node: ir.Node) -> Iterator[ir.Value]:
        """The values of a node that have the axes."""
        yield from node.outputs
        yield from (value for index in self.nodes[node] if (value := node.inputs[index]) is not None)


def _region(attention: Attention, place: _Place) -> _Region | None:
    """The largest region around attention that two axes of the scores can be merged in; None where there is none."""
    start, graph = attention.scores.outputs[0], attention.scores.graph
    region, queue = _Region(places={start: place}), [start]
    while queue:
        value = queue.pop()
        for node in dict.fromkeys([value.producer(), *(user for user, _ in value.uses())]):
            if node is None or node in region.nodes or node.graph is not graph:
                continue
            found = _carried(node, value, region.places[value])
            if found is None:
                continue
            made, given = found
            ports = [(output, made) for output in node.outputs]
            ports += [(source, at) for index, at in given.items() if (source := node.inputs[index]) is not None]
            if any(region.places.get(port, at) != at for port, at in ports):
                return None
            region.nodes[node] = given
            queue += [port for port, _ in ports if port not in region.places]
            region.places.update(ports)
    region.shrink()
    moves = any(perm[:-2] != tuple(range(len(perm) - 2)) for perm in map(_perm_of, region.nodes))
    return region if moves and region.nodes.keys() >= set(attention.nodes) else None


def _perm_of(node: ir.Node) -> tuple[int, ...]:
    return (edit.ints_attribute(node, "perm") or ()) if edit.is_op(node, "Transpose") else ()


def _carried(node: ir.Node, value: ir.Value, place: _Place) -> tuple[_Place, dict[int, _Place]] | None:
    """Where the axes are in what a node makes, and in its inputs, where they are at ``place`` of ``value``, one of
    both; None where it does more than to treat their entries alike."""
    output = node.outputs[0]
    if output.shape is None or any(port.shape is None for port in node.inputs if port is not None):
        return None
    along = [_along(node, axis) for axis in range(len(output.shape))]
    indices = [index for index, port in enumerate(node.inputs) if port is value]
    if value.producer() is node:
        made = [place]
    else:
        ends = [[axis for axis, given in enumerate(along) if given.get(indices[0]) == each] for each in place]
        made = [(outer, inner) for outer in ends[0] for inner in ends[1]]
    for outer, inner in made:
        first, second = along[outer], along[inner]
        given = {index: (axis, second[index]) for index, axis in first.items() if index in second}
        others = [index for index in second if index not in first and not _is_one(node, index, second[index])]
        is_whole = bool(given) and len(given) == len(first) and not others
        if is_whole and all(given.get(index, place) == place for index in indices if value.producer() is not node):
            return ((outer, inner), given) if _is_written(node, (outer, inner), given) else None
    return None


def _along(node: ir.Node, axis: int) -> dict[int, int]:
    """As :func:`inputs_along`, also for an axis of length 1."""
    found, shape = inputs_along(node, axis), node.outputs[0].shape or ()
    if found or shape[axis] != 1 or node.domain != "":
        return found
    if edit.is_op(node, "MatMul"):
        is_other = axis >= len(shape) - 2
    elif edit.is_op(node, *_NORMS):
        is_other = axis >= edit.int_attribute(node, "axis", -1) % len(shape) or any(v.uses() for v in node.outputs[1:])
    else:
        is_other = node.op_type not in _ELEMENTWISE
    ranks = [0 if value is None or value.shape is None else len(value.shape) for value in node.inputs]
    ends = {index: rank - len(shape) + axis for index, rank in enumerate(ranks)}
    return {} if is_other else {index: end for index, end in ends.items() if end >= 0}


def _is_one(node: ir.Node, index: int, axis: int) -> bool:
    value = node.inputs[index]
    return value is not None and value.shape is not None and value.shape[axis] == 1


def _is_written(node: ir.Node, made: _Place, given: dict[int, _Place]) -> bool:
    """Whether a node can be written for the merged axes."""
    if not edit.is_op(node, "Reshape"):
        return not edit.is_op(node, "Squeeze", "Unsqueeze") or edit.axes_of(node) is not None
    before, after = _dims(node.inputs[0]), _dims(node.outputs[0])
    beside = made[1] == made[0] + 1 and given[0][1] == given[0][0] + 1
    alike = made == given[0] and before[: max(made) + 1] == after[: max(made) + 1]
    return (beside or alike) and bool(_merged(after, made))


def _dims(value: ir.Value | None) -> tuple[int | str | None, ...]:
    return () if value is None else edit.dims_of_value(value) or ()


def _merged(dims: Sequence[int | str | None], place: _Place) -> list[int]:
    """The dimensions for a Reshape that merges two axes; empty where more than one is not known."""
    outer, inner = place
    pair = dims[outer], dims[inner]
    whole = pair[0] * pair[1] if isinstance(pair[0], int) and isinstance(pair[1], int) else -1
    found = [whole if axis == outer else dim for axis, dim in enumerate(dims) if axis != inner]
    sizes = [dim if isinstance(dim, int) else -1 for dim in found]
    apart = sum(not isinstance(dim, int) for dim in dims)
    return sizes if sizes.count(-1) <= 1 and apart <= 1 and 0 not in sizes else []


def _constant(splice: edit.Splice, array: Sequence[int], like: ir.Value) -> ir.Value:
    return splice.constant(np.asarray(array, np.int64), like, "shape")


def _merge(node: ir.Node, region: _Region, splice: edit.Splice) -> None:
    """Write one node for merged axes; its inputs that have them will be merged."""
    given, output = region.nodes[node], node.outputs[0]
    made, before, dims = region.places[output], _dims(node.inputs[0]), _dims(output)
    source = given[0][1] if 0 in given else -1
    if edit.is_op(node, "Reshape"):
        node.replace_input_with(1, _constant(splice, _merged(dims, made), output))
        node.attributes.pop("allowzero", None)
    elif edit.is_op(node, "Transpose"):
        perm = edit.ints_attribute(node, "perm") or tuple(reversed(range(len(dims))))
        node.attributes["perm"] = ir.AttrInt64s("perm", [_less(axis, source) for axis in perm if axis != source])
    elif edit.is_op(node, "Squeeze"):
        _set_axes(node, 1, [_less(axis % len(before), source) for axis in edit.axes_of(node) or ()], splice)
    elif edit.is_op(node, "Unsqueeze"):
        _set_axes(node, 1, [_less(axis % len(dims), made[1]) for axis in edit.axes_of(node) or ()], splice)
    elif edit.is_op(node, "Slice") or node.op_type.startswith("Reduce"):
        index = 3 if edit.is_op(node, "Slice") else 1
        array = edit.constant_of(edit.input_of(node, index))
        axes = edit.ints_attribute(node, "axes") or () if array is None else array.ravel().tolist()
        _set_axes(node, index, [_less(axis % len(before), source) for axis in axes], splice)
    elif edit.is_op(node, "MatMul", *_BROADCAST):
        for index, value in enumerate(node.inputs):
            axis = len(_dims(value)) - len(dims) + made[1]
            if value is not None and index not in given and axis >= 0:
                node.replace_input_with(index, _without(value, axis, splice, node))
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
    axes = splice.constant(np.asarray([axis], np.int64), value, "axes")
    return splice.fresh("Squeeze", value, axes, like=value, before=node)
