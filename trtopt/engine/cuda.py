"""The calls of the CUDA runtime, and memory that grows.

Written to the documented API of cuda-python 12.6.1 and later; it was never run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, TypeVar

from trtopt.errors import EngineBuildError, TargetError
from trtopt.support._lazy import require

_T = TypeVar("_T")


def _loaded(call: Callable[[], _T]) -> _T:
    """``call()``; cuda-python raises RuntimeError where a library of the driver cannot be loaded, at any first call."""
    try:
        return call()
    except RuntimeError as error:
        raise TargetError(
            f"The NVIDIA driver cannot be used: {error}",
            where="cuda.bindings.runtime",
            remedy="check the driver with nvidia-smi; in a container, run it with --gpus all",
        ) from error


class Cuda:
    """The calls of the CUDA runtime that are needed, with errors raised."""

    def __init__(self) -> None:
        self.api: ModuleType = _loaded(lambda: require("cuda.bindings.runtime", "gpu", "run engines"))

    def call(self, name: str, *arguments: Any) -> Any:
        status, *values = _loaded(lambda: getattr(self.api, name)(*arguments))
        if status != self.api.cudaError_t.cudaSuccess:
            self.api.cudaGetLastError()  # else the runtime's next launch takes it for its own
            raise EngineBuildError(
                f"CUDA failed: {status.name}", where=name, remedy="check the driver with nvidia-smi; free GPU memory"
            )
        return values[0] if values else None

    def end_capture(self, stream: Any) -> None:
        """End a capture that failed: what was captured until then is a graph of its own, or none."""
        with contextlib.suppress(EngineBuildError):
            graph = self.call("cudaStreamEndCapture", stream)
            if graph is not None and int(graph):
                self.call("cudaGraphDestroy", graph)

    def instantiated(self, graph: Any) -> Any:
        """What launches a graph, which is not needed any more then."""
        try:
            return self.call("cudaGraphInstantiate", graph, 0)
        finally:
            self.call("cudaGraphDestroy", graph)

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
    """Memory that grows: of the device, or of the host, for what the runtime reads and writes there.

    Attributes:
        pointer: Where it lies; 0 without any.
        size: Its bytes.
    """

    def __init__(self, cuda: Cuda, *, on_host: bool = False) -> None:
        self._cuda = cuda
        self._allocate, self._release = ("cudaMallocHost", "cudaFreeHost") if on_host else ("cudaMalloc", "cudaFree")
        self.size = 0
        self.pointer = 0

    def reserve(self, size: int) -> int:
        if size > self.size:
            self.free()
            self.pointer = int(self._cuda.call(self._allocate, size))
            self.size = size
        return self.pointer

    def free(self) -> None:
        if self.size:
            self._cuda.call(self._release, self.pointer)
        self.size = self.pointer = 0
