"""A sweep's report: cost, the Pareto front, the answer to a question, and its forms."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from drawn_cases import given
from hypothesis import strategies as st
from rich.console import Console
from sweep_samples import failed, report, row

from trtopt.errors import UsageError
from trtopt.gates.facts import facts_of
from trtopt.report.files import sweep_csv
from trtopt.report.html.page import html_page
from trtopt.report.schema.read import read_report
from trtopt.report.schema.sweep import SweepReport, SweepRow, cost_per_million, with_front
from trtopt.report.schema.write import write_report
from trtopt.report.text.markdown import as_markdown
from trtopt.report.text.sweep import EngineLimits, choices_json, choices_view, choose, view


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
    (choice,) = choose(found, EngineLimits())
    assert choice.best is not None and choice.best.key == "b"
    assert choice.others[0][1] == "its time is predicted, others are measured"


def test_without_a_price_only_engines_of_the_same_gpu_are_compared() -> None:
    assert _front(row("a", "T4", latency_us=900.0), row("b", "L4", latency_us=10.0)) == ["a", "b"]
    assert _front(row("a", "T4", latency_us=900.0), row("b", "T4", latency_us=10.0)) == ["b"]


def test_without_a_price_the_time_of_an_inference_stands_for_the_cost() -> None:
    """A batch of 8 takes longer than one inference, and less for each: at any price it is the cheaper."""
    rows = row("one", "T4", latency_us=800.0), row("eight", "T4", latency_us=1600.0, batch=8)
    assert _front(*rows) == ["one", "eight"]
    (choice,) = choose(report(*rows), EngineLimits())
    assert choice.best is not None and choice.best.key == "eight" and choice.best.on_front


def test_equals_are_on_the_front_together() -> None:
    assert _front(row("a"), row("b"), row("c", drop=0.1)) == ["a", "b"]


@pytest.mark.parametrize("jobs", [200, pytest.param(10_000, marks=pytest.mark.long)])
def test_all_of_many_jobs_may_be_on_the_front(jobs: int) -> None:
    rows = [row(str(index), latency_us=100.0 + index, drop=1.0 - index / 1e5) for index in range(jobs)]
    assert len(_front(*rows)) == len(rows)


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
        return (found.latency_us, found.drop, found.engine_bytes, found.latency_us if item.cost is None else item.cost)

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
    (choice,) = choose(report(*rows), EngineLimits(latency_ms=5, drop=0.01))
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
    (choice,) = choose(found, EngineLimits())
    assert choice.best is not None and (choice.best.key, choice.by) == ("b", "latency")
    assert choice.others[0][1] == "300 % slower"
    assert choose(found, EngineLimits(latency_ms=0.5))[0].best is None
    assert choose(found, EngineLimits(), "other") == []


def test_an_engine_whose_accuracy_nobody_knows_is_within_no_limit_of_it() -> None:
    found = report(row("a", drop=None))
    assert choose(found, EngineLimits(drop=1.0))[0].others[0][1] == "its accuracy is not known"


def test_an_unknown_drop_wins_no_tie() -> None:
    (choice,) = choose(report(row("unknown", drop=None), row("known", drop=0.001)), EngineLimits())
    assert choice.best is not None and choice.best.key == "known"


def test_a_drop_is_within_its_limit_as_it_is_for_a_build() -> None:
    (choice,) = choose(report(row("a", drop=0.9 - 0.895)), EngineLimits(drop=0.005))
    assert choice.best is not None and choice.others == ()


@pytest.mark.parametrize(
    ("drop", "latency_us", "why"),
    [
        (0.01004, 1000.0, "accuracy drops by 0.01004"),
        (0.01 + 2e-9, 1000.0, "accuracy drops by 0.010000002"),
        (0.0, 5001.0, "takes 5.001 ms"),
        (0.0, 5000.000001, "takes 5.000000001 ms"),
        (0.01996, 5004.9, "takes 5.005 ms; accuracy drops by 0.0200"),
    ],
)
def test_what_exceeds_a_limit_by_little_is_told_from_it(drop: float, latency_us: float, why: str) -> None:
    (choice,) = choose(report(row("a", drop=drop, latency_us=latency_us)), EngineLimits(latency_ms=5, drop=0.01))
    assert [reason for _, reason in choice.others] == [why]


def test_where_nothing_fits_the_nearest_is_named_with_all_that_it_exceeds() -> None:
    near = row("near", latency_us=6000.0, drop=0.011)
    found = report(near, row("lossy", latency_us=1000.0, drop=0.2), row("unknown", drop=None, latency_us=5001.0))
    (choice,) = choose(found, EngineLimits(latency_ms=5, drop=0.01))
    assert choice.best is None and choice.nearest is not None and choice.nearest.key == "near"
    assert choice.others[0][1] == "takes 6.00 ms; accuracy drops by 0.0110"
    assert choices_json([choice])["models"][0]["nearest"]["key"] == "near"
    assert "nearest: gpu L4, precision fp16" in _shown(found, EngineLimits(latency_ms=5, drop=0.01))
    assert choose(report(row("a", drop=None)), EngineLimits(drop=0.0))[0].nearest is None
    assert choose(report(failed("a")), EngineLimits(drop=0.0))[0].nearest is None
    assert choose(found, EngineLimits(latency_ms=0, drop=0))[0].nearest is not None


def test_the_answer_says_that_prices_are_missing_where_some_are_there() -> None:
    rows = row("a", "L4"), row("b", "T4", latency_us=800.0)
    assert "not all of them have a price" in _shown(report(*rows), EngineLimits())
    assert "price" not in _shown(report(rows[0]), EngineLimits())
    assert "price" not in _shown(report(*rows, prices={}), EngineLimits())


def _shown(found: SweepReport, limits: EngineLimits) -> str:
    out = io.StringIO()
    Console(file=out, width=200).print(choices_view(found, choose(found, limits)))
    return out.getvalue()


def test_a_metric_that_rose_a_lot_is_asked_about() -> None:
    """Of a loss, where less is better, a rise is a loss of accuracy; it shows as no drop."""
    assert "rose by up to 45" in as_markdown(view(report(row("a", drop=-45.0))))
    assert "rose" not in as_markdown(view(report(row("a", drop=-0.01))))


def test_the_forms_say_where_accuracy_was_verified() -> None:
    assert "against FP32, verified on the CPU" in as_markdown(view(report(row("a"))))


_WRONG = {
    "batch of 0": lambda data: data["rows"][0]["result"].update(batch=0),
    "negative time": lambda data: data["rows"][0]["result"].update(latency_us=-1.0),
    "time of an age": lambda data: data["rows"][0]["result"].update(latency_us=1e300),
    "negative size": lambda data: data["rows"][0]["result"].update(engine_bytes=-1),
    "negative cost": lambda data: data["rows"][0].update(cost=-1.0),
    "negative price": lambda data: data["prices"].update(L4=-1.0),
    "no jobs": lambda data: data.update(rows=[]),
    "another matrix": lambda data: data["rows"][1]["varied"].update(more="1"),
    "a key twice": lambda data: data["rows"][1].update(key="a"),
    "built without a result": lambda data: data["rows"][0].update(result=None),
    "failed without a reason": lambda data: data["rows"][2].update(failure=None),
    "failed with a result": lambda data: data["rows"][0].update(status="failed"),
}


@pytest.mark.parametrize("change", _WRONG.values(), ids=_WRONG)
def test_an_altered_report_is_one_clear_error(tmp_path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    data = json.loads(json.dumps(report(row("a"), row("b"), failed("c")).to_json_dict()))
    change(data)
    (tmp_path / "sweep.json").write_text(json.dumps(data))
    with pytest.raises(UsageError, match="wrong field"):
        read_report(tmp_path / "sweep.json")


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


def test_the_page_names_the_engine_by_all_that_the_sweep_varies() -> None:
    rows = [row("a", latency_us=5.0), row("b")]
    rows = [dataclasses.replace(item, varied={**item.varied, "opt_shapes": f"x-{item.key}"}) for item in rows]
    (tile,) = re.findall('<div class="tile">.*?</div>', html_page(view(report(*rows), drop=0.01)))
    assert "L4 fp16" in tile and "opt_shapes" in tile and "x-a" in tile


@pytest.mark.parametrize(
    ("drops", "latencies", "words"),
    [
        ((0.1, 0.01), (5.0, 9.0), ("that drops by at most 0.01", "9.00 µs predicted, accuracy drop 0.0100")),
        ((0.1, 0.2), (9.0, 5.0), ("none drops by at most 0.01: 9.00 µs", "drop 0.1000")),
        ((None, None), (5.0, 9.0), ("no engine", "none drops by at most 0.01, as far as is known")),
    ],
)
def test_the_page_recommends_no_engine_that_costs_more_accuracy_than_a_build_may(
    drops: tuple[float | None, ...], latencies: tuple[float, ...], words: tuple[str, ...]
) -> None:
    rows = [row(key, drop=drop, latency_us=us) for key, drop, us in zip("ab", drops, latencies, strict=True)]
    (tile,) = re.findall('<div class="tile">.*?</div>', html_page(view(report(*rows), drop=0.01)))
    assert all(word in tile for word in words), tile


def test_the_csv_has_a_line_for_each_job_and_no_formula() -> None:
    lines = list(csv.DictReader(io.StringIO(sweep_csv(_hostile()))))
    assert [line["status"] for line in lines] == ["done", "done", "failed"]
    assert lines[0]["model"] == f"'{HOSTILE}"
    assert lines[1]["drop"] == "0.1" and float(lines[0]["cost_per_million"]) == pytest.approx(0.2)
    assert lines[2]["exit_code"] == "4" and lines[2]["latency_us"] == ""


def test_the_csv_has_one_line_for_a_job_whatever_its_texts_hold() -> None:
    job = failed("c")
    assert job.failure is not None
    job = dataclasses.replace(
        job,
        varied={"=axis": "a\rb", **job.varied},
        failure=dataclasses.replace(job.failure, what="one\rtwo\nthree\x1b[31m"),
    )
    lines = sweep_csv(report(job)).encode().splitlines()
    assert len(lines) == 2 and lines[0].startswith(b"'=axis,")
    assert b"one\\rtwo\\nthree\\x1b[31m" in lines[1]


def test_headings_of_a_markdown_table_are_no_markup() -> None:
    job = row("a")
    job = dataclasses.replace(job, varied={"<b>|": "1", **job.varied})
    text = as_markdown(view(report(job, currency="<i>|")))
    head = next(line for line in text.splitlines() if line.startswith("|"))
    assert "\\<b\\>\\|" in head and "\\<i\\>\\|/million" in head


def test_markdown_and_page_take_nothing_for_markup() -> None:
    markdown, page = as_markdown(view(_hostile())), html_page(view(_hostile(), drop=0.01))
    assert "<script>alert" not in markdown and "@me" not in markdown
    assert "<script>alert" not in page
    assert "It cannot be built; V100; name another GPU" in page
