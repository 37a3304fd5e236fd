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
        ("h100_sxm", "H100-SXM5-80GB", "fp8", 20, 0, 0.06),
        ("h100_sxm", "H100-SXM5-80GB", "fp8_block", 10, 257, 0.18),
        ("rtx_pro_6000_server", "RTX-PRO-6000-BW-Server", "fp8", 20, 0, 0.085),
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


def test_what_was_taken_off_a_product_is_added_where_its_input_was_cold(monkeypatch: pytest.MonkeyPatch) -> None:
    """16384 x 768: input and operand fit into the L2 cache of 128 MiB; all that 65536 columns touch does not."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "predictor"))
    from dataclasses import replace

    from fitting import Measured
    from quantized_data import quantized_table

    table = quantized_table("rtx_pro_6000_server", "RTX-PRO-6000-BW-Server", "fp8", 20)
    gemms = [sample.work.gemm for sample in table.samples]
    constants = constants_for(table.gpu)
    added = []
    for n in (768, 65536):
        sample = next(
            each
            for each, gemm in zip(table.samples, gemms, strict=True)
            if gemm is not None and (gemm.m, gemm.n, gemm.k) == (16384, n, 768)
        )
        alone = replace(sample, beside=None, taken_off=None)
        with_both, product = (
            Measured.of(replace(table, samples=(each,))).predict(constants)[0] for each in (sample, alone)
        )
        added.append(with_both - product)
    assert abs(added[0]) < 1e-6 < 5 < added[1]
