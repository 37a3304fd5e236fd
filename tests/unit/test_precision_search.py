"""The search for the fastest precision within an accuracy budget, on networks that are only numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from search_oracles import PLAIN_US, Numbers, one_type, two_types

from trtopt.config.budget import AccuracyBudget
from trtopt.events import Event
from trtopt.precision.search.search import SearchResult, Trials, Tried, conclude, search_auto, search_budget
from trtopt.precision.search.space import Budget, Evaluation, Mix, Move, RegionOption, SearchRegion, Space, aim_for
from trtopt.report.schema.decisions import SearchRecord
from trtopt.support.precision import Precision

BUDGET = Budget(AccuracyBudget(0.01), "top1")


def random_network(regions: int, seed: int, total: float, **how: float) -> Numbers:
    """Errors and savings that differ by orders of magnitude, as those of layers do; ``total`` is the sum of errors."""
    generator = np.random.default_rng(seed)
    errors, saved = generator.lognormal(0, 1.5, regions), generator.lognormal(0, 1, regions)
    return one_type([*(errors * total / errors.sum())], [*(saved * 400 / saved.sum())], **how)


def actions(record: SearchRecord) -> list[str]:
    return [step.action for step in record.steps]


def test_all_that_pays_is_kept_after_one_evaluation_where_it_is_within_the_budget() -> None:
    oracle = one_type([0.001, 0.002, 0.003], [10, 20, 30])
    found = search_budget(oracle.space, BUDGET, oracle)
    assert found.reached and found.mix == oracle.space.fastest("fp16")
    assert oracle.count("evaluate") == 1 and oracle.count("rank") == 0
    assert found.record.predicted_us == PLAIN_US - 60 and found.record.plain_us == PLAIN_US
    assert not found.record.reverted and not found.record.stopped_early


def test_the_region_with_the_most_error_per_microsecond_goes_first() -> None:
    """r1 has the largest error, and r2 the largest for what it saves."""
    oracle = one_type([0.001, 0.006, 0.005, 0.001], [10, 100, 5, 10])
    found = search_budget(oracle.space, BUDGET, oracle)
    assert found.record.reverted == ("r2",)
    assert found.mix.types == {"r0": "int8", "r1": "int8", "r3": "int8"}
    assert found.evaluation.drop == pytest.approx(0.008)


def test_sixteen_bit_beyond_the_budget_ends_the_search_at_once_with_the_closest_point() -> None:
    oracle = one_type([0.1] * 50, [10] * 50, floor={"fp16": 0.02})
    found = search_budget(oracle.space, BUDGET, oracle)
    assert not found.reached and not found.record.reached
    assert found.mix == Mix("fp16") and found.record.drop == pytest.approx(0.02)
    assert oracle.count("evaluate") == 2 and oracle.count("rank") == 0


@pytest.mark.parametrize("regions", [10, 53, 200, 800])
@pytest.mark.parametrize("total", [0.02, 0.1, 0.8])
def test_the_budget_is_reached_in_a_logarithmic_number_of_evaluations(regions: int, total: float) -> None:
    """Two to reach all 16-bit; doubling and halving; what follows are attempts to win back."""
    for seed in range(3):
        oracle = random_network(regions, seed, total)
        record = search_budget(oracle.space, BUDGET, oracle).record
        reaching = [action for action in actions(record) if action != "win back"]
        assert record.reached and len(reaching) <= 2 + 2 * math.ceil(math.log2(regions) + 1)
        assert record.evaluations <= 40


@pytest.mark.parametrize("seed", range(12))
def test_it_comes_close_to_the_best_choice(seed: int) -> None:
    """Against the knapsack's exact optimum, by dynamic programming over 4000 steps of the budget."""
    oracle = random_network(53, seed, 0.05)
    found = search_budget(oracle.space, BUDGET, oracle)
    best = np.zeros(4001)
    for region in oracle.space.regions:
        weight = math.ceil(oracle.errors[region.name, "int8"] / BUDGET.drop * 4000)
        if weight <= 4000:
            best[weight:] = np.maximum(best[weight:], best[: 4001 - weight] + region.saved_us("int8"))
    assert oracle.space.saved_us(found.mix) >= 0.99 * best[-1]


def test_a_region_is_won_back_where_the_ranking_was_wrong() -> None:
    """Ranked by what each region adds beside its neighbour: r0 and r1 are only bad together, and r0 saves more."""
    oracle = one_type([0.001, 0.001, 0.001], [50, 40, 1], pairs=0.012)
    found = search_budget(oracle.space, BUDGET, oracle)
    assert found.mix.types == {"r0": "int8", "r2": "int8"}
    assert "win back" in actions(found.record) or found.record.reverted == ("r1",)


def test_what_was_won_back_is_named() -> None:
    """Everything goes when no ranking tells good from bad; then the good ones come back, the fastest first."""

    class Misled(Numbers):
        def rank(self, mix: Mix) -> dict[str, float]:
            self.asked.append(("rank", mix))
            return {name: 1.0 / (1 + self.errors[name, "int8"]) for name in mix.types}

    plain = one_type([0.05, 0.0001, 0.0001, 0.0001, 0.0001], [50, 40, 30, 20, 10])
    oracle = Misled(plain.space, plain.errors)
    found = search_budget(oracle.space, BUDGET, oracle)
    assert found.mix.types == dict.fromkeys(("r1", "r2", "r3", "r4"), "int8")
    assert found.record.reverted == ("r0",) and set(found.record.won_back) >= {"r1"}


def test_many_regions_are_won_back_in_few_evaluations() -> None:
    """The ranking puts the one bad region last, so that all are taken back; attempts to win back double."""

    class Misled(Numbers):
        def rank(self, mix: Mix) -> dict[str, float]:
            return {name: 1.0 / (1 + self.errors[name, "int8"]) for name in mix.types}

    plain = one_type([0.05, *[0.0001] * 32], [100.0, *(10.0 + i for i in range(32))])
    oracle = Misled(plain.space, plain.errors)
    found = search_budget(oracle.space, BUDGET, oracle)
    assert found.record.reverted == ("r0",) and found.record.evaluations <= 24


def test_where_rankings_do_not_tell_the_way_down_is_halved() -> None:
    """FP8 is ranked as the better type everywhere, and is far worse: steps from INT8 to FP8 lead nowhere."""

    class Misled(Numbers):
        def rank(self, mix: Mix) -> dict[str, float]:
            return {name: 0.001 if dtype == "fp8" else 0.1 for name, dtype in mix.types.items()}

    plain = two_types([(0.003, 20)] * 40, [(0.05, 19)] * 40)
    oracle = Misled(plain.space, plain.errors)
    found = search_auto(oracle.space, BUDGET, oracle)
    assert found.reached and "take fewer back" in actions(found.record)
    assert found.mix.types and set(found.mix.types.values()) == {"int8"}


@pytest.mark.parametrize("seconds", [120.0, 0.0])
def test_a_slow_search_that_is_misled_does_not_end_in_sixteen_bit(seconds: float) -> None:
    """As long as more than half of the regions are 8-bit, no step helps."""

    class Flat(Numbers):
        def evaluate(self, mix: Mix) -> Evaluation:
            found = super().evaluate(mix)
            return Evaluation(1.0, 1.0) if len(mix.types) > 16 else found

    plain = one_type([0.0001] * 32, [10.0] * 32)
    oracle = Flat(plain.space, plain.errors)
    found = search_budget(oracle.space, BUDGET, oracle, seconds=seconds)
    assert found.reached and len(found.mix.types) == 16


def test_a_step_that_does_not_help_is_undone_and_the_regions_ranked_anew() -> None:
    """Three regions look worst at first and matter nothing; taking the second pair of them raises the drop."""

    class Surprising(Numbers):
        def evaluate(self, mix: Mix) -> Evaluation:
            found = super().evaluate(mix)
            missing = {"r1", "r2"} - set(mix.types)
            return Evaluation(found.drop + 0.02 * len(missing) * bool(mix.types), found.error)

        def rank(self, mix: Mix) -> dict[str, float]:
            first = not self.count("rank")
            errors = super().rank(mix)
            return {**errors, "r1": 0.5, "r2": 0.4} if first and "r1" in errors else errors

    plain = one_type([0.03, 0.001, 0.001, 0.02, 0.001], [1.0] * 5)
    errors = {**plain.errors, ("r0", "int8"): 0.9}
    oracle = Surprising(plain.space, errors)
    found = search_budget(oracle.space, BUDGET, oracle)
    undone = [step for step in found.record.steps if step.action == "take back" and not step.kept]
    assert undone and undone[0].regions == ("r1", "r2")
    assert found.record.rankings == 2
    assert found.mix.types == dict.fromkeys(("r1", "r2", "r4"), "int8")


def test_equal_drops_are_told_apart_by_the_error() -> None:
    """A metric over 20 samples: most steps change nothing in it, and the search does not take that for no help."""
    oracle = random_network(40, 1, 0.4, steps=20)
    found = search_budget(oracle.space, Budget(AccuracyBudget(0.05), "top1"), oracle)
    assert found.reached and found.record.rankings == 1
    assert len(found.mix.quantized) > 10


@pytest.mark.parametrize(("error", "is_nearer"), [(0.0010, True), (0.0011, True), (0.0013, False)])
def test_points_that_few_samples_refuse_compare_by_their_error(error: float, is_nearer: bool) -> None:
    """Three answers instead of two changed among eight samples, which is chance; an error that is 2 % larger may be."""
    start, fewer = Mix.of(Precision.FP16, {"r0": Precision.INT8, "r1": Precision.INT8}), Mix(Precision.FP16)
    oracle = one_type([0.1, 0.1], [10, 10])
    trials = Trials(oracle.space, BUDGET, oracle)
    trials.tried[start] = Tried("start", (), Evaluation(2 / 64, 0.00108, is_partial=True))
    trials.tried[fewer] = Tried("take back", ("r0", "r1"), Evaluation(3 / 64, error, is_partial=True))
    assert trials.is_nearer(fewer, start) == is_nearer
    trials.tried[fewer] = Tried("take back", ("r0", "r1"), Evaluation(3 / 64, error))
    assert not trials.is_nearer(fewer, start)


def trials_of(points: list[tuple[float, float]], **how: float) -> tuple[Trials, list[Mix]]:
    """Points of the given errors and drops, as if they had been evaluated."""
    oracle = one_type([0.1] * len(points), [1.0] * len(points))
    trials = Trials(oracle.space, Budget(AccuracyBudget(0.01), "top1", **how), oracle)
    mixes = [Mix("fp16", tuple(oracle.space.fastest("fp16").quantized[:index])) for index in range(len(points))]
    trials.tried.update(
        (mix, Tried("win back", (), Evaluation(drop, error))) for mix, (error, drop) in zip(mixes, points, strict=True)
    )
    return trials, mixes


def test_a_point_that_is_within_the_budget_by_luck_is_not_taken() -> None:
    """A larger error with a smaller drop than points that miss: their expected drop is the mean of all three."""
    trials, mixes = trials_of([(0.0, 0.0), (0.1, 0.012), (0.2, 0.013), (0.3, 0.009), (0.9, math.inf)])
    expected = trials.expected()
    assert [expected[mix] for mix in mixes] == pytest.approx([0.0, 0.034 / 3, 0.034 / 3, 0.034 / 3, math.inf])
    assert [trials.holds(mix) for mix in mixes] == [True, False, False, False, False]
    assert conclude(trials, mixes[4], mixes[0]).mix == mixes[0]


def test_drops_that_rise_with_the_error_and_points_of_equal_error_are_taken_as_they_are() -> None:
    trials, mixes = trials_of([(0.0, 0.001), (0.1, 0.002), (0.2, 0.011)])
    assert [trials.expected()[mix] for mix in mixes] == [0.001, 0.002, 0.011]
    unknown, mixes = trials_of([(0.0, 0.03), (0.0, 0.002), (0.0, 0.011)])
    assert [unknown.expected()[mix] for mix in mixes] == [0.03, 0.002, 0.011]


def test_sixteen_bit_is_not_one_of_many_and_stands_as_it_was_measured() -> None:
    """Two 8-bit points of smaller error and larger drop say nothing about it."""
    trials, mixes = trials_of([(0.2, 0.009), (0.1, 0.02), (0.15, 0.03)])
    assert trials.expected()[mixes[0]] == 0.009 and trials.holds(mixes[0])
    assert conclude(trials, mixes[2], mixes[0]).mix == mixes[0]


def test_chance_costs_time_and_not_accuracy() -> None:
    """With a standard deviation of 0.003 the true drops stay near the aim: luck would take them beyond the budget."""
    drops = []
    for seed in range(12):
        oracle = random_network(53, seed, 0.2, noise=0.003)
        found = search_budget(oracle.space, Budget(AccuracyBudget(0.01), "top1", aim=0.007), oracle)
        assert found.reached and found.evaluation.drop <= 0.01
        drops.append(oracle.error(found.mix))
    assert np.mean(drops) < 0.01


def test_the_aim_leaves_room_for_samples_that_were_not_seen() -> None:
    assert aim_for(0.01, 500) == pytest.approx(0.00555, abs=1e-5)
    assert aim_for(0.01, 10_000) == pytest.approx(0.0090, abs=1e-4)
    assert aim_for(0.01, 50) == 0.005 and aim_for(0.0, 100) == 0.0 and aim_for(3.0, 0) == 3.0
    oracle = one_type([0.004, 0.003, 0.002], [1, 2, 3])
    found = search_budget(oracle.space, Budget(AccuracyBudget(0.01), "top1", aim=0.006), oracle)
    assert found.evaluation.drop == pytest.approx(0.005) and found.record.aim == 0.006
    assert found.record.steps[0].within_budget and not found.record.steps[0].within_aim


def test_an_aim_that_sixteen_bit_misses_is_given_up_for_the_budget() -> None:
    oracle = one_type([0.001, 0.002, 0.02], [1, 2, 3], floor={"fp16": 0.007})
    found = search_budget(oracle.space, Budget(AccuracyBudget(0.01), "top1", aim=0.006), oracle)
    assert found.reached and found.record.aim == 0.01
    assert found.mix.types == {"r0": "int8", "r1": "int8"}


def test_a_drop_that_is_the_budget_but_for_rounding_is_within_it() -> None:
    assert 0.9 - 0.895 > 0.005 and Budget(AccuracyBudget(0.005), "top1").holds(Evaluation(0.9 - 0.895, 0.1))
    trials, mixes = trials_of([(0.0, 0.0), (0.1, 0.91 - 0.9)])
    assert trials.tried[mixes[1]].found.drop > 0.01 and trials.holds(mixes[1])


def test_a_bound_on_the_error_holds_as_well() -> None:
    oracle = one_type([0.004, 0.003, 0.002], [1, 2, 3])
    found = search_budget(oracle.space, Budget(AccuracyBudget(1.0, -10 * math.log10(0.0055)), "top1"), oracle)
    assert found.reached and found.evaluation.error <= 0.0055 and len(found.mix.quantized) == 2


def test_outputs_that_are_not_finite_are_beyond_every_budget() -> None:
    class Overflowing(Numbers):
        def evaluate(self, mix: Mix) -> Evaluation:
            self.asked.append(("evaluate", mix))
            return Evaluation(math.nan, math.nan) if "r3" in mix.types else super().evaluate(mix)

        def rank(self, mix: Mix) -> dict[str, float]:
            return {**super().rank(mix), **({"r3": math.nan} if "r3" in mix.types else {})}

    plain = one_type([0.001] * 6, [10] * 6)
    oracle = Overflowing(plain.space, plain.errors)
    found = search_budget(oracle.space, BUDGET, oracle)
    assert found.reached and found.record.reverted == ("r3",)
    assert found.record.steps[0].drop == math.inf


def test_it_is_never_slower_than_sixteen_bit() -> None:
    """What the regions save by themselves does not add up: with them the network is slower."""
    oracle = one_type([0.001, 0.001], [10, 20], fusion=-1.0)
    found = search_budget(oracle.space, BUDGET, oracle)
    assert found.mix == Mix("fp16") and found.record.predicted_us == PLAIN_US


def test_the_fastest_of_the_points_that_hold_is_the_result_by_the_price_of_the_whole() -> None:
    """The estimate prefers r0; the judge finds that it saves nothing in the network."""

    class Priced(Numbers):
        def time_us(self, mix: Mix) -> float:
            return PLAIN_US - sum({"r0": 0, "r1": 30, "r2": 20}[name] for name in mix.types)

    plain = two_types([(0.02, 100), (0.004, 30), (0.004, 20)], [None, None, None])
    oracle = Priced(plain.space, plain.errors)
    found = search_auto(oracle.space, BUDGET, oracle)
    assert found.mix.types == {"r1": "int8", "r2": "int8"}


def test_it_stops_at_the_most_evaluations_it_may_make() -> None:
    oracle = random_network(200, 3, 0.8)
    found = search_budget(oracle.space, BUDGET, oracle, most=5)
    assert found.reached and oracle.count("evaluate") == 5 and found.record.stopped_early


def test_it_ends_within_the_budget_when_its_time_is_over() -> None:
    """What brings the budget within reach is tried; nothing is won back, and no step is halved."""
    oracle = random_network(100, 0, 0.1)
    found = search_budget(oracle.space, BUDGET, oracle, seconds=0.0)
    assert found.reached and found.record.stopped_early
    assert set(actions(found.record)) == {"start", "16-bit", "take back"}


def test_nothing_to_quantize_is_sixteen_bit() -> None:
    oracle = one_type([], [])
    found = search_budget(oracle.space, BUDGET, oracle)
    assert found.reached and found.mix == Mix("fp16") and found.record.evaluations == 1
    assert [point.name for point in found.record.pareto] == ["fp16"]


def test_auto_evaluates_every_type_alone_and_prints_them() -> None:
    oracle = two_types([(0.001, 40), (0.002, 30), (0.001, 5)], [(0.0005, 20), (0.0005, 35), None])
    found = search_auto(oracle.space, BUDGET, oracle)
    assert found.mix.types == {"r0": "int8", "r1": "fp8", "r2": "int8"}
    asked = [mix for question, mix in oracle.asked if question == "evaluate"]
    assert {Mix("fp16"), Mix("bf16"), oracle.space.pure("fp16", "int8"), oracle.space.pure("fp16", "fp8")} <= set(asked)
    assert actions(found.record) == ["16-bit", "16-bit", "start", "alternative", "alternative"]


@pytest.mark.parametrize("best", [{"r0": "fp8", "r1": "fp8"}, {"r0": "int8", "r1": "fp8"}, {"r1": "fp8"}])
def test_auto_takes_what_is_fastest_on_the_whole_though_its_regions_save_less_by_themselves(
    best: dict[str, Precision],
) -> None:
    """Quantizers between equal types are left out, which no region sees by itself."""

    class Fused(Numbers):
        def time_us(self, mix: Mix) -> float:
            return super().time_us(mix) - (500.0 if mix == Mix.of("fp16", best) else 0.0)

    plain = two_types([(0.001, 40), (0.002, 30)], [(0.003, 20), (0.004, 10)])
    oracle = Fused(replace(plain.space, together=best), plain.errors)
    found = search_auto(oracle.space, BUDGET, oracle)
    assert found.mix == Mix.of("fp16", best) and found.record.predicted_us < PLAIN_US - 500
    assert found.record.pareto[0].chosen and actions(found.record)[:3] == ["16-bit", "16-bit", "start"]


def test_a_faster_type_beyond_the_budget_is_not_taken() -> None:
    class Fused(Numbers):
        def time_us(self, mix: Mix) -> float:
            return 100.0 if mix == self.space.pure("fp16", "fp8") else super().time_us(mix)

    plain = two_types([(0.001, 40), (0.002, 30)], [(0.01, 20), (0.02, 10)])
    found = search_auto(plain.space, BUDGET, Fused(plain.space, plain.errors))
    assert found.mix.types == {"r0": "int8", "r1": "int8"}
    assert [(point.name, point.within_budget) for point in found.record.pareto[:2]] == [("fp8", False), ("int8", True)]


def test_auto_moves_nothing_where_what_holds_is_as_fast_as_what_saves_most() -> None:
    """One type everywhere is faster than the best of each region: what lies below that is slower still."""

    class Fused(Numbers):
        def time_us(self, mix: Mix) -> float:
            return super().time_us(mix) - (500.0 if mix == self.space.pure("fp16", "int8") else 0.0)

    fp8 = (0.007, 35)
    plain = two_types([(0.001, 40), (0.002, 30), (0.002, 30)], [None, fp8, fp8])
    oracle = Fused(plain.space, plain.errors)
    found = search_auto(oracle.space, BUDGET, oracle)
    assert found.reached and found.mix == plain.space.pure("fp16", "int8")
    assert oracle.count("rank") == 0 and not {"take back", "win back"} & set(actions(found.record))


def test_auto_gives_a_region_the_more_accurate_type_before_it_gives_it_up() -> None:
    """INT8 of r0 costs too much; its FP8 saves a little less and adds little."""
    oracle = two_types([(0.02, 40), (0.002, 30)], [(0.003, 35), (0.001, 10)])
    found = search_auto(oracle.space, BUDGET, oracle)
    assert found.mix.types == {"r0": "fp8", "r1": "int8"} and found.record.reverted == ("r0",)


def test_auto_takes_bf16_where_fp16_breaks_the_network() -> None:
    oracle = two_types([(0.001, 40), (0.02, 30)], [None, None], floor={"fp16": 0.5, "bf16": 0.002})
    found = search_auto(oracle.space, BUDGET, oracle)
    assert found.reached and found.mix == Mix.of("bf16", {"r0": "int8"})
    none = two_types([(0.001, 40)], [None], floor={"fp16": 0.5, "bf16": 0.2})
    missed = search_auto(none.space, BUDGET, none)
    assert not missed.reached and missed.mix == Mix("bf16") and none.count("evaluate") == 2


def test_auto_without_anything_in_8_bit_chooses_between_the_16_bit_types() -> None:
    oracle = one_type([], [], floor={"fp16": 0.001})
    found = search_auto(oracle.space, BUDGET, oracle)
    assert found.mix == Mix("bf16"), "the times are equal, and bf16 is more accurate here"
    assert search_auto(oracle.space, BUDGET, oracle, narrows=("fp16",)).mix == Mix("fp16")


def test_the_pareto_front_holds_no_point_that_another_beats_in_both() -> None:
    oracle = random_network(53, 2, 0.1)
    record = search_budget(oracle.space, BUDGET, oracle).record
    points = record.pareto
    assert [point.chosen for point in points].count(True) == 1
    assert len({point.name for point in points}) == len(points) > 3
    assert [point.predicted_us for point in points] == sorted(point.predicted_us for point in points)
    assert [point.drop for point in points] == sorted((point.drop for point in points), reverse=True)
    chosen = next(point for point in points if point.chosen)
    assert chosen.within_budget and chosen.precision["int8"] + chosen.precision["fp16"] == 53
    assert chosen.flop_share["int8"] == pytest.approx(chosen.precision["int8"] / 53)
    assert points[0].name == "int8" and points[-1].name == "fp16"


def test_points_that_cannot_be_built_are_not_chosen() -> None:
    class Unbuildable(Numbers):
        def time_us(self, mix: Mix) -> float:
            return math.inf if "r0" in mix.types else super().time_us(mix)

    plain = one_type([0.001, 0.02], [50, 10])
    oracle = Unbuildable(plain.space, plain.errors)
    found = search_budget(oracle.space, BUDGET, oracle)
    assert found.mix == Mix("fp16") and all(point.predicted_us < math.inf for point in found.record.pareto)


def test_ways_down_follow_the_lower_hull_and_never_turn_back() -> None:
    region = SearchRegion("a", (RegionOption("int8", 40), RegionOption("fp8", 30)))
    space = Space((region, SearchRegion("b", (RegionOption("int8", 10),))))
    start = space.fastest("fp16")
    way = space.ways_down(start, {("a", "int8"): 9.0, ("a", "fp8"): 3.0, ("b", "int8"): 2.0})
    assert way == [Move("a", "fp8"), Move("b", None), Move("a", None)]
    above = space.ways_down(start, {("a", "int8"): 4.0, ("a", "fp8"): 3.9, ("b", "int8"): 2.0})
    assert above == [Move("b", None), Move("a", None)], "FP8 lies above the line from INT8 to 16-bit"
    worse = space.ways_down(start, {("a", "int8"): 4.0, ("a", "fp8"): 5.0, ("b", "int8"): 0.0})
    assert worse == [Move("a", None), Move("b", None)]
    endless = space.ways_down(start, {("a", "int8"): math.inf, ("a", "fp8"): math.inf, ("b", "int8"): math.inf})
    assert start.moved(endless) == Mix("fp16")


def test_progress_says_what_is_tried_and_what_came_of_it() -> None:
    events: list[Event] = []
    oracle = random_network(20, 0, 0.05)
    record = search_budget(oracle.space, BUDGET, oracle, on_event=events.append).record
    kinds = [event.kind for event in events]
    assert kinds[0] == "start" and kinds[-1] == "end" and kinds.count("advance") == record.evaluations
    assert {event.task for event in events} == {"search"} and events[0].total == 40
    texts = [event.text for event in events if event.kind == "detail"]
    assert texts[0] == "start, 20 regions: r0, r1 and 18 more"
    assert texts[1] == "start, 20 regions: r0, r1 and 18 more: drop 0.05, more than 0.01"
    assert "ranking 20 regions" in texts


def test_a_point_that_a_few_samples_let_pass_has_to_hold_on_all() -> None:
    """On a few samples the error of two regions is that of one, which is all that the budget bears."""

    class Few(Numbers):
        def evaluate(self, mix: Mix) -> Evaluation:
            found = super().evaluate(mix)
            return replace(found, drop=found.drop / 2, is_partial=True) if mix.quantized else found

        def confirm(self, mix: Mix) -> Evaluation:
            self.asked.append(("confirm", mix))
            return super().evaluate(mix)

    oracle = Few(one_type([0.008, 0.008, 0.016], [10, 20, 30]).space, {(f"r{i}", "int8"): 0.008 for i in range(3)})
    found = search_budget(oracle.space, BUDGET, oracle)
    assert found.reached and found.evaluation.drop == 0.008 and not found.evaluation.is_partial
    assert found.mix.types == {"r2": "int8"} and oracle.count("confirm") == 3


class Lenient(Numbers):
    """A few samples say of each point what chance has it, and all samples the truth."""

    def evaluate(self, mix: Mix) -> Evaluation:
        found = super().evaluate(mix)
        share = self.chance(mix).uniform(0.0, 1.2)
        return replace(found, drop=found.drop * share, is_partial=True) if mix.quantized else found

    def confirm(self, mix: Mix) -> Evaluation:
        self.asked.append(("confirm", mix))
        return super().evaluate(mix)

    def time_us(self, mix: Mix) -> float:
        return super().time_us(mix) * self.chance(mix).uniform(0.9, 1.1)

    @staticmethod
    def chance(mix: Mix) -> np.random.Generator:
        return np.random.default_rng(list(repr(mix).encode()))


@pytest.mark.parametrize("search", [search_budget, search_auto])
def test_what_is_chosen_was_run_on_all_samples_and_holds(search: Callable[..., SearchResult]) -> None:
    for seed in range(30):
        plain = random_network(20, seed, 0.03)
        oracle = Lenient(plain.space, plain.errors)
        found = search(oracle.space, BUDGET, oracle)
        assert found.reached and not found.evaluation.is_partial and found.evaluation.drop <= BUDGET.drop


@pytest.mark.parametrize("search", [search_budget, search_auto])
def test_where_all_that_pays_holds_on_few_samples_only_regions_are_taken_back(
    search: Callable[..., SearchResult],
) -> None:
    """As if the few samples had said what all do."""

    class Few(Numbers):
        def evaluate(self, mix: Mix) -> Evaluation:
            found = super().evaluate(mix)
            return replace(found, drop=found.drop / 5, is_partial=True) if mix.quantized else found

        def confirm(self, mix: Mix) -> Evaluation:
            return super().evaluate(mix)

    plain = random_network(20, 1, 0.04)
    few, known = Few(plain.space, plain.errors), search(plain.space, BUDGET, plain)
    found = search(few.space, BUDGET, few)
    assert found.reached and found.mix == known.mix and actions(found.record) == actions(known.record)
