"""Which other ways to make a product are tried at all."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
from search_oracles import one_type, two_types

from trtopt.config.budget import AccuracyBudget
from trtopt.events import ignore
from trtopt.pipeline.product import Built
from trtopt.pipeline.shipped import Trial, all_regions_miss, doubted, hold
from trtopt.precision.search.search import search_auto, search_budget
from trtopt.precision.search.space import Budget
from trtopt.report.schema.steps import Cost, RegionRecord, StepRecord
from trtopt.support.clock import Clock
from trtopt.support.precision import Precision

MISSES = "INT8 on the regions that pay, which are fewer, loses more than the budget"


def test_q_dq_everywhere_is_not_tried_where_fewer_regions_lose_too_much() -> None:
    oracle = two_types([(0.02, 40), (0.002, 30), (0.001, 5)], [(0.003, 35), (0.001, 10), None])
    found = search_auto(oracle.space, Budget(AccuracyBudget(0.01), "top1"), oracle).record
    assert all_regions_miss(found, Precision.INT8) == MISSES
    assert not all_regions_miss(found, Precision.FP8)  # a drop of 0.004


def test_q_dq_everywhere_is_tried_where_nothing_speaks_against_it() -> None:
    oracle = one_type([0.001, 0.002], [10, 10])
    found = search_budget(oracle.space, Budget(AccuracyBudget(0.01), "top1"), oracle).record
    assert not all_regions_miss(found, Precision.INT8) and not all_regions_miss(None, Precision.INT8)


def test_where_nothing_holds_the_budget_q_dq_everywhere_may_lose_less() -> None:
    oracle = one_type([0.1, 0.1], [10, 10])
    found = search_budget(oracle.space, Budget(AccuracyBudget(0.01), "top1"), oracle).record
    assert all_regions_miss(found, Precision.INT8) == MISSES
    assert not all_regions_miss(dataclasses.replace(found, reached=False), Precision.INT8)


@dataclasses.dataclass
class Final:
    """A model that only takes the steps that are recorded."""

    artifact: Any = None

    def __post_init__(self) -> None:
        self.artifact = SimpleNamespace(model=None, with_step=lambda model, step: self.artifact)


def cost(microseconds: float) -> Cost:
    return Cost(1, 0, 1, microseconds)


def made(microseconds: float, without: float | None = None) -> Built:
    """A product; in 8-bit where it has a price without."""
    judged = None if without is None else cost(without)
    lowered: Any = SimpleNamespace(sixteen_bit=judged, quantized={} if without is None else {"conv": "x"})
    unused: Any = None
    return Built(unused, lowered, Final(), unused, None, (), cost(microseconds))  # type: ignore[arg-type]


def unwanted() -> Trial:
    def make(below: float) -> Built:
        raise AssertionError("nothing is to be tried")

    return Trial("unwanted", make, lambda built: "")


@pytest.mark.parametrize(
    ("eight", "without", "refused", "ships"),
    [
        (150.0, 140.0, "", 141.0),  # slower than its own 16-bit form
        (150.0, 140.0, "less accurate", 150.0),
        (130.0, 140.0, "", 130.0),
        (150.0, None, "", 150.0),
    ],
)
def test_8_bit_that_ends_slower_than_without_is_not_shipped(
    eight: float, without: float | None, refused: str, ships: float
) -> None:
    asked: list[float] = []

    def make(below: float) -> Built:
        asked.append(below)
        return made(141.0)

    first = made(eight, without)
    doubts = [Trial("without 8-bit", make, lambda built: refused, enough_us=first.without_us)]
    doubts = doubts if eight > first.without_us else []
    found = hold(first, {"fp16": cost(200.0)}, iter([unwanted()]), Clock(ignore), iter(doubts))
    assert found.built.microseconds == ships
    assert len(asked) == len(doubts), "plain is slower: nothing else is tried"
    assert found.refused == ({"without 8-bit": refused} if refused else {})


def test_nothing_is_tried_where_nothing_is_held() -> None:
    found = hold(made(150.0, 140.0), {}, iter([unwanted()]), Clock(ignore), iter([unwanted()]))
    assert found.built.microseconds == 150.0


def rewritten(lost: float, wide: bool = True, sixteen: float | None = None) -> Built:
    """A product judged at 100 us after two recipes, of which ``small`` won 3 us at two places, that ships with ``lost``
    more, with nodes that stay FP32 or without; in 8-bit where it has a price in 16-bit."""
    gains = {"small": (1.5, ("a", "b")), "large": (20.0, ("c",)), "unjudged": (0.0, ())}
    steps = tuple(
        StepRecord(name, "CLEAN", 1, 0.0, regions=(RegionRecord(nodes, "", True, "", cost(50.0), cost(50.0 - won)),))
        if nodes
        else StepRecord(name, "CLEAN", 1, 0.0)
        for name, (won, nodes) in gains.items()
    )
    own: Any = SimpleNamespace(rewritten=SimpleNamespace(after=cost(100.0), artifact=SimpleNamespace(steps=steps)))
    record = SimpleNamespace(kept=("d",) if wide else ())
    judged = None if sixteen is None else cost(sixteen)
    lowered: Any = SimpleNamespace(sixteen_bit=judged, quantized={} if judged is None else {"c": "x"}, record=record)
    return dataclasses.replace(made(100.0 + lost), own=own, lowered=lowered)


@pytest.mark.parametrize(
    ("built", "found"),
    [
        (rewritten(2.0), []),
        (rewritten(4.0), ["small"]),
        (rewritten(4.0, wide=False), []),
        (rewritten(30.0), ["small", "large"]),
        (rewritten(-50.0, sixteen=104.0), ["small"]),  # what 8-bit wins is beside the point
        (rewritten(30.0, sixteen=102.0), []),
    ],
)
def test_a_recipe_that_won_less_than_the_repair_costs_is_doubted(built: Built, found: list[str]) -> None:
    assert doubted(built, ("small", "large", "unjudged")) == found
    assert not doubted(built, ())
