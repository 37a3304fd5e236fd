"""What a job is asked, what comes of it, what the machine has that it runs on, and the process of a local worker."""

from __future__ import annotations

import json
import os
import queue
import shutil
import signal
import threading
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NoReturn

from trtopt.cache.code import code_hash
from trtopt.cache.folder import CALIBRATION, PRICES, SEARCH, SENSITIVITY
from trtopt.engine.backend import BACKENDS, installed_version
from trtopt.hardware.probe import present_gpu
from trtopt.report.schema.sweep import Failure
from trtopt.rewrite.registry import pack_hashes
from trtopt.support.ort_session import share_cores
from trtopt.support.precision import Precision
from trtopt.support.version import VERSION

REPORT, PROFILE = "report.json", "profile.json"
"""Files of a result, beside the engine and its manifest."""

CACHE = "cache"
"""The folder of what was prepared, in that of the job."""

KINDS = (CALIBRATION, PRICES, SEARCH, SENSITIVITY)
"""The kinds of cached files that a job may take from another machine."""

EXECUTE, PREPARE = "trtopt.fleet.run:execute", "trtopt.fleet.run:prepare"
"""What runs a job, and what does the part of it that needs no GPU: ``module:function``, loaded where it runs."""


READY = "ready"
"""The first line that a process for jobs writes, once all is loaded."""


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

    @property
    def is_worth_preparing(self) -> bool:
        """Whether a machine without a GPU can spare the one with it anything: samples to run, graphs to compare."""
        return self.options.get("precision") in [item for item in Precision if item.is_quantized]


@dataclass(frozen=True)
class Outcome:
    """What came of it; the files are in the folder. ``failure``: None where it was built, or a gate failed."""

    seconds: float
    node: str
    failure: Failure | None = None


@dataclass(frozen=True)
class Survey:
    """What a machine has: the version of trtopt, a hash of the code that does a job, versions of the compilers, the
    name of its GPU (empty without one), and hashes of others' packs of recipes."""

    trtopt: str
    code: str
    backends: dict[str, str]
    gpu: str
    packs: dict[str, str]


def survey() -> Survey:
    """What this machine has."""
    gpu = present_gpu()
    versions = {name: installed_version(backend) for name, backend in BACKENDS.items()}
    code = code_hash("trtopt.fleet.run", "trtopt_recipes")
    return Survey(VERSION, code, versions, "" if gpu is None else gpu.name, pack_hashes())


def main(function: str, threads: int, temporary: str) -> NoReturn:
    """Run jobs, one on each line of standard input, an answer on each line of standard output, until input ends."""
    share_cores(threads)
    execute = resolve_name(function)
    # What native libraries and users' metrics print is no answer, and what they read no order.
    answers, orders = os.fdopen(os.dup(1), "w", encoding="utf-8"), os.fdopen(os.dup(0), encoding="utf-8")
    os.dup2(2, 1)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(orders, lines, temporary), daemon=True).start()
    answers.write(f"{READY}\n")
    answers.flush()
    while True:
        order = json.loads(lines.get())
        outcome = execute(Task(**order["task"]), Path(order["folder"]))
        answers.write(json.dumps(asdict(outcome)) + "\n")
        answers.flush()


def _read(orders: Iterable[str], lines: queue.SimpleQueue[str], temporary: str) -> None:
    for line in orders:
        lines.put(line)
    shutil.rmtree(temporary, ignore_errors=True)
    if hasattr(os, "killpg") and os.getpgrp() == os.getpid():  # with what its scripts have started
        os.killpg(0, signal.SIGKILL)
    os._exit(0)  # whoever asked is gone, also in the middle of a build
