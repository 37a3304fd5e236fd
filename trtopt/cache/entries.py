"""What is kept in the cache folder: files of bytes, one for each key, and files of lines that grow.

The cache saves time only. What cannot be read is not there, and what cannot be written is not kept: that ends no run,
and one warning says so. What bytes and records mean is for those who keep them to know.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import filelock

from trtopt.cache.checksummed import MOST_LINE_BYTES, from_line, lines_of, read_checksummed, to_line, write_checksummed
from trtopt.cache.folder import FORMATS, KINDS, LOCKS, cache_folder, mark_used, warn_not_kept, why
from trtopt.errors import TrtoptError, UsageError
from trtopt.events import Event, OnEvent
from trtopt.support.files import atomic_write, check_writable, open_shared, read_shared

_T = TypeVar("_T")


@dataclass
class _Kept:
    """The files of one kind, and whether they can be written.

    Attributes:
        kind: A key of :data:`KINDS`.
        folder: The cache folder; None for ``~/.cache/trtopt``.
        on_event: Told what cannot be read or written.
    """

    kind: str
    folder: str | Path | None
    on_event: OnEvent
    _writes: bool = field(init=False, default=True)

    def path(self, key: str) -> Path:
        """The file of a key."""
        return cache_folder(self.folder) / self.kind / f"{key}{KINDS[self.kind]}"

    @contextlib.contextmanager
    def locked(
        self, key: str, longest_wait_s: float = 10.0, on_wait: Callable[[], None] | None = None
    ) -> Iterator[str]:
        """Hold the lock of a key; yields why that cannot be, empty where it is held.

        The lock is the kernel's (flock): it ends with the process that holds it, however that ends.

        Args:
            key: The key.
            longest_wait_s: How long to wait for another process.
            on_wait: Called before waiting.
        """
        folder, refused = cache_folder(self.folder) / LOCKS, ""
        # A soft lock stays when its holder is killed: worse than none.
        lock = filelock.FileLock(folder / f"{key}.lock", fallback_to_soft=False)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            try:
                lock.acquire(blocking=False)
            except filelock.Timeout:
                if on_wait is not None:
                    on_wait()
                lock.acquire(timeout=longest_wait_s)
        except (OSError, NotImplementedError, filelock.Timeout) as error:
            refused = why(error)
        try:
            yield refused
        finally:
            lock.release()

    def _stop(self, error: Exception, place: Path | None = None) -> None:
        if self._writes:
            warn_not_kept(place or cache_folder(self.folder), error, self.on_event)
        self._writes = False


@dataclass
class Blobs(_Kept):
    """Checksummed files, one for each key: bytes in, bytes out.

    Attributes:
        words: Whose task a warning is about, what it calls an entry, and what is done where one is damaged.
        max_bytes: The largest entry.
        file: A file of the user's, which takes the place of all in the folder.
    """

    words: tuple[str, str, str]
    max_bytes: int
    file: Path | None = None

    def path(self, key: str) -> Path:
        """The file of an entry."""
        return self.file or super().path(key)

    def load(self, key: str, read: Callable[[memoryview], _T], *, warns: bool = True) -> _T | None:
        """What ``read`` makes of an entry; None without one.

        Args:
            key: The entry's.
            read: Takes the content; where it raises ValueError or TrtoptError, the entry counts as damaged.
            warns: Whether damage is said.
        """
        path, (task, name, instead) = self.path(key), self.words
        try:
            found = read(read_checksummed(path, FORMATS[self.kind], key, self.max_bytes))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, TrtoptError) as error:
            if warns:
                text = f"{name} {path}: it cannot be used ({why(error)[:200]}); {instead}"
                self.on_event(Event("warning", task, text=text))
            return None
        mark_used(path)
        return found

    def store(self, key: str, parts: Sequence[bytes]) -> None:
        """Write an entry, whole or not at all."""
        path = self.path(key)
        if self._writes and sum(map(len, parts)) > self.max_bytes:
            text = f"{path} would be larger than the cache may be: it is not kept"
            self.on_event(Event("warning", self.words[0], text=text))
        elif self._writes:
            try:
                if self.file is None:
                    path.parent.mkdir(parents=True, exist_ok=True)
                write_checksummed(path, FORMATS[self.kind], key, parts)
            except (UsageError, OSError) as error:
                self._stop(error, self.file)

    def can_be_written(self) -> bool:
        """Whether the folder can be written; said where it cannot."""
        try:
            self.path("entry").parent.mkdir(parents=True, exist_ok=True)
            check_writable(self.path("entry"))
        except (UsageError, OSError) as error:
            self._stop(error)
        return self._writes


@dataclass
class Lines(_Kept):
    """A file of checksummed lines that several processes add to: records in, records out.

    One process writes at a time, to the file that has the name by then, so that none adds to one that was replaced. A
    line that is torn or damaged is left out. When the file is full, the older half of the lines goes.

    Attributes:
        key: The key of the file.
        synced: Whether each line is on the disk before the next one is made.
    """

    key: str
    synced: bool = False

    def load(self) -> list[dict[str, Any]]:
        """The records, in their order; where there is content and no record, that is said."""
        records, path = list[dict[str, Any]](), self.path(self.key)
        try:
            lines = self._lines()
            records = [record for line in lines if (record := from_line(line)) is not None]
            if any(lines) and not records:
                raise ValueError("no line is what was written")
        except ValueError as error:
            self.on_event(Event("warning", "cache", text=f"{path} cannot be used ({error}): starting anew"))
        if records:
            mark_used(path)
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
        """The lines; none where the file cannot be opened: writing says why.

        Raises:
            ValueError: It is too large.
        """
        try:
            return lines_of(read_shared(self.path(self.key), MOST_LINE_BYTES))
        except OSError:
            return []

    def _append(self, new: bytes) -> None:
        if not (self._writes and new):
            return
        path = self.path(self.key)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with self.locked(self.key) as refused:
                if not self._added(new):
                    if refused:
                        raise OSError(errno.ENOLCK, f"{path} is full, and cannot be locked: {refused}")
                    atomic_write(path, self._newer_half(new))
        except (UsageError, OSError) as error:
            self._stop(error)

    def _added(self, new: bytes) -> bool:
        """Append lines with one call; False where the file is full."""
        # Without a buffer, and not kept open: the file of this name may be another one by the next time.
        handle = open_shared(self.path(self.key), os.O_RDWR | os.O_APPEND | os.O_CREAT)
        with open(handle, "r+b", buffering=0) as file:
            size = os.fstat(handle).st_size
            if size + len(new) > MOST_LINE_BYTES:
                return False
            file.seek(max(size - 1, 0))
            line = b"\n" * (file.read(1) not in (b"", b"\n")) + new  # behind what a killed run left unfinished
            if file.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if self.synced:
                os.fsync(handle)
        return True

    def _newer_half(self, new: bytes) -> bytes:
        """The last lines of a file that is full, and new ones."""
        half = MOST_LINE_BYTES // 2
        with open(open_shared(self.path(self.key), os.O_RDONLY), "rb") as file:
            file.seek(max(os.fstat(file.fileno()).st_size - half, 0))
            old = file.read(half).rpartition(b"\n")[0]
        return b"\n".join((old, new))[-half:].partition(b"\n")[2]
