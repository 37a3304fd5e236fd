"""Stand-ins for the modules ``tensorrt`` and ``cuda.bindings.runtime`` that refuse what the real ones do not have.

Names and arguments are those of the documented Python API (TensorRT 10.3 to 11; ``tensorrt_rtx`` 1.7 has the same):
another attribute is an error, device memory is bounds-checked, and what is freed, leaked or used after is counted.
They prove that calls fit the documentation, not that TensorRT does what it says: tests/gpu does on a GPU.
"""

from __future__ import annotations

import ctypes
import enum
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

HEADER = b"ftrt" + bytes(20) + bytes((10, 13, 0, 35)) + bytes(40)
"""The beginning of an engine of TensorRT 10.13."""


class Severity(enum.Enum):
    INTERNAL_ERROR, ERROR, WARNING, INFO, VERBOSE = range(5)


class TensorIOMode(enum.Enum):
    NONE, INPUT, OUTPUT = range(3)


class TensorLocation(enum.Enum):
    DEVICE, HOST = range(2)


class ExecutionContextAllocationStrategy(enum.Enum):
    STATIC, ON_PROFILE_CHANGE, USER_MANAGED = range(3)


TensorFormat = enum.Enum("TensorFormat", "LINEAR CHW2 HWC8 CHW4 CHW16 CHW32 DHWC8 CDHW32 HWC DLA_LINEAR", start=0)
DataType = enum.Enum("DataType", "FLOAT HALF INT8 INT32 BOOL UINT8 FP8 BF16 INT64", start=0)
_NUMPY = {"FLOAT": np.float32, "HALF": np.float16, "INT32": np.int32, "INT64": np.int64, "INT8": np.int8}


@dataclass
class Tensor:
    """An input or output; -1 stands for a dynamic dimension."""

    name: str
    shape: tuple[int, ...]
    is_input: bool = True
    dtype: str = "FLOAT"
    format: str = "LINEAR"
    on_host: bool = False
    profile: tuple[tuple[int, ...], ...] = ()
    alias: str = ""


@dataclass
class Plan:
    """What an engine does: ``compute`` gives the outputs of the inputs, as memory holds them."""

    tensors: tuple[Tensor, ...]
    compute: Callable[[Mapping[str, np.ndarray]], Mapping[str, np.ndarray]]
    is_version_compatible: bool = False
    streamable: int = 0
    has_aliases: bool = False
    inspected: str | Exception = "{}"


@dataclass
class Machine:
    """One process: what lives in it, and how it is to fail."""

    plans: dict[bytes, Plan] = field(default_factory=dict)
    memory: dict[int, np.ndarray] = field(default_factory=dict)
    free_bytes: int = 1 << 30
    loggers: list[Any] = field(default_factory=list)
    loaded_libraries: list[str] = field(default_factory=list)
    alive: dict[str, int] = field(default_factory=dict)
    driver_error: str = ""
    missing_driver: bool = False
    uncapturable: bool = False
    capturing: bool = False
    graphs: set[int] = field(default_factory=set)
    contexts: list[Any] = field(default_factory=list)
    next_address: int = 1 << 40

    def engine(self, plan: Plan, name: bytes = b"x") -> bytes:
        data = HEADER + name
        self.plans[data] = plan
        return data

    def view(self, pointer: int, size: int) -> np.ndarray:
        for start, block in self.memory.items():
            if start <= pointer and pointer + size <= start + block.nbytes:
                return block[pointer - start : pointer - start + size]
        raise AssertionError(f"{size} bytes at {pointer:#x} are not in memory of the device")

    def bytes_at(self, pointer: int, size: int) -> np.ndarray:
        if any(start <= pointer < start + block.nbytes for start, block in self.memory.items()):
            return self.view(pointer, size)
        assert pointer < 1 << 40 or pointer > 1 << 46, f"{pointer:#x} is memory of the device that was freed"
        return np.ctypeslib.as_array((ctypes.c_ubyte * size).from_address(pointer))


class _Counted:
    """Something whose instances are counted while they are alive."""

    __slots__ = ("_machine",)

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        machine.alive[type(self).__name__] = machine.alive.get(type(self).__name__, 0) + 1

    def __del__(self) -> None:
        self._machine.alive[type(self).__name__] -= 1


class Context(_Counted):
    __slots__ = ("_addresses", "_allocators", "_engine", "_has_memory", "_shapes", "active_optimization_profile")

    def __init__(self, engine: Engine, strategy: ExecutionContextAllocationStrategy) -> None:
        super().__init__(engine._machine)
        self._engine, self._addresses, self._allocators = engine, {}, {}
        self._has_memory = strategy is ExecutionContextAllocationStrategy.STATIC
        self._shapes = {item.name: item.shape for item in engine._plan.tensors if item.is_input}
        self.active_optimization_profile = 0

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        wanted = self._engine._of(name).shape
        if len(wanted) != len(shape) or any(a not in (-1, b) for a, b in zip(wanted, shape, strict=True)):
            self._engine._log(f"set_input_shape: {name}")
            return False
        self._shapes[name] = tuple(shape)
        return True

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        if name in self._shapes:
            return self._shapes[name]
        first = next(iter(self._shapes.values()))
        return tuple(first[0] if dim == -1 else dim for dim in self._engine._of(name).shape)

    def get_max_output_size(self, name: str) -> int:
        assert not self._engine._of(name).is_input
        return int(self._engine._size(name, self.get_tensor_shape(name)))

    def set_tensor_address(self, name: str, memory: int) -> bool:
        assert isinstance(memory, int) and self._engine._of(name)
        alias = self._engine._of(name).alias
        if memory == 0 or (alias and self._addresses.get(alias) != memory):
            self._engine._log(f"set_tensor_address: {name}")
            return False
        self._addresses[name] = memory
        return True

    def set_output_allocator(self, name: str, output_allocator: Any) -> bool:
        assert not self._engine._of(name).alias, "an aliased output lies where its input does"
        self._allocators[name] = output_allocator
        return True

    def set_device_memory(self, memory: int, size: int) -> None:
        assert not self._has_memory
        self._machine.view(memory, size)
        self._has_memory = True

    def execute_async_v3(self, stream_handle: int) -> bool:
        machine, engine = self._machine, self._engine
        assert isinstance(stream_handle, int) and self._has_memory, "no memory for activations"
        if machine.capturing:
            if machine.uncapturable:
                engine._log("operation not permitted when stream is capturing")
            return not machine.uncapturable
        feeds = {}
        for item in engine._plan.tensors:
            if item.is_input:
                shape, dtype = engine._padded(item.name, self._shapes[item.name]), _NUMPY[item.dtype]
                size = int(np.prod(shape)) * np.dtype(dtype).itemsize
                at = machine.bytes_at if item.on_host else machine.view
                feeds[item.name] = at(self._addresses[item.name], size).view(dtype).reshape(shape)
        for name, value in engine._plan.compute(feeds).items():
            array = np.ascontiguousarray(value, _NUMPY[engine._of(name).dtype])
            address, allocator = self._addresses[name], self._allocators.get(name)
            if allocator is not None:
                address = allocator.reallocate_output(name, address, array.nbytes, 256)
                allocator.notify_shape(name, engine._shape_of(name, array.shape))
                if address == 0:
                    engine._log("Error Code 2: OutOfMemory")
                    return False
            at = machine.bytes_at if engine._of(name).on_host else machine.view
            at(address, array.nbytes)[:] = array.view(np.uint8).reshape(-1)
        return True


class Inspector:
    __slots__ = ("_engine", "execution_context")

    def __init__(self, engine: Engine) -> None:
        self._engine, self.execution_context = engine, None

    def get_engine_information(self, format: Any) -> str:
        found = self._engine._plan.inspected
        if isinstance(found, Exception):
            raise found
        return found


class Engine(_Counted):
    """An ``ICudaEngine``; ``get_aliased_input_tensor`` is missing where the plan is of an older TensorRT."""

    __slots__ = ("_budget", "_contexts", "_logger", "_plan")

    def __init__(self, machine: Machine, plan: Plan, logger: Any) -> None:
        super().__init__(machine)
        self._plan, self._logger, self._budget, self._contexts = plan, logger, plan.streamable, 0

    def _of(self, name: str) -> Tensor:
        return next(item for item in self._plan.tensors if item.name == name)

    def _log(self, message: str) -> None:
        self._logger.log(Severity.ERROR, message)

    def _padded(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        multiple = {"LINEAR": 0, "HWC": 1, "HWC8": 8}[self._of(name).format]
        if not multiple:
            return shape
        return (shape[0], *shape[2:], -(-shape[1] // multiple) * multiple)

    def _shape_of(self, name: str, memory: tuple[int, ...]) -> tuple[int, ...]:
        return memory if self._of(name).format == "LINEAR" else (memory[0], memory[-1], *memory[1:-1])

    def _size(self, name: str, shape: tuple[int, ...]) -> int:
        return int(np.prod(self._padded(name, shape))) * np.dtype(_NUMPY[self._of(name).dtype]).itemsize

    @property
    def num_io_tensors(self) -> int:
        return len(self._plan.tensors)

    @property
    def num_optimization_profiles(self) -> int:
        return 1

    @property
    def device_memory_size_v2(self) -> int:
        return 64

    @property
    def streamable_weights_size(self) -> int:
        return self._plan.streamable

    @property
    def weight_streaming_scratch_memory_size(self) -> int:
        return 16

    @property
    def weight_streaming_budget_v2(self) -> int:
        return self._budget

    @weight_streaming_budget_v2.setter
    def weight_streaming_budget_v2(self, budget: int) -> None:
        if self._contexts:
            self._log("the budget is set while there are contexts")
        else:
            self._budget = budget

    def get_weight_streaming_automatic_budget(self) -> int:
        return self._plan.streamable // 4

    def get_tensor_name(self, index: int) -> str:
        return self._plan.tensors[index].name

    def get_tensor_mode(self, name: str) -> TensorIOMode:
        return TensorIOMode.INPUT if self._of(name).is_input else TensorIOMode.OUTPUT

    def get_tensor_location(self, name: str) -> TensorLocation:
        return TensorLocation.HOST if self._of(name).on_host else TensorLocation.DEVICE

    def get_tensor_dtype(self, name: str) -> Any:
        return DataType[self._of(name).dtype]

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return self._of(name).shape

    def get_tensor_format(self, name: str, profile_index: int = 0) -> Any:
        assert 0 <= profile_index < self.num_optimization_profiles
        return TensorFormat[self._of(name).format]

    def get_tensor_format_desc(self, name: str, profile_index: int = 0) -> str:
        return f"some words about {self._of(name).format}"

    def get_tensor_profile_shape(self, name: str, profile_index: int) -> list[tuple[int, ...]]:
        return list(self._of(name).profile or (self._of(name).shape,) * 3)

    def get_tensor_profile_values(self, name: str, profile_index: int) -> list[list[int]]:
        return [list(values) for values in self._of(name).profile]

    def is_shape_inference_io(self, name: str) -> bool:
        return self._of(name).on_host

    def create_execution_context(
        self, strategy: ExecutionContextAllocationStrategy = ExecutionContextAllocationStrategy.STATIC
    ) -> Context:
        assert isinstance(strategy, ExecutionContextAllocationStrategy)
        self._contexts += 1
        self._machine.contexts.append(strategy)
        return Context(self, strategy)

    def create_engine_inspector(self) -> Inspector:
        return Inspector(self)


class EngineWithAliases(Engine):
    """Of a TensorRT that has ``KVCacheUpdate``."""

    __slots__ = ()

    def get_aliased_input_tensor(self, name: str) -> str | None:
        return self._of(name).alias or None


def tensorrt_module(machine: Machine) -> types.ModuleType:
    """The module ``tensorrt``."""

    class ILogger:
        Severity = Severity

    class IOutputAllocator:
        pass

    class Runtime(_Counted):
        __slots__ = ("_logger", "engine_host_code_allowed")

        def __init__(self, logger: ILogger) -> None:
            super().__init__(machine)
            assert isinstance(logger, ILogger)
            machine.loggers.append(logger)
            self._logger, self.engine_host_code_allowed = logger, False
            if machine.driver_error:
                logger.log(Severity.ERROR, machine.driver_error)  # type: ignore[attr-defined]
                raise TypeError("pybind11::init(): factory function returned nullptr")

        def deserialize_cuda_engine(self, serialized_engine: bytes) -> Engine | None:
            plan = machine.plans[bytes(serialized_engine)]
            if plan.is_version_compatible and not self.engine_host_code_allowed:
                self._logger.log(Severity.ERROR, "engine_host_code_allowed is false")
                return None
            return (EngineWithAliases if plan.has_aliases else Engine)(machine, plan, self._logger)

    class Registry:
        __slots__ = ()

        def load_library(self, plugin_path: str) -> object | None:
            if plugin_path in machine.loaded_libraries:
                return None
            machine.loaded_libraries.append(plugin_path)
            return object()

    def init_libnvinfer_plugins(logger: ILogger, namespace: str) -> bool:
        machine.loggers.append(logger)
        return True

    module = types.ModuleType("tensorrt")
    module.__dict__.update(
        __version__="10.13.0.35",
        ILogger=ILogger,
        IOutputAllocator=IOutputAllocator,
        Runtime=Runtime,
        TensorIOMode=TensorIOMode,
        TensorLocation=TensorLocation,
        TensorFormat=TensorFormat,
        ExecutionContextAllocationStrategy=ExecutionContextAllocationStrategy,
        LayerInformationFormat=enum.Enum("LayerInformationFormat", "ONELINE JSON"),
        init_libnvinfer_plugins=init_libnvinfer_plugins,
        get_plugin_registry=Registry,
        nptype=lambda dtype: _NUMPY[dtype.name],
    )
    return module


def cuda_module(machine: Machine) -> types.ModuleType:
    """The module ``cuda.bindings.runtime``, whose functions give a status first."""
    errors = enum.Enum("cudaError_t", {"cudaSuccess": 0, "cudaErrorMemoryAllocation": 2, "cudaErrorCapture": 900})
    kinds = enum.Enum("cudaMemcpyKind", {"cudaMemcpyHostToDevice": 1, "cudaMemcpyDeviceToHost": 2})
    ok = errors.cudaSuccess  # type: ignore[attr-defined]

    def allocate(size: int) -> tuple[Any, ...]:
        if machine.missing_driver:
            raise RuntimeError("Failed to dlopen libcuda.so.1")
        if sum(block.nbytes for block in machine.memory.values()) + size > machine.free_bytes:
            return errors.cudaErrorMemoryAllocation, None  # type: ignore[attr-defined]
        address, machine.next_address = machine.next_address, machine.next_address + (size // 256 + 2) * 256
        machine.memory[address] = np.zeros(size, np.uint8)
        return ok, address

    def free(pointer: int) -> tuple[Any, ...]:
        del machine.memory[pointer]
        return (ok,)

    pinned: dict[int, Any] = {}

    def allocate_host(size: int) -> tuple[Any, ...]:
        block = np.zeros(size, np.uint8)
        pinned[block.ctypes.data] = block
        return ok, block.ctypes.data

    def copy(target: int, source: int, size: int, kind: Any, stream: Any = None) -> tuple[Any, ...]:
        assert kind in kinds
        machine.bytes_at(target, size)[:] = machine.bytes_at(source, size)
        return (ok,)

    def copy_async(target: int, source: int, size: int, kind: Any, stream: Any) -> tuple[Any, ...]:
        return copy(target, source, size, kind)

    def device() -> tuple[Any, ...]:
        if machine.missing_driver:
            raise RuntimeError("Failed to dlopen libcuda.so.1")
        return ok, 0

    def begin(stream: int, mode: Any) -> tuple[Any, ...]:
        machine.capturing = True
        return (ok,)

    def end(stream: int) -> tuple[Any, ...]:
        machine.capturing = False
        machine.graphs.add(len(machine.graphs) + 1)
        return ok, max(machine.graphs)

    def destroy(graph: int) -> tuple[Any, ...]:
        machine.graphs.remove(graph)
        return (ok,)

    module = types.ModuleType("cuda.bindings.runtime")
    module.__dict__.update(
        cudaError_t=errors,
        cudaMemcpyKind=kinds,
        cudaStreamNonBlocking=1,
        cudaEventDisableTiming=2,
        cudaStreamCaptureMode=types.SimpleNamespace(cudaStreamCaptureModeThreadLocal=1),
        cudaGetLastError=lambda: (ok,),
        cudaGetDevice=device,
        cudaMalloc=allocate,
        cudaFree=free,
        cudaMallocHost=allocate_host,
        cudaFreeHost=lambda pointer: (ok, pinned.pop(pointer))[:1],
        cudaMemcpy=copy,
        cudaMemcpyAsync=copy_async,
        cudaStreamCreate=lambda: (ok, 7),
        cudaStreamCreateWithFlags=lambda flags: (ok, 7),
        cudaStreamDestroy=lambda stream: (ok,),
        cudaStreamSynchronize=lambda stream: (ok,),
        cudaStreamBeginCapture=begin,
        cudaStreamEndCapture=end,
        cudaGraphDestroy=destroy,
        cudaGraphInstantiate=lambda graph, flags: (ok, 1000 + graph),
        cudaGraphExecDestroy=lambda graph: (ok,),
        cudaGraphLaunch=lambda graph, stream: (ok,),
        cudaEventCreate=lambda: (ok, 9),
        cudaEventCreateWithFlags=lambda flags: (ok, 9),
        cudaEventDestroy=lambda event: (ok,),
    )
    return module
