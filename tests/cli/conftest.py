"""Real runs of the command line."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from command_line import Run, environment_in, run_here, run_process


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """The home of the command's user, with the cache. A file of tests that ask for the same engines again and again,
    and not for the cache, makes it one for all of them."""
    return tmp_path


@pytest.fixture
def trtopt(tmp_path: Path, home: Path) -> Run:
    """Runs ``trtopt ARGUMENTS`` in a folder of the test's own, with a home and a width of its own.

    It runs within the process of the tests: starting Python and importing all packages takes more than a second.
    """

    def run(*arguments: str, cwd: Path | None = None, columns: int = 100) -> subprocess.CompletedProcess[str]:
        return run_here(arguments, cwd or tmp_path, environment_in(home, columns))

    return run


@pytest.fixture
def trtopt_process(tmp_path: Path) -> Run:
    """As ``trtopt``, in a process of its own: what crashes, fills or closes a process, or looks at its start."""

    def run(*arguments: str, cwd: Path | None = None, columns: int = 100) -> subprocess.CompletedProcess[str]:
        return run_process(arguments, cwd or tmp_path, environment_in(tmp_path, columns))

    return run
