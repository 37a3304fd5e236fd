"""``import trtopt``, ``--help`` and mistakes in the options load nothing heavy."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

HEAVY = (
    "numpy",
    "onnx",
    "onnx_ir",
    "ml_dtypes",
    "rich",
    "polygraphy",
    "onnxruntime",
    "torch",
    "tensorrt",
    "tensorrt_rtx",
    "sklearn",
)
STATEMENTS = ("import trtopt; trtopt.BuildConfig; trtopt.TrtoptError",)
COMMANDS = ("build", "optimize", "check", "export", "recipe", "gpu", "doctor")
MISTAKES = [
    [],
    ["--help"],
    ["--version"],
    ["bild"],
    ["build"],
    ["build", "model.onnx", "--fp61"],
    ["build", "model.onnx", "--fp8", "--int8"],
    ["build", "model.onnx", "--backend", "tensort"],
    ["build", "model.onnx", "--max-accuracy-drop", "much"],
    ["build", "model.onnx", "--loadEngine=e"],
    ["build", "model.onnx", "--config", "missing.toml"],
    ["build", "model.onnx", "--report", "missing/folder/report.json"],
    ["gpu", "shwo"],
]
_MAIN = "from trtopt.cli.main import main\ntry:\n    main({arguments!r})\nexcept SystemExit:\n    pass"
_SCRIPT = """\
import json, sys
statements, heavy = json.load(sys.stdin)
found = {}
for statement in statements:
    before = set(sys.modules)
    exec(statement)
    found[statement] = [name for name in heavy if name in sys.modules and name not in before]
print(json.dumps(found), file=sys.stderr)
"""


def _statement(arguments: list[str]) -> str:
    return _MAIN.format(arguments=arguments)


@pytest.fixture(scope="module")
def loaded() -> dict[str, list[str]]:
    """The heavy modules that each statement loads, one after the other in a fresh interpreter; NumPy last."""
    runs = [*([command, "--help"] for command in COMMANDS), *MISTAKES]
    statements = [*STATEMENTS, *map(_statement, runs), "import numpy"]
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT],
        input=json.dumps([statements, HEAVY]),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return dict(json.loads(done.stderr.splitlines()[-1]))


def test_the_check_sees_a_heavy_module(loaded: dict[str, list[str]]) -> None:
    assert loaded["import numpy"] == ["numpy"]


def test_importing_the_package_loads_nothing_heavy(loaded: dict[str, list[str]]) -> None:
    assert loaded[STATEMENTS[0]] == []


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command_loads_nothing_heavy(loaded: dict[str, list[str]], command: str) -> None:
    assert loaded[_statement([command, "--help"])] == []


@pytest.mark.parametrize("arguments", MISTAKES, ids=" ".join)
def test_help_and_wrong_options_load_nothing_heavy(loaded: dict[str, list[str]], arguments: list[str]) -> None:
    assert loaded[_statement(arguments)] == []


def test_the_help_of_all_commands_loads_no_configuration() -> None:
    script = "import sys\n" + _statement(["--help"]) + "\nprint([name for name in sys.modules if '.config' in name])"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(("given", "expected"), [(None, "1"), ("3", "3")])
def test_numpy_multiplies_in_one_thread_unless_the_caller_says_otherwise(given: str | None, expected: str) -> None:
    script = (
        "import atexit, os, sys; from trtopt.cli.main import entry; sys.argv[1:] = ['--version']; "
        "atexit.register(lambda: print(os.environ['OPENBLAS_NUM_THREADS'])); entry()"
    )
    environment = {name: value for name, value in os.environ.items() if name != "OPENBLAS_NUM_THREADS"}
    environment |= {} if given is None else {"OPENBLAS_NUM_THREADS": given}
    found = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert found.stdout.splitlines()[-1] == expected
