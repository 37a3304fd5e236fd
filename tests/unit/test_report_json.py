"""The JSON of a report is the contract ``trtopt.build/1``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from report_samples import ACCURACY, ENGINE, full_report

from trtopt.errors import UsageError
from trtopt.report.schema.analysis import EngineAnalysis, totals_of
from trtopt.report.schema.build import PrecisionRecord
from trtopt.report.schema.shipped import PlainCost
from trtopt.report.schema.write import LAYERS_SCHEMA, write_layers, write_report

CONTRACT = {
    "": "schema model gpu steps calibration precision accuracy judge guard sparsity pareto warnings engine config "
    "environment prediction analysis seconds gate_failures",
    "model": "path sha256 opset inputs",
    "gpu": "name",
    "steps.0": "name stage changes refusals seconds",
    "steps.2.refusals.0": "node reason",
    "calibration": "source method samples seconds peak_rss_bytes",
    "precision": "requested achieved",
    "precision.achieved.int8": "layers flop_share time_share",
    "accuracy": "samples verified outputs engine metric",
    "accuracy.outputs.logits": "sqnr_db cosine max_abs top1_agreement",
    "accuracy.metric": "name baseline optimized drop",
    "engine": "path sha256 bytes backend backend_version compute_capabilities kernels activation_bytes weight_bytes "
    "layers",
    "engine.layers.0": "name type onnx_nodes inputs outputs constants",
    "engine.layers.0.inputs.0": "name shape dtype format",
}
"""Field names that others rely on, by where they stand."""


def _at(value: Any, path: str) -> Any:
    for part in filter(None, path.split(".")):
        value = value[int(part)] if isinstance(value, list) else value[part]
    return value


@pytest.mark.parametrize("path", CONTRACT)
def test_the_fields_of_the_contract_are_there(path: str) -> None:
    assert set(_at(full_report().to_json_dict(), path)) >= set(CONTRACT[path].split())


def test_the_schema_comes_first_and_is_named() -> None:
    report = full_report().to_json_dict()
    assert next(iter(report.items())) == ("schema", "trtopt.build/1")


def test_the_json_is_strict_and_survives_a_round_trip() -> None:
    report = full_report().to_json_dict()
    assert json.loads(json.dumps(report, allow_nan=False)) == report


def test_numbers_that_are_not_finite_are_null() -> None:
    outputs = full_report().to_json_dict()["accuracy"]["outputs"]
    assert outputs["boxes"]["sqnr_db"] is None
    assert outputs["broken"] == {
        "sqnr_db": None,
        "cosine": None,
        "max_abs": None,
        "top1_agreement": None,
        "nonfinite": 7,
        "shapes_differ": 0,
        "tolerance": None,
        "held_against": None,
        "ties": 0,
        "has_scores": True,
    }
    assert outputs["logits"]["sqnr_db"] == ACCURACY.outputs["logits"].sqnr_db


def test_shapes_of_the_configuration_are_lists() -> None:
    assert full_report().to_json_dict()["config"]["opt_shapes"] == [{"x": [8, 3]}]


def test_a_report_without_engine_calibration_and_accuracy_is_valid() -> None:
    report = full_report(engine=None, calibration=None, accuracy=None, gpu=None).to_json_dict()
    assert report["engine"] is report["calibration"] is report["accuracy"] is report["gpu"] is None


def test_the_file_holds_the_report(tmp_path: Path) -> None:
    write_report(full_report(), tmp_path / "report.json")
    assert json.loads((tmp_path / "report.json").read_text()) == full_report().to_json_dict()
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]


def test_the_file_of_layers_holds_the_layers_of_the_report(tmp_path: Path) -> None:
    write_layers(ENGINE, tmp_path / "layers.json")
    written = json.loads((tmp_path / "layers.json").read_text())
    assert written["schema"] == LAYERS_SCHEMA
    assert written["layers"] == full_report().to_json_dict()["engine"]["layers"]


def test_a_folder_that_is_missing_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        write_report(full_report(), tmp_path / "missing" / "report.json")


def test_where_plain_ships_it_is_the_fp16_baseline() -> None:
    """Nothing was rewritten then, and the recipes' own figure is missing."""
    plain = PlainCost(5, 0, 1000, 20.0)
    analysis = EngineAnalysis("L4", (), totals_of(()))
    report = full_report(precision=PrecisionRecord("fp16"), analysis=analysis, plain=plain)
    assert report.to_json_dict()["prediction"]["baseline_fp16_us"] == 20.0
