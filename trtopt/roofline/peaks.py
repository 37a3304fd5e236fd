"""What a GPU's datasheet promises, by the type of the arithmetic."""

from __future__ import annotations

from trtopt.errors import UsageError
from trtopt.hardware.spec import GpuSpec
from trtopt.roofline.work import MathType

L2_PORT_BYTES = 64
"""Bytes per cycle that an SM can take from the L2 cache (NVIDIA A100 architecture white paper, 2020; no later
document gives more)."""

_RATE_OF: dict[MathType, str] = {"bf16": "fp16"}
"""Types that share another's units and rate."""

_BF16_SINCE = 8.0
"""The first compute capability with BF16 units (Ampere)."""


def supports(gpu: GpuSpec, dtype: MathType) -> bool:
    """Whether the GPU has units for that type."""
    if dtype == "bf16" and float(gpu.compute_capability) < _BF16_SINCE:
        return False
    return _RATE_OF.get(dtype, dtype) in gpu.tflops


def peak_rate(gpu: GpuSpec, dtype: MathType, accumulate_fp16: bool = False) -> float:
    """Dense peak in flop per microsecond, one multiply-add = 2 flop.

    Args:
        gpu: The GPU.
        dtype: The type of the operands.
        accumulate_fp16: FP16 products summed in FP16, which GeForce GPUs do at twice the rate.

    Raises:
        UsageError: The GPU has no units for that type.
    """
    if not supports(gpu, dtype):
        have = ", ".join(name for name in ("fp32", "tf32", "fp16", "bf16", "fp8", "int8", "fp4") if _has(gpu, name))
        raise UsageError(f"{gpu.name} has no units for {dtype}", where="--precision", remedy=f"it has: {have}")
    rate, units = gpu.tflops[_RATE_OF.get(dtype, dtype)] * 1e6, gpu.fma_per_clock_per_sm
    if dtype == "fp16" and accumulate_fp16 and "fp16_acc16" in units:
        return rate * units["fp16_acc16"] / units["fp16_acc32"]
    return rate


def _has(gpu: GpuSpec, name: str) -> bool:
    return supports(gpu, name)  # type: ignore[arg-type]


def cuda_core_rate(gpu: GpuSpec) -> float:
    """FP32 peak of the CUDA cores in flop per microsecond."""
    return gpu.tflops["fp32"] * 1e6


def ridge(gpu: GpuSpec, dtype: MathType) -> float:
    """Flop per byte of DRAM at which arithmetic and memory take equally long (V100, FP16: 138.9).

    Raises:
        UsageError: The GPU has no units for that type.
    """
    return peak_rate(gpu, dtype) / (gpu.bandwidth_gbs * 1e3)
