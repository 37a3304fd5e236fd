"""The page of a profile: its graph's layout, its data, its figures; nothing of the file taken for markup."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re

import pytest
from analysis_samples import HOSTILE, elementwise
from profile_samples import bare_profile, hostile_profile, large_profile, profile_of, small_profile

from trtopt.report.html.page import html_page
from trtopt.report.html.plots import compared, roofline, scatter
from trtopt.report.html.profile import _title, colorings, columns, ink_on, label, layer_data
from trtopt.report.html.profile_graph import LANE, ROW, graph, links
from trtopt.report.schema.layers import TensorInfo
from trtopt.report.schema.profile import ProfileLayer, ProfileReport, ProfileTotals
from trtopt.report.text.format import visible
from trtopt.report.text.profile import view


def _layer(name: str, reads: str = "", writes: str = "") -> ProfileLayer:
    """A layer by the letters of the tensors it reads and writes."""
    inputs, outputs = (tuple(TensorInfo(letter, (1,), "Half") for letter in names) for names in (reads, writes))
    return ProfileLayer(name, "kgen", (), (), inputs, outputs, (), "", None, None, 1.0)


def _chain(number: int) -> ProfileReport:
    return profile_of([elementwise(f"/{index}", 1 << 16) for index in range(number)])


def _text(page: str) -> str:
    """The words of a page."""
    body = re.sub(r"<(script|style).*?</\1>", "", page, flags=re.DOTALL)
    return " ".join(re.sub(r"<[^>]*>", " ", body).split())


def test_a_layer_reads_a_tensor_as_the_last_layer_before_wrote_it() -> None:
    layers = [_layer("first", "x", "ab"), _layer("again", "a", "a"), _layer("both", "ab", "y"), _layer("out", "y", "z")]
    assert links(layers) == [(0, 1), (1, 2), (0, 2), (2, 3)]


def test_layers_without_tensors_follow_the_one_that_runs_before() -> None:
    assert links(bare_profile().layers) == list(itertools.pairwise(range(12)))
    mixed = [_layer("first", "x", "a"), _layer("bare"), _layer("last", "a", "y")]
    assert links(mixed) == [(0, 1), (0, 2)]


def test_branches_stand_side_by_side_and_join_below() -> None:
    layers = [_layer("in", "x", "a"), _layer("left", "a", "b"), _layer("right", "a", "c"), _layer("join", "bc", "d")]
    (x0, y0), (x1, y1), (x2, y2), (x3, y3) = graph(layers).places
    assert (y0, y1, y2, y3) == (0, ROW, ROW, 2 * ROW)
    assert x2 - x1 == pytest.approx(LANE)
    assert x0 == x3 == pytest.approx((x1 + x2) / 2)


def test_a_line_past_other_layers_has_a_lane_of_its_own() -> None:
    layers = [_layer("in", "x", "a"), _layer("one", "a", "b"), _layer("two", "b", "c"), _layer("add", "ca", "d")]
    drawn = graph(layers)
    (shortcut,) = [edge for edge in drawn.edges if edge.bends]
    assert (shortcut.source, shortcut.target) == (0, 3)
    between = [drawn.places[index] for index in (1, 2)]
    assert all(abs(x - bend) > LANE / 2 for x, _ in between for bend, _ in shortcut.bends)
    assert shortcut.bends[0][1] < ROW < 2 * ROW < shortcut.bends[-1][1]


def test_what_reads_from_no_layer_stands_just_above_its_reader() -> None:
    layers = [_layer("in", "x", "a"), _layer("mask", "m", "n"), _layer("one", "a", "b"), _layer("add", "bn", "c")]
    places = graph(layers).places
    assert places[1][1] == places[2][1] == ROW


@pytest.mark.parametrize("report", [small_profile(), large_profile(), bare_profile(), _chain(1), _chain(2), _chain(97)])
def test_boxes_keep_their_distance_in_a_graph_as_wide_as_its_window(report: ProfileReport) -> None:
    drawn = graph(report.layers)
    rows: dict[float, list[float]] = {}
    for x, y in drawn.places:
        rows.setdefault(y, []).append(x)
    for row in rows.values():
        assert all(right - left > 0.999 * LANE for left, right in itertools.pairwise(sorted(row)))
    assert all(low + ROW == high for low, high in itertools.pairwise(sorted(rows)))
    if len(report.layers) > 20:
        width = max(x for x, _ in drawn.places) + LANE
        height = max(rows) + ROW
        assert 1.2 < width / height < 2.2


def test_a_layer_that_shares_no_tensor_takes_a_row_of_its_own() -> None:
    layers = [_layer(str(index), "x", "") for index in range(8)]
    assert links(layers) == []
    assert len(set(graph(layers).places)) == len(layers)


def test_every_column_has_a_value_of_each_layer() -> None:
    report = small_profile()
    for layer in (*report.layers, *bare_profile().layers):
        for _, style, value in columns(report.totals.measured_us):
            assert (style == "number") == isinstance(value(layer), tuple) or value(layer) == ""


def test_the_cells_say_what_is_known_of_a_layer() -> None:
    report = small_profile()
    layer = max(report.layers, key=lambda item: len(item.deviation))
    row = layer.predicted
    assert row is not None and row.gemm is not None and layer.ratio is not None
    found = {title: value(layer) for title, _, value in columns(report.totals.measured_us)}
    assert found["measured"] == (found["measured"][0], layer.measured_us)
    assert found["measured / predicted"] == (f"{layer.ratio:.2f}", layer.ratio)
    assert found["reasons"] == "tail-wave, slower-than-predicted"
    assert found["reads"] == "Half Channel major FP16 format"
    assert found["m x n x k"] == f"{row.gemm['m']}x{row.gemm['n']}x{row.gemm['k']}"
    bare = {title: value(bare_profile().layers[0]) for title, _, value in columns(0.0)}
    assert {title for title, value in bare.items() if value} == {"layer", "measured", "share"}


def test_a_label_is_short_and_names_the_end_of_a_path() -> None:
    layer = _layer("/model/encoder/Conv_0 + /model/encoder/Relu_1")
    assert label(layer) == "Conv_0 + Relu_1\nkgen 1.00 µs"
    for item in hostile_profile().layers:
        assert all(len(line) <= 21 for line in label(item).split("\n")) and label(item).count("\n") == 1


def test_texts_of_a_file_cannot_end_the_script_that_holds_them() -> None:
    report = hostile_profile()
    data = layer_data(report.layers)
    assert not set("<>&\u2028\u2029") & set(data) and data.isascii()
    assert [layer["name"] for layer in json.loads(data)["layers"]] == [
        visible(_title(layer)) for layer in report.layers
    ]


def test_the_details_write_times_as_the_cells_do() -> None:
    layer = next(layer for layer in small_profile().layers if layer.deviation)
    reason = dataclasses.replace(layer.deviation[0], message="12.3 us predicted")
    (shown,) = json.loads(layer_data([dataclasses.replace(layer, deviation=(reason,))]))["layers"]
    assert shown["reasons"][0][2] == "12.3 µs predicted"


def test_texts_of_a_file_are_no_markup_anywhere() -> None:
    clean, page = html_page(view(small_profile())), html_page(view(hostile_profile()))
    for mark in ("<script", "</script", "<img", "</title"):
        assert page.count(mark) == clean.count(mark)
    for name in HOSTILE[:2]:
        assert name not in page


def test_the_page_forbids_every_request_and_makes_none() -> None:
    page = html_page(view(small_profile()))
    assert "default-src 'none'" in page
    tags = re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)
    assert not re.search(r"<[^>]*\s(src|href|action)=", tags)


def test_what_is_in_no_layer_is_no_negative_cost_of_timing() -> None:
    report = small_profile()
    totals = dataclasses.replace(report.totals, end_to_end_us=100.0, profiling_overhead_us=-40.0)
    text = _text(html_page(view(dataclasses.replace(report, totals=totals))))
    assert "in no layer 40.0 µs 40.0 % of one inference" in text and "timing each layer adds" not in text


def test_the_head_has_the_figures_and_the_warnings() -> None:
    report = small_profile()
    text = _text(html_page(view(report)))
    for words in ("sum of the layers", "one inference", "timing each layer adds", "mean error", "rank correlation"):
        assert words in text
    assert "56 layers on L4, by tensorrt 10.9.0, each layer timed, 100 runs" in text
    assert f"{len(report.layers)} layers, 1 of which run nothing" in text
    assert report.warnings[0] in text


def test_what_is_not_known_is_not_shown() -> None:
    text = _text(html_page(view(bare_profile())))
    assert "one inference not known" in text
    assert "no layer has both a measured and a predicted time" in text
    assert "names no tensors" in text
    assert "rank correlation" not in text and "Roofline" not in text


def test_a_profile_without_layers_is_a_page() -> None:
    empty = dataclasses.replace(bare_profile(), layers=(), totals=ProfileTotals(0.0, 0.0, 0.0))
    assert "None." in _text(html_page(view(empty)))


def test_each_way_to_colour_puts_every_layer_into_one_group_that_can_be_read() -> None:
    report = small_profile()
    found = colorings(report.layers)
    assert [coloring["title"] for coloring in found] == [
        "time",
        "precision",
        "measured / predicted",
        "limited by",
        "reason of the deviation",
    ]
    for coloring in found:
        assert len(coloring["of_layer"]) == len(report.layers)
        assert set(coloring["of_layer"]) == set(range(len(coloring["groups"])))
    assert [coloring["title"] for coloring in colorings(bare_profile().layers)] == ["time", "precision"]


@pytest.mark.parametrize("color, ink", [("#ffffff", "#000000"), ("#000000", "#ffffff"), ("#a3224f", "#ffffff")])
def test_text_is_black_or_white_whichever_is_read_better(color: str, ink: str) -> None:
    assert ink_on(color) == ink


def test_the_plots_hold_the_layers_with_both_times() -> None:
    report = small_profile()
    both = compared(report.layers)
    assert len(both) == len(report.layers) - 1
    roofs = roofline(report.layers, report.gpu["tflops"], report.gpu["bandwidth_gbs"])
    for figure in (scatter(report.layers), roofs):
        points = [trace for trace in figure["data"] if trace["mode"] == "markers"]
        assert sorted(index for trace in points for index in trace.get("customdata", ())) == sorted(both)
    point = report.layers[both[0]]
    trace = next(trace for trace in scatter(report.layers)["data"] if both[0] in trace.get("customdata", ()))
    place = trace["customdata"].index(both[0])
    assert (trace["x"][place], trace["y"][place]) == (point.predicted_us, point.measured_us)
