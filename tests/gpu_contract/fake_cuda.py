"""A stand-in for ``cuda.bindings.runtime``: bounds-checked memory, streams that do nothing until they are waited for,
and captures that refuse what CUDA refuses.

What is enqueued runs as late as CUDA allows: when its stream, an event behind it or the whole device is waited for.
Addresses are never given twice, so that a use after free is always found.
"""

from __future__ import annotations

import ctypes
import re
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from declared import checked, enums, read_table

_FIRST, _LAST = 1 << 40, 1 << 46
_LEGACY = 1
_LOWER = re.compile("(?<=[a-z])(?=[A-Z])")
Op = Callable[[], None]


class _Handle:
    """What CUDA gives for a stream, an event or a graph: an address, as ``int()`` says."""

    def __init__(self, value: int) -> None:
        self._value = value

    def __int__(self) -> int:
        return self._value


@dataclass
class Graph:
    """What was captured, and whether something spoiled the capture."""

    ops: list[Op] = field(default_factory=list)
    is_broken: bool = False


@dataclass
class Stream:
    """Work in order; ``graph`` is what a capture collects."""

    is_blocking: bool
    waiting: list[Op] = field(default_factory=list)
    graph: Graph | None = None

    def enqueue(self, op: Op) -> None:
        (self.waiting if self.graph is None else self.graph.ops).append(op)

    def drain(self) -> None:
        self.run_while(lambda: True)

    def run_while(self, is_needed: Callable[[], bool]) -> None:
        while self.waiting and is_needed():
            self.waiting.pop(0)()


@dataclass
class Event:
    """A point in a stream, where it was recorded last; ``time_ms`` once it was reached."""

    has_timing: bool
    stream: Stream | None = None
    time_ms: float | None = None
    waits: int = 0

    def reach(self) -> None:
        """Have the device do what lies before it, and no more."""
        if self.stream is not None:
            self.stream.run_while(lambda: self.waits > 0)


class Device:
    """One GPU and the process on it: what lives there, and how it is to fail.

    Attributes:
        clock_ms: Its time, which runs and copies move, one after the other.
        copy_ms: What a copy in a stream takes.
    """

    def __init__(self) -> None:
        self.memory: dict[int, np.ndarray] = {}
        self.pinned: dict[int, np.ndarray] = {}
        self.streams: dict[int, Stream] = {}
        self.events: dict[int, Event] = {}
        self.graphs: dict[int, Graph] = {}
        self.executables: dict[int, list[Op]] = {}
        self.clock_ms, self.copy_ms = 0.0, 0.0
        self.free_bytes = 1 << 30
        self.missing_driver = False
        self.faults: list[str] = []
        self._next = _FIRST

    def left(self) -> dict[str, int]:
        """How many of everything live; empty where nothing does."""
        kinds = ("memory", "pinned", "streams", "events", "graphs", "executables")
        return {kind: len(getattr(self, kind)) for kind in kinds if getattr(self, kind)}

    def new_handle(self) -> int:
        self._next += 1 << 12
        return self._next

    def stream(self, handle: Any) -> Stream:
        return self._of(self.streams, handle, "stream")

    def _of(self, table: dict[int, Any], handle: Any, what: str) -> Any:
        if int(handle) not in table:
            raise AssertionError(f"{int(handle):#x} is no {what}, or one that was destroyed")
        return table[int(handle)]

    @property
    def capturing(self) -> list[Stream]:
        return [stream for stream in self.streams.values() if stream.graph is not None]

    def view(self, pointer: int, size: int) -> np.ndarray:
        """Bytes of the device's memory; what is not in one block of it is an error."""
        for start, block in self.memory.items():
            if start <= pointer and pointer + size <= start + block.nbytes:
                return block[pointer - start : pointer - start + size]
        raise AssertionError(f"{size} bytes at {pointer:#x} are not in memory of the device")

    def bytes_at(self, pointer: int, size: int) -> np.ndarray:
        """Bytes of the device or of the host."""
        if _FIRST <= pointer < _LAST:
            return self.view(pointer, size)
        for start, block in self.pinned.items():
            if start <= pointer < start + block.nbytes:
                assert pointer + size <= start + block.nbytes, f"{size} bytes at {pointer:#x} pass the end of it"
        return np.ctypeslib.as_array((ctypes.c_ubyte * size).from_address(pointer))

    def spoils_captures(self) -> bool:
        """For a call that is not allowed while this thread captures: it is refused and the capture is lost."""
        for stream in self.capturing:
            assert stream.graph is not None
            stream.graph.is_broken = True
        return bool(self.capturing)


def cuda_module(device: Device, release: str = "cuda-13.0.3") -> types.ModuleType:
    """The module ``cuda.bindings.runtime`` of a release; every function gives a status first."""
    table = read_table(release)
    calls = _Calls(device, enums(release)["cudaError_t"], enums(release)["cudaMemcpyKind"])
    module = types.ModuleType("cuda.bindings.runtime")
    module.__dict__.update(enums(release), **table["constants"])
    for name, overloads in table["functions"].items():
        does = getattr(calls, _LOWER.sub("_", name[4:]).lower(), None)
        if does is not None:
            setattr(module, name, checked(name, overloads, calls.started(does)))
    return module


class _Calls:
    """What the functions do; each is named as CUDA's, in lower case, without ``cuda``."""

    def __init__(self, device: Device, errors: Any, kinds: Any) -> None:
        self.device, self.errors, self.kinds = device, errors, kinds
        self.ok = errors.cudaSuccess

    def started(self, does: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            if self.device.missing_driver:
                raise RuntimeError("Failed to dlopen libcuda.so.1")
            found = does(*arguments)
            return found if isinstance(found, tuple) else (self.ok,) if found is None else (self.ok, found)

        return call

    def _refused_in_capture(self) -> tuple[Any, ...] | None:
        return (self.errors.cudaErrorStreamCaptureUnsupported, None) if self.device.spoils_captures() else None

    def malloc(self, size: int) -> Any:
        device = self.device
        if refused := self._refused_in_capture():
            return refused
        if sum(block.nbytes for block in device.memory.values()) + size > device.free_bytes:
            return self.errors.cudaErrorMemoryAllocation, None
        address, device._next = device._next, device._next + (size // 256 + 2) * 256
        address = -(-address // 256) * 256
        device._next = address + (size // 256 + 2) * 256
        device.memory[address] = np.full(size, 0xA5, np.uint8)
        return address

    def free(self, pointer: int) -> Any:
        if refused := self._refused_in_capture():
            return refused[:1]
        del self.device.memory[pointer]
        return None

    def malloc_host(self, size: int) -> Any:
        block = np.full(size, 0xA5, np.uint8)
        self.device.pinned[block.ctypes.data] = block
        return block.ctypes.data

    def free_host(self, pointer: int) -> None:
        del self.device.pinned[pointer]

    def memcpy(self, target: int, source: int, size: int, kind: Any) -> Any:
        if self.device.capturing:
            self.device.spoils_captures()
            return (self.errors.cudaErrorStreamCaptureImplicit,)
        self._legacy()
        self._copy(target, source, size, kind)
        return None

    def memcpy_async(self, target: int, source: int, size: int, kind: Any, stream: Any) -> None:
        def copy() -> None:
            self._copy(target, source, size, kind)
            self.device.clock_ms += self.device.copy_ms

        self.device.stream(stream).enqueue(copy)

    def _copy(self, target: int, source: int, size: int, kind: Any) -> None:
        assert isinstance(kind, self.kinds), kind
        device, name = self.device, kind.name
        to = device.view if name.endswith("ToDevice") else device.bytes_at
        of = device.view if name.startswith("cudaMemcpyDevice") else device.bytes_at
        to(target, size)[:] = of(source, size)

    def _legacy(self) -> None:
        """What every call on the legacy stream waits for."""
        for stream in self.device.streams.values():
            if stream.is_blocking:
                stream.drain()

    def stream_create(self) -> Any:
        return self.stream_create_with_flags(0)

    def stream_create_with_flags(self, flags: int) -> Any:
        handle = self.device.new_handle()
        self.device.streams[handle] = Stream(is_blocking=not flags)
        return _Handle(handle)

    def stream_destroy(self, stream: Any) -> None:
        self.device.stream(stream).drain()
        del self.device.streams[int(stream)]

    def stream_synchronize(self, stream: Any) -> Any:
        found = self.device.stream(stream)
        if found.graph is not None:
            found.graph.is_broken = True
            return (self.errors.cudaErrorStreamCaptureUnsupported,)
        found.drain()
        return None

    def device_synchronize(self) -> Any:
        if refused := self._refused_in_capture():
            return refused[:1]
        for stream in self.device.streams.values():
            stream.drain()
        return None

    def stream_wait_event(self, stream: Any, event: Any, flags: int) -> None:
        found = self.device._of(self.device.events, event, "event")
        assert flags == 0 and (found.stream is not None or found.time_ms is not None), "the event was never recorded"
        if found.stream is not None:
            self.device.stream(stream).enqueue(found.reach)

    def stream_begin_capture(self, stream: Any, mode: Any) -> None:
        found = self.device.stream(stream)
        assert found.graph is None and not found.waiting, "a capture begins in an idle stream"
        found.graph = Graph()

    def stream_end_capture(self, stream: Any) -> Any:
        found = self.device.stream(stream)
        graph, found.graph = found.graph, None
        assert graph is not None, "nothing is captured"
        if graph.is_broken:
            return self.errors.cudaErrorStreamCaptureInvalidated, None
        handle = self.device.new_handle()
        self.device.graphs[handle] = graph
        return _Handle(handle)

    def graph_instantiate(self, graph: Any, flags: int) -> Any:
        handle = self.device.new_handle()
        self.device.executables[handle] = list(self.device._of(self.device.graphs, graph, "graph").ops)
        return _Handle(handle)

    def graph_destroy(self, graph: Any) -> None:
        self.device._of(self.device.graphs, graph, "graph")
        del self.device.graphs[int(graph)]

    def graph_exec_destroy(self, graph: Any) -> None:
        self.device._of(self.device.executables, graph, "executable graph")
        del self.device.executables[int(graph)]

    def graph_launch(self, graph: Any, stream: Any) -> None:
        for op in self.device._of(self.device.executables, graph, "executable graph"):
            self.device.stream(stream).enqueue(op)

    def event_create(self) -> Any:
        return self.event_create_with_flags(0)

    def event_create_with_flags(self, flags: int) -> Any:
        handle = self.device.new_handle()
        self.device.events[handle] = Event(has_timing=not flags & 2)
        return _Handle(handle)

    def event_destroy(self, event: Any) -> None:
        self.device._of(self.device.events, event, "event")
        del self.device.events[int(event)]

    def event_record(self, event: Any, stream: Any) -> None:
        found = self.device._of(self.device.events, event, "event")
        if int(stream) == _LEGACY:
            self._legacy()
            found.stream, found.time_ms = None, self.device.clock_ms
            return
        found.stream, found.time_ms, found.waits = self.device.stream(stream), None, found.waits + 1

        def reached() -> None:
            found.waits -= 1
            if not found.waits:
                found.time_ms = self.device.clock_ms

        found.stream.enqueue(reached)

    def event_synchronize(self, event: Any) -> None:
        self.device._of(self.device.events, event, "event").reach()

    def event_elapsed_time(self, start: Any, end: Any) -> Any:
        one, two = (self.device._of(self.device.events, event, "event") for event in (start, end))
        if not (one.has_timing and two.has_timing):
            return self.errors.cudaErrorInvalidResourceHandle, None
        if one.time_ms is None or two.time_ms is None:
            return self.errors.cudaErrorNotReady, None
        return two.time_ms - one.time_ms

    def get_device(self) -> int:
        return 0

    def set_device(self, device: int) -> None:
        assert device == 0

    def get_last_error(self) -> None:
        return None

    def device_get_pcibus_id(self, length: int, device: int) -> bytes:
        return b"00000000:01:00.0"[:length]
