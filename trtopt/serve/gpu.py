"""Engines served on their GPU: execution contexts, each with its stream, memory and CUDA graphs.

Written to the documented API of TensorRT 10.3 and later, TensorRT for RTX 1.7 and cuda-python 12.6.1 and later; it has
not been run on a GPU yet. `tests/gpu/test_serve_runs.py` is its first run.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from trtopt.engine.backend import TENSORRT_RTX, RuntimeOptions
from trtopt.engine.cuda import Buffer, Cuda
from trtopt.engine.loaded import LoadedEngine, guarded, output_allocator
from trtopt.engine.manifest import VerifiedEngine
from trtopt.engine.profiles import choose
from trtopt.engine.run import why_not_run
from trtopt.errors import EngineBuildError, TargetError, UsageError
from trtopt.hardware.probe import probe
from trtopt.serve.tensors import CallInput, GpuTensor, TensorSpec, empty_like, on_device_of, package_of, spec_of
from trtopt.support._lazy import require

_G = TypeVar("_G")

WARM_UPS = 2
"""Runs of a shape before its capture: the first one allocates, and both must reach the context outside of a capture."""

_OTHERS = 8
"""Shapes that are remembered without a graph, for each that has one: those that warm up, and those that failed."""


@dataclass
class GraphCounts:
    """What came of the graphs of one execution context."""

    captured: int = 0
    replayed: int = 0
    failed: int = 0
    evicted: int = 0


class GraphCache(Generic[_G]):
    """The graphs of one execution context, by the shapes they were captured for."""

    def __init__(self, limit: int, free: Callable[[_G], None]) -> None:
        self.counts = GraphCounts()
        self._limit = limit
        self._free = free
        self._graphs: OrderedDict[Hashable, _G] = OrderedDict()
        self._runs: OrderedDict[Hashable, int] = OrderedDict()
        """Runs without a graph; below zero after a failure."""

    def get(self, key: Hashable) -> _G | None:
        """The graph to launch for a shape, if it has one."""
        graph = self._graphs.get(key)
        if graph is not None:
            self._graphs.move_to_end(key)
            self.counts.replayed += 1
        return graph

    def wants(self, key: Hashable) -> bool:
        """Whether a shape that has no graph should be captured now; counts a run where it should not."""
        if not self._limit:
            return False
        runs = self._runs.pop(key, 0)
        if runs == WARM_UPS:
            return True
        self._remember(key, runs + 1 if runs >= 0 else runs)
        return False

    def add(self, key: Hashable, graph: _G) -> None:
        """Keep a graph that was captured; the one not used for longest goes when there are too many."""
        self._graphs[key] = graph
        self.counts.captured += 1
        while len(self._graphs) > self._limit:
            self._free(self._graphs.popitem(last=False)[1])
            self.counts.evicted += 1

    def fail(self, key: Hashable) -> None:
        """Remember that a shape cannot be captured: it is not tried again."""
        self.counts.failed += 1
        self._remember(key, -1)

    def clear(self) -> None:
        """Drop all graphs: the memory that they use has moved. Shapes that failed stay."""
        while self._graphs:
            key, graph = self._graphs.popitem(last=False)
            self._free(graph)
            self._remember(key, 0)

    def _remember(self, key: Hashable, runs: int) -> None:
        self._runs[key] = runs
        while len(self._runs) > _OTHERS * self._limit:
            self._runs.popitem(last=False)


_LOG = logging.getLogger("trtopt.serve")

_ALIGNMENT_BYTES = 256
"""Of addresses that TensorRT takes (documentation of ``setTensorAddress``)."""

_LEGACY_STREAM = 1
"""``cudaStreamLegacy``."""


@dataclass(frozen=True)
class _Captured:
    """A CUDA graph, and the execution context whose state it holds: TensorRT's documentation wants one for each."""

    context: Any
    graph: Any


class Lane:
    """Runs one call at a time; several lanes of an engine run at once.

    Args:
        graphs: How many shapes have a CUDA graph. TensorRT for RTX captures by itself, and falls back unseen.
    """

    def __init__(self, loaded: LoadedEngine, stack: contextlib.ExitStack, graphs: int) -> None:
        self._loaded, self._cuda = loaded, Cuda()
        by_runtime = loaded.trt.__name__ == TENSORRT_RTX.module
        call, api = self._cuda.call, self._cuda.api
        self._stream = call("cudaStreamCreateWithFlags", api.cudaStreamNonBlocking)
        stack.callback(call, "cudaStreamDestroy", self._stream)
        self._event = call("cudaEventCreateWithFlags", api.cudaEventDisableTiming)
        stack.callback(call, "cudaEventDestroy", self._event)
        self._buffers = loaded.new_buffers(self._cuda)
        self._scratch = Buffer(self._cuda)
        for buffer in (*self._buffers.values(), self._scratch):
            stack.callback(buffer.free)
        own = [name for name in loaded.outputs if name not in loaded.aliased]
        self._allocators = {name: output_allocator(loaded.trt, self._buffers[name]) for name in own}
        # What is written where an input lies may not run twice, as the run before a capture would have it.
        limit = 0 if by_runtime or loaded.on_host or loaded.aliased else graphs
        self._graphs: GraphCache[_Captured] = GraphCache(limit, self._free)
        with loaded.heard():
            self._context = loaded.new_context(by_runtime and graphs > 0)
        stack.callback(self._drop)
        self._captures = limit > 0
        self._allocates = False
        self.counts = self._graphs.counts

    def _drop(self) -> None:
        """Let go of the contexts, before their engine, stream and memory go."""
        self._graphs.clear()
        self._context = None

    def run(self, profile: int, feeds: Mapping[str, CallInput]) -> dict[str, Any]:
        """Outputs by name: numpy arrays, or tensors on the GPU where the first input is one.

        Raises:
            UsageError: The engine refuses a shape, or a tensor on the GPU is not contiguous.
            EngineBuildError: The engine fails.
        """
        try:
            return self._loaded.guarded(lambda: self._run(profile, feeds))
        except BaseException:  # the caller's memory may be read until the stream is done
            with contextlib.suppress(EngineBuildError):
                self._cuda.call("cudaStreamSynchronize", self._stream)
            raise

    def _run(self, profile: int, feeds: Mapping[str, CallInput]) -> dict[str, Any]:
        if any(isinstance(given, GpuTensor) for given in feeds.values()):
            self._wait_for_legacy()  # for what the caller's package has done to them
        held = {name: self._ready(name, feeds[name]) for name in self._loaded.inputs}  # until the stream is done
        addresses = {name: self._place(name, given) for name, given in held.items()}
        self._set(self._context, profile, feeds, addresses)
        shapes = self._place_outputs()
        key = (profile, *(tuple(feeds[name].shape) for name in self._loaded.inputs))
        self._launch(key, profile, feeds, addresses, is_fixed=shapes is not None)
        first = next(iter(feeds.values()), None)
        source = first.tensor if isinstance(first, GpuTensor) else None
        found = {name: self._fetch(name, shapes, source) for name in self._loaded.outputs}
        self._cuda.call("cudaStreamSynchronize", self._stream)
        del held
        for name in self._loaded.on_host & found.keys():
            found[name] = self._fetch_from_host(name, found[name], source)
        return {name: self._as_model_has_it(name, value, source) for name, value in found.items()}

    def _wait_for_legacy(self) -> None:
        self._cuda.call("cudaEventRecord", self._event, _LEGACY_STREAM)
        self._cuda.call("cudaStreamWaitEvent", self._stream, self._event, 0)

    def _ready(self, name: str, given: CallInput) -> CallInput:
        """An input in the order that the engine's memory has."""
        last = name in self._loaded.channels_last
        if not isinstance(given, GpuTensor):
            return np.ascontiguousarray(np.moveaxis(given, 1, -1) if last else given)
        if name in self._loaded.on_host:
            raise _not_on_gpu(name)
        moved = given.channels_last() if last else given
        if not moved.is_contiguous:
            order = "with channels last (torch: memory_format=torch.channels_last)" if last else "(torch: contiguous())"
            raise UsageError(
                f"The input {name!r} lies on the GPU and has gaps, or another order than the engine reads",
                where=name,
                remedy=f"make it contiguous {order}",
            )
        return moved

    def _place(self, name: str, given: CallInput) -> int:
        """The address of an input. What may be in a graph has one that stays, and is copied there."""
        if isinstance(given, GpuTensor):
            is_written = name in self._loaded.aliased.values()  # by the engine: the caller keeps what it gave
            if not self._captures and not is_written and given.pointer % _ALIGNMENT_BYTES == 0:
                return given.pointer
            return self._copied(name, given.pointer, given.nbytes, "cudaMemcpyDeviceToDevice")
        if name in self._loaded.on_host:
            return int(given.ctypes.data)
        return self._copied(name, given.ctypes.data, given.nbytes, "cudaMemcpyHostToDevice")

    def _copied(self, name: str, pointer: int, size: int, kind: str) -> int:
        target = self._reserve(name, size)
        self._copy(target, pointer, size, kind)
        return target

    def _copy(self, target: int, source: int, size: int, kind: str) -> None:
        self._cuda.call(
            "cudaMemcpyAsync", target, source, size, getattr(self._cuda.api.cudaMemcpyKind, kind), self._stream
        )

    def _reserve(self, name: str, size: int) -> int:
        """Memory for an input or output; when it moves, the graphs that hold its address go."""
        buffer = self._buffers[name]
        before = buffer.pointer
        pointer = buffer.reserve(max(size, 1))
        if pointer != before:
            self._graphs.clear()
        return pointer

    def _set(self, context: Any, profile: int, feeds: Mapping[str, CallInput], addresses: Mapping[str, int]) -> None:
        if context.active_optimization_profile != profile and not context.set_optimization_profile_async(
            profile, int(self._stream)
        ):
            raise self._loaded.failed(f"optimization profile {profile}")
        for name, address in addresses.items():
            if not context.set_input_shape(name, tuple(feeds[name].shape)):
                raise UsageError(
                    f"The engine refuses the shape {list(feeds[name].shape)} of {name!r}",
                    where=name,
                    remedy="build with wider --min-shapes and --max-shapes",
                )
            self._set_address(context, name, address)

    def _set_address(self, context: Any, name: str, address: int) -> None:
        if not context.set_tensor_address(name, address):
            raise self._loaded.failed(f"the address of {name!r}")

    def _place_outputs(self) -> dict[str, tuple[int, ...]] | None:
        """Give the outputs memory; their shapes as memory has them, or None where a size depends on the data."""
        shapes = {name: tuple(self._context.get_tensor_shape(name)) for name in self._loaded.outputs}
        fixed = all(-1 not in shape for shape in shapes.values())
        if self._allocates == fixed:
            # not at every call: TensorRT's Python interface keeps a reference for each
            self._allocates = not fixed
            self._graphs.clear()  # allocators have moved the memory
            for name, allocator in self._allocators.items():
                self._context.set_output_allocator(name, None if fixed else allocator)
        for name in self._allocators:
            # no callback into Python where the size is known, and an address that a graph may hold
            size = self._loaded.output_bytes(self._context, name, shapes[name]) if fixed else 1
            self._set_address(self._context, name, self._reserve(name, size))
        for name in self._loaded.aliased:
            self._set_address(self._context, name, self._buffers[name].pointer)
        return shapes if fixed else None

    def _launch(
        self, key: Any, profile: int, feeds: Mapping[str, CallInput], addresses: Mapping[str, int], *, is_fixed: bool
    ) -> None:
        captured = self._graphs.get(key) if is_fixed else None
        if captured is None and is_fixed and self._graphs.wants(key):
            try:
                captured = self._capture(profile, feeds, addresses)
                self._graphs.add(key, captured)
            except EngineBuildError as error:
                self._graphs.fail(key)
                _LOG.warning("no CUDA graph for %s, which runs without: %s", key, error.what)
        if captured is not None:
            self._cuda.call("cudaGraphLaunch", captured.graph, self._stream)
        else:
            self._enqueue(self._context, feeds)

    def _enqueue(self, context: Any, feeds: Mapping[str, CallInput]) -> None:
        if not context.execute_async_v3(int(self._stream)):
            where = ", ".join(f"{name}{list(given.shape)}" for name, given in feeds.items())
            raise self._loaded.failed(where, self._allocators.values())

    def _capture(self, profile: int, feeds: Mapping[str, CallInput], addresses: Mapping[str, int]) -> _Captured:
        """A graph of these shapes, in a context of its own that shares its scratch memory with the others."""
        trt, engine = self._loaded.trt, self._loaded.engine
        context = engine.create_execution_context(trt.ExecutionContextAllocationStrategy.USER_MANAGED)
        if context is None:
            raise self._loaded.failed("a context for a CUDA graph")
        size = int(engine.device_memory_size_v2)
        context.set_device_memory(self._scratch.reserve(max(size, 1)), size)
        self._set(context, profile, feeds, addresses)
        for name in self._loaded.outputs:
            self._set_address(context, name, self._buffers[name].pointer)
        self._enqueue(context, feeds)  # the first run of a context may not be captured
        call, api = self._cuda.call, self._cuda.api
        call("cudaStreamSynchronize", self._stream)
        call("cudaStreamBeginCapture", self._stream, api.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal)
        try:
            self._enqueue(context, feeds)
        except EngineBuildError:  # which says more than the error that ending this capture gives
            self._cuda.end_capture(self._stream)
            raise
        return _Captured(context, self._cuda.instantiated(call("cudaStreamEndCapture", self._stream)))

    def _free(self, captured: _Captured) -> None:
        self._cuda.call("cudaGraphExecDestroy", captured.graph)

    def _fetch(self, name: str, shapes: dict[str, tuple[int, ...]] | None, source: Any) -> Any:
        """An output, being copied: into an array, or a new tensor like ``source``."""
        if shapes is not None:
            shape = shapes[name]
        elif name in self._loaded.aliased:
            shape = tuple(self._context.get_tensor_shape(name))
        else:
            shape = self._allocators[name].shape
        if name in self._loaded.channels_last:
            shape = (shape[0], *shape[2:], shape[1])
        dtype, pointer = self._loaded.dtypes[name], self._buffers[name].pointer
        if name in self._loaded.on_host:
            return np.empty(shape, dtype)  # filled when the stream is done
        if source is None:
            array = np.empty(shape, dtype)
            self._copy(array.ctypes.data, pointer, array.nbytes, "cudaMemcpyDeviceToHost")
            return array
        target = empty_like(source, shape, dtype)
        self._wait_for_legacy()  # its memory may have been freed there, and still be in use
        self._copy(target.pointer, pointer, target.nbytes, "cudaMemcpyDeviceToDevice")
        return target.tensor

    def _fetch_from_host(self, name: str, array: np.ndarray, source: Any) -> Any:
        """An output that the engine wrote in the host's memory: into ``array``, or a new tensor like ``source``."""
        ctypes.memmove(array.ctypes.data, self._buffers[name].pointer, array.nbytes)
        return array if source is None else on_device_of(source, array)

    def _as_model_has_it(self, name: str, value: Any, source: Any) -> Any:
        if name not in self._loaded.channels_last:
            return value
        return np.moveaxis(value, -1, 1) if source is None else package_of(source).moveaxis(value, -1, 1)


def _not_on_gpu(name: str) -> UsageError:
    return UsageError(
        f"The input {name!r} lies on the GPU, and the engine reads its values on the host",
        where=name,
        remedy="give it as a numpy array",
    )


class GpuRunner:
    """An engine on its GPU, with as many execution contexts and streams as calls run at a time.

    Args:
        options: How the engine is loaded.
        graphs: How many shapes have a CUDA graph, in each context.

    Raises:
        TargetError: It cannot run here, or the runtime refuses the engine.
        EngineBuildError: The runtime fails.
    """

    takes_gpu = True

    def __init__(self, verified: VerifiedEngine, options: RuntimeOptions, contexts: int, graphs: int) -> None:
        backend = verified.backend
        reason = why_not_run(backend, verified.data)
        if reason:
            raise TargetError(f"The engine cannot run here: {reason}", where=backend.runtime, remedy=backend.install)
        trt = require(backend.module, "gpu", "run engines")
        self._cuda = Cuda()
        with self._cuda.first_gpu(), contextlib.ExitStack() as stack:
            loaded = guarded(lambda: LoadedEngine(trt, verified.data, options))
            stack.callback(loaded.release)
            self._lanes = guarded(lambda: [Lane(loaded, stack, graphs) for _ in range(contexts)])
            self._stack = stack.pop_all()
        self.runtime = f"{backend.name} {trt.__version__} on {probe().name}"
        manifest = verified.manifest
        if manifest is None:
            self.inputs = guarded(lambda: tuple(_spec(loaded, name) for name in loaded.inputs))
            self.outputs = guarded(lambda: tuple(_spec(loaded, name) for name in loaded.outputs))
        else:
            self.inputs = tuple(map(spec_of, manifest.inputs))
            self.outputs = tuple(map(spec_of, manifest.outputs))
        self._profiles, self._values = loaded.profiles, loaded.shape_values

    def run(self, context: int, feeds: Mapping[str, CallInput]) -> dict[str, Any]:
        """Outputs by name, on the GPU where the first input is."""
        profile = choose(self._profiles, {name: self._sizes(name, feeds[name]) for name in self._profiles})
        with self._cuda.first_gpu():
            return self._lanes[context].run(profile, feeds)

    def _sizes(self, name: str, given: CallInput) -> tuple[int, ...]:
        """What chooses a profile: the shape of an input, the values of one that is read as a shape."""
        if name not in self._values:
            return tuple(given.shape)
        if isinstance(given, GpuTensor):
            raise _not_on_gpu(name)
        return tuple(int(value) for value in given.reshape(-1))

    def close(self) -> None:
        with self._cuda.first_gpu():
            self._lanes = []
            self._stack.close()

    @property
    def graph_counts(self) -> dict[str, int]:
        every = [dataclasses.asdict(lane.counts) for lane in self._lanes]
        return {field.name: sum(counts[field.name] for counts in every) for field in dataclasses.fields(GraphCounts)}


def _spec(loaded: LoadedEngine, name: str) -> TensorSpec:
    """A tensor as the engine itself tells, without names of dimensions."""
    dims = tuple("?" if dim < 0 else int(dim) for dim in loaded.engine.get_tensor_shape(name))
    ranges = () if name in loaded.shape_values else tuple(loaded.profiles.get(name, ()))
    return TensorSpec(name, loaded.dtypes[name], dims, ranges)
