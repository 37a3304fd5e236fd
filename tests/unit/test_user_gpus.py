"""GPUs of the user's own, and other figures for known ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trtopt.config.toml_file import load, load_gpus
from trtopt.errors import UsageError
from trtopt.hardware.spec import all_gpus, choose_gpu, find_gpu, precisions_of, ridge_flop_per_byte
from trtopt.hardware.user import gpu_table

WHOLE: dict[str, Any] = {
    "compute_capability": "8.9",
    "sm": 100,
    "clock_cuda_mhz": 2000,
    "clock_tensor_mhz": 2000,
    "memory_gb": 20,
    "bandwidth_gbs": 500,
    "l2_mib": 48,
    "tdp_w": 200,
    "sparse_2_4": True,
    "source": "a datasheet",
    "tflops": {"fp32": 51.2},
    "fma_per_clock_per_sm": {"fp16_acc32": 512, "int8": 1024},
}


def test_an_override_changes_what_it_names_and_keeps_the_place_in_the_table() -> None:
    table = gpu_table({"rtx 4090": {"bandwidth_gbs": 900, "source": "measured"}})
    assert [gpu.name for gpu in table] == [gpu.name for gpu in all_gpus()]
    mine, known = find_gpu("4090", table), find_gpu("4090")
    assert mine.bandwidth_gbs == 900
    assert (mine.sm, mine.tflops, mine.fma_per_clock_per_sm) == (known.sm, known.tflops, known.fma_per_clock_per_sm)
    assert mine.source.startswith("measured; ") and known.source in mine.source
    assert known.bandwidth_gbs == 1008, "trtopt's own table is not changed"


def test_rates_follow_the_multiprocessors_and_the_clock_of_a_gpu_built_on_another() -> None:
    base = find_gpu("RTX-5090")
    mine = find_gpu("half", gpu_table({"half": {"base": "RTX 5090", "sm": 85, "source": "x"}}))
    assert mine.tflops == {dtype: pytest.approx(rate / 2) for dtype, rate in base.tflops.items()}
    assert mine.fma_per_clock_per_sm == base.fma_per_clock_per_sm


def test_rates_and_units_follow_from_each_other() -> None:
    mine = find_gpu("mine", gpu_table({"mine": WHOLE}))
    assert mine.tflops["fp16"] == pytest.approx(2 * 512 * 100 * 2000e6 / 1e12)
    assert mine.tflops["int8"] == pytest.approx(2 * mine.tflops["fp16"])
    assert mine.fma_per_clock_per_sm["fp32"] == pytest.approx(128)
    assert precisions_of(mine) == ("fp32", "fp16", "bf16", "int8")


def test_an_overridden_rate_takes_its_units_along() -> None:
    mine = find_gpu("L4", gpu_table({"L4": {"tflops": {"fp16": 60.5}, "source": "sustained at 72 W"}}))
    known = find_gpu("L4")
    assert mine.fma_per_clock_per_sm["fp16_acc32"] == pytest.approx(
        60.5e12 / (2 * known.sm * known.clock_tensor_mhz * 1e6)
    )
    assert mine.fma_per_clock_per_sm["fp16_acc16"] == mine.fma_per_clock_per_sm["fp16_acc32"]
    assert mine.tflops["int8"] == known.tflops["int8"]


def test_a_rate_of_zero_is_no_unit() -> None:
    mine = find_gpu("L4", gpu_table({"L4": {"tflops": {"int8": 0}, "source": "x"}}))
    assert "int8" not in precisions_of(mine)
    assert "int8" not in mine.fma_per_clock_per_sm


def test_a_later_gpu_builds_on_an_earlier_one() -> None:
    table = gpu_table({"one": WHOLE, "two": {"base": "ONE", "memory_gb": 40, "source": "y"}})
    assert find_gpu("two", table).memory_gb == 40
    assert find_gpu("two", table).bandwidth_gbs == WHOLE["bandwidth_gbs"]


def test_a_base_may_have_the_short_name_that_gpu_takes() -> None:
    mine = find_gpu("mine", gpu_table({"mine": {"base": "A100", "source": "y"}}))
    assert mine.sm == find_gpu("A100").sm


def test_two_tables_of_one_name_are_an_error() -> None:
    with pytest.raises(UsageError, match="'MY-GPU' and 'my gpu' are one name"):
        gpu_table({"MY-GPU": WHOLE, "my gpu": WHOLE})


@pytest.mark.parametrize(
    ("changes", "what", "remedy"),
    [
        ({"bandwith_gbs": 1}, "Unknown field 'bandwith_gbs'", "did you mean bandwidth_gbs?"),
        ({"tflops": {"fp61": 1}}, "Unknown type 'fp61'", "did you mean fp16?"),
        ({"base": "RTX-4099"}, "There is no GPU 'RTX-4099'", "did you mean RTX-4090?"),
        ({"base": 7}, "There is no GPU 7", "gpu list"),
        ({"sm": "100"}, "sm is '100'", "number from 1"),
        ({"sm": 100.5}, "not a whole number", "multiprocessors"),
        ({"sm": True}, "sm is True", "number from 1"),
        ({"memory_gb": 20e9}, "memory_gb is", "to 10000"),
        ({"bandwidth_gbs": float("nan")}, "bandwidth_gbs is nan", "number from"),
        ({"clock_cuda_mhz": 2e9}, "clock_cuda_mhz is", "to 10000"),
        ({"compute_capability": 8.9}, "compute_capability is 8.9", '"8.9"'),
        ({"compute_capability": "sm_89"}, "compute_capability is 'sm_89'", '"8.9"'),
        ({"sparse_2_4": "yes"}, "not true or false", "sparse_2_4 = true"),
        ({"source": ""}, "source is ''", "where the numbers come from"),
        ({"tflops": 51.2}, "tflops is no table", "fp32"),
        ({"tflops": {"fp32": -1}}, "fp32 is -1", "from 0 on"),
        ({"tflops": {"fp32": 51.2, "fp16": 100}}, "does not follow from the units", "correct one"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_wrong_field_is_named_with_its_gpu_and_a_remedy(changes: dict[str, Any], what: str, remedy: str) -> None:
    with pytest.raises(UsageError) as caught:
        gpu_table({"mine": {**WHOLE, **changes}})
    assert what in caught.value.what
    assert remedy in caught.value.remedy
    assert '[gpu."mine"]' in caught.value.where


@pytest.mark.parametrize("key", [key for key in WHOLE if key not in ("tflops", "fma_per_clock_per_sm")])
def test_a_missing_field_is_named(key: str) -> None:
    with pytest.raises(UsageError) as caught:
        gpu_table({"mine": {name: value for name, value in WHOLE.items() if name != key}})
    assert key in caught.value.what or key in caught.value.where


def test_a_source_is_required_for_an_override_too() -> None:
    with pytest.raises(UsageError, match="source is missing"):
        gpu_table({"L4": {"bandwidth_gbs": 280}})


@pytest.mark.parametrize("name", ["", "  ", "portable", "a\nb"])
def test_a_gpu_needs_a_name_of_its_own(name: str) -> None:
    with pytest.raises(UsageError, match="cannot be called"):
        gpu_table({name: WHOLE})


def test_the_file_gives_gpus_to_every_command(tmp_path: Path) -> None:
    path = tmp_path / "trtopt.toml"
    path.write_text('[gpu."MY-GPU"]\nbase = "L4"\nsource = "x"\n[build]\ngpu = "MY-GPU"\n')
    tables = {"MY-GPU": {"base": "L4", "source": "x"}}
    assert load(path, "build") == {"gpu": "MY-GPU", "gpus": tables}
    assert load(path, "analyze") == {"gpus": tables}
    assert load_gpus(path) == tables


def test_a_file_with_a_value_where_a_gpu_belongs_is_a_usage_error(tmp_path: Path) -> None:
    path = tmp_path / "trtopt.toml"
    path.write_text('gpu = "L4"\n')
    with pytest.raises(UsageError, match="'gpu' is no table"):
        load_gpus(path)
    path.write_text('[gpu]\nname = "L4"\n')
    with pytest.raises(UsageError, match="is no table"):
        load_gpus(path)
    path.write_text("[build]\n")
    with pytest.raises(UsageError, match="has no GPU"):
        load_gpus(path)


def test_the_users_figures_hold_for_the_gpu_that_is_present() -> None:
    table = gpu_table({"L4": {"bandwidth_gbs": 280, "source": "measured"}})
    chosen = choose_gpu(None, table, find_gpu("L4"))
    assert chosen is not None and chosen.bandwidth_gbs == 280
    default = choose_gpu(None, table, None)
    assert default is not None and default.name == "L4"
    assert choose_gpu("Portable", table, None) is None


def test_ridge_points_are_rate_over_bandwidth() -> None:
    """V100 FP16: 125e12 / 900e9 (NVIDIA's deep learning performance guide)."""
    assert f"{ridge_flop_per_byte(find_gpu('V100'), 'fp16'):.1f}" == "138.9"


@pytest.mark.parametrize(
    ("name", "precisions"),
    [
        ("V100", ("fp32", "fp16")),
        ("T4", ("fp32", "fp16", "int8")),
        ("A100", ("fp32", "tf32", "fp16", "bf16", "int8")),
        ("Thor", ("fp32", "fp16", "bf16", "fp8")),
    ],
)
def test_the_precisions_of_a_gpu_are_those_it_has_units_for(name: str, precisions: tuple[str, ...]) -> None:
    assert precisions_of(find_gpu(name)) == precisions
