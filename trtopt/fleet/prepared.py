"""What another machine prepared of a job (see ``trtopt.fleet.run.prepare``), put into this machine's cache."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

from trtopt.cache.checksummed import MOST_LINE_BYTES, lines_of
from trtopt.cache.folder import CALIBRATION, PRICES, SEARCH, SENSITIVITY, make_cache_folder
from trtopt.errors import UsageError
from trtopt.fleet.task import Task
from trtopt.support.files import atomic_write, open_shared

KINDS = (CALIBRATION, PRICES, SEARCH, SENSITIVITY)
"""The kinds of cached files that a job may take from another machine."""


def receive(prepared: Mapping[str, bytes], task: Task) -> None:
    """Put what the other machine left into this one's cache. What fails there, the job does anew."""
    with contextlib.suppress(UsageError):
        folder = make_cache_folder(task.options.get("cache_dir"))
        for name, content in prepared.items():
            kind, _, file = name.partition("/")
            with contextlib.suppress(OSError, ValueError, UsageError):
                if kind in KINDS and Path(file).name == file:
                    _receive(folder / kind / file, content)


def _receive(path: Path, content: bytes) -> None:
    path.parent.mkdir(exist_ok=True)
    if path.parent.name == PRICES or (path.suffix == ".jsonl" and path.exists()):
        _add_lines(path, content)
    else:  # also in the place of statistics that a job of another precision collected: they hold less
        atomic_write(path, content)


def _add_lines(path: Path, content: bytes) -> None:
    """Add the lines that the file has not: prices of one GPU are in one file, which other jobs add to meanwhile. Each
    line has its own checksum."""
    with open(open_shared(path, os.O_RDWR | os.O_APPEND | os.O_CREAT), "r+b", buffering=0) as file:
        if os.fstat(file.fileno()).st_size > MOST_LINE_BYTES:
            raise ValueError("it is too large")
        known = lines_of(file.read())
        held, torn = set(known), known[-1] != b""  # by a run that was killed: its end comes first
        new = [b""] * torn + [line for line in lines_of(content)[:-1] if line not in held]
        file.write(b"".join(line + b"\n" for line in new))
