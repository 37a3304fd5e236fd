"""Models quantized by ONNX Runtime's own quantizer keep their accuracy when their Q/DQ is mended."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest
from onnx import helper
from quantized_models import VARIANTS, X, quantized

from trtopt.analysis.sensitivity import sensitivity
from trtopt.errors import InvalidModelError
from trtopt.graph import edit
from trtopt.precision.qdq.canonicalize import quantizer_of
from trtopt.precision.qdq.existing import canonicalize_qdq, without_qdq
from trtopt.source.onnx_file import load
from trtopt.support.ort_session import OrtSession

RNG = np.random.default_rng(0)


def run(model: ir.Model, **feeds: np.ndarray) -> np.ndarray:
    with OrtSession(model, keep_qdq=True) as session:
        return session.run(feeds or {"x": X})[0]


def sqnr_db(exact: np.ndarray, found: np.ndarray) -> float:
    noise = float(np.square(exact.astype(np.float64) - found).sum())
    return math.inf if noise == 0 else 10 * math.log10(float(np.square(exact.astype(np.float64)).sum()) / noise)


@pytest.mark.parametrize("backend", ["tensorrt-rtx", "tensorrt"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_quantized_network_keeps_its_accuracy(tmp_path: Path, variant: str, backend: str) -> None:
    source, result = quantized(tmp_path, variant)
    exact, model = run(load(source).model), load(result).model
    found = canonicalize_qdq(model, backend)
    assert found is not None
    before, after = sqnr_db(exact, run(model)), sqnr_db(exact, run(found.model))
    assert before > 15, "the quantizer itself broke the network"
    # A zero point that goes costs up to one bit (6 dB) of a tensor; Q/DQ that goes gives some of it back.
    assert after > before - 6
    for node in found.model.graph:
        if edit.is_op(node, "QuantizeLinear", "DequantizeLinear"):
            how = quantizer_of(node)
            assert how is not None and how.is_symmetric and how.dtype is ir.DataType.INT8
            assert node.op_type == "DequantizeLinear" or edit.constant_of(node.inputs[0]) is None
        assert node.domain == ""
    if variant != "16 bits":
        quantizers = [node for node in found.model.graph if edit.is_op(node, "QuantizeLinear")]
        assert len(quantizers) >= 3, "what was INT8 stays INT8"


@pytest.mark.parametrize("variant", VARIANTS)
def test_without_its_qdq_a_network_is_as_accurate_or_more(tmp_path: Path, variant: str) -> None:
    source, result = quantized(tmp_path, variant)
    found = canonicalize_qdq(load(result).model, "tensorrt-rtx")
    assert found is not None
    plain = without_qdq(found.model)
    assert not any(edit.is_op(node, "QuantizeLinear") for node in plain.graph)
    exact = run(load(source).model)
    assert sqnr_db(exact, run(plain)) >= sqnr_db(exact, run(found.model))


def test_a_clip_that_the_quantizer_stood_for_comes_back(tmp_path: Path) -> None:
    source, result = quantized(tmp_path, "default")
    assert {"Relu", "Clip"} & {node.op_type for node in onnx.load(source).graph.node} == {"Relu", "Clip"}
    assert {"Relu", "Clip"} & {node.op_type for node in onnx.load(result).graph.node} == set()
    found = canonicalize_qdq(load(result).model, "tensorrt-rtx")
    assert found is not None
    wild = {"x": X * 20}  # beyond what the quantizer saw: the depthwise convolution's input must still end at 1.5
    depthwise = next(node for node in found.model.graph if node.name == "depthwise")
    bounds = [edit.constant_of(value) for node, _ in depthwise.outputs[0].uses() for value in node.inputs[1:]]
    assert [float(bound) for bound in bounds if bound is not None] == pytest.approx([0, 1.5], rel=0.01)
    assert sqnr_db(run(load(result).model, **wild), run(found.model, **wild)) > 15


def test_quantized_operators_give_the_same_numbers(tmp_path: Path) -> None:
    """QLinearConv as Conv between Q/DQ: at most a step apart, where a sum lies between two."""
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"], name="q"),
        helper.make_node("QLinearConv", ["q", "s", "z", "w", "k", "zk", "t", "z", "b"], ["c"], name="c"),
        helper.make_node("DequantizeLinear", ["c", "t", "z"], ["y"], name="y"),
    ]
    arrays = {
        "s": np.float32(0.02),
        "t": np.float32(0.03),
        "z": np.int8(0),
        "w": RNG.integers(-127, 128, (16, 8, 1, 1)).astype(np.int8),
        "k": RNG.uniform(0.5, 1, 16).astype(np.float32) * np.float32(0.01),
        "zk": np.zeros(16, np.int8),
        "b": RNG.integers(-2000, 2000, 16).astype(np.int32),
    }
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, X.shape)],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [4, 16, 12, 12])],
        [onnx.numpy_helper.from_array(np.asarray(array), name) for name, array in arrays.items()],
    )
    path = tmp_path / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), path)
    model = load(path).model
    found = canonicalize_qdq(model, "tensorrt")
    assert found is not None and "Conv" in {node.op_type for node in found.model.graph}
    kept = canonicalize_qdq(model, "tensorrt")
    assert kept is not None
    # The Q/DQ at the output of the network is taken out: written back, it must give the numbers of the operator.
    steps = np.clip(np.rint(run(kept.model) / arrays["t"]), -128, 127)
    expected = run(model) / arrays["t"]
    assert np.abs(steps - expected).max() <= 1.001
    assert (np.abs(steps - expected) > 0.5).mean() < 0.001


def fp8_behind_relu() -> ir.Model:
    text = """<ir_version: 10, opset_import: ["" : 21]> g (float[4, 64] x) => (float[4, 64] y) <float s = {0.01}>
    { r = Relu (x) q = QuantizeLinear (r, s, z) d = DequantizeLinear (q, s, z) y = MatMul (d, w) }"""
    found = ir.from_onnx_text(text)
    for name, tensor in {
        "z": ir.tensor(np.zeros((), ir.DataType.FLOAT8E4M3FN.numpy()), name="z"),
        "w": ir.tensor(np.eye(64, dtype=np.float32), name="w"),
    }.items():
        value = edit.add_initializer(found.graph, name, tensor)
        for node in found.graph:
            for index, old in enumerate(node.inputs):
                if old is not None and old.name == name and old is not value:
                    node.replace_input_with(index, value)
    return found


def test_a_relu_in_front_of_an_fp8_quantizer_is_computed() -> None:
    """ONNX Runtime's rewrites take the FP8 zero point for the lowest UINT8 and drop the ReLU, unless they are off."""
    x = np.linspace(-3, 3, 256, dtype=np.float32).reshape(4, 64)
    assert run(fp8_behind_relu(), x=x).min() == 0


def test_small_weights_in_a_file_beside_the_model_are_read(tmp_path: Path) -> None:
    text = '<ir_version: 10, opset_import: ["" : 21]> g (float[2, 4] x) => (float[2, 4] y) { y = Add (x, w) }'
    model = ir.from_onnx_text(text)
    value = edit.add_initializer(model.graph, "w", np.arange(8, dtype=np.float32).reshape(2, 4))
    model.graph[0].replace_input_with(1, value)
    proto = ir.to_proto(model)
    onnx.save(proto, tmp_path / "m.onnx", save_as_external_data=True, location="m.data", size_threshold=0)
    loaded = load(tmp_path / "m.onnx").model
    assert np.array_equal(run(loaded, x=np.zeros((2, 4), np.float32)), np.arange(8).reshape(2, 4))


def test_sensitivity_says_that_a_model_is_quantized_already(tmp_path: Path) -> None:
    text = """<ir_version: 10, opset_import: ["" : 21]> g (float[1, 2] x) => (float[1, 2] y)
    <float s = {0.1}, int8 z = {0}, int8[2, 2] w = {1, 2, 3, 4}> {
        q = QuantizeLinear (x, s, z) d = DequantizeLinear (q, s, z) v = DequantizeLinear (w, s, z) y = MatMul (d, v)
    }"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "m.onnx")
    with pytest.raises(InvalidModelError) as caught:
        sensitivity(tmp_path / "m.onnx", cache_dir=str(tmp_path))
    assert caught.value.where == "it is quantized already" and "before it was quantized" in caught.value.remedy


@pytest.mark.parametrize("behind", ["", "Reshape"])
def test_a_network_of_unsigned_pixels_gives_the_same_integers(tmp_path: Path, behind: str) -> None:
    """Unsigned inputs and outputs with a zero point become plain arithmetic, also behind what moves integers."""
    end = "q = Reshape(y, flat)" if behind else "q = Identity(y)"
    text = (
        '<ir_version: 10, opset_import: ["": 21]> g (uint8[2,3,4,4] x) => (uint8[2,48] q)'
        " <float step = {0.05}, uint8 middle = {128}, float wide = {0.04}, uint8 low = {90}, int64[2] flat = {2, 48}> {"
        " f = DequantizeLinear(x, step, middle) r = LeakyRelu(f) y = QuantizeLinear(r, wide, low) " + end + " }"
    )
    if not behind:
        text = text.replace("uint8[2,48] q", "uint8[2,3,4,4] q")
    path = tmp_path / "pixels.onnx"
    onnx.save(onnx.parser.parse_model(text), path)
    model = load(path).model
    found = canonicalize_qdq(model, "tensorrt-rtx")
    assert found is not None
    pixels = RNG.integers(0, 256, (2, 3, 4, 4), dtype=np.uint8)
    after = run(found.model, x=pixels)
    assert after.dtype == np.uint8 and np.array_equal(after, run(model, x=pixels))
    types = {node.op_type for node in found.model.graph}
    assert {"Cast", "Sub", "Mul"} <= types or behind
