"""What a GPU's datasheet promises, by the type of the arithmetic."""

from __future__ import annotations

from trtopt.hardware.spec import GpuSpec, dense_tflops
from trtopt.roofline.work import MathType

L2_PORT_BYTES = 64
"""Bytes per cycle that an SM can take from the L2 cache (NVIDIA A100 architecture white paper, 2020; no later
document gives more)."""


def peak_rate(gpu: GpuSpec, dtype: MathType, accumulate_fp16: bool = False) -> float:
    """Dense peak in flop per microsecond, one multiply-add = 2 flop.

    Args:
        gpu: The GPU.
        dtype: The type of the operands.
        accumulate_fp16: FP16 products summed in FP16, which GeForce GPUs do at twice the rate.

    Raises:
        UsageError: The GPU has no units for that type.
    """
    rate, units = dense_tflops(gpu, dtype) * 1e6, gpu.fma_per_clock_per_sm
    if dtype == "fp16" and accumulate_fp16 and "fp16_acc16" in units:
        return rate * units["fp16_acc16"] / units["fp16_acc32"]
    return rate


def cuda_core_rate(gpu: GpuSpec) -> float:
    """FP32 peak of the CUDA cores in flop per microsecond."""
    return peak_rate(gpu, "fp32")
