"""For whom a graph is judged."""

from __future__ import annotations

from trtopt.engine.backend import RTX_TARGETS
from trtopt.hardware.spec import GpuSpec, gpus_of

_BLACKWELL = (10, 0)
_BLACKWELL_TARGET = "12.0"
_OLDEST_PROXY = "8.0"


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
