"""The report a user attaches to an issue."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest

from trtopt.engine.doctor import diagnose, selftest

pytest.importorskip("tensorrt_rtx")


def test_the_selftest_builds_with_every_backend_that_can_be_used() -> None:
    report = selftest()
    usable = [name for name, state in report["environment"]["backends"].items() if state["usable"]]
    assert "tensorrt-rtx" in usable
    assert [(check["backend"], check["precision"]) for check in report["checks"]] == [
        (backend, precision) for backend in usable for precision in ("fp16", "int8")
    ]
    assert report["ok"], report
    int8 = next(check for check in report["checks"] if check["precision"] == "int8")
    assert int8["flop_share"]["int8"] > 0.9
    assert int8["not_run_because"] or int8["difference_ratio"] < 0.02


def test_the_report_is_json_without_paths_of_this_machine() -> None:
    text = json.dumps(selftest())
    for path in (tempfile.gettempdir(), str(Path.home()), str(Path.cwd())):
        if path != "/":
            assert path not in text


def test_the_diagnosis_names_versions_targets_and_the_missing_gpu() -> None:
    report = diagnose()
    assert report["packages"]["onnx"]
    assert report["backends"]["tensorrt-rtx"]["version"].startswith("1.7.")
    assert "8.9" in report["backends"]["tensorrt-rtx"]["targets"]
    assert (report["gpu"] is None) == bool(report["gpu_note"] and not report["driver"])


def test_two_onnxruntime_packages_at_once_are_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert diagnose()["problems"] == []
    for name in ("onnxruntime", "onnxruntime_gpu"):
        folder = tmp_path / f"{name}-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    (problem,) = diagnose()["problems"]
    assert "uninstall both" in problem
