"""What a job is asked and what came of it, and the folder it runs in."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtopt.config.paths import source_file
from trtopt.engine.backend import BACKENDS, installed_version
from trtopt.hardware.probe import present_gpu
from trtopt.report.schema.sweep import Failure
from trtopt.rewrite.registry import pack_hashes
from trtopt.support._script import is_script
from trtopt.support.version import VERSION

REPORT, PROFILE = "report.json", "profile.json"
"""Files of a result, beside the engine and its manifest."""


@dataclass(frozen=True)
class Task:
    """What a job is asked, as JSON values.

    Attributes:
        model: The model's path.
        options: Fields of :class:`~trtopt.config.BuildConfig`.
        measure: Whether the engine is timed on this machine's GPU.
    """

    model: str
    options: dict[str, Any]
    measure: bool = False


@dataclass(frozen=True)
class Outcome:
    """What came of it; the files are in the folder.

    Attributes:
        seconds: From its start to its end.
        node: The machine.
        failure: None where it was built, or a gate failed.
    """

    seconds: float
    node: str
    failure: Failure | None = None


@dataclass(frozen=True)
class Survey:
    """What a machine has: versions of trtopt and of the compilers, the name of its GPU (empty without one), and hashes
    of others' packs of recipes."""

    trtopt: str
    backends: dict[str, str]
    gpu: str
    packs: dict[str, str]


def survey() -> Survey:
    """What this machine has."""
    gpu = present_gpu()
    versions = {name: installed_version(backend) for name, backend in BACKENDS.items()}
    return Survey(VERSION, versions, "" if gpu is None else gpu.name, pack_hashes())


def _forget(task: Task, before: set[str]) -> None:
    """Drop the modules beside the job's scripts: those of the next job may have the same names."""
    scripts = [value for value in task.options.values() if isinstance(value, str) and is_script(value)]
    folders = {source_file(value).resolve().parent for value in scripts}
    new = sorted(set(sys.modules) - before, reverse=True)  # parts of a package before the package
    for name in new:
        file = getattr(sys.modules.get(name.partition(".")[0]), "__file__", None) or ""
        # Beside, not below: an environment may lie there, and its compiled modules are loaded once only.
        beside = Path(file).parent.parent if Path(file).name == "__init__.py" else Path(file).parent
        if file and beside in folders:
            sys.modules.pop(name, None)


@contextlib.contextmanager
def inside(folder: Path, task: Task) -> Iterator[None]:
    """Run a job in a folder; the next one finds neither that folder nor the modules of this one's scripts."""
    before, modules = os.getcwd(), set(sys.modules)
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)
        _forget(task, modules)
