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
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from trtopt.report.html.analysis_tables import text
from trtopt.report.html.figures import Figure
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


def page(
    title: str,
    sections: Iterable[str],
    *,
    styles: Sequence[str] = ("analysis.css",),
    libraries: Sequence[str] = (),
    scripts: Sequence[str] = ("analysis.js",),
) -> str:
    """A whole page of about 5 MB, without any request to the network.

    Args:
        title: Its title, as plain text.
        sections: HTML.
        styles: Style sheets, as files of ``assets``.
        libraries: Scripts that run before the sections are read, likewise; plotly's is always one.
        scripts: Scripts that run when the sections stand, likewise.

    Raises:
        MissingDependencyError: plotly is not installed.
    """
    before = "\n".join(f"<script>{script}</script>" for script in (_plotly_script(), *map(_asset, libraries)))
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
    """Raise early, before any work, when a page cannot be written.

    Raises:
        MissingDependencyError: plotly is not installed.
    """
    _plotly("plotly.io")


def _plotly(module: str) -> Any:
    return require(module, "report", "draw the plots of an HTML report")


def _plotly_script() -> str:
    script: str = _plotly("plotly.offline").get_plotlyjs()
    return script


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
