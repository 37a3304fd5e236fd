"""What an engine counts, for Prometheus and OpenTelemetry."""

from __future__ import annotations

import bisect
import itertools
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from trtopt.support._lazy import require

BOUNDS_S = tuple(1e-5 * 2**power for power in range(21))
"""Upper bounds of the latency buckets: 10 us, doubled up to 10.5 s."""


@dataclass(frozen=True)
class Latency:
    """Seconds from a call to its reply, the time in the queue included, of all calls that got one.

    Attributes:
        bounds_s: Upper bounds of the buckets; one more without bound follows.
        cumulative: How many replies took at most each bound; last, all of them.
    """

    bounds_s: tuple[float, ...]
    cumulative: tuple[int, ...]
    sum_s: float
    count: int


class Counters:
    """Counts replies by their latency, and errors by their kind. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._buckets = [0] * (len(BOUNDS_S) + 1)
        self._sum_s = 0.0
        self._errors: dict[str, int] = {}

    def replied(self, seconds: float) -> None:
        """Count a reply."""
        index = bisect.bisect_left(BOUNDS_S, seconds)
        with self._lock:
            self._buckets[index] += 1
            self._sum_s += seconds

    def failed(self, kind: str) -> None:
        """Count a call that got an error."""
        with self._lock:
            self._errors[kind] = self._errors.get(kind, 0) + 1

    @property
    def latency(self) -> Latency:
        """The histogram as it is now."""
        with self._lock:
            buckets, seconds = list(self._buckets), self._sum_s
        cumulative = tuple(itertools.accumulate(buckets))
        return Latency(BOUNDS_S, cumulative, seconds, cumulative[-1])

    @property
    def errors(self) -> dict[str, int]:
        """Errors by the ``code`` of their class; ``internal`` is a bug."""
        with self._lock:
            return dict(self._errors)


@dataclass(frozen=True)
class Family:
    """A metric and its values: suffix of the name, labels, value."""

    name: str
    kind: str
    help: str
    samples: Iterable[tuple[str, dict[str, str], float]]


def histogram(latency: Latency) -> Family:
    """The latency as a metric."""
    bounds = [*(f"{bound:.9g}" for bound in latency.bounds_s), "+Inf"]
    samples: list[tuple[str, dict[str, str], float]] = [
        ("_bucket", {"le": bound}, count) for bound, count in zip(bounds, latency.cumulative, strict=True)
    ]
    samples += [("_sum", {}, latency.sum_s), ("_count", {}, latency.count)]
    return Family("trtopt_latency_seconds", "histogram", "From a call to its reply, the queue included", samples)


def exposition(models: Mapping[str, Iterable[Family]]) -> str:
    """The text that Prometheus scrapes, in which all values of a metric stand together.

    Raises:
        MissingDependencyError: prometheus_client is not installed.
    """
    client = require("prometheus_client", "serve", "write metrics for Prometheus")
    found: dict[str, Any] = {}
    for model, families in models.items():
        for family in families:
            metric = found.setdefault(family.name, client.Metric(family.name, family.help, family.kind))
            for suffix, labels, value in family.samples:
                metric.add_sample(family.name + suffix, {"model": model, **labels}, value)
    text: bytes = client.generate_latest(SimpleNamespace(collect=found.values))
    return text.decode()
