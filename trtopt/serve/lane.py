"""One execution context of an engine, with the stream, the memory and the graphs that belong to it.

Written to the documented API of TensorRT 10.3 and later, TensorRT for RTX 1.7 and cuda-python 12.6.1 and later; it has
not been run on a GPU yet. `tests/gpu/test_serve_runs.py` is its first run. What can be decided without a GPU is in
`profiles` and `graphs`.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from trtopt.engine.backend import TENSORRT_RTX
from trtopt.engine.run import Buffer, Cuda, LoadedEngine, output_allocator
from trtopt.errors import EngineBuildError, UsageError
from trtopt.serve import dlpack
from trtopt.serve.dlpack import GpuTensor
from trtopt.serve.graphs import GraphCache
from trtopt.serve.tensors import Given

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
        loaded: The engine.
        stack: Frees the lane's memory when it closes.
        graphs: How many shapes have a CUDA graph. TensorRT for RTX captures by itself, and falls back unseen.
    """

    def __init__(self, loaded: LoadedEngine, stack: contextlib.ExitStack, graphs: int) -> None:
        self._loaded, self._cuda = loaded, Cuda()
        by_runtime = loaded.trt.__name__ == TENSORRT_RTX.module
        self._context = loaded.new_context(by_runtime and graphs > 0)
        call, api = self._cuda.call, self._cuda.api
        self._stream = call("cudaStreamCreateWithFlags", api.cudaStreamNonBlocking)
        stack.callback(call, "cudaStreamDestroy", self._stream)
        self._event = call("cudaEventCreateWithFlags", api.cudaEventDisableTiming)
        stack.callback(call, "cudaEventDestroy", self._event)
        self._buffers = {name: loaded.new_buffer(self._cuda, name) for name in (*loaded.inputs, *loaded.outputs)}
        self._scratch = Buffer(self._cuda)
        for buffer in (*self._buffers.values(), self._scratch):
            stack.callback(buffer.free)
        self._allocators = {name: output_allocator(loaded.trt, self._buffers[name]) for name in loaded.outputs}
        limit = 0 if by_runtime or loaded.on_host else graphs
        self._graphs: GraphCache[_Captured] = GraphCache(limit, self._free)
        stack.callback(self._graphs.clear)
        self._captures = limit > 0
        self._allocates = False
        self.counts = self._graphs.counts

    def run(self, profile: int, feeds: Mapping[str, Given]) -> dict[str, Any]:
        """Outputs by name: numpy arrays, or tensors on the GPU where the first input is one.

        Raises:
            UsageError: The engine refuses a shape, or a tensor on the GPU is not contiguous.
            EngineBuildError: The engine fails.
        """
        try:
            return self._run(profile, feeds)
        except BaseException:  # the caller's memory may be read until the stream is done
            with contextlib.suppress(EngineBuildError):
                self._cuda.call("cudaStreamSynchronize", self._stream)
            raise

    def _run(self, profile: int, feeds: Mapping[str, Given]) -> dict[str, Any]:
        self._order(feeds)
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

    def _order(self, feeds: Mapping[str, Given]) -> None:
        """Have the stream wait for what the caller's package has done to tensors on the GPU."""
        if any(isinstance(given, GpuTensor) for given in feeds.values()):
            self._wait_for_legacy()

    def _wait_for_legacy(self) -> None:
        self._cuda.call("cudaEventRecord", self._event, _LEGACY_STREAM)
        self._cuda.call("cudaStreamWaitEvent", self._stream, self._event, 0)

    def _ready(self, name: str, given: Given) -> Given:
        """An input in the order that the engine's memory has."""
        last = name in self._loaded.channels_last
        if not isinstance(given, GpuTensor):
            return np.ascontiguousarray(np.moveaxis(given, 1, -1) if last else given)
        if name in self._loaded.on_host:
            raise UsageError(
                f"The input {name!r} lies on the GPU, and the engine reads its values on the host",
                where=name,
                remedy="give it as a numpy array",
            )
        moved = given.channels_last() if last else given
        if not moved.is_contiguous:
            order = "with channels last (torch: memory_format=torch.channels_last)" if last else "(torch: contiguous())"
            raise UsageError(
                f"The input {name!r} lies on the GPU and has gaps, or another order than the engine reads",
                where=name,
                remedy=f"make it contiguous {order}",
            )
        return moved

    def _place(self, name: str, given: Given) -> int:
        """The address of an input. What may be in a graph has one that stays, and is copied there."""
        if isinstance(given, GpuTensor):
            if not self._captures and given.pointer % _ALIGNMENT_BYTES == 0:
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

    def _set(self, context: Any, profile: int, feeds: Mapping[str, Given], addresses: Mapping[str, int]) -> None:
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
            for name in shapes:
                self._context.set_output_allocator(name, None if fixed else self._allocators[name])
        for name, shape in shapes.items():
            # no callback into Python where the size is known, and an address that a graph may hold
            size = int(np.prod(shape)) * self._loaded.dtypes[name].itemsize if fixed else 1
            self._set_address(self._context, name, self._reserve(name, size))
        return shapes if fixed else None

    def _launch(
        self, key: Any, profile: int, feeds: Mapping[str, Given], addresses: Mapping[str, int], *, is_fixed: bool
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

    def _enqueue(self, context: Any, feeds: Mapping[str, Given]) -> None:
        if not context.execute_async_v3(int(self._stream)):
            raise self._loaded.failed(", ".join(f"{name}{list(given.shape)}" for name, given in feeds.items()))

    def _capture(self, profile: int, feeds: Mapping[str, Given], addresses: Mapping[str, int]) -> _Captured:
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
            with contextlib.suppress(EngineBuildError):
                call("cudaStreamEndCapture", self._stream)
            raise
        graph = call("cudaStreamEndCapture", self._stream)
        try:
            return _Captured(context, call("cudaGraphInstantiate", graph, 0))
        finally:
            call("cudaGraphDestroy", graph)

    def _free(self, captured: _Captured) -> None:
        self._cuda.call("cudaGraphExecDestroy", captured.graph)

    def _fetch(self, name: str, shapes: dict[str, tuple[int, ...]] | None, source: Any) -> Any:
        """An output, being copied: into an array, or a new tensor like ``source``."""
        shape = self._allocators[name].shape if shapes is None else shapes[name]
        if name in self._loaded.channels_last:
            shape = (shape[0], *shape[2:], shape[1])
        dtype, pointer = self._loaded.dtypes[name], self._buffers[name].pointer
        if name in self._loaded.on_host:
            return np.empty(shape, dtype)  # filled when the stream is done
        if source is None:
            array = np.empty(shape, dtype)
            self._copy(array.ctypes.data, pointer, array.nbytes, "cudaMemcpyDeviceToHost")
            return array
        target = dlpack.empty_like(source, shape, dtype)
        self._wait_for_legacy()  # its memory may have been freed there, and still be in use
        self._copy(target.pointer, pointer, target.nbytes, "cudaMemcpyDeviceToDevice")
        return target.tensor

    def _fetch_from_host(self, name: str, array: np.ndarray, source: Any) -> Any:
        """An output that the engine wrote in the host's memory: into ``array``, or a new tensor like ``source``."""
        ctypes.memmove(array.ctypes.data, self._buffers[name].pointer, array.nbytes)
        return array if source is None else dlpack.on_device_of(source, array)

    def _as_model_has_it(self, name: str, value: Any, source: Any) -> Any:
        if name not in self._loaded.channels_last:
            return value
        return np.moveaxis(value, -1, 1) if source is None else dlpack.package_of(source).moveaxis(value, -1, 1)
