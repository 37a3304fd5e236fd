"""Operators that only move elements (Reshape, Transpose, Gather of one index, ...), done on numpy views.

A constant that is broadcast over an activation is followed through such operators without being written out: numpy
gives broadcast axes a stride of 0, and most of these operators keep it.
"""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from trtopt.graph.edit import (
    array_of,
    axes_of,
    constant_of,
    constant_tensor_of,
    input_of,
    int_attribute,
    ints_attribute,
    is_op,
)

_STAND_INS = (7, 11, 13, 17, 19, 23, 29, 31)
"""Sizes for dimensions that are not known; primes, so that no reshape fits by chance."""

_PASSES = frozenset("Cast Identity Dropout".split())


class Sizes:
    """Sizes for all dimensions of a graph: those known, and a stand-in for each that is not."""

    def __init__(self) -> None:
        self._names: dict[str | int, int] = {}

    def of(self, value: ir.Value | None) -> tuple[int, ...] | None:
        """The shape of ``value`` with stand-ins; None where the rank is not known, or there are too many names.

        Dimensions without a name have one stand-in per axis: equal sizes do not mean that they are equal.
        """
        if value is None or value.shape is None:
            return None
        found = [
            dim if isinstance(dim, int) else self._stand_in(axis if dim.value is None else dim.value)
            for axis, dim in enumerate(value.shape)
        ]
        return tuple(dim for dim in found if dim is not None) if None not in found else None

    def open(self, value: ir.Value) -> tuple[int, ...]:
        """As :meth:`of`, with -1 for dimensions that have no stand-in; raises ValueError without a rank."""
        if value.shape is None:
            raise ValueError(f"{value.name} has no rank")
        dims = [
            dim if isinstance(dim, int) else -1 if dim.value is None else self._stand_in(dim.value)
            for dim in value.shape
        ]
        return tuple(-1 if dim is None else dim for dim in dims)

    def _stand_in(self, name: str | int) -> int | None:
        if name not in self._names and len(self._names) < len(_STAND_INS):
            self._names[name] = _STAND_INS[len(self._names)]
        return self._names.get(name)


def is_move(node: ir.Node | None) -> bool:
    """Whether ``node`` moves the elements of its first input, and does nothing else."""
    return is_op(node, *_HANDLERS)


def is_pass(node: ir.Node | None) -> bool:
    """Whether ``node`` hands its first input on: Identity, Dropout in inference, a Cast between float types."""
    if not is_op(node, *_PASSES) or node.inputs[0] is None:
        return False
    if node.op_type == "Cast":
        return all(v.dtype is not None and v.dtype.is_floating_point() for v in (node.inputs[0], node.outputs[0]))
    if node.op_type == "Dropout":
        training = constant_of(input_of(node, 2))
        idle = input_of(node, 2) is None or (training is not None and not training.any())
        return idle and not any(value.uses() or value.is_graph_output() for value in node.outputs[1:])
    return True


def scaled_by(node: ir.Node) -> tuple[ir.Value, np.ndarray] | None:
    """The operand of a Mul (Div) whose other operand (divisor) is a constant, and that constant; None where none is."""
    for index in (1, 0) if is_op(node, "Mul") else (1,) if is_op(node, "Div") else ():
        data, constant = node.inputs[1 - index], constant_of(node.inputs[index])
        if data is not None and constant is not None and constant_tensor_of(data) is None:
            return data, constant
    return None


def moved(node: ir.Node, output: ir.Value, array: np.ndarray, sizes: Sizes) -> np.ndarray | None:
    """What ``node`` (see :func:`is_move`, :func:`is_pass`) makes of ``array`` as first input, a view where numpy can.

    None where an operand is not a constant, or does not fit the array.
    """
    if is_pass(node):
        return array
    try:
        return _HANDLERS[node.op_type](node, output, array, sizes)
    except (ValueError, IndexError, TypeError):
        return None


def merged_rows(output: ir.Value, array: np.ndarray, width: int, sizes: Sizes) -> np.ndarray | None:
    """What a Reshape to a shape that is not known makes of ``array``, where the last axis of its output has this width.

    None unless the array repeats rows of ``width`` elements, which stay rows however the others are divided.
    """
    shape, axis = sizes.of(output), array.ndim
    while axis > 0 and math.prod(array.shape[axis:]) < width:
        axis -= 1
    rows = one_per(array)
    if not shape or math.prod(array.shape[axis:]) != width or any(dim != 1 for dim in rows.shape[:axis]):
        return None
    row = np.broadcast_to(rows, (*rows.shape[:axis], *array.shape[axis:])).reshape(width)
    return np.broadcast_to(row, (*shape[:-1], width))


def one_per(array: np.ndarray) -> np.ndarray:
    """``array`` with each axis along which it does not change cut to length 1."""
    array = array[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in array.strides)]
    for axis in range(array.ndim):
        first = array[(slice(None),) * axis + (slice(0, 1),)]
        array = first if (array == first).all() else array
    return array


def _constants(node: ir.Node, *indices: int) -> list[list[int]]:
    return [[int(item) for item in array_of(input_of(node, index)).ravel()] for index in indices]


def _expand(node: ir.Node, output: ir.Value, array: np.ndarray, sizes: Sizes) -> np.ndarray:
    return np.broadcast_to(array, np.broadcast_shapes(array.shape, tuple(_constants(node, 1)[0])))


def _flatten(node: ir.Node, output: ir.Value, array: np.ndarray, sizes: Sizes) -> np.ndarray:
    axis = int_attribute(node, "axis", 1)
    rows = int(np.prod(array.shape[:axis], dtype=np.int64))
    return array.reshape(rows, -1)


def _gather(node: ir.Node, output: ir.Value, array: np.ndarray, sizes: Sizes) -> np.ndarray:
    indices = constant_of(input_of(node, 1))
    if indices is None or indices.size != 1 or indices.ndim > 1:
        raise ValueError("not one constant index")
    axis, index = int_attribute(node, "axis", 0) % array.ndim, int(indices.ravel()[0])
    index %= array.shape[axis]
    return array[(slice(None),) * axis + (index if indices.ndim == 0 else slice(index, index + 1),)]


def _reshape(node: ir.Node, output: ir.Value, array: np.ndarray, sizes: Sizes) -> np.ndarray:
    if constant_of(input_of(node, 1)) is None:
        return array.reshape(sizes.open(output))
    dims = _constants(node, 1)[0]
    if not int_attribute(node, "allowzero", 0):
        dims = [array.shape[axis] if dim == 0 else dim for axis, dim in enumerate(dims)]
    return array.reshape(dims)


def _slice(node: ir.Node, output: ir.Value, array: np.ndarray, sizes: Sizes) -> np.ndarray:
    starts, ends = _constants(node, 1, 2)
    axes = _constants(node, 3)[0] if input_of(node, 3) is not None else list(range(len(starts)))
    steps = _constants(node, 4)[0] if input_of(node, 4) is not None else [1] * len(starts)
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        if step < 1:
            raise ValueError("backwards")
        array = array[(slice(None),) * (axis % array.ndim) + (slice(start, end, step),)]
    return array


def _split(node: ir.Node, output: ir.Value, array: np.ndarray, sizes: Sizes) -> np.ndarray:
    axis = int_attribute(node, "axis", 0) % array.ndim
    lengths: list[int] | tuple[int, ...] | None = ints_attribute(node, "split")
    if lengths is None and input_of(node, 1) is not None:
        lengths = _constants(node, 1)[0]
    if lengths is None:
        length = -(-array.shape[axis] // len(node.outputs))
        lengths = [length] * len(node.outputs)
    index = list(node.outputs).index(output)
    start = sum(lengths[:index])
    return array[(slice(None),) * axis + (slice(start, start + lengths[index]),)]


def _squeeze(node: ir.Node, output: ir.Value, array: np.ndarray, sizes: Sizes) -> np.ndarray:
    axes = axes_of(node)
    if axes is None and input_of(node, 1) is not None:
        raise ValueError("axes that are computed")
    return np.squeeze(array, axes)


def _transpose(node: ir.Node, output: ir.Value, array: np.ndarray, sizes: Sizes) -> np.ndarray:
    return np.transpose(array, ints_attribute(node, "perm"))


def _unsqueeze(node: ir.Node, output: ir.Value, array: np.ndarray, sizes: Sizes) -> np.ndarray:
    axes = axes_of(node)
    if axes is None:
        raise ValueError("no axes")
    return np.expand_dims(array, axes)


_HANDLERS = {
    "Expand": _expand,
    "Flatten": _flatten,
    "Gather": _gather,
    "Reshape": _reshape,
    "Slice": _slice,
    "Split": _split,
    "Squeeze": _squeeze,
    "Transpose": _transpose,
    "Unsqueeze": _unsqueeze,
}
