"""An engine in its runtime, what its inputs and outputs are, and how its memory is laid out.

Written to the documented API of TensorRT 10.3 and later and TensorRT for RTX 1.7; it has not been run on a GPU yet.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal, TypeVar

import ml_dtypes
import numpy as np

from trtopt.engine.backend import AS_BUILT, TENSORRT_RTX, RuntimeOptions, describe, identify
from trtopt.engine.cuda import Buffer, Cuda
from trtopt.engine.kernel_cache import KernelCache
from trtopt.engine.native_log import heard, logger_of
from trtopt.engine.process import driver_failed, is_driver_failure, plugin_refused
from trtopt.engine.profiles import Profiles
from trtopt.errors import EngineBuildError, TargetError, UsageError
from trtopt.hardware.probe import probe
from trtopt.report.schema.manifest import ShapeRange

_T = TypeVar("_T")
_MOST_MESSAGES = 32
_ML_DTYPES = {"BF16": ml_dtypes.bfloat16, "FP8": ml_dtypes.float8_e4m3fn}
_IMAGE_RANK = 4
_PACKED = {"HWC": 1, "HWC8": 8}
"""Formats that hold the channels of [N, C, H, W] last, and the multiple of channels at which they have no gaps."""

_PLUGINS: set[tuple[str, Path]] = set()
"""Libraries that this process has loaded: a registry refuses one that it has."""
_PLUGINS_LOCK = threading.Lock()


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


class LoadedEngine:
    """An engine in its runtime, and what its inputs and outputs are.

    Attributes:
        on_host: Inputs and outputs whose values the runtime reads or writes in the host's memory: shapes, as a rule.
        profiles: By optimization profile, the shapes of dynamic inputs and the values of shape tensors.
        shape_values: The inputs that are read as shapes.
        channels_last: Inputs and outputs that hold their channels last in memory.
        aliased: Outputs that are written where an input lies (KV caches), and that input.
        messages: Errors that the runtime logged.

    Raises:
        TargetError: The runtime refuses the engine, or the driver does not start.
        UsageError: A library of plugins cannot be loaded; or an input or output has a memory format that trtopt does
            not fill; or a weight budget is for an engine that streams none.
    """

    def __init__(self, trt: Any, data: bytes, options: RuntimeOptions = AS_BUILT) -> None:
        self.trt = trt
        self._options = options
        self._kernels = None if options.kernels is None else KernelCache(options.kernels, data, trt.__version__)
        self.messages: list[str] = []
        self._built = describe(*identify(data))
        with self.heard():
            self._runtime = self._new_runtime()  # first: the registry of plugins has no logger before
            load_plugins(trt, options.plugins, self.messages)
            if options.host_code:
                self._runtime.engine_host_code_allowed = True
            self.engine = self._given(self._runtime.deserialize_cuda_engine(data))
            if options.weight_budget is not None:
                self._set_budget(options.weight_budget)
            self._read_tensors()

    def _new_runtime(self) -> Any:
        try:
            return self.trt.Runtime(logger_of(self.trt))
        except TypeError as error:
            if not is_driver_failure(error):
                raise
            raise driver_failed(self.messages) from error

    def _read_tensors(self) -> None:
        trt, engine = self.trt, self.engine
        names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
        modes = {name: engine.get_tensor_mode(name) for name in names}
        self.inputs = [name for name in names if modes[name] == trt.TensorIOMode.INPUT]
        self.outputs = [name for name in names if modes[name] == trt.TensorIOMode.OUTPUT]
        self.on_host = {name for name in names if engine.get_tensor_location(name) == trt.TensorLocation.HOST}
        self.dtypes = {name: self._dtype(engine.get_tensor_dtype(name)) for name in names}
        found = {name: self._values(name) for name in self.inputs if engine.is_shape_inference_io(name)}
        values = {name: ranges for name, ranges in found.items() if all(ranges)}
        dynamic = {name: self._shapes(name) for name in self.inputs if -1 in tuple(engine.get_tensor_shape(name))}
        self.shape_values = set(values)
        self.profiles: Profiles = {
            name: [ShapeRange(*(tuple(map(int, sizes)) for sizes in each)) for each in ranges]
            for name, ranges in {**dynamic, **values}.items()
        }
        self.channels_last = {name for name in names if self._is_channels_last(name)}
        alias = getattr(engine, "get_aliased_input_tensor", None)  # older versions have no such outputs
        sources = {} if alias is None else {name: alias(name) for name in self.outputs}
        self.aliased: dict[str, str] = {name: source for name, source in sources.items() if source}

    def _values(self, name: str) -> list[Any]:
        """Of a shape tensor; nothing of others. The Python interface calls the two arguments by each other's names."""
        engine = self.engine
        return [engine.get_tensor_profile_values(index, name) for index in range(engine.num_optimization_profiles)]

    def _shapes(self, name: str) -> list[Any]:
        engine = self.engine
        return [engine.get_tensor_profile_shape(name, index) for index in range(engine.num_optimization_profiles)]

    def _is_channels_last(self, name: str) -> bool:
        """Whether the channels lie last, in every profile; raises UsageError: memory is laid out in another way."""
        engine = self.engine
        profiles = range(max(engine.num_optimization_profiles, 1))
        formats = {engine.get_tensor_format(name, index).name for index in profiles}
        shape = tuple(engine.get_tensor_shape(name))
        if formats == {"LINEAR"}:
            return False
        packed = _PACKED.get(next(iter(formats))) if len(formats) == 1 and len(shape) == _IMAGE_RANK else None
        if packed == 1 or (packed is not None and shape[1] > 0 and shape[1] % packed == 0):
            return True
        raise UsageError(
            f"The engine holds {name!r} of shape {list(shape)} in the memory format {', '.join(sorted(formats))}, "
            "which trtopt does not fill",
            where=engine.get_tensor_format_desc(name),
            remedy="build it with inputs and outputs in the usual order (trtexec --inputIOFormats=fp32:chw "
            "--outputIOFormats=fp32:chw), or with `trtopt build --io`",
        )

    def _set_budget(self, asked: int | Literal["auto"]) -> None:
        """Before any context exists: TensorRT refuses it after."""
        engine = self.engine
        streamable = int(engine.streamable_weights_size)
        if not streamable:
            raise UsageError(
                "The engine streams no weights, so that there is no budget to set",
                where=self._built,
                remedy="build it with --builder weight_streaming=true, or leave the budget out",
            )
        budget = engine.get_weight_streaming_automatic_budget() if asked == "auto" else min(asked, streamable)
        engine.weight_streaming_budget_v2 = budget
        if engine.weight_streaming_budget_v2 != budget:
            raise self.failed(f"a weight budget of {budget} bytes")

    def weight_streaming(self) -> dict[str, int] | None:
        """Bytes of streamable weights, of those that stay on the GPU, and of the memory that streaming takes; None
        where nothing is streamed."""
        engine = self.engine
        streamable = int(engine.streamable_weights_size)
        resident = min(int(engine.weight_streaming_budget_v2), streamable) if streamable else 0
        if resident == streamable:
            return None
        return {
            "streamable_bytes": streamable,
            "resident_bytes": resident,
            "scratch_bytes": int(engine.weight_streaming_scratch_memory_size),
        }

    def heard(self) -> AbstractContextManager[None]:
        """Keep the errors that calls of this thread log in ``messages``, the last ones: a service goes on for long."""

        def keep(severity: Any, message: str) -> None:
            if severity.value <= self.trt.ILogger.Severity.ERROR.value:
                self.messages.append(message)
                del self.messages[:-_MOST_MESSAGES]

        return heard(keep)

    def guarded(self, call: Callable[[], _T]) -> _T:
        """:func:`guarded`, with the errors that are logged meanwhile in ``messages``."""
        with self.heard():
            return guarded(call)

    def new_context(self, rtx_graphs: bool) -> Any:
        """An execution context.

        TensorRT for RTX compiles the kernels for a new shape as the options say.

        Raises:
            TargetError: The runtime refuses, for want of memory as a rule.
        """
        trt, engine = self.trt, self.engine
        if trt.__name__ != TENSORRT_RTX.module:
            return self._given(engine.create_execution_context())
        config = engine.create_runtime_config()
        strategies = trt.DynamicShapesKernelSpecializationStrategy
        config.dynamic_shapes_kernel_specialization_strategy = getattr(strategies, self._options.specialization.upper())
        if self._kernels is not None:
            self._kernels.attach(config)
        if rtx_graphs:
            config.cuda_graph_strategy = trt.CudaGraphStrategy.WHOLE_GRAPH_CAPTURE
        return self._given(engine.create_execution_context(config))

    def new_buffers(self, cuda: Cuda) -> dict[str, Buffer]:
        """Memory for every input and output; an aliased output has that of its input."""
        names = [name for name in (*self.inputs, *self.outputs) if name not in self.aliased]
        found = {name: Buffer(cuda, on_host=name in self.on_host) for name in names}
        found.update((name, found[source]) for name, source in self.aliased.items())
        return found

    def output_bytes(self, context: Any, name: str, shape: Sequence[int]) -> int:
        """What an output of this shape takes at most, with the padding of its format."""
        largest = int(context.get_max_output_size(name))  # -1 where it is not known
        return max(largest, math.prod(shape) * self.dtypes[name].itemsize)

    def failed(self, where: str, allocators: Iterable[Any] = ()) -> Exception:
        """What is raised when the engine fails to run: what an output's allocator raised, else what was logged."""
        for allocator in allocators:
            if allocator.error is not None:
                error: Exception = allocator.error
                allocator.error = None
                return error
        return EngineBuildError(
            f"The engine failed to run: {'; '.join(self.messages[-3:]) or 'without a reason'}",
            where=where,
            remedy="run `trtopt doctor --selftest` and report it with the output",
        )

    def release(self) -> None:
        """Let go of the engine and its runtime, and keep the kernels that were compiled; every context is gone."""
        try:
            if self._kernels is not None:
                self.guarded(self._kernels.keep)
        finally:
            self.let_go()

    def let_go(self) -> None:
        """Let go of the engine and its runtime."""
        self.engine = self._runtime = None

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


def load_plugins(trt: Any, libraries: Iterable[Path], messages: Iterable[str]) -> None:
    """Register TensorRT's plugins, and those of libraries that this process has not loaded yet.

    Args:
        trt: The backend's module.
        libraries: The libraries.
        messages: Where errors are logged meanwhile.

    Raises:
        UsageError: A library cannot be loaded.
    """
    with _PLUGINS_LOCK:
        trt.init_libnvinfer_plugins(logger_of(trt), "")
        for library in libraries:
            key = (trt.__name__, library.resolve())
            if key in _PLUGINS:
                continue
            if trt.get_plugin_registry().load_library(str(key[1])) is None:
                raise plugin_refused(str(library), messages)
            _PLUGINS.add(key)


def output_allocator(trt: Any, buffer: Buffer) -> Any:
    """What gives the engine memory once it knows an output's size, which may depend on the data."""

    class Allocator(trt.IOutputAllocator):  # type: ignore[misc]
        """Keeps what goes wrong in ``error``: the runtime would only say that it got no memory."""

        def __init__(self) -> None:
            trt.IOutputAllocator.__init__(self)
            self.shape: tuple[int, ...] = ()
            self.error: Exception | None = None

        def reallocate_output(self, name: str, memory: int, size: int, alignment: int) -> int:
            try:
                return buffer.reserve(max(size, 1))
            except Exception as error:  # noqa: BLE001 - raised where the run fails
                self.error = error
                return 0

        def reallocate_output_async(self, name: str, memory: int, size: int, alignment: int, stream: int) -> int:
            return self.reallocate_output(name, memory, size, alignment)

        def notify_shape(self, name: str, shape: Any) -> None:
            self.shape = tuple(shape)

    return Allocator()
