"""The search over builder options, as a terminal shows it."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType

from trtopt.report.schema.builder_options import BuilderTrial
from trtopt.report.text.analysis import time_text
from trtopt.report.text.numbers import seconds_text, table


def section(trials: Sequence[BuilderTrial]) -> list[RenderableType]:
    """A row for each engine; nothing where there was no search."""
    rows = [
        (
            "*" if trial.chosen else "",
            ", ".join(trial.options) or "as asked for",
            "" if trial.median_us is None else time_text(trial.median_us),
            "" if trial.spread_us is None else time_text(trial.spread_us),
            "" if trial.build_seconds is None else seconds_text(trial.build_seconds),
            f"{trial.reason} (remembered)" if trial.remembered else trial.reason,
        )
        for trial in trials
    ]
    return [table(("", "options", "median", "spread", "build", ""), rows, right=range(2, 5))] if rows else []
