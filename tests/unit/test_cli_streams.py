"""Progress on a terminal and off it."""

from __future__ import annotations

import sys

import pytest

from trtopt.cli.streams import Listener
from trtopt.events import Event

NASTY = "region [bold]a\x1b[31m\n: drop 0.02"


def test_verbose_says_what_a_task_is_at_on_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with Listener(verbose=True) as listener:
        listener(Event("start", "search", total=40))
        listener(Event("detail", "search", text=NASTY))
        listener(Event("advance", "search"))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and lines[0].endswith("start search (40)")
    assert lines[1].endswith("detail search: region [bold]a\\x1b[31m\\n: drop 0.02")


def test_without_verbose_and_off_a_terminal_nothing_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with Listener() as listener:
        listener(Event("start", "search", total=40))
        listener(Event("detail", "search", text=NASTY))
        listener(Event("end", "search"))
    assert capsys.readouterr().err == ""


def test_the_bar_shows_what_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with Listener() as listener:
        listener(Event("start", "search", total=40))
        listener(Event("detail", "search", text=NASTY))
        listener(Event("advance", "search"))
        assert listener._progress is not None
        (task,) = listener._progress.tasks
        assert task.description == "search: region \\[bold]a\\x1b[31m\\n: drop 0.02" and task.completed == 1
        listener(Event("end", "search"))
        assert not listener._progress.tasks
