"""A sensitivity report, as it is shown. Everything that is cut here is whole in the JSON."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from trtopt.report.html import plots
from trtopt.report.schema.sensitivity import OutputError, RegionError, Sensitivity, noise_shares
from trtopt.report.text.blocks import (
    Block,
    Cell,
    Column,
    Command,
    Inline,
    Name,
    Note,
    Plot,
    Section,
    Table,
    View,
    left_out,
    line,
    numbers,
    sum_of,
    table,
)
from trtopt.report.text.command import shell
from trtopt.report.text.format import count, decibels, percent, shorten, visible
from trtopt.report.text.names import Labels
from trtopt.report.text.words import model_name, rests_on

_MOST_REGIONS = 20
_MOST_STEPS = 20
_NAME = 34


def view(found: Sensitivity) -> View:
    """What is lost by all regions together, by each alone, and along the network."""
    sections = (
        Section(f"All regions together, on {count(found.together.samples, 'sample')}", (_together(found),)),
        Section("One region alone, the worst first", _regions(found)),
        Section("Along the network, all regions together", _growth(found)),
        Section("Products in no region", _refused(found), "page"),
        Section("Worth doing next", _advice(found)),
        rests_on(found.schema, _values(found)),
    )
    name = f"{model_name(found)}, {found.precision}: sensitivity"
    return View(line(headline(found)), (), sections, name=name, warnings=found.warnings)


def headline(found: Sensitivity) -> str:
    """Model, precision, backend, and what was measured on what."""
    cached = " (from the cache)" if found.cached else ""
    return (
        f"{shorten(model_name(found), _NAME)}, {found.precision} for {found.backend}:"
        f" {count(len(found.regions), 'region')} on {count(found.samples, 'sample')}{cached}"
    )


def _together(found: Sensitivity) -> Table:
    rows = [(Name(name), sqnr_text(item), agreement_text(item)) for name, item in found.together.outputs.items()]
    return table(("output", "SQNR", "same class"), rows, right=(1, 2))


def _regions(found: Sensitivity) -> tuple[Block, ...]:
    note = (
        "What the outputs lose when one region is in 8 bits and the rest in FP32, in the order of the graph."
        " Errors of different regions add up in power, so a region's share of the noise is what taking it back wins."
    )
    order = {step.region: index for index, step in enumerate(found.growth)}
    in_order = sorted(found.regions, key=lambda region: order.get(region.region, len(order)))
    several = len(found.together.outputs) > 1
    columns = (
        *(Column("first node", "name"), *numbers("SQNR", "same class", "flop", "noise")),
        *([Column("output")] if several else []),
        *(Column("reads", on="page"), *numbers("nodes", "samples", on="page")),
    )
    labels = Labels(found.names)
    names = short_names([_called(region, labels) for region in found.regions])
    shares = noise_shares(found.regions)
    rows = [
        _cells(region, name, share, several) for region, name, share in zip(found.regions, names, shares, strict=True)
    ]
    body = Table(
        *(columns, tuple(rows), _MOST_REGIONS, "region"),
        rest=lambda left: f" with {percent(sum_of(left, 4))} of the noise",
        sorted_by=4,
        style="layers",
        gap=2,
    )
    return Note(note), Plot("regions", lambda: plots.regions(in_order)), body


def _cells(region: RegionError, name: str, share: float, several: bool) -> tuple[Inline, ...]:
    worst = region.outputs[region.worst]
    flop = "" if region.flop_share is None else percent(region.flop_share)
    return (
        Name(name),
        Cell(sqnr_text(worst), plots.drawn(worst.sqnr_db)),
        Cell(agreement_text(worst), 0.0 if worst.disagreement is None else 1 - worst.disagreement),
        Cell(flop, region.flop_share or 0.0),
        Cell(percent(share), share),
        *([shorten(visible(region.worst), 16)] if several else []),
        Name(region.region),
        Cell(str(len(region.nodes)), len(region.nodes)),
        Cell(str(region.samples), region.samples),
    )


def _called(region: RegionError, labels: Labels) -> str:
    """What the user calls a region, and how many nodes it has more where no module says so."""
    has_more = len(region.nodes) > 1 and not labels.modules(region.nodes)
    return labels.of(region.nodes).text + (f" +{len(region.nodes) - 1}" if has_more else "")


def _growth(found: Sensitivity) -> tuple[Block, ...]:
    if not found.growth:
        return ()
    steps, labels = found.growth, Labels(found.names)
    size = len(steps)
    picked = sorted({slot * (size - 1) // (_MOST_STEPS - 1) for slot in range(_MOST_STEPS)})
    names = short_names([labels.of([steps[index].node]).text for index in picked])
    rows = [
        (Name(name), decibels(steps[index].input_sqnr_db), decibels(steps[index].output_sqnr_db))
        for name, index in zip(names, picked, strict=True)
    ]
    note = "SQNR against FP32 inside the network with all regions in 8 bits: of what each region reads, and gives."
    body = table(("node", "reads", "gives"), rows, right=(1, 2), gap=2)
    left = left_out(size - len(rows), "node", " between them")
    return Note(note), Plot("growth", lambda: plots.growth(steps)), body, *left


def _refused(found: Sensitivity) -> tuple[Block, ...]:
    labels = Labels(found.names)
    rows = [(labels.of([item.node]), visible(item.reason)) for item in found.refused]
    return (table(("node", "reason"), rows),) if rows else ()


def _advice(found: Sensitivity) -> tuple[Block, ...]:
    """A line that keeps the regions that a budget bears; nothing for a model that code makes, whose inputs are gone."""
    path = found.model.get("path")
    samples = ("--calib", found.calib or "samples.npz", "--eval", "labelled.npz")
    budget = ("--metric", "top1", "--max-accuracy-drop", "1%")
    if not path:
        return ()
    why = line("keep what an accuracy budget bears: regions that lose most go back first")
    return why, Command(shell("trtopt", "build", path, f"--{found.precision}", *samples, *budget))


def _values(found: Sensitivity) -> dict[str, Any]:
    taken = found.calibration
    ranges = {} if taken is None else {"calibration": f"{taken.source}, {taken.samples} samples"}
    return {**found.model, "samples": found.samples, **ranges}


def short_names(names: Sequence[str]) -> list[str]:
    """Node names without the path that all of them start with."""
    parts = [name.split("/") for name in names]
    steps = itertools.takewhile(lambda level: len(set(level)) == 1, zip(*(path[:-1] for path in parts), strict=False))
    shared = sum(1 for _ in steps) if len(names) > 1 else 0
    return ["/".join(path[shared:]) for path in parts]


def sqnr_text(item: OutputError) -> str:
    """An SQNR with its standard error: ``42.1 dB ± 0.3``."""
    spread = item.standard_error_db
    return decibels(item.sqnr_db) + (f" ± {spread:.1f}" if spread is not None and spread >= 0.05 else "")


def agreement_text(item: OutputError) -> str:
    """The share of positions with the same best class; nothing where there are no classes."""
    return "" if item.disagreement is None else percent(1 - item.disagreement)
