"""What the driver says, matched with the table."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from trtopt.engine.backend import TENSORRT, check_target
from trtopt.hardware.probe import _first_of_cuda, probe, read_answer
from trtopt.hardware.spec import gpus_of

BUS = "00000000:01:00.0"


def never() -> tuple[str, str]:
    raise AssertionError("there is but one GPU")


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        ("NVIDIA L4, 8.9, 23034, 550.54.15", "L4"),
        ("NVIDIA L40S, 8.9, 46068, 550.54.15", "L40S"),
        ("NVIDIA GeForce RTX 4090, 8.9, 24564, 555.42", "RTX-4090"),
        ("Tesla T4, 7.5, 15360, 535.1", "T4"),
        ("Tesla V100-SXM2-32GB, 7.0, 32768, 535.1", "V100-SXM2-32GB"),
        ("NVIDIA A100-SXM4-40GB, 8.0, 40960, 535.1", "A100-SXM4-40GB"),
        ("NVIDIA A100-PCIE-40GB, 8.0, 40960, 535.1", "A100-PCIe-40GB"),
        ("NVIDIA A100 80GB PCIe, 8.0, 81920, 535.1", "A100-PCIe-80GB"),
        ("NVIDIA H100 80GB HBM3, 9.0, 81559, 535.1", "H100-SXM5-80GB"),
        ("NVIDIA H100 PCIe, 9.0, 81559, 535.1", "H100-PCIe-80GB"),
        ("NVIDIA H100 NVL, 9.0, 95830, 535.1", "H100-NVL-94GB"),
        ("NVIDIA H200, 9.0, 143771, 570.1", "H200-SXM-141GB"),
        ("NVIDIA GH200 480GB, 9.0, 97871, 550.1", "GH200-96GB"),
        ("NVIDIA GeForce RTX 2080 Ti, 7.5, 11264, 535.1", "RTX-2080Ti"),
        ("NVIDIA GeForce RTX 3060 Laptop GPU, 8.6, 6144, 535.1", "RTX-3060-Laptop"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition, 12.0, 97887, 575.1", "RTX-PRO-6000-BW-WS"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition, 12.0, 97887, 575.1", "RTX-PRO-6000-BW-Server"),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition, 12.0, 97887, 575.1", "RTX-PRO-6000-BW-Max-Q"),
        ("NVIDIA RTX 6000 Ada Generation, 8.9, 49140, 550.1", "RTX-6000-Ada"),
        ("NVIDIA RTX 4000 SFF Ada Generation, 8.9, 20475, 550.1", "RTX-4000-SFF-Ada"),
        ("NVIDIA RTX A2000 12GB, 8.6, 12282, 550.1", "RTX-A2000-12GB"),
        ("NVIDIA RTX A2000, 8.6, 6138, 550.1", "RTX-A2000-6GB"),
        ("NVIDIA GeForce RTX 3080, 8.6, 12288, 550.1", "RTX-3080-12GB"),
        ("NVIDIA GeForce RTX 4070 Ti SUPER, 8.9, 16376, 550.1", "RTX-4070-Ti-Super"),
        ("NVIDIA GeForce RTX 4060 Ti, 8.9, 16380, 550.1", "RTX-4060-Ti-16GB"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU, 8.9, 16376, 550.1", "RTX-4090-Laptop"),
        ("NVIDIA A10G, 8.6, 23028, 550.1", "A10G"),
        ("NVIDIA H200 NVL, 9.0, 143771, 570.1", "H200-NVL-141GB"),
        ("NVIDIA H20, 9.0, 97871, 570.1", "H20-96GB"),
        ("NVIDIA B300 SXM6 AC, 10.3, 275040, 580.1", "B300"),
        ("NVIDIA GB10, 12.1, [N/A], 580.1", "GB10"),
        ("Orin (nvgpu), 8.7, [N/A], 540.3.0", "Jetson-AGX-Orin-64GB"),
    ],
)
def test_the_drivers_name_leads_to_the_right_variant(answer: str, found: str) -> None:
    result = read_answer(f"{answer}, {BUS}\n", never)
    assert result.gpu is not None
    assert result.gpu.name == found
    assert result.reason == ""
    assert result.driver == answer.rsplit(", ", 1)[1]


def test_another_model_of_a_known_kind_says_whose_numbers_it_has() -> None:
    result = read_answer("NVIDIA GeForce RTX 4090 D, 8.9, 24564, 555.42, " + BUS, never)
    assert result.gpu is not None
    assert result.gpu.name == "NVIDIA GeForce RTX 4090 D"
    assert result.gpu.compute_capability == "8.9"
    assert "RTX-4090" in result.reason
    assert result.gpu.source == result.reason


@pytest.mark.parametrize(("capability", "like"), [("15.0", "12.1"), ("9.9", "9.0"), ("8.8", "8.7")])
def test_a_kind_that_is_not_in_the_table_is_a_gpu_with_the_figures_of_another(capability: str, like: str) -> None:
    result = read_answer(f"NVIDIA Future, {capability}, 100000, 999.0, {BUS}\n", never)
    assert result.gpu is not None and result.gpu.compute_capability == capability
    assert result.gpu.name == "NVIDIA Future" and result.gpu.memory_gb == pytest.approx(104.8576)
    assert result.gpu.sm in {gpu.sm for gpu in gpus_of(like)}
    assert capability in result.reason and result.gpu.source == result.reason
    check_target(TENSORRT, result.gpu, result.gpu)


def test_a_gpu_before_volta_is_none() -> None:
    result = read_answer(f"Tesla P4, 6.1, 7680, 535.1, {BUS}\n", never)
    assert result.gpu is None and "6.1" in result.reason


TWO = "NVIDIA T1000, 7.5, 4096, 580.1, 00000000:01:00.0\nNVIDIA L4, 8.9, 23034, 580.1, 00000000:C1:00.0\n"


def test_of_several_gpus_cudas_first_is_the_one() -> None:
    result = read_answer(TWO, lambda: ("0000:c1:00.0", ""))
    assert result.gpu is not None and result.gpu.name == "L4"


def test_several_gpus_that_cuda_does_not_tell_apart_are_none() -> None:
    for answer in (("", "no libcuda.so.1"), ("0000:99:00.0", "")):
        assert read_answer(TWO, lambda answer=answer: answer).gpu is None  # type: ignore[misc]


def test_cuda_is_asked_in_a_process_of_its_own() -> None:
    address, why = _first_of_cuda()
    assert bool(address) != bool(why)


@pytest.mark.parametrize("answer", ["", "\n", "No devices were found\n"])
def test_no_gpu_is_no_gpu(answer: str) -> None:
    result = read_answer(answer, never)
    assert result.gpu is None
    assert "no GPU" in result.reason


@pytest.mark.skipif(sys.platform == "win32", reason="the stand-in for the driver's program is a shell script")
@pytest.mark.parametrize(
    ("script", "gpu", "reason"),
    [
        ("echo 'NVIDIA L4, 8.9, 23034, 550.54, 00000000:01:00.0'", "L4", ""),
        ("echo 'NVIDIA-SMI has failed'; exit 9", None, "NVIDIA-SMI has failed"),
    ],
)
def test_the_driver_is_asked_by_its_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, gpu: str | None, reason: str
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/usr/bin{os.pathsep}/bin")
    result = probe.__wrapped__()
    assert (result.gpu.name if result.gpu else None) == gpu
    assert reason in result.reason
