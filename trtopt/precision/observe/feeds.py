"""Rules that split arrays into single samples, and checks of each sample against the network's inputs."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trtopt.errors import UsageError
from trtopt.graph.artifact import InputSpec
from trtopt.precision.observe.arrays import ArrayReader

LABELS = "__labels__"
"""The key under which a file or a feed may carry labels."""

Sample = dict[str, np.ndarray]
"""One sample: arrays by input name, in the dtype the network wants."""


@dataclass(frozen=True)
class Group:
    """The arrays of one file or one feed, and how they split into samples.

    Attributes:
        readers: By input name.
        specs: By input name.
        count: Samples in the group.
        counts: Blocks of each array's first axis: ``count``, or 1 for an array that every sample shares.
        drop_axis: Inputs whose first array axis counts samples and is not part of the network's input.
        where: The file or the place in the stream, for messages.
        labels: Labels with ``count`` as first axis.
    """

    readers: Mapping[str, ArrayReader]
    specs: Mapping[str, InputSpec]
    count: int
    counts: Mapping[str, int]
    drop_axis: frozenset[str]
    where: str
    labels: np.ndarray | None = None

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each input in every sample of the group."""
        return {name: self._shape(name) for name in self.readers}

    def samples(self) -> Iterator[Sample]:
        """Read the group sample by sample.

        Raises:
            UsageError: A value is NaN or infinite, does not fit the input's type, or the file is damaged.
        """
        streams = {name: reader.blocks(self.counts[name]) for name, reader in self.readers.items()}
        shapes = self.shapes()
        shared: Sample = {}
        for index in range(self.count):
            sample = dict(shared)
            for name, stream in streams.items():
                if name not in shared:
                    where = f"{self.where}, input {name}, sample {index}"
                    sample[name] = convert(next(stream).reshape(shapes[name]), self.specs[name], where)
                    if self.counts[name] == 1:
                        shared[name] = sample[name]
            yield sample

    def _shape(self, name: str) -> tuple[int, ...]:
        shape = self.readers[name].shape
        if name in self.drop_axis:
            return shape[1:]
        return (shape[0] // self.counts[name], *shape[1:]) if shape else ()


def group(
    arrays: Mapping[str, ArrayReader], inputs: Sequence[InputSpec], where: str, labels: np.ndarray | None = None
) -> Group:
    """Decide how the arrays of one file (or one feed) split into samples.

    The rules, input by input: an array with one axis more than the input has is indexed along its first axis; an
    array of the input's rank is split into single rows where the input's first dimension is dynamic, into blocks of
    that many rows where it is static; a scalar is shared by all samples. The inputs must agree on the number of
    samples. Where they do not, but each array as a whole is a valid input, the arrays are one sample: a recurrent
    state ``[2, batch, 128]`` beside ``[batch, 576]``.

    Raises:
        UsageError: Names, types or shapes do not fit the inputs, or there are no samples.
    """
    specs = {spec.name: spec for spec in inputs}
    check_names(arrays.keys(), specs, where)
    for name, reader in arrays.items():
        check_dtype(reader.dtype, specs[name], where)
    counts, dropped = {}, set()
    for name, reader in arrays.items():
        counts[name] = _count(reader, specs[name], where)
        if len(reader.shape) > len(specs[name].shape):
            dropped.add(name)
    total = {counts[name] for name, spec in specs.items() if spec.shape or name in dropped} or {1}
    if len(total) > 1:
        if dropped or not all(_fits(reader.shape, specs[name].shape) for name, reader in arrays.items()):
            raise _disagree(counts, where)
        counts, total = dict.fromkeys(counts, 1), {1}
    count = total.pop()
    if count == 0:
        raise UsageError("There are no samples", where=where, remedy="give at least one sample")
    result = Group(arrays, specs, count, counts, frozenset(dropped), where)
    _check_symbols(result.shapes(), specs, where)
    return Group(arrays, specs, count, counts, frozenset(dropped), where, _split_labels(labels, result))


def check_names(names: Any, specs: Mapping[str, InputSpec], where: str) -> None:
    """Raise when an input is missing or a name is not an input's."""
    for name in names:
        if name not in specs:
            near = difflib.get_close_matches(str(name), specs, 1, 0.4)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise UsageError(
                f"The model has no input {name!r}",
                where=where,
                remedy=f"{hint}name the arrays after the inputs: {', '.join(specs)}",
            )
    missing = [name for name in specs if name not in names]
    if missing:
        raise UsageError(
            f"The samples lack the input {missing[0]!r}",
            where=where,
            remedy=f"give an array for each input: {', '.join(specs)}",
        )


def check_dtype(dtype: np.dtype[Any], spec: InputSpec, where: str) -> None:
    """Raise unless ``dtype`` is of the same kind as the input's: float to float, integer to integer, bool to bool.

    An integer image for a float input is refused: whether 0..255 or 0..1 is meant cannot be known, and the ranges
    would be wrong by a factor of 255.
    """
    if _kind(dtype) != _kind(spec.dtype) or _kind(dtype) == "?":
        raise UsageError(
            f"The input {spec.name!r} is {spec.dtype}, the samples are {dtype}",
            where=where,
            remedy=f"preprocess as the model expects and convert with array.astype('{spec.dtype}')",
        )


def convert(array: np.ndarray, spec: InputSpec, where: str) -> np.ndarray:
    """The array in the input's dtype, contiguous, with every value checked.

    Raises:
        UsageError: NaN or infinity, or an integer outside the input's type.
    """
    result = array
    if array.dtype != spec.dtype:
        if _kind(spec.dtype) == "i":
            bounds = np.iinfo(spec.dtype)
            if array.size and (int(array.min()) < int(bounds.min) or int(array.max()) > int(bounds.max)):
                raise UsageError(f"A value does not fit {spec.dtype}", where=where, remedy="store the input's type")
        with np.errstate(over="ignore"):
            result = array.astype(spec.dtype)
    if _kind(spec.dtype) == "f" and not np.isfinite(result).all():
        raise UsageError(
            "The samples hold NaN or infinity" + (f" once converted to {spec.dtype}" if result is not array else ""),
            where=where,
            remedy="remove the sample, or correct its preprocessing",
        )
    return np.asarray(result, order="C")


def _kind(dtype: np.dtype[Any]) -> str:
    if dtype.kind in "iu":
        return "i"
    if dtype.kind == "f" or dtype.name == "bfloat16":
        return "f"
    return dtype.kind if dtype.kind == "b" else "?"


def _count(reader: ArrayReader, spec: InputSpec, where: str) -> int:
    """Samples in one array; see :func:`group` for the rules."""
    shape, want = reader.shape, spec.shape
    if len(shape) == len(want) + 1 and _fits(shape[1:], want):
        return shape[0]
    if len(shape) == len(want) and _fits(shape[1:], want[1:]):
        if not shape:
            return 1
        first = want[0]
        if not isinstance(first, int):
            return shape[0]
        if first > 0 and shape[0] % first == 0:
            return shape[0] // first
    raise UsageError(
        f"The input {spec.name!r} has the shape {_text(want)}, the samples {_text(shape)}",
        where=where,
        remedy=f"the first axis counts samples: give {_text(('samples', *want))}, or batches of {_text(want)}",
    )


def _fits(shape: Sequence[int], want: Sequence[int | str]) -> bool:
    return len(shape) == len(want) and all(
        dim == size for dim, size in zip(shape, want, strict=True) if isinstance(size, int)
    )


def _disagree(counts: Mapping[str, int], where: str) -> UsageError:
    text = ", ".join(f"{name}: {count}" for name, count in counts.items())
    return UsageError(
        f"The inputs disagree on the number of samples ({text})",
        where=where,
        remedy="give every input the same number of samples, or one file per sample in a folder",
    )


def _check_symbols(shapes: Mapping[str, tuple[int, ...]], specs: Mapping[str, InputSpec], where: str) -> None:
    """A symbol names one size: TensorRT refuses inputs whose equally named dimensions differ."""
    seen: dict[str, tuple[str, int]] = {}
    for name, shape in shapes.items():
        for dim, symbol in zip(shape, specs[name].shape, strict=True):
            if isinstance(symbol, int) or symbol == "?":
                continue
            other, size = seen.setdefault(symbol, (name, dim))
            if size != dim:
                raise UsageError(
                    f"The dimension {symbol!r} is {size} in the input {other!r} and {dim} in {name!r}",
                    where=where,
                    remedy="give samples whose equally named dimensions agree",
                )


def _split_labels(labels: np.ndarray | None, of: Group) -> np.ndarray | None:
    """Labels with one entry per sample: one per sample, or one per row of the samples' first input."""
    if labels is None:
        return None
    if labels.shape[:1] == (of.count,):
        return labels
    rows = next((shape[0] for shape in of.shapes().values() if shape), 1)
    if labels.shape[:1] == (of.count * rows,):
        return labels.reshape(of.count, rows, *labels.shape[1:])
    raise UsageError(
        f"There are {labels.shape[0] if labels.shape else 1} labels for {of.count} samples",
        where=f"{of.where}, {LABELS}",
        remedy="give one label per sample",
    )


def _text(shape: Sequence[int | str]) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"
