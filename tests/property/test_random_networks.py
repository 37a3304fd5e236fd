"""Random networks: every recipe alone, all together and in mixtures compute what the original computes."""

from __future__ import annotations

import onnx
import pytest
from check_network import Findout, check_all
from random_networks import random_network

from trtopt.rewrite.registry import all_recipes

NETWORKS = 200
LEAST_REWRITES = 3
"""Of each recipe over 200 networks: a generator that never makes its pattern proves nothing."""


@pytest.fixture(scope="module")
def found() -> Findout:
    return check_all(range(NETWORKS))


def test_a_seed_makes_one_network_and_it_is_valid() -> None:
    for seed in range(0, 200, 10):
        model = random_network(seed)
        assert model.SerializeToString(deterministic=True) == random_network(seed).SerializeToString(deterministic=True)
        onnx.checker.check_model(model, full_check=True)


def test_recipes_change_nothing_that_is_computed(found: Findout) -> None:
    assert not found.problems, "\n".join(found.problems)


def test_every_recipe_finds_its_pattern(found: Findout) -> None:
    rare = {
        recipe.name: found.fired[recipe.name] for recipe in all_recipes() if found.fired[recipe.name] < LEAST_REWRITES
    }
    assert not rare
