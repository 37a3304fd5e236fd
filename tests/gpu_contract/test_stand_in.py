"""The stand-in refuses what the real thing refuses, so that what passes on it means something."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import numpy as np
import pytest
from declared import bound
from machine import RELEASES, Machine
from plans import doubling, static

A_CALL = ["(name: str, profile_index: int = 0) -> int"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [((), {}), ((1,), {}), (("a", 1, 2), {}), (("a",), {"index": 1}), (("a", 1.5), {}), (("a",), {"name": "b"})],
)
def test_another_count_name_or_type_of_arguments_is_an_error(
    arguments: tuple[object, ...], named: dict[str, object]
) -> None:
    assert bound("f", A_CALL, ("a",), {"profile_index": 2}) == {"name": "a", "profile_index": 2}
    with pytest.raises(TypeError, match="incompatible function arguments"):
        bound("f", A_CALL, arguments, dict(named))


@pytest.mark.parametrize("machine", RELEASES, indirect=True)
def test_what_a_release_lacks_is_no_attribute_of_its_classes(machine: Machine) -> None:
    trt = sys.modules[machine.release.partition("-")[0]]
    context = trt.ICudaEngine(machine, static(), None, trt).create_execution_context()
    with pytest.raises(AttributeError):
        context.execute_v3(7)
    with pytest.raises(AttributeError):
        context.profilers = None
    with pytest.raises(AttributeError):
        context.active_optimization_profile = 0
    assert hasattr(context._engine, "create_runtime_config") == (machine.release != "tensorrt-10.3.0")


class Calls:
    """A context of y = 2 x at 2 images, its stream and its memory, without the code that is tested on them."""

    def __init__(self, machine: Machine) -> None:
        self.machine, self.cuda = machine, sys.modules["cuda.bindings.runtime"]
        trt = sys.modules["tensorrt"]
        (_, self.stream) = self.cuda.cudaStreamCreate()
        self.x, self.y = (self.cuda.cudaMalloc(96)[1] for _ in range(2))
        engine = trt.ICudaEngine(machine, doubling(), _Log(), trt)
        self.context = engine.create_execution_context()
        assert self.context.set_input_shape("x", (2, 3, 2, 2))
        assert self.context.set_tensor_address("x", self.x) and self.context.set_tensor_address("y", self.y)

    def enqueue(self) -> bool:
        return bool(self.context.execute_async_v3(int(self.stream)))

    def status(self, name: str, *arguments: object) -> str:
        return str(getattr(self.cuda, name)(*arguments)[0].name)


class _Log:
    def log(self, severity: object, message: str) -> None:
        pass


@pytest.fixture
def calls(machine: Machine) -> Iterator[Calls]:
    yield Calls(machine)


def test_nothing_runs_before_it_is_waited_for(calls: Calls) -> None:
    x, y = np.ones(24, np.float32), np.zeros(24, np.float32)
    kind = calls.cuda.cudaMemcpyKind
    calls.cuda.cudaMemcpyAsync(calls.x, x.ctypes.data, 96, kind.cudaMemcpyHostToDevice, calls.stream)
    assert calls.enqueue()
    calls.cuda.cudaMemcpyAsync(y.ctypes.data, calls.y, 96, kind.cudaMemcpyDeviceToHost, calls.stream)
    assert not y.any()
    x += 1  # too early: the copy has not been made
    calls.cuda.cudaStreamSynchronize(calls.stream)
    np.testing.assert_array_equal(y, 4)


def test_memory_is_neither_passed_nor_used_after_it_was_freed(calls: Calls) -> None:
    kind, host = calls.cuda.cudaMemcpyKind.cudaMemcpyDeviceToHost, np.zeros(100, np.uint8)
    with pytest.raises(AssertionError, match="not in memory"):
        calls.cuda.cudaMemcpy(host.ctypes.data, calls.x, 97, kind)
    assert calls.enqueue()
    calls.cuda.cudaFree(calls.y)
    with pytest.raises(AssertionError, match="not in memory"):
        calls.cuda.cudaStreamSynchronize(calls.stream)
    with pytest.raises(KeyError):
        calls.cuda.cudaFree(calls.y)


def test_what_is_not_destroyed_is_counted(calls: Calls) -> None:
    left = calls.machine.left()
    assert left["memory"] == 2 and left["streams"] == 1 and left["IExecutionContext"] == 1


@pytest.mark.parametrize("name", ["cudaMalloc", "cudaFree", "cudaDeviceSynchronize", "cudaMemcpy"])
def test_a_call_that_captures_forbid_loses_the_capture(name: str, calls: Calls) -> None:
    assert calls.enqueue()
    calls.cuda.cudaStreamSynchronize(calls.stream)
    mode, kind = calls.cuda.cudaStreamCaptureMode, calls.cuda.cudaMemcpyKind.cudaMemcpyDeviceToDevice
    arguments = {"cudaMalloc": (8,), "cudaFree": (calls.x,), "cudaMemcpy": (calls.x, calls.y, 96, kind)}
    calls.cuda.cudaStreamBeginCapture(calls.stream, mode.cudaStreamCaptureModeThreadLocal)
    assert calls.enqueue()
    assert "Capture" in calls.status(name, *arguments.get(name, ()))
    assert calls.status("cudaStreamEndCapture", calls.stream) == "cudaErrorStreamCaptureInvalidated"


def test_a_first_run_is_not_captured_and_a_graph_ends_with_its_contexts_shapes(calls: Calls) -> None:
    mode = calls.cuda.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
    calls.cuda.cudaStreamBeginCapture(calls.stream, mode)
    assert not calls.enqueue()
    assert calls.status("cudaStreamEndCapture", calls.stream) == "cudaErrorStreamCaptureInvalidated"
    assert calls.enqueue()
    calls.cuda.cudaStreamSynchronize(calls.stream)
    calls.cuda.cudaStreamBeginCapture(calls.stream, mode)
    assert calls.enqueue()
    (_, graph) = calls.cuda.cudaStreamEndCapture(calls.stream)
    (_, executable) = calls.cuda.cudaGraphInstantiate(graph, 0)
    assert calls.status("cudaGraphLaunch", executable, calls.stream) == "cudaSuccess"
    calls.cuda.cudaStreamSynchronize(calls.stream)
    assert calls.context.set_input_shape("x", (1, 3, 2, 2))
    calls.cuda.cudaGraphLaunch(executable, calls.stream)
    with pytest.raises(AssertionError, match="context of a captured graph"):
        calls.cuda.cudaStreamSynchronize(calls.stream)


def test_an_event_has_no_time_before_it_was_reached(calls: Calls) -> None:
    (_, one), (_, two) = (calls.cuda.cudaEventCreate() for _ in range(2))
    calls.cuda.cudaEventRecord(one, calls.stream)
    assert calls.enqueue()
    calls.cuda.cudaEventRecord(two, calls.stream)
    assert calls.status("cudaEventElapsedTime", one, two) == "cudaErrorNotReady"
    assert calls.enqueue()
    calls.cuda.cudaEventSynchronize(two)
    assert len(calls.machine.device.stream(calls.stream).waiting) == 1  # what lies behind it is not waited for
    assert calls.cuda.cudaEventElapsedTime(one, two)[1] == 0.25
