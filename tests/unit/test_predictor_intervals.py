"""The quantiles of the benchmark of predictions, on made-up errors: needs no measurements."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trtopt.hardware.spec import find_gpu

FOLDER = Path(__file__).parents[2] / "benchmarks" / "predictor"


@pytest.fixture(scope="module")
def found() -> Any:
    pytest.importorskip("scipy")
    sys.path.insert(0, str(FOLDER))
    try:
        return importlib.import_module("intervals")
    finally:
        sys.path.pop(0)


def held(found: Any, name: str, ratios: Any, gpu: str = "T4") -> Any:
    values = np.asarray(ratios)
    groups = np.array([f"{name} {index // 2}" for index in range(len(values))])
    return found.HeldBack(name, find_gpu(gpu), True, np.array(["gemm"] * len(values)), groups, values)


@pytest.mark.parametrize("number", [9, 19, 99])
def test_of_the_next_kernel_four_fifths_are_inside(found: Any, number: int) -> None:
    draws = np.random.default_rng(0).normal(1.0, 0.1, (3000, number + 1))
    ranges = [found.bounds([held(found, "a", draw[:-1])]) for draw in draws]
    inside = np.mean([low <= draw[-1] <= high for (low, high), draw in zip(ranges, draws, strict=True)])
    assert inside == pytest.approx(0.8, abs=0.03)


def test_every_dataset_has_the_same_weight(found: Any) -> None:
    few, many = np.linspace(0.5, 0.7, 50), np.linspace(0.9, 1.1, 5000)
    sets = [held(found, "few", few), held(found, "many", many)]
    low, high = found.bounds(sets)
    assert 0.53 < low < 0.55 and 1.05 < high < 1.07
    assert found.inside(sets, low, high) == pytest.approx(0.8, abs=0.02)


def test_coverage_is_of_kernels_the_range_is_not_from(found: Any) -> None:
    random = np.random.default_rng(1)
    sets = [held(found, name, random.normal(1.0, 0.1, 400)) for name in ("a", "b")]
    other = held(found, "c", random.normal(2.0, 0.1, 400), "L4")
    item = found.coverage(True, "gemm", [*sets, other])
    assert 0.75 < item.other_half < 0.85 and item.interval.kernels == 1200
    assert item.left_out["c"] == 0 and item.by_dataset["c"] > 0.5
    assert {"T4", "L4"} <= set(item.interval.gpus)


def test_a_gpu_of_few_kernels_does_not_count_as_measured(found: Any) -> None:
    sets = [held(found, "a", np.full(30, 1.0)), held(found, "b", np.full(4, 1.0), "L4")]
    assert "L4" not in found.coverage(True, "gemm", sets).interval.gpus
