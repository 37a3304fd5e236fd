"""A sweep: its plan, its run, its report. What ``trtopt sweep`` and Python callers use."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trtopt.accuracy.metric import drop_of
from trtopt.engine.backend import BACKENDS
from trtopt.errors import MissingDependencyError, UsageError
from trtopt.fleet.executor import Executor, Finished, LocalExecutor, Scheduler
from trtopt.fleet.plan import Job, Settings, check_distinct, check_recipes, job_key, load_plan
from trtopt.fleet.store import Entry, Store, open_store, shown
from trtopt.fleet.task import PROFILE, REPORT, Survey
from trtopt.report.schema.build import AccuracyRecord, BuildReport
from trtopt.report.schema.profile import ProfileReport
from trtopt.report.schema.read import read_profile, read_report
from trtopt.report.schema.sweep import Failure, Result, Status, SweepReport, SweepRow, cost_per_million, with_front
from trtopt.report.schema.write import environment


def result_of(folder: Path, seconds: float) -> Result:
    """What a finished job left in a folder.

    Raises:
        UsageError: Its report is not there, or wrong.
    """
    report = read_report(folder / REPORT)
    if not isinstance(report, BuildReport):
        raise UsageError("The report is not that of a build", where=str(folder / REPORT), remedy="run the job again")
    measured = read_profile(folder / PROFILE) if (folder / PROFILE).exists() else None
    engine = report.engine
    written = bool(engine is not None and (folder / f"model{BACKENDS[engine.backend].suffix}").exists())
    measure, drop = _drop(report.accuracy)
    latency = _measured_us(measured)
    if latency is None and report.analysis is not None:
        latency = report.analysis.totals.predicted_us
    return Result(
        model_sha256=str(report.model["sha256"]),
        seconds=round(seconds, 3),
        measure=measure,
        drop=drop,
        verified="" if report.accuracy is None else report.accuracy.verified,
        latency_us=latency,
        latency="predicted" if measured is None else "measured",
        batch=_batch(report),
        engine=f"model{BACKENDS[engine.backend].suffix}" if engine is not None and written else "",
        engine_bytes=0 if engine is None else engine.bytes,
        engine_sha256="" if engine is None else engine.sha256,
        kernels=0 if engine is None else engine.kernels or 0,
        failures=() if written else report.gate_failures,
    )


def row_of(job: Job, key: str, entry: Entry | None, price: float | None, location: str) -> SweepRow:
    """A row with what the store has of a job.

    ``entry`` is None where it has nothing, ``price`` is that of an hour of its GPU, ``location`` where its engine is.
    """
    found = None if entry is None else entry.result
    status: Status = "failed" if found is None else ("gate" if found.failures else "done")
    cost = None
    if found is not None and found.engine and price is not None and found.latency_us is not None:
        cost = cost_per_million(found.latency_us, found.batch, price)
    engine = location if found is not None and found.engine else ""
    return SweepRow(key, job.varied, job.model, job.gpu, job.precision, status, found, engine=engine, cost=cost)


def _drop(accuracy: AccuracyRecord | None) -> tuple[str, float | None]:
    """What accuracy is measured by, and its drop; the engine's own outputs count where it ran."""
    if accuracy is None:
        return "", None
    metric = accuracy.product_metric
    if metric is not None and math.isfinite(metric.drop):
        return metric.name.replace("\\", "/").rpartition("/")[2], metric.drop
    outputs = accuracy.engine or accuracy.outputs
    found = [drop_of(item) for name, item in outputs.items() if name not in accuracy.host_outputs]
    if not found:
        return "", None
    measure, drop = max(found, key=lambda item: math.inf if math.isnan(item[1]) else item[1])
    return measure, drop if math.isfinite(drop) else None


def _measured_us(report: ProfileReport | None) -> float | None:
    if report is None:
        return None
    return report.totals.measured_us if report.totals.end_to_end_us is None else report.totals.end_to_end_us


def _batch(report: BuildReport) -> int:
    """The first dimension of the first input at the optimum; 1 where it has none."""
    inputs = report.model["inputs"]
    first: dict[str, Any] = inputs[0] if inputs else {"name": ""}
    profiles = () if report.engine is None else report.engine.profiles
    shape = profiles[0].get(str(first["name"]), {}).get("opt") if profiles else None
    shape = shape or first.get("shape") or [1]
    return shape[0] if isinstance(shape[0], int) and shape[0] > 0 else 1


ExecutorName = Literal["local", "ray"]


@dataclass(frozen=True)
class Planned:
    """A job with the key of its results, and what the store has of it."""

    job: Job
    key: str
    entry: Entry | None


@dataclass(frozen=True)
class SweepPlan:
    """What a sweep would do: all jobs, how many run at once, and who runs them.

    ``estimate_s`` is what the missing jobs would take; None where nothing in the store says.
    """

    path: Path
    settings: Settings
    jobs: tuple[Planned, ...]
    workers: int
    executor: str
    estimate_s: float | None

    @property
    def missing(self) -> int:
        """Jobs that the store does not have."""
        return sum(item.entry is None for item in self.jobs)


@dataclass(frozen=True)
class Progress:
    """What happened to a job, numbered from 0: it was given to the executor, its worker was lost, or it ended.

    ``row`` is of its report, and ``seconds`` what it took, where it ended; ``text`` says why its worker was lost.
    """

    kind: Literal["start", "lost", "end"]
    number: int
    job: Job
    row: SweepRow | None = None
    text: str = ""
    seconds: float = 0.0
    node: str = ""


OnProgress = Callable[[Progress], None]


def plan_sweep(
    path: str | Path, *, executor: ExecutorName = "local", address: str | None = None, workers: int | None = None
) -> SweepPlan:
    """What a sweep would do; nothing is built and nothing written.

    Arguments and errors as of :func:`sweep`.
    """
    found = load_plan(Path(path))
    with _executor(executor, address, found.settings, workers) as runs:
        return _planned(found.path, found.settings, found.jobs, runs, open_store(found.settings.store))


def sweep(
    path: str | Path,
    *,
    executor: ExecutorName = "local",
    address: str | None = None,
    workers: int | None = None,
    yes: bool = False,
    on_plan: Callable[[SweepPlan], None] = lambda plan: None,
    on_progress: OnProgress = lambda progress: None,
) -> SweepReport:
    """Build what the store does not have yet, and report on all of it.

    Args:
        path: The sweep's file (docs/sweep.md).
        executor: ``local`` for processes of this machine, ``ray`` for a Ray cluster.
        address: Of the cluster; None to start one here.
        workers: Jobs at once on this machine; None for what the file says.
        yes: Whether the sweep may be larger than its limit.
        on_plan: Told what is going to be done, before the first job.
        on_progress: Told of every job.

    Returns:
        The report. Jobs that failed are in it, with their errors.

    Raises:
        UsageError: The file is wrong, the store cannot be written, two jobs are the same, or there are too many.
        TargetError: No machine has a GPU that jobs need.
        MissingDependencyError: Ray or fsspec is not installed, the cluster cannot be reached, or has another version of
            trtopt.

    Example:
        >>> report = trtopt.sweep("sweep.toml", workers=1)
        >>> [(row.model, row.precision, row.status) for row in report.rows]
        [('model', 'fp32', 'done'), ('model', 'fp16', 'done')]
    """
    began = time.perf_counter()
    found = load_plan(Path(path))
    settings = found.settings
    if len(found.jobs) > settings.limit and not yes:
        raise UsageError(
            f"The sweep has {len(found.jobs)} jobs, more than its limit of {settings.limit}",
            where=f"{found.path}: [matrix]",
            remedy="look at --dry-run, then give --yes or a higher [sweep] limit",
        )
    store = open_store(settings.store)
    with _executor(executor, address, settings, workers) as runs:
        plan = _planned(found.path, settings, found.jobs, runs, store)
        store.check()
        on_plan(plan)
        run = _Run(plan, store, runs, on_progress)
        rows = run.all()
    return SweepReport(
        name=found.path.stem,
        rows=with_front(rows),
        store=shown(settings.store),
        executor=executor,
        seconds=round(time.perf_counter() - began, 3),
        currency=settings.currency,
        prices=settings.prices,
        environment=environment(),
        warnings=tuple(run.warnings),
    )


class _Run:
    """One run of a sweep."""

    def __init__(self, plan: SweepPlan, store: Store, executor: Executor, on_progress: OnProgress) -> None:
        self._plan, self._store, self._executor, self._tell = plan, store, executor, on_progress
        self._rows: dict[int, SweepRow] = {}
        self.warnings: list[str] = []

    def all(self) -> list[SweepRow]:
        """The rows of all jobs; what the store does not have is run."""
        missing: dict[int, Job] = {}
        for number, planned in enumerate(self._plan.jobs):
            if planned.entry is None:
                missing[number] = planned.job
            else:
                row = self._row(number, planned.entry)
                self._rows[number] = dataclasses.replace(row, status="cached") if row.status == "done" else row
        scheduler = Scheduler(
            executor=self._executor,
            retries=self._plan.settings.retries,
            scratch=self._store.scratch,
            on_end=self._end,
            on_lost=self._lost,
            on_start=lambda number: self._tell(Progress("start", number, missing[number])),
        )
        scheduler.run(missing)
        return [self._rows[number] for number in range(len(self._plan.jobs))]

    def _row(self, number: int, entry: Entry | None) -> SweepRow:
        planned = self._plan.jobs[number]
        name = "" if entry is None else entry.result.engine
        location = self._store.location(planned.key, name) if name else ""
        price = self._plan.settings.prices.get(planned.job.gpu)
        return row_of(planned.job, planned.key, entry, price, location)

    def _end(self, finished: Finished) -> None:
        number, outcome = finished.number, finished.outcome
        failure, entry = outcome.failure, None
        if failure is None:
            try:
                result = result_of(finished.folder, outcome.seconds)
            except UsageError as error:  # a full disk there cut it off
                failure = Failure(error.what, error.where, error.remedy, error.exit_code)
            else:
                self._store.commit(self._plan.jobs[number].key, finished.folder, result)
                entry = Entry({}, result)
        row = dataclasses.replace(self._row(number, entry), failure=failure, attempts=finished.attempts)
        self._rows[number] = row
        job = self._plan.jobs[number].job
        self._tell(Progress("end", number, job, row, seconds=outcome.seconds, node=outcome.node))

    def _lost(self, number: int, reason: str, again: bool) -> None:
        job = self._plan.jobs[number].job
        text = f"{job.words}: the worker was lost ({reason}){'; the job is started again' if again else ''}"
        self.warnings.append(text)
        self._tell(Progress("lost", number, job, text=text))


def _planned(path: Path, settings: Settings, jobs: tuple[Job, ...], executor: Executor, store: Store) -> SweepPlan:
    surveys = executor.survey(sorted({job.place for job in jobs}))
    check_recipes(path, jobs, {name: code for found in surveys.values() for name, code in found.packs.items()})
    keys = [_key(job, surveys) for job in jobs]
    check_distinct(jobs, keys)
    planned = tuple(Planned(job, key, store.entry(key)) for job, key in zip(jobs, keys, strict=True))
    return SweepPlan(path, settings, planned, executor.workers, executor.name, _estimate(planned, executor))


def _key(job: Job, surveys: Mapping[str, Survey]) -> str:
    there, backend = surveys[job.place], job.config.backend
    version = there.backends.get(backend, "")
    if not version:
        raise MissingDependencyError(
            f"The package of the backend {backend} is not installed where jobs of {job.gpu} run",
            where=f"backend {backend}",
            remedy='pip install "trtopt[rtx,cpu]", or "trtopt[gpu]" on the machines with GPUs',
        )
    return job_key(job, there.code, version, there.packs)


def _estimate(jobs: tuple[Planned, ...], executor: Executor) -> float | None:
    """Seconds until the last of the missing jobs ends: that of the busiest place, or of all workers together.

    A job counts as the mean of those of the same model and precision that the store has, else of the model's, else of
    all.
    """
    took: dict[tuple[str, ...], list[float]] = defaultdict(list)
    missing = [item.job for item in jobs if item.entry is None]
    for item in jobs:
        if item.entry is not None:
            for group in _groups(item.job):
                took[group].append(item.entry.result.seconds)
    if not missing or not took:
        return None if missing else 0.0
    means = {group: statistics.fmean(seconds) for group, seconds in took.items()}
    places: dict[str, list[float]] = defaultdict(list)
    for job in missing:
        places[job.place].append(next(means[group] for group in _groups(job) if group in means))
    loads = [(executor.at_once(place), seconds) for place, seconds in places.items()]
    loads.append((executor.workers, [item for seconds in places.values() for item in seconds]))
    return max(sum(seconds) / min(max(at_once, 1), len(seconds)) for at_once, seconds in loads)


def _groups(job: Job) -> tuple[tuple[str, ...], ...]:
    """Jobs like it, the most alike first."""
    return (job.model, job.precision), (job.model,), ()


@contextlib.contextmanager
def _executor(name: ExecutorName, address: str | None, settings: Settings, workers: int | None) -> Iterator[Executor]:
    count = settings.workers if workers is None else workers
    executor: Executor
    if name == "ray":
        from trtopt.fleet.ray_executor import RayExecutor

        executor = RayExecutor(address, count, limit_s=settings.time_limit)
    else:
        executor = LocalExecutor(count, limit_s=settings.time_limit)
    try:
        yield executor
    finally:
        executor.close()
