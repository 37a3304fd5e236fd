"""A stream of single samples that can be read again and again, whatever they come from."""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import numpy as np

from trtopt.errors import UsageError
from trtopt.images.labels import Labels
from trtopt.precision.observe.feeds import LABELS, Sample, SampleGroup

_Feeds = TypeVar("_Feeds", bound=Mapping[str, np.ndarray])
_T = TypeVar("_T")

_MOST_BYTES = 1 << 28
"""Of samples that are held, and of reference outputs."""


@dataclass(frozen=True)
class _Scan:
    """What one pass over a stream of feeds tells."""

    count: int
    shapes: tuple[dict[str, tuple[int, ...]], ...]
    labels: np.ndarray | None
    sha256: str


class Samples:
    """A stream of samples that can be iterated any number of times.

    Each sample is a dict of arrays by input name, in the inputs' dtypes: batch 1, or the static first dimension of
    the model. Memory holds one sample of a file at a time; of a JSON of Polygraphy, all.

    Attributes:
        source: ``user``, or ``synthetic`` for random data.
        where: The file, folder or function, for messages.
        taken: One line that says what of a Python object or a script was taken for what; empty for others.
    """

    taken = ""

    def __init__(
        self,
        groups: Callable[[], Iterator[SampleGroup]],
        *,
        where: str,
        source: Literal["user", "synthetic"] = "user",
        sha256: str | None = None,
        known: tuple[SampleGroup, ...] | None = None,
        taken: str = "",
        kept: object = None,
    ) -> None:
        self._groups = groups
        self._known = known
        self._sha256 = sha256
        self._kept = kept  # whose files are there as long as this
        self.taken = taken
        self.where = where
        self.source: Literal["user", "synthetic"] = source

    def __iter__(self) -> Iterator[Sample]:
        """Yield the samples in order.

        Raises:
            UsageError: A value is NaN or infinite, a file is damaged, a function fails or yields nothing.
        """
        empty = True
        for item in self._groups():
            for sample in item.samples():
                empty = False
                yield sample
        if empty:
            raise UsageError("There are no samples", where=self.where, remedy="give at least one sample")

    def undivided(self) -> Samples:
        """The same with each feed, or file, as one sample, as it was given: what Polygraphy calls an iteration."""
        known = None if self._known is None else tuple(item.undivided() for item in self._known)
        return Samples(
            lambda: (item.undivided() for item in self._groups()),
            where=self.where,
            source=self.source,
            sha256=self._sha256,
            known=known,
            taken=self.taken,
            kept=self._kept,
        )

    def with_rows(self) -> Iterator[tuple[Sample, int]]:
        """Yield the samples in order, each with how many of the caller's samples it holds: several where they are
        joined to batches. Raises as :meth:`__iter__`."""
        return ((sample, 1) for sample in self)

    @property
    def count(self) -> int | None:
        """Number of samples; None for functions and iterables, whose length only a pass over them tells."""
        return None if self._known is None else sum(item.count for item in self._known)

    @functools.cached_property
    def labels(self) -> np.ndarray | Labels | None:
        """Labels with the samples as first axis, or None. Reads functions and iterables through once.

        Raises:
            UsageError: Some files carry labels and some do not, or their shapes differ.
        """
        if self._known is None:
            return self._scan.labels
        return _join_labels([item.labels for item in self._known], self.where)

    @functools.cached_property
    def sha256(self) -> str:
        """Hash of the data, hex: of a file that of its content, of a folder that of names and contents, of a script or
        a Python object that of the arrays it gives."""
        return self._sha256 if self._sha256 is not None else self._scan.sha256

    def shapes(self) -> tuple[dict[str, tuple[int, ...]], ...]:
        """Input shapes, sample by sample: from the headers of files; functions and iterables are read through once."""
        if self._known is None:
            return self._scan.shapes
        return tuple(item.shapes() for item in self._known for _ in range(item.count))

    @functools.cached_property
    def _scan(self) -> _Scan:
        digest = hashlib.sha256()
        shapes: list[dict[str, tuple[int, ...]]] = []
        labels: list[np.ndarray | None] = []
        for item in self._groups():
            labels.append(item.labels)
            for sample in item.samples():
                shapes.append({name: array.shape for name, array in sample.items()})
                hash_arrays(digest, sample)
        if not shapes:
            raise UsageError("There are no samples", where=self.where, remedy="give at least one sample")
        return _Scan(len(shapes), tuple(shapes), _join_labels(labels, self.where), digest.hexdigest())


def entries(sample: Mapping[str, np.ndarray]) -> int:
    """How many entries a sample holds along its first axis: 8 of a batch of 8."""
    return max((array.shape[0] for array in sample.values() if array.ndim), default=1)


def up_to(samples: Iterable[_Feeds], most: int) -> Iterator[_Feeds]:
    """The first samples, until they hold ``most`` entries."""
    held = 0
    for sample in samples:
        yield sample
        held += entries(sample)
        if held >= most:
            return


FEW_ROWS = 16
"""Entries that are run first where 16 bits are decided and verified; all of them where these leave a doubt."""


class SomeSamples(Samples):
    """Samples of at most ``most`` entries of others, one sample at least: spread evenly where their number is known,
    else the first."""

    def __init__(self, whole: Samples, most: int) -> None:
        self._whole, count = whole, whole.count
        self.most = samples = max(1, most // max(1, entries(next(iter(whole)))))
        self._chosen = slice(0, samples) if count is None else slice(0, None, max(1, -(-count // samples)))
        self.where, self.source = whole.where, whole.source

    def __iter__(self) -> Iterator[Sample]:
        return (sample for sample, _ in self.with_rows())

    def with_rows(self) -> Iterator[tuple[Sample, int]]:
        """Yield the samples that are chosen, each with how many of the caller's it holds."""
        return itertools.islice(self._whole.with_rows(), self._chosen.start, self._chosen.stop, self._chosen.step)

    @property
    def indices(self) -> Sequence[int]:
        """Which samples of the others are chosen; those of ``most`` where only a pass over them tells how many are."""
        whole = self._whole.count
        return range(self.most if whole is None else whole)[self._chosen]

    @property
    def count(self) -> int | None:
        """Number of samples; None where only a pass over them tells."""
        return None if self._whole.count is None else len(self.indices)

    @property
    def labels(self) -> np.ndarray | Labels | None:
        """Those of the samples that are chosen."""
        labels = self._whole.labels
        return None if labels is None else labels[self._chosen]

    @property
    def sha256(self) -> str:
        """Hash of all samples and of which are chosen."""
        return hashlib.sha256(f"{self._whole.sha256} {self._chosen}".encode()).hexdigest()

    def shapes(self) -> tuple[dict[str, tuple[int, ...]], ...]:
        """Input shapes, sample by sample."""
        return self._whole.shapes()[self._chosen]


class SomeFirst(Samples):
    """The same samples, those of some indices first, in their order; these are held in memory."""

    def __init__(self, whole: Samples, first: Sequence[int]) -> None:
        self._whole, self._first = whole, tuple(first)
        self._held: dict[int, tuple[Sample, int]] = {}
        self.where, self.source = whole.where, whole.source

    def __iter__(self) -> Iterator[Sample]:
        return (sample for sample, _ in self.with_rows())

    def with_rows(self) -> Iterator[tuple[Sample, int]]:
        """Yield the samples, each with how many of the caller's it holds; the first are read once, all the others."""
        if not self._held:
            until = itertools.islice(self._whole.with_rows(), max(self._first, default=-1) + 1)
            self._held = {index: taken for index, taken in enumerate(until) if index in self._first}
        yield from (self._held[index] for index in self._first if index in self._held)
        for index, taken in enumerate(self._whole.with_rows()):
            if index not in self._held:
                yield taken

    @property
    def count(self) -> int | None:
        """Number of samples; None where only a pass over them tells."""
        return self._whole.count


class FilledSamples(Samples):
    """Samples that are fed what others leave out: one of several sets of arrays, the first ones the first set."""

    def __init__(self, others: Samples, sets: Sequence[Sample]) -> None:
        self._others, self._sets = others, tuple(sets)
        self.where, self.source, self.taken = others.where, others.source, others.taken

    def __iter__(self) -> Iterator[Sample]:
        return (sample for sample, _ in self.with_rows())

    def with_rows(self) -> Iterator[tuple[Sample, int]]:
        """Yield the samples with a set in each, and how many of the caller's each holds."""
        count = self.count or len(self._sets)  # what gets the same set stands together, so that it can be one batch
        for index, (sample, rows) in enumerate(self._others.with_rows()):
            yield {**sample, **self._sets[index * len(self._sets) // count % len(self._sets)]}, rows

    def undivided(self) -> Samples:
        """The same with each feed as one sample."""
        return FilledSamples(self._others.undivided(), self._sets)

    @property
    def count(self) -> int | None:
        """Number of samples; None where only a pass over them tells."""
        return self._others.count

    @property
    def labels(self) -> np.ndarray | Labels | None:
        """Those of the others."""
        return self._others.labels

    @functools.cached_property
    def sha256(self) -> str:
        """Hash of the others and of all sets."""
        digest = hashlib.sha256(self._others.sha256.encode())
        for arrays in self._sets:
            hash_arrays(digest, arrays)
        return digest.hexdigest()

    def shapes(self) -> tuple[dict[str, tuple[int, ...]], ...]:
        """Input shapes, sample by sample."""
        own = {name: array.shape for name, array in self._sets[0].items()}
        return tuple({**shapes, **own} for shapes in self._others.shapes())


def hash_arrays(digest: Any, arrays: Mapping[str, np.ndarray]) -> None:
    """Add names, types, shapes and values to a digest of :mod:`hashlib`."""
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        digest.update(f"{name} {array.dtype} {array.shape};".encode())
        digest.update(array.reshape(-1).view(np.uint8).data)


def _join_labels(parts: Sequence[np.ndarray | None], where: str) -> np.ndarray | None:
    found = [part for part in parts if part is not None]
    if not found:
        return None
    if len(found) != len(parts) or len({part.shape[1:] for part in found}) > 1:
        raise UsageError(
            f"{len(found)} of {len(parts)} files carry labels, or their shapes differ",
            where=f"{where}, {LABELS}",
            remedy="give labels of one shape for every sample, or for none",
        )
    return np.concatenate(found)


def bounded(items: Iterable[_T], arrays: Callable[[_T], Iterable[np.ndarray]]) -> Iterator[_T]:
    """Items, one at least, until their arrays fill 256 MiB."""
    held = 0
    for item in items:
        yield item
        held += sum(array.nbytes for array in arrays(item))
        if held > _MOST_BYTES:
            return
