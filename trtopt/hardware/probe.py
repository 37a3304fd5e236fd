"""The GPU of this machine, asked of its driver."""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace

from trtopt.hardware.spec import GpuSpec, gpus_of

_QUERY = "name,compute_cap,memory.total,driver_version"
_TIMEOUT_S = 20
_VARIANT = re.compile(
    r"nvidia|geforce|tesla|quadro|jetson|agx|gpu|nvgpu|per|pcie|sxm\d?|nvl|hbm\d?e?|\d+gb|t5000|"
    r"blackwell|workstation|server|edition|generation|ac"
)
"""Words of a name that say which variant of a model it is, not which model."""

_ABBREVIATIONS = {"bw": "blackwell", "ws": "workstation"}


@dataclass(frozen=True)
class Probe:
    """What was found.

    Attributes:
        gpu: The first GPU's numbers; None when there is no GPU or nothing is known of its kind.
        name: Its name as the driver says, empty without one.
        driver: The driver's version, empty without one.
        reason: Why ``gpu`` is None, or where its numbers come from when its model is not in the table; else empty.
    """

    gpu: GpuSpec | None
    name: str = ""
    driver: str = ""
    reason: str = ""


@functools.cache
def probe() -> Probe:
    """Ask ``nvidia-smi`` for the first GPU; the answer is kept for the life of the process."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return Probe(None, reason="nvidia-smi is not on the path: no NVIDIA driver")
    try:
        answer = subprocess.run(
            [program, f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Probe(None, reason=f"nvidia-smi failed: {error}")
    if answer.returncode != 0:
        return Probe(None, reason=f"nvidia-smi failed: {(answer.stdout or answer.stderr).strip()[:200]}")
    return read_answer(answer.stdout)


def read_answer(text: str) -> Probe:
    """Read the first line of the driver's answer: name, compute capability, memory in MiB, driver version."""
    lines = text.strip().splitlines()
    fields = [field.strip() for field in lines[0].split(",")] if lines else []
    if len(fields) != 4:
        return Probe(None, reason="nvidia-smi lists no GPU")
    name, capability, memory, driver = fields
    memory_gb = float(memory) * 2**20 / 1e9 if memory.replace(".", "", 1).isdigit() else None
    same_kind = gpus_of(capability)
    if not same_kind:
        return Probe(None, name, driver, f"{name} (compute capability {capability}) is not in the table of GPUs")
    same_model = [gpu for gpu in same_kind if _is_model(gpu, name)]
    if same_model:
        return Probe(_closest(same_model, name, memory_gb), name, driver)
    like = _closest(same_kind, name, memory_gb)
    reason = f"{name} is not in the table of GPUs; the numbers are those of {like.name}, of the same kind"
    return Probe(replace(like, name=name, source=reason), name, driver, reason)


def present_gpu() -> GpuSpec | None:
    """The GPU of this machine, or None (:func:`probe` gives the reason)."""
    return probe().gpu


def _words(name: str) -> frozenset[str]:
    words = re.findall(r"[a-z0-9]+", re.sub(r"(\d)(ti|super)\b", r"\1 \2", name.lower()))
    return frozenset(_ABBREVIATIONS.get(word, word) for word in words)


def _is_model(gpu: GpuSpec, name: str) -> bool:
    """Whether the driver's ``name`` is the same model as ``gpu``: an RTX 4090 D or A10G is another chip."""
    return {word for word in _words(gpu.name) ^ _words(name) if not _VARIANT.fullmatch(word)} == set()


def _closest(gpus: Sequence[GpuSpec], name: str, memory_gb: float | None) -> GpuSpec:
    """The variant with the nearest memory size (within a tenth), then the most words in common."""

    def distance(gpu: GpuSpec) -> tuple[float, int]:
        off = abs(gpu.memory_gb - memory_gb) if memory_gb is not None else 0.0
        return round(off / gpu.memory_gb, 1), -len(_words(gpu.name) & _words(name))

    return min(gpus, key=distance)
