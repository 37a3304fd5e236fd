"""The accuracy budget as a user meets it: budgets that cannot be met, metrics that fail, searches that are killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from small_models import samples, save_small

from trtopt.report.text.decisions import drop_text

Run = Callable[..., "subprocess.CompletedProcess[str]"]

WIDTH, SIZE, CONVOLUTIONS, BATCH = 32, 8, 3, 64

METRICS = """\
import time
from pathlib import Path
import numpy as np

X = np.load("calib.npz")["x"]
outputs = []

def closeness(run):
    outputs.append(run({"x": X})[0])
    return -float(np.abs(outputs[-1] - outputs[0]).max())

def raises(run):
    raise KeyError("no such label")

def not_a_number_in_8_bit(run):
    return float("nan") if outputs else closeness(run)

def feeds(name, dtype, rank):
    return lambda run: float(run({name: X.astype(dtype)[(0,) * (4 - rank)]})[0].mean())

wrong_name, wrong_type, wrong_rank = feeds("data", "f4", 4), feeds("x", "f8", 4), feeds("x", "f4", 3)

def no_arrays(run):
    return float(run({"x": X.tolist()})[0].mean())

def nan(run):
    return float("nan")

def slow(run):
    if len(outputs) > 2 and not Path("again").exists():
        Path("started").touch()
        time.sleep(120)
    return closeness(run)
"""
"""``closeness`` falls with every rounding, so that FP16 misses a budget of nothing and 8-bit one that FP16 holds. A
search calls its metric for each point, and once more for its file where it holds, after the run did for the reference:
``slow`` stops behind the first point."""


def _wide_model() -> onnx.ModelProto:
    """x [N, 32, 8, 8] -> 3 times conv 3x3 and ReLU, global average, Gemm -> scores [N, 10]; faster in INT8."""
    rng = np.random.default_rng(0)
    weights = {"wg": rng.standard_normal((WIDTH, 10))}
    nodes, last = [], "x"
    for number in range(CONVOLUTIONS):
        weights[f"w{number}"] = rng.standard_normal((WIDTH, WIDTH, 3, 3)) / (4.5 * WIDTH) ** 0.5
        names = [last, f"w{number}"]
        nodes.append(helper.make_node("Conv", names, [f"c{number}"], f"conv{number}", pads=[1] * 4))
        nodes.append(helper.make_node("Relu", [f"c{number}"], [last := f"r{number}"], f"relu{number}"))
    nodes += [
        helper.make_node("GlobalAveragePool", [last], ["p"], "pool"),
        helper.make_node("Flatten", ["p"], ["f"], "flatten"),
        helper.make_node("Gemm", ["f", "wg"], ["scores"], "head"),
    ]
    graph = helper.make_graph(
        nodes,
        "wide",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", WIDTH, SIZE, SIZE])],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["N", 10])],
        [numpy_helper.from_array(value.astype(np.float32), name) for name, value in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    onnx.save(_wide_model(), tmp_path / "model.onnx")
    np.savez(tmp_path / "calib.npz", x=samples(4, (WIDTH, SIZE, SIZE)))
    (tmp_path / "metric.py").write_text(METRICS)
    return tmp_path


def _arguments(*options: str, command: str = "optimize", backend: str = "tensorrt") -> list[str]:
    """A run with a budget; TensorRT's regions are judged by the model, and need no compiler."""
    output = ("-o", "out.onnx") if command == "optimize" else ("-o", "out.engine")
    given = ("--calib", "calib.npz", "--recipes", "none", "--opt-shapes", f"x:{BATCH}x{WIDTH}x{SIZE}x{SIZE}")
    return [command, "model.onnx", *output, *given, "--backend", backend, "--report", "r.json", *options]


def _report(folder: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((folder / "r.json").read_text())
    return report


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("raises", "the function failed: KeyError: 'no such label'"),
        ("nan", "the function returned nan"),
        ("wrong_name", "the model does not take what the function feeds it: "),
        ("wrong_type", "the model does not take what the function feeds it: "),
        ("wrong_rank", "the model does not take what the function feeds it: "),
        ("no_arrays", "the model does not take what the function feeds it: no dict of numpy arrays: {'x': 'list'}"),
    ],
)
def test_a_wrong_metric_ends_the_run_before_the_work(trtopt: Run, folder: Path, function: str, said: str) -> None:
    done = trtopt(*_arguments("--int8", "--metric", f"metric.py:{function}"))
    assert done.returncode == 2, done.stderr
    assert f"--metric: {said}" in done.stderr and "Traceback" not in done.stderr
    line = int(done.stderr.partition("where:  metric.py:")[2].split()[0]) if function != "nan" else 0
    assert 0 <= line <= METRICS.count("\n"), "a line of the user's file"
    assert not (folder / ".cache" / "trtopt" / "calibration").exists(), "nothing was calibrated"


def test_a_metric_that_fails_in_the_search_ends_the_run(trtopt: Run, folder: Path) -> None:
    said = "the function returned nan"
    budget = ("--int8", "--max-accuracy-drop", "0.01", "--metric", "metric.py:not_a_number_in_8_bit")
    done = trtopt(*_arguments(*budget))
    assert done.returncode == 2, done.stderr
    assert said in done.stderr and "metric.py" in done.stderr and "remedy:" in done.stderr
    assert done.stderr.count("error:") == 1 and "Traceback" not in done.stderr and done.stdout == ""
    assert not (folder / "out.onnx").exists() and not (folder / "r.json").exists()


def test_a_budget_that_cannot_be_met_is_exit_code_7_with_the_closest_point(trtopt: Run, folder: Path) -> None:
    pytest.importorskip("tensorrt_rtx")
    budget = ("--int8", "--max-accuracy-drop", "0", "--metric", "metric.py:closeness")
    arguments = _arguments(*budget, command="build", backend="tensorrt-rtx")
    done = trtopt(*arguments)
    assert done.returncode == 7, done.stderr
    found = _report(folder)
    drop = found["search"]["drop"]
    assert not found["search"]["reached"] and 0 < drop < 0.1
    said = " ".join(done.stderr.split())
    assert "no precision that was tried is within the 0 of --max-accuracy-drop" in said
    assert f"the closest point has a drop of {drop_text(drop)} (metric.py:closeness)" in said
    assert "--allow-accuracy-loss" in said and "Traceback" not in said
    assert found["gate_failures"] and not (folder / "out.engine").exists()
    refused = {item["node"]: item["reason"] for step in found["steps"] for item in step["refusals"]}
    back = [record for record in found["guard"] if record["reason"].startswith("taken back for the accuracy budget")]
    assert back and all(refused[node] == record["reason"] for record in back for node in record["nodes"])

    done = trtopt(*arguments, "--allow-accuracy-loss")
    assert done.returncode == 0, done.stderr
    assert "warning: accuracy budget: no precision that was tried" in " ".join(done.stderr.split())
    assert (folder / "out.engine").exists() and _report(folder)["search"]["drop"] == drop


def test_auto_prints_the_pareto_front_also_where_there_is_no_fp8(trtopt: Run, folder: Path) -> None:
    """A T4 has neither FP8 nor BF16."""
    done = trtopt(*_arguments("--auto", "--gpu", "T4", "--metric", "metric.py:closeness", "--max-accuracy-drop", "1"))
    assert done.returncode == 0, done.stderr
    front = _report(folder)["pareto"]
    assert [point["predicted_us"] for point in front] == sorted(point["predicted_us"] for point in front)
    assert [point["drop"] for point in front] == sorted((point["drop"] for point in front), reverse=True)
    assert {"int8", "fp16"} <= {point["name"] for point in front}
    assert sum(point["chosen"] for point in front) == 1
    assert not {"fp8", "bf16"} & {dtype for point in front for dtype in point["precision"]}
    table = done.stdout.partition("Pareto front\n")[2].partition("* chosen")[0]
    for point in front:
        assert point["name"] in table


@pytest.mark.parametrize("gpu", ["T4", "portable"])
def test_fp8_for_a_target_without_it_is_refused_before_the_work(trtopt: Run, tmp_path: Path, gpu: str) -> None:
    save_small(tmp_path)
    done = trtopt("optimize", "model.onnx", "-o", "out.onnx", "--fp8", "--gpu", gpu)
    assert done.returncode == 4, done.stderr
    assert "The target has no FP8 units" in done.stderr and gpu in done.stderr and "remedy:" in done.stderr
    assert done.stderr.count("error:") == 1 and not (tmp_path / "out.onnx").exists()


@pytest.mark.skipif(os.name == "nt", reason="SIGKILL is POSIX's")
@pytest.mark.long
def test_a_search_that_was_killed_goes_on_where_it_was(trtopt: Run, folder: Path) -> None:
    budget = ("--int8", "--metric", "metric.py:slow", "--max-accuracy-drop", "0.05")
    arguments = _arguments(*budget)
    process = subprocess.Popen(
        [sys.executable, "-m", "trtopt", *arguments],
        cwd=folder,
        env={**os.environ, "HOME": str(folder)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 240
    while not (folder / "started").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    process.kill()
    process.wait()
    assert not (folder / "out.onnx").exists() and not (folder / "r.json").exists()

    (folder / "again").touch()
    done = trtopt(*arguments)
    assert done.returncode == 0, done.stderr
    found = _report(folder)["search"]
    assert found["resumed"] > 0 and found["evaluations"] > 1 and found["reached"]
    assert 0 < len(found["types"]) < found["regions"], "a part of what pays is within the budget"


def test_absurd_calibration_data_is_warned_of_by_name(trtopt: Run, tmp_path: Path) -> None:
    save_small(tmp_path)
    data = samples(2)
    data[0, 0, 0, 0] = 1e9
    np.savez(tmp_path / "calib.npz", x=data)
    options = ("--int8", "--keep-all-int8", "--recipes", "none", "--backend", "tensorrt")
    done = trtopt("optimize", "model.onnx", "-o", "out.onnx", "--calib", "calib.npz", *options)
    assert done.returncode == 7, "below the floor"
    warned = next(line for line in done.stderr.replace("\n  ", " ").splitlines() if "fill values" in line)
    assert warned.startswith("warning: calibration samples: ") and "input x (up to 1e+09)" in warned
