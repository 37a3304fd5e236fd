"""Run an engine where its GPU is.

Written to the documented API of TensorRT 10.3 and later, TensorRT for RTX 1.7 and cuda-python 12.6.1 and later; it has
not been run on a GPU yet. `trtopt doctor --selftest` runs it and compares with ONNX Runtime.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np

from trtopt.engine.backend import AS_BUILT, TENSORRT_RTX, Backend, RuntimeOptions, read_header
from trtopt.engine.cuda import Buffer, Cuda
from trtopt.engine.loaded import LoadedEngine, guarded, output_allocator
from trtopt.engine.profiles import choose
from trtopt.errors import EngineBuildError, TargetError, UsageError
from trtopt.graph.artifact import InputSpec
from trtopt.hardware.probe import probe
from trtopt.support._lazy import is_available, require
from trtopt.support.ort_session import Feeds

if TYPE_CHECKING:
    from typing_extensions import Self


def why_not_run(backend: Backend, engine: bytes | None = None) -> str:
    """Why engines of ``backend`` (or this one) cannot run here; empty when they can."""
    found = probe()
    if found.gpu is None:
        return found.reason
    if not is_available(backend.module):
        return f"the Python package {backend.module} is not installed"
    if not is_available("cuda.bindings"):  # cuda-pathfinder alone brings a folder "cuda"
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

    Attributes:
        output_names: The engine's outputs.
        profiles: By optimization profile, the shapes of dynamic inputs and the values of shape tensors.

    Args:
        engine: The engine file's content.
        backend: What built it.
        options: How it is loaded.
        rtx_graphs: Whether TensorRT for RTX captures and launches CUDA graphs by itself; it falls back unseen.

    Raises:
        TargetError: It cannot run here, or the runtime refuses the engine.
        EngineBuildError: The runtime fails.
    """

    def __init__(
        self, engine: bytes, backend: Backend, options: RuntimeOptions = AS_BUILT, *, rtx_graphs: bool = False
    ) -> None:
        reason = why_not_run(backend, engine)
        if reason:
            raise TargetError(f"The engine cannot run here: {reason}", where=backend.runtime, remedy=backend.install)
        trt = require(backend.module, "gpu", "run engines")
        with contextlib.ExitStack() as stack:
            self._runner = guarded(lambda: _Runner(trt, engine, options, stack, rtx_graphs))
            self._stack = stack.pop_all()
        self.output_names: tuple[str, ...] = self._runner.output_names
        self.profiles = self._runner.profiles

    def run(self, feeds: Feeds) -> list[np.ndarray]:
        """Outputs in the order of ``output_names``.

        Args:
            feeds: Arrays by input name, converted to the engine's dtypes.

        Raises:
            UsageError: A feed is missing an input, or its shape is outside of the engine's profiles.
            EngineBuildError: The engine fails to run.
        """
        return self._runner.guarded(lambda: self._runner.run(feeds))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()


class _Runner(LoadedEngine):
    """An engine with its context and buffers, freed when ``stack`` closes."""

    def __init__(
        self, trt: Any, data: bytes, options: RuntimeOptions, stack: contextlib.ExitStack, rtx_graphs: bool
    ) -> None:
        super().__init__(trt, data, options)
        self.cuda = Cuda()
        stack.callback(self.release)
        self._open(stack, rtx_graphs)

    def another(self, stack: contextlib.ExitStack, rtx_graphs: bool) -> _Runner:
        """A context of the same engine, with a stream and memory of its own, that runs beside this one."""
        found = copy.copy(self)
        stack.callback(found.let_go)
        found._open(stack, rtx_graphs)
        return found

    def _open(self, stack: contextlib.ExitStack, rtx_graphs: bool) -> None:
        self.stream = self.cuda.call("cudaStreamCreate")
        stack.callback(self.cuda.call, "cudaStreamDestroy", self.stream)
        self.output_names = tuple(self.outputs)
        self._buffers = self.new_buffers(self.cuda)
        for buffer in self._buffers.values():
            stack.callback(buffer.free)
        own = [name for name in self.outputs if name not in self.aliased]
        self._allocators = {name: output_allocator(self.trt, self._buffers[name]) for name in own}
        self._held: list[np.ndarray] = []
        self._pinned: dict[str, Buffer] = {}
        with self.heard():
            self.context = self.new_context(rtx_graphs)
        stack.callback(self._drop_context)

    def _drop_context(self) -> None:
        """Before its engine, stream and memory go; what was enqueued before a failure still reads and writes them."""
        with contextlib.suppress(EngineBuildError):
            self.synchronize()
        self.context = None

    def input_specs(self) -> tuple[InputSpec, ...]:
        specs = []
        for name in self.inputs:
            dims = (int(dim) for dim in self.engine.get_tensor_shape(name))
            specs.append(InputSpec(name, self.dtypes[name], tuple("?" if dim < 0 else dim for dim in dims)))
        return tuple(specs)

    def run(self, feed: Feeds) -> list[np.ndarray]:
        self.set(feed)
        self.enqueue()
        self.synchronize()
        return [self._fetch(name) for name in self.outputs]

    def set(self, feed: Feeds) -> None:
        """Choose the profile, copy the inputs, and have the outputs' memory follow their sizes."""
        for name in self.inputs:
            if name not in feed:
                raise UsageError(f"The engine's input {name!r} is missing", where=", ".join(feed), remedy="add it")
        self._set_profile(feed)
        self._held = [self._set_input(name, feed) for name in self.inputs]  # must live until the stream is done
        for name, allocator in self._allocators.items():
            self.context.set_output_allocator(name, allocator)
            self._set_address(name, self._buffers[name].reserve(1))
        for name in self.aliased:
            self._set_address(name, self._buffers[name].pointer)

    def _set_profile(self, feed: Feeds) -> None:
        profile = choose(self.profiles, {name: self._sizes(name, feed[name]) for name in self.profiles})
        context = self.context
        if context.active_optimization_profile != profile and not context.set_optimization_profile_async(
            profile, int(self.stream)
        ):
            raise self.failed(f"optimization profile {profile}")

    def _sizes(self, name: str, array: np.ndarray) -> tuple[int, ...]:
        """What chooses a profile: the shape of an input, the values of one that is read as a shape."""
        return tuple(np.ravel(array).tolist()) if name in self.shape_values else np.shape(array)

    def fix_outputs(self) -> None:
        """After a run: keep the outputs' memory as it is, so that no callback into Python is timed.

        Outputs whose size depends on the data keep their allocator.
        """
        for name in self._allocators:
            if -1 not in tuple(self.context.get_tensor_shape(name)):
                self.context.set_output_allocator(name, None)
                self._set_address(name, self._buffers[name].pointer)

    def pin(self, stack: contextlib.ExitStack) -> None:
        """After :meth:`fix_outputs`: memory of the host that :meth:`transfer` copies at full speed."""
        for name in (*self.inputs, *self._allocators):
            if name not in self.on_host:
                self._pinned[name] = Buffer(self.cuda, on_host=True)
                stack.callback(self._pinned[name].free)
                self._pinned[name].reserve(self._buffers[name].size)
        for name, array in zip(self.inputs, self._held, strict=True):
            if name in self._pinned:
                ctypes.memmove(self._pinned[name].pointer, array.ctypes.data, array.nbytes)

    def transfer(self, *, to_host: bool) -> None:
        """Enqueue the copies of all inputs to the GPU, or of all outputs to the host's memory."""
        kinds = self.cuda.api.cudaMemcpyKind
        for name in self._allocators if to_host else self.inputs:
            if name in self._pinned:
                host, device = self._pinned[name], self._buffers[name].pointer
                if to_host:
                    ends, kind = (host.pointer, device), kinds.cudaMemcpyDeviceToHost
                else:
                    ends, kind = (device, host.pointer), kinds.cudaMemcpyHostToDevice
                self.cuda.call("cudaMemcpyAsync", *ends, host.size, kind, self.stream)

    def _set_address(self, name: str, address: int) -> None:
        if not self.context.set_tensor_address(name, address):
            raise self.failed(f"the address of {name!r}")

    def enqueue(self) -> None:
        if not self.context.execute_async_v3(int(self.stream)):
            where = ", ".join(f"{n}{a.shape}" for n, a in zip(self.inputs, self._held, strict=True))
            raise self.failed(where, self._allocators.values())

    def synchronize(self) -> None:
        self.cuda.call("cudaStreamSynchronize", self.stream)

    def _set_input(self, name: str, feed: Feeds) -> np.ndarray:
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
            self._set_address(name, array.ctypes.data)
            return array
        pointer = self._buffers[name].reserve(max(array.nbytes, 1))
        kind = self.cuda.api.cudaMemcpyKind.cudaMemcpyHostToDevice
        self.cuda.call("cudaMemcpyAsync", pointer, array.ctypes.data, array.nbytes, kind, self.stream)
        self._set_address(name, pointer)
        return array

    def _fetch(self, name: str) -> np.ndarray:
        aliased = name in self.aliased
        shape = tuple(self.context.get_tensor_shape(name)) if aliased else self._allocators[name].shape
        if name in self.channels_last:
            shape = (shape[0], *shape[2:], shape[1])
        array = np.empty(shape, self.dtypes[name])
        if name in self.on_host:
            ctypes.memmove(array.ctypes.data, self._buffers[name].pointer, array.nbytes)
            return array
        kind = self.cuda.api.cudaMemcpyKind.cudaMemcpyDeviceToHost
        self.cuda.call("cudaMemcpy", array.ctypes.data, self._buffers[name].pointer, array.nbytes, kind)
        return np.moveaxis(array, -1, 1) if name in self.channels_last else array
