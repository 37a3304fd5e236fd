"""Who runs jobs and when: what the scheduler asks of an executor, the executor of this machine, the scheduler."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Protocol

import msgspec

from trtopt.engine.process import START
from trtopt.errors import TargetError, UsageError
from trtopt.fleet.plan import Job, check_unchanged
from trtopt.fleet.task import EXECUTE, Outcome, Survey, survey
from trtopt.report.schema.sweep import Failure
from trtopt.support.files import TEMPORARY
from trtopt.support.version import IMPORT_ROOT

_START = (
    START
    + "os.environ.update(OMP_NUM_THREADS='{threads}', OPENBLAS_NUM_THREADS='{threads}', TMPDIR=sys.argv[3]); "
    + "from trtopt.fleet.task import main; main(sys.argv[2], {threads}, sys.argv[3])"
)
"""Threads of matrix products are read from the environment when numpy is loaded."""

_LAST_CHARACTERS = 400
_ENDS_S = 5.0
"""For a process that answers no more to end by itself, so that its exit code is known."""


@dataclass(frozen=True)
class Lost:
    """The process or the machine of a job went away before it was done."""

    reason: str


@dataclass(frozen=True)
class Order:
    """A job given to an executor: where its files go on this machine, and whether its worker was lost before."""

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

    def at_once(self, place: str) -> int:
        """How many jobs of a place run at once, after :meth:`survey`."""

    def slots(self, place: str) -> int:
        """How many jobs of a place are worth giving at once."""

    def submit(self, order: Order) -> None:
        """Start a job, or queue it."""

    def wait(self) -> Sequence[Ended]:
        """Jobs that ended since, by their number; waits for the first."""

    def close(self) -> None:
        """End all workers, whatever they are at."""


class LocalExecutor(Executor):
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
        self._loops: list[threading.Thread] = []

    @property
    def workers(self) -> int:
        return self._count

    def survey(self, places: Iterable[str]) -> dict[str, Survey]:
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

    def at_once(self, place: str) -> int:
        return self._count

    def slots(self, place: str) -> int:
        return self._count

    def submit(self, order: Order) -> None:
        self._orders.put(order)
        if len(self._loops) < self._count:  # no more of them than jobs
            self._loops.append(threading.Thread(target=self._loop, daemon=True))
            self._loops[-1].start()

    def wait(self) -> Sequence[Ended]:
        return [self._ended.get()]

    def close(self) -> None:
        self._closed.set()
        for process in list(self._processes):
            process.kill()
        for _ in self._loops:
            self._orders.put(None)
        for loop in self._loops:
            loop.join()

    def _loop(self) -> None:
        """One worker: the jobs it gets, by one process until that is lost."""
        while (order := self._orders.get()) is not None and not self._closed.is_set():
            try:
                with self._process() as (process, stderr):
                    while isinstance(ended := self._run(process, order, stderr), Outcome):
                        self._ended.put((order.number, ended))
                        following = self._orders.get()
                        if following is None or self._closed.is_set():
                            return
                        order = following
            except OSError as error:
                ended = Lost(f"its process cannot be started: {error}")
            self._ended.put((order.number, ended))

    @contextlib.contextmanager
    def _process(self) -> Iterator[tuple[subprocess.Popen[str], IO[str]]]:
        """A process for jobs and what it says on standard error; its temporary files go with it."""
        root, pipe = IMPORT_ROOT, subprocess.PIPE
        with (
            tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as stderr,
            tempfile.TemporaryDirectory(prefix=TEMPORARY, ignore_cleanup_errors=True) as folder,
        ):
            command = [sys.executable, "-c", _START.format(threads=self._threads), str(root), self._function, folder]
            process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=stderr, encoding="utf-8")
            self._processes.add(process)
            try:
                if self._closed.is_set():  # too late for close to see it
                    process.kill()
                yield process, stderr
            finally:
                self._processes.discard(process)
                process.kill()
                process.wait()
                for end in (process.stdin, process.stdout):
                    if end is not None:
                        with contextlib.suppress(BrokenPipeError):  # an order that it did not live to read
                            end.close()

    def _run(self, process: subprocess.Popen[str], order: Order, stderr: IO[str]) -> Outcome | Lost:
        stderr.seek(0)  # for the process too: the offset is shared
        stderr.truncate()
        try:
            check_unchanged(order.job.inputs)
            if process.stdin is None or process.stdout is None:
                raise OSError("it has no pipes")
            task = {"folder": str(order.folder), "task": asdict(order.job.task())}
            process.stdin.write(json.dumps(task) + "\n")
            process.stdin.flush()
            # Not by msgspec alone, which refuses names of files that are no UTF-8.
            outcome = msgspec.convert(json.loads(process.stdout.readline()), Outcome)
            check_unchanged(order.job.inputs)
            return outcome
        except UsageError as error:
            return Outcome(0.0, "", Failure(error.what, error.where, error.remedy, error.exit_code))
        except (OSError, ValueError):  # its pipe is closed, or what it wrote last is not whole
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_ENDS_S)
            process.kill()
            code = process.wait()
            stderr.seek(0)
            said = " ".join(stderr.read()[-_LAST_CHARACTERS:].split())
            return Lost(f"its process ended with exit code {code}{f': {said}' if said else ''}")


def available_cores() -> int:
    """The cores this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


_LOST_EXIT_CODE = 6
"""As of a compiler that crashed in ``trtopt build``."""


@dataclass(frozen=True)
class Finished:
    """A job that ended: its number, what came of it, the folder of its files, and how often it was started."""

    number: int
    outcome: Outcome
    folder: Path
    attempts: int


@dataclass
class Scheduler:
    """Runs jobs on an executor.

    Attributes:
        executor: Who runs them.
        retries: How often a job whose worker was lost is started again.
        scratch: Makes the folder of a job's files, gone after ``on_end``.
        on_end: Told of every job that ended, in the order in which they did.
        on_lost: Told of every worker that was lost: the job's number, why, and whether it is started again.
        on_start: Told of every job that is given to the executor.
    """

    executor: Executor
    retries: int
    scratch: Callable[[], contextlib.AbstractContextManager[Path]]
    on_end: Callable[[Finished], None]
    on_lost: Callable[[int, str, bool], None]
    on_start: Callable[[int], None]
    _given: dict[int, tuple[Job, contextlib.ExitStack, Path]] = field(default_factory=dict)
    _attempts: Counter[int] = field(default_factory=Counter)

    def run(self, jobs: Mapping[int, Job]) -> None:
        """Run jobs by their number until all have ended. No more are given out than the executor has use for.

        What ``on_end`` raises ends the sweep; jobs that ended before are not lost.
        """
        waiting: dict[str, deque[int]] = {}
        for number, job in jobs.items():
            waiting.setdefault(job.place, deque()).append(number)
        running: Counter[str] = Counter()
        try:
            while any(waiting.values()) or self._given:
                for place, numbers in waiting.items():
                    free = self.executor.slots(place) - running[place] if numbers else 0
                    for _ in range(min(free, len(numbers))):
                        number = numbers.popleft()
                        running[place] += 1
                        self._submit(number, jobs[number])
                for number, ended in self.executor.wait():
                    place = jobs[number].place
                    running[place] -= 1
                    if self._again(number, ended):
                        waiting[place].appendleft(number)
        finally:
            for _, stack, _ in self._given.values():
                stack.close()

    def _submit(self, number: int, job: Job) -> None:
        stack = contextlib.ExitStack()
        folder = stack.enter_context(self.scratch())
        self._given[number] = (job, stack, folder)
        self._attempts[number] += 1
        self.on_start(number)
        self.executor.submit(Order(number, job, folder, again=self._attempts[number] > 1))

    def _again(self, number: int, ended: Outcome | Lost) -> bool:
        """Take what came of a job; whether it has to be started again."""
        _, stack, folder = self._given.pop(number)
        attempts = self._attempts[number]
        with stack:
            if isinstance(ended, Lost):
                again = attempts <= self.retries
                self.on_lost(number, ended.reason, again)
                if again:
                    return True
                times = "once" if attempts == 1 else f"{attempts} times"
                remedy = "look at the memory of that machine, or run fewer jobs at once (--workers)"
                failure = Failure(f"The worker was lost {times}", ended.reason, remedy, _LOST_EXIT_CODE)
                ended = Outcome(0.0, "", failure)
            self.on_end(Finished(number, ended, folder, attempts))
        return False
