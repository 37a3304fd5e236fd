"""The search over 8-bit types with the prices of the real compiler: under a wide budget the fastest type wins."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import numpy_helper

import trtopt
from trtopt.report.search_records import SearchRecord

pytest.importorskip("tensorrt_rtx")

WIDTH, HIDDEN = 256, 1024
TOKENS = (8, 128, WIDTH)


def feed_forward() -> onnx.ModelProto:
    """The second half of a transformer block: normalization, two products with a GELU between them, the residual."""
    shape = ", ".join(map(str, TOKENS))
    text = f"""<ir_version: 10, opset_import: ["" : 21]> g (float[{shape}] x) => (float[{shape}] y) {{
        n = LayerNormalization (x, gain) a = MatMul (n, w0) h = Gelu (a) b = MatMul (h, w1) y = Add (x, b)
    }}"""
    found = onnx.parser.parse_model(text)
    rng = np.random.default_rng(0)
    arrays = {
        "gain": np.ones(WIDTH),
        "w0": rng.uniform(-1, 1, (WIDTH, HIDDEN)) * (3 / HIDDEN) ** 0.5,
        "w1": rng.uniform(-1, 1, (HIDDEN, WIDTH)) * (3 / WIDTH) ** 0.5,
    }
    for name, array in arrays.items():
        found.graph.initializer.append(numpy_helper.from_array(array.astype(np.float32), name))
    for node in found.graph.node:
        node.name = node.output[0]
    return found


def searched(folder: Path, budget: float) -> SearchRecord:
    samples = np.random.default_rng(1).standard_normal((2 * TOKENS[0], *TOKENS[1:])).astype(np.float32)
    options = {"precision": "auto", "max_accuracy_drop": budget, "recipes": "none", "cache_dir": str(folder / "cache")}
    found = trtopt.optimize(feed_forward(), output=folder / "o.onnx", calib=samples, gpu="L4", **options)
    assert found.search is not None
    return found.search


def test_the_fastest_type_within_the_budget_is_chosen(tmp_path: Path) -> None:
    """FP8 is the fastest here, and the least accurate; INT8 follows in both."""
    wide = searched(tmp_path, 0.9)
    assert [point.name for point in wide.pareto] == ["fp8", "int8", "fp16"]
    assert [point.chosen for point in wide.pareto] == [True, False, False]
    drops = {point.name: point.drop for point in wide.pareto}
    # The search aims at half the budget or more: twice a point's drop takes it in.
    narrow = searched(tmp_path, min(2 * drops["int8"], 0.99 * drops["fp8"]))
    assert next(point.name for point in narrow.pareto if point.chosen) == "int8"
    assert narrow.reached and narrow.resumed
