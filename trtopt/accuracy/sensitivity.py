"""How much each region of a network costs in accuracy when it alone becomes 8-bit, and how the error grows.

A region is measured on a few samples, the next region on the next ones, so that all samples are used equally often. The
standard error says how far the figure may be from that of all samples (``benchmarks/sensitivity`` compares the two).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from trtopt.accuracy.compare import Accumulator, checked_arrays, compare, decibels
from trtopt.accuracy.segments import SegmentedModel
from trtopt.events import Event, OnEvent, ignore
from trtopt.graph.shapes import static_shapes
from trtopt.hardware.cpu import available_threads
from trtopt.report.schema.sensitivity import GrowthStep, OutputError, RegionError
from trtopt.support.ort_session import Feeds, OrtSession
from trtopt.support.threads import in_threads

TASK = "sensitivity"

_RUNS = 4
"""Runs with a region changed for each sample there is; on average such a run computes half of the network."""
_LEAST = 4
"""Samples that each region is measured on at least."""
_TOGETHER = 16
_TOGETHER_SHARE = 4
"""With all regions quantized, every fourth sample is run, and at least 16."""
_GROWTH_SAMPLES = 2
_PASS_BYTES = 256 << 20
"""Tensors compared in one pass over the samples, in each of the two models."""
_MOST_WORKERS = 8

_Job = tuple[list[tuple[int, frozenset[str]]], Feeds]
"""A sample, and what it is run with: the number of each job, and the nodes that are in 8 bits."""


@dataclass(frozen=True)
class Sampling:
    """Samples that a region is measured on: how many (all if there are fewer; None bounds the time); the seed
    chooses."""

    per_region: int | None = None
    seed: int = 0


@dataclass(frozen=True)
class Errors:
    """What :func:`sensitivity` found by region, in the order asked, and for all regions quantized at once."""

    regions: Mapping[str, RegionError]
    together: RegionError
    samples: int


def sensitivity(
    model: SegmentedModel,
    regions: Mapping[str, Sequence[str]],
    samples: Iterable[Feeds],
    *,
    always: Collection[str] = (),
    sampling: Sampling = Sampling(),
    on_event: OnEvent = ignore,
) -> Errors:
    """The error of the outputs with one region changed, for each region.

    Without ``always``, a region's error is that of the network with this region in 8 bits and the rest as in the base
    model. With it, the network already has those nodes in 8 bits: a region that is among them is taken back, another
    one is added, and ``change`` says what that does to the error.

    Args:
        model: Both forms of every node of ``regions`` and ``always``. It keeps its sessions, so that asking again of
            the same model costs less.
        regions: Nodes that change together, by a name.
        samples: Read twice: counted, then run.
        always: Nodes that are in 8 bits in every run, but for the region taken back.
        sampling: Which samples each region is measured on.
        on_event: Told of progress; the task is ``sensitivity``, a unit is a run.

    Raises:
        InvalidModelError: ONNX Runtime cannot run the model.
        UsageError: A sample is bad.
        ValueError: There are no regions or no samples.
    """
    count = sum(1 for _ in samples)
    if not count or not regions:
        raise ValueError("sensitivity needs at least one region and one sample")
    fixed = frozenset(always)
    sets = {name: frozenset(nodes) for name, nodes in regions.items()}
    everything = frozenset().union(fixed, *sets.values())
    wanted = {name: fixed - nodes if nodes <= fixed else fixed | nodes for name, nodes in sets.items()}
    each = sampling.per_region or max(_LEAST, _RUNS * count // len(regions))
    jobs = _assign([*wanted.values()], count, each, sampling.seed)
    for index in _spread(count, max(_TOGETHER, count // _TOGETHER_SHARE)):
        jobs[index].append((len(wanted), everything))
    bench = _Bench(model, fixed, [[] for _ in range(len(wanted) + 1)], on_event)
    on_event(Event("start", TASK, total=sum(len(item) for item in jobs)))
    workers = min(available_threads(), count, _MOST_WORKERS)
    in_threads(zip(jobs, samples, strict=True), bench.measure, workers, TASK)
    on_event(Event("end", TASK))
    found = {}
    for (name, nodes), tallies in zip(regions.items(), bench.found, strict=False):
        errors = _errors(tallies, count)
        found[name] = RegionError(name, tuple(nodes), errors, len(tallies))
    last = bench.found[-1]
    return Errors(found, RegionError("", tuple(sorted(everything)), _errors(last, count), len(last)), count)


@dataclass(frozen=True)
class _Tally:
    """One run of one sample compared: by output, what it differs by, and what it did without the change."""

    sample: int
    changed: dict[str, Accumulator]
    before: dict[str, Accumulator]


@dataclass
class _Bench:
    """Runs samples; threads share it. ``found`` has the runs of each job."""

    model: SegmentedModel
    fixed: frozenset[str]
    found: list[list[_Tally]]
    on_event: OnEvent
    lock: threading.Lock = field(default_factory=threading.Lock)

    def measure(self, index: int, item: _Job) -> None:
        """Run one sample: as it is, then with the change of each of its jobs."""
        jobs, feeds = item
        if not jobs:
            return
        start = self.model.run(feeds, self.fixed)
        names, plain = self.model.output_names, self.model.outputs(start)
        truth = self.model.outputs(self.model.run(feeds, (), start)) if self.fixed else plain
        before = _compared(names, truth, plain)
        for job, exchanged in jobs:
            run = self.model.run(feeds, exchanged, start)
            tally = _Tally(index, _compared(names, truth, self.model.outputs(run)), before)
            with self.lock:
                self.found[job].append(tally)
                self.on_event(Event("advance", TASK))


def _compared(names: Sequence[str], truth: Sequence[np.ndarray], found: Sequence[np.ndarray]) -> dict[str, Accumulator]:
    result = {}
    for name, expected, output in zip(names, truth, found, strict=True):
        result[name] = Accumulator()
        result[name].update(*checked_arrays(name, expected, output, may_differ=True))
    return result


def _assign(jobs: Sequence[frozenset[str]], count: int, each: int, seed: int) -> list[list[tuple[int, frozenset[str]]]]:
    """For each sample the jobs it is used for, as numbers with their nodes: ``each`` different samples a job, in turn
    through all samples in a random order."""
    order = np.random.default_rng(seed).permutation(count)
    found: list[list[tuple[int, frozenset[str]]]] = [[] for _ in range(count)]
    turn = 0
    for number, nodes in enumerate(jobs):
        for _ in range(min(each, count)):
            found[order[turn % count]].append((number, nodes))
            turn += 1
    return found


def _spread(count: int, most: int) -> list[int]:
    """At most ``most`` of ``count`` indices, evenly spread."""
    return sorted({index * count // most for index in range(most)}) if count > most else list(range(count))


def _errors(tallies: Sequence[_Tally], count: int) -> dict[str, OutputError]:
    """The error of each output over some of ``count`` samples, in an order that threads do not change."""
    ordered = sorted(tallies, key=lambda tally: tally.sample)
    names = ordered[0].changed
    return {
        name: _error([item.changed[name] for item in ordered], [item.before[name] for item in ordered], count)
        for name in names
    }


def _error(found: Sequence[Accumulator], before: Sequence[Accumulator], count: int) -> OutputError:
    positions = sum(item.positions for item in found)
    agree = sum(item.agree for item in found)
    disagreement = 1 - agree / positions if positions and found[0].has_top1 else None
    if any(item.nonfinite or item.differs for item in found):
        return OutputError(math.inf, -math.inf, None, disagreement, math.inf)
    ratio = _ratio(found)
    broken = any(item.nonfinite or item.differs for item in before)
    change = -math.inf if broken else ratio - _ratio(before)
    if ratio == 0:
        return OutputError(0.0, math.inf, 0.0, disagreement, change)
    if math.isinf(ratio):
        return OutputError(ratio, -math.inf, None, disagreement, change)
    spread = _standard_error(found, ratio, count)
    error_db = None if spread is None else 10 / math.log(10) * spread / ratio
    return OutputError(ratio, decibels(ratio), error_db, disagreement, change)


def _ratio(items: Sequence[Accumulator]) -> float:
    """Noise over signal; infinite where all of a signal that is zero is noise."""
    noise, signal = math.fsum(item.noise for item in items), math.fsum(item.signal for item in items)
    return noise / signal if signal else math.inf if noise else 0.0


def _standard_error(items: Sequence[Accumulator], ratio: float, count: int) -> float | None:
    """Standard error of a ratio of sums over some of ``count`` samples (W. G. Cochran, "Sampling techniques", 1977,
    section 6.4: the linearized ratio estimator, with the correction for a finite population)."""
    size = len(items)
    if size == count:
        return 0.0
    if size < 2:
        return None
    residuals = math.fsum((item.noise - ratio * item.signal) ** 2 for item in items)
    mean = math.fsum(item.signal for item in items) / size
    return math.sqrt((1 - size / count) * residuals / (size * (size - 1))) / mean


def growth(
    base: ir.Model,
    quantized: ir.Model,
    regions: Mapping[str, Sequence[str]],
    samples: Iterable[Feeds],
    *,
    most_samples: int = _GROWTH_SAMPLES,
) -> tuple[GrowthStep, ...]:
    """The error of what each region's first node reads and gives when all are quantized, in graph order.

    The first ``most_samples`` are run through the FP32 model ``base`` and ``quantized``, whose tensors keep their
    names.

    Raises:
        InvalidModelError: ONNX Runtime cannot run the model.
    """
    chosen = [feeds for feeds, _ in zip(samples, range(most_samples), strict=False)]
    order = {str(node.name): (index, node) for index, node in enumerate(base.graph)}
    first = sorted((min(nodes, key=lambda name: order[name][0]), region) for region, nodes in regions.items())
    first.sort(key=lambda item: order[item[0]][0])
    given = {node: str(order[node][1].outputs[0].name) for node, _ in first}
    inputs = {value.name for value in base.graph.inputs}
    names = dict.fromkeys(name for node, region in first for name in (region, given[node]) if name not in inputs)
    shapes = static_shapes(base, {name: array.shape for name, array in chosen[0].items()})
    errors = dict.fromkeys((str(name) for name in inputs), 0.0)
    for part in _passes(list(names), shapes):
        with OrtSession(base, part) as before, OrtSession(quantized, part, keep_qdq=True) as after:
            found = compare(before, after, chosen, varying=part)
            errors.update((name, _power(item.sqnr_db)) for name, item in found.items())
    return tuple(
        GrowthStep(
            region, node, decibels(errors[region]), decibels(errors[given[node]]), errors[given[node]] - errors[region]
        )
        for node, region in first
    )


def _passes(names: Sequence[str], shapes: Mapping[str, tuple[int, ...]]) -> Iterator[list[str]]:
    """The tensors in groups of bounded size."""
    part: list[str] = []
    held = 0
    for name in names:
        size = 4 * math.prod(shapes.get(name, ()))
        if part and held + size > _PASS_BYTES:
            yield part
            part, held = [], 0
        part.append(name)
        held += size
    if part:
        yield part


def _power(sqnr_db: float) -> float:
    """The noise-to-signal ratio of an SQNR; infinite where that is not finite or cannot be said."""
    return math.inf if math.isnan(sqnr_db) else float(10 ** (-sqnr_db / 10))
