"""Profiles, and comparisons of two, in words and as a terminal shows them; what is cut here is whole in the JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from trtopt.report.schema.profile import (
    Change,
    ComparedRegion,
    Comparison,
    Profiled,
    ProfileReport,
    ProfileTotals,
    precision_of,
    slowest,
)
from trtopt.report.text.calibration import calibration_lines
from trtopt.report.text.format import (
    Rows,
    count,
    decibels,
    left_out,
    line,
    list_lines,
    pairs,
    percent,
    range_text,
    sections,
    shorten,
    some,
    table,
    time_text,
    visible,
)

if TYPE_CHECKING:
    from rich.console import Group, RenderableType

    from trtopt.report.schema.analysis import Finding

LIMITERS = {"math": "arithmetic", "memory": "memory", "latency": "launch"}

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


def totals(report: ProfileReport) -> list[tuple[str, str]]:
    """Sum of the layers, one inference, and what lies between them; how good the prediction is."""
    found = report.totals
    rows = [("sum of the layers", f"{time_text(found.measured_us)} measured{_prediction(found)}")]
    if found.end_to_end_us is not None:
        spread = "" if found.end_to_end_spread_us is None else f" ± {time_text(found.end_to_end_spread_us)}"
        predicted = found.predicted_end_to_end_us
        low_high = found.predicted_end_to_end_low_us, found.predicted_end_to_end_high_us
        after = "" if predicted is None else f" measured, {bracketed(predicted, *low_high)} predicted"
        rows.append(("one inference", f"{time_text(found.end_to_end_us)}{spread}{after}"))
    if found.profiling_overhead_us is not None:
        rows.append(("timing each layer adds", time_text(found.profiling_overhead_us)))
    if found.host_us is not None:
        rows.append(("on the host", f"{time_text(found.host_us)} to enqueue"))
    if found.mean_error is not None:
        rank = "" if found.rank_correlation is None else f", rank correlation {found.rank_correlation:.2f}"
        rows.append(("prediction", f"mean error {percent(found.mean_error)} a layer{rank}"))
    rows += [("calibrated", text) for text in calibration_lines(report.gpu)]
    return rows


def bracketed(predicted_us: float, low_us: float | None, high_us: float | None, *, micro: str = "u") -> str:
    """A predicted time and its range within a sentence: ``179 us (150 to 210)``."""
    low_high = range_text(predicted_us, low_us, high_us)
    return time_text(predicted_us, micro=micro) + (f" ({low_high})" if low_high else "")


def _prediction(found: ProfileTotals) -> str:
    """The sum of the predictions, beside what these layers took where that is not all."""
    if not found.compared_us:
        return ", nothing predicted"
    text = f"{bracketed(found.predicted_us, found.low_us, found.high_us)} predicted"
    left = found.measured_us - found.compared_us
    if left < LEAST_CHANGE_US:
        return f", {text}"
    return f"; {time_text(found.compared_us)} of it in layers with a prediction, {text}"


def layer_rows(report: ProfileReport, most: int, width: int, line: str) -> Rows:
    """The slowest layers, ``most`` at most, their names within ``width``.

    ``line`` stands between a name and why the layer takes longer than it could.
    """
    total = report.totals.measured_us
    cells = []
    for layer in slowest(report.layers)[:most]:
        row = layer.predicted
        why = ", ".join(dict.fromkeys(item.reason for item in layer.deviation))
        cells.append(
            (
                shorten(visible(layer.name), width) + (f"{line}{why}" if why else ""),
                time_text(layer.measured_us),
                percent(layer.measured_us / total) if total else "",
                "" if row is None else time_text(row.predicted_us),
                "" if layer.ratio is None else f"{layer.ratio:.2f}",
                "" if row is None else LIMITERS[row.limiter],
                precision_of(layer),
            )
        )
    head = ("layer", "measured", "share", "predicted", "ratio", "limit", "type")
    return Rows(head, tuple(cells), (1, 2, 3, 4))


def accuracy(report: ProfileReport) -> list[tuple[str, str]]:
    """Each output of the engine against FP32."""
    rows = (report.accuracy or {}).items()
    return [(f"output {visible(name)} against FP32", decibels(item.sqnr_db)) for name, item in rows]


def conditions(report: ProfileReport) -> list[str]:
    """What was recorded of the machine."""
    return [
        f"{visible(key).replace('_', ' ')} {visible(str(value))}" for key, value in report.source.conditions.items()
    ]


def compared(found: Comparison) -> list[tuple[str, str]]:
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


def region_rows(found: Comparison, most: int, width: int) -> Rows:
    """The regions that changed, the largest difference first."""
    cells = []
    for region in changed(found.regions)[:most]:
        precisions = [" ".join(side.precisions) for side in (region.before, region.after)]
        types = precisions[0] if precisions[0] == precisions[1] else " -> ".join(item or "none" for item in precisions)
        cells.append(
            (
                _region_name(region, width),
                time_text(region.before.measured_us),
                time_text(region.after.measured_us),
                f"{-region.gain_us:+.1f} us",
                types,
                CHANGES[region.change],
            )
        )
    return Rows(("layers", "before", "after", "change", "type", "kernels"), tuple(cells), (1, 2, 3))


def _region_name(region: ComparedRegion, width: int) -> str:
    """The nodes of a region; what stands for what, where its layers do not have the same."""
    if region.aligned == "shape":
        pair = (region.before.layers[0], region.after.layers[0])
        return " -> ".join(shorten(visible(name), (width - 4) // 2) for name in pair)
    telling = sorted(region.nodes, key=lambda name: "quantizelinear" in name.lower())  # a layer is not its Q/DQ
    return some([shorten(visible(name), width) for name in telling], 1)


_MOST_LAYERS = 15
_MOST_REGIONS = 25
_NAME = 36
_LONGEST_MESSAGE = 600


def render(report: ProfileReport) -> Group:
    """The profile, to be printed by a ``rich`` console of 80 columns or more."""
    conditions = [(key.replace("_", " "), visible(str(value))) for key, value in report.source.conditions.items()]
    outputs = [
        (shorten(visible(name), _NAME), decibels(item.sqnr_db)) for name, item in (report.accuracy or {}).items()
    ]
    layers = layer_rows(report, _MOST_LAYERS, _NAME, "\n> ")
    left = left_out(len(report.layers) - len(layers.cells), "layer")
    return sections(
        [line(headline(report), "bold")],
        (
            ("Time", [pairs(totals(report))]),
            ("Conditions", [pairs(conditions)] if conditions else []),
            ("Outputs against FP32", [table(("output", "SQNR"), outputs, right=(1,))] if outputs else []),
            ("Slowest layers", [layers.table(), *left] if layers.cells else []),
            ("Findings", _findings(report.findings)),
            ("Warnings", list_lines(report.warnings, "yellow")),
        ),
    )


def render_comparison(found: Comparison) -> Group:
    """The comparison, likewise."""
    shown = region_rows(found, _MOST_REGIONS, _NAME)
    left = left_out(len(changed(found.regions)) - len(shown.cells), "region")
    return sections(
        [line("Two profiles compared", "bold")],
        (
            ("Time", [pairs(compared(found))]),
            ("What changed, the most time first", [shown.table(), *left] if shown.cells else [line("nothing")]),
            ("Warnings", list_lines(found.warnings, "yellow")),
        ),
    )


def _findings(findings: Sequence[Finding]) -> list[RenderableType]:
    rows = [
        (
            f"-{time_text(item.gain_us)}" if item.gain_us > 0 else item.severity,
            f"{item.rule}: {shorten(visible(item.message), _LONGEST_MESSAGE)}\n> {visible(item.remedy)}",
        )
        for item in findings
    ]
    if not rows:
        return []
    return [pairs(rows), line("times overlap and do not add up; trtopt explain RULE says why and how")]
