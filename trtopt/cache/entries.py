"""What is kept in the cache folder: files of bytes, one for each key, and files of lines that grow.

The cache saves time only. What cannot be read is not there, and what cannot be written is not kept: that ends no run,
and one warning says so. What bytes and records mean is for those who keep them to know.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from trtopt.cache.checksummed import MOST_LINE_BYTES, from_line, lines_of, read_checksummed, to_line, write_checksummed
from trtopt.cache.folder import FORMATS, KINDS, cache_folder, locked, mark_used, warn_not_kept, why
from trtopt.errors import TrtoptError, UsageError
from trtopt.events import Event, OnEvent
from trtopt.support.files import atomic_write, check_writable, open_shared, read_shared

_LONGEST_WAIT_S = 10.0
"""For another process that writes lines, which takes it less than a second."""

_T = TypeVar("_T")


class _Kept:
    """The files of one kind, and whether they can be written.

    Args:
        kind: A key of :data:`KINDS`.
        folder: The cache folder; None for ``~/.cache/trtopt``.
        on_event: Told what cannot be read or written.
    """

    def __init__(self, kind: str, folder: str | Path | None, on_event: OnEvent) -> None:
        self.folder = cache_folder(folder)
        self._kind, self._on_event, self._writes = kind, on_event, True

    def _path(self, key: str) -> Path:
        return self.folder / self._kind / f"{key}{KINDS[self._kind]}"

    def _stop(self, error: Exception, place: Path | None = None) -> None:
        if self._writes:
            warn_not_kept(place or self.folder, error, self._on_event)
        self._writes = False


class Blobs(_Kept):
    """Checksummed files, one for each key: bytes in, bytes out.

    Args:
        kind: See above, as the next two.
        words: Whose task a warning is about, what it calls an entry, and what is done where one is damaged.
        max_bytes: The largest entry.
        file: A file of the user's, which takes the place of those in the folder.
    """

    def __init__(
        self,
        kind: str,
        folder: str | Path | None,
        on_event: OnEvent,
        *,
        words: tuple[str, str, str],
        max_bytes: int,
        file: Path | None = None,
    ) -> None:
        super().__init__(kind, folder, on_event)
        self._words, self._max_bytes, self._file = words, max_bytes, file

    def path(self, key: str) -> Path:
        """The file of an entry."""
        return self._file or self._path(key)

    def load(self, key: str, read: Callable[[memoryview], _T], *, warns: bool = True) -> _T | None:
        """What ``read`` makes of an entry; None without one.

        Args:
            key: The entry's.
            read: Takes the content; where it raises ValueError or TrtoptError, the entry counts as damaged.
            warns: Whether damage is said.
        """
        path = self.path(key)
        try:
            found = read(read_checksummed(path, FORMATS[self._kind], key, self._max_bytes))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, TrtoptError) as error:
            if warns:
                self._warn(f"{self._words[1]} {path}: it cannot be used ({why(error)[:200]}); {self._words[2]}")
            return None
        mark_used(path)
        return found

    def store(self, key: str, parts: Sequence[bytes]) -> None:
        """Write an entry, whole or not at all."""
        if not self._writes:
            return
        path = self.path(key)
        if sum(map(len, parts)) > self._max_bytes:
            self._warn(f"{path} would be larger than the cache may be: it is not kept")
            return
        try:
            if self._file is None:
                path.parent.mkdir(parents=True, exist_ok=True)
            write_checksummed(path, FORMATS[self._kind], key, parts)
        except (UsageError, OSError) as error:
            self._stop(error, self._file)

    def can_be_written(self) -> bool:
        """Whether the folder can be written; said where it cannot."""
        try:
            self._path("entry").parent.mkdir(parents=True, exist_ok=True)
            check_writable(self._path("entry"))
        except (UsageError, OSError) as error:
            self._stop(error)
        return self._writes

    def _warn(self, text: str) -> None:
        self._on_event(Event("warning", self._words[0], text=text))


class Lines(_Kept):
    """A file of checksummed lines that several processes add to: records in, records out.

    One process writes at a time, to the file that has the name by then, so that none adds to one that was replaced. A
    line that is torn or damaged is left out. When the file is full, the older half of the lines goes.

    Args:
        kind: See above, as ``folder`` and ``on_event``.
        key: The key of the file.
        synced: Whether each line is on the disk before the next one is made.
    """

    def __init__(
        self, kind: str, key: str, folder: str | Path | None, on_event: OnEvent, *, synced: bool = False
    ) -> None:
        super().__init__(kind, folder, on_event)
        self.path = self._path(key)
        self._synced = synced

    def load(self) -> list[dict[str, Any]]:
        """The records, in their order; what holds none is said."""
        records: list[dict[str, Any]] = []
        try:
            lines = self._lines()
            for line in lines:
                with contextlib.suppress(ValueError):
                    records.append(from_line(line))
            if any(lines) and not records:
                raise ValueError("no line is what was written")
        except ValueError as error:
            text = f"{self.path} cannot be used ({error}): starting anew"
            self._on_event(Event("warning", "cache", text=text))
        mark_used(self.path)
        return records

    def add(self, record: Mapping[str, Any]) -> None:
        """Append one record."""
        self._append(to_line(record))

    def merge(self, content: bytes) -> None:
        """Append the lines of another file's content that this one lacks.

        Raises:
            ValueError: One of the two is no file of lines.
        """
        held = set(self._lines())
        self._append(b"".join(line + b"\n" for line in lines_of(content)[:-1] if line not in held))

    def _lines(self) -> list[bytes]:
        """The lines; none where there is no file, or nothing that may be read as one: writing says why.

        Raises:
            ValueError: It is too large.
        """
        try:
            return lines_of(read_shared(self.path, MOST_LINE_BYTES))
        except OSError:
            return []

    def _append(self, new: bytes) -> None:
        if not (self._writes and new):
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with locked(self.folder, self.path.stem, _LONGEST_WAIT_S) as refused:
                if not self._added(new):
                    if refused:
                        raise OSError(errno.ENOLCK, f"{self.path} is full, and cannot be locked: {refused}")
                    atomic_write(self.path, self._newer_half(new))
        except (UsageError, OSError) as error:
            self._stop(error)

    def _added(self, new: bytes) -> bool:
        """Append lines with one call; False where the file is full."""
        # Without a buffer, and not kept open: the file of this name may be another one by the next time.
        handle = open_shared(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
        with open(handle, "r+b", buffering=0) as file:
            size = os.fstat(handle).st_size
            if size + len(new) > MOST_LINE_BYTES:
                return False
            file.seek(max(size - 1, 0))
            line = b"\n" * (file.read(1) not in (b"", b"\n")) + new  # behind what a killed run left unfinished
            if file.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if self._synced:
                os.fsync(handle)
        return True

    def _newer_half(self, new: bytes) -> bytes:
        """The last lines of a file that is full, and new ones."""
        half = MOST_LINE_BYTES // 2
        with open(open_shared(self.path, os.O_RDONLY), "rb") as file:
            file.seek(max(os.fstat(file.fileno()).st_size - half, 0))
            old = file.read(half).rpartition(b"\n")[0]
        return b"\n".join((old, new))[-half:].partition(b"\n")[2]
