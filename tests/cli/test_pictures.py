"""Builds on folders of pictures, from the command line: what is built, what is said, what is refused."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from small_models import save_small, small_model

pytest.importorskip("PIL", reason="pictures are read by Pillow: pip install 'trtopt[images]'")
from PIL import Image

Run = Callable[..., "subprocess.CompletedProcess[str]"]

ROOT = Path(__file__).parents[2]
INT8 = ("--int8", "--keep-all-int8", "--recipes", "none", "--no-cache", "--min-agreement", "0")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a model, 20 pictures to calibrate on, and 3 of each of 10 classes to verify on."""
    save_small(tmp_path)
    rng = np.random.default_rng(0)
    for index in range(20):
        save(rng, tmp_path / "pictures" / f"{index}.png")
    for index in range(30):
        save(rng, tmp_path / "val" / f"{index % 10}" / f"{index}.jpg")
    return tmp_path


def save(rng: np.random.Generator, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(rng.integers(0, 256, (12, 10, 3), dtype=np.uint8)).save(path)


def test_pictures_calibrate_and_labelled_ones_are_the_metric(trtopt: Run, folder: Path) -> None:
    options = ("--calib", "pictures", "--eval", "val", "--metric", "top1", "--max-accuracy-drop", "1")
    done = trtopt("build", "model.onnx", *INT8, *options, "--report", "r.json")
    assert done.returncode == 0, done.stderr
    assert (folder / "model.rtx.engine").is_file()
    report = json.loads((folder / "r.json").read_text())
    assert report["calibration"]["samples"] == 20 and report["calibration"]["source"] == "user"
    assert report["accuracy"]["samples"] == 30 and report["accuracy"]["metric"]["name"] == "top1"
    assert "pictures are prepared by --preprocess" in done.stderr.replace("\n", " ")


def test_what_is_said_of_pictures_is_in_the_manifest_and_no_warning(trtopt: Run, folder: Path) -> None:
    options = ("--calib", "pictures", "--eval", "val", "--preprocess", "scale=255,color=bgr")
    done = trtopt("build", "model.onnx", *INT8, *options)
    assert done.returncode == 0, done.stderr
    assert "--preprocess" not in done.stderr
    manifest = json.loads((folder / "model.rtx.engine.manifest.json").read_text())
    assert manifest["options"]["preprocess"] == "scale=255,color=bgr"


def test_a_broken_picture_is_named_or_skipped(trtopt: Run, folder: Path) -> None:
    (folder / "pictures/7.png").write_bytes(b"no picture")
    options = ("--calib", "pictures", "--preprocess", "imagenet")
    done = trtopt("build", "model.onnx", *INT8, *options)
    assert done.returncode == 2 and "7.png" in done.stderr and "--skip-bad" in done.stderr
    assert not list(folder.glob("*.engine*"))
    done = trtopt("build", "model.onnx", *INT8, *options, "--skip-bad")
    assert done.returncode == 0, done.stderr
    assert "1 of 20 pictures cannot be decoded" in done.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--calib", "pictures", "--metric", "top1"), "top1 needs labels"),
        (("--calib", "pictures", "--eval", "val", "--metric", "map50"), "map50 needs boxes"),
        (("--calib", "pictures", "--eval", "val", "--metric", "top7"), "unknown metric 'top7'"),
        (("--calib", "pictures", "--eval", "val", "--metric", "miou"), "miou needs"),
        (("--calib", "pictures", "--preprocess", "imagnet"), "did you mean imagenet?"),
        (("--calib", "pictures", "--preprocess", "missing.py:f"), "missing.py"),
        (("--calib", "pictures", "--labels", "missing.csv"), "The labels do not exist"),
        (("--calib", "empty"), "no picture"),
        (("--calib", "pictures", "--boxes", "yolo"), "--boxes: 'yolo'"),
    ],
)
def test_what_cannot_be_is_refused_with_a_remedy(
    trtopt: Run, folder: Path, options: tuple[str, ...], message: str
) -> None:
    (folder / "empty").mkdir()
    done = trtopt("build", "model.onnx", "--fp16", *options)
    assert done.returncode == 2, done.stdout + done.stderr
    assert message in done.stderr and "remedy:" in done.stderr and "Traceback" not in done.stderr
    assert not list(folder.glob("*.engine*"))


def test_sensitivity_prepares_pictures_as_it_is_told(trtopt: Run, folder: Path) -> None:
    done = trtopt("sensitivity", "model.onnx", "--calib", "pictures")
    assert done.returncode == 0 and "guessed" in done.stderr, done.stderr
    said = trtopt("sensitivity", "model.onnx", "--calib", "pictures", "--eval", "val", "--preprocess", "scale=255")
    assert said.returncode == 0 and said.stderr == "", said.stderr
    assert "2 regions on 30 samples" in said.stdout
    np.savez(folder / "x.npz", x=np.zeros((2, 3, 8, 8), np.float32))
    done = trtopt("sensitivity", "model.onnx", "--calib", "x.npz", "--preprocess", "scale=255")
    assert "--preprocess has no effect" in done.stderr


def test_a_network_that_takes_no_pictures_says_so(trtopt: Run, folder: Path) -> None:
    model = small_model()
    for value in (model.graph.input[0], *model.graph.value_info):
        value.type.tensor_type.shape.dim[1].dim_value = 4
    model.graph.initializer[0].CopyFrom(
        onnx.numpy_helper.from_array(np.zeros((16, 4, 3, 3), np.float32), model.graph.initializer[0].name)
    )
    onnx.save(model, folder / "four.onnx")
    done = trtopt("build", "four.onnx", "--fp16", "--calib", "pictures")
    assert done.returncode == 2 and "takes no pictures" in done.stderr


PAGE = (ROOT / "docs" / "pictures.md").read_text(encoding="utf-8")


@pytest.mark.long
def test_every_command_of_the_page_runs(trtopt: Run, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="the tutorial trains a network: pip install 'trtopt[torch]'")
    pytest.importorskip("jinja2", reason="the tutorial writes a page: pip install 'trtopt[report]'")
    section = PAGE.partition("## From a network to an engine")[2].partition("\n## ")[0]
    commands, program = re.findall(r"```(?:python)?\n(.*?)```", section, flags=re.DOTALL)
    shutil.copy(ROOT / "examples/pictures/shapes.py", tmp_path)
    for line in commands.splitlines():
        words = line.split()
        if words[0] == "python":
            subprocess.run([sys.executable, *words[1:]], cwd=tmp_path, check=True, timeout=600)
            continue
        done = trtopt(*words[1:])
        assert done.returncode == 0, f"{line}\n{done.stderr}"
    metric = json.loads((tmp_path / "shapes.json").read_text())["accuracy"]["metric"]
    assert metric["baseline"] > 0.95 and metric["optimized"] > 0.94
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "square", done.stderr
    own = tmp_path / "own"
    own.mkdir()
    for source, target in (("shapes.onnx", "model.onnx"), ("pictures/train", "pictures"), ("pictures/val", "val")):
        (tmp_path / source).rename(own / target)
    (first,) = re.findall(r"^trtopt (build .*)$", PAGE.partition("\n## ")[0], flags=re.MULTILINE)
    done = trtopt(*first.split(), cwd=own)
    assert done.returncode == 0 and (own / "model.rtx.engine").is_file(), done.stderr
