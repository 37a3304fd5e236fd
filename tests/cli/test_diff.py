"""``trtopt diff``: builds under two compilers, and reports that were made elsewhere."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import onnx.parser
import pytest

pytest.importorskip("tensorrt_rtx", reason="needs TensorRT for RTX")

Run = Callable[..., "subprocess.CompletedProcess[str]"]

NET = """
<ir_version: 8, opset_import: ["" : 17]>
net (float[1, 64, 28, 28] x) => (float[1, 64, 28, 28] y)
  <float[64, 64, 3, 3] w = {0}, float[64, 64, 3, 3] v = {0}> {
    [conv] c = Conv <pads = [1, 1, 1, 1]> (x, w)
    [act] a = ACT (c)
    [last] y = Conv <pads = [1, 1, 1, 1]> (a, v)
}
"""
INSTALLED = ("--compiler", "installed")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, act in (("relu", "Relu"), ("mish", "Softplus")):
        onnx.save(model(act), tmp_path / f"{name}.onnx")
    return tmp_path


def model(act: str) -> onnx.ModelProto:
    import numpy as np

    text = NET.replace("ACT", act).replace(
        "<float[64, 64, 3, 3] w = {0}, float[64, 64, 3, 3] v = {0}>", "<float[64, 64, 3, 3] w, float[64, 64, 3, 3] v>"
    )
    found = onnx.parser.parse_model(text)
    dice = np.random.default_rng(0)
    del found.graph.initializer[:]
    for name in ("w", "v"):
        weights = dice.normal(0, 0.05, (64, 64, 3, 3)).astype(np.float32)
        found.graph.initializer.append(onnx.numpy_helper.from_array(weights, name))
    return found


def test_one_compiler_twice_differs_in_nothing(trtopt: Run, folder: Path) -> None:
    options = ("--max-slowdown", "0", "--report", "d.json", "--markdown", "d.md", "--html", "d.html")
    done = trtopt("diff", "relu.onnx", *INSTALLED, *INSTALLED, *options)
    assert done.returncode == 0, done.stderr
    assert "nothing differs" in done.stdout
    found = json.loads((folder / "d.json").read_text())
    assert found["schema"] == "trtopt.diff/1" and found["changes"] == [] and found["slowdown"] == 0
    assert found["before"]["compiler"].startswith("tensorrt-rtx 1.")
    assert "nothing differs" in (folder / "d.md").read_text() and "nothing differs" in (folder / "d.html").read_text()
    assert not list(folder.glob("*.engine"))


def test_a_planted_break_of_a_fusion_is_named_by_its_node(trtopt: Run, folder: Path) -> None:
    for name in ("relu", "mish"):
        done = trtopt("build", f"{name}.onnx", "--recipes", "none", "--report", f"{name}.json")
        assert done.returncode == 0, done.stderr
    both = ("--compiler", "relu.json", "--compiler", "mish.json")
    done = trtopt("diff", *both, "--json", "--max-slowdown", "0.001")
    assert done.returncode == 7, done.stderr
    found = json.loads(done.stdout)
    assert [item["parted"] for item in found["changes"] if item["parted"]] == [["act"]]
    assert "Fuses no more" in trtopt("diff", "relu.json", "mish.json").stdout
    back = trtopt("diff", *both[2:], *both[:2], "--max-slowdown", "0.001")
    assert back.returncode == 0 and "Fuses now" in back.stdout


def test_a_model_that_no_compiler_builds_is_a_refusal_in_the_report(trtopt: Run, folder: Path) -> None:
    done = trtopt("diff", "relu.onnx", *INSTALLED, *INSTALLED, "--io", "nothing:fp16:chw", "--json")
    assert done.returncode == 2
    found = json.loads(done.stdout)
    assert "nothing" in found["before"]["failure"]["what"] and found["before"]["failure"]["exit_code"] == 2
    (folder / "cut.onnx").write_bytes((folder / "relu.onnx").read_bytes()[:100])
    done = trtopt("diff", "cut.onnx", *INSTALLED, *INSTALLED)
    assert done.returncode == 3 and "or it is cut off" in done.stdout
    (folder / "cut.toml").write_text('[build]\nrecipes = "none"\n[matrix]\nmodel = ["cut.onnx", "mish.onnx"]\n')
    done = trtopt("diff", "--config", "cut.toml", *INSTALLED, *INSTALLED)
    assert done.returncode == 3 and "mish.onnx" in done.stdout and "nothing differs" in done.stdout


def test_a_matrix_compares_many_models(trtopt: Run, folder: Path) -> None:
    (folder / "m.toml").write_text('[build]\nrecipes = "none"\n[matrix]\nmodel = ["relu.onnx", "mish.onnx"]\n')
    compared = ("diff", "--config", "m.toml", *INSTALLED, *INSTALLED, "--max-slowdown", "0")
    done = trtopt(*compared, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [item["changes"] for item in found["diffs"]] == [[], []]
    done = trtopt(*compared, "--html", "d.html")
    assert done.returncode == 2 and "no such form" in done.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("relu.onnx", *INSTALLED), "Two compilers are compared"),
        (("relu.json", "mish.json", *INSTALLED), "not 2 files"),
        (("relu.onnx", *INSTALLED, "--compiler", "tensorrt==10.3"), "names no compiler"),
        (("relu.onnx", *INSTALLED, "--compiler", "tensorrt-rtx==1.6; x"), "names no compiler"),
        (("none.onnx", *INSTALLED, *INSTALLED), "does not exist"),
        (INSTALLED * 2, "no model to build"),
        (("--compiler", "none.json", "--compiler", "none.json"), "cannot be read"),
        (("relu.onnx", *INSTALLED, *INSTALLED, "-o", "e.engine"), "does not write that"),
        (("relu.onnx", *INSTALLED, *INSTALLED, "--max-slowdown", "-1"), "number from 0 on"),
        (("relu.onnx", *INSTALLED, *INSTALLED, "--backend", "tensorrt"), "need their GPU"),
    ],
)
def test_what_cannot_be_compared_is_one_error(trtopt: Run, folder: Path, options: tuple[str, ...], words: str) -> None:
    done = trtopt("diff", *options)
    assert done.returncode == 2 and words in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
