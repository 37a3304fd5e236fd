"""The folder that keeps what is slow to make: its kinds of files, what they take, what is evicted, what is damaged.

Every file in it can be made again, so whatever is removed costs time only. Files are found by hashes of all that they
depend on. When one is used its modification time is set, and the files used longest ago go first.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

import filelock

from trtopt.cache.checksummed import MOST_LINE_BYTES, from_line, is_of_other_version, lines_of, read_checksummed
from trtopt.errors import TrtoptError, UsageError
from trtopt.events import Event, OnEvent
from trtopt.support.files import read_shared

ENGINES, TIMING, TIMES, CALIBRATION = "engines", "timing", "times", "calibration"
PRICES, SEARCH, SENSITIVITY = "prices", "search", "sensitivity"
LOCKS = "locks"

KINDS = {
    ENGINES: ".entry",
    TIMING: ".entry",
    TIMES: ".json",
    CALIBRATION: ".calib",
    PRICES: ".jsonl",
    SEARCH: ".jsonl",
    SENSITIVITY: ".json",
}
"""The subfolders, and the suffix of their files."""

FORMATS = {
    ENGINES: "trtopt.engine-cache/2",
    TIMING: "trtopt.timing-cache/2",
    TIMES: "trtopt.engine-times/1",
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
        path: The file.
        kind: A key of :data:`KINDS`.
        bytes: Its size.
        used: When it was used last, in seconds since 1970.
    """

    path: Path
    kind: str
    bytes: int
    used: float


def cache_folder(asked: str | Path | None) -> Path:
    """The folder that was asked for, or ``~/.cache/trtopt``.

    Raises:
        UsageError: There is no home folder.
    """
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


def warn_not_kept(folder: Path, error: Exception, on_event: OnEvent) -> None:
    """Say that nothing is kept. The cache saves time only, so what cannot be written ends no run that has begun."""
    text = f"the cache {folder} cannot be written ({why(error)}): it is read, and what is made now is not kept"
    on_event(Event("warning", "cache", text=text))


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
        if path.suffix == suffix and _is_ours(path, kind)
    ]
    return sorted(found, key=lambda file: (file.used, str(file.path)))


@dataclass(frozen=True)
class Pruned:
    """What became of the files that had to go.

    Attributes:
        removed: Those that are gone.
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
        folder: The cache folder.
        max_bytes: What the files of ``kinds`` may take together afterwards; None for no bound.
        older_than_s: Files not used for longer than this go; None for none.
        kinds: What is looked at.
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


def _is_ours(path: Path, kind: str) -> bool:
    name = _GPU_AND_VERSIONS if kind == TIMING else _KEY
    return name.fullmatch(path.stem) is not None


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
