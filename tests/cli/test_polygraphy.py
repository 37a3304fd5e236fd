"""Files that go to Polygraphy and come from it, by whole runs of the command line and the real package."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from command_line import Run
from small_models import samples, save_small

from trtopt.precision.observe.polygraphy import read_inputs, read_outputs, write_inputs, write_outputs

OPTIMIZE = ("optimize", "model.onnx", "-o", "m.onnx", "--fp16", "--recipes", "none", "--json")


def polygraphy(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A run of Polygraphy's command line."""
    pytest.importorskip("polygraphy", reason="Polygraphy is not installed: the extra polygraphy")
    code = "import sys; from polygraphy.tools import main; sys.exit(main())"
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)


def compared(folder: Path, *arguments: str) -> int:
    """The exit code of ``polygraphy run``: 0 where all outputs match."""
    found = polygraphy(folder, "run", *arguments)
    assert "Accuracy Summary" in found.stdout + found.stderr, found.stdout + found.stderr
    return found.returncode


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_small(tmp_path)
    return tmp_path


def test_what_polygraphy_saves_is_calibrated_on_and_compared_with(trtopt: Run, folder: Path) -> None:
    """Batches of 5, which the build cuts to rows where it calibrates, and keeps where it compares."""
    saved = ("--save-inputs", "inputs.json", "--save-outputs", "outputs.json")
    shape = ("--input-shapes", "x:[5,3,8,8]", "--iterations", "3")
    assert polygraphy(folder, "run", "model.onnx", "--onnxrt", *shape, *saved).returncode == 0
    found = trtopt(*OPTIMIZE, "--calib", "inputs.json", "--eval", "inputs.json", "--reference", "outputs.json")
    assert found.returncode == 0, found.stderr
    report = json.loads(found.stdout)
    assert report["calibration"]["samples"] == 15
    assert report["accuracy"]["samples"] == 3
    assert report["accuracy"]["outputs"]["scores"]["sqnr_db"] > 40
    assert "outputs.json" in " ".join(report["accuracy"]["notes"])


def test_folders_of_iterations_are_read_too(trtopt: Run, folder: Path) -> None:
    saved = ("--save-inputs", "inputs", "--save-outputs", "outputs")
    ran = polygraphy(folder, "run", "model.onnx", "--onnxrt", "--iterations", "2", *saved)
    if not (folder / "inputs").is_dir():
        pytest.skip(f"this Polygraphy writes no folders: {ran.stderr[-200:]}")
    found = trtopt(*OPTIMIZE, "--eval", "inputs", "--reference", "outputs")
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout)["accuracy"]["samples"] == 2


def test_polygraphy_compares_what_a_build_keeps(trtopt: Run, folder: Path) -> None:
    np.savez(folder / "calib.npz", x=samples())
    found = trtopt(*OPTIMIZE, "--calib", "calib.npz", "--polygraphy", "kept")
    assert found.returncode == 0, found.stderr
    assert {item.name for item in (folder / "kept").iterdir()} == {
        "model.onnx",
        "optimized.onnx",
        "inputs.json",
        "reference.json",
        "outputs.json",
    }
    loaded = ("--load-inputs", "kept/inputs.json", "--load-outputs", "kept/outputs.json")
    assert compared(folder, "model.onnx", "--onnxrt", *loaded, "--atol", "1e-2", "--rtol", "1e-2") == 0
    assert compared(folder, "kept/optimized.onnx", "--onnxrt", *loaded, "--atol", "1e-2", "--rtol", "1e-2") == 0
    both = ("--load-outputs", "kept/reference.json", "kept/outputs.json")
    assert compared(folder, *both, "--atol", "1e-2", "--rtol", "1e-2") == 0
    assert compared(folder, *both, "--atol", "1e-7", "--rtol", "1e-7") != 0


def test_polygraphy_compares_what_a_profile_keeps(trtopt: Run, folder: Path) -> None:
    found = trtopt("profile", "model.onnx", "--backend", "onnxruntime", "--polygraphy", "kept")
    assert found.returncode == 0, found.stderr
    assert read_inputs(folder / "kept" / "inputs.json")[0]["x"].shape == (8, 3, 8, 8)
    loaded = ("--load-inputs", "kept/inputs.json", "--load-outputs", "kept/outputs.json")
    assert compared(folder, "model.onnx", "--onnxrt", *loaded) == 0


def write_pair(folder: Path, *, rows: int = 1, count: int = 2, scores: int = 10) -> None:
    """Inputs, and outputs of another network for them."""
    rng = np.random.default_rng(0)
    images = rng.standard_normal((2, rows, 3, 8, 8)).astype(np.float32)
    write_inputs(folder / "inputs.json", [{"x": image} for image in images])
    outputs = rng.standard_normal((count, rows, scores)).astype(np.float32)
    write_outputs(folder / "outputs.json", "another", [{"scores": array} for array in outputs])


def test_a_reference_is_what_gates_judge_against(trtopt: Run, folder: Path) -> None:
    write_pair(folder)
    found = trtopt(*OPTIMIZE, "--eval", "inputs.json", "--reference", "outputs.json", "--min-sqnr-db", "20")
    assert found.returncode == 7
    assert "SQNR" in found.stderr and not (folder / "m.onnx").exists()
    (folder / "report.json").write_text(found.stdout)
    checked = trtopt("check", "report.json", "--max-accuracy-drop", "0.01")
    assert checked.returncode == 7
    assert "with the recorded outputs" in checked.stdout and "FP32" not in checked.stdout


@pytest.mark.parametrize(
    ("pair", "arguments", "why"),
    [
        ({}, (), "Recorded outputs belong to inputs"),
        ({"count": 3}, ("--eval", "inputs.json"), "outputs of 3 iterations, and inputs of 2"),
        ({"scores": 7}, ("--eval", "inputs.json"), "has the shape [1, 7]"),
    ],
)
def test_a_reference_of_something_else_is_refused(
    trtopt: Run, folder: Path, pair: dict[str, int], arguments: tuple[str, ...], why: str
) -> None:
    write_pair(folder, **pair)
    found = trtopt(*OPTIMIZE, *arguments, "--reference", "outputs.json")
    assert found.returncode == 2
    assert why in found.stderr and "remedy" in found.stderr


def test_a_tolerance_beyond_which_values_are_is_a_failed_gate(trtopt: Run, folder: Path) -> None:
    found = trtopt(*OPTIMIZE, "--atol", "1e-9", "--rtol", "scores:1e-9")
    assert found.returncode == 7
    assert "1e-09 of --atol and 1e-09 of --rtol" in found.stderr
    judged = json.loads(found.stdout)["accuracy"]["outputs"]["scores"]["tolerance"]
    assert 0 < judged["beyond"] <= judged["values"]
    assert trtopt(*OPTIMIZE, "--atol", "scores:1").returncode == 0
    assert trtopt(*OPTIMIZE, "--atol", "other:1").returncode == 2


def test_the_command_of_a_failed_gate_reduces_the_model(trtopt: Run, folder: Path) -> None:
    """Its check, run on the whole model, ends as the run did."""
    found = trtopt(*OPTIMIZE, "--atol", "1e-9", "--polygraphy", "kept")
    assert found.returncode == 7
    last = found.stderr.rstrip().splitlines()[-1]
    command = shlex.split(last.partition("reduce: ")[2])
    assert command[:4] == ["polygraphy", "debug", "reduce", str(folder / "kept" / "model.onnx")]
    assert json.loads(found.stdout)["reduce"] == shlex.join(command)
    check = command[command.index("--check") + 2 :]
    (folder / "polygraphy_debug.onnx").write_bytes((folder / "kept" / "model.onnx").read_bytes())
    assert str(trtopt(*check).returncode) == command[command.index("--fail-code") + 1] == "7"


def test_what_the_check_of_the_command_cannot_have_is_said(trtopt: Run, folder: Path) -> None:
    """A part has other outputs and fixed shapes: a tolerance is that of all, and what is left out is a warning."""
    write_pair(folder, rows=2)
    shapes = ("--min-shapes", "x:1x3x8x8", "--opt-shapes", "x:2x3x8x8", "--max-shapes", "x:4x3x8x8")
    recorded = ("--eval", "inputs.json", "--reference", "outputs.json")
    found = trtopt(*OPTIMIZE, *shapes, *recorded, "--rtol", "scores:1e-4", "--polygraphy", "kept")
    assert found.returncode == 7
    report = json.loads(found.stdout)
    check = shlex.split(report["reduce"].partition(" --check ")[2])
    assert check[check.index("--atol") :][:4] == ["--atol", "1e-05", "--rtol", "0.0001"]
    assert "--model-input-shapes 'x:[2,3,8,8]'" in report["reduce"]
    (left,) = (warning for warning in report["warnings"] if "debug reduce" in str(warning))
    assert str(left).endswith("without --reference, --min-shapes, --opt-shapes, --max-shapes")
    assert "without --reference" in found.stderr


def test_a_failed_build_is_kept_with_its_command(trtopt: Run, folder: Path) -> None:
    arguments = ("--gpu", "L4", "--recipes", "none", "--no-cache", "--polygraphy", "kept")
    found = trtopt("build", "model.onnx", *arguments, "--builder", "workspace=1")
    if found.returncode == 0:
        pytest.skip("this compiler builds it with a byte of workspace")
    assert found.returncode == 6
    assert found.stderr.rstrip().splitlines()[-1].lstrip().startswith("reduce: polygraphy debug reduce")
    assert read_outputs(folder / "kept" / "outputs.json")[0] == "trtopt-onnx"
