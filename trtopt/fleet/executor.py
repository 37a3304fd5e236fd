"""Who runs jobs and when: what the scheduler asks of an executor, the executor of this machine, the scheduler."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from trtopt.errors import TargetError, UsageError
from trtopt.fleet.job_process import JobProcess, Lost
from trtopt.fleet.plan import Job, check_unchanged
from trtopt.fleet.task import EXECUTE, Outcome, Survey, survey
from trtopt.report.schema.sweep import Failure


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
        limit_s: Seconds that a job may take; 0 for no limit.
    """

    name = "local"

    def __init__(self, workers: int = 0, threads: int = 0, function: str = EXECUTE, limit_s: float = 0) -> None:
        cores = available_cores()
        self._count = workers or cores
        self._threads = threads or max(cores // self._count, 1)
        self._function = function
        self._limit_s = limit_s
        self._orders: queue.SimpleQueue[Order | None] = queue.SimpleQueue()
        self._ended: queue.SimpleQueue[Ended] = queue.SimpleQueue()
        self._processes: set[JobProcess] = set()
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
        process: JobProcess | None = None
        while (order := self._orders.get()) is not None and not self._closed.is_set():
            ended: Outcome | Lost
            try:
                process = process or self._started()
                ended = self._run(process, order)
            except OSError as error:
                ended = Lost(f"its process cannot be started: {error}")
            if process is not None and process.is_over:
                self._end(process)
                process = None
            self._ended.put((order.number, ended))
        if process is not None:
            self._end(process)

    def _started(self) -> JobProcess:
        process = JobProcess(self._function, self._threads, self._limit_s)
        self._processes.add(process)
        if self._closed.is_set():  # too late for close to see it
            process.kill()
        return process

    def _end(self, process: JobProcess) -> None:
        self._processes.discard(process)
        process.close()

    def _run(self, process: JobProcess, order: Order) -> Outcome | Lost:
        try:
            check_unchanged(order.job.inputs)
            ended = process.run(order.job.task(), order.folder)
            check_unchanged(order.job.inputs)
            return ended
        except UsageError as error:
            return Outcome(0.0, "", Failure(error.what, error.where, error.remedy, error.exit_code))


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
