"""Blocks on windows of a map leave fewer kernels and bytes: [8, 28, 28, 192], windows of 7 x 7, six heads of 32."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from test_recipes_attention import costs

from trtopt.graph.artifact import ModelArtifact
from trtopt.source.onnx_file import load

pytest.importorskip("tensorrt_rtx", reason="TensorRT for RTX is not installed")

_LENGTHS = "{0}n = ReduceL2({0}, last) {0}m = Max({0}n, small) {0}d = Div({0}, {0}m)"
_QKV = (
    "a3 = MatMul(w, wqkv) a4 = Add(a3, bqkv) a5 = Reshape(a4, split) a6 = Transpose <perm = [2, 0, 3, 1, 4]> (a5) "
    "q = Gather <axis = 0> (a6, i0) k = Gather <axis = 0> (a6, i1) v = Gather <axis = 0> (a6, i2)"
)
_CORE = (
    "kt = Transpose <perm = [0, 1, 3, 2]> ({1}) s0 = MatMul({0}, kt) s1 = Mul(s0, size) p = Softmax <axis = -1> (s1) "
    "c0 = MatMul(p, v) c1 = Transpose <perm = [0, 2, 1, 3]> (c0) c2 = Reshape(c1, rows) c3 = MatMul(c2, wo) "
    "c4 = Add(c3, bo)"
)
_BLOCK = (
    "n = LayerNormalization(x, ones, bo) a0 = Reshape(n, cut) a1 = Transpose <perm = [0, 1, 3, 2, 4, 5]> (a0) "
    f"w = Reshape(a1, rows) {_QKV} {{}} d0 = Reshape(c4, join) d1 = Transpose <perm = [0, 1, 3, 2, 4, 5]> (d0) "
    "d2 = Reshape(d1, map) r = Add(x, d2) m0 = LayerNormalization(r, ones, bo) m1 = MatMul(m0, wu) m2 = Add(m1, bu) "
    "m3 = Gelu(m2) m4 = MatMul(m3, wd) y = Add(r, m4)"
)


def blocks(folder: Path, core: str) -> ModelArtifact:
    body = _BLOCK.format(core)
    made = re.findall(r"(\w+) = (?=[A-Z])", body)
    first, second = (re.sub(rf"\b({'|'.join(made)})\b", rf"\1_{index}", body) for index in range(2))
    second = re.sub(r"\bx\b", "y_0", second).replace("y_1", "y")
    model = onnx.parser.parse_model(
        '<ir_version: 9, opset_import: ["" : 20]> g (float[8, 28, 28, 192] x) => (float[8, 28, 28, 192] y) '
        "<int64[6] cut = {-1, 4, 7, 4, 7, 192}, int64[3] rows = {-1, 49, 192}, int64[5] split = {-1, 49, 3, 6, 32}, "
        "int64[6] join = {-1, 4, 4, 7, 7, 192}, int64[4] map = {-1, 28, 28, 192}, int64[1] last = {-1}, "
        "int64 i0 = {0}, int64 i1 = {1}, "
        f"int64 i2 = {{2}}, float size = {{0.17}}, float small = {{1e-6}}> {{ {first} {second} }}"
    )
    rng = np.random.default_rng(0)
    shapes = {"wqkv": (192, 576), "wo": (192, 192), "wu": (192, 768), "wd": (768, 192), "bqkv": (576,), "bo": (192,)}
    for name, shape in {**shapes, "bu": (768,), "ones": (192,)}.items():
        array = rng.standard_normal(shape) * 0.05 + (name == "ones")
        model.graph.initializer.append(onnx.numpy_helper.from_array(array.astype(np.float32), name))
    onnx.save(model, folder / "m.onnx")
    return load(folder / "m.onnx")


def test_windows_are_cut_before_the_normalization_and_read_in_place(tmp_path: Path) -> None:
    artifact = blocks(tmp_path, _CORE.format("q", "k"))
    both = "merged-projection,window-residual,normalized-qkv-bias"
    plain, windows, tokens = costs(artifact, both, f"{both},batch-first-attention")
    assert windows.kernels < plain.kernels and windows.bytes < 0.9 * plain.bytes
    assert tokens.kernels < windows.kernels and tokens.bytes < 0.95 * windows.bytes


def test_the_attention_kernel_divides_by_the_norms(tmp_path: Path) -> None:
    lengths = " ".join(_LENGTHS.format(name) for name in "qk")
    artifact = blocks(tmp_path, f"{lengths} {_CORE.format('qd', 'kd')}")
    plain, scored = costs(artifact, "merged-projection,normalized-scores")
    assert scored.bytes < 0.95 * plain.bytes


_ROTATED = (
    "{0}a, {0}b = Split <axis = 3> ({0}) {0}m = Neg({0}b) {0}h = Concat <axis = 3> ({0}m, {0}a) {0}c = Mul({0}, cos) "
    "{0}s = Mul({0}h, sin) {0}r = Add({0}c, {0}s)"
)


def test_parts_that_are_rotated_keep_their_one_product_until_somebody_judges(tmp_path: Path) -> None:
    """A block of GPT-NeoX, whose projections are merged head by head: a kernel rotates and copies all three parts."""
    body = (
        "a0 = MatMul(x, wqkv) a1 = Add(a0, bqkv) a2 = Reshape(a1, split) a3 = Transpose <perm = [0, 2, 1, 3]> (a2) "
        f"q, k, v = Split <axis = 3> (a3) {_ROTATED.format('q')} {_ROTATED.format('k')} "
        "kt = Transpose <perm = [0, 1, 3, 2]> (kr) s0 = MatMul(qr, kt) s1 = Mul(s0, size) p = Softmax <axis = -1> (s1) "
        "c0 = MatMul(p, v) c1 = Transpose <perm = [0, 2, 1, 3]> (c0) c2 = Reshape(c1, rows) c3 = MatMul(c2, wo) "
        "y = Add(x, c3)"
    )
    model = onnx.parser.parse_model(
        '<ir_version: 9, opset_import: ["" : 17]> g (float[8, 128, 512] x, float[1, 1, 128, 64] cos, '
        "float[1, 1, 128, 64] sin) => (float[8, 128, 512] y) <int64[4] split = {8, 128, 8, 192}, "
        f"int64[3] rows = {{8, 128, 512}}, float size = {{0.125}}> {{ {body} }}"
    )
    rng = np.random.default_rng(0)
    for name, shape in {"wqkv": (512, 1536), "wo": (512, 512), "bqkv": (1536,)}.items():
        array = (rng.standard_normal(shape) * 0.05).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    onnx.save(model, tmp_path / "m.onnx")
    plain, merged, rotated = costs(load(tmp_path / "m.onnx"), "merged-projection", "rotated-projection")
    assert merged == plain
    assert rotated.kernels > plain.kernels and rotated.predicted_us > plain.predicted_us


def test_windows_with_an_axis_of_their_own_are_read_in_place(tmp_path: Path) -> None:
    parts = " ".join(f"{name} = Gather <axis = 0> (t, i{index})" for index, name in enumerate("qkv"))
    body = (
        "n = LayerNormalization(x, ones, b) f = MatMul(n, w) r = Reshape(f, split) "
        f"t = Transpose <perm = [3, 0, 4, 1, 2, 5]> (r) {parts} kt = Transpose <perm = [0, 1, 2, 4, 3]> (k) "
        "s0 = MatMul(q, kt) s1 = Mul(s0, size) p = Softmax <axis = -1> (s1) m = MatMul(p, v) "
        "mt = Transpose <perm = [0, 2, 3, 4, 1]> (m) mr = Reshape(mt, join) o = MatMul(mr, wo) y = Add(x, o)"
    )
    made = re.findall(r"(\w+) = (?=[A-Z])", body)
    first, second = (re.sub(rf"\b({'|'.join(made)})\b", rf"\1_{index}", body) for index in range(2))
    second = re.sub(r"\bx\b", "y_0", second).replace("y_1", "y")
    model = onnx.parser.parse_model(
        '<ir_version: 9, opset_import: ["" : 20]> g (float[8, 16, 49, 96] x) => (float[8, 16, 49, 96] y) '
        "<int64[6] split = {-1, 16, 49, 3, 3, 32}, int64[4] join = {-1, 16, 49, 96}, int64 i0 = {0}, int64 i1 = {1}, "
        f"int64 i2 = {{2}}, float size = {{0.17}}> {{ {first} {second} }}"
    )
    rng = np.random.default_rng(0)
    for name, shape in {"w": (96, 288), "wo": (96, 96), "b": (96,), "ones": (96,)}.items():
        array = rng.standard_normal(shape) * 0.05 + (name == "ones")
        model.graph.initializer.append(onnx.numpy_helper.from_array(array.astype(np.float32), name))
    onnx.save(model, tmp_path / "m.onnx")
    plain, merged, ordered = costs(
        load(tmp_path / "m.onnx"),
        "merged-windows",
        "merged-windows,feature-order,merged-projection,batch-first-attention",
    )
    assert merged.bytes < 0.95 * plain.bytes
    assert ordered.kernels < merged.kernels and ordered.bytes < 0.7 * plain.bytes
