"""The rows of ``trtopt calibrate-gpu``: factors fitted to a third of the layers of one engine, scored on the rest."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from data import Dataset, Sample, engines_of, tensorrt_layers
from fit import engine_constants
from fitting import Array, Measured
from scoring import Fold, Row, compare, predictor

from trtopt.roofline.calibrate import Kernel, fit_factors, merged
from trtopt.roofline.constants import Constants, calibrated

SEEDS = range(8)
"""Seeds of the third."""

LOWERED = 0.25
"""By how much the error has to be lower."""


def calibration_rows() -> tuple[list[Row], dict[str, Any]]:
    """The rows of both GPUs, from constants that saw nothing of the GPU, and how the gain spreads."""
    a100, laptop = tensorrt_layers("A100-PCIe-80GB"), tensorrt_layers("RTX-3060-Laptop")
    rows: list[Row] = []
    spread: dict[str, Any] = {}
    for known, other in ((laptop, a100), (a100, laptop)):
        constants = engine_constants(known)
        for rest in ("the rest of all engines", "the rest of that engine"):
            name = f"{other.gpu.name}: TensorRT layers, calibrated with a third of one engine, {rest}"
            row, spread[name] = _row(name, other, constants, own="that" in rest)
            rows.append(row)
    return rows, spread


def _row(name: str, dataset: Dataset, constants: Constants, *, own: bool) -> tuple[Row, dict[str, Any]]:
    folds: list[Fold] = []
    gains: dict[str, list[float]] = {}
    errors_before = []
    for engine in engines_of(dataset):
        samples = [sample for sample in dataset.samples if sample.group == engine]
        for seed in SEEDS:
            third, left = _third(samples, seed)
            rest = left if own else [*left, *(each for each in dataset.samples if each.group != engine)]
            found = fit_factors(merged([_kernel(each, dataset) for each in third]), dataset.gpu, constants)
            gpu = dataclasses.replace(dataset.gpu, calibration=found)
            after = calibrated(constants, found)
            train, before = _part(dataset, third), _part(dataset, rest)
            test = _part(dataclasses.replace(dataset, gpu=gpu), rest)
            folds.append((predictor(after), [train], test))
            errors = _errors(before, constants), _errors(test, after)
            gains.setdefault(engine, []).append(1 - float(errors[1].mean() / errors[0].mean()))
            errors_before.append(errors[0])
    before_all = float(np.concatenate(errors_before).mean())
    row = compare(name, (1 - LOWERED) * before_all, folds)
    every = np.array([gain for each in gains.values() for gain in each])
    lowest, median, highest = np.quantile(every, (0.1, 0.5, 0.9)).tolist()
    found_spread = {
        "error_before": before_all,
        "error_after": row.model.mape,
        "gain_quantiles_10_50_90": [lowest, median, highest],
        "better": float((every > 0).mean()),
        "mean_gain_by_engine": {engine: float(np.mean(each)) for engine, each in gains.items()},
    }
    print(f"  before {before_all:.1%}; {found_spread}", flush=True)
    return row, found_spread


def _third(samples: Sequence[Sample], seed: int) -> tuple[list[Sample], list[Sample]]:
    """A third of the layers, and the rest."""
    order = np.random.default_rng(seed).permutation(len(samples))
    number = round(len(samples) / 3)
    return [samples[index] for index in order[:number]], [samples[index] for index in order[number:]]


def _kernel(sample: Sample, dataset: Dataset) -> Kernel:
    return Kernel(sample.work, sample.measured_us, dataset.timing)


def _part(dataset: Dataset, samples: Sequence[Sample]) -> Measured:
    return Measured.of(dataclasses.replace(dataset, samples=tuple(samples)))


def _errors(part: Measured, constants: Constants) -> Array:
    return np.abs(part.predict(constants) / part.measured_us - 1)
