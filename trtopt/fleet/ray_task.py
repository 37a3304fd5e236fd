"""What runs on the nodes of a Ray cluster. Ray calls these functions by their names: trtopt is installed there."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import filelock

from trtopt.errors import UsageError
from trtopt.fleet.prepare import receive
from trtopt.fleet.task import Outcome, Survey, Task, survey
from trtopt.report.schema.sweep import Failure
from trtopt.support._lazy import require
from trtopt.support.files import TEMPORARY, atomic_path
from trtopt.support.ort_session import share_cores

INPUTS = "{inputs}"
"""Stands in a task for the folder of the inputs, which each machine chooses."""

Parts = Mapping[str, list[tuple[str, list[Any]]]]
"""The files of each input by its hash: name, and references to the parts of the content."""


def look() -> Survey:
    """What this node has."""
    return survey()


def prepare(function: str, task: Task, inputs: Parts, folder: str) -> dict[str, bytes]:
    """Do what of a job needs no GPU: arguments as of :func:`run`, result as of ``trtopt.fleet.execute.prepare``."""
    share_cores(1)
    prepare_task = _function(function)
    try:
        root = _received(inputs, folder)
    except (UsageError, OSError):
        return {}
    with _temporary_files_in(root):
        found: dict[str, bytes] = prepare_task(_placed(task, root))
        return found


def run(
    function: str, task: Task, inputs: Parts, folder: str, prepared: Mapping[str, bytes]
) -> tuple[Outcome, dict[str, bytes]]:
    """Run a job.

    Args:
        function: What runs it, ``module:function``.
        task: The job.
        inputs: What it reads.
        folder: The name of the sweep's folder for inputs, on every machine.
        prepared: What :func:`prepare` gave; empty where it was not called.

    Returns:
        What came of it, and the contents of its files by name.
    """
    share_cores(1)
    execute = _function(function)
    try:
        root = _received(inputs, folder)
    except (UsageError, OSError) as error:
        failure = Failure(f"The inputs cannot be written: {error}", tempfile.gettempdir(), "make room there", 2)
        return Outcome(0.0, "", failure), {}
    receive(prepared, task)
    with _temporary_files_in(root), tempfile.TemporaryDirectory(prefix=TEMPORARY) as results:
        outcome = execute(_placed(task, root), Path(results))
        files = sorted(path for path in Path(results).iterdir() if path.is_file())
        return outcome, {path.name: path.read_bytes() for path in files}


def _function(name: str) -> Callable[..., Any]:
    """What ``module:function`` names."""
    module, _, function = name.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return found


def clean(folder: str) -> None:
    """Remove the inputs, and what jobs that were ended left, from this machine."""
    shutil.rmtree(Path(tempfile.gettempdir(), folder), ignore_errors=True)


@contextlib.contextmanager
def _temporary_files_in(folder: Path) -> Iterator[None]:
    """Where Python makes temporary files: who is killed leaves them where ``clean`` looks."""
    before, tempfile.tempdir = tempfile.tempdir, str(folder)
    try:
        yield
    finally:
        tempfile.tempdir = before


def _placed(task: Task, root: Path) -> Task:
    """The task with the folder of this machine in its paths."""

    def place(value: Any) -> Any:
        if isinstance(value, str):
            return value.replace(INPUTS, str(root), 1) if value.startswith(INPUTS) else value
        return tuple(map(place, value)) if isinstance(value, tuple) else value

    options = {name: place(value) for name, value in task.options.items()}
    return dataclasses.replace(task, model=place(task.model), options=options)


def _received(inputs: Parts, folder: str) -> Path:
    """The folder of the inputs on this machine, with those of a job in it; each is fetched once."""
    root = Path(tempfile.gettempdir(), folder)
    root.mkdir(mode=0o700, exist_ok=True)
    found = root.lstat()
    if not stat.S_ISDIR(found.st_mode) or (hasattr(os, "getuid") and found.st_uid != os.getuid()):
        raise UsageError("The folder is somebody else's", where=str(root), remedy="start the sweep again")
    for key, files in inputs.items():
        target = root / key
        with filelock.FileLock(root / f"{key}.lock"):
            if not target.exists():
                _fetch(files, target)
    return root


def _fetch(files: list[tuple[str, list[Any]]], target: Path) -> None:
    """Write the files of an input; the folder gets its name when all of them are there."""
    ray = require("ray", "ray", "fetch inputs")
    partial = target.with_name(f"{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    for name, parts in files:
        path = partial / name
        if partial.resolve() not in path.resolve().parents:
            raise UsageError("An input lies outside of its folder", where=name, remedy="start the sweep again")
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(path) as temporary, open(temporary, "wb") as file:
            for part in parts:
                file.write(ray.get(part))
    partial.rename(target)
