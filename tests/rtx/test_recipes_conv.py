"""What the recipes around convolutions change in engines of TensorRT for RTX: FP16, batch 8, judged by the compiler."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
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
from trtopt.rewrite.driver import run
from trtopt.rewrite.protocol import Target
from trtopt.rewrite.sweeps import Judging
from trtopt.source.onnx_file import load
from trtopt.support.precision import Precision

pytest.importorskip("tensorrt_rtx", reason="TensorRT for RTX is not installed")

SAME = "pads = [1, 1, 1, 1]"
TWICE = "kernel_shape = [2, 2], strides = [2, 2]"


@dataclass(frozen=True)
class Net:
    """``middle`` makes ``z`` from ``a``, 64 channels at 28 x 28, between two convolutions.

    Attributes:
        recipe: The recipe tried.
        middle: Nodes as ONNX text.
        weights: Shapes of random weights.
        kernels: By how many kernels fewer the engine has.
        values: Constants.
        channels: Channels of ``z``.
    """

    recipe: str
    middle: str
    weights: dict[str, tuple[int, ...]]
    kernels: int
    values: dict[str, np.ndarray] = field(default_factory=dict)
    channels: int = 64


NORM = {"g": (64,), "b": (64,), "m": (64,), "v": (64,)}
CONV = {"w": (64, 64, 3, 3), "s": (64,)}
POINT = {"w": (64, 64, 1, 1), "s": (64,)}
C2F = (
    "c = Conv(a, w, s) i = Sigmoid(c) d = Mul(c, i) o, p = Split <axis = 1> (d, k) "
    f"q = Conv <{SAME}> (p, u) r = Conv <{SAME}> (q, u) t = Add(p, r) z = Concat <axis = 1> (o, p, t)"
)

NETS = {
    "c2f": Net(
        "split-after-conv", C2F, {**POINT, "u": (32, 32, 3, 3)}, 1, {"k": np.array([32, 32], np.int64)}, channels=96
    ),
    "mixed-kernels": Net(
        "joined-convs",
        "o, p = Split <axis = 1> (a, k) c = Conv <group = 32, pads = [1, 1, 1, 1]> (o, u) "
        "d = Conv <group = 32, pads = [2, 2, 2, 2]> (p, t) j = Concat <axis = 1> (c, d) z = Relu(j)",
        {"u": (32, 1, 3, 3), "t": (32, 1, 5, 5)},
        4,
        {"k": np.array([32, 32], np.int64)},
    ),
    "parted-1x1": Net(
        "joined-convs",
        "o, p = Split <axis = 1> (a, k) c = Conv(o, u) d = Conv(p, t) j = Concat <axis = 1> (c, d) z = Relu(j)",
        {"u": (32, 32, 1, 1), "t": (32, 32, 1, 1)},
        4,
        {"k": np.array([32, 32], np.int64)},
    ),
    "repvgg": Net(
        "repvgg-branches",
        f"c = Conv <{SAME}> (a, w, s) d = Conv(a, u) n = BatchNormalization(a, g, b, m, v) "
        "f = Add(c, d) h = Add(f, n) z = Relu(h)",
        {**CONV, "u": (64, 64, 1, 1), **NORM},
        2,
    ),
    "1x1-chain": Net("conv-1x1-chain", "c = Conv(a, w, s) z = Conv(c, u)", {**POINT, "u": (64, 64, 1, 1)}, 1),
    "squeeze-and-excitation": Net(
        "global-average-pool",
        "p = GlobalAveragePool(a) c = Conv(p, w, s) d = Sigmoid(c) z = Mul(a, d)",
        POINT,
        1,
    ),
    "pad-max-pool": Net(
        "pad-conv",
        "p = Pad(a, k) z = MaxPool <kernel_shape = [3, 3], strides = [2, 2]> (p)",
        {},
        2,
        {"k": np.array([0, 0, 0, 0, 0, 0, 1, 1], np.int64)},
    ),
    "pad-average-pool": Net(
        "pad-conv",
        "p = Pad(a, k) z = AveragePool <kernel_shape = [3, 3], strides = [2, 2]> (p)",
        {},
        2,
        {"k": np.array([0, 0, 0, 0, 0, 0, 1, 1], np.int64)},
    ),
    "pad-conv": Net(
        "pad-conv",
        "p = Pad(a, k) z = Conv <strides = [2, 2]> (p, w, s)",
        CONV,
        0,
        {"k": np.array([0, 0, 0, 0, 0, 0, 1, 1], np.int64)},
    ),
    "resize": Net(
        "resize-conv",
        "r = Resize(a, , k) z = Conv(r, w, s)",
        {"w": (32, 64, 1, 1), "s": (32,)},
        0,
        {"k": np.array([1, 1, 2, 2], np.float32)},
        channels=32,
    ),
    "doubled": Net(
        "resize-conv",
        f"r = Resize(a, , k) z = Conv <{SAME}> (r, w, s)",
        CONV,
        1,
        {"k": np.array([1, 1, 2, 2], np.float32)},
    ),
    "average-pool": Net(
        "average-pool-conv",
        f"c = Conv(a, w, s) z = AveragePool <{TWICE}> (c)",
        {"w": (64, 64, 1, 1), "s": (64,)},
        0,
    ),
    "affine": Net(
        "constant-affine", f"c = Conv <{SAME}> (a, w, s) d = Mul(c, t) z = Relu(d)", {**CONV, "t": (64, 1, 1)}, 0
    ),
}


@pytest.fixture(scope="module")
def judge() -> Iterator[Judge]:
    gpu = find_gpu("L4")
    assert gpu is not None
    with judge_for(TENSORRT_RTX, gpu, Precision.FP16) as judge:
        yield judge


def text_of(net: Net) -> str:
    return (
        '<ir_version: 8, opset_import: ["" : 17]> g (float[8, 64, 28, 28] x) => (float[8, 64, H, W] y) '
        f"{{ c0 = Conv <{SAME}> (x, w0) a = Relu(c0) {net.middle} c1 = Conv <{SAME}> (z, w1) y = Relu(c1) }}"
    )


MIXER = (
    "g (float[8, 196, 512] x) => (float[8, 196, 512] y) { "
    "l = LayerNormalization(x, g, g) t = Transpose <perm = [0, 2, 1]> (l) m = MatMul(t, w) n = Add(m, a) r = Relu(n) "
    "o = MatMul(r, v) p = Add(o, c) q = Transpose <perm = [0, 2, 1]> (p) e = Add(q, x) h = LayerNormalization(e, g, g) "
    "f = MatMul(h, u) y = Add(f, e) }"
)
MIXED = {"w": (196, 256), "a": (256,), "v": (256, 196), "c": (196,), "g": (512,), "u": (512, 512)}
STEM = "g (float[8, 3, 64, 64] x) => (float[8, 64, H, W] y) { c = Conv <%s> (x, w) r = Relu(c) y = Conv(r, v) }"
WHOLE = {
    "stem": (
        "strided-stem",
        STEM % "strides = [2, 2], pads = [3, 3, 3, 3]",
        {"w": (64, 3, 7, 7), "v": (64, 64, 3, 3)},
        0,
    ),
    "patches": ("strided-stem", STEM % "strides = [8, 8]", {"w": (64, 3, 8, 8), "v": (64, 64, 3, 3)}, 0),
    "mixer": ("token-mixing", MIXER, MIXED, 1),
    "gate": (
        "gated-conv",
        "g (float[8, 24, 56, 56] x) => (float[8, 144, 56, 56] y) { c = Conv(x, w) b = Relu(c) "
        "p = AveragePool <kernel_shape = [56, 56]> (b) d = Conv(p, q) s = Sigmoid(d) m = Mul(b, s) e = Conv(m, u) "
        "f = Conv(e, w) y = Relu(f) }",
        {"w": (144, 24, 1, 1), "q": (144, 144, 1, 1), "u": (24, 144, 1, 1)},
        -1,
    ),
    "large-map": (
        "global-average-pool",
        "g (float[8, 64, 56, 56] x) => (float[8, 64, 56, 56] y) { c = Conv(x, w) p = GlobalAveragePool(c) "
        "d = Conv(p, w) s = Sigmoid(d) m = Mul(c, s) y = Conv(m, w) }",
        {"w": (64, 64, 1, 1)},
        0,
    ),
}


@pytest.mark.parametrize("net", [pytest.param(net, id=name) for name, net in NETS.items()])
def test_the_engine_has_fewer_kernels_or_moves_less(net: Net, judge: Judge, tmp_path: Path) -> None:
    weights = {"w0": (64, 64, 3, 3), "w1": (64, net.channels, 3, 3), **net.weights}
    _gains(net.recipe, text_of(net), weights, net.kernels, judge, tmp_path, **net.values)


@pytest.mark.parametrize("name", WHOLE)
def test_a_whole_network_has_fewer_kernels_or_moves_less(name: str, judge: Judge, tmp_path: Path) -> None:
    recipe, graph, weights, kernels = WHOLE[name]
    _gains(recipe, f'<ir_version: 8, opset_import: ["" : 17]> {graph}', weights, kernels, judge, tmp_path)


def _gains(
    recipe: str,
    text: str,
    weights: dict[str, tuple[int, ...]],
    kernels: int,
    judge: Judge,
    folder: Path,
    **constants: np.ndarray,
) -> None:
    """Apply a recipe to a network, which it changes in one place, and compare what the engines cost."""
    model = onnx.parser.parse_model(text)
    rng = np.random.default_rng(0)
    for name, shape in weights.items():
        array = (rng.standard_normal(shape) * 0.05).astype(np.float32)
        constants[name] = np.abs(array) if name == "v" else array
    model.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in constants.items())
    onnx.save(model, folder / "m.onnx")
    target, judging = Target("tensorrt-rtx", "fp16"), Judging(judge, ())
    result = run(load(folder / "m.onnx"), recipes=recipe, strict=True, target=target, judging=judging)
    before, after = result.before, result.after
    assert isinstance(before, Cost) and isinstance(after, Cost)
    step = next(step for step in result.artifact.steps if step.name == recipe)
    assert step.changes == 1, step
    assert before.kernels - after.kernels == kernels, (before, after)
    assert after.bytes <= before.bytes and after.predicted_us <= before.predicted_us
