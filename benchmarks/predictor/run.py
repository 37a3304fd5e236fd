"""Scores the performance model against a naive roofline and a fit of three constants, on kernels it was not fitted to.

    python benchmarks/predictor/run.py [--out results.json]

Every row is fitted and scored here, in one run, with the procedures `fit.py` writes the shipped constants with; the
latencies of BERT are predicted with the shipped constants, which saw none of them. Needs the folder `profiles` (see
`data.py`).
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import scipy
from data import Dataset, deepbench, engines_of, gemm_table, tensorrt_layers
from end_to_end import lines, score_end_to_end
from fit import TABLES, engine_constants, layer_constants, product_constants, unseen_constants, v100_constants
from fitting import START, Array, Measured, Score, score
from readme import replace_table
from scipy.optimize import least_squares

from trtopt.roofline.constants import Constants

HERE = Path(__file__).parent
SPLIT_SEEDS = (0, 1, 2)
"""Seeds of the halves; the figure is the mean over them."""


@dataclass(frozen=True)
class Row:
    """One line of the table. ``limit`` is what the model has to reach."""

    name: str
    limit: float
    model: Score
    naive: Score
    three: Score


Predictor = Callable[[Measured], Array]
Fitter = Callable[[Sequence[Measured]], Predictor]


def naive(part: Measured) -> Array:
    """max(flop / peak, bytes / bandwidth), without any constant."""
    batch = part.batch
    moved = np.array([work.bytes for work in batch.works]) / batch.chip.bandwidth
    rate = np.where(batch.product >= 0, batch.rate, batch.fp32_rate)
    return np.asarray(np.maximum(batch.flop / rate, moved))


def three_constants(parts: Sequence[Measured]) -> Predictor:
    """Launch, share of the peak and share of the bandwidth, fitted to the same kernels with the same loss."""

    def predict(part: Measured, free: Array) -> Array:
        batch = part.batch
        moved = np.array([work.bytes for work in batch.works]) / batch.chip.bandwidth
        rate = np.where(batch.product >= 0, batch.rate, batch.fp32_rate)
        return np.asarray(np.exp(free[0]) + np.maximum(batch.flop / rate / np.exp(free[1]), moved / np.exp(free[2])))

    def residuals(free: Array) -> Array:
        return np.concatenate([predict(part, free) / part.measured_us - 1 for part in parts])

    found: Any = least_squares(residuals, np.log([4.0, 0.6, 0.7]), loss="soft_l1", f_scale=0.05)
    return lambda part: predict(part, found.x)


def compare(name: str, limit: float, folds: Sequence[tuple[Predictor, Sequence[Measured], Measured]]) -> Row:
    """Score predictors on what each was not fitted to.

    A fold is a predictor, what it was fitted to, and what it is scored on.
    """
    measured = np.concatenate([test.measured_us for _, _, test in folds])
    model = np.concatenate([predict(test) for predict, _, test in folds])
    three = np.concatenate([three_constants(train)(test) for _, train, test in folds])
    plain = np.concatenate([naive(test) for _, _, test in folds])
    row = Row(name, limit, score(model, measured), score(plain, measured), score(three, measured))
    print(line(row), flush=True)
    return row


def left_out_engines(layers: Dataset, limit: float, fitted: Callable[[frozenset[str]], Predictor]) -> Row:
    """Each engine predicted from the others."""
    engines = frozenset(engines_of(layers))
    folds = []
    for engine in sorted(engines):
        rest = engines - {engine}
        folds.append((fitted(rest), [Measured.of(layers, rest)], Measured.of(layers, [engine])))
    return compare(f"{layers.gpu.name}: TensorRT layers, one engine left out", limit, folds)


def halves(dataset: Dataset, seed: int) -> tuple[frozenset[str], frozenset[str]]:
    """The groups of a dataset in two halves."""
    groups = sorted({sample.group for sample in dataset.samples})
    order = np.random.default_rng(seed).permutation(len(groups))
    first = frozenset(groups[index] for index in order[: len(groups) // 2])
    return first, frozenset(groups) - first


def half_and_half(dataset: Dataset, limit: float, fitted: Callable[[frozenset[str]], Predictor], what: str) -> Row:
    """Half of the groups predicted from the other half, for each seed."""
    folds = []
    for seed in SPLIT_SEEDS:
        train, test = halves(dataset, seed)
        folds.append((fitted(train), [Measured.of(dataset, train)], Measured.of(dataset, test)))
    return compare(f"{dataset.gpu.name}: {what}, half left out", limit, folds)


def layer_rows(tables: dict[str, Dataset]) -> list[Row]:
    """TensorRT's layers: engines left out, and from one GPU to the other."""
    a100, laptop = tensorrt_layers("A100-PCIe-80GB"), tensorrt_layers("RTX-3060-Laptop")
    products = product_constants(tables["a100_sxm"])
    rows = [
        left_out_engines(a100, 0.13, lambda groups: _predictor(layer_constants(a100, products, groups))),
        left_out_engines(laptop, 0.18, lambda groups: _predictor(engine_constants(laptop, groups))),
    ]
    for known, other in ((a100, laptop), (laptop, a100)):
        train = [Measured.of(known)]
        fold = (_predictor(engine_constants(known)), train, Measured.of(other))
        rows.append(compare(f"{other.gpu.name}: TensorRT layers, fitted to those of {known.gpu.name}", 0.25, [fold]))
    return rows


def table_rows(tables: dict[str, Dataset]) -> list[Row]:
    """BF16 matrix products: half of the (n, k) pairs, and whole GPUs left out."""
    limits = {"a100_sxm": (0.08, 0.13), "h100_sxm": (0.055, 0.13), "rtx_pro_6000_server": (0.12, 0.22)}
    rows = []
    for name, table in tables.items():
        half, _ = limits[name]
        rows.append(
            half_and_half(table, half, lambda groups, t=table: _predictor(product_constants(t, groups)), "GEMM")
        )
    for name, table in tables.items():
        rest = [other for key, other in tables.items() if key != name]
        fold = (_predictor(unseen_constants(rest)), [Measured.of(other) for other in rest], Measured.of(table))
        rows.append(compare(f"{table.gpu.name}: GEMM, GPU left out", limits[name][1], [fold]))
    return rows


def deepbench_row(bench: list[Dataset], part: Dataset) -> Row:
    """DeepBench's products or convolutions, from half of both."""
    folds = []
    for seed in SPLIT_SEEDS:
        splits = [halves(each, seed) for each in bench]
        known = frozenset().union(*(train for train, _ in splits))
        test = next(rest for each, (_, rest) in zip(bench, splits, strict=True) if each is part)
        fitted = [Measured.of(each, known) for each in bench]
        folds.append((_predictor(v100_constants(bench, known)), fitted, Measured.of(part, test)))
    return compare(f"{part.gpu.name}: {part.name}, half left out", 0.20, folds)


def _from_products(table: Dataset, groups: frozenset[str]) -> Predictor:
    return _predictor(product_constants(table, groups))


def _predictor(constants: Constants) -> Predictor:
    return lambda part: part.predict(constants)


def below_bound(datasets: Sequence[Dataset]) -> dict[str, int]:
    """Measured kernels that were faster than the bound: what is wrong in the bound, or in the data."""
    counts = {}
    for dataset in datasets:
        part = Measured.of(dataset)
        bound = part.batch.predict(START).bound
        counts[dataset.name] = int((part.measured_us < bound).sum())
    return counts


def line(row: Row) -> str:
    """A row of the README's table."""
    cells = [row.name, f"{row.limit:.1%}"]
    cells += [f"{item.mape:.1%}" for item in (row.model, row.three, row.naive)]
    cells += [f"{row.model.ratio:.2f}", f"{row.model.spearman:.3f}", str(row.model.kernels)]
    return f"| {' | '.join(cells)} | {'yes' if row.model.mape <= row.limit else 'NO'} |"


_HEAD = "| | limit | error | three constants | naive roofline | sum | Spearman | kernels | met |"


def main() -> None:
    """Score everything, print the tables, write the results and the README."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=HERE / "results.json")
    args = parser.parse_args()
    tables = {name: gemm_table(name, gpu) for name, gpu in TABLES.items()}
    bench = [deepbench("gemm"), deepbench("conv")]
    rows = layer_rows(tables) + table_rows(tables)
    rows += [deepbench_row(bench, part) for part in bench]
    layers = [tensorrt_layers("A100-PCIe-80GB"), tensorrt_layers("RTX-3060-Laptop")]
    results: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "machine": "2-core x86-64, no GPU",
        "python": platform.python_version(),
        "numpy": np.__version__,
        "scipy": scipy.__version__,
        "rows": [dataclasses.asdict(row) for row in rows],
        "end_to_end": score_end_to_end(),
        "measured_below_bound": below_bound([*layers, *tables.values(), *bench]),
    }
    args.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    end_to_end = lines(results["end_to_end"])
    print("\n".join(end_to_end))
    replace_table("scores", [_HEAD, "|---" * 9 + "|", *(line(row) for row in rows)])
    replace_table("end to end", end_to_end)
    print(results["measured_below_bound"])


if __name__ == "__main__":
    main()
