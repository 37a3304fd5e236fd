"""Fitting the constants of the performance model to measured kernels."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from data import Dataset
from numpy.typing import NDArray
from scipy.optimize import least_squares

from trtopt.hardware.spec import GpuSpec
from trtopt.roofline.batch import Batch
from trtopt.roofline.constants import Constants
from trtopt.roofline.layer import is_light, is_sustained, launch_us
from trtopt.roofline.work import Work

Array = NDArray[np.float64]

FIELDS = tuple(field.name for field in dataclasses.fields(Constants))
SHARES = {
    "peak_share": 1.0,
    "dram_share": 1.0,
    "wave_smoothing": 1.0,
    "l2_bytes_per_clock": 64.0,
    "l2_share": 1.0,
    "sm_bytes_per_clock": 128.0,
    "misaligned_share": 1.0,
    "conv_share": 1.0,
    "pointwise_share": 1.0,
    "layout_share": 1.0,
    "narrow_share": 1.0,
    "attention_share": 1.0,
    "softmax_share": 1.0,
    "lone_query_share": 1.0,
    "winograd_gain": 4.0,
    "fp8_share": 1.0,
    "block_share": 1.0,
    "stream_share": 1.0,
    "reread_share": 1.0,
}
"""Constants that have an upper limit by what they mean; the rest are positive."""

TIMING_FIELDS = ("profiled_us", "single_run_us")
ATTENTION_FIELDS = FIELDS[FIELDS.index("replay_us") : FIELDS.index("decode_bytes") + 1]
"""The constants of attention, and of how its measured kernels were timed (``attention_fit.py``)."""

QUANTIZED_FIELDS = ("fp8_us", "fp8_share", "block_share", "dequant_cycles")
"""The constants of products with 8-bit and 4-bit operands or narrow weights (``quantized_fit.py``)."""

ROW_FIELDS = ("stream_share", "event_us", "reread_share", "row_cycles", "row_load_cycles")
"""The constants of streams and of rows (``norms_fit.py``)."""

_OWN_FITS = (*ATTENTION_FIELDS, *QUANTIZED_FIELDS, *ROW_FIELDS)
KERNEL_FIELDS = tuple(name for name in FIELDS if name not in _OWN_FITS)
"""The constants that products, convolutions and the layers of engines say something about."""

FAMILY_FIELDS = KERNEL_FIELDS[KERNEL_FIELDS.index("conv_share") :]
"""The constants of kernels other than plain products."""

_OTHERS = (*TIMING_FIELDS, *FAMILY_FIELDS, "misaligned_share")
PRODUCT_FIELDS = tuple(name for name in KERNEL_FIELDS if name not in _OTHERS)
"""The constants that tables of matrix products say something about; all their rows are aligned."""

LAYER_FIELDS = tuple(name for name in KERNEL_FIELDS if name != "misaligned_share")
"""The constants that a few engines say something about; a classifier of 1000 outputs is their only misaligned layer."""

START = Constants(
    launch_us=1.0, launch_cycles=2500.0, profiled_us=1.7, single_run_us=3.0, peak_share=0.9, half_area=3000.0,
    fill_bytes=300.0, step_cycles=15.0, sm_bytes_per_clock=50.0, wave_smoothing=0.5, split_us=2.0, split_traffic=0.5,
    dram_share=0.85, ramp_us=1.5, l2_bytes_per_clock=30.0, l2_share=0.25, norm=3.0, power=0.02, power_us=200.0,
    misaligned_share=0.9, conv_share=0.9, tap_bytes=16.0, pointwise_share=0.8, layout_share=0.6, narrow_share=0.3,
    cuda_core_share=0.5, winograd_gain=2.0, replay_us=8.0, attention_share=0.55, head_loss=0.1, softmax_share=0.7,
    block_cycles=4000.0, lone_block=2.0, decode_cycles=7000.0, lone_query_share=0.25, decode_bytes=20.0,
    fp8_us=1.0, fp8_share=0.95, block_share=0.75, dequant_cycles=0.01,
    stream_share=0.85, event_us=20.0, reread_share=0.5, row_cycles=5000.0, row_load_cycles=800.0,
)  # fmt: skip
"""Where every fit starts, and what it is held to where the data say nothing: round numbers of the right size."""


LOOSE, MEDIUM, FIRM, STIFF = 0.001, 0.003, 0.03, 2.0
"""How strongly constants are held to where they start: for tables of thousands of products; for hundreds of
kernels of all kinds; for a few engines; for what is carried over to a GPU that was never measured."""

SOFT = 0.05
"""Relative error from which on a kernel counts linearly."""

SUM_WEIGHT = 0.3
"""Weight of the logarithm of the ratio of the sums, in units of all kernels of a part."""


@dataclass(frozen=True)
class Measured:
    """A part of a dataset as arrays."""

    batch: Batch
    measured_us: Array
    dataset: Dataset
    beside: Others
    taken_off: Others
    groups: tuple[str, ...]

    @staticmethod
    def of(dataset: Dataset, groups: Iterable[str] | None = None, most: int | None = None) -> Measured:
        """The samples of the given groups (default: all), at most ``most`` of them drawn with a fixed seed."""
        wanted = None if groups is None else frozenset(groups)
        samples = [sample for sample in dataset.samples if wanted is None or sample.group in wanted]
        if most is not None and len(samples) > most:
            chosen = np.random.default_rng(0).choice(len(samples), most, replace=False)
            samples = [samples[index] for index in sorted(chosen)]
        works = [sample.work for sample in samples]
        beside = Others.of([sample.beside for sample in samples], dataset)
        taken_off = Others.of([sample.taken_off for sample in samples], dataset)
        measured = np.array([sample.measured_us for sample in samples])
        names = tuple(sample.group for sample in samples)
        return Measured(_batch(works, dataset), measured, dataset, beside, taken_off, names)

    def predict(self, constants: Constants) -> Array:
        """Predicted microseconds, the launch included."""
        gpu, timing = self.dataset.gpu, self.dataset.timing
        light = np.array([is_light(work) for work in self.batch.works], dtype=bool)
        heavy_us, light_us = (launch_us(gpu, constants, timing=timing, light=each) for each in (False, True))
        latency = np.where(light, light_us, heavy_us) + (self.dataset.tensors - 1) * constants.event_us
        total = self.batch.predict(constants).total + latency
        return np.asarray(total + self.beside.predict(gpu, constants) - self.taken_off.predict(gpu, constants))


@dataclass(frozen=True)
class Others:
    """Kernels that some samples were timed with."""

    batch: Batch
    present: NDArray[np.bool_]

    @staticmethod
    def of(works: Sequence[Work | None], dataset: Dataset) -> Others:
        found = [work for work in works if work is not None]
        return Others(_batch(found, dataset), np.array([work is not None for work in works], dtype=bool))

    def predict(self, gpu: GpuSpec, constants: Constants) -> Array:
        """Microseconds of each sample's, its launch included; 0 where it has none."""
        total = np.zeros(len(self.present))
        if self.present.any():
            total[self.present] = self.batch.predict(constants).total + launch_us(gpu, constants)
        return total


def _batch(works: list[Work], dataset: Dataset) -> Batch:
    warm, sustained = dataset.timing == "replay", is_sustained(dataset.timing)
    return Batch.of(works, dataset.gpu, warm=warm, sustained=sustained)


def fit(
    parts: Sequence[Measured],
    start: Constants = START,
    fields: Sequence[str] = KERNEL_FIELDS,
    hold: float = 0.05,
    sum_weight: float = SUM_WEIGHT,
) -> Constants:
    """Fit constants to measured kernels.

    Minimised is the robust sum (soft L1) of the relative errors, plus the logarithm of the ratio of the sums for each
    part (fits of relative errors alone come out low on the sum), plus what holds each constant to its start.

    Args:
        parts: What to fit to; each part weighs the same.
        start: Where to start, and what to hold to.
        fields: The constants to fit.
        hold: Standard deviation of the relative error of one kernel over that of a constant's logarithm around its
            start, squared; larger holds more.
        sum_weight: Weight of the ratio of sums, in units of all kernels of a part.
    """
    begin = _to_free(start, fields)
    most = max(len(part.measured_us) for part in parts)

    def residuals(free: Array) -> Array:
        constants = _from_free(free, fields, start)
        found = [_quadratic(np.sqrt(hold) * (free - begin))]
        for part in parts:
            predicted = part.predict(constants)
            weight = np.sqrt(most / len(part.measured_us))
            found.append(weight * (predicted / part.measured_us - 1))
            ratio = np.log(predicted.sum() / part.measured_us.sum())
            found.append(np.array([sum_weight * np.sqrt(most) * ratio]))
        return np.concatenate(found)

    result: Any = least_squares(residuals, begin, loss="soft_l1", f_scale=SOFT, diff_step=1e-3, max_nfev=40)
    return _from_free(result.x, fields, start)


def _quadratic(values: Array) -> Array:
    """Residuals that count by their square in spite of the soft L1 loss, so that no constant runs away alone."""
    return np.asarray(SOFT * np.sign(values) * np.sqrt((1 + (values / SOFT) ** 2 / 2) ** 2 - 1))


def _to_free(constants: Constants, fields: Sequence[str]) -> Array:
    values = []
    for name in fields:
        value, top = getattr(constants, name), SHARES.get(name)
        values.append(np.log(value) if top is None else np.log(value / (top - value)))
    return np.array(values)


def _from_free(free: Array, fields: Sequence[str], base: Constants) -> Constants:
    values = {}
    for name, value in zip(fields, np.clip(free, -30, 30), strict=True):
        top = SHARES.get(name)
        values[name] = float(np.exp(value) if top is None else top / (1 + np.exp(-value)))
    return dataclasses.replace(base, **values)


def log_mean(sets: Sequence[Constants], fields: Sequence[str], base: Constants) -> Constants:
    """``base`` with the given constants replaced by the mean over ``sets``, in the scale they are fitted in."""
    return _from_free(np.mean([_to_free(constants, fields) for constants in sets], axis=0), fields, base)


@dataclass(frozen=True)
class Score:
    """How good predictions are.

    Attributes:
        mape: Mean absolute relative error of a kernel.
        ratio: Sum of predictions over sum of measurements.
        spearman: Rank correlation.
        kernels: How many.
    """

    mape: float
    ratio: float
    spearman: float
    kernels: int


def score(predicted: Array, measured: Array) -> Score:
    """Compare predictions with measurements, both [kernels] in microseconds."""
    from scipy.stats import spearmanr

    error = float(np.mean(np.abs(predicted - measured) / measured))
    rank: Any = spearmanr(predicted, measured)
    return Score(error, float(predicted.sum() / measured.sum()), float(rank.statistic), len(measured))
