"""What goes into an engine and comes out of it, the profile for its shapes, and the checks of a call's inputs.

Tensors of torch, cupy and other packages are read without a copy. numpy reads the host's memory (``np.from_dlpack``),
except the types that it lacks, which torch shows as integers. On a GPU DLPack orders the producer's work before the
reader's; addresses are those that torch and cupy give themselves.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from trtopt.engine.profiles import choose
from trtopt.errors import IntegrityError, InvalidModelError, UsageError
from trtopt.report.schema.manifest import EngineTensor, ShapeRange
from trtopt.support._lazy import require
from trtopt.support.words import nearest

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
        exported: What DLPack gave for it, which keeps its memory alive.
    """

    tensor: Any
    dtype: np.dtype[Any]
    exported: Any = None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def pointer(self) -> int:
        """The address of its first element."""
        return int(self.tensor.data_ptr() if is_torch(self.tensor) else self.tensor.data.ptr)

    @property
    def nbytes(self) -> int:
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


def zeros_like(source: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    """Zeros: a tensor of torch or cupy on the device of ``source``, an array without one."""
    if source is None or isinstance(source, np.ndarray):
        return np.zeros(shape, dtype)
    package = package_of(source)
    if is_torch(source):
        return package.zeros(shape, dtype=getattr(package, dtype.name), device=source.device)
    return package.zeros(shape, dtype=dtype)


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


def check(inputs: Sequence[EngineTensor], outputs: Sequence[EngineTensor]) -> None:
    """Check that tensors of a manifest can be those of an engine: another program may have written it.

    Raises:
        IntegrityError: Two have one name, a size is negative or above 2147483647, a profile has not the rank of its
            input, or is upside down, or not all inputs that have profiles have the same number.
    """
    count = max((len(tensor.ranges) for tensor in inputs), default=0)
    for tensors in (inputs, outputs):
        names = [tensor.name for tensor in tensors]
        for tensor in tensors:
            shape = tensor.shape or ()
            sound = all(0 <= dim < 2**31 for dim in shape if isinstance(dim, int)) and names.count(tensor.name) == 1
            if not sound or len(tensor.ranges) not in (0, count) or not all(_fits(one, shape) for one in tensor.ranges):
                raise IntegrityError(
                    "The shapes, profiles or names in the manifest are not those of an engine",
                    where=f"tensor {tensor.name}",
                    remedy="build the engine again",
                )


def _fits(one: ShapeRange, shape: Sequence[int | str]) -> bool:
    sizes = (one.min, one.opt, one.max)
    return all(len(size) == len(shape) for size in sizes) and all(
        0 <= low <= best <= high < 2**31 for low, best, high in zip(*sizes, strict=True)
    )


Arrays = dict[str, np.ndarray]
"""Arrays by the name of the input or output."""

CallInput = np.ndarray | GpuTensor
"""An input of a call: in the host's memory, or on the GPU."""

_MOST_SEEN = 1024
"""Combinations of shapes that are remembered as right."""


@dataclass(frozen=True)
class TensorSpec:
    """An input or output.

    Attributes:
        dtype: Its numpy type; ``ml_dtypes.bfloat16`` for BF16.
        shape: A number, or the name of the dimension (``"?"`` without one) where it is dynamic; None where not even the
            rank is known.
        profiles: Of an engine's input: smallest, best and largest shape of each optimization profile.
        state: Of an input that is a state, the output that is this input in the next step; else empty.
    """

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int | str, ...] | None
    profiles: tuple[ShapeRange, ...] = ()
    state: str = ""


def spec_of(item: EngineTensor) -> TensorSpec:
    """A tensor of a manifest."""
    dtype = ml_dtypes.bfloat16 if item.dtype == "bfloat16" else item.dtype
    return TensorSpec(item.name, np.dtype(dtype), item.shape, item.ranges, item.state)


class InputChecker:
    """Checks the inputs of calls, at the border, so that a runtime never sees wrong ones."""

    def __init__(self, inputs: Sequence[TensorSpec], *, takes_gpu: bool) -> None:
        self._specs = {spec.name: spec for spec in inputs}
        self._wanted = [(spec.name, spec.dtype) for spec in inputs]
        self._profiles = {spec.name: spec.profiles for spec in inputs if spec.profiles}
        self._takes_gpu = takes_gpu
        self._seen: set[tuple[tuple[int, ...], ...]] = set()
        """Shapes that fit, bounded: looking them up is cheaper than checking them."""

    def check(self, inputs: Mapping[str, Any]) -> dict[str, CallInput]:
        """The inputs, of the right type and shape, without copies.

        Raises:
            UsageError: A name, a type or a shape is wrong, or the shapes are outside of all profiles.
        """
        if type(inputs) is not dict and not isinstance(inputs, Mapping):
            raise UsageError(
                f"The inputs are a {type(inputs).__name__}, not a dict of arrays by name",
                where="inputs",
                remedy=f"give {{{', '.join(f'{name!r}: ...' for name in self._specs)}}}",
            )
        if len(inputs) != len(self._wanted):
            raise self._wrong_names(inputs)
        arrays: dict[str, CallInput] = {}
        shapes = []
        for name, dtype in self._wanted:
            if name not in inputs:
                raise self._wrong_names(inputs)
            value = inputs[name]
            array = arrays[name] = value if type(value) is np.ndarray else self._read(name, value)
            if array.dtype is not dtype and array.dtype != dtype:
                raise UsageError(
                    f"The input {name!r} is {array.dtype}; the model takes {dtype}",
                    where=name,
                    remedy=f"convert it: nothing is converted unasked. With numpy: {name}.astype({dtype.name!r})",
                )
            shapes.append(array.shape)
        key = tuple(shapes)
        if key not in self._seen:
            self._check_shapes(dict(zip(self._specs, shapes, strict=True)))
            if len(self._seen) >= _MOST_SEEN:
                self._seen.clear()
            self._seen.add(key)
        return arrays

    def _read(self, name: str, value: Any) -> CallInput:
        """A tensor of another package."""
        if isinstance(value, np.ndarray):
            return value
        if not hasattr(value, "__dlpack__"):
            raise UsageError(
                f"The input {name!r} is a {type(value).__name__}, no array",
                where=name,
                remedy="give a numpy array, or a tensor that speaks DLPack",
            )
        try:
            kind, number = value.__dlpack_device__()
            if kind in (CPU, CUDA_HOST):
                return host_array(value)
            self._check_gpu(name, number)
            return on_gpu(value)
        except (BufferError, RuntimeError, TypeError, ValueError) as error:
            raise UsageError(
                f"The input {name!r} cannot be read without a copy: {' '.join(str(error).split())[:200]}",
                where=name,
                remedy="give what is contiguous, needs no gradient and has a type of NumPy "
                "(torch: tensor.detach().contiguous())",
            ) from error

    def _check_gpu(self, name: str, number: int) -> None:
        if not self._takes_gpu:
            raise UsageError(
                f"The input {name!r} lies on a GPU, and this engine reads the host's memory",
                where=name,
                remedy="move it (torch: tensor.cpu(), cupy: array.get()); engine.runtime says what runs",
            )
        if number != 0:
            raise UsageError(
                f"The input {name!r} lies on GPU {number}, and the engine on GPU 0",
                where=name,
                remedy="move it (torch: tensor.to('cuda:0')); CUDA_VISIBLE_DEVICES says which GPU is number 0",
            )

    def _wrong_names(self, inputs: Mapping[str, Any]) -> UsageError:
        known = ", ".join(self._specs)
        for name in inputs:
            if name not in self._specs:
                near = nearest(str(name), self._specs)
                meant = f"; did you mean {near!r}?" if near else ""
                return UsageError(f"There is no input {name!r}{meant}", where=str(name), remedy=f"give {known}")
        missing = ", ".join(name for name in self._specs if name not in inputs)
        return UsageError(f"The call lacks the input {missing}", where=missing, remedy=f"give {known}")

    def _check_shapes(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        sizes: dict[str, tuple[int, str]] = {}
        for name, shape in shapes.items():
            wanted = self._specs[name].shape
            if wanted is None:
                continue
            if len(wanted) != len(shape) or any(
                isinstance(dim, int) and dim != size for dim, size in zip(wanted, shape, strict=True)
            ):
                raise UsageError(
                    f"The input {name!r} has the shape {list(shape)}; the model takes {said(wanted)}",
                    where=name,
                    remedy="give that rank and those sizes, names stand for any; for others build with --min-shapes "
                    "and --max-shapes",
                )
            for dim, size in zip(wanted, shape, strict=True):
                if isinstance(dim, int) or dim == "?":
                    continue
                other, first = sizes.setdefault(dim, (size, name))
                if other != size:
                    raise UsageError(
                        f"The dimension {dim!r} is {other} in {first!r} and {size} in {name!r}",
                        where=f"{first}, {name}",
                        remedy="give inputs of one call with the same size there",
                    )
        choose(self._profiles, shapes)


def said(shape: Sequence[int | str] | None) -> str:
    """A shape for a message: ``[batch, 3, 224, 224]``."""
    return "any shape" if shape is None else f"[{', '.join(map(str, shape))}]"


def check_nan(arrays: Mapping[str, Any], *, outputs: bool) -> None:
    """Check that no array holds a NaN.

    Raises:
        UsageError: An input does.
        InvalidModelError: An output does.
    """
    for name, array in arrays.items():
        count = _nan_count(array.tensor if isinstance(array, GpuTensor) else array)
        if count and outputs:
            raise InvalidModelError(
                f"The output {name!r} has {count} NaN, from inputs without",
                where=name,
                remedy="see `trtopt build --report`: which layers overflow; or load with nan='allow'",
            )
        if count:
            raise UsageError(
                f"The input {name!r} has {count} NaN",
                where=name,
                remedy="clean the input, or load with nan='allow'",
            )


def _nan_count(array: Any) -> int:
    """Values of an array, or of a tensor of torch or cupy, that are no number."""
    if isinstance(array, np.ndarray):
        is_float = array.dtype.kind in "fc" or array.dtype in ML_FLOATS
        return int(np.count_nonzero(np.isnan(array))) if is_float else 0
    return int(package_of(array).isnan(array).sum())
