"""Arrays of calibration files, read row by row and never as pickles.

``numpy.load`` reads a whole member of an ``.npz`` at once, and a memory map of an ``.npy`` counts towards the resident
memory as it is read. Both formats are a short header followed by the elements, so they are read as a stream instead:
memory holds one sample, whatever the number of samples.
"""

from __future__ import annotations

import tokenize
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy_format

from trtopt.errors import UsageError
from trtopt.support.files import open_file

MAX_SAMPLE_BYTES = 4 << 30
"""A header that declares larger rows than this is not believed."""

_NO_PYTHON = (SyntaxError, tokenize.TokenError, RecursionError, TypeError)
"""What numpy raises for headers that are no Python literals, beside ValueError."""

_MOST_EMPTY = 10_000
"""Samples without a value, as of an input with a dimension of 0: no file shows how many there are."""


@dataclass(frozen=True)
class ArrayReader:
    """An array that can be read in blocks of rows along its first axis.

    Attributes:
        shape: Its dimensions.
        dtype: Its element type, never ``object``.
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
        """The whole array.

        Raises:
            UsageError: The file is shorter than its header says, or damaged.
        """
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
    where = f"{path}, array {member}" if member else str(path)
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
    return ArrayReader(shape, dtype, path, member, fortran)


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
