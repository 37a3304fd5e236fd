"""What of a job needs no GPU, done on another machine: calibration, and the search for a precision.

What these leave in the cache is found by its content, so the machine with the GPU takes it from there, and a job comes
to the same whether it was prepared or not.
"""

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
from trtopt.support.precision import Precision

KINDS = (CALIBRATION, PRICES, SEARCH, SENSITIVITY)


PREPARE = "trtopt.fleet.execute:prepare"
"""What prepares a job: called with a :class:`~trtopt.fleet.task.Task`."""


def is_worth(task: Task) -> bool:
    """Whether a machine without a GPU can spare the one with it anything: samples to run, graphs to compare."""
    return task.options.get("precision") in [item for item in Precision if item.is_quantized]


def receive(prepared: Mapping[str, bytes], task: Task) -> None:
    """Put what :func:`prepare` left into the cache of the machine that builds. What fails there, the job does anew."""
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
