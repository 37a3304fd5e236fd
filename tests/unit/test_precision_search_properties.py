"""What holds of every search, whatever the network: random errors, interactions, plateaus and noise."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from drawn_cases import given
from hypothesis import strategies as st
from search_oracles import Numbers, two_types

from trtopt.config.budget import AccuracyBudget
from trtopt.events import ignore
from trtopt.precision.search.search import SearchResult, search_auto, search_budget
from trtopt.precision.search.space import Budget, Checkpoint, Evaluation, Mix, Oracle, Space

Search = Callable[[Space, Budget, Oracle], SearchResult]
SEARCHES: tuple[Search, ...] = (search_budget, search_auto)
LEAST_GAIN = 1e-9

errors = st.one_of(st.just(0.0), st.floats(1e-6, 0.1), st.just(math.inf))
saved = st.one_of(st.just(0.0), st.floats(-5.0, 100.0))
options = st.tuples(errors, saved)


@st.composite
def networks(draw: st.DrawFn) -> Numbers:
    regions = draw(st.lists(st.tuples(options, st.none() | options), max_size=14))
    return two_types(
        [first for first, _ in regions],
        [second for _, second in regions],
        pairs=draw(st.sampled_from([0.0, 0.002, -0.0005])),
        steps=draw(st.sampled_from([0, 20, 1000])),
        noise=draw(st.sampled_from([0.0, 0.003, 0.05])),
        floor={"fp16": draw(st.sampled_from([0.0, 0.004, 0.02])), "bf16": draw(st.sampled_from([0.0, 0.02]))},
        fusion=draw(st.sampled_from([1.0, 0.5, -0.3])),
    )


budgets = st.builds(
    Budget,
    st.builds(
        AccuracyBudget,
        st.sampled_from([0.0, 0.005, 0.01, 0.05]),
        st.sampled_from([None, -10 * math.log10(0.03)]),
    ),
    st.just("top1"),
    aim=st.sampled_from([None, 0.0, 0.004]),
)
searches = st.sampled_from(SEARCHES)


@given(networks(), budgets, searches)
def test_the_result_holds_the_budget_if_sixteen_bit_does_and_is_never_slower(
    oracle: Numbers, budget: Budget, search: Search
) -> None:
    sixteen = Mix("fp16")
    can = budget.holds(oracle.evaluate(sixteen))
    oracle.asked.clear()
    found = search(oracle.space, budget, oracle)
    assert found.reached or not can
    assert found.reached == budget.holds(found.evaluation) == found.record.reached
    assert found.evaluation == oracle.evaluate(found.mix)
    if can:
        assert oracle.time_us(found.mix) <= oracle.time_us(sixteen) + LEAST_GAIN


@given(networks(), budgets, searches, many=60)
def test_no_point_is_evaluated_priced_or_ranked_twice_and_none_beyond_the_most(
    oracle: Numbers, budget: Budget, search: Search
) -> None:
    record = search(oracle.space, budget, oracle).record
    for question in ("evaluate", "time_us", "rank"):
        asked = [mix for kind, mix in oracle.asked if kind == question]
        assert len(asked) == len(set(asked))
    assert oracle.count("evaluate") == record.evaluations == len(record.steps) <= 40
    assert oracle.count("rank") == record.rankings
    names = {region.name for region in oracle.space.regions}
    assert set(record.reverted) <= names and set(record.won_back) <= set(record.types) <= names


@given(networks(), budgets, searches, many=60)
def test_the_front_is_a_front_and_the_result_is_the_fastest_on_it_that_holds(
    oracle: Numbers, budget: Budget, search: Search
) -> None:
    found = search(oracle.space, budget, oracle)
    front = found.record.pareto
    assert [point.chosen for point in front].count(True) == 1
    rest = [point for point in front if not point.chosen]
    for one in rest:
        assert not any(
            other.predicted_us <= one.predicted_us and other.drop < one.drop
            for other in front
            if other.predicted_us < math.inf
        )
    chosen = next(point for point in front if point.chosen)
    assert chosen.predicted_us == found.record.predicted_us and chosen.within_budget == found.reached


class KilledError(Exception):
    """The process ends here."""


class Mortal(Numbers):
    """Dies at one of its answers."""

    left = 0

    def answer(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise KilledError

    def evaluate(self, mix: Mix) -> Evaluation:
        self.answer()
        return super().evaluate(mix)

    def time_us(self, mix: Mix) -> float:
        self.answer()
        return super().time_us(mix)

    def rank(self, mix: Mix) -> dict[str, float]:
        self.answer()
        return super().rank(mix)


@given(networks(), budgets, searches, st.lists(st.integers(0, 12), max_size=4), many=25)
def test_a_search_that_was_killed_goes_on_to_the_same_result_and_asks_nothing_twice(
    oracle: Numbers, budget: Budget, search: Search, lives: list[int]
) -> None:
    whole = search(oracle.space, budget, oracle)
    mortal = Mortal(oracle.space, oracle.errors, oracle.pairs, oracle.steps, oracle.noise, oracle.floor, oracle.fusion)
    with TemporaryDirectory() as folder:
        for life in [*lives, 10_000]:
            mortal.left = life
            try:
                found = search(oracle.space, budget, Checkpoint(mortal, "network", Path(folder), ignore))
            except KilledError:
                continue
    assert found == whole
    assert sorted(map(repr, mortal.asked)) == sorted(map(repr, oracle.asked))
