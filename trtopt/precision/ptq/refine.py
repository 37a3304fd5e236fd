"""Better numbers for a plan from samples without labels: INT8 weights rounded together, and corrected biases.

What is found layer by layer is kept only where the error at the network's outputs falls, on samples that the search
has not seen.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import onnx_ir as ir

from trtopt.events import OnEvent, ignore
from trtopt.graph.shapes import static_shapes
from trtopt.precision.observe.feeds import Sample
from trtopt.precision.observe.stream import entries
from trtopt.precision.plan import PrecisionPlan
from trtopt.precision.ptq.correct import Corrections, Goal, correct
from trtopt.precision.ptq.layer_walk import samples_held

ErrorOf = Callable[[PrecisionPlan], float]
"""The error at the network's outputs under a plan: noise over signal, the worst output's."""

LARGEST_SAMPLES = 64
"""Samples the search walks with, where memory allows (``layer_walk.HELD_BYTES``)."""

NEAR = 1.26
"""Rounding alone is tried where rounding and biases leave an error of at most so many times the least (1 dB): of a
SqueezeNet 0.2 dB behind it was the best; of a MiniLM both were 7 dB behind."""

SMALLEST_SAMPLES = 6
"""With fewer, nothing can be told from chance."""


@dataclass(frozen=True)
class TriedPlan:
    """A plan that was tried, named after what it had beyond the one it started from, and its error at the outputs."""

    name: str
    error: float


@dataclass(frozen=True)
class Refined:
    """The result of :func:`refine`.

    Attributes:
        plan: The best plan found; the one given where nothing helped.
        kept: The name of its trial: ``none`` where nothing helped.
        trials: What was tried, in order; the first is ``none``.
        reason: Why nothing was tried; empty where something was.
    """

    plan: PrecisionPlan
    kept: str
    trials: tuple[TriedPlan, ...]
    reason: str = ""


def refine(
    base: ir.Model,
    plan: PrecisionPlan,
    samples: Iterable[Sample],
    error_of: ErrorOf,
    *,
    error: float | None = None,
    seed: int = 0,
    on_event: OnEvent = ignore,
) -> Refined:
    """Round the INT8 weights of a plan and correct biases, as far as that lowers the error at the outputs.

    Tried are biases alone and both, found in one walk; where both are not the best, but near it, rounding alone, in a
    second walk. Deterministic for a seed.

    Args:
        base: The widened model the plan was made for.
        plan: The plan; its rounding and biases are replaced.
        samples: Calibration samples; they are read once. A bounded number spread evenly over them is held.
        error_of: Measures a plan on other samples. Called at most four times.
        error: What it says of the plan without rounding and biases, where the caller knows.
        seed: Which positions of layers' inputs are looked at.
        on_event: Progress of the task ``refine``.

    Raises:
        InvalidModelError: ONNX Runtime cannot run a part of the model.
    """
    plain = dataclasses.replace(plan, rounded={}, bias={})
    if not plan.quantized:
        return Refined(plain, "none", (), "no node is quantized")
    searched = _searched(base, samples)
    if len(searched) < SMALLEST_SAMPLES:
        return Refined(plain, "none", (), f"fewer than {SMALLEST_SAMPLES} samples")
    attempt = _Attempts(plain, error_of)
    attempt.make("none", Corrections(), error)
    wishes = (Goal(rounding=False, bias=True), Goal(rounding=True, bias=True))
    bias, both = correct(base, plain, searched, wishes, seed=seed, on_event=on_event)
    attempt.make("bias", bias)
    if not attempt.make("rounding and bias", both) and attempt.is_near:
        (rounding,) = correct(base, plain, searched, (Goal(True, False),), seed=seed, on_event=on_event)
        attempt.make("rounding", rounding)
    return attempt.result()


class _Attempts:
    """Plans tried one after the other, the best kept."""

    def __init__(self, plain: PrecisionPlan, error_of: Callable[[PrecisionPlan], float]) -> None:
        self._plain, self._error_of = plain, error_of
        self._trials: list[TriedPlan] = []
        self._best: tuple[float, PrecisionPlan] | None = None
        self.kept = "none"

    def make(self, name: str, found: Corrections, error: float | None = None) -> bool:
        """Measure one, if its error is not known; whether it is the best so far."""
        plan = dataclasses.replace(self._plain, rounded=found.rounded, bias=found.bias)
        error = self._error_of(plan) if error is None else error
        self._trials.append(TriedPlan(name, error))
        if self._best is not None and not error < self._best[0]:
            return False
        self._best, self.kept = (error, plan), name
        return True

    @property
    def is_near(self) -> bool:
        """Whether the last one is nearly the best."""
        return self._trials[-1].error <= NEAR * min(trial.error for trial in self._trials)

    def result(self) -> Refined:
        plan = self._plain if self._best is None else self._best[1]
        return Refined(plan, self.kept, tuple(self._trials))


def _searched(base: ir.Model, samples: Iterable[Sample]) -> list[Sample]:
    """What the search walks with: as many as memory allows; ``samples`` are read once."""
    stream = iter(samples)
    first = next(stream, None)
    if first is None:
        return []
    held = samples_held(base, shapes_at(base, first), -(-LARGEST_SAMPLES // entries(first)))
    return spread_samples(itertools.chain([first], stream), held)


def shapes_at(base: ir.Model, sample: Sample) -> dict[str, tuple[int, ...]]:
    """The static shapes of a model's values for a sample, which may hold inputs of the part for the host too."""
    inputs = {value.name for value in base.graph.inputs}
    return static_shapes(base, {name: array.shape for name, array in sample.items() if name in inputs})


def spread_samples(stream: Iterable[Sample], limit: int) -> list[Sample]:
    """At most ``limit`` samples at even distances, whatever their number; at most twice as many are held at any
    time."""
    kept: list[Sample] = []
    stride = 1
    for index, sample in enumerate(stream):
        if index % stride:
            continue
        kept.append(sample)
        if len(kept) > 2 * limit:
            kept, stride = kept[::2], stride * 2
    count = min(limit, len(kept))
    return [kept[index * len(kept) // count] for index in range(count)]
