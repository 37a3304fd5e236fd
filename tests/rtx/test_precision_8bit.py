"""What the table of 8-bit placement says of TensorRT for RTX, asked of its compiler: kernels, types and bytes."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from trtopt.engine.backend import TENSORRT_RTX
from trtopt.engine.build import Compiler
from trtopt.engine.layers import buffer_sizes, moved_bytes
from trtopt.engine.request import BuildRequest
from trtopt.graph import edit
from trtopt.graph.shapes import infer_shapes
from trtopt.hardware.spec import find_gpu
from trtopt.precision import rules
from trtopt.precision.plan import FP16, Operand, PrecisionPlan, QuantizedOp
from trtopt.precision.write import apply_plan, cast_borders
from trtopt.report.schema.layers import LayerInfo, TensorInfo
from trtopt.source.save import save_model
from trtopt.support.precision import Precision

pytest.importorskip("tensorrt_rtx")

RNG = np.random.default_rng(0)
Kernels = Callable[..., list[LayerInfo]]


@pytest.fixture(scope="module")
def kernels() -> Iterator[Kernels]:
    """Compiles a model with some nodes in 8 bits for compute capability 8.9, and lists its kernels."""
    with Compiler() as compiler, tempfile.TemporaryDirectory() as folder:

        def compiled(
            source: ir.Model, *ops: QuantizedOp, maps: bool = False, ends: tuple[str, ...] = ()
        ) -> list[LayerInfo]:
            model = cast_borders(apply_plan(source, PrecisionPlan(Precision.INT8, FP16, {}, ops)), FP16.dtype, ends)
            path = Path(folder) / "m.onnx"
            save_model(model, path)
            borders = [str(value.name) for value in (*model.graph.inputs, *model.graph.outputs)]
            nodes = tuple(str(node.name) for node in model.graph)
            formats = dict.fromkeys(borders, "HWC") if maps else {}
            request = BuildRequest(
                onnx=path, backend=TENSORRT_RTX, gpu=find_gpu("L4"), nodes=nodes, tf32=False, formats=formats
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


def op(node: str, tensor: str, dtype: Precision, axis: int | None = None, other: str = "") -> QuantizedOp:
    operand = Operand(other, 1.0, "max") if other else None
    return QuantizedOp(node, tensor, 1.0, axis, "max", dtype=dtype, other=operand)


def moved(layers: list[LayerInfo]) -> int:
    sizes = buffer_sizes(layers)
    return sum(moved_bytes(layer, sizes) for layer in layers)


def read(layers: list[LayerInfo], node: str, dtype: Precision) -> list[TensorInfo]:
    """The 8-bit tensors that the kernels of a node read."""
    name = {"int8": "Int8", "fp8": "FP8"}[dtype]
    inputs = [tensor for layer in layers if node in layer.onnx_nodes for tensor in layer.inputs]
    return [tensor for tensor in inputs if tensor.dtype == name]


CHAIN = (
    "g (float[8,64,28,28] x) => (float[8,64,28,28] y) { c = Conv <pads = [1,1,1,1]> (x, w) r = Relu(c) y = Conv(r, v) }"
)


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_scales_per_channel_make_convolutions_write_fp32(kernels: Kernels, dtype: Precision) -> None:
    source = model(CHAIN, w=(64, 64, 3, 3), v=(64, 64, 1, 1))
    kind = {"int8": "Int8", "fp8": "FP8"}[dtype]
    found = {}
    for axis in (None, 0):
        layers = kernels(source, op("c", "x", dtype, axis), op("y", "r", dtype, axis), maps=True)
        products = [layer for layer in layers if layer.inputs[0].dtype == kind]
        assert len(products) == 2
        found[axis] = {layer.outputs[0].dtype for layer in products}, len(layers)
    assert found[None][0] == {"Half"} and found[0][0] == {"Float"} and found[0][1] > found[None][1]


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_depthwise_convolutions_in_8_bits_read_four_times_the_elements(kernels: Kernels, dtype: Precision) -> None:
    text = """g (float[8,96,28,28] x) => (float[8,96,28,28] y)
        { r = Relu(x) d = Conv <group = 96, pads = [1,1,1,1]> (r, w) s = Relu(d) y = Conv(s, v) }"""
    source = model(text, w=(96, 1, 3, 3), v=(96, 96, 1, 1))
    node = next(node for node in source.graph if node.name == "d")
    assert rules.placement(node, "tensorrt-rtx", dtype).granularity is None
    layers = kernels(source, op("d", "r", dtype), maps=True)
    assert max(np.prod(tensor.shape) for tensor in read(layers, "d", dtype)) == 4 * 8 * 96 * 28 * 28


def test_another_scale_behind_a_concat_costs_bytes_but_no_kernel(kernels: Kernels) -> None:
    text = """g (float[8,64,28,28] x) => (float[8,64,28,28] y) { c = Conv(x, w) b = Relu(c) d = Conv(b, w) e = Relu(d)
        k = Concat <axis = 1> (b, e) y = Conv(k, v) }"""
    source = model(text, w=(64, 64, 1, 1), v=(64, 128, 1, 1))
    inner, result = op("d", "b", "int8"), op("y", "k", "int8")
    same, other = (kernels(source, inner, replace(result, activation_amax=amax), maps=True) for amax in (1.0, 2.0))
    assert len(same) == len(other) and moved(same) < moved(other) < 1.1 * moved(same)


def test_a_quantized_residual_is_written_for_its_addition_in_16_bits_too(kernels: Kernels) -> None:
    text = """g (float[8,64,28,28] x) => (float[8,64,28,28] y) { t = Relu(x) c = Conv <pads = [1,1,1,1]> (t, w)
        r = Relu(c) d = Conv <pads = [1,1,1,1]> (r, v) a = Add(d, t) y = Relu(a) }"""
    source = model(text, w=(64, 64, 3, 3), v=(64, 64, 3, 3))
    ops = op("c", "t", "int8"), op("d", "r", "int8")
    floating = kernels(source, *ops, maps=True)
    quantized = kernels(source, replace(ops[0], skips=("a",)), ops[1], maps=True)
    assert moved(quantized) >= moved(floating)
    adding = next(layer for layer in quantized if "a" in layer.onnx_nodes)
    assert [tensor.dtype for tensor in adding.inputs] == ["Int8", "Half"]


def test_a_16_bit_product_writes_fp8_at_no_cost_and_int8_with_a_kernel(kernels: Kernels) -> None:
    text = """g (float[1024,256] x) => (float[1024,256] y)
        { a = MatMul(x, w) b = Add(a, k) r = Relu(b) c = MatMul(r, v) y = Add(c, k) }"""
    source = model(text, w=(256, 256), v=(256, 256), k=(256,))
    first = kernels(source, op("c", "r", "fp8"))[0]
    assert (first.inputs[0].dtype, first.outputs[0].dtype) == ("Half", "FP8")
    assert len(kernels(source, op("c", "r", "int8"))) == len(kernels(source, op("c", "r", "fp8"))) + 1


@pytest.mark.parametrize(
    ("axis", "multiply", "written"), [(None, False, "Int8"), (1, True, "Int8"), (1, False, "Half")]
)
def test_an_int8_product_with_one_scale_writes_int8_for_the_kernel_behind_it(
    kernels: Kernels, axis: int | None, multiply: bool, written: str
) -> None:
    text = """g (float[1024,256] x) => (float[1024,256] y)
        { n = Relu(x) a = MatMul(n, w) b = Add(a, k) r = Gelu(b) y = MatMul(r, v) }"""
    source = model(text, w=(256, 1024), v=(1024, 256), k=(1024,))
    first, last = op("a", "n", "int8", axis), op("y", "r", "int8")
    wide = kernels(source, first, last)
    narrow = kernels(source, replace(first, result_amax=1.0, writes=True, multiply=multiply), last)
    product = next(layer for layer in narrow if "a" in layer.onnx_nodes)
    assert len(narrow) == len(wide) and product.outputs[0].dtype == written
    saved = 2 * 1024 * 1024 if written == "Int8" else 0
    assert moved(wide) - moved(narrow) == saved


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_a_product_that_ends_the_network_writes_fp32_where_its_scales_are_fp32(
    kernels: Kernels, dtype: Precision
) -> None:
    source = model("g (float[64,256] x) => (float[64,2048] y) { n = Relu(x) y = MatMul(n, w) }", w=(256, 2048))
    narrow, wide = (kernels(source, replace(op("y", "n", dtype), ends=ends), ends=("y",)) for ends in (False, True))
    assert [layer.outputs[0].dtype for layer in narrow[-2:]] == ["Half", "Float"]
    assert "y" in wide[-1].onnx_nodes and wide[-1].outputs[0].dtype == "Float" and read(wide, "y", dtype)
    assert len(wide) == len(narrow) - 1 and moved(wide) < 0.6 * moved(narrow)


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_a_merged_qkv_is_an_8_bit_product_with_one_scale_only(kernels: Kernels, dtype: Precision) -> None:
    text = """g (float[2,64,128] x) => (float[2,64,128] y)
        <int64[5] five = {2, 64, 3, 4, 32}, int64[3] flat = {2, 64, 128}, int64 n0 = {0}, int64 n1 = {1},
        int64 n2 = {2}> { n = LayerNormalization (x, g, g) h = MatMul(n, w) h5 = Reshape(h, five)
        t = Transpose <perm = [2,0,3,1,4]> (h5) q = Gather(t, n0) k0 = Gather(t, n1) v = Gather(t, n2)
        k = Transpose <perm = [0,1,3,2]> (k0) s = MatMul(q, k) p = Softmax(s) m = MatMul(p, v)
        o1 = Transpose <perm = [0,2,1,3]> (m) o = Reshape(o1, flat) u = MatMul(o, wo) y = Add(u, x) }"""
    source = model(text, w=(128, 384), g=(128,), wo=(128, 128))
    node = next(node for node in source.graph if node.name == "h")
    assert rules.placement(node, "tensorrt-rtx", dtype).granularity == "per-tensor"
    assert read(kernels(source, op("h", "n", dtype)), "h", dtype)
    assert not read(kernels(source, op("h", "n", dtype, 1)), "h", dtype)


def attention(queries: int, head: int) -> ir.Model:
    width = 4 * head
    return model(
        f"""g (float[2,{queries},{width}] x) => (float[2,{queries},{width}] z)
        <int64[4] heads = {{2, {queries}, 4, {head}}}, int64[3] flat = {{2, {queries}, {width}}}> {{
        n = LayerNormalization (x, g, g)
        q0 = MatMul(n, wq) k0 = MatMul(n, wk) v0 = MatMul(n, wv)
        q1 = Reshape(q0, heads) k1 = Reshape(k0, heads) v1 = Reshape(v0, heads)
        q = Transpose <perm = [0,2,1,3]> (q1) k = Transpose <perm = [0,2,3,1]> (k1)
        v = Transpose <perm = [0,2,1,3]> (v1)
        s = MatMul(q, k) p = Softmax(s) m = MatMul(p, v)
        o1 = Transpose <perm = [0,2,1,3]> (m) o = Reshape(o1, flat) y = MatMul(o, wo) z = Add(y, x) }}""",
        **dict.fromkeys(("wq", "wk", "wv", "wo"), (width, width)),
        g=(width,),
    )


def fused(layers: list[LayerInfo]) -> bool:
    return any({"s", "m"} <= set(layer.onnx_nodes) and "mha" in layer.name for layer in layers)


def in_8_bits(dtype: Precision) -> list[QuantizedOp]:
    ops = [op(f"{each}0", "n", dtype) for each in "qkv"]
    return [*ops, op("s", "q", dtype, other="k"), op("m", "p", dtype, other="v"), op("y", "o", dtype)]


@pytest.mark.parametrize(
    ("dtype", "queries", "head"),
    [("int8", 512, 64), ("int8", 513, 64), ("int8", 64, 40), ("fp8", 513, 40), ("fp8", 32, 64), ("fp8", 31, 64)],
)
def test_attention_is_fused_in_8_bits_in_the_sizes_of_the_table(
    kernels: Kernels, dtype: Precision, queries: int, head: int
) -> None:
    expected = rules.attention_placement(head, queries, queries, "tensorrt-rtx", dtype).granularity is not None
    assert fused(kernels(attention(queries, head), *in_8_bits(dtype))) is expected


def test_int8_attention_needs_all_operands_and_a_reader_of_int8(kernels: Kernels) -> None:
    source, ops = attention(64, 32), in_8_bits("int8")
    assert fused(kernels(source, *ops))
    for left_out in ("s", "m", "y"):
        assert not fused(kernels(source, *(item for item in ops if item.node != left_out)))
    assert fused(kernels(source, *(item for item in in_8_bits("fp8") if item.node != "y")))


def test_what_moves_an_operand_of_fp8_attention_reads_what_an_int8_product_writes(kernels: Kernels) -> None:
    first, last = in_8_bits("int8")[:3], in_8_bits("fp8")[3:]
    written = [replace(item, result_amax=1.0, writes=True) for item in first]
    wide, narrow = (kernels(attention(640, 64), *ops, *last) for ops in (first, written))
    assert fused(wide) and fused(narrow)
    assert moved(wide) - moved(narrow) == 2 * 3 * 2 * 640 * 256  # written by three products and read again
