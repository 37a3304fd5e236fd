"""Run an engine where its GPU is.

Written to the documented API of TensorRT 10.3 and later, TensorRT for RTX 1.7 and cuda-python 12.6.1 and later; it has
not been run on a GPU yet. `trtopt doctor --selftest` runs it and compares with ONNX Runtime.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import ml_dtypes
import numpy as np

from trtopt.engine.backend import TENSORRT_RTX, Backend, describe, identify, read_header
from trtopt.errors import EngineBuildError, TargetError, UsageError
from trtopt.graph.artifact import InputSpec
from trtopt.hardware.probe import probe
from trtopt.support._lazy import is_available, require
from trtopt.support.ort_session import Feeds

if TYPE_CHECKING:
    from typing_extensions import Self

_T = TypeVar("_T")
_CHANNELS_LAST = ("HWC", "HWC8")
"""Formats of inputs and outputs that `--io` gives; their channels fill the memory without gaps."""
_MOST_MESSAGES = 32
_ML_DTYPES = {"BF16": ml_dtypes.bfloat16, "FP8": ml_dtypes.float8_e4m3fn}


def why_not_run(backend: Backend, engine: bytes | None = None) -> str:
    """Why engines of ``backend`` (or this one) cannot run here; empty when they can."""
    found = probe()
    if found.gpu is None:
        return found.reason
    if not is_available(backend.module):
        return f"the Python package {backend.module} is not installed"
    if not is_available("cuda"):
        return "the Python package cuda-python is not installed (pip install cuda-python)"
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
    """An engine on its GPU, run like an :class:`~trtopt.support.ort_session.OrtSession`.

    A context manager that frees its memory.

    Args:
        rtx_graphs: Whether TensorRT for RTX captures and launches CUDA graphs by itself; it falls back unseen.

    Raises:
        TargetError: It cannot run here, or the runtime refuses the engine.
        EngineBuildError: The runtime fails.
    """

    def __init__(self, engine: bytes, backend: Backend, *, rtx_graphs: bool = False) -> None:
        reason = why_not_run(backend, engine)
        if reason:
            raise TargetError(f"The engine cannot run here: {reason}", where=backend.runtime, remedy=backend.install)
        trt = require(backend.module, "gpu", "run engines")
        with contextlib.ExitStack() as stack:
            self._runner = guarded(lambda: _Runner(trt, engine, stack, rtx_graphs))
            self._stack = stack.pop_all()
        self.output_names: tuple[str, ...] = self._runner.output_names

    def run(self, feeds: Feeds) -> list[np.ndarray]:
        """Outputs in the order of ``output_names``.

        Args:
            feeds: Arrays by input name, converted to the engine's dtypes.

        Raises:
            UsageError: A feed is missing an input, or its shape is outside of the engine's profile.
            EngineBuildError: The engine fails to run.
        """
        return guarded(functools.partial(self._runner.run, feeds))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()


def guarded(call: Callable[[], _T]) -> _T:
    """``call()``, with what the native bindings raise as one of our errors."""
    try:
        return call()
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        raise EngineBuildError(
            f"The runtime's Python interface failed: {type(error).__name__}: {error}",
            where="running the engine",
            remedy="run `trtopt doctor --selftest` and report it with the output",
        ) from error


class Cuda:
    """The calls of the CUDA runtime that are needed, with errors raised."""

    def __init__(self) -> None:
        self.api = require("cuda.bindings.runtime", "gpu", "run engines")

    def call(self, name: str, *arguments: Any) -> Any:
        status, *values = getattr(self.api, name)(*arguments)
        if status != self.api.cudaError_t.cudaSuccess:
            self.api.cudaGetLastError()  # else the runtime's next launch takes it for its own
            raise EngineBuildError(
                f"CUDA failed: {status.name}", where=name, remedy="check the driver with nvidia-smi; free GPU memory"
            )
        return values[0] if values else None

    @contextlib.contextmanager
    def first_gpu(self) -> Iterator[None]:
        """Make the first GPU the current one of this thread: the caller's package may have chosen another."""
        before = self.call("cudaGetDevice")
        if before:
            self.call("cudaSetDevice", 0)
        try:
            yield
        finally:
            if before:
                self.call("cudaSetDevice", before)


class Buffer:
    """Memory that grows: of the device, or of the host, for what the runtime reads and writes there."""

    def __init__(self, cuda: Cuda, *, on_host: bool = False) -> None:
        self._cuda = cuda
        self._allocate, self._release = ("cudaMallocHost", "cudaFreeHost") if on_host else ("cudaMalloc", "cudaFree")
        self._bytes = 0
        self.pointer = 0

    def reserve(self, size: int) -> int:
        if size > self._bytes:
            self.free()
            self.pointer = int(self._cuda.call(self._allocate, size))
            self._bytes = size
        return self.pointer

    def free(self) -> None:
        if self._bytes:
            self._cuda.call(self._release, self.pointer)
        self._bytes = self.pointer = 0


class LoadedEngine:
    """An engine in its runtime, and what its inputs and outputs are.

    Attributes:
        on_host: Inputs and outputs whose values the runtime reads or writes in the host's memory: shapes, as a rule.
        channels_last: Inputs and outputs that hold their channels last in memory.
        messages: Errors that the runtime logged.
    """

    def __init__(self, trt: Any, data: bytes) -> None:
        self.trt = trt
        self.messages: list[str] = []
        self._built = describe(*identify(data))
        self._logger = error_log(trt, self.messages)
        trt.init_libnvinfer_plugins(self._logger, "")
        self._runtime = trt.Runtime(self._logger)
        self.engine = self._given(self._runtime.deserialize_cuda_engine(data))
        names = [self.engine.get_tensor_name(index) for index in range(self.engine.num_io_tensors)]
        modes = {name: self.engine.get_tensor_mode(name) for name in names}
        self.inputs = [name for name in names if modes[name] == trt.TensorIOMode.INPUT]
        self.outputs = [name for name in names if modes[name] == trt.TensorIOMode.OUTPUT]
        self.on_host = {name for name in names if self.engine.get_tensor_location(name) == trt.TensorLocation.HOST}
        self.dtypes = {name: self._dtype(self.engine.get_tensor_dtype(name)) for name in names}
        self.channels_last = {name for name in names if self.engine.get_tensor_format(name).name in _CHANNELS_LAST}

    def new_context(self, rtx_graphs: bool) -> Any:
        """An execution context.

        TensorRT for RTX compiles the kernels for a new shape in the background unless it is told to wait, so that the
        first runs are those of other kernels.

        Raises:
            TargetError: The runtime refuses, for want of memory as a rule.
        """
        trt, engine = self.trt, self.engine
        if trt.__name__ != TENSORRT_RTX.module:
            return self._given(engine.create_execution_context())
        config = engine.create_runtime_config()
        config.dynamic_shapes_kernel_specialization_strategy = trt.DynamicShapesKernelSpecializationStrategy.EAGER
        if rtx_graphs:
            config.cuda_graph_strategy = trt.CudaGraphStrategy.WHOLE_GRAPH_CAPTURE
        return self._given(engine.create_execution_context(config))

    def new_buffer(self, cuda: Cuda, name: str) -> Buffer:
        return Buffer(cuda, on_host=name in self.on_host)

    def failed(self, shapes: str) -> EngineBuildError:
        """What is raised when the engine fails to run."""
        return EngineBuildError(
            f"The engine failed to run: {'; '.join(self.messages[-3:]) or 'without a reason'}",
            where=shapes,
            remedy="run `trtopt doctor --selftest` and report it with the output",
        )

    def _given(self, made: Any) -> Any:
        if made is None:
            raise TargetError(
                f"The runtime refuses the engine, built by {self._built}: "
                + ("; ".join(self.messages) or "without a reason"),
                where=f"{self.trt.__name__} {self.trt.__version__} on {probe().name}",
                remedy="build it with this version and for this GPU; free GPU memory",
            )
        return made

    def _dtype(self, dtype: Any) -> np.dtype[Any]:
        found: np.dtype[Any] = np.dtype(_ML_DTYPES.get(dtype.name) or self.trt.nptype(dtype))
        return found


class _Runner(LoadedEngine):
    """An engine with its context and buffers, freed when ``stack`` closes."""

    def __init__(self, trt: Any, data: bytes, stack: contextlib.ExitStack, rtx_graphs: bool) -> None:
        super().__init__(trt, data)
        self.cuda = Cuda()
        self.context = self.new_context(rtx_graphs)
        self.stream = self.cuda.call("cudaStreamCreate")
        stack.callback(self.cuda.call, "cudaStreamDestroy", self.stream)
        self.output_names = tuple(self.outputs)
        self._buffers = {name: self.new_buffer(self.cuda, name) for name in (*self.inputs, *self.outputs)}
        for buffer in self._buffers.values():
            stack.callback(buffer.free)
        self._allocators = {name: output_allocator(trt, self._buffers[name]) for name in self.outputs}
        self._held: list[np.ndarray] = []

    def input_specs(self) -> tuple[InputSpec, ...]:
        specs = []
        for name in self.inputs:
            dims = (int(dim) for dim in self.engine.get_tensor_shape(name))
            specs.append(InputSpec(name, self.dtypes[name], tuple("?" if dim < 0 else dim for dim in dims)))
        return tuple(specs)

    def optimum(self, name: str) -> tuple[int, ...]:
        """The shape of an input that the first optimization profile is tuned for."""
        return tuple(int(dim) for dim in self.engine.get_tensor_profile_shape(name, 0)[1])

    def run(self, feed: Feeds) -> list[np.ndarray]:
        self.set(feed)
        self.enqueue()
        self.synchronize()
        return [self._fetch(name) for name in self.outputs]

    def set(self, feed: Feeds) -> None:
        """Copy the inputs, and have the outputs' memory follow their sizes."""
        self._held = [self._set_input(name, feed) for name in self.inputs]  # must live until the stream is done
        for name in self.outputs:
            self.context.set_output_allocator(name, self._allocators[name])
            self.context.set_tensor_address(name, self._buffers[name].reserve(1))

    def fix_outputs(self) -> None:
        """After a run: keep the outputs' memory as it is, so that no callback into Python is timed.

        Outputs whose size depends on the data keep their allocator.
        """
        for name in self.outputs:
            if -1 not in tuple(self.context.get_tensor_shape(name)):
                self.context.set_output_allocator(name, None)
                self.context.set_tensor_address(name, self._buffers[name].pointer)

    def enqueue(self) -> None:
        if not self.context.execute_async_v3(int(self.stream)):
            raise self.failed(", ".join(f"{n}{a.shape}" for n, a in zip(self.inputs, self._held, strict=True)))

    def synchronize(self) -> None:
        self.cuda.call("cudaStreamSynchronize", self.stream)

    def _set_input(self, name: str, feed: Feeds) -> np.ndarray:
        if name not in feed:
            raise UsageError(f"The engine's input {name!r} is missing", where=", ".join(feed), remedy="add it")
        array = np.ascontiguousarray(feed[name], dtype=self.dtypes[name]).reshape(np.shape(feed[name]))
        if not self.context.set_input_shape(name, array.shape):
            raise UsageError(
                f"The shape {list(array.shape)} of {name!r} is outside of the engine's profile",
                where=name,
                remedy="build with wider --min-shapes and --max-shapes",
            )
        if name in self.channels_last:
            array = np.ascontiguousarray(np.moveaxis(array, 1, -1))
        if name in self.on_host:
            self.context.set_tensor_address(name, array.ctypes.data)
            return array
        pointer = self._buffers[name].reserve(max(array.nbytes, 1))
        kind = self.cuda.api.cudaMemcpyKind.cudaMemcpyHostToDevice
        self.cuda.call("cudaMemcpyAsync", pointer, array.ctypes.data, array.nbytes, kind, self.stream)
        self.context.set_tensor_address(name, pointer)
        return array

    def _fetch(self, name: str) -> np.ndarray:
        allocator = self._allocators[name]
        shape = allocator.shape
        if name in self.channels_last:
            shape = (shape[0], *shape[2:], shape[1])
        array = np.empty(shape, self.dtypes[name])
        if name in self.on_host:
            ctypes.memmove(array.ctypes.data, self._buffers[name].pointer, array.nbytes)
            return array
        kind = self.cuda.api.cudaMemcpyKind.cudaMemcpyDeviceToHost
        self.cuda.call("cudaMemcpy", array.ctypes.data, self._buffers[name].pointer, array.nbytes, kind)
        return np.moveaxis(array, -1, 1) if name in self.channels_last else array


def error_log(trt: Any, messages: list[str]) -> Any:
    class ErrorLogger(trt.ILogger):  # type: ignore[misc]
        """Keeps the last errors: a service may go on for long after them."""

        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            if severity.value <= trt.ILogger.Severity.ERROR.value:
                messages.append(message)
                del messages[:-_MOST_MESSAGES]

    return ErrorLogger()


def output_allocator(trt: Any, buffer: Buffer) -> Any:
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
