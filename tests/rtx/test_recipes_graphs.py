"""Messages of a graph network: features are multiplied at the nodes, and gathered for the edges behind."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from test_recipes_attention import costs

from trtopt.source.onnx_file import load

pytest.importorskip("tensorrt_rtx", reason="TensorRT for RTX is not installed")


def test_products_of_both_ends_of_edges_are_products_of_nodes(tmp_path: Path) -> None:
    """256 nodes and 1024 edges, a batch of 8; messages are summed by a product."""
    model = onnx.parser.parse_model(
        '<ir_version: 9, opset_import: ["" : 20]> g (float[8, 256, 128] x) => (float[8, 256, 128] y) { '
        "h = MatMul(x, w0) p = Gather <axis = 1> (h, i) q = Gather <axis = 1> (h, j) c = Concat <axis = 2> (p, q) "
        "m0 = MatMul(c, w1) m1 = Add(m0, b1) m2 = Relu(m1) m3 = MatMul(m2, w2) s = MatMul(a, m3) y = Add(s, h) }"
    )
    rng = np.random.default_rng(0)
    for name, shape in {"w0": (128, 128), "w1": (256, 128), "b1": (128,), "w2": (128, 128), "a": (256, 1024)}.items():
        array = rng.standard_normal(shape, dtype=np.float32) * 0.05
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    for name in "ij":
        model.graph.initializer.append(onnx.numpy_helper.from_array(rng.integers(0, 256, 1024), name))
    onnx.save(model, tmp_path / "m.onnx")
    plain, first = costs(load(tmp_path / "m.onnx"), "gathered-rows")
    assert first.bytes < 0.7 * plain.bytes and first.predicted_us < 0.95 * plain.predicted_us


def test_scattered_sums_compile(tmp_path: Path) -> None:
    """TensorRT for RTX scatters without a reduction only."""
    model = onnx.parser.parse_model(
        '<ir_version: 9, opset_import: ["" : 20]> g (float[64, 32] x, float[200, 32] m, int64[200, 1] i) '
        '=> (float[64, 32] y) { s = ScatterND <reduction = "add"> (x, i, m) y = Relu(s) }'
    )
    onnx.save(model, tmp_path / "m.onnx")
    (cost,) = costs(load(tmp_path / "m.onnx"))
    assert cost.kernels
