"""GPUs of the user's own, and other figures for known ones: the tables ``[gpu.NAME]`` of a configuration file."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from trtopt.errors import UsageError
from trtopt.hardware.spec import (
    FACTORS,
    LARGEST_FACTOR,
    PORTABLE,
    SHORT_NAMES,
    UNITS,
    GpuCalibration,
    GpuSpec,
    all_gpus,
    clock_mhz,
    normalized,
)
from trtopt.support.precision import Precision
from trtopt.support.words import did_you_mean

_BASE = "base"
CALIBRATION = "calibration"
"""The field that ``trtopt calibrate-gpu`` writes; it is of one GPU, and none that builds on it has it."""

_RANGES: dict[str, tuple[float, float]] = {
    "sm": (1, 1024),
    "clock_cuda_mhz": (100, 10_000),
    "clock_tensor_mhz": (100, 10_000),
    "memory_gb": (0.5, 10_000),
    "bandwidth_gbs": (1, 100_000),
    "l2_mib": (0.1, 10_000),
    "tdp_w": (1, 10_000),
}
"""Smallest and largest value of the plain numbers: what a figure in another unit (bytes, Hz) does not pass."""

_LARGEST_RATE = {"fma_per_clock_per_sm": 1e6, "tflops": 1e6}
_KEYS = {
    "fma_per_clock_per_sm": (*UNITS.values(), "fp16_acc16"),
    "tflops": tuple(UNITS),
}

_CALIBRATION_RANGES = {
    **dict.fromkeys(FACTORS, (1 / LARGEST_FACTOR, LARGEST_FACTOR)),
    "layers": (1, 10**9),
    "error_before": (0, 10**9),
    "error_after": (0, 10**9),
}
_CALIBRATION_TEXTS = ("date", "driver")

_RATE_TOLERANCE = 0.05
"""How far a rate may be from 2 x multiply-adds x SMs x clock: datasheets round clocks and rates."""


def gpu_table(tables: Mapping[str, Mapping[str, Any]]) -> tuple[GpuSpec, ...]:
    """Every GPU of trtopt's table and of the user's, with the user's figures.

    A table with the name of a known GPU overrides its fields. Any other adds a GPU; ``base`` names the one it takes the
    fields from that it does not give. ``tflops`` and ``fma_per_clock_per_sm`` follow from each other where only one
    is given (rate = 2 x multiply-adds x SMs x clock) and have to agree where both are; a rate of 0 means that the GPU
    has no such unit. ``source`` is required.

    Args:
        tables: Fields of :class:`GpuSpec`, and ``base``, by GPU name; later tables may build on earlier ones.

    Raises:
        UsageError: A field is unknown, missing, of the wrong type or out of range, rates disagree, or two tables have
            one name.
    """
    gpus = {normalized(gpu.name): gpu for gpu in all_gpus()}
    given: dict[str, str] = {}
    for name, table in tables.items():
        reader = _Reader(name, table)
        if normalized(name) in given:
            what = f"{given[normalized(name)]!r} and {name!r} are one name: case, spaces and dashes do not count"
            raise UsageError(what, where=f'[gpu."{name}"]', remedy="rename one of them, or make them one table")
        given[normalized(name)] = name
        base = reader.base(gpus)
        gpus[normalized(name)] = reader.spec(base)
    return tuple(gpus.values())


@dataclass(frozen=True)
class _Reader:
    """Reads one table."""

    name: str
    table: Mapping[str, Any]

    def base(self, gpus: Mapping[str, GpuSpec]) -> GpuSpec | None:
        """The GPU whose fields hold where the table gives none."""
        if not normalized(self.name) or not self.name.isprintable() or normalized(self.name) == PORTABLE:
            raise UsageError(f"A GPU cannot be called {self.name!r}", where="[gpu]", remedy="choose another name")
        known = [item.name for item in fields(GpuSpec) if item.name != "name"]
        for key in self.table:
            if key not in (*known, _BASE):
                near = did_you_mean(key, (*known, _BASE))
                raise self._error(f"Unknown field {key!r}", key, near or f"there are: {', '.join((_BASE, *known))}")
        if _BASE in self.table:
            asked = self.table[_BASE]
            short = {normalized(alias): normalized(target) for alias, target in SHORT_NAMES.items()}
            key = normalized(asked) if isinstance(asked, str) else ""
            found = gpus.get(key) or gpus.get(short.get(key, ""))
            if found is None:
                near = did_you_mean(str(asked), [gpu.name for gpu in gpus.values()])
                raise self._error(f"There is no GPU {asked!r} to build on", _BASE, near or "see trtopt gpu list")
            return found
        same = gpus.get(normalized(self.name))
        missing = [key for key in known if key not in self.table and key not in (*_KEYS, CALIBRATION)]
        if same is None and [key for key in missing if key != "source"]:
            raise self._error(f"Fields are missing: {', '.join(missing)}", "", f"give them, or {_BASE} = a GPU like it")
        return same

    def spec(self, base: GpuSpec | None) -> GpuSpec:
        """The GPU."""
        source = self._text("source", r".*\S.*", "say where the numbers come from: source = ...")
        if base is not None:
            source += f"; the rest is that of {base.name} ({base.source})"
        if "compute_capability" in self.table or base is None:
            capability = self._text("compute_capability", r"\d{1,2}\.\d", 'write compute_capability = "8.9"')
        else:
            capability = base.compute_capability
        numbers = {key: self._number(key, base) for key in _RANGES}
        sparse = self.table.get("sparse_2_4", base.sparse_2_4 if base is not None else None)
        if not isinstance(sparse, bool):
            raise self._error("sparse_2_4 is not true or false", "sparse_2_4", "write sparse_2_4 = true")
        if numbers["sm"] != int(numbers["sm"]):
            raise self._error("sm is not a whole number", "sm", "give the number of multiprocessors")
        units, rates = self._rates("fma_per_clock_per_sm"), self._rates("tflops")
        plain = GpuSpec(
            name=base.name if base is not None and normalized(base.name) == normalized(self.name) else self.name,
            compute_capability=capability,
            sm=int(numbers["sm"]),
            clock_cuda_mhz=numbers["clock_cuda_mhz"],
            clock_tensor_mhz=numbers["clock_tensor_mhz"],
            memory_gb=numbers["memory_gb"],
            bandwidth_gbs=numbers["bandwidth_gbs"],
            l2_mib=numbers["l2_mib"],
            tdp_w=numbers["tdp_w"],
            fma_per_clock_per_sm=dict(base.fma_per_clock_per_sm) if base is not None else {},
            tflops={dtype: rate * self._scale(dtype, base, numbers) for dtype, rate in base.tflops.items()}
            if base is not None
            else {},
            sparse_2_4=sparse,
            source=source,
            calibration=self._calibration(),
        )
        self._settle(plain, units, rates)
        if Precision.FP32 not in plain.tflops:
            raise self._error("The rate of FP32 is not known", "tflops", "give tflops = { fp32 = ... } at least")
        return plain

    def _calibration(self) -> GpuCalibration | None:
        """What ``trtopt calibrate-gpu`` wrote; None without it."""
        if CALIBRATION not in self.table:
            return None
        table, remedy = self.table[CALIBRATION], "run trtopt calibrate-gpu again, or remove the table"
        if not isinstance(table, Mapping):
            raise self._error(f"{CALIBRATION} is no table", CALIBRATION, remedy)
        for key in (*table, *_CALIBRATION_RANGES, "date"):
            value, (low, high) = table.get(key), _CALIBRATION_RANGES.get(key, (0, 0))
            if key in _CALIBRATION_TEXTS:
                good = isinstance(value, str) and value.isprintable()
            else:
                good = isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high
            if not good or (key == "layers" and not isinstance(value, int)):
                raise self._error(f"{key} is {value!r}", CALIBRATION, remedy)
        return GpuCalibration(**table)

    @staticmethod
    def _scale(dtype: str, base: GpuSpec, numbers: Mapping[str, float]) -> float:
        """How the base's rate changes with the user's SMs and clock."""
        clock = "clock_cuda_mhz" if dtype == Precision.FP32 else "clock_tensor_mhz"
        return numbers["sm"] * numbers[clock] / (base.sm * clock_mhz(base, dtype))

    def _settle(self, gpu: GpuSpec, units: Mapping[str, float], rates: Mapping[str, float]) -> None:
        """Write the user's rates into ``gpu``, what follows from them, and check that they agree."""
        before = dict(gpu.fma_per_clock_per_sm)
        gpu.fma_per_clock_per_sm.update(units)
        for dtype, unit in UNITS.items():
            per_unit = 2 * gpu.sm * clock_mhz(gpu, dtype) * 1e6 / 1e12
            if dtype in rates and unit in units:
                expected = units[unit] * per_unit
                if not math.isclose(rates[dtype], expected, rel_tol=_RATE_TOLERANCE):
                    text = f"{dtype}: {rates[dtype]:g}, but 2 x {units[unit]:g} x {gpu.sm} SMs x clock = {expected:.1f}"
                    raise self._error(
                        f"The rate does not follow from the units: {text}", "tflops", "correct one of them"
                    )
            elif dtype in rates:
                gpu.fma_per_clock_per_sm[unit] = rates[dtype] / per_unit
                if unit == "fp16_acc32" and "fp16_acc16" not in units and before.get(unit):
                    ratio = before.get("fp16_acc16", before[unit]) / before[unit]
                    gpu.fma_per_clock_per_sm["fp16_acc16"] = rates[dtype] / per_unit * ratio
            elif unit in units:
                gpu.tflops[dtype] = units[unit] * per_unit
            if dtype in rates:
                gpu.tflops[dtype] = rates[dtype]
        for table in (gpu.fma_per_clock_per_sm, gpu.tflops):
            for key in [key for key, value in table.items() if value == 0]:
                del table[key]

    def _number(self, key: str, base: GpuSpec | None) -> float:
        if key not in self.table and base is not None:
            return float(getattr(base, key))
        value, (low, high) = self.table[key], _RANGES[key]
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
            raise self._error(f"{key} is {value!r}", key, f"give a number from {low:g} to {high:g}")
        return float(value)

    def _rates(self, key: str) -> dict[str, float]:
        table = self.table.get(key, {})
        if not isinstance(table, Mapping):
            raise self._error(f"{key} is no table", key, f"write {key} = {{ {_KEYS[key][0]} = ... }}")
        for name, value in table.items():
            if name not in _KEYS[key]:
                near = did_you_mean(name, _KEYS[key])
                raise self._error(f"Unknown type {name!r}", key, near or f"there are: {', '.join(_KEYS[key])}")
            good = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not good or not 0 <= value <= _LARGEST_RATE[key]:
                raise self._error(f"{name} is {value!r}", key, "give a number from 0 on; 0: there is no such unit")
        return {name: float(value) for name, value in table.items()}

    def _text(self, key: str, pattern: str, remedy: str) -> str:
        value = self.table.get(key)
        if not isinstance(value, str) or not re.fullmatch(pattern, value):
            raise self._error(f"{key} is {value!r}" if key in self.table else f"{key} is missing", key, remedy)
        return value

    def _error(self, what: str, key: str, remedy: str) -> UsageError:
        return UsageError(what, where=f'[gpu."{self.name}"] {key}'.rstrip(), remedy=remedy)
