"""For whom a model is prepared and judged."""

from __future__ import annotations

from dataclasses import dataclass, replace

from trtopt.engine.backend import RTX_TARGETS, Backend
from trtopt.engine.request import ShapeProfile
from trtopt.hardware.spec import PORTABLE, GpuSpec, gpus_of, supports
from trtopt.support.precision import Precision

_BLACKWELL = (10, 0)
_BLACKWELL_TARGET = "12.0"
_OLDEST_PROXY = "8.0"


@dataclass(frozen=True)
class BuildTarget:
    """For whom a model is prepared.

    Attributes:
        gpu: The GPU; None for every one from Ampere on.
        profiles: The shapes an engine takes; none for a model whose inputs are all static.
    """

    backend: Backend
    gpu: GpuSpec | None
    profiles: tuple[ShapeProfile, ...] = ()

    def with_profiles(self, profiles: tuple[ShapeProfile, ...]) -> BuildTarget:
        """The same for other shapes."""
        return replace(self, profiles=profiles)

    @property
    def gpu_name(self) -> str:
        """How reports name the GPU."""
        return PORTABLE if self.gpu is None else self.gpu.name

    @property
    def name(self) -> str:
        """The backend and the GPU, in words."""
        return f"{self.backend.name} {self.gpu_name}"

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The input shapes of the first profile's optimum: those it is judged at."""
        return {name: best for name, (_, best, _) in self.profiles[0].shapes.items()} if self.profiles else {}

    @property
    def largest(self) -> dict[str, tuple[int, ...]]:
        """The largest input shapes."""
        return {name: top for profile in self.profiles for name, (_, _, top) in profile.shapes.items()}

    @property
    def takes_bfloat(self) -> bool:
        """Whether it computes in BF16."""
        return self.gpu is None or supports(self.gpu, Precision.BF16)

    def quantized_types(self, precision: Precision) -> tuple[Precision, ...]:
        """The 8-bit types that a precision stands for and it computes in."""
        fp8 = self.gpu is not None and supports(self.gpu, Precision.FP8)
        return tuple(dtype for dtype in precision.quantized_types if dtype != Precision.FP8 or fp8)


def nearest_target(gpu: GpuSpec) -> GpuSpec:
    """The GPU to lower for: ``gpu`` itself where TensorRT for RTX can target it.

    Else one of the highest target from 8.0 on that is not above its compute capability: 8.6 for 8.7, 8.9 for 9.0. Two
    exceptions: Blackwell 10.x and 11.x become 12.0, the same generation, where the compiler knows their types (FP4);
    and what is older than 8.0 becomes 8.0, since 7.5 is lowered unlike all others (no FP32 products, depthwise
    convolutions padded to eight channels). For ResNet-50, MobileNetV2, ViT-B, BERT-base and ConvNeXt-T in FP16 or INT8
    the targets from 8.0 to 12.0 give the same kernels (TensorRT for RTX 1.7.1).
    """
    if gpu.compute_capability in RTX_TARGETS:
        return gpu
    wanted = _version(gpu.compute_capability)
    if wanted >= _BLACKWELL:
        return gpus_of(_BLACKWELL_TARGET)[0]
    below = [target for target in RTX_TARGETS if _version(_OLDEST_PROXY) <= _version(target) <= wanted]
    return gpus_of(max(below, key=_version, default=_OLDEST_PROXY))[0]


def _version(capability: str) -> tuple[int, ...]:
    return tuple(int(part) for part in capability.split("."))
