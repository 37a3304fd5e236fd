"""``--io``: what is read, what is refused, and what the graph becomes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest

from trtopt.engine.backend import TENSORRT_RTX
from trtopt.engine.request import ShapeProfile
from trtopt.errors import UsageError
from trtopt.graph import invariants
from trtopt.graph.artifact import ModelArtifact
from trtopt.judge.target import BuildTarget
from trtopt.pipeline.network_io import change, check
from trtopt.precision.fp16.cast_to_half import cast_to_half
from trtopt.precision.fp16.network_io import (
    IoRequest,
    apply_io,
    check_io,
    describe,
    fed_as_before,
    feeds_for,
    formats,
    parse_io,
)
from trtopt.precision.observe.samples import open_samples
from trtopt.precision.plan import FP16
from trtopt.source.onnx_file import load
from trtopt.support.ort_session import OrtSession

STEM = "c = Conv <pads = [1, 1, 1, 1]> (x, w) y = Relu(c)"
X, Y = "float[N, 3, 8, 8] x", "float[N, 4, 8, 8] y"


def model(folder: Path, nodes: str = STEM, inputs: str = X, outputs: str = Y) -> ModelArtifact:
    """A network whose weight ``w`` reads 3 channels; ``m`` and ``s`` hold one number for each of them."""
    text = f'<ir_version: 8, opset_import: ["" : 17]> g ({inputs}) => ({outputs}) {{ {nodes} }}'
    proto = onnx.parser.parse_model(text)
    rng = np.random.default_rng(1)
    for name, shape in {"w": (4, 3, 3, 3), "g": (3, 1, 3, 3), "m": (1, 3, 1, 1), "s": (3, 1, 1)}.items():
        array = rng.uniform(0.5, 1.5, shape).astype(np.float32)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    onnx.save(proto, folder / "m.onnx")
    return load(folder / "m.onnx")


def pixels(count: int = 2) -> np.ndarray:
    return np.random.default_rng(2).integers(0, 256, (count, 3, 8, 8)).astype(np.float32)


def ops(graph: ir.Graph) -> list[str]:
    return [node.op_type for node in graph]


def test_options_are_read() -> None:
    assert parse_io(["x:fp16:hwc4", "a:b:UINT8:HWC"]) == (
        IoRequest("x", "fp16", "hwc4"),
        IoRequest("a:b", "uint8", "hwc"),
    )
    assert formats(parse_io(["x:fp16:hwc4", "y:fp16:chw", "z:bf16:hwc8"])) == {"x": "HWC", "z": "HWC8"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x", "NAME:DTYPE:LAYOUT"),
        ("x:fp16", "NAME:DTYPE:LAYOUT"),
        (":fp16:hwc", "NAME:DTYPE:LAYOUT"),
        ("x:fp61:hwc", "did you mean fp16?"),
        ("x:fp16:hwc3", "did you mean hwc?"),
        ("x:half:hwc", "fp32, fp16, bf16"),
        ("x:bf16:hwc", "choose chw, hwc8"),
        ("x:int64:hwc", "choose chw"),
    ],
)
def test_what_is_no_option_is_refused(text: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_io([text])
    assert said in f"{caught.value.what} {caught.value.remedy}"
    assert text in caught.value.where


def test_a_tensor_is_named_once() -> None:
    with pytest.raises(UsageError, match="named twice"):
        parse_io(["x:fp16:hwc", "x:fp32:chw"])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("xx:fp16:hwc", "did you mean x?"),
        ("nothing:fp16:hwc", "its inputs and outputs are x, t, y"),
        ("t:fp16:chw", "only floating-point"),
        ("t:int64:chw", ""),
        ("y:uint8:chw", "choose fp32, fp16 or bf16"),
        ("x:int32:chw", "choose fp32, fp16, bf16 or uint8"),
        ("u:fp16:hwc", "rank 2"),
        ("y:fp16:hwc8", "no multiple of 8"),
        ("y:fp16:hwc4", ""),
        ("v:fp16:hwc4", "dynamic"),
    ],
)
def test_tensors_must_fit(tmp_path: Path, text: str, said: str) -> None:
    inputs = f"{X}, int64[N] t"
    nodes, outputs = f"{STEM} k = Neg(t)", f"{Y}, int64[N] k"
    if text.startswith(("u", "v")):
        inputs += ", float[N, C, 8, 8] r"
        nodes += " u = ReduceMean <axes = [2, 3], keepdims = 0> (y) v = Neg(r)"
        outputs += ", float[N, 4] u, float[N, C, 8, 8] v"
    artifact = model(tmp_path, nodes, inputs, outputs)
    if not said:
        check_io(artifact.model, parse_io([text]))
        return
    with pytest.raises(UsageError) as caught:
        check_io(artifact.model, parse_io([text]))
    assert said in f"{caught.value.what} {caught.value.remedy}"


def test_fp16_reaches_an_fp16_network_without_a_cast(tmp_path: Path) -> None:
    narrow = cast_to_half(model(tmp_path).model, FP16, ())
    assert ops(narrow.graph).count("Cast") == 2
    changed = apply_io(narrow, parse_io(["x:fp16:hwc", "y:fp16:chw"]))
    invariants.check(changed)
    assert ops(changed.graph) == ["Conv", "Relu"]
    assert [value.dtype for value in (*changed.graph.inputs, *changed.graph.outputs)] == [ir.DataType.FLOAT16] * 2
    assert ops(narrow.graph).count("Cast") == 2


def test_pixels_are_cast_once(tmp_path: Path) -> None:
    narrow = cast_to_half(model(tmp_path).model, FP16, ())
    changed = apply_io(narrow, parse_io(["x:uint8:hwc"]))
    assert ops(changed.graph).count("Cast") == 2
    assert changed.graph.inputs[0].dtype is ir.DataType.UINT8


NORMALIZED = (
    "h = Constant <value = float {0.5}> () a = Sub(x, m) b = Div(a, s) k = Mul(b, h) c = Conv(k, w) y = Relu(c)"
)
NETS = {
    "conv": STEM,
    "two-convs": "a = Conv(x, w) b = Conv(x, w) y = Add(a, b)",
    "normalized": NORMALIZED,
    "swapped": "a = Add(m, x) c = Conv(a, w) y = Relu(c)",
}


@pytest.mark.parametrize("layout", ["hwc", "hwc4", "hwc8"])
@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("dtype", ["fp32", "uint8"])
def test_the_function_stays(tmp_path: Path, net: str, layout: str, dtype: str) -> None:
    outputs = Y if net == "conv" else "float[N, 4, 6, 6] y"
    text = NETS[net]
    artifact = model(tmp_path, text, outputs=outputs)
    requests = parse_io([f"x:{dtype}:{layout}", "y:fp32:hwc"])
    changed = apply_io(artifact.model, requests)
    invariants.check(changed)
    as_before = fed_as_before(changed, artifact.model, requests)
    invariants.check(as_before, invariants.signature(artifact.model))
    feeds = {"x": pixels()}
    with (
        OrtSession(artifact.model) as reference,
        OrtSession(changed) as found,
        OrtSession(as_before) as compared,
    ):
        expected = reference.run(feeds)[0]
        given = feeds_for(feeds, changed, requests)
        channels = {"hwc": 3, "hwc4": 4, "hwc8": 8}[layout]
        assert given["x"].shape == (2, channels, 8, 8) and given["x"].dtype == np.dtype(
            f"{dtype}".replace("fp", "float")
        )
        bound = 1e-5 * np.abs(expected).max()
        np.testing.assert_allclose(found.run(given)[0], expected, atol=bound, rtol=0)
        np.testing.assert_allclose(compared.run(feeds)[0], expected, atol=bound, rtol=0)


def test_quantized_weights_get_channels_too(tmp_path: Path) -> None:
    nodes = (
        "q = QuantizeLinear(x, p, z) d = DequantizeLinear(q, p, z) v = DequantizeLinear <axis = 0> (i, r) "
        "a = Conv(d, v) b = Conv(d, v) y = Add(a, b)"
    )
    artifact = _quantized(tmp_path, nodes)
    requests = parse_io(["x:fp32:hwc4"])
    changed = apply_io(artifact.model, requests)
    invariants.check(changed)
    with OrtSession(artifact.model, keep_qdq=True) as reference, OrtSession(changed, keep_qdq=True) as found:
        feeds = {"x": pixels()}
        np.testing.assert_allclose(
            found.run(feeds_for(feeds, changed, requests))[0], reference.run(feeds)[0], rtol=1e-5, atol=1e-3
        )


def _quantized(folder: Path, nodes: str) -> ModelArtifact:
    text = f'<ir_version: 8, opset_import: ["" : 17]> g ({X}) => (float[N, 4, 6, 6] y) {{ {nodes} }}'
    proto = onnx.parser.parse_model(text)
    rng = np.random.default_rng(1)
    constants = {
        "i": rng.integers(-127, 128, (4, 3, 3, 3)).astype(np.int8),
        "r": rng.uniform(0.01, 0.1, 4).astype(np.float32),
        "p": np.float32(2.0),
        "z": np.int8(0),
    }
    for name, array in constants.items():
        proto.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(array), name))
    onnx.save(proto, folder / "q.onnx")
    return load(folder / "q.onnx")


@pytest.mark.parametrize(
    ("nodes", "outputs", "said"),
    [
        ("y = Relu(x)", "float[N, 3, 8, 8] y", "Relu"),
        ("y = Conv <group = 3> (x, g)", "float[N, 3, 6, 6] y", "Conv"),
        ("a = Mul(x, x) y = Conv(a, w)", "float[N, 4, 6, 6] y", "Mul"),
    ],
)
def test_channels_are_filled_up_before_convolutions_only(tmp_path: Path, nodes: str, outputs: str, said: str) -> None:
    artifact = model(tmp_path, nodes, outputs=outputs)
    with pytest.raises(UsageError) as caught:
        apply_io(artifact.model, parse_io(["x:fp32:hwc4"]))
    assert said in caught.value.what and "hwc" in caught.value.remedy


def test_a_report_says_what_the_caller_feeds(tmp_path: Path) -> None:
    artifact = model(tmp_path)
    requests = parse_io(["x:uint8:hwc4", "y:fp16:hwc"])
    first, second = describe(artifact.model, apply_io(artifact.model, requests), requests)
    assert (first.kind, first.dtype, first.layout, first.shape) == ("input", "uint8", "hwc4", ("N", 4, 8, 8))
    assert "Nx8x8x4" in first.caller and "3 channels and zeros" in first.caller and "0 to 255" in first.caller
    assert second.kind == "output" and "read fp16" in second.caller and "Nx8x8x4" in second.caller


def test_profiles_get_the_channels(tmp_path: Path) -> None:
    artifact = model(tmp_path)
    profile = ShapeProfile({"x": ((1, 3, 8, 8), (8, 3, 8, 8), (16, 3, 8, 8))})
    target = BuildTarget(TENSORRT_RTX, None)
    border = change(artifact, target.with_profiles((profile,)), parse_io(["x:fp16:hwc4"]), artifact.model, None)
    assert border.profiles[0].shapes["x"] == ((1, 4, 8, 8), (8, 4, 8, 8), (16, 4, 8, 8))
    assert border.artifact.steps[-1].name == "network-io"
    assert change(artifact, target, (), artifact.model, None).feeds is None


@pytest.mark.parametrize("data", [pixels() + 0.5, pixels() - 300, "synthetic"])
def test_pixels_must_be_whole_numbers(tmp_path: Path, data: np.ndarray | str) -> None:
    artifact = model(tmp_path)
    given = data if isinstance(data, str) else {"x": data}
    samples = open_samples(given, artifact.inputs)
    with pytest.raises(UsageError, match="whole numbers") as caught:
        check(artifact.model, parse_io(["x:uint8:hwc"]), samples)
    assert "--calib" in caught.value.remedy
    check(artifact.model, parse_io(["x:uint8:hwc"]), open_samples({"x": pixels()}, artifact.inputs))
