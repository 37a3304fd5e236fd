"""Which shapes get a CUDA graph: bounded, least recently used out first, after warming up."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

_G = TypeVar("_G")

WARM_UPS = 2
"""Runs of a shape before its capture: the first one allocates, and both must reach the context outside of a capture."""

_OTHERS = 8
"""Shapes that are remembered without a graph, for each that has one: those that warm up, and those that failed."""


@dataclass
class GraphCounts:
    """What came of the graphs of one execution context."""

    captured: int = 0
    replayed: int = 0
    failed: int = 0
    evicted: int = 0


class GraphCache(Generic[_G]):
    """The graphs of one execution context, by the shapes they were captured for.

    Args:
        limit: How many graphs there may be.
        free: Called with a graph that is not needed any more.
    """

    def __init__(self, limit: int, free: Callable[[_G], None]) -> None:
        self.counts = GraphCounts()
        self._limit = limit
        self._free = free
        self._graphs: OrderedDict[Hashable, _G] = OrderedDict()
        self._runs: OrderedDict[Hashable, int] = OrderedDict()
        """Runs without a graph; below zero after a failure."""

    def get(self, key: Hashable) -> _G | None:
        """The graph to launch for a shape, if it has one."""
        graph = self._graphs.get(key)
        if graph is not None:
            self._graphs.move_to_end(key)
            self.counts.replayed += 1
        return graph

    def wants(self, key: Hashable) -> bool:
        """Whether a shape that has no graph should be captured now; counts a run where it should not."""
        if not self._limit:
            return False
        runs = self._runs.pop(key, 0)
        if runs == WARM_UPS:
            return True
        self._remember(key, runs + 1 if runs >= 0 else runs)
        return False

    def add(self, key: Hashable, graph: _G) -> None:
        """Keep a graph that was captured; the one not used for longest goes when there are too many."""
        self._graphs[key] = graph
        self.counts.captured += 1
        while len(self._graphs) > self._limit:
            self._free(self._graphs.popitem(last=False)[1])
            self.counts.evicted += 1

    def fail(self, key: Hashable) -> None:
        """Remember that a shape cannot be captured: it is not tried again."""
        self.counts.failed += 1
        self._remember(key, -1)

    def clear(self) -> None:
        """Drop all graphs: the memory that they use has moved. Shapes that failed stay."""
        while self._graphs:
            key, graph = self._graphs.popitem(last=False)
            self._free(graph)
            self._remember(key, 0)

    def _remember(self, key: Hashable, runs: int) -> None:
        self._runs[key] = runs
        while len(self._runs) > _OTHERS * self._limit:
            self._runs.popitem(last=False)
