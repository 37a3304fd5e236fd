"""``trtopt build`` of the combinations in a configuration file."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from small_models import samples, save_small

Run = Callable[..., "subprocess.CompletedProcess[str]"]

CONFIG = """\
[build]
calib = "calib.npz"
recipes = "none"
output = "out/{model}-{gpu}-{precision}.rtx.engine"
report = "out/{gpu}-{precision}.json"
[matrix]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a model, calibration samples, and a configuration whose matrix is to be filled in."""
    save_small(tmp_path)
    np.savez(tmp_path / "calib.npz", x=samples())
    (tmp_path / "out").mkdir()
    return tmp_path


def test_each_combination_is_built_and_the_worst_exit_code_is_given(trtopt: Run, folder: Path) -> None:
    (folder / "trtopt.toml").write_text(CONFIG + 'gpu = ["RTX 4090", "V100"]\nprecision = ["fp32", "fp16"]\n')
    done = trtopt("build", "model.onnx", "--config", "trtopt.toml")
    assert done.returncode == 4
    engines = sorted(path.name for path in (folder / "out").glob("*.engine"))
    assert engines == ["model-RTX-4090-fp16.rtx.engine", "model-RTX-4090-fp32.rtx.engine"]
    rows = [line.split() for line in done.stdout.splitlines()]
    assert rows[0] == ["gpu", "precision", "kernels", "predicted", "size"]
    assert rows[1][:2] == ["RTX-4090", "fp32"] and rows[1][-1] == "done"
    assert rows[2][:2] == ["RTX-4090", "fp16"] and rows[2][-1] == "done"
    assert done.stdout.count("exit code 4: TensorRT for RTX") == 2
    assert "build 4 of 4: gpu V100, precision fp16" in done.stderr
    report = json.loads((folder / "out" / "RTX-4090-fp32.json").read_text())
    assert report["config"]["precision"] == "fp32" and report["gpu"]["name"] == "RTX-4090"


def test_json_holds_every_report(trtopt: Run, folder: Path) -> None:
    (folder / "trtopt.toml").write_text(
        '[optimize]\noutput = "out/{model}.onnx"\nrecipes = "none"\n[matrix]\nmodel = ["model.onnx", "none.onnx"]\n'
    )
    done = trtopt("optimize", "--config", "trtopt.toml", "--json")
    assert done.returncode == 2 and (folder / "out" / "model.onnx").exists()
    found = json.loads(done.stdout)
    assert found["schema"] == "trtopt.matrix/1"
    assert [(item["matrix"], item["exit_code"]) for item in found["builds"]] == [
        ({"model": "model"}, 0),
        ({"model": "none"}, 2),
    ]
    assert found["builds"][0]["report"]["schema"] == "trtopt.build/1" and found["builds"][1]["report"] is None


@pytest.mark.parametrize(
    ("matrix", "arguments", "message", "remedy"),
    [
        ("gpu = []", ("model.onnx",), "expands to nothing", "1 or more values"),
        ('gpu = ["L4", "A10"]\nsparse = [false, true]', ("model.onnx",), "precision", "{gpu}, {sparse}"),
        ('gpu = ["L4", "L 4"]\nprecision = ["fp16"]', ("model.onnx", "-o", "e"), "would write", "{gpu}-{precision}"),
        (
            'gpu = ["L4"]\nprecision = ["fp16"]',
            ("model.onnx", "--int8"),
            "given, and varied by the matrix",
            "leave one out",
        ),
        ('gpu = ["L4"]\nprecision = ["fp16"]', (), "There is no model", 'model = ["model.onnx"] in [matrix]'),
        ('gpu = ["L4"]\nprecision = ["fp16"]', ("model.onnx", "--report", "{gqu}"), "does not vary {gqu}", "mean gpu"),
    ],
)
def test_a_wrong_matrix_ends_before_the_first_build(
    trtopt: Run, folder: Path, matrix: str, arguments: tuple[str, ...], message: str, remedy: str
) -> None:
    (folder / "trtopt.toml").write_text(CONFIG + matrix + "\n")
    done = trtopt("build", *arguments, "--config", "trtopt.toml")
    assert done.returncode == 2 and done.stdout == ""
    assert message in done.stderr and remedy in done.stderr.partition("remedy: ")[2]
    assert "build 1 of" not in done.stderr and list((folder / "out").iterdir()) == []


def test_a_build_that_crashes_costs_no_other(trtopt: Run, folder: Path) -> None:
    (folder / "metric.py").write_text("import os\ndef dies(run):\n    os.abort()\ndef one(run):\n    return 1.0\n")
    (folder / "trtopt.toml").write_text(
        '[optimize]\noutput = "out/{metric}.onnx"\nrecipes = "none"\ncalib = "calib.npz"\neval = "calib.npz"\n'
        '[matrix]\nmetric = ["metric.py:dies", "metric.py:one"]\n'
    )
    done = trtopt("optimize", "model.onnx", "--config", "trtopt.toml", "--json")
    assert done.returncode == 2
    first, second = json.loads(done.stdout)["builds"]
    assert (first["exit_code"], first["error"], first["report"]) == (2, "A script crashed (SIGABRT)", None)
    assert second["exit_code"] == 0 and second["report"]["config"]["metric"].endswith("metric.py:one")
    (made,) = (folder / "out").iterdir()
    assert made.name.endswith("one.onnx")
