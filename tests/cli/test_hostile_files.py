"""Hostile files on the command line: what they hold does not reach the terminal raw, and no output is lost by them."""

from __future__ import annotations

import ast
import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper
from small_models import save_small, small_model

import trtopt.cli
from trtopt.cli.streams import print_error, safe
from trtopt.errors import InvalidModelError

Run = Callable[..., "subprocess.CompletedProcess[str]"]
EVIL = "\x1b]0;gone\x07\x1b[2J‮‏"


def no_escapes(text: str) -> bool:
    return not set(text) & set("\x1b\x07\x9b\r‮‏")


def test_what_a_terminal_acts_on_is_shown_as_escapes() -> None:
    assert safe(EVIL + "\x9b\r\ud800\ta\n") == "\\x1b]0;gone\\x07\\x1b[2J\\u202e\\u200f\\x9b\\r\\ud800\ta\n"
    assert safe("é 中 😀 ─ │") == "é 中 😀 ─ │"


def test_all_printing_of_text_goes_through_one_place() -> None:
    """``print`` of anything but fixed text and what installed recipes say of themselves stands in ``streams`` only."""
    allowed = {"streams.py", "recipe.py", "explain.py", "gpu.py", "main.py", "watch.py"}
    folder = Path(trtopt.cli.__file__).parent
    for path in folder.glob("*.py"):
        calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        printing = [node.lineno for node in calls if isinstance(node.func, ast.Name) and node.func.id == "print"]
        assert not printing or path.name in allowed, (path.name, printing)


def test_an_error_fits_a_screen_whatever_the_names_in_it(capsys: pytest.CaptureFixture[str]) -> None:
    print_error(InvalidModelError("n" * 1_000_000, where="w" * 1_000_000, remedy="do that"))
    printed = capsys.readouterr().err
    assert len(printed) < 2500 and printed.startswith("error: nnn") and "  where:  www" in printed
    assert printed.endswith("  remedy: do that\n")


def evil_model(folder: Path) -> Path:
    model = small_model(batch=f"N{EVIL}")
    for node in model.graph.node:
        node.name = f"{node.name}{EVIL}"
        node.output[:] = [name if name == "scores" else f"{name}{EVIL}" for name in node.output]
        node.input[:] = [f"{n}{EVIL}" if n in {"c1", "r1", "c2", "r2", "p", "f"} else n for n in node.input]
    onnx.save(model, folder / "evil.onnx")
    return folder / "evil.onnx"


def test_names_of_a_model_do_not_reach_the_terminal(trtopt: Run, tmp_path: Path) -> None:
    evil_model(tmp_path)
    done = trtopt("analyze", "evil.onnx", "--report", "r.json")
    shown = trtopt("report", "r.json")
    assert (done.returncode, shown.returncode) == (0, 0)
    assert no_escapes(done.stdout + done.stderr + shown.stdout) and "\\u202e" in done.stdout


def test_names_do_not_reach_a_real_terminal_which_keeps_its_colours(tmp_path: Path) -> None:
    evil_model(tmp_path)
    parent, child = pty.openpty()
    environment = {**os.environ, "HOME": str(tmp_path), "TERM": "xterm-256color", "COLUMNS": "100"}
    command = [sys.executable, "-m", "trtopt", "analyze", "evil.onnx"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=child, stderr=subprocess.DEVNULL, env=environment)
    os.close(child)
    shown = b""
    try:
        while block := os.read(parent, 65536):
            shown += block
    except OSError:  # Linux: the other end was closed
        pass
    os.close(parent)
    assert process.wait(60) == 0
    text = shown.decode()
    assert "\x1b[1m" in text and "\x1b]0;" not in text and "\x1b[2J" not in text and "\x07" not in text


def test_messages_and_file_names_are_escaped(trtopt: Run, tmp_path: Path) -> None:
    done = trtopt("report", f"missing{EVIL}.json")
    assert done.returncode == 2 and no_escapes(done.stderr) and "remedy" in done.stderr
    done = trtopt("analyze", f"missing{EVIL}.onnx")
    assert done.returncode == 2 and no_escapes(done.stderr)
    (tmp_path / f"cache{EVIL}" / "engines").mkdir(parents=True)
    (tmp_path / f"cache{EVIL}" / "engines" / f"{'0' * 64}.entry").write_bytes(b"{}")
    done = trtopt("cache", "verify", "--cache-dir", f"cache{EVIL}")
    assert done.returncode == 2 and no_escapes(done.stdout + done.stderr) and "0" * 64 in done.stdout
    done = trtopt("cache", "list", "--cache-dir", f"cache{EVIL}")
    assert done.returncode == 0 and no_escapes(done.stdout)


def test_the_manifest_of_an_engine_is_not_printed_raw(trtopt: Run, tmp_path: Path) -> None:
    (tmp_path / "m.engine").write_bytes(b"ftrt" + bytes(100))
    (tmp_path / "m.engine.manifest.json").write_text(json.dumps({"schema": EVIL}))
    done = trtopt("profile", "m.engine")
    assert done.returncode == 3 and no_escapes(done.stderr)


@pytest.mark.parametrize("command", ["optimize", "build"])
def test_a_model_whose_input_holds_nothing_is_built(trtopt: Run, tmp_path: Path, command: str) -> None:
    if command == "build":
        pytest.importorskip("tensorrt_rtx")
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [0, 4]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "empty", values[:1], values[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, tmp_path / "model.onnx")
    done = trtopt(command, "model.onnx", "-o", "out", "--recipes", "none", "--no-cache")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out").stat().st_size > 0


def test_the_same_build_in_other_words_has_the_same_manifest(trtopt: Run, tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx")
    save_small(tmp_path)
    found = []
    for words in ((), ("--backend", "tensorrt-rtx", "--gpu", "l4", "--fp16")):
        done = trtopt("build", "model.onnx", "-o", "m.engine", "--recipes", "none", "--cache-dir", "cache", *words)
        assert done.returncode == 0, done.stderr
        found.append((tmp_path / "m.engine.manifest.json").read_bytes())
    assert len(set(found)) == 1
