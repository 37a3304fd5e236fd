"""The native calls that time an engine on its GPU.

Nothing is decided here, since none of it can be tried without a GPU: it is written to the documented API of TensorRT
10.3 and later, TensorRT for RTX 1.7 and cuda-python 12.6.1 and later, and has not been run yet.
`tests/gpu/test_profile_runs.py` is its first run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from trtopt.engine.backend import TENSORRT_RTX, Backend
from trtopt.engine.run import EngineSession, guarded
from trtopt.errors import EngineBuildError
from trtopt.graph.artifact import InputSpec
from trtopt.support.ort_session import Feeds

_BUS_ID_BYTES = 32


class TimedEngine(EngineSession):
    """An engine whose runs are timed. After :meth:`prepare` the other methods run it on the same inputs.

    Args:
        engine: The engine file's content.
        backend: What built it.
        graph: Whether :attr:`launch` launches a CUDA graph. TensorRT for RTX captures it itself and falls back unseen.

    Attributes:
        launch: Enqueues one inference and returns at once; set by :meth:`prepare`.

    Raises:
        TargetError: It cannot run here, or the runtime refuses the engine.
        EngineBuildError: The runtime fails.
    """

    launch: Callable[[], object]

    def __init__(self, engine: bytes, backend: Backend, *, graph: bool = False) -> None:
        by_runtime = graph and backend == TENSORRT_RTX
        super().__init__(engine, backend, rtx_graphs=by_runtime)
        self._captures = graph and not by_runtime

    def inputs(self) -> tuple[InputSpec, ...]:
        """The engine's inputs."""
        return guarded(self._runner.input_specs)

    def optimum(self, name: str) -> tuple[int, ...]:
        """The shape of a dynamic input that the engine's first optimization profile is tuned for."""
        return guarded(lambda: self._runner.optimum(name))

    def prepare(self, feeds: Feeds) -> None:
        """Copy the inputs, run once, so that everything is allocated, and capture the graph where one is asked for.

        Raises:
            UsageError: A feed is missing an input, or its shape is outside of the engine's profile.
            EngineBuildError: The engine fails to run, or cannot be captured.
        """

        def run() -> None:
            self._start, self._end = self._event(), self._event()
            self._runner.set(feeds)
            self._runner.enqueue()
            self._runner.synchronize()
            self._runner.fix_outputs()
            self._runner.enqueue()  # what changed must reach the context outside of a capture
            self._runner.synchronize()
            self.launch = self._captured() if self._captures else self._runner.enqueue

        guarded(run)

    def _event(self) -> Any:
        cuda = self._runner.cuda
        event = cuda.call("cudaEventCreate")
        self._stack.callback(cuda.call, "cudaEventDestroy", event)
        return event

    def _captured(self) -> Callable[[], object]:
        cuda, stream = self._runner.cuda, self._runner.stream
        mode = cuda.api.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        cuda.call("cudaStreamBeginCapture", stream, mode)
        try:
            self._runner.enqueue()
        except EngineBuildError:  # which says more than the error that ending this capture gives
            cuda.api.cudaStreamEndCapture(stream)
            cuda.api.cudaGetLastError()
            raise
        graph = cuda.call("cudaStreamEndCapture", stream)
        executable = cuda.call("cudaGraphInstantiate", graph, 0)
        self._stack.callback(cuda.call, "cudaGraphExecDestroy", executable)
        cuda.call("cudaGraphDestroy", graph)
        return functools.partial(cuda.call, "cudaGraphLaunch", executable, stream)

    def synchronize(self) -> None:
        """Wait until the GPU is done."""
        self._runner.synchronize()

    def device_us(self, count: int) -> float:
        """Microseconds of one of ``count`` inferences, enqueued at once, between two events on the device.

        One more goes before them: while it runs, the next ones are enqueued, so that the GPU does not wait for the host
        where the host is fast enough.
        """
        cuda, stream = self._runner.cuda, self._runner.stream

        def run() -> float:
            self.launch()
            cuda.call("cudaEventRecord", self._start, stream)
            for _ in range(count):
                self.launch()
            cuda.call("cudaEventRecord", self._end, stream)
            cuda.call("cudaEventSynchronize", self._end)
            return float(cuda.call("cudaEventElapsedTime", self._start, self._end)) * 1e3 / count

        return guarded(run)

    def profiled(self) -> Callable[[], list[tuple[str, float]]]:
        """Attach the profiler; every run from now on is slower.

        Returns:
            What runs once, and gives names and microseconds of the layers in the order they are reported.
        """
        context = self._runner.context
        profiler = _profiler(self._runner.trt)

        def attach() -> None:
            context.profiler = profiler
            context.enqueue_emits_profile = False

        def run() -> list[tuple[str, float]]:
            profiler.times = []
            self._runner.enqueue()
            self._runner.synchronize()
            if not context.report_to_profiler():
                raise EngineBuildError(
                    "The runtime reports no times of layers",
                    where="report_to_profiler",
                    remedy="measure with trtexec --exportProfile, and give the file with --layer-profile",
                )
            return list(profiler.times)

        guarded(attach)
        return lambda: guarded(run)

    def layer_information(self) -> str:
        """The engine inspector's JSON, with the shapes of the inputs that are set."""

        def run() -> str:
            inspector = self._runner.engine.create_engine_inspector()
            inspector.execution_context = self._runner.context
            text: str = inspector.get_engine_information(self._runner.trt.LayerInformationFormat.JSON)
            return text

        return guarded(run)

    def pci_bus_id(self) -> str:
        """The PCI address of the GPU, ``domain:bus:device.function``."""
        cuda = self._runner.cuda
        name: bytes = cuda.call("cudaDeviceGetPCIBusId", _BUS_ID_BYTES, cuda.call("cudaGetDevice"))
        return name.split(b"\0")[0].decode()


def _profiler(trt: Any) -> Any:
    class Profiler(trt.IProfiler):  # type: ignore[misc]
        """Keeps what it is told of one run."""

        def __init__(self) -> None:
            trt.IProfiler.__init__(self)
            self.times: list[tuple[str, float]] = []

        def report_layer_time(self, layer_name: str, ms: float) -> None:
            self.times.append((layer_name, ms * 1e3))

    return Profiler()
