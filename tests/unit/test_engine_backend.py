"""Which compiler builds for which GPU, and the header of its engines."""

from __future__ import annotations

import importlib.metadata
import struct
from pathlib import Path

import pytest

from trtopt.engine.backend import (
    RTX_TARGETS,
    TENSORRT,
    TENSORRT_RTX,
    check_target,
    check_version,
    choose_backend,
    describe,
    identify,
    installed_version,
    read_header,
)
from trtopt.errors import MissingDependencyError, TargetError, UsageError
from trtopt.hardware.spec import all_gpus, find_gpu


def test_tensorrt_for_rtx_targets_what_it_can_and_portable() -> None:
    check_target(TENSORRT_RTX, None, None)
    for gpu in all_gpus():
        if gpu.compute_capability in RTX_TARGETS:
            check_target(TENSORRT_RTX, gpu, None)
        else:
            with pytest.raises(TargetError) as caught:
                check_target(TENSORRT_RTX, gpu, None)
            assert gpu.name in caught.value.what
            assert caught.value.exit_code == 4
            assert "trtopt optimize" in caught.value.remedy


def test_tensorrt_builds_for_the_gpu_that_is_present_only() -> None:
    check_target(TENSORRT, find_gpu("L4"), find_gpu("RTX 4090"))
    for gpu, present in (
        (find_gpu("L4"), None),
        (None, find_gpu("L4")),
        (find_gpu("H100"), find_gpu("L4")),
    ):
        with pytest.raises(TargetError):
            check_target(TENSORRT, gpu, present)


def test_without_a_gpu_auto_is_tensorrt_for_rtx() -> None:
    pytest.importorskip("tensorrt_rtx")
    assert choose_backend("auto", find_gpu("L4"), None) is TENSORRT_RTX


def test_an_unknown_backend_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="openvino"):
        choose_backend("openvino", None, None)


def test_a_backend_that_is_not_installed_names_what_to_install() -> None:
    from trtopt.support._lazy import is_available

    if is_available("tensorrt"):
        pytest.skip("tensorrt is installed")
    with pytest.raises(MissingDependencyError) as caught:
        choose_backend("tensorrt", find_gpu("L4"), find_gpu("L4"))
    assert caught.value.exit_code == 4
    assert caught.value.remedy == 'pip install "trtopt[gpu]"'


@pytest.mark.parametrize(("version", "fits"), [("10.2.0", False), ("10.3.0", True), ("11.4.0.1", True), ("9.9", False)])
def test_versions_before_10_3_are_too_old(version: str, fits: bool) -> None:
    if fits:
        check_version(TENSORRT, version)
    else:
        with pytest.raises(MissingDependencyError, match=version):
            check_version(TENSORRT, version)


def engine(size: int = 100, targets: int = 8, magic: bytes = b"vtrt") -> bytes:
    header = bytearray(size)
    header[:4] = header[28:32] = magic
    struct.pack_into("<Q", header, 16, size)
    header[24:28] = bytes((1, 7, 1, 116))
    header[32] = targets
    return bytes(header)


def test_the_header_tells_version_targets_and_size() -> None:
    header = read_header(engine(targets=2 | 8 | 64))
    assert header.version == "1.7.1.116"
    assert header.compute_capabilities == ("8.0", "8.9")
    assert header.bytes == 100


def plan(layout: int = 0) -> bytes:
    header = bytearray(100)
    header[:8] = b"ftrt" + struct.pack("<I", layout)
    header[24:28] = bytes((10, 3, 0, 26))
    return bytes(header)


def test_an_engine_tells_which_backend_built_it() -> None:
    backend, header = identify(engine(targets=8))
    assert backend == TENSORRT_RTX
    assert describe(backend, header) == "tensorrt-rtx 1.7.1.116 for compute capability 8.9"
    backend, header = identify(plan())
    assert backend == TENSORRT and header.compute_capabilities == ()
    assert describe(backend, header) == "tensorrt 10.3.0.26"


def test_a_plan_of_an_unknown_layout_is_of_an_unknown_version() -> None:
    backend, header = identify(plan(layout=1))
    assert describe(backend, header) == "tensorrt"


@pytest.mark.parametrize("data", [b"", b"vtrt", plan()[:63], engine()[:-1], b"\x08\x0aonnx" * 20], ids=str)
def test_what_is_no_engine_of_either_backend_is_refused(data: bytes) -> None:
    with pytest.raises(UsageError):
        identify(data)


@pytest.mark.parametrize("data", [b"", b"vtrt", engine()[:-1], engine() + b"x", engine(magic=b"ptrt")], ids=str)
def test_what_is_not_a_whole_engine_is_refused(data: bytes) -> None:
    with pytest.raises(UsageError):
        read_header(data)


@pytest.mark.parametrize("name", ["tensorrt", "tensorrt-cu12", "tensorrt-cu13"])
def test_the_version_is_found_under_every_name_of_the_package(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(asked: str) -> str:
        if asked != name:
            raise importlib.metadata.PackageNotFoundError(asked)
        return "10.13.3"

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert installed_version(TENSORRT) == "10.13.3"


def test_the_extras_name_the_packages_of_one_cuda() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    for extra, package in (("gpu", "tensorrt"), ("gpu-cu12", "tensorrt-cu12"), ("gpu-cu13", "tensorrt-cu13")):
        (line,) = (line for line in text.splitlines() if line.startswith(f"{extra} = "))
        assert f'"{package}>=' in line and package in TENSORRT.distributions
