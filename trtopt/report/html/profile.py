"""A profile as one HTML file that loads nothing else (see :mod:`trtopt.report.html.page`).

The graph is drawn by Cytoscape.js 3.34.4, whose script (0.44 MB) is written into the page. Of the other maintained
libraries, vis-network 10.1 (0.65 MB) draws 1,500 layers in 0.15 s instead of 0.6 s, but a line is straight or one curve
there, and crosses the boxes that a residual passes; plotly, which draws the plots, has no graphs. The layout is
computed in Python (:mod:`trtopt.report.html.profile_graph`) in 0.04 s, where dagre 3.1 takes 1.3 s and elkjs 0.12
(1.6 MB) 2 s, during which the page would not answer. ``benchmarks/profile`` has the times of the page.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath

from trtopt.report.html import plots
from trtopt.report.html.page import (
    Cell,
    Column,
    Draw,
    assumptions,
    banners,
    drawing,
    findings,
    name,
    page,
    quiet,
    section,
    table,
    text,
    tiles,
)
from trtopt.report.html.plots import MOST_POINTS
from trtopt.report.html.profile_graph import without_tensors
from trtopt.report.html.profile_layers import layer_data
from trtopt.report.schema.profile import ProfileLayer, ProfileReport
from trtopt.report.text.format import count, decibels, page_time, percent, visible
from trtopt.report.text.profile import headline
from trtopt.support.version import VERSION

_NO_SUM = "What could be won is estimated one by one and does not add up. <code>trtopt explain RULE</code> says why."


def profile_html(report: ProfileReport) -> str:
    """The page of a profile: one file of 5.3 MB and 2 kB a layer, without any request to the network.

    Raises:
        MissingDependencyError: plotly is not installed.
    """
    draw = drawing()
    sections = (
        _head(report),
        findings(report.findings, report.totals.measured_us, _NO_SUM),
        _graph(report),
        _compared(report, draw),
        _roofline(report, draw),
        _layers(report),
        _accuracy(report),
        _assumptions(report),
        f'<script type="application/json" id="data">{layer_data(report.layers)}</script>',
    )
    return page(
        f"{profile_name(report)} on {visible(str(report.gpu['name']))}: profile",
        sections,
        styles=("analysis.css", "profile.css"),
        libraries=("vendor/cytoscape.min.js",),
        scripts=("analysis.js", "profile.js"),
    )


def profile_name(report: ProfileReport) -> str:
    """The name of the network: that of the file it comes from."""
    files = report.source.files
    first = next((files[kind] for kind in ("model", "engine", "layer-info", "layer-profile") if kind in files), "")
    return visible(PurePath(first).name) or "network in memory"


def _head(report: ProfileReport) -> str:
    files = ", ".join(f"{text(kind)} {name(PurePath(file).name, 60)}" for kind, file in report.source.files.items())
    return (
        f"<header><h1>{text(profile_name(report))} on {text(report.gpu['name'])}</h1>"
        f'<p class="quiet">{text(headline(report))}: {files}</p></header>'
        f"{banners(report.warnings)}{tiles(_tiles(report))}"
    )


def _tiles(report: ProfileReport) -> list[tuple[str, str, str]]:
    """Title, value and note of the figures at the head."""
    totals = report.totals
    both = plots.compared(report.layers)
    idle = sum(layer.measured_us <= 0 for layer in report.layers)
    runs_nothing = f", {idle} of which run nothing" if idle else ""
    found = [("sum of layers", page_time(totals.measured_us), count(len(report.layers), "layer") + runs_nothing)]
    if totals.end_to_end_us is None:
        found.append(("end to end", "not known", "the time of one inference without profiling was not measured"))
    else:
        spread = totals.end_to_end_spread_us
        plus = "" if spread is None else f" ± {page_time(spread)}"
        host = "" if totals.host_us is None else f", enqueued in {page_time(totals.host_us)}"
        found.append(("end to end", page_time(totals.end_to_end_us), f"one inference without profiling{plus}{host}"))
    if totals.profiling_overhead_us is not None and totals.end_to_end_us:
        over = totals.profiling_overhead_us
        share = percent(abs(over) / totals.end_to_end_us)
        note = f"the sum of layers is {share} {'above' if over > 0 else 'below'} end to end"
        found.append(("profiling overhead", page_time(over), note))
    if not both:
        return found
    whole = totals.predicted_end_to_end_us
    note = f"for layers measured at {page_time(totals.compared_us)}"
    note += "" if whole is None else f"; end to end {page_time(whole)}"
    found.append(("predicted", page_time(totals.predicted_us), note))
    if totals.mean_error is not None:
        found.append(("mean error", percent(totals.mean_error), f"of the prediction, over {count(len(both), 'layer')}"))
    if totals.rank_correlation is not None:
        found.append(("rank correlation", f"{totals.rank_correlation:.3f}", "Spearman's, of measured and predicted"))
    return found


def _graph(report: ProfileReport) -> str:
    if not report.layers:
        return section("Layers", "<p>None.</p>")
    return f"""<section><h2>Layers as a graph</h2>
<noscript><p class="banner">The graph and the table of layers need it too.</p></noscript>
<p class="quiet">{_graph_note(report.layers)}</p>
<div class="tools">
<label class="find">find <input type="search" id="find" placeholder="layer, node, module or kernel ( / )"
 autocomplete="off" spellcheck="false" aria-describedby="found"></label>
<label>colour by <select id="coloring"></select></label>
<span class="zoom"><button type="button" id="closer" aria-label="zoom in">+</button><button type="button" id="farther"
 aria-label="zoom out">−</button><button type="button" id="whole">whole graph</button></span>
</div>
<p class="quiet" id="found" role="status"></p><ol id="hits" hidden></ol>
<ul class="key" id="legend"></ul>
<div class="map"><div id="graph" role="img" aria-label="graph of the layers; the table below has the same layers"></div>
<aside id="details" tabindex="-1" aria-label="details of a layer"></aside></div></section>"""


def _graph_note(layers: Sequence[ProfileLayer]) -> str:
    bare = sum(without_tensors(layer) for layer in layers)
    lines = "A line leads from the layer that writes a tensor to one that reads it."
    if bare == len(layers):
        lines = "The file names no tensors: the layers are linked in the order they run."
    elif bare:
        lines += f" {count(bare, 'layer')} without tensors: linked to the one that runs before."
    return f"{lines} Long graphs go on at the top of the next column. Drag to move; after a click, the wheel zooms."


def _compared(report: ProfileReport, draw: Draw) -> str:
    title = "Measured and predicted"
    both = plots.compared(report.layers)
    if not both:
        return section(title, "<p>No layer has both a measured and a predicted time.</p>")
    note = "A point is a layer, its area its time; a click shows it in the graph. The dashed lines are twice and half."
    left = len(report.layers) - len(both)
    if left:
        note += f" {count(left, 'layer')} without both times cannot be drawn."
    note += _cut(len(both))
    return section(title, quiet(note), draw("scatter", plots.scatter(report.layers)))


def _roofline(report: ProfileReport, draw: Draw) -> str:
    placed = plots.measured_placed(report.layers)
    if not placed:
        return ""
    note = (
        "Arithmetic over the measured time, under the peaks of the device by type in TFLOP/s and the bandwidth of its"
        " memory. Bytes count each tensor once: what stays in a cache lies over the memory roof."
    )
    left = len(plots.compared(report.layers)) - len(placed)
    if left:
        note += f" {count(left, 'layer')} without arithmetic cannot be drawn."
    note += _cut(len(placed))
    return section("Roofline", quiet(note), draw("roofline", plots.measured_roofline(report.layers, report.gpu)))


def _cut(number: int) -> str:
    return f" The {MOST_POINTS} slowest of {number} are drawn." if number > MOST_POINTS else ""


def _layers(report: ProfileReport) -> str:
    if not report.layers:
        return ""
    return """<section><h2>Layers</h2>
<div class="tools"><label class="find">filter <input type="search" id="filter" placeholder="words of a row"
 autocomplete="off" spellcheck="false" aria-describedby="shown"></label>
<span class="quiet" id="shown" role="status"></span></div>
<div class="scroll tall"><table class="layers" id="layers"><thead></thead><tbody></tbody></table></div></section>"""


def _accuracy(report: ProfileReport) -> str:
    if not report.accuracy:
        return ""
    measures = ("SQNR", "cosine", "largest error", "same class")
    columns = [Column("output"), *(Column(word, "number") for word in measures)]
    rows = [
        [
            Cell(name(output)),
            Cell(decibels(item.sqnr_db)),
            Cell(f"{item.cosine:.6f}"),
            Cell(f"{item.max_abs:.3g}"),
            Cell("" if item.top1_agreement is None else percent(item.top1_agreement)),
        ]
        for output, item in report.accuracy.items()
    ]
    body = table(columns, rows, style="levels", sorted_by=None)
    return section("Outputs against the FP32 reference", f'<div class="scroll">{body}</div>')


def _assumptions(report: ProfileReport) -> str:
    source = report.source
    values = {**source.files, **source.conditions, **report.environment}
    values |= {"trtopt": VERSION, "schema": report.schema}
    return assumptions(report.gpu, values, " Times are those of one inference.")
