"""The fitted constants: which GPU gets which, and that they mean what they are said to mean."""

from __future__ import annotations

import dataclasses
import math

import pytest

from trtopt.hardware.spec import all_gpus, find_gpu
from trtopt.roofline.batch import WINOGRAD_SAVING
from trtopt.roofline.constants import CARRIED_OVER, GENERIC, Fit, all_fits, constants_for, fit_for, set_for
from trtopt.roofline.peaks import L2_PORT_BYTES

FITS = {fit.name: fit for fit in all_fits()}
AT_MOST = {
    "peak_share": 1.0,
    "dram_share": 1.0,
    "l2_share": 1.0,
    "wave_smoothing": 1.0,
    "misaligned_share": 1.0,
    "conv_share": 1.0,
    "pointwise_share": 1.0,
    "layout_share": 1.0,
    "narrow_share": 1.0,
    "cuda_core_share": 1.0,
    "l2_bytes_per_clock": L2_PORT_BYTES,
    "winograd_gain": min(WINOGRAD_SAVING.values()),
    "sm_bytes_per_clock": 128.0,
}
"""Nothing is faster than the datasheet; an SM loads 128 bytes per cycle from shared memory (CUDA programming guide)."""


@pytest.mark.parametrize(
    ("gpu", "expected"),
    [
        ("A100-SXM4-80GB", "A100-SXM4-80GB"),
        ("RTX-3060-Laptop", "RTX-3060-Laptop"),
        ("A100-PCIe-40GB", "A100-SXM4-80GB"),
        ("A30", "A100-SXM4-80GB"),
        ("H200-SXM-141GB", "H100-SXM5-80GB"),
        ("RTX-3090", "RTX-3060-Laptop"),
        ("V100-SXM2-32GB", "V100-SXM2-16GB"),
        ("T4", "T4"),
        ("RTX-4090", "RTX-PRO-6000-BW-Server"),
    ],
)
def test_a_gpu_gets_its_own_set_else_its_architectures_else_the_generic_one(gpu: str, expected: str) -> None:
    spec = find_gpu(gpu)
    found = fit_for(spec.name, spec.compute_capability)
    assert found is FITS[expected]
    assert constants_for(spec) is found.constants


@pytest.mark.parametrize(
    ("compute_capability", "expected"),
    [
        ("7.2", "V100-SXM2-16GB"),
        ("7.5", "T4"),
        ("8.7", "RTX-3060-Laptop"),
        ("8.9", "RTX-PRO-6000-BW-Server"),
        ("10.0", "H100-SXM5-80GB"),
        ("10.3", "H100-SXM5-80GB"),
        ("11.0", "H100-SXM5-80GB"),
        ("12.1", "RTX-PRO-6000-BW-Server"),
        ("13.0", GENERIC),
    ],
)
def test_a_gpu_of_a_users_own_gets_the_set_of_its_architecture(compute_capability: str, expected: str) -> None:
    assert fit_for("somebody's GPU", compute_capability) is FITS[expected]


def test_every_compute_capability_of_the_table_is_measured_or_has_a_rule_with_a_reason() -> None:
    measured = {fit.compute_capability for fit in all_fits()}
    assert {gpu.compute_capability for gpu in all_gpus()} <= measured | set(CARRIED_OVER)
    for source, reason in CARRIED_OVER.values():
        assert source in measured | {GENERIC} and reason


def test_a_set_of_its_own_comes_before_what_carries_over() -> None:
    own = dataclasses.replace(FITS[GENERIC], name="mine", compute_capability="8.9")
    assert set_for("8.9", (*all_fits(), own)) == "mine"


def test_every_gpu_of_the_table_has_constants() -> None:
    assert {fit_for(gpu.name, gpu.compute_capability).name for gpu in all_gpus()} <= set(FITS)


@pytest.mark.parametrize("fit", all_fits(), ids=lambda fit: fit.name)
def test_constants_lie_within_their_limits(fit: Fit) -> None:
    for name, value in dataclasses.asdict(fit.constants).items():
        assert math.isfinite(value) and value > 0, name
        assert value <= AT_MOST.get(name, math.inf), name
    assert fit.constants.norm >= 1


@pytest.mark.parametrize("fit", all_fits(), ids=lambda fit: fit.name)
def test_every_set_names_its_data_and_its_gpu(fit: Fit) -> None:
    assert "TensorRT layers" in fit.data or "DeepBench" in fit.data
    if fit.name == GENERIC:
        assert fit.compute_capability == ""
    else:
        gpu = find_gpu(fit.name)
        assert (gpu.name, gpu.compute_capability) == (fit.name, fit.compute_capability)


def test_sets_have_names_of_their_own() -> None:
    assert len(FITS) == len(all_fits())
    assert GENERIC in FITS
