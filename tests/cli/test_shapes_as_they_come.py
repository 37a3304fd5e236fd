"""``--batches`` and ``--shape-histogram``: profiles of the engine, and what does not fit the model."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_models import save_small

from trtopt.engine.manifest import manifest_path

pytest.importorskip("tensorrt_rtx", reason="needs TensorRT for RTX")

Run = Callable[..., "subprocess.CompletedProcess[str]"]


def profiles(trtopt: Run, folder: Path, *options: str) -> list[dict[str, Any]]:
    """The optimization profiles of the engine's input."""
    done = trtopt("build", "model.onnx", "--recipes", "none", *options)
    assert done.returncode == 0, done.stderr
    (item,) = json.loads(manifest_path(folder / "model.rtx.engine").read_bytes())["inputs"]
    return list(item["ranges"])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_small(tmp_path)
    return tmp_path


def test_every_batch_has_a_profile(trtopt: Run, folder: Path) -> None:
    found = profiles(trtopt, folder, "--batches", "1,4,16")
    assert [(item["min"][0], item["opt"][0], item["max"][0]) for item in found] == [(1, 1, 1), (2, 4, 4), (5, 16, 16)]
    assert all(item["min"][1:] == item["max"][1:] for item in found)


def test_requests_are_divided_by_their_predicted_time(trtopt: Run, folder: Path) -> None:
    shape = json.loads(json.dumps(profiles(trtopt, folder, "--batches", "1")[0]["max"]))[1:]
    text = "x".join(map(str, shape))
    (folder / "log.txt").write_text(f"x:1x{text} 900\nx:512x{text} 100\n")
    done = trtopt("build", "model.onnx", "--recipes", "none", "--shape-histogram", "log.txt", "-o", "h.engine")
    assert done.returncode == 0 and "less than one profile of the largest" in done.stderr
    (item,) = json.loads(manifest_path(folder / "h.engine").read_bytes())["inputs"]
    assert [(found["min"][0], found["max"][0]) for found in item["ranges"]] == [(1, 1), (2, 512)]


def test_requests_of_nothing_are_in_a_range_and_are_optimized_for_by_none(trtopt: Run, folder: Path) -> None:
    shape = "x".join(map(str, profiles(trtopt, folder, "--batches", "1")[0]["max"][1:]))
    (folder / "log.txt").write_text(f"x:0x{shape} 900\nx:8x{shape}\n")
    (found,) = profiles(trtopt, folder, "--shape-histogram", "log.txt")
    assert (found["min"][0], found["opt"][0], found["max"][0]) == (0, 8, 8)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--batches", "1,8", "--opt-shapes", "x:1x3"), "in two ways"),
        (("--batches", "0"), "out of range"),
        (("--shape-histogram", "none.txt"), "cannot be read"),
        (("--shape-histogram", "other.txt"), "is no shape of the model, whose inputs are x"),
        (("--shape-histogram", "rank.txt"), "the rank is"),
        (("--shape-histogram", "."), "not a file|cannot be read"),
    ],
)
def test_what_does_not_fit_is_one_error(trtopt: Run, folder: Path, options: tuple[str, ...], words: str) -> None:
    (folder / "other.txt").write_text("y:1x3\n")
    (folder / "rank.txt").write_text("x:1x3\n")
    done = trtopt("build", "model.onnx", *options)
    assert done.returncode == 2 and any(word in done.stderr for word in words.split("|")), done.stderr
    assert not list(folder.glob("*.engine"))
