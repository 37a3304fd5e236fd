"""What native code does to the process that works on a model is an error message of the command."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from small_models import save_small

from trtopt.cli import watch
from trtopt.errors import EngineBuildError, InvalidModelError, ResourceError, TrtoptError, UsageError
from trtopt.support.crash import CrashedError, death

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the command runs directly")

PLAIN = ("--fp32", "--recipes", "none", "--no-cache")
_QUICK = (
    "import sys, trtopt.cli.watch as watch\nwatch.GRACE_S = 1.0\nfrom trtopt.cli.main import entry\nsys.exit(entry())\n"
)
FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
LOWEST = -(2**63)


def _save(path: Path, nodes: list[onnx.NodeProto], constants: dict[str, object]) -> None:
    info = helper.make_tensor_value_info
    weights = [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()]
    graph = helper.make_graph(nodes, "g", [info("x", FLOAT, [1, 4])], [info("y", FLOAT, [1, 4])], weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)


def _divides_lowest(path: Path) -> None:
    """INT64's lowest number by -1, which traps on x86: ONNX Runtime 1.31 and TensorRT for RTX 1.7.1 die of SIGFPE."""
    nodes = [
        helper.make_node("Cast", ["x"], ["i"], to=INT64),
        helper.make_node("Mul", ["i", "zero"], ["none"]),
        helper.make_node("Add", ["none", "lowest"], ["low"]),
        helper.make_node("Div", ["low", "minus"], ["q"]),
        helper.make_node("Cast", ["q"], ["y"], to=FLOAT),
    ]
    _save(path, nodes, {"zero": np.int64(0), "lowest": np.int64(LOWEST), "minus": np.int64(-1)})


def _never_ends(path: Path) -> None:
    info = helper.make_tensor_value_info
    body = helper.make_graph(
        [helper.make_node("GreaterOrEqual", ["i", "zero"], ["on"]), helper.make_node("Add", ["v", "one"], ["w"])],
        "body",
        [info("i", INT64, []), info("go", BOOL, []), info("v", FLOAT, [1, 4])],
        [info("on", BOOL, []), info("w", FLOAT, [1, 4])],
    )
    constants = {"true": True, "one": np.float32(1), "zero": np.int64(0)}
    _save(path, [helper.make_node("Loop", ["", "true", "x"], ["y"], body=body)], constants)


def _expands(path: Path) -> None:
    """16 bytes become 4 GB, of which a sum is left."""
    nodes = [
        helper.make_node("Expand", ["x", "shape"], ["much"]),
        helper.make_node("Exp", ["much"], ["e"]),
        helper.make_node("ReduceMean", ["e"], ["y"], axes=[0], keepdims=1),
    ]
    _save(path, nodes, {"shape": np.array([1 << 28, 4])})


def _environment(folder: Path) -> dict[str, str]:
    (folder / "tmp").mkdir(exist_ok=True)
    return {**os.environ, "HOME": str(folder), "TMPDIR": str(folder / "tmp")}


def _run(folder: Path, *arguments: str, limit: int | None = None) -> subprocess.CompletedProcess[str]:
    def limited() -> None:
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))

    return subprocess.run(
        [sys.executable, "-m", "trtopt", *arguments],
        cwd=folder,
        env=_environment(folder),
        capture_output=True,
        text=True,
        timeout=120,
        preexec_fn=limited,
        check=False,
    )


def _check_error(folder: Path, done: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    """One error with its remedy, no traceback; nothing is left of the run."""
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr and "Fatal Python error" not in done.stderr
    assert done.stderr.count("error: ") == 1 and "  remedy: " in done.stderr
    for word in words:
        assert word in done.stderr
    assert list((folder / "tmp").glob("trtopt-*")) == []
    assert not list(folder.glob("*.partial")) and not list(folder.glob(".*.partial"))


def test_a_model_that_crashes_onnx_runtime_is_an_error(tmp_path: Path) -> None:
    _divides_lowest(tmp_path / "model.onnx")
    done = _run(
        tmp_path, "optimize", "model.onnx", "-o", "out.onnx", "--report", "out.json", "--backend", "tensorrt", *PLAIN
    )
    _check_error(tmp_path, done, 3, "ONNX Runtime crashed (SIGFPE)", "trtopt optimize model.onnx")
    assert not (tmp_path / "out.onnx").exists() and not (tmp_path / "out.json").exists()


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        ("ctypes.string_at(0)", 2, ("A script crashed (SIGSEGV)", "metric.py, line 4, in crash")),
        ("os.kill(os.getpid(), signal.SIGKILL)", 3, ("killed (SIGKILL)", "memory")),
    ],
)
def test_a_metric_that_kills_the_process_is_an_error(
    tmp_path: Path, line: str, code: int, words: tuple[str, ...]
) -> None:
    save_small(tmp_path)
    (tmp_path / "metric.py").write_text(f"import ctypes, os, signal\n\ndef crash(run):\n    {line}\n")
    done = _run(tmp_path, "build", "model.onnx", "--metric", "metric.py:crash", "-o", "m.engine", *PLAIN)
    _check_error(tmp_path, done, code, *words)
    assert not (tmp_path / "m.engine").exists()


def test_a_small_model_that_asks_for_more_memory_than_there_is_does_not_get_it(tmp_path: Path) -> None:
    _expands(tmp_path / "model.onnx")
    limit = 1 << 30
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss << 10
    done = _run(tmp_path, "optimize", "model.onnx", "-o", "out.onnx", *PLAIN, limit=limit)
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss << 10 <= max(2 * limit, before)
    _check_error(tmp_path, done, 3, "Failed to allocate memory")


def test_memory_that_runs_out_is_no_bug() -> None:
    script = (
        "import sys, types, trtopt.cli.main as main\n"
        "main.COMMANDS['large'] = ''\n"
        "module = sys.modules['trtopt.cli.large'] = types.ModuleType('large')\n"
        "module.run = lambda argv: len(bytearray(1 << 60))\n"
        "sys.exit(main.main(['large']))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 3
    assert done.stderr.startswith("error: Memory ran out\n  where:  trtopt large\n  remedy: ")


def _start(folder: Path, *arguments: str, terminal: int | None = None) -> subprocess.Popen[str]:
    def alone() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.setsid()
        if terminal is not None:
            fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)

    return subprocess.Popen(
        [sys.executable, "-c", _QUICK, *arguments],
        cwd=folder,
        env=_environment(folder),
        stdin=terminal,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=alone,
    )


def _wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _children(process: int) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


SLEEPS = "import pathlib, time\n\ndef slow(run):\n    pathlib.Path('started').touch()\n    time.sleep(120)\n"
NATIVE = (
    "import ctypes, pathlib\n\ndef slow(run):\n    pathlib.Path('started').touch()\n"
    "    ctypes.PyDLL(None).sleep(120)\n"  # holds the interpreter, so that no handler runs
)


def _metric(folder: Path, text: str) -> tuple[str, ...]:
    save_small(folder)
    (folder / "metric.py").write_text(text)
    return ("build", "model.onnx", "--metric", "metric.py:slow", "-o", "m.engine", *PLAIN)


@pytest.mark.parametrize(
    ("text", "number", "code"),
    [
        (SLEEPS, signal.SIGINT, 130),
        pytest.param(SLEEPS, signal.SIGTERM, 143, marks=pytest.mark.long),
        (NATIVE, signal.SIGTERM, 143),
    ],
    ids=["interrupt", "terminate", "native"],
)
def test_a_stop_that_reaches_both_processes_ends_the_command_once(
    tmp_path: Path, text: str, number: int, code: int
) -> None:
    """As a shell or ``timeout`` sends it, to the command and to its group; also where Python is not asked."""
    process = _start(tmp_path, *_metric(tmp_path, text))
    _wait_for((tmp_path / "started").exists)
    process.send_signal(number)
    os.killpg(process.pid, number)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == code
    assert stderr.splitlines()[-1] in ("interrupted", "terminated") and "Traceback" not in stderr
    assert list((tmp_path / "tmp").glob("trtopt-*")) == [] and not (tmp_path / "m.engine").exists()


@pytest.mark.parametrize("code", [130, 3])
def test_a_child_that_gives_up_while_it_cleans_leaves_no_folder(tmp_path: Path, code: int) -> None:
    """A second interrupt ends the removal of a temporary folder, and the child ends with the code of the first."""
    script = (
        "import sys, tempfile\nfrom trtopt.cli import watch\nfrom trtopt.support.temporary import TEMPORARY\n"
        f"sys.exit(watch.watched(lambda _: tempfile.mkdtemp(prefix=TEMPORARY) and {code}, []))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], env=_environment(tmp_path), capture_output=True, timeout=60, check=False
    )
    assert done.returncode == code, done.stderr
    assert list((tmp_path / "tmp").iterdir()) == []


def test_the_interrupt_key_of_a_terminal_ends_the_command(tmp_path: Path) -> None:
    leader, follower = os.openpty()
    process = _start(tmp_path, *_metric(tmp_path, SLEEPS), terminal=follower)
    _wait_for((tmp_path / "started").exists)
    os.write(leader, b"\x03")
    _, stderr = process.communicate(timeout=60)
    os.close(leader), os.close(follower)
    assert process.returncode == 130
    assert [line for line in stderr.splitlines() if line == "interrupted"] == ["interrupted"]
    assert "Traceback" not in stderr and list((tmp_path / "tmp").glob("trtopt-*")) == []


@pytest.mark.long
def test_a_model_that_never_ends_can_be_interrupted(tmp_path: Path) -> None:
    _never_ends(tmp_path / "model.onnx")
    process = _start(tmp_path, "optimize", "model.onnx", "-o", "out.onnx", "--backend", "tensorrt", *PLAIN)
    (child,) = _until_children(process.pid)
    _wait_for(lambda: _seconds(child) > 2.0)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in stderr
    assert list((tmp_path / "tmp").glob("trtopt-*")) == []


def _until_children(process: int) -> list[int]:
    _wait_for(lambda: bool(_children(process)))
    return _children(process)


def _seconds(process: int) -> float:
    """CPU time of a process."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_the_work_does_not_outlive_a_command_that_is_killed(tmp_path: Path) -> None:
    process = _start(tmp_path, *_metric(tmp_path, NATIVE))
    _wait_for((tmp_path / "started").exists)
    (child,) = _children(process.pid)
    process.kill()
    process.communicate(timeout=60)
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it is a zombie until somebody reaps it
        _wait_for(lambda: Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] == "Z")


def test_an_ignored_interrupt_stays_ignored(tmp_path: Path) -> None:
    """As for a job in the background of a script."""
    arguments = _metric(tmp_path, SLEEPS.replace("120", "1") + "    return 1.0\n")
    script = f"trap '' INT; exec {sys.executable} -m trtopt {' '.join(arguments)}"
    shell = shutil.which("sh") or "sh"
    process = subprocess.Popen([shell, "-c", script], cwd=tmp_path, env=_environment(tmp_path), stdout=subprocess.PIPE)
    _wait_for((tmp_path / "started").exists)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 0 and (tmp_path / "m.engine").exists()


@pytest.mark.parametrize(
    "closed", [*(pytest.param(each, marks=pytest.mark.long) for each in ("<&-", ">&-", "2>&-")), "<&- >&- 2>&-"]
)
def test_a_stream_that_is_closed_takes_nothing_and_breaks_nothing(tmp_path: Path, closed: str) -> None:
    """As some schedulers start their jobs: no file of the run may get the number of a stream either."""
    save_small(tmp_path)
    arguments = " ".join(("optimize", "model.onnx", "-o", "out.onnx", "--report", "out.json", *PLAIN))
    script = f"{sys.executable} -m trtopt {arguments} {closed}"
    shell = shutil.which("sh") or "sh"
    done = subprocess.run(
        [shell, "-c", script], cwd=tmp_path, env=_environment(tmp_path), capture_output=True, timeout=60, check=False
    )
    assert done.returncode == 0 and b"Traceback" not in done.stderr
    onnx.load(tmp_path / "out.onnx")
    missing = subprocess.run(
        [shell, "-c", script.replace("model.onnx", "none.onnx")],
        cwd=tmp_path,
        env=_environment(tmp_path),
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert missing.returncode == 2 and missing.stdout == b""
    assert (b"does not exist" in missing.stderr) is ("2>&-" not in closed)


def test_a_caller_that_ignores_its_children_gets_the_exit_code(tmp_path: Path) -> None:
    """What is ignored stays so when a program starts another, and a child that is ignored leaves no status."""
    save_small(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "trtopt", "optimize", "model.onnx", "-o", "out.onnx", *PLAIN],
        cwd=tmp_path,
        env=_environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=60,
        preexec_fn=lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN) and None,
        check=False,
    )
    assert done.returncode == 0 and (tmp_path / "out.onnx").exists(), done.stderr


def test_a_terminal_that_is_closed_ends_the_command_and_leaves_no_folders(tmp_path: Path) -> None:
    process = _start(tmp_path, *_metric(tmp_path, SLEEPS))
    _wait_for((tmp_path / "started").exists)
    assert list((tmp_path / "tmp").glob("trtopt-*")) != []
    os.killpg(process.pid, signal.SIGHUP)
    process.communicate(timeout=60)
    assert process.returncode == 129
    assert list((tmp_path / "tmp").glob("trtopt-*")) == [] and not (tmp_path / "m.engine").exists()


def test_a_process_that_cannot_be_started_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", refused)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with pytest.raises(ResourceError, match="Resource temporarily unavailable"):
        watch.watched(lambda arguments: 0, ["analyze"])
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == mask


def test_every_temporary_folder_is_found_when_a_run_crashes() -> None:
    for path in Path(watch.__file__).parents[1].rglob("*.py"):
        for line in path.read_text().splitlines():
            assert path.name == "temporary.py" or not re.search(r"TemporaryDirectory\(|mkdtemp\(", line), (path, line)


def _frames(*places: tuple[str, str]) -> str:
    lines = [f'  File "{path}", line 7 in {function}' for path, function in places]
    return "Fatal Python error: Segmentation fault\n\nCurrent thread 0x1 (most recent call first):\n" + "\n".join(lines)


OWN = str(Path(watch.__file__).parents[1] / "runtime.py")
LIBRARY = "/env/lib/python3.11/site-packages/"


_THREADS = f"""Fatal Python error: Segmentation fault

Thread 0x1 (most recent call first):
  File "{OWN}", line 7 in _watch

Current thread 0x2 (most recent call first):
  <no Python frame>

Thread 0x3 (most recent call first):
  File "{LIBRARY}onnxruntime/capi/s.py", line 7 in run
  File "{OWN}", line 7 in run
"""


@pytest.mark.parametrize(
    ("number", "trace", "kind", "word"),
    [
        (signal.SIGSEGV, _frames((LIBRARY + "onnxruntime/capi/s.py", "run"), (OWN, "run")), InvalidModelError, "ONNX "),
        (signal.SIGSEGV, _frames((LIBRARY + "onnx/checker.py", "check"), (OWN, "run")), InvalidModelError, "checks"),
        (signal.SIGABRT, _frames((LIBRARY + "tensorrt/x.py", "f"), (OWN, "run")), EngineBuildError, "TensorRT"),
        (signal.SIGBUS, _frames((OWN, "run"), ("/home/me/metric.py", "f")), CrashedError, "trtopt crashed"),
        (signal.SIGBUS, _frames((LIBRARY + "numpy/x.py", "f"), ("/me/m.py", "f"), (OWN, "run")), UsageError, "script"),
        (signal.SIGBUS, _frames((os.__file__, "f"), ("/me/m.py", "f"), (OWN, "run")), UsageError, "script"),
        (signal.SIGSEGV, _THREADS, InvalidModelError, "ONNX Runtime"),
        (signal.SIGILL, "", CrashedError, "SIGILL"),
        (signal.SIGKILL, "", ResourceError, "memory"),
        (64, "", CrashedError, "signal 64" if 64 not in set(signal.Signals) else "SIGRTMAX"),
    ],
)
def test_what_was_running_decides_the_error(number: int, trace: str, kind: type[TrtoptError], word: str) -> None:
    error = death(number, trace, "trtopt build model.onnx")
    assert type(error) is kind and word in error.what and error.where and error.remedy


def test_the_command_of_an_error_fits_a_screen() -> None:
    assert len(watch.shorten_command(["build", "x" * 5000])) < 400
