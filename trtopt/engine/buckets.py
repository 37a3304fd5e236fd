"""Optimization profiles for the shapes that requests have: buckets of a histogram, chosen by time.

A request runs in its bucket at the most in the time of the bucket's largest shape. Buckets are the cut of the requests,
sorted by their time, into at most k runs whose total time is least: dynamic programming over the ends of the runs,
O(k n^2), as for the optimal quantization of numbers on a line (Bruce 1965; Wang and Song, "Ckmeans.1d.dp", 2011).
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trtopt.config.base import ShapeMap
from trtopt.engine.request import parse_shapes
from trtopt.errors import UsageError
from trtopt.support.files import read_file
from trtopt.support.json_text import decoded

MOST_BUCKETS = 4
"""More are a kernel list, memory and a build time each for little: 4 buckets leave a few percent."""

_WORTH = 0.02
"""Share of the time of the most buckets that fewer may cost more."""

_MOST_SHAPES = 48
"""Distinct shapes that are told apart; more are put together, each group at its largest."""

_LARGEST_BYTES = 64 << 20

Shapes = tuple[tuple[str, tuple[int, ...]], ...]
"""Input shapes in the order of their names."""


@dataclass(frozen=True)
class Bucket:
    """Requests that one profile takes.

    Attributes:
        low: The smallest size of every axis.
        high: The largest, which the profile is optimized for.
        requests: How many of the histogram it takes.
    """

    low: ShapeMap
    high: ShapeMap
    requests: int


@dataclass(frozen=True)
class Buckets:
    """How requests are divided.

    Attributes:
        buckets: The buckets, the fastest first.
        us: Predicted microseconds of a request in them, on average.
        single_us: The same with one profile of the largest shape.
        padding: Share of the elements that are padding where every request is filled up to its bucket.
    """

    buckets: tuple[Bucket, ...]
    us: float
    single_us: float
    padding: float

    @property
    def note(self) -> str:
        """What was chosen, in words."""
        sizes = "; ".join(
            ", ".join(f"{name}:{'x'.join(map(str, dims))}" for name, dims in item.high.items())
            + f" ({item.requests} requests)"
            for item in self.buckets
        )
        saved = 1 - self.us / self.single_us if self.single_us else 0.0
        return (
            f"profiles of the histogram, up to {sizes}: {self.us:.1f} us a request by prediction, {saved:.0%} less than"
            f" one profile of the largest; filled up to them, {self.padding:.0%} of the elements are padding"
        )


def read_histogram(path: Path) -> Counter[Shapes]:
    """The shapes of requests and how many there were of each.

    A line is one of ``ids:1x37,mask:1x37``, the same with a number of requests behind a space, and
    ``{"ids": [1, 37], "mask": [1, 37]}``, as a log has them; what begins with ``#`` is left out.

    Raises:
        UsageError: The file cannot be read, a line is none of these, or there is none.
    """
    found: Counter[Shapes] = Counter()
    try:
        lines = read_file(path, "The histogram of shapes", _LARGEST_BYTES).decode().splitlines()
    except UnicodeDecodeError as error:
        raise UsageError("The histogram is no text", where=str(path), remedy="give a text file in UTF-8") from error
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if text and not text.startswith("#"):
            shapes, count = _parsed(text, f"{path}, line {number}")
            found[tuple(sorted(shapes.items()))] += count
    if not found:
        raise UsageError("The histogram has no request", where=str(path), remedy="give a line for each: ids:1x37")
    names = {tuple(name for name, _ in shapes) for shapes in found}
    if len(names) > 1:
        raise UsageError(
            "The lines of the histogram name different inputs",
            where=str(path),
            remedy="give the shape of every dynamic input in every line",
        )
    return found


def _parsed(text: str, where: str) -> tuple[ShapeMap, int]:
    try:
        if text.startswith("{"):
            data = decoded(text.encode())
            pairs = data.items()
            shapes = {str(name): tuple(int(dim) for dim in dims) for name, dims in pairs if isinstance(dims, list)}
            if len(shapes) != len(data):
                raise ValueError("a shape is no list")
            count = 1
        else:
            spec, _, number = text.partition(" ")
            shapes, count = dict(parse_shapes(spec)), int(number or 1)
        if count < 1 or not shapes or any(dim < 0 for dims in shapes.values() for dim in dims):
            raise ValueError("a number is below its least")
    except (ValueError, TypeError, UsageError, json.JSONDecodeError) as error:
        raise UsageError(
            f"A line of the histogram is not understood: {text[:80]!r}",
            where=where,
            remedy='write ids:1x37,mask:1x37, a number of requests behind it where it is not 1; or {"ids": [1, 37]}',
        ) from error
    return shapes, count


def choose(histogram: Mapping[Shapes, int], time_of: Callable[[ShapeMap], float], most: int = MOST_BUCKETS) -> Buckets:
    """The buckets in which the requests take the least time, as few of them as cost at most 2 % more.

    Of requests in which one size varies, no other division into as many buckets takes less; of several sizes, none of
    those that keep the order of their times.

    Args:
        histogram: Requests by their shapes.
        time_of: Predicted microseconds of a request of these shapes.
        most: How many buckets there may be.
    """
    known: dict[Shapes, float] = {}

    def cost(shapes: Shapes) -> float:
        if shapes not in known:
            known[shapes] = time_of(dict(shapes))
        return known[shapes]

    groups = _grouped(histogram)
    groups.sort(key=lambda item: (cost(item[0]), item[0]))
    shapes, counts = [item[0] for item in groups], [item[1] for item in groups]
    sums = [0]
    for count in counts:
        sums.append(sums[-1] + count)

    def of_run(start: int, end: int) -> float:
        return (sums[end] - sums[start]) * cost(_high(shapes[start:end]))

    tried = [divide(len(groups), number, of_run) for number in range(1, min(most, len(groups)) + 1)]
    best = tried[-1][0]
    total, ends = next(found for found in tried if found[0] <= best * (1 + _WORTH))
    start = 0
    found: list[Bucket] = []
    least = dict(_low(list(histogram)))
    for end in ends:
        high = _high(shapes[start:end])
        found.append(Bucket(_from(least, dict(high), found), dict(high), sums[end] - sums[start]))
        start = end
    requests = sums[-1]
    return Buckets(tuple(found), total / requests, tried[0][0] / requests, _padding(histogram, found))


def divide(length: int, runs: int, cost: Callable[[int, int], float]) -> tuple[float, tuple[int, ...]]:
    """The cut of ``range(length)`` into so many runs whose costs add up to the least; the sum, and where runs end.

    ``cost(start, end)`` is that of one run. The number of calls grows with ``runs * length ** 2``.
    """
    best: list[tuple[float, tuple[int, ...]]] = [(math.inf, ()) for _ in range(length + 1)]
    best[0] = (0.0, ())
    for _ in range(runs):
        best = [
            min(
                ((best[start][0] + cost(start, end), (*best[start][1], end)) for start in range(end)),
                default=(math.inf, ()),
            )
            for end in range(length + 1)
        ]
    return best[length]


def _grouped(histogram: Mapping[Shapes, int]) -> list[tuple[Shapes, int]]:
    """The shapes, or where there are many, groups of them in the order of their elements, each at its largest."""
    items = sorted(histogram.items(), key=lambda item: (_elements(item[0]), item[0]))
    size = -(-len(items) // _MOST_SHAPES)
    parts = [items[start : start + size] for start in range(0, len(items), size)]
    return [(_high([shapes for shapes, _ in part]), sum(count for _, count in part)) for part in parts]


def _from(least: ShapeMap, high: ShapeMap, before: Sequence[Bucket]) -> ShapeMap:
    """The smallest sizes of a bucket: those behind the bucket before it where one size varies, else the least of all,
    so that every shape up to the largest is in a bucket."""
    varied = [
        (name, axis) for name, dims in high.items() for axis in range(len(dims)) if least[name][axis] < dims[axis]
    ]
    low = {name: list(dims) for name, dims in least.items()}
    if before and len({high[name][axis] for name, axis in varied}) == 1:
        for name, axis in varied:
            low[name][axis] = before[-1].high[name][axis] + 1
    return {name: tuple(dims) for name, dims in low.items()}


def _high(shapes: Sequence[Shapes]) -> Shapes:
    return _ends(shapes, max)


def _low(shapes: Sequence[Shapes]) -> Shapes:
    return _ends(shapes, min)


def _ends(shapes: Sequence[Shapes], end: Callable[[Iterator[int]], int]) -> Shapes:
    first = shapes[0]
    return tuple(
        (name, tuple(end(item[index][1][axis] for item in shapes) for axis in range(len(dims))))
        for index, (name, dims) in enumerate(first)
    )


def _elements(shapes: Shapes) -> int:
    return sum(math.prod(dims) for _, dims in shapes)


def _padding(histogram: Mapping[Shapes, int], buckets: Sequence[Bucket]) -> float:
    own = filled = 0
    for shapes, count in histogram.items():
        bucket = next(
            item
            for item in buckets
            if all(size <= most for name, dims in shapes for size, most in zip(dims, item.high[name], strict=True))
        )
        own += count * _elements(shapes)
        filled += count * sum(math.prod(dims) for dims in bucket.high.values())
    return 1 - own / filled if filled else 0.0
