"""A check as a terminal, a pull request and a CI system show it."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from analysis_samples import HOSTILE
from rich.console import Console

from trtopt.report.files import junit_xml, write_forms
from trtopt.report.html.page import html_page
from trtopt.report.schema.check import Checked, CheckReport, Gate, LayerChange
from trtopt.report.text.check import view
from trtopt.report.text.markdown import as_markdown

MAIN = Checked("main.json", "trtopt.build/1", "/ci/models/model.onnx", "ab", "L4", "tensorrt-rtx 1.7.1", "int8")
LOST = LayerChange(("layer1/conv", "layer1/relu"), (1, 2), (("int8",), ("fp16",)), (10.0, 21.5))
GATES = (
    Gate("build", "the gates of the build itself", "passed"),
    Gate("accuracy:top1", "top1", "failed", "metric", 0.95, 0.93, "at least", 0.94, True, "0.02 less accurate"),
    Gate("latency", "latency, predicted", "passed", "us", 1234.5, 1200.0, "at most", 1296.2, True),
    Gate("share:int8", "int8 share of the flop", "failed", "share", 0.9, 0.4, "at least", 0.5, False, "less", (LOST,)),
    Gate("bytes", "engine size", "passed", "bytes", 2_000_000, 2_100_000, "at most", 2_200_000.0, True),
    Gate("kernels", "kernels", "not judged", is_default=True, reason="the report has no engine"),
)
FOUND = CheckReport(dataclasses.replace(MAIN, report="pr.json"), MAIN, GATES, ("the model changed",))
PASSED = CheckReport(MAIN, None, (GATES[0], GATES[2]))


def hostile() -> CheckReport:
    """Names as a model from elsewhere may have them, in every place that shows one."""
    layers = tuple(LayerChange((name, name), (1, 2), ((name,), ("fp16",)), (1.0, None)) for name in HOSTILE)
    gates = tuple(
        Gate(
            f"accuracy:{name}", name, "failed", "metric", 1.0, float("nan"), "at least", 0.9, reason=name, layers=layers
        )
        for name in HOSTILE
    )
    gates += tuple(Gate("latency", name, "not judged", reason=name) for name in HOSTILE)
    checked = Checked(HOSTILE[0], "trtopt.build/1", HOSTILE[-1], "ab", HOSTILE[1], "", "int8")
    return CheckReport(checked, checked, gates, tuple(HOSTILE))


def shown(found: CheckReport, width: int = 100) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115 - closed with the process
    console.print(view(found))
    return console.export_text()


def test_the_markdown_starts_with_the_verdict_and_has_a_row_for_each_gate() -> None:
    lines = as_markdown(view(FOUND)).splitlines()
    assert lines[0] == "## ❌ trtopt check: 2 of 5 gates failed"
    assert r"| ❌ failed | top1 | 0.9500 | 0.9300 | at least 0.9400 \(default\) |" in lines
    assert "| ❌ failed | int8 share of the flop | 90.0 % | 40.0 % | at least 50.0 % |" in lines
    assert r"| ✅ passed | engine size | 2.0 MB | 2.1 MB | at most 2.2 MB \(default\) |" in lines
    assert "| ➖ not judged | kernels |  |  |  |" in lines
    assert as_markdown(view(PASSED)).startswith("## ✅ trtopt check: 2 gates passed\n")


def test_the_markdown_says_where_to_look() -> None:
    text = as_markdown(view(FOUND))
    what = text.partition("### Failed: int8 share of the flop")[2].partition("### Not judged")[0]
    assert what.startswith("\n\nless\n")
    assert r"| layer1/conv \+1 |  | 1 \-\> 2 | int8 \-\> fp16 | 10.0 \-\> 21.5 us |" in what
    assert "### Not judged: kernels\n\nthe report has no engine" in text
    assert "- the model changed" in text.partition("### Notes")[2]


def test_a_check_has_a_page(tmp_path: Path) -> None:
    write_forms(FOUND, html=tmp_path / "check.html")
    page = (tmp_path / "check.html").read_text(encoding="utf-8")
    assert '<h1 class="bad">2 of 5 gates failed</h1>' in page and "Content-Security-Policy" in page
    assert "<title>model.onnx, int8, on L4, tensorrt-rtx 1.7.1: check</title>" in page
    assert "<script><b>" not in html_page(view(hostile()))


def test_many_layers_are_cut_and_counted() -> None:
    unlike = tuple(dataclasses.replace(LOST, nodes=(f"conv_{'x' * number}",)) for number in range(20))
    text = as_markdown(view(dataclasses.replace(FOUND, gates=(dataclasses.replace(GATES[3], layers=unlike),))))
    assert text.count("| conv") == 8 and "and 12 more places; all of them are in the JSON" in text


def test_equal_changes_of_equal_layers_are_one_row() -> None:
    equal = tuple(dataclasses.replace(LOST, nodes=(f"blocks.{number}.conv",)) for number in range(20))
    text = shown(dataclasses.replace(FOUND, gates=(dataclasses.replace(GATES[3], layers=equal),)), 80)
    assert len([line for line in text.splitlines() if "conv" in line]) == 1
    assert "x20" in text and "200 -> 430 us" in text


def test_a_failed_check_ends_in_the_line_that_shows_why() -> None:
    assert "trtopt report pr.json --against main.json" in shown(FOUND, 80)
    assert "trtopt report pr.json\n" in as_markdown(view(dataclasses.replace(FOUND, baseline=None)))
    passed = tuple(dataclasses.replace(gate, verdict="passed") for gate in GATES)
    assert "trtopt report" not in shown(dataclasses.replace(FOUND, gates=passed), 80)


def test_names_are_no_markup() -> None:
    text = as_markdown(view(hostile()))
    for line in text.splitlines():
        if line.startswith("| "):
            assert len(re.findall(r"(?<!\\)\|", line)) in (6, 7), line
    outside = text.split("\n```\n")[::2]  # of code, in which nothing is markup
    assert not re.search(r"(?<!\\)[<@]", "".join(outside))


@pytest.mark.parametrize("width", [80, 120])
def test_the_terminal_shows_the_same_within_its_width(width: int) -> None:
    text = shown(FOUND, width)
    assert text.splitlines()[0].strip() == "2 of 5 gates failed"
    assert "Failed: int8 share of the flop" in text and "10.0 -> 21.5 us" in text
    assert "model.onnx, int8, on L4, tensorrt-rtx 1.7.1 (pr.json)" in " ".join(text.split())
    assert "\x1b" not in shown(hostile(), width)


CHILDREN = {
    "testsuites": {"testsuite"},
    "testsuite": {"properties", "testcase"},
    "properties": {"property"},
    "property": set(),
    "testcase": {"failure", "skipped"},
    "failure": set(),
    "skipped": set(),
}
REQUIRED = {
    "testsuite": {"name", "tests", "failures", "errors"},
    "property": {"name", "value"},
    "testcase": {"name", "classname", "time"},
    "failure": {"type", "message"},
    "skipped": {"message"},
}
ALLOWED = REQUIRED | {
    "testsuites": {"name", "time", "tests", "failures", "errors"},
    "testsuite": {"name", "tests", "failures", "errors", "skipped", "time", "timestamp", "hostname", "id", "package"},
}
"""The elements and attributes of Jenkins' junit-10.xsd (xUnit plugin) that this document may use."""


@pytest.mark.parametrize("found", [FOUND, PASSED, hostile()], ids=["failed", "passed", "hostile"])
def test_the_junit_file_keeps_to_its_schema(found: CheckReport) -> None:
    root = ElementTree.fromstring(junit_xml(found).encode())
    assert root.tag == "testsuites"
    for element in root.iter():
        assert {child.tag for child in element} <= CHILDREN[element.tag]
        assert REQUIRED.get(element.tag, set()) <= set(element.attrib) <= ALLOWED.get(element.tag, set())
        if element.tag not in ("failure",):
            assert not (element.text or "").strip()
        if "time" in element.attrib:
            assert re.fullmatch(r"[0-9]{0,3}(\.[0-9]*)?", element.attrib["time"])
    (suite,) = root
    cases = suite.findall("testcase")
    for node in (root, suite):
        assert int(node.attrib["tests"]) == len(cases) == len(found.gates)
        assert int(node.attrib["failures"]) == len(suite.findall("testcase/failure")) == len(found.failed)
        assert node.attrib["errors"] == "0"
    assert int(suite.attrib["skipped"]) == len(suite.findall("testcase/skipped"))
    assert all(len(case) <= 1 for case in cases)


def test_a_failure_carries_the_figures_and_the_layers() -> None:
    root = ElementTree.fromstring(junit_xml(FOUND).encode())
    failures = {case.attrib["name"]: case.find("failure") for case in root.iter("testcase")}
    failure = failures["int8 share of the flop"]
    assert failure is not None and failure.attrib["message"] == "less"
    text = failure.text or ""
    for words in ("before: 90.0 %", "now: 40.0 %", "limit: at least 50.0 %", "layer1/conv"):
        assert words in text
    skipped = [case.attrib["name"] for case in root.iter("testcase") if case.find("skipped") is not None]
    assert skipped == ["kernels"]
