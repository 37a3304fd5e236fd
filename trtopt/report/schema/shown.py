"""What reports are to Python callers and in notebooks: the views that terminals and pages show, and tables of rows."""

from __future__ import annotations

import dataclasses
import importlib
import io
from typing import Any, ClassVar

_WIDTH = 100


class Shown:
    """A report that shows itself; its class names its view and its rows.

    Attributes:
        VIEW: ``module:function`` that makes the view; by name, since views know the reports.
        ROWS: Where its rows are: fields, by dots.
    """

    VIEW: ClassVar[str]
    ROWS: ClassVar[str]

    def view(self) -> Any:
        """What its forms show: a :class:`trtopt.report.text.blocks.View`."""
        module, _, function = self.VIEW.partition(":")
        return getattr(_trtopt(module), function)(self)

    def to_json_dict(self) -> dict[str, Any]:
        """Plain JSON values, the schema first: no NaN or infinity (None stands for both), paths as strings."""
        fields: Any = self
        return {"schema": fields.schema, **_trtopt("support.json_text").plain(dataclasses.asdict(fields))}

    def __str__(self) -> str:
        """As a terminal shows it."""
        return self._printed().rstrip()

    def __repr__(self) -> str:
        """One line: what it is and its headline."""
        return f"<{type(self).__name__}: {self.view().head.text}>"

    def _repr_html_(self) -> str:
        """As a notebook shows it: what a terminal shows, in colours."""
        return self._printed(html=True)

    def to_html(self) -> str:
        """A page of its own, of at most about 2 MB, which loads nothing else.

        Raises:
            MissingDependencyError: plotly or Jinja2 is not installed.
        """
        return str(_trtopt("report.html.page").html_page(self.view()))

    def to_dataframe(self) -> Any:
        """Its rows, layers, regions, jobs or gates, as a ``pandas.DataFrame``: a column for each field. ``limiter`` has
        the words that reports show, ``arithmetic`` for the ``math`` of the JSON.

        Raises:
            MissingDependencyError: pandas is not installed.
        """
        frame = _required("pandas")
        rows: Any = self
        for name in self.ROWS.split("."):
            rows = getattr(rows, name, None)
        found = frame.DataFrame([dataclasses.asdict(row) for row in rows or ()])
        return found.replace({"limiter": _trtopt("report.text.words").LIMITERS})

    def plot(self, name: str = "") -> Any:
        """One of the plots of its page, the first unless it is named, as a figure of plotly.

        Raises:
            UsageError: The report has no such plot.
            MissingDependencyError: plotly is not installed.
        """
        parts = self.view().parts("page")
        plots = {block.name: block for part in parts for block in part.blocks if hasattr(block, "figure")}
        if not plots or (name and name not in plots):
            remedy = f"choose one of {', '.join(plots)}" if plots else "look at trtopt.analyze of the model"
            raise _trtopt("errors").UsageError(
                f"The report has no plot{f' {name!r}' if name else ''}", where="plot", remedy=remedy
            )
        return _required("plotly.graph_objects").Figure(plots[name or next(iter(plots))].figure())

    def _printed(self, *, html: bool = False) -> str:
        from rich.console import Console

        console = Console(file=io.StringIO(), width=_WIDTH, record=html, emoji=False, markup=False, highlight=False)
        console.print(self.view())
        if html:
            frame = '<pre style="white-space: pre; overflow-x: auto; line-height: 1.2">{code}</pre>'
            return console.export_html(inline_styles=True, code_format=frame)
        text: str = console.file.getvalue()  # type: ignore[attr-defined]
        return "\n".join(line.rstrip() for line in text.split("\n"))


def _trtopt(module: str) -> Any:
    """A module of trtopt, by name: what shows reports knows them, and they stand below all else."""
    return importlib.import_module(f"trtopt.{module}")


def _required(module: str) -> Any:
    return _trtopt("support._lazy").require(module, "notebook", "show this")
