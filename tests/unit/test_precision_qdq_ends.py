"""The product that ends a network, in a model that brings its Q/DQ along."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import onnx_ir as ir

from trtopt.graph import edit
from trtopt.graph.shapes import infer_shapes, static_shapes
from trtopt.precision.decide import decide
from trtopt.precision.qdq.ends import dequantized_apart, ending_products
from trtopt.precision.write import apply_plan
from trtopt.support.ort_session import OrtSession
from trtopt.support.precision import Precision

RNG = np.random.default_rng(0)
ONE, EACH = np.float32(0.01), np.linspace(0.01, 0.02, 24, dtype=np.float32)
TEXT = """g (float[3,16] x) => (float[3,24] y, float[3,16] z) {
    n = Relu(x) q = QuantizeLinear(n, s, zero) d = DequantizeLinear(q, s, zero)
    v = DequantizeLinear<axis = 1>(w, t) y = MatMul(d, v)
    k = DequantizeLinear(u, s) m = MatMul(d, k) z = Relu(m)
}"""
"""Two products of one quantized tensor; ``y`` alone ends the network."""


def model(scales: np.ndarray | np.float32 = ONE) -> ir.Model:
    found = ir.from_onnx_text(f'<ir_version: 10, opset_import: ["" : 21]>\n{TEXT}')
    arrays = {name: RNG.integers(-127, 128, shape, np.int8) for name, shape in (("w", (16, 24)), ("u", (16, 16)))}
    for name, array in {**arrays, "s": ONE, "t": scales, "zero": np.int8(0)}.items():
        edit.add_initializer(found.graph, name, np.asarray(array))
        for node in found.graph:
            for index, value in enumerate(node.inputs):
                if value is not None and value.name == name:
                    node.replace_input_with(index, found.graph.initializers[name])
    found = infer_shapes(ir.from_proto(ir.to_proto(found)))
    for node in found.graph:
        node.name = str(node.outputs[0].name)
    return found


def in_fp16(source: ir.Model, ends: Collection[str], backend: str = "tensorrt-rtx") -> ir.Model:
    return apply_plan(source, decide(source, Precision.FP16, backend, {}, static_shapes(source, {}), ends=ends))


def types_of(source: ir.Model, name: str) -> set[ir.DataType | None]:
    node = next(node for node in source.graph if node.name == name)
    return {value.dtype for value in (*node.inputs, *node.outputs) if value is not None}


def test_a_product_with_one_scale_that_is_an_fp32_output_ends_the_network() -> None:
    assert ending_products(model(), ("y", "z")) == {"y"}
    assert not ending_products(model(), ("z",))
    assert not ending_products(model(EACH), ("y", "z"))  # scales per channel are a kernel of their own


def test_it_writes_fp32_and_what_else_reads_the_tensor_is_fp16() -> None:
    source = model()
    before = len(source.graph)
    written = in_fp16(source, ("y",))
    assert len(source.graph) == before
    assert types_of(written, "y") == {ir.DataType.FLOAT}
    assert types_of(written, "m") == {ir.DataType.FLOAT16}
    assert [node.op_type for node in written.graph].count("Cast") == 2  # the input and z
    feed = {"x": RNG.standard_normal((3, 16), dtype=np.float32)}
    with OrtSession(source) as one, OrtSession(written) as other:
        for exact, found in zip(one.run(feed), other.run(feed), strict=True):
            assert np.abs(exact - found).max() < 0.01 * np.abs(exact).max()


def test_it_is_fp16_where_the_output_is_or_the_compiler_is_another() -> None:
    for written in (in_fp16(model(), ()), in_fp16(model(), ("y",), "tensorrt"), in_fp16(model(EACH), ("y",))):
        assert ir.DataType.FLOAT16 in types_of(written, "y")


def test_a_dequantizer_of_the_product_alone_is_not_written_twice() -> None:
    source = model()
    found, names = dequantized_apart(source, frozenset({"y", "m"}))
    assert len(found.graph) == len(source.graph) and names == {"y", "m", "d", "v", "k"}
    assert dequantized_apart(source, frozenset()) == (source, frozenset())
