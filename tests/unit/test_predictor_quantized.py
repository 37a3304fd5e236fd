"""The measured products of 8 and 4 bits beside the checkout, against the shipped constants (in-sample)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from trtopt.roofline.constants import constants_for

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.shared,
    pytest.mark.skipif(
        not (ROOT.parent / "shared" / "profiles").is_dir(), reason="the folder profiles is not beside the checkout"
    ),
]


@pytest.mark.parametrize(
    ("name", "gpu", "item", "floor_us", "least_m", "limit"),
    (
        ("h100_sxm", "H100-SXM5-80GB", "fp8", 10, 0, 0.08),
        ("h100_sxm", "H100-SXM5-80GB", "fp8_block", 10, 257, 0.18),
        ("rtx_pro_6000_server", "RTX-PRO-6000-BW-Server", "fp8", 20, 0, 0.125),
        ("rtx_pro_6000_server", "RTX-PRO-6000-BW-Server", "nvfp4", 10, 257, 0.14),
        ("a100_sxm", "A100-SXM4-80GB", "int8_wo", 20, 0, 0.12),
        ("a100_sxm", "A100-SXM4-80GB", "int4_wo", 20, 0, 0.13),
        ("a100_sxm", "A100-SXM4-80GB", "sq", 20, 0, 0.18),
    ),
)
def test_error_of_the_shipped_constants(
    monkeypatch: pytest.MonkeyPatch, name: str, gpu: str, item: str, floor_us: float, least_m: int, limit: float
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "predictor"))
    from fitting import Measured
    from quantized_data import quantized_table

    part = Measured.of(quantized_table(name, gpu, item, floor_us, least_m), most=3000)
    constants = constants_for(part.dataset.gpu)
    predicted = part.predict(constants)
    assert np.mean(np.abs(predicted / part.measured_us - 1)) < limit
    assert 0.93 < predicted.sum() / part.measured_us.sum() < 1.07
    assert np.all(predicted >= part.batch.predict(constants).bound)
