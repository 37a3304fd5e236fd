"""What of a job needs no GPU, done on another machine: calibration, and the search for a precision.

What these leave in the cache is found by its content, so the machine with the GPU takes it from there, and a job comes
to the same whether it was prepared or not.
"""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Mapping
from pathlib import Path

from trtopt import api
from trtopt.cache.entries import Lines
from trtopt.cache.folder import CALIBRATION, PRICES, SEARCH, SENSITIVITY, files, make_cache_folder
from trtopt.config import BuildConfig
from trtopt.errors import UsageError
from trtopt.events import ignore
from trtopt.fleet.task import Task, inside
from trtopt.support.files import TEMPORARY, atomic_write

_KINDS = (CALIBRATION, PRICES, SEARCH, SENSITIVITY)
_CALIBRATED = ("int8", "fp8", "auto")


def is_worth(task: Task) -> bool:
    """Whether a machine without a GPU can spare the one with it anything: samples to run, graphs to compare."""
    return task.options.get("precision") in _CALIBRATED


def prepare(task: Task) -> dict[str, bytes]:
    """Do what needs no GPU.

    Returns:
        The files it left in the cache, by ``KIND/NAME``. Of a job that fails those up to there: it fails again, and is
        reported, where it is built.
    """
    with tempfile.TemporaryDirectory(prefix=TEMPORARY) as name:
        cache = Path(name, "cache")
        config = BuildConfig(**{**task.options, "cache_dir": str(cache), "cache_gb": None})  # none is evicted
        with contextlib.suppress(Exception), inside(Path(name), task):
            api.optimize(task.model, dataclasses.replace(config, output=str(Path(name, "model.onnx"))))
        found = [file.path for file in files(cache) if file.kind in _KINDS]
        return {f"{path.parent.name}/{path.name}": path.read_bytes() for path in found}


def receive(prepared: Mapping[str, bytes], task: Task) -> None:
    """Put what :func:`prepare` left into the cache of the machine that builds. What fails there, the job does anew."""
    with contextlib.suppress(UsageError):
        folder = make_cache_folder(task.options.get("cache_dir"))
        for name, content in prepared.items():
            kind, _, file = name.partition("/")
            with contextlib.suppress(OSError, ValueError, UsageError):
                if kind not in _KINDS or Path(file).name != file:
                    continue
                if kind in (PRICES, SEARCH):  # prices of one GPU are in one file, which other jobs add to meanwhile
                    Lines(kind, folder, ignore, Path(file).stem).merge(content)
                else:  # also in the place of statistics that a job of another precision collected: they hold less
                    (folder / kind).mkdir(exist_ok=True)
                    atomic_write(folder / kind / file, content)
