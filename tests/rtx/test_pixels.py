"""An engine that takes bytes, built by TensorRT for RTX: as many kernels as one that takes floats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest

import trtopt

pytest.importorskip("tensorrt_rtx", reason="needs TensorRT for RTX")


def stem(folder: Path, channels: int) -> Path:
    """The first layers of a ResNet."""
    proto = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["": 21]>
      g (float[N, {channels}, 64, 64] x) => (y) {{
        a = Conv <pads = [3, 3, 3, 3], strides = [2, 2]> (x, w) r = Relu (a)
        p = MaxPool <kernel_shape = [3, 3], strides = [2, 2], pads = [1, 1, 1, 1]> (r)
        b = Conv <pads = [1, 1, 1, 1]> (p, v) s = Relu (b) y = GlobalAveragePool (s)
      }}""")
    rng = np.random.default_rng(0)
    for name, shape in (("w", (32, channels, 7, 7)), ("v", (32, 32, 3, 3))):
        proto.graph.initializer.append(
            onnx.numpy_helper.from_array((rng.standard_normal(shape) / 12).astype(np.float32), name)
        )
    onnx.save(proto, folder / "m.onnx")
    return folder / "m.onnx"


@pytest.mark.parametrize(
    ("text", "channels"),
    [("imagenet,crop=64", 3), ("yolo,letterbox=64,color=bgr", 3), ("mean=0.1307,std=0.3081,crop=64", 1)],
)
@pytest.mark.parametrize("precision", ["fp16", "int8"])
def test_bytes_cost_no_kernel(text: str, channels: int, precision: str, tmp_path: Path) -> None:
    """In colour, blue first, and gray; the first convolution pads with zeros, not with the mean."""
    path = stem(tmp_path, channels)
    options: dict[str, Any] = {"precision": precision, "gpu": "L4", "recipes": "none"}
    floats = trtopt.build(path, opt_shapes=[{"x": (2, channels, 64, 64)}], **options)
    pixels = np.random.default_rng(1).integers(0, 256, (4, 64, 64, channels), np.uint8)
    how: dict[str, Any] = {"preprocess": text, "preprocess_in_engine": True, "calib": {"x": pixels}}
    bytes_ = trtopt.build(path, opt_shapes=[{"x": (2, 64, 64, channels)}], **how, **options)
    assert floats.shipped is not None and bytes_.shipped is not None and bytes_.accuracy is not None
    assert bytes_.shipped.kernels <= floats.shipped.kernels + 1
    assert bytes_.shipped.bytes < floats.shipped.bytes
    assert bytes_.accuracy.outputs["y"].sqnr_db > (55 if precision == "fp16" else 25)
