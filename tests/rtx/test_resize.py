"""Antialiased Resize, which the compiler refuses, built by TensorRT for RTX as products."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest

import trtopt
from trtopt.errors import InvalidModelError

pytest.importorskip("tensorrt_rtx", reason="needs TensorRT for RTX")


def network(folder: Path, dims: str) -> Path:
    proto = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["": 21]> g (float[N, 3, {dims}] x) => (y)
        <int64[2] s = {{24, 20}}> {{
            r = Resize <antialias = 1, mode = "cubic", axes = [2, 3]> (x, , , s)
            y = Conv (r, w)
        }}""")
    weight = np.random.default_rng(0).standard_normal((8, 3, 3, 3)).astype(np.float32)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    onnx.save(proto, folder / "m.onnx")
    return folder / "m.onnx"


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_an_antialiased_resize_builds_with_a_dynamic_batch(precision: str, tmp_path: Path) -> None:
    report = trtopt.build(network(tmp_path, "64, 48"), precision=precision, opt_shapes=[{"x": (4, 3, 64, 48)}])
    assert report.engine is not None and report.accuracy is not None
    assert report.accuracy.outputs["y"].sqnr_db > (100 if precision == "fp32" else 55)
    assert [(step.name, step.changes) for step in report.steps if "antialiased" in step.name] == [
        ("antialiased-resize", 1)
    ]


def test_one_of_unknown_sizes_is_refused_with_the_node(tmp_path: Path) -> None:
    path = network(tmp_path, "H, W")
    shapes = {"min_shapes": [{"x": (1, 3, 32, 32)}], "max_shapes": [{"x": (1, 3, 64, 64)}]}
    with pytest.raises(InvalidModelError, match="antialias = 1") as caught:
        trtopt.build(path, precision="fp16", **shapes)
    assert "(Resize)" in caught.value.where and "--shapes" in caught.value.remedy
    assert trtopt.build(path, precision="fp16", opt_shapes=[{"x": (1, 3, 64, 64)}]).engine is not None
