"""The shipped constants on kernels of an H200 and an H100 that none was fitted to (``predictor/measured``)."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from trtopt.roofline.constants import constants_for

pytest.importorskip("scipy", reason="the benchmark's fits need SciPy")


@pytest.fixture
def scores(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """``measured_rows.py``: the benchmarks are no package."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks" / "predictor"))
    import measured_rows

    return measured_rows


@pytest.mark.parametrize("table", ["h200", "h100"])
@pytest.mark.parametrize(
    ("name", "limit"),
    [
        ("products, BF16 and FP16", 0.08),
        ("products, FP8", 0.08),
        ("attention, no mask (cuDNN)", 0.18),
        ("attention, causal (cuDNN)", 0.12),
        ("attention, one query (cuDNN)", 0.18),
        ("element-wise", 0.15),
    ],
)
def test_kernels_that_nothing_was_fitted_to(scores: ModuleType, name: str, limit: float, table: str) -> None:
    found, predicted = scores.predictions(next(part for part in scores.PARTS if part.name.startswith(name)), table)
    assert len(predicted) > 20
    assert np.mean(np.abs(predicted / found.measured_us - 1)) < limit
    bound = found.batch.predict(constants_for(found.dataset.gpu)).bound
    assert (found.measured_us >= bound).all()


def test_one_more_kernel_behind_a_product_costs_what_is_predicted(scores: ModuleType) -> None:
    added = scores.Measured.of(scores.behind_products("h200"))
    predicted = added.predict(constants_for(added.dataset.gpu))
    assert len(predicted) == 14
    assert abs(predicted.sum() / added.measured_us.sum() - 1) < 0.1
    assert np.mean(np.abs(predicted / added.measured_us - 1)) < 0.2
