"""The table "Other tasks" of docs/pictures.md: each of its lines, on a small network whose answers are known."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser

pytest.importorskip("PIL", reason="pictures are read by Pillow: pip install 'trtopt[images]'")
from PIL import Image

Run = Callable[..., "subprocess.CompletedProcess[str]"]
SIDE, CELLS = 32, 4


@pytest.fixture
def quadrants(tmp_path: Path) -> Path:
    """Pictures with one bright quadrant; masks of it (class 1 of two), and its box in YOLO's text, as class 0."""
    for index in range(8):
        top, left = divmod(index % CELLS, 2)
        pixels = np.zeros((SIDE, SIDE, 3), np.uint8)
        half = np.s_[16 * top : 16 * top + 16, 16 * left : 16 * left + 16]
        pixels[half] = 200
        mask = np.zeros((SIDE, SIDE), np.uint8)
        mask[half] = 1
        for folder, array in (("images", pixels), ("masks", mask)):
            (tmp_path / folder).mkdir(exist_ok=True)
            Image.fromarray(array).save(tmp_path / folder / f"{index}.png")
        (tmp_path / "labels").mkdir(exist_ok=True)
        box = f"0 {left / 2 + 0.25} {top / 2 + 0.25} 0.5 0.5\n"
        (tmp_path / "labels" / f"{index}.txt").write_text(box)
    return tmp_path


def save(folder: Path, text: str, **tensors: np.ndarray) -> None:
    model = parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> g {text}')
    model.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in tensors.items())
    onnx.save(model, folder / "model.onnx")


def built(trtopt: Run, folder: Path, *options: str) -> dict[str, object]:
    """The report's accuracy of ``trtopt build --int8``, which the line of the table is added to."""
    fixed = ("--int8", "--recipes", "none", "--no-cache", "--preprocess", "scale=255", "--report", "r.json")
    done = trtopt("build", "model.onnx", *fixed, "--calib", "images", "--eval", "images", *options, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    accuracy = json.loads((folder / "r.json").read_text())["accuracy"]
    assert isinstance(accuracy, dict)
    return accuracy


def metric(accuracy: dict[str, object]) -> dict[str, float]:
    found = accuracy["metric"]
    assert isinstance(found, dict)
    return found


def bright(classes: int) -> np.ndarray:
    """Weights of a convolution of 1x1 whose second class is the brightness, and whose others are a constant's."""
    weights = np.zeros((classes, 3, 1, 1), np.float32)
    weights[1] = 1
    return weights


def test_segmentation(trtopt: Run, quadrants: Path) -> None:
    body = "(float[N,3,32,32] x) => (float[N,3,32,32] y) { y = Conv(x, w, b) }"
    save(quadrants, body, w=bright(3), b=np.array([0.5, 0, -1], np.float32))
    found = metric(built(trtopt, quadrants, "--labels", "masks", "--metric", "miou"))
    assert found["name"] == "miou" and found["baseline"] == 1.0 and found["optimized"] > 0.99


def poses() -> tuple[str, dict[str, np.ndarray]]:
    """A head of YOLO v8 for poses: 64 cells with the box of their quadrant, a score, 17 keypoints of three numbers."""
    rows, columns = np.divmod(np.arange(64), 8)
    middles = 8 + 16 * np.stack([columns // 4, rows // 4])
    boxes = np.concatenate([middles, np.full((2, 64), 16)])[None].astype(np.float32)
    body = """(float[1,3,32,32] x) => (float[1,56,64] y) {
        means = AveragePool <kernel_shape = [4, 4], strides = [4, 4]> (x)
        gray = Conv(means, w)
        cells = Reshape(gray, shape)
        score = Sigmoid(cells)
        points = Mul(score, ones)
        y = Concat <axis = 1> (boxes, score, points)
    }"""
    tensors = {
        "w": np.full((1, 3, 1, 1), 2, np.float32),
        "shape": np.array([1, 1, 64]),
        "ones": np.ones((1, 51, 64), np.float32),
        "boxes": boxes,
    }
    return body, tensors


def test_poses_by_their_boxes(trtopt: Run, quadrants: Path) -> None:
    body, tensors = poses()
    save(quadrants, body, **tensors)
    found = metric(built(trtopt, quadrants, "--metric", "map50", "--boxes", "yolov8,count=1"))
    assert found["name"] == "map50" and found["baseline"] > 0.99 and found["optimized"] > 0.99


def test_poses_by_a_function_of_the_users(trtopt: Run, quadrants: Path) -> None:
    body, tensors = poses()
    save(quadrants, body, **tensors)
    (quadrants / "oks.py").write_text(
        "import numpy as np\n\ndef points(run):\n"
        "    (y,) = run({'x': np.full((1, 3, 32, 32), 0.8, np.float32)})\n    return float(y[0, 5:].min() > 0.9)\n"
    )
    found = metric(built(trtopt, quadrants, "--metric", "oks.py:points"))
    assert found["baseline"] == found["optimized"] == 1.0


def test_faces_coded_by_anchors_are_refused_with_the_outputs(trtopt: Run, quadrants: Path) -> None:
    body = """(float[1,3,32,32] x) => (float[1,256,4] loc, float[1,256,2] conf, float[1,256,10] landms) {
        small = AveragePool <kernel_shape = [2, 2], strides = [2, 2]> (x)
        features = Conv(small, w)
        rows = Reshape(features, shape)
        turned = Transpose <perm = [0, 2, 1]> (rows)
        loc, scores, landms = Split <axis = 2> (turned, parts)
        conf = Softmax <axis = 2> (scores)
    }"""
    w = np.random.default_rng(0).normal(size=(16, 3, 1, 1)).astype(np.float32)
    save(quadrants, body, w=w, shape=np.array([1, 16, 256]), parts=np.array([4, 2, 10]))
    done = trtopt(*"build model.onnx --fp16 --calib images --eval images --metric map50".split(), cwd=quadrants)
    assert done.returncode == 2 and "remedy:" in done.stderr, done.stderr
    said = " ".join(done.stderr.split())
    assert all(name in said for name in ("loc", "conf", "landms")), said
    assert not list(quadrants.glob("*.engine*"))
    (quadrants / "own.py").write_text(
        "import numpy as np\n\ndef found(run):\n"
        "    loc, conf, landms = run({'x': np.zeros((1, 3, 32, 32), np.float32)})\n"
        "    return float(conf.shape[1] == 256)\n"
    )
    assert metric(built(trtopt, quadrants, "--metric", "own.py:found"))["baseline"] == 1.0


def test_lines_of_text_by_the_best_character_of_each_place(trtopt: Run, tmp_path: Path) -> None:
    body = """(float[N,3,48,W] x) => (float[N,T,37] y) {
        tall = AveragePool <kernel_shape = [48, 8], strides = [48, 8]> (x)
        scores = Conv(tall, w)
        row = Squeeze(scores, two)
        places = Transpose <perm = [0, 2, 1]> (row)
        y = Softmax <axis = 2> (places)
    }"""
    rng = np.random.default_rng(0)
    w = rng.normal(size=(37, 3, 1, 1)).astype(np.float32)
    save(tmp_path, body, w=w, two=np.array([2]))
    (tmp_path / "images").mkdir()
    for index in range(8):
        stripes = rng.integers(0, 256, (6, 40, 3), dtype=np.uint8)
        Image.fromarray(stripes).resize((320, 48), Image.Resampling.NEAREST).save(tmp_path / f"images/{index}.png")
    accuracy = built(trtopt, tmp_path, "--opt-shapes", "x:1x3x48x320", "--metric", "agreement")
    assert metric(accuracy)["baseline"] == 1.0 and metric(accuracy)["optimized"] >= 0.99


def test_encoders_by_their_error(trtopt: Run, quadrants: Path) -> None:
    body = """(float[N,3,32,32] x) => (float[N,64,32] y) {
        patches = Conv <strides = [4, 4]> (x, w)
        rows = Reshape(patches, shape)
        y = Transpose <perm = [0, 2, 1]> (rows)
    }"""
    w = np.random.default_rng(0).normal(size=(32, 3, 4, 4)).astype(np.float32)
    save(quadrants, body, w=w, shape=np.array([0, 32, 64]))
    outputs = built(trtopt, quadrants)["outputs"]
    assert isinstance(outputs, dict) and outputs["y"]["sqnr_db"] > 20
