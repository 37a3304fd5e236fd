"""A text encoder without samples is calibrated and verified on ids of its whole table, not on two rows of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import numpy_helper

from trtopt import api
from trtopt.pipeline import settings

ROWS, WIDTH = 400, 64

_TEXT = """
<ir_version: 8, opset_import: ["" : 17]>
encoder (int64[N, 32] ids, int64[N, 32] keep) => (float[N, 32, 64] y) {
    words = Gather (table, ids)
    first = LayerNormalization (words, ones, zeros)
    wide = MatMul (first, w1)
    half = Erf (wide)
    gate = Mul (wide, half)
    narrow = MatMul (gate, w2)
    sum = Add (first, narrow)
    seen = Cast <to = 1> (keep)
    column = Unsqueeze (seen, two)
    masked = Mul (sum, column)
    y = LayerNormalization (masked, ones, zeros)
}
"""


def save_encoder(path: Path) -> None:
    """Most rows of the table have a few large entries, the first two have none."""
    rng = np.random.default_rng(0)
    table = rng.standard_normal((ROWS, WIDTH))
    table[2:, :2] += 20 * rng.standard_normal((ROWS - 2, 2))
    weights = {
        "table": table,
        "ones": np.ones(WIDTH),
        "zeros": np.zeros(WIDTH),
        "w1": rng.standard_normal((WIDTH, 4 * WIDTH)) / 4,
        "w2": rng.standard_normal((4 * WIDTH, WIDTH)) / 16,
    }
    model = onnx.parser.parse_model(_TEXT)
    for name, array in weights.items():
        model.graph.initializer.append(numpy_helper.from_array(array.astype(np.float32), name))
    model.graph.initializer.append(numpy_helper.from_array(np.asarray([2], np.int64), "two"))
    for node in model.graph.node:
        node.name = node.output[0]
    onnx.save(model, path)


def sqnr_db(folder: Path, **options: object) -> float:
    report = api.optimize(
        folder / "model.onnx",
        precision="int8",
        keep_all_int8=True,
        min_sqnr_db=-100.0,
        backend="tensorrt",
        output=str(folder / "out.onnx"),
        cache_dir=str(folder / "cache"),
        **options,
    )
    assert report.accuracy is not None
    return report.accuracy.outputs["y"].sqnr_db


def test_the_accuracy_on_synthetic_ids_is_that_on_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_encoder(tmp_path / "model.onnx")
    ids = np.random.default_rng(1).integers(0, ROWS, (16, 32))
    true = sqnr_db(tmp_path, eval={"ids": ids, "keep": np.ones_like(ids)})
    assert sqnr_db(tmp_path) == pytest.approx(true, abs=1.5)
    monkeypatch.setattr(settings, "input_values", lambda model: {})
    assert sqnr_db(tmp_path) > true + 2
    assert sqnr_db(tmp_path, eval={"ids": ids, "keep": np.ones_like(ids)}) < true - 6
