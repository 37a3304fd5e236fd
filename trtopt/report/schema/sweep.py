"""The records of ``trtopt.sweep/1``: what a sweep found, and what of it nothing else beats. Field names are part of the
contract."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from trtopt.report.schema.shown import Shown

SCHEMA = "trtopt.sweep/1"

Status = Literal["done", "cached", "gate", "failed"]
"""Built by this sweep; found in the store; built or found, and a gate failed, so that there is no engine; failed."""

_SECONDS_PER_HOUR = 3600.0

_Figures = tuple[float, float, float, float]
"""Drop, microseconds, bytes and cost: less is better in each."""


@dataclass(frozen=True)
class Failure:
    """Why there is no engine: what, where, remedy, and the exit code that ``trtopt build`` would have."""

    what: str
    where: str
    remedy: str
    exit_code: int


@dataclass(frozen=True)
class Result:
    """What came of a build, without what a price or the place of a file would change.

    Attributes:
        model_sha256: Hash of the model.
        seconds: What the build took, from its start to its end.
        measure: What the drop is of: a metric's name, ``top-1 agreement`` or ``cosine``; empty where nothing could say.
        drop: The drop of accuracy against FP32; without a metric that of the worst output; None where unknown.
        verified: ``onnx-only`` or ``engine``.
        latency_us: Microseconds of one run at the optimum; None where unknown.
        latency: How it came about.
        batch: Inferences of one run: the first dimension of the first input at the optimum.
        engine: The engine's file; empty without one.
        engine_bytes: Its size.
        engine_sha256: Its hash.
        kernels: Its kernels.
        failures: The gates that failed.
    """

    model_sha256: str
    seconds: float
    measure: str
    drop: float | None
    verified: str
    latency_us: float | None
    latency: Literal["predicted", "measured"]
    batch: int
    engine: str
    engine_bytes: int
    engine_sha256: str
    kernels: int
    failures: tuple[str, ...] = ()


@dataclass(frozen=True)
class SweepRow:
    """A job.

    Attributes:
        key: Of the store.
        varied: What the matrix varies, by option.
        model: The model's file name without its suffix.
        gpu: The target.
        precision: As asked for.
        status: See :data:`Status`.
        result: What came of it; None where it failed.
        failure: Why it failed; None where it did not.
        engine: Path or URL of the engine; empty without one.
        attempts: How often it was started by this sweep; 0 where it was found.
        cost: Of a million inferences; None without a price or a latency.
        on_front: Whether no other job of the model is better in one of accuracy, latency, size and cost and as good in
            the others.
    """

    key: str
    varied: dict[str, str]
    model: str
    gpu: str
    precision: str
    status: Status
    result: Result | None = None
    failure: Failure | None = None
    engine: str = ""
    attempts: int = 0
    cost: float | None = None
    on_front: bool = False


@dataclass(frozen=True, repr=False)
class SweepReport(Shown):
    """A sweep.

    Attributes:
        name: The name of its file, without the suffix.
        rows: The jobs in the order of the matrix.
        store: Where results are.
        executor: ``local``, or ``ray``.
        seconds: What this run of the sweep took.
        currency: What prices are in.
        prices: What an hour of a GPU costs, by its name.
        environment: Versions.
        warnings: What the user should know.
    """

    VIEW = "report.text.sweep:view"
    ROWS = "rows"

    name: str
    rows: tuple[SweepRow, ...]
    store: str
    executor: str
    seconds: float
    currency: str
    prices: dict[str, float]
    environment: dict[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    schema: str = SCHEMA


def cost_per_million(latency_us: float, batch: int, price_per_hour: float) -> float:
    """What a million inferences cost on a GPU that does nothing else, one run after the other.

    ``latency_us`` is of one run, ``batch`` its inferences, and the price that of an hour of the GPU.
    """
    runs = 1e6 / batch
    return price_per_hour / _SECONDS_PER_HOUR * runs * latency_us * 1e-6


def with_front(rows: Sequence[SweepRow]) -> tuple[SweepRow, ...]:
    """The rows with those marked that are on the Pareto front of their model.

    Compared are rows of one model with an engine, whose drops are of the same measure and whose times came about in the
    same way: a predicted time is never compared with a measured one. Those of a GPU without a price are compared with
    each other only; what an inference takes stands for its cost, which any price would make proportional to it.
    """
    groups: dict[tuple[str, str, str, str], list[tuple[_Figures, int]]] = {}
    for number, row in enumerate(rows):
        found = row.result
        if found is None or not row.engine or found.drop is None or found.latency_us is None:
            continue
        gpu, cost = (row.gpu, found.latency_us / found.batch) if row.cost is None else ("", row.cost)
        figures = (max(found.drop, 0.0), found.latency_us, float(found.engine_bytes), cost)
        groups.setdefault((found.model_sha256, found.measure, found.latency, gpu), []).append((figures, number))
    best = {number for group in groups.values() for number in _unbeaten(group)}
    return tuple(dataclasses.replace(row, on_front=number in best) for number, row in enumerate(rows))


def _unbeaten(group: list[tuple[_Figures, int]]) -> list[int]:
    """The rows that none beats: nowhere worse and somewhere better. Equal ones do not beat each other.

    In the order of its figures a row is beaten only by those before it, and then also by one of them that is unbeaten;
    in the first figure those are no worse.
    """
    front: list[_Figures] = []
    found: list[int] = []
    for figures, number in sorted(group):
        if not front or figures != front[-1]:
            _, latency, size, cost = figures
            if any(a <= latency and b <= size and c <= cost for _, a, b, c in front):
                continue
            front.append(figures)
        found.append(number)
    return found
