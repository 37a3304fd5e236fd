"""A profile written and read back, as Markdown, as a trace and for a terminal."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
from drawn_cases import given
from hypothesis import strategies as st
from profile_samples import bare_profile, hostile_profile, large_profile, small_profile
from rich.console import Console

from trtopt.errors import UsageError
from trtopt.profiling.compare import compare
from trtopt.report.files import profile_trace
from trtopt.report.schema.profile import ProfileReport
from trtopt.report.schema.read import read_profile
from trtopt.report.schema.write import write_report
from trtopt.report.text.markdown import as_markdown
from trtopt.report.text.profile import comparison_view, view
from trtopt.support.json_text import plain

SAMPLES = {"small": small_profile, "large": large_profile, "hostile": hostile_profile, "bare": bare_profile}


def shown(renderable: Any, width: int = 100) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115 - closed with the process
    console.print(renderable)
    return console.export_text()


@pytest.mark.parametrize("name", SAMPLES)
def test_a_report_is_read_back_as_it_was_written(name: str, tmp_path: Path) -> None:
    report = SAMPLES[name]()
    write_report(report, tmp_path / "r.json")
    found = read_profile(tmp_path / "r.json")
    assert found.to_json_dict() == report.to_json_dict()
    for read, written in zip(found.layers, report.layers, strict=True):
        assert (read.predicted is None) == (written.predicted is None)
        if read.predicted is not None and written.predicted is not None:
            assert plain(dataclasses.asdict(read.predicted)) == plain(dataclasses.asdict(written.predicted))


def test_the_fields_of_the_contract_stand_in_every_layer() -> None:
    layers = small_profile().to_json_dict()["layers"]
    fields = "name op onnx_nodes flop bytes arithmetic_intensity dtype gemm tile tiles waves tile_efficiency"
    fields += " wave_efficiency alignment_bytes limiter math_us memory_us latency_us predicted_us"
    fields += " measured_us ratio deviation"
    assert all(set(fields.split()) <= set(layer) for layer in layers)
    unpredicted = next(layer for layer in layers if layer["predicted_us"] is None)
    assert unpredicted["flop"] is None and unpredicted["name"] and "predicted" not in unpredicted


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"schema": "trtopt.build/1"}, "not a profile: its schema is 'trtopt.build/1'"),
        ({"schema": None}, "not a trtopt report"),
        ({"layers": 3}, "wrong field: Expected `array`, got `int` - at `$.layers`"),
        ({"totals": {"measured_us": "3"}}, "at `$.totals.measured_us`"),
        ({"source": {}}, "missing required field"),
    ],
)
def test_a_wrong_field_is_named(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_text(json.dumps(small_profile().to_json_dict() | change))
    with pytest.raises(UsageError) as caught:
        read_profile(path)
    assert words in str(caught.value) and str(path) in caught.value.where


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "3", '{"schema": "trtopt.profile/1", "layers": [', "[" * 100_000, "\xff"]
)
def test_what_is_no_report_is_one_error(text: str, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(UsageError):
        read_profile(path)
    with pytest.raises(UsageError, match="cannot be read"):
        read_profile(tmp_path / "missing.json")


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def test_a_calibration_that_leaves_fields_out_is_read_and_shown(tmp_path: Path) -> None:
    value = small_profile().to_json_dict()
    value["gpu"]["calibration"] = {"layers": 3}
    (tmp_path / "r.json").write_text(json.dumps(value))
    assert "from 3 layers: error on layers left out" in as_markdown(view(read_profile(tmp_path / "r.json")))


@given(data=st.data(), many=150)
def test_a_mutated_report_is_read_or_refused(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Any value in any place: a report, or one error; what was read can be shown."""
    value = small_profile().to_json_dict()
    value["layers"] = value["layers"][:3]
    place: Any = value
    for _ in range(data.draw(st.integers(1, 5))):
        keys = list(place) if isinstance(place, dict) else list(range(len(place))) if isinstance(place, list) else []
        if not keys:
            break
        key = data.draw(st.sampled_from(keys))
        if not isinstance(place[key], (dict, list)) or data.draw(st.booleans()):
            place[key] = data.draw(_JSON)
            break
        place = place[key]
    path = tmp_path_factory.mktemp("mutated") / "r.json"
    path.write_text(json.dumps(value))
    try:
        found = read_profile(path)
    except UsageError:
        return
    assert as_markdown(view(found)) and shown(view(found)) and profile_trace(found)


def test_the_terminal_shows_totals_layers_and_findings() -> None:
    report = small_profile()
    text = shown(view(report))
    slow = max(report.layers, key=lambda layer: layer.measured_us)
    assert "sum of the layers" in text and "rank correlation" in text
    assert slow.name in text and "ratio" in text and "low-clock" in text
    assert "the engine was built for an L40S" in text and "52.4 dB" in text


def test_a_profile_without_predictions_is_shown() -> None:
    text = shown(view(bare_profile()))
    assert "conv_11 + relu_11" in text and "rank correlation" not in text


@pytest.mark.parametrize("width", [80, 100, 160])
def test_nothing_is_wider_than_the_terminal(width: int) -> None:
    for make in SAMPLES.values():
        assert max(len(line) for line in shown(view(make()), width).splitlines()) <= width


def test_markdown_takes_no_name_for_markup() -> None:
    text = as_markdown(view(hostile_profile()))
    assert re.search(r"(?<!\\)<", text) is None and "\x1b" not in text
    tables = [line for line in text.splitlines() if line.startswith("|")]
    columns = {line.replace("\\|", "").count("|") for line in tables}
    assert columns == {6, 8}, "the outputs, and the layers"


@pytest.mark.parametrize("name", ["@octocat", "#12", "https://evil.example/x", "www.evil.example", ":shipit:", "GH-3"])
def test_no_name_becomes_a_mention_or_a_link_on_github(name: str) -> None:
    layer = dataclasses.replace(small_profile().layers[1], name=name, measured_us=1e6)
    text = as_markdown(view(dataclasses.replace(small_profile(), layers=(layer,))))
    plain = text.replace("\\", "")  # GitHub looks for them after Markdown has taken the escapes away
    assert name not in plain and name in plain.replace("\u200b", "")


def test_markdown_of_1500_layers_stays_a_comment() -> None:
    text = as_markdown(view(large_profile()))
    assert len(text) < 20_000 and "and 1485 more layers" in text


def test_the_trace_holds_every_layer_that_ran_one_after_the_other() -> None:
    report = small_profile()
    events = [event for event in json.loads(profile_trace(report))["traceEvents"] if event["ph"] == "X"]
    measured = [event for event in events if event["tid"] == 1]
    ran = [layer for layer in report.layers if layer.measured_us > 0]
    assert [event["name"] for event in measured] == [layer.name for layer in ran]
    assert measured[-1]["ts"] + measured[-1]["dur"] == pytest.approx(report.totals.measured_us)
    for before, after in itertools.pairwise(measured):
        assert after["ts"] == pytest.approx(before["ts"] + before["dur"])


def slower(report: ProfileReport) -> ProfileReport:
    layers = tuple(dataclasses.replace(layer, measured_us=layer.measured_us * 1.5) for layer in report.layers)
    totals = dataclasses.replace(report.totals, measured_us=report.totals.measured_us * 1.5)
    return dataclasses.replace(report, layers=layers, totals=totals)


@pytest.mark.parametrize("name", ["small", "large", "hostile"])
def test_a_comparison_is_shown_and_written(name: str) -> None:
    report = SAMPLES[name]()
    found = compare(report, slower(report), ("a.json", "b.json"))
    text, markdown = shown(comparison_view(found)), as_markdown(comparison_view(found))
    assert "50.0 %" in text and "more" in text and "| layers |" in markdown and "\x1b" not in markdown
    assert found.to_json_dict()["schema"] == "trtopt.comparison/1"


def test_a_comparison_of_equals_says_so() -> None:
    found = compare(small_profile(), small_profile())
    assert "the same" in shown(comparison_view(found)) and "Nothing." in as_markdown(comparison_view(found))
