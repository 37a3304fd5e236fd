"""The scheduler, with executors that do as the test says; and the worker processes of this machine."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pytest

from trtopt.config import BuildConfig
from trtopt.errors import TargetError
from trtopt.fleet.executor import Ended, Finished, LocalExecutor, Order, Scheduler
from trtopt.fleet.job_process import Lost
from trtopt.fleet.plan import Hashes, Job, inputs_of
from trtopt.fleet.task import Outcome, Survey


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _job(place: str = "", **varied: str) -> Job:
    return Job(varied, "net", BuildConfig(), (), "L4", place, False)


class Scripted:
    """Runs one job at a time; loses the numbers in ``loses``, each as often as it stands there."""

    name, workers = "scripted", 1

    def __init__(self, loses: Sequence[int] = (), slots: int = 2) -> None:
        self._loses, self._slots = list(loses), slots
        self._queue: deque[Order] = deque()
        self.most = 0
        self.again: list[int] = []

    def survey(self, places: Iterable[str]) -> dict[str, Survey]:
        return {}

    def at_once(self, place: str) -> int:
        return self.workers

    def slots(self, place: str) -> int:
        return 0 if place == "nobody" else self._slots

    def submit(self, order: Order) -> None:
        self._queue.append(order)
        self.most = max(self.most, len(self._queue))
        if order.again:
            self.again.append(order.number)

    def wait(self) -> Sequence[Ended]:
        order = self._queue.popleft()
        if order.number in self._loses:
            self._loses.remove(order.number)
            return [(order.number, Lost("it was killed"))]
        (order.folder / "result").write_text(str(order.number))
        return [(order.number, Outcome(0.1, "here"))]

    def close(self) -> None:
        pass


class Log:
    """What a scheduler told, and the folders it made."""

    def __init__(self, root: Path) -> None:
        self.root, self.made = root, 0
        self.ended: list[Finished] = []
        self.lost: list[tuple[int, str, bool]] = []
        self.read: dict[int, str] = {}

    @contextlib.contextmanager
    def scratch(self) -> Iterator[Path]:
        self.made += 1
        folder = self.root / str(self.made)
        folder.mkdir()
        try:
            yield folder
        finally:
            for path in folder.iterdir():
                path.unlink()
            folder.rmdir()

    def end(self, finished: Finished) -> None:
        self.ended.append(finished)
        if finished.outcome.failure is None and (finished.folder / "result").exists():
            self.read[finished.number] = (finished.folder / "result").read_text()

    def run(self, executor: object, jobs: dict[int, Job], retries: int = 2) -> None:
        Scheduler(
            executor=executor,  # type: ignore[arg-type]
            retries=retries,
            scratch=self.scratch,
            on_end=self.end,
            on_lost=lambda *lost: self.lost.append(lost),
            on_start=lambda number: None,
        ).run(jobs)


def test_every_job_ends_once_and_no_more_are_out_than_there_is_room_for(tmp_path: Path) -> None:
    log, executor = Log(tmp_path), Scripted(slots=3)
    log.run(executor, {number: _job() for number in range(50)})
    assert [item.number for item in log.ended] == list(range(50)) and executor.most == 3
    assert log.read == {number: str(number) for number in range(50)}
    assert not list(tmp_path.iterdir())


def test_places_have_room_of_their_own(tmp_path: Path) -> None:
    log, executor = Log(tmp_path), Scripted(slots=2)
    log.run(executor, {number: _job("AB"[number % 2]) for number in range(10)})
    assert len(log.ended) == 10 and executor.most == 4


def test_a_lost_job_is_started_again_and_given_up_at_last(tmp_path: Path) -> None:
    log, executor = Log(tmp_path), Scripted(loses=[1, 3, 3, 3])
    log.run(executor, {number: _job() for number in range(5)})
    attempts = {item.number: item.attempts for item in log.ended}
    assert attempts == {0: 1, 1: 2, 2: 1, 3: 3, 4: 1}
    assert sorted(set(executor.again)) == [1, 3]
    assert [lost[2] for lost in log.lost if lost[0] == 3] == [True, True, False]
    (given_up,) = (item.outcome.failure for item in log.ended if item.outcome.failure is not None)
    assert (given_up.what, given_up.where) == ("The worker was lost 3 times", "it was killed")
    assert given_up.exit_code == 6 and not list(tmp_path.iterdir())


def _tasks(tmp_path: Path, source: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module with a function that runs jobs, on the path of the workers."""
    (tmp_path / "odd_tasks.py").write_text(
        "import os, signal, sys\nfrom pathlib import Path\nfrom trtopt.fleet.task import Outcome\n" + source
    )
    import os

    # Without an empty part, which is the current folder.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")])))
    return "odd_tasks:execute"


CRASHES_ONCE = """
def execute(task, folder):
    print("no answer", flush=True)
    seen = Path(__file__).with_name("seen")
    if task.options.get("gpu") == "A10" and not seen.exists():
        seen.touch()
        print("out of memory, says the library", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    (folder / "result").write_text(str(os.getpid()))
    return Outcome(0.1, "here")
"""


@pytest.mark.long
def test_a_process_that_is_killed_costs_one_attempt_of_one_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = LocalExecutor(2, function=_tasks(tmp_path, CRASHES_ONCE, monkeypatch))
    (tmp_path / "scratch").mkdir()
    log = Log(tmp_path / "scratch")
    jobs = {number: _job() for number in range(6)}
    jobs[3] = Job({}, "net", BuildConfig(gpu="A10"), (), "A10", "", False)
    try:
        log.run(executor, jobs)
    finally:
        executor.close()
    assert {item.number: item.attempts for item in log.ended} == {0: 1, 1: 1, 2: 1, 3: 2, 4: 1, 5: 1}
    assert log.lost[0][1] == "its process ended with exit code -9: no answer out of memory, says the library"
    assert 2 <= len(set(log.read.values())) <= 3, "workers run one job after the other"


HANGS = """
import subprocess, time
def execute(task, folder):
    if task.options["gpu"] == "hangs":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        (folder / "child").write_text(str(child.pid))
        print("asking the server", file=sys.stderr, flush=True)
        time.sleep(600)
    return Outcome(0.1, "here")
"""


def test_a_job_that_hangs_is_stopped_with_what_it_started_and_the_worker_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = LocalExecutor(1, function=_tasks(tmp_path, HANGS, monkeypatch), limit_s=4)
    (tmp_path / "scratch").mkdir()
    log = Log(tmp_path / "scratch")
    child = ""

    def end(finished: Finished) -> None:
        nonlocal child
        log.ended.append(finished)
        if finished.outcome.failure is not None:
            child = (finished.folder / "child").read_text()

    monkeypatch.setattr(log, "end", end)
    jobs = {
        number: Job({}, "net", BuildConfig(gpu=gpu), (), gpu, "", False) for number, gpu in enumerate(["hangs", "L4"])
    }
    try:
        log.run(executor, jobs)
    finally:
        executor.close()
    stopped, done = (item.outcome.failure for item in log.ended)
    assert done is None and stopped is not None and not log.lost, "it would hang again"
    assert stopped.what == "The job did not end within 4 s and was stopped"
    assert stopped.where.endswith("which said last: asking the server") and "time_limit" in stopped.remedy
    assert not is_alive(int(child))


def test_closing_ends_workers_in_the_middle_of_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "import time\ndef execute(task, folder):\n"
    source += "    (folder / 'pid').write_text(str(os.getpid()))\n    time.sleep(600)\n"
    executor = LocalExecutor(1, function=_tasks(tmp_path, source, monkeypatch))
    executor.submit(Order(0, _job(), tmp_path))
    pid = tmp_path / "pid"
    while not pid.exists() or not pid.read_text():
        time.sleep(0.01)
    executor.close()
    assert not Path(f"/proc/{pid.read_text()}").exists()


ODD = """
import tempfile
from trtopt.report.schema.sweep import Failure
def execute(task, folder):
    kind = task.options["gpu"]
    if kind == "surrogate":
        return Outcome(0.1, "here", Failure("\\udcff", "", "", 1))
    if kind == "closes":
        os.closerange(3, 64)
    if kind == "reads":
        return Outcome(0.1, "here", Failure(repr(sys.stdin.read()), "", "", 1))
    if kind == "shadowed":
        import statistics
    return Outcome(0.1, tempfile.gettempdir())
"""


def test_no_job_stops_its_worker_from_answering(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names that are no UTF-8, ``input()``, a module of Python's name where the user stands, closed descriptors."""
    function = _tasks(tmp_path, ODD, monkeypatch)
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "statistics.py").write_text("raise RuntimeError('the wrong one')\n")
    monkeypatch.chdir(tmp_path / "here")
    executor = LocalExecutor(1, function=function)
    said: dict[str, object] = {}
    try:
        for kind in ("surrogate", "reads", "shadowed", "closes"):
            executor.submit(Order(0, Job({}, "net", BuildConfig(gpu=kind), (), "L4", "", False), tmp_path))
            ((_, ended),) = executor.wait()
            said[kind] = ended
            if isinstance(ended, Outcome):
                said[kind] = None if ended.failure is None else ended.failure.what
    finally:
        executor.close()
    assert isinstance(said.pop("closes"), Lost)
    assert said == {"surrogate": "\udcff", "reads": "''", "shadowed": None}


LEAVES = """
import tempfile, time
def execute(task, folder):
    Path(tempfile.mkdtemp(), "weights").write_text("")
    (folder / "pid").write_text(str(os.getpid()))
    if task.options["gpu"] == "dies":
        os._exit(3)
    time.sleep(600)
"""


@pytest.mark.parametrize("kind", ["dies", "closed"])
def test_workers_that_end_early_leave_no_temporary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    monkeypatch.setenv("TMPDIR", str(temporary))
    executor = LocalExecutor(1, function=_tasks(tmp_path, LEAVES, monkeypatch))
    try:
        executor.submit(Order(0, Job({}, "net", BuildConfig(gpu=kind), (), "L4", "", False), tmp_path))
        if kind == "dies":
            ((_, ended),) = executor.wait()
            assert isinstance(ended, Lost)
        while not (tmp_path / "pid").exists():
            time.sleep(0.01)
    finally:
        executor.close()
    assert not list(temporary.iterdir())


ORPHAN = """
import sys
from pathlib import Path
from trtopt.config import BuildConfig
from trtopt.fleet.executor import LocalExecutor, Order
from trtopt.fleet.plan import Job
executor = LocalExecutor(1, function="odd_tasks:execute")
executor.submit(Order(0, Job({}, "net", BuildConfig(gpu="stays"), (), "L4", "", False), Path(sys.argv[1])))
executor.wait()
"""


@pytest.mark.long
def test_a_worker_whose_sweep_was_killed_goes_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _tasks(tmp_path, LEAVES, monkeypatch)
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    with subprocess.Popen([sys.executable, "-c", ORPHAN, str(tmp_path)]) as sweep:
        pid = tmp_path / "pid"
        while not pid.exists() or not pid.read_text():
            time.sleep(0.01)
        sweep.kill()
    deadline = time.monotonic() + 30
    while (Path(f"/proc/{pid.read_text()}").exists() or list(temporary.iterdir())) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{pid.read_text()}").exists() and not list(temporary.iterdir())


def test_an_input_that_changes_during_a_job_fails_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "def execute(task, folder):\n    Path(task.model).write_text('other')\n    return Outcome(0.1, 'here')\n"
    function = _tasks(tmp_path, source, monkeypatch)
    model = tmp_path / "model.onnx"
    model.write_text("one")
    job = Job({}, "net", BuildConfig(), inputs_of(model, BuildConfig(), Hashes()), "L4", "", False)
    executor = LocalExecutor(1, function=function)
    try:
        executor.submit(Order(0, job, tmp_path))
        ((_, ended),) = executor.wait()
    finally:
        executor.close()
    assert isinstance(ended, Outcome) and ended.failure is not None
    assert ended.failure.what == "The file changed since the sweep was planned"


def test_a_worker_that_cannot_be_started_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none"))
    executor = LocalExecutor(1)
    try:
        executor.submit(Order(0, _job(), tmp_path))
        ((_, ended),) = executor.wait()
    finally:
        executor.close()
    assert isinstance(ended, Lost) and "No such file" in ended.reason


def test_workers_are_no_more_than_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, function = threading.active_count(), _tasks(tmp_path, ODD, monkeypatch)
    executor = LocalExecutor(1_000_000, function=function)
    try:
        executor.submit(Order(0, Job({}, "net", BuildConfig(gpu="L4"), (), "L4", "", False), tmp_path))
        ((_, ended),) = executor.wait()
        assert isinstance(ended, Outcome) and threading.active_count() == before + 1
    finally:
        executor.close()


def test_this_machine_has_no_gpu_that_it_does_not_have() -> None:
    executor = LocalExecutor(1)
    try:
        with pytest.raises(TargetError, match="Jobs need a machine with the GPU Jetson"):
            executor.survey(["Jetson-AGX-Thor-T5000"])
    finally:
        executor.close()
