"""The table of GPUs and the names they are found by."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from trtopt.errors import UsageError
from trtopt.hardware.spec import all_gpus, find_gpu

TABLE = Path(__file__).parents[3] / "shared" / "gpu_specs.csv"


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("L4", "L4"),
        ("l4", "L4"),
        ("RTX-4090", "RTX-4090"),
        ("rtx 4090", "RTX-4090"),
        ("RTX_4090", "RTX-4090"),
        ("4090", "RTX-4090"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("V100", "V100-SXM2-16GB"),
        ("A100", "A100-SXM4-80GB"),
        ("h100", "H100-SXM5-80GB"),
        ("H200", "H200-SXM-141GB"),
        ("GH200", "GH200-96GB"),
        ("RTX PRO 6000", "RTX-PRO-6000-BW-WS"),
        ("rtxpro6000", "RTX-PRO-6000-BW-WS"),
        ("Orin", "Jetson-AGX-Orin-64GB"),
        ("Thor", "Jetson-AGX-Thor-T5000"),
        ("GB200", "GB200-per-GPU"),
        ("H100 NVL", "H100-NVL-94GB"),
        ("A10", "A10"),
        ("A100-PCIe-40", "A100-PCIe-40GB"),
    ],
)
def test_a_gpu_is_found_by_the_names_people_use(asked: str, found: str) -> None:
    assert find_gpu(asked).name == found


def test_every_gpu_is_found_by_its_own_name() -> None:
    for gpu in all_gpus():
        assert find_gpu(gpu.name.lower().replace("-", " ")) is gpu


def test_an_ambiguous_name_lists_the_candidates() -> None:
    with pytest.raises(UsageError, match="A100-SXM4-40GB, A100-SXM4-80GB"):
        find_gpu("A100-SXM4")


@pytest.mark.parametrize("name", ["RTX 4099", "", "quantum"])
def test_an_unknown_name_is_a_usage_error_that_names_the_table(name: str) -> None:
    with pytest.raises(UsageError) as caught:
        find_gpu(name)
    assert "RTX-4090" in caught.value.remedy


def test_an_unknown_name_gets_the_nearest_first() -> None:
    with pytest.raises(UsageError) as caught:
        find_gpu("RTX 4099")
    assert caught.value.remedy.startswith("did you mean RTX-4090")


def test_rates_follow_from_units_and_clock() -> None:
    """Rate = SMs x clock x multiply-adds per clock x 2, within the rounding of datasheets."""
    units = {"fp32": "fp32", "tf32": "tf32", "fp16": "fp16_acc32", "int8": "int8", "fp8": "fp8_acc32"}
    for gpu in all_gpus():
        for dtype, unit in units.items():
            if dtype not in gpu.tflops or unit not in gpu.fma_per_clock_per_sm:
                continue
            clock = gpu.clock_cuda_mhz if dtype == "fp32" else gpu.clock_tensor_mhz
            rate = gpu.sm * clock * 1e6 * gpu.fma_per_clock_per_sm[unit] * 2 / 1e12
            assert rate == pytest.approx(gpu.tflops[dtype], rel=0.035), (gpu.name, dtype)


def test_every_gpu_has_a_source_and_plausible_numbers() -> None:
    assert len({gpu.name for gpu in all_gpus()}) == len(all_gpus()) >= 31
    for gpu in all_gpus():
        assert gpu.source
        assert 10 <= gpu.sm <= 256
        assert 100 <= gpu.bandwidth_gbs <= 10000
        assert gpu.compute_capability in {"7.0", "7.5", "8.0", "8.6", "8.7", "8.9", "9.0", "10.0", "11.0", "12.0"}


@pytest.mark.shared
@pytest.mark.skipif(not TABLE.exists(), reason="gpu_specs.csv is not beside the checkout")
def test_the_table_holds_every_number_that_was_collected() -> None:
    plain = {
        "sm": "sm",
        "clk_cuda_mhz": "clock_cuda_mhz",
        "clk_tensor_mhz": "clock_tensor_mhz",
        "mem_gb": "memory_gb",
        "bw_gbs": "bandwidth_gbs",
        "l2_mib": "l2_mib",
        "tdp_w": "tdp_w",
    }
    with open(TABLE, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["gpu"] for row in rows] == [gpu.name for gpu in all_gpus()]
    for row, gpu in zip(rows, all_gpus(), strict=True):
        assert gpu.compute_capability == row["cc"]
        assert gpu.sparse_2_4 == (row["sparse2to4"] == "yes")
        for column, field in plain.items():
            assert float(row[column]) == getattr(gpu, field)
        for prefix, field in (("fma_", "fma_per_clock_per_sm"), ("tf_", "tflops")):
            numbers = {key.removeprefix(prefix): float(row[key]) for key in row if key.startswith(prefix) and row[key]}
            assert numbers == getattr(gpu, field), gpu.name
