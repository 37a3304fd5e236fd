"""Clocks, temperature and power of a GPU at one moment, asked of its driver."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass

_FIELDS = "pci.bus_id,clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,temperature.gpu,power.draw,power.limit"
_REASONS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")
"""The name since driver 535, and the one before; a driver refuses the whole query for a field that it does not know."""
_UNKNOWN_FIELD = "is not a valid field"
_TIMEOUT_S = 20
_POLL_S = 0.02

_REASON_BITS = {
    0x001: "idle",
    0x002: "application clocks",
    0x004: "software power cap",
    0x008: "hardware slowdown",
    0x010: "sync boost",
    0x020: "software thermal slowdown",
    0x040: "hardware thermal slowdown",
    0x080: "hardware power brake",
    0x100: "display clocks",
}
"""``nvmlClocksEventReasons`` of NVML's header."""


@dataclass(frozen=True)
class Clocks:
    """What the driver said; None for what the GPU does not tell.

    Attributes:
        sm_clock_mhz: Clock of the SMs.
        memory_clock_mhz: Clock of the memory.
        max_sm_clock_mhz: Highest clock of the SMs.
        max_memory_clock_mhz: Highest clock of the memory.
        temperature_c: Degrees Celsius.
        power_w: Power drawn.
        power_limit_w: Its limit.
        clocks_held_by: What holds the clocks down; empty for nothing.
        clocks_unknown: Why nothing is known; else empty.
    """

    sm_clock_mhz: float | None = None
    memory_clock_mhz: float | None = None
    max_sm_clock_mhz: float | None = None
    max_memory_clock_mhz: float | None = None
    temperature_c: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    clocks_held_by: tuple[str, ...] | None = None
    clocks_unknown: str = ""


def read_clocks(bus_id: str, meanwhile: Callable[[], object] = lambda: time.sleep(_POLL_S)) -> Clocks:
    """Ask ``nvidia-smi``, which takes a part of a second.

    Args:
        bus_id: The GPU's PCI address, as ``cudaDeviceGetPCIBusId`` gives it.
        meanwhile: Called until the answer is there. To see the clocks under load, keep the GPU busy here.
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        return Clocks(clocks_unknown="nvidia-smi is not on the path")
    found = Clocks()
    for reasons in _REASONS:
        command = [program, f"--query-gpu={_FIELDS},{reasons}", "--format=csv,noheader,nounits"]
        try:
            answer = _answer(command, meanwhile)
        except (OSError, subprocess.TimeoutExpired) as error:
            return Clocks(clocks_unknown=f"nvidia-smi failed: {error}")
        found = parse_clocks(answer, bus_id)
        if _UNKNOWN_FIELD not in answer:
            break
    return found


def _answer(command: list[str], meanwhile: Callable[[], object]) -> str:
    end = time.monotonic() + _TIMEOUT_S
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        while process.poll() is None:
            if time.monotonic() > end:
                process.kill()
                raise subprocess.TimeoutExpired(command, _TIMEOUT_S)
            meanwhile()
        return process.communicate()[0]


def parse_clocks(answer: str, bus_id: str) -> Clocks:
    """Read the line of the GPU at ``bus_id`` (any case, with four or eight digits of the domain)."""
    for line in answer.splitlines():
        bus, *fields = (field.strip() for field in line.split(","))
        if len(fields) == len(_FIELDS.split(",")) and same_address(bus, bus_id):
            sm, memory, max_sm, max_memory, temperature, power, limit = map(_number, fields[:-1])
            reasons = _reasons(fields[-1])
            return Clocks(sm, memory, max_sm, max_memory, temperature, power, limit, reasons)
    return Clocks(clocks_unknown=f"nvidia-smi says nothing of the GPU at {bus_id}: {answer.strip()[:200]}")


def same_address(one: str, two: str) -> bool:
    """Whether two PCI addresses are one: any case, with four or eight digits of the domain."""
    return _address(one) == _address(two)


def _address(bus_id: str) -> str:
    domain, _, rest = bus_id.partition(":")
    return f"{domain.lstrip('0')}:{rest}".lower()


def _number(field: str) -> float | None:
    try:
        return float(field)
    except ValueError:  # [N/A], [Not Supported], [Unknown Error]
        return None


def _reasons(field: str) -> tuple[str, ...] | None:
    try:
        mask = int(field, 16)
    except ValueError:
        return None
    known = tuple(name for bit, name in _REASON_BITS.items() if mask & bit)
    rest = mask & ~sum(_REASON_BITS)
    return (*known, f"0x{rest:x}") if rest else known
