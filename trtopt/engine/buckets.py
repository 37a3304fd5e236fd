"""Optimization profiles for the shapes that requests have: buckets of a histogram, chosen by time.

A request takes the fastest bucket that holds it, in the time of the bucket's largest shape. That shape need not be
larger than what its requests have, so that it is one of the *corners*, the joins of requests: of those, all choices of
at most k are tried that have the join of all, so that an engine refuses no shape up to the largest.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trtopt.config.base import ShapeMap
from trtopt.engine.request import parse_shapes
from trtopt.errors import UsageError
from trtopt.support.files import read_file
from trtopt.support.json_text import decoded

MOST_BUCKETS = 4
"""More are a kernel list, memory and a build time each for little: 4 buckets leave a few percent."""

_WORTH = 0.02
"""Share of the time of the most buckets that fewer may cost more."""

_MOST_SIZES = 48
"""Sizes of an axis that are told apart; more are put together, each group at its largest."""

_MOST_CORNERS = 100
"""About so many shapes are priced, a quarter of a second each: of more axes fewer sizes are told apart."""

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

    No other buckets, as many, take less time, whichever and however many sizes vary; sizes that are put together
    (more than 48 of one axis, 10 each of two, 4 each of three) count as their largest.

    Args:
        histogram: Requests by their shapes.
        time_of: Predicted microseconds of a request of these shapes; at least that of smaller ones.
        most: How many buckets there may be.
    """
    least = dict(_ends(list(histogram), min))
    histogram = filled(histogram)
    varied = _varied(histogram)
    requests = _rounded(histogram, min(_MOST_SIZES, int(_MOST_CORNERS ** (1 / max(varied, 1)))))
    corners = _corners(requests)
    us = np.array([time_of(dict(corner)) for corner in corners])
    takes = np.array([[_covers(dict(corner), shapes) for shapes in requests] for corner in corners])
    times, counts = np.where(takes, us[:, None], math.inf), np.array(list(requests.values()))
    tried = [_fastest(times, counts, number) for number in range(1, min(most, len(corners)) + 1)]
    requested = int(counts.sum())
    total, chosen = next(found for found in tried if found[0] <= tried[-1][0] * (1 + _WORTH))
    order = sorted(chosen, key=lambda index: (us[index], index))
    taken = np.bincount(times[order].argmin(0), counts, len(order))
    found: list[Bucket] = []
    for index, number in zip(order, taken, strict=True):
        high = dict(corners[index])
        low = _behind(found[-1].high, least, high) if found and varied == 1 else least
        found.append(Bucket(low, high, int(number)))
    return Buckets(tuple(found), total / requested, tried[0][0] / requested, _padding(histogram, found))


def filled(histogram: Mapping[Shapes, int]) -> Counter[Shapes]:
    """The requests with the next larger size in place of 0 (an empty past, an empty batch), or 1 where there is none.

    A profile may begin at 0, and no engine is optimized for it.
    """
    up = [{0: min((size for size in sizes if size), default=1)} for sizes in _axes(histogram)]
    return _exchanged(histogram, up)


def _fastest(times: np.ndarray, counts: np.ndarray, number: int) -> tuple[float, tuple[int, ...]]:
    """So many corners, the last one among them, in which the requests take the least time, and that time.

    ``times`` [corners, requests] is infinite where a corner does not hold a request; the last one holds all.
    """
    last = len(times) - 1
    if number == 1:
        return float(times[last] @ counts), (last,)
    best: tuple[float, tuple[int, ...]] = (math.inf, ())
    for others in itertools.combinations(range(last), number - 2):
        totals = np.minimum(times[:last], times[[*others, last]].min(0)) @ counts
        index = int(totals.argmin())
        best = min(best, (float(totals[index]), (*others, index, last)))
    return best[0], tuple(dict.fromkeys(best[1]))


def _varied(histogram: Mapping[Shapes, int]) -> int:
    """How many sizes vary apart: those of one order, such as the lengths of ids and mask, are one."""
    return len({tuple(map(_ranks(sizes).__getitem__, sizes)) for sizes in _axes(histogram) if len(set(sizes)) > 1})


def _ranks(sizes: Iterable[int]) -> dict[int, int]:
    return {size: rank for rank, size in enumerate(sorted(set(sizes)))}


def _axes(histogram: Mapping[Shapes, int]) -> list[tuple[int, ...]]:
    """The sizes that each axis of the inputs has in the requests."""
    return list(zip(*([dim for _, dims in shapes for dim in dims] for shapes in histogram), strict=True))


def _rounded(histogram: Mapping[Shapes, int], most: int) -> Counter[Shapes]:
    """The requests, where an axis has more sizes each rounded up to the largest of its group of neighbours."""
    up = []
    for sizes in _axes(histogram):
        known = sorted(set(sizes))
        step = -(-len(known) // most)
        up.append({size: known[min(at // step * step + step, len(known)) - 1] for at, size in enumerate(known)})
    return _exchanged(histogram, up)


def _exchanged(histogram: Mapping[Shapes, int], sizes: Iterable[Mapping[int, int]]) -> Counter[Shapes]:
    """The requests with other sizes, of each axis in order."""
    sizes = list(sizes)
    found: Counter[Shapes] = Counter()
    for shapes, count in histogram.items():
        axes = iter(sizes)
        found[tuple((name, tuple(next(axes).get(dim, dim) for dim in dims)) for name, dims in shapes)] += count
    return found


def _corners(requests: Iterable[Shapes]) -> list[Shapes]:
    """The smallest shapes that hold some of the requests together; the last one holds all."""
    found: set[Shapes] = set()
    for shapes in requests:
        found |= {shapes, *(_ends([shapes, other], max) for other in found)}
    return sorted(found, key=lambda corner: (_elements(corner), corner))


def _covers(high: ShapeMap, shapes: Shapes) -> bool:
    return all(size <= most for name, dims in shapes for size, most in zip(dims, high[name], strict=True))


def _behind(before: ShapeMap, least: ShapeMap, high: ShapeMap) -> ShapeMap:
    """The smallest sizes above those of the bucket before, where the same one size varies in both."""
    return {
        name: tuple(
            low if low == most else most_before + 1
            for low, most, most_before in zip(least[name], dims, before[name], strict=True)
        )
        for name, dims in high.items()
    }


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
        bucket = next(item for item in buckets if _covers(item.high, shapes))
        own += count * _elements(shapes)
        filled += count * sum(math.prod(dims) for dims in bucket.high.values())
    return 1 - own / filled if filled else 0.0
