"""Calibration statistics kept in a file, found again by the hash of the model and of the data."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from trtopt.cache.checksummed import read_sealed, write_sealed
from trtopt.cache.folder import CALIBRATION, FORMATS, cache_folder, mark_used, warn_not_kept, why
from trtopt.errors import UsageError
from trtopt.events import Event, OnEvent
from trtopt.precision.observe.ranges import RangeTable
from trtopt.precision.observe.statistics import STATISTICS_VERSION
from trtopt.support.files import check_writable, open_file

_MAGIC = FORMATS[CALIBRATION]
_MAX_BYTES = 4 << 30
_START = f'{{"format": "{_MAGIC[:6]}'.encode()
"""How every file starts that :meth:`CacheFile.store` wrote, of this version or another."""


@dataclass(frozen=True)
class Entry:
    """What a cache file holds: a table, and the number of samples it was made from."""

    table: RangeTable
    samples: int


class CacheFile:
    """The cache file of one model and one set of samples.

    Args:
        model_key: Hash of the model's structure and weights.
        samples_key: Hash of the samples.
        folder: Where the file lies, named by the hash; made when missing. None for ``~/.cache/trtopt``.
        file: An explicit file instead.
        on_event: Told why a file was not used, or not written.

    Raises:
        UsageError: The explicit file cannot be written.
    """

    def __init__(
        self, model_key: str, samples_key: str, *, folder: Path | None, file: Path | None, on_event: OnEvent
    ) -> None:
        text = f"{_MAGIC} {STATISTICS_VERSION} {model_key} {samples_key}"
        self._identity = hashlib.sha256(text.encode()).hexdigest()
        self._on_event = on_event
        self._folder = None if file is not None else cache_folder(folder)
        self.path = file or cache_folder(folder) / CALIBRATION / f"{self._identity}.calib"
        if file is not None:
            check_own(file)
            check_writable(file)

    def load(self) -> Entry | None:
        """The entry, or None when there is none for this model and these samples; says why if the file is there."""
        try:
            identity, content = read_sealed(self.path, _MAGIC, _MAX_BYTES)
            if identity != self._identity:
                self._warn("it was made from another model, other samples or another version", "calibrating anew")
                return None
            samples, _, table = bytes(content).partition(b"\n")
            entry = Entry(RangeTable.from_bytes(table), int(samples))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            self._warn(f"it cannot be read ({' '.join(str(error).split())[:120]})", "calibrating anew")
            return None
        mark_used(self.path)
        return entry

    def store(self, entry: Entry) -> None:
        """Write the entry, whole or not at all; where that fails, the samples were run and a warning is enough."""
        content = [f"{entry.samples}\n".encode(), entry.table.to_bytes()]
        try:
            if self._folder is not None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
            write_sealed(self.path, _MAGIC, self._identity, content)
        except (UsageError, OSError) as error:
            if self._folder is not None:
                warn_not_kept(self._folder, error, self._on_event)
            else:
                self._warn(f"it cannot be written ({why(error)})", "the statistics are not kept")

    def _warn(self, why: str, what: str) -> None:
        self._on_event(Event("warning", "calibrate", text=f"calibration cache {self.path}: {why}; {what}"))


def check_own(file: Path) -> None:
    """Refuse a file that is not one of ours, so that it is never written over.

    Raises:
        UsageError: The file holds something, and that is no statistics of trtopt, not even damaged ones.
    """
    try:
        with open_file(file, "The calibration cache") as opened:
            start = opened.read(len(_START))
    except UsageError:
        return  # check_writable says what is wrong with it
    if start and start != _START:
        raise UsageError(
            "The calibration cache is neither a file of trtopt's statistics nor a calibration cache of TensorRT",
            where=str(file),
            remedy="name another file for --calib-cache; this one was left as it is",
        )
