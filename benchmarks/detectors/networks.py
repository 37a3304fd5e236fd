"""Detectors as they are exported, with their selection of boxes in the graph and without; random weights."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torchvision
import torchvision_ops
import transformers as hf
from networks_dense import _detections
from subject import Subject, image, network
from torch import nn
from written import ConvUnit, YoloV8


def _has_ops() -> bool:
    return True


_ROI_ALIGN = sys.modules["torchvision.ops.roi_align"]
torchvision.extension._has_ops = _ROI_ALIGN._has_ops = _has_ops  # the zoo defines the operators that detectors call


@torch.library.impl(torchvision_ops._LIBRARY, "roi_align", "CPU")
def roi_align(*inputs: Any) -> torch.Tensor:
    """torchvision's own in Python, not compiled."""
    return _ROI_ALIGN._roi_align.__wrapped__(*inputs)


SIZE = 320
CLASSES = 80
MOST = 300
"""Boxes a YOLO of version 10 gives."""

_ANCHORS = ((10, 13, 16, 30, 33, 23), (30, 61, 62, 45, 59, 119), (116, 90, 156, 198, 373, 326))
"""Widths and heights of the three anchors of each stride of YOLOv5, in pixels."""


def _alone(module: nn.Module, call: Callable[..., Any] = lambda model, *inputs: model(*inputs)) -> Subject:
    return Subject(module, {"image": image(SIZE, 1)}, {"image": {}}, call)


def _moving(module: nn.Module, call: Callable[..., Any] = lambda model, *inputs: model(*inputs)) -> Subject:
    """Batch, height and width are dynamic."""
    return Subject(module, {"image": image(SIZE, 1)}, {"image": {0: "batch", 2: "height", 3: "width"}}, call)


def _torchvision(name: str, **settings: Any) -> Subject:
    module = getattr(torchvision.models.detection, name)(weights=None, weights_backbone=None, **settings)

    def call(model: nn.Module, pixels: torch.Tensor) -> tuple[torch.Tensor, ...]:
        settles = any(item.training for item in model.modules())  # statistics of a level of 1x1 need two images
        found = model([pixels[0], 1 - pixels[0]] if settles else [pixels[0]])[0]
        return found["boxes"], found["scores"], found["labels"]

    return Subject(module, {"image": torch.rand(1, 3, SIZE, SIZE)}, {"image": {}}, call)


@network
def tv_ssdlite() -> Subject:
    return _torchvision("ssdlite320_mobilenet_v3_large", topk_candidates=30)


@network
def tv_retinanet() -> Subject:
    return _torchvision("retinanet_resnet50_fpn", min_size=SIZE, max_size=SIZE)


@network
def tv_fcos() -> Subject:
    return _torchvision("fcos_resnet50_fpn", min_size=SIZE, max_size=SIZE)


@network
def tv_fasterrcnn() -> Subject:
    return _torchvision("fasterrcnn_mobilenet_v3_large_320_fpn", min_size=SIZE, max_size=SIZE)


@network
def detr_small() -> Subject:
    """One layer of encoder and of decoder behind basic blocks, 128 pixels."""
    config = hf.DetrConfig(
        backbone_config=_small_backbone(["stage4"]),
        encoder_layers=1,
        decoder_layers=1,
        d_model=64,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        num_queries=20,
        num_labels=91,
    )
    inputs = {"image": image(128, 1)}
    return Subject(hf.DetrForObjectDetection(config), inputs, {"image": {}}, _detections)


@network
def detr_r50() -> Subject:
    """As published: ResNet-50, six layers of encoder and of decoder, 100 queries."""
    config = hf.DetrConfig(backbone_config=hf.ResNetConfig(out_features=["stage4"]), num_labels=91)
    return Subject(hf.DetrForObjectDetection(config), {"image": image(SIZE, 1)}, {"image": {}}, _detections)


@network
def rtdetr_r50() -> Subject:
    """As published: ResNet-50, six layers of decoder, 300 queries."""
    config = hf.RTDetrConfig(num_labels=80, anchor_image_size=[SIZE, SIZE])
    return Subject(hf.RTDetrForObjectDetection(config), {"image": image(SIZE, 1)}, {"image": {}}, _detections)


@network
def yolos_base() -> Subject:
    """As published: twelve layers of 768."""
    config = hf.YolosConfig(image_size=[SIZE, SIZE], num_labels=91)
    return Subject(hf.YolosForObjectDetection(config), {"image": image(SIZE, 1)}, {"image": {}}, _detections)


@network
def rtdetr_small() -> Subject:
    """One layer of decoder, half the width, 128 pixels; the best 20 places of its encoder begin."""
    backbone = hf.RTDetrResNetConfig(
        hidden_sizes=[32, 64, 128, 256],
        depths=[1, 1, 1, 1],
        layer_type="basic",
        embedding_size=32,
        out_features=["stage2", "stage3", "stage4"],
    )
    config = hf.RTDetrConfig(
        backbone_config=backbone,
        encoder_hidden_dim=128,
        encoder_in_channels=[64, 128, 256],
        feat_strides=[8, 16, 32],
        encoder_ffn_dim=256,
        d_model=128,
        decoder_in_channels=[128, 128, 128],
        decoder_ffn_dim=256,
        decoder_layers=1,
        num_queries=20,
        num_labels=80,
        anchor_image_size=[128, 128],
    )
    inputs = {"image": image(128, 1)}
    return Subject(hf.RTDetrForObjectDetection(config), inputs, {"image": {}}, _detections)


def _small_backbone(features: list[str]) -> hf.ResNetConfig:
    return hf.ResNetConfig(
        hidden_sizes=[32, 64, 128, 256],
        depths=[1, 1, 1, 1],
        layer_type="basic",
        embedding_size=32,
        out_features=features,
    )


class YoloV5(YoloV8):
    """The backbone of YOLOv8n with the head of version 5: three anchors a place, an objectness, decoded."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Conv2d(width, 3 * (5 + CLASSES), 1) for width in (64, 128, 256))
        del self.boxes, self.scores
        self.register_buffer("anchors", torch.tensor(_ANCHORS, dtype=torch.float32).view(3, 1, 3, 1, 1, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = []
        for index, (head, level) in enumerate(zip(self.heads, self.levels(x), strict=True)):
            made = head(level)
            batch, _, height, width = made.shape
            made = made.view(batch, 3, 5 + CLASSES, height, width).permute(0, 1, 3, 4, 2).sigmoid()
            rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
            grid = torch.stack((columns, rows), 2).view(1, 1, height, width, 2) - 0.5
            xy, wh, rest = made.split((2, 2, 1 + CLASSES), 4)
            xy = (xy * 2 + grid) * (8.0 * 2**index)
            wh = (wh * 2) ** 2 * self.anchors[index]
            found.append(torch.cat((xy, wh, rest), 4).view(batch, 3 * height * width, 5 + CLASSES))
        return torch.cat(found, 1)


class Attention(nn.Module):
    """Attention over places, with the position as a depthwise convolution of the values: that of YOLO 10 and 11."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.head, self.key = heads, width // heads, width // heads // 2
        self.qkv = nn.Conv2d(width, width + 2 * heads * self.key, 1)
        self.place, self.last = nn.Conv2d(width, width, 3, padding=1, groups=width), nn.Conv2d(width, width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, width, height, columns = x.shape
        qkv = self.qkv(x).view(batch, self.heads, 2 * self.key + self.head, height * columns)
        query, key, value = qkv.split((self.key, self.key, self.head), 2)
        weights = (query.transpose(-2, -1) @ key * self.key**-0.5).softmax(-1)
        found = (value @ weights.transpose(-2, -1)).view(batch, width, height, columns)
        return self.last(found + self.place(value.reshape(batch, width, height, columns)))


class Yolo11(YoloV8):
    """With attention at its coarsest level, and depthwise convolutions in the head of the scores."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention(256, 4)
        self.scores = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(width, width, 3, padding=1, groups=width),
                ConvUnit(width, CLASSES),
                nn.Conv2d(CLASSES, CLASSES, 3, padding=1, groups=CLASSES),
                ConvUnit(CLASSES, CLASSES),
                nn.Conv2d(CLASSES, CLASSES, 1),
            )
            for width in (64, 128, 256)
        )

    def deepest(self, x: torch.Tensor) -> torch.Tensor:
        found = super().deepest(x)
        return found + self.attention(found)


class YoloV10(Yolo11):
    """Boxes without suppression: the best 300 of each image, by the best class first."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        boxes, scores = super().forward(x).transpose(1, 2).split((4, CLASSES), 2)
        places = scores.amax(2).topk(MOST, 1)[1].unsqueeze(2)
        boxes = boxes.gather(1, places.expand(-1, -1, 4))
        scores = scores.gather(1, places.expand(-1, -1, CLASSES))
        best, order = scores.flatten(1).topk(MOST, 1)
        labels = (order % CLASSES).unsqueeze(2)
        boxes = boxes.gather(1, (order // CLASSES).unsqueeze(2).expand(-1, -1, 4))
        return torch.cat((boxes, best.unsqueeze(2), labels.float()), 2)


@network
def yolo5() -> Subject:
    return _moving(YoloV5())


@network
def yolo8() -> Subject:
    return _moving(YoloV8())


@network
def yolo10() -> Subject:
    return _moving(YoloV10())


@network
def yolo11() -> Subject:
    return _moving(Yolo11())


def _selected(boxes: torch.Tensor, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """NMS by class of one image, its boxes as centre and size, as YOLO's own export writes it."""
    best, labels = scores.max(1)
    kept = best > 0.25
    boxes, best, labels = boxes[kept], best[kept], labels[kept]
    centre, half = boxes[:, :2], boxes[:, 2:] / 2
    corners = torch.cat((centre - half, centre + half), 1)
    kept = torch.ops.torchvision.nms(corners + 7680.0 * labels.unsqueeze(1), best, 0.45)[:MOST]
    return corners[kept], best[kept], labels[kept]


@network
def yolo5_nms() -> Subject:
    def call(model: nn.Module, pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        found = model(pixels)[0]
        return _selected(found[:, :4], found[:, 5:] * found[:, 4:5])

    return _alone(YoloV5(), call)


@network
def yolo8_nms() -> Subject:
    def call(model: nn.Module, pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        found = model(pixels)[0].transpose(0, 1)
        return _selected(found[:, :4], found[:, 4:])

    return Subject(YoloV8(), {"image": image(SIZE, 1)}, {"image": {2: "height", 3: "width"}}, call)


class OnnxNms(torch.autograd.Function):
    """ONNX's NonMaxSuppression, as YOLOv7 exports it: indices of picture, class and box; in PyTorch some of them."""

    @staticmethod
    def forward(ctx: Any, boxes: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        places = torch.arange(7) * 13
        return torch.stack((torch.zeros(7, dtype=torch.int64), places % scores.shape[1], places), 1)

    @staticmethod
    def symbolic(graph: Any, boxes: Any, scores: Any) -> Any:
        numbers = (torch.tensor([MOST]), torch.tensor([0.45]), torch.tensor([0.25]))
        return graph.op("NonMaxSuppression", boxes, scores, *(graph.op("Constant", value_t=each) for each in numbers))


def _corners(coded: torch.Tensor) -> torch.Tensor:
    return torch.cat((coded[..., :2] - coded[..., 2:] / 2, coded[..., :2] + coded[..., 2:] / 2), 2)


@network
def yolo7_rows() -> Subject:
    """The head of version 7 is that of version 5; behind it its end for ONNX Runtime: picture, box, class, score."""

    def call(model: nn.Module, pixels: torch.Tensor) -> torch.Tensor:
        found = model(pixels)
        boxes, (best, labels) = _corners(found[..., :4]), (found[..., 5:] * found[..., 4:5]).max(2, keepdim=True)
        chosen = OnnxNms.apply(boxes + labels.float() * 640.0, best.transpose(1, 2).contiguous())
        row, place = chosen[:, 0], chosen[:, 2]
        return torch.cat((row[:, None].float(), boxes[row, place], labels[row, place].float(), best[row, place]), 1)

    return _moving(YoloV5(), call)


@network
def yolo8_indices() -> Subject:
    """Boxes, scores and what was selected of them, as TensorFlow's YOLOv3 has its outputs."""

    def call(model: nn.Module, pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        found = model(pixels)
        boxes, scores = _corners(found[:, :4].transpose(1, 2)), found[:, 4:]
        return boxes, scores, OnnxNms.apply(boxes, scores)

    return _moving(YoloV8(), call)
