"""Attention between the positions of a map ends in the compiler's fused kernel: [8, 64, 32, 32], L4, FP16."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from test_recipes_attention import costs

from trtopt.graph.artifact import ModelArtifact
from trtopt.source.onnx_file import load

pytest.importorskip("tensorrt_rtx", reason="TensorRT for RTX is not installed")

_FLAT = "q = Reshape(a, narrow) k = Reshape(c, narrow) v = Reshape(d, wide)"
_CONVS = "a = Conv(e, wq, bq) c = Conv(e, wk, bk) d = Conv(e, wv, bv)"
_TURN = "Transpose <perm = [0, 2, 1]>"
_SAGAN = (
    f"{_CONVS} {_FLAT} qt = {_TURN} (q) s = MatMul(qt, k) p = Softmax <axis = -1> (s) pt = {_TURN} (p) "
    "o = MatMul(v, pt)"
)
_POOL = "MaxPool <kernel_shape = [2, 2], strides = [2, 2]>"
_POOLED = _SAGAN.replace(_FLAT, f"q = Reshape(a, narrow) cp = {_POOL} (c) dp = {_POOL} (d) {_FLAT[22:]}")
_POOLED = _POOLED.replace("(c, narrow)", "(cp, less)").replace("(d, wide)", "(dp, few)")
_LOCAL = f"{_SAGAN[: _SAGAN.index('pt =')]} vt = {_TURN} (v) r = MatMul(p, vt) o = {_TURN} (r)"
_OTHER_AXIS = f"{_CONVS} {_FLAT} qt = {_TURN} (q) s = MatMul(qt, k) p = Softmax <axis = 1> (s) o = MatMul(v, p)"


def network(folder: Path, attention: str, size: int = 8) -> ModelArtifact:
    """Attention between two convolutions of three by three, with a projection and a residual."""
    model = onnx.parser.parse_model(
        '<ir_version: 9, opset_import: ["" : 20]> g (float[8, 64, 32, 32] x) => (float[8, 64, 32, 32] y) '
        f"<int64[3] narrow = {{0, {size}, 1024}}, int64[3] wide = {{0, 32, 1024}}, int64[3] less = {{0, {size}, 256}}, "
        "int64[3] few = {0, 32, 256}, int64[4] map = {0, 32, 32, 32}> { e0 = Conv <pads = [1, 1, 1, 1]> (x, w0) "
        f"e = Relu(e0) {attention} m = Reshape(o, map) z = Conv(m, wo, bo) u = Add(z, e) "
        "y = Conv <pads = [1, 1, 1, 1]> (u, w0) }"
    )
    rng = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {"w0": (64, 64, 3, 3), "wo": (64, 32, 1, 1), "bo": (64,)}
    for name, channels in (("q", size), ("k", size), ("v", 32)):
        shapes |= {f"w{name}": (channels, 64, 1, 1), f"b{name}": (channels,)}
    for name, shape in shapes.items():
        array = rng.standard_normal(shape, dtype=np.float32) * 0.05
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    onnx.save(model, folder / "m.onnx")
    return load(folder / "m.onnx")


@pytest.mark.parametrize(
    "attention", [_SAGAN, _OTHER_AXIS, _LOCAL], ids=["channels-first", "other-axis", "tokens-first"]
)
def test_attention_of_a_map_is_one_kernel(attention: str, tmp_path: Path) -> None:
    """Scores of 1024 x 1024 positions are not stored."""
    plain, fused = costs(network(tmp_path, attention), "map-attention")
    assert fused.kernels <= plain.kernels - 5
    assert fused.bytes < 0.4 * plain.bytes and fused.predicted_us < 0.8 * plain.predicted_us


def test_pooled_keys_and_values_come_from_one_convolution(tmp_path: Path) -> None:
    plain, fused = costs(network(tmp_path, _POOLED), "map-attention")
    assert fused.kernels <= plain.kernels - 5
    assert fused.bytes < 0.7 * plain.bytes and fused.predicted_us < plain.predicted_us


def test_one_head_keeps_the_transpose_that_attention_reads_in_place(tmp_path: Path) -> None:
    """A Reshape in its place would be copied, for queries, keys and values each."""
    alone, cleaned = costs(network(tmp_path, _SAGAN), "map-attention", "map-attention,reshape-chain,no-op")[1:]
    assert cleaned.kernels <= alone.kernels


def test_the_largest_of_neighbours_is_pooled_as_the_map_lies(tmp_path: Path) -> None:
    """As networks on points take it: 256 points with 16 neighbours each."""
    model = onnx.parser.parse_model(
        '<ir_version: 9, opset_import: ["" : 20]> g (float[8, 64, 256, 16] x) => (float[8, 64, 256] y) '
        "<int64[1] last = {-1}> { c = Conv(x, w) r = LeakyRelu(c) y = ReduceMax <keepdims = 0> (r, last) }"
    )
    array = np.random.default_rng(0).standard_normal((64, 64, 1, 1), dtype=np.float32) * 0.1
    model.graph.initializer.append(onnx.numpy_helper.from_array(array, "w"))
    onnx.save(model, tmp_path / "m.onnx")
    plain, pooled = costs(load(tmp_path / "m.onnx"), "global-average-pool")
    assert pooled.kernels <= plain.kernels and pooled.bytes < 0.9 * plain.bytes
    assert pooled.predicted_us < plain.predicted_us
