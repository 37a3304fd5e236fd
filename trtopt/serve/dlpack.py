"""Tensors of other packages by their address: DLPack, read without a copy.

Layouts of the structures: dlpack.h of DLPack 1.1 (``DLManagedTensor``; the versioned one is asked for by nobody here).
numpy reads host memory by itself (``np.from_dlpack``); GPU memory and BF16 it does not know.
"""

from __future__ import annotations

import ctypes
import dataclasses
import math
import sys
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from trtopt.support._lazy import require

CPU, CUDA, CUDA_HOST, CUDA_MANAGED = 1, 2, 3, 13
"""Device types of DLPack."""

ML_FLOATS = tuple(np.dtype(kind) for kind in (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2))
"""Floating types of engines and models that numpy lacks."""

_LEGACY_STREAM = 1
"""CUDA's default stream, as DLPack's ``stream`` says it: the producer's work is done before what follows in it."""

_NAME = b"dltensor"
_DTYPES: dict[tuple[int, int], np.dtype[Any]] = {
    **{(0, bits): np.dtype(f"int{bits}") for bits in (8, 16, 32, 64)},
    **{(1, bits): np.dtype(f"uint{bits}") for bits in (8, 16, 32, 64)},
    **{(2, bits): np.dtype(f"float{bits}") for bits in (16, 32, 64)},
    (4, 16): np.dtype(ml_dtypes.bfloat16),
    (6, 8): np.dtype(np.bool_),
}
"""Types by DLPack's code and bits."""


class _Device(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int32), ("id", ctypes.c_int32))


class _DType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _DType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


@dataclass(frozen=True)
class View:
    """Somebody else's tensor.

    Attributes:
        pointer: Address of its first element.
        shape: Its shape.
        strides: In elements.
        dtype: Its numpy type.
        device: Type and number of the device, as DLPack has them.
        source: The tensor.
        owner: What keeps its memory alive.
    """

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype[Any]
    device: tuple[int, int]
    source: Any
    owner: Any

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize

    def channels_last(self) -> View:
        """The same memory with the second axis as the last one."""
        shape, strides = self.shape, self.strides
        moved = (shape[0], *shape[2:], shape[1]), (strides[0], *strides[2:], strides[1])
        return dataclasses.replace(self, shape=moved[0], strides=moved[1])

    @property
    def is_contiguous(self) -> bool:
        """Whether its elements lie in the order of its shape without gaps."""
        step = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != step:
                return math.prod(self.shape) == 0
            step *= size
        return True


def view(value: Any) -> View:
    """A tensor by its address.

    Raises:
        BufferError: Its package does not export it, or its type is none that engines take.
    """
    on_gpu = value.__dlpack_device__()[0] in (CUDA, CUDA_MANAGED)
    capsule = value.__dlpack__(stream=_LEGACY_STREAM) if on_gpu else value.__dlpack__()
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    try:
        address = get(capsule, _NAME)
    except ValueError as error:
        raise BufferError(f"its DLPack capsule cannot be read: {error}") from error
    tensor = _Tensor.from_address(address)
    shape = tuple(tensor.shape[: tensor.ndim])
    if tensor.strides:
        strides = tuple(tensor.strides[: tensor.ndim])
    else:
        strides = tuple(math.prod(shape[axis + 1 :]) for axis in range(tensor.ndim))
    pointer = (tensor.data or 0) + tensor.byte_offset
    device = (tensor.device.type, tensor.device.id)
    return View(pointer, shape, strides, _dtype(tensor.dtype), device, value, capsule)


def host_array(value: Any) -> np.ndarray:
    """A tensor in the host's memory as an array on the same memory.

    Raises:
        BufferError: It cannot be read without a copy.
    """
    try:
        return np.from_dlpack(value)
    except (BufferError, RuntimeError, TypeError, ValueError):
        found = view(value)
    if not found.is_contiguous or not found.nbytes:
        raise BufferError("it is not contiguous")
    memory = (ctypes.c_uint8 * found.nbytes).from_address(found.pointer)
    memory.owner = found  # type: ignore[attr-defined]
    return np.frombuffer(memoryview(memory), found.dtype).reshape(found.shape)


def is_torch(value: Any) -> bool:
    """Whether it is a tensor of torch, or of a class that another package derives from that."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def package_of(value: Any) -> Any:
    """The package that a tensor is of: torch, cupy, ..."""
    return sys.modules["torch" if is_torch(value) else type(value).__module__.partition(".")[0]]


def empty_like(source: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    """A new tensor of torch or cupy, on the device of ``source``."""
    package = package_of(source)
    if is_torch(source):
        return package.empty(shape, dtype=getattr(package, dtype.name), device=source.device)
    return package.empty(shape, dtype=dtype)


def on_device_of(source: Any, array: np.ndarray) -> Any:
    """A copy of an array as a tensor of torch or cupy, on the device of ``source``."""
    package = package_of(source)
    return package.asarray(array, device=source.device) if is_torch(source) else package.asarray(array)


def as_torch(array: np.ndarray) -> Any:
    """An array as a torch tensor on the same memory."""
    torch = require("torch", "torch", "give tensors back")
    if array.dtype in ML_FLOATS:
        return torch.from_numpy(array.view(f"u{array.itemsize}")).view(getattr(torch, array.dtype.name))
    return torch.from_numpy(array)


def _dtype(given: _DType) -> np.dtype[Any]:
    found = _DTYPES.get((given.code, given.bits)) if given.lanes == 1 else None
    if found is None:
        raise BufferError(f"its type (DLPack code {given.code}, {given.bits} bits) is none that engines take")
    return found
