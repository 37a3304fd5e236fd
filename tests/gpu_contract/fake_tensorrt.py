"""A stand-in for ``tensorrt`` and ``tensorrt_rtx``, of the releases in ``tables``: it has what they have, stricter.

An engine is a :class:`~machine.Plan`. What runs is enqueued in a stream of ``fake_cuda`` and runs as late
as CUDA allows; shapes are checked against the profile that is set; values of shape tensors are read when a run is
enqueued; a run may be captured only after one of the same shapes, and a captured graph fails once its context changed.
A stand-in proves little: that calls fit the interfaces and the documented rules, not that TensorRT keeps them.
``tests/gpu`` and ``trtopt doctor --selftest`` are the judge, on a GPU.
"""

from __future__ import annotations

import itertools
import types
from typing import Any

import numpy as np
from declared import checked, declared, enums, read_table
from fake_context import Context, Counted, RuntimeCache, RuntimeConfig
from machine import NUMPY, Machine, Plan, Shape, Tensor


class _Inspector(Counted):
    def __init__(self, engine: _Engine) -> None:
        super().__init__(engine._machine)
        self._engine, self._context = engine, None

    @property
    def execution_context(self) -> Any:
        return self._context

    @execution_context.setter
    def execution_context(self, context: Any) -> None:
        self._context = context

    def get_engine_information(self, format: Any) -> str:
        found = self._engine._plan.inspected
        if self._context is not None:
            for item in self._engine._outputs():
                self._context._output_shape(item)
        if isinstance(found, Exception):
            raise found
        return found


class _Engine(Counted):
    def __init__(self, machine: Machine, plan: Plan, logger: Any, trt: types.ModuleType) -> None:
        super().__init__(machine)
        self._plan, self._logger, self._trt = plan, logger, trt
        self._budget, self._contexts, self._kernels = plan.streamable, 0, list[str]()
        self._next_ms = itertools.cycle(plan.took_ms).__next__

    def _inputs(self) -> list[Tensor]:
        return [item for item in self._plan.tensors if item.is_input]

    def _outputs(self) -> list[Tensor]:
        return [item for item in self._plan.tensors if not item.is_input]

    def _of(self, name: str) -> Tensor:
        return next(item for item in self._plan.tensors if item.name == name)

    def _value_ranges(self, profile: int) -> list[tuple[str, Shape, Shape]]:
        shaped = (item for item in self._inputs() if item.is_values and item.profiles)
        return [(item.name, item.profiles[profile][0], item.profiles[profile][2]) for item in shaped]

    def _refuse(self, message: str) -> bool:
        self._logger.log(self._trt.ILogger.Severity.ERROR, message)
        return False

    def _padded(self, item: Tensor, shape: Shape) -> Shape:
        multiple = {"LINEAR": 0, "HWC": 1, "HWC8": 8}[item.format]
        if not multiple:
            return shape
        return (shape[0], *shape[2:], -(-shape[1] // multiple) * multiple)

    def _shape_of(self, item: Tensor, memory: Shape) -> Shape:
        return memory if item.format == "LINEAR" else (memory[0], memory[-1], *memory[1:-1])

    def _size(self, item: Tensor, shape: Shape) -> int:
        return int(np.prod(self._padded(item, shape))) * item.itemsize

    @property
    def num_io_tensors(self) -> int:
        return len(self._plan.tensors)

    @property
    def num_optimization_profiles(self) -> int:
        return self._plan.profiles

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
            self._refuse("the budget is set while there are contexts")
        else:
            self._budget = budget

    def get_weight_streaming_automatic_budget(self) -> int:
        return self._plan.streamable // 4

    def get_tensor_name(self, index: int) -> str:
        return self._plan.tensors[index].name

    def get_tensor_mode(self, name: str) -> Any:
        return self._trt.TensorIOMode.INPUT if self._of(name).is_input else self._trt.TensorIOMode.OUTPUT

    def get_tensor_location(self, name: str) -> Any:
        return self._trt.TensorLocation.HOST if self._of(name).on_host else self._trt.TensorLocation.DEVICE

    def get_tensor_dtype(self, name: str) -> Any:
        return self._trt.DataType[self._of(name).dtype]

    def get_tensor_shape(self, name: str) -> Shape:
        return self._of(name).shape

    def get_tensor_format(self, name: str, profile_index: int = 0) -> Any:
        assert 0 <= profile_index < self.num_optimization_profiles
        return self._trt.TensorFormat[self._of(name).format]

    def get_tensor_format_desc(self, name: str, profile_index: int = 0) -> str:
        return f"some words about {self._of(name).format}"

    def get_tensor_profile_shape(self, name: str, profile_index: int) -> list[Shape]:
        item = self._of(name)
        assert not item.is_values, f"{name} is a shape tensor: its profile has values"
        return list(item.profiles[profile_index] if item.profiles else (item.shape,) * 3)

    def get_tensor_profile_values(self, profile_index: int, name: str) -> list[list[int]]:
        item = self._of(name)
        return [list(values) for values in item.profiles[profile_index]] if item.is_values else []

    def get_aliased_input_tensor(self, name: str) -> str | None:
        return self._of(name).alias or None

    def is_shape_inference_io(self, name: str) -> bool:
        return self._of(name).on_host

    def create_runtime_config(self) -> Any:
        return self._trt.IRuntimeConfig(self._machine, self._trt)

    def create_execution_context(self, how: Any = None) -> Any:
        config = how if isinstance(how, RuntimeConfig) else None
        strategy = self._trt.ExecutionContextAllocationStrategy.STATIC if how is None else how
        strategy = strategy if config is None else config._allocation
        self._contexts += 1
        self._machine.contexts.append(strategy.name)
        if config is not None and config._specialization is not None:
            self._machine.strategies.append(config._specialization.name)
        return self._trt.IExecutionContext(self, strategy, config)

    def create_engine_inspector(self) -> Any:
        return self._trt.EngineInspector(self)


def tensorrt_module(machine: Machine) -> types.ModuleType:
    """The module of the machine's release, under the name that it has there."""
    table = read_table(machine.release)
    trt = types.ModuleType(machine.release.partition("-")[0])
    trt.__dict__.update(enums(machine.release))
    trt.__dict__["__version__"] = machine.version

    class ILogger:
        Severity = trt.__dict__.pop("Severity")

        def __init__(self) -> None:
            self._is_initialized = True

    class IOutputAllocator:
        _is_initialized = False

        def __init__(self) -> None:
            self._is_initialized = True

    class IProfiler(IOutputAllocator):
        """It is subclassed like an allocator."""

    class _Runtime(Counted):
        def __init__(self, logger: ILogger) -> None:
            assert isinstance(logger, ILogger) and logger._is_initialized
            machine.loggers.append(logger)
            if machine.driver_error:
                logger.log(ILogger.Severity.ERROR, machine.driver_error)  # type: ignore[attr-defined]
                raise TypeError("pybind11::init(): factory function returned nullptr")
            super().__init__(machine)
            self._logger, self._host_code = logger, False

        @property
        def engine_host_code_allowed(self) -> bool:
            return self._host_code

        @engine_host_code_allowed.setter
        def engine_host_code_allowed(self, allowed: bool) -> None:
            self._host_code = allowed

        def deserialize_cuda_engine(self, serialized_engine: Any) -> Any:
            plan = machine.plans[bytes(serialized_engine)]
            if plan.is_version_compatible and not self._host_code:
                self._logger.log(ILogger.Severity.ERROR, "engine_host_code_allowed is false")  # type: ignore[attr-defined]
                return None
            return trt.ICudaEngine(machine, plan, self._logger, trt)

    class _Registry:
        def load_library(self, plugin_path: str) -> object | None:
            if plugin_path in machine.loaded_libraries:
                return None
            machine.loaded_libraries.append(plugin_path)
            return object()

    def init_libnvinfer_plugins(logger: ILogger, namespace: str) -> bool:
        machine.loggers.append(logger)
        return True

    does: dict[str, type] = {
        **{"Runtime": _Runtime, "ICudaEngine": _Engine, "IExecutionContext": Context, "EngineInspector": _Inspector},
        **{"IRuntimeConfig": RuntimeConfig, "IRuntimeCache": RuntimeCache, "IPluginRegistry": _Registry},
    }
    for name, cls in does.items():
        found = declared(table, name, cls)
        if found is not None:
            setattr(trt, name, found)
    plugins = checked("init_libnvinfer_plugins", table["functions"]["init_libnvinfer_plugins"], init_libnvinfer_plugins)
    trt.__dict__.update(
        ILogger=ILogger,
        IOutputAllocator=IOutputAllocator,
        IProfiler=IProfiler,
        init_libnvinfer_plugins=plugins,
        get_plugin_registry=lambda: trt.IPluginRegistry(),
        nptype=lambda dtype: NUMPY[dtype.name],
    )
    return trt
