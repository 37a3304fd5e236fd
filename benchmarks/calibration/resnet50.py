"""ResNet-50 as torchvision lays it out (batch norm folded), with seeded random weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

STAGES = ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2))
"""Width, blocks and stride of the stages (He et al. 2016, table 1; the stride sits on the 3x3, as in torchvision)."""


class _Builder:
    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []

    def constant(self, name: str, value: np.ndarray) -> str:
        self.weights.append(numpy_helper.from_array(value.astype(np.float32), name))
        return name

    def conv(
        self, x: str, name: str, channels: tuple[int, int], *, kernel: int, stride: int = 1, gain: float = 2.0
    ) -> str:
        """He initialisation with variance ``gain / fan_in``; a small random bias stands for the folded batch norm."""
        c_in, c_out = channels
        fan_in = c_in * kernel * kernel
        shape = (c_out, c_in, kernel, kernel)
        weight = self.constant(f"{name}.weight", self._rng.standard_normal(shape) * np.sqrt(gain / fan_in))
        bias = self.constant(f"{name}.bias", self._rng.standard_normal(c_out) * 0.1)
        pad = kernel // 2
        return self.op(
            "Conv", [x, weight, bias], name, kernel_shape=[kernel, kernel], strides=[stride, stride], pads=[pad] * 4
        )

    def op(self, op_type: str, inputs: list[str], name: str, **attributes: object) -> str:
        self.nodes.append(helper.make_node(op_type, inputs, [f"{name}_out"], name=name, **attributes))
        return f"{name}_out"

    def bottleneck(self, x: str, name: str, channels: tuple[int, int], stride: int) -> str:
        c_in, width = channels
        y = self.op("Relu", [self.conv(x, f"{name}.conv1", (c_in, width), kernel=1)], f"{name}.relu1")
        y = self.conv(y, f"{name}.conv2", (width, width), kernel=3, stride=stride)
        y = self.op("Relu", [y], f"{name}.relu2")
        # A small gain on the branch keeps the variance of the residual stream bounded over 16 blocks.
        y = self.conv(y, f"{name}.conv3", (width, 4 * width), kernel=1, gain=0.2)
        if stride != 1 or c_in != 4 * width:
            x = self.conv(x, f"{name}.downsample", (c_in, 4 * width), kernel=1, stride=stride, gain=1.0)
        return self.op("Relu", [self.op("Add", [y, x], f"{name}.add")], f"{name}.relu3")


def resnet50(path: Path, seed: int = 0, *, batch: int = 1) -> None:
    """Write the model: input ``input`` [batch, 3, 224, 224] float32, output ``logits`` [batch, 1000]."""
    b = _Builder(seed)
    x = b.op("Relu", [b.conv("input", "conv1", (3, 64), kernel=7, stride=2)], "relu1")
    x = b.op("MaxPool", [x], "maxpool", kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
    c_in = 64
    for stage, (width, blocks, stride) in enumerate(STAGES, start=1):
        for block in range(blocks):
            x = b.bottleneck(x, f"layer{stage}.{block}", (c_in, width), stride if block == 0 else 1)
            c_in = 4 * width
    x = b.op("Flatten", [b.op("GlobalAveragePool", [x], "avgpool")], "flatten", axis=1)
    rng = np.random.default_rng(seed + 1)
    b.constant("fc.weight", rng.standard_normal((1000, 2048)) * np.sqrt(1 / 2048))
    b.constant("fc.bias", np.zeros(1000))
    b.nodes.append(helper.make_node("Gemm", [x, "fc.weight", "fc.bias"], ["logits"], name="fc", transB=1))
    graph = helper.make_graph(
        b.nodes,
        "resnet50",
        [helper.make_tensor_value_info("input", TensorProto.FLOAT, [batch, 3, 224, 224])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, [batch, 1000])],
        b.weights,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, path)


def write_samples(path: Path, count: int, seed: int = 0) -> None:
    """Write ``count`` random images [3, 224, 224] to one .npz: smooth blocks with a little white noise."""
    rng = np.random.default_rng(seed)
    images = rng.standard_normal((count, 3, 28, 28)).astype(np.float32).repeat(8, axis=2).repeat(8, axis=3)
    images += 0.3 * rng.standard_normal(images.shape, dtype=np.float32)
    np.savez(path, input=images)
