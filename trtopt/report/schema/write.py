"""Reports and layers written as JSON files, and the versions that a report must carry to be reproducible."""

from __future__ import annotations

import json
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

from trtopt.report.schema.build import EngineRecord, layer_dicts
from trtopt.report.schema.shown import Shown
from trtopt.support.files import atomic_write
from trtopt.support.version import VERSION

LAYERS_SCHEMA = "trtopt.layers/1"


def write_report(report: Shown, path: Path) -> None:
    """Write a report as JSON of its schema, whole or not at all.

    Raises:
        UsageError: The file cannot be written.
    """
    atomic_write(path, json_form(report.to_json_dict()))


def write_layers(engine: EngineRecord, path: Path) -> None:
    """Write ``trtopt.layers/1``: the layers of an engine as in ``engine.layers[]`` of the report.

    Raises:
        UsageError: The file cannot be written.
    """
    atomic_write(path, json_form({"schema": LAYERS_SCHEMA, "backend": engine.backend, "layers": layer_dicts(engine)}))


def json_form(value: dict[str, Any]) -> str:
    """A report as the text of its file."""
    return json.dumps(value, indent=2, allow_nan=False) + "\n"


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
