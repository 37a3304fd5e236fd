"""Execution contexts of the stand-in, with their runtime configurations and caches of kernels."""

from __future__ import annotations

import json
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from fake_cuda import Stream
from machine import NUMPY, Machine, Shape, Tensor


class Counted:
    """Something whose instances are counted while they are alive."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        machine.alive[type(self).__name__] = machine.alive.get(type(self).__name__, 0) + 1

    def __del__(self) -> None:
        if hasattr(self, "_machine"):
            self._machine.alive[type(self).__name__] -= 1


class _HostMemory(bytes):
    @property
    def nbytes(self) -> int:
        return len(self)


class RuntimeCache(Counted):
    """Kernels that were compiled; what it writes is JSON with a magic word."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine)
        self._kernels: list[str] = []

    def serialize(self) -> Any:
        assert not self._machine.alive.get("IExecutionContext"), "a context may still add kernels"
        if self._machine.kernel_cache == "not written":
            return None
        return _HostMemory(b"rtxc" + json.dumps(self._kernels).encode())

    def deserialize(self, blob: bytes) -> bool:
        data = bytes(blob)
        if not data.startswith(b"rtxc"):
            return False
        self._kernels = json.loads(data[4:])
        return True

    def reset(self) -> bool:
        self._kernels = []
        return True


class RuntimeConfig(Counted):
    def __init__(self, machine: Machine, trt: types.ModuleType) -> None:
        super().__init__(machine)
        self._trt, self._cache, self._graphs = trt, None, None
        self._specialization = trt.DynamicShapesKernelSpecializationStrategy.LAZY if machine.is_rtx else None
        self._allocation = trt.ExecutionContextAllocationStrategy.STATIC

    @property
    def dynamic_shapes_kernel_specialization_strategy(self) -> Any:
        return self._specialization

    @dynamic_shapes_kernel_specialization_strategy.setter
    def dynamic_shapes_kernel_specialization_strategy(self, strategy: Any) -> None:
        assert isinstance(strategy, self._trt.DynamicShapesKernelSpecializationStrategy)
        self._specialization = strategy

    @property
    def cuda_graph_strategy(self) -> Any:
        return self._graphs

    @cuda_graph_strategy.setter
    def cuda_graph_strategy(self, strategy: Any) -> None:
        assert isinstance(strategy, self._trt.CudaGraphStrategy)
        self._graphs = strategy

    def set_execution_context_allocation_strategy(self, strategy: Any) -> None:
        self._allocation = strategy

    def create_runtime_cache(self) -> Any:
        if self._machine.kernel_cache == "missing":
            return None
        return self._trt.IRuntimeCache(self._machine)

    def set_runtime_cache(self, cache: Any = None) -> bool:
        self._cache = cache
        return True

    def get_runtime_cache(self) -> Any:
        return self._cache


class Context(Counted):
    """One profile, its shapes and addresses; ``_state`` counts what changed them."""

    def __init__(self, engine: Any, strategy: Any, config: RuntimeConfig | None) -> None:
        super().__init__(engine._machine)
        self._engine, self._config, self._addresses, self._allocators = engine, config, {}, {}
        self._has_memory, self._scratch = strategy.name == "STATIC", (0, 0)
        self._profile, self._state, self._warm = 0, 0, -1
        self._profiler, self._emits, self._reported = None, True, True
        self._forget_shapes()

    def _forget_shapes(self) -> None:
        static = (item for item in self._engine._plan.tensors if item.is_input and -1 not in item.shape)
        self._shapes = {item.name: item.shape for item in static}
        self._state += 1

    @property
    def active_optimization_profile(self) -> int:
        return self._profile

    @property
    def profiler(self) -> Any:
        return self._profiler

    @profiler.setter
    def profiler(self, profiler: Any) -> None:
        self._profiler = profiler

    @property
    def enqueue_emits_profile(self) -> bool:
        return self._emits

    @enqueue_emits_profile.setter
    def enqueue_emits_profile(self, emits: bool) -> None:
        self._emits = emits

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        self._machine.device.stream(stream_handle)
        if not 0 <= profile_index < self._engine._plan.profiles or self._machine.device.capturing:
            return self._engine._refuse(f"setOptimizationProfileAsync: {profile_index}")
        self._profile = profile_index
        self._forget_shapes()
        return True

    def set_input_shape(self, name: str, shape: Sequence[int]) -> bool:
        item = self._engine._of(name)
        assert item.is_input, f"{name} is no input"
        new, ranges = tuple(shape), () if item.is_values else item.profiles
        fits = len(new) == len(item.shape) and all(a in (-1, b) for a, b in zip(item.shape, new, strict=True))
        if fits and ranges:
            low, _, high = ranges[self._profile]
            fits = all(a <= b <= c for a, b, c in zip(low, new, high, strict=True))
        if not fits:
            return self._engine._refuse(f"setInputShape: {name}")
        if self._shapes.get(name) != new:
            self._state += 1
        self._shapes[name] = new
        return True

    def get_tensor_shape(self, name: str) -> Shape:
        item = self._engine._of(name)
        if item.is_input:
            return self._shapes.get(name, item.shape)
        return self._output_shape(item)

    def _output_shape(self, item: Tensor) -> Shape:
        missing = [each.name for each in self._engine._inputs() if each.name not in self._shapes]
        assert not missing, f"the shapes of {missing} are not set"
        return tuple(self._engine._plan.shape_of(self._shapes, self._values(), item))

    def _values(self) -> dict[str, np.ndarray]:
        """The values of shape tensors, as they lie in the host's memory now."""
        found = {}
        for item in self._engine._inputs():
            if item.is_values:
                assert item.name in self._addresses, f"the values of {item.name} have no address"
                address, size = self._addresses[item.name], int(np.prod(item.shape)) * item.itemsize
                assert not 1 << 40 <= address < 1 << 46, f"{item.name} is read on the host, and lies on the device"
                found[item.name] = self._machine.device.bytes_at(address, size).view(NUMPY[item.dtype]).copy()
        return found

    def get_max_output_size(self, name: str) -> int:
        item = self._engine._of(name)
        assert not item.is_input, f"{name} is no output"
        shape = self._output_shape(item)
        return -1 if -1 in shape else self._engine._size(item, shape)

    def set_tensor_address(self, name: str, memory: int) -> bool:
        item = self._engine._of(name)
        if memory == 0 or (item.alias and self._addresses.get(item.alias) != memory):
            return self._engine._refuse(f"setTensorAddress: {name}")
        assert item.on_host or memory % 256 == 0, f"the address of {name} is no multiple of 256"
        if self._addresses.get(name) != memory:
            self._state += 1
        self._addresses[name] = memory
        return True

    def set_output_allocator(self, name: str, output_allocator: Any) -> bool:
        assert not self._engine._of(name).alias, "an aliased output lies where its input does"
        assert output_allocator is None or output_allocator._is_initialized, "its __init__ was not called"
        self._allocators[name] = output_allocator
        return True

    def set_device_memory(self, memory: int, size: int) -> None:
        assert not self._has_memory and size >= self._engine.device_memory_size_v2
        self._machine.device.view(memory, size)
        self._has_memory, self._scratch = True, (memory, size)

    def infer_shapes(self) -> list[str]:
        return [item.name for item in self._engine._inputs() if item.name not in self._shapes]

    def execute_async_v3(self, stream_handle: int) -> bool:
        machine, engine = self._machine, self._engine
        stream = machine.device.stream(stream_handle)
        assert self._has_memory, "the context has no memory for activations"
        shapes = {item.name: self._output_shape(item) for item in engine._outputs()}
        if stream.graph is not None:
            why = (
                "operation not permitted when stream is capturing" if machine.uncapturable else self._uncaptured(shapes)
            )
            if why:
                stream.graph.is_broken = True
                return engine._refuse(why)
        values = self._values()
        for name, low, high in engine._value_ranges(self._profile):
            given = values[name].reshape(-1)
            if not all(a <= b <= c for a, b, c in zip(low, given, high, strict=True)):
                return engine._refuse(f"enqueueV3: the values of {name} are outside of the profile")
        self._compile()
        feeds = self._reader(values)
        if any(-1 in shape for shape in shapes.values()):
            stream.drain()  # the sizes follow from the data
            found = engine._plan.compute(feeds())
            shapes = {name: engine._shape_of(engine._of(name), np.shape(found[name])) for name in shapes}
        places = {}
        for item in engine._outputs():
            place = self._placed(item, shapes[item.name], int(stream_handle))
            if place == 0:
                return engine._refuse(f"Error Code 2: OutOfMemory: {item.name}")
            places[item.name] = place
        stream.enqueue(self._op(stream, feeds, places))
        if stream.graph is None:
            self._warm = self._state
            if self._profiler is not None and self._emits:
                stream.drain()
                self._report()
        return True

    def _uncaptured(self, shapes: Mapping[str, Shape]) -> str:
        if self._warm != self._state:
            return "the first run after a change cannot be captured"
        if any(-1 in shape for shape in shapes.values()) or self._profiler is not None:
            return "a run that waits for the device cannot be captured"
        return ""

    def _compile(self) -> None:
        """What TensorRT for RTX does before the first run of a shape; a kernel in the cache is not compiled again."""
        if not self._machine.is_rtx or self._config is None:
            return
        is_special = self._config._specialization.name != "NONE"
        kernel = f"{id(self._engine._plan)} {sorted(self._shapes.items()) if is_special else 'any'}"
        cache = self._config._cache
        known = cache._kernels if cache is not None else self._engine._kernels
        if kernel not in known:
            known.append(kernel)
            self._machine.compiled.append(kernel)

    def _reader(self, values: Mapping[str, np.ndarray]) -> Callable[[], dict[str, np.ndarray]]:
        """Reads the inputs, from where they are to lie when the run is reached."""
        engine, device = self._engine, self._machine.device
        placed = []
        for item in engine._inputs():
            if item.on_host:
                continue
            assert item.name in self._addresses, f"{item.name} has no address"
            shape = engine._padded(item, self._shapes[item.name])
            placed.append((item, shape, self._addresses[item.name]))

        def read() -> dict[str, np.ndarray]:
            found = {
                item.name: device.view(address, int(np.prod(shape)) * item.itemsize)
                .view(NUMPY[item.dtype])
                .reshape(shape)
                for item, shape, address in placed
            }
            return found | {name: array.reshape(engine._of(name).shape) for name, array in values.items()}

        return read

    def _placed(self, item: Tensor, shape: Shape, stream: int) -> int:
        """Where an output goes; 0 where its allocator has no memory."""
        allocator = self._allocators.get(item.name)
        if allocator is None:
            assert item.name in self._addresses, f"{item.name} has no address"
            return int(self._addresses[item.name])
        size, before = self._engine._size(item, shape), self._addresses.get(item.name, 0)
        if hasattr(allocator, "reallocate_output_async"):
            place = allocator.reallocate_output_async(item.name, before, size, 256, stream)
        else:
            place = allocator.reallocate_output(item.name, before, size, 256)
        if place:
            allocator.notify_shape(item.name, shape)
        return int(place)

    def _op(self, stream: Stream, feeds: Callable[[], dict[str, np.ndarray]], places: Mapping[str, int]) -> Any:
        device, engine, state = self._machine.device, self._engine, self._state
        is_captured = stream.graph is not None

        def run() -> None:
            assert not is_captured or self._state == state, "the context of a captured graph has changed"
            if self._scratch[1]:
                device.view(*self._scratch)
            inputs = {name: array.copy() for name, array in feeds().items()}
            for name, value in engine._plan.compute(inputs).items():
                item = engine._of(name)
                array = np.ascontiguousarray(value, NUMPY[item.dtype])
                at = device.bytes_at if item.on_host else device.view
                at(places[name], array.nbytes)[:] = array.view(np.uint8).reshape(-1)
            device.clock_ms += engine._next_ms()
            self._reported = False

        return run

    def _report(self) -> None:
        for layer, ms in self._engine._plan.layers.items():
            self._profiler.report_layer_time(layer, ms)
        self._reported = True

    def report_to_profiler(self) -> bool:
        if self._profiler is None or self._reported:
            return self._engine._refuse("reportToProfiler: nothing ran, or it is not done")
        self._report()
        return True
