"""The models that ``run.py`` analyses: weights are random, tiny, or holes in a sparse file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

WIDTH = 64
BLOCK = ("MatMul", "Add", "Relu", "Mul", "Sigmoid", "Mul", "Add", "Reshape", "Transpose", "Reshape")
"""Nodes of one block of :func:`many_nodes`: products, element-wise operators, a residual, and moving data."""


def many_nodes(path: Path, nodes: int = 20_000, seed: int = 0) -> None:
    """A deep network of ``nodes`` nodes on [N, 16, 64]: 2000 blocks of 10 nodes each, with a dynamic batch."""
    random = np.random.default_rng(seed)
    made, constants = (
        [],
        [
            numpy_helper.from_array(np.array([0, 4, 4, WIDTH], np.int64), "split"),
            numpy_helper.from_array(np.array([0, 16, WIDTH], np.int64), "join"),
        ],
    )
    last = "x"
    for block in range(nodes // len(BLOCK)):
        weight = random.standard_normal((WIDTH, WIDTH), np.float32) / 8
        bias = random.standard_normal(WIDTH, np.float32)
        constants += [numpy_helper.from_array(weight, f"w{block}"), numpy_helper.from_array(bias, f"b{block}")]
        name = [f"{block}_{index}" for index in range(len(BLOCK))]
        inputs = [
            (last, f"w{block}"), (name[0], f"b{block}"), (name[1],), (name[2], f"b{block}"), (name[3],),
            (name[3], name[4]), (name[5], last), (name[6], "split"), (name[7],), (name[8], "join"),
        ]  # fmt: skip
        for op, read, output in zip(BLOCK, inputs, name, strict=True):
            attributes = {"perm": [0, 2, 1, 3]} if op == "Transpose" else {}
            made.append(helper.make_node(op, read, [output], name=f"{op}_{output}", **attributes))
        last = name[-1]
    shape = ["N", 16, WIDTH]
    graph = helper.make_graph(
        made,
        "many_nodes",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info(last, TensorProto.FLOAT, shape)],
        constants,
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), path)


def large_weights(path: Path, gib: int = 14, width: int = 4096) -> None:
    """Dense layers of FP16 weights [4096, 4096], 32 MiB each, ``gib`` GiB in a sparse file beside the model."""
    layer_bytes = width * width * 2
    layers = (gib << 30) // layer_bytes
    data = path.with_suffix(".data")
    with open(data, "wb") as file:
        file.truncate(layers * layer_bytes)
    constants, nodes, last = [], [], "x"
    for index in range(layers):
        tensor = TensorProto(name=f"w{index}", data_type=TensorProto.FLOAT16, dims=[width, width])
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in (("location", data.name), ("offset", index * layer_bytes), ("length", layer_bytes)):
            tensor.external_data.add(key=key, value=str(value))
        constants.append(tensor)
        nodes.append(helper.make_node("MatMul", [last, f"w{index}"], [f"product{index}"], name=f"MatMul_{index}"))
        nodes.append(helper.make_node("Relu", [f"product{index}"], [f"y{index}"], name=f"Relu_{index}"))
        last = f"y{index}"
    shape = ["N", 128, width]
    graph = helper.make_graph(
        nodes,
        "large_weights",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT16, shape)],
        [helper.make_tensor_value_info(last, TensorProto.FLOAT16, shape)],
        constants,
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), path)
