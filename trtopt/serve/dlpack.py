"""Tensors of torch, cupy and other packages, without a copy: by DLPack in the host's memory, by their address on a GPU.

numpy reads the host's memory (``np.from_dlpack``), except the types that it lacks, which torch shows as integers. On a
GPU DLPack orders the producer's work before the reader's; addresses are those that torch and cupy give themselves.
"""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from trtopt.support._lazy import require

CPU, CUDA_HOST = 1, 3
"""Device types of DLPack."""

ML_FLOATS = tuple(np.dtype(kind) for kind in (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2))
"""Floating types of engines and models that numpy lacks."""

_LEGACY_STREAM = 1
"""CUDA's default stream, as DLPack's ``stream`` says it: the producer's work is done before what follows in it."""


@dataclass(frozen=True)
class GpuTensor:
    """A tensor of torch or cupy on a GPU.

    Attributes:
        tensor: The tensor.
        dtype: Its numpy type.
        exported: What DLPack gave for it, which keeps its memory alive.
    """

    tensor: Any
    dtype: np.dtype[Any]
    exported: Any = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return tuple(self.tensor.shape)

    @property
    def pointer(self) -> int:
        """The address of its first element."""
        return int(self.tensor.data_ptr() if is_torch(self.tensor) else self.tensor.data.ptr)

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return int(self.tensor.nbytes)

    @property
    def is_contiguous(self) -> bool:
        """Whether its elements lie in the order of its shape without gaps."""
        return bool(self.tensor.is_contiguous() if is_torch(self.tensor) else self.tensor.flags.c_contiguous)

    def channels_last(self) -> GpuTensor:
        """The same memory with the second axis as the last one."""
        return dataclasses.replace(self, tensor=package_of(self.tensor).moveaxis(self.tensor, 1, -1))


def on_gpu(tensor: Any) -> GpuTensor:
    """A tensor on a GPU, once its package's work on it is done for what follows in CUDA's default stream.

    Raises:
        BufferError: Its package does not export it, or is neither torch nor cupy.
        TypeError: numpy has no word for its type.
    """
    exported = tensor.__dlpack__(stream=_LEGACY_STREAM)
    if not is_torch(tensor) and type(tensor).__module__.partition(".")[0] != "cupy":
        raise BufferError("on a GPU, tensors are those of torch or cupy")
    return GpuTensor(tensor, _dtype_of(tensor), exported)


def host_array(value: Any) -> np.ndarray:
    """A tensor in the host's memory as an array on the same memory.

    Raises:
        BufferError, RuntimeError, TypeError, ValueError: It cannot be read without a copy.
    """
    if is_torch(value):
        if value.is_neg():  # torch exports it without its sign
            raise BufferError("it is negated on reading (torch: tensor.resolve_neg())")
        dtype = _dtype_of(value)
        if dtype in ML_FLOATS and not value.requires_grad:
            integers = value.view(getattr(package_of(value), f"int{8 * dtype.itemsize}"))
            return np.from_dlpack(integers).view(dtype)
    return np.from_dlpack(value)


def is_torch(value: Any) -> bool:
    """Whether it is a tensor of torch, or of a class that another package derives from that."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def package_of(value: Any) -> Any:
    """The package that a tensor is of: torch, cupy, ..."""
    return sys.modules["torch" if is_torch(value) else type(value).__module__.partition(".")[0]]


def empty_like(source: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> GpuTensor:
    """A new tensor of torch or cupy, on the device of ``source``."""
    package = package_of(source)
    if is_torch(source):
        return GpuTensor(package.empty(shape, dtype=getattr(package, dtype.name), device=source.device), dtype)
    return GpuTensor(package.empty(shape, dtype=dtype), dtype)


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


def _dtype_of(tensor: Any) -> np.dtype[Any]:
    name = str(tensor.dtype).removeprefix("torch.")
    return np.dtype(getattr(ml_dtypes, name, name))
