"""What a GPU's datasheet promises, by the type of the arithmetic."""

from __future__ import annotations

from trtopt.errors import UsageError
from trtopt.hardware.spec import GpuSpec, dense_tflops
from trtopt.support.precision import Precision

L2_PORT_BYTES = 64
"""Bytes per cycle that an SM can take from the L2 cache (NVIDIA A100 architecture white paper, 2020; no later
document gives more)."""

SPARSE_SPEED = 2.0
"""Rate of Sparse Tensor Cores on a 2:4 weight over the dense rate: they skip two of four multiplications (NVIDIA A100
architecture white paper, 2020, and the datasheets since).

No sparse kernel was ever measured for this model. Besides this rate and the compressed weight in memory, everything is
taken to cost what it costs a dense kernel: activations, the operands' way to the SMs, filling the pipeline, waves, the
launch. So BERT (base and large, 128 and 384 tokens, batch 128, INT8, A100) is predicted 1.14 to 1.22 times as fast;
NVIDIA attests 1.12 to 1.31. Were the weight compressed on its way to the SMs too, it would be up to 1.37."""

SPARSE_TYPES: tuple[Precision, ...] = (Precision.FP16, Precision.BF16, Precision.FP8, Precision.INT8)
"""Types of 2:4 products. In TF32 one of two weights stays, and in FP4 pairs of weights (cuSPARSELt documentation,
"cusparseLtSparsity_t"): 2:4 weights are in general neither."""


def peak_rate(gpu: GpuSpec, dtype: Precision, accumulate_fp16: bool = False) -> float:
    """Dense peak in flop per microsecond, one multiply-add = 2 flop.

    Args:
        gpu: The GPU.
        dtype: The type of the operands.
        accumulate_fp16: FP16 products summed in FP16, which GeForce GPUs do at twice the rate.

    Raises:
        UsageError: The GPU has no units for that type.
    """
    rate, units = dense_tflops(gpu, dtype) * 1e6, gpu.fma_per_clock_per_sm
    if dtype == Precision.FP16 and accumulate_fp16 and "fp16_acc16" in units:
        return rate * units["fp16_acc16"] / units["fp16_acc32"]
    return rate


def cuda_core_rate(gpu: GpuSpec) -> float:
    """FP32 peak of the CUDA cores in flop per microsecond."""
    return peak_rate(gpu, Precision.FP32)


def sparse_speed(gpu: GpuSpec, dtype: Precision) -> float:
    """How many times as fast as dense ones the Tensor Cores multiply by a 2:4 weight.

    Raises:
        UsageError: The GPU has no Sparse Tensor Cores, or they do not take 2:4 weights of that type.
    """
    if not gpu.sparse_2_4 or dtype not in SPARSE_TYPES:
        what = f"{gpu.name} has no Tensor Cores for 2:4 weights in {dtype}"
        raise UsageError(
            what, where="--sparse", remedy=f"Ampere and later GPUs have them for {', '.join(SPARSE_TYPES)}"
        )
    return SPARSE_SPEED
