"""Hypothesis in the two runs of the suite: twenty cases, the same each time, and the many of ``scripts/test --all``."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import hypothesis
import pytest
from hypothesis.strategies import SearchStrategy

FEW = 20


def few_or(many: int) -> list[object]:
    """Values for a test that is told how many cases to try."""
    return [FEW, pytest.param(many, marks=pytest.mark.long)]


def seeds(many: int) -> list[object]:
    """Seeds for a test of one case."""
    return [*range(FEW), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(FEW, many))]


def given(
    *strategies: SearchStrategy[Any], many: int = 100, seeded: bool = False, **named: SearchStrategy[Any]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """As ``hypothesis.given``: the strategies draw the last arguments, or those named; the others are fixtures.

    Args:
        many: Cases that the test marked ``long`` draws.
        seeded: Whether those too are the same each time.
    """

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        arguments = [item for item in inspect.signature(test).parameters.values() if item.name not in named]
        fixtures = arguments[: len(arguments) - len(strategies)]
        count = inspect.Parameter("cases", inspect.Parameter.KEYWORD_ONLY)

        @functools.wraps(test)
        def run(*, cases: int, **values: Any) -> None:
            drawn = hypothesis.given(*strategies, **named)(test)
            hypothesis.settings(max_examples=cases, deadline=None, derandomize=seeded or cases == FEW)(drawn)(**values)

        run.__signature__ = inspect.Signature([*fixtures, count])  # type: ignore[attr-defined]
        return pytest.mark.parametrize("cases", few_or(many))(run)

    return decorate
