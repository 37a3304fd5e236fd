"""One job where it runs: in a process of its own, on this machine or another.

A job returns, whatever happens. The process of a worker of this machine takes a job on each line of standard input, and
gives an answer on each line of standard output, both as JSON; it ends with the process that started it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import os
import platform
import queue
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from trtopt import api
from trtopt.analysis.profile import profile
from trtopt.config import BuildConfig, ProfileConfig
from trtopt.config.paths import source_file
from trtopt.engine.backend import BACKENDS, TENSORRT_RTX, installed_version
from trtopt.errors import TrtoptError
from trtopt.hardware.probe import present_gpu
from trtopt.report.schema.build import BuildReport
from trtopt.report.schema.sweep import Failure
from trtopt.rewrite.registry import pack_hashes
from trtopt.support._script import is_script
from trtopt.support.ort_session import share_cores
from trtopt.support.version import VERSION

REPORT, PROFILE = "report.json", "profile.json"
"""Files of a result, beside the engine and its manifest."""

_BUG = 1


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


def execute(task: Task, folder: Path) -> Outcome:
    """Build, and time where that is asked for.

    Args:
        task: The job.
        folder: Gets the engine, its manifest and the report; an empty one.
    """
    began = time.perf_counter()
    failure: Failure | None = None
    try:
        with inside(folder, task):
            _execute(task)
    except TrtoptError as error:
        failure = Failure(error.what, error.where, error.remedy, error.exit_code)
    except MemoryError:
        failure = Failure("There is not enough memory", platform.node(), "run fewer jobs at once", _BUG)
    except Exception as error:  # noqa: BLE001 - one job's bug must not end the others; it is reported whole
        where = "".join(traceback.format_exception(error)[-2:]).strip()
        what = f"A bug in trtopt: {type(error).__name__}: {error}"
        failure = Failure(what, where, "report it with the output of `trtopt doctor`", _BUG)
    return Outcome(time.perf_counter() - began, platform.node(), failure)


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


def _execute(task: Task) -> None:
    config = BuildConfig(**task.options)
    suffix = (BACKENDS.get(config.backend) or TENSORRT_RTX).suffix
    engine = f"model{suffix}"
    # Relative names, in the folder: what is written says nothing of this machine's folders.
    folder = os.getcwd()
    report = api.build(task.model, dataclasses.replace(config, output=engine, report=REPORT))
    if task.measure and not report.gate_failures:
        os.chdir(folder)  # a script of the job may have left it
        profile(engine, ProfileConfig(report=PROFILE, shapes=_shapes(report), gpus=config.gpus))


def _shapes(report: BuildReport) -> tuple[dict[str, tuple[int, ...]], ...]:
    """The optimum, which times are predicted for too."""
    if report.engine is None or not report.engine.profiles:
        return ()
    return ({name: tuple(shapes["opt"]) for name, shapes in report.engine.profiles[0].items()},)


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


def work(function: str, threads: int, temporary: str) -> NoReturn:
    """Run jobs until standard input ends.

    Args:
        function: What runs one, ``module:function``.
        threads: Threads that ONNX Runtime takes.
        temporary: The folder of its temporary files, which goes with it.
    """
    share_cores(threads)
    module, _, name = function.partition(":")
    execute = getattr(importlib.import_module(module), name)
    # What native libraries and users' metrics print is no answer, and what they read no order.
    answers, orders = os.fdopen(os.dup(1), "w", encoding="utf-8"), os.fdopen(os.dup(0), encoding="utf-8")
    os.dup2(2, 1)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(orders, lines, temporary), daemon=True).start()
    while True:
        order = json.loads(lines.get())
        outcome = execute(Task(**order["task"]), Path(order["folder"]))
        answers.write(json.dumps(asdict(outcome)) + "\n")
        answers.flush()


def _read(orders: Iterable[str], lines: queue.SimpleQueue[str], temporary: str) -> None:
    for line in orders:
        lines.put(line)
    shutil.rmtree(temporary, ignore_errors=True)
    os._exit(0)  # whoever asked is gone, also in the middle of a build
