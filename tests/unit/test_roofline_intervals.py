"""The range of a predicted time: by kind of kernel and GPU, of sums, in reports and in what advice says."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.unit.analysis_samples import GPU, analysis_of, elementwise, product, small_layers
from tests.unit.report_samples import full_report
from trtopt.errors import UsageError
from trtopt.hardware.spec import find_gpu
from trtopt.report.html.page import html_page
from trtopt.report.schema.analysis import (
    EngineAnalysis,
    Finding,
    is_noise,
    range_of_rows,
    range_of_sum,
    rank,
    totals_of,
)
from trtopt.report.schema.read import read_report
from trtopt.report.schema.steps import Cost, RewritingRecord
from trtopt.report.schema.write import write_report
from trtopt.report.text import analysis as analysis_text
from trtopt.report.text import build as build_text
from trtopt.report.text.analysis import view
from trtopt.report.text.format import range_text
from trtopt.roofline import intervals
from trtopt.roofline.intervals import interval_of, kind_of, range_of
from trtopt.roofline.layer import predict
from trtopt.roofline.rows import RowSizes
from trtopt.roofline.work import AttentionSizes
from trtopt.support.precision import Precision

KINDS = ("gemm", "gemm 8-bit", "conv", "depthwise", "attention", "decode", "rows", "memory", "layout", "recurrent")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gpu", ["A100-SXM4-80GB", "T4", "RTX-4090"])
def test_a_prediction_lies_in_its_interval(kind: str, gpu: str) -> None:
    low, high = interval_of(kind, find_gpu(gpu))
    assert 0.3 < low <= 1 <= high < 3


@pytest.mark.parametrize("kind", KINDS)
def test_a_gpu_that_was_not_measured_has_no_narrower_range(kind: str) -> None:
    other = interval_of(kind, find_gpu("B200"))
    for name in ("A100-SXM4-80GB", "H100-SXM5-80GB", "RTX-3060-Laptop"):
        own = interval_of(kind, find_gpu(name))
        assert other[0] <= own[0] and own[1] <= other[1]


def test_a_kind_without_data_has_the_widest_range() -> None:
    assert "recurrent" not in intervals.table(True) | intervals.table(False)
    ranges = [interval_of(kind, find_gpu("B200")) for kind in KINDS[:-1]]
    assert interval_of("recurrent", GPU) == (min(low for low, _ in ranges), max(high for _, high in ranges))


def test_own_data_are_those_of_the_kind() -> None:
    table = intervals.table(True)
    assert "T4" in table["rows"].gpus and "T4" not in table["gemm"].gpus


def test_kinds_are_those_whose_errors_are_alike() -> None:
    dense, narrow = (product("p", 64, 64, 64, dtype=dtype).work for dtype in (Precision.FP16, Precision.FP8))
    stream = elementwise("e", 1000).work
    assert dense is not None and narrow is not None and stream is not None
    step = AttentionSizes(1, 128, 64, 64, 8, 8)
    fused = dataclasses.replace(dense, kind="attention", attention=step)
    assert [kind_of(work) for work in (dense, narrow, stream, fused)] == ["gemm", "gemm 8-bit", "memory", "decode"]
    assert kind_of(dataclasses.replace(fused, attention=dataclasses.replace(step, queries=128))) == "attention"
    assert kind_of(dataclasses.replace(dense, weight_bits=4)) == "gemm 8-bit"
    assert kind_of(dataclasses.replace(stream, rows=RowSizes(10, 100))) == "rows"


def test_a_layer_has_the_range_of_its_kind() -> None:
    layer = product("p", 512, 512, 512)
    (row,), _ = predict([layer], GPU)
    low, high = interval_of("gemm", GPU)
    assert row.low_us == pytest.approx(low * row.predicted_us) and row.high_us == pytest.approx(high * row.predicted_us)
    assert layer.work is not None and range_of(layer.work, row.predicted_us, GPU) == (row.low_us, row.high_us)


def test_errors_add_up_within_a_kind_and_not_across() -> None:
    parts = [("gemm", 10.0, 9.0, 12.0), ("gemm", 20.0, 18.0, 22.0), ("conv", 30.0, 26.0, 33.0)]
    assert range_of_sum(parts[:2]) == (27.0, 34.0)
    assert range_of_sum(parts) == (60.0 - 5.0, 60.0 + 5.0)
    assert range_of_sum([]) == (0.0, 0.0)


def test_totals_have_no_range_where_a_layer_has_none() -> None:
    rows = analysis_of(small_layers).layers
    totals = totals_of(rows)
    assert totals.low_us is not None and totals.high_us is not None
    assert totals.low_us < totals.predicted_us < totals.high_us
    unknown = [*rows, dataclasses.replace(rows[0], low_us=None, high_us=None)]
    assert range_of_rows(unknown) is None and totals_of(unknown).low_us is None


@pytest.mark.parametrize(
    ("time", "text"),
    [((281.0, 240.0, 330.2), "240 to 330"), ((2320.0, 950.0, 12000.0), "0.95 to 12.0"), ((5.0, None, None), "")],
)
def test_a_range_is_in_the_unit_of_its_time(time: tuple[float, float | None, float | None], text: str) -> None:
    assert range_text(*time) == text


def test_the_text_says_the_range() -> None:
    found = analysis_of(small_layers)
    found = dataclasses.replace(found, totals=totals_of(found.layers))
    shown = _shown(analysis_text.view(found, GPU), 130)
    span = range_text(found.totals.predicted_us, found.totals.low_us, found.totals.high_us)
    assert f", {span} in 5 layers" in shown and "80 %" in shown
    assert "80 %" not in _shown(analysis_text.view(found, GPU), 90)


def test_the_page_says_the_range() -> None:
    found = analysis_of(small_layers)
    found = dataclasses.replace(found, totals=totals_of(found.layers))
    page = html_page(view(found, GPU))
    for time in (found.totals, *found.layers):
        assert range_text(time.predicted_us, time.low_us, time.high_us) in page
    assert "80 % of such kernels were within" in page


def test_the_report_comes_back_with_its_ranges(tmp_path: Path) -> None:
    found = analysis_of(small_layers)
    found = dataclasses.replace(found, totals=totals_of(found.layers))
    write_report(found, tmp_path / "report.json")
    again = read_report(tmp_path / "report.json")
    assert json.dumps(again.to_json_dict()) == json.dumps(found.to_json_dict())


def test_a_report_from_before_ranges_is_read(tmp_path: Path) -> None:
    data = analysis_of(small_layers).to_json_dict()
    for item in (*data["layers"], data["totals"], *(level["totals"] for level in data["levels"])):
        del item["low_us"], item["high_us"]
    (tmp_path / "report.json").write_text(json.dumps(data))
    assert read_report(tmp_path / "report.json").totals.low_us is None  # type: ignore[union-attr]


@pytest.mark.parametrize("where", ["layers", "totals"])
@pytest.mark.parametrize("wrong", [{"low_us": "NaN"}, {"low_us": -1.0}, {"high_us": 1e-9}, {"low_us": 1e9}])
def test_an_altered_range_is_refused(tmp_path: Path, where: str, wrong: dict[str, Any]) -> None:
    data = analysis_of(small_layers).to_json_dict()
    item = data["layers"][0] if where == "layers" else data["totals"]
    item.update(wrong)
    (tmp_path / "report.json").write_text(json.dumps(data).replace('"NaN"', "NaN"))
    with pytest.raises(UsageError):
        read_report(tmp_path / "report.json")


def test_a_gain_below_half_of_the_range_is_noise() -> None:
    assert is_noise(4.9, (90.0, 100.0)) and not is_noise(5.0, (90.0, 100.0)) and not is_noise(1.0, None)


def test_findings_inside_the_noise_come_after_the_others() -> None:
    def finding(rule: str, gain: float, *, noise: bool = False) -> Finding:
        return Finding(rule, "warning" if gain else "hint", (), rule, "do", gain, noise)

    found = [finding("hint", 0.0), finding("noise", 9.0, noise=True), finding("small", 1.0), finding("large", 5.0)]
    assert [item.rule for item in sorted(found, key=rank)] == ["large", "small", "noise", "hint"]
    shown = _shown(analysis_text.view(analysis_of(small_layers, findings=tuple(found)), GPU), 120)
    assert "noise; the gain is inside the model's noise" in shown and shown.count("model's noise") == 1


@pytest.mark.parametrize(("after", "said"), [(0.99, True), (0.4, False), (1.0, False)])
def test_a_build_says_that_the_gain_of_its_recipes_is_inside_the_noise(after: float, said: bool) -> None:
    rows, _ = predict([product("p", 4096, 4096, 4096)], GPU)
    costs = Cost(3, 0, 10, 100.0), Cost(2, 0, 10, 100.0 * after)
    engine = EngineAnalysis(GPU.name, rows, totals_of(rows))
    shown = _shown(build_text.view(full_report(analysis=engine, rewriting=RewritingRecord(*costs)), verbose=True), 120)
    assert ("the gain of 1.0 % is inside the model's noise of -" in shown) == said


def _shown(content: Any, width: int) -> str:
    console = Console(width=width, record=True, file=None, force_terminal=False)
    with console.capture() as capture:
        console.print(content)
    return " ".join(capture.get().split())
