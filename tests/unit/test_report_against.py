"""Two reports of one kind, compared in all forms."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from analysis_samples import analysis_of, full_analysis, resnet50_layers
from profile_samples import small_profile
from report_samples import full_report
from rich.console import Console
from sweep_samples import report as sweep_report
from sweep_samples import row
from test_report_sensitivity import region
from test_report_sensitivity import report as sensitivity

from trtopt.analysis.against import compare_reports
from trtopt.errors import UsageError
from trtopt.report.schema.analysis import EngineAnalysis, totals_of
from trtopt.report.schema.build import Achieved, BuildReport, PrecisionRecord
from trtopt.report.schema.layers import NodeName
from trtopt.report.schema.write import write_report
from trtopt.report.text.profile import comparison_view


def _build(folder: Path, name: str, us: float, dtype: str) -> Path:
    rows = tuple(
        dataclasses.replace(item, dtype=dtype, predicted_us=us, onnx_nodes=(f"n{index}",))
        for index, item in enumerate(analysis_of(resnet50_layers).layers[:4])
    )
    names = {f"n{index}": NodeName(f"blocks.{index}.fc", "MatMul") for index in range(4)}
    report: BuildReport = full_report(
        analysis=EngineAnalysis("L4", rows, totals_of(rows)),
        precision=PrecisionRecord(dtype, {dtype: Achieved(4, 1.0)}),
        names=names,
    )
    write_report(report, folder / name)
    return folder / name


def _shown(found: object) -> str:
    console = Console(width=80, no_color=True)
    with console.capture() as capture:
        console.print(comparison_view(found))  # type: ignore[arg-type]
    return capture.get()


def test_two_builds_differ_layer_by_layer_under_the_users_names(tmp_path: Path) -> None:
    before, after = _build(tmp_path, "a.json", 20.0, "fp16"), _build(tmp_path, "b.json", 12.0, "int8")
    page, text = tmp_path / "c.html", tmp_path / "c.md"
    found = compare_reports(after, before, html=page, markdown=text)
    assert {item.name: (item.before, item.after) for item in found.figures}["precision"] == ("fp16", "int8")
    lines = _shown(found).splitlines()
    assert lines[0] == "Two builds compared: 32.0 us less (40.0 %)"
    row = next(line for line in lines if "blocks" in line).split()
    assert row == ["blocks.*.fc", "x4", "80.0", "us", "48.0", "us", "-32.0", "us", "fp16", "->", "int8"]
    assert all(len(line.rstrip()) <= 80 for line in lines)
    for form in (page, text):
        assert "48.0" in form.read_text(encoding="utf-8")


def test_a_build_without_layers_took_no_zero_time(tmp_path: Path) -> None:
    """`trtopt optimize` builds no engine: what is known of the whole is compared, and no layers."""
    after = _build(tmp_path, "b.json", 12.0, "int8")
    optimized = full_report(engine=None, analysis=None, precision=PrecisionRecord("fp16", {}))
    write_report(optimized, tmp_path / "a.json")
    text = _shown(compare_reports(after, tmp_path / "a.json"))
    assert text.startswith("Two builds compared: ") and "figures differ" in text.splitlines()[0]
    assert "0 layers" not in text and "appeared" not in text and "fp16" in text


def test_two_analyses_and_two_sweeps_are_compared(tmp_path: Path) -> None:
    analyses = full_analysis(), dataclasses.replace(full_analysis(), precision="int8")
    sweeps = sweep_report(row("a", latency_us=10.0)), sweep_report(row("a", latency_us=12.0))
    for kind, pair in (("analyses", analyses), ("sweeps", sweeps)):
        for name, item in zip(("old.json", "new.json"), pair, strict=True):
            write_report(item, tmp_path / name)
        found = compare_reports(tmp_path / "new.json", tmp_path / "old.json")
        assert found.of == kind and found.figures
        assert _shown(found).startswith(f"Two {kind} compared")


def test_two_sensitivity_reports_are_compared_region_by_region(tmp_path: Path) -> None:
    old = sensitivity(region("a", 0.3), region("b", 0.1))
    new = dataclasses.replace(sensitivity(region("c", 0.3), region("b", 0.1)), precision="fp8")
    for name, item in (("old.json", old), ("new.json", new), ("other.json", sensitivity(region("z", 0.3)))):
        write_report(item, tmp_path / name)
    page, text = tmp_path / "c.html", tmp_path / "c.md"
    found = compare_reports(tmp_path / "new.json", tmp_path / "old.json", html=page, markdown=text)
    figures = {item.name: (item.before, item.after) for item in found.figures}
    assert _shown(found).startswith("Two sensitivity reports compared: 3 figures differ\n")
    assert figures["precision"] == ("int8", "fp8")
    assert figures["net/c/conv"] == ("none", "5.2 dB ± 0.3, 75.0 % of the noise")
    assert "net/b/conv" not in figures  # it is as it was
    assert all("75.0 %" in form.read_text(encoding="utf-8") for form in (page, text))
    with pytest.raises(UsageError, match="no region in common"):
        compare_reports(tmp_path / "new.json", tmp_path / "other.json")


def test_reports_of_different_kinds_are_refused(tmp_path: Path) -> None:
    write_report(full_analysis(), tmp_path / "a.json")
    write_report(small_profile(), tmp_path / "p.json")
    with pytest.raises(UsageError, match="profiles and analyses"):
        compare_reports(tmp_path / "p.json", tmp_path / "a.json")
