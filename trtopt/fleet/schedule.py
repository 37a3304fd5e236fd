"""Which job runs when: each place has a queue, lost workers' jobs are started again, failed ones end."""

from __future__ import annotations

import contextlib
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from trtopt.fleet.executor import Executor, Lost, Order
from trtopt.fleet.plan import Job
from trtopt.fleet.task import Outcome
from trtopt.report.schema.sweep import Failure

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
