"""A sensitivity report as a terminal shows it. Everything that is cut here is whole in the JSON."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from trtopt.report.schema.sensitivity import OutputError, RegionError, Sensitivity, noise_shares
from trtopt.report.text.analysis import NO_MORE, model_name, shorten, visible
from trtopt.report.text.numbers import count, decibels, percent, table

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

_MOST_REGIONS = 20
_MOST_STEPS = 20
_NAME = 34
_BAR = 12


def render(found: Sensitivity) -> RenderableType:
    """The report, to be printed by a ``rich`` console of 80 columns or more."""
    from rich.console import Group
    from rich.padding import Padding
    from rich.text import Text

    parts: list[RenderableType] = [Text(headline(found), style="bold")]
    sections: tuple[tuple[str, list[RenderableType]], ...] = (
        (f"All regions together, on {count(found.together.samples, 'sample')}", [_together(found)]),
        ("One region alone, the worst first", _regions(found)),
        ("Along the network, all regions together", _growth(found)),
        ("Warnings", [Text(f"- {visible(line)}", style="yellow") for line in found.warnings]),
    )
    for title, body in sections:
        if body:
            parts += [Text(""), Text(title, style="bold")]
            parts += [Padding(item, (0, 0, 0, 2), expand=False) for item in body]
    return Group(*parts)


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
    from rich.text import Text

    shares = noise_shares(found.regions)
    shown = found.regions[:_MOST_REGIONS]
    several = len(found.together.outputs) > 1
    rows = [
        (
            name + _more(region),
            sqnr_text(region.outputs[region.worst]),
            agreement_text(region.outputs[region.worst]),
            "" if region.flop_share is None else percent(region.flop_share),
            percent(share),
            shorten(visible(region.worst), 16) if several else _bar(share),
        )
        for name, region, share in zip(short_names([item.nodes[0] for item in shown]), shown, shares, strict=False)
    ]
    headers = ("first node", "SQNR", "same class", "flop", "noise", "output" if several else "")
    body: list[RenderableType] = [_close(table(headers, rows, right=(1, 2, 3, 4)))]
    left = len(found.regions) - len(shown)
    if left:
        body.append(
            Text(
                f"and {count(left, 'more region')} with {percent(sum(shares[_MOST_REGIONS:]))} of the noise; {NO_MORE}"
            )
        )
    return body


def _growth(found: Sensitivity) -> list[RenderableType]:
    from rich.text import Text

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
    body: list[RenderableType] = [_close(table(("node", "reads", "gives", "noise"), rows, right=(1, 2)))]
    if size > len(rows):
        body.append(Text(f"and {count(size - len(rows), 'more node')} between them; {NO_MORE}"))
    return body


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


def _more(region: RegionError) -> str:
    return f" +{len(region.nodes) - 1}" if len(region.nodes) > 1 else ""


def _close(result: Table) -> Table:
    result.padding = (0, 2, 0, 0)
    return result
