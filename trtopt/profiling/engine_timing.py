"""One inference of an engine timed on this machine's GPU, end to end."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trtopt.config.base import ShapeMap
from trtopt.engine.backend import Backend
from trtopt.engine.request import check_shape
from trtopt.errors import EngineBuildError, TargetError
from trtopt.graph.artifact import InputSpec
from trtopt.precision.observe.samples import random_feeds
from trtopt.profiling.gpu_session import TimedEngine
from trtopt.profiling.stable import Limits, Samples, timed, until_stable
from trtopt.support.ort_session import Feeds

_SAMPLE_US = 1000.0
_MOST_INFERENCES = 50
_LIMITS = Limits()


@dataclass(frozen=True)
class Timing:
    """One inference without profiling.

    Attributes:
        device: Time on the device.
        host: Time on the host to enqueue it, with the GPU idle.
        inferences: How many inferences each sample of ``device`` is the mean of.
    """

    device: Samples
    host: Samples
    inferences: int


def time_engine(engine: bytes, backend: Backend, limits: Limits = _LIMITS) -> Timing:
    """Time an engine end to end, as :func:`measure_engine` does: with a CUDA graph where one can be captured.

    Args:
        engine: The engine file's content, of this machine's GPU and versions.
        backend: What built it.
        limits: When a median stands still.

    Raises:
        TargetError: It cannot run here.
        EngineBuildError: It fails to run.
    """
    with TimedEngine(engine, backend) as session:
        feeds = feeds_of(session.inputs(), {}, session.optimum)
        session.prepare(feeds)
        stream = timing_of(session, limits)
    return graph_timing(engine, backend, feeds, limits)[0] or stream


def feeds_of(inputs: Sequence[InputSpec], shapes: ShapeMap, optimum: Callable[[str], tuple[int, ...]]) -> Feeds:
    """Random inputs for an engine.

    Args:
        inputs: Its inputs.
        shapes: Shapes that were asked for.
        optimum: Gives the shape of a dynamic input that was not.

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


def timing_of(session: TimedEngine, limits: Limits) -> Timing:
    """The timing of one inference of a prepared engine."""
    count = inferences_per_sample(session.device_us(1))
    device = until_stable(lambda: session.device_us(count), limits)
    launch = timed(lambda: session.launch())

    def enqueue_alone() -> float:
        session.synchronize()
        return launch()

    host = until_stable(enqueue_alone, limits)
    session.synchronize()
    return Timing(device, host, count)


def graph_timing(engine: bytes, backend: Backend, feeds: Feeds, limits: Limits) -> tuple[Timing | None, str]:
    """The timing with a CUDA graph; None, and why, where none can be captured.

    In a session of its own: TensorRT for RTX takes the choice when a context is created, and a capture that failed
    may leave a context behind that fails.
    """
    try:
        with TimedEngine(engine, backend, graph=True) as session:
            session.prepare(feeds)
            return timing_of(session, limits), ""
    except (EngineBuildError, TargetError) as error:  # the engine itself has run before
        return None, f"{error.what} ({error.where})"
