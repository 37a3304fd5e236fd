"""The networks that ``run.py`` optimizes: random seeded weights, batch 8, ONNX of opset 17.

Written so that the compiler sees what common exports give it; sizes are those of the papers, as in
``benchmarks/predictor/random_models.py``, which has the others.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn
from torch.nn import functional

sys.path.append(str(Path(__file__).parent.parent / "predictor"))
from random_models import Bert, BertBlock, InvertedResidual, Vit, convnext_t, mobilenet_v2

BATCH = 8
IMAGE = (BATCH, 3, 224, 224)
ALIGNED = (64, (64, 128, 256, 512), (256, 512, 1024, 2048), 1000)
ODD = (61, (61, 125, 250, 512), (245, 501, 1003, 2043), 1001)
"""Width of the stem, inner and outer widths of the stages, classes: those of the paper, and as pruning leaves them."""


class Bottleneck(nn.Module):
    """Batch norm folded; the stride sits on the 3x3."""

    def __init__(self, c_in: int, width: int, c_out: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(c_in, width, 1), nn.Conv2d(width, width, 3, stride, 1)
        self.conv3 = nn.Conv2d(width, c_out, 1)
        same = stride == 1 and c_in == c_out
        self.shortcut = nn.Identity() if same else nn.Conv2d(c_in, c_out, 1, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.conv2(torch.relu(self.conv1(x))))
        return torch.relu(self.conv3(y) + self.shortcut(x))


def resnet50(widths: tuple[int, tuple[int, ...], tuple[int, ...], int]) -> nn.Module:
    """Input [N, 3, 224, 224]."""
    channels, inner, outer, classes = widths
    layers: list[nn.Module] = [nn.Conv2d(3, channels, 7, 2, 3), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    for stage, blocks in enumerate((3, 4, 6, 3)):
        for block in range(blocks):
            stride = 2 if stage and not block else 1
            layers.append(Bottleneck(channels, inner[stage], outer[stage], stride))
            channels = outer[stage]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


class EagerBertBlock(BertBlock):
    """Attention spelled out, as ``transformers`` does without fused attention."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        a = self.attention
        q, k, v = (each(x).view(batch, length, a.heads, -1).transpose(1, 2) for each in (a.q, a.k, a.v))
        scores = q @ k.transpose(2, 3) / math.sqrt(width // a.heads) + mask
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, width)
        x = self.norm1(a.out(mixed) + x)
        return self.norm2(self.mlp(x) + x)


class PooledBert(Bert):
    """The pooled output of ``transformers.BertModel``: the first token through a dense layer and tanh."""

    def __init__(self, depth: int) -> None:
        super().__init__(depth=depth)
        self.blocks = nn.ModuleList(EagerBertBlock(768, 12) for _ in range(depth))
        self.types, self.pooler = nn.Embedding(2, 768), nn.Linear(768, 768)
        self.register_buffer("kinds", torch.zeros(1, 512, dtype=torch.int64))

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        kinds = self.types(self.kinds[:, : input_ids.shape[1]].expand(input_ids.shape))
        x = self.norm(self.words(input_ids) + kinds + self.positions.weight[: input_ids.shape[1]])
        lowest = torch.finfo(x.dtype).min
        mask = (1.0 - attention_mask[:, None, None, :].to(x.dtype)) * lowest
        for block in self.blocks:
            x = block(x, mask)
        return torch.tanh(self.pooler(x[:, 0]))


class ConvSilu(nn.Module):
    def __init__(self, c_in: int, c_out: int, kernel: int, stride: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(c_in, c_out, kernel, stride, kernel // 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.silu(self.conv(x))


class C2f(nn.Module):
    """YOLOv8's block with one bottleneck: input [N, C, H, W], output the same."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        half = channels // 2
        self.first, self.last = ConvSilu(channels, channels, 1), ConvSilu(half * 3, channels, 1)
        self.inner = nn.Sequential(ConvSilu(half, half, 3), ConvSilu(half, half, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right = self.first(x).chunk(2, 1)
        return self.last(torch.cat((left, right, right + self.inner(right)), 1))


class Lstm(nn.Module):
    """Input [64, N, 512], output [N, 1000] of the last step."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(512, 512, 2), nn.Linear(512, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0][-1])


class Detector(nn.Module):
    """A backbone, a head, and boxes decoded from it: [N, 3, 160, 160] -> corners [N, 400, 4], scores [N, 4, 400]."""

    def __init__(self, classes: int = 4) -> None:
        super().__init__()
        steps = ((3, 16), (16, 32), (32, 64))
        self.backbone = nn.Sequential(*(ConvSilu(c_in, c_out, 3, 2) for c_in, c_out in steps), C2f(64))
        self.boxes, self.scores = nn.Conv2d(64, 4, 1), nn.Conv2d(64, classes, 1)
        rows, columns = torch.meshgrid(torch.arange(20.0), torch.arange(20.0), indexing="ij")
        self.register_buffer("centers", torch.stack((rows.flatten(), columns.flatten()), 1) * 8 + 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.backbone(x)
        boxes = self.boxes(x).flatten(2).transpose(1, 2)
        middle, half = self.centers + boxes[..., :2] * 8, torch.exp(boxes[..., 2:].clamp(-4, 4)) * 8
        return torch.cat((middle - half, middle + half), 2), torch.sigmoid(self.scores(x)).flatten(2)


def conv_and(activation: nn.Module) -> nn.Module:
    """Input [N, 64, 28, 28]."""
    return nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), activation)


def _float(*shape: int) -> tuple[torch.Tensor, ...]:
    return (torch.zeros(shape),)


def _tokens() -> tuple[torch.Tensor, ...]:
    return torch.zeros(BATCH, 128, dtype=torch.int64), torch.ones(BATCH, 128, dtype=torch.int64)


MAP = (BATCH, 64, 28, 28)
NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[torch.Tensor, ...]]] = {
    "ViT-B/16": (Vit, _float(*IMAGE)),
    "BERT, 4 layers": (lambda: PooledBert(4), _tokens()),
    "ResNet-50": (lambda: resnet50(ALIGNED), _float(*IMAGE)),
    "ResNet-50, odd widths": (lambda: resnet50(ODD), _float(*IMAGE)),
    "MobileNetV2": (mobilenet_v2, _float(*IMAGE)),
    "ConvNeXt-T": (convnext_t, _float(*IMAGE)),
    "C2f": (lambda: C2f(64), _float(*MAP)),
    "Conv and PReLU": (lambda: conv_and(nn.PReLU(64)), _float(*MAP)),
    "Conv and Mish": (lambda: conv_and(nn.Mish()), _float(*MAP)),
    "Conv and Softplus": (lambda: conv_and(nn.Softplus()), _float(*MAP)),
    "Stem, --io hwc": (lambda: nn.Sequential(nn.Conv2d(3, 64, 7, 2, 3), nn.ReLU()), _float(*IMAGE)),
    "Stem, --io hwc4": (lambda: nn.Sequential(nn.Conv2d(3, 64, 7, 2, 3), nn.ReLU()), _float(*IMAGE)),
    "LSTM 2x512": (Lstm, _float(64, BATCH, 512)),
    "Detector with NMS": (Detector, _float(BATCH, 3, 160, 160)),
}
"""How each is made, and inputs of its shapes."""


def file_name(name: str) -> str:
    """The file a network is written to."""
    return "".join(char if char.isalnum() else "_" for char in name.lower()) + ".onnx"


def write(name: str, folder: Path, seed: int = 0, *, free: bool = False) -> Path:
    """Write one network as ONNX into ``folder``; with ``free``, the batch of its inputs may be of any size."""
    make, inputs = NETWORKS[name]
    torch.manual_seed(seed)
    network = make().eval()
    network.apply(_keep_scale)
    path = folder / file_name(name)
    outputs = ["boxes", "scores"] if name.startswith("Detector") else ["output"]
    names = {"input_names": [f"input{i}" for i in range(len(inputs))], "output_names": outputs}
    options: dict[str, Any] = {"opset_version": 17, "dynamo": False, **names}
    if free:
        axes = {f"input{i}": {value.shape.index(BATCH): "batch"} for i, value in enumerate(inputs)}
        options["dynamic_axes"] = axes | {output: {0: "batch"} for output in outputs}
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(network, inputs, str(path), **options)
    if name.startswith("Detector"):
        _append_nms(path)
    return path


def _keep_scale(module: nn.Module) -> None:
    """Weights with which the scale of activations is kept: PyTorch's own let those of deep networks vanish, and what is
    too small for FP16 stays FP32."""
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
    if isinstance(module, Bottleneck):
        module.conv3.weight.data.mul_(0.3)
    if isinstance(module, InvertedResidual) and module.residual:
        module.branch[-2].weight.data.mul_(0.3)


def _append_nms(path: Path) -> None:
    """The end most detectors are exported with: 20 boxes per class of [N, boxes, 4] and [N, classes, boxes]."""
    model = onnx.load(path)
    limits = {"max_boxes": np.array([20], np.int64), "iou": np.array([0.5], np.float32)}
    limits["score"] = np.array([0.4], np.float32)
    model.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in limits.items())
    read = ["boxes", "scores", *limits]
    model.graph.node.append(helper.make_node("NonMaxSuppression", read, ["selected"], name="nms"))
    model.graph.output.append(helper.make_tensor_value_info("selected", TensorProto.INT64, ["selections", 3]))
    onnx.checker.check_model(model)
    onnx.save(model, path)
