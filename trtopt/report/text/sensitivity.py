"""A sensitivity report as a terminal shows it. Everything that is cut here is whole in the JSON."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from trtopt.report.schema.sensitivity import OutputError, Sensitivity, noise_shares
from trtopt.report.text.analysis import model_name
from trtopt.report.text.format import (
    count,
    decibels,
    left_out,
    line,
    list_lines,
    percent,
    sections,
    shorten,
    table,
    visible,
)

if TYPE_CHECKING:
    from rich.console import Group, RenderableType
    from rich.table import Table

_MOST_REGIONS = 20
_MOST_STEPS = 20
_NAME = 34
_BAR = 12


def render(found: Sensitivity) -> Group:
    """The report, to be printed by a ``rich`` console of 80 columns or more."""
    return sections(
        [line(headline(found), "bold")],
        (
            (f"All regions together, on {count(found.together.samples, 'sample')}", [_together(found)]),
            ("One region alone, the worst first", _regions(found)),
            ("Along the network, all regions together", _growth(found)),
            ("Warnings", list_lines(found.warnings, "yellow")),
        ),
    )


def headline(found: Sensitivity) -> str:
    """Model, precision, backend, and what was measured on what."""
    cached = " (from the cache)" if found.cached else ""
    return (
        f"{shorten(model_name(found), _NAME)}, {found.precision} for {found.backend}:"
        f" {count(len(found.regions), 'region')} on {count(found.samples, 'sample')}{cached}"
    )


def _together(found: Sensitivity) -> Table:
    rows = [
        (shorten(visible(name), _NAME), sqnr_text(item), agreement_text(item))
        for name, item in found.together.outputs.items()
    ]
    return table(("output", "SQNR", "same class"), rows, right=(1, 2))


def _regions(found: Sensitivity) -> list[RenderableType]:
    shares = noise_shares(found.regions)
    shown = found.regions[:_MOST_REGIONS]
    several = len(found.together.outputs) > 1
    rows = [
        (
            name + (f" +{len(region.nodes) - 1}" if len(region.nodes) > 1 else ""),
            sqnr_text(region.outputs[region.worst]),
            agreement_text(region.outputs[region.worst]),
            "" if region.flop_share is None else percent(region.flop_share),
            percent(share),
            shorten(visible(region.worst), 16) if several else _bar(share),
        )
        for name, region, share in zip(short_names([item.nodes[0] for item in shown]), shown, shares, strict=False)
    ]
    headers = ("first node", "SQNR", "same class", "flop", "noise", "output" if several else "")
    where = f" with {percent(sum(shares[_MOST_REGIONS:]))} of the noise"
    left = left_out(len(found.regions) - len(shown), "region", where)
    return [table(headers, rows, right=(1, 2, 3, 4), gap=2), *left]


def _growth(found: Sensitivity) -> list[RenderableType]:
    if not found.growth:
        return []
    steps = found.growth
    size = len(steps)
    picked = sorted({slot * (size - 1) // (_MOST_STEPS - 1) for slot in range(_MOST_STEPS)})
    noise = [10 ** (-step.output_sqnr_db / 10) for step in steps]
    most = max((value for value in noise if value < float("inf")), default=0.0)
    rows = [
        (
            name,
            decibels(steps[index].input_sqnr_db),
            decibels(steps[index].output_sqnr_db),
            _bar(min(noise[index] / most, 1.0) if most else 0.0),
        )
        for name, index in zip(short_names([steps[index].node for index in picked]), picked, strict=True)
    ]
    left = left_out(size - len(rows), "node", " between them")
    return [table(("node", "reads", "gives", "noise"), rows, right=(1, 2), gap=2), *left]


def short_names(names: Sequence[str]) -> list[str]:
    """Node names without the path that all of them start with, each within the width of its column."""
    parts = [name.split("/") for name in names]
    steps = itertools.takewhile(lambda level: len(set(level)) == 1, zip(*(path[:-1] for path in parts), strict=False))
    shared = sum(1 for _ in steps) if len(names) > 1 else 0
    return [shorten(visible("/".join(path[shared:])), _NAME) for path in parts]


def sqnr_text(item: OutputError) -> str:
    """An SQNR with its standard error: ``42.1 dB ± 0.3``."""
    spread = item.standard_error_db
    return decibels(item.sqnr_db) + (f" ± {spread:.1f}" if spread is not None and spread >= 0.05 else "")


def agreement_text(item: OutputError) -> str:
    """The share of positions with the same best class; nothing where there are no classes."""
    return "" if item.disagreement is None else percent(1 - item.disagreement)


def _bar(share: float) -> str:
    return "#" * max(round(_BAR * share), 1) if share else ""
