"""Builder options as users write them."""

from __future__ import annotations

import pytest

from trtopt.engine.backend import TENSORRT, TENSORRT_RTX
from trtopt.engine.options import parse_builder_options, route_axes, with_found
from trtopt.errors import TargetError, UsageError


def test_every_option_reaches_the_api_of_tensorrt() -> None:
    items = (
        "builder_optimization_level=5",
        "workspace=2G",
        "max_aux_streams=0",
        "tiling=moderate",
        "hardware-compatibility=Ampere+",
        "weight_streaming=yes",
        "sparsity=enable",
        "refit=1",
        "strip_plan=off",
        "version_compatible=true",
        "tactic_sources=JIT_convolutions",
        "search=8",
        "l2_limit_for_tiling=1M",
        "avg_timing_iterations=4",
        "max_num_tactics=100",
        "build_route=-conv_lowering=off  -kgen:tiling=[0|1]",
        "exclude_lean_runtime=true",
    )
    settings = parse_builder_options(items, TENSORRT, gpu_present=True)
    assert settings.attributes == {
        "builder_optimization_level": 5,
        "max_aux_streams": 0,
        "l2_limit_for_tiling": 1 << 20,
        "avg_timing_iterations": 4,
        "max_num_tactics": 100,
        "build_route": "-conv_lowering=off -kgen:tiling=[0|1]",
    }
    assert settings.pools == {"WORKSPACE": 2 << 30}
    assert settings.masks == {"tactic_sources": ("TacticSource", ["JIT_CONVOLUTIONS"])}
    assert settings.search == {"search": 8}
    assert settings.enums == {
        "tiling_optimization_level": ("TilingOptimizationLevel", "MODERATE"),
        "hardware_compatibility_level": ("HardwareCompatibilityLevel", "AMPERE_PLUS"),
    }
    assert settings.flags == {
        "WEIGHT_STREAMING": True,
        "SPARSE_WEIGHTS": True,
        "REFIT": True,
        "STRIP_PLAN": False,
        "VERSION_COMPATIBLE": True,
        "EXCLUDE_LEAN_RUNTIME": True,
    }
    assert settings.ignored == ()


@pytest.mark.parametrize(("text", "size"), [("4096", 4096), ("512k", 512 << 10), ("64M", 64 << 20), ("1GiB", 1 << 30)])
def test_sizes_take_powers_of_1024(text: str, size: int) -> None:
    settings = parse_builder_options([f"workspace={text}"], TENSORRT_RTX, gpu_present=False)
    assert settings.pools == {"WORKSPACE": size}


@pytest.mark.parametrize(
    "item",
    [
        "builder_optimization_level=6",
        "builder_optimization_level=high",
        "workspace=lots",
        "workspace=-1",
        "max_aux_streams",
        "tactic_sources=cudnn",
        "search=1",
        "search=many",
        "search=99999999999999999999",
        "max_num_tactics=-1",
        "avg_timing_iterations=0",
        "l2_limit_for_tiling=some",
        "build_route=",
        "build_route=conv_lowering=off",
        "build_route=-conv_lowering",
        "build_route=-a=[on",
        "build_route=-a=[on||off]",
        "build_route=-a=$(reboot)",
        "tiling=sometimes",
        "refit=perhaps",
        "=",
        "",
    ],
)
def test_a_wrong_value_is_a_usage_error(item: str) -> None:
    with pytest.raises(UsageError):
        parse_builder_options([item], TENSORRT_RTX, gpu_present=False)


def test_an_unknown_key_gets_the_nearest() -> None:
    with pytest.raises(UsageError) as caught:
        parse_builder_options(["workspce=1G"], TENSORRT_RTX, gpu_present=False)
    assert caught.value.remedy.startswith("did you mean workspace?")


def test_a_key_given_twice_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="twice"):
        parse_builder_options(["workspace=1G", "workspace=2G"], TENSORRT_RTX, gpu_present=False)


def test_what_tensorrt_for_rtx_ignores_is_listed() -> None:
    items = ["builder_optimization_level=5", "workspace=1G", "sparsity=true", "tiling=fast"]
    settings = parse_builder_options(items, TENSORRT_RTX, gpu_present=False)
    assert settings.ignored == ("builder_optimization_level=5", "sparsity=true", "tiling=fast")


@pytest.mark.parametrize("key", ["refit", "strip_plan"])
def test_what_tensorrt_for_rtx_cannot_do_without_a_gpu_is_refused_there_only(key: str) -> None:
    with pytest.raises(TargetError, match=key):
        parse_builder_options([f"{key}=true"], TENSORRT_RTX, gpu_present=False)
    assert parse_builder_options([f"{key}=false"], TENSORRT_RTX, gpu_present=False).ignored == ()
    assert parse_builder_options([f"{key}=true"], TENSORRT_RTX, gpu_present=True).flags


def test_version_compatible_engines_are_tensorrts_alone() -> None:
    with pytest.raises(TargetError, match="lean runtime"):
        parse_builder_options(["version_compatible=true"], TENSORRT_RTX, gpu_present=True)


def test_values_of_a_knob_are_for_a_search() -> None:
    with pytest.raises(UsageError, match="no search tries them"):
        parse_builder_options(["build_route=-a=[on|off]"], TENSORRT, gpu_present=True)


def test_knobs_that_a_search_chose_are_one_route() -> None:
    items = ("search=8", "build_route=-a=[1|2] -b=on -c=[x|y]", "workspace=1G")
    assert route_axes(items) == (("-a", ("1", "2")), ("-c", ("x", "y")))
    assert with_found(items) == ("workspace=1G", "build_route=-b=on")
    assert with_found(items, ("tiling=fast", "-a=2")) == ("workspace=1G", "tiling=fast", "build_route=-b=on -a=2")
    assert with_found(("search=8",), ()) == ()
