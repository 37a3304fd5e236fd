"""Random networks: every recipe alone, all together and in mixtures compute what the original computes."""

from __future__ import annotations

from collections.abc import Sequence

import onnx
import pytest
from check_network import check_all
from random_networks import DIALECTS, WINDOWS, random_network

from trtopt.rewrite.registry import all_recipes

FEW = (
    *range(11),
    12,
    16,
    18,
    19,
    21,
    24,
    25,
    34,
    39,
    51,
    59,
    64,
    79,
    99,
    119,
    160,
    212,
    279,
    399,
    479,
    539,
    579,
    639,
    699,
    719,
    739,
    759,
    799,
    899,
    919,
    939,
    999,
    1019,
    1059,
    1119,
    1139,
    1159,
    1259,
    1279,
    1359,
    1419,
)
"""Networks in which every recipe finds its pattern."""
MANY = (*range(260), *range(279, 1420, 20))
"""Each twentieth is one of the rare parts, in turn."""
FEW_DIALECTS = (*range(DIALECTS, DIALECTS + 19), DIALECTS + 27, DIALECTS + 44, DIALECTS + 89)
MANY_DIALECTS = range(DIALECTS, DIALECTS + 300)
FEW_WINDOWS = range(WINDOWS, WINDOWS + 6)
MANY_WINDOWS = range(WINDOWS, WINDOWS + 150)
_SLICES = 6
"""Tests the many are shared out to: one of all of them took more than the time a test is given."""


def test_a_seed_makes_one_network_and_it_is_valid() -> None:
    for seed in (*MANY[::4], *FEW_DIALECTS, *FEW_WINDOWS):
        model = random_network(seed)
        assert model.SerializeToString(deterministic=True) == random_network(seed).SerializeToString(deterministic=True)
        onnx.checker.check_model(model, full_check=True)


def test_recipes_change_nothing_that_is_computed() -> None:
    """A generator that never makes a recipe's pattern proves nothing: each has to find it."""
    found = check_all((*FEW, *FEW_DIALECTS, *FEW_WINDOWS), processes=1)
    assert not found.problems, "\n".join(found.problems)
    assert not {recipe.name for recipe in all_recipes() if not found.fired[recipe.name]}


@pytest.mark.long
@pytest.mark.parametrize("first", range(_SLICES))
def test_recipes_change_nothing_that_is_computed_in_many_networks(first: int) -> None:
    seeds: Sequence[int] = (*MANY, *MANY_DIALECTS, *MANY_WINDOWS)
    found = check_all(seeds[first::_SLICES], processes=1)
    assert not found.problems, "\n".join(found.problems)
