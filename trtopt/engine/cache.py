"""Engines that were built before: one sealed file per engine, found by its key, safe with many builders at once.

An entry is written under another name and renamed, so readers see whole files or none, on a shared file system too.
Locks only keep two processes from building the same engine at once: where the file system has none, or a lock is lost,
an engine is built twice and both give the same entry. A lock is the kernel's (``filelock``, flock), so it ends with the
process that holds it, however that ends.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

import filelock
import msgspec

from trtopt.cache.checksummed import read_sealed, write_sealed
from trtopt.cache.folder import (
    DEFAULT_BYTES,
    ENGINES,
    FORMATS,
    LOCKS,
    TIMES,
    TIMING,
    make_cache_folder,
    mark_used,
    warn_not_kept,
    why,
)
from trtopt.errors import EngineBuildError, UsageError
from trtopt.events import Event, OnEvent
from trtopt.support.files import check_writable

_LENGTH_BYTES = 8
_MOST_OF_TIMES = 1 << 16
_LARGEST_HEAD_BYTES = 4 << 20
_TASK = "build engine"

_T = TypeVar("_T")


@dataclass(frozen=True)
class Compiled:
    """What the compiler left.

    Attributes:
        engine: The engine file's content.
        layers: Its list of layers, as the compiler gave it.
        messages: Warnings and errors: severity and text.
        version: The compiler's version, as it says itself.
        seconds: What the build took.
        timing_cache: The timing cache after the build, if there is one.
        sized: The list of layers of a static build at the optimum, where ``layers`` does not tell sizes.
    """

    engine: bytes
    layers: str
    messages: tuple[tuple[str, str], ...]
    version: str
    seconds: float
    timing_cache: bytes | None = None
    sized: str | None = None

    def to_parts(self) -> list[bytes]:
        """As the content of a file, in parts."""
        texts = {"layers": self.layers, "sized": self.sized}
        parts = {"engine": self.engine, "timing_cache": self.timing_cache}
        parts.update((name, None if text is None else text.encode()) for name, text in texts.items())
        held = {name: part for name, part in parts.items() if part is not None}
        sizes = {name: len(part) for name, part in held.items()}
        head = json.dumps(asdict(_Head(self.messages, self.version, self.seconds, sizes))).encode()
        return [len(head).to_bytes(_LENGTH_BYTES, "little"), head, *held.values()]

    @classmethod
    def from_content(cls, content: memoryview) -> Compiled:
        """Read what :meth:`to_parts` wrote.

        Raises:
            ValueError: It is something else.
        """
        at = _LENGTH_BYTES + int.from_bytes(content[:_LENGTH_BYTES], "little")
        try:
            if at > _LARGEST_HEAD_BYTES:
                raise ValueError("its head is too large")
            head = msgspec.convert(json.loads(bytes(content[_LENGTH_BYTES:at])), _Head)
        except (msgspec.ValidationError, RecursionError) as error:
            raise ValueError(f"its head is wrong: {error}") from error
        parts: dict[str, bytes] = {}
        for name, size in head.sizes.items():
            if size < 0 or size > len(content) - at:
                raise ValueError(f"its part {name} is not whole")
            parts[name] = bytes(content[at : at + size])
            at += size
        if at != len(content) or not {"engine", "layers"} <= parts.keys():
            raise ValueError("its parts are not those of an engine")
        sized = parts["sized"].decode() if "sized" in parts else None
        return cls(
            parts["engine"],
            parts["layers"].decode(),
            head.messages,
            head.version,
            head.seconds,
            parts.get("timing_cache"),
            sized,
        )


@dataclass(frozen=True)
class _Head:
    """What an entry holds beside its parts, and their sizes in their order."""

    messages: tuple[tuple[str, str], ...]
    version: str
    seconds: float
    sizes: dict[str, int]


_LONGEST_WAIT_S = 1800.0
"""For another builder of the same engine: one that hangs must not stop a CI. Two that build it at once do no harm."""


class EngineCache:
    """The engines and timing caches of a cache folder.

    Args:
        folder: The folder; made when missing, and only read where it cannot be written. None for ``~/.cache/trtopt``.
        max_bytes: The largest file that is kept or read.
        on_event: Told why an entry was not used, or not kept.

    Raises:
        UsageError: The folder was asked for, is not there and cannot be made.
    """

    def __init__(self, folder: Path | None, on_event: OnEvent, *, max_bytes: int = DEFAULT_BYTES) -> None:
        self._folder = make_cache_folder(folder)
        self._max_bytes = max_bytes
        self._on_event = on_event
        self._writes = True
        try:
            for kind in (ENGINES, TIMING, TIMES, LOCKS):
                (self._folder / kind).mkdir(parents=True, exist_ok=True)
                check_writable(self._folder / kind / "entry")
        except (UsageError, OSError) as error:
            self._writes = False
            warn_not_kept(self._folder, error, on_event)

    def path(self, key: str) -> Path:
        """The file of an engine."""
        return self._folder / ENGINES / f"{key}.entry"

    def obtain(self, key: str, make: Callable[[], Compiled], use: Callable[[Compiled], _T]) -> tuple[_T, bool]:
        """What ``use`` makes of the entry, or of what ``make`` gives, which is then kept.

        Where another process is at it, this one waits and takes what that one kept.

        Args:
            key: The key of the engine.
            make: Builds it.
            use: Reads what was built; where it raises on an entry, that is damaged and built anew.

        Returns:
            What ``use`` gave, and whether it came from the cache.
        """
        known = self._used(key, use, warns=False)
        if known is not None:
            return known, True
        with self._locked(key):
            known = self._used(key, use, warns=True)
            if known is not None:
                return known, True
            compiled = make()
            result = use(compiled)
            self._keep(self.path(key), FORMATS[ENGINES], key, compiled.to_parts())
            return result, False

    def timing(self, name: str) -> bytes:
        """The timing cache of a GPU and a version; empty where there is none."""
        path = self._timing_path(name)
        try:
            identity, content = read_sealed(path, FORMATS[TIMING], self._max_bytes)
            if identity != path.stem:
                raise ValueError("it is that of another GPU or version")
        except (FileNotFoundError, NotADirectoryError):
            return b""
        except (OSError, ValueError) as error:
            self._warn(f"timing cache {path}: it cannot be read ({error}); kernels are timed anew")
            return b""
        mark_used(path)
        return bytes(content)

    def keep_timing(self, name: str, content: bytes) -> None:
        """Replace the timing cache of a GPU and a version: of builds at once, that of the last to end stays."""
        path = self._timing_path(name)
        self._keep(path, FORMATS[TIMING], path.stem, [content])

    def times(self, key: str) -> bytes | None:
        """What was measured of an engine; None where nothing is known."""
        path = self._folder / TIMES / f"{key}.json"
        try:
            identity, content = read_sealed(path, FORMATS[TIMES], _MOST_OF_TIMES)
            if identity != key:
                raise ValueError("it is that of another engine")
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError) as error:
            self._warn(f"times of an engine {path}: they cannot be read ({error}); they are measured anew")
            return None
        mark_used(path)
        return bytes(content)

    def keep_times(self, key: str, content: bytes) -> None:
        """Keep what was measured of an engine."""
        self._keep(self._folder / TIMES / f"{key}.json", FORMATS[TIMES], key, [content])

    def _timing_path(self, name: str) -> Path:
        return self._folder / TIMING / f"{re.sub(r'[^A-Za-z0-9.]+', '-', name)}.entry"

    def _used(self, key: str, use: Callable[[Compiled], _T], *, warns: bool) -> _T | None:
        """What ``use`` makes of the entry; None without one, or for one that is damaged."""
        path = self.path(key)
        try:
            identity, content = read_sealed(path, FORMATS[ENGINES], self._max_bytes)
            if identity != key:
                raise ValueError("it is that of another engine")
            result = use(Compiled.from_content(content))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, EngineBuildError) as error:
            if warns:
                self._warn(f"cached engine {path}: it cannot be used ({why(error)[:200]}); it is built anew")
            return None
        mark_used(path)
        return result

    def _keep(self, path: Path, form: str, identity: str, parts: list[bytes]) -> None:
        """Write an entry; what was built is not lost where that fails."""
        if not self._writes:
            return
        if sum(map(len, parts)) > self._max_bytes:
            self._warn(f"{path} would be larger than the cache may be: it is not kept")
            return
        try:
            write_sealed(path, form, identity, parts)
        except (UsageError, OSError) as error:
            warn_not_kept(self._folder, error, self._on_event)

    @contextmanager
    def _locked(self, key: str) -> Iterator[None]:
        """Hold the lock of an engine; without it where there are no locks."""
        if not self._writes:
            yield
            return
        # A soft lock stays when its holder is killed: worse than none.
        lock = filelock.FileLock(self._folder / LOCKS / f"{key}.lock", fallback_to_soft=False)
        try:
            try:
                lock.acquire(blocking=False)
            except filelock.Timeout:
                self._warn("another process builds this engine: waiting for it")
                lock.acquire(timeout=_LONGEST_WAIT_S)
        except filelock.Timeout:
            self._warn(f"that process took longer than {_LONGEST_WAIT_S:g} s: building without it")
        except (OSError, NotImplementedError) as error:
            self._warn(f"no lock in {self._folder / LOCKS} ({why(error)}): others may build the same engine meanwhile")
        try:
            yield
        finally:
            lock.release()

    def _warn(self, text: str) -> None:
        self._on_event(Event("warning", _TASK, text=text))
