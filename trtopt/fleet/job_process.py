"""The process of a job: started in a session of its own, asked, stopped when it takes too long, and lost by name."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import threading
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from trtopt.engine.process import START
from trtopt.errors import ResourceError
from trtopt.fleet.task import READY, Outcome, Task
from trtopt.report.schema.sweep import Failure
from trtopt.support.temporary import TemporaryFolder
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


class JobProcess:
    """A process that runs one job after the other; what its jobs start, and its temporary files, go with it.

    Args:
        function: What runs a job, ``module:function``.
        threads: Threads of matrix products and of sessions.
        limit_s: Seconds that a job may take; 0 for no limit.
        python: The Python that runs it, with the packages of this one; None for this one.

    Attributes:
        is_over: Whether it runs no more jobs.

    Raises:
        OSError: It cannot be started.
    """

    def __init__(self, function: str, threads: int, limit_s: float, python: str | Path | None = None) -> None:
        self._limit_s = limit_s
        self.is_over = self._is_ready = self._is_late = False
        with contextlib.ExitStack() as stack:
            self._said = stack.enter_context(tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace"))
            folder = stack.enter_context(TemporaryFolder())
            self._process = subprocess.Popen(
                [python or sys.executable, "-c", _START.format(threads=threads), str(IMPORT_ROOT), function, folder],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._said,
                encoding="utf-8",
                start_new_session=True,
            )
            self._stack = stack.pop_all()

    def run(self, task: Task, folder: Path) -> Outcome | Lost:
        """Run a job, whose files go into ``folder``."""
        self._said.seek(0)  # for the process too: the offset is shared
        self._said.truncate()
        timer = threading.Timer(self._limit_s, self._stop) if self._limit_s else None
        try:
            if self._process.stdin is None or self._process.stdout is None:
                raise OSError("it has no pipes")
            if not self._is_ready:  # its start is no part of the job
                self._is_ready = self._process.stdout.readline() == f"{READY}\n"
            self._process.stdin.write(json.dumps({"folder": str(folder), "task": asdict(task)}) + "\n")
            self._process.stdin.flush()
            if timer is not None:
                timer.daemon = True
                timer.start()
            # Not by msgspec alone, which refuses names of files that are no UTF-8.
            return msgspec.convert(json.loads(self._process.stdout.readline()), Outcome)
        except (OSError, ValueError):  # its pipe is closed, or what it wrote last is not whole
            return self._lost()
        finally:
            if timer is not None:
                timer.cancel()

    def _stop(self) -> None:
        self._is_late = True
        self.kill()

    def _lost(self) -> Outcome | Lost:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_ENDS_S)
        self.kill()
        code = self._process.wait()
        self._said.seek(0)
        said = " ".join(self._said.read()[-_LAST_CHARACTERS:].split())
        if not self._is_late:
            return Lost(f"its process ended with exit code {code}{f': {said}' if said else ''}")
        what = f"The job did not end within {self._limit_s:g} s and was stopped"
        where = f"{platform.node()}{f', which said last: {said}' if said else ''}"
        remedy = "look for what its scripts (calib, eval, metric) wait for; or raise time_limit in [sweep]"
        return Outcome(self._limit_s, platform.node(), Failure(what, where, remedy, ResourceError.exit_code))

    def kill(self) -> None:
        """End it, and what its jobs have started."""
        self.is_over = True
        if hasattr(os, "killpg"):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()

    def close(self) -> None:
        """End it and wait for its end; its temporary files are removed."""
        self.kill()
        self._process.wait()
        for end in (self._process.stdin, self._process.stdout):
            if end is not None:
                with contextlib.suppress(BrokenPipeError):  # an order that it did not live to read
                    end.close()
        self._stack.close()
