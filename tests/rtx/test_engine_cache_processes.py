"""Real builds of real engines into one cache at once (many more, and more often: ``tests/rtx/cache_soak.py``)."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from cache_race import make_models, race, reference

import trtopt
from trtopt.report.schema.build import BuildReport

pytestmark = pytest.mark.skipif(os.name == "nt", reason="SIGKILL is POSIX's")


@pytest.mark.long
def test_builders_at_once_make_each_engine_once_though_some_are_killed(tmp_path: Path) -> None:
    models = make_models(tmp_path, 2)
    counts = race(models, reference(models), processes=6, kills=2, dice=random.Random(3))
    assert counts["built"] + counts["cached"] + counts["killed"] == 6 and counts["cached"] > 0


def test_a_damaged_engine_is_built_anew_and_said(tmp_path: Path) -> None:
    (model,) = make_models(tmp_path, 1)

    def built(name: str) -> BuildReport:
        return trtopt.build(
            model,
            output=tmp_path / f"{name}.engine",
            precision="fp32",
            recipes="none",
            cache_dir=str(tmp_path / "cache"),
        )

    first = built("first")
    plain = (tmp_path / "first.engine").read_bytes()
    (entry,) = (tmp_path / "cache" / "engines").iterdir()
    whole = bytearray(entry.read_bytes())
    whole[len(whole) // 2] ^= 1
    entry.write_bytes(whole)
    second = built("second")
    assert second.engine is not None and not second.engine.cached
    assert any("built anew" in text for text in second.warnings)
    assert (tmp_path / "second.engine").read_bytes() == plain
    third = built("third")
    assert third.engine is not None and third.engine.cached and not third.warnings
    assert first.engine is not None and first.engine.layers == third.engine.layers
    assert (tmp_path / "third.engine").read_bytes() == plain
