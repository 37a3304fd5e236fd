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
from pathlib import Path
from typing import Any

import numpy as np
import scipy
from attention_rows import attention_rows
from calibration_rows import calibration_rows
from data import TABLES, Dataset, deepbench, engines_of, gemm_table, taking_turns, tensorrt_layers
from end_to_end import lines, score_end_to_end
from fit import engine_constants, layer_constants, product_constants, unseen_constants, v100_constants
from fitting import START, Measured
from intervals import write
from norms_rows import norm_rows
from quantized_rows import quantized_rows
from readme import replace_table
from scoring import SPLIT_SEEDS, Predictor, Row, compare, halves, line, predictor

HERE = Path(__file__).parent


def left_out_engines(layers: Dataset, limit: float, fitted: Callable[[frozenset[str]], Predictor]) -> Row:
    """Each engine predicted from the others."""
    engines = frozenset(engines_of(layers))
    folds = []
    for engine in sorted(engines):
        rest = engines - {engine}
        folds.append((fitted(rest), [Measured.of(layers, rest)], Measured.of(layers, [engine])))
    return compare(f"{layers.gpu.name}: TensorRT layers, one engine left out", limit, folds)


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
        left_out_engines(a100, 0.13, lambda groups: predictor(layer_constants(a100, products, groups))),
        left_out_engines(laptop, 0.18, lambda groups: predictor(engine_constants(laptop, groups))),
    ]
    for known, other in ((a100, laptop), (laptop, a100)):
        train = [Measured.of(known)]
        fold = (predictor(engine_constants(known)), train, Measured.of(other))
        rows.append(compare(f"{other.gpu.name}: TensorRT layers, fitted to those of {known.gpu.name}", 0.25, [fold]))
    return rows


def table_rows(tables: dict[str, Dataset]) -> list[Row]:
    """BF16 matrix products: half of the (n, k) pairs, and whole GPUs left out."""
    limits = {"a100_sxm": (0.08, 0.13), "h100_sxm": (0.055, 0.13), "rtx_pro_6000_server": (0.12, 0.22)}
    rows = []
    for name, table in tables.items():
        half, _ = limits[name]
        rows.append(half_and_half(table, half, lambda groups, t=table: predictor(product_constants(t, groups)), "GEMM"))
    for name, table in tables.items():
        rest = [other for key, other in tables.items() if key != name]
        test = Measured.of(taking_turns(table))
        fold = (predictor(unseen_constants(rest)), [Measured.of(other) for other in rest], test)
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
        folds.append((predictor(v100_constants(bench, known)), fitted, Measured.of(part, test)))
    return compare(f"{part.gpu.name}: {part.name}, half left out", 0.20, folds)


def _from_products(table: Dataset, groups: frozenset[str]) -> Predictor:
    return predictor(product_constants(table, groups))


def below_bound(datasets: Sequence[Dataset]) -> dict[str, int]:
    """Measured kernels that were faster than the bound: what is wrong in the bound, or in the data."""
    counts = {}
    for dataset in datasets:
        part = Measured.of(dataset)
        bound = part.batch.predict(START).bound
        counts[dataset.name] = int((part.measured_us < bound).sum())
    return counts


def all_rows() -> list[Row]:
    """Every row: each fits and predicts what it was not fitted to."""
    tables = {name: gemm_table(name, gpu) for name, gpu in TABLES.items()}
    bench = [deepbench("gemm"), deepbench("conv")]
    rows = layer_rows(tables) + table_rows(tables)
    rows += [deepbench_row(bench, part) for part in bench]
    return [*rows, *attention_rows(tables), *quantized_rows(), *norm_rows()]


_HEAD = "| | limit | error | three constants | naive roofline | sum | Spearman | kernels | met |"


def _figures(row: Row) -> dict[str, Any]:
    """A row without its kernels."""
    scores = {"model": row.model, "naive": row.naive, "three": row.three}
    return {"name": row.name, "limit": row.limit, **{key: dataclasses.asdict(item) for key, item in scores.items()}}


def main() -> None:
    """Score everything, print the tables, write the results and the README."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=HERE / "results.json")
    args = parser.parse_args()
    rows = all_rows()
    tables = [gemm_table(name, gpu) for name, gpu in TABLES.items()]
    bench = [deepbench("gemm"), deepbench("conv")]
    calibrated, spread = calibration_rows()
    layers = [tensorrt_layers("A100-PCIe-80GB"), tensorrt_layers("RTX-3060-Laptop")]
    results: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "machine": "2-core x86-64, no GPU",
        "python": platform.python_version(),
        "numpy": np.__version__,
        "scipy": scipy.__version__,
        "rows": [_figures(row) for row in (*rows, *calibrated)],
        "calibration": spread,
        "intervals": [dataclasses.asdict(item) for item in write(rows)],
        "end_to_end": score_end_to_end(),
        "measured_below_bound": below_bound([*layers, *tables, *bench]),
    }
    args.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    end_to_end = lines(results["end_to_end"])
    print("\n".join(end_to_end))
    replace_table("scores", [_HEAD, "|---" * 9 + "|", *(line(row) for row in (*rows, *calibrated))])
    replace_table("end to end", end_to_end)
    print(results["measured_below_bound"])


if __name__ == "__main__":
    main()
