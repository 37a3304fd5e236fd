"""A run of ONNX Runtime that does not end is stopped."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import numpy as np
import onnx.parser
import onnx_ir as ir
import pytest

import trtopt
import trtopt.support.ort_session
from trtopt.errors import ResourceError, UsageError
from trtopt.support.ort_session import OrtSession, _LimitedRun, _RunLimit

LOOP = ir.serde.deserialize_model(
    onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17]>
        loops (float[1] x, int64 n) => (float[1] y) {
            go = Constant <value: tensor = bool {1}> ()
            y = Loop (n, go, x) <body: graph = body (int64 i, bool on, float[1] v) => (bool on_out, float[1] v_out) {
                on_out = Identity (on)
                v_out = Add (v, v)
            }>
        }"""
    )
)
X = np.ones(1, np.float32)


def test_a_loop_that_does_not_end_is_stopped_and_the_session_runs_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trtopt.support.ort_session, "_limit_s", [0.3])
    with OrtSession(LOOP) as session:
        assert session.run({"x": X, "n": np.array(3)})[0] == 8
        with pytest.raises(ResourceError, match="did not end within"):
            session.run({"x": X, "n": np.array(2**60)})
        assert session.run({"x": X, "n": np.array(3)})[0] == 8


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_the_limit_holds_in_a_process_that_was_forked_after_a_run() -> None:
    """As the workers of a service are, from one that has loaded the model; no thread is there any more after a fork."""
    script = (
        "import os, signal, sys, threading\n"
        "import numpy as np, onnx_ir as ir\n"
        "import trtopt.support.ort_session as runtime\n"
        "from trtopt.errors import ResourceError\n"
        "model = ir.load(sys.argv[1])\n"
        "x = np.ones(1, np.float32)\n"
        "with runtime.OrtSession(model, threads=1) as session:\n"
        "    session.run({'x': x, 'n': np.array(3)})\n"
        "runtime._LIMIT._lock.acquire()  # as another thread may hold it at the fork\n"
        "child = os.fork()\n"
        "if child:\n"
        "    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
        "signal.alarm(20)\n"
        "runtime.limit_runs(0.3)\n"
        "with runtime.OrtSession(model, threads=1) as session:\n"
        "    try:\n"
        "        session.run({'x': x, 'n': np.array(2**60)})\n"
        "    except ResourceError:\n"
        "        os._exit(7)\n"
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "loop.onnx"
        ir.save(LOOP, path)
        done = subprocess.run([sys.executable, "-c", script, path], timeout=60, check=False)
    assert done.returncode == 7


def test_a_failure_is_no_timeout() -> None:
    with (
        OrtSession(LOOP) as session,
        pytest.raises(trtopt.support.ort_session.InvalidModelError, match="fails on an input"),
    ):
        session.run({"x": np.ones(2, np.float32), "n": np.array(3)})


COUNTS = """<ir_version: 8, opset_import: ["" : 17]>
    counts (float[N, 1] x) => (float[1] y) {
        most = Constant <value: tensor = int64 {4611686018427387904}> ()
        zero = Constant <value: tensor = float {0}> ()
        sum = ReduceSum <keepdims = 0> (x)
        go = Greater (sum, zero)
        start = Constant <value: tensor = float[1] {1}> ()
        y = Loop (most, go, start) <body: graph = body (int64 i, bool on, float[1] v) => (bool out, float[1] w) {
            w = Mul (v, v)
            zeros = Constant <value: tensor = float[1] {0}> ()
            more = Greater (w, zeros)
            out = Squeeze (more)
        }>
    }"""


def test_a_loop_whose_condition_is_computed_is_stopped_in_verification(tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx", reason="asks what the compiler takes")
    path, samples = tmp_path / "counts.onnx", {"x": np.ones((2, 1), np.float32)}
    ir.save(ir.serde.deserialize_model(onnx.parser.parse_model(COUNTS)), path)
    options = {"output": tmp_path / "out.onnx", "precision": "fp16", "calib": samples, "no_cache": True}
    with pytest.raises(ResourceError, match=r"did not end within 0\.5 seconds") as error:
        trtopt.optimize(path, **options, run_limit=0.5)
    assert "--run-limit" in error.value.remedy and not (tmp_path / "out.onnx").exists()
    with pytest.raises(UsageError, match="0 seconds"):
        trtopt.optimize(path, **options, run_limit=0)


def test_sessions_that_open_meanwhile_do_not_end_the_watch() -> None:
    limit, stop, failed = _RunLimit(), threading.Event(), list[BaseException]()

    def look() -> None:
        try:
            while not stop.is_set():
                limit.runs()
        except RuntimeError as error:
            failed.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        watcher = threading.Thread(target=look)
        watcher.start()
        held = [object.__new__(_LimitedRun) for _ in range(20_000)]
        for run in held:
            limit.add(run)
    finally:
        stop.set()
        watcher.join()
        sys.setswitchinterval(interval)
    assert not failed and len(limit.runs()) == len(held)
