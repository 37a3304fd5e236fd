"""How a prediction is scored on what it was not fitted to, beside a naive roofline and a fit of three constants."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from data import Dataset
from fitting import Array, Measured, Score, score
from numpy.typing import NDArray
from scipy.optimize import least_squares

from trtopt.hardware.spec import GpuSpec
from trtopt.roofline.batch import Batch
from trtopt.roofline.constants import Constants
from trtopt.roofline.intervals import kind_of

SPLIT_SEEDS = (0, 1, 2)
"""Seeds of the halves; the figure is the mean over them."""


Predictor = Callable[[Measured], Array]
Fold = tuple[Predictor, Sequence[Measured], Measured]
"""A predictor, what it was fitted to, and what it is scored on."""


@dataclass(frozen=True)
class HeldBack:
    """The kernels that a row of the table predicts without having been fitted to them.

    Attributes:
        name: The row.
        gpu: The GPU they were measured on.
        own: Whether the constants were fitted to other kernels of that GPU.
        kinds: The kind of each kernel (:func:`trtopt.roofline.intervals.kind_of`).
        groups: What is left out together, by kernel.
        ratios: Measured over predicted, by kernel.
    """

    name: str
    gpu: GpuSpec
    own: bool
    kinds: Array
    groups: Array
    ratios: Array

    @staticmethod
    def of(name: str, folds: Sequence[Fold]) -> HeldBack:
        """Those of some folds, which are of one GPU."""
        gpu = folds[0][2].dataset.gpu
        own = "GPU left out" not in name and any(part.dataset.gpu == gpu for _, train, _ in folds for part in train)
        tests = [test for _, _, test in folds]
        return HeldBack(
            name,
            gpu,
            own,
            np.array([kind_of(work) for test in tests for work in test.batch.works]),
            np.array([f"{test.dataset.name} {group}" for test in tests for group in test.groups]),
            np.concatenate([test.measured_us / predict(test) for predict, _, test in folds]),
        )

    def only(self, chosen: NDArray[np.bool_]) -> HeldBack:
        """Some of the kernels."""
        return dataclasses.replace(
            self, kinds=self.kinds[chosen], groups=self.groups[chosen], ratios=self.ratios[chosen]
        )


@dataclass(frozen=True)
class Row:
    """One line of the table. ``limit`` is what the model has to reach."""

    name: str
    limit: float
    model: Score
    naive: Score
    three: Score
    held_back: HeldBack


def naive(part: Measured) -> Array:
    """max(flop / peak, bytes / bandwidth), without any constant."""
    batch = part.batch
    moved = _bytes(part) / batch.chip.bandwidth
    return np.asarray(np.maximum(batch.flop / _rates(batch), moved))


def _rates(batch: Batch) -> Array:
    """The peak of Tensor Cores for products and attention, of CUDA cores for the rest."""
    fused = np.array([work.attention is not None for work in batch.works], dtype=bool)
    return np.asarray(np.where((batch.product >= 0) | fused, batch.rate, batch.fp32_rate))


def _bytes(part: Measured) -> Array:
    """Of each kernel, and of the one beside it that was timed with it, less those of what was taken off."""
    moved = np.array([work.bytes for work in part.batch.works], dtype=np.float64)
    for sign, others in ((1, part.beside), (-1, part.taken_off)):
        moved[others.present] += [sign * work.bytes for work in others.batch.works]
    return moved


def three_constants(parts: Sequence[Measured]) -> Predictor:
    """Launch, share of the peak and share of the bandwidth, fitted to the same kernels with the same loss."""

    def predict(part: Measured, free: Array) -> Array:
        batch = part.batch
        moved = _bytes(part) / batch.chip.bandwidth
        return np.asarray(
            np.exp(free[0]) + np.maximum(batch.flop / _rates(batch) / np.exp(free[1]), moved / np.exp(free[2]))
        )

    def residuals(free: Array) -> Array:
        return np.concatenate([predict(part, free) / part.measured_us - 1 for part in parts])

    found: Any = least_squares(residuals, np.log([4.0, 0.6, 0.7]), loss="soft_l1", f_scale=0.05)
    return lambda part: predict(part, found.x)


def compare(name: str, limit: float, folds: Sequence[Fold]) -> Row:
    """Score predictors on what each was not fitted to."""
    measured = np.concatenate([test.measured_us for _, _, test in folds])
    model = np.concatenate([predict(test) for predict, _, test in folds])
    three = np.concatenate([three_constants(train)(test) for _, train, test in folds])
    plain = np.concatenate([naive(test) for _, _, test in folds])
    found = (score(values, measured) for values in (model, plain, three))
    row = Row(name, limit, *found, held_back=HeldBack.of(name, folds))
    print(line(row), flush=True)
    return row


def halves(dataset: Dataset, seed: int) -> tuple[frozenset[str], frozenset[str]]:
    """The groups of a dataset in two halves."""
    groups = sorted({sample.group for sample in dataset.samples})
    order = np.random.default_rng(seed).permutation(len(groups))
    first = frozenset(groups[index] for index in order[: len(groups) // 2])
    return first, frozenset(groups) - first


def predictor(constants: Constants) -> Predictor:
    """The model with these constants."""
    return lambda part: part.predict(constants)


def line(row: Row) -> str:
    """A row of the README's table."""
    cells = [row.name, f"{row.limit:.1%}"]
    cells += [f"{item.mape:.1%}" for item in (row.model, row.three, row.naive)]
    cells += [f"{row.model.ratio:.2f}", f"{row.model.spearman:.3f}", str(row.model.kernels)]
    return f"| {' | '.join(cells)} | {'yes' if row.model.mape <= row.limit else 'NO'} |"
