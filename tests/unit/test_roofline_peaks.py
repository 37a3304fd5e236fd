"""What datasheets promise, by the type of the arithmetic."""

from __future__ import annotations

import pytest
from kernels import DTYPES, combinations

from trtopt.errors import UsageError
from trtopt.hardware.spec import all_gpus, find_gpu, ridge_flop_per_byte, supports
from trtopt.roofline.peaks import cuda_core_rate, peak_rate


def test_every_supported_type_has_a_peak_and_a_ridge_and_others_are_usage_errors() -> None:
    for gpu in all_gpus():
        for dtype in DTYPES:
            if supports(gpu, dtype):
                assert peak_rate(gpu, dtype) > 0
                assert ridge_flop_per_byte(gpu, dtype) == pytest.approx(
                    peak_rate(gpu, dtype) / (gpu.bandwidth_gbs * 1e3)
                )
            else:
                with pytest.raises(UsageError, match=f"{gpu.name} has no units for {dtype}"):
                    peak_rate(gpu, dtype)
                with pytest.raises(UsageError):
                    ridge_flop_per_byte(gpu, dtype)


def test_the_error_names_the_types_the_gpu_has() -> None:
    with pytest.raises(UsageError) as caught:
        peak_rate(find_gpu("T4"), "fp8")
    assert caught.value.remedy == "it has: fp32, fp16, int8"
    assert caught.value.where == "--precision"


@pytest.mark.parametrize(("gpu", "has"), [("V100", False), ("T4", False), ("A100", True), ("RTX 4090", True)])
def test_bf16_has_the_rate_of_fp16_from_ampere_on(gpu: str, has: bool) -> None:
    spec = find_gpu(gpu)
    assert supports(spec, "bf16") is has
    if has:
        assert peak_rate(spec, "bf16") == peak_rate(spec, "fp16")


@pytest.mark.parametrize(
    ("gpu", "factor"),
    [("RTX 4090", 2), ("RTX 3090", 2), ("RTX 2080Ti", 2), ("RTX 3060 Laptop", 2), ("A100", 1), ("H100", 1), ("T4", 1)],
)
def test_sums_in_fp16_double_the_rate_on_geforce_only(gpu: str, factor: int) -> None:
    spec = find_gpu(gpu)
    assert peak_rate(spec, "fp16", accumulate_fp16=True) == factor * peak_rate(spec, "fp16")


def test_every_gpu_with_a_rate_for_fp16_sums_has_one_for_fp32_sums() -> None:
    for gpu in all_gpus():
        assert "fp16_acc16" not in gpu.fma_per_clock_per_sm or "fp16_acc32" in gpu.fma_per_clock_per_sm, gpu.name


def test_how_products_are_summed_matters_for_fp16_alone() -> None:
    for gpu, dtype in combinations():
        if dtype != "fp16":
            assert peak_rate(gpu, dtype, accumulate_fp16=True) == peak_rate(gpu, dtype)


def test_narrower_types_are_never_slower() -> None:
    order = ("fp32", "tf32", "fp16", "fp8", "fp4")
    for gpu in all_gpus():
        rates = [peak_rate(gpu, dtype) for dtype in order if supports(gpu, dtype)]  # type: ignore[arg-type]
        assert rates == sorted(rates), gpu.name
        assert cuda_core_rate(gpu) == rates[0]
