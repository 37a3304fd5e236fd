"""The folder that keeps what is slow to make: its kinds of files, what they take, what is evicted, what is damaged.

Every file in it can be made again, so whatever is removed costs time only. What cannot be read is not there, and what
cannot be written is not kept: that ends no run, and one warning says so. Files are found by hashes of all that they
depend on. When one is used its modification time is set, and the files used longest ago go first.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import filelock

from trtopt.cache.checksummed import (
    MOST_LINE_BYTES,
    from_line,
    is_of_other_version,
    lines_of,
    read_checksummed,
    to_line,
    write_checksummed,
)
from trtopt.errors import TrtoptError, UsageError
from trtopt.events import Event, OnEvent
from trtopt.support.files import atomic_write, check_writable, open_shared, read_shared

ENGINES, TIMING, TIMES, KERNELS, CALIBRATION = "engines", "timing", "times", "kernels", "calibration"
PRICES, SEARCH, SENSITIVITY, OUTPUTS = "prices", "search", "sensitivity", "outputs"
LOCKS = "locks"

KINDS = {
    ENGINES: ".entry",
    TIMING: ".entry",
    TIMES: ".json",
    KERNELS: ".entry",
    CALIBRATION: ".calib",
    PRICES: ".jsonl",
    SEARCH: ".jsonl",
    SENSITIVITY: ".json",
    OUTPUTS: ".jsonl",
}
"""The subfolders, and the suffix of their files."""

FORMATS = {
    ENGINES: "trtopt.engine-cache/2",
    TIMING: "trtopt.timing-cache/2",
    TIMES: "trtopt.engine-times/1",
    KERNELS: "trtopt.kernels/1",
    CALIBRATION: "trtopt.calibration/4",
    SENSITIVITY: "trtopt.sensitivity-cache/4",
}
"""The formats of checksummed files; the others hold lines, and their name is a hash that the format is in."""

_KEY = re.compile(r"[0-9a-f]{64}")
_GPU_AND_VERSIONS = re.compile(r"[A-Za-z0-9.-]+-\d+\.\d[\d.]*")
_LOCK = re.compile(r"[0-9a-f]{64}\.lock")
_PARTIAL = re.compile(r"\..*\.[0-9a-f]{16}\.partial")
"""Names of our files; others are not ours, and stay."""

DEFAULT_BYTES = 10_000_000_000
"""What the folder may take, unless another bound is given."""

_LEFT_OVER_S = 24 * 3600.0
"""Age from which an unfinished file, or a lock that nobody holds, was left by a run that was killed."""


@dataclass(frozen=True)
class CachedFile:
    """A file of the cache.

    Attributes:
        used: When it was used last, in seconds since 1970.
    """

    path: Path
    kind: str
    bytes: int
    used: float


def cache_folder(asked: str | Path | None) -> Path:
    """The folder that was asked for, or ``~/.cache/trtopt``. Raises UsageError: there is no home folder."""
    if asked:
        return Path(asked)
    try:
        return Path.home() / ".cache" / "trtopt"
    except RuntimeError as error:
        raise UsageError(
            "There is no home folder for the cache", where="HOME is not set", remedy="give a folder with --cache-dir"
        ) from error


def make_cache_folder(asked: str | Path | None) -> Path:
    """The cache folder, made where it is missing. What is in it is used also where it cannot be written.

    Raises:
        UsageError: It was asked for, is not there and cannot be made; or there is no home folder.
    """
    folder = cache_folder(asked)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if asked is not None:
            raise UsageError(
                f"The cache folder cannot be made: {error.strerror}",
                where=str(folder),
                remedy="give a --cache-dir that is there or can be made",
            ) from error
    return folder


def why(error: Exception) -> str:
    """What the system said, in one line: the same of one failure whoever met it."""
    cause = error.__cause__ if isinstance(error.__cause__, OSError) else error
    what = getattr(cause, "strerror", None) or (error.what if isinstance(error, TrtoptError) else None)
    return " ".join(str(what or error).split())


def mark_used(path: Path) -> None:
    """Set the time of a file's last use; a folder that cannot be written keeps the old one."""
    with contextlib.suppress(OSError):
        os.utime(path)


def files(folder: Path) -> list[CachedFile]:
    """All files of the cache, the one used longest ago first.

    Raises:
        OSError: The folder cannot be read; one that is not there is empty.
    """
    found = [
        CachedFile(path, kind, status.st_size, status.st_mtime)
        for kind, suffix in KINDS.items()
        for path, status in _entries(folder / kind)
        if path.suffix == suffix and (_GPU_AND_VERSIONS if kind == TIMING else _KEY).fullmatch(path.stem)
    ]
    return sorted(found, key=lambda file: (file.used, str(file.path)))


@dataclass(frozen=True)
class Pruned:
    """What became of the files that had to go.

    Attributes:
        stuck: Those that could not be removed: another user's, or in a folder that cannot be written.
    """

    removed: tuple[CachedFile, ...]
    stuck: tuple[CachedFile, ...]


def prune(
    folder: Path,
    *,
    max_bytes: float | None = None,
    older_than_s: float | None = None,
    kinds: Collection[str] = KINDS,
    outdated: bool = False,
) -> Pruned:
    """Remove files, the one used longest ago first, and what killed runs left behind.

    On POSIX a run that reads a file meanwhile reads it to its end; one that comes later makes it anew.

    Args:
        max_bytes: What the files of ``kinds`` may take together afterwards; None for no bound.
        older_than_s: Files not used for longer than this go; None for none.
        outdated: Whether files of other versions of trtopt go as well, before all others.

    Raises:
        OSError: The folder cannot be read.
    """
    known = [file for file in files(folder) if file.kind in kinds]
    useless = {file for file in known if outdated and is_outdated(file)}
    total, now = sum(file.bytes for file in known), time.time()
    removed, stuck = [], []
    for file in sorted(known, key=lambda file: file not in useless):
        is_old = older_than_s is not None and now - file.used > older_than_s
        if not (file in useless or is_old or (max_bytes is not None and total > max_bytes)):
            continue
        if remove(file.path):
            removed.append(file)
            total -= file.bytes
        else:
            stuck.append(file)
    _sweep(folder, now)
    return Pruned(tuple(removed), tuple(stuck))


def is_outdated(file: CachedFile) -> bool:
    """Whether a file is of another version of trtopt, whose formats this one does not read."""
    try:
        return file.kind in FORMATS and is_of_other_version(file.path, FORMATS[file.kind])
    except OSError:
        return False


def damage(file: CachedFile) -> str:
    """What is wrong with a file; empty where its checksums fit. Said of one that is outdated, too.

    A line that is not whole at the end of a file of lines is what a killed run leaves, and no damage.

    Raises:
        OSError: It cannot be read.
    """
    try:
        if file.path.suffix == ".jsonl":
            *lines, _ = lines_of(read_shared(file.path, MOST_LINE_BYTES))
            wrong = sum(from_line(line) is None for line in lines)
            return f"{wrong} of {len(lines)} lines are not what was written" if wrong else ""
        read_checksummed(file.path, FORMATS[file.kind], file.path.stem, file.bytes)
    except ValueError as error:
        return str(error)
    return ""


def _entries(folder: Path) -> Iterable[tuple[Path, os.stat_result]]:
    """Regular files of a folder; links are not followed, and what vanishes meanwhile is left out."""
    if folder.is_symlink():
        return
    try:
        with os.scandir(folder) as found:
            for entry in found:
                with contextlib.suppress(FileNotFoundError):
                    if entry.is_file(follow_symlinks=False):
                        yield Path(entry.path), entry.stat(follow_symlinks=False)
    except (FileNotFoundError, NotADirectoryError):
        return


def remove(path: Path) -> bool:
    """Whether the file is gone; another user's, or one that Windows keeps while it is read, stays."""
    try:
        path.unlink(missing_ok=True)
    except OSError:
        return False
    return True


def _sweep(folder: Path, now: float) -> None:
    """Remove unfinished files and locks that killed runs left."""
    for kind in KINDS:
        for path, status in _entries(folder / kind):
            if _PARTIAL.fullmatch(path.name) and now - status.st_mtime > _LEFT_OVER_S:
                remove(path)
    for path, status in _entries(folder / LOCKS):
        if _LOCK.fullmatch(path.name) and now - status.st_mtime > _LEFT_OVER_S:
            # Held while it is removed.
            lock = filelock.FileLock(path, blocking=False, fallback_to_soft=False)
            with contextlib.suppress(OSError, NotImplementedError, filelock.Timeout), lock:
                remove(path)


_T = TypeVar("_T")


@dataclass
class _Kept:
    """The files of one kind, and whether they can be written.

    Attributes:
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
        """Hold the lock of a key, as :func:`held`."""
        with held(self.lock_of(key), longest_wait_s, on_wait) as refused:
            yield refused

    def lock_of(self, key: str) -> Path:
        """The lock of a key."""
        return cache_folder(self.folder) / LOCKS / f"{key}.lock"

    def _stop(self, error: Exception, place: Path | None = None) -> None:
        if self._writes:
            text = f"the cache {place or cache_folder(self.folder)} cannot be written ({why(error)})"
            self.on_event(Event("warning", "cache", text=f"{text}: it is read, and what is made now is not kept"))
        self._writes = False


@contextlib.contextmanager
def held(path: Path, longest_wait_s: float, on_wait: Callable[[], None] | None = None) -> Iterator[str]:
    """Hold a lock; yields why that cannot be, empty where it is held.

    The lock is the kernel's (flock): it ends with the process that holds it, however that ends.
    """
    refused = ""
    # A soft lock stays when its holder is killed: worse than none.
    lock = filelock.FileLock(path, fallback_to_soft=False)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
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


@dataclass
class Blobs(_Kept):
    """Checksummed files, one for each key: bytes in, bytes out.

    Attributes:
        words: Whose task a warning is about, what it calls an entry, and what is done where one is damaged.
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
            read: Takes the content; where it raises ValueError or TrtoptError, the entry counts as damaged.
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
        """The lines; none where the file cannot be opened: writing says why. Raises ValueError: it is too large."""
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
