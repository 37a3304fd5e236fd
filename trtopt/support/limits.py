"""The memory a process may take: what this machine has, so that a small file cannot ask for all of it and more.

The limit is RLIMIT_DATA, which counts the private writable memory of a process (since Linux 4.7): an allocation beyond
it fails at once, where ONNX Runtime, NumPy and TensorRT turn that into an error that names the operator. Considered:
RLIMIT_AS counts memory-mapped weights and address space that CUDA only reserves; watching the resident memory is too
late where a few hundred milliseconds fill the rest, and its only answer is to kill. What RLIMIT_DATA does not see is
the sum over several processes; there the kernel ends the largest, and the command's watcher says so.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

_SHARE = 0.9
"""Of the available memory; the rest is left to what else runs."""

_GROUPS = Path("/sys/fs/cgroup")


def limit_memory() -> None:
    """Limit the memory of this process, and of each it starts, to most of what is available now; elsewhere than on
    Linux, do nothing."""
    available = available_bytes() if sys.platform == "linux" else None
    if available is None:
        return
    resource = importlib.import_module("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limits = [int(_SHARE * available), *(limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY)]
    resource.setrlimit(resource.RLIMIT_DATA, (min(limits), hard))


def available_bytes(meminfo: Path = Path("/proc/meminfo"), groups: Path | None = None) -> int | None:
    """Memory and swap that can be had without taking them from other processes; None where nothing tells.

    Args:
        meminfo: The machine's, as proc(5) describes it.
        groups: The folder of this process's control group (version 2), whose limits and those of its parents count.
    """
    try:
        lines = dict(line.split(":", 1) for line in meminfo.read_text(encoding="ascii").splitlines())
        machine = sum(int(lines[name].split()[0]) << 10 for name in ("MemAvailable", "SwapFree"))
    except (OSError, ValueError, KeyError):
        return None
    return min([machine, *_left_in_groups(groups or _own_group())])


def _own_group() -> Path:
    """The folder of this process's control group; the root's where there is none."""
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return _GROUPS
    return next((_GROUPS / line[4:] for line in lines if line.startswith("0::/")), _GROUPS)


def _left_in_groups(folder: Path) -> Iterator[int]:
    """What each limit leaves; file pages that are not in use count as free, for the kernel drops them first."""
    for group in (folder, *folder.parents):
        try:
            limit, current = (
                int((group / f"memory.{name}").read_text(encoding="ascii")) for name in ("max", "current")
            )
            stat = (group / "memory.stat").read_text(encoding="ascii").split()
            yield max(limit - current + int(stat[stat.index("inactive_file") + 1]), 0)
        except (OSError, ValueError):  # no limit reads "max"
            continue
