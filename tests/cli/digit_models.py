"""A small network that reads digits, as a team would change it: random convolutions and a head that is trained."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from sklearn.datasets import load_digits
from sklearn.linear_model import RidgeClassifier

CHANNELS = 32
EVAL = 1300
"""The images from here on are kept for the evaluation."""


@functools.cache
def images() -> tuple[np.ndarray, np.ndarray]:
    """The images [1797, 1, 8, 8] in a random order, and their labels."""
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.images))
    return (digits.images[order, None] / 16).astype(np.float32), digits.target[order]


def save_samples(folder: Path) -> None:
    """Write ``calib.npz`` and ``eval.npz``, the latter with labels."""
    x, labels = images()
    np.savez(folder / "calib.npz", x=x[:64])
    np.savez(folder / "eval.npz", x=x[EVAL:], __labels__=labels[EVAL:])


def digit_model(*, train: int = 1200, depthwise: bool = False, mixed: bool = False) -> onnx.ModelProto:
    """x [N, 1, 8, 8] -> conv1, ReLU, conv2, ReLU, head -> scores [N, 10].

    Args:
        train: How many images the head is trained on.
        depthwise: Make conv2 depthwise, which TensorRT for RTX runs in 16 bits.
        mixed: A product of the scores with a matrix near the identity, which the compiler does not fuse.
    """
    _, labels = images()
    w1, w2, features = _convolutions(depthwise=depthwise)
    head = RidgeClassifier(alpha=10.0).fit(features[:train].reshape(train, -1), labels[:train])
    weights = {"w1": w1, "w2": w2, "w3": head.coef_.T.astype(np.float32), "b3": head.intercept_.astype(np.float32)}
    if mixed:
        weights["w4"] = np.eye(10, dtype=np.float32) - 0.01
    nodes = [
        helper.make_node("Conv", ["x", "w1"], ["c1"], "conv1", pads=[1] * 4),
        helper.make_node("Relu", ["c1"], ["r1"], "relu1"),
        helper.make_node("Conv", ["r1", "w2"], ["c2"], "conv2", pads=[1] * 4, group=CHANNELS if depthwise else 1),
        helper.make_node("Relu", ["c2"], ["r2"], "relu2"),
        helper.make_node("Flatten", ["r2"], ["f"], "flatten"),
        helper.make_node("Gemm", ["f", "w3", "b3"], ["logits" if mixed else "scores"], "head"),
        helper.make_node("MatMul", ["logits", "w4"], ["scores"], "mix"),
    ]
    graph = helper.make_graph(
        [node for node in nodes if mixed or node.name != "mix"],
        "digits",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 1, 8, 8])],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["N", 10])],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@functools.cache
def _convolutions(*, depthwise: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The weights of the two convolutions, and what they make of the images."""
    x, _ = images()
    rng = np.random.default_rng(0)
    w1 = rng.standard_normal((CHANNELS, 1, 3, 3)).astype(np.float32) / 3
    w2 = rng.standard_normal((CHANNELS, 1 if depthwise else CHANNELS, 3, 3)).astype(np.float32)
    w2 /= 3 if depthwise else 17
    return w1, w2, np.maximum(_convolved(np.maximum(_convolved(x, w1), 0), w2), 0)


def _windows(x: np.ndarray) -> np.ndarray:
    """[N, C, H, W, 3, 3]: the pixels around each, zeros beyond the edge."""
    padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
    return np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(2, 3))


def _convolved(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """A convolution of 3x3, depthwise where the weight has one input channel and ``x`` has several."""
    if weight.shape[1] == x.shape[1]:
        return np.einsum("nchwij,ocij->nohw", _windows(x), weight, optimize=True)
    return np.einsum("nchwij,cij->nchw", _windows(x), weight[:, 0], optimize=True)
