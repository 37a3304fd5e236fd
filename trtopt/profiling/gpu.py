"""An engine timed on the GPU that it was built for: end to end, on the host, and layer by layer.

:class:`TimedEngine` makes the native calls and decides nothing. It is written to the documented API of TensorRT 10.3
and later, TensorRT for RTX 1.7 and cuda-python 12.6.1 and later, and has not been run yet:
`tests/gpu/test_profile_runs.py` is its first run.
"""

from __future__ import annotations

import functools
import json
import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from decimal import Decimal
from typing import Any

import numpy as np

from trtopt.accuracy.compare import Accumulator, Runner, checked_arrays
from trtopt.config import ShapeMap
from trtopt.engine.backend import AS_BUILT, TENSORRT_RTX, Backend, RuntimeOptions
from trtopt.engine.manifest import VerifiedEngine, check_runs_here, runtime_options
from trtopt.engine.request import check_shape
from trtopt.engine.run import EngineSession
from trtopt.errors import EngineBuildError, TargetError
from trtopt.graph.artifact import InputSpec
from trtopt.hardware.clocks import Clocks, read_clocks
from trtopt.precision.observe.samples import random_feeds
from trtopt.profiling.engine_layers import LayerTime, join_times
from trtopt.profiling.measured import Measurement, RunLimits, RunTimes, spread, timed, until_stable
from trtopt.report.schema.build import OutputAccuracy
from trtopt.report.schema.profile import ProfileSource
from trtopt.support.ort_session import Feeds

_BUS_ID_BYTES = 32


class TimedEngine(EngineSession):
    """An engine whose runs are timed. After :meth:`prepare` the other methods run it on the same inputs.

    Args:
        engine: The engine file's content.
        backend: What built it.
        options: How it is loaded.
        graph: Whether :attr:`launch` launches a CUDA graph. TensorRT for RTX captures it itself and falls back unseen.

    Attributes:
        launch: Enqueues one inference and returns at once; set by :meth:`prepare`.

    Raises:
        TargetError: It cannot run here, or the runtime refuses the engine.
        EngineBuildError: The runtime fails.
    """

    launch: Callable[[], object]

    def __init__(
        self, engine: bytes, backend: Backend, options: RuntimeOptions = AS_BUILT, *, graph: bool = False
    ) -> None:
        by_runtime = graph and backend == TENSORRT_RTX
        super().__init__(engine, backend, options, rtx_graphs=by_runtime)
        self._captures = graph and not by_runtime

    def inputs(self) -> tuple[InputSpec, ...]:
        """The engine's inputs."""
        return self._runner.guarded(self._runner.input_specs)

    def optimum(self, name: str) -> tuple[int, ...]:
        """The shape of a dynamic input that the engine's first optimization profile is tuned for."""
        return self._runner.guarded(lambda: self._runner.optimum(name))

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

        self._runner.guarded(run)

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
            cuda.end_capture(stream)
            raise
        executable = cuda.instantiated(cuda.call("cudaStreamEndCapture", stream))
        self._stack.callback(cuda.call, "cudaGraphExecDestroy", executable)
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

        return self._runner.guarded(run)

    def profiled(self) -> Callable[[], list[tuple[str, float]]]:
        """Attach the profiler; every run from now on is slower.

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


_SAMPLE_US = 1000.0
_MOST_INFERENCES = 50
_LIMITS = RunLimits()


@dataclass(frozen=True)
class InferenceTiming:
    """One inference without profiling: its time on the device, and on the host to enqueue it with the GPU idle.

    Each sample of ``device`` is the mean of so many ``inferences``.
    """

    device: RunTimes
    host: RunTimes
    inferences: int


def time_engine(
    engine: bytes, backend: Backend, options: RuntimeOptions = AS_BUILT, limits: RunLimits = _LIMITS
) -> InferenceTiming:
    """Time an engine end to end, as :func:`measure_engine` does: with a CUDA graph where one can be captured.

    Args:
        engine: The engine file's content, of this machine's GPU and versions.
        backend: What built it.
        options: How it is loaded.
        limits: When a median stands still.

    Raises:
        TargetError: It cannot run here.
        EngineBuildError: It fails to run.
    """
    with TimedEngine(engine, backend, options) as session:
        feeds = feeds_of(session.inputs(), {}, session.optimum)
        session.prepare(feeds)
        stream = timing_of(session, limits)
    return graph_timing(lambda: TimedEngine(engine, backend, options, graph=True), feeds, limits)[0] or stream


def feeds_of(inputs: Sequence[InputSpec], shapes: ShapeMap, optimum: Callable[[str], tuple[int, ...]]) -> Feeds:
    """Random inputs for an engine, at the shapes that were asked for; ``optimum`` gives those that were not.

    Raises:
        UsageError: A shape is of no input, or does not fit.
    """
    known = {item.name: item for item in inputs}
    for name, shape in shapes.items():
        check_shape(known, name, shape, "--shapes")
    fixed = dict(shapes)
    for item in inputs:
        if item.name not in fixed:
            static = tuple(dim for dim in item.shape if isinstance(dim, int))
            fixed[item.name] = static if item.is_static else optimum(item.name)
    return random_feeds(inputs, fixed)


def inferences_per_sample(us: float) -> int:
    """How many inferences of ``us`` microseconds to time at once: events resolve half a microsecond."""
    return max(1, min(_MOST_INFERENCES, math.ceil(_SAMPLE_US / us))) if us > 0 else _MOST_INFERENCES


def timing_of(session: TimedEngine, limits: RunLimits) -> InferenceTiming:
    """The timing of one inference of a prepared engine."""
    count = inferences_per_sample(session.device_us(1))
    device = until_stable(lambda: session.device_us(count), limits)
    launch = timed(lambda: session.launch())

    def enqueue_alone() -> float:
        session.synchronize()
        return launch()

    host = until_stable(enqueue_alone, limits)
    session.synchronize()
    return InferenceTiming(device, host, count)


def graph_timing(
    opened: Callable[[], TimedEngine], feeds: Feeds, limits: RunLimits
) -> tuple[InferenceTiming | None, str]:
    """The timing with a CUDA graph; None, and why, where none can be captured.

    In a session of its own: TensorRT for RTX takes the choice when a context is created, and a capture that failed
    may leave a context behind that fails.
    """
    try:
        with opened() as session:
            session.prepare(feeds)
            return timing_of(session, limits), ""
    except (EngineBuildError, TargetError) as error:  # the engine itself has run before
        return None, f"{error.what} ({error.where})"


_STREAM, _GRAPH = "stream", "cuda_graph"
_CHANGING = ("sm_clock_mhz", "temperature_c", "power_w", "clocks_held_by")

Run = Sequence[tuple[str, float]]
"""Names and microseconds of the layers of one inference, in the order they were reported."""


def measure_engine(
    verified: VerifiedEngine,
    shapes: ShapeMap,
    options: RuntimeOptions | None = None,
    *,
    reference: Runner | None = None,
    limits: RunLimits = _LIMITS,
) -> Measurement:
    """Run an engine on this machine's GPU and time it, on random inputs.

    End to end is timed without and with a CUDA graph, each until its median stands still; the layers are timed in runs
    of their own, by the runtime's profiler, which slows the whole down. Clocks are read before, under load and after.

    Args:
        verified: The engine, of either backend.
        shapes: Shapes of dynamic inputs; others are at the optimum of the engine's first optimization profile.
        options: How it is loaded; None for what its manifest allows.
        reference: The FP32 model, for ``accuracy`` on the same inputs; its outputs are matched by name.
        limits: When a median stands still.

    Returns:
        The measurement. ``end_to_end_us`` and ``host_us`` are those with a CUDA graph where one can be captured, and
        without elsewhere; ``source.conditions`` says which, and holds the others. TensorRT for RTX captures by itself
        and does not say whether it did.

    Raises:
        UsageError: A shape does not fit it, or an option does not.
        TargetError: It was built for another GPU or version than is here, or there is no GPU.
        MissingDependencyError: The backend's package or cuda-python is not installed.
        EngineBuildError: It fails to run.
    """
    version, backend = check_runs_here(verified), verified.backend
    options = runtime_options(verified) if options is None else options
    with TimedEngine(verified.data, backend, options) as session:
        feeds = feeds_of(session.inputs(), shapes, session.optimum)
        session.prepare(feeds)
        bus_id = session.pci_bus_id()
        before = read_clocks(bus_id)
        stream = timing_of(session, limits)
        load = read_clocks(bus_id, lambda: session.device_us(stream.inferences))
        runs, layers_stable = profiled_runs(session.profiled(), limits)
        entries = inspected(session.layer_information())
        outputs = dict(zip(session.output_names, session.run(feeds), strict=True))
        streamed = session.weight_streaming()
    graph, refusal = graph_timing(lambda: TimedEngine(verified.data, backend, options, graph=True), feeds, limits)
    clocks = {"": load, "_before": before, "_after": read_clocks(bus_id)}
    layers, notes = join_times(entries, layer_times(runs))
    end_to_end = graph or stream
    found = conditions(stream, graph, clocks)
    found |= {"cuda_graph_confirmed": graph is not None and backend != TENSORRT_RTX}
    found |= {} if streamed is None else {"weight_streaming": streamed}
    found |= {"input_shapes": {name: list(np.shape(array)) for name, array in feeds.items()}}
    return Measurement(
        ProfileSource(
            origin="tensorrt-rtx" if backend == TENSORRT_RTX else "tensorrt",
            files={"engine": str(verified.path)},
            version=version,
            runs=len(runs),
            launching="profile",
            conditions=found,
        ),
        layers,
        end_to_end.device.median_us,
        end_to_end.device.spread_us,
        end_to_end.host.median_us,
        None if reference is None else accuracy_of(reference, feeds, outputs),
        (*warnings_of(stream, graph, refusal, layers_stable=layers_stable, load=load), *notes),
    )


def accuracy_of(reference: Runner, feeds: Feeds, outputs: Mapping[str, np.ndarray]) -> dict[str, OutputAccuracy]:
    """The outputs of an engine that the reference has too, against the reference's on the same inputs.

    Raises:
        InvalidModelError: An output is no array of numbers.
    """
    found = {}
    for name, expected in zip(reference.output_names, reference.run(feeds), strict=True):
        if name in outputs:
            sums = Accumulator()
            sums.update(*checked_arrays(name, expected, outputs[name], may_differ=True))
            found[name] = sums.result()
    return found


def inspected(text: str) -> list[Any]:
    """The layers' entries in the engine inspector's JSON.

    Raises:
        EngineBuildError: It has no list of layers.
    """
    try:
        entries = json.loads(text)["Layers"]
    except (ValueError, KeyError, TypeError):
        entries = None
    if not isinstance(entries, list):
        raise EngineBuildError(
            "The engine inspector's answer is not understood: it has no list of layers",
            where=text[:200],
            remedy="report it with the output of `trtopt doctor`",
        )
    return entries


def profiled_runs(run: Callable[[], Run], limits: RunLimits) -> tuple[list[Run], bool]:
    """Repeat ``run`` until the sum over the layers stands still; the runs that count, and whether it did."""
    runs: list[Run] = []

    def once() -> float:
        runs.append(run())
        return math.fsum(us for _, us in runs[-1])

    found = until_stable(once, limits)
    return runs[-len(found.us) :], found.stable


def layer_times(runs: Sequence[Run]) -> list[LayerTime]:
    """The figures of each layer over the runs, in the order the layers first ran.

    A name that comes again within a run is another layer; a layer that a run leaves out took no time in it.
    """
    found: dict[tuple[str, int], list[float]] = {}
    for index, run in enumerate(runs):
        seen: Counter[str] = Counter()
        for name, us in run:
            found.setdefault((name, seen[name]), [0.0] * len(runs))[index] = us
            seen[name] += 1
    figures = ((name, math.fsum(us) / len(us), statistics.median(us), spread(us)) for (name, _), us in found.items())
    return [LayerTime(name, Decimal(mean), Decimal(median), Decimal(mad)) for name, mean, median, mad in figures]


def conditions(stream: InferenceTiming, graph: InferenceTiming | None, clocks: Mapping[str, Clocks]) -> dict[str, Any]:
    """What was recorded of a run, flat, for tables; ``graph`` is None where there is no timing with a CUDA graph.

    ``clocks`` are the readings, by what the names of their fields end in; the one under load by "".
    """
    found: dict[str, Any] = {"end_to_end": _STREAM if graph is None else _GRAPH}
    for name, timing in ((_STREAM, stream), (_GRAPH, graph)):
        if timing is not None:
            found |= {f"{name}_{key}": value for key, value in _figures(timing).items()}
    for ending, reading in clocks.items():
        for key, value in asdict(reading).items():
            if value not in (None, "") and (not ending or key in _CHANGING):
                found[f"{key}{ending}"] = ", ".join(value) or "none" if isinstance(value, tuple) else value
    return found


def _figures(timing: InferenceTiming) -> dict[str, float]:
    return {
        "device_us": timing.device.median_us,
        "device_spread_us": timing.device.spread_us,
        "host_us": timing.host.median_us,
        "host_spread_us": timing.host.spread_us,
        "samples": len(timing.device.us),
        "inferences_per_sample": timing.inferences,
    }


def warnings_of(
    stream: InferenceTiming, graph: InferenceTiming | None, refusal: str, *, layers_stable: bool, load: Clocks
) -> list[str]:
    """What the reader of a measurement should know; ``refusal`` is why there is no timing with a CUDA graph."""
    found = [
        f"the time of one inference ({name}) did not settle; its median is over {len(timing.device.us)} samples"
        for name, timing in ((_STREAM, stream), (_GRAPH, graph))
        if timing is not None and not timing.device.stable
    ]
    if not layers_stable:
        found.append("the times of the layers did not settle")
    if refusal:
        found.append(f"no CUDA graph could be captured, so the end-to-end time is without one: {refusal}")
    if load.clocks_unknown:
        found.append(f"the clocks are not known: {load.clocks_unknown}")
    return found
