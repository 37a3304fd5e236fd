"""Calibrations in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from trtopt.hardware.spec import GpuCalibration
from trtopt.report.schema.calibration import CalibrationReport
from trtopt.report.text.blocks import Section, View, line, pairs
from trtopt.report.text.format import count, percent, visible

_FACTORS = {
    "clock": "clock that it sustains",
    "launch": "launch of a kernel",
    "bandwidth": "memory bandwidth",
    "attention": "rate of attention",
}


def calibration_lines(gpu: Mapping[str, Any] | None) -> tuple[str, ...]:
    """One line that says that predictions use a calibration, from a report's ``gpu``; none where they use none."""
    if gpu is None or gpu.get("calibration") is None:
        return ()
    found = msgspec.convert(gpu["calibration"], GpuCalibration)  # as it was checked: a file may leave fields out
    errors = f"{percent(found.error_before)} -> {percent(found.error_after)}"
    return (
        f"predictions for {visible(str(gpu.get('name', '?')))} use a calibration of {visible(found.date)} from"
        f" {count(found.layers, 'layer')}: error on layers left out {errors}",
    )


def view(report: CalibrationReport) -> View:
    """The calibration."""
    found = report.calibration
    layers = f"{found.layers}, {count(report.kernels, 'different kernel')}"
    if report.zero_time:
        layers += f"; {report.zero_time} of zero time left out"
    if report.unknown:
        layers += f"; {report.unknown} of unknown work left out"
    rows = [
        ("GPU", visible(report.gpu)),
        ("layers", layers),
        *((words, f"x {getattr(found, name):.3f}") for name, words in _FACTORS.items()),
        ("layers left out", f"error {percent(found.error_before)} -> {percent(found.error_after)}"),
        ("written", f'[gpu."{visible(report.name)}"] in {visible(report.output)}' if report.written else "nothing"),
    ]
    return View(line(f"Calibration of {visible(report.gpu)}"), (), (Section("", (pairs(rows),)),))
