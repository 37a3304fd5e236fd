"""Sums that are scattered by an index, written as a product with a matrix of zeros and ones.

TensorRT for RTX scatters without a reduction only; exporters write one for ``index_add``, ``scatter_add`` and
``index_put(accumulate=True)``, by which graph networks sum the messages at each node. Their meaning is that of ONNX:
https://onnx.ai/onnx/operators/onnx__ScatterND.html. An update that is infinite or no number spoils its whole column,
where a scattered one spoils one entry.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from trtopt.graph import edit
from trtopt.source.written import Writer, WritingError, float_type_of

_MOST_ROWS = 4096
"""Entries of the axis that is scattered into, each a row of the matrix."""

_MOST_ELEMENTS = 1 << 24
"""Of the matrix, where the number of updates is known."""


def is_sum(node: ir.Node) -> bool:
    """Whether a node scatters sums."""
    names = ("ScatterElements", "ScatterND")
    return edit.is_op(node, *names) and edit.string_attribute(node, "reduction", "none") == "add"


def scatter_nd(w: Writer) -> None:
    """``ScatterND`` of one index for each update: data [n, ...], indices [e, 1], updates [e, ...]."""
    data, index, updates = (w.needed(at) for at in range(3))
    if index.shape is None or len(index.shape) != 2 or index.shape[1] != 1:
        raise WritingError("its updates have not one index each")
    _write(w, data, w.reshape(index, -1), updates, axis=0)


def scatter_elements(w: Writer) -> None:
    """``ScatterElements`` by an index that is the same along all other axes."""
    data, index, updates = (w.needed(at) for at in range(3))
    rank = len(_shape(data))
    axis = w.int_of("axis", 0) % rank
    others = [
        (mine, other) for at, (mine, other) in enumerate(zip(_shape(data), _shape(updates), strict=True)) if at != axis
    ]
    if any(one != other or (isinstance(one, ir.SymbolicDim) and one.value is None) for one, other in others):
        raise WritingError("it scatters into a part of the other axes")
    _write(w, data, _vector(w, index, axis), updates, axis)


def _shape(value: ir.Value) -> ir.Shape:
    if value.shape is None or not len(value.shape):
        raise WritingError(f"the shape of {value.name} is not known")
    return value.shape


def _vector(w: Writer, index: ir.Value, axis: int) -> ir.Value:
    """The indices along an axis, along all others of which they are the same."""
    array, rank = edit.constant_of(index), len(_shape(index))
    if array is not None:
        first = np.moveaxis(array, axis, -1).reshape(-1, array.shape[axis])
        if not len(first) or (first != first[0]).any():
            raise WritingError("its index differs along other axes than the one that it scatters along")
        return w.op("Constant", value=ir.tensor(np.ascontiguousarray(first[0], np.int64)))
    maker = index.producer()
    source = maker.inputs[0] if edit.is_op(maker, "Expand") else index
    if source is None or source.shape is None:
        raise WritingError("the shape of its index is not known")
    dims = (1,) * (rank - len(source.shape)) + tuple(source.shape)
    if any(dim != 1 for at, dim in enumerate(dims) if at != axis):
        raise WritingError("its index may differ along other axes than the one that it scatters along")
    if dims[axis] == 1 != _shape(index)[axis]:
        raise WritingError("one index is that of all updates")
    return w.reshape(source, -1)


def _write(w: Writer, data: ir.Value, index: ir.Value, updates: ir.Value, axis: int) -> None:
    rows, count, rank = _shape(data)[axis], _shape(updates)[axis], len(_shape(data))
    if data.dtype is not None and not data.dtype.is_floating_point():
        raise WritingError("it adds integers")
    kind = float_type_of(data)
    if not isinstance(rows, int) or rows > _MOST_ROWS or (isinstance(count, int) and rows * count > _MOST_ELEMENTS):
        raise WritingError(f"its matrix would have {rows} x {count} entries")
    is_last = axis == rank - 1
    index = w.op("Cast", index, to=int(ir.DataType.INT64))
    index = w.op("Where", w.op("Less", index, w.scalar(0)), w.op("Add", index, w.scalar(rows)), index)
    places = w.op("Constant", value=ir.tensor(np.arange(rows).reshape((1, -1) if is_last else (-1, 1))))
    chosen = w.op("Equal", w.op("Unsqueeze", index, w.ints(1 if is_last else 0)), places)
    matrix = w.op("Cast", chosen, to=int(kind))
    if is_last:
        found = w.op("MatMul", updates, matrix)
    elif axis == rank - 2:
        found = w.op("MatMul", matrix, updates)
    else:
        order = [at for at in range(rank) if at != axis]
        order.insert(rank - 2, axis)
        turned = w.op("MatMul", matrix, w.transpose(updates, *order))
        found = w.transpose(turned, *(order.index(at) for at in range(rank)))
    w.replace(w.op("Add", data, found))
