"""A sensitivity report: shares, names, JSON, terminal and page."""

from __future__ import annotations

import dataclasses
import io
import json
import math
from typing import Any

import pytest
from rich.console import Console

from trtopt.report.html.page import html_page
from trtopt.report.schema.layers import NodeName
from trtopt.report.schema.sensitivity import GrowthStep, OutputError, RegionError, Sensitivity, noise_shares
from trtopt.report.schema.steps import Refusal
from trtopt.report.text.sensitivity import short_names, view

HOSTILE = 'a</script><b>&"\x1b[31m\n'


def error(ratio: float, **changes: Any) -> OutputError:
    sqnr = math.inf if ratio == 0 else -math.inf if math.isinf(ratio) else -10 * math.log10(ratio)
    return OutputError(
        **{"standard_error_db": 0.3, "disagreement": 0.05, "change": ratio, **changes},
        **{
            "noise_to_signal": ratio,
            "sqnr_db": sqnr,
        },
    )


def region(name: str, ratio: float, nodes: tuple[str, ...] = ()) -> RegionError:
    return RegionError(name, nodes or (f"net/{name}/conv",), {"y": error(ratio), "z": error(ratio / 2)}, 5, 0.1)


def report(*regions: RegionError, **changes: Any) -> Sensitivity:
    growth = tuple(GrowthStep(item.region, item.nodes[0], math.inf, 20.0, 0.01) for item in regions)
    together = RegionError("", ("a",), {"y": error(0.1), "z": error(0.2)}, 16)
    given: dict[str, Any] = {"refused": (Refusal("n", "why"),), "growth": growth, **changes}
    return Sensitivity({"path": "/m/net.onnx"}, "int8", "tensorrt", 64, regions, together, **given)


def shown(found: Sensitivity, width: int = 100) -> str:
    stream = io.StringIO()
    Console(file=stream, width=width, no_color=True).print(view(found))
    return stream.getvalue()


def test_shares_are_of_the_sum_and_a_broken_region_has_all_of_it() -> None:
    assert noise_shares([region("a", 0.3), region("b", 0.1)]) == pytest.approx([0.75, 0.25])
    assert noise_shares([region("a", 0.0)]) == [0.0]
    assert noise_shares([region("a", math.inf), region("b", 0.1), region("c", math.inf)]) == [0.5, 0.0, 0.5]


def test_the_path_that_all_names_share_is_left_out() -> None:
    assert short_names(["/net/layer.0/conv1", "/net/layer.1/conv1"]) == ["layer.0/conv1", "layer.1/conv1"]
    assert short_names(["/net/conv"]) == ["/net/conv"]
    assert short_names(["conv", "conv"]) == ["conv", "conv"]
    assert short_names(["a/b", "a"]) == ["a/b", "a"]


def test_the_json_has_null_for_what_is_infinite_and_names_the_worst_output() -> None:
    found = report(region("a", math.inf), region("b", 0.0)).to_json_dict()
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert [item["worst"] for item in found["regions"]] == ["y", "y"]
    assert found["together"]["worst"] == "z"
    assert found["regions"][0]["outputs"]["y"]["sqnr_db"] is None


def test_the_terminal_shows_the_worst_regions_and_how_many_more_there_are() -> None:
    regions = [region(f"t{index}", 0.5 / (index + 1)) for index in range(30)]
    text = shown(report(*regions, warnings=("look out",)))
    assert "t0/conv" in text and "t19/conv" in text
    assert "and 10 more regions" in text
    assert "look out" in text
    assert "on 16 samples" in text
    assert max(map(len, text.splitlines())) <= 100


def test_a_region_of_several_nodes_says_how_many_it_has() -> None:
    both = region("a", 0.3, ("conv1", "down"))
    assert "conv1 +1  " in shown(report(both))
    names = {"conv1": NodeName("layer2.conv1", "Conv"), "down": NodeName("layer2.down", "Conv")}
    text = shown(report(both, names=names)).partition("One region alone")[2]
    assert "layer2.conv1 +1  " in text and "+1 +1" not in text


def test_figures_without_error_or_without_end_are_shown() -> None:
    text = shown(report(region("a", math.inf), region("b", 0.0)))
    assert "-inf dB" in text and "equal" in text
    html_page(view(report(region("a", math.inf), region("b", 0.0))))


def test_names_of_the_model_are_text_wherever_they_stand() -> None:
    found = report(region("a", 0.1, (HOSTILE,)), region(HOSTILE, 0.05), refused=(Refusal(HOSTILE, HOSTILE),))
    assert "\x1b" not in shown(found)
    page = html_page(view(found))
    assert "</script><b>" not in page and "\x1b" not in page
    assert "Content-Security-Policy" in page


def test_it_ends_in_the_build_that_keeps_what_a_budget_bears() -> None:
    found = report(region("a", 0.1))
    text = shown(dataclasses.replace(found, model={"path": "nets/my net.onnx"}))
    assert "trtopt build 'nets/my net.onnx' --int8 --calib samples.npz" in text and "--max-accuracy-drop" in text
    named = shown(dataclasses.replace(found, model={"path": "net.onnx"}, calib="pictures"))
    assert "trtopt build net.onnx --int8 --calib pictures" in named
    assert "trtopt build" not in shown(dataclasses.replace(found, model={"path": None, "target": "nets.py:resnet"}))
