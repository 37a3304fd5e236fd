"""Small detectors as exporters write them, with random weights."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
import onnx.parser
from onnx import numpy_helper

HEADER = '<ir_version: 10, opset_import: ["" : 21, "TRT" : 1, "com.microsoft" : 1]>'

BACKBONE = """
    c1 = Conv <strides = [2, 2], pads = [1, 1, 1, 1]> (image, w1, b1)
    r1 = Relu(c1)
    c2 = Conv <strides = [2, 2], pads = [1, 1, 1, 1]> (r1, w2)
    features = Relu(c2)
"""
"""image [N, 3, 32, 32] -> features [N, 16, 8, 8]."""

HEADS = """
    box_map = Conv (features, wb)
    class_map = Conv (features, wc)
    box_flat = Reshape(box_map, box_shape)
    class_flat = Reshape(class_map, class_shape)
    scores = Sigmoid(class_flat)
    box_rows = Transpose <perm = [0, 2, 1]> (box_flat)
    offsets, sizes = Split <axis = 2, num_outputs = 2> (box_rows)
    near = Sigmoid(offsets)
    centers = Add(near, cells)
    large = Exp(sizes)
    half = Mul(large, half_size)
    low = Sub(centers, half)
    high = Add(centers, half)
    boxes = Concat <axis = 2> (low, high)
"""
"""Box decode: boxes [N, 64, 4] as corners, scores [N, 3, 64]."""

NMS = """
    selected = NonMaxSuppression(boxes, scores, most, iou, least)
    index = Slice(selected, two, three, one)
    places = Squeeze(index, one)
    box_list = Squeeze(boxes, zero)
    detections = Gather <axis = 0> (box_list, places)
"""
"""detections [found, 4], selected [found, 3]; batch 1."""

NMS_OUTPUTS = "float[found, 4] detections, int64[found, 3] selected"


def constants(seed: int = 0) -> dict[str, np.ndarray]:
    """The weights and constants the texts above name."""
    rng = np.random.default_rng(seed)
    grid = np.stack(np.meshgrid(np.arange(8), np.arange(8)), axis=-1).reshape(1, 64, 2)
    return {
        "w1": (rng.standard_normal((8, 3, 3, 3)) / 4).astype(np.float32),
        "b1": (rng.standard_normal(8) / 4).astype(np.float32),
        "w2": (rng.standard_normal((16, 8, 3, 3)) / 8).astype(np.float32),
        "wb": (rng.standard_normal((4, 16, 1, 1)) / 4).astype(np.float32),
        "wc": rng.standard_normal((3, 16, 1, 1)).astype(np.float32),
        "box_shape": np.array([0, 4, 64], np.int64),
        "class_shape": np.array([0, 3, 64], np.int64),
        "cells": grid.astype(np.float32),
        "half_size": np.array([0.7], np.float32),
        "most": np.array([20], np.int64),
        "iou": np.array([0.4], np.float32),
        "least": np.array([0.5], np.float32),
        "zero": np.array([0], np.int64),
        "one": np.array([1], np.int64),
        "two": np.array([2], np.int64),
        "three": np.array([3], np.int64),
        "last": np.array([-1], np.int64),
    }


def model(
    *parts: str,
    outputs: str,
    batch: int | str = 1,
    more: dict[str, np.ndarray] | None = None,
    inputs: Sequence[str] = (),
) -> onnx.ModelProto:
    """A model of the given texts.

    Args:
        parts: Texts of nodes.
        outputs: The graph's outputs, as in ONNX's text form.
        batch: The batch of ``image``.
        more: Constants beside those of :func:`constants`.
        inputs: Inputs beside ``image``.
    """
    first = ", ".join([f"float[{batch}, 3, 32, 32] image", *inputs])
    proto = onnx.parser.parse_model(f"{HEADER} detector ({first}) => ({outputs}) {{ {''.join(parts)} }}")
    read = {name for node in proto.graph.node for name in node.input}
    arrays = {**constants(), **(more or {})}
    proto.graph.initializer.extend(
        numpy_helper.from_array(array, name) for name, array in arrays.items() if name in read
    )
    for number, node in enumerate(proto.graph.node):
        node.name = f"{node.op_type.lower()}_{node.output[0] or number}"
    domains = {node.domain for node in proto.graph.node} | {""}
    for item in [item for item in proto.opset_import if item.domain not in domains]:
        proto.opset_import.remove(item)
    return proto


def detector(batch: int | str = 1) -> onnx.ModelProto:
    """Backbone, heads, box decode, NonMaxSuppression, Gather of the boxes; the scores are an output too."""
    return model(BACKBONE, HEADS, NMS, outputs=f"{NMS_OUTPUTS}, float[{batch}, 3, 64] scores", batch=batch)


def images(count: int = 4, seed: int = 1) -> np.ndarray:
    """Samples of ``image``; the first axis counts them."""
    return np.random.default_rng(seed).standard_normal((count, 3, 32, 32)).astype(np.float32)
