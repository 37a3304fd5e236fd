"""Signals that ask the command to stop: what its last word and its exit code are."""

from __future__ import annotations

import signal

_WORDS = {"SIGHUP": (129, "hung up"), "SIGINT": (130, "interrupted"), "SIGTERM": (143, "terminated")}

STOPPED = {signal.Signals[name]: word for name, word in _WORDS.items() if name in signal.Signals.__members__}
"""Exit code and last word by signal: the end of the terminal, its interrupt key, a request to end. Windows has no
SIGHUP."""
