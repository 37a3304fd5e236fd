"""Where the quantizer written as arithmetic is used: behind 16-bit products, for TensorRT for RTX."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx_ir as ir
import pytest

from trtopt.graph import edit
from trtopt.graph.shapes import infer_shapes, static_shapes
from trtopt.precision.decide import decide, wanted_tensors
from trtopt.precision.fp16.to_fp32 import to_fp32
from trtopt.precision.observe.statistics import StatsBuilder
from trtopt.precision.plan import FP16, PrecisionPlan, QuantizedOp
from trtopt.precision.qdq.apart import apart
from trtopt.precision.qdq.arithmetic import follows_product
from trtopt.precision.qdq.existing import canonicalize_qdq
from trtopt.precision.write import apply_plan
from trtopt.support.ort_session import OrtSession
from trtopt.support.precision import Precision

RNG = np.random.default_rng(0)

NET = """g (float[2,64,16,16] x) => (float[2,64,16,16] y) { n = Relu(x) a = Conv <pads = [1,1,1,1]> (n, w3)
    s = Sigmoid(a) m = Mul(a, s) b = Conv <pads = [1,1,1,1]> (m, w3) r = Relu(b) p = MaxPool <kernel_shape = [1,1]> (r)
    c = Conv (p, w1) q = Relu(c) d = Conv (q, w1) y = Relu(d) }"""


def net() -> ir.Model:
    """Convolutions that read a ReLU of the input (a), a SiLU of a product (b), a pool (c), a ReLU of a product (d)."""
    found = ir.from_onnx_text(f'<ir_version: 10, opset_import: ["" : 21]>\n{NET}')
    for name, shape in {"w3": (64, 64, 3, 3), "w1": (64, 64, 1, 1)}.items():
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


INPUTS = {"a": "n", "b": "m", "c": "p", "d": "q"}


def forms(*nodes: str, fused: bool = True, dtype: str = "int8") -> dict[str, str]:
    """The operator that writes the 8-bit form of each node's input."""
    ops = tuple(QuantizedOp(node, INPUTS[node], 1.0, None, "max", dtype=dtype) for node in nodes)  # type: ignore[arg-type]
    model = apply_plan(net(), PrecisionPlan(Precision.INT8, FP16, {}, ops, fused_quantizers=fused))
    found = {}
    for node in model.graph:
        if node.name in nodes:
            dequantize = node.inputs[0].producer()  # type: ignore[union-attr]
            found[str(node.name)] = dequantize.inputs[0].producer().op_type  # type: ignore[union-attr]
    return found


def test_the_arithmetic_stands_behind_16_bit_products_only() -> None:
    assert forms("a") == {"a": "QuantizeLinear"}  # no product before it
    assert forms("b") == {"b": "Cast"}
    assert forms("c") == {"c": "QuantizeLinear"}  # a pool is a kernel of its own, and takes a quantizer in
    assert forms("d") == {"d": "Cast"}


def test_an_8_bit_product_takes_in_no_quantizer() -> None:
    assert forms("a", "b") == {"a": "QuantizeLinear", "b": "QuantizeLinear"}
    assert forms("c", "d") == {"c": "QuantizeLinear", "d": "QuantizeLinear"}
    assert forms("b", "d") == {"b": "Cast", "d": "Cast"}


def test_fp8_and_other_backends_keep_the_operator() -> None:
    assert forms("b", "d", dtype="fp8") == {"b": "QuantizeLinear", "d": "QuantizeLinear"}
    assert forms("b", "d", fused=False) == {"b": "QuantizeLinear", "d": "QuantizeLinear"}


@pytest.mark.parametrize(("backend", "is_used"), [("tensorrt-rtx", True), ("tensorrt", False)])
def test_only_plans_for_tensorrt_rtx_ask_for_it(backend: str, is_used: bool) -> None:
    source, stats = net(), {}
    wanted = wanted_tensors(source, Precision.INT8, backend)
    for name in sorted(wanted.histogram | wanted.ranges):
        builder = StatsBuilder(histogram=True)
        builder.update(np.linspace(-1, 1, 4096, dtype=np.float32))
        stats[name] = builder.finish()
    plan = decide(source, Precision.INT8, backend, stats, static_shapes(source, {}))
    assert plan.quantized and plan.fused_quantizers is is_used


def test_the_scale_of_the_arithmetic_is_that_of_the_dequantizer() -> None:
    op = QuantizedOp("d", "q", 0.1, None, "max")
    model = apply_plan(net(), PrecisionPlan(Precision.INT8, FP16, {}, (op,), fused_quantizers=True))
    divide = next(node for node in model.graph if node.op_type == "Div")
    divisor = edit.constant_of(divide.inputs[1])
    dequantize = next(node for node in model.graph if node.name == "d").inputs[0].producer()  # type: ignore[union-attr]
    scale = edit.constant_of(dequantize.inputs[1])  # type: ignore[union-attr]
    assert divisor is not None and scale is not None
    assert (divisor.dtype, scale.dtype) == (np.float32, np.float16)
    assert divisor == scale.astype(np.float32)


def test_products_are_found_through_elementwise_operators_only() -> None:
    values = {str(node.outputs[0].name): node.outputs[0] for node in net().graph}
    assert follows_product(values["m"], ())
    assert not follows_product(values["n"], ()) and not follows_product(values["p"], ())
    assert not follows_product(values["m"], {"a"})


def read_back(model: ir.Model) -> ir.Model:
    found = canonicalize_qdq(model, "tensorrt-rtx")
    assert found is not None
    return found.model


def counted(model: ir.Model) -> Counter[str]:
    return Counter(node.op_type for node in model.graph)


def test_arithmetic_is_read_as_q_dq_and_written_again() -> None:
    ops = (QuantizedOp("b", "m", 1.0, None, "max"), QuantizedOp("d", "q", 1.0, None, "max"))
    saved = apply_plan(net(), PrecisionPlan(Precision.INT8, FP16, {}, ops, fused_quantizers=True))
    read = read_back(saved)
    assert counted(saved)["Div"] == 2 and not counted(read)["Div"] and counted(read)["QuantizeLinear"] == 2
    assert {node.inputs[0].dtype for node in read.graph if node.op_type == "QuantizeLinear"} == {ir.DataType.FLOAT16}  # type: ignore[union-attr]
    base = to_fp32(read)
    again = apply_plan(base, decide(base, Precision.FP16, "tensorrt-rtx", {}, static_shapes(base, {})))
    assert counted(again) == counted(saved)
    assert counted(apart(read, "tensorrt-rtx")) == counted(saved), "as it is, without a precision"
    assert apart(read, "tensorrt") is read
    feed = {"x": RNG.standard_normal((2, 64, 16, 16), dtype=np.float32)}
    with OrtSession(saved) as one, OrtSession(again) as other:
        np.testing.assert_array_equal(one.run(feed)[0], other.run(feed)[0])


@pytest.mark.parametrize("change", ["number", "reader", "scale"])
def test_other_arithmetic_stays(change: str) -> None:
    op = QuantizedOp("d", "q", 1.0, None, "max")
    model = apply_plan(net(), PrecisionPlan(Precision.INT8, FP16, {}, (op,), fused_quantizers=True))
    steps = {node.op_type: node for node in model.graph if str(node.name).startswith("trtopt/")}
    if change == "number":
        steps["Min"].replace_input_with(1, edit.add_initializer(model.graph, "six", np.array(6, np.float32)))
    elif change == "reader":
        model.graph.outputs.append(steps["Max"].outputs[0])
    else:
        steps["Div"].replace_input_with(1, edit.add_initializer(model.graph, "minus", np.array(-1, np.float32)))
    assert counted(read_back(model))["Div"] == 1
