"""What a person reads about a search."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from rich.console import Console, Group, RenderableType
from search_oracles import one_type, two_types

from trtopt.config.budget import AccuracyBudget
from trtopt.precision.search.search import search_auto, search_budget
from trtopt.precision.search.space import Budget
from trtopt.report.schema.decisions import SearchRecord
from trtopt.report.text.decisions import drop_text, miss_text, pareto_section
from trtopt.report.text.decisions import search_section as section
from trtopt.support.json_text import plain


def shown(parts: list[RenderableType], width: int = 100) -> str:
    console = Console(width=width, no_color=True, markup=False, emoji=False, highlight=False)
    with console.capture() as capture:
        console.print(Group(*parts))
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def record() -> SearchRecord:
    oracle = two_types([(0.02, 40), (0.002, 30), (0.001, 5)], [(0.003, 35), (0.001, 10), None])
    return search_auto(oracle.space, Budget(AccuracyBudget(0.01, source="default"), "top-1 agreement"), oracle).record


def test_it_says_what_was_asked_for_and_what_was_found() -> None:
    text = shown(section(record()), width=140)
    assert "a drop of 0.01 (top-1 agreement), the default\n" in text
    assert "1 in FP8 and 2 in INT8 of 3 regions: drop 0.0060, predicted 930 us against 1.00 ms in 16-bit" in text
    assert "taken back   1 region: r0" in text
    assert "5 evaluations, 2 rankings" in text


def test_every_evaluation_has_a_row() -> None:
    lines = shown(section(record())).splitlines()
    start = next(index for index, line in enumerate(lines) if "tried" in line)
    rows = [" ".join(line.split()) for line in lines[start + 1 :]]
    assert rows == [
        "1 16-bit only fp16 0.0000 within",
        "2 16-bit only bf16 0.0000 within",
        "3 all that pays int8 0.0230 missed",
        "4 another start fp8 0.0040 within",
        "5 taken back int8 2/3 + fp8 1/3 1 region: r0 0.0060 within",
    ]


def test_the_front_marks_the_chosen_point() -> None:
    found = record()
    lines = [" ".join(line.split()) for line in shown(pareto_section(found)).splitlines()]
    assert lines[0] == "point predicted INT8 of the flop FP8 of the flop drop budget"
    assert lines[1] == "int8 925 us 100 % 0 % 0.0230 missed"
    assert lines[2] == "* int8 2/3 + fp8 1/3 930 us 66.7 % 33.3 % 0.0060 within"
    assert lines[-2] == "fp16 1.00 ms 0 % 0 % 0.0000 within"
    assert lines[-1] == "* chosen; no other point is both faster and more accurate"


def test_a_faster_point_that_is_too_close_to_the_budget_is_not_called_within_it() -> None:
    oracle = one_type([0.004, 0.003, 0.002], [1, 2, 3])
    found = search_budget(oracle.space, Budget(AccuracyBudget(0.01), "top1", aim=0.006), oracle).record
    front = [" ".join(line.split()) for line in shown(pareto_section(found), width=160).splitlines()]
    assert front[1].startswith("int8 ") and front[1].endswith(" 0.0090 too close")
    assert front[2].startswith("* int8 2/3 ") and front[2].endswith(" 0.0050 within")
    assert front[-1] == (
        "* chosen; no other point is both faster and more accurate; "
        "too close: within the budget, not within the 0.006 that the search aims at"
    )


def test_a_miss_names_the_closest_point() -> None:
    oracle = one_type([0.1, 0.1], [10, 10], floor={"fp16": 0.02})
    found = search_budget(oracle.space, Budget(AccuracyBudget(0.01), "metric.py:f"), oracle).record
    assert miss_text(found) == (
        "accuracy budget: no precision that was tried is within the 0.01 of --max-accuracy-drop; the closest point has "
        "a drop of 0.0200 (metric.py:f) with no region in 8-bit, predicted 1.00 ms"
    )
    assert "NOT REACHED; closest: no region in 8-bit" in shown(section(found))


def test_a_budget_of_sqnr_alone_is_said_as_one() -> None:
    oracle = one_type([0.1, 0.1], [10, 10], floor={"fp16": 0.02})
    found = search_budget(oracle.space, Budget(AccuracyBudget(sqnr_db=20.0), "agreement"), oracle).record
    assert not found.reached
    assert miss_text(found) == (
        "accuracy budget: no precision that was tried holds --min-sqnr-db; the closest point has 17.0 dB SQNR with no "
        "region in 8-bit, predicted 1.00 ms"
    )
    text = " ".join(shown(section(found)).split())
    assert "budget an SQNR of 20 dB" in text and "no region in 8-bit: SQNR 17.0 dB, predicted" in text
    assert "16-bit only fp16 17.0 dB missed" in text and "drop" not in text
    front = [" ".join(line.split()) for line in shown(pareto_section(found)).splitlines()]
    assert front[0] == "point predicted INT8 of the flop SQNR budget"
    assert "* fp16 1.00 ms 0 % 17.0 dB missed" in front


def test_both_budgets_have_a_column() -> None:
    oracle = one_type([0.001, 0.002], [10, 10])
    found = search_budget(oracle.space, Budget(AccuracyBudget(0.01, 20.0), "top1"), oracle).record
    text = " ".join(shown(section(found), width=140).split())
    assert "a drop of 0.01 (top1); and an SQNR of 20 dB" in text and "drop 0.0030, SQNR 25.2 dB, predicted" in text
    assert "all that pays int8 0.0030 25.2 dB within" in text


def test_the_models_own_qdq_is_named() -> None:
    oracle = one_type([], [])
    found = search_budget(oracle.space, Budget(AccuracyBudget(0.01), "top1"), oracle).record
    said = shown(section(dataclasses.replace(found, own_qdq=True)), width=140)
    assert "no region in 8-bit but the model's own Q/DQ" in said and "in all points" in said
    assert "own Q/DQ" not in shown(section(found))


def test_steps_beyond_the_first_are_counted_and_the_aim_is_said() -> None:
    generator = np.random.default_rng(0)
    oracle = one_type([*(generator.lognormal(0, 1.5, 200) / 900)], [*generator.lognormal(0, 1, 200)])
    found = search_budget(oracle.space, Budget(AccuracyBudget(0.01), "top1", aim=0.0056), oracle).record
    found = dataclasses.replace(found, steps=found.steps * 3, resumed=7, stopped_early=True)
    text = shown(section(found), width=140)
    assert f"and {len(found.steps) - 24} more, in the JSON report" in text
    assert "; the search aims at 0.0056, for samples it has not seen" in text
    assert "7 answers from an earlier run; stopped at the most evaluations or seconds that it takes" in text


def test_names_of_the_model_cannot_change_the_terminal() -> None:
    found = dataclasses.replace(record(), reverted=("\x1b[31mred" + "x" * 80,))
    text = shown(section(found))
    assert "\x1b" not in text and "\\x1b" in text and "x" * 60 not in text


def test_nothing_searched_is_nothing_said() -> None:
    assert section(None) == [] and pareto_section(None) == []


def test_the_record_is_plain_json() -> None:
    value = plain(dataclasses.asdict(record()))
    assert value["pareto"][0].keys() == {
        *("name", "precision", "flop_share", "predicted_us", "drop", "error", "metric", "chosen", "within_budget"),
        *("disagreement", "noise", "within_aim"),
    }
    assert value["steps"][0]["action"] == "16-bit" and value["types"] == {"r0": "fp8", "r1": "int8", "r2": "int8"}


def test_drops() -> None:
    assert [drop_text(value) for value in (0.0, 0.0123, -0.002, 4.5e-5, math.inf, math.nan)] == [
        *("0.0000", "0.0123", "-0.0020", "4.5e-05", "not finite", "not finite")
    ]
