"""What the recipes around activations and linear layers change in engines of TensorRT for RTX: FP16, batch 8."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest

from trtopt.engine.backend import TENSORRT_RTX
from trtopt.hardware.spec import find_gpu
from trtopt.judge.judges import judge_for
from trtopt.judge.protocol import Judge
from trtopt.report.schema.steps import Cost
from trtopt.rewrite.driver import Rewritten, run
from trtopt.rewrite.protocol import Target
from trtopt.rewrite.sweeps import Judging
from trtopt.source.onnx_file import load
from trtopt.support.precision import Precision

pytest.importorskip("tensorrt_rtx", reason="TensorRT for RTX is not installed")

ACTIVATIONS = {
    "prelu": "z = PRelu(a, s)",
    "selu": "z = Selu(a)",
    "softplus": "z = Softplus(a)",
    "mish": "t = Softplus(a) h = Tanh(t) z = Mul(a, h)",
}
FIRST, LAST = "Transpose <perm = [0, 3, 1, 2]>", "Transpose <perm = [0, 2, 3, 1]>"


@pytest.fixture(scope="module")
def judge() -> Iterator[Judge]:
    gpu = find_gpu("L4")
    assert gpu is not None
    with judge_for(TENSORRT_RTX, gpu, Precision.FP16) as judge:
        yield judge


def rewritten(
    text: str, weights: Mapping[str, tuple[int, ...]], recipes: str, judge: Judge, folder: Path
) -> tuple[Rewritten, Cost, Cost]:
    model = onnx.parser.parse_model('<ir_version: 8, opset_import: ["" : 17]> g ' + text)
    rng = np.random.default_rng(0)
    for name, shape in weights.items():
        array = (rng.standard_normal(shape) * 0.05).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    onnx.save(model, folder / "m.onnx")
    target, judging = Target("tensorrt-rtx", "fp16"), Judging(judge, ())
    result = run(load(folder / "m.onnx"), recipes=recipes, strict=True, target=target, judging=judging)
    assert result.before is not None and result.after is not None
    return result, result.before, result.after


@pytest.mark.parametrize("recipe", ACTIVATIONS)
@pytest.mark.parametrize("product", ["conv", "gemm"])
def test_the_activation_becomes_part_of_the_kernel_before_it(
    recipe: str, product: str, judge: Judge, tmp_path: Path
) -> None:
    if product == "conv":
        same = "pads = [1, 1, 1, 1]"
        ends = "(float[8, 64, 28, 28] x) => (float[8, 64, 28, 28] y)"
        text = f"{ends} {{ a = Conv <{same}> (x, w, b) {ACTIVATIONS[recipe]} y = Conv <{same}> (z, u) }}"
        shapes = {"w": (64, 64, 3, 3), "b": (64,), "u": (64, 64, 3, 3), "s": (64, 1, 1)}
    else:
        ends = "(float[1576, 64] x) => (float[1576, 64] y)"
        text = f"{ends} {{ a = Gemm(x, w, b) {ACTIVATIONS[recipe]} y = Gemm(z, u) }}"
        shapes = {"w": (64, 64), "b": (64,), "u": (64, 64), "s": (64,)}
    _, before, after = rewritten(text, shapes, recipe, judge, tmp_path)
    assert before.kernels - after.kernels == 1
    assert after.bytes < before.bytes and after.predicted_us < before.predicted_us


@pytest.mark.parametrize(
    ("channels", "size", "form", "fewer", "share"), [(96, 56, "conv", 4, 0.7), (384, 14, "tokens", 2, 0.8)]
)
def test_convnext_blocks(
    channels: int, size: int, form: str, fewer: int, share: float, judge: Judge, tmp_path: Path
) -> None:
    shapes: dict[str, tuple[int, ...]] = {"w0": (channels, channels, 1, 1)}
    blocks, data = "", "i"
    for each in "pq":
        blocks += (
            f"{each}c = Conv <group = {channels}, pads = [3, 3, 3, 3]> ({data}, {each}d) {each}t = {LAST} ({each}c) "
            f"{each}l = LayerNormalization({each}t, {each}s) {each}m = MatMul({each}l, {each}w) "
            f"{each}a = Add({each}m, {each}b) {each}e = Sigmoid({each}a) {each}g = Mul({each}a, {each}e) "
            f"{each}n = MatMul({each}g, {each}v) {each}o = Add({each}n, {each}h) {each}f = {FIRST} ({each}o) "
            f"{each}k = Mul({each}f, {each}z) {each}y = Add({data}, {each}k) "
        )
        shapes |= {f"{each}d": (channels, 1, 7, 7), f"{each}w": (channels, 4 * channels), f"{each}b": (4 * channels,)}
        shapes |= {f"{each}v": (4 * channels, channels), f"{each}z": (channels, 1, 1)}
        shapes |= {f"{each}{name}": (channels,) for name in "sh"}
        data = f"{each}y"
    ends = f"(float[8, {channels}, {size}, {size}] x) => (float[8, {channels}, {size}, {size}] y)"
    text = f"{ends} {{ i = Conv(x, w0) {blocks} y = Conv(qy, w0) }}"
    result, before, after = rewritten(text, shapes, "layer-scale,rank-4-linear", judge, tmp_path)
    scale, linear = (next(s for s in result.artifact.steps if s.name == n) for n in ("layer-scale", "rank-4-linear"))
    assert (scale.changes, linear.changes) == (2, 2)
    assert {region.choice for region in linear.regions if region.kept} == {form}
    assert before.kernels - after.kernels == fewer
    assert after.bytes < share * before.bytes


def test_a_spelled_out_layer_norm_moves_no_more_than_before(judge: Judge, tmp_path: Path) -> None:
    text = (
        "(float[8, 128, 256] x) => (float[8, 128, 256] y) <float p = {2}, float e = {0.00001}> "
        "{ i = MatMul(x, w) m = ReduceMean <axes = [-1]> (i) d = Sub(i, m) q = Pow(d, p) "
        "v = ReduceMean <axes = [-1]> (q) a = Add(v, e) s = Sqrt(a) n = Div(d, s) k = Mul(n, g) l = Add(k, b) "
        "f = MatMul(l, u) r = Relu(f) h = MatMul(r, t) o = Add(h, i) y = MatMul(o, w) }"
    )
    shapes = {"w": (256, 256), "g": (256,), "b": (256,), "u": (256, 1024), "t": (1024, 256)}
    result, before, after = rewritten(text, shapes, "decomposed-layer-norm", judge, tmp_path)
    assert "LayerNormalization" in {node.op_type for node in result.artifact.model.graph}
    assert after.kernels <= before.kernels and after.bytes <= before.bytes
