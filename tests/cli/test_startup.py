"""``import trtopt``, ``--help`` and mistakes in the options load nothing heavy."""

from __future__ import annotations

import json
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
_SCRIPT = """\
import json, sys
{statement}
print(json.dumps([name for name in {heavy!r} if name in sys.modules]), file=sys.stderr)
"""
_MAIN = "from trtopt.cli.main import main\ntry:\n    main({arguments!r})\nexcept SystemExit:\n    pass"


def _loaded(statement: str) -> list[str]:
    """The heavy modules that a fresh interpreter has loaded after ``statement``."""
    script = _SCRIPT.format(statement=statement, heavy=HEAVY)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    return list(json.loads(done.stderr.splitlines()[-1]))


def test_the_check_sees_a_heavy_module() -> None:
    assert _loaded("import numpy") == ["numpy"]


def test_importing_the_package_loads_nothing_heavy() -> None:
    assert _loaded("import trtopt; trtopt.BuildConfig; trtopt.TrtoptError") == []


@pytest.mark.parametrize("command", ["build", "optimize", "check", "export", "recipe", "gpu", "doctor"])
def test_the_help_of_a_command_loads_nothing_heavy(command: str) -> None:
    assert _loaded(_MAIN.format(arguments=[command, "--help"])) == []


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--help"],
        ["--version"],
        ["bild"],
        ["build"],
        ["build", "model.onnx", "--fp61"],
        ["build", "model.onnx", "--fp16", "--int8"],
        ["build", "model.onnx", "--backend", "tensort"],
        ["build", "model.onnx", "--max-accuracy-drop", "much"],
        ["build", "model.onnx", "--loadEngine=e"],
        ["build", "model.onnx", "--config", "missing.toml"],
        ["build", "model.onnx", "--report", "missing/folder/report.json"],
        ["gpu", "shwo"],
    ],
    ids=" ".join,
)
def test_help_and_wrong_options_load_nothing_heavy(arguments: list[str]) -> None:
    assert _loaded(_MAIN.format(arguments=arguments)) == []
