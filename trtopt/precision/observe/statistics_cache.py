"""Calibration statistics kept in a file, found again by the model, the data, and the code that observes."""

from __future__ import annotations

from pathlib import Path

from trtopt.cache.code import entry_key
from trtopt.cache.entries import Blobs
from trtopt.cache.folder import CALIBRATION, FORMATS
from trtopt.errors import UsageError
from trtopt.events import OnEvent
from trtopt.precision.observe.ranges import RangeTable
from trtopt.support.files import check_writable, open_file

_MAX_BYTES = 4 << 30
_START = f'{{"format": "{FORMATS[CALIBRATION][:6]}'.encode()
"""How every file starts that :meth:`CacheFile.store` wrote, of this version or another."""


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
        self, model_key: str, samples_key: str, *, folder: str | Path | None, file: Path | None, on_event: OnEvent
    ) -> None:
        self._key = entry_key("trtopt.precision.observe.calibrate", model_key, samples_key)
        words = ("calibrate", "calibration cache", "calibrating anew")
        self._blobs = Blobs(CALIBRATION, folder, on_event, words, _MAX_BYTES, file)
        if file is not None:
            check_own(file)
            check_writable(file)

    def load(self) -> tuple[RangeTable, int] | None:
        """The table and the number of samples it was made from, or None when there is none; says why if the file is
        there."""
        return self._blobs.load(self._key, _read)

    def store(self, table: RangeTable, samples: int) -> None:
        """Write them, whole or not at all; where that fails, the samples were run and a warning is enough."""
        self._blobs.store(self._key, [f"{samples}\n".encode(), table.to_bytes()])


def _read(content: memoryview) -> tuple[RangeTable, int]:
    samples, _, table = bytes(content).partition(b"\n")
    return RangeTable.from_bytes(table), int(samples)


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
