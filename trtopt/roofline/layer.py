"""The time of one layer on a GPU."""

from __future__ import annotations

import math
from dataclasses import dataclass

from trtopt.hardware.spec import GpuSpec
from trtopt.report.analysis import LayerRow, Limiter
from trtopt.roofline.work import Layer, Work


@dataclass(frozen=True)
class Tile:
    """Output rows and columns of one thread block."""

    m: int
    n: int


@dataclass(frozen=True)
class LayerTime:
    """A layer's predicted time, in microseconds, and why.

    Attributes:
        math_us: Time of the arithmetic alone.
        memory_us: Time of moving the bytes alone.
        latency_us: The launch.
        predicted_us: All of it.
        limiter: What bounds it.
        tile: The tile chosen; None without a product.
        tiles: Thread blocks.
        waves: Rounds of thread blocks over the GPU.
        tile_efficiency: Share of the tiles' arithmetic that is useful.
        wave_efficiency: Share of the GPU's slots that have a tile.
    """

    math_us: float
    memory_us: float
    latency_us: float
    predicted_us: float
    limiter: Limiter
    tile: Tile | None = None
    tiles: int = 0
    waves: int = 0
    tile_efficiency: float = 1.0
    wave_efficiency: float = 1.0


def layer_time(work: Work, gpu: GpuSpec, *, profiled: bool = False) -> LayerTime:
    """Predict the time of a kernel.

    Args:
        work: What it has to do.
        gpu: The GPU.
        profiled: Whether each layer is timed by itself, which costs more than a launch in a captured graph.
    """
    rate = gpu.tflops.get({"bf16": "fp16"}.get(work.dtype, work.dtype), gpu.tflops["fp32"])
    math_us = work.flop / (rate * 1e12) * 1e6
    memory_us = work.moved_bytes / (gpu.bandwidth_gbs * 1e9) * 1e6
    latency = 2.0
    total = max(math_us, memory_us) + latency
    limiter: Limiter = "latency" if latency > max(math_us, memory_us) else "math" if math_us > memory_us else "memory"
    if work.gemm is None:
        return LayerTime(math_us, memory_us, latency, total, limiter)
    tile = Tile(128, 128)
    tiles = math.ceil(work.gemm.m / tile.m) * math.ceil(work.gemm.n / tile.n) * work.gemm.batch
    waves = math.ceil(tiles / gpu.sm)
    return LayerTime(math_us, memory_us, latency, total, limiter, tile, tiles, waves, 1.0, tiles / (waves * gpu.sm))


def row_of(layer: Layer, gpu: GpuSpec, *, profiled: bool = False) -> LayerRow:
    """The report's row of a layer whose work is known.

    Raises:
        ValueError: ``layer.work`` is None.
    """
    work = layer.work
    if work is None:
        raise ValueError(f"the cost of {layer.name} is not known")
    time = layer_time(work, gpu, profiled=profiled)
    gemm = work.gemm
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
        tile={"m": time.tile.m, "n": time.tile.n} if time.tile else None,
        tiles=time.tiles,
        waves=time.waves,
        tile_efficiency=time.tile_efficiency,
        wave_efficiency=time.wave_efficiency,
        alignment_bytes=work.alignment_bytes,
        limiter=time.limiter,
        math_us=time.math_us,
        memory_us=time.memory_us,
        latency_us=time.latency_us,
        predicted_us=time.predicted_us,
    )
