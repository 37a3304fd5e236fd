"""Detection, segmentation, images out of networks: dense outputs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torchvision
import transformers as hf
from diffusers import AutoencoderKL, DiTTransformer2DModel, UNet2DConditionModel
from subject import BATCH, Subject, batched, image, network
from torch import nn
from written import EDSR, UNet, YoloV8

HEIGHT_WIDTH = {2: "height", 3: "width"}


def _images(size: int, module: nn.Module, batch: int = BATCH, sizes: bool = False, **more: Any) -> Subject:
    inputs = {"image": image(size, batch)}
    return Subject(module, inputs, batched(inputs, **({"image": HEIGHT_WIDTH} if sizes else {})), **more)


@network
def vae_decoder() -> Subject:
    """Of Stable Diffusion: half its widths, one layer a block less."""
    module = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(64, 128, 256),
        layers_per_block=1,
        latent_channels=4,
    )
    inputs = {"latent": torch.randn(BATCH, 4, 32, 32)}
    return Subject(module, inputs, batched(inputs), lambda model, latent: model.decode(latent, return_dict=False)[0])


@network
def sd_unet() -> Subject:
    """Of Stable Diffusion: its first two resolutions, one layer a block."""
    module = UNet2DConditionModel(
        sample_size=32,
        layers_per_block=1,
        block_out_channels=(320, 640),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=768,
        attention_head_dim=8,
    )
    inputs = {
        "sample": torch.randn(BATCH, 4, 32, 32),
        "timestep": torch.linspace(1, 900, BATCH),
        "states": torch.randn(BATCH, 77, 768),
    }

    def call(model: nn.Module, sample: torch.Tensor, time: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        return model(sample, time, states, return_dict=False)[0]

    return Subject(module, inputs, batched(inputs), call)


@network
def dit() -> Subject:
    module = DiTTransformer2DModel(num_layers=2)
    inputs = {
        "latent": torch.randn(BATCH, 4, 32, 32),
        "timestep": torch.linspace(1, 900, BATCH).long(),
        "label": torch.randint(0, 1000, (BATCH,)),
    }

    def call(model: nn.Module, latent: torch.Tensor, time: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return model(latent, timestep=time, class_labels=label, return_dict=False)[0]

    return Subject(module, inputs, batched(inputs), call)


def _detections(model: nn.Module, pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    found = model(pixel_values=pixels)
    return found.logits, found.pred_boxes


@network
def detr() -> Subject:
    """ResNet-50, two layers of encoder and of decoder; every pixel is valid."""
    config = hf.DetrConfig(
        backbone_config=hf.ResNetConfig(out_features=["stage4"]), encoder_layers=2, decoder_layers=2, num_labels=91
    )
    return _images(320, hf.DetrForObjectDetection(config), call=_detections)


@network
def rtdetr() -> Subject:
    config = hf.RTDetrConfig(decoder_layers=2, num_labels=80, anchor_image_size=[320, 320])
    return _images(320, hf.RTDetrForObjectDetection(config), call=_detections)


@network
def yolos() -> Subject:
    config = hf.YolosConfig(num_hidden_layers=3, image_size=[256, 256], num_labels=91)
    return _images(256, hf.YolosForObjectDetection(config), call=_detections)


@network
def yolov8() -> Subject:
    return _images(320, YoloV8(), sizes=True)


@network
def ssdlite() -> Subject:
    """Without its selection of boxes."""
    module = torchvision.models.detection.ssdlite320_mobilenet_v3_large(weights=None, weights_backbone=None)

    def call(model: nn.Module, pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = model.head(list(model.backbone(pixels).values()))
        return found["bbox_regression"], found["cls_logits"]

    return _images(320, module, call=call)


@network
def deeplabv3() -> Subject:
    module = torchvision.models.segmentation.deeplabv3_mobilenet_v3_large(weights=None, weights_backbone=None)
    return _images(256, module, sizes=True, call=lambda model, pixels: model(pixels)["out"])


@network
def segformer() -> Subject:
    module = hf.SegformerForSemanticSegmentation(hf.SegformerConfig(num_labels=150))
    return _images(256, module, call=lambda model, pixels: model(pixels, return_dict=False)[0])


@network
def mask2former() -> Subject:
    backbone = hf.SwinConfig(depths=[1, 1, 2, 1], out_features=["stage1", "stage2", "stage3", "stage4"], image_size=256)
    config = hf.Mask2FormerConfig(backbone_config=backbone, encoder_layers=2, decoder_layers=3, num_labels=80)

    def call(model: nn.Module, pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = model(pixel_values=pixels)
        return found.class_queries_logits, found.masks_queries_logits

    # The exporter gives one branch the example's batch for good: with another the file runs in no runtime.
    return replace(_images(256, hf.Mask2FormerForUniversalSegmentation(config), batch=1, call=call), axes={})


@network
def sam_encoder() -> Subject:
    """At 512 instead of 1024 pixels: one block of windows, one of all."""
    config = hf.SamVisionConfig(num_hidden_layers=2, image_size=512, global_attn_indexes=[1])
    return _images(512, hf.SamVisionModel(config), batch=1, call=lambda model, x: model(x, return_dict=False)[0])


@network
def unet() -> Subject:
    return _images(128, UNet(), sizes=True)


@network
def edsr() -> Subject:
    return _images(96, EDSR())


@network
def convnextv2() -> Subject:
    """Global response normalization."""
    module = hf.ConvNextV2ForImageClassification(hf.ConvNextV2Config(depths=[1, 1, 2, 1]))
    return _images(224, module, call=lambda model, pixels: model(pixels, return_dict=False)[0])


@network
def yolov8_nms() -> Subject:
    """One image, with its selection: the best 300 boxes, NMS by class."""

    def call(model: nn.Module, pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        found = model(pixels)[0].transpose(0, 1)
        centre, half = found[:, :2], found[:, 2:4] / 2
        scores, classes = found[:, 4:].max(1)
        scores, order = scores.topk(300)
        boxes, classes = torch.cat([centre - half, centre + half], 1)[order], classes[order]
        kept = torch.ops.torchvision.nms(boxes + 4096.0 * classes.unsqueeze(1), scores, 0.6)
        return boxes[kept], scores[kept], classes[kept]

    inputs = {"image": image(320, 1)}
    return Subject(YoloV8(), inputs, {"image": {}}, call)
