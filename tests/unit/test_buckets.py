"""Buckets of a histogram of shapes: no other division is faster, every request has one, and bad files are refused."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

import pytest
from drawn_cases import given
from hypothesis import strategies as st

from trtopt.config.base import ShapeMap
from trtopt.engine.buckets import Shapes, choose, read_histogram
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


def area(shapes: ShapeMap) -> float:
    height, width = shapes["x"][2:]
    return 20 + 0.5 * height * width


def sides(counts: dict[tuple[int, int], int]) -> Counter[Shapes]:
    return Counter({(("x", (1, 3, *size)),): count for size, count in counts.items()})


@given(
    st.dictionaries(st.tuples(st.integers(1, 20), st.integers(1, 20)), st.integers(1, 9), min_size=1, max_size=4),
    st.integers(1, 4),
)
def test_no_other_buckets_of_two_sizes_take_less(counts: dict[tuple[int, int], int], most: int) -> None:
    """Against every choice of at most four heights x widths that holds the largest of both."""
    heights, widths = {height for height, _ in counts}, {width for _, width in counts}
    largest = (max(heights), max(widths))
    corners = sorted({*itertools.product(heights, widths)} - {largest})
    best = min(
        sum(
            count * min(area({"x": (1, 3, *end)}) for end in [*chosen, largest] if h <= end[0] and w <= end[1])
            for (h, w), count in counts.items()
        )
        for size in range(most)
        for chosen in itertools.combinations(corners, size)
    )
    found = choose(sides(counts), area, most)
    requests = sum(counts.values())
    assert best <= found.us * requests + 1e-6 <= best * 1.02 + 1e-3
    assert len(found.buckets) <= most and sum(item.requests for item in found.buckets) == requests
    assert found.buckets[-1].high["x"] == (1, 3, *largest)


def test_portraits_and_landscapes_get_a_bucket_each() -> None:
    """A cut by the number of elements would put them together, where both take as long as the larger square."""
    found = choose(sides({(640, 320): 50, (320, 640): 50, (640, 640): 1}), area)
    assert [(item.high["x"][2:], item.requests) for item in found.buckets] == [
        ((320, 640), 50), ((640, 320), 50), ((640, 640), 1)
    ]  # fmt: skip


def test_two_sizes_with_one_largest_are_not_taken_for_one() -> None:
    """A batch and a length both up to 32: a bucket that began above another's sizes would leave shapes out."""
    counts = {(1, 32): 40, (32, 4): 40, (32, 32): 1}
    found = choose(sides(counts), area)
    for size in itertools.product((1, 2, 31, 32), (4, 5, 32)):
        assert any(
            all(low <= dim <= high for low, dim, high in zip(item.low["x"][2:], size, item.high["x"][2:], strict=True))
            for item in found.buckets
        )


def test_few_shapes_are_priced_however_many_there_are() -> None:
    priced: list[ShapeMap] = []

    def time_of(shapes: ShapeMap) -> float:
        priced.append(shapes)
        return area(shapes)

    choose(sides(dict.fromkeys(itertools.product(range(50, 90), range(40, 90)), 1)), time_of)
    assert len(priced) <= 100
    assert max(item["x"] for item in priced) == (1, 3, 89, 89)


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


def test_an_empty_request_is_in_the_range_of_the_smallest_bucket_and_no_bucket_is_made_for_it() -> None:
    found = choose(lengths({0: 900, 16: 50, 128: 50}), quadratic)
    assert [(item.low["ids"][1], item.high["ids"][1]) for item in found.buckets] == [(0, 16), (17, 128)]
    assert [item.requests for item in found.buckets] == [950, 50]
    (alone,) = choose(lengths({0: 1}), quadratic).buckets
    assert (alone.low["ids"], alone.high["ids"]) == ((1, 0), (1, 1))
