"""The report and the engine's layers as JSON files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trtopt.report.schema.analysis import Analysis
from trtopt.report.schema.build import BuildReport, EngineRecord, layer_dicts
from trtopt.report.schema.profile import ProfileReport
from trtopt.report.schema.sensitivity import Sensitivity
from trtopt.report.schema.sweep import SweepReport
from trtopt.support.files import atomic_write

LAYERS_SCHEMA = "trtopt.layers/1"


def write_report(report: BuildReport | Analysis | Sensitivity | ProfileReport | SweepReport, path: Path) -> None:
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
