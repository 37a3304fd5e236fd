"""What is judged is what ships: open axes and profiles in the whole network and in its pieces."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import numpy_helper
from shape_networks import shape_network

import trtopt
from trtopt.report.schema.build import BuildReport

pytest.importorskip("tensorrt_rtx")


def net(text: str, **weights: tuple[int, ...]) -> onnx.ModelProto:
    found = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]>\n{text}')
    rng = np.random.default_rng(0)
    for name, shape in weights.items():
        array = rng.uniform(-1, 1, shape) * (3 / np.prod(shape[1:] or (1,))) ** 0.5
        found.graph.initializer.append(numpy_helper.from_array(array.astype(np.float32), name))
    for node in found.graph.node:
        node.name = node.output[0]
    return found


def attention() -> onnx.ModelProto:
    """Attention with a mask, which a compiler fuses at a fixed batch only, and shapes that are computed."""
    heads = "".join(
        f"{n}p = MatMul(x, w{n}) {n}r = Reshape({n}p, split) {n} = Transpose <perm = [0, 2, 1, 3]> ({n}r) "
        for n in "qkv"
    )
    return net(
        "g (float[N, 32, 64] x, bool[N, 32] mask) => (float[N, 32, 64] y) "
        "<int64[2] tail = {4, 16}, int64[1] rows = {32}, int64[2] middle = {1, 2}, float none = {0}, "
        "float off = {-9999}>"
        "{ sh = Shape <end = 1> (x) split = Concat <axis = 0> (sh, rows, tail) "
        f"{heads} kt = Transpose <perm = [0, 1, 3, 2]> (k) s = MatMul(q, kt) me = Unsqueeze(mask, middle) "
        "mw = Where(me, none, off) sm = Add(s, mw) p = Softmax <axis = -1> (sm) "
        "nan = IsNaN(p) pz = Where(nan, none, p) "
        "o = MatMul(pz, v) ot = Transpose <perm = [0, 2, 1, 3]> (o) sx = Shape(x) or_ = Reshape(ot, sx) "
        "pr = MatMul(or_, wo) y = Add(pr, x) }",
        **dict.fromkeys(("wq", "wk", "wv", "wo"), (64, 64)),
    )


def yolo() -> onnx.ModelProto:
    """A detector's neck: SiLU, concatenations and a resized map."""
    layers, weights = [], {}

    def conv(name: str, source: str, inputs: int, outputs: int, window: int = 3, stride: int = 1) -> None:
        pads = window // 2
        layers.append(
            f"c{name} = Conv <pads = [{pads},{pads},{pads},{pads}], strides = [{stride},{stride}]> ({source}, w{name}) "
            f"s{name} = Sigmoid(c{name}) {name} = Mul(c{name}, s{name})"
        )
        weights[f"w{name}"] = (outputs, inputs, window, window)

    conv("a", "x", 3, 16, stride=2)
    conv("b", "a", 16, 32, stride=2)
    conv("d", "b", 32, 32, 1)
    layers.append("d1, d2 = Split <axis = 1, num_outputs = 2> (d)")
    conv("e", "d2", 16, 16)
    conv("f", "e", 16, 16)
    layers.append("g0 = Add(f, d2) g = Concat <axis = 1> (d1, d2, g0)")
    conv("h", "g", 48, 32, 1)
    conv("i", "h", 32, 64, stride=2)
    layers.append('iu = Resize <mode = "nearest"> (i, , scales) j = Concat <axis = 1> (iu, h)')
    conv("k", "j", 96, 32, 1)
    conv("l", "k", 32, 32)
    layers.append("y = Conv (l, wy)")
    weights["wy"] = (24, 32, 1, 1)
    text = "g (float[N, 3, 160, 160] x) => (float[N, 24, 40, 40] y) <float[4] scales = {1, 1, 2, 2}> "
    return net(text + f"{{ {' '.join(layers)} }}", **weights)


def built(tmp_path: Path, model: onnx.ModelProto, **options: Any) -> BuildReport:
    return trtopt.build(
        model, output=tmp_path / "m.engine", gpu="L4", backend="tensorrt-rtx", cache_dir=str(tmp_path), **options
    )


def predicted(report: BuildReport) -> float:
    assert report.analysis is not None
    return sum(row.predicted_us for row in report.analysis.layers)


def test_the_judged_network_is_the_engine(tmp_path: Path) -> None:
    shapes = [{"x": (n, 32, 64), "mask": (n, 32)} for n in (1, 8, 32)]
    low, best, high = ([item] for item in shapes)
    report = built(tmp_path, attention(), precision="fp16", min_shapes=low, opt_shapes=best, max_shapes=high)
    judged, engine = report.rewriting.after, report.engine
    assert judged is not None and engine is not None
    waits = sum(layer.type in ("signal", "wait") for layer in engine.layers)
    assert (judged.kernels, judged.syncs) == (engine.kernels, waits)
    assert judged.predicted_us == pytest.approx(predicted(report), rel=1e-12)


def test_no_detector_becomes_slower_in_int8(tmp_path: Path) -> None:
    low, best, high = ([{"x": (n, 3, 160, 160)}] for n in (1, 4, 8))
    report = built(
        tmp_path, yolo(), precision="int8", allow_accuracy_loss=True, min_shapes=low, opt_shapes=best, max_shapes=high
    )
    assert report.sixteen_bit is not None
    assert predicted(report) <= report.sixteen_bit.predicted_us * 1.001
    for record in report.guard:
        if record.after_us is not None and record.before_us is not None and record.kernels and record.bytes:
            assert min(record.after_us, *record.kernels, *record.bytes) > 0
            assert not record.kept or record.after_us < record.before_us


def test_kernels_are_those_that_ship_where_nothing_tells_the_sizes(tmp_path: Path) -> None:
    """Sizes are then those of a static build, whose kernels are others."""
    path = tmp_path / "net.onnx"
    onnx.save(shape_network(1), path)
    shapes = {f"{kind}_shapes": ({"x": (n, s, 8)},) for kind, n, s in (("min", 1, 2), ("opt", 3, 5), ("max", 4, 8))}
    report = trtopt.build(path, precision="fp16", no_cache=True, cache_dir=str(tmp_path), **shapes)
    assert report.dynamic_cost is not None and report.dynamic_cost.kernels
    assert report.rewriting.after == report.shipped
