"""Classifiers and encoders of images."""

from __future__ import annotations

from typing import Any

import timm
import transformers as hf
from subject import Subject, batched, image, network
from timm.utils.model import reparameterize_model
from torch import nn


def _images(module: nn.Module, size: int = 224, **more: Any) -> Subject:
    inputs = {"image": image(size)}
    return Subject(module, inputs, batched(inputs), **more)


def _timm(name: str, size: int = 224, fused: bool = True, **settings: Any) -> Subject:
    """``fused`` is timm's default; two networks' fused attention is refused by torch's exporter (2.13)."""
    timm.layers.set_fused_attn(fused)
    return _images(timm.create_model(name, **settings), size)


@network
def mobilenetv2() -> Subject:
    module = hf.MobileNetV2ForImageClassification(hf.MobileNetV2Config(num_labels=1000))
    return _images(module, call=lambda model, pixels: model(pixels, return_dict=False)[0])


@network
def vit() -> Subject:
    return _timm("vit_base_patch16_224", depth=4)


@network
def swin_tiny() -> Subject:
    return _timm("swin_tiny_patch4_window7_224", depths=(2, 2, 2, 2))


@network
def resnet18() -> Subject:
    return _timm("resnet18")


@network
def resnet50() -> Subject:
    return _timm("resnet50")


@network
def regnety() -> Subject:
    return _timm("regnety_004")


@network
def mobilenetv3() -> Subject:
    return _timm("mobilenetv3_large_100")


@network
def efficientnet_b0() -> Subject:
    return _timm("efficientnet_b0")


@network
def efficientnetv2_s() -> Subject:
    return _timm("tf_efficientnetv2_s")


@network
def convnext_tiny() -> Subject:
    return _timm("convnext_tiny", depths=(2, 2, 3, 2))


@network
def densenet121() -> Subject:
    """A third of its layers."""
    return _timm("densenet121", block_config=(3, 6, 8, 4))


def _plain(name: str, size: int = 224) -> Subject:
    """Branches are summed into one convolution before deployment."""
    return _images(timm.create_model(name), size, deploy=reparameterize_model)


@network
def repvgg() -> Subject:
    return _plain("repvgg_a0")


@network
def mobileone() -> Subject:
    return _plain("mobileone_s0")


@network
def fastvit() -> Subject:
    return _plain("fastvit_t8", 256)


@network
def vgg16() -> Subject:
    return _timm("vgg16")


@network
def deit_small() -> Subject:
    return _timm("deit_small_patch16_224", depth=4)


@network
def dinov2_small() -> Subject:
    """With registers."""
    return _timm("vit_small_patch14_reg4_dinov2", depth=4, img_size=224)


@network
def beit() -> Subject:
    return _timm("beit_base_patch16_224", depth=4, fused=False)


@network
def poolformer() -> Subject:
    return _timm("poolformer_s12")


@network
def hiera() -> Subject:
    return _timm("hiera_tiny_224", stages=(1, 2, 3, 1), fused=False)


@network
def pvt_v2() -> Subject:
    return _timm("pvt_v2_b1")


@network
def mobilevit() -> Subject:
    return _timm("mobilevit_s", 256)


@network
def swinv2_tiny() -> Subject:
    """Attention with L2-normalised queries and keys."""
    return _timm("swinv2_tiny_window8_256", 256, depths=(2, 2, 2, 2))


@network
def clip_vision() -> Subject:
    module = hf.CLIPVisionModel(hf.CLIPVisionConfig(num_hidden_layers=4))
    return _images(module, call=lambda model, pixels: model(pixels, return_dict=False)[1])


@network
def vit_transformers() -> Subject:
    module = hf.ViTModel(hf.ViTConfig(num_hidden_layers=4))
    return _images(module, call=lambda model, pixels: model(pixels, return_dict=False)[0])
