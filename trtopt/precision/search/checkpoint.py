"""The answers of a search's oracle, kept in a file as they come, so that a killed search goes on where it was."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trtopt.cache.checksummed import MOST_LINE_BYTES, lines_of, open_line, seal_line
from trtopt.cache.folder import SEARCH, cache_folder, mark_used, warn_not_kept
from trtopt.errors import UsageError
from trtopt.events import Event, OnEvent
from trtopt.precision.search.space import Evaluation, Mix, Oracle
from trtopt.support.files import atomic_write, open_shared, read_shared
from trtopt.support.version import VERSION

_FORMAT = "trtopt.search/2"


@dataclass
class Journal:
    """An oracle that asks another one, and remembers in a file what it said.

    The file is JSON lines: a header with the identity of the search, then an answer per line, each written with one
    call and synced. What a killed run leaves of its last line is no JSON, and left out. Answers do not depend on the
    budget, so that a search with another one finds them again.

    Attributes:
        oracle: Who is asked what is not in the file.
        keys: What the answers depend on: hashes of the model and the samples, the metric, the regions with their nodes
            and types, the options, the backend, its version, the GPU. The version of trtopt is added.
        folder: Where the cache lies; None for ``~/.cache/trtopt``, which need not be writable.
        on_event: Told why a file was not used, or not written.
        path: The file, named by the hash of the keys.
        reused: Answers taken from the file.
    """

    oracle: Oracle
    keys: Sequence[str]
    folder: Path | None
    on_event: OnEvent
    path: Path = field(init=False)
    reused: int = 0
    _known: dict[tuple[str, Mix], Any] = field(default_factory=dict)
    _from_file: set[tuple[str, Mix]] = field(default_factory=set)
    _identity: str = field(init=False)
    _writes: bool = True
    _torn: bool = False

    def __post_init__(self) -> None:
        text = json.dumps([_FORMAT, VERSION, *self.keys])
        self._identity = hashlib.sha256(text.encode()).hexdigest()
        self.path = cache_folder(self.folder) / SEARCH / f"{self._identity}.jsonl"
        if not self._load():
            self._create()
        self._from_file = set(self._known)

    def evaluate(self, mix: Mix) -> Evaluation:
        """As :meth:`~trtopt.precision.search.space.Oracle.evaluate`."""

        def ask() -> list[float | None]:
            found = self.oracle.evaluate(mix)
            return [_plain(found.drop), _plain(found.error)]

        drop, error = self._answer("evaluate", mix, ask)
        return Evaluation(_number(drop), _number(error))

    def time_us(self, mix: Mix) -> float:
        """As :meth:`~trtopt.precision.search.space.Oracle.time_us`."""
        return _number(self._answer("time_us", mix, lambda: _plain(self.oracle.time_us(mix))))

    def rank(self, mix: Mix) -> Mapping[str, float]:
        """As :meth:`~trtopt.precision.search.space.Oracle.rank`."""
        found = self._answer(
            "rank", mix, lambda: {name: _plain(error) for name, error in self.oracle.rank(mix).items()}
        )
        return {name: _number(error) for name, error in found.items()}

    def _answer(self, question: str, mix: Mix, ask: Callable[[], Any]) -> Any:
        key = question, mix
        if key in self._from_file:
            self._from_file.remove(key)
            self.reused += 1
        if key not in self._known:
            self._known[key] = ask()
            self._append({"ask": question, "narrow": mix.narrow, "types": mix.types, "answer": self._known[key]})
        return self._known[key]

    def _load(self) -> bool:
        """Read the answers; whether the file can be added to."""
        try:
            head, *lines = lines_of(read_shared(self.path, MOST_LINE_BYTES))
            header = open_line(head)
            if header["format"] != _FORMAT or header["identity"] != self._identity:
                raise ValueError("it is that of another search")
        except (FileNotFoundError, NotADirectoryError):
            return False
        except (OSError, ValueError, KeyError) as error:
            self._warn(f"it cannot be read ({' '.join(str(error).split())[:120]}); starting anew")
            return False
        # Every line that was written whole ends in a line feed.
        self._torn = bool(lines and lines[-1])
        for line in filter(None, lines):
            item = _read(line)
            if item is not None:
                self._known[item[0]] = item[1]
        mark_used(self.path)
        return True

    def _create(self) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(self.path, seal_line({"format": _FORMAT, "identity": self._identity}))
        except (UsageError, OSError) as error:
            self._stop(error)

    def _append(self, record: Mapping[str, Any]) -> None:
        """Write one line and sync it; a search that cannot be written down any more goes on."""
        if not self._writes:
            return
        line = b"\n" * self._torn + seal_line(record)
        try:
            # Not created here: without its header the file would be taken for that of another search.
            handle = open_shared(self.path, os.O_WRONLY | os.O_APPEND)
            try:
                if os.write(handle, line) != len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.fsync(handle)
            finally:
                os.close(handle)
            self._torn = False
        except OSError as error:
            self._stop(error)

    def _stop(self, error: Exception) -> None:
        self._writes = False
        warn_not_kept(cache_folder(self.folder), error, self.on_event)

    def _warn(self, text: str) -> None:
        self.on_event(Event("warning", "search", text=f"journal of the search {self.path}: {text}"))


def _read(line: bytes) -> tuple[tuple[str, Mix], Any] | None:
    """A question and its answer; None for what is neither, such as the end of a line that was torn."""
    try:
        item = open_line(line)
        question, answer = str(item["ask"]), item["answer"]
        mix = Mix.of(item["narrow"], {str(name): dtype for name, dtype in item["types"].items()})
        hash(mix)
        if question == "evaluate":
            _number(answer[0]), _number(answer[1])
        elif question == "time_us":
            _number(answer)
        else:
            [_number(error) for error in answer.values()]
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        return None
    return (question, mix), answer


def _plain(number: float) -> float | None:
    """JSON has no infinity; a number that is not finite is worse than all others."""
    return float(number) if math.isfinite(number) else None


def _number(value: float | None) -> float:
    return math.inf if value is None else float(value)
