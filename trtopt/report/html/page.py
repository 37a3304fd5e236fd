"""The frame of an HTML report: one file that loads nothing else.

The plots are plotly's, whose script is written into the page. Measured for the page of an analysis against the other
maintained libraries that draw in a browser: plotly 7.1 is imported and has written the plots in 0.1 s and adds 4.8 MB;
bokeh 3.9 adds 1.3 MB but takes 0.5 s to be imported, and bakes light or dark into the file, where plotly's SVG follows
the page's style sheet; Altair needs an 84 MB package to write its scripts into a page; matplotlib's SVG answers no
pointer. A Content-Security-Policy in the page forbids the browser every request, so that it cannot come to need the
network.
"""

from __future__ import annotations

import importlib.resources
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from trtopt.report.html.plots import Figure
from trtopt.report.schema.analysis import Finding
from trtopt.report.text.analysis import NOISE, by_gain
from trtopt.report.text.format import NO_MORE, page_time, percent, shorten, visible
from trtopt.support._lazy import require

Draw = Callable[[str, Figure], str]
"""Turns a figure into a piece of the page, given the name of its element."""

_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:;"
    " form-action 'none'; base-uri 'none'"
)
_CONFIG = {
    "displaylogo": False,
    "responsive": True,
    "showSendToCloud": False,
    "modeBarButtons": [["toImage", "zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d"]],
}
"""The buttons are named because plotly's own choice includes one that uploads the plot."""
_NAME = 120
"""Characters of a name in a table; the whole name shows when the pointer rests on it."""
_NODES = 3
MOST_ROWS = 500
"""Rows of a table: beyond it a browser takes more than a second to lay them out."""
_LONGEST_VALUE = 400
"""Characters of one value of the model's description."""


def page(
    title: str,
    sections: Iterable[str],
    *,
    styles: Sequence[str] = ("analysis.css",),
    libraries: Sequence[str] = (),
    scripts: Sequence[str] = ("analysis.js",),
) -> str:
    """A whole page of about 5 MB, without any request to the network.

    ``title`` is plain text, ``sections`` are HTML. Style sheets and scripts are files of ``assets``: ``libraries`` run
    before the sections are read (plotly's is always one), ``scripts`` when they stand.

    Raises:
        MissingDependencyError: plotly is not installed.
    """
    plotly: str = _plotly("plotly.offline").get_plotlyjs()
    before = "\n".join(f"<script>{script}</script>" for script in (plotly, *map(_asset, libraries)))
    after = "\n".join(f"<script>{_asset(name)}</script>" for name in scripts)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<title>{text(title)}</title>
<style>{"".join(map(_asset, styles))}</style>
{before}
</head>
<body>
<main>
<noscript><p class="banner">The plots need JavaScript; the tables do not.</p></noscript>
{"".join(sections)}
</main>
{after}
</body>
</html>
"""


def check_html() -> None:
    """Raise :class:`MissingDependencyError` early, before any work, when plotly is not installed."""
    _plotly("plotly.io")


def _plotly(module: str) -> Any:
    return require(module, "report", "draw the plots of an HTML report")


def drawing() -> Draw:
    """What turns a figure into a piece of the page; plotly checks it and escapes what could end the script."""
    to_html = _plotly("plotly.io").to_html

    def draw(name: str, figure: Figure) -> str:
        height = f"{figure['layout']['height']}px"
        options: dict[str, Any] = {"full_html": False, "include_plotlyjs": False, "config": _CONFIG}
        piece = to_html(figure, div_id=name, default_height=height, **options)
        return f'<div class="plot">{piece}</div>'

    return draw


def _asset(name: str) -> str:
    return importlib.resources.files("trtopt.report").joinpath("assets", name).read_text(encoding="utf-8")


@dataclass(frozen=True)
class Column:
    """A column: its heading, and the class of its cells (``number`` is sorted as one)."""

    title: str
    style: str = ""


def numbers(*titles: str) -> list[Column]:
    """Columns of numbers."""
    return [Column(title, "number") for title in titles]


@dataclass(frozen=True)
class Cell:
    """A cell: its HTML, and the value it is sorted by where that is not its text."""

    html: str
    value: float | str | None = None


def text(value: object) -> str:
    """``value`` as HTML: every character shown, none taken for markup."""
    return escape(visible(str(value)), quote=True)


def name(value: str, most: int = _NAME) -> str:
    """A name of the model; a long one is cut in the middle and whole in its tooltip."""
    short = shorten(visible(value), most, mark="…")
    title = f' title="{text(value)}"' if short != visible(value) else ""
    broken = escape(short).replace("/", "<wbr>/")
    return f'<span class="name"{title}>{broken or "(no name)"}</span>'


def table(columns: Sequence[Column], rows: Sequence[Sequence[Cell]], *, style: str, sorted_by: int | None) -> str:
    """A table of the class ``style`` whose headings sort it.

    ``sorted_by`` is the column it is sorted by already, the largest first; None when it stays as it is and cannot be
    sorted.
    """
    heads = []
    for index, column in enumerate(columns):
        now = ' aria-sort="descending"' if index == sorted_by else ""
        title = text(column.title) if sorted_by is None else f'<button type="button">{text(column.title)}</button>'
        heads.append(f'<th scope="col" class="{column.style}"{now}>{title}</th>')
    lines = []
    for row in rows:
        cells = []
        for column, cell in zip(columns, row, strict=True):
            value = "" if cell.value is None else f' data-value="{text(cell.value)}"'
            cells.append(f'<td class="{column.style}"{value}>{cell.html}</td>')
        lines.append(f"<tr>{''.join(cells)}</tr>")
    body = "\n".join(lines)
    return f'<table class="{style}"><thead><tr>{"".join(heads)}</tr></thead>\n<tbody>{body}</tbody></table>'


def section(title: str, *pieces: str) -> str:
    """A part of the page, of pieces of HTML; without a title, none is shown."""
    return f"<section><h2>{title}</h2>{''.join(pieces)}</section>"


def quiet_lines(texts: Iterable[str]) -> str:
    """A paragraph of small print for each text."""
    return "".join(f'<p class="quiet">{text(each)}</p>' for each in texts)


def quiet(note: str) -> str:
    """A remark, as HTML."""
    return f'<p class="quiet">{note}</p>'


def scroll(body: str) -> str:
    """A tall table that scrolls by itself."""
    return f'<div class="scroll tall">{body}</div>'


def banners(lines: Iterable[str], style: str = "") -> str:
    """Warnings over the page, as plain text."""
    return "".join(f'<p class="banner{style}">{text(line)}</p>' for line in lines)


def tiles(figures: Iterable[tuple[str, str, str]]) -> str:
    """The figures at the head: title, value and note of each, as plain text."""
    boxes = (
        f'<div class="tile"><span>{text(title)}</span><b>{text(value)}</b><span>{text(note)}</span></div>'
        for title, value, note in figures
    )
    return f'<div class="tiles">{"".join(boxes)}</div>'


def findings(found: Sequence[Finding], total_us: float, note: str) -> str:
    """The findings by gain; beyond :data:`MOST_ROWS` they are in the JSON only."""
    ordered = by_gain(found)
    if not ordered:
        return section("Findings", "<p>None.</p>")
    return section(
        "Findings",
        quiet(f"{note}{first_rows(len(ordered))}"),
        scroll(finding_table(ordered[:MOST_ROWS], total_us)),
    )


def first_rows(number: int) -> str:
    """What to add to the note of a table that does not show all of its rows."""
    return f" The first {MOST_ROWS} of {number}; {NO_MORE}." if number > MOST_ROWS else ""


def assumptions(device: Mapping[str, Any], values: Mapping[str, Any], more: str) -> str:
    """What the figures rest on: the device, and all else."""
    note = (
        "<p>One multiply-add is 2 FLOP; the bytes of a layer are each input, constant and output once; 1 GB is 10⁹"
        f" bytes.{more}</p>"
    )
    columns = f"<div>{description(device)}</div><div>{description(values)}</div>"
    return section("What this rests on", note, f'<div class="columns">{columns}</div>')


def finding_table(findings: Sequence[Finding], total_us: float) -> str:
    """The findings, in the order given: the largest gain first."""
    columns = [
        *(*numbers("gain", "of the time"), Column("rule", "short")),
        *(Column("what, and what to do", "text"), Column("nodes", "nodes")),
    ]
    rows = []
    for finding in findings:
        share = finding.gain_us / total_us if total_us else 0.0
        message = text(finding.message) + (f"; {NOISE}" if finding.within_noise else "")
        gain = f'<span class="gain">−{page_time(finding.gain_us)}</span>' if finding.gain_us > 0 else "–"
        rows.append(
            [
                Cell(gain, finding.gain_us),
                Cell(percent(share) if finding.gain_us > 0 else "", share),
                Cell(f'<span class="pill {finding.severity}">{text(finding.rule)}</span>', finding.rule),
                Cell(f'{message}<br><span class="remedy">→ {text(finding.remedy)}</span>'),
                Cell(_nodes(finding.nodes)),
            ]
        )
    return table(columns, rows, style="findings", sorted_by=0)


def _nodes(nodes: Sequence[str]) -> str:
    shown = "<br>".join(name(node, 60) for node in nodes[:_NODES])
    more = len(nodes) - _NODES
    return f'{shown}<br><span class="quiet">and {more} more</span>' if more > 0 else shown


def split_bar(parts: Sequence[tuple[str, str, float, str]], total: float) -> str:
    """A bar in parts, and its key; a total of 0 shows no bar.

    The parts are class of the colour, words, value, and value in words.
    """
    if not total:
        return ""
    shown = [part for part in parts if part[2] > 0]
    pieces = "".join(
        f'<i class="{style}" style="width:{100 * value / total:.3f}%"></i>' for style, _, value, _ in shown
    )
    key = "".join(
        f'<li><i class="{style}"></i>{text(word)}: {text(amount)}'
        f' <span class="quiet">{percent(value / total)}</span></li>'
        for style, word, value, amount in shown
    )
    return f'<div class="bar">{pieces}</div><ul class="key">{key}</ul>'


def description(values: Mapping[str, Any]) -> str:
    """Names and values, lists and tables as JSON."""
    rows = []
    for key, value in values.items():
        words = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
        rows.append(f"<dt>{text(key)}</dt><dd>{text(shorten(words, _LONGEST_VALUE, mark=' … '))}</dd>")
    return f"<dl>{''.join(rows)}</dl>"
