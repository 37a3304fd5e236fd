"""The time of a node on a CPU by the roofline: the rates that a probe measured, and nothing fitted."""

from __future__ import annotations

from collections.abc import Sequence

from trtopt.hardware.cpu import CpuSpec
from trtopt.report.schema.analysis import LayerRow, limiter_of
from trtopt.roofline.work import Layer, Work
from trtopt.support.precision import Precision


def predict_cpu(layers: Sequence[Layer], cpu: CpuSpec) -> tuple[LayerRow | None, ...]:
    """Predict the time of every node, each timed by itself: arithmetic or memory, whichever takes longer, and a node's
    latency.

    What a node reads and writes comes from the caches where all of it fits into them, as its producer has just written
    it; weights, where those of the whole network do, as each inference reads them all. The rates are those of a large
    matrix product and of a plain element-wise operator: transcendental functions, padded or strided windows, and thin
    products reach less, which is what the comparison is to show.

    Args:
        layers: All nodes of the network.
        cpu: What the CPU reaches. A type without a rate of its own computes at that of FP32.

    Returns:
        A row for each layer, None where its work is not known. Tiles and waves are those of no GPU: none, efficiency 1.
    """
    weights = sum(layer.work.weight_bytes // _executions(layer.work) for layer in layers if layer.work is not None)
    weights_gbs = _bandwidth(weights, cpu)
    return tuple(None if layer.work is None else _row(layer, layer.work, cpu, weights_gbs) for layer in layers)


def _executions(work: Work) -> int:
    """The steps of a recurrent layer are one node; those of anything else are executions of it, in a loop."""
    return 1 if work.kind == "recurrent" else work.steps


def _bandwidth(size: int, cpu: CpuSpec) -> float:
    return cpu.cache_bandwidth_gbs if size <= cpu.cache_bytes else cpu.bandwidth_gbs


def _row(layer: Layer, work: Work, cpu: CpuSpec, weights_gbs: float) -> LayerRow:
    gemm = work.gemm
    math_us = work.flop / cpu.tflops.get(work.dtype, cpu.tflops[Precision.FP32]) / 1e6
    activations_gbs = _bandwidth(work.bytes // _executions(work), cpu)
    memory_us = ((work.moved_bytes - work.weight_bytes) / activations_gbs + work.weight_bytes / weights_gbs) / 1e3
    latency_us = (cpu.latency_us + cpu.profiled_us) * _executions(work)
    predicted_us = max(math_us, memory_us) + latency_us
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
        tile=None,
        tiles=0,
        waves=0,
        tile_efficiency=1.0,
        wave_efficiency=1.0,
        alignment_bytes=work.alignment_bytes,
        limiter=limiter_of(math_us, memory_us, predicted_us),
        math_us=math_us,
        memory_us=memory_us,
        latency_us=latency_us,
        predicted_us=predicted_us,
    )
