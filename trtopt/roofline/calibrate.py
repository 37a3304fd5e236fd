"""Fits the few factors of a GPU that a handful of its measured layers can tell (:class:`GpuCalibration`).

The constants stay those of the GPU or of its architecture: too many for a few layers. The logarithms of the factors are
held to 0, so that what the layers say nothing about stays as it is: the most probable factors under a normal
distribution around 1 and a robust error of the layers, by Gauss-Newton steps with iteratively reweighted residuals.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trtopt.hardware.spec import FACTORS, LARGEST_FACTOR, GpuCalibration, GpuSpec
from trtopt.roofline.batch import Batch
from trtopt.roofline.constants import Constants, calibrated, sustained_share
from trtopt.roofline.gemm import Array
from trtopt.roofline.layer import Timing, launch_us
from trtopt.roofline.work import Work

LEAST_KERNELS = 6
"""Different kernels below which nothing is fitted: two per factor."""

_FOLDS = 5
_PRIOR = 0.2
"""Standard deviation of the logarithm of a factor before anything is measured. The layers of A100 and RTX 3060, each
from the constants of the other, give factors from 0.86 to 1.22."""

_NOISE = 0.1
"""Relative error of a layer that no factor explains, from which on it counts linearly."""

_STEP, _ROUNDS, _HALVINGS, _ENOUGH = 1e-3, 20, 5, 1e-4
_DIGITS = 4


@dataclass(frozen=True)
class Kernel:
    """A kernel that was measured.

    Attributes:
        work: What it has to do.
        us: Its time in microseconds, above 0: the mean, where layers have the same work.
        timing: How it was timed.
        layers: Layers that have this work.
    """

    work: Work
    us: float
    timing: Timing
    layers: int = 1


def merged(kernels: Sequence[Kernel]) -> tuple[Kernel, ...]:
    """Each pair of work and timing once, with its mean time."""
    found: dict[tuple[Work, Timing], list[Kernel]] = {}
    for kernel in kernels:
        found.setdefault((kernel.work, kernel.timing), []).append(kernel)
    return tuple(
        Kernel(work, math.fsum(each.us * each.layers for each in group) / total, timing, total)
        for (work, timing), group in found.items()
        if (total := sum(each.layers for each in group))
    )


@dataclass(frozen=True)
class _Part:
    """Kernels on one GPU, as arrays."""

    batch: Batch
    steps: Array
    us: Array
    layers: Array
    timings: tuple[Timing, ...]
    gpu: GpuSpec
    constants: Constants

    @staticmethod
    def of(kernels: Sequence[Kernel], gpu: GpuSpec, constants: Constants) -> _Part:
        batch = Batch.of([kernel.work for kernel in kernels], gpu)
        us, steps, layers = (
            np.array(values, dtype=np.float64)
            for values in zip(*((each.us, each.work.steps, each.layers) for each in kernels), strict=True)
        )
        return _Part(batch, steps, us, layers, tuple(kernel.timing for kernel in kernels), gpu, constants)

    def errors(self, found: GpuCalibration) -> Array:
        """Relative error of each kernel, [kernels]."""
        constants = calibrated(self.constants, found)
        latency = {timing: launch_us(self.gpu, constants, timing=timing) for timing in set(self.timings)}
        batch = dataclasses.replace(self.batch, sustained_share=sustained_share(self.gpu) * found.clock)
        total = batch.predict(constants).total + np.array([latency[timing] for timing in self.timings]) * self.steps
        return np.asarray(total / self.us - 1)


def fit_factors(kernels: Sequence[Kernel], gpu: GpuSpec, constants: Constants) -> GpuCalibration:
    """The factors of a GPU from kernels measured on it; that of attention only where one of them is.

    Args:
        kernels: At least one.
        gpu: The GPU, without a calibration.
        constants: What the factors scale.

    Raises:
        UsageError: The GPU has no units for the type of one of them.
    """
    part = _Part.of(kernels, gpu, constants)
    names = FACTORS if any(kernel.work.attention is not None for kernel in kernels) else FACTORS[:-1]

    def cost(free: Array) -> float:
        error = part.errors(_from_free(names, free)) / _NOISE
        return float(part.layers @ (2 * (np.sqrt(1 + error**2) - 1)) + np.sum((free / _PRIOR) ** 2))

    free = np.zeros(len(names))
    best = cost(free)
    for _ in range(_ROUNDS):
        move = _gauss_newton(part, names, free)
        tries = [_bounded(free + move / 2**halving) for halving in range(_HALVINGS)]
        after, values = next(((c, t) for t in tries if (c := cost(t)) < best), (best, free))
        gain, best, free = best - after, after, values
        if gain <= _ENOUGH * best:
            break
    return _from_free(names, np.log(np.round(np.exp(free), _DIGITS)))


def _gauss_newton(part: _Part, names: Sequence[str], free: Array) -> Array:
    error = part.errors(_from_free(names, free)) / _NOISE
    moved = (part.errors(_from_free(names, free + _STEP * axis)) / _NOISE for axis in np.eye(len(free)))
    slopes = np.stack([(each - error) / _STEP for each in moved], axis=1)
    weighted = slopes.T * (part.layers / np.sqrt(1 + error**2))
    curvature = weighted @ slopes + np.eye(len(free)) / _PRIOR**2
    return np.asarray(-np.linalg.solve(curvature, weighted @ error + free / _PRIOR**2))


def _bounded(free: Array) -> Array:
    return np.clip(free, -math.log(LARGEST_FACTOR), math.log(LARGEST_FACTOR))


def _from_free(names: Sequence[str], free: Array) -> GpuCalibration:
    return GpuCalibration(**dict(zip(names, np.exp(free).tolist(), strict=True)))


def mean_error(kernels: Sequence[Kernel], gpu: GpuSpec, constants: Constants, found: GpuCalibration) -> float:
    """Mean absolute relative error of a layer with the factors of a calibration."""
    part = _Part.of(kernels, gpu, constants)
    return float(np.average(np.abs(part.errors(found)), weights=part.layers))


def left_out_error(kernels: Sequence[Kernel], gpu: GpuSpec, constants: Constants) -> float:
    """Mean absolute relative error of layers that the factors were not fitted to: each fifth of the kernels predicted
    with factors fitted to the rest, drawn with a fixed seed. Layers of one work are left out together."""
    order = np.random.default_rng(0).permutation(len(kernels))
    error = layers = 0.0
    for fold in range(min(_FOLDS, len(kernels))):
        test = [kernels[index] for index in order[fold::_FOLDS]]
        rest = [kernels[index] for at, index in enumerate(order) if at % _FOLDS != fold]
        count = sum(kernel.layers for kernel in test)
        error += count * mean_error(test, gpu, constants, fit_factors(rest, gpu, constants))
        layers += count
    return error / layers
