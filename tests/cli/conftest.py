"""Real runs of the command line, as processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def trtopt(tmp_path: Path) -> Run:
    """Runs ``trtopt ARGUMENTS`` in a folder of the test's own, with a cache folder and a width of its own."""

    def run(*arguments: str, cwd: Path | None = None, columns: int = 100) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "HOME": str(tmp_path), "COLUMNS": str(columns)}
        environment.pop("XDG_CACHE_HOME", None)
        return subprocess.run(
            [sys.executable, "-m", "trtopt", *arguments],
            cwd=cwd or tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    return run
