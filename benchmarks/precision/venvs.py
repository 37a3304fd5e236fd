"""Virtual environments of the other quantizers, and processes that run to their end."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

TIMEOUT_S = 3600

PEERS = {
    "onnxruntime": [["onnxruntime==1.31.1", "onnx==1.23.2", "sympy"]],
    # As in benchmarks/calibration: what its CPU path needs, then itself without its CUDA packages.
    "modelopt": [
        ["torch==2.13.0", "onnx~=1.21.0", "onnxruntime~=1.24.2", "onnx-graphsurgeon", "onnxconverter-common~=1.16.0"],
        ["onnxslim", "onnxscript", "polygraphy", "cppimport", "lief", "ml_dtypes", "scipy", "omegaconf", "pydantic"],
        ["regex", "rich", "safetensors", "tqdm", "PyYAML", "pulp<4", "ninja", "nvidia-ml-py", "setuptools>=80"],
        ["requests", "huggingface_hub"],  # which modelopt.torch imports
        ["--no-deps", "nvidia-modelopt==0.47.0"],
    ],
}


class FailedError(Exception):
    """A tool ended with an error: its last words."""


def run(command: Sequence[str]) -> None:
    """Run a command to its end.

    Raises:
        FailedError: It failed, or took too long.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise FailedError(f"no end after {TIMEOUT_S} s") from error
    if done.returncode:
        said = done.stderr[max(done.stderr.find("error: "), 0) :].strip() or done.stdout.strip()
        raise FailedError(f"exit {done.returncode}: {said[-600:]}")


def interpreter(folder: Path, name: str) -> str:
    """The interpreter of a peer's virtual environment in ``folder``, made where it is not there.

    Raises:
        FailedError: It cannot be made.
    """
    home = folder / f"venv-{name}"
    python = home / "bin" / "python"
    if not (home / "complete").exists():
        run([sys.executable, "-m", "venv", "--clear", str(home)])
        for packages in PEERS[name]:
            run([str(python), "-m", "pip", "install", "--quiet", *packages])
        (home / "complete").touch()
    return str(python)
