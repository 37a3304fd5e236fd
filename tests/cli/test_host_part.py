"""Models that end in what the compiler refuses, from the command line."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import detectors
import numpy as np
import onnx
import pytest

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    onnx.save(detectors.detector(), tmp_path / "det.onnx")
    np.savez(tmp_path / "calib.npz", image=detectors.images())
    return tmp_path


def test_a_build_names_both_parts_and_what_passes_between_them(trtopt: Run, folder: Path) -> None:
    pytest.importorskip("tensorrt_rtx", reason="needs TensorRT for RTX")
    done = trtopt("build", "det.onnx", "--fp16", "--calib", "calib.npz", "-o", "out.rtx.engine", "--report", "r.json")
    assert done.returncode == 0, done.stderr
    report = json.loads((folder / "r.json").read_text())
    assert report["host"] == {
        "path": "out.host.onnx",
        "reasons": ["TensorRT for RTX does not run NonMaxSuppression (nonmaxsuppression_selected)"],
        "nodes": 5,
        "inputs": ["boxes", "scores"],
        "outputs": ["detections", "selected"],
        "between": [
            {"name": "boxes", "dtype": "float32", "shape": [1, 64, 4]},
            {"name": "scores", "dtype": "float32", "shape": [1, 3, 64]},
        ],
        "model_outputs": ["detections", "selected", "scores"],
    }
    assert (folder / "out.host.onnx").exists()
    for part in ("out.host.onnx", "boxes: float32 1x64x4", "gives", "detections, selected, by 5 nodes"):
        assert part in done.stdout
    assert "the model is cut in two" in done.stderr
    assert [step["name"] for step in report["steps"]][:2] == ["load", "host-part"]


def test_a_model_without_such_an_end_has_no_second_part(trtopt: Run, folder: Path) -> None:
    proto = detectors.model(
        detectors.BACKBONE, detectors.HEADS, outputs="float[1, 3, 64] scores, float[1, 64, 4] boxes"
    )
    onnx.save(proto, folder / "whole.onnx")
    done = trtopt("optimize", "whole.onnx", "-o", "out.onnx", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["host"] is None
    assert not (folder / "out.host.onnx").exists()


def test_tensorrt_gets_the_suppression_too(trtopt: Run, folder: Path) -> None:
    done = trtopt("optimize", "det.onnx", "-o", "out.onnx", "--backend", "tensorrt", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["host"] is None
    assert "NonMaxSuppression" in {node.op_type for node in onnx.load(folder / "out.onnx").graph.node}


def test_the_middle_is_an_error_that_names_node_and_remedy(trtopt: Run, folder: Path) -> None:
    second = "again = Gemm(detections, big)"
    proto = detectors.model(
        detectors.BACKBONE, detectors.HEADS, detectors.NMS, second, outputs="float[found, 128] again",
        more={"big": np.ones((4, 128), np.float32)},
    )  # fmt: skip
    onnx.save(proto, folder / "two.onnx")
    done = trtopt("optimize", "two.onnx", "-o", "out.onnx")
    assert done.returncode == 3
    assert "TensorRT for RTX does not run NonMaxSuppression, and the layer gemm_again (Gemm) needs it" in done.stderr
    assert "node nonmaxsuppression_selected (NonMaxSuppression)" in done.stderr
    assert "TopK of a constant k" in done.stderr and "--backend tensorrt" in done.stderr
    assert "Traceback" not in done.stderr and not (folder / "out.onnx").exists()


def test_a_failed_gate_writes_neither_part(trtopt: Run, folder: Path) -> None:
    options = ("--int8", "--keep-all-int8", "--calib", "calib.npz", "--min-sqnr-db", "90", "--json")
    done = trtopt("optimize", "det.onnx", "-o", "out.onnx", *options)
    assert done.returncode == 7, done.stderr
    report = json.loads(done.stdout)
    assert report["host"]["path"] is None
    assert not any("output detections" in failure for failure in report["gate_failures"])
    assert not list(folder.glob("out*"))


@pytest.mark.parametrize(
    ("model", "arguments", "message"),
    [
        ("det.host.onnx", ["-o", "det.onnx"], "would overwrite the model"),
        ("model.onnx", ["-o", "det.onnx", "--report", "det.host.onnx"], "would overwrite the output det.host.onnx"),
    ],
)
def test_the_second_part_overwrites_nothing(
    model: str, arguments: list[str], message: str, trtopt: Run, folder: Path
) -> None:
    (folder / "det.onnx").rename(folder / model)
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    done = trtopt("optimize", model, *arguments)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} == before
