"""What is known of a CPU: rates that a program reached on it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class CpuSpec:
    """What a number of a CPU's cores reach together, as measured; one multiply-add = 2 flop.

    Attributes:
        name: The processor's name, as the system says.
        threads: Threads that computed, one per core.
        tflops: 1e12 operations per second of a large matrix product by the type of its operands; ``fp32`` always.
        bandwidth_gbs: Bandwidth of the DRAM in GB/s (1e9 bytes), reading and writing alike.
        cache_bandwidth_gbs: The same of what stays in the caches.
        cache_bytes: The most bytes read and written that reach nearly the rate of the caches.
        latency_us: What the smallest node takes.
        profiled_us: What profiling adds to the time of each node.
        source: How it was measured.
    """

    name: str
    threads: int
    tflops: Mapping[str, float]
    bandwidth_gbs: float
    cache_bandwidth_gbs: float
    cache_bytes: int
    latency_us: float
    profiled_us: float
    source: str


def available_threads() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
