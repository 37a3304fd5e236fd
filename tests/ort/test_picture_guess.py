"""How pictures are prepared where nobody says it: as the network agrees best with their labels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

pytest.importorskip("PIL", reason="pictures are read by Pillow: pip install 'trtopt[images]'")
from PIL import Image

from trtopt.config import BuildConfig
from trtopt.events import Event
from trtopt.graph.artifact import input_spec
from trtopt.pipeline.pictures import with_preprocess
from trtopt.pipeline.settings import DataSources, read_inputs, settle
from trtopt.precision.observe.pictures import PictureOptions, PictureSamples
from trtopt.precision.observe.samples import open_samples
from trtopt.support.clock import Clock

# Scores of red, green, blue and dark of a network that was trained on pixels of 0 to 255, blue first.
NET = """
<ir_version: 8, opset_import: ["" : 17]>
colors (float[N, 3, 8, 8] x) => (float[N, 4] scores)
<float[3, 4] weight = {0, 0, 1, 0, 0, 1, 0, 0, 1, 0, 0, 0}, float[4] bias = {0, 0, 0, 60}> {
    p = GlobalAveragePool (x)
    f = Flatten (p)
    s = MatMul (f, weight)
    scores = Add (s, bias)
}
"""
COLORS = {"0": (200, 90, 90), "1": (90, 200, 90), "2": (90, 90, 200), "3": (20, 30, 25)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    for name, color in COLORS.items():
        (tmp_path / name).mkdir()
        for index in range(6):
            pixels = np.clip(rng.normal(color, 8, (8, 8, 3)), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(tmp_path / name / f"{index}.png")
    return tmp_path


def settled(
    folder: Path, metric: Any, preprocess: str | None = None, network: str = NET
) -> tuple[PictureSamples, list[str]]:
    model, said = ir.from_onnx_text(network), []

    def listen(event: Event) -> None:
        if event.kind == "warning":
            said.append(event.text)

    samples = open_samples(folder, [input_spec(model.graph.inputs[0])], pictures=PictureOptions(preprocess))
    found = with_preprocess(samples, metric, None, model, Clock(listen))
    assert isinstance(found, PictureSamples)
    return found, said


def test_the_way_that_agrees_with_the_labels_is_taken_and_said(folder: Path) -> None:
    found, said = settled(folder, "top1")
    assert (found.how.scale, found.how.color, found.how.mean) == (1.0, "bgr", (0.0, 0.0, 0.0))
    assert found.how.describe() in said[-1] and "top1 1.000" in said[-1] and "of 10 usual ways" in said[-1]
    assert len(list(found)) == 24 and found.sha256 != settled(folder, None)[0].sha256


def test_bytes_may_be_blue_first(folder: Path) -> None:
    pixels = "(uint8[N, 8, 8, 3] bytes) => (float[N, 4] scores)"
    turned = "{ y = Cast <to = 1> (bytes) x = Transpose <perm = [0, 3, 1, 2]> (y)"
    network = NET.replace("(float[N, 3, 8, 8] x) => (float[N, 4] scores)", pixels).replace("> {", f"> {turned}")
    found, said = settled(folder, "top1", network=network)
    assert (found.how.dtype, found.how.layout, found.how.color) == ("uint8", "nhwc", "bgr")
    assert "top1 1.000" in said[-1] and "of 2 usual ways" in said[-1]


def test_without_labels_it_is_guessed_and_said(folder: Path) -> None:
    found, said = settled(folder, None)
    assert found.how.mean == (0.485, 0.456, 0.406) and "guessed" in said[-1]
    assert settled(folder, lambda run: 1.0)[0].how == found.how


def test_what_is_said_is_done_without_a_word(folder: Path) -> None:
    found, said = settled(folder, "top1", "scale=255")
    assert found.how.scale == 255 and said == []


def test_what_is_assumed_is_said_once_where_the_engine_takes_pixels(folder: Path) -> None:
    """And found by the labels, as without. One picture has none; they are opened to find that out, then as pixels."""
    said: list[str] = []
    rows = [f"{place.relative_to(folder)},{place.parent.name}" for place in sorted(folder.rglob("*.png"))[1:]]
    (folder / "labels.csv").write_text("\n".join(rows) + "\n")
    model = folder / "m.onnx"
    ir.save(ir.from_onnx_text(NET), model)
    options: dict[str, Any] = {"metric": "top1", "eval": str(folder), "preprocess_in_engine": True}
    config = BuildConfig(output=str(folder / "x"), **options)
    clock = Clock(lambda event: said.append(event.text) if event.kind == "warning" else None)
    settings = settle(model, config, None, clock, make_engine=False)
    read_inputs(settings, DataSources(None, str(folder), "top1"), clock)
    assert any("1 of 24 pictures have no label" in text for text in said)
    assert any("feed x uint8" in text for text in said)
    assert any("color=bgr" in text and "top1 1.000" in text for text in said)
    assert len(said) == len(set(said))
