"""Arrays of files and feeds, split into single samples, each of which is checked against the network's inputs.

``numpy.load`` reads a whole member of an ``.npz`` at once, and a memory map of an ``.npy`` counts towards the resident
memory as it is read. Both formats are a short header followed by the elements, so they are read as a stream instead,
never as pickles: memory holds one sample, whatever the number of samples.
"""

from __future__ import annotations

import io
import tokenize
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy_format

from trtopt.errors import UsageError
from trtopt.graph.artifact import InputSpec
from trtopt.support.files import open_file
from trtopt.support.words import nearest

MAX_SAMPLE_BYTES = 4 << 30
"""A header that declares larger rows than this is not believed."""

_NO_PYTHON = (SyntaxError, tokenize.TokenError, RecursionError, TypeError)
"""What numpy raises for headers that are no Python literals, beside ValueError."""

_MOST_EMPTY = 10_000
"""Samples without a value, as of an input with a dimension of 0: no file shows how many there are."""


@dataclass(frozen=True)
class ArrayReader:
    """An array, never of objects, that can be read in blocks of rows along its first axis.

    Attributes:
        path: The file it comes from; None for an array in memory.
        member: Its name inside an ``.npz``; empty for an ``.npy``.
        fortran: Whether the file stores it in column-major order (it is then read whole).
        array: The array itself, when it is in memory.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    path: Path | None = None
    member: str = ""
    fortran: bool = False
    array: np.ndarray | None = None

    def blocks(self, count: int) -> Iterator[np.ndarray]:
        """Yield ``count`` equal blocks of the first axis, each of shape ``[shape[0] / count, ...]``.

        A scalar is one block.

        Raises:
            UsageError: The file is shorter than its header says, or damaged.
        """
        rows = self.shape[0] // count if self.shape else 1
        shape = (rows, *self.shape[1:]) if self.shape else ()
        if self.array is not None or self.fortran:
            array = self.read() if self.array is None else self.array
            if not self.shape:
                yield array
                return
            for index in range(count):
                yield array[index * rows : (index + 1) * rows]
            return
        with self._open() as stream:
            _read_header(stream, self._where)
            for _ in range(count):
                yield self._take(stream, shape)

    def read(self) -> np.ndarray:
        """The whole array. Raises UsageError where the file is shorter than its header says, or damaged."""
        if self.array is not None:
            return self.array
        size = int(np.prod(self.shape, dtype=object)) * self.dtype.itemsize
        if size > MAX_SAMPLE_BYTES:
            raise _too_large(size, self._where)
        with self._open() as stream:
            _read_header(stream, self._where)
            flat = self._take(stream, (int(np.prod(self.shape, dtype=np.int64)),))
        return flat.reshape(self.shape, order="F" if self.fortran else "C")

    def _take(self, stream: IO[bytes], shape: tuple[int, ...]) -> np.ndarray:
        out = np.empty(shape, self.dtype)
        view = out.reshape(-1).view(np.uint8).data
        done = 0
        try:
            while done < len(view):
                # A bounded read keeps the buffers of the decompressor small.
                data = stream.read(min(len(view) - done, 1 << 22))
                if not data:
                    raise EOFError("the data ends early")
                view[done : done + len(data)] = data
                done += len(data)
        except (OSError, EOFError, zipfile.BadZipFile, zlib.error, ValueError) as error:
            raise _damaged(self._where, error) from error
        return out

    @property
    def _where(self) -> str:
        return f"{self.path}, array {self.member}" if self.member else str(self.path)

    def _open(self) -> IO[bytes]:
        if self.path is None:
            raise ValueError("an array in memory has no file")
        try:
            if not self.member:
                return open(self.path, "rb")
            with zipfile.ZipFile(self.path) as archive:
                return archive.open(f"{self.member}.npy")
        except (OSError, KeyError, zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:
            raise _damaged(self._where, error) from error


def in_memory(array: np.ndarray) -> ArrayReader:
    """A reader of an array that is in memory already."""
    return ArrayReader(array.shape, array.dtype, array=array)


def open_arrays(path: Path) -> dict[str, ArrayReader]:
    """The arrays of an ``.npz`` by name, or of an ``.npy`` under the empty name. Reads headers only.

    Raises:
        UsageError: The file is not one of the two formats, is damaged, or holds pickled objects.
    """
    if path.suffix == ".npy":
        with open_file(path, "The samples") as stream:
            reader = _reader(stream, path, "", path.stat().st_size)
        return {"": reader}
    readers = {}
    try:
        with open_file(path, "The samples") as file, zipfile.ZipFile(file) as archive:
            for info in archive.infolist():
                member = info.filename.removesuffix(".npy")
                if member == info.filename:
                    raise UsageError(
                        f"The archive holds {info.filename!r}, which is not an array",
                        where=str(path),
                        remedy="write it with numpy.savez(path, **arrays)",
                    )
                if member in readers:
                    raise UsageError(
                        f"The archive holds the array {member!r} twice",
                        where=str(path),
                        remedy="write it with numpy.savez(path, **arrays)",
                    )
                with archive.open(info) as stream:
                    readers[member] = _reader(stream, path, member, info.file_size)
    except (OSError, zipfile.BadZipFile, NotImplementedError, RuntimeError, zlib.error) as error:
        raise _damaged(str(path), error) from error
    return readers


def _reader(stream: IO[bytes], path: Path, member: str, size: int) -> ArrayReader:
    """Describe one array from its header, and check that ``size`` bytes hold what the header declares."""
    shape, fortran, dtype = _checked_header(stream, f"{path}, array {member}" if member else str(path), size)
    return ArrayReader(shape, dtype, path, member, fortran)


def array_in(content: bytes, where: str) -> np.ndarray:
    """The array of an ``.npy`` in memory, read-only, never of objects.

    Raises:
        UsageError: It is none, is cut short, or holds pickled objects; ``where`` is its place.
    """
    stream = io.BytesIO(content)
    shape, fortran, dtype = _checked_header(stream, where, len(content))
    try:
        flat = np.frombuffer(content, dtype, int(np.prod(shape, dtype=object)), stream.tell())
        return flat.reshape(shape, order="F" if fortran else "C")
    except ValueError as error:
        raise _damaged(where, error) from error


def _checked_header(stream: IO[bytes], where: str, size: int) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Shape, order and dtype of an array in ``size`` bytes, which have to hold it."""
    shape, fortran, dtype = _read_header(stream, where)
    if dtype.hasobject:
        raise UsageError(
            "The array holds pickled Python objects, which are not loaded: unpickling runs code",
            where=where,
            remedy="store numeric arrays: convert with numpy.asarray(values, dtype) before numpy.savez",
        )
    elements = int(np.prod(shape, dtype=object))
    row_bytes = elements // max(shape[0] if shape else 1, 1) * dtype.itemsize
    if row_bytes > MAX_SAMPLE_BYTES:
        raise _too_large(row_bytes, where)
    if not elements and max(shape) > _MOST_EMPTY:
        raise UsageError(
            f"The array of shape {shape} holds nothing", where=where, remedy="give arrays with a value for each sample"
        )
    if elements * dtype.itemsize > size:
        raise UsageError(
            f"The array is cut short: its header declares {elements * dtype.itemsize} bytes, {size} are there",
            where=where,
            remedy="write the file again",
        )
    return shape, fortran, dtype


def _read_header(stream: IO[bytes], where: str) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    try:
        version = npy_format.read_magic(stream)
        if version != (1, 0):
            # Later versions exist for structured types only, and let a header declare gigabytes of text.
            raise ValueError(f"version {version} of the .npy format is for structured arrays")
        shape, fortran, dtype = npy_format.read_array_header_1_0(stream)
        if any(dim < 0 for dim in shape):
            raise ValueError(f"the header declares the shape {shape}")
    except (ValueError, EOFError, OSError, zipfile.BadZipFile, zlib.error, *_NO_PYTHON) as error:
        raise _damaged(where, error) from error
    return shape, fortran, dtype


def _too_large(size: int, where: str) -> UsageError:
    return UsageError(
        f"The array declares {size} bytes that have to be read at once, more than {MAX_SAMPLE_BYTES}",
        where=where,
        remedy="store the samples along the first axis, in C order",
    )


def _damaged(where: str, error: Exception) -> UsageError:
    return UsageError(
        f"The samples cannot be read: {' '.join(str(error).split())[:200] or type(error).__name__}",
        where=where,
        remedy="give an .npz written by numpy.savez or an .npy written by numpy.save",
    )


LABELS = "__labels__"
"""The key under which a file or a feed may carry labels."""

Sample = dict[str, np.ndarray]
"""One sample: arrays by input name, in the dtype the network wants."""


@dataclass(frozen=True)
class SampleGroup:
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

    def undivided(self) -> SampleGroup:
        """The arrays as they are as one sample. Raises UsageError where they are no input of the network."""
        for name, reader in self.readers.items():
            if not _fits(reader.shape, self.specs[name].shape):
                raise UsageError(
                    f"The input {name!r} has the shape {_text(self.specs[name].shape)}, the feed {_text(reader.shape)}",
                    where=self.where,
                    remedy="give feeds as the network takes them, one for each inference",
                )
        return replace(self, count=1, counts=dict.fromkeys(self.counts, 1), drop_axis=frozenset())

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
) -> SampleGroup:
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
    result = SampleGroup(arrays, specs, count, counts, frozenset(dropped), where)
    _check_symbols(result.shapes(), specs, where)
    return SampleGroup(arrays, specs, count, counts, frozenset(dropped), where, _split_labels(labels, result))


def check_names(names: Any, specs: Mapping[str, InputSpec], where: str) -> None:
    """Raise when an input is missing or a name is not an input's."""
    for name in names:
        if name not in specs:
            near = nearest(str(name), specs)
            hint = f"did you mean {near!r}? " if near else ""
            raise UsageError(
                f"The model has no input {name!r}",
                where=where,
                remedy=f"{hint}name the arrays after the inputs: {', '.join(specs)}; the one of labels: {LABELS}",
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


def _split_labels(labels: np.ndarray | None, of: SampleGroup) -> np.ndarray | None:
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
