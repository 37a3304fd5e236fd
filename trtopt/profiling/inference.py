"""Inferences of an engine, each timed by events of its own on the device, as trtexec times them.

The mean over a batch of inferences has no tail, and reads low where inferences overlap at their ends. Two are in flight
on each stream, so that the GPU has the next one when an inference ends.

Written to the documented API of TensorRT 10.3 and later, TensorRT for RTX 1.7 and cuda-python 12.6.1 and later; it has
not been run on a GPU yet: `tests/gpu/test_profile_runs.py` is its first run.
"""

from __future__ import annotations

import functools
import itertools
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trtopt.engine.backend import AS_BUILT, TENSORRT_RTX, Backend, RuntimeOptions
from trtopt.engine.run import EngineSession
from trtopt.errors import EngineBuildError, TargetError
from trtopt.graph.artifact import InputSpec
from trtopt.profiling.inputs import feeds_of
from trtopt.profiling.measured import until_stable
from trtopt.profiling.timing import COLUMNS, DEFAULT_TIMING, InferenceTiming, TimingOptions
from trtopt.support.ort_session import Feeds

_BUS_ID_BYTES = 32
_IN_FLIGHT = 2
"""Inferences of a stream, as in trtexec, which enqueues one while the one before runs."""


class TimedEngine(EngineSession):
    """An engine whose runs are timed. After :meth:`prepare` the other methods run it on the same inputs.

    Args:
        engine: The engine file's content.
        backend: What built it.
        options: How it is loaded.
        graph: Whether CUDA graphs are launched. TensorRT for RTX captures them itself and falls back unseen.
        streams: Contexts that run at once.

    Raises:
        TargetError: It cannot run here, or the runtime refuses the engine.
        EngineBuildError: The runtime fails.
    """

    def __init__(
        self,
        engine: bytes,
        backend: Backend,
        options: RuntimeOptions = AS_BUILT,
        *,
        graph: bool = False,
        streams: int = 1,
    ) -> None:
        by_runtime = graph and backend == TENSORRT_RTX
        super().__init__(engine, backend, options, rtx_graphs=by_runtime)
        self._captures = graph and not by_runtime
        self._launches: list[Callable[[], object]] = []
        with self._stack.pop_all() as stack:  # closed where a context is refused
            others = [self._runner.guarded(lambda: self._runner.another(stack, by_runtime)) for _ in range(1, streams)]
            self._stack = stack.pop_all()
        self._lanes = [self._runner, *others]

    def inputs(self) -> tuple[InputSpec, ...]:
        """The engine's inputs."""
        return self._runner.guarded(self._runner.input_specs)

    def optimum(self, name: str) -> tuple[int, ...]:
        """The shape of a dynamic input that the engine's first optimization profile is tuned for."""
        return self._runner.profiles[name][0].opt

    def values(self) -> dict[str, tuple[int, ...]]:
        """The values of shape tensors that the engine's first optimization profile is tuned for."""
        return {name: self.optimum(name) for name in self._runner.shape_values}

    def prepare(self, feeds: Feeds) -> None:
        """Copy the inputs, run once, so that everything is allocated, and capture the graphs where they are asked for.

        Raises:
            UsageError: A feed is missing an input, or its shape is outside of the engine's profiles.
            EngineBuildError: The engine fails to run, or cannot be captured.
        """

        def run() -> None:
            self._launches = []
            for lane in self._lanes:
                lane.set(feeds)
                lane.enqueue()
                lane.synchronize()
                lane.fix_outputs()
                lane.enqueue()  # what changed must reach the context outside of a capture
                lane.synchronize()
                self._launches.append(self._captured(lane) if self._captures else lane.enqueue)

        self._runner.guarded(run)

    def _captured(self, lane: Any) -> Callable[[], object]:
        cuda, stream = lane.cuda, lane.stream
        mode = cuda.api.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        cuda.call("cudaStreamBeginCapture", stream, mode)
        try:
            lane.enqueue()
        except EngineBuildError:  # which says more than the error that ending this capture gives
            cuda.end_capture(stream)
            raise
        executable = cuda.instantiated(cuda.call("cudaStreamEndCapture", stream))
        self._stack.callback(cuda.call, "cudaGraphExecDestroy", executable)
        return functools.partial(cuda.call, "cudaGraphLaunch", executable, stream)

    def time(self, options: TimingOptions) -> InferenceTiming:
        """Run prepared inferences, as many as the limits want, and time each.

        Raises:
            EngineBuildError: The engine fails to run.
        """

        def run() -> InferenceTiming:
            inferences = self._inferences(transfers=options.transfers)
            try:
                found = until_stable(inferences, options.limits)
            finally:
                self.synchronize()
            return InferenceTiming(found, inferences.trace()[-len(found.us) :], transfers=options.transfers)

        return self._runner.guarded(run)

    def _inferences(self, *, transfers: bool) -> _Inferences:
        event = self._event
        base = event()
        if transfers:
            for lane in self._lanes:
                lane.pin(self._stack)
        slots = []
        for _ in range(_IN_FLIGHT):
            for lane, launch in zip(self._lanes, self._launches, strict=True):
                inner = (event(), event())
                ends = (event(), event()) if transfers else inner
                slots.append(_Slot(lane, launch, (ends[0], *inner, ends[1])))
        return _Inferences(slots, base, transfers=transfers)

    def _event(self) -> Any:
        cuda = self._runner.cuda
        event = cuda.call("cudaEventCreate")
        self._stack.callback(cuda.call, "cudaEventDestroy", event)
        return event

    def synchronize(self) -> None:
        """Wait until the GPU is done."""
        for lane in self._lanes:
            lane.synchronize()

    def busy(self, count: int) -> None:
        """Run so many prepared inferences without a pause."""

        def run() -> None:
            for _ in range(count):
                self._launches[0]()
            self.synchronize()

        self._runner.guarded(run)

    def profiled(self) -> Callable[[], list[tuple[str, float]]]:
        """Attach the profiler to the first context; every run of it from now on is slower.

        Returns what runs once, and gives names and microseconds of the layers in the order they are reported.
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

        self._runner.guarded(attach)
        return lambda: self._runner.guarded(run)

    def layer_information(self) -> str:
        """The engine inspector's JSON, with the shapes of the inputs that are set."""

        def run() -> str:
            inspector = self._runner.engine.create_engine_inspector()
            inspector.execution_context = self._runner.context
            text: str = inspector.get_engine_information(self._runner.trt.LayerInformationFormat.JSON)
            return text

        return self._runner.guarded(run)

    def weight_streaming(self) -> dict[str, int] | None:
        """Bytes of weights that are streamed, and that stay; None where nothing is streamed."""
        return self._runner.guarded(self._runner.weight_streaming)

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


@dataclass
class _Slot:
    """One inference in flight: its events around the whole and around the engine, and when the host enqueued it."""

    lane: Any
    launch: Callable[[], object]
    events: tuple[Any, Any, Any, Any]
    enqueued: tuple[float, float] = (0.0, 0.0)


class _Inferences:
    """Called again and again, waits for the oldest inference, gives its microseconds and enqueues the next one."""

    def __init__(self, slots: Sequence[_Slot], base: Any, *, transfers: bool) -> None:
        self._cuda, self._base, self._transfers = slots[0].lane.cuda, base, transfers
        self._ms = array("d")
        self._cuda.call("cudaEventRecord", base, slots[0].lane.stream)
        self._cuda.call("cudaEventSynchronize", base)
        self._clock_at_base = time.perf_counter()
        for slot in slots:
            self._enqueue(slot)
        self._oldest = itertools.cycle(slots)

    def __call__(self) -> float:
        slot = next(self._oldest)
        took = self._collected(slot)
        self._enqueue(slot)
        return took

    def trace(self) -> np.ndarray:
        """A row for each inference that was waited for, with the columns :data:`COLUMNS`."""
        return np.array(self._ms).reshape(-1, len(COLUMNS))

    def _enqueue(self, slot: _Slot) -> None:
        lane, record = slot.lane, functools.partial(self._cuda.call, "cudaEventRecord")
        first, start, end, last = slot.events
        if self._transfers:
            record(first, lane.stream)
            lane.transfer(to_host=False)
        record(start, lane.stream)
        before = time.perf_counter()
        slot.launch()
        slot.enqueued = (before, time.perf_counter())
        record(end, lane.stream)
        if self._transfers:
            lane.transfer(to_host=True)
            record(last, lane.stream)

    def _collected(self, slot: _Slot) -> float:
        first, start, end, last = slot.events
        self._cuda.call("cudaEventSynchronize", last)
        at = self._elapsed_ms(self._base, first)
        h2d, d2h = (self._elapsed_ms(first, start), self._elapsed_ms(end, last)) if self._transfers else (0.0, 0.0)
        compute = self._elapsed_ms(start, end)
        computed = at + h2d + compute  # each time from its own events: a point in time has fewer digits
        host = [(seconds - self._clock_at_base) * 1e3 for seconds in slot.enqueued]
        self._ms.extend((*host, at, at + h2d, at + h2d, computed, computed, computed + d2h))
        return compute * 1e3

    def _elapsed_ms(self, start: Any, end: Any) -> float:
        return float(self._cuda.call("cudaEventElapsedTime", start, end))


def time_engine(engine: bytes, backend: Backend, options: RuntimeOptions = AS_BUILT) -> InferenceTiming:
    """Time an engine end to end on random inputs: with a CUDA graph where one can be captured, until its median stands
    still.

    Args:
        engine: The engine file's content, of this machine's GPU and versions.
        backend: What built it.
        options: How it is loaded.

    Raises:
        TargetError: It cannot run here.
        EngineBuildError: It fails to run.
    """
    with TimedEngine(engine, backend, options) as session:
        feeds = feeds_of(session.inputs(), {}, session.optimum, values=session.values())
        session.prepare(feeds)
        stream = session.time(DEFAULT_TIMING)
    return graph_timing(lambda: TimedEngine(engine, backend, options, graph=True), feeds, DEFAULT_TIMING)[0] or stream


def graph_timing(
    opened: Callable[[], TimedEngine], feeds: Feeds, options: TimingOptions
) -> tuple[InferenceTiming | None, str]:
    """The timing with a CUDA graph; None, and why, where none can be captured.

    In a session of its own: TensorRT for RTX takes the choice when a context is created, and a capture that failed
    may leave a context behind that fails.
    """
    try:
        with opened() as session:
            session.prepare(feeds)
            return session.time(options), ""
    except (EngineBuildError, TargetError) as error:  # the engine itself has run before
        return None, f"{error.what} ({error.where})"
