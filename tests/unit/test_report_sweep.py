"""A sweep's report: cost, the Pareto front, the answer to a question, and its forms."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sweep_samples import failed, report, row

from trtopt.errors import UsageError
from trtopt.gates.facts import facts_of
from trtopt.report.json_file import write_report
from trtopt.report.read import read_report
from trtopt.report.sweep import SweepReport, SweepRow, cost_per_million, with_front
from trtopt.report.sweep_forms import Limits, choices_json, choose, sweep_csv, sweep_markdown
from trtopt.report.sweep_html import html_page


def test_the_cost_of_a_million_inferences() -> None:
    # One hour at 0.72 holds 3.6e9 us / 1000 us = 3.6 million runs of 8 inferences.
    assert cost_per_million(1000.0, 8, 0.72) == pytest.approx(0.72 / (3.6 * 8))


def _front(*rows: SweepRow) -> list[str]:
    return [item.key for item in with_front(rows) if item.on_front]


def test_the_front_has_what_nothing_beats() -> None:
    fast = row("fast", "A10", latency_us=500.0, drop=0.02)
    exact = row("exact", "A10", latency_us=800.0, drop=0.0)
    worse = row("worse", "A10", latency_us=900.0, drop=0.01, engine_bytes=2000)
    small = row("small", "A10", latency_us=950.0, drop=0.03, engine_bytes=10)
    assert _front(fast, exact, worse, small, failed("failed")) == ["fast", "exact", "small"]


def test_predicted_and_measured_times_are_never_compared() -> None:
    assert _front(row("a", latency_us=10.0), row("b", latency_us=1000.0, latency="measured")) == ["a", "b"]
    found = report(row("a", latency_us=10.0), row("b", latency_us=1000.0, latency="measured"))
    (choice,) = choose(found, Limits())
    assert choice.best is not None and choice.best.key == "b"
    assert choice.others[0][1] == "its time is predicted, others are measured"


def test_without_a_price_only_engines_of_the_same_gpu_are_compared() -> None:
    assert _front(row("a", "T4", latency_us=900.0), row("b", "L4", latency_us=10.0)) == ["a", "b"]
    assert _front(row("a", "T4", latency_us=900.0), row("b", "T4", latency_us=10.0)) == ["b"]


def test_other_models_and_other_measures_are_not_compared() -> None:
    rows = row("a"), row("b", latency_us=2000.0, model_sha256="2" * 64), row("c", latency_us=3000.0, measure="cosine")
    assert _front(*rows) == ["a", "b", "c"]


_FIGURES = st.tuples(st.sampled_from(["L4", "A10", "T4"]), *[st.integers(1, 4) for _ in range(3)])


@given(st.lists(_FIGURES, min_size=1, max_size=12))
def test_what_is_off_the_front_is_beaten_by_something_on_it(figures: list[tuple[str, int, int, int]]) -> None:
    """By hand: no figure worse, one better; of rows with a price, cost is a figure too."""
    rows = [
        row(str(index), gpu, latency_us=100.0 * a, drop=0.01 * b, engine_bytes=c)
        for index, (gpu, a, b, c) in enumerate(figures)
    ]
    front = set(_front(*rows))

    def values(item: SweepRow) -> tuple[float, ...]:
        found = item.result
        assert found is not None and found.latency_us is not None and found.drop is not None
        return (found.latency_us, found.drop, found.engine_bytes, *(() if item.cost is None else (item.cost,)))

    for item in rows:
        rivals = [other for other in rows if (other.cost is None) == (item.cost is None)]
        rivals = [other for other in rivals if item.cost is not None or other.gpu == item.gpu]
        beaten = any(
            all(a <= b for a, b in zip(values(other), values(item), strict=True)) and values(other) != values(item)
            for other in rivals
        )
        assert (item.key in front) == (not beaten)


def test_the_answer_is_the_cheapest_within_the_limits_and_says_why_no_other() -> None:
    rows = (
        row("slow", "A10", "fp32", latency_us=9000.0),
        row("lossy", "A10", "int8", latency_us=1000.0, drop=0.05),
        row("dear", "L4", "fp16", latency_us=3000.0),
        row("good", "A10", "fp16", latency_us=4000.0, drop=0.01),
        failed("failed"),
    )
    (choice,) = choose(report(*rows), Limits(latency_ms=5, drop=0.01))
    assert choice.best is not None and (choice.best.key, choice.by) == ("good", "cost")
    assert {item.key: why for item, why in choice.others} == {
        "slow": "takes 9.00 ms",
        "lossy": "accuracy drops by 0.0500",
        "dear": "50.0 % dearer",
        "failed": "exit code 4: It cannot be built",
    }
    assert choices_json([choice])["models"][0]["best"]["key"] == "good"


def test_the_answer_is_the_fastest_where_prices_are_missing_and_none_where_nothing_fits() -> None:
    found = report(row("a", "T4", latency_us=800.0, batch=1), row("b", "L4", latency_us=1600.0, batch=8))
    (choice,) = choose(found, Limits())
    assert choice.best is not None and (choice.best.key, choice.by) == ("b", "latency")
    assert choice.others[0][1] == "300 % slower"
    assert choose(found, Limits(latency_ms=0.5))[0].best is None
    assert choose(found, Limits(), "other") == []


def test_an_engine_whose_accuracy_nobody_knows_is_within_no_limit_of_it() -> None:
    found = report(row("a", drop=None))
    assert choose(found, Limits(drop=1.0))[0].others[0][1] == "its accuracy is not known"


def test_the_report_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    found = report(row("a"), row("b", drop=None, latency_us=None), failed("c"), warnings=("careful",))
    write_report(found, tmp_path / "sweep.json")
    assert read_report(tmp_path / "sweep.json") == found
    assert json.loads((tmp_path / "sweep.json").read_text())["schema"] == "trtopt.sweep/1"
    with pytest.raises(UsageError, match="not judged as a whole"):
        facts_of(found, tmp_path / "sweep.json")


HOSTILE = "=cmd|' /C calc'!A0 <script>alert(1)</script> @me"


def _hostile() -> SweepReport:
    return report(row("a", model=HOSTILE), row("b", model=HOSTILE, latency_us=2000.0, drop=0.1), failed("c"))


def test_the_csv_has_a_line_for_each_job_and_no_formula() -> None:
    lines = list(csv.DictReader(io.StringIO(sweep_csv(_hostile()))))
    assert [line["status"] for line in lines] == ["done", "done", "failed"]
    assert lines[0]["model"] == f"'{HOSTILE}"
    assert lines[1]["drop"] == "0.1" and float(lines[0]["cost_per_million"]) == pytest.approx(0.2)
    assert lines[2]["exit_code"] == "4" and lines[2]["latency_us"] == ""


def test_markdown_and_page_take_nothing_for_markup() -> None:
    markdown, page = sweep_markdown(_hostile()), html_page(_hostile())
    assert "<script>alert" not in markdown and "@me" not in markdown
    assert "<script>alert" not in page
    assert "It cannot be built; V100; name another GPU" in page
