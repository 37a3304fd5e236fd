"""Buckets of a histogram of shapes: no other division is faster, every request has one, and bad files are refused."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

import pytest
from drawn_cases import given
from hypothesis import strategies as st

from trtopt.config.base import ShapeMap
from trtopt.engine.buckets import Shapes, choose, divide, read_histogram
from trtopt.errors import UsageError


def quadratic(shapes: ShapeMap) -> float:
    length = shapes["ids"][1]
    return 5 + 0.3 * length + 0.01 * length**2


def lengths(counts: dict[int, int]) -> Counter[Shapes]:
    return Counter({(("ids", (1, length)),): count for length, count in counts.items()})


@given(
    st.dictionaries(st.integers(1, 200), st.integers(1, 50), min_size=1, max_size=9), st.integers(1, 4),
)  # fmt: skip
def test_no_other_division_takes_less(counts: dict[int, int], most: int) -> None:
    """Against every subset of lengths that holds the largest, of at most four."""
    known = sorted(counts)
    best = min(
        sum(
            count * quadratic({"ids": (1, min(end for end in ends if end >= length))})
            for length, count in counts.items()
        )
        for size in range(min(most, len(known)))
        for chosen in itertools.combinations(known[:-1], size)
        for ends in [(*chosen, known[-1])]
    )
    requests = sum(counts.values())
    found = choose(lengths(counts), quadratic, most)
    assert best <= found.us * requests + 1e-6 <= best * 1.02 + 1e-3
    assert found.single_us == pytest.approx(quadratic({"ids": (1, known[-1])}))
    # Every length up to the largest is in one bucket.
    for length in range(known[0], known[-1] + 1):
        taking = [item for item in found.buckets if item.low["ids"][1] <= length <= item.high["ids"][1]]
        assert len(taking) == 1


@given(st.lists(st.floats(0.1, 100), min_size=1, max_size=7), st.integers(1, 4))
def test_runs_are_divided_as_by_trying_all(values: list[float], runs: int) -> None:
    def cost(start: int, end: int) -> float:
        return (end - start) * max(values[start:end])

    number = min(runs, len(values))
    cuts = itertools.combinations(range(1, len(values)), number - 1)
    tried = [[0, *inner, len(values)] for inner in cuts]
    best = min(sum(cost(a, b) for a, b in itertools.pairwise(ends)) for ends in tried)
    total, ends = divide(len(values), number, cost)
    assert total == pytest.approx(best) and len(ends) == number and ends[-1] == len(values)


def test_few_buckets_are_kept_where_more_gain_nothing() -> None:
    assert len(choose(lengths({128: 1000, 127: 1}), quadratic).buckets) == 1
    assert len(choose(lengths({8: 1000, 512: 100}), quadratic).buckets) == 2


def test_sizes_that_vary_apart_are_all_taken() -> None:
    requests = Counter({(("x", (n, 3, side, side)),): 5 for n in (1, 4) for side in (224, 320, 640)})
    found = choose(requests, lambda shapes: float(shapes["x"][0] * shapes["x"][2] ** 2))
    for n, side in itertools.product((1, 2, 4), (224, 500, 640)):
        dims = (n, 3, side, side)
        assert any(
            all(low <= dim <= high for low, dim, high in zip(item.low["x"], dims, item.high["x"], strict=True))
            for item in found.buckets
        )
    assert sum(item.requests for item in found.buckets) == 30


def test_many_lengths_are_put_together() -> None:
    found = choose(lengths(dict.fromkeys(range(1, 2001), 1)), quadratic)
    assert found.buckets[-1].high["ids"] == (1, 2000) and len(found.buckets) == 4
    assert found.us < 0.6 * found.single_us and 0 < found.padding < 0.3


def test_a_log_of_requests_is_read(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    path.write_text('# requests\nids:1x37 3\nids:[1,37]\n{"ids": [1, 9]}\n\n')
    assert read_histogram(path) == lengths({37: 4, 9: 1})


@pytest.mark.parametrize(
    "text", ["", "# nothing\n", "ids\n", "ids:1x-3\n", "ids:1x3 0\n", "ids:1x3 many\n", '{"ids": 3}\n', "{\n", "[1]\n",
             "ids:1x3\nmask:1x3\n", '{"ids": ["a"]}\n']
)  # fmt: skip
def test_what_is_no_histogram_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "log.txt"
    path.write_text(text)
    with pytest.raises(UsageError):
        read_histogram(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="no text"):
        read_histogram(path)
