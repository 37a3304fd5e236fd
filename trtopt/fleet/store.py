"""Where results are kept: a folder for each job's key, whole or not there.

An entry has a checksummed file, written last, with the size and hash of all its files and the row of the report: an
entry is complete when that file is whole and the others are what it says. Only the process that runs the sweep writes.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote

from trtopt.cache.checksummed import read_checksummed, write_checksummed
from trtopt.errors import MissingDependencyError, UsageError
from trtopt.report.schema.sweep import Result
from trtopt.source.check import sha256_of
from trtopt.support._lazy import require
from trtopt.support.files import check_writable
from trtopt.support.json_text import converted
from trtopt.support.temporary import TemporaryFolder

ENTRY = "entry.sealed"
_FORM = "trtopt.sweep-entry/1"
_MOST_ENTRY_BYTES = 4 << 20
_KEY = re.compile(r"[0-9a-f]{64}")
_PARTIAL = re.compile(r"\.[0-9a-f]{16}\.partial")
_LEFT_OVER_S = 24 * 3600.0
_TRIES = 10
"""To keep an entry that other sweeps replace at the same time."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_USER = re.compile(r"(?<=://)(?:[^/?\s]+|[^/?\s:@]+:(?!\d+(?:/|$))\S+)(?=@)")
"""User and password of a URL; a password that should have been quoted may hold ``/`` and ``?``."""
_QUERY = re.compile(r"(?<=\?).+")
_HIDDEN = "***"


@dataclass(frozen=True)
class Kept:
    """A file of an entry."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Entry:
    """What a job left: its files by name, and what the report says of it."""

    files: dict[str, Kept]
    result: Result


class Store(Protocol):
    """A place for results."""

    def check(self) -> None:
        """Raise :class:`UsageError` where nothing can be written."""

    def entry(self, key: str) -> Entry | None:
        """The entry of a job; None where there is none, or not all of it. Asking what is far away may fail."""

    def scratch(self) -> contextlib.AbstractContextManager[Path]:
        """A folder for the files of one job, gone afterwards."""

    def commit(self, key: str, folder: Path, result: Result) -> None:
        """Keep the files in ``folder``. Where a whole entry is there by now, that one stays.

        Raises:
            UsageError: They cannot be written.
        """

    def location(self, key: str, name: str) -> str:
        """Path or URL of a file, without credentials."""


def open_store(place: str) -> Store:
    """The store at a folder or an fsspec URL.

    Raises:
        UsageError: There is no such kind of URL.
        MissingDependencyError: fsspec, or its package for that kind, is not installed.
    """
    return RemoteStore(place) if "://" in place else FolderStore(Path(place))


def shown(place: str) -> str:
    """A store as reports and messages name it: of a URL, without user, password and query."""
    if "://" not in place:
        return place
    return "::".join(_QUERY.sub(_HIDDEN, _USER.sub(_HIDDEN, part)) for part in place.split("::"))


def _said(error: Exception, url: str) -> str:
    """What an error says, without the credentials in the URL that it is about."""
    text = str(error) or type(error).__name__
    found = [secret for part in url.split("::") for form in (_USER, _QUERY) for secret in form.findall(part)]
    passwords = [secret.partition(":")[2] for secret in found]
    for secret in (*found, *passwords, *map(unquote, passwords)):
        text = text.replace(secret, _HIDDEN) if secret else text
    return text


class FolderStore(Store):
    """A folder of this machine, or one that is mounted."""

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()

    def check(self) -> None:
        """Makes the folder, and removes what killed sweeps left there a day ago."""
        try:
            self._root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _refused(str(self._root), error.strerror or str(error)) from error
        try:
            check_writable(self._root / ENTRY)
        except UsageError as error:
            raise _refused(str(self._root), error.what) from error
        for left in self._root.glob(".*.partial"):
            with contextlib.suppress(OSError):
                if _PARTIAL.fullmatch(left.name) and time.time() - left.stat().st_mtime > _LEFT_OVER_S:
                    shutil.rmtree(left, ignore_errors=True)

    def entry(self, key: str) -> Entry | None:
        """Every file is hashed."""
        folder = self._folder(key)
        try:
            found = _entry(folder / ENTRY, key)
            for name, kept in found.files.items():
                path = folder / name
                if path.is_symlink() or path.stat().st_size != kept.bytes or sha256_of([path]) != kept.sha256:
                    return None
        except (OSError, ValueError, UsageError):  # also one that another sweep replaces meanwhile
            return None
        return found

    @contextlib.contextmanager
    def scratch(self) -> Iterator[Path]:
        """In the store, so that keeping it is one rename."""
        folder = self._root / f".{secrets.token_hex(8)}.partial"
        try:
            folder.mkdir()
        except OSError as error:
            raise _refused(str(self._root), error.strerror or str(error)) from error
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def commit(self, key: str, folder: Path, result: Result) -> None:
        _seal(folder, key, result)
        target, refused = self._folder(key), OSError()
        for _ in range(_TRIES):
            if self.entry(key) is not None:
                return
            broken = self._root / f".{secrets.token_hex(8)}.partial"
            try:
                with contextlib.suppress(FileNotFoundError):
                    target.rename(broken)
                folder.rename(target)
                return
            except OSError as error:
                refused = error
            finally:
                shutil.rmtree(broken, ignore_errors=True)
        raise _refused(str(target), refused.strerror or str(refused)) from refused

    def location(self, key: str, name: str) -> str:
        return str(self._folder(key) / _checked_name(name))

    def _folder(self, key: str) -> Path:
        return self._root / _checked_key(key)


class RemoteStore(Store):
    """What fsspec reaches: ``s3://bucket/sweeps``, ``gs://``, ``file://``, ``memory://``, ...

    The hash of a file is checked when it is written, afterwards its size only: asking for the hash of what is far away
    means fetching it.
    """

    def __init__(self, url: str) -> None:
        fsspec = require("fsspec", "sweep", "keep results at a URL")
        try:
            self._fs, self._root = fsspec.core.url_to_fs(url)
        except ImportError as error:
            raise MissingDependencyError(_said(error, url), where=shown(url), remedy="install what it names") from error
        except Exception as error:  # each kind of URL has errors of its own
            what = f"The store cannot be used: {_said(error, url)}"
            raise UsageError(what, where=shown(url), remedy="see docs/sweep.md") from error
        self._url, self._shown = url, shown(url.rstrip("/"))

    def check(self) -> None:
        name = f"{self._root.rstrip('/')}/.{secrets.token_hex(8)}.partial"
        with self._writing():
            self._fs.makedirs(self._root, exist_ok=True)
            self._fs.pipe_file(name, b"")
            self._fs.rm_file(name)

    def entry(self, key: str) -> Entry | None:
        """Sizes are checked, not hashes."""
        place = self._place(key, ENTRY)
        try:
            if self._fs.size(place) > _MOST_ENTRY_BYTES:
                return None
            with TemporaryFolder() as folder:
                Path(folder, ENTRY).write_bytes(self._fs.cat_file(place))
                found = _entry(Path(folder, ENTRY), key)
            sizes = {name: self._fs.size(self._place(key, name)) for name in found.files}
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError):
            return None
        except Exception as error:  # as in __init__; what cannot be asked is not missing
            remedy = "try again; without the right to list, a missing file is an error"
            what = f"The store cannot be read: {_said(error, self._url)}"
            raise UsageError(what, where=self._shown, remedy=remedy) from error
        return found if sizes == {name: kept.bytes for name, kept in found.files.items()} else None

    @contextlib.contextmanager
    def scratch(self) -> Iterator[Path]:
        try:
            folder = TemporaryFolder()
        except OSError as error:
            raise _refused(tempfile.gettempdir(), error.strerror or str(error)) from error
        with folder as name:
            yield Path(name)

    def commit(self, key: str, folder: Path, result: Result) -> None:
        """The checksummed file is sent last."""
        entry = _seal(folder, key, result)
        if self.entry(key) is not None:
            return
        with self._writing():
            for name in (*entry.files, ENTRY):
                self._fs.makedirs(self._fs._parent(self._place(key, name)), exist_ok=True)
                self._fs.put_file(str(folder / name), self._place(key, name))

    def location(self, key: str, name: str) -> str:
        return f"{self._shown}/{_checked_key(key)}/{_checked_name(name)}"

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # as in __init__
            raise _refused(self._shown, _said(error, self._url)) from error

    def _place(self, key: str, name: str) -> str:
        return f"{self._root.rstrip('/')}/{_checked_key(key)}/{_checked_name(name)}"


def _seal(folder: Path, key: str, result: Result) -> Entry:
    """Write the checksummed file of an entry; what users' scripts left that is no file with a plain name is removed."""
    try:
        files = {}
        for path in sorted(folder.iterdir()):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path.is_symlink() or not path.is_file() or not _NAME.fullmatch(path.name):
                path.unlink()
            elif path.name != ENTRY:
                files[path.name] = Kept(path.stat().st_size, sha256_of([path]))
        entry = Entry(files, result)
        write_checksummed(folder / ENTRY, _FORM, key, [json.dumps(asdict(entry), allow_nan=False).encode()])
    except OSError as error:
        raise _refused(str(folder), error.strerror or str(error)) from error
    return entry


def _entry(path: Path, key: str) -> Entry:
    found = converted(bytes(read_checksummed(path, _FORM, key, _MOST_ENTRY_BYTES)), Entry, any_text=True)
    for name in found.files:
        _checked_name(name)
    return found


def _checked_key(key: str) -> str:
    if not _KEY.fullmatch(key):
        raise ValueError(f"{key!r} is no key")
    return key


def _checked_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no name of a result")
    return name


def _refused(where: str, why: str) -> UsageError:
    return UsageError(
        f"The store cannot be written: {why}", where=where, remedy="give [sweep] store a place that you may write to"
    )
