"""Q/DQ that a model brings along, before the real parser and builder: refused or slow, and mended neither."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper
from quantized_models import VARIANTS, quantized
from rtx_nets import constant, model

from trtopt.engine.backend import TENSORRT_RTX
from trtopt.engine.build import Compiler
from trtopt.engine.layers import NOT_KERNELS, activation_bytes
from trtopt.engine.request import BuildRequest
from trtopt.errors import EngineBuildError
from trtopt.graph.edit import all_nodes
from trtopt.hardware.spec import find_gpu
from trtopt.precision.fp16.cast_to_half import cast_to_half
from trtopt.precision.fp16.to_fp32 import to_fp32
from trtopt.precision.plan import FP16
from trtopt.precision.qdq.existing import canonicalize_qdq
from trtopt.report.schema.layers import LayerInfo
from trtopt.source.onnx_file import load
from trtopt.source.save import save_model

pytest.importorskip("tensorrt_rtx")

RNG = np.random.default_rng(0)


@pytest.fixture(scope="module")
def compiler() -> Iterator[Compiler]:
    with Compiler() as found:
        yield found


def layers(found: ir.Model, compiler: Compiler, folder: Path) -> tuple[LayerInfo, ...]:
    """The kernels of an engine of a model, its floating part in FP16."""
    narrow = cast_to_half(to_fp32(found), FP16, ())
    save_model(narrow, folder / "built.onnx")
    names = tuple(str(node.name) for node in all_nodes(narrow.graph))
    request = BuildRequest(folder / "built.onnx", TENSORRT_RTX, find_gpu("L4"), names, ())
    return tuple(layer for layer in compiler.layers(request) if layer.type not in NOT_KERNELS)


def mended(found: ir.Model) -> ir.Model:
    result = canonicalize_qdq(found, "tensorrt-rtx")
    assert result is not None
    return result.model


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_quantize_static_writes_builds_in_int8(tmp_path: Path, compiler: Compiler, variant: str) -> None:
    found = load(quantized(tmp_path, variant)[1]).model
    if variant != "symmetric":
        with pytest.raises(EngineBuildError):
            layers(found, compiler, tmp_path)
    built = layers(mended(found), compiler, tmp_path)
    for name in ("conv1", "conv3", "gemm"):
        kernels = [layer for layer in built if any(node.startswith(name) for node in layer.onnx_nodes)]
        in_int8 = any(tensor.dtype == "Int8" for layer in kernels for tensor in layer.inputs)
        assert in_int8 == (variant != "16 bits"), name


def residual(quantized_skip: bool) -> onnx.ModelProto:
    """x [8, 64, 28, 28] -> conv, ReLU, conv, + x, ReLU, conv, scales per channel; maybe Q/DQ at the addition."""
    constants = [constant("s", np.float32(0.03)), constant("z", np.int8(0)), constant("zk", np.zeros(64, np.int8))]
    nodes = []

    def pair(name: str) -> None:
        nodes.append(helper.make_node("QuantizeLinear", [name, "s", "z"], [f"{name}_q"], name=f"{name}_q"))
        nodes.append(helper.make_node("DequantizeLinear", [f"{name}_q", "s", "z"], [f"{name}_d"], name=f"{name}_d"))

    def conv(name: str, data: str) -> None:
        weight = RNG.integers(-127, 128, (64, 64, 3, 3)).astype(np.int8)
        scales = RNG.uniform(0.5, 1, 64).astype(np.float32) * np.float32(0.001)
        constants.extend([constant(f"{name}_w", weight), constant(f"{name}_k", scales)])
        constants.append(constant(f"{name}_b", RNG.standard_normal(64).astype(np.float32)))
        inputs = [f"{name}_w", f"{name}_k", "zk"]
        nodes.append(helper.make_node("DequantizeLinear", inputs, [f"{name}_v"], name=f"{name}_v", axis=0))
        nodes.append(helper.make_node("Conv", [data, f"{name}_v", f"{name}_b"], [name], name=name, pads=[1, 1, 1, 1]))

    pair("x")
    conv("c1", "x_d")
    nodes.append(helper.make_node("Relu", ["c1"], ["r1"], name="r1"))
    pair("r1")
    conv("c2", "r1_d")
    if quantized_skip:
        pair("c2")
    operands = ["c2_d", "x_d"] if quantized_skip else ["c2", "x"]
    nodes.append(helper.make_node("Add", operands, ["a"], name="a"))
    nodes.append(helper.make_node("Relu", ["a"], ["r2"], name="r2"))
    pair("r2")
    conv("c3", "r2_d")
    shape = [8, 64, 28, 28]
    return model(nodes, [("x", np.float32, shape)], [("c3", np.float32)], constants)


def test_qdq_on_a_residual_and_scales_per_channel_move_more_bytes(tmp_path: Path, compiler: Compiler) -> None:
    onnx.save(residual(quantized_skip=True), tmp_path / "m.onnx")
    found = load(tmp_path / "m.onnx").model
    before, after = layers(found, compiler, tmp_path), layers(mended(found), compiler, tmp_path)
    assert len(after) <= len(before)
    assert activation_bytes(after) < 0.8 * activation_bytes(before)
    # The sum joins the kernel that quantizes it, and reads the residual as INT8.
    assert any({"a", "r2_q", "x_d"} <= set(layer.onnx_nodes) for layer in after)


def test_scales_of_empty_channels_are_refused_in_fp16_unless_mended(tmp_path: Path, compiler: Compiler) -> None:
    proto = residual(quantized_skip=False)
    for tensor in proto.graph.initializer:
        if tensor.name == "c2_k":
            scales = onnx.numpy_helper.to_array(tensor).copy()
            scales[3] = 1e-12
            tensor.CopyFrom(onnx.numpy_helper.from_array(scales, tensor.name))
    onnx.save(proto, tmp_path / "m.onnx")
    found = load(tmp_path / "m.onnx").model
    with pytest.raises(EngineBuildError, match="positive"):
        layers(found, compiler, tmp_path)
    assert layers(mended(found), compiler, tmp_path)
