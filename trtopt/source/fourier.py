"""The discrete Fourier transform of a known length, written as the product with its matrix.

No backend has DFT; exporters write it for `torch.fft` and for the front ends of speech models. Its meaning is that of
ONNX (opset 17 to 20): https://onnx.ai/onnx/operators/onnx__DFT.html.
"""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir

from trtopt.graph import edit
from trtopt.source.written import Writer, WritingError

_LARGEST = 1 << 23
"""Entries of a matrix (32 MiB in FP32): a transform of 2,896 real values, or of 2,048 complex ones on one side."""


def say_one_sided(proto: onnx.ModelProto) -> None:
    """Write the default of STFT's ``onesided``, 1, in place: ONNX 1.23 infers the shape as if it were 0."""
    for node in proto.graph.node:
        if node.op_type == "STFT" and not node.domain and all(item.name != "onesided" for item in node.attribute):
            node.attribute.append(onnx.helper.make_attribute("onesided", 1))


def dft(w: Writer) -> None:
    """``DFT``: input [..., n, ..., 1 or 2], its length, its axis; output [..., k, ..., 2]."""
    signal = w.needed(0)
    if signal.shape is None:
        raise WritingError("the rank of its input is not known")
    rank, parts = len(signal.shape), signal.shape[-1]
    axis = _axis(w, rank)
    given, size = _number(w.input(1)), signal.shape[axis]
    length = size if w.input(1) is None else given
    if not isinstance(size, int) or not isinstance(length, int) or not isinstance(parts, int) or length < 1:
        raise WritingError("its length is not known")
    kind = _numpy_type(signal)
    if size > length:
        signal = w.op("Slice", signal, w.ints(0), w.ints(length), w.ints(axis))
    matrix = _matrix(min(size, length), length, parts, bool(w.int_of("onesided", 0)), bool(w.int_of("inverse", 0)))
    order = [*(at for at in range(rank - 1) if at != axis), axis, rank - 1]
    rows = w.reshape(_turned(w, signal, order), *[0] * (rank - 2), matrix.shape[0])
    product = w.op("MatMul", rows, w.op("Constant", value=ir.tensor(matrix.astype(kind))))
    found = w.reshape(product, *[0] * (rank - 2), matrix.shape[1] // 2, 2)
    w.replace(_turned(w, found, [int(at) for at in np.argsort(order)]))


def _axis(w: Writer, rank: int) -> int:
    axis = -2 if w.input(2) is None else _number(w.input(2))
    if axis is None or not -rank <= axis < rank or axis % rank == rank - 1:
        raise WritingError("its axis is not known")
    return axis % rank


def _number(value: ir.Value | None) -> int | None:
    found = edit.constant_of(value)
    return None if found is None or found.size != 1 else int(found.item())


def _numpy_type(value: ir.Value) -> np.dtype:
    if value.dtype is None:
        raise WritingError(f"the type of {value.name} is not known")
    return value.dtype.numpy()


def _turned(w: Writer, value: ir.Value, order: list[int]) -> ir.Value:
    return value if order == sorted(order) else w.transpose(value, *order)


def _matrix(rows: int, length: int, parts: int, one_sided: bool, inverse: bool) -> np.ndarray:
    """Float64 [rows * parts, bins * 2]: of real values (``parts`` 1) or of pairs of real and imaginary ones."""
    bins = length // 2 + 1 if one_sided else length
    if rows * parts * bins * 2 > _LARGEST:
        raise WritingError(f"its matrix would have {rows * parts} x {bins * 2} entries")
    steps = np.outer(np.arange(rows), np.arange(bins)) % length  # exact, where the angle itself would be rounded
    wave = np.exp((2j if inverse else -2j) * np.pi * steps / length) / (length if inverse else 1)
    found = np.empty((rows, parts, bins, 2))
    found[:, 0, :, 0], found[:, 0, :, 1] = wave.real, wave.imag
    if parts == 2:
        found[:, 1, :, 0], found[:, 1, :, 1] = -wave.imag, wave.real
    return found.reshape(rows * parts, bins * 2)
