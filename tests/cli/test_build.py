"""Whole runs of ``trtopt build`` and ``trtopt optimize`` with the real compiler."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from small_models import samples, save_small

from trtopt.engine.backend import read_header

Run = Callable[..., "subprocess.CompletedProcess[str]"]

PLAIN = ("--recipes", "none")
"""Recipes are judged by compiling, which takes most of the time of a build."""
INT8 = ("--int8", "--keep-all-int8", *PLAIN)
"""Likewise the guard, which would take the INT8 of a tiny network back."""
METRIC = """\
import os
import numpy as np

print("printed on import")

def mean(run):
    print("printed by the metric")
    os.write(1, b"written to the file descriptor\\n")
    return float(np.mean(run({"x": np.ones((1, 3, 8, 8), np.float32)})[0]))
"""
SLOW_METRIC = """\
import pathlib, time

def slow(run):
    pathlib.Path("started").touch()
    time.sleep(120)
    return 0.0
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a model and calibration samples."""
    save_small(tmp_path)
    np.savez(tmp_path / "calib.npz", x=samples())
    return tmp_path


def test_an_int8_engine_is_built_and_reported(trtopt: Run, folder: Path) -> None:
    done = trtopt("build", "model.onnx", *INT8[:2], "--calib", "calib.npz", "--report", "r.json", "--verbose")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("INT8 on L4, TensorRT for RTX: ")
    data = (folder / "model.rtx.engine").read_bytes()
    assert read_header(data).bytes == len(data)
    report = json.loads((folder / "r.json").read_text())
    assert report["schema"] == "trtopt.build/1"
    assert report["engine"]["bytes"] == len(data)
    assert report["calibration"]["source"] == "user"
    assert report["precision"]["achieved"]["int8"]["layers"] > 0
    assert report["accuracy"]["verified"] == "onnx-only"
    for part in ("model.rtx.engine", "r.json", "8-bit in the graph", "scores", "calibrate"):
        assert part in done.stdout


def test_nothing_is_coloured_and_nothing_is_padded_in_a_pipe(trtopt: Run, folder: Path) -> None:
    done = trtopt("build", "model.onnx", "--fp32", *PLAIN, columns=80)
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    assert all(len(line) <= 80 and line == line.rstrip() for line in done.stdout.splitlines())


def test_verbose_prints_each_stage_on_stderr(trtopt: Run, folder: Path) -> None:
    options = ("--fp16", "--calib", "calib.npz", "--cache-dir", "own", *PLAIN)
    done = trtopt("build", "model.onnx", *options, "--verbose")
    assert done.returncode == 0, done.stderr
    for task in ("calibrate", "verify", "build engine"):
        assert f"start {task}" in done.stderr
        assert f"end   {task}" in done.stderr
    assert "start" not in trtopt("build", "model.onnx", *options).stderr


def test_without_samples_the_warning_is_loud_on_both_streams(trtopt: Run, folder: Path) -> None:
    done = trtopt("build", "model.onnx", *INT8)
    assert done.returncode == 0, done.stderr
    assert "SYNTHETIC" in done.stderr
    assert "RANDOM data" in done.stdout and "--calib samples.npz" in done.stdout
    assert "SYNTHETIC" not in done.stdout, "no warning twice"


def test_json_is_all_there_is_on_stdout(trtopt: Run, folder: Path) -> None:
    (folder / "metric.py").write_text(METRIC)
    options = ("--fp16", "--calib", "calib.npz", "--metric", "metric.py:mean", "--json", *PLAIN)
    done = trtopt("build", "model.onnx", *options)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["schema"] == "trtopt.build/1"
    assert report["accuracy"]["metric"]["name"] == "metric.py:mean"
    for text in ("printed on import", "printed by the metric", "written to the file descriptor"):
        assert text in done.stderr


def test_a_failed_gate_is_exit_code_7_with_a_report_and_no_engine(trtopt: Run, folder: Path) -> None:
    options = [*INT8, "--calib", "calib.npz", "--min-sqnr-db", "300", "--report", "r.json", "--save-onnx", "o.onnx"]
    done = trtopt("build", "model.onnx", "-o", "m.engine", *options)
    assert done.returncode == 7
    assert "error: a gate failed: output scores: SQNR" in done.stderr
    assert "--allow-accuracy-loss" in done.stderr
    assert done.stdout.splitlines()[0] == "Nothing was made: a gate failed"
    assert not (folder / "m.engine").exists()
    assert not (folder / "o.onnx").exists()
    assert json.loads((folder / "r.json").read_text())["gate_failures"]

    done = trtopt("build", "model.onnx", "-o", "m.engine", *options, "--json")
    assert done.returncode == 7
    assert json.loads(done.stdout)["gate_failures"]

    done = trtopt("build", "model.onnx", "-o", "m.engine", *options, "--allow-accuracy-loss")
    assert done.returncode == 0
    assert "warning: output scores: SQNR" in done.stderr
    assert (folder / "m.engine").exists()


def test_the_configuration_file_is_read_and_the_command_line_wins(trtopt: Run, folder: Path) -> None:
    (folder / "conf").mkdir()
    (folder / "conf" / "trtopt.toml").write_text(
        '[build]\nprecision = "int8"\ncalib = "../calib.npz"\nreport = "../r.json"\nopt_shapes = "x:2x3x8x8"\n'
        'keep_all_int8 = true\nrecipes = "none"\n'
    )
    done = trtopt("build", "model.onnx", "--config", "conf/trtopt.toml", "--fp16", "--no-keep-all-int8")
    assert done.returncode == 0, done.stderr
    report = json.loads((folder / "r.json").read_text())
    assert report["config"]["precision"] == "fp16"
    assert report["config"]["keep_all_int8"] is False
    assert report["engine"]["profiles"] == [{"x": {"min": [2, 3, 8, 8], "opt": [2, 3, 8, 8], "max": [2, 3, 8, 8]}}]


def test_a_command_line_of_trtexec_works(trtopt: Run, folder: Path) -> None:
    done = trtopt(
        "build",
        "--onnx=model.onnx",
        "--saveEngine=m.engine",
        "--fp16",
        "--minShapes=x:1x3x8x8",
        "--optShapes=x:4x3x8x8",
        "--maxShapes=x:8x3x8x8",
        "--memPoolSize=workspace:512",
        "--builderOptimizationLevel=5",
        "--skipInference",
        "--exportLayerInfo=layers.json",
        "--verbose",
    )
    assert done.returncode == 0, done.stderr
    assert "note: --skipInference has no effect" in done.stderr
    assert read_header((folder / "m.engine").read_bytes()).compute_capabilities
    assert json.loads((folder / "layers.json").read_text())["layers"]
    assert "x: 1x3x8x8 .. 4x3x8x8 .. 8x3x8x8" in done.stdout
    assert "builder_optimization_level=5" in done.stdout


def test_optimize_writes_a_model_that_onnx_runtime_loads(trtopt: Run, folder: Path) -> None:
    done = trtopt("optimize", "model.onnx", "-o", "out.onnx", *INT8, "--calib", "calib.npz", "--json")
    assert done.returncode == 0, done.stderr
    model = onnx.load(folder / "out.onnx")
    onnx.checker.check_model(model, full_check=True)
    onnxruntime.InferenceSession(folder / "out.onnx")
    assert onnx.TensorProto.INT8 in {tensor.data_type for tensor in model.graph.initializer}
    assert json.loads(done.stdout)["engine"] is None


def test_optimize_keeps_the_types_unless_one_is_asked_for(trtopt: Run, folder: Path) -> None:
    done = trtopt("optimize", "model.onnx", "-o", "out.onnx")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("ONNX model for TensorRT for RTX on L4, types as they are: ")
    assert "Written\n  out.onnx" in done.stdout
    types = {tensor.data_type for tensor in onnx.load(folder / "out.onnx").graph.initializer}
    assert onnx.TensorProto.FLOAT16 not in types


@pytest.mark.parametrize("precision", [(), ("--fp16",)], ids=str)
def test_keeping_all_int8_where_there_is_none_is_said(trtopt: Run, folder: Path, precision: tuple[str, ...]) -> None:
    done = trtopt("optimize", "model.onnx", "-o", "o.onnx", "--keep-all-int8", *precision, *PLAIN)
    assert done.returncode == 0, done.stderr
    assert "warning: --keep-all-int8 has no effect: it goes with --int8" in " ".join(done.stderr.split())


def test_optimize_makes_no_engine_that_has_layers(trtopt: Run, folder: Path) -> None:
    done = trtopt("optimize", "model.onnx", "-o", "o.onnx", "--export-layer-info", "layers.json")
    assert done.returncode == 2 and "where:  --export-layer-info" in done.stderr
    assert not (folder / "layers.json").exists() and not (folder / "o.onnx").exists()


def test_optimize_needs_an_output(trtopt: Run, folder: Path) -> None:
    done = trtopt("optimize", "model.onnx")
    assert done.returncode == 2
    assert "-o OUT.onnx" in done.stderr


def _take_interrupts() -> None:
    """Where the tests run in the background of a shell, SIGINT is ignored, and children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.skipif(os.name == "nt", reason="signals are POSIX's")
@pytest.mark.parametrize(
    ("number", "code", "word"),
    [
        pytest.param(signal.SIGINT, 130, "interrupted", marks=pytest.mark.long),
        (signal.SIGTERM, 143, "terminated"),
    ],
)
def test_a_run_that_is_stopped_leaves_nothing(folder: Path, number: int, code: int, word: str) -> None:
    (folder / "tmp").mkdir()
    (folder / "metric.py").write_text(SLOW_METRIC)
    process = subprocess.Popen(
        [sys.executable, "-m", "trtopt", "build", "model.onnx", "--metric", "metric.py:slow", "-o", "m.engine", *PLAIN],
        cwd=folder,
        env={**os.environ, "HOME": str(folder), "TMPDIR": str(folder / "tmp")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=_take_interrupts,
    )
    deadline = time.monotonic() + 120
    while not (folder / "started").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == code
    assert stderr.splitlines()[-1] == word
    assert "Traceback" not in stderr
    assert stdout == ""
    assert not (folder / "m.engine").exists()
    assert list((folder / "tmp").glob("trtopt-*")) == []


@pytest.mark.skipif(os.name == "nt", reason="pseudo-terminals are POSIX's")
def test_progress_is_drawn_on_a_terminal_and_only_there(folder: Path) -> None:
    leader, follower = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "trtopt", "build", "model.onnx", *INT8, "--calib", "calib.npz", "--json"],
        cwd=folder,
        env={**os.environ, "HOME": str(folder), "TERM": "xterm"},
        stdout=subprocess.PIPE,
        stderr=follower,
    )
    os.close(follower)
    drawn = b""
    with contextlib.suppress(OSError):
        while piece := os.read(leader, 65536):
            drawn += piece
    os.close(leader)
    stdout, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert b"\x1b[" in drawn
    assert b"build engine" in drawn
    assert json.loads(stdout)["schema"] == "trtopt.build/1"


def test_an_unexpected_error_is_exit_code_1_with_the_traceback() -> None:
    script = (
        "import sys, types, trtopt.cli.main as main\n"
        "main.COMMANDS['broken'] = ''\n"
        "module = sys.modules['trtopt.cli.broken'] = types.ModuleType('broken')\n"
        "module.run = lambda argv: 1 / 0\n"
        "sys.exit(main.main(['broken']))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stderr
    assert "This is a bug in trtopt" in done.stderr
