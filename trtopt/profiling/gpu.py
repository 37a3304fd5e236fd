"""Measure an engine on the GPU that it was built for: end to end, on the host, and layer by layer.

The calls are in `gpu_session`, which has not been run yet; what is decided from them stands here.
"""

from __future__ import annotations

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
from trtopt.engine.backend import TENSORRT_RTX, Backend
from trtopt.engine.manifest import VerifiedEngine, check_runs_here
from trtopt.errors import EngineBuildError
from trtopt.hardware.clocks import Clocks, read_clocks
from trtopt.profiling.engine_layers import LayerTime, join_times
from trtopt.profiling.engine_timing import Timing, feeds_of, graph_timing, timing_of
from trtopt.profiling.gpu_session import TimedEngine
from trtopt.profiling.measured import Measurement
from trtopt.profiling.stable import Limits, spread, until_stable
from trtopt.report.schema.build import OutputAccuracy
from trtopt.report.schema.profile import ProfileSource
from trtopt.support.ort_session import Feeds

_STREAM, _GRAPH = "stream", "cuda_graph"
_CHANGING = ("sm_clock_mhz", "temperature_c", "power_w", "clocks_held_by")
_LIMITS = Limits()

Run = Sequence[tuple[str, float]]
"""Names and microseconds of the layers of one inference, in the order they were reported."""


def measure_engine(
    engine: VerifiedEngine, shapes: ShapeMap, *, reference: Runner | None = None, limits: Limits = _LIMITS
) -> Measurement:
    """Run an engine on this machine's GPU and time it, on random inputs.

    End to end is timed without and with a CUDA graph, each until its median stands still; the layers are timed in runs
    of their own, by the runtime's profiler, which slows the whole down. Clocks are read before, under load and after.

    Args:
        engine: The engine, of either backend.
        shapes: Shapes of dynamic inputs; others are at the optimum of the engine's first optimization profile.
        reference: The FP32 model, for ``accuracy`` on the same inputs; its outputs are matched by name.
        limits: When a median stands still.

    Returns:
        The measurement. ``end_to_end_us`` and ``host_us`` are those with a CUDA graph where one can be captured, and
        without elsewhere; ``source.conditions`` says which, and holds the others. TensorRT for RTX captures by itself
        and does not say whether it did.

    Raises:
        UsageError: A shape does not fit it.
        TargetError: It was built for another GPU or version than is here, or there is no GPU.
        MissingDependencyError: The backend's package or cuda-python is not installed.
        EngineBuildError: It fails to run.
    """
    version, backend = check_runs_here(engine), engine.backend
    run = _stream_run(engine.data, backend, shapes, limits)
    graph, refusal = graph_timing(engine.data, backend, run.feeds, limits)
    clocks = {"": run.load, "_before": run.before, "_after": read_clocks(run.bus_id)}
    layers, notes = join_times(run.entries, layer_times(run.layers))
    end_to_end = graph or run.timing
    found = conditions(run.timing, graph, clocks)
    found |= {"cuda_graph_confirmed": graph is not None and backend != TENSORRT_RTX}
    found |= {"input_shapes": {name: list(np.shape(array)) for name, array in run.feeds.items()}}
    return Measurement(
        ProfileSource(
            origin="tensorrt-rtx" if backend == TENSORRT_RTX else "tensorrt",
            files={"engine": str(engine.path)},
            version=version,
            runs=len(run.layers),
            launching="profile",
            conditions=found,
        ),
        layers,
        end_to_end.device.median_us,
        end_to_end.device.spread_us,
        end_to_end.host.median_us,
        None if reference is None else accuracy_of(reference, run.feeds, run.outputs),
        (*warnings_of(run.timing, graph, refusal, layers_stable=run.layers_stable, load=run.load), *notes),
    )


@dataclass(frozen=True)
class _StreamRun:
    """All that is recorded without a CUDA graph."""

    feeds: Feeds
    bus_id: str
    before: Clocks
    timing: Timing
    load: Clocks
    layers: Sequence[Run]
    layers_stable: bool
    entries: Sequence[Any]
    outputs: Mapping[str, np.ndarray]


def _stream_run(engine: bytes, backend: Backend, shapes: ShapeMap, limits: Limits) -> _StreamRun:
    with TimedEngine(engine, backend) as session:
        feeds = feeds_of(session.inputs(), shapes, session.optimum)
        session.prepare(feeds)
        bus_id = session.pci_bus_id()
        before = read_clocks(bus_id)
        timing = timing_of(session, limits)
        load = read_clocks(bus_id, lambda: session.device_us(timing.inferences))
        layers, layers_stable = profiled_runs(session.profiled(), limits)
        entries = inspected(session.layer_information())
        outputs = dict(zip(session.output_names, session.run(feeds), strict=True))
    return _StreamRun(feeds, bus_id, before, timing, load, layers, layers_stable, entries, outputs)


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


def profiled_runs(run: Callable[[], Run], limits: Limits) -> tuple[list[Run], bool]:
    """Repeat ``run`` until the sum over the layers stands still.

    Returns:
        The runs that count, and whether the sum stood still.
    """
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
    return [_layer_time(name, times) for (name, _), times in found.items()]


def _layer_time(name: str, times: Sequence[float]) -> LayerTime:
    mean = math.fsum(times) / len(times)
    return LayerTime(name, Decimal(mean), Decimal(statistics.median(times)), Decimal(spread(times)))


def conditions(stream: Timing, graph: Timing | None, clocks: Mapping[str, Clocks]) -> dict[str, Any]:
    """What was recorded of a run, flat, for tables.

    Args:
        stream: The timing without a graph.
        graph: The one with a graph; None where there is none.
        clocks: The readings, by what the names of their fields end in; the one under load by "".
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


def _figures(timing: Timing) -> dict[str, float]:
    return {
        "device_us": timing.device.median_us,
        "device_spread_us": timing.device.spread_us,
        "host_us": timing.host.median_us,
        "host_spread_us": timing.host.spread_us,
        "samples": len(timing.device.us),
        "inferences_per_sample": timing.inferences,
    }


def warnings_of(stream: Timing, graph: Timing | None, refusal: str, *, layers_stable: bool, load: Clocks) -> list[str]:
    """What the reader of a measurement should know.

    Args:
        stream: The timing without a graph.
        graph: The one with a graph.
        refusal: Why there is none with a graph; else empty.
        layers_stable: Whether the sum of the layers stood still.
        load: The clocks under load.
    """
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
