"""The precision an engine really runs at: from the names of its kernels, which TensorRT calls tactics, and its layers.

The names are those of NVIDIA's libraries: xmma (``sm80_xmma_fprop_implicit_gemm_..._tensor16x8x16``), cuDNN
(``ampere_h16816cudnn_...``, ``ampere_scudnn_...``), CUTLASS (``..._hmma_...``, ``..._tensorop_...``, ``simt``) and
cuBLAS (``nvjet_...``, ``..._gemvx_...``). TensorRT for RTX hides them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

from trtopt.engine.layers import layers_of_profile, tensor_bytes
from trtopt.report.schema.analysis import WITHOUT_KERNEL, LayerRow
from trtopt.report.schema.build import Achieved
from trtopt.report.schema.layers import LayerInfo, TensorInfo
from trtopt.support.precision import TENSORRT_TYPES, Precision

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


_WIDEST_FIRST = ("Float", "BFloat16", "Half", "FP8", "Int8", "UInt8", "FP4", "FP4E2M1", "Int4")
_QUANTIZED = ("FP4", "FP4E2M1", "Int8", "FP8")
MATH_KINDS = ("conv", "gemm", "mha", "fused")
"""Kinds of kernels with matrix multiplications, those that surely have one first."""

_FLOATS = frozenset(["Half", "BFloat16", "Float"])


def achieved_precision(
    layers: Sequence[LayerInfo], flop_by_node: Mapping[str, int], predicted: Sequence[LayerRow] = ()
) -> dict[str, Achieved]:
    """The share of each dtype in kernels, in flop and in predicted time, first optimization profile.

    A node whose computation is spread over several kernels (padding, transposing, multiplying, dequantizing) counts
    once, for the kernel that does its math.

    Args:
        layers: With ``onnx_nodes`` resolved to names of the graph.
        flop_by_node: Flop of each ONNX node; one multiply-add = 2 flop.
        predicted: The predicted times of the same kernels; none when they are not predicted.

    Returns:
        By ``int8``, ``fp8``, ``fp16``, ``bf16``, ``fp32``, ... in order of falling flop share. ``flop_share`` is of
        the flop of the nodes some kernel claims; ``time_share`` is None where nothing was predicted. TF32 counts as
        ``fp32``: it is the type of the tensors.
    """
    kernels = [layer for layer in layers_of_profile(layers) if layer.is_kernel]
    dtypes = [math_dtype(layer) for layer in kernels]
    owner: dict[str, int] = {}
    for index, layer in enumerate(kernels):
        for node in layer.onnx_nodes:
            if node in flop_by_node and (node not in owner or preference(layer) < preference(kernels[owner[node]])):
                owner[node] = index
    flop: dict[str, int] = dict.fromkeys(dtypes, 0)
    for node, index in owner.items():
        flop[dtypes[index]] += flop_by_node[node]
    total = sum(flop.values())
    shares = {name: (value / total if total else 0.0) for name, value in flop.items()}
    order = sorted(shares, key=lambda name: (-shares[name], name))
    times: dict[str, float] = {}
    listed = {layer.name: dtype for layer, dtype in zip(kernels, dtypes, strict=True)}
    for row in (row for row in predicted if row.kind not in WITHOUT_KERNEL):
        name = listed.get(row.name, Precision.FP32 if row.dtype == Precision.TF32 else row.dtype)
        times[name] = times.get(name, 0.0) + row.predicted_us
    spent = sum(times.values())
    return {
        name: Achieved(dtypes.count(name), shares[name], times.get(name, 0.0) / spent if spent else None)
        for name in order
    }


def math_dtype(layer: LayerInfo) -> str:
    """The dtype a kernel's operands have.

    A convolution, matrix product or attention kernel is narrow (INT8, FP8, FP4) when an activation *and* its other
    operand (a weight, else another view or activation) are; a narrow constant alone is a compressed weight, widened
    before the product. Otherwise a floating-point weight decides (an activation of another type is cast as it is read),
    and without one the floating-point type of most elements that are read, as a mask beside queries, keys and values
    may be wider; the widest of several. Weights are the constants with several axes longer than one;
    where there are none, those of rank 2 or more: a scale per channel behind the product may be of another type.
    """
    operands = [tensor.dtype for tensor in layer.inputs]
    if layer.kind in MATH_KINDS:
        matrices = [tensor for tensor in layer.constants if sum(size > 1 for size in tensor.shape) > 1]
        weights = [item.dtype for item in matrices or layer.constants if len(item.shape) >= 2]
        for dtype in _QUANTIZED:
            if dtype in operands and (dtype in weights or operands.count(dtype) >= 2):
                return TENSORRT_TYPES[dtype]
        stored = [dtype for dtype in weights if dtype in _FLOATS]
        operands = (
            stored or _most_read(layer.inputs) or [item for item in operands if item not in _QUANTIZED] or operands
        )
    return _name(operands, layer.constants, layer.outputs)


def _most_read(inputs: Sequence[TensorInfo]) -> list[str]:
    """The floating-point types of most elements; empty where there are none."""
    elements: dict[str, int] = {}
    for item in inputs:
        if item.dtype in _FLOATS:
            elements[item.dtype] = elements.get(item.dtype, 0) + math.prod(
                map(abs, item.shape)
            )  # an unknown size is -1
    return [dtype for dtype, count in elements.items() if count == max(elements.values())]


def _name(operands: Sequence[str], constants: Sequence[TensorInfo], outputs: Sequence[TensorInfo]) -> str:
    for dtypes in (operands, [item.dtype for item in outputs], [item.dtype for item in constants]):
        for dtype in _WIDEST_FIRST:
            if dtype in dtypes:
                return TENSORRT_TYPES.get(dtype, dtype.lower())
    return next((dtype.lower() for dtype in (*operands, *(item.dtype for item in outputs))), "none")


def math_rank(layer: LayerInfo) -> int:
    """Lower for kernels that more surely do the math of the nodes they claim."""
    return MATH_KINDS.index(layer.kind) if layer.kind in MATH_KINDS else len(MATH_KINDS)


def preference(layer: LayerInfo) -> tuple[int, int]:
    """Lower for kernels that more surely do the math of the nodes they claim: by their kind, then by what they move."""
    return math_rank(layer), -sum(tensor_bytes(item) for item in (*layer.inputs, *layer.outputs, *layer.constants))


def sparse_kernels(layers: Sequence[LayerInfo]) -> tuple[str, ...] | None:
    """The layers that run a 2:4 sparse kernel, by the names of their tactics; None where no tactic is named."""
    if not any(layer.tactic for layer in layers):
        return None
    return tuple(layer.name for layer in layers if is_sparse(layer.tactic))
