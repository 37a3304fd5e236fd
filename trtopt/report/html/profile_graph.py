"""The graph of an engine's layers, laid out for the page of a profile.

The layout is made here and not in the browser: a row is the longest way from the inputs, the order within a row follows
the predecessors (the layered layout of K. Sugiyama, S. Tagawa and M. Toda, "Methods for visual understanding of
hierarchical system structures", IEEE Transactions on Systems, Man, and Cybernetics 11(2), 1981), and the rows are
folded into columns, so that a deep network fills the window.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from trtopt.report.schema.profile import ProfileLayer

LANE, ROW = 178.0, 66.0
"""Distance of neighbours in a row and of rows, in pixels at zoom 1."""
_NARROW = 0.14
"""Lanes that a tensor passing by takes."""
_YIELDING = 4
"""Power of its width with which something is kept in place: lines give way to boxes, so that chains are straight."""
_HALF_BOX = 0.34
"""Half the height a row's boxes may take, in rows: within it lines run straight down, between rows they cross."""
_GUTTER = 0.6
"""Lanes between columns."""
_SHAPE = 1.4
"""Width over height of the window that the graph is shown in."""
_SHORT = 12
"""Rows that a column has at least, since they can be read in the window."""

Point = tuple[float, float]


@dataclass(frozen=True)
class Edge:
    """A layer reads what another wrote (indices); ``bends`` are the points the line passes between the two."""

    source: int
    target: int
    bends: tuple[Point, ...]


@dataclass(frozen=True)
class Graph:
    """Where every layer stands, in pixels, and the lines between them."""

    places: tuple[Point, ...]
    edges: tuple[Edge, ...]


def without_tensors(layer: ProfileLayer) -> bool:
    """Whether the file names no tensor of a layer, as lists of bare names do."""
    return not layer.inputs and not layer.outputs


def links(layers: Sequence[ProfileLayer]) -> list[tuple[int, int]]:
    """Which layer reads from which: pairs of indices (writer, reader), the writer always before the reader.

    A tensor is read as the last layer before wrote it, since buffers are written again. A layer without tensors is
    linked to the one before it.
    """
    writer: dict[str, int] = {}
    found: dict[tuple[int, int], None] = {}
    for index, layer in enumerate(layers):
        if without_tensors(layer) and index:
            found[index - 1, index] = None
        for tensor in layer.inputs:
            if tensor.name in writer:
                found[writer[tensor.name], index] = None
        writer |= dict.fromkeys((tensor.name for tensor in layer.outputs), index)
    return list(found)


def graph(layers: Sequence[ProfileLayer], pairs: Sequence[tuple[int, int]] | None = None) -> Graph:
    """The layers laid out; ``pairs`` are those of :func:`links`, where tensors do not tell them."""
    pairs = links(layers) if pairs is None else pairs
    rows = _rows(len(layers), pairs)
    across = _across(rows, pairs)
    columns = _folded(across)
    places = [columns.place(row, across[row][index]) for index, row in enumerate(rows)]
    edges = []
    for source, target in pairs:
        way = [(row, across[row][source]) for row in range(rows[source] + 1, rows[target])]
        bends = columns.line(
            (rows[source], across[rows[source]][source]), way, (rows[target], across[rows[target]][target])
        )
        edges.append(Edge(source, target, tuple(bends)))
    return Graph(tuple(places), tuple(edges))


def _rows(number: int, pairs: Iterable[tuple[int, int]]) -> list[int]:
    """The row of each layer: below all it reads from; what reads from none, just above its first reader."""
    before: list[list[int]] = [[] for _ in range(number)]
    after: list[list[int]] = [[] for _ in range(number)]
    for source, target in pairs:
        before[target].append(source)
        after[source].append(target)
    rows: list[int] = []
    for index in range(number):
        alone = not before[index] and not after[index]
        above = [rows[other] for other in before[index]] or ([rows[-1]] if alone and rows else [-1])
        rows.append(max(above) + 1)
    for index in range(number):
        if after[index] and not before[index]:
            rows[index] = min(rows[other] for other in after[index]) - 1
    return rows


def _across(rows: Sequence[int], pairs: Sequence[tuple[int, int]]) -> list[dict[int, float]]:
    """By row, the lane of each layer in it, and of each layer above it whose output a row below reads.

    The key of either is the index of the layer; a tensor that passes by keeps a narrow lane free for its line.
    """
    depth = max(rows, default=-1) + 1
    before: list[list[int]] = [[] for _ in rows]
    last = list(rows)
    for source, target in pairs:
        before[target].append(source)
        last[source] = max(last[source], rows[target])
    starts: list[list[int]] = [[] for _ in range(depth)]
    for index, row in enumerate(rows):
        starts[row].append(index)
    placed: list[dict[int, float]] = []
    for row in range(depth):
        above = placed[-1] if placed else {}
        passing = [index for index in above if last[index] > row]
        edge = max(above.values(), default=0.0)
        wanted = {index: above[index] for index in passing}
        for index in starts[row]:
            near = [other for other in before[index] if rows[other] == row - 1] or before[index]
            wanted[index] = sum(above[other] for other in near) / len(near) if near else edge
        order = sorted(wanted, key=lambda index: (wanted[index], rows[index] != row, index))
        widths = [1.0 if rows[index] == row else _NARROW for index in order]
        placed.append(dict(zip(order, _spread([wanted[index] for index in order], widths), strict=True)))
    return placed


def _spread(wanted: Sequence[float], widths: Sequence[float]) -> list[float]:
    """Centres of boxes side by side, as near as can be to where they are wanted, in rising order.

    Least squares under the given order, in which narrow ones (of a width of 1 or less) yield: with the distances taken
    off it is isotonic regression, solved by pooling adjacent violators.
    """
    offsets = [0.0]
    for left, right in itertools.pairwise(widths):
        offsets.append(offsets[-1] + (left + right) / 2)
    pools: list[tuple[float, float, int]] = []  # mean, weight and number
    for value, width, offset in zip(wanted, widths, offsets, strict=False):
        mean, weight, number = value - offset, width**_YIELDING, 1
        while pools and pools[-1][0] > mean:
            other, others, size = pools.pop()
            mean = (mean * weight + other * others) / (weight + others)
            weight, number = weight + others, number + size
        pools.append((mean, weight, number))
    means = (mean for mean, _, number in pools for _ in range(number))
    return [mean + offset for mean, offset in zip(means, offsets, strict=False)]


@dataclass(frozen=True)
class _Columns:
    """Rows folded into columns of ``height`` rows.

    By column, ``starts`` has the lane of its left edge, ``shifts`` what is added to a lane of :func:`_across`.
    """

    height: int
    starts: tuple[float, ...]
    shifts: tuple[float, ...]

    def place(self, row: int, lane: float, down: float = 0.0) -> Point:
        """In pixels; ``down`` in rows."""
        column, rest = divmod(row, self.height)
        return round((lane + self.shifts[column]) * LANE, 1), round((rest + down) * ROW, 1)

    def line(self, start: tuple[int, float], way: Sequence[tuple[int, float]], end: tuple[int, float]) -> list[Point]:
        """The points a line passes, given row and lane of its start, of what it passes, and of its end."""
        bends: list[Point] = []
        for (row, lane), (below, next_lane) in zip([start, *way], [*way, end], strict=True):
            column = below // self.height
            if column != row // self.height:
                gutter = round((self.starts[column] - _GUTTER / 2) * LANE, 1)
                leaves, arrives = self.place(row, lane, 0.5), self.place(below, next_lane, -0.5)
                bends += [leaves, (gutter, leaves[1]), (gutter, arrives[1]), arrives]
            if below != end[0]:
                bends += [self.place(below, next_lane, -_HALF_BOX), self.place(below, next_lane, _HALF_BOX)]
        return list(_corners(bends))


def _corners(points: Sequence[Point]) -> Iterator[Point]:
    """The points without those on a straight way down between two others."""
    for index, point in enumerate(points):
        inner = 0 < index < len(points) - 1
        if not (inner and points[index - 1][0] == point[0] == points[index + 1][0]):
            yield point


def _folded(across: Sequence[dict[int, float]]) -> _Columns:
    """As many columns as show the whole largest in its window; one where it is short."""
    rows = len(across)
    left = [min(row.values()) for row in across]
    right = [max(row.values()) for row in across]
    best, largest = _Columns(max(rows, 1), (0.0,), (0.0,)), 0.0
    number = 0
    while True:
        number += 1
        height = max(math.ceil(rows / number), 1)
        starts, shifts, width = [], [], 0.0
        for start in range(0, rows, height):
            part = slice(start, start + height)
            low, high = min(left[part]), max(right[part])
            starts.append(width)
            shifts.append(width + 0.5 - low)
            width += high - low + 1 + _GUTTER
        scale = min(_SHAPE / max(width * LANE, 1.0), 1 / (height * ROW))
        if scale > largest:
            best, largest = _Columns(height, tuple(starts), tuple(shifts)), scale
        if width * LANE >= _SHAPE * height * ROW or height <= _SHORT:
            return best
