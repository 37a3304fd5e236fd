"""What another machine prepared of a job (see ``trtopt.fleet.run.prepare``), put into this machine's cache."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path

from trtopt.cache.folder import CALIBRATION, PRICES, SEARCH, SENSITIVITY, Lines, make_cache_folder
from trtopt.errors import UsageError
from trtopt.events import ignore
from trtopt.fleet.task import Task
from trtopt.support.files import atomic_write

KINDS = (CALIBRATION, PRICES, SEARCH, SENSITIVITY)
"""The kinds of cached files that a job may take from another machine."""


def receive(prepared: Mapping[str, bytes], task: Task) -> None:
    """Put what the other machine left into this one's cache. What fails there, the job does anew."""
    with contextlib.suppress(UsageError):
        folder = make_cache_folder(task.options.get("cache_dir"))
        for name, content in prepared.items():
            kind, _, file = name.partition("/")
            with contextlib.suppress(OSError, ValueError, UsageError):
                if kind not in KINDS or Path(file).name != file:
                    continue
                if kind in (PRICES, SEARCH):  # prices of one GPU are in one file, which other jobs add to meanwhile
                    Lines(kind, folder, ignore, Path(file).stem).merge(content)
                else:  # also in the place of statistics that a job of another precision collected: they hold less
                    (folder / kind).mkdir(exist_ok=True)
                    atomic_write(folder / kind / file, content)
