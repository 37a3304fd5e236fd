"""The two compilers behind one interface, and what each can build for."""

from __future__ import annotations

import contextlib
import importlib.metadata
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trtopt.errors import MissingDependencyError, TargetError, UsageError
from trtopt.hardware.spec import GpuSpec
from trtopt.support._lazy import is_available
from trtopt.support.files import open_file


@dataclass(frozen=True)
class Backend:
    """A compiler, whose Python module has TensorRT's API.

    Attributes:
        install: The command that installs it.
        runtime: What loads its engines.
        needs_gpu: Whether building needs the target GPU to be present.
        oldest: The oldest version that is supported.
        distributions: The packages that bring the module, by their names on PyPI: the one for the newest CUDA, and
            those for one CUDA each.
    """

    name: str
    module: str
    install: str
    runtime: str
    suffix: str
    needs_gpu: bool
    oldest: tuple[int, int]
    distributions: tuple[str, ...]


TENSORRT_RTX = Backend(
    "tensorrt-rtx",
    "tensorrt_rtx",
    'pip install "trtopt[rtx,cpu]"',
    "TensorRT for RTX",
    ".rtx.engine",
    needs_gpu=False,
    oldest=(1, 4),
    distributions=("tensorrt-rtx", "tensorrt-rtx-cu12", "tensorrt-rtx-cu13"),
)
TENSORRT = Backend(
    "tensorrt",
    "tensorrt",
    'pip install "trtopt[gpu]"',
    "TensorRT, trtexec, Triton Inference Server",
    ".engine",
    needs_gpu=True,
    oldest=(10, 3),
    distributions=("tensorrt", "tensorrt-cu12", "tensorrt-cu13"),
)
BACKENDS = {backend.name: backend for backend in (TENSORRT_RTX, TENSORRT)}

RTX_TARGETS = {"7.5": 1, "8.0": 2, "8.6": 4, "8.9": 8, "12.0": 16, "12.1": 32}
"""Compute capabilities TensorRT for RTX 1.7 builds for, and their bits in the header of an engine."""

_MAGIC = b"vtrt"
_TENSORRT_MAGIC = b"ftrt"
_HEADER_BYTES = 64


def choose_backend(requested: str, gpu: GpuSpec | None, present: GpuSpec | None) -> Backend:
    """The compiler to build with.

    ``auto`` takes TensorRT where it is installed, a GPU is present and it is the target's kind; TensorRT for RTX
    otherwise.

    Raises:
        UsageError: There is no such backend.
        MissingDependencyError: Its package is not installed.
        TargetError: It cannot build for ``gpu`` here.
    """
    if requested == "auto":
        fits = gpu is not None and present is not None and gpu.compute_capability == present.compute_capability
        backend = TENSORRT if fits and is_available(TENSORRT.module) else TENSORRT_RTX
    elif requested in BACKENDS:
        backend = BACKENDS[requested]
    else:
        raise UsageError(
            f"There is no backend {requested!r}", where="--backend", remedy="choose auto, tensorrt or tensorrt-rtx"
        )
    check_target(backend, gpu, present)
    if not is_available(backend.module):
        raise MissingDependencyError(
            f"The package of the backend {backend.name} is not installed",
            where=f"import {backend.module}",
            remedy=backend.install,
        )
    version = installed_version(backend)
    if version:
        check_version(backend, version)
    return backend


def backend_of_rules(requested: str, gpu: GpuSpec | None) -> Backend:
    """The compiler whose rules apply where none builds: the one asked for.

    ``auto`` stands for TensorRT for RTX where that can build for the GPU, for TensorRT otherwise.
    """
    if requested == "auto":
        return TENSORRT_RTX if gpu is None or gpu.compute_capability in RTX_TARGETS else TENSORRT
    return BACKENDS[requested]


def installed_version(backend: Backend) -> str:
    """The version of the backend's package; empty where it is not known."""
    for name in backend.distributions:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return ""


def check_version(backend: Backend, version: str) -> None:
    """Raise MissingDependencyError where a version of the backend's package is older than trtopt knows how to drive."""
    if tuple(int(part) for part in version.split(".")[:2]) < backend.oldest:
        needed = ".".join(str(part) for part in backend.oldest)
        raise MissingDependencyError(
            f"{backend.name} {version} is too old: {needed} or later is needed",
            where=f"import {backend.module}",
            remedy=backend.install,
        )


def check_target(backend: Backend, gpu: GpuSpec | None, present: GpuSpec | None) -> None:
    """Raise TargetError where ``backend`` cannot build for ``gpu`` on this machine."""
    if backend.needs_gpu:
        _check_present(gpu, present)
    elif gpu is not None and gpu.compute_capability not in RTX_TARGETS:
        raise TargetError(
            f"TensorRT for RTX cannot build for {gpu.name} (compute capability {gpu.compute_capability}); "
            f"it targets {', '.join(RTX_TARGETS)} and portable",
            where="--gpu",
            remedy="write the model with `trtopt optimize` here and run `trtopt build --backend tensorrt` on a machine "
            "with that GPU, or name another GPU with --gpu",
        )


def _check_present(gpu: GpuSpec | None, present: GpuSpec | None) -> None:
    if present is None:
        raise TargetError(
            "TensorRT builds on the target GPU, and this machine has none",
            where="--backend tensorrt",
            remedy="use --backend tensorrt-rtx here, or write the model with `trtopt optimize --backend tensorrt` and "
            "build that on the GPU",
        )
    if gpu is None:
        raise TargetError(
            "TensorRT has no portable target; it builds for the GPU that is present",
            where="--gpu portable",
            remedy="use --backend tensorrt-rtx, or leave --gpu out and set --builder hardware_compatibility=ampere+",
        )
    if gpu.compute_capability != present.compute_capability:
        raise TargetError(
            f"TensorRT builds for the GPU that is present ({present.name}), not for {gpu.name}",
            where="--gpu",
            remedy="run `trtopt build` on a machine with that GPU; `trtopt optimize` writes the model to take there",
        )


Specialization = Literal["eager", "lazy", "none"]
SPECIALIZATIONS: tuple[Specialization, ...] = ("eager", "lazy", "none")


@dataclass(frozen=True)
class RuntimeOptions:
    """How an engine is loaded.

    Attributes:
        host_code: Whether the engine may bring code for the host: a version-compatible one brings its own runtime.
        plugins: Libraries of its plugins, which the user names. What they hold runs in this process.
        weight_budget: Bytes of its streamable weights that stay on the GPU, or ``auto`` for what TensorRT takes; None
            for all. For engines of ``--builder weight_streaming=true``.
        specialization: When TensorRT for RTX compiles kernels for the very shapes of a dynamic engine: before their
            first run (``eager``), beside runs of a general kernel (``lazy``), or never (``none``).
        kernels: The cache folder that keeps what TensorRT for RTX compiles; None to keep nothing.
    """

    host_code: bool = False
    plugins: tuple[Path, ...] = ()
    weight_budget: int | Literal["auto"] | None = None
    specialization: Specialization = "eager"
    kernels: Path | None = None


AS_BUILT = RuntimeOptions()
"""Nothing allowed, nothing added."""


@dataclass(frozen=True)
class EngineHeader:
    """What the header of an engine says.

    Attributes:
        version: The builder's version, for example ``1.7.1.116``; empty where it is not known.
        compute_capabilities: Those the engine may run on, ascending; empty where the header does not tell.
    """

    version: str
    compute_capabilities: tuple[str, ...]
    bytes: int


def read_header(data: bytes) -> EngineHeader:
    """Check the header of a TensorRT for RTX engine, which needs no GPU and no runtime.

    Layout as observed in engines of version 1.7 (serialization version 2), little-endian: 0-3 ``vtrt``; 8 the
    serialization version; 16-23 the total size; 24-27 the version; 28-31 ``vtrt``; 32 a bit mask of targets.

    Raises:
        UsageError: It is not such an engine, or not all of it.
    """
    if len(data) < _HEADER_BYTES or data[:4] != _MAGIC or data[28:32] != _MAGIC:
        raise UsageError(
            "Not an engine of TensorRT for RTX",
            where=f"the first {_HEADER_BYTES} bytes",
            remedy="give an .rtx.engine file",
        )
    (size,) = struct.unpack_from("<Q", data, 16)
    if size != len(data):
        raise UsageError(
            f"The engine should have {size} bytes and has {len(data)}",
            where="the engine's header",
            remedy="it was cut off or changed; build or copy it again",
        )
    targets = tuple(capability for capability, bit in RTX_TARGETS.items() if data[32] & bit)
    return EngineHeader(_version(data), targets, size)


def identify(data: bytes) -> tuple[Backend, EngineHeader]:
    """Which backend built an engine, and what its header says.

    The header of a TensorRT engine tells its version only (layout: ``printPlanVersion`` of trtexec), not its GPU.

    Raises:
        UsageError: It is no engine, or not all of it.
    """
    if len(data) >= _HEADER_BYTES and data[:4] == _TENSORRT_MAGIC:
        known = not any(data[4:8])  # the only serialization version whose layout is known
        return TENSORRT, EngineHeader(_version(data) if known else "", (), len(data))
    if data[:4] != _MAGIC:
        raise UsageError(
            "Neither an engine of TensorRT nor of TensorRT for RTX",
            where=f"its first bytes: {data[:4].hex(' ') or 'none'}",
            remedy="give an .engine or .rtx.engine file",
        )
    return TENSORRT_RTX, read_header(data)


def is_engine(path: Path) -> bool:
    """Whether a file begins as engines do, of either backend; raises UsageError where it cannot be read."""
    with open_file(path, "The file") as file:
        return file.read(4) in (_TENSORRT_MAGIC, _MAGIC)


def describe(backend: Backend, header: EngineHeader) -> str:
    """What built an engine and for what: ``tensorrt-rtx 1.7.1.116 for compute capability 8.9``."""
    targets = ", ".join(header.compute_capabilities)
    return f"{backend.name} {header.version}".rstrip() + (f" for compute capability {targets}" if targets else "")


def _version(data: bytes) -> str:
    return ".".join(str(part) for part in data[24:28])
