"""The table of GPUs and the names users call them by."""

from __future__ import annotations

import difflib
import functools
import importlib.resources
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trtopt.errors import UsageError
from trtopt.support.precision import MATH_TYPES, PRECISIONS, Precision

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DEFAULT_GPU = "L4"
"""The target when no GPU is present and none was named."""

PORTABLE = "portable"
"""The target name that stands for every GPU from Ampere on, not for one chip."""

SHORT_NAMES = {
    "V100": "V100-SXM2-16GB",
    "A100": "A100-SXM4-80GB",
    "H100": "H100-SXM5-80GB",
    "H200": "H200-SXM-141GB",
    "H20": "H20-96GB",
    "GH200": "GH200-96GB",
    "RTX PRO 6000": "RTX-PRO-6000-BW-WS",
    "RTX PRO 6000 Max-Q": "RTX-PRO-6000-BW-Max-Q",
    "RTX A2000": "RTX-A2000-6GB",
    "RTX 3060": "RTX-3060-12GB",
    "RTX 3080": "RTX-3080-10GB",
    "RTX 4060 Ti": "RTX-4060-Ti-8GB",
    "RTX 5060 Ti": "RTX-5060-Ti-8GB",
    "DGX Spark": "GB10",
    "Orin": "Jetson-AGX-Orin-64GB",
    "AGX Orin": "Jetson-AGX-Orin-64GB",
    "Orin NX": "Jetson-Orin-NX-16GB",
    "Orin Nano": "Jetson-Orin-Nano-8GB",
    "Orin Nano Super": "Jetson-Orin-Nano-8GB-Super",
    "Thor": "Jetson-AGX-Thor-T5000",
}
"""Short names that several GPUs could have, and the one that is meant: of GeForce and RTX cards that differ in memory
the one with less, on which a model that fits, fits everywhere."""

BEST_KNOWN = {
    "7.0": "V100-SXM2-16GB",
    "7.5": "T4",
    "8.0": "A100-SXM4-80GB",
    "8.6": "A10",
    "8.7": "Jetson-AGX-Orin-64GB",
    "8.9": DEFAULT_GPU,
    "9.0": "H100-SXM5-80GB",
    "10.0": "B200",
    "10.3": "B300",
    "11.0": "Jetson-AGX-Thor-T5000",
    "12.0": "RTX-5090",
    "12.1": "GB10",
}
"""The GPU that a compute capability stands for as a name (``8.9``, ``sm_89``): the one of it most rented or sold for
inference, as clouds, MLPerf Inference and published TensorRT figures have it; of 8.6 the data-centre card, since A10
is in every large cloud, and of 12.0 the GeForce card, since most of them are."""

_NEAREST = 5
_CAPABILITY = re.compile(r"(?:sm)?(\d+)\.(\d)|sm(\d+)(\d)")
"""A compute capability as users write it, without case and underscores."""


UNITS = {
    Precision.FP32: "fp32",
    Precision.TF32: "tf32",
    Precision.FP16: "fp16_acc32",
    Precision.FP8: "fp8_acc32",
    Precision.INT8: "int8",
    Precision.FP4: "fp4",
}
"""The key of ``fma_per_clock_per_sm`` from which the rate of each key of ``tflops`` follows."""

_BF16_SINCE = 8
"""The first major compute capability whose Tensor Cores take BF16 (Ampere), at the rate of FP16."""


@dataclass(frozen=True)
class GpuCalibration:
    """How a GPU differs from what the performance model knows of it, from layers measured on it (``calibrate-gpu``).

    Attributes:
        clock: Factor on the clock that it sustains: on all arithmetic and on the L2 cache.
        launch: Factor on what every kernel costs before it does anything, and on what timing it costs.
        bandwidth: Factor on the share of the DRAM bandwidth that kernels reach, and on that of the L2 cache that stays
            resident.
        attention: Factor on the rate of the products of fused attention.
        layers: Layers that they were fitted to.
        error_before: Mean absolute relative error of a layer without them.
        error_after: The same with factors fitted to other layers.
        date: Of the fit, as ``2026-11-22``.
        driver: The driver's version; empty where it is not known.
    """

    clock: float = 1.0
    launch: float = 1.0
    bandwidth: float = 1.0
    attention: float = 1.0
    layers: int = 0
    error_before: float = 0.0
    error_after: float = 0.0
    date: str = ""
    driver: str = ""


FACTORS = ("clock", "launch", "bandwidth", "attention")
"""The factors of a :class:`GpuCalibration`."""

LARGEST_FACTOR = 2.5
"""A factor lies between its inverse and this: what is further off is another GPU."""


@dataclass(frozen=True)
class GpuSpec:
    """What is known of a GPU. Rates are dense; one multiply-add = 2 flop.

    Attributes:
        name: Its name in the table, for example ``RTX-4090``.
        compute_capability: ``"8.9"``.
        sm: Streaming multiprocessors.
        clock_cuda_mhz: Boost clock of the CUDA cores.
        clock_tensor_mhz: The clock at which the Tensor Core rates are reached.
        memory_gb: Memory in GB (1e9 bytes).
        bandwidth_gbs: Memory bandwidth in GB/s (1e9 bytes).
        l2_mib: L2 cache in MiB.
        tdp_w: Power limit in watts.
        fma_per_clock_per_sm: Multiply-adds per clock per SM by ``fp32``, ``tf32``, ``fp16_acc32``, ``fp16_acc16``,
            ``fp8_acc32``, ``int8``, ``fp4``; without an entry where the GPU has no unit or it is not known.
        tflops: 1e12 operations per second by ``fp32``, ``tf32``, ``fp16``, ``fp8``, ``int8``, ``fp4``; likewise.
        sparse_2_4: Whether 2:4 structured sparsity doubles the Tensor Core rates.
        source: Where the numbers come from.
        calibration: What measured layers say of it; None where none were given.
    """

    name: str
    compute_capability: str
    sm: int
    clock_cuda_mhz: float
    clock_tensor_mhz: float
    memory_gb: float
    bandwidth_gbs: float
    l2_mib: float
    tdp_w: float
    fma_per_clock_per_sm: dict[str, float] = field(hash=False)
    tflops: dict[str, float] = field(hash=False)
    sparse_2_4: bool
    source: str
    calibration: GpuCalibration | None = None


def gpu_of(fields: Mapping[str, Any], where: str) -> GpuSpec:
    """A GPU from its fields, as a report holds them.

    Args:
        fields: By the names of :class:`GpuSpec`.
        where: The report.

    Raises:
        UsageError: One is missing, or of another type; or a figure is not above zero; or FP32 has no rate.
    """
    import msgspec

    remedy = "write it again with --report"

    try:
        gpu = msgspec.convert(fields, GpuSpec)
    except msgspec.ValidationError as error:
        raise UsageError(f"The report has a wrong GPU: {error}", where=where, remedy=remedy) from error
    figures: tuple[float, ...]
    figures = (gpu.sm, gpu.clock_cuda_mhz, gpu.clock_tensor_mhz, gpu.memory_gb, gpu.bandwidth_gbs, gpu.l2_mib)
    if gpu.calibration is not None:
        figures += tuple(getattr(gpu.calibration, name) for name in FACTORS)
    if not all(figure > 0 for figure in (*figures, *gpu.tflops.values())):
        raise UsageError("The report has a wrong GPU: a figure is not above zero", where=where, remedy=remedy)
    if Precision.FP32 not in gpu.tflops:
        raise UsageError("The report has a wrong GPU: no rate of FP32", where=where, remedy=remedy)
    return gpu


@functools.cache
def all_gpus() -> tuple[GpuSpec, ...]:
    """Every GPU of the table, in its order: by generation."""
    text = importlib.resources.files("trtopt.hardware").joinpath("gpus.toml").read_text(encoding="utf-8")
    entries: list[dict[str, Any]] = tomllib.loads(text)["gpu"]
    return tuple(GpuSpec(**entry) for entry in entries)


def find_gpu(name: str, gpus: Sequence[GpuSpec] | None = None) -> GpuSpec:
    """The GPU a user means.

    A name is matched without regard to case, spaces, dashes, underscores and the vendor's words, in this order: the
    whole name; a short name (:data:`SHORT_NAMES`), both also without ``RTX``; a compute capability
    (:data:`BEST_KNOWN`); the beginning of exactly one name; a part of exactly one.

    Args:
        name: What the user wrote.
        gpus: The table to look in; None for trtopt's own.

    Raises:
        UsageError: No GPU of the table, or several, have that name; the message lists the nearest.
    """
    wanted = normalized(name)
    exact = {normalized(gpu.name): gpu for gpu in (all_gpus() if gpus is None else gpus)}
    short = {normalized(alias): exact.get(normalized(target)) for alias, target in SHORT_NAMES.items()}
    whole = {alias: gpu for alias, gpu in short.items() if gpu is not None} | exact
    for key in (wanted, f"rtx{wanted}", normalized(BEST_KNOWN.get(_capability(wanted), ""))):
        if key in whole:
            return whole[key]
    matches = [gpu for key, gpu in exact.items() if wanted and key.startswith(wanted)]
    matches = matches or [gpu for key, gpu in exact.items() if len(wanted) >= 3 and wanted in key]
    if len(matches) == 1:
        return matches[0]
    if matches:
        candidates = ", ".join(gpu.name for gpu in matches)
        raise UsageError(f"Several GPUs are called {name!r}: {candidates}", where="--gpu", remedy="name one of them")
    near = _nearest(wanted, whole)
    raise UsageError(
        f"No GPU is called {name!r}",
        where="--gpu",
        remedy=f"{f'did you mean {near}? ' if near else ''}'trtopt gpu list' names all, 'portable' stands for every "
        "GPU from Ampere on, and a table [gpu.NAME] in the file of --config describes one of your own",
    )


def _capability(wanted: str) -> str:
    """``8.9`` of ``8.9``, ``sm8.9`` and ``sm89``; nothing of any other name."""
    found = _CAPABILITY.fullmatch(wanted)
    return ".".join(part for part in found.groups() if part is not None) if found else ""


def _nearest(wanted: str, gpus: Mapping[str, GpuSpec]) -> str:
    """The names of the GPUs whose names or short names are most like ``wanted``, best first; empty where none is."""
    keys = difflib.get_close_matches(wanted, gpus, n=len(gpus), cutoff=0.5)  # names of two letters: L5 is near L4
    return " or ".join(list(dict.fromkeys(gpus[key].name for key in keys))[:_NEAREST])


def choose_gpu(name: str | None, gpus: Sequence[GpuSpec], present: GpuSpec | None) -> GpuSpec | None:
    """The GPU asked for; without a name, the one present, else :data:`DEFAULT_GPU`. None for ``portable``.

    Args:
        name: What the user wrote.
        gpus: The table; its figures hold for the GPU present too.
        present: The GPU of this machine.

    Raises:
        UsageError: As of :func:`find_gpu`.
    """
    if name is not None:
        return None if normalized(name) == PORTABLE else find_gpu(name, gpus)
    if present is None:
        return find_gpu(DEFAULT_GPU, gpus)
    return next((gpu for gpu in gpus if gpu.name == present.name), present)


def supports(gpu: GpuSpec, dtype: str) -> bool:
    """Whether the GPU has arithmetic units for a type of arithmetic."""
    if dtype == Precision.BF16:
        return Precision.FP16 in gpu.tflops and int(gpu.compute_capability.split(".")[0]) >= _BF16_SINCE
    return dtype in gpu.tflops


def precisions_of(gpu: GpuSpec) -> tuple[Precision, ...]:
    """The precisions a GPU has arithmetic units for."""
    return tuple(name for name in PRECISIONS if supports(gpu, name))


def dense_tflops(gpu: GpuSpec, dtype: str) -> float:
    """The rate of a type of arithmetic in 1e12 operations per second.

    Raises:
        UsageError: The GPU has no units for that type.
    """
    if not supports(gpu, dtype):
        have = ", ".join(name for name in MATH_TYPES if supports(gpu, name))
        raise UsageError(f"{gpu.name} has no units for {dtype}", where="--precision", remedy=f"it has: {have}")
    return gpu.tflops[Precision.FP16 if dtype == Precision.BF16 else dtype]


def clock_mhz(gpu: GpuSpec, dtype: str) -> float:
    """The clock at which the units of a key of ``tflops`` run."""
    return gpu.clock_cuda_mhz if dtype == Precision.FP32 else gpu.clock_tensor_mhz


def ridge_flop_per_byte(gpu: GpuSpec, dtype: str) -> float:
    """The arithmetic intensity at which math and memory take equally long: rate over bandwidth (roofline model,
    Williams et al. 2009); 138.9 for FP16 on a V100.

    Args:
        gpu: The GPU.
        dtype: A type of arithmetic.

    Raises:
        UsageError: The GPU has no units for that type.
    """
    return dense_tflops(gpu, dtype) * 1e12 / (gpu.bandwidth_gbs * 1e9)


def gpus_of(compute_capability: str) -> tuple[GpuSpec, ...]:
    """The GPUs of the table with that compute capability."""
    return tuple(gpu for gpu in all_gpus() if gpu.compute_capability == compute_capability)


def normalized(name: str) -> str:
    """``name`` without case, spaces, dashes, underscores and the vendor's words."""
    lowered = name.lower()
    for word in ("nvidia", "geforce", "tesla", "jetson"):
        lowered = lowered.replace(word, "")
    return "".join(character for character in lowered if character not in " -_\t")
