"""What the names of kernels tell: TensorRT calls them tactics.

The names are those of NVIDIA's libraries: xmma (``sm80_xmma_fprop_implicit_gemm_..._tensor16x8x16``), cuDNN
(``ampere_h16816cudnn_...``, ``ampere_scudnn_...``), CUTLASS (``..._hmma_...``, ``..._tensorop_...``, ``simt``) and
cuBLAS (``nvjet_...``, ``..._gemvx_...``). TensorRT for RTX hides them.
"""

from __future__ import annotations

import re

_SPARSE = re.compile(r"sparse|spgemm", re.IGNORECASE)
"""In the names of TensorRT's sparse kernels (``sm80_xmma_fprop_sparse_conv_...``) and of CUTLASS's
(``..._s16832spgemm_...``); none was run here."""

_TENSOR_CORE = re.compile(
    r"tensor\d+x\d+x\d+|tensorop|nvjet|[hiqbw]?g?mma(?![a-z])|(?<![a-z0-9])[a-z]{1,4}_?(?:884|1688|8816|16816|16832|16864)",
    re.IGNORECASE,
)
"""The shape of a Tensor Core instruction (m, n, k), or the instruction."""

_CUDA_CORE = re.compile(
    r"simt|[his]cudnn|[his]gemm|gemv|ffma|dp4a|(?:fprop|dgrad|gemm)_\w{0,200}f32f32_f32f32", re.IGNORECASE
)
"""FP32 and DP4A kernels, and products of a matrix and a vector."""


def is_sparse(tactic: str) -> bool | None:
    """Whether a kernel skips the zeros of 2:4 weights; None where the name is hidden."""
    return _SPARSE.search(tactic) is not None if tactic else None


def uses_tensor_cores(tactic: str) -> bool | None:
    """Whether a kernel multiplies on Tensor Cores; None where its name does not tell."""
    bare = tactic.replace("xmma", "")
    if _TENSOR_CORE.search(bare):
        return True
    return False if _CUDA_CORE.search(bare) else None
