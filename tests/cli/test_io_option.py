"""``--io`` on the command line."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from small_models import samples, save_small

Run = Callable[..., "subprocess.CompletedProcess[str]"]


def test_the_report_says_what_to_feed(trtopt: Run, tmp_path: Path) -> None:
    save_small(tmp_path)
    np.savez(tmp_path / "calib.npz", x=samples())
    arguments = ("build", "model.onnx", "--calib", "calib.npz", "--io", "x:fp16:hwc4", "--io", "scores:fp16:chw")
    done = trtopt(*arguments, "--report", "r.json", columns=140)
    assert done.returncode == 0, done.stderr
    assert "Inputs and outputs changed" in done.stdout
    assert "feed fp16 values, channels last" in done.stdout and "zeros in the others" in done.stdout
    first, second = json.loads((tmp_path / "r.json").read_text())["network_io"]
    assert first == {
        "name": "x",
        "kind": "input",
        "dtype": "fp16",
        "layout": "hwc4",
        "shape": ["N", 4, 8, 8],
        "caller": "feed fp16 values, channels last: memory holds Nx8x8x4; 3 channels and zeros in the others",
        "state": False,
    }
    assert (second["kind"], second["dtype"]) == ("output", "fp16")


def test_pixels_from_a_configuration_file(trtopt: Run, tmp_path: Path) -> None:
    save_small(tmp_path)
    np.savez(tmp_path / "calib.npz", x=np.random.default_rng(0).integers(0, 256, (4, 3, 8, 8)).astype(np.float32))
    (tmp_path / "trtopt.toml").write_text('[optimize]\nio = ["x:uint8:hwc"]\ncalib = "calib.npz"\n')
    done = trtopt("optimize", "model.onnx", "-o", "out.onnx", "--config", "trtopt.toml")
    assert done.returncode == 0, done.stderr
    assert "the numbers 0 to 255 stand for themselves" in " ".join(done.stdout.split())


@pytest.mark.parametrize(
    ("io", "said"),
    [
        ("xx:fp16:hwc", "did you mean x?"),
        ("x:fp61:hwc", "did you mean fp16?"),
        ("x:fp16:hwcc", "did you mean hwc"),
        ("x=fp16", "NAME:DTYPE:LAYOUT"),
        ("scores:fp16:hwc", "rank 2"),
        ("x:uint8:hwc", "whole numbers from 0 to 255"),
    ],
)
def test_a_wrong_option_is_a_usage_error(trtopt: Run, tmp_path: Path, io: str, said: str) -> None:
    save_small(tmp_path)
    done = trtopt("build", "model.onnx", "--io", io)
    assert done.returncode == 2, done.stdout
    assert said in " ".join(done.stderr.split()) and "Traceback" not in done.stderr
    assert not (tmp_path / "model.rtx.engine").exists()
