"""What an engine counts, for Prometheus and OpenTelemetry.

The text is Prometheus' exposition format 0.0.4, which is small; the package prometheus_client would be a dependency of
every service for it, and a service that has the package scrapes these lines beside its own.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import threading
from collections.abc import Iterable
from dataclasses import dataclass

BOUNDS_S = tuple(1e-5 * 2**power for power in range(21))
"""Upper bounds of the latency buckets: 10 us, doubled up to 10.5 s."""


@dataclass(frozen=True)
class Latency:
    """Seconds from a call to its reply, the time in the queue included, of all calls that got one.

    Attributes:
        bounds_s: Upper bounds of the buckets; one more without bound follows.
        cumulative: How many replies took at most each bound; last, all of them.
        sum_s: All seconds together.
        count: How many replies there were.
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


def labelled(families: Iterable[Family], labels: dict[str, str]) -> list[Family]:
    """Metrics with these labels before their own."""
    return [
        dataclasses.replace(
            family, samples=[(suffix, {**labels, **own}, value) for suffix, own, value in family.samples]
        )
        for family in families
    ]


def exposition(families: Iterable[Family]) -> str:
    """The text that Prometheus scrapes, in which all values of a metric stand together."""
    by_name: dict[str, list[Family]] = {}
    for family in families:
        by_name.setdefault(family.name, []).append(family)
    lines = []
    for name, parts in by_name.items():
        lines += [f"# HELP {name} {parts[0].help}", f"# TYPE {name} {parts[0].kind}"]
        for suffix, labels, value in itertools.chain.from_iterable(part.samples for part in parts):
            text = ",".join(f'{key}="{_escaped(label)}"' for key, label in labels.items())
            lines.append(f"{name}{suffix}{{{text}}} {value}")
    return "\n".join(lines) + "\n"


def _escaped(label: str) -> str:
    return label.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
