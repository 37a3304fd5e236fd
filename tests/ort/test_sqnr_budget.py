"""A search whose budget is an SQNR: nothing is said of a largest drop that nobody gave."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from small_models import samples, save_small

from trtopt import api
from trtopt.errors import UsageError
from trtopt.report.schema.build import BuildReport

SHAPE = (3, 8, 8)


def optimized(folder: Path, **options: Any) -> BuildReport:
    """TensorRT's regions are judged by the model, and need no compiler."""
    save_small(folder)
    return api.optimize(
        folder / "model.onnx",
        calib={"x": samples(4, SHAPE)},
        metric="sqnr",
        backend="tensorrt",
        output=str(folder / "out.onnx"),
        cache_dir=str(folder / "cache"),
        **options,
    )


@pytest.mark.parametrize("options", [{"precision": "auto"}, {"precision": "fp16", "sparse": True}])
def test_an_sqnr_is_a_budget_of_its_own(tmp_path: Path, options: dict[str, Any]) -> None:
    report = optimized(tmp_path, min_sqnr_db=20.0, **options)
    assert not report.gate_failures and report.config["max_accuracy_drop"] is None
    assert report.accuracy is not None and report.accuracy.metric is not None
    assert report.accuracy.metric.optimized >= 20
    if report.search is not None:
        assert not report.search.is_default_budget and report.search.min_sqnr_db == pytest.approx(20)


def test_an_sqnr_that_does_not_hold_is_the_gate_that_failed(tmp_path: Path) -> None:
    report = optimized(tmp_path, precision="auto", min_sqnr_db=300.0)
    assert report.gate_failures and all("--max-accuracy-drop" not in failure for failure in report.gate_failures)


@pytest.mark.parametrize("options", [{"precision": "auto"}, {"precision": "fp16", "sparse": True}])
def test_a_search_by_an_sqnr_that_nobody_bounds_says_so(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="no budget") as caught:
        optimized(tmp_path, **options)
    assert "--max-accuracy-drop" not in str(caught.value) and caught.value.remedy == "give --min-sqnr-db X"


def test_a_largest_drop_that_was_given_is_still_blamed(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--max-accuracy-drop cannot bound the metric sqnr"):
        optimized(tmp_path, precision="auto", max_accuracy_drop=0.01, min_sqnr_db=20.0)
