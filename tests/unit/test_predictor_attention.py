"""The measured attention kernels beside the checkout, as the shipped constants predict them: in-sample, so that a
change of the model that forgets to fit again is seen."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from trtopt.roofline.constants import constants_for

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.shared,
    pytest.mark.skipif(
        not (ROOT.parent / "shared" / "profiles").is_dir(), reason="profiles is not beside the checkout"
    ),
]


@pytest.mark.parametrize(
    ("table", "rows", "most"),
    [("encoder", 5836, 0.10), ("context", 14815, 0.11), ("generation", 14268, 0.16), ("cudnn", 25, 0.08)],
)
def test_attention_is_predicted_as_measured(
    table: str, rows: int, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H100: no mask, prompts with RoPE and cache, one query against a cache; GB200, to which nothing was fitted."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "predictor"))
    import attention_data
    from fitting import Measured

    dataset = attention_data.cudnn(False) if table == "cudnn" else getattr(attention_data, table)("h100_sxm")
    assert len(dataset.samples) == rows
    part = Measured.of(dataset, most=1000)
    error = np.abs(part.predict(constants_for(dataset.gpu)) / part.measured_us - 1)
    assert error.mean() < most
