"""The GPU of this machine, asked of its driver.

``nvidia-smi`` lists all GPUs in the order of their PCI addresses, whatever ``CUDA_VISIBLE_DEVICES`` and
``CUDA_DEVICE_ORDER`` say. Engines run on CUDA's device 0, so that where these may differ CUDA is asked, in a process of
its own: CUDA must not be initialized in one that forks.
"""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from trtopt.hardware.clocks import same_address
from trtopt.hardware.spec import GpuSpec, all_gpus, gpus_of

_QUERY = "name,compute_cap,memory.total,driver_version,pci.bus_id"
_TIMEOUT_S = 20
_OLDEST = (7, 0)
"""The compute capability that TensorRT 10 begins with."""

_ASK_CUDA = """
import ctypes, sys
cuda = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
device, name = ctypes.c_int(), ctypes.create_string_buffer(32)
for step, call in (
    ("cuInit", lambda: cuda.cuInit(0)),
    ("cuDeviceGet", lambda: cuda.cuDeviceGet(ctypes.byref(device), 0)),
    ("cuDeviceGetPCIBusId", lambda: cuda.cuDeviceGetPCIBusId(name, 32, device)),
):
    status = call()
    if status:
        sys.exit(f"{step} gives error {status}")
print(name.value.decode())
"""
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
        gpu: The numbers of CUDA's first GPU; None when there is no GPU that TensorRT runs on.
        name: Its name as the driver says, empty without one.
        driver: The driver's version, empty without one.
        reason: Why ``gpu`` is None, or where its numbers come from when its model is not in the table, which only
            predictions depend on; else empty.
    """

    gpu: GpuSpec | None
    name: str = ""
    driver: str = ""
    reason: str = ""


@functools.cache
def probe() -> Probe:
    """Ask the driver for CUDA's first GPU; the answer is kept for the life of the process."""
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
    return read_answer(answer.stdout, _first_of_cuda)


def _first_of_cuda() -> tuple[str, str]:
    """The PCI address of CUDA's device 0, or empty, and why."""
    try:
        answer = subprocess.run(
            [sys.executable, "-c", _ASK_CUDA], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", str(error)
    said = (answer.stdout if answer.returncode == 0 else answer.stderr).strip().splitlines()
    last = said[-1] if said else "it gave no answer"
    return (last, "") if answer.returncode == 0 else ("", last)


def read_answer(text: str, first_of_cuda: Callable[[], tuple[str, str]]) -> Probe:
    """Read the line of CUDA's first GPU in the driver's answer.

    Args:
        text: A line for each GPU: name, compute capability, memory in MiB, driver version, PCI address.
        first_of_cuda: Asks CUDA for the PCI address of its first GPU, or gives an empty one and why; called where
            there are several.
    """
    rows = [[field.strip() for field in line.split(",")] for line in text.strip().splitlines()]
    rows = [fields for fields in rows if len(fields) == len(_QUERY.split(","))]
    if not rows:
        return Probe(None, reason="nvidia-smi lists no GPU")
    if len(rows) > 1:
        address, why = first_of_cuda()
        rows = [fields for fields in rows if address and same_address(fields[-1], address)]
        if not rows:
            unknown = f"its first is at {address}, which nvidia-smi does not list" if address else why
            return Probe(None, reason=f"there are several GPUs, and CUDA does not say which is its first: {unknown}")
    return _identified(*rows[0][:-1])


def _identified(name: str, capability: str, memory: str, driver: str) -> Probe:
    """The GPU of the table that a driver's answer means; a stand-in of the nearest kind before it where none does."""
    memory_gb = float(memory) * 2**20 / 1e9 if memory.replace(".", "", 1).isdigit() else None
    same_kind = gpus_of(capability)
    if not same_kind:
        return _stand_in(name, capability, driver, memory_gb)
    same_model = [gpu for gpu in same_kind if _is_model(gpu, name)]
    if same_model:
        return Probe(_closest(same_model, name, memory_gb), name, driver)
    like = _closest(same_kind, name, memory_gb)
    reason = f"{name} is not in the table of GPUs; the numbers are those of {like.name}, of the same kind"
    return Probe(replace(like, name=name, source=reason), name, driver, reason)


def _stand_in(name: str, capability: str, driver: str, memory_gb: float | None) -> Probe:
    """A GPU of a kind that is not in the table: TensorRT builds for it, and predictions are those of an older one."""
    known = {_version(gpu.compute_capability) for gpu in all_gpus()}
    before = [found for found in known if _OLDEST <= found < _version(capability)]
    if not before:
        return Probe(None, name, driver, f"{name} has compute capability {capability}, which TensorRT does not run on")
    like = _closest(gpus_of("{}.{}".format(*max(before))), name, memory_gb)
    reason = f"{name} (compute capability {capability}) is not in the table of GPUs: predictions are for {like.name}"
    figures = replace(like, name=name, compute_capability=capability, source=reason)
    return Probe(replace(figures, memory_gb=memory_gb or like.memory_gb), name, driver, reason)


def _version(capability: str) -> tuple[int, ...]:
    return tuple(int(part) for part in capability.split(".") if part.isdigit())


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
