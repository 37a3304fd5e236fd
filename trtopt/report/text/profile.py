"""Profiles, and comparisons of two, as they are shown; what is cut here is whole in the JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import PurePath

from trtopt.report.html import plots
from trtopt.report.schema.layers import NodeName
from trtopt.report.schema.profile import (
    Change,
    ComparedRegion,
    Comparison,
    Profiled,
    ProfileLayer,
    ProfileReport,
    Side,
    precision_of,
    slowest,
)
from trtopt.report.text.accuracy import accuracy_table
from trtopt.report.text.blocks import (
    Block,
    Cell,
    Column,
    Figures,
    Findings,
    Inline,
    Line,
    Name,
    Note,
    Plot,
    Section,
    Table,
    View,
    line,
    numbers,
    pairs,
    table,
)
from trtopt.report.text.calibration import calibration_lines
from trtopt.report.text.changes import Became, together, types_arrow
from trtopt.report.text.format import count, percent, range_text, time_text, visible
from trtopt.report.text.layers import graph_blocks, roofline_blocks
from trtopt.report.text.names import Labels, named
from trtopt.report.text.words import FLOP_NOTE, LIMITERS, described, rests_on

_MOST_LAYERS, _MOST_REGIONS = 15, 25
_NOTE = "times overlap and do not add up; trtopt explain RULE says why and how"


def view(report: ProfileReport) -> View:
    """The profile: its times, what could be won, its layers; in a page with their graph."""
    conditions = described(report.source.conditions)
    calibrated = [line(text) for text in calibration_lines(report.gpu)]
    layers = (_layers(report),) if report.layers else ()
    graph = graph_blocks(report.layers) or (line("None."),)
    named_layers = [layer for layer in report.layers if layer.modules]
    modules = {node: NodeName(layer.modules[0], "") for layer in named_layers for node in layer.onnx_nodes}
    found = Labels(modules).found(report.findings)
    sections = (
        Section("Time", (_totals(report), *calibrated)),
        Section("Conditions", (pairs(conditions),) if conditions else (), "text"),
        Section("Findings", (Findings(found, report.totals.measured_us, _NOTE),) if found else ()),
        Section("Layers as a graph", graph, "page"),
        Section("Measured and predicted", _scatter(report.layers), "page"),
        Section("Roofline", roofline_blocks(report.layers, report.gpu["tflops"], report.gpu["bandwidth_gbs"]), "page"),
        Section("Slowest layers", layers, "text"),
        Section("Outputs against FP32", (accuracy_table("output", report.accuracy),) if report.accuracy else ()),
        _assumptions(report),
    )
    name = f"{profile_name(report)} on {visible(str(report.gpu['name']))}: profile"
    return View(line(headline(report)), (), sections, kind=profile_name(report), name=name, warnings=report.warnings)


def profile_name(report: ProfileReport) -> str:
    """The name of the network: that of the file it comes from."""
    files = report.source.files
    first = next((files[kind] for kind in ("model", "engine", "layer-info", "layer-profile") if kind in files), "")
    return visible(PurePath(first).name) or "network in memory"


CHANGES: dict[Change, str] = {
    "same": "",
    "fused": "fused further",
    "split": "in more kernels",
    "regrouped": "fused differently",
    "appeared": "appeared",
    "vanished": "vanished",
}

LEAST_CHANGE_US = 0.05
"""Differences below the printed digit are none."""

_LAUNCHING = {"graph": ", in a CUDA graph", "profile": ", each layer timed", "single run": ", each layer timed"}


def headline(report: ProfileReport) -> str:
    """Device, who measured, and how."""
    source = report.source
    by = f"{source.origin} {source.version}".strip()
    runs = "" if source.runs is None else f", {count(source.runs, 'run')}"
    how = "" if source.origin == "onnxruntime" else _LAUNCHING[source.launching]
    return f"{count(len(report.layers), 'layer')} on {visible(str(report.gpu.get('name', '?')))}, by {by}{how}{runs}"


def _totals(report: ProfileReport) -> Figures:
    """Sum of the layers, one inference, and what lies between them; how good the prediction is."""
    found = report.totals
    idle = sum(layer.measured_us <= 0 for layer in report.layers)
    layers = count(len(report.layers), "layer") + (f", {idle} of which run nothing" if idle else "")
    rows = [("sum of the layers", time_text(found.measured_us), f"measured, {layers}")]
    if found.compared_us:
        left = found.measured_us - found.compared_us
        some = f"for layers measured at {time_text(found.compared_us)}" if left >= LEAST_CHANGE_US else ""
        rows.append(("predicted", bracketed(found.predicted_us, found.low_us, found.high_us), some))
    else:
        rows.append(("predicted", "nothing", "no layer has both a measured and a predicted time"))
    if found.end_to_end_us is None:
        rows.append(("one inference", "not known", "its time without profiling was not measured"))
    else:
        spread = "" if found.end_to_end_spread_us is None else f" ± {time_text(found.end_to_end_spread_us)}"
        predicted = found.predicted_end_to_end_us
        low_high = found.predicted_end_to_end_low_us, found.predicted_end_to_end_high_us
        after = "" if predicted is None else f", {bracketed(predicted, *low_high)} predicted"
        host = "" if found.host_us is None else f", enqueued in {time_text(found.host_us)} on the host"
        rows.append(("one inference", f"{time_text(found.end_to_end_us)}{spread}", f"measured{after}{host}"))
    if found.profiling_overhead_us is not None:
        over = found.profiling_overhead_us
        share = "" if not found.end_to_end_us else f"{percent(abs(over) / found.end_to_end_us)} of one inference"
        rows.append(("timing each layer adds" if over >= 0 else "in no layer", time_text(abs(over)), share))
    if found.mean_error is not None:
        rank = "" if found.rank_correlation is None else f"; rank correlation {found.rank_correlation:.2f}"
        rows.append(("mean error", percent(found.mean_error), f"of the prediction of a layer{rank}"))
    return Figures(tuple(rows))


def bracketed(predicted_us: float, low_us: float | None, high_us: float | None) -> str:
    """A predicted time and its range within a sentence: ``179 us (150 to 210)``."""
    low_high = range_text(predicted_us, low_us, high_us)
    return time_text(predicted_us) + (f" ({low_high})" if low_high else "")


def _layers(report: ProfileReport) -> Table:
    """The slowest layers, and why they take longer than they could."""
    columns = (
        *(Column("layer", "name"), *numbers("measured", "share", "predicted", "ratio")),
        *(Column("limit"), Column("type")),
    )
    total = report.totals.measured_us
    rows = tuple(_cells(layer, total) for layer in slowest(report.layers))
    return Table(columns, rows, _MOST_LAYERS, "layer", gap=2)


def _cells(layer: ProfileLayer, total_us: float) -> tuple[Inline, ...]:
    row = layer.predicted
    return (
        dataclasses.replace(
            named(layer.modules, layer.name), below=", ".join(dict.fromkeys(item.reason for item in layer.deviation))
        ),
        time_text(layer.measured_us),
        percent(layer.measured_us / total_us) if total_us else "",
        "" if row is None else time_text(row.predicted_us),
        "" if layer.ratio is None else f"{layer.ratio:.2f}",
        "" if row is None else LIMITERS[row.limiter],
        visible(precision_of(layer)),
    )


def _scatter(layers: Sequence[ProfileLayer]) -> tuple[Block, ...]:
    both = plots.compared(layers)
    if not both:
        return ()
    note = "A point is a layer, its area its time; a click shows it in the graph. The dashed lines are twice and half."
    left = len(layers) - len(both)
    if left:
        note += f" {count(left, 'layer')} without both times cannot be drawn."
    if len(both) > plots.MOST_POINTS:
        note += f" The {plots.MOST_POINTS} slowest of {len(both)} are drawn."
    return Note(note), Plot("scatter", lambda: plots.scatter(layers))


def _assumptions(report: ProfileReport) -> Section:
    source = report.source
    values = {**report.gpu, **source.files, **source.conditions, **report.environment}
    return rests_on(report.schema, values, Line(f"{FLOP_NOTE} Times are those of one inference.", "quiet"))


def comparison_view(found: Comparison) -> View:
    """The comparison: both sides, and what changed."""
    regions = changed(found.regions)
    head = ("", "before", "after")
    rows = [(Name(item.name), visible(item.before), visible(item.after)) for item in found.figures]
    figures = table(head, rows, most=_MOST_REGIONS, noun="figure")
    changes: tuple[Block, ...] = (_regions(regions, Labels(found.names)),) if regions else (line("Nothing."),)
    has_layers = found.before.layers > 0 and found.after.layers > 0
    files = (pairs([("before", visible(found.before.report)), ("after", visible(found.after.report))]),)
    sections = (
        Section("", () if has_layers else files),
        Section("Time", (pairs(_compared(found)),) if has_layers else ()),
        Section("What differs", (figures,) if found.figures else () if has_layers else (line("Nothing."),)),
        Section("What changed, the most time first", changes if has_layers else ()),
    )
    name = f"{visible(found.after.report)} against {visible(found.before.report)}"
    gain, before = found.before.measured_us - found.after.measured_us, found.before.measured_us
    differ = count(len(found.figures), "figure") if found.figures else "nothing"
    verdict = difference(gain, before) if has_layers else f"{differ} differ{'s' if len(found.figures) < 2 else ''}"
    return View(line(f"Two {found.of} compared: {verdict}"), (), sections, name=name, warnings=found.warnings)


def _compared(found: Comparison) -> list[tuple[str, str]]:
    """Both sides in one line each, and the difference."""
    rows = [("before", _side(found.before)), ("after", _side(found.after))]
    gain = found.before.measured_us - found.after.measured_us
    if found.before.measured_us:
        rows.append(("sum of the layers", difference(gain, found.before.measured_us)))
    if found.before.end_to_end_us and found.after.end_to_end_us is not None:
        rows.append(
            (
                "one inference",
                difference(found.before.end_to_end_us - found.after.end_to_end_us, found.before.end_to_end_us),
            )
        )
    return rows


def difference(gain_us: float, before_us: float) -> str:
    """``12.3 us less (8.1 %)``, ``3.2 us more (1.0 %)``, ``the same``."""
    if abs(gain_us) < LEAST_CHANGE_US:
        return "the same"
    share = f" ({percent(abs(gain_us) / before_us)})" if before_us else ""
    return f"{time_text(abs(gain_us))} {'less' if gain_us > 0 else 'more'}{share}"


def _side(side: Profiled) -> str:
    inference = "" if side.end_to_end_us is None else f", one inference {time_text(side.end_to_end_us)}"
    return (
        f"{visible(side.report)}: {visible(side.device)}, {side.origin}, {count(side.layers, 'layer')},"
        f" {time_text(side.measured_us)}{inference}"
    )


def changed(regions: Sequence[ComparedRegion]) -> list[ComparedRegion]:
    """The regions where something changed."""
    return [
        region
        for region in regions
        if abs(region.gain_us) >= LEAST_CHANGE_US or region.changed_precision or region.change != "same"
        if region.before.measured_us > 0 or region.after.measured_us > 0
    ]


def _regions(regions: Sequence[ComparedRegion], labels: Labels) -> Table:
    """The regions, the largest change first."""
    changes = [
        Became(
            (name,),
            types_arrow(region.before.precisions, region.after.precisions),
            CHANGES[region.change],
            (region.before.measured_us, region.after.measured_us),
        )
        for name, region in _by_name(regions, labels)
    ]
    rows = []
    for called, item in together(changes):
        before, after = item.us or (0.0, 0.0)
        times = (Cell(time_text(before), before), Cell(time_text(after), after))
        more = ("+" if after >= before else "-") + time_text(abs(after - before))
        rows.append(
            (
                *called,
                *times,
                Cell(more, abs(after - before)),
                item.types,
                item.kernels,
            )
        )
    rows.sort(key=lambda row: -(row[4].value or 0.0) if isinstance(row[4], Cell) else 0.0)
    columns = (
        *(Column("layers", "name"), *numbers("x", "before", "after", "change")),
        *(Column("type"), Column("kernels", on="wide")),
    )
    return Table(columns, tuple(rows), _MOST_REGIONS, "row", sorted_by=4, style="layers", gap=2)


def _by_name(regions: Sequence[ComparedRegion], labels: Labels) -> Iterator[tuple[str, ComparedRegion]]:
    """The regions with their names; what vanished and what appeared of one module is one."""
    found: dict[str, list[ComparedRegion]] = {}
    for region in regions:
        found.setdefault(_region_name(region, labels), []).append(region)
    for name, alike in found.items():
        if {"appeared", "vanished"} <= {region.change for region in alike}:
            sides = [_together([getattr(region, side) for region in alike]) for side in ("before", "after")]
            gain = sum(region.gain_us for region in alike)
            yield name, dataclasses.replace(alike[0], before=sides[0], after=sides[1], change="regrouped", gain_us=gain)
        else:
            yield from ((name, region) for region in alike)


def _together(sides: Sequence[Side]) -> Side:
    def each(field: str) -> tuple[str, ...]:
        return tuple(dict.fromkeys(item for side in sides for item in getattr(side, field)))

    return Side(each("layers"), each("precisions"), each("tactics"), sum(side.measured_us for side in sides))


def _region_name(region: ComparedRegion, labels: Labels) -> str:
    """The nodes of a region; what stands for what, where its layers do not have the same."""
    if region.aligned == "shape":
        return " -> ".join((region.before.layers[0], region.after.layers[0]))
    return labels.region(region.nodes)
