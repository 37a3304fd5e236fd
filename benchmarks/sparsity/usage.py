"""What a call costs: seconds and memory. Standard library alone, so that every tool's process can use it."""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable
from pathlib import Path


def measured(work: Callable[[], None]) -> dict[str, float]:
    """Run something once the process has imported and loaded all it needs, and say what it took.

    Returns:
        ``seconds`` of wall time, ``cpu_seconds`` of all threads, ``peak_mib`` of the process from its start to the end
        of the call, and ``above_mib``: by how much the call's peak is above what was resident when it began.
    """
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # what loading has freed would hide what the call needs
    loading = _peak_mib()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from what is resident: proc(5)
    resident = _peak_mib()
    started = time.perf_counter(), time.process_time()
    work()
    seconds, cpu = time.perf_counter() - started[0], time.process_time() - started[1]
    peak = _peak_mib()
    return {
        "seconds": round(seconds, 2),
        "cpu_seconds": round(cpu, 2),
        "peak_mib": round(max(loading, peak)),
        "above_mib": round(peak - resident),
    }


def _peak_mib() -> float:
    """``getrusage`` would count what the parent held when it started this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024
