"""What a command says last: an error, the gates that failed, or the signal that stopped it."""

from __future__ import annotations

import signal
import sys
from typing import TYPE_CHECKING

from trtopt.cli.streams import say
from trtopt.config import BuildConfig
from trtopt.errors import GateError, TrtoptError

if TYPE_CHECKING:
    from trtopt.report.schema.build import BuildReport

_WORDS = {"SIGHUP": (129, "hung up"), "SIGINT": (130, "interrupted"), "SIGTERM": (143, "terminated")}

STOPPED = {signal.Signals[name]: word for name, word in _WORDS.items() if name in signal.Signals.__members__}
"""Exit code and last word by signal: the end of the terminal, its interrupt key, a request to end. Windows has no
SIGHUP."""


_LONGEST_ERROR_LINE = 1000
_MOST_ERROR_LINES = 20


def print_error(error: TrtoptError) -> None:
    """Print what, where and remedy on stderr, within one screen."""
    cut = _LONGEST_ERROR_LINE
    lines = [line if len(line) <= cut else f"{line[:cut]} ..." for line in str(error).splitlines()]
    what = lines[:_MOST_ERROR_LINES]
    if len(lines) > _MOST_ERROR_LINES:
        tail = lines[-2:]
        what = [*lines[: _MOST_ERROR_LINES - 3], f"  ... {len(lines) - _MOST_ERROR_LINES + 1} more lines", *tail]
    say("error: " + "\n".join(what), sys.stderr)


def gate(report: BuildReport, config: BuildConfig) -> int:
    """Print the gates that failed, unless they are allowed; returns the exit code."""
    if not report.gate_failures:
        return 0
    if config.allow_accuracy_loss:
        return 0
    for failure in report.gate_failures:
        say(f"error: a gate failed: {failure}", sys.stderr)
    say("  remedy: --allow-accuracy-loss turns failed gates into warnings", sys.stderr)
    return GateError.exit_code
