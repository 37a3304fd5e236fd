"""Where the command line writes: the report on stdout; progress, warnings and what it says last on stderr."""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from trtopt.errors import GateError, TrtoptError, UsageError
from trtopt.report.text.format import shorten, visible

if TYPE_CHECKING:
    import argparse
    from types import TracebackType

    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.progress import Progress, TaskID
    from rich.segment import Segment

    from trtopt.config import BuildConfig
    from trtopt.events import Event
    from trtopt.report.schema.build import BuildReport
    from trtopt.report.text.blocks import View

_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]")
"""What a terminal acts on, or shows nothing of: control characters but tab and line feed, marks that reverse the
direction of writing or have no width, halves of surrogate pairs."""


class _Report(Protocol):
    def to_json_dict(self) -> dict[str, Any]: ...


_PIPE_WIDTH = 100
_DETAIL_WIDTH = 100


def open_streams() -> None:
    """Give the process the streams that it was started without: what is written there goes nowhere.

    Else the next file that is opened gets the number of a stream, and what is printed.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            mode = "w" if number else "r"
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))


def safe(text: str) -> str:
    """``text`` with what a terminal would act on as escapes: names in files may hold anything.

    All that the command line prints passes through here; JSON has escapes of its own.
    """
    return _UNSAFE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def say(text: str, file: TextIO | None = None) -> None:
    """Print a line, on stdout unless ``file`` is another stream, without what a terminal would act on."""
    print(safe(text), file=file)


class Listener:
    """Prints warnings on stderr as they happen and, when stderr is a terminal, progress bars.

    With ``verbose`` it prints a line when a task starts and when it ends, terminal or not; with ``quiet`` nothing.
    """

    def __init__(self, *, verbose: bool = False, quiet: bool = False) -> None:
        self._verbose, self._quiet = verbose, quiet
        self._start = time.monotonic()
        self._progress: Progress | None = None
        self._tasks: dict[str, TaskID] = {}

    @classmethod
    def of(cls, args: argparse.Namespace) -> Listener:
        """As ``--verbose`` and ``--quiet`` ask for."""
        return cls(verbose=args.verbose, quiet=args.quiet)

    def __enter__(self) -> Listener:
        if sys.stderr.isatty() and not self._quiet:
            from rich.console import Console
            from rich.progress import Progress

            self._progress = Progress(console=Console(stderr=True), transient=True)
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()

    def __call__(self, event: Event) -> None:
        """Show one event."""
        if self._quiet:
            return
        if event.kind in ("warning", "note"):
            self.print(f"{event.kind}: {event.text}", "yellow" if event.kind == "warning" else "dim")
            return
        if self._verbose and event.kind != "advance":
            work = f" ({event.total})" if event.total is not None else ""
            if event.kind == "detail":
                work = f": {_detail(event)}"
            self.print(f"{time.monotonic() - self._start:8.2f} s  {event.kind:5} {event.task}{work}", "dim")
        if self._progress is not None:
            self._advance(self._progress, event)

    def print(self, text: str, style: str = "") -> None:
        """Print a line on stderr, above the progress bars."""
        if self._progress is not None:
            self._progress.console.print(safe(text), markup=False, highlight=False, style=style)
        else:
            say(text, sys.stderr)

    def _advance(self, progress: Progress, event: Event) -> None:
        if event.kind == "start":
            self._tasks[event.task] = progress.add_task(event.task, total=event.total)
        elif event.task in self._tasks and event.kind == "advance":
            progress.advance(self._tasks[event.task])
        elif event.task in self._tasks and event.kind == "detail":
            from rich.markup import escape

            description = escape(f"{event.task}: {_detail(event)}")
            progress.update(self._tasks[event.task], description=description)
        elif event.task in self._tasks:
            progress.remove_task(self._tasks.pop(event.task))


def _detail(event: Event) -> str:
    """What a task is at, on one line; names of the model in it may hold anything."""
    return shorten(visible(event.text), _DETAIL_WIDTH)


@contextlib.contextmanager
def own_stdout(*, quiet: bool) -> Iterator[None]:
    """With ``quiet``, send to stderr what anything else prints on stdout: a user's metric, a native library.

    The file descriptor itself is moved, so that native code and worker processes follow.
    """
    if not quiet:
        yield
        return
    sys.stdout.flush()
    saved = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(saved, 1)
        os.close(saved)


def print_json(value: dict[str, Any]) -> None:
    import json

    _print(json.dumps(value, indent=2, allow_nan=False))


def print_notes(args: argparse.Namespace) -> None:
    """Print what there is to say of the options, on stderr."""
    for note in () if args.quiet else args.notes:
        say(f"note: {note}", sys.stderr)


def show(
    report: _Report,
    render: Callable[[Any], View] = lambda report: report.view(),
    *,
    as_json: bool,
    warned: bool = False,
    quiet: bool = False,
) -> None:
    """Print a report on stdout: as JSON and nothing else, or as ``render`` shows it, without the warnings that a
    :class:`Listener` has printed (``warned``); with ``quiet`` as JSON only."""
    if as_json:
        print_json(report.to_json_dict())
    elif not quiet:
        from dataclasses import replace

        shown = render(report)
        print_renderable(replace(shown, warnings=()) if warned else shown)


def print_renderable(renderable: RenderableType) -> None:
    """Print on stdout, as wide as the terminal; without colours, and 100 columns wide, when it is not one."""
    from rich.console import Console

    if sys.stdout.isatty():
        Console(highlight=False, emoji=False, markup=False).print(_Safe(renderable), crop=False)
        return
    columns = os.environ.get("COLUMNS", "")
    width = int(columns) if columns.isdecimal() and int(columns) > 0 else _PIPE_WIDTH
    text = io.StringIO()
    Console(file=text, width=width, no_color=True, emoji=False, markup=False).print(
        renderable, highlight=False, crop=False
    )
    _print(safe("\n".join(line.rstrip() for line in text.getvalue().rstrip("\n").split("\n"))))


class _Safe:
    """Something to print on a terminal, its text without what the terminal would act on, its colours kept."""

    def __init__(self, of: RenderableType) -> None:
        self.of = of

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        from rich.segment import Segment

        for text, style, control in console.render(self.of, options):
            yield Segment(text if control else safe(text), style, control)


def _print(text: str) -> None:
    """Print a line, or say that the disk is full: part of a report must not pass for all of it."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        # What is still in the buffer would fail again when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise UsageError(
            f"Cannot write the report: {error.strerror}", where="stdout", remedy="send it to another file or disk"
        ) from error


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
    if report.reduce:
        say(f"  reduce: {report.reduce}", sys.stderr)
    return GateError.exit_code
