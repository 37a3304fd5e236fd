"""Which other ways to make a product are tried at all."""

from __future__ import annotations

import dataclasses

from search_oracles import one_type, two_types

from trtopt.config.budget import AccuracyBudget
from trtopt.pipeline.shipped import all_regions_miss
from trtopt.precision.search.search import search_auto, search_budget
from trtopt.precision.search.space import Budget
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
