"""A small network with everything that a cut has to get right, and its plans."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import onnx
import onnx_ir as ir

from trtopt.precision.plan import PrecisionPlan, QuantizedOp
from trtopt.precision.write import apply_plan
from trtopt.support.ort_session import OrtSession
from trtopt.support.precision import Precision

CODE = """
<ir_version: 8, opset_import: ["" : 19]>
net (float[N, 3, 8, 8] x) => (float[N, 10] scores, float[N, 16, 8, 8] r2, int64[N, 1] best)
{
    [conv1] c1 = Conv <pads = [1, 1, 1, 1]> (x, w1)
    [relu1] r1 = Relu (c1)
    [conv2] c2 = Conv <pads = [1, 1, 1, 1]> (r1, w2)
    [conv3] c3 = Conv (r1, w3)
    [add] s = Add (c2, c3)
    [relu2] r2 = Relu (s)
    [conv4] c4 = Conv <pads = [1, 1, 1, 1]> (r2, w4)
    [residual] t = Add (c4, r1)
    [most] m = ReduceMax <keepdims = 0> (r2)
    [zero] zero = Constant <value = float {0.0}> ()
    [is_big] big = Greater (m, zero)
    [choice] z = If (big) <
        then_branch = kept () => (float[N, 16, 8, 8] u) { [scale] u = Mul (t, r2) },
        else_branch = left () => (float[N, 16, 8, 8] v) { [copy] v = Identity (t) }
    >
    [pool] p = GlobalAveragePool (z)
    [flat] f = Flatten (p)
    [head] scores = Gemm (f, w5)
    [top] best = ArgMax <axis = 1> (scores)
}
"""
REGIONS = {"x": ("conv1",), "r1": ("conv2", "conv3"), "r2": ("conv4",), "f": ("head",)}
NODES = tuple(node for nodes in REGIONS.values() for node in nodes)
SAMPLES = [{"x": image[None]} for image in np.random.default_rng(1).standard_normal((8, 3, 8, 8)).astype(np.float32)]


def base_model() -> ir.Model:
    """The network in FP32, with shapes."""
    rng = np.random.default_rng(0)
    proto = onnx.parser.parse_model(CODE)
    shapes = {"w1": (16, 3, 3, 3), "w2": (16, 16, 3, 3), "w3": (16, 16, 1, 1), "w4": (16, 16, 3, 3), "w5": (16, 10)}
    for name, shape in shapes.items():
        spread = np.sqrt(2 / np.prod(shape[1:]))
        proto.graph.initializer.append(
            onnx.numpy_helper.from_array((rng.standard_normal(shape) * spread).astype(np.float32), name)
        )
    return ir.from_proto(onnx.shape_inference.infer_shapes(proto))


def quantized(model: ir.Model, nodes: Collection[str] = NODES, dtype: Precision = Precision.INT8) -> ir.Model:
    """The network with some nodes in 8 bits: per-tensor scales, and in INT8 ``conv4`` with a multiplication behind."""
    tensors = [name for name in REGIONS if name != "x"]
    with OrtSession(model, tensors) as session:
        runs = [dict(zip(tensors, session.run(feeds), strict=True)) | feeds for feeds in SAMPLES]
    ops = []
    for tensor, readers in REGIONS.items():
        amax = max(float(np.abs(run[tensor]).max()) for run in runs)
        for node in readers:
            multiply = node == "conv4" and dtype == "int8"
            op = QuantizedOp(node, tensor, amax, 0 if multiply else None, "max", multiply, dtype)
            ops += [op] if node in nodes else []
    return apply_plan(model, PrecisionPlan(dtype, quantized=tuple(ops)))
