"""``--preprocess-in-engine``: the model that takes bytes against the pipeline before the model that takes floats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest

import trtopt
from trtopt.errors import UsageError
from trtopt.graph.artifact import ModelArtifact
from trtopt.pipeline.pixels import in_model, said
from trtopt.precision.fp16.pixels import pixel_nodes
from trtopt.source.onnx_file import load
from trtopt.support.ort_session import OrtSession

SIDE = 12


def network(dtype: str = "float", layout: str = "nchw", pads: int = 1, channels: int = 3) -> onnx.ModelProto:
    dims = f"N, {channels}, H, W" if layout == "nchw" else f"N, H, W, {channels}"
    first = "x" if layout == "nchw" else "turned"
    turn = "" if layout == "nchw" else "turned = Transpose <perm = [0, 3, 1, 2]> (x)"
    rng = np.random.default_rng(0)
    proto = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["": 21]>
        g ({dtype}[{dims}] x) => ({dtype}[N, 4] y) {{
            {turn} a = Conv <pads = [{pads}, {pads}, {pads}, {pads}]> ({first}, w, b) r = Relu (a)
            p = GlobalAveragePool (r) y = Flatten (p)
        }}""")
    kind = np.float16 if dtype == "float16" else np.float32
    for name, shape in (("w", (4, channels, 3, 3)), ("b", (4,))):
        proto.graph.initializer.append(
            onnx.numpy_helper.from_array((rng.standard_normal(shape) / 3).astype(kind), name)
        )
    return proto


def artifact(folder: Path, **form: Any) -> ModelArtifact:
    onnx.save(network(**form), folder / "m.onnx")
    return load(folder / "m.onnx")


def run(model: ir.Model, x: np.ndarray) -> np.ndarray:
    with OrtSession(model) as session:
        return session.run({"x": x})[0]


@pytest.mark.parametrize(
    "text",
    [
        "imagenet,crop=12",
        "clip,crop=12",
        "yolo,letterbox=12",
        "imagenet,crop=12,color=bgr",
        "scale=1,mean=104,117,123,color=bgr,crop=12",
        "scale=127.5,mean=1,crop=12",
    ],
)
@pytest.mark.parametrize("form", [{}, {"layout": "nhwc"}, {"dtype": "float16"}, {"pads": 0}])
def test_the_engine_computes_what_the_pipeline_computes(text: str, form: dict[str, Any], tmp_path: Path) -> None:
    """The padding of the first convolution is that of the network: zeros behind the normalization."""
    before = artifact(tmp_path, **form)
    how = said(text, before.inputs)
    after, left = in_model(before, how)
    pixels = np.random.default_rng(1).integers(0, 256, (3, SIDE, SIDE, 3), np.uint8)
    channels = pixels[..., ::-1] if how.color == "bgr" else pixels
    values = (channels / np.float64(how.scale) - np.array(how.mean)) / np.array(how.std)
    values = values.transpose(0, 3, 1, 2) if how.layout == "nchw" else values
    outside = run(before.model, values.astype(how.dtype))
    inside = run(after.model, pixels)
    np.testing.assert_allclose(inside, outside, atol=1e-5 * (50 if form.get("dtype") else 1), rtol=1e-5)
    (spec,) = after.inputs
    assert spec.dtype == np.uint8 and spec.shape == ("N", "H", "W", 3)
    assert (left.layout, left.color, left.dtype, left.size) == ("nhwc", "rgb", "uint8", (SIDE, SIDE))
    assert left.affine()[0].tolist() == [1, 1, 1] and not left.affine()[1].any()


def test_pictures_without_a_batch(tmp_path: Path) -> None:
    """As torchvision's detectors take them."""
    proto = network()
    proto.graph.node[0].input[0] = "whole"
    proto.graph.node.insert(0, onnx.helper.make_node("Unsqueeze", ["x", "zero"], ["whole"]))
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.array([0]), "zero"))
    del proto.graph.input[0].type.tensor_type.shape.dim[0]
    onnx.save(proto, tmp_path / "m.onnx")
    before = load(tmp_path / "m.onnx")
    after, left = in_model(before, said("imagenet,color=bgr", before.inputs, (SIDE, SIDE + 4, 3)))
    assert after.inputs[0].shape == ("H", "W", 3) and left.size == (SIDE, SIDE + 4)
    pixels = np.random.default_rng(1).integers(0, 256, (SIDE, SIDE + 4, 3), np.uint8)
    values = (pixels[..., ::-1] / 255 - np.array([0.406, 0.456, 0.485])) / np.array([0.225, 0.224, 0.229])
    outside = run(before.model, values.transpose(2, 0, 1).astype(np.float32))
    np.testing.assert_allclose(run(after.model, pixels), outside, atol=1e-5, rtol=1e-5)


def test_gray_pictures(tmp_path: Path) -> None:
    before = artifact(tmp_path, channels=1)
    after, left = in_model(before, said("mean=0.1307,std=0.3081,crop=12", before.inputs))
    pixels = np.random.default_rng(1).integers(0, 256, (1, SIDE, SIDE, 1), np.uint8)
    outside = run(before.model, ((pixels / 255 - 0.1307) / 0.3081).transpose(0, 3, 1, 2).astype(np.float32))
    np.testing.assert_allclose(run(after.model, pixels), outside, atol=1e-5)
    assert left.color == "gray"


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_the_size_asked_for_is_that_of_the_pixels(layout: str, tmp_path: Path) -> None:
    pillow = pytest.importorskip("PIL.Image", reason="pictures are read by Pillow: pip install 'trtopt[images]'")
    before = artifact(tmp_path, layout=layout)
    assert said("yolo", before.inputs, (1, 16, 24, 3)).size == (16, 24)
    options: dict[str, Any] = {"preprocess_in_engine": True, "opt_shapes": [{"x": (1, 16, 24, 3)}], "recipes": "none"}
    (tmp_path / "pictures").mkdir()
    pillow.fromarray(np.zeros((9, 9, 3), np.uint8)).save(tmp_path / "pictures/a.png")
    for more in ({"preprocess": "yolo"}, {"calib": tmp_path / "pictures"}):
        trtopt.optimize(tmp_path / "m.onnx", output=str(tmp_path / "o.onnx"), gpu="L4", **options, **more)
        assert load(tmp_path / "o.onnx").inputs[0].shape == (1, 16, 24, 3)


def test_what_is_left_to_the_caller_is_said(tmp_path: Path) -> None:
    before = artifact(tmp_path)
    after, _ = in_model(before, said("imagenet,resize=14,crop=12", before.inputs))
    inside, _, outside = after.steps[-1].details[0].partition("; engines ")
    assert "scale=255" in inside and "crop" not in inside and "resize=14,crop=12x12 before" in outside


def test_what_cannot_go_into_the_engine_is_refused(tmp_path: Path) -> None:
    (tmp_path / "p.py").write_text("def f(picture):\n    return picture\n")
    before = artifact(tmp_path)
    with pytest.raises(UsageError, match="function cannot be put into an engine"):
        said(f"{tmp_path / 'p.py'}:f", before.inputs)
    after, left = in_model(before, said("imagenet,crop=12", before.inputs))
    with pytest.raises(UsageError, match="already"):
        in_model(after, left)
    two = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21]>
        g (float[1, 3, 8, 8] a, float[1, 3, 8, 8] b) => (y) { y = Add (a, b) }"""
    )
    onnx.save(two, tmp_path / "two.onnx")
    with pytest.raises(UsageError, match="Several inputs take pictures: a, b"):
        said("imagenet", load(tmp_path / "two.onnx").inputs)


def test_what_normalizes_bytes_stays_fp32(tmp_path: Path) -> None:
    before = artifact(tmp_path)
    after, _ = in_model(before, said("imagenet,crop=12,color=bgr", before.inputs))
    kept = {node.op_type for node in after.model.graph if node.name in pixel_nodes(after.model)}
    assert kept == {"Cast", "Gather", "Mul", "Add", "Transpose"}
    assert not pixel_nodes(before.model)


def test_a_run_takes_bytes_as_samples(tmp_path: Path) -> None:
    """Calibration and verification see raw pixels; the reference is the pipeline in FP32."""
    artifact(tmp_path)
    pixels = np.random.default_rng(1).integers(0, 256, (6, SIDE, SIDE, 3), np.uint8)
    options: dict[str, Any] = {"preprocess": "imagenet,crop=12", "preprocess_in_engine": True, "gpu": "L4"}
    options |= {"opt_shapes": [{"x": (2, SIDE, SIDE, 3)}], "recipes": "none", "backend": "tensorrt"}
    out = tmp_path / "o.onnx"
    report = trtopt.optimize(tmp_path / "m.onnx", precision="fp16", output=str(out), calib={"x": pixels}, **options)
    assert report.accuracy is not None and report.accuracy.outputs["y"].sqnr_db > 55
    assert any("feed x uint8 pixels" in warning for warning in report.warnings)
    (made,) = load(out).inputs
    assert made.dtype == np.uint8 and made.shape[1:] == (SIDE, SIDE, 3)
    with pytest.raises(UsageError, match="is to take pixels"):
        trtopt.optimize(tmp_path / "m.onnx", output=str(out), calib={"x": pixels}, io=["x:uint8:hwc"], **options)
    del options["preprocess"], options["opt_shapes"]
    with pytest.raises(UsageError, match="how pixels become the input"):
        trtopt.optimize(tmp_path / "m.onnx", output=str(out), **options)
