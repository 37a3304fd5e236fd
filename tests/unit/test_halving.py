"""The search by halving finds the fewest that are enough, and asks a logarithmic number of times."""

from __future__ import annotations

import math

import pytest

from trtopt.support.halving import fewest


@pytest.mark.parametrize("count", [1, 2, 3, 8, 100])
def test_every_boundary_is_found(count: int) -> None:
    for boundary in range(1, count + 1):
        asked: list[int] = []
        assert fewest(count, lambda number: asked.append(number) or number >= boundary) == boundary  # type: ignore[func-returns-value]  # noqa: B023
        assert len(asked) <= math.ceil(math.log2(count)) and not {0, count} & set(asked)


def test_it_stops_where_it_may_not_ask_any_more() -> None:
    left = iter((True, True, False))
    assert fewest(100, lambda number: number >= 3, lambda: next(left)) == 25
