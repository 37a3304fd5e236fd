"""Hostile pictures and labels end in an error that names them, or are read: no crash, no hang, little memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("PIL", reason="pictures are read by Pillow: pip install 'trtopt[images]'")
pytest.importorskip("resource", reason="memory is measured on Unix")

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("hostile_pictures.py")
SECONDS, MIB = 10, 1200
"""Of processor time for a folder of two pictures; of resident memory in all: a picture of the largest size is 400."""


@pytest.mark.parametrize("inputs", [50, pytest.param(1000, marks=pytest.mark.long)])
def test_hostile_pictures_and_labels_are_refused_or_read(inputs: int, tmp_path: Path) -> None:
    line = [sys.executable, str(SCRIPT), str(tmp_path / "case"), str(inputs), "7"]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'recipes'}"}
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    cases = [json.loads(text) for text in done.stdout.splitlines()]
    outcomes = [case["outcome"] for case in cases]
    assert len(cases) == inputs and outcomes.count("refused") > inputs // 4 and outcomes.count("read") > inputs // 10
    slow = max(cases, key=lambda case: float(case["seconds"]))
    assert slow["seconds"] < SECONDS, slow
    assert cases[-1]["mib"] < MIB, cases[-1]
