"""Batch sizes as users write them."""

from __future__ import annotations

import pytest

from trtopt.config import AnalyzeConfig
from trtopt.errors import UsageError


@pytest.mark.parametrize(
    ("given", "sizes"),
    [
        ("1,2,4", (1, 2, 4)),
        (" 8 , 1 ", (1, 8)),
        ("4,4,4", (4,)),
        ("5..9", (5, 6, 7, 8, 9)),
        ("1..16", (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16)),
        ("100..130,1", (1, 100, 112, 128, 130)),
        ((4, 1), (1, 4)),
        ([2], (2,)),
        ("65536", (65536,)),
    ],
)
def test_lists_and_ranges_become_increasing_sizes(given: object, sizes: tuple[int, ...]) -> None:
    assert AnalyzeConfig(batch_sweep=given).batch_sweep == sizes  # type: ignore[arg-type]


def test_a_range_has_its_ends_and_four_sizes_per_doubling() -> None:
    sizes = AnalyzeConfig(batch_sweep="1..256").batch_sweep  # type: ignore[arg-type]
    assert (sizes[0], sizes[-1]) == (1, 256)
    for low in (8, 16, 32, 64, 128):
        assert len([size for size in sizes if low < size <= 2 * low]) == 4


@pytest.mark.parametrize(
    "given",
    ["", "a", "1..", "..4", "4..1", "-1", "1,,2", "1..2..3", "0", "0..4", "65537", "1..100000", "9" * 5000, "1.5"],
)
def test_sizes_out_of_range_or_malformed_are_usage_errors_that_name_the_option(given: str) -> None:
    with pytest.raises(UsageError) as caught:
        AnalyzeConfig(batch_sweep=given)  # type: ignore[arg-type]
    assert "batch" in caught.value.where
    assert len(str(caught.value)) < 400 or given.startswith("9")


def test_too_many_sizes_are_refused() -> None:
    with pytest.raises(UsageError, match="too many"):
        AnalyzeConfig(batch_sweep=tuple(range(1, 200)))


@pytest.mark.parametrize(("budget", "sizes"), [(0.0, (1, 2)), (-1.0, (1, 2)), (5.0, ())])
def test_a_budget_is_positive_and_needs_sizes(budget: float, sizes: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match="latency budget"):
        AnalyzeConfig(latency_budget_ms=budget, batch_sweep=sizes)
