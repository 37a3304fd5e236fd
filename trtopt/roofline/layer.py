"""The time of one layer on a GPU."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from trtopt.hardware.spec import GpuSpec
from trtopt.report.schema.analysis import LayerRow, Limiter, Uncosted, limiter_of
from trtopt.roofline.batch import Batch, Times
from trtopt.roofline.constants import Constants, constants_for
from trtopt.roofline.gemm import TILES, Tiling, tiling
from trtopt.roofline.intervals import range_of
from trtopt.roofline.work import Layer, Work

Timing = Literal["graph", "profile", "single run", "repeated", "events", "replay", "difference"]
"""A launch in a captured CUDA graph; each layer timed by itself, averaged over many runs; the same in one run; one
kernel again and again, as DeepBench does, which costs what a profile costs; events around one that is launched without
a graph; a graph of one call, replayed again and again on the same data; the difference of such graphs with and without
the kernel."""

_ALONE: tuple[Timing, ...] = ("repeated", "events")
"""Timings of so little work, or with such pauses, that a low-power card keeps the clock of its datasheet: in NeuSight's
timings T4 waits as many of its cycles per load as A100 does (766 and 673)."""

SYNC_US = 0.1
"""What a stream that waits for another takes. On an H200 three kernels that fill the GPU and wait for each other take
0.31 us more than the same in one stream, and as long where both are captured in a graph; a branch and its join take
less than no time, since a launch is hidden (``benchmarks/predictor/measured/h200_syncs.csv``)."""

COPY_US = 3.5
"""What a copy of a few bytes takes: from the host in a graph, on an H200 (the same file); to the host it is 8 us."""

_AT_ONCE = 1024
"""Kernels predicted together: bounds the memory of the arrays."""


@dataclass(frozen=True)
class PredictedTime:
    """A layer's predicted time, in microseconds, and why.

    Attributes:
        math_us: Time of the arithmetic alone, as long as it would take with work for every SM all the time.
        memory_us: Time of moving the bytes alone.
        latency_us: The launch, once per step.
        predicted_us: All of it, idle SMs included.
        limiter: What bounds it (:func:`~trtopt.report.schema.analysis.limiter_of`).
        tiling: Tile and waves of a matrix product; None without one.
    """

    math_us: float
    memory_us: float
    latency_us: float
    predicted_us: float
    limiter: Limiter
    tiling: Tiling | None = None


@functools.lru_cache(maxsize=65536)
def layer_time(work: Work, gpu: GpuSpec, *, timing: Timing = "graph") -> PredictedTime:
    """Predict the time of a kernel, with the constants of the GPU or of its architecture.

    Args:
        work: What it has to do.
        gpu: The GPU.
        timing: How it is launched and timed; each way costs something else per kernel.

    Raises:
        UsageError: The GPU has no units for the type of the arithmetic.
    """
    return layer_times((work,), gpu, constants_for(gpu), timing=timing)[0]


def layer_times(
    works: Sequence[Work], gpu: GpuSpec, constants: Constants, *, timing: Timing = "graph"
) -> tuple[PredictedTime, ...]:
    """Predict the times of kernels with given constants, together: many times as fast as one by one. See
    :func:`layer_time`.

    Streams that wait and copies of a few bytes cost :data:`SYNC_US` and :data:`COPY_US`.
    """
    found: list[PredictedTime] = []
    for start in range(0, len(works), _AT_ONCE):
        chunk = works[start : start + _AT_ONCE]
        times = Batch.of(chunk, gpu, warm=timing == "replay", sustained=is_sustained(timing)).predict(constants)
        for index, work in enumerate(chunk):
            latency = _latency_us(work, gpu, constants, timing)
            found.append(_layer_time(index, work, times, latency * work.steps, gpu))
    return tuple(found)


def is_sustained(timing: Timing) -> bool:
    """Whether kernels follow each other without a pause (see :class:`trtopt.roofline.constants.LowPower`)."""
    return timing not in _ALONE


def _latency_us(work: Work, gpu: GpuSpec, constants: Constants, timing: Timing) -> float:
    if work.kind in ("sync", "copy"):
        return SYNC_US if work.kind == "sync" else COPY_US
    return launch_us(gpu, constants, timing=timing, light=is_light(work))


def is_light(work: Work) -> bool:
    """Whether a kernel only streams: element-wise, a copy, a cast. No tiles, shared memory or pipelines have to be set
    up for it, so that in a captured graph it starts as soon as the one before ends and pays that part of a launch which
    does not depend on the clock.

    On an H200 such kernels of 4096 elements follow each other at 1.1 to 1.4 us, the smallest products at 3 us, and one
    behind a product of 2.4 MB adds 2.0 us (``benchmarks/predictor/measured``). Norms and softmax do not gain: with it,
    cuDNN's on a GB200 come out 13 % too fast. Where kernels are timed by events, all of a launch is in the time.
    """
    return work.kind == "memory" and work.rows is None and not work.pooled


def launch_us(gpu: GpuSpec, constants: Constants, *, timing: Timing = "graph", light: bool = False) -> float:
    """What every kernel costs before it does anything; less in a graph where it is light (:func:`is_light`)."""
    if light and timing == "graph":
        return constants.launch_us
    launch = constants.launch_us + constants.launch_cycles / gpu.clock_tensor_mhz
    if timing == "graph":
        return launch
    if timing == "events":
        return launch + constants.event_us
    if timing == "difference":
        return launch + constants.fp8_us
    if timing == "replay":
        return launch + constants.replay_us
    return launch + constants.profiled_us + (constants.single_run_us if timing == "single run" else 0.0)


def _layer_time(index: int, work: Work, times: Times, latency: float, gpu: GpuSpec) -> PredictedTime:
    arithmetic, memory, busy = (float(values[index]) for values in (times.math, times.memory, times.total))
    shape = None
    if times.choice is not None and work.gemm is not None and times.product[index] >= 0:
        row = times.product[index]
        tile = TILES[times.choice.tile[row]]
        shape = tiling(work.gemm, tile, gpu.sm, split=int(times.choice.split[row]))
    limiter = limiter_of(arithmetic, memory, busy + latency)
    return PredictedTime(arithmetic, memory, latency, busy + latency, limiter, shape)


def predict(
    layers: Sequence[Layer], gpu: GpuSpec, *, timing: Timing = "graph"
) -> tuple[tuple[LayerRow, ...], tuple[Uncosted, ...]]:
    """The rows of all layers whose cost is known, in their order, and the others by operator.

    Raises:
        UsageError: The GPU has no units for the type of a layer's arithmetic.
    """
    unknown: dict[str, list[str]] = {}
    for layer in layers:
        if layer.work is None:
            unknown.setdefault(layer.op, []).extend(layer.onnx_nodes or (layer.name,))
    distinct = list(dict.fromkeys(layer.work for layer in layers if layer.work is not None))
    times = dict(zip(distinct, layer_times(distinct, gpu, constants_for(gpu), timing=timing), strict=True))
    rows = []
    for layer in layers:
        if layer.work is not None:
            time = times[layer.work]
            low_us, high_us = range_of(layer.work, time.predicted_us, gpu)
            rows.append(replace(row_of(layer, layer.work, time), low_us=low_us, high_us=high_us))
    return tuple(rows), tuple(Uncosted(op, tuple(nodes)) for op, nodes in unknown.items())


def row_of(layer: Layer, work: Work, time: PredictedTime) -> LayerRow:
    """The report's row of a layer, without the range of its time."""
    gemm, shape = work.gemm, time.tiling
    return LayerRow(
        name=layer.name,
        op=layer.op,
        onnx_nodes=layer.onnx_nodes,
        kind=work.kind,
        flop=work.flop,
        bytes=work.bytes,
        arithmetic_intensity=work.arithmetic_intensity,
        dtype=work.dtype,
        gemm={"m": gemm.m, "n": gemm.n, "k": gemm.k, "batch": gemm.batch} if gemm else None,
        tile={"m": shape.tile_m, "n": shape.tile_n} if shape else None,
        tiles=shape.tiles if shape else 0,
        waves=shape.waves if shape else 0,
        tile_efficiency=shape.tile_efficiency if shape else 1.0,
        wave_efficiency=shape.wave_efficiency if shape else 1.0,
        alignment_bytes=work.alignment_bytes,
        limiter=time.limiter,
        math_us=time.math_us,
        memory_us=time.memory_us,
        latency_us=time.latency_us,
        predicted_us=time.predicted_us,
    )
