"""Who runs jobs: what the scheduler asks of an executor, and the executor of this machine."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec

import trtopt
from trtopt.engine.process import START
from trtopt.errors import TargetError, UsageError
from trtopt.fleet.inputs import check_unchanged
from trtopt.fleet.plan import Job
from trtopt.fleet.task import Outcome, Survey, survey
from trtopt.report.sweep import Failure

EXECUTE = "trtopt.fleet.task:execute"
"""What runs a job: called with a :class:`~trtopt.fleet.task.Task` and a folder."""

_START = (
    "import os; os.environ.update(dict.fromkeys(['OMP_NUM_THREADS', 'OPENBLAS_NUM_THREADS'], '{threads}')); "
    + START
    + "from trtopt.fleet.worker import main; main(sys.argv[2], {threads})"
)
"""Threads of matrix products are read from the environment when numpy is loaded."""

_LAST_CHARACTERS = 400


@dataclass(frozen=True)
class Lost:
    """The process or the machine of a job went away before it was done."""

    reason: str


@dataclass(frozen=True)
class Order:
    """A job given to an executor.

    Attributes:
        number: Its number.
        job: What to do.
        folder: Where its files go, on this machine.
        again: Whether its worker was lost before.
    """

    number: int
    job: Job
    folder: Path
    again: bool = False


Ended = tuple[int, "Outcome | Lost"]


class Executor(Protocol):
    """Runs jobs somewhere. The methods are called from one thread."""

    name: str

    @property
    def workers(self) -> int:
        """How many jobs run at once."""

    def survey(self, places: Iterable[str]) -> dict[str, Survey]:
        """What the machines have that jobs of each place run on.

        Raises:
            TargetError: No machine has the GPU of a place.
        """

    def slots(self, place: str) -> int:
        """How many jobs of a place are worth giving at once."""

    def submit(self, order: Order) -> None:
        """Start a job, or queue it."""

    def wait(self) -> Sequence[Ended]:
        """Jobs that ended since, by their number; waits for the first."""

    def close(self) -> None:
        """End all workers, whatever they are at."""


class LocalExecutor:
    """Processes of this machine, each of which runs one job after the other; a new one where one was lost.

    Considered were ``concurrent.futures`` and joblib's loky, which give up all jobs when one process crashes, and
    pebble, which does not: a dependency for the 60 lines here, whose workers also have to know their threads.

    Args:
        workers: Processes; 0 for one on each core.
        threads: Threads of each; 0 for its share of the cores.
        function: What runs a job, ``module:function``.
    """

    name = "local"

    def __init__(self, workers: int = 0, threads: int = 0, function: str = EXECUTE) -> None:
        cores = available_cores()
        self._count = workers or cores
        self._threads = threads or max(cores // self._count, 1)
        self._function = function
        self._orders: queue.SimpleQueue[Order | None] = queue.SimpleQueue()
        self._ended: queue.SimpleQueue[Ended] = queue.SimpleQueue()
        self._processes: set[subprocess.Popen[str]] = set()
        self._closed = threading.Event()
        self._loops = [threading.Thread(target=self._loop, daemon=True) for _ in range(self._count)]
        for loop in self._loops:
            loop.start()

    @property
    def workers(self) -> int:
        """As of :class:`Executor`."""
        return self._count

    def survey(self, places: Iterable[str]) -> dict[str, Survey]:
        """As of :class:`Executor`."""
        here = survey()
        for place in places:
            if place and place != here.gpu:
                raise TargetError(
                    f"Jobs need a machine with the GPU {place}",
                    where=f"this machine has {here.gpu or 'no GPU'}",
                    remedy="use --executor ray on a cluster that has it; TensorRT for RTX needs none without on_gpu "
                    "and measure",
                )
        return dict.fromkeys(places, here)

    def slots(self, place: str) -> int:
        """As of :class:`Executor`."""
        return self._count

    def submit(self, order: Order) -> None:
        """As of :class:`Executor`."""
        self._orders.put(order)

    def wait(self) -> Sequence[Ended]:
        """As of :class:`Executor`."""
        return [self._ended.get()]

    def close(self) -> None:
        """As of :class:`Executor`."""
        self._closed.set()
        for process in list(self._processes):
            process.kill()
        for _ in self._loops:
            self._orders.put(None)
        for loop in self._loops:
            loop.join()

    def _loop(self) -> None:
        """One worker: its process, and the jobs it gets."""
        process: subprocess.Popen[str] | None = None
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as stderr:
            while (order := self._orders.get()) is not None and not self._closed.is_set():
                if process is None or process.poll() is not None:
                    process = self._started(stderr)
                ended = self._run(process, order, stderr)
                if isinstance(ended, Lost):
                    self._end(process)
                    process = None
                self._ended.put((order.number, ended))
            if process is not None:
                self._end(process)

    def _started(self, stderr: Any) -> subprocess.Popen[str]:
        root = Path(trtopt.__file__).resolve().parent.parent
        command = [sys.executable, "-c", _START.format(threads=self._threads), str(root), self._function]
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=stderr, encoding="utf-8")
        self._processes.add(process)
        return process

    def _run(self, process: subprocess.Popen[str], order: Order, stderr: Any) -> Outcome | Lost:
        try:
            check_unchanged(order.job.inputs)
        except UsageError as error:
            return Outcome(0.0, "", Failure(error.what, error.where, error.remedy, error.exit_code))
        answer = ""
        stderr.seek(0)  # for the process too: the offset is shared
        stderr.truncate()
        try:
            if process.stdin is not None and process.stdout is not None:
                task = {"folder": str(order.folder), "task": asdict(order.job.task())}
                process.stdin.write(json.dumps(task) + "\n")
                process.stdin.flush()
                answer = process.stdout.readline()
            return msgspec.json.decode(answer, type=Outcome)
        except (OSError, ValueError):  # its pipe is closed, or what it wrote last is not whole
            code = process.wait()
            stderr.seek(0)
            said = " ".join(stderr.read()[-_LAST_CHARACTERS:].split())
            return Lost(f"its process ended with exit code {code}{f': {said}' if said else ''}")

    def _end(self, process: subprocess.Popen[str]) -> None:
        self._processes.discard(process)
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


def available_cores() -> int:
    """The cores this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1
