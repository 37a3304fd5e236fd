"""Two reports of one kind compared: what ``trtopt report A --against B`` shows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from trtopt.errors import UsageError
from trtopt.profiling.compare import compare
from trtopt.report.files import write_forms
from trtopt.report.schema.analysis import Analysis, LayerRow
from trtopt.report.schema.build import BuildReport
from trtopt.report.schema.diff import DiffReport
from trtopt.report.schema.layers import LayerInfo, NodeName
from trtopt.report.schema.profile import Comparison, Figure, ProfileReport, ProfileSource, ProfileTotals
from trtopt.report.schema.read import Report, read_report
from trtopt.report.schema.sensitivity import Sensitivity, noise_shares
from trtopt.report.schema.sweep import SweepReport, SweepRow
from trtopt.report.text.format import bytes_text, percent, time_text
from trtopt.report.text.layers import as_layers
from trtopt.report.text.names import Labels
from trtopt.report.text.sensitivity import agreement_text, sqnr_text
from trtopt.report.text.sweep import drop_text, latency_text
from trtopt.report.text.verdict import accuracy_texts, speed_of

_KINDS = {
    BuildReport: "builds",
    Analysis: "analyses",
    ProfileReport: "profiles",
    SweepReport: "sweeps",
    Sensitivity: "sensitivity reports",
    DiffReport: "comparisons",
}


def compare_reports(
    after: str | Path, before: str | Path, *, html: str | Path | None = None, markdown: str | Path | None = None
) -> Comparison:
    """Compare two reports of one kind that ``--report`` wrote: builds, analyses, profiles, sweeps, sensitivity.

    Args:
        after: The newer one.
        before: The one it is compared against.
        html: Where to write the comparison as a page.
        markdown: Where to write it as Markdown.

    Raises:
        UsageError: A file cannot be read or written, or the two are of different kinds or networks.
        MissingDependencyError: ``html`` needs Jinja2.
    """
    old, new = read_report(Path(before)), read_report(Path(after))
    if type(old) is not type(new):
        raise UsageError(
            f"Two reports of different kinds, {_KINDS[type(new)]} and {_KINDS[type(old)]}, have nothing to compare",
            where=f"{after}, against {before}",
            remedy="give two reports of one command",
        )
    if isinstance(new, DiffReport):
        what = "Reports of `trtopt diff` compare two builds already"
        raise UsageError(what, where=str(after), remedy="show each by itself, or give the reports of two builds")
    found = _compared(old, new, (str(before), str(after)))
    write_forms(found, html=html, markdown=markdown)
    return found


def _compared(old: Report, new: Report, files: tuple[str, str]) -> Comparison:
    if isinstance(old, Sensitivity) and isinstance(new, Sensitivity):
        _check_regions(old, new, files)
    kind, figures = _KINDS[type(new)], tuple(_changed(dict(_figures(old)), dict(_figures(new))))
    found = compare(_as_profile(old), _as_profile(new), files)
    return replace(found, of=kind, figures=figures, names={**_names(old), **_names(new)})


def _as_profile(report: Report) -> ProfileReport:
    """Predicted layers in the place of measured ones; a sweep has none."""
    if isinstance(report, ProfileReport):
        return report
    if isinstance(report, SweepReport):
        return _predicted({"name": report.name}, (), ())
    if isinstance(report, (Sensitivity, DiffReport)):
        return _predicted({"name": ""}, (), ())
    if isinstance(report, Analysis):
        return _predicted(report.gpu, report.layers, ())
    rows = () if report.analysis is None else report.analysis.layers
    listed = () if report.engine is None or report.engine.layers is None else report.engine.layers
    return _predicted(report.gpu or {"name": "portable"}, rows, listed)


def _predicted(gpu: Mapping[str, Any], rows: tuple[LayerRow, ...], listed: tuple[LayerInfo, ...]) -> ProfileReport:
    total = sum(row.predicted_us for row in rows)
    source = ProfileSource("prediction", {}, "", None, "graph")
    layers = as_layers(rows, Labels({}), listed)
    return ProfileReport(gpu, source, layers, ProfileTotals(total, total, total), ())


def _names(report: Report) -> dict[str, NodeName]:
    return dict(report.names) if isinstance(report, (BuildReport, Analysis, Sensitivity)) else {}


def _figures(report: Report) -> Iterator[tuple[str, str]]:
    """What is known of the whole, by name."""
    if isinstance(report, SweepReport):
        yield from (
            (", ".join(f"{axis} {value}" for axis, value in row.varied.items()), _job(row)) for row in report.rows
        )
    elif isinstance(report, Sensitivity):
        yield "precision", report.precision
        yield "samples", str(report.samples)
        for name, error in report.together.outputs.items():
            yield f"all regions, {name}", ", ".join(filter(None, (sqnr_text(error), agreement_text(error))))
        yield from _regions(report)
    elif isinstance(report, Analysis):
        yield "precision", report.precision
        yield "memory", bytes_text(report.memory.weight_bytes + report.memory.activation_bytes)
        yield "bytes moved", bytes_text(report.totals.bytes)
    elif isinstance(report, BuildReport):
        yield "precision", report.precision.requested
        speed, engine = speed_of(report), report.engine
        yield "predicted", "" if speed.us is None else time_text(speed.us)
        yield "against plain", "" if speed.ratio is None else f"{speed.ratio:.2f}x as fast"
        if engine is not None:
            yield "engine", bytes_text(engine.bytes)
            yield "kernels", "" if engine.kernels is None else str(engine.kernels)
        yield "bytes moved", "" if report.shipped is None else bytes_text(report.shipped.bytes)
        yield "accuracy", "; ".join(accuracy_texts(report))
        yield "gates", "; ".join(report.gate_failures) or "held"


def _regions(report: Sensitivity) -> Iterator[tuple[str, str]]:
    """Each region by what the user calls it, by its first node where several have that name."""
    names = [Labels(report.names).of(region.nodes).text for region in report.regions]
    for region, name, share in zip(report.regions, names, noise_shares(report.regions), strict=True):
        called = name if names.count(name) == 1 else region.nodes[0]
        yield called, f"{sqnr_text(region.outputs[region.worst])}, {percent(share)} of the noise"


def _check_regions(old: Sensitivity, new: Sensitivity, files: tuple[str, str]) -> None:
    nodes = [{node for region in report.regions for node in region.nodes} for report in (old, new)]
    if nodes[0].isdisjoint(nodes[1]):
        what = "The two reports have no region in common"
        raise UsageError(what, where=" and ".join(files), remedy="compare reports of one network")


def _job(row: SweepRow) -> str:
    if row.result is None:
        return "failed"
    drop = drop_text(row)
    return ", ".join(
        part for part in (latency_text(row), drop and f"drop {drop}", bytes_text(row.result.engine_bytes)) if part
    )


def _changed(old: Mapping[str, str], new: Mapping[str, str]) -> Iterator[Figure]:
    """The figures that differ."""
    for name in {**new, **old}:
        if old.get(name) != new.get(name):
            yield Figure(name, old.get(name, "none"), new.get(name, "none"))
