"""A token taken behind an encoder is taken before its last block: [N, 128, 256], 4 heads, two blocks."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest

from trtopt.engine.backend import TENSORRT_RTX
from trtopt.graph.artifact import ModelArtifact
from trtopt.hardware.spec import find_gpu
from trtopt.judge.judges import judge_for
from trtopt.report.schema.steps import RegionRecord
from trtopt.rewrite.driver import Rewritten, run
from trtopt.rewrite.protocol import Target
from trtopt.rewrite.sweeps import Judging
from trtopt.source.onnx_file import load
from trtopt.support.precision import Precision

pytest.importorskip("tensorrt_rtx", reason="TensorRT for RTX is not installed")

_SPLIT = "{0}0 = MatMul(n, w{0}) {0}1 = Reshape({0}0, heads) {0}2 = Transpose <perm = [0, 2, {1}]> ({0}1)"
_BLOCK = (
    "n = LayerNormalization(x, scale) "
    + " ".join(_SPLIT.format(*each) for each in (("q", "1, 3"), ("k", "3, 1"), ("v", "1, 3")))
    + " s = MatMul(q2, k2) t = Mul(s, size) p = Softmax <axis = -1> (t) o0 = MatMul(p, v2) "
    "o1 = Transpose <perm = [0, 2, 1, 3]> (o0) o2 = Reshape(o1, flat) o3 = MatMul(o2, wo) r = Add(x, o3) "
    "m0 = LayerNormalization(r, scale) m1 = MatMul(m0, wu) m2 = Gelu(m1) m3 = MatMul(m2, wd) y = Add(r, m3)"
)
_SHAPES = {**{f"w{name}": (256, 256) for name in "qkvo"}, "wu": (256, 1024), "wd": (1024, 256), "scale": (256,)}


def encoder(folder: Path, batch: int) -> ModelArtifact:
    """Two blocks, and the first token of what they make."""
    first = re.sub(r"\b(x|y|n|r|s|t|p|[qkv][0-2]|o[0-3]|m[0-3])\b", r"\1_1", _BLOCK)
    second = re.sub(r"\bx\b", "y_1", _BLOCK)
    model = onnx.parser.parse_model(
        f'<ir_version: 9, opset_import: ["" : 20]> g (float[{batch}, 128, 256] x_1) => (float[{batch}, 256] z) '
        "<int64[4] heads = {0, 0, 4, 64}, int64[3] flat = {0, 0, 256}, float size = {0.125}, int64 token = {0}> "
        f"{{ {first} {second} z = Gather <axis = 1> (y, token) }}"
    )
    rng = np.random.default_rng(0)
    for name, dims in _SHAPES.items():
        array = rng.standard_normal(dims, dtype=np.float32) * 0.06 + (name == "scale")
        model.graph.initializer.append(onnx.numpy_helper.from_array(array.astype(np.float32), name))
    onnx.save(model, folder / "m.onnx")
    return load(folder / "m.onnx")


def judged(artifact: ModelArtifact) -> tuple[Rewritten, tuple[RegionRecord, ...]]:
    gpu = find_gpu("L4")
    with judge_for(TENSORRT_RTX, gpu, Precision.FP16) as judge:
        target, judging = Target("tensorrt-rtx", "fp16"), Judging(judge, ())
        found = run(artifact, recipes="late-selection", strict=True, target=target, judging=judging)
    return found, tuple(region for step in found.artifact.steps for region in step.regions)


@pytest.mark.parametrize(("batch", "choice"), [(8, "queries and behind attention"), (1, "behind attention")])
def test_the_last_block_is_computed_for_one_token(batch: int, choice: str, tmp_path: Path) -> None:
    """The queries' projection becomes a kernel of its own, which a small batch does not make up for."""
    found, regions = judged(encoder(tmp_path, batch))
    (region,) = (region for region in regions if region.kept)
    assert region.choice == choice
    assert region.before and region.after and found.before and found.after
    assert region.after.bytes < region.before.bytes
    assert found.after.bytes < found.before.bytes
    assert found.after.predicted_us < 0.98 * found.before.predicted_us
