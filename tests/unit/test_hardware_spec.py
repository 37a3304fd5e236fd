"""The table of GPUs and the names they are found by."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest

from trtopt.errors import UsageError
from trtopt.hardware.spec import BEST_KNOWN, SHORT_NAMES, UNITS, all_gpus, clock_mhz, find_gpu, normalized

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
        ("RTX 4070", "RTX-4070"),
        ("RTX 4070 Ti", "RTX-4070-Ti"),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", "RTX-4070-Ti-Super"),
        ("3060", "RTX-3060-12GB"),
        ("A6000", "RTX-A6000"),
        ("Jetson AGX Orin", "Jetson-AGX-Orin-64GB"),
        ("Jetson Orin Nano", "Jetson-Orin-Nano-8GB"),
        ("Orin NX 8GB", "Jetson-Orin-NX-8GB"),
        ("H20", "H20-96GB"),
        ("A2", "A2"),
        ("DGX Spark", "GB10"),
    ],
)
def test_a_gpu_is_found_by_the_names_people_use(asked: str, found: str) -> None:
    assert find_gpu(asked).name == found


def test_every_gpu_is_found_by_its_own_name() -> None:
    for gpu in all_gpus():
        assert find_gpu(gpu.name.lower().replace("-", " ")) is gpu


@pytest.mark.parametrize("capability", sorted({gpu.compute_capability for gpu in all_gpus()}))
def test_a_compute_capability_is_a_name_of_the_best_known_gpu_that_has_it(capability: str) -> None:
    digits = capability.replace(".", "")
    for asked in (capability, f"sm_{digits}", f"sm{digits}", f"SM {capability}"):
        found = find_gpu(asked)
        assert (found.name, found.compute_capability) == (BEST_KNOWN[capability], capability)


@pytest.mark.parametrize("asked", ["89", "sm_61", "8.4", "sm_8"])
def test_other_numbers_are_no_compute_capability(asked: str) -> None:
    with pytest.raises(UsageError):
        find_gpu(asked)


def test_short_names_are_names_of_gpus_of_the_table() -> None:
    assert {*SHORT_NAMES.values(), *BEST_KNOWN.values()} <= {gpu.name for gpu in all_gpus()}


def test_an_ambiguous_name_lists_the_candidates() -> None:
    with pytest.raises(UsageError, match="A100-SXM4-40GB, A100-SXM4-80GB"):
        find_gpu("A100-SXM4")


@pytest.mark.parametrize("name", ["RTX 4099", "RTX 5055"])
def test_an_unknown_name_is_a_usage_error_with_the_five_nearest_and_where_to_look(name: str) -> None:
    with pytest.raises(UsageError) as caught:
        find_gpu(name)
    near, _, rest = caught.value.remedy.removeprefix("did you mean ").partition("?")
    names = re.split(", | or ", near)
    assert len(set(names)) == 5 and set(names) <= {gpu.name for gpu in all_gpus()}
    for word in ("trtopt gpu list", "portable", "[gpu.NAME]"):
        assert word in rest


@pytest.mark.parametrize("name", ["", "quantum", "sm_61", "banana"])
def test_a_name_that_is_like_none_gets_no_guess_but_where_to_look(name: str) -> None:
    with pytest.raises(UsageError) as caught:
        find_gpu(name)
    assert caught.value.remedy.startswith("'trtopt gpu list' names all")


def test_a_table_of_few_gpus_names_those() -> None:
    with pytest.raises(UsageError) as caught:
        find_gpu("L40", [find_gpu("T4"), find_gpu("L4")])
    assert caught.value.remedy.startswith("did you mean L4?")


def test_an_unknown_name_gets_the_nearest_first() -> None:
    with pytest.raises(UsageError) as caught:
        find_gpu("RTX 4099")
    assert caught.value.remedy.startswith("did you mean RTX-4090")


def test_rates_follow_from_units_and_clock() -> None:
    """Rate = SMs x clock x multiply-adds per clock x 2, within the rounding of datasheets."""
    for gpu in all_gpus():
        for dtype, unit in UNITS.items():
            if dtype in gpu.tflops and unit in gpu.fma_per_clock_per_sm:
                rate = gpu.sm * clock_mhz(gpu, dtype) * 1e6 * gpu.fma_per_clock_per_sm[unit] * 2 / 1e12
                assert rate == pytest.approx(gpu.tflops[dtype], rel=0.03), (gpu.name, dtype)


GENERATIONS = {
    "7": r"V100|T4|RTX-20\d\d|TITAN",
    "8.0": r"A100|A30",
    "8.6": r"A2|A10|A16|A40|RTX-30\d\d|RTX-A\d",
    "8.7": r"Jetson-.*Orin",
    "8.9": r"L4|RTX-40\d\d|RTX-.*-Ada$",
    "9": r"H100|H20|GH200",
    "10": r"G?B[23]00",
    "11": r"Jetson-.*Thor",
    "12": r"RTX-50[5-9]0|RTX-PRO|GB10$",
}
"""How the names of a generation begin; :data:`L2_MIB` has its smallest and largest L2 cache."""
L2_MIB = {"7": (3, 6), "8.0": (24, 40), "8.6": (2, 6), "8.7": (2, 4), "8.9": (12, 96), "9": (50, 60)}
L2_MIB |= {"10": (120, 130), "11": (32, 32), "12": (24, 128)}


def test_every_gpu_has_a_source_and_plausible_numbers() -> None:
    assert len({normalized(gpu.name) for gpu in all_gpus()}) == len(all_gpus()) >= 90
    for gpu in all_gpus():
        major = gpu.compute_capability.split(".")[0]
        key = gpu.compute_capability if major == "8" else major
        assert re.match(GENERATIONS[key], gpu.name), gpu.name
        low, high = L2_MIB[key]
        assert low <= gpu.l2_mib <= high, gpu.name
        assert gpu.source
        assert 8 <= gpu.sm <= 256 and 500 <= gpu.clock_tensor_mhz <= gpu.clock_cuda_mhz <= 2700, gpu.name
        assert 50 <= gpu.bandwidth_gbs <= 10000 and 6 <= gpu.memory_gb <= 300 and 10 <= gpu.tdp_w <= 1400, gpu.name


def test_units_of_a_generation_are_those_of_its_chips() -> None:
    """Beside the rates: TF32 from Ampere on, FP8 from Ada on, FP4 from Blackwell on (NVIDIA's white papers)."""
    since = {"tf32": 8.0, "fp8_acc32": 8.9, "fp4": 10.0}
    unknown = {("Jetson-AGX-Thor-T5000", "tf32")}
    for gpu in all_gpus():
        units = {unit for unit, first in since.items() if float(gpu.compute_capability) >= first}
        assert {unit for unit in units if (gpu.name, unit) not in unknown} == since.keys() & gpu.fma_per_clock_per_sm


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
    by_name = {gpu.name: gpu for gpu in all_gpus()}
    for row in rows:
        gpu = by_name[row["gpu"]]
        assert gpu.compute_capability == row["cc"]
        assert gpu.sparse_2_4 == (row["sparse2to4"] == "yes")
        for column, field in plain.items():
            assert float(row[column]) == getattr(gpu, field)
        for prefix, field in (("fma_", "fma_per_clock_per_sm"), ("tf_", "tflops")):
            numbers = {key.removeprefix(prefix): float(row[key]) for key in row if key.startswith(prefix) and row[key]}
            assert numbers == getattr(gpu, field), gpu.name
