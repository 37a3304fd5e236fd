"""Plans run on samples: 16-bit nodes are put back to FP32 until the outputs are within the bound.

The search for the nodes is that of ``precision.fp16.repair``.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from trtopt.accuracy.compare import Accumulator, is_float
from trtopt.accuracy.emulation import fp32_emulation
from trtopt.accuracy.scores import least_size
from trtopt.accuracy.switched import SwitchedEmulation, switched_emulation
from trtopt.events import Event, OnEvent, ignore
from trtopt.graph import edit
from trtopt.precision.fp16.repair import Damage, Repaired, repair, smallest_sqnr_db
from trtopt.precision.observe.stream import bounded, up_to
from trtopt.precision.plan import PrecisionPlan
from trtopt.precision.qdq.existing import without_qdq
from trtopt.precision.write import apply_plan
from trtopt.support.nms_plugins import PLUGINS
from trtopt.support.ort_session import Feeds, OrtSession

_SELECTIONS = frozenset(
    "ArgMax ArgMin TopK NonMaxSuppression NonZero Unique Multinomial Bernoulli RandomNormal RandomNormalLike "
    "RandomUniform RandomUniformLike".split()
).union(PLUGINS)
"""Operators whose result jumps: two scores that rounding makes equal change places, and what is behind them with it."""

_MOST_SAMPLES, _FEW = 8, 2
"""Samples that the result of a repair is checked on, and those that its searches run."""

_ROUNDS = 4
"""Searches on a few samples, each of which goes on from what the one before has found."""

_MARGIN_DB = 0.5
"""Decibels that the search keeps above the bound, for the samples that it does not see."""

_SHOWS = 0.1
"""Share of the elements of an output behind a selection that more exact ranks have to put right."""

_SMALLEST_CENTRED = 1e-8
"""Share of a tensor's power that may be left without the mean of its last axis: below, it says nothing."""


@dataclass(frozen=True)
class _Watched:
    """A value that is compared.

    ``centred`` scores are ranked: what is left without the mean of the last axis is compared. Of ``finite_only``
    values, which lie behind a selection, only NaN and infinity count. ``least``: of :func:`least_size`.
    """

    name: str
    centred: bool = False
    finite_only: bool = False
    least: float = 0.0


def repaired(
    base: ir.Model,
    plan: PrecisionPlan,
    samples: Iterable[Feeds],
    *,
    min_sqnr_db: float | None = None,
    on_event: OnEvent = ignore,
) -> Repaired:
    """``plan`` with nodes put back to FP32 until its 16-bit part is within the bound on a few samples.

    Where all is well this costs two sessions and at most eight samples. What the plan quantizes is left out, so that
    one call serves every choice of 8-bit nodes.

    Args:
        base: The widened model.
        plan: Its plan.
        samples: The first eight are used, or as many as give 256 MiB of outputs.
        min_sqnr_db: A higher bound for the outputs than the type's own, in dB.
        on_event: Told of each plan that is run.

    Raises:
        InvalidModelError: ONNX Runtime cannot run the model.
    """
    if plan.narrow is None or not _watched(base):
        return Repaired(plan, Damage(0.0), Damage(0.0))
    bound = max(smallest_sqnr_db(plan.narrow), min_sqnr_db if min_sqnr_db is not None else -math.inf)
    on_event(Event("start", "check precision"))
    runner = PlanRunner(base, samples, bound, on_event)
    found = _repaired(base, plan, runner)
    on_event(Event("end", "check precision"))
    return found


def _repaired(base: ir.Model, plan: PrecisionPlan, runner: PlanRunner) -> Repaired:
    """The search on two samples, which costs a quarter; from what it finds on, on the two that are worst with it; then
    on all."""
    before = runner(plan)
    if before.is_allowed or not runner.can_gain(plan, before):
        return Repaired(plan, before, before)
    now, after, few = plan, before, runner.on(range(runner.count)[:_FEW])
    for _ in range(_ROUNDS if runner.count > _FEW else 0):
        found = repair(base, now, few)
        if found.plan is now and not found.before.is_allowed:
            if now is plan:
                return Repaired(plan, before, before)
            break
        now, after = found.plan, runner(found.plan)
        if after.is_allowed:
            break
        few = runner.on_worst(now, after)
    if not after.is_allowed:
        found = repair(base, now, runner)
        if not found.after.is_allowed and now is not plan:
            found = repair(base, plan, runner)
    others = tuple(other for other in found.others if runner(other).is_allowed)
    fallbacks = {name: reason for name, reason in found.plan.wide.items() if name not in plan.wide}
    every = runner.on(range(runner.count))
    return Repaired(found.plan, before, runner(found.plan), fallbacks, others, few, every)


class _Emulations:
    """Runs plans of one widened model: the first in a session of its own, the others in one for all."""

    def __init__(self, base: ir.Model, names: Sequence[str]) -> None:
        self._base, self._names = base, names
        self._first: PrecisionPlan | None = None
        self._switched: SwitchedEmulation | None = None
        self._session: OrtSession | None = None

    def runs(
        self, plan: PrecisionPlan, samples: Sequence[tuple[Feeds, list[np.ndarray]]]
    ) -> Iterator[tuple[list[np.ndarray], list[np.ndarray]]]:
        """What is expected of each sample, and what the graph with the plan gives."""
        if self._first is not None and self._session is None:
            self._switched = switched_emulation(self._base, self._first)
            if self._switched is not None:
                self._session = OrtSession(self._switched.model, self._names, keep_qdq=True, brief=True)
        self._first = self._first or plan
        switches = None if self._switched is None else self._switched.feeds(plan)
        if self._session is not None and switches is not None:
            for feeds, expected in samples:
                yield expected, self._session.run({**feeds, **switches})
            return
        with OrtSession(
            fp32_emulation(apply_plan(self._base, plan)), self._names, keep_qdq=True, brief=True
        ) as session:
            for feeds, expected in samples:
                yield expected, session.run(feeds)


class PlanRunner:
    """Runs plans of one widened model against its FP32 outputs.

    Every output has to keep ``bound`` dB of signal to noise; samples as in :func:`repaired`.
    """

    def __init__(self, base: ir.Model, samples: Iterable[Feeds], bound: float, on_event: OnEvent = ignore) -> None:
        # Behind the quantizers that it came with the error of the 16-bit types is drowned: a rounding that moves a
        # value over a border between two levels is an error of a whole level (ResNet-20 keeps 59 dB in FP16, and 32 dB
        # with Q/DQ at every convolution).
        quantized = any(node.op_type == "QuantizeLinear" for node in base.graph)
        self._base, self._bound, self._on_event = without_qdq(base) if quantized else base, bound, on_event
        self._watched = _watched(base)
        self._names = [item.name for item in self._watched]
        with OrtSession(self._base, self._names, brief=True) as session:
            runs = ((feeds, session.run(feeds)) for feeds in up_to(samples, _MOST_SAMPLES))
            self._expected = list(bounded(runs, lambda run: run[1]))
        self._emulations = _Emulations(self._base, self._names)

    @property
    def count(self) -> int:
        """How many samples it runs."""
        return len(self._expected)

    def on(self, samples: Iterable[int]) -> PlanRunner:
        """The same on a few samples only, with a bound that the others should bear too."""
        found = copy.copy(self)
        found._expected = [self._expected[index] for index in samples]
        found._bound += _MARGIN_DB
        return found

    def on_worst(self, plan: PrecisionPlan, damage: Damage) -> PlanRunner:
        """The same on the samples that ``plan`` does most damage to, with a bound that it misses there by as much as it
        does with all of them, by ``damage``."""
        each = [self.on([index])(plan).excess for index in range(self.count)]
        found = self.on(sorted(range(self.count), key=lambda index: -each[index])[:_FEW])
        there = found(plan).excess
        if 0 < there < math.inf and damage.excess < math.inf:
            found._bound += 10 * math.log10(damage.excess / there) + _MARGIN_DB
        return found

    def __call__(self, plan: PrecisionPlan) -> Damage:
        """What the 16-bit part of ``plan`` does to the outputs."""
        plan = replace(plan, quantized=(), rounded={}, bias={})
        sums = [Accumulator(least=item.least) for item in self._watched]
        for expected, outputs in self._emulations.runs(plan, self._expected):
            for item, total, reference, output in zip(self._watched, sums, expected, outputs, strict=True):
                _add(item, total, reference, output)
            if any(total.nonfinite for total in sums):
                break
        self._on_event(Event("advance", "check precision"))
        found = [self._damage(item, total) for item, total in zip(self._watched, sums, strict=True)]
        return max(found, key=lambda damage: damage.excess, default=Damage(0.0))

    def can_gain(self, plan: PrecisionPlan, damage: Damage) -> bool:
        """Whether a repair can show: where only what a selection ranks is damaged, more of what lies behind it has to
        be right with ranks as exact as the bound asks; equal ranks change places with any rounding."""
        ranked = [item.name for item in self._watched if item.centred]
        behind = [item.name for item in self._watched if item.finite_only]
        if damage.output not in ranked or math.isinf(damage.excess) or not behind:
            return True
        rng = np.random.default_rng(0)
        now, bounded = fp32_emulation(apply_plan(self._base, plan)), _from_values(self._base, ranked)
        right = np.zeros((2, len(behind)))
        with OrtSession(now, behind, keep_qdq=True) as first, OrtSession(bounded, behind) as second:
            for feeds, expected in self._expected:
                exact = dict(zip(self._names, expected, strict=True))
                ranks = {_given(name): _noisy(exact[name], self._bound, rng) for name in ranked}
                runs = first.run(feeds), second.run({**feeds, **ranks})
                right += [
                    [_right(exact[name], output) for name, output in zip(behind, run, strict=True)] for run in runs
                ]
        return bool((right[1] - right[0] > _SHOWS * len(self._expected)).any())

    def _damage(self, item: _Watched, total: Accumulator) -> Damage:
        if total.nonfinite:
            return Damage(math.inf, item.name, math.nan)
        if item.finite_only or total.size == 0.0 or total.noise == 0.0:
            return Damage(0.0, item.name)
        sqnr = 10 * math.log10(total.size / total.noise)
        return Damage(10 ** ((self._bound - sqnr) / 10), item.name, sqnr)


def _right(exact: np.ndarray, output: np.ndarray) -> float:
    """Share of the elements that are off by less than a tenth of the tensor's size."""
    if exact.shape != output.shape or not exact.size:
        return 0.0
    first, second = exact.astype(np.float64), output.astype(np.float64)
    size = math.sqrt(float(np.square(first).mean()))
    return float((np.abs(first - second) <= size / 10).mean())


def _given(name: str) -> str:
    """The input that stands for a value."""
    return f"{name}/given"


def _from_values(base: ir.Model, names: Sequence[str]) -> ir.Model:
    """A clone that reads some of its values from inputs."""
    clone = base.clone()
    values = {value.name: value for node in clone.graph for value in node.outputs}
    for name in names:
        given = ir.Value(name=_given(name), type=values[name].type, shape=values[name].shape)
        values[name].replace_all_uses_with(given)
        clone.graph.inputs.append(given)
    return clone


def _noisy(exact: np.ndarray, bound_db: float, rng: np.random.Generator) -> np.ndarray:
    """Ranks with noise of ``bound_db`` below what tells them apart; those that are not finite stay."""
    finite = exact[np.isfinite(exact)].astype(np.float64)
    spread = float(finite.std()) if finite.size else 0.0
    noise = rng.standard_normal(exact.shape) * spread * 10 ** (-bound_db / 20)
    return np.asarray(exact + noise, exact.dtype)


def _add(item: _Watched, total: Accumulator, reference: np.ndarray, output: np.ndarray) -> None:
    if item.finite_only:
        if is_float(output):
            total.nonfinite += int(np.isnan(output).any() and not np.isnan(reference).any())
        return
    if item.centred and reference.ndim and reference.shape == output.shape:
        exact = reference.astype(np.float64)
        mean = np.where(np.isfinite(exact), exact, 0.0).mean(axis=-1, keepdims=True)
        left = np.nan_to_num(exact - mean, posinf=0.0, neginf=0.0)
        if float(np.square(left).sum()) > _SMALLEST_CENTRED * float(np.square(mean).sum()) * reference.shape[-1]:
            reference, output = exact - mean, output - mean
    total.update(reference, output)


def _watched(base: ir.Model) -> list[_Watched]:
    """What stands for the network's outputs.

    An output behind a selection (the first hundred boxes by score) jumps with the least rounding, however good the
    scores are; the scores are compared instead.
    """
    behind: set[ir.Value] = set()
    ranked: dict[str, _Watched] = {}
    for node in base.graph:
        inputs = [value for value in node.inputs if value is not None]
        if any(value in behind for value in edit.values_read(node)):
            behind.update(node.outputs)
        elif node.op_type in _SELECTIONS:
            behind.update(node.outputs)
            for value in inputs:
                if value.dtype is ir.DataType.FLOAT and value.producer() is not None:
                    ranked[str(value.name)] = _Watched(str(value.name), centred=True)
    outputs = [
        _Watched(str(value.name), finite_only=value in behind, least=least_size(value))
        for value in base.graph.outputs
        if value.producer() is not None
    ]
    named = {item.name for item in outputs if not item.finite_only}
    return [*outputs, *(item for name, item in ranked.items() if name not in named)]
