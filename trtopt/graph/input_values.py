"""What inputs may hold, as far as the graph tells by what it does with them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import onnx_ir as ir

from trtopt.graph import edit

_HANDED_ON = frozenset(
    "Cast Identity Reshape Flatten Squeeze Unsqueeze Expand Transpose Slice Tile Clip Gather GatherElements "
    "GatherND".split()
)
_MASKS = ("Where", "And", "Or", "Not", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Sub", "Mul")
_INDEXED = ("Gather", "GatherElements", "ScatterElements")
"""Operators that index an axis of their first input by their second."""
_INDEXED_AXES = ("GatherND", "ScatterND")
"""Operators that index the first axes of their first input by their second."""
_TURNED = 1000.0
"""Largest angle, in radians, of the highest frequency: the steps of diffusion (Ho et al. 2020, arXiv:2006.11239)."""
_MOST = 65504.0
"""Largest time, as FP16 holds it: an input may have that type."""
_LEAST_MASK = 1e4
"""Softmax leaves nothing of what such a number is taken away from."""
_DEPTH = 16
_LENGTH = re.compile(r"^(?!.*(past|cache)).*(?<![a-z])(seq)?len(s|gths?)?$")
"""The name of a length, but of a cache's: what is filled of it is no length of another input."""


_Dims = tuple[int | str | None, ...]


@dataclass(frozen=True)
class InputValues:
    """The values of one input.

    Attributes:
        kind: ``ids`` are drawn from 0 to below ``size``; ``positions`` count along the last axis, below ``size``;
            ``mask`` is 1, or true, everywhere, ``padding`` 0; ``lengths`` say that rows of the other inputs are full,
            ``sizes`` are those of a picture; ``given`` are the ``numbers``, of a shape tensor; ``weight`` is a matrix
            that products read as others read their weights; ``times`` are spread from 0 to ``size``.
        size: Entries of the smallest table or axis that the input indexes; rows of a weight; the largest time; else
            None.
    """

    kind: Literal["ids", "positions", "mask", "padding", "lengths", "sizes", "given", "weight", "times"]
    size: int | None = None
    numbers: tuple[int, ...] = ()


def input_values(model: ir.Model) -> dict[str, InputValues]:
    """The values of the inputs that the graph says something of, by name.

    An input that indexes a table (Gather of an embedding, also behind a constant that is added) holds ids of it, and so
    does one that is compared with 0, 1, 2, ... One
    that is only compared, multiplied, subtracted or used as a condition is a mask. The graph cannot tell positions from
    ids: an input named after positions counts, one named after lengths holds them. What Resize goes to are sizes. The
    others are in nobody's table here. Of floating inputs, matrices that only stand on the right of products are
    weights: adapters. What is only turned into angles is a time, of diffusion for one. Masks that take
    away where they are 1 are paddings, floats as well: ``padding * -1e9`` and ``where(padding, -inf, scores)``.
    """
    found: dict[str, InputValues] = {}
    for value in model.graph.inputs:
        if value.dtype is None or value.shape is None:
            continue
        name, uses = str(value.name), list(_uses_of(value))
        if value.dtype.is_floating_point():
            shape = edit.static_shape(value)
            if shape and len(shape) == 2 and uses and all(edit.is_op(n, "MatMul") and i == 1 for n, i, _ in uses):
                found[name] = InputValues("weight", max(shape[0], 1))
            elif latest := _latest(value):
                found[name] = InputValues("times", latest)
            elif (kept := _kept_by(value)) is not None:
                found[name] = InputValues("mask" if kept else "padding")
            continue
        sizes = [size - offset for node, index, offset in uses for size in _sizes_indexed(node, index)]
        size = max(min(sizes), 1) if sizes else None
        counts = "position" in name.lower()
        if counts or size is not None:
            found[name] = InputValues("positions" if counts else "ids", size)
        elif any(edit.is_op(node, "Resize") and index == 3 for node, index, _ in uses):
            found[name] = InputValues("sizes")
        elif _LENGTH.search(name.lower()) and len(value.shape) <= 1:
            found[name] = InputValues("lengths")
        elif latest := _latest(value):
            found[name] = InputValues("times", latest)
        elif "mask" in name.lower() or any(edit.is_op(node, *_MASKS) for node, index, _ in uses):
            found[name] = InputValues("padding" if _kept_by(value) == 0 else "mask")
    return found


def _kept_by(value: ir.Value) -> int | None:
    """Which of 0 and 1 an input holds where the mask made of it takes nothing away; None where it is no mask.

    Each tensor made of it is looked at once, as what it is where the input is 0 and where it is 1; of booleans what is
    not 0 is true.
    """
    waiting, seen = [(value, (0.0, 1.0))], {value}
    while waiting:
        now, at = waiting.pop()
        for node, index in now.uses():
            lowered = [_lowers(node, index, each) for each in at]
            made = [_made_of(node, index, each) for each in at]
            if lowered[0] != lowered[1]:
                kept = lowered.index(False)
                if edit.is_op(node, "Where") or not made[kept]:
                    return kept
            output = node.outputs[0]
            if made[0] is not None and made[1] is not None and output not in seen:
                seen.add(output)
                waiting.append((output, (made[0], made[1])))
    return None


def _lowers(node: ir.Node, index: int, number: float) -> bool:
    """Whether ``node`` makes of a number what softmax leaves nothing of."""
    if edit.is_op(node, "Where") and index == 0:
        constant = edit.constant_of(node.inputs[1 if number else 2])
        return constant is not None and bool(constant.size) and bool(constant.max() <= -_LEAST_MASK)
    product = _made_of(node, index, number) if edit.is_op(node, "Mul") else None
    return product is not None and product <= -_LEAST_MASK


def _made_of(node: ir.Node, index: int, number: float) -> float | None:
    """What ``node`` makes of a number; None where it does something else, or where that depends on another tensor."""
    if edit.is_op(node, "Not"):
        return float(number == 0)
    if edit.is_op(node, "Neg"):
        return -number
    if edit.is_op(node, "And", "Or") or (edit.is_op(node, "Where") and index):
        return number
    if index == 0 and edit.is_op(node, "ReduceMax", "ReduceMin", *_HANDED_ON):
        return number
    if not edit.is_op(node, "Mul", "Sub", "Equal"):
        return None
    constant = edit.constant_of(node.inputs[1 - index])
    if constant is None or constant.size != 1:
        return None
    other = float(constant.reshape(-1)[0])
    if edit.is_op(node, "Equal"):
        return float(number == other)
    if edit.is_op(node, "Mul"):
        return number * other if number else 0.0
    return number - other if index == 0 else other - number


def _latest(value: ir.Value) -> int:
    """The largest time; 0 where the value is none."""
    frequency = _frequency(value, {}, _DEPTH)
    return round(min(max(_TURNED / frequency, 1.0), _MOST)) if 0 < frequency < math.inf else 0


def _frequency(value: ir.Value, known: dict[ir.Value, float], depth: int) -> float:
    """The largest factor between a value and the Sin and Cos it ends in; 0 where one use leads elsewhere."""
    if value not in known:
        found = [_frequency_behind(use.node, use.idx, known, depth) for use in value.uses()]
        known[value] = 0.0 if value.is_graph_output() else max(found, default=0.0) * all(found)
    return known[value]


def _frequency_behind(node: ir.Node, index: int, known: dict[ir.Value, float], depth: int) -> float:
    if edit.is_op(node, "Sin", "Cos"):
        return 1.0
    factor = 1.0
    if edit.is_op(node, "Mul", "Div") and index <= edit.is_op(node, "Mul"):
        other = node.inputs[1 - index]
        maker = edit.maker_of(other)
        repeated = edit.is_op(maker, "Expand")  # to the batch
        factor = _factor(node, edit.constant_of(maker.inputs[0] if maker is not None and repeated else other))
    elif not (edit.is_op(node, "Concat") or (index == 0 and edit.is_op(node, *_HANDED_ON))):
        return 0.0
    return factor and depth and factor * min(_frequency(output, known, depth - 1) for output in node.outputs)


def _factor(node: ir.Node, constant: np.ndarray | None) -> float:
    """The largest factor of a product or quotient with a constant; 0 where it has none, or no number."""
    if constant is None or not constant.size:
        return 0.0
    sizes = np.abs(constant.astype(np.float64))
    least = float(sizes.min())
    factor = float(sizes.max()) if edit.is_op(node, "Mul") else 1 / least if least else 0.0
    return factor if 0 < factor < math.inf else 0.0


def _uses_of(value: ir.Value) -> Iterator[tuple[ir.Node, int, int]]:
    """The nodes that read an input, with the place they read it at and the constant that was added before.

    Operators that hand elements on are followed.
    """
    waiting: list[tuple[ir.Value, int]] = [(value, 0)]
    seen = {value}
    while waiting:
        now, offset = waiting.pop()
        for use in now.uses():
            added = _added(use.node, use.idx)
            if added is None:
                yield use.node, use.idx, offset
                continue
            for output in use.node.outputs:
                if output not in seen:
                    seen.add(output)
                    waiting.append((output, offset + added))


def _added(node: ir.Node, index: int) -> int | None:
    """What ``node`` adds to the elements of its input ``index`` that it hands on; None where it does something else."""
    if edit.is_op(node, "Add"):
        constant = edit.constant_of(node.inputs[1 - index])
        return int(constant.max()) if constant is not None and constant.dtype.kind in "iu" and constant.size else None
    if edit.is_op(node, "Concat", "Min", "Max") or (edit.is_op(node, "Where") and index):
        return 0
    return 0 if index == 0 and edit.is_op(node, *_HANDED_ON) else None


def _sizes_indexed(node: ir.Node, index: int) -> list[int]:
    """The size of the axis that ``node`` indexes by its input ``index``; empty where it indexes none of known size."""
    if edit.is_op(node, "OneHot") and index == 0:
        depth = edit.constant_of(node.inputs[1])
        return [] if depth is None else [int(depth.reshape(-1)[0])]
    if edit.is_op(node, "Equal"):
        return _counted(edit.constant_of(node.inputs[1 - index]))
    if not edit.is_op(node, *_INDEXED, *_INDEXED_AXES) or index != 1:
        return []
    dims = _dims_of_table(node.inputs[0])
    if edit.is_op(node, *_INDEXED_AXES):
        return _first_axes(dims, edit.dims_of_value(node.inputs[1]), edit.int_attribute(node, "batch_dims", 0))
    axis = edit.int_attribute(node, "axis", 0)
    if dims is None or not -len(dims) <= axis < len(dims):
        return []
    size = dims[axis]
    return [size] if isinstance(size, int) else []


def _counted(numbers: np.ndarray | None) -> list[int]:
    """How many numbers there are where they count from 0: what is compared with each of them is a one-hot index."""
    size = 0 if numbers is None else numbers.size
    return [size] if size > 1 and numbers is not None and (numbers.reshape(-1) == np.arange(size)).all() else []


def _first_axes(dims: _Dims | None, index: _Dims | None, batch: int) -> list[int]:
    """The sizes of the axes that GatherND and ScatterND index."""
    count = index[-1] if index else None
    if dims is None or not isinstance(count, int):
        return []
    return [size for size in dims[batch : batch + count] if isinstance(size, int)]


def _dims_of_table(value: ir.Value | None) -> _Dims | None:
    """The shape of what is indexed; of quantized weights that of the integers."""
    dims, node = edit.dims_of_value(value), edit.maker_of(value)
    if dims is None and edit.is_op(node, "DequantizeLinear", "Cast", "Identity"):
        dims = edit.dims_of_value(node.inputs[0])
    return dims
