"""``trtopt.optimize(..., isolate=True)``: a build in a process of its own, and what crosses between the two."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest

import trtopt
from trtopt.errors import GateError, ResourceError, UsageError
from trtopt.events import Event

pytest.importorskip("onnxruntime", reason="verifies on the CPU")
pytest.importorskip("tensorrt_rtx", reason="asks what the compiler takes")
pytestmark = pytest.mark.skipif(os.name == "nt", reason="reads the signal that ended a process")

NET = onnx.parser.parse_model(
    """
    <ir_version: 8, opset_import: ["" : 17]>
    net (float[N, 4] file) => (float[N, 4] y) { h = Relu (file)  y = Softmax (h) }
    """
)
SAMPLES = {"file": np.random.default_rng(0).standard_normal((4, 4)).astype(np.float32)}
METRICS = """
import os, signal, subprocess, sys, time
def aborts(run): os.abort()
def is_killed(run): os.kill(os.getpid(), signal.SIGKILL)
def leaves(run): os._exit(3)
def falls(run, calls=[]):
    calls.append(run)
    return 1.0 if len(calls) == 1 else 0.0
def waits(run):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    open("pids", "w").write(f"{os.getpid()} {child.pid}\\n")
    time.sleep(600)
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    (tmp_path / "metric.py").write_text(METRICS)
    onnx.save(NET, "net.onnx")
    return tmp_path


def optimized(**options: Any) -> trtopt.BuildReport:
    return trtopt.optimize("net.onnx", output="out.onnx", precision="fp16", no_cache=True, isolate=True, **options)


def test_the_report_and_the_events_are_those_of_a_build_in_this_process(here: Path) -> None:
    events: list[Event] = []
    apart = optimized(calib=SAMPLES, on_event=events.append)
    made = (here / "out.onnx").read_bytes()
    own_events: list[Event] = []
    own = trtopt.optimize(
        "net.onnx", output="out.onnx", precision="fp16", no_cache=True, calib=SAMPLES, on_event=own_events.append
    )
    assert (here / "out.onnx").read_bytes() == made
    assert [(event.kind, event.task) for event in events] == [(event.kind, event.task) for event in own_events]
    for part in ("model", "accuracy", "precision", "gpu", "gate_failures"):
        assert getattr(apart, part) == getattr(own, part), part
    assert not list((here / "tmp").iterdir())


@pytest.mark.parametrize(
    ("metric", "kind", "what"),
    [
        ("aborts", UsageError, r"A script crashed \(SIGABRT\)"),
        ("is_killed", ResourceError, "SIGKILL"),
        ("leaves", UsageError, "ended with exit code 3, and no word"),
    ],
)
def test_a_crash_is_an_exception_and_leaves_nothing(here: Path, metric: str, kind: type[Exception], what: str) -> None:
    with pytest.raises(kind, match=what):
        optimized(calib=SAMPLES, eval=SAMPLES, metric=f"metric.py:{metric}")
    assert not (here / "out.onnx").exists() and not list((here / "tmp").iterdir())


def test_errors_and_gates_are_those_of_a_build_in_this_process(here: Path) -> None:
    with pytest.raises(UsageError) as error:
        optimized(calib="none.npz")
    assert "none.npz" in str(error.value) and error.value.remedy
    report = optimized(calib=SAMPLES, eval=SAMPLES, metric="metric.py:falls", max_accuracy_drop=0.1)
    with pytest.raises(GateError):
        report.raise_for_gate()


def test_a_model_in_memory_goes_there_too(here: Path) -> None:
    report = trtopt.optimize(NET, output="out.onnx", isolate=True)
    assert (here / "out.onnx").exists() and report.model["inputs"][0]["name"] == "file"


@pytest.mark.parametrize(("name", "value"), [("metric", lambda run: 1.0), ("calib", iter([SAMPLES]))])
def test_what_cannot_go_there_is_refused(here: Path, name: str, value: Any) -> None:
    with pytest.raises(UsageError, match="cannot go to another process") as error:
        optimized(**{"calib": SAMPLES, "eval": SAMPLES, name: value})
    assert error.value.where == name


def test_the_work_ends_with_a_caller_that_is_killed(here: Path) -> None:
    call = "import trtopt; trtopt.optimize('net.onnx', output='out.onnx', precision='fp16', isolate=True, "
    call += "calib='a.npz', eval='a.npz', metric='metric.py:waits')"
    np.savez("a.npz", **{"file_": SAMPLES["file"]})
    onnx.save(onnx.parser.parse_model(onnx.printer.to_text(NET).replace("file", "file_")), "net.onnx")
    with subprocess.Popen([sys.executable, "-c", call]) as caller:
        pids = here / "pids"
        while not pids.exists() or not pids.read_text().endswith("\n"):
            assert caller.poll() is None
            time.sleep(0.02)
        caller.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 30
    while (left := [pid for pid in pids.read_text().split() if alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not left


def alive(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
