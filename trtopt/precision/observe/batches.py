"""Samples for a graph whose batch has one size: joined to batches, and filled up where they run out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from trtopt.errors import UsageError
from trtopt.graph.artifact import InputSpec
from trtopt.graph.edit import dims_of_value
from trtopt.images.labels import Labels
from trtopt.precision.observe.feeds import Sample
from trtopt.precision.observe.stream import Samples

Sizes = Mapping[str, Mapping[int, int]]
"""By the name of an input and its axis, the one size it has."""


@dataclass(frozen=True)
class FixedAxes:
    """The axes of inputs that have one size in a graph, and any in the model as loaded.

    Attributes:
        sizes: All of them.
        counting: Those of them that count rows: first axes, and others of the same name.
        rows: The batch size; None where there is none, or it differs between inputs.
        outputs: By the name of an output, its axis that counts rows.
    """

    sizes: Sizes
    counting: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    rows: int | None = None
    outputs: Mapping[str, int] = field(default_factory=dict)

    def rows_in(self, feeds: Mapping[str, np.ndarray]) -> int:
        """How many rows a sample holds. Raises UsageError: another fixed axis has another size, or inputs disagree."""
        found = set()
        for name, axes in self.sizes.items():
            shape = np.shape(feeds[name]) if name in feeds else ()
            for axis, size in axes.items():
                if axis in self.counting.get(name, ()):
                    found.add(shape[axis] if axis < len(shape) else 0)
                elif axis >= len(shape) or shape[axis] != size:
                    raise _unfit(name, shape, axis, size)
        if len(found) > 1:
            shapes = ", ".join(f"{name}: {list(np.shape(array))}" for name, array in feeds.items())
            remedy = "give every input the same number of rows, or build with --keep-dynamic"
            raise UsageError("The inputs of a sample disagree on the number of rows", where=shapes, remedy=remedy)
        return found.pop() if found else 0

    def taken(self, feeds: Mapping[str, np.ndarray], rows: Sequence[int] | np.ndarray) -> Sample:
        """Some rows of a sample; inputs without rows as they are."""
        return {
            name: np.take(array, rows, self.counting[name][0]) if name in self.counting else array
            for name, array in feeds.items()
        }

    def resized(self, feeds: Mapping[str, np.ndarray]) -> Sample:
        """A sample cut, or repeated, to the size of every axis that counts rows."""
        found = dict(feeds)
        for name, axes in self.counting.items():
            for axis in axes:
                array = found[name]
                found[name] = np.take(array, np.arange(self.sizes[name][axis]) % array.shape[axis], axis)
        return found


def fixed_axes(model: ir.Model, inputs: Sequence[InputSpec], sizes: Sizes) -> FixedAxes:
    """What is fixed of ``model``, as loaded, whose inputs are ``inputs``, when the axes of ``sizes`` are."""
    named = {spec.shape[0] for spec in inputs if 0 in sizes.get(spec.name, ()) and spec.shape[0] != "?"}
    counting = {
        spec.name: tuple(axis for axis in sizes[spec.name] if axis == 0 or spec.shape[axis] in named)
        for spec in inputs
        if spec.name in sizes
    }
    counting = {name: axes for name, axes in counting.items() if axes}
    found = {sizes[name][axis] for name, axes in counting.items() for axis in axes}
    simple = len(found) == 1 and all(len(axes) == 1 for axes in counting.values())
    outputs = {}
    for value in model.graph.outputs:
        dims = dims_of_value(value) or ()
        outputs[str(value.name)] = next((axis for axis, dim in enumerate(dims) if dim in named), 0)
    return FixedAxes(sizes, counting, found.pop() if simple else None, outputs)


class BatchedSamples(Samples):
    """Samples joined to batches of the size that a graph takes, in their order.

    The last batch has the rows that are left; ``filled`` gives it rows of the one before, or its own again. Where
    inputs have different batch sizes, each sample is cut or repeated by itself.
    """

    def __init__(self, samples: Samples, axes: FixedAxes, *, filled: bool) -> None:
        self._samples, self._axes, self._filled = samples, axes, filled
        self.where, self.source = samples.where, samples.source

    def __iter__(self) -> Iterator[Sample]:
        """Yield the batches. Raises as those of the samples, and UsageError: one has another size on a fixed axis."""
        return (batch for batch, _ in self.with_rows())

    def with_rows(self) -> Iterator[tuple[Sample, int]]:
        """Yield the batches, each with the rows of the samples in it, without those that fill it up; a sample that is
        cut or repeated by itself counts as 1."""
        if self._axes.rows is None:
            for sample in self._samples:
                if not self._axes.counting:
                    self._axes.rows_in(sample)
                yield self._axes.resized(sample), 1
            return
        yield from self._joined(self._axes.rows)

    def _joined(self, size: int) -> Iterator[tuple[Sample, int]]:
        waiting: Sample | None = None
        last: Sample | None = None
        for sample in self._samples:
            self._axes.rows_in(sample)
            if waiting is not None and not self._fits(waiting, sample):
                yield self._end(waiting, last, size), self._axes.rows_in(waiting)
                waiting, last = None, None
            waiting = sample if waiting is None else self._behind(waiting, sample)
            while (count := self._axes.rows_in(waiting)) > size:
                last = self._axes.taken(waiting, range(size))
                yield last, size
                waiting = self._axes.taken(waiting, range(size, count))
            if count == size:
                yield waiting, size
                waiting, last = None, waiting
        if waiting is not None:
            yield self._end(waiting, last, size), self._axes.rows_in(waiting)

    def _end(self, sample: Sample, last: Sample | None, size: int) -> Sample:
        if not self._filled:
            return sample
        more = sample if last is None or not self._fits(sample, last) else self._behind(sample, last)
        return self._axes.taken(more, np.arange(size) % self._axes.rows_in(more))

    def _fits(self, one: Sample, other: Sample) -> bool:
        """Whether two samples can be rows of one batch: all but the rows has the same shape, and what has no rows is
        equal."""
        counting = self._axes.counting
        for name, array in one.items():
            axis = counting[name][0] if name in counting else None
            first, second = (
                [size for index, size in enumerate(item.shape) if index != axis] for item in (array, other[name])
            )
            if first != second or (axis is None and not np.array_equal(array, other[name])):
                return False
        return True

    def _behind(self, one: Sample, other: Sample) -> Sample:
        counting = self._axes.counting
        return {
            name: np.concatenate([array, other[name]], counting[name][0]) if name in counting else array
            for name, array in one.items()
        }

    @property
    def count(self) -> int | None:
        """Number of batches; None where only a pass over the samples tells."""
        known, rows = self._samples.count, self._axes.rows
        if known is None or rows is None:
            return known
        shapes = self._samples.shapes()
        if len({tuple(sorted(item.items())) for item in shapes}) > 1:
            return None
        name, axes = next(iter(self._axes.counting.items()))
        return -(-sum(item[name][axes[0]] for item in shapes) // rows)

    @property
    def labels(self) -> np.ndarray | Labels | None:
        """Those of the samples."""
        return self._samples.labels

    @property
    def sha256(self) -> str:
        """That of the samples."""
        return self._samples.sha256

    def shapes(self) -> tuple[dict[str, tuple[int, ...]], ...]:
        """Input shapes, batch by batch; reads the samples through."""
        return tuple({name: array.shape for name, array in batch.items()} for batch in self)


def _unfit(name: str, shape: Sequence[int], axis: int, size: int) -> UsageError:
    return UsageError(
        f"A sample has the shape {list(shape)} at the input {name!r}, and the profiles fix its axis {axis} to {size}",
        where=f"input {name}",
        remedy="give samples of that size, or let the axis vary with --min-shapes and --max-shapes",
    )
