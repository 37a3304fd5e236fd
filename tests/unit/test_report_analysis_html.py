"""The page of an analysis: one file, nothing fetched, nothing of the model taken for markup."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from analysis_samples import (
    GPU,
    HOSTILE,
    analysis_of,
    full_analysis,
    hostile_layers,
    many_layers,
    resnet50_layers,
    small_layers,
    sweep_of,
)

from trtopt.errors import MissingDependencyError, UsageError
from trtopt.report.html import plots
from trtopt.report.html.page import check_html, html_page
from trtopt.report.schema.analysis import Analysis, Excess, Limit
from trtopt.report.text.analysis import view
from trtopt.report.text.format import page_time, visible
from trtopt.report.text.layers import as_layers
from trtopt.report.text.names import Labels
from trtopt.roofline.work import Layer
from trtopt.support.files import atomic_write

SCRIPTS = 5
"""plotly, Cytoscape.js, the layers, the sorting of tables, the graph; each plot adds one."""


class _Page(HTMLParser):
    """Tags, attributes and texts of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.cells: list[str] = []
        self._script = False
        self.source = page
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._script = tag in ("script", "style")
        if tag == "td":
            self.cells.append("")

    def handle_endtag(self, tag: str) -> None:
        self._script = False

    def handle_data(self, data: str) -> None:
        if self._script:
            return
        self.texts.append(data)
        if self.cells:
            self.cells[-1] += data

    @property
    def text(self) -> str:
        return " ".join("".join(self.texts).split())


def _page(analysis: Analysis) -> _Page:
    return _Page(html_page(view(analysis, GPU)))


def _figure(page: str, name: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Data and layout of a plot as they stand in the page."""
    start = page.index(f'Plotly.newPlot("{name}"')
    decoder = json.JSONDecoder()
    data, end = decoder.raw_decode(page, page.index("[", start))
    layout, _ = decoder.raw_decode(page, page.index("{", end))
    return data, layout


def test_the_page_needs_nothing_from_elsewhere_and_forbids_every_request() -> None:
    page = _page(full_analysis())
    for tag, attributes in page.tags:
        assert not {"src", "href", "action", "background", "poster"} & set(attributes), (tag, attributes)
    policies = [attrs["content"] for tag, attrs in page.tags if attrs.get("http-equiv") == "Content-Security-Policy"]
    assert len(policies) == 1
    directives = dict(part.split(maxsplit=1) for part in (policies[0] or "").split(";"))
    assert directives["default-src"] == directives["form-action"] == "'none'"
    assert not any("http" in value or "*" in value for value in directives.values())


def test_no_button_uploads_a_plot() -> None:
    page = html_page(view(full_analysis(), GPU))
    configs = re.findall(r'"modeBarButtons":(\[\[.*?\]\])', page)
    assert configs and all("cloud" not in config.lower() for config in configs)


def test_names_of_the_model_are_text_wherever_they_stand() -> None:
    base = analysis_of(hostile_layers)
    analysis = dataclasses.replace(
        base,
        model={"path": "a/</title><b>.onnx", HOSTILE[0]: [HOSTILE[1]]},
        gpu={**base.gpu, "name": HOSTILE[0]},
        warnings=HOSTILE,
        findings=tuple(dataclasses.replace(base.findings[0], nodes=(name,), remedy=name) for name in HOSTILE),
        levels=(base.levels[0], dataclasses.replace(base.levels[0], level="engine", proxy=HOSTILE[0])),
        memory=dataclasses.replace(base.memory, peak_node=HOSTILE[0]),
    )
    gpu = dataclasses.replace(GPU, name=HOSTILE[0], source=HOSTILE[1], tflops={**GPU.tflops, HOSTILE[0]: 1.0})
    source = html_page(view(analysis, gpu))
    page = _Page(source)
    assert sum(tag == "script" for tag, _ in page.tags) == SCRIPTS + 2
    assert not {"img", "b", "iframe"} & {
        tag for tag, attributes in page.tags if "onerror" in attributes or tag == "img"
    }
    assert not [attributes for _, attributes in page.tags if any(name.startswith("on") for name in attributes)]
    source.encode("utf-8")
    for name in HOSTILE[:7]:
        assert " ".join(visible(name).split()) in page.text, name


def test_names_are_no_markup_beside_the_pointer_either() -> None:
    data, _ = _figure(html_page(view(analysis_of(hostile_layers), GPU)), "roofline")
    hovers = [text for trace in data for text in trace.get("hovertext", [])]
    assert len(hovers) == len(HOSTILE)
    for text in hovers:
        assert set(re.findall(r"<[^>]*>", text)) <= {"<b>", "</b>", "<br>"}
    assert any("%{x} &lt;b&gt;bold" in text for text in hovers)


def test_the_layers_of_an_engine_name_the_nodes_they_compute() -> None:
    row = dataclasses.replace(analysis_of(small_layers).layers[0], name="__myl_1", onnx_nodes=("/a/Conv", "/a/Relu"))
    (layer,) = as_layers([row], Labels({}))
    assert plots.hover_text(layer, row).endswith("<br>computes /a/Conv and 1 more")
    assert "computes" not in plots.hover_text(dataclasses.replace(layer, onnx_nodes=("__myl_1",)), row)
    page = _page(dataclasses.replace(analysis_of(small_layers), layers=(row,)))
    assert "__myl_1" in page.cells and '"nodes":["/a/Conv","/a/Relu"]' in page.source


def test_every_layer_is_a_point_under_its_own_ceilings() -> None:
    analysis = analysis_of(resnet50_layers)
    data, layout = _figure(html_page(view(analysis, GPU)), "roofline")
    points = [trace for trace in data if trace["mode"] == "markers"]
    assert sum(len(trace["x"]) for trace in points) == len(analysis.layers)
    named = {trace["name"] for trace in data if trace["mode"] == "lines"}
    assert named == {
        "fp8, int8: 242 TFLOP/s",
        "fp16: 121 TFLOP/s",
        "tf32: 60 TFLOP/s",
        "fp32: 30.3 TFLOP/s",
        "memory: 300 GB/s",
    }
    xs = [x for trace in points for x in trace["x"]]
    ys = [y for trace in points for y in trace["y"]]
    for values, axis in ((xs, "xaxis"), (ys, "yaxis")):
        low, high = layout[axis]["range"]
        assert 10**low <= min(values) and max(values) <= 10**high


def _roofline(make: Callable[[int], list[Layer]], precision: str, l2_gbs: float | None = None) -> plots.Figure:
    layers = as_layers(analysis_of(make).layers, Labels({}))
    return plots.roofline(layers, GPU.tflops, GPU.bandwidth_gbs, precision, l2_gbs)


@pytest.mark.parametrize(
    ("precision", "strong"),
    [
        ("fp16", ["fp16: 121 TFLOP/s"]),
        ("bf16", ["fp16: 121 TFLOP/s"]),
        ("int8", ["fp8, int8: 242 TFLOP/s"]),
        ("as-is", ["fp8, int8: 242 TFLOP/s", "fp16: 121 TFLOP/s"]),
    ],
)
def test_the_ceiling_of_the_precision_stands_out_or_else_those_of_the_types_in_use(
    precision: str, strong: list[str]
) -> None:
    data = _roofline(many_layers, precision)["data"]
    solid = [trace["name"] for trace in data if trace.get("line", {}).get("dash") == "solid"]
    assert [name for name in solid if "TFLOP/s" in name] == strong


def test_the_l2_is_a_second_roof_where_its_bandwidth_is_known() -> None:
    figure = _roofline(small_layers, "fp16", 1500.0)
    roofs = {trace["name"]: trace for trace in figure["data"] if "GB/s" in trace["name"]}
    assert set(roofs) == {"memory: 300 GB/s", "L2: 1,500 GB/s"}
    for trace, rate in zip(roofs.values(), (0.3, 1.5), strict=True):
        assert [y / x for x, y in zip(trace["x"], trace["y"], strict=True)] == pytest.approx([rate, rate])


def test_layers_without_arithmetic_are_said_to_be_missing_from_the_roofline() -> None:
    assert "1 layer without arithmetic cannot be drawn" in _page(analysis_of(small_layers)).text
    assert "cannot be drawn" not in _page(analysis_of(resnet50_layers)).text


def test_the_bars_in_order_hold_all_the_time_however_many_layers_there_are() -> None:
    for make in (small_layers, resnet50_layers, many_layers):
        analysis = analysis_of(make)
        figure = plots.in_order(as_layers(analysis.layers, Labels({})))
        assert sum(sum(trace["y"]) for trace in figure["data"]) == pytest.approx(analysis.totals.predicted_us)
        assert max(len(trace["y"]) for trace in figure["data"]) <= plots.MOST_BARS


def test_what_a_large_model_has_left_out_is_said_with_its_time() -> None:
    analysis = analysis_of(many_layers)
    source = html_page(view(analysis, GPU))
    data, _ = _figure(source, "roofline")
    assert sum(len(trace["x"]) for trace in data if trace["mode"] == "markers") == plots.MOST_POINTS
    text = _Page(source).text
    assert "The 2000 slowest are drawn; the other 400 take" in text
    assert " more rows with" in text and "; all of them are in the JSON" in text
    assert "Each bar is 8 layers" in text
    assert len(source) < 8_000_000


def test_the_page_shows_proxy_warnings_uncosted_operators_levels_and_versions() -> None:
    import trtopt

    text = _page(full_analysis()).text
    for part in (
        "PROXY: the compiler cannot target L4",
        "batch 8 was taken for the dynamic axis",
        "com.acme::Fancy",
        "Without a cost, and in no sum",
        "PROXY: RTX-4090",
        f"trtopt{trtopt.__version__}",
        "is the smallest with 90 % of the best throughput",
        GPU.source,
    ):
        assert part in text, part


@pytest.mark.parametrize(("folder", "shown"), [("nets", "nets/model.onnx"), ("../elsewhere", "model.onnx")])
def test_what_the_page_rests_on_is_in_words_and_names_no_folder_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str, shown: str
) -> None:
    monkeypatch.chdir(tmp_path)
    path = (tmp_path / folder / "model.onnx").resolve()
    inputs = [{"name": "x", "dtype": "float32", "shape": ["batch", 3]}]
    model = {"path": str(path), "inputs": inputs, "weights_hashed": True, "left_out": None}
    page = _page(dataclasses.replace(analysis_of(small_layers), model=model))
    assert f"model{shown}inputsx float32 [batch, 3]weights hashedyestrtopt" in page.text
    assert str(tmp_path) not in page.source


def test_the_limit_names_the_kernels_that_make_the_difference() -> None:
    excess = Excess("layout", "Transpose", "fp16", 3, ("turn<b>",), 40.0, 38.0)
    page = html_page(view(analysis_of(small_layers, limit=Limit(60.0, 98.0, 50.0, 2_000_000, (excess,))), GPU))
    assert ">Limit<" in page and "60.0 µs of 98.0 µs (61.2 %)" in page
    assert "turn&lt;b&gt;" in page and "only copies" in page
    assert ">Limit<" not in html_page(view(analysis_of(small_layers), GPU))


def test_parts_an_analysis_does_not_have_are_not_headed() -> None:
    text = _page(analysis_of(small_layers)).text
    for title in ("Batch", "Levels", "Without a cost", "PROXY"):
        assert title not in text
    empty = analysis_of(small_layers)
    empty = dataclasses.replace(
        empty, layers=(), totals=dataclasses.replace(empty.totals, predicted_us=0.0, flop=0, by_limiter={}, by_kind={})
    )
    assert "Roofline" not in _page(empty).text


def test_findings_stand_by_gain() -> None:
    page = _page(full_analysis())
    gains = [cell for cell in page.cells if cell.startswith("−") or cell == "–"]
    assert gains[0].startswith("−") and gains[-1] == "–"


def test_the_batch_curve_marks_knee_best_batch_and_budget() -> None:
    sweep = full_analysis().batch_sweep
    assert sweep is not None and sweep.budget_us is not None
    figure = plots.batch_curve(dataclasses.replace(sweep, knee=16, best_within_budget=32))
    marks = [dict(zip(trace["text"], trace["x"], strict=False)) for trace in figure["data"]]
    for mark in marks:
        mark.pop("", None)
    budget = f"budget {page_time(sweep.budget_us)}"
    assert marks == [{"knee: 16": 16}, {"best within the budget: 32": 32}, {budget: 1.0}]
    assert set(figure["data"][2]["y"]) == {sweep.budget_us / 1e3}
    assert figure["layout"]["xaxis"]["tickvals"] == [1, 2, 4, 8, 16, 32, 64, 128, 256]


@pytest.mark.parametrize(
    ("batches", "ticks"),
    [
        (range(1, 257), [1, 2, 4, 8, 16, 32, 64, 128, 256]),
        ((3,), [3]),
        ((1, 10, 100), [1, 10, 100]),
        ((33, 34, 35), [33, 35]),
    ],
)
def test_the_batches_named_on_the_axis_do_not_crowd(batches: range | tuple[int, ...], ticks: list[int]) -> None:
    figure = plots.batch_curve(sweep_of(small_layers, GPU, batches))
    assert figure["layout"]["xaxis"]["tickvals"] == ticks


def test_a_budget_far_above_the_curve_does_not_flatten_it() -> None:
    data = plots.batch_curve(sweep_of(small_layers, GPU, (1, 2), 1e9))["data"]
    assert [trace["name"] for trace in data] == ["throughput", "latency"]


def test_the_file_is_written_whole_and_a_folder_that_is_missing_is_a_usage_error(tmp_path: Path) -> None:
    path = tmp_path / "model.html"
    atomic_write(path, html_page(view(analysis_of(small_layers), GPU)))
    assert path.read_text(encoding="utf-8").endswith("</html>\n")
    assert [item.name for item in tmp_path.iterdir()] == ["model.html"]
    with pytest.raises(UsageError):
        atomic_write(tmp_path / "missing" / "model.html", html_page(view(analysis_of(small_layers), GPU)))


def test_without_jinja_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(MissingDependencyError):
        check_html("page.html")
    with pytest.raises(MissingDependencyError) as caught:
        html_page(view(analysis_of(small_layers), GPU))
    assert caught.value.exit_code == 4
    assert caught.value.remedy == 'pip install "trtopt[report]"'


def test_importing_the_page_does_not_import_jinja() -> None:
    heavy = "bool('jinja2' in sys.modules)"
    code = f"import sys, trtopt.report.html.page, trtopt.report.text.analysis; sys.exit({heavy})"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
