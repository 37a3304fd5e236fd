"""Run an engine where its GPU is.

Written to the documented API of TensorRT 10.3 and later, TensorRT for RTX 1.7 and cuda-python 12 and later; it has not
been run on a GPU yet. `trtopt doctor --selftest` runs it and compares with ONNX Runtime.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

import ml_dtypes
import numpy as np

from trtopt._lazy import is_available, require
from trtopt.engine.backend import TENSORRT_RTX, Backend, read_header
from trtopt.errors import EngineBuildError, TargetError, UsageError
from trtopt.hardware.probe import probe
from trtopt.runtime import Feeds

_T = TypeVar("_T")
_CHANNELS_LAST = ("HWC", "HWC8")
"""Formats of inputs and outputs that `--io` gives; their channels fill the memory without gaps."""
_ML_DTYPES = {"BF16": ml_dtypes.bfloat16, "FP8": ml_dtypes.float8_e4m3fn}


def why_not_run(backend: Backend, engine: bytes | None = None) -> str:
    """Why engines of ``backend`` (or this one) cannot run here; empty when they can."""
    found = probe()
    if found.gpu is None:
        return found.reason
    for module in (backend.module, "cuda"):
        if not is_available(module):
            return f"the Python package {module} is not installed"
    capability = found.gpu.compute_capability
    if backend == TENSORRT_RTX and engine is not None:
        targets = read_header(engine).compute_capabilities
        if capability not in targets:
            return f"the engine is for compute capability {', '.join(targets)}, this GPU has {capability}"
    return ""


def can_run(backend: Backend, engine: bytes | None = None) -> bool:
    """Whether engines of ``backend`` (or this one) can run here."""
    return not why_not_run(backend, engine)


class EngineSession:
    """An engine on its GPU, run like an :class:`~trtopt.runtime.OrtSession`; a context manager that frees its memory.

    Args:
        engine: The engine file's content.
        backend: What built it.

    Raises:
        TargetError: It cannot run here.
        EngineBuildError: The runtime refuses the engine.
    """

    def __init__(self, engine: bytes, backend: Backend) -> None:
        reason = why_not_run(backend, engine)
        if reason:
            raise TargetError(f"The engine cannot run here: {reason}", where=backend.runtime, remedy=backend.install)
        trt = require(backend.module, "gpu", "run engines")
        self._stack = contextlib.ExitStack()
        self._runner = _guarded(lambda: _Runner(trt, engine, self._stack))
        self.output_names: tuple[str, ...] = self._runner.output_names

    def run(self, feeds: Feeds) -> list[np.ndarray]:
        """Outputs in the order of ``output_names``.

        Args:
            feeds: Arrays by input name, converted to the engine's dtypes.

        Raises:
            UsageError: A feed is missing an input, or its shape is outside of the engine's profile.
            EngineBuildError: The engine fails to run.
        """
        return _guarded(functools.partial(self._runner.run, feeds))

    def __enter__(self) -> EngineSession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()


def _guarded(call: Callable[[], _T]) -> _T:
    """``call()``, with what the native bindings raise as one of our errors."""
    try:
        return call()
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        raise EngineBuildError(
            f"The runtime's Python interface failed: {type(error).__name__}: {error}",
            where="running the engine",
            remedy="run `trtopt doctor --selftest` and report it with the output",
        ) from error


class _Cuda:
    """The calls of the CUDA runtime that are needed, with errors raised."""

    def __init__(self) -> None:
        self.api = require("cuda.bindings.runtime", "gpu", "run engines")

    def call(self, name: str, *arguments: Any) -> Any:
        status, *values = getattr(self.api, name)(*arguments)
        if status != self.api.cudaError_t.cudaSuccess:
            raise EngineBuildError(
                f"CUDA failed: {status.name}", where=name, remedy="check the driver with nvidia-smi; free GPU memory"
            )
        return values[0] if values else None


class _Buffer:
    """Device memory that grows."""

    def __init__(self, cuda: _Cuda) -> None:
        self._cuda = cuda
        self._bytes = 0
        self.pointer = 0

    def reserve(self, size: int) -> int:
        if size > self._bytes:
            self.free()
            self.pointer = int(self._cuda.call("cudaMalloc", size))
            self._bytes = size
        return self.pointer

    def free(self) -> None:
        if self._bytes:
            self._cuda.call("cudaFree", self.pointer)
        self._bytes = self.pointer = 0


class _Runner:
    """An engine with its context and buffers, freed when ``stack`` closes."""

    def __init__(self, trt: Any, data: bytes, stack: contextlib.ExitStack) -> None:
        self._trt = trt
        self._cuda = _Cuda()
        self._logger = trt.Logger(trt.Logger.ERROR)
        trt.init_libnvinfer_plugins(self._logger, "")
        runtime = trt.Runtime(self._logger)
        engine = runtime.deserialize_cuda_engine(data)
        if engine is None:
            raise EngineBuildError(
                "The runtime refuses the engine",
                where=f"{trt.__name__} {trt.__version__}",
                remedy="build it with this version and for this GPU",
            )
        self._keep = (runtime, engine)
        self._context = engine.create_execution_context()
        self._stream = self._cuda.call("cudaStreamCreate")
        stack.callback(self._cuda.call, "cudaStreamDestroy", self._stream)
        names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
        modes = {name: engine.get_tensor_mode(name) for name in names}
        self._inputs = [name for name in names if modes[name] == trt.TensorIOMode.INPUT]
        self._outputs = [name for name in names if modes[name] == trt.TensorIOMode.OUTPUT]
        self.output_names = tuple(self._outputs)
        self._on_host = {name for name in names if engine.get_tensor_location(name) == trt.TensorLocation.HOST}
        self._dtypes = {name: self._dtype(engine.get_tensor_dtype(name)) for name in names}
        self._last = {name for name in names if engine.get_tensor_format(name).name in _CHANNELS_LAST}
        self._buffers = {name: _Buffer(self._cuda) for name in names}
        for buffer in self._buffers.values():
            stack.callback(buffer.free)
        self._allocators = {name: _output_allocator(trt, self._buffers[name]) for name in self._outputs}

    def _dtype(self, dtype: Any) -> np.dtype[Any]:
        found: np.dtype[Any] = np.dtype(_ML_DTYPES.get(dtype.name) or self._trt.nptype(dtype))
        return found

    def run(self, feed: Feeds) -> list[np.ndarray]:
        held = [self._set_input(name, feed) for name in self._inputs]  # host memory must live until the stream is done
        for name in self._outputs:
            self._context.set_output_allocator(name, self._allocators[name])
            self._context.set_tensor_address(name, self._buffers[name].reserve(1))
        if not self._context.execute_async_v3(int(self._stream)):
            raise EngineBuildError(
                "The engine failed to run",
                where=", ".join(f"{name}{array.shape}" for name, array in zip(self._inputs, held, strict=True)),
                remedy="run `trtopt doctor --selftest` and report it with the output",
            )
        self._cuda.call("cudaStreamSynchronize", self._stream)
        return [self._fetch(name) for name in self._outputs]

    def _set_input(self, name: str, feed: Feeds) -> np.ndarray:
        if name not in feed:
            raise UsageError(f"The engine's input {name!r} is missing", where=", ".join(feed), remedy="add it")
        array = np.ascontiguousarray(feed[name], dtype=self._dtypes[name]).reshape(np.shape(feed[name]))
        if not self._context.set_input_shape(name, array.shape):
            raise UsageError(
                f"The shape {list(array.shape)} of {name!r} is outside of the engine's profile",
                where=name,
                remedy="build with wider --min-shapes and --max-shapes",
            )
        if name in self._last:
            array = np.ascontiguousarray(np.moveaxis(array, 1, -1))
        if name in self._on_host:
            self._context.set_tensor_address(name, array.ctypes.data)
            return array
        pointer = self._buffers[name].reserve(max(array.nbytes, 1))
        kind = self._cuda.api.cudaMemcpyKind.cudaMemcpyHostToDevice
        self._cuda.call("cudaMemcpyAsync", pointer, array.ctypes.data, array.nbytes, kind, self._stream)
        self._context.set_tensor_address(name, pointer)
        return array

    def _fetch(self, name: str) -> np.ndarray:
        allocator = self._allocators[name]
        shape = allocator.shape
        if name in self._last:
            shape = (shape[0], *shape[2:], shape[1])
        array = np.empty(shape, self._dtypes[name])
        kind = self._cuda.api.cudaMemcpyKind.cudaMemcpyDeviceToHost
        self._cuda.call("cudaMemcpy", array.ctypes.data, self._buffers[name].pointer, array.nbytes, kind)
        return np.moveaxis(array, -1, 1) if name in self._last else array


def _output_allocator(trt: Any, buffer: _Buffer) -> Any:
    class Allocator(trt.IOutputAllocator):  # type: ignore[misc]
        """Gives the engine memory once it knows an output's size, which may depend on the data."""

        def __init__(self) -> None:
            trt.IOutputAllocator.__init__(self)
            self.shape: tuple[int, ...] = ()

        def reallocate_output(self, name: str, memory: int, size: int, alignment: int) -> int:
            return buffer.reserve(max(size, 1))

        def reallocate_output_async(self, name: str, memory: int, size: int, alignment: int, stream: int) -> int:
            return buffer.reserve(max(size, 1))

        def notify_shape(self, name: str, shape: Any) -> None:
            self.shape = tuple(shape)

    return Allocator()
