"""Small networks for the real builder, and a request to build one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from trtopt.engine.backend import TENSORRT_RTX
from trtopt.engine.request import BuildRequest, ShapeProfile
from trtopt.hardware.spec import find_gpu

DTYPES = {"fp32": np.float32, "fp16": np.float16}


def constant(name: str, array: np.ndarray) -> onnx.TensorProto:
    return numpy_helper.from_array(array, name)


def model(
    nodes: Sequence[onnx.NodeProto],
    inputs: Iterable[tuple[str, np.dtype | type, Sequence[int | str]]],
    outputs: Iterable[tuple[str, np.dtype | type]],
    constants: Sequence[onnx.TensorProto],
) -> onnx.ModelProto:
    graph = helper.make_graph(
        list(nodes),
        "g",
        [_value(name, dtype, shape) for name, dtype, shape in inputs],
        [_value(name, dtype, None) for name, dtype in outputs],
        list(constants),
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)


def _value(name: str, dtype: np.dtype | type, shape: Sequence[int | str] | None) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), shape)


def conv_net(precision: str = "fp32", batch: int | str = 8) -> onnx.ModelProto:
    """Two convolutions and a Gemm: x [N, 16, 16, 16] -> [N, 8]; with ``int8``, FP16 with Q/DQ at the convolutions."""
    dtype = DTYPES.get(precision, np.float16)
    rng = np.random.default_rng(0)
    constants = [
        constant("b1", np.zeros(32, dtype)),
        constant("b2", np.zeros(32, dtype)),
        constant("wg", (rng.standard_normal((32 * 64, 8)) * 0.1).astype(dtype)),
    ]
    nodes: list[onnx.NodeProto] = []
    weights = {"w1": (32, 16, 3, 3), "w2": (32, 32, 3, 3)}
    operand = {"x": "x", "r1": "r1", "w1": "w1", "w2": "w2"}
    for name, shape in weights.items():
        array = rng.standard_normal(shape) * 0.1
        if precision == "int8":
            constants.append(constant(f"{name}_q", np.clip(np.rint(array * 256), -127, 127).astype(np.int8)))
            constants.append(constant(f"{name}_s", np.asarray(1 / 256, dtype)))
            nodes.append(helper.make_node("DequantizeLinear", [f"{name}_q", f"{name}_s"], [name], name=f"dq_{name}"))
        else:
            constants.append(constant(name, array.astype(dtype)))
    if precision == "int8":
        constants.append(constant("s", np.asarray(1 / 32, dtype)))
        constants.append(constant("z", np.asarray(0, np.int8)))
        operand |= {"x": "x_d", "r1": "r1_d"}
    qdq = {name: _qdq(name) if precision == "int8" else [] for name in ("x", "r1")}
    nodes += [
        *qdq["x"],
        helper.make_node("Conv", [operand["x"], "w1", "b1"], ["c1"], name="conv1", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c1"], ["r1"], name="relu1"),
        *qdq["r1"],
        helper.make_node("Conv", [operand["r1"], "w2", "b2"], ["c2"], name="conv2", pads=[1, 1, 1, 1], strides=[2, 2]),
        helper.make_node("Relu", ["c2"], ["r2"], name="relu2"),
        helper.make_node("Flatten", ["r2"], ["f"], name="flatten"),
        helper.make_node("Gemm", ["f", "wg"], ["y"], name="gemm"),
    ]
    return model(nodes, [("x", dtype, [batch, 16, 16, 16])], [("y", dtype)], constants)


def _qdq(name: str) -> list[onnx.NodeProto]:
    return [
        helper.make_node("QuantizeLinear", [name, "s", "z"], [f"{name}_q"], name=f"q_{name}"),
        helper.make_node("DequantizeLinear", [f"{name}_q", "s"], [f"{name}_d"], name=f"dq_{name}"),
    ]


CONV_FLOP = {
    "conv1": 2 * 8 * 16 * 16 * 32 * 16 * 9,
    "conv2": 2 * 8 * 8 * 8 * 32 * 32 * 9,
    "gemm": 2 * 8 * 8 * 32 * 64,
}
"""Flop of :func:`conv_net` at batch 8."""


def attention_net() -> onnx.ModelProto:
    """One FP16 attention block with residual: x [2, 64, 128], 4 heads of 32."""
    rng = np.random.default_rng(0)
    weights = [
        constant(f"w{each}", (rng.standard_normal((128, 128)) * 0.1).astype(np.float16))
        for each in ("q", "k", "v", "o")
    ]
    shapes = [
        constant("heads", np.array([2, 64, 4, 32], np.int64)),
        constant("flat", np.array([2, 64, 128], np.int64)),
        constant("scale", np.asarray(0.17, np.float16)),
    ]
    nodes = []
    for each in "qkv":
        order = [0, 2, 3, 1] if each == "k" else [0, 2, 1, 3]
        nodes += [
            helper.make_node("MatMul", ["x", f"w{each}"], [f"{each}0"], name=f"proj_{each}"),
            helper.make_node("Reshape", [f"{each}0", "heads"], [f"{each}1"], name=f"reshape_{each}"),
            helper.make_node("Transpose", [f"{each}1"], [f"{each}2"], name=f"transpose_{each}", perm=order),
        ]
    nodes += [
        helper.make_node("MatMul", ["q2", "k2"], ["s"], name="scores"),
        helper.make_node("Mul", ["s", "scale"], ["t"], name="scaled"),
        helper.make_node("Softmax", ["t"], ["p"], name="softmax"),
        helper.make_node("MatMul", ["p", "v2"], ["o"], name="context"),
        helper.make_node("Transpose", ["o"], ["o1"], name="transpose_o", perm=[0, 2, 1, 3]),
        helper.make_node("Reshape", ["o1", "flat"], ["o2"], name="reshape_o"),
        helper.make_node("MatMul", ["o2", "wo"], ["o3"], name="proj_o"),
        helper.make_node("Add", ["o3", "x"], ["y"], name="residual"),
    ]
    return model(nodes, [("x", np.float16, [2, 64, 128])], [("y", np.float16)], [*weights, *shapes])


def if_net() -> onnx.ModelProto:
    """y = c ? relu(x w) : sigmoid(x w)."""
    branches = {
        branch: helper.make_graph(
            [
                helper.make_node("MatMul", ["x", "w"], [f"{branch}_m"], name=f"matmul_{branch}"),
                helper.make_node(op, [f"{branch}_m"], [f"{branch}_y"], name=f"activation_{branch}"),
            ],
            branch,
            [],
            [_value(f"{branch}_y", np.float32, [4, 16])],
        )
        for branch, op in (("then", "Relu"), ("else", "Sigmoid"))
    }
    node = helper.make_node(
        "If", ["c"], ["y"], name="choice", then_branch=branches["then"], else_branch=branches["else"]
    )
    weight = constant("w", np.eye(16, dtype=np.float32))
    return model([node], [("x", np.float32, [4, 16]), ("c", np.bool_, [])], [("y", np.float32)], [weight])


def loop_net() -> onnx.ModelProto:
    """n times x = relu(x w)."""
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["keep"], ["keep_on"], name="keep_on"),
            helper.make_node("MatMul", ["state", "w"], ["m"], name="matmul_body"),
            helper.make_node("Relu", ["m"], ["next"], name="relu_body"),
        ],
        "body",
        [_value("i", np.int64, []), _value("keep", np.bool_, []), _value("state", np.float32, [4, 16])],
        [_value("keep_on", np.bool_, []), _value("next", np.float32, [4, 16])],
    )
    node = helper.make_node("Loop", ["n", "cond", "x"], ["y"], name="loop", body=body)
    constants = [constant("w", np.eye(16, dtype=np.float32)), constant("cond", np.asarray(True))]
    return model([node], [("x", np.float32, [4, 16]), ("n", np.int64, [])], [("y", np.float32)], constants)


def lstm_net() -> onnx.ModelProto:
    """x [16, 2, 24] -> LSTM of 32."""
    rng = np.random.default_rng(0)
    constants = [
        constant("W", (rng.standard_normal((1, 128, 24)) * 0.1).astype(np.float32)),
        constant("R", (rng.standard_normal((1, 128, 32)) * 0.1).astype(np.float32)),
    ]
    node = helper.make_node("LSTM", ["x", "W", "R"], ["y", "h"], name="lstm", hidden_size=32)
    return model([node], [("x", np.float32, [16, 2, 24])], [("y", np.float32), ("h", np.float32)], constants)


def recurrent_net(op: str, steps: int, batch: int, size: int) -> onnx.ModelProto:
    """x [steps, batch, size] -> LSTM or GRU of ``size``."""
    rng, rows = np.random.default_rng(0), {"LSTM": 4, "GRU": 3}[op] * size
    weights = [constant(name, (rng.standard_normal((1, rows, size)) / 32).astype(np.float32)) for name in "WR"]
    node = helper.make_node(op, ["x", "W", "R"], ["y"], name="cell", hidden_size=size)
    return model([node], [("x", np.float32, [steps, batch, size])], [("y", np.float32)], weights)


def names(graph: onnx.GraphProto) -> tuple[str, ...]:
    """Every node's name, subgraphs included."""
    found: list[str] = []
    for node in graph.node:
        found.append(node.name)
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                found += names(attribute.g)
    return tuple(found)


def request(
    proto: onnx.ModelProto,
    folder: Path,
    *,
    gpu: str | None = "L4",
    profiles: Sequence[ShapeProfile] = (),
    **options: object,
) -> BuildRequest:
    """A request for TensorRT for RTX; the model is written into ``folder``."""
    path = folder / "model.onnx"
    onnx.save(proto, path)
    target = find_gpu(gpu) if gpu is not None else None
    return BuildRequest(path, TENSORRT_RTX, target, names(proto.graph), tuple(profiles), **options)  # type: ignore[arg-type]


def batch_profile(low: int, optimum: int, high: int) -> ShapeProfile:
    """A profile of :func:`conv_net` with a dynamic batch."""
    return ShapeProfile({"x": ((low, 16, 16, 16), (optimum, 16, 16, 16), (high, 16, 16, 16))})


__all__ = ["CONV_FLOP", "TensorProto"]
