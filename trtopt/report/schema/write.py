"""Reports and layers written as JSON files, and the versions that a report must carry to be reproducible."""

from __future__ import annotations

import json
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

from trtopt.report.schema.analysis import Analysis
from trtopt.report.schema.build import BuildReport, EngineRecord, layer_dicts
from trtopt.report.schema.diff import DiffReport
from trtopt.report.schema.profile import ProfileReport
from trtopt.report.schema.sensitivity import Sensitivity
from trtopt.report.schema.sweep import SweepReport
from trtopt.support.files import atomic_write
from trtopt.support.version import VERSION

LAYERS_SCHEMA = "trtopt.layers/1"


def write_report(
    report: BuildReport | Analysis | Sensitivity | ProfileReport | SweepReport | DiffReport, path: Path
) -> None:
    """Write a report as JSON of its schema, whole or not at all.

    Raises:
        UsageError: The file cannot be written.
    """
    _write(report.to_json_dict(), path)


def write_layers(engine: EngineRecord, path: Path) -> None:
    """Write ``trtopt.layers/1``: the layers of an engine as in ``engine.layers[]`` of the report.

    Raises:
        UsageError: The file cannot be written.
    """
    _write({"schema": LAYERS_SCHEMA, "backend": engine.backend, "layers": layer_dicts(engine)}, path)


def _write(value: dict[str, Any], path: Path) -> None:
    atomic_write(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


_PACKAGES = (
    "numpy onnx onnx_ir onnxruntime onnxruntime-gpu tensorrt-rtx tensorrt tensorrt-cu12 tensorrt-cu13 torch".split()
)


def environment() -> dict[str, str]:
    """Versions of trtopt, Python, the platform, and the packages that are installed."""
    found = {"trtopt": VERSION, "python": platform.python_version(), "platform": platform.platform()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found
