"""Runs any number of rows on a graph whose batch has one size, or an engine that takes a range of them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from trtopt.accuracy.compare import Runner
from trtopt.errors import UsageError
from trtopt.precision.observe.batches import FixedAxes
from trtopt.support.ort_session import Feeds


class BatchRunner:
    """A runner that cuts and fills up what it is fed to the batch that its graph takes.

    The last rows are repeated in the place of those that are missing, and left out of the outputs.
    """

    def __init__(self, runner: Runner, axes: FixedAxes) -> None:
        self._runner, self._axes = runner, axes
        self.output_names = runner.output_names

    def run(self, feeds: Feeds) -> list[np.ndarray]:
        """Outputs in the order of ``output_names``.

        Raises:
            UsageError: A fixed axis other than the batch has another size, or outputs cannot be joined.
        """
        axes, size = self._axes, self._axes.rows
        if size is None:
            return self._runner.run(feeds)
        count = axes.rows_in(feeds)
        if count == size:
            return self._runner.run(feeds)
        parts = []
        for start in range(0, count, size):
            rows = np.arange(start, start + size)
            outputs = self._runner.run(axes.taken(feeds, np.minimum(rows, count - 1)))
            parts.append(
                [
                    self._cut(name, array, min(size, count - start), is_only=count < size)
                    for name, array in zip(self.output_names, outputs, strict=True)
                ]
            )
        return [
            found[0] if len(found) == 1 else np.concatenate(found, self._axes.outputs.get(name, 0))
            for name, found in zip(self.output_names, zip(*parts, strict=True), strict=True)
        ]

    def _cut(self, name: str, array: np.ndarray, rows: int, *, is_only: bool) -> np.ndarray:
        """The first rows of an output; all of it where rows are no axis of it and nothing has to be joined."""
        axis, size = self._axes.outputs.get(name, 0), self._axes.rows or 1
        if axis >= array.ndim or array.shape[axis] % size:
            if is_only:
                return array
            raise UsageError(
                f"The output {name!r} of shape {list(array.shape)} does not hold {size} rows, and more were fed",
                where=f"output {name}",
                remedy=f"give samples in batches of {size}, or build with --keep-dynamic",
            )
        return array[(slice(None),) * axis + (slice(rows * array.shape[axis] // size),)]


class RowsRunner:
    """A runner that cuts and fills up what it is fed to a number of rows that its engine takes.

    Args:
        runner: The engine.
        axes: What is fixed of the model where a batch has so many rows.
        low: The fewest rows.
        high: The most.
    """

    def __init__(self, runner: Runner, axes: Callable[[int], FixedAxes], low: int, high: int) -> None:
        self._runner, self._axes, self._low, self._high = runner, axes, low, high
        self.output_names = runner.output_names

    def run(self, feeds: Feeds) -> list[np.ndarray]:
        """Outputs in the order of ``output_names``. Raises UsageError as :meth:`BatchRunner.run`."""
        rows = self._axes(self._low).rows_in(feeds)
        if self._low <= rows <= self._high:
            return self._runner.run(feeds)
        return BatchRunner(self._runner, self._axes(max(self._low, min(rows, self._high)))).run(feeds)
