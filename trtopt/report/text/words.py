"""What reports say of a model, its layers and a device, in a table, beside the pointer, and in a sentence."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from trtopt.report.schema.analysis import Analysis, LayerRow
from trtopt.report.text.blocks import Block, Section, pairs
from trtopt.report.text.format import near, shorten, visible
from trtopt.support.precision import Precision
from trtopt.support.version import VERSION

if TYPE_CHECKING:
    from trtopt.hardware.spec import GpuSpec
    from trtopt.report.schema.sensitivity import Sensitivity

LIMITERS = {"math": "arithmetic", "memory": "memory", "latency": "latency"}
VERIFIED = {"onnx-only": "on the CPU", "engine": "on the engine"}
"""Where outputs were compared with FP32."""
FLOP_NOTE = (
    "One multiply-add is 2 FLOP; the bytes of a layer are each input, constant and output once; 1 GB is 10⁹ bytes."
)
_LONGEST_VALUE = 400
"""Characters of one value of the model's description."""


def model_name(report: Analysis | Sensitivity) -> str:
    """The model's file name, or the code that makes it."""
    path = report.model.get("path")
    return visible(PurePath(str(path)).name if path else str(report.model.get("target") or "model in memory"))


_TITLES = {
    **{"compute_capability": "compute capability", "sm": "multiprocessors", "clock_cuda_mhz": "clock, MHz"},
    **{"clock_tensor_mhz": "clock of Tensor Cores, MHz", "memory_gb": "memory, GB", "l2_mib": "L2, MiB"},
    **{"bandwidth_gbs": "memory bandwidth, GB/s", "tdp_w": "power limit, W", "tflops": "peaks, TFLOP/s"},
    **{"fma_per_clock_per_sm": "multiply-adds a clock", "sparse_2_4": "2:4 sparsity"},
    **{"cache_bandwidth_gbs": "bandwidth of the caches, GB/s", "cache_bytes": "bytes that the caches take"},
    **{"latency_us": "least time of a node, us", "profiled_us": "time that profiling adds to a node, us"},
    **{"graph_optimizations": "graph optimizations", "load_average": "load average"},
    **{"input_shapes": "shapes", "weights_hashed": "weights hashed", "path": "model", "name": "device"},
}
"""What fields of models and devices are called."""


def described(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Names and values in words; what is None is left out."""
    return [
        (visible(_TITLES.get(key, key)), shorten(visible(_in_words(value)), _LONGEST_VALUE, mark=" … "))
        for key, value in values.items()
        if value is not None
    ]


def _in_words(value: Any) -> str:
    """``mfcc float32 [batch, 1, 49, 10]`` of an input; ``fp16 312, int8 624`` of a table; a file as :func:`near`."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_in_words(item)}" for key, item in value.items())
    if isinstance(value, (list, tuple)) and all(isinstance(item, Mapping) for item in value):
        return "; ".join(" ".join(map(_in_words, item.values())) for item in value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_in_words, value))}]"
    return near(str(value))


def rests_on(schema: str, values: Mapping[str, Any], *notes: Block) -> Section:
    """How a page ends: what is taken for granted, the version and the schema."""
    shown = pairs(described({**values, "trtopt": VERSION, "schema": schema}))
    return Section("What this rests on", (*notes, shown), "page")


def rate_of(dtype: str) -> str:
    """The key of ``GpuSpec.tflops`` for a type: BF16 runs at the rate of FP16."""
    return Precision.FP16 if dtype == Precision.BF16 else dtype


def peak_of(gpu: GpuSpec, dtype: str) -> float | None:
    """The GPU's 1e12 operations per second in a type; None when it is not known."""
    return gpu.tflops.get(rate_of(dtype))


def product_text(layer: LayerRow) -> str:
    """m, n and k of a layer's matrix product, and how many there are: ``784x512x128``, ``12 * 197x197x64``."""
    if layer.gemm is None:
        return ""
    sizes = "x".join(str(layer.gemm[axis]) for axis in ("m", "n", "k"))
    batch = layer.gemm.get("batch", 1)
    return sizes if batch == 1 else f"{batch} * {sizes}"


def tile_text(layer: LayerRow) -> str:
    """The output tile of a thread block: ``128x64``."""
    return f"{layer.tile['m']}x{layer.tile['n']}" if layer.tile else ""
