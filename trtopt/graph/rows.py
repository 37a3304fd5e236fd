"""Whether the rows of a batch are alone: what a network gives for one row follows from that row and constants only.

The rows are followed from the inputs to the outputs. A node that may mix them, or that is not known, ends the proof.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from trtopt.graph.cost import POINTWISE
from trtopt.graph.edit import (
    axes_of,
    constant_of,
    input_of,
    int_attribute,
    ints_attribute,
    static_shape,
    string_attribute,
    subgraphs_of,
)


@dataclass(frozen=True)
class _Rows:
    """Entries ``block * r`` to ``block * (r + 1)`` of the axis belong to row ``r``."""

    axis: int
    block: int = 1


class _MixedError(Exception):
    """A node makes one row of several, or may."""


def are_alone(model: ir.Model, rows: int) -> bool:
    """Whether row ``r`` of every output follows from row ``r`` of the inputs alone.

    Rows are the first axis of the inputs that have ``rows`` there, and of all outputs; other inputs belong to all.

    Args:
        model: A model whose shapes are known and static; not changed.
        rows: The size of the batch, at least 2.

    Returns:
        False where a node mixes rows, where that is not known, and where an output has no rows.

    Example:
        A classifier is; one that subtracts the mean over the batch is not.
    """
    opset = model.opset_imports.get("", 0)
    found: dict[ir.Value, _Rows | None] = {
        value: _Rows(0) if (static_shape(value) or (0,))[0] == rows else None for value in model.graph.inputs
    }
    try:
        for node in model.graph:
            for value, place in zip(node.outputs, _places(node, found, rows, opset), strict=True):
                shape = static_shape(value)
                if place is not None and (shape is None or shape[place.axis : place.axis + 1] != (rows * place.block,)):
                    return False
                found[value] = place
    except _MixedError:
        return False
    return all(found.get(value) == _Rows(0) for value in model.graph.outputs)


def _places(node: ir.Node, found: dict[ir.Value, _Rows | None], rows: int, opset: int) -> list[_Rows | None]:
    """Where the outputs of a node have the rows."""
    places = [None if value is None else found.get(value) for value in node.inputs]
    if subgraphs_of(node):
        raise _MixedError
    if not any(places):
        return [None] * len(node.outputs)
    rule = _RULES.get(node.op_type) if node.domain == "" else None
    if rule is None or any(attribute.is_ref() for attribute in node.attributes.values()):
        raise _MixedError
    place = rule(_Seen(node, places, rows, opset))
    made = [place if value.name else None for value in node.outputs]
    if node.op_type in _RECURRENT and made[0]:  # all states, with the directions in front of the rows
        made[0] = _Rows(place.axis + 1, place.block)
    return made


@dataclass(frozen=True)
class _Seen:
    """A node, and where its inputs have the rows."""

    node: ir.Node
    places: Sequence[_Rows | None]
    rows: int
    opset: int

    def shape(self, index: int) -> tuple[int, ...]:
        return _known(input_of(self.node, index))

    @property
    def output(self) -> tuple[int, ...]:
        return _known(self.node.outputs[0])

    def only(self, *indices: int) -> _Rows:
        """Where these inputs, and no others, have the rows: all that do at the same place."""
        if any(place for at, place in enumerate(self.places) if at not in indices):
            raise _MixedError
        return _one({place for place in self.places if place})


def _known(value: ir.Value | None) -> tuple[int, ...]:
    shape = static_shape(value)
    if shape is None:
        raise _MixedError
    return shape


def _one(found: set[_Rows]) -> _Rows:
    if len(found) != 1:
        raise _MixedError
    return next(iter(found))


def _by_element(seen: _Seen) -> _Rows:
    """Axes are counted from the last one; what has no rows is the same for all of them."""
    rank = len(seen.output)
    return _one(
        {
            _Rows(place.axis + rank - len(seen.shape(index)), place.block)
            for index, place in enumerate(seen.places)
            if place
        }
    )


def _beside(touched: Callable[[_Seen], Collection[int]], *indices: int) -> Callable[[_Seen], _Rows]:
    """The rule of a node that works along some axes of its data and leaves the others as they are."""

    def rule(seen: _Seen) -> _Rows:
        place = seen.only(*(indices or (0,)))
        if place.axis in touched(seen):
            raise _MixedError
        return place

    return rule


def _axis(default: int) -> Callable[[_Seen], Collection[int]]:
    return lambda seen: {int_attribute(seen.node, "axis", default) % len(seen.shape(0))}


def _from_axis(seen: _Seen, default: int = -1) -> Collection[int]:
    rank = len(seen.shape(0))
    return range(int_attribute(seen.node, "axis", default) % rank, rank)


def _softmax(seen: _Seen) -> Collection[int]:
    """Before opset 13 all axes from ``axis`` on are one."""
    return _axis(-1)(seen) if seen.opset >= 13 else _from_axis(seen, 1)


def _listed(index: int) -> Callable[[_Seen], Collection[int]]:
    """The axes that a constant input names."""

    def axes(seen: _Seen) -> Collection[int]:
        named = constant_of(input_of(seen.node, index))
        rank = len(seen.shape(0))
        return range(rank) if named is None else {int(axis) % rank for axis in named.reshape(-1)}

    return axes


def _sliced(seen: _Seen) -> Collection[int]:
    """The axes of which a Slice takes a part, or that it turns round."""
    listed, steps = _listed(3)(seen), input_of(seen.node, 4)
    known = constant_of(steps)
    if steps is not None and (known is None or (known != 1).any()):
        return listed
    return set(listed) & set(_tiled(seen))


def _tiled(seen: _Seen) -> Collection[int]:
    return {axis for axis, (old, new) in enumerate(zip(seen.shape(0), seen.output, strict=True)) if old != new}


def _padded(seen: _Seen) -> Collection[int]:
    """The axes to which a Pad adds something, or of which it takes something away."""
    pads, rank = constant_of(input_of(seen.node, 1)), len(seen.shape(0))
    if pads is None or input_of(seen.node, 3) is not None:
        return _listed(3)(seen)
    return {axis for axis in range(rank) if pads[axis] or pads[axis + rank]}


def _resized(seen: _Seen) -> Collection[int]:
    """The axes of a Resize whose scale is not one: where sizes are given, those whose length changes."""
    scales, node = constant_of(input_of(seen.node, 2)), seen.node
    special = {"axes", "keep_aspect_ratio_policy"} & set(node.attributes)
    if special or string_attribute(node, "coordinate_transformation_mode", "") == "tf_crop_and_resize":
        return range(len(seen.shape(0)))
    if scales is not None and scales.size:
        return {axis for axis, scale in enumerate(scales) if scale != 1}
    return _tiled(seen) if input_of(node, 3) is not None else range(len(seen.shape(0)))


def _reduced(seen: _Seen) -> _Rows:
    rank, place = len(seen.shape(0)), seen.only(0)
    if seen.node.op_type in ("ArgMax", "ArgMin"):
        axes = set(_axis(0)(seen))
    else:
        named = axes_of(seen.node)
        if named is None and input_of(seen.node, 1) is not None:
            raise _MixedError
        axes = {axis % rank for axis in named or range(rank)}
    if place.axis in axes:
        raise _MixedError
    dropped = 0 if int_attribute(seen.node, "keepdims", 1) else sum(axis < place.axis for axis in axes)
    return _Rows(place.axis - dropped, place.block)


def _view(seen: _Seen) -> _Rows:
    """The axis of the output in which a row has as many elements in one piece."""
    place, shape, output = seen.only(0), seen.shape(0), seen.output
    piece = place.block * math.prod(shape[place.axis + 1 :])
    for axis, size in enumerate(output):
        behind = math.prod(output[axis + 1 :])
        if behind and piece % behind == 0 and size == seen.rows * (piece // behind):
            return _Rows(axis, piece // behind)
    raise _MixedError


def _transpose(seen: _Seen) -> _Rows:
    place, rank = seen.only(0), len(seen.shape(0))
    perm = ints_attribute(seen.node, "perm") or tuple(reversed(range(rank)))
    return _Rows(perm.index(place.axis), place.block)


def _gather(seen: _Seen) -> _Rows:
    axis, indices = int_attribute(seen.node, "axis", 0) % len(seen.shape(0)), len(seen.shape(1))
    if seen.places[0] is None:
        place = seen.only(1)
        return _Rows(axis + place.axis, place.block)
    place = seen.only(0)
    if place.axis == axis:
        return _picked(seen, place)
    return _Rows(place.axis + (indices - 1 if place.axis > axis else 0), place.block)


def _picked(seen: _Seen, place: _Rows) -> _Rows:
    """Where a Gather with constant indices picks the entries of each row for that row, as masks of transformers do."""
    indices = constant_of(input_of(seen.node, 1))
    if indices is None:
        raise _MixedError
    rows = indices % seen.shape(0)[place.axis] // place.block
    for axis, size in enumerate(rows.shape):
        if size and size % seen.rows == 0:
            block = size // seen.rows
            wanted = (np.arange(size) // block).reshape(-1, *[1] * (rows.ndim - axis - 1))
            if (rows == wanted).all():
                return _Rows(place.axis + axis, block)
    raise _MixedError


def _concat(seen: _Seen) -> _Rows:
    place = seen.only(*range(len(seen.places)))
    if place.axis == int_attribute(seen.node, "axis", 0) % len(seen.output):
        raise _MixedError
    return place


def _product(seen: _Seen) -> _Rows:
    """MatMul: rows are those of the first operand, columns of the second, or a batch axis of one or of both."""
    found, rank = set[_Rows](), len(seen.output)
    for index, place in enumerate(seen.places):
        dims = len(seen.shape(index))
        if dims < 2 or (place and place.axis == dims - (1, 2)[index]):
            raise _MixedError
        if place:
            found.add(_Rows(place.axis + rank - dims, place.block))
    return _one(found)


def _gemm(seen: _Seen) -> _Rows:
    place = seen.only(0)
    if place.axis != int_attribute(seen.node, "transA", 0):
        raise _MixedError
    return _Rows(0, place.block)


def _recurrent(seen: _Seen) -> _Rows:
    """Rows are the second axis of the sequence and of the states that it begins with; lengths may have them."""
    allowed: list[set[_Rows | None]] = [
        {_Rows(1)},
        {None},
        {None},
        {None},
        {None, _Rows(0)},
        {None, _Rows(1)},
        {None, _Rows(1)},
        {None},
    ]
    fits = all(place in each for place, each in zip(seen.places, allowed, strict=False))
    if not fits or int_attribute(seen.node, "layout", 0):
        raise _MixedError
    return _Rows(1)


def _einsum(seen: _Seen) -> _Rows:
    terms, _, output = string_attribute(seen.node, "equation", "").replace(" ", "").partition("->")
    if "." in terms or len(terms.split(",")) != len(seen.places):
        raise _MixedError
    named = {
        (term[place.axis], place.block) for term, place in zip(terms.split(","), seen.places, strict=True) if place
    }
    name, block = next(iter(named))
    if len(named) != 1 or name not in output:
        raise _MixedError
    return _Rows(output.index(name), block)


def _sample(*indices: int) -> Callable[[_Seen], _Rows]:
    """The rule of a node that works on each entry of the first axis of these inputs, all with rows, alone."""

    def rule(seen: _Seen) -> _Rows:
        place = seen.only(*indices)
        if place.axis or not all(seen.places[at] for at in indices) or int_attribute(seen.node, "training_mode", 0):
            raise _MixedError
        return place

    return rule


_RECURRENT = ("GRU", "LSTM", "RNN")
_BY_ELEMENT = (*POINTWISE, "Cast", "Expand", "Identity", "Max", "Mean", "Min", "Sum")
_REDUCE = """
    ArgMax ArgMin ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum
    ReduceSumSquare
""".split()
_OF_SAMPLES = """
    AveragePool BatchNormalization Conv ConvTranspose DepthToSpace GlobalAveragePool GlobalLpPool GlobalMaxPool
    GroupNormalization InstanceNormalization LRN LpPool MaxPool SpaceToDepth
""".split()

_RULES: dict[str, Callable[[_Seen], _Rows]] = {
    **dict.fromkeys(_BY_ELEMENT, _by_element),
    **dict.fromkeys(_REDUCE, _reduced),
    **dict.fromkeys(_OF_SAMPLES, _sample(0)),
    **dict.fromkeys(_RECURRENT, _recurrent),
    **dict.fromkeys(("Flatten", "Reshape", "Squeeze", "Unsqueeze"), _view),
    **dict.fromkeys(("Softmax", "LogSoftmax", "Hardmax"), _beside(_softmax)),
    **dict.fromkeys(("LayerNormalization", "RMSNormalization"), _beside(_from_axis)),
    **dict.fromkeys(("LpNormalization", "TopK"), _beside(_axis(-1))),
    **dict.fromkeys(("DequantizeLinear", "QuantizeLinear"), _beside(lambda _: ())),  # scales may lie along any axis
    "Concat": _concat,
    "CumSum": _beside(_listed(1)),
    "Einsum": _einsum,
    "Gather": _gather,
    "GatherElements": _beside(_axis(0), 0, 1),
    "Gemm": _gemm,
    "GridSample": _sample(0, 1),
    "MatMul": _product,
    "Pad": _beside(_padded),
    "Resize": _beside(_resized),
    "Slice": _beside(_sliced),
    "Split": _beside(_axis(0)),
    "Tile": _beside(_tiled),
    "Transpose": _transpose,
    "Trilu": _beside(lambda seen: range(len(seen.shape(0)) - 2, len(seen.shape(0)))),
}
"""What is not here may mix rows."""
