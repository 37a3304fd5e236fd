"""The checkpoint of a search: what a killed run leaves is used, and nothing else."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from pathlib import Path

import pytest
from search_oracles import Numbers, one_type

from trtopt.config.budget import AccuracyBudget
from trtopt.events import Event, ignore
from trtopt.precision.search.search import search_budget
from trtopt.precision.search.space import Budget, Checkpoint, Evaluation, Mix

KEY = 64 * "a"
MIX = Mix.of("fp16", {"r0": "int8", "r1": "int8"})


def network() -> Numbers:
    return one_type([0.02, 0.001, 0.004, 0.003], [40, 30, 20, 10])


def checkpoint(oracle: Numbers, folder: Path, key: str = KEY, events: list[Event] | None = None) -> Checkpoint:
    return Checkpoint(oracle, key, folder, ignore if events is None else events.append)


def file_in(folder: Path) -> Path:
    (found,) = (folder / "search").iterdir()
    return found


def test_a_second_search_asks_nothing_and_finds_the_same(tmp_path: Path) -> None:
    first, second = network(), network()
    found = search_budget(first.space, Budget(AccuracyBudget(0.01), "top1"), checkpoint(first, tmp_path))
    kept = checkpoint(second, tmp_path)
    assert search_budget(second.space, Budget(AccuracyBudget(0.01), "top1"), kept) == found
    assert not second.asked and kept.reused == len(first.asked) > 5


def test_a_search_with_another_budget_uses_what_was_evaluated(tmp_path: Path) -> None:
    first, second = network(), network()
    search_budget(first.space, Budget(AccuracyBudget(0.01), "top1"), checkpoint(first, tmp_path))
    found = search_budget(second.space, Budget(AccuracyBudget(0.005), "top1"), checkpoint(second, tmp_path))
    assert found.reached and second.count("evaluate") < found.record.evaluations


@pytest.mark.parametrize("cut", range(2, 60, 7))
def test_a_torn_last_line_is_left_out_and_the_file_goes_on(tmp_path: Path, cut: int) -> None:
    oracle = network()
    book = checkpoint(oracle, tmp_path)
    book.time_us(MIX)
    before = book.path.read_bytes()
    book.evaluate(MIX)
    book.path.write_bytes(book.path.read_bytes()[:-cut])
    torn = network()
    again = checkpoint(torn, tmp_path)
    assert again.evaluate(MIX) == oracle.evaluate(MIX) and again.time_us(MIX) == oracle.time_us(MIX)
    assert torn.count("evaluate") == 1 and torn.count("time_us") == 0
    assert book.path.read_bytes().startswith(before)
    whole = network()
    assert checkpoint(whole, tmp_path).evaluate(MIX) == oracle.evaluate(MIX) and not whole.asked


def test_answers_that_are_not_finite_come_back_as_infinite(tmp_path: Path) -> None:
    class Broken(Numbers):
        def evaluate(self, mix: Mix) -> Evaluation:
            return Evaluation(math.inf, math.nan)

        def time_us(self, mix: Mix) -> float:
            return math.inf

        def rank(self, mix: Mix) -> dict[str, float]:
            return {"r0": math.nan, "r1": 0.25}

    plain = network()
    broken = Broken(plain.space, plain.errors)
    for oracle in (broken, plain):
        book = checkpoint(oracle, tmp_path)
        assert book.evaluate(MIX) == Evaluation(math.inf, math.inf)
        assert book.time_us(MIX) == math.inf and book.rank(MIX) == {"r0": math.inf, "r1": 0.25}
    assert not plain.asked
    for line in file_in(tmp_path).read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)


def test_names_of_regions_may_hold_anything(tmp_path: Path) -> None:
    odd = Mix.of("bf16", {"a\nb": "fp8", "\ud800": "int8", "": "int8"})
    oracle = network()
    oracle.errors = dict.fromkeys(odd.quantized, 0.5)
    checkpoint(oracle, tmp_path).rank(odd)
    asked = list(oracle.asked)
    assert checkpoint(oracle, tmp_path).evaluate(odd).drop == 1.5
    assert checkpoint(oracle, tmp_path).rank(odd) == {"a\nb": 0.5, "\ud800": 0.5, "": 0.5}
    assert oracle.asked == [*asked, ("evaluate", odd)]


def test_another_key_is_another_file(tmp_path: Path) -> None:
    checkpoint(network(), tmp_path).evaluate(MIX)
    oracle = network()
    checkpoint(oracle, tmp_path, 64 * "b").evaluate(MIX)
    assert oracle.count("evaluate") == 1 and len(list((tmp_path / "search").iterdir())) == 2


@pytest.mark.parametrize(
    "damage",
    [
        b"\x00\xff",
        b"[]\n",
        b'{"format": "trtopt.search/1"}\n',
        b'{"format": "trtopt.search/1", "identity": "0"}\n',
        b"[" * 100_000,
    ],
)
def test_a_damaged_file_is_said_and_started_anew(tmp_path: Path, damage: bytes) -> None:
    checkpoint(network(), tmp_path).evaluate(MIX)
    file_in(tmp_path).write_bytes(damage)
    events: list[Event] = []
    oracle = network()
    checkpoint(oracle, tmp_path, events=events).evaluate(MIX)
    assert oracle.count("evaluate") == 1
    (warning,) = events
    assert warning.kind == "warning" and "starting anew" in warning.text and str(tmp_path) in warning.text
    again = network()
    checkpoint(again, tmp_path).evaluate(MIX)
    assert not again.asked


@pytest.mark.parametrize(
    "line",
    [
        "",
        "7",
        "null",
        '{"ask": "evaluate"}',
        '{"ask": "evaluate", "narrow": "fp16", "types": [], "answer": [0, 0]}',
        '{"ask": "evaluate", "narrow": "fp16", "types": {"r0": "int8", "r1": "int8"}, "answer": [0]}',
        '{"ask": "evaluate", "narrow": "fp16", "types": {"r0": "int8", "r1": "int8"}, "answer": ["x", 0]}',
        '{"ask": "evaluate", "narrow": "fp16", "types": {"r0": ["int8"], "r1": "int8"}, "answer": [0, 0]}',
        '{"ask": "rank", "narrow": "fp16", "types": {"r0": "int8", "r1": "int8"}, "answer": [1]}',
    ],
)
def test_a_line_that_is_no_answer_is_left_out(tmp_path: Path, line: str) -> None:
    checkpoint(network(), tmp_path).time_us(MIX)
    with file_in(tmp_path).open("a") as file:
        file.write(line + "\n")
    oracle = network()
    book = checkpoint(oracle, tmp_path)
    assert book.evaluate(MIX) == network().evaluate(MIX) and book.rank(MIX) == network().rank(MIX)
    assert book.time_us(MIX) == network().time_us(MIX)
    assert [question for question, _ in oracle.asked] == ["evaluate", "rank"]


def test_a_folder_that_cannot_be_written_ends_no_search(tmp_path: Path) -> None:
    (tmp_path / "search").write_text("in the way")
    events: list[Event] = []
    book = checkpoint(network(), tmp_path, events=events)
    assert [book.evaluate(MIX), book.evaluate(MIX)] == [network().evaluate(MIX)] * 2
    assert [event.kind for event in events] == ["warning"] and "not kept" in events[0].text


def test_the_default_folder_need_not_be_writable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    (tmp_path / ".cache").write_text("in the way")
    events: list[Event] = []
    oracle = network()
    book = Checkpoint(oracle, KEY, None, events.append)
    assert [book.evaluate(MIX), book.evaluate(MIX)] == [network().evaluate(MIX)] * 2
    assert oracle.count("evaluate") == 1
    assert [event.kind for event in events] == ["warning"] and "not kept" in events[0].text


def test_a_search_goes_on_when_its_file_is_gone(tmp_path: Path) -> None:
    events: list[Event] = []
    book = checkpoint(network(), tmp_path, events=events)
    book.evaluate(MIX)
    os.unlink(book.path)
    book.time_us(MIX)
    oracle = network()
    again = checkpoint(oracle, tmp_path)
    again.time_us(MIX)
    again.evaluate(MIX)
    assert [question for question, _ in oracle.asked] == ["evaluate"] and not events


def test_what_a_few_samples_settle_is_asked_again_by_a_later_run(tmp_path: Path) -> None:
    """It depends on the budget, which the file of answers does not."""

    class Partial(Numbers):
        def evaluate(self, mix: Mix) -> Evaluation:
            return replace(super().evaluate(mix), is_partial=bool(mix.quantized))

    oracle = Partial(one_type([0.1], [50]).space, {("r0", "int8"): 0.1})
    asked = Mix("fp16"), Mix("fp16", (("r0", "int8"),))
    first = checkpoint(oracle, tmp_path)
    found = [first.evaluate(mix) for mix in asked]
    second = checkpoint(oracle, tmp_path)
    assert [second.evaluate(mix) for mix in asked] == found
    assert oracle.count("evaluate") == 3 and second.reused == 1
