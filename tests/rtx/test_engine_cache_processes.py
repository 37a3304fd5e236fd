"""Real builds of real engines into one cache at once (many more, and more often: ``tests/rtx/cache_soak.py``)."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest
from cache_race import build, make_models, race, reference

pytestmark = pytest.mark.skipif(os.name == "nt", reason="SIGKILL is POSIX's")


def test_builders_at_once_make_each_engine_once_though_some_are_killed(tmp_path: Path) -> None:
    models = make_models(tmp_path, 2)
    counts = race(models, reference(models), processes=6, kills=2, dice=random.Random(3))
    assert counts["built"] + counts["cached"] + counts["killed"] == 6 and counts["cached"] > 0


def test_a_damaged_engine_is_built_anew_and_said(tmp_path: Path) -> None:
    (model,) = make_models(tmp_path, 1)
    assert build(model, "first", "--cache-dir", "cache").wait(300) == 0
    plain = (tmp_path / "first.engine").read_bytes()
    (entry,) = (tmp_path / "cache" / "engines").iterdir()
    whole = bytearray(entry.read_bytes())
    whole[len(whole) // 2] ^= 1
    entry.write_bytes(whole)
    assert build(model, "second", "--cache-dir", "cache").wait(300) == 0
    report = json.loads((tmp_path / "second.json").read_text())
    assert not report["engine"]["cached"] and any("built anew" in text for text in report["warnings"])
    assert (tmp_path / "second.engine").read_bytes() == plain
    assert build(model, "third", "--cache-dir", "cache").wait(300) == 0
    third = json.loads((tmp_path / "third.json").read_text())
    assert third["engine"]["cached"] and not third["warnings"]
    layers = [json.loads((tmp_path / f"{name}.json").read_text())["engine"]["layers"] for name in ("first", "third")]
    assert layers[0] == layers[1] and (tmp_path / "third.engine").read_bytes() == plain
