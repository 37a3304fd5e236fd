"""Views as pages: one HTML file that loads nothing else.

Jinja2 fills ``assets/page.html.j2`` and escapes every text. The plots are plotly.js's, whose basic bundle (lines,
points and bars: 1.2 MB in place of 4.8) is written into the page. Of the other maintained libraries that draw in a
browser, bokeh 3.9 adds 1.3 MB, takes 0.5 s to be imported, and bakes light or dark into the file, where plotly's SVG
follows the page's style sheet; Altair needs an 84 MB package to write its scripts into a page; matplotlib's SVG answers
no pointer. A Content-Security-Policy in the page forbids the browser every request, so that it cannot come to need the
network.
"""

from __future__ import annotations

import importlib.resources
import json
import re
from typing import TYPE_CHECKING, Any

from trtopt.report.text.blocks import Graph, Plot, View, is_line, typed
from trtopt.report.text.format import percent, shorten, time_text, visible, with_micro
from trtopt.support._lazy import require
from trtopt.support.json_text import plain

if TYPE_CHECKING:
    from jinja2 import Environment

_CONFIG = {
    "displaylogo": False,
    "responsive": True,
    "showSendToCloud": False,
    "modeBarButtons": [["toImage", "zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d"]],
}
"""The buttons are named because plotly's own choice includes one that uploads the plot."""
_NAME = 120
"""Characters of a name; the whole name shows when the pointer rests on it."""
MOST_ROWS = 500
"""Rows of a table: beyond it a browser takes more than a second to lay them out."""


def html_page(view: View) -> str:
    """The view as a whole page of 1.3 to 2 MB, without any request to the network.

    Raises:
        MissingDependencyError: Jinja2 is not installed.
    """
    parts = view.parts("page")
    has_graph = any(isinstance(block, Graph) for part in parts for block in part.blocks)
    has_plot = any(isinstance(block, Plot) for part in parts for block in part.blocks)
    libraries = [
        *([_asset("vendor/plotly-basic.min.js")] if has_plot else []),
        *([_asset("vendor/cytoscape.min.js")] if has_graph else []),
    ]
    names = ("page", "profile") if has_graph else ("page",)
    styles = [_asset(f"{name}.css") for name in names]
    scripts = [_asset(f"{name}.js") for name in names]
    found = _environment().get_template("page.html.j2")
    whole = found.render(view=view, parts=parts, styles=styles, libraries=libraries, scripts=scripts)
    return whole.strip() + "\n"


def check_html(page: object) -> None:
    """Raise :class:`MissingDependencyError` early, before any work, where a page is asked for and Jinja2 is not
    installed."""
    if page is not None:
        _jinja2()


def _jinja2() -> Any:
    return require("jinja2", "report", "write an HTML report")


def _environment() -> Environment:
    """Jinja2 as the template needs it: all is escaped, and what is not defined is an error."""
    jinja2 = _jinja2()
    made: Environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        loader=jinja2.FunctionLoader(_asset),
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {"shown": _shown, "percent": percent, "time": lambda us: with_micro(time_text(us))}
    made.filters |= {"typed": typed}
    made.filters |= {"parts": lambda name: re.split(r"(?<=[./])(?=[^./])", name)}
    made.filters |= {"short": lambda name: shorten(visible(name), _NAME, mark="…")}
    made.globals |= {
        "most_rows": MOST_ROWS,
        "drawn": _drawn,
        "kind": lambda item: type(item).__name__,
        "is_line": is_line,
    }
    return made


def _shown(value: object) -> str:
    """A text of which every character is seen; an arrow is one, which no line breaks."""
    return with_micro(visible(str(value))).replace(" -> ", " → ")


def _drawn(plot: Plot) -> str:
    """A plot as a piece of the page: its element, and the call that draws it."""
    figure = plain(plot.figure())
    call = ", ".join(as_script(item) for item in (plot.name, figure["data"], figure["layout"], _CONFIG))
    height = f"height:{figure['layout']['height']}px"
    return f'<div id="{plot.name}" style="{height}"></div><script>Plotly.newPlot({call})</script>'


def as_script(value: Any) -> str:
    """JSON within a script, which no text in it can end."""
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _asset(name: str) -> str:
    return importlib.resources.files("trtopt.report").joinpath("assets", name).read_text(encoding="utf-8")
