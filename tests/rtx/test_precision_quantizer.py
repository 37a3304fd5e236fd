"""TensorRT for RTX takes the quantizer written as arithmetic into the FP16 kernel before it."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import trtopt
from trtopt.engine.backend import TENSORRT_RTX
from trtopt.engine.build import Compiler
from trtopt.engine.request import BuildRequest
from trtopt.graph import edit
from trtopt.graph.shapes import infer_shapes
from trtopt.hardware.spec import find_gpu
from trtopt.precision.plan import FP16, PrecisionPlan, QuantizedOp
from trtopt.precision.write import apply_plan, cast_borders
from trtopt.report.schema.layers import LayerInfo
from trtopt.source.save import save_model
from trtopt.support.precision import Precision

pytest.importorskip("tensorrt_rtx")

RNG = np.random.default_rng(0)
Kernels = Callable[..., list[LayerInfo]]


@pytest.fixture(scope="module")
def kernels() -> Iterator[Kernels]:
    """Compiles a model for compute capability 8.9, with the input of one node in INT8, and lists its kernels."""
    with Compiler() as compiler, tempfile.TemporaryDirectory() as folder:

        def compiled(source: ir.Model, *ops: QuantizedOp, fused: bool = True) -> list[LayerInfo]:
            plan = PrecisionPlan(Precision.INT8, FP16, {}, ops, fused_quantizers=fused)
            model = cast_borders(apply_plan(source, plan), FP16.dtype)
            path = Path(folder) / "m.onnx"
            save_model(model, path)
            borders = [value for value in (*model.graph.inputs, *model.graph.outputs) if len(value.shape or ()) == 4]
            request = BuildRequest(
                onnx=path,
                backend=TENSORRT_RTX,
                gpu=find_gpu("L4"),
                nodes=tuple(str(node.name) for node in model.graph),
                tf32=False,
                formats=dict.fromkeys([str(value.name) for value in borders], "HWC"),
            )
            return [layer for layer in compiler.layers(request) if layer.is_kernel]

        yield compiled


def model(text: str, **weights: tuple[int, ...]) -> ir.Model:
    found = ir.from_onnx_text(f'<ir_version: 10, opset_import: ["" : 21]>\n{text}')
    for name, shape in weights.items():
        array = (RNG.uniform(-1, 1, shape) / np.prod(shape[1:]) ** 0.5).astype(np.float32)
        edit.add_initializer(found.graph, name, array)
        for node in found.graph:
            for index, value in enumerate(node.inputs):
                if value is not None and value.name == name:
                    node.replace_input_with(index, found.graph.initializers[name])
    found = infer_shapes(ir.from_proto(ir.to_proto(found)))
    for node in found.graph:
        node.name = str(node.outputs[0].name)
    return found


CONV = "g (float[8,64,28,28] x) => (float[8,64,28,28] y) {{ c = Conv <pads = [1,1,1,1]> (x, w) {} y = Conv(r, v) }}"
GEMM = "g (float[1024,256] x) => (float[1024,256] y) {{ a = MatMul(x, w) c = Add(a, k) {} y = MatMul(r, v) }}"
NETS = {
    "convolution": (CONV, {"w": (64, 64, 3, 3), "v": (64, 64, 1, 1)}),
    "product": (GEMM, {"w": (256, 256), "v": (256, 256), "k": (256,)}),
}
EPILOGUES = {
    "relu": "r = Relu(c)",
    "silu": "s = Sigmoid(c) r = Mul(c, s)",
    "residual": "t = Add(c, x) r = Relu(t)",
    "none": "r = Identity(c)",
}


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("net", NETS)
def test_the_fp16_kernel_writes_int8(kernels: Kernels, net: str, epilogue: str) -> None:
    text, weights = NETS[net]
    source = model(text.format(EPILOGUES[epilogue]), **weights)
    op = QuantizedOp("y", "r", 1.0, None, "max")
    layers, floating = kernels(source, op), kernels(source)
    assert len(layers) == len(floating)
    first = next(layer for layer in layers if any(tensor.dtype == "Int8" for tensor in layer.outputs))
    assert first.inputs[0].dtype == "Half" and {"a", "c"} & set(first.onnx_nodes)
    assert len(kernels(source, op, fused=False)) == len(layers) + 1  # QuantizeLinear is a kernel of its own


def test_behind_an_int8_product_it_is_quantize_linear(kernels: Kernels) -> None:
    text, weights = NETS["convolution"]
    source = model(text.format("r = Relu(c)"), **weights)
    ops = [QuantizedOp("c", "x", 1.0, None, "max"), QuantizedOp("y", "r", 1.0, None, "max")]
    fused, plain = (kernels(source, *ops, fused=each) for each in (True, False))
    assert [layer.name for layer in fused] == [layer.name for layer in plain]


@pytest.mark.parametrize("precision", ["fp16", None])
def test_a_saved_model_keeps_it(kernels: Kernels, tmp_path: Path, precision: str | None) -> None:
    text, weights = NETS["product"]
    source = model(text.format("r = Gelu(c)"), **weights)
    op = QuantizedOp("y", "r", 1.0, None, "max")
    saved = apply_plan(source, PrecisionPlan(Precision.INT8, FP16, {}, (op,), fused_quantizers=True))
    save_model(saved, tmp_path / "8.onnx")
    report = trtopt.optimize(
        tmp_path / "8.onnx", output=tmp_path / "again.onnx", precision=precision, gpu="L4", no_cache=True
    )
    again = Counter(node.op_type for node in onnx.load(tmp_path / "again.onnx").graph.node)
    assert again == Counter(node.op_type for node in saved.graph)
    assert not any("own Q/DQ stays" in text for text in report.warnings), "the compiler took it"
