"""Jobs on a Ray cluster: placed by the type of GPU, inputs sent once, a lost machine's jobs given back.

A job for a GPU asks for Ray's resource ``accelerator_type:LABEL``, which Ray gives every node with a GPU it knows
(``L4``, ``A100``, ``GeForce-RTX-4090``), and one GPU. Inputs are put into Ray's object store once, by the process that
runs the sweep, and written once on every machine into a folder that is removed at the end; results come back as bytes,
and only that process writes to the store of the sweep. On the nodes, where trtopt is installed, Ray calls
:func:`prepare`, :func:`run` and :func:`clean` by their names.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock

from trtopt.cache.folder import PRICES, SEARCH, Lines, files, make_cache_folder
from trtopt.errors import MissingDependencyError, TargetError, UsageError
from trtopt.events import ignore
from trtopt.fleet.executor import Ended, Executor, Order, available_cores
from trtopt.fleet.job_process import JobProcess, Lost
from trtopt.fleet.plan import Input, check_unchanged
from trtopt.fleet.task import CACHE, EXECUTE, KINDS, PREPARE, Outcome, Survey, Task, survey
from trtopt.report.schema.sweep import Failure
from trtopt.support._lazy import require
from trtopt.support.files import atomic_path, atomic_write, open_file
from trtopt.support.temporary import TemporaryFolder
from trtopt.support.version import VERSION


def receive(prepared: Mapping[str, bytes], task: Task) -> None:
    """Put what the other machine left into this one's cache. What fails there, the job does anew."""
    with contextlib.suppress(UsageError):
        folder = make_cache_folder(task.options.get("cache_dir"))
        for name, content in prepared.items():
            kind, _, file = name.partition("/")
            with contextlib.suppress(OSError, ValueError, UsageError):
                if kind not in KINDS or Path(file).name != file:
                    continue
                if kind in (PRICES, SEARCH):  # prices of one GPU are in one file, which other jobs add to meanwhile
                    Lines(kind, folder, ignore, Path(file).stem).merge(content)
                else:  # also in the place of statistics that a job of another precision collected: they hold less
                    (folder / kind).mkdir(exist_ok=True)
                    atomic_write(folder / kind / file, content)


INPUTS = "{inputs}"
"""Stands in a task for the folder of the inputs, which each machine chooses."""

Parts = Mapping[str, list[tuple[str, list[Any]]]]
"""The files of each input by its hash: name, and references to the parts of the content."""


def prepare(task: Task, inputs: Parts, folder: str, limit_s: float) -> dict[str, bytes]:
    """Do what of a job needs no GPU; returns what that left in the cache, by ``KIND/NAME``. Arguments: :func:`run`."""
    try:
        root = _received(inputs, folder)
    except (UsageError, OSError):
        return {}
    with _done_alone(PREPARE, _placed(task, root), root, limit_s) as (_, results):
        return prepared_files(results)


def prepared_files(folder: Path) -> dict[str, bytes]:
    """What :func:`trtopt.fleet.run.prepare` left in ``folder``, for :func:`receive`."""
    found = [file.path for file in files(folder / CACHE) if file.kind in KINDS]
    return {f"{path.parent.name}/{path.name}": path.read_bytes() for path in found}


@contextlib.contextmanager
def _done_alone(function: str, task: Task, root: Path, limit_s: float) -> Iterator[tuple[Outcome | Lost, Path]]:
    """What came of a job in a process of its own, and the folder of its files; temporary files are in ``root``."""
    with _temporary_files_in(root), TemporaryFolder() as results:
        with contextlib.closing(JobProcess(function, 1, limit_s)) as process:
            outcome = process.run(task, Path(results))
        yield outcome, Path(results)


def run(
    function: str, task: Task, inputs: Parts, folder: str, prepared: Mapping[str, bytes], limit_s: float
) -> tuple[Outcome | Lost, dict[str, bytes]]:
    """Run a job, in a process of its own; returns what came of it, and the contents of its files by name.

    Args:
        function: What runs it, ``module:function``.
        task: The job.
        inputs: What it reads.
        folder: The name of the sweep's folder for inputs, on every machine.
        prepared: What :func:`prepare` gave; empty where it was not called.
        limit_s: Seconds that it may take; 0 for no limit.
    """
    try:
        root = _received(inputs, folder)
    except (UsageError, OSError) as error:
        failure = Failure(f"The inputs cannot be written: {error}", tempfile.gettempdir(), "make room there", 2)
        return Outcome(0.0, "", failure), {}
    receive(prepared, task)
    with _done_alone(function, _placed(task, root), root, limit_s) as (outcome, results):
        found = sorted(path for path in results.iterdir() if path.is_file())
        return outcome, {path.name: path.read_bytes() for path in found}


def clean(folder: str) -> None:
    """Remove the inputs, and what jobs that were ended left, from this machine; their processes may write a little
    longer than their tasks run."""
    root, until = Path(tempfile.gettempdir(), folder), time.monotonic() + _WRITES_S
    shutil.rmtree(root, ignore_errors=True)
    while root.exists() and time.monotonic() < until:
        time.sleep(0.1)
        shutil.rmtree(root, ignore_errors=True)


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
    for key, parts in inputs.items():
        target = root / key
        with filelock.FileLock(root / f"{key}.lock"):
            if not target.exists():
                _fetch(parts, target)
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


_RESOURCE = "accelerator_type:"
_SHARE = 0.001
"""Of the resource that names the accelerator: Ray's own convention, so that it limits nothing."""
_ANSWERS_S = 5.0
_CLEANS_S, _WRITES_S = 30.0, 5.0
_CONNECTS_S = 60.0
_STARTS_MS = 120_000
_LOOK_S = 5.0
"""How long to wait for a job before looking whether the machines of the others are still there."""
_CHUNK_BYTES = 64 << 20
_VENDOR = ("nvidia", "geforce", "tesla")
_BUG = 1


@dataclass
class _Given:
    """A job on the cluster: its number, its folder here, its place, and the task that prepares it, if any."""

    number: int
    folder: Path
    place: str
    prepared: Any


class RayExecutor(Executor):
    """The nodes of a Ray cluster.

    Args:
        address: ``host:port``, ``auto`` for the cluster of this machine; None to start one here for the time of the
            sweep.
        workers: CPUs of a cluster that is started; 0 for the cores of this machine.
        function: What runs a job, ``module:function``.
        limit_s: Seconds that a job may take where it runs, what prepares it apart; 0 for no limit.

    Raises:
        MissingDependencyError: Ray is not installed, or the cluster cannot be reached.
    """

    name = "ray"

    def __init__(self, address: str | None, workers: int = 0, function: str = EXECUTE, limit_s: float = 0) -> None:
        self._limit_s = limit_s
        self._ray = require("ray", "ray", "run a sweep on a Ray cluster")
        self._function = function
        self._folder = f"trtopt-{secrets.token_hex(16)}"
        self._shipped: dict[str, list[tuple[str, list[Any]]]] = {}
        self._given: dict[Any, _Given] = {}
        self._stranded: list[Ended] = []
        self._labels: dict[str, str] = {}
        self._cpus: dict[str, int] = {}
        _connect(self._ray, address, workers or available_cores())
        self._run = self._ray.remote(run)
        self._prepare = self._ray.remote(prepare)

    def survey(self, places: Iterable[str]) -> dict[str, Survey]:
        """As of :class:`~trtopt.fleet.executor.Executor`.

        Raises:
            MissingDependencyError: trtopt is not installed there, or in another version.
        """
        nodes = self._nodes()
        found = {}
        ask = self._ray.remote(survey)
        for place in places:
            self._labels[place] = self._label(place, nodes)
            # It takes no CPU and no GPU: on a busy cluster it would wait for hours.
            needs = {name: value for name, value in self._needs(place).items() if name != "num_gpus"}
            try:
                there = self._ray.get(ask.options(**needs, num_cpus=0).remote(), timeout=_CONNECTS_S)
            except self._ray.exceptions.RayError as error:
                raise MissingDependencyError(
                    f"A node of the cluster cannot run trtopt: {_first_line(error)}",
                    where=f"jobs for {place or 'any machine'}",
                    remedy="install the same trtopt on every node",
                ) from error
            if there.trtopt != VERSION:
                raise MissingDependencyError(
                    f"The cluster has trtopt {there.trtopt}, and this machine {VERSION}",
                    where=f"jobs for {place or 'any machine'}",
                    remedy="install the same version everywhere",
                )
            found[place] = there
        self._count()
        return found

    def at_once(self, place: str) -> int:
        return self._cpus.get(place, 0)

    def slots(self, place: str) -> int:
        """What runs there at once, as many in Ray's queue, and for a GPU what all CPUs can prepare meanwhile."""
        return 2 * max(self.at_once(place), 1) + (self.at_once("") if place else 0)

    @property
    def workers(self) -> int:
        return sum(int(node["Resources"].get("CPU", 0)) for node in self._nodes())

    def submit(self, order: Order) -> None:
        job = order.job
        if self._cpus.get(job.place) == 0:
            self._stranded.append((order.number, _gone(job.place)))
            return
        try:
            inputs = {item.sha256: self._ship(item) for item in job.inputs}
        except UsageError as error:
            failed = Failure(error.what, error.where, error.remedy, error.exit_code)
            self._stranded.append((order.number, Outcome(0.0, "", failed)))
            return
        folders = {item.sha256: Path(INPUTS, item.sha256) for item in job.inputs}
        # A job that lost its worker should not come to the same node again where there is another.
        strategy = "SPREAD" if order.again else "DEFAULT"
        task, options = job.task(folders), {"num_cpus": 1, "max_retries": 0, "scheduling_strategy": strategy}
        prepared = None
        if job.place and task.is_worth_preparing:
            # On any node, while the GPU is at other jobs.
            prepared = self._prepare.options(**options).remote(task, inputs, self._folder, self._limit_s)
        run = self._run.options(**self._needs(job.place), **options)
        reference = run.remote(self._function, task, inputs, self._folder, prepared or {}, self._limit_s)
        self._given[reference] = _Given(order.number, order.folder, job.place, prepared)

    def wait(self) -> Sequence[Ended]:
        """Jobs that ended since; those whose GPU left the cluster fail."""
        while True:
            if self._stranded:
                ended, self._stranded = self._stranded, []
                return ended
            ready, _ = self._ray.wait(list(self._given), num_returns=1, timeout=_LOOK_S)
            if ready:
                return [self._ended(reference) for reference in ready]
            self._count()
            self._strand()

    def close(self) -> None:
        """End all jobs; the folders of inputs are removed."""
        with contextlib.suppress(self._ray.exceptions.RayError):
            tasks = [*self._given, *(given.prepared for given in self._given.values() if given.prepared is not None)]
            for reference in tasks:
                self._ray.cancel(reference, force=True)
            if tasks:  # else they write while their folders are removed
                self._ray.wait(tasks, num_returns=len(tasks), timeout=_CLEANS_S)
            self._clean()
        self._shipped.clear()
        self._ray.shutdown()

    def _ended(self, reference: Any) -> Ended:
        given = self._given.pop(reference)
        exceptions = self._ray.exceptions
        try:
            outcome, files = self._ray.get(reference)
        except exceptions.RayTaskError as error:
            if isinstance(error.cause, exceptions.RayError):  # the task that prepared it was lost
                return given.number, Lost(f"{type(error.cause).__name__}: {_first_line(error.cause)}")
            failure = Failure(
                f"The job failed outside of trtopt: {_first_line(error)}", "Ray", "look at Ray's log", _BUG
            )
            return given.number, Outcome(0.0, "", failure)
        except exceptions.RayError as error:
            self._count()
            return given.number, Lost(f"{type(error).__name__}: {_first_line(error)}")
        if isinstance(outcome, Lost):
            return given.number, outcome
        try:
            for name, content in files.items():
                (given.folder / Path(name).name).write_bytes(content)
        except OSError as error:
            what = f"The results cannot be written: {error.strerror}"
            outcome = Outcome(outcome.seconds, outcome.node, Failure(what, str(given.folder), "make room there", 2))
        return given.number, outcome

    def _ship(self, item: Input) -> list[tuple[str, list[Any]]]:
        """The input's files in Ray's object store, put there once: their names, and references to their parts."""
        if item.sha256 not in self._shipped:
            parts = [(file.name, self._parts(file.path)) for file in item.files]
            check_unchanged([item])  # while it was read, too
            self._shipped[item.sha256] = parts
        return self._shipped[item.sha256]

    def _parts(self, path: Path) -> list[Any]:
        numpy = require("numpy", "cpu", "send files")
        with open_file(path, "An input") as file:
            # An array, not bytes: Ray maps it into the memory of its readers instead of copying it.
            parts = iter(lambda: file.read(_CHUNK_BYTES), b"")
            return [self._ray.put(numpy.frombuffer(part, dtype=numpy.uint8)) for part in parts]

    def _needs(self, place: str) -> dict[str, Any]:
        """The resources that a place asks for."""
        if not place:
            return {}
        return {"num_gpus": 1, "resources": {_RESOURCE + self._labels[place]: _SHARE}}

    def _nodes(self) -> list[dict[str, Any]]:
        return [node for node in self._ray.nodes() if node["Alive"]]

    def _label(self, place: str, nodes: Sequence[dict[str, Any]]) -> str:
        """The accelerator type of the nodes that have a GPU; the longest of several."""
        if not place:
            return ""
        with_gpu = [node["Resources"] for node in nodes if node["Resources"].get("GPU", 0) >= 1]
        labels: set[str] = {
            name.removeprefix(_RESOURCE) for found in with_gpu for name in found if name.startswith(_RESOURCE)
        }
        fitting = [label for label in labels if _fits(label, place)]
        if not fitting:
            raise TargetError(
                f"No node of the cluster has the GPU {place}",
                where=f"accelerator types there: {', '.join(sorted(labels)) or 'none'}",
                remedy=f"add a node that has it; where Ray does not know the GPU, start the node with --num-gpus 1 "
                f"--resources '{{\"{_RESOURCE}{place}\": 1}}'",
            )
        return max(fitting, key=len)

    def _count(self) -> None:
        """How many jobs each place runs at once, by the nodes there are now."""
        nodes = self._nodes()
        for place, label in {"": "", **self._labels}.items():
            there = [node["Resources"] for node in nodes if not place or _RESOURCE + label in node["Resources"]]
            # A GPU is for one job at a time: the engine is timed on it.
            jobs = [min(item.get("CPU", 0), item.get("GPU", 0) if place else item.get("CPU", 0)) for item in there]
            self._cpus[place] = int(sum(jobs))

    def _strand(self) -> None:
        """Give up jobs that no node is left for."""
        for reference, given in list(self._given.items()):
            if not self.at_once(given.place):
                del self._given[reference]
                self._ray.cancel(reference, force=True)
                self._stranded.append((given.number, _gone(given.place)))

    def _clean(self) -> None:
        strategy = require("ray.util.scheduling_strategies", "ray", "clean up").NodeAffinitySchedulingStrategy
        task = self._ray.remote(clean)
        done = [
            task.options(num_cpus=0, scheduling_strategy=strategy(node["NodeID"], soft=False)).remote(self._folder)
            for node in self._nodes()
        ]
        self._ray.wait(done, num_returns=len(done), timeout=_CLEANS_S)


def _gone(place: str) -> Outcome:
    what = f"No node of the cluster has {f'the GPU {place}' if place else 'a CPU'} any more"
    return Outcome(0.0, "", Failure(what, "Ray", "add such a node and start the sweep again", TargetError.exit_code))


def _fits(label: str, gpu: str) -> bool:
    """Whether Ray's label may be the GPU: its words begin the GPU's name. ``A100`` is every A100, and no A10."""
    mine, theirs = _words(label), _words(gpu)
    return bool(mine) and theirs[: len(mine)] == mine


def _words(name: str) -> list[str]:
    return [word for word in re.split(r"[-_ ]+", name.lower()) if word and word not in _VENDOR]


def _connect(ray: Any, address: str | None, cpus: int) -> None:
    if address is not None and address != "auto":
        _check_address(address)
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
    if address is None:
        # On a busy machine Ray's own processes take longer to start than the 15 s it gives them.
        options.update(num_cpus=cpus, include_dashboard=False, address="local")
        options["_system_config"] = {"agent_register_timeout_ms": _STARTS_MS}
    else:
        options["address"] = address
    try:
        with _own_signals():
            ray.init(**options)
    except Exception as error:
        raise _unreachable(address or "a cluster on this machine", _first_line(error)) from error


def _check_address(address: str) -> None:
    """Ask in advance: Ray itself waits for two minutes, and then ends the process."""
    host, colon, port = address.rpartition(":")
    if "://" in address or not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        remedy = "give host:port of the head node (6379 unless it was changed), or auto"
        raise UsageError(f"{address!r} is no address of a Ray cluster", where="--address", remedy=remedy)
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWERS_S).close()
    except OSError as error:
        raise _unreachable(address, error.strerror or str(error)) from error
    try:
        probe = f"import ray; ray._raylet.GcsClient(address={address!r})"
        done = subprocess.run([sys.executable, "-c", probe], capture_output=True, timeout=_CONNECTS_S / 4, check=False)
    except subprocess.TimeoutExpired as error:
        raise _unreachable(address, "what listens there does not answer as Ray does") from error
    if done.returncode:
        raise _unreachable(address, "what listens there is not Ray, or another version of it")


def _unreachable(address: str, why: str) -> MissingDependencyError:
    return MissingDependencyError(
        f"The Ray cluster cannot be reached: {why}",
        where=address,
        remedy="start one (ray start --head), check --address, or leave it out to start one here",
    )


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    """Keep the handler of SIGTERM, which Ray replaces."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
