"""The record of the JSON contract ``trtopt.calibration/1``. Field names are part of the contract."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trtopt.hardware.spec import GpuCalibration
from trtopt.support.json_text import plain

SCHEMA = "trtopt.calibration/1"


@dataclass(frozen=True)
class CalibrationReport:
    """What layers measured on a GPU say of it.

    Attributes:
        gpu: The GPU that was measured, by the name its profiles or ``--gpu`` gave.
        name: The name of its table.
        calibration: The factors, what they were fitted to, and the error before and after on layers left out.
        kernels: Different kernels among the layers.
        zero_time: Layers that took no time, which are left out.
        unknown: Layers whose work is not known, likewise.
        files: What was read.
        output: The configuration file.
        written: Whether the table was written there: not where the factors do not lower the error.
        environment: Versions and machine.
    """

    gpu: str
    name: str
    calibration: GpuCalibration
    kernels: int
    zero_time: int
    unknown: int
    files: tuple[str, ...]
    output: str
    written: bool
    environment: Mapping[str, str] = field(default_factory=dict)
    schema: str = SCHEMA

    def to_json_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        found = plain(dataclasses.asdict(self))
        return {"schema": found.pop("schema"), **found}
