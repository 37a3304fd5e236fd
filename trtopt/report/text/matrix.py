"""The builds of a matrix: the records of ``trtopt.matrix/1``, and how a terminal shows them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trtopt.report.schema.build import BuildReport
from trtopt.report.text.analysis import time_text, visible
from trtopt.report.text.numbers import bytes_text, table

if TYPE_CHECKING:
    from rich.console import RenderableType

SCHEMA = "trtopt.matrix/1"


@dataclass(frozen=True)
class MatrixBuild:
    """One build.

    Attributes:
        varied: What the matrix varies, by option, as names of files have it.
        exit_code: Of the build.
        error: Why it failed: one line; empty when it did not.
        report: Its report; None where it did not come to one.
    """

    varied: dict[str, str]
    exit_code: int
    error: str = ""
    report: BuildReport | None = None


def matrix_json(builds: Sequence[MatrixBuild]) -> dict[str, Any]:
    """The builds as plain JSON values."""
    return {
        "schema": SCHEMA,
        "builds": [
            {
                "matrix": build.varied,
                "exit_code": build.exit_code,
                "error": build.error,
                "report": None if build.report is None else build.report.to_json_dict(),
            }
            for build in builds
        ],
    }


def render(builds: Sequence[MatrixBuild]) -> RenderableType:
    """A row for each build."""
    axes = list(builds[0].varied)
    rows = []
    for build in builds:
        engine = None if build.report is None else build.report.engine
        found = None if build.report is None else build.report.analysis
        rows.append(
            (
                *(visible(build.varied[axis]) for axis in axes),
                "" if engine is None else str(engine.kernels),
                "" if found is None else time_text(found.totals.predicted_us),
                "" if engine is None else bytes_text(engine.bytes),
                "done" if not build.exit_code else f"exit code {build.exit_code}: {visible(build.error)}",
            )
        )
    figures = tuple(range(len(axes), len(axes) + 3))
    return table((*axes, "kernels", "predicted", "size", ""), rows, right=figures)
