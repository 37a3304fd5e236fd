"""The page of a profile in a real browser."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from browser import CHROMIUM, Page, chromium
from profile_samples import bare_profile, hostile_profile, large_profile, small_profile

from trtopt.report.html.page import html_page
from trtopt.report.schema.profile import ProfileLayer, ProfileReport, slowest
from trtopt.report.text.profile import view

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")

CY = "document.getElementById('graph')._cyreg.cy"
"""The graph, as Cytoscape registers it at its element."""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with chromium(tmp_path_factory.mktemp("chromium")) as page:
        yield page


@pytest.fixture
def page(browser: Page) -> Page:
    browser.complaints.clear()
    browser.requests.clear()
    browser.size(1280, 900)
    return browser


def _open(page: Page, report: ProfileReport, folder: Path) -> None:
    path = folder / "page.html"
    path.write_text(html_page(view(report)), encoding="utf-8")
    page.open(path)


def _text(page: Page, selector: str) -> str:
    return str(page.run(f"document.querySelector('{selector}').textContent"))


def _title(layer: ProfileLayer) -> str:
    """What the page calls a layer of one module, or of none."""
    return f"{layer.modules[0]} ({layer.name})" if layer.modules else layer.name


def _rows(page: Page) -> list[str]:
    """The layers in the table, from the top."""
    return list(page.run("[...document.querySelectorAll('#layers tbody tr')].map((row) => row.cells[0].textContent)"))


def _heading(page: Page, title: str) -> None:
    """Click a heading of the table of layers."""
    headings = list(page.run("[...document.querySelectorAll('#layers th')].map((cell) => cell.textContent)"))
    page.click_on(f"#layers th:nth-child({headings.index(title) + 1}) button")


def test_the_browser_notes_what_a_page_must_not_do(page: Page, tmp_path: Path) -> None:
    (tmp_path / "bad.html").write_text(
        "<meta charset=utf-8><img src='missing.png'><script>setTimeout(() => { throw Error('late'); })</script>"
    )
    page.open(tmp_path / "bad.html")
    assert any("late" in complaint for complaint in page.complaints)
    assert [request.rsplit("/", 1)[1] for request in page.requests] == ["missing.png"]


def _place(page: Page, index: int) -> tuple[float, float]:
    """Where in the window a layer of the graph is drawn."""
    x, y = page.run(
        f"""(() => {{
          const {"{x, y}"} = {CY}.getElementById('{index}').renderedPosition();
          const box = document.getElementById('graph').getBoundingClientRect();
          return [box.x + x, box.y + y];
        }})()"""
    )
    return x, y


@pytest.mark.parametrize("width", [1280, 500])
@pytest.mark.parametrize("make", [small_profile, large_profile, bare_profile])
def test_every_layer_is_drawn_without_errors_and_without_requests(
    page: Page, tmp_path: Path, make: Callable[[], ProfileReport], width: int
) -> None:
    page.size(width, 900)
    report = make()
    _open(page, report, tmp_path)
    assert page.run(f"{CY}.nodes().length") == len(report.layers)
    assert page.run("document.documentElement.scrollWidth <= innerWidth")
    assert page.complaints == [] == page.requests


def test_no_two_layers_of_the_graph_overlap(page: Page, tmp_path: Path) -> None:
    _open(page, large_profile(), tmp_path)
    overlapping = page.run(
        f"""(() => {{
          const boxes = {CY}.nodes().map((node) => node.boundingBox({{ includeLabels: true }}));
          boxes.sort((a, b) => a.y1 - b.y1);
          return boxes.filter((box, index) => boxes.slice(index + 1, index + 60).some((other) =>
            box.x1 < other.x2 && other.x1 < box.x2 && box.y1 < other.y2 && other.y1 < box.y2)).length;
        }})()"""
    )
    assert overlapping == 0


@pytest.mark.parametrize("what", ["layer3.2/conv2", "layer3.2.conv2", "layer3.2/conv2/conv", "LAYER3.2.CONV2"])
def test_search_finds_a_layer_by_name_node_and_module(page: Page, tmp_path: Path, what: str) -> None:
    _open(page, small_profile(), tmp_path)
    page.key("/")
    page.write(what)
    assert _text(page, "#found") == "1 layer"
    assert _text(page, "#hits") == "layer3.2.conv2 (/layer3/layer3.2/conv2)" == _text(page, "#details h3")
    assert page.run(f"{CY}.nodes('.miss').length") == len(small_profile().layers) - 1


def test_search_by_kernel_lists_all_its_layers_and_enter_goes_through_them(page: Page, tmp_path: Path) -> None:
    report = small_profile()
    _open(page, report, tmp_path)
    page.click_on("#find")
    page.write("scudnn")
    hits = [_title(layer) for layer in report.layers if "scudnn" in layer.tactic]
    assert page.run("[...document.querySelectorAll('#hits button')].map((hit) => hit.textContent)") == hits
    page.key("Enter")
    assert _text(page, "#details h3") == hits[1]


def test_search_says_when_there_is_none(page: Page, tmp_path: Path) -> None:
    _open(page, small_profile(), tmp_path)
    page.click_on("#find")
    page.write("no such layer")
    assert _text(page, "#found") == "0 layers"
    assert page.run("document.querySelector('#hits').hidden")


def test_a_click_on_a_layer_of_the_graph_shows_its_details(page: Page, tmp_path: Path) -> None:
    report = small_profile()
    _open(page, report, tmp_path)
    index = next(index for index, layer in enumerate(report.layers) if len(layer.deviation) == 2)
    assert _text(page, "#details h3") == _title(slowest(report.layers)[0]) != _title(report.layers[index])
    page.run("document.getElementById('graph').scrollIntoView({ block: 'center' })")
    page.settle()
    page.click(*_place(page, index))
    layer = report.layers[index]
    shown = _text(page, "#details")
    assert _text(page, "#details h3") == _title(layer)
    wanted = [*layer.onnx_nodes, *layer.modules, *(item.message for item in layer.deviation)]
    wanted += [layer.inputs[0].name, layer.outputs[0].format, layer.constants[0].name, layer.tactic]
    assert [text for text in wanted if text not in shown] == []


def _to_the_graph(page: Page) -> None:
    """Scroll to the graph, and wait until it takes the wheel: while a page scrolls, Cytoscape does not."""
    page.run("document.getElementById('graph').scrollIntoView({ block: 'center' })")
    page.run("new Promise((done) => setTimeout(done, 400))")


def test_the_graph_moves_by_dragging_and_zooms_by_the_wheel_after_a_click_only(page: Page, tmp_path: Path) -> None:
    _open(page, small_profile(), tmp_path)
    _to_the_graph(page)
    (x, y), level = _place(page, 0), page.run(f"{CY}.zoom()")
    page.wheel(x, y, -200)
    assert page.run(f"{CY}.zoom()") == level
    _to_the_graph(page)
    (x, y), place = _place(page, 0), page.run(f"{CY}.pan()")
    page.drag((x + 120, y), (x + 150, y + 40))
    moved = page.run(f"{CY}.pan()")
    assert (moved["x"] - place["x"], moved["y"] - place["y"]) == pytest.approx((30, 40), abs=1)
    page.wheel(x + 150, y + 40, -200)
    assert page.run(f"{CY}.zoom()") > level


def test_a_tap_reaches_the_last_of_many_layers(page: Page, tmp_path: Path) -> None:
    report = large_profile()
    _open(page, report, tmp_path)
    page.run(f"{CY}.getElementById('1499').emit('tap') && null")
    assert _text(page, "#details h3") == _title(report.layers[1499])


def test_the_colours_follow_the_choice_and_the_legend_says_which(page: Page, tmp_path: Path) -> None:
    report = small_profile()
    _open(page, report, tmp_path)
    seen = {}
    for index in range(page.run("document.getElementById('coloring').options.length")):
        page.run(
            f"document.getElementById('coloring').value = '{index}',"
            "document.getElementById('coloring').dispatchEvent(new Event('change'))"
        )
        title = page.run("document.getElementById('coloring').selectedOptions[0].textContent")
        colors = page.run(f"[...new Set({CY}.nodes().map((node) => node.style('background-color')))].length")
        assert colors == page.run("document.querySelectorAll('#legend li').length")
        seen[title] = _text(page, "#legend")
    assert list(seen) == ["time", "precision", "measured / predicted", "limited by", "reason of the deviation"]
    assert "runs nothing: 1 layer" in seen["time"]
    assert "fp16" in seen["precision"] and "tail-wave" in seen["reason of the deviation"]


def test_names_in_the_table_break_behind_their_dots(page: Page, tmp_path: Path) -> None:
    report = small_profile()
    _open(page, report, tmp_path)
    breaks = sum(len(re.findall(r"[./](?=[^./])", _title(layer))) for layer in report.layers)
    assert breaks and page.run("document.querySelectorAll('#layers tbody wbr').length") == breaks


def test_the_table_sorts_by_any_column_and_filters_by_words(page: Page, tmp_path: Path) -> None:
    report = small_profile()
    _open(page, report, tmp_path)
    assert _rows(page) == [_title(layer) for layer in slowest(report.layers)]
    _heading(page, "measured")
    assert _rows(page)[-1] == _title(slowest(report.layers)[0])
    _heading(page, "layer")
    titles = [_title(layer) for layer in report.layers]
    assert _rows(page) == list(page.run(f"{titles}.sort((a, b) => a.localeCompare(b))"))
    page.click_on("#filter")
    page.write("conv3 tail-wave")
    found = {
        _title(layer)
        for layer in report.layers
        if "conv3" in layer.name and layer.deviation[:1] and layer.predicted.gemm
    }
    assert found and set(_rows(page)) == found
    assert _text(page, "#shown").startswith(f"{len(found)} layers of {len(report.layers)}")


def test_the_table_filters_all_of_many_layers_and_shows_the_first(page: Page, tmp_path: Path) -> None:
    report = large_profile()
    _open(page, report, tmp_path)
    assert _rows(page) == [_title(layer) for layer in slowest(report.layers)[:200]]
    assert _text(page, "#shown") == "1500 layers of 1500, the first 200 of them"
    fastest = slowest(report.layers)[-1]
    page.click_on("#filter")
    page.write(fastest.name)
    assert _title(fastest) in _rows(page)


def test_a_layer_of_the_table_is_shown_in_the_graph(page: Page, tmp_path: Path) -> None:
    report = small_profile()
    _open(page, report, tmp_path)
    page.click_on("#layers tbody tr:nth-child(3) button")
    layer = slowest(report.layers)[2]
    assert _text(page, "#details h3") == _title(layer)
    assert page.run(f"{CY}.nodes('.chosen').map((node) => Number(node.id()))") == [report.layers.index(layer)]
    assert page.run("document.activeElement.id") == "details"


@pytest.mark.parametrize("plot", ["scatter", "roofline"])
def test_a_layer_of_a_plot_is_shown_in_the_graph(page: Page, tmp_path: Path, plot: str) -> None:
    report = small_profile()
    _open(page, report, tmp_path)
    page.click_on(f"#{plot} .points path")
    name = _text(page, "#details h3")
    limiters = ("math", "memory", "latency")
    first = next(
        layer
        for limiter in limiters
        for layer in slowest(report.layers)
        if layer.predicted and layer.predicted.limiter == limiter
    )
    clicked = next(layer for layer in report.layers if _title(layer) == name)
    assert clicked.predicted is not None and first.predicted is not None
    assert clicked.predicted.predicted_us == first.predicted.predicted_us, "of layers in one place, the last is on top"
    assert page.run("document.activeElement.id") == "details"


def test_texts_of_a_file_run_no_script_and_are_shown_as_they_are(page: Page, tmp_path: Path) -> None:
    report = hostile_profile()
    _open(page, report, tmp_path)
    for index in range(len(report.layers)):
        page.run(f"{CY}.getElementById('{index}').emit('tap') && null")
    assert page.run("document.querySelectorAll('img, b b, [onmouseover]').length") == 0
    page.click_on("#find")
    page.write("</script><script>")
    assert _text(page, "#details h3") == report.layers[0].name
    assert page.run("document.title").endswith(": profile")
    assert page.complaints == [] == page.requests


def test_bare_names_are_a_chain_and_the_page_says_so(page: Page, tmp_path: Path) -> None:
    report = bare_profile()
    _open(page, report, tmp_path)
    assert page.run(f"{CY}.edges().length") == len(report.layers) - 1
    assert "names no tensors" in _text(page, "main")
    assert page.run("document.getElementById('scatter')") is None
