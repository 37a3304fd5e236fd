"""Scores of the model of attention on rows, and on GPUs, that it was not fitted to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attention_data import GPUS, context, cudnn
from attention_fit import attention_constants, attention_tables, stiff_constants
from data import Dataset
from fit import unseen_constants
from fitting import ATTENTION_FIELDS, Measured, log_mean
from scoring import SPLIT_SEEDS, Fold, Row, compare, halves, predictor

from trtopt.hardware.spec import find_gpu
from trtopt.roofline.constants import Constants, constants_for

_LIMITS = {"encoder": (0.12, 0.18), "context": (0.15, 0.18), "generation": (0.18, 0.22)}
"""Half of the shapes left out; the GPU left out."""


def attention_rows(products: Mapping[str, Dataset]) -> list[Row]:
    """Every table from half of its heads and batches, from the other GPUs, and what nothing was fitted to.

    Args:
        products: The tables of matrix products, for the constants of a GPU that was never measured.
    """
    tables = attention_tables()
    bases = {name: constants_for(find_gpu(gpu)) for name, gpu in GPUS.items()}
    rows = [row for name, parts in tables.items() for row in _halves(parts, bases[name])]
    for name, parts in tables.items():
        rest = {other: found for other, found in tables.items() if other != name}
        own = unseen_constants([products[other] for other in rest])
        found = predictor(log_mean(stiff_constants(rest, bases), ATTENTION_FIELDS, own))
        for table in parts:
            train = [Measured.of(other, most=3000) for group in rest.values() for other in group]
            rows.append(compare(_title(table, "GPU left out"), _limit(table)[1], [(found, train, Measured.of(table))]))
    for name in ("h100_sxm", "rtx_pro_6000_server"):
        fold = _fold(tables[name], bases[name], context(name, windowed=True))
        rows.append(compare(f"{find_gpu(GPUS[name]).name}: windowed context, nothing fitted to it", 0.25, [fold]))
    for causal in (False, True):
        fold = _fold(tables["h100_sxm"], bases["h100_sxm"], cudnn(causal))
        what = "causal" if causal else "no mask"
        rows.append(compare(f"GB200: SDPA of cuDNN, {what}, BF16 and FP8, nothing fitted to it", 0.12, [fold]))
    return rows


def _halves(parts: Sequence[Dataset], base: Constants) -> list[Row]:
    """All tables of a GPU are fitted together, each predicted from half of its groups."""
    folds: dict[str, list[Fold]] = {part.name: [] for part in parts}
    for seed in SPLIT_SEEDS:
        splits = [halves(part, seed) for part in parts]
        known = [_only(part, train) for part, (train, _) in zip(parts, splits, strict=True)]
        found = predictor(attention_constants(known, base))
        for part, (train, test) in zip(parts, splits, strict=True):
            folds[part.name].append((found, [Measured.of(part, train)], Measured.of(part, test)))
    return [compare(_title(part, "half left out"), _limit(part)[0], folds[part.name]) for part in parts]


def _only(part: Dataset, groups: frozenset[str]) -> Dataset:
    samples = tuple(sample for sample in part.samples if sample.group in groups)
    return Dataset(part.name, part.gpu, samples, part.timing)


def _fold(tables: Sequence[Dataset], base: Constants, test: Dataset) -> Fold:
    train = [Measured.of(table, most=3000) for table in tables]
    return predictor(attention_constants(tables, base)), train, Measured.of(test)


def _title(part: Dataset, what: str) -> str:
    return f"{part.gpu.name}: attention, {part.name.split()[0]}, {what}"


def _limit(part: Dataset) -> tuple[float, float]:
    return _LIMITS[part.name.split()[0]]
