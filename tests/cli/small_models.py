"""Small models and samples for runs of the command line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper


def small_model(*, batch: int | str = "N", channels: int = 16) -> onnx.ModelProto:
    """x [N, 3, 8, 8] -> conv 3x3, ReLU, conv 3x3, ReLU, global average, Gemm -> scores [N, 10]."""
    rng = np.random.default_rng(0)
    weights = {
        "w1": rng.standard_normal((channels, 3, 3, 3)) / 5,
        "w2": rng.standard_normal((channels, channels, 3, 3)) / 12,
        "w3": rng.standard_normal((channels, 10)) / 4,
        "b1": rng.standard_normal(channels) / 10,
    }
    nodes = [
        helper.make_node("Conv", ["x", "w1", "b1"], ["c1"], "conv1", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c1"], ["r1"], "relu1"),
        helper.make_node("Conv", ["r1", "w2"], ["c2"], "conv2", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c2"], ["r2"], "relu2"),
        helper.make_node("GlobalAveragePool", ["r2"], ["p"], "pool"),
        helper.make_node("Flatten", ["p"], ["f"], "flatten"),
        helper.make_node("Gemm", ["f", "w3"], ["scores"], "head"),
    ]
    graph = helper.make_graph(
        nodes,
        "small",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [batch, 3, 8, 8])],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, [batch, 10])],
        [numpy_helper.from_array(value.astype(np.float32), name) for name, value in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def save_small(folder: Path, name: str = "model.onnx", **options: int | str) -> Path:
    """Save :func:`small_model` and return its path."""
    path = folder / name
    onnx.save(small_model(**options), path)  # type: ignore[arg-type]
    return path


def save_external(folder: Path) -> onnx.ModelProto:
    """Save the model as ``model.onnx`` with all weights in ``weights.bin``; returns it without the weights."""
    onnx.save(
        small_model(),
        folder / "model.onnx",
        save_as_external_data=True,
        location="weights.bin",
        size_threshold=0,
        convert_attribute=False,
    )
    return onnx.load(folder / "model.onnx", load_external_data=False)


def set_location(model: onnx.ModelProto, location: str) -> None:
    """Make every weight of ``model`` name ``location`` as its file."""
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = location


def samples(count: int = 4, shape: tuple[int, ...] = (3, 8, 8), dtype: str = "float32") -> np.ndarray:
    """Normally distributed samples; the first axis counts them."""
    return np.random.default_rng(1).standard_normal((count, *shape)).astype(dtype)
