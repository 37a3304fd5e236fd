"""The commands of docs/detectors.md and of the pixels in docs/build.md, on a detector whose boxes are right."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from command_line import Run
from onnx import numpy_helper

pytest.importorskip("PIL", reason="pictures are read by Pillow: pip install 'trtopt[images]'")
pytest.importorskip("pycocotools", reason="metrics of boxes are computed by it: pip install 'trtopt[images]'")
pytest.importorskip("tensorrt_rtx", reason="needs TensorRT for RTX")
from PIL import Image

DOCS = Path(__file__).parents[2] / "docs"
CELL = 16


def commands(page: str) -> list[list[str]]:
    """The lines for a shell of a page of docs/, without the name of the program."""
    text = (DOCS / page).read_text(encoding="utf-8")
    blocks = re.findall(r"^```\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)
    return [line.split()[1:] for block in blocks for line in block.splitlines() if line.startswith("trtopt ")]


def save_detector(path: Path, side: int, end: str = "", outputs: str = "float[1, 6, C] found") -> None:
    """A network that finds red and green cells of 16 pixels: boxes and two scores, as YOLO v8 writes them."""
    cells = side // CELL
    proto = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["": 17]>
        g (float[1, 3, {side}, {side}] images) => ({outputs}) {{
            bright = Conv <strides = [{CELL}, {CELL}]> (images, weight, bias)
            flat = Reshape (bright, two_rows) scores = Sigmoid (flat)
            found = Concat <axis = 1> (places, scores) {end}
        }}""")
    weight = np.zeros((2, 3, CELL, CELL), np.float32)
    weight[0, 0] = weight[1, 1] = 1
    weight[0, 1] = weight[1, 0] = -1
    rows, columns = (grid.ravel() * CELL + CELL / 2 for grid in np.mgrid[:cells, :cells])
    whole = np.full(cells**2, CELL)
    arrays: dict[str, np.ndarray] = {
        "weight": weight * np.float32(16 / CELL**2),
        "bias": np.full(2, -4, np.float32),
        "two_rows": np.array([1, 2, -1]),
        "places": np.stack([columns, rows, whole, whole])[None].astype(np.float32),
        "parts": np.array([4, 2]),
        "last": np.array([-1]),
        "half": np.array([0.5], np.float32),
        "most": np.array([20]),
        "iou": np.array([0.5], np.float32),
        "least": np.array([0.5], np.float32),
    }
    read = {name for node in proto.graph.node for name in node.input}
    proto.graph.initializer.extend(numpy_helper.from_array(arrays[name], name) for name in arrays if name in read)
    onnx.save(proto, path)


INDICES = """
    coded, marks = Split <axis = 1> (found, parts) boxes = Transpose <perm = [0, 2, 1]> (coded)
    chosen = NonMaxSuppression <center_point_box = 1> (boxes, marks, most, iou, least)
"""


INDEXED = "float[1, C, 4] boxes, float[1, 2, C] marks, int64[F, 3] chosen"

BEST = """
    coded, marks = Split <axis = 1> (found, parts) best = ReduceMax <axes = [1], keepdims = 0> (marks)
    score, place = TopK <axis = 1> (best, most) names = ArgMax <axis = 1, keepdims = 0> (marks)
    boxes = Transpose <perm = [0, 2, 1]> (coded) rows = Unsqueeze (place, last)
    chosen_boxes = GatherND <batch_dims = 1> (boxes, rows) middle, sides = Split <axis = 2> (chosen_boxes)
    half_sides = Mul (sides, half) low = Sub (middle, half_sides) high = Add (middle, half_sides)
    label = GatherElements <axis = 1> (names, place) number = Cast <to = 1> (label)
    score_column = Unsqueeze (score, last) class_column = Unsqueeze (number, last)
    rows_found = Concat <axis = 2> (low, high, score_column, class_column)
"""
"""The best twenty, as YOLO v10 writes them."""


def save_pictures(folder: Path, side: int) -> None:
    """``pictures``, ``val`` and the labels of these in ``instances.json``, whose categories are 3 and 7."""
    rng, images, boxes = np.random.default_rng(0), [], []
    for split, index in [(split, index) for split in ("pictures", "val") for index in range(6)]:
        pixels = rng.integers(30, 90, (side, side, 3), dtype=np.uint8)
        for place in rng.choice((side // CELL) ** 2, 3, replace=False):
            label, (row, column) = int(rng.integers(2)), np.divmod(int(place), side // CELL)
            top, left = row * CELL, column * CELL
            pixels[top : top + CELL, left : left + CELL] = ((250, 20, 20), (20, 250, 20))[label]
            box = {"image_id": index, "category_id": (3, 7)[label], "bbox": [left, top, CELL, CELL], "iscrowd": 0}
            boxes += [{"id": len(boxes) + 1, "area": CELL**2, **box}] if split == "val" else []
        (folder / split).mkdir(exist_ok=True)
        Image.fromarray(pixels).save(folder / split / f"{index}.png")
        images += [{"id": index, "file_name": f"{index}.png", "width": side, "height": side}] if split == "val" else []
    categories = [{"id": 3, "name": "red"}, {"id": 7, "name": "green"}]
    labels = {"images": images, "annotations": boxes, "categories": categories}
    (folder / "instances.json").write_text(json.dumps(labels, default=int))


@pytest.mark.parametrize(
    ("end", "form", "host"),
    [
        (("",), "yolov8", None),
        ((INDICES, INDEXED), "nms", ["boxes", "marks"]),
        ((BEST, "float[1, 20, 6] rows_found"), "yolov10", None),
    ],
)
def test_the_command_of_the_page_finds_the_form_and_keeps_the_figure(
    trtopt: Run, tmp_path: Path, end: tuple[str, ...], form: str, host: list[str] | None
) -> None:
    save_detector(tmp_path / "model.onnx", 96, *end)
    save_pictures(tmp_path, 96)
    (command,) = commands("detectors.md")
    done = trtopt(*command, "--report", "r.json")
    assert done.returncode == 0, done.stderr
    assert f"boxes are read as --boxes {form}" in " ".join(done.stderr.split())
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["accuracy"]["metric"]["baseline"] == pytest.approx(1.0)
    assert report["accuracy"]["metric"]["optimized"] == pytest.approx(1.0)
    between = None if report["host"] is None else [item["name"] for item in report["host"]["between"]]
    assert between == host
    assert report["accuracy"]["selections"] == {"nms": ["chosen"], "yolov10": ["rows_found"]}.get(form, [])
    program = re.search(r"```python\n(.*?)```", (DOCS / "detectors.md").read_text(encoding="utf-8"), flags=re.DOTALL)
    assert program is not None
    done = subprocess.run([sys.executable, "-c", program[1]], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    names = {line.split()[0] for line in done.stdout.splitlines()}
    assert names == {item.name for item in onnx.load(tmp_path / "model.onnx").graph.output}, done.stderr


def test_the_command_for_pixels_in_the_engine_runs(trtopt: Run, tmp_path: Path) -> None:
    save_detector(tmp_path / "yolo.onnx", 640)
    (command,) = [words for words in commands("build.md") if "--preprocess-in-engine" in words]
    done = trtopt(*command)
    assert done.returncode == 0, done.stderr
    (item,) = json.loads((tmp_path / "yolo.rtx.engine.manifest.json").read_text())["inputs"]
    assert (item["name"], item["dtype"], item["shape"]) == ("images", "uint8", [1, 640, 640, 3])
