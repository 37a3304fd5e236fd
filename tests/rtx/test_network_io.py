"""``--io`` with the real compiler: layouts it takes, and the kernels they save."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest

from trtopt import build, optimize
from trtopt.report.schema.build import BuildReport

pytest.importorskip("tensorrt_rtx", reason="TensorRT for RTX is not installed")

PIXELS = np.random.default_rng(3).integers(0, 256, (2, 3, 64, 64)).astype(np.float32)


@pytest.fixture
def stem(tmp_path: Path) -> Path:
    """The first convolution of a network for images."""
    text = (
        '<ir_version: 8, opset_import: ["" : 17]> g (float[N, 3, 64, 64] x) => (float[N, 64, 32, 32] y) '
        "{ c = Conv <pads = [3, 3, 3, 3], strides = [2, 2]> (x, w, b) y = Relu(c) }"
    )
    model = onnx.parser.parse_model(text)
    rng = np.random.default_rng(0)
    for name, shape in {"w": (64, 3, 7, 7), "b": (64,)}.items():
        array = rng.standard_normal(shape, dtype=np.float32) * 0.1
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    onnx.save(model, tmp_path / "stem.onnx")
    return tmp_path / "stem.onnx"


def run(model: Path, *io: str, **options: Any) -> BuildReport:
    values = {"gpu": "L4", "opt_shapes": {"x": (8, 3, 64, 64)}, "calib": {"x": PIXELS}, **options}
    return build(model, output=model.with_suffix(".engine"), io=io, **values)


def kernels(report: BuildReport) -> int:
    assert report.engine is not None
    return report.engine.kernels


def test_channels_last_saves_the_layout_kernels(stem: Path) -> None:
    assert kernels(run(stem)) == 3
    assert kernels(run(stem, "x:fp16:hwc", "y:fp16:hwc")) == 2
    found = run(stem, "x:fp16:hwc4", "y:fp16:hwc")
    assert kernels(found) == 1
    assert found.accuracy is not None and found.accuracy.outputs["y"].sqnr_db > 60
    assert [item.layout for item in found.network_io] == ["hwc4", "hwc"]
    assert found.engine is not None and "NHWC" in found.engine.layers[0].inputs[0].format
    assert found.engine.profiles[0]["x"]["opt"] == [8, 4, 64, 64]


@pytest.mark.parametrize(
    ("precision", "io"),
    [
        ("fp16", "x:uint8:hwc4"),
        ("bf16", "x:bf16:hwc8"),
        ("int8", "x:fp16:hwc4"),
        ("fp16", "y:fp32:hwc4"),
        *(
            pytest.param(precision, io, marks=pytest.mark.long)
            for precision, io in (
                ("fp16", "x:uint8:hwc"),
                ("fp16", "x:uint8:hwc8"),
                ("fp16", "x:fp16:hwc8"),
                ("fp16", "x:fp32:hwc4"),
                ("fp16", "x:fp32:hwc8"),
                ("fp32", "x:fp16:chw"),
                ("fp16", "y:bf16:hwc8"),
            )
        ),
    ],
)
def test_the_compiler_takes_every_layout(stem: Path, precision: str, io: str) -> None:
    report = run(stem, io, precision=precision)
    assert kernels(report) >= 1
    assert report.accuracy is not None
    assert report.accuracy.outputs["y"].sqnr_db > (30 if precision in ("int8", "bf16") else 55)


def test_a_batch_may_vary(stem: Path) -> None:
    shapes = {f"{key}_shapes": {"x": (batch, 3, 64, 64)} for key, batch in (("min", 1), ("opt", 8), ("max", 16))}
    report = run(stem, "x:fp16:hwc4", "y:fp16:hwc", **shapes)
    assert kernels(report) == 1
    assert report.engine is not None and report.engine.profiles[0]["x"]["max"] == [16, 4, 64, 64]


def test_an_optimized_model_has_the_inputs_asked_for(stem: Path) -> None:
    path = stem.with_name("out.onnx")
    optimize(stem, output=path, io=("x:uint8:hwc4", "y:fp16:chw"), precision="fp16", calib={"x": PIXELS})
    graph = onnx.load(path).graph
    (x,), (y,) = graph.input, graph.output
    assert x.type.tensor_type.elem_type == onnx.TensorProto.UINT8
    assert x.type.tensor_type.shape.dim[1].dim_value == 4
    assert y.type.tensor_type.elem_type == onnx.TensorProto.FLOAT16
    assert [node.op_type for node in graph.node] == ["Cast", "Conv", "Relu"]


def test_tensors_are_compared_in_the_original_layout(stem: Path) -> None:
    report = run(stem, "x:fp16:hwc4", compare_tensors=True)
    assert report.accuracy is not None and report.accuracy.tensors is not None
    assert "y" in report.accuracy.tensors and report.accuracy.first_bad is None
