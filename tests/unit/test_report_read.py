"""Reports read back from their files."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
from analysis_samples import full_analysis
from drawn_cases import given
from hypothesis import strategies as st
from profile_samples import small_profile
from report_samples import full_report
from rich.console import Console
from test_report_sensitivity import region
from test_report_sensitivity import report as sensitivity_of

import trtopt
from trtopt.errors import UsageError
from trtopt.gates.check import Limits, evaluate
from trtopt.gates.facts import facts_of
from trtopt.report.files import junit_xml
from trtopt.report.html.page import html_page
from trtopt.report.schema.analysis import Analysis, EngineAnalysis
from trtopt.report.schema.build import BuildReport, MetricRecord
from trtopt.report.schema.decisions import BuilderTrial, ParetoPoint, SearchRecord
from trtopt.report.schema.diff import DiffReport, DiffSide, RegionDiff
from trtopt.report.schema.profile import ProfileReport
from trtopt.report.schema.read import read_report
from trtopt.report.schema.sensitivity import GrowthStep, Sensitivity
from trtopt.report.schema.steps import Cost
from trtopt.report.schema.sweep import Failure
from trtopt.report.schema.write import write_report
from trtopt.report.text.check import view
from trtopt.report.text.markdown import as_markdown

INPUTS = {"inputs": [{"name": "x", "dtype": "float32", "shape": ["N", 3, 8, 8]}]}


def analysis() -> Analysis:
    report = full_analysis()
    return dataclasses.replace(report, model=report.model | INPUTS | {"input_shapes": {"x": [8, 3, 8, 8]}})


def build() -> BuildReport:
    report = full_report(analysis=EngineAnalysis("L4", full_analysis().layers, full_analysis().totals))
    trials = (
        BuilderTrial((), 12.5, 1000.0, 3.0, True, True, "as asked for"),
        BuilderTrial(("tiling=fast",), None, None, None, False, False, "refused: no such option"),
    )
    engine = None if report.engine is None else dataclasses.replace(report.engine, builder_search=trials)
    return dataclasses.replace(report, model=report.model | INPUTS, engine=engine)


def sensitivity() -> Sensitivity:
    broken = region("b", math.inf)
    growth = (GrowthStep("a", "a/conv", math.inf, 20.0, 0.01), GrowthStep("b", "b/conv", 20.0, -math.inf, math.inf))
    return sensitivity_of(broken, region("c", 0.0), region("d", 0.1), growth=growth)


def diff() -> DiffReport:
    sides = DiffSide("a.json", "tensorrt-rtx 1.6", 3, 10, 5.0), DiffSide("b.json", failure=Failure("no", "x", "y", 6))
    changed = RegionDiff(("n",), ((("n",),), ()), ("n",), (), (0, 1), (("fp16",), ()), (10, 0), (5.0, 0.0))
    return DiffReport({"path": "m.onnx", "sha256": "ab"}, "L4", "fp16", *sides, (changed,), 0.05, ("note",))


GATED: dict[type, Any] = {BuildReport: build, Analysis: analysis, ProfileReport: small_profile}
OTHERS: dict[type, Any] = {Sensitivity: sensitivity, DiffReport: diff}
SAMPLES = GATED | OTHERS


@pytest.mark.parametrize("kind", SAMPLES, ids=lambda kind: kind.__name__)
def test_a_report_is_read_back_as_it_was_written(kind: type, tmp_path: Path) -> None:
    report = SAMPLES[kind]()
    write_report(report, tmp_path / "r.json")
    found = read_report(tmp_path / "r.json")
    assert type(found) is kind
    assert found.to_json_dict() == report.to_json_dict()
    assert as_markdown(found.view()) == as_markdown(report.view())


@pytest.mark.parametrize("kind", OTHERS, ids=lambda kind: kind.__name__)
def test_a_report_without_gates_is_refused_by_them(kind: type, tmp_path: Path) -> None:
    write_report(SAMPLES[kind](), tmp_path / "r.json")
    with pytest.raises(UsageError, match="has no gates"):
        trtopt.check(tmp_path / "r.json")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda found: found["regions"][0].update(outputs={}), "no output - at `$.regions[0]`"),
        (lambda found: found["regions"][1].update(nodes=[]), "no node"),
        (lambda found: found["together"]["outputs"]["y"].update(noise_to_signal=-1.0), "negative - at `$.together`"),
        (lambda found: found["growth"][0].update(output_sqnr_db=-1e300), "too large - at `$.growth[0]`"),
        (lambda found: found["model"].update(path=[1]), "Expected `str"),
    ],
)
def test_a_sensitivity_that_cannot_be_is_refused(change: Any, words: str, tmp_path: Path) -> None:
    found = sensitivity().to_json_dict()
    change(found)
    (tmp_path / "r.json").write_text(json.dumps(found))
    with pytest.raises(UsageError) as caught:
        read_report(tmp_path / "r.json")
    assert words in str(caught.value)


def test_a_build_is_read_back_into_its_records(tmp_path: Path) -> None:
    report = full_report(gate_failures=("metric top1",))
    write_report(report, tmp_path / "r.json")
    found = read_report(tmp_path / "r.json")
    assert isinstance(found, BuildReport)
    assert found.engine == report.engine
    assert found.steps == report.steps
    assert found.precision == report.precision
    assert found.gate_failures == ("metric top1",)


def test_null_is_read_as_what_is_not_finite(tmp_path: Path) -> None:
    """JSON has no word for NaN and infinity: an equal output must not come back as a broken one."""
    point = ParetoPoint("int8", {"int8": 2}, {"int8": 1.0}, math.inf, math.inf, 0.1, "top1", True, False)
    search = SearchRecord(0.01, 0.008, "top1", False, math.inf, 0.1, 3.0, 4.0, 1, 0, (), (point,), 2, {}, (), ())
    report = full_report(search=search, sixteen_bit=Cost(3, 0, 10, math.inf))
    assert report.accuracy is not None
    accuracy = dataclasses.replace(report.accuracy, metric=MetricRecord("mine", 1.0, math.nan, math.nan))
    write_report(dataclasses.replace(report, accuracy=accuracy), tmp_path / "r.json")
    found = read_report(tmp_path / "r.json")
    assert isinstance(found, BuildReport) and found.accuracy is not None and found.accuracy.metric is not None
    outputs = found.accuracy.outputs
    assert outputs["boxes"].sqnr_db == math.inf
    assert math.isnan(outputs["broken"].sqnr_db) and math.isnan(outputs["broken"].cosine)
    assert outputs["logits"].sqnr_db == 31.234
    assert math.isnan(found.accuracy.metric.optimized)
    assert found.search is not None and found.search.drop == math.inf and found.search.min_sqnr_db is None
    assert found.search.pareto[0].predicted_us == math.inf
    assert found.sixteen_bit == Cost(3, 0, 10, math.inf)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"schema": "trtopt.check/1"}, "another kind: its schema is 'trtopt.check/1'"),
        ({"schema": ["trtopt.build/1"]}, "another kind"),
        ({"schema": None}, "not a trtopt report"),
        ({"engine": {"kernels": 3}}, "missing required field"),
        ({"steps": "none"}, "Expected `array`, got `str` - at `$.steps`"),
        ({"accuracy": {"samples": "8"}}, "at `$.accuracy.samples`"),
        ({"calibration": {"source": "guess"}}, "Invalid enum value 'guess' - at `$.calibration.source`"),
        ({"seconds": {"load": 10**30}}, "the number 10000000000000000000... is too large"),
    ],
)
def test_a_wrong_field_is_named(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_text(json.dumps(full_report().to_json_dict() | change))
    with pytest.raises(UsageError) as caught:
        read_report(path)
    assert words in str(caught.value) and str(path) in caught.value.where


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@pytest.mark.parametrize("kind", GATED, ids=lambda kind: kind.__name__)
def test_each_kind_of_report_is_gated(kind: type, tmp_path: Path) -> None:
    write_report(SAMPLES[kind](), tmp_path / "r.json")
    facts = facts_of(read_report(tmp_path / "r.json"), tmp_path / "r.json")
    names = {gate.name.partition(":")[0] for gate in evaluate(facts, facts, Limits()).gates}
    assert {"latency", "kernels", "share"} <= names


def _mutate(value: dict[str, Any], data: st.DataObject) -> None:
    """Put any value in any place of a report."""
    place: Any = value
    for _ in range(data.draw(st.integers(1, 6))):
        keys = list(place) if isinstance(place, dict) else list(range(len(place))) if isinstance(place, list) else []
        if not keys:
            break
        key = data.draw(st.sampled_from(keys))
        if not isinstance(place[key], (dict, list)) or data.draw(st.booleans()):
            place[key] = data.draw(_JSON)
            break
        place = place[key]


@given(data=st.data(), many=60)
def test_a_mutated_report_without_gates_is_shown_or_refused(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    value = OTHERS[data.draw(st.sampled_from(list(OTHERS)))]().to_json_dict()
    _mutate(value, data)
    path = tmp_path_factory.mktemp("mutated") / "r.json"
    path.write_text(json.dumps(value))
    try:
        found = read_report(path)
    except UsageError:
        return
    console = Console(width=100, record=True, file=path.with_suffix(".txt").open("w"))
    console.print(found.view())
    assert console.export_text() and as_markdown(found.view()).encode() and html_page(found.view()).encode()
    json.dumps(found.to_json_dict(), allow_nan=False)


@given(data=st.data(), many=60)
def test_a_mutated_report_is_gated_and_shown_or_refused(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Any value in any place of a report or of its baseline: a verdict in every form, or one error."""
    value = GATED[data.draw(st.sampled_from(list(GATED)))]().to_json_dict()
    layers = value if "layers" in value else value["analysis"]
    layers["layers"] = layers["layers"][:3]
    sound = json.dumps(value)
    _mutate(value, data)
    folder = tmp_path_factory.mktemp("mutated")
    sides = [sound, json.dumps(value)]
    for name, text in zip(("a", "b"), sides if data.draw(st.booleans()) else sides[::-1], strict=True):
        (folder / name).write_text(text)
    limits = Limits(max_accuracy_drop=0.01, min_share={"int8": 0.5}, allow_synthetic=data.draw(st.booleans()))
    try:
        after, before = (facts_of(read_report(folder / name), folder / name) for name in ("a", "b"))
        found = evaluate(after, before, limits)
    except UsageError:
        return
    console = Console(width=100, record=True, file=(folder / "terminal").open("w"))
    console.print(view(found))
    assert console.export_text() and as_markdown(view(found)).encode() and junit_xml(found).encode()
    json.dumps(found.to_json_dict(), allow_nan=False)
