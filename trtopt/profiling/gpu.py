"""An engine measured on the GPU that it was built for: end to end, on the host, and layer by layer.

:class:`~trtopt.profiling.inference.TimedEngine` makes the native calls and decides nothing.
"""

from __future__ import annotations

import functools
import json
import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from decimal import Decimal
from typing import Any

import numpy as np

from trtopt.accuracy.compare import Accumulator, Runner, checked_arrays
from trtopt.config import ShapeMap
from trtopt.engine.backend import TENSORRT_RTX, RuntimeOptions
from trtopt.engine.manifest import VerifiedEngine, check_runs_here, runtime_options
from trtopt.errors import EngineBuildError
from trtopt.graph.artifact import InputSpec
from trtopt.hardware.clocks import Clocks, read_clocks
from trtopt.profiling.engine_layers import LayerTime, join_times
from trtopt.profiling.inference import TimedEngine, graph_timing
from trtopt.profiling.inputs import feeds_of
from trtopt.profiling.measured import Measurement, RunLimits, spread, until_stable
from trtopt.profiling.timing import DEFAULT_TIMING, InferenceTiming, TimingOptions
from trtopt.report.schema.build import OutputAccuracy
from trtopt.report.schema.manifest import EngineTensor
from trtopt.report.schema.profile import ProfileSource
from trtopt.support.ort_session import Feeds

_STREAM, _GRAPH = "stream", "cuda_graph"
_LIMITS = RunLimits()
_BUSY_US, _MOST_AT_ONCE = 1000.0, 50
"""What the GPU is given at once to see its clocks under load, and in how many inferences at most."""
_HOST_BOUND = 0.8
"""Share of the device's time from which trtexec warns that the throughput may be bound by the enqueue."""
_CHANGING = ("sm_clock_mhz", "temperature_c", "power_w", "clocks_held_by")

Run = Sequence[tuple[str, float]]
"""Names and microseconds of the layers of one inference, in the order they were reported."""


@dataclass(frozen=True)
class EngineRun:
    """A measured engine, and what trtexec would have written of it.

    Attributes:
        measurement: What was measured.
        timing: The inferences behind ``measurement.end_to_end_us``.
        runs: Names and microseconds of the layers of each inference that was profiled.
        layer_information: The engine inspector's JSON.
        feeds: The inputs it was run on.
        outputs: What it gave for them, by name.
    """

    measurement: Measurement
    timing: InferenceTiming
    runs: Sequence[Run]
    layer_information: str
    feeds: Feeds
    outputs: Mapping[str, np.ndarray]


def measure_engine(
    verified: VerifiedEngine,
    shapes: ShapeMap,
    options: RuntimeOptions | None = None,
    *,
    reference: Runner | None = None,
    timing: TimingOptions = DEFAULT_TIMING,
    inputs: str | None = None,
) -> EngineRun:
    """Run an engine on this machine's GPU and time it.

    End to end is timed without and with a CUDA graph; the layers are timed in runs of their own, by the runtime's
    profiler, which slows the whole down. Clocks are read before, under load and after.

    Args:
        verified: The engine, of either backend.
        shapes: Shapes of dynamic inputs; others are at the optimum of the engine's first optimization profile.
        options: How it is loaded; None for what its manifest allows.
        reference: The FP32 model, for ``accuracy`` on the same inputs; its outputs are matched by name.
        timing: How inferences are timed.
        inputs: Files with the inputs' values (:func:`~trtopt.profiling.inputs.feeds_of`); None for random ones.

    Returns:
        The measurement. ``end_to_end_us`` and ``host_us`` are those with a CUDA graph where one can be captured, and
        without elsewhere; ``source.conditions`` says which, and holds the others. TensorRT for RTX captures by itself
        and does not say whether it did.

    Raises:
        UsageError: A shape or a file of values does not fit it, or an option does not.
        TargetError: It was built for another GPU or version than is here, or there is no GPU.
        MissingDependencyError: The backend's package or cuda-python is not installed.
        EngineBuildError: It fails to run.
    """
    version, backend = check_runs_here(verified), verified.backend
    options = runtime_options(verified) if options is None else options
    opened = functools.partial(TimedEngine, verified.data, backend, options, streams=timing.streams)
    with opened() as session:
        specs = named_inputs(session.inputs(), () if verified.manifest is None else verified.manifest.inputs)
        feeds = feeds_of(specs, shapes, session.optimum, inputs, session.values())
        session.prepare(feeds)
        bus_id = session.pci_bus_id()
        before = read_clocks(bus_id)
        stream = session.time(timing)
        at_once = int(max(1.0, min(_MOST_AT_ONCE, _BUSY_US / max(stream.device.median_us, 1.0))))
        load = read_clocks(bus_id, functools.partial(session.busy, at_once))
        runs, layers_stable = profiled_runs(session.profiled())
        information = session.layer_information()
        outputs = dict(zip(session.output_names, session.run(feeds), strict=True))
        streamed = session.weight_streaming()
    graph, refusal = graph_timing(functools.partial(opened, graph=True), feeds, timing) if timing.graph else (None, "")
    clocks = {"": load, "_before": before, "_after": read_clocks(bus_id)}
    layers, notes = join_times(inspected(information), layer_times(runs))
    end_to_end = graph or stream
    found = conditions(stream, graph, clocks)
    found |= {"cuda_graph_confirmed": graph is not None and backend != TENSORRT_RTX}
    found |= {"streams": timing.streams} if timing.streams > 1 else {}
    found |= {} if streamed is None else {"weight_streaming": streamed}
    found |= {"input_shapes": {name: list(np.shape(array)) for name, array in feeds.items()}}
    measurement = Measurement(
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
        end_to_end.host_us,
        None if reference is None else accuracy_of(reference, feeds, outputs),
        (*warnings_of(stream, graph, refusal, layers_stable=layers_stable, load=load), *notes),
    )
    return EngineRun(measurement, end_to_end, runs, information, feeds, outputs)


def named_inputs(inputs: Sequence[InputSpec], tensors: Sequence[EngineTensor]) -> list[InputSpec]:
    """An engine's inputs with the names that its manifest has for their dynamic dimensions: an engine keeps none."""
    known = {item.name: item.shape or () for item in tensors}
    return [
        replace(item, shape=known[item.name]) if len(known.get(item.name, ())) == len(item.shape) else item
        for item in inputs
    ]


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


def profiled_runs(run: Callable[[], Run], limits: RunLimits = _LIMITS) -> tuple[list[Run], bool]:
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
            found |= {f"{name}_{key}": value for key, value in timing.figures().items()}
    for ending, reading in clocks.items():
        for key, value in asdict(reading).items():
            if value not in (None, "") and (not ending or key in _CHANGING):
                found[f"{key}{ending}"] = ", ".join(value) or "none" if isinstance(value, tuple) else value
    return found


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
    end_to_end = graph or stream
    if end_to_end.host_us > _HOST_BOUND * end_to_end.device.median_us:
        found.append(
            "the host needs about as long to enqueue an inference as the GPU to run it: the time on the device may hold"
            " some of it, and more inferences may run at once (--inf-streams)"
        )
    if load.clocks_unknown:
        found.append(f"the clocks are not known: {load.clocks_unknown}")
    return found
