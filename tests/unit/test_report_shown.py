"""Reports in Python and in notebooks: one line, the terminal's form, a page, a table of rows, a plot, a gate."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from analysis_samples import full_analysis
from profile_samples import small_profile
from report_samples import full_report
from sweep_samples import report as sweep_report
from sweep_samples import row
from test_check_forms import FOUND
from test_report_sensitivity import region
from test_report_sensitivity import report as sensitivity_report

from trtopt.errors import GateError, UsageError
from trtopt.report.schema.analysis import EngineAnalysis
from trtopt.report.schema.diff import DiffReport, DiffSide
from trtopt.report.schema.shown import Shown
from trtopt.report.text.words import LIMITERS

REPORTS = {
    "build": full_report(),
    "analysis": full_analysis(),
    "profile": small_profile(),
    "sweep": sweep_report(row("a"), row("b", gpu="A10")),
    "check": FOUND,
    "sensitivity": sensitivity_report(region("a", 0.1), region("b", 0.2)),
    "diff": DiffReport({"path": "m.onnx"}, "L4", "fp16", DiffSide("a.json"), DiffSide("b.json")),
}
every = pytest.mark.parametrize("report", REPORTS.values(), ids=REPORTS)


@every
def test_a_report_is_one_short_line(report: Shown) -> None:
    text = repr(report)
    assert text.startswith(f"<{type(report).__name__}: ") and text.endswith(">")
    assert "\n" not in text and len(text) < 300


@every
def test_printed_it_is_the_form_of_the_terminal(report: Shown) -> None:
    text = str(report)
    assert text.startswith(repr(report).partition(": ")[2][:-1][:60])
    assert len(text.splitlines()) > 3 and "\x1b" not in text


@every
def test_a_notebook_shows_it_in_colours_and_nothing_of_it_is_markup(report: Shown) -> None:
    text = report._repr_html_()
    assert text.startswith("<pre") and text.endswith("</pre>") and "font-weight: bold" in text


def test_names_of_a_model_are_no_markup_in_a_notebook() -> None:
    found = full_analysis()
    name = "<script>alert(1)</script>"
    layers = (dataclasses.replace(found.layers[0], name=name), *found.layers[1:])
    text = dataclasses.replace(found, layers=layers, findings=())._repr_html_()
    assert "<script" not in text and "&lt;script" in text


@every
def test_a_report_is_a_page(report: Shown) -> None:
    pytest.importorskip("jinja2", reason="pages need Jinja2")
    pytest.importorskip("plotly", reason="pages need plotly")
    assert report.to_html().startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("kind", "column"), [("analysis", "predicted_us"), ("profile", "measured_us"), ("sweep", "gpu")]
)
def test_rows_are_a_data_frame(kind: str, column: str) -> None:
    pytest.importorskip("pandas", reason="data frames need pandas")
    report: Any = REPORTS[kind]
    frame = report.to_dataframe()
    rows = report.rows if kind == "sweep" else report.layers
    assert [None if found != found else found for found in frame[column]] == [getattr(item, column) for item in rows]


def test_limiters_of_a_data_frame_are_those_of_the_terminal() -> None:
    pytest.importorskip("pandas", reason="data frames need pandas")
    found = full_analysis()
    assert [LIMITERS[item.limiter] for item in found.layers] == list(found.to_dataframe()["limiter"])
    assert "arithmetic" in LIMITERS.values()


def test_a_build_without_an_engine_has_no_rows() -> None:
    pytest.importorskip("pandas", reason="data frames need pandas")
    assert len(full_report(analysis=None).to_dataframe()) == 0


def test_a_plot_is_one_of_the_pages() -> None:
    pytest.importorskip("plotly", reason="plots need plotly")
    found = full_analysis()
    assert found.plot().to_dict() == found.plot("roofline").to_dict() != found.plot("order").to_dict()
    with pytest.raises(UsageError, match="no plot 'pie'") as caught:
        found.plot("pie")
    assert "roofline" in caught.value.remedy
    with pytest.raises(UsageError, match="no plot"):
        FOUND.plot()
    engine = EngineAnalysis("L4", found.layers, found.totals)
    assert full_report(analysis=engine).plot().to_dict() == found.plot("order").to_dict()


def test_a_failed_gate_may_be_an_exception() -> None:
    full_report(gate_failures=()).raise_for_gate()
    failed = full_report(gate_failures=("top-1 drops by 3 points",))
    with pytest.raises(GateError, match="top-1 drops by 3 points"):
        failed.raise_for_gate()
    dataclasses.replace(failed, config={**failed.config, "allow_accuracy_loss": True}).raise_for_gate()
    assert FOUND.failed
    with pytest.raises(GateError, match=FOUND.failed[0].name):
        FOUND.raise_for_gate()
    dataclasses.replace(FOUND, gates=()).raise_for_gate()
