"""Four well-known networks with seeded random weights, as PyTorch modules small enough to read.

Sizes are those of the papers: MobileNetV2 (Sandler et al. 2018, table 2), ViT-B/16 (Dosovitskiy et al. 2021, table 1),
BERT-base (Devlin et al. 2019, section 3), ConvNeXt-T (Liu et al. 2022, section 2). Weights are what PyTorch
initialises them to: no time depends on them.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


class ConvBnRelu6(nn.Sequential):
    def __init__(self, c_in: int, c_out: int, kernel: int, stride: int = 1, groups: int = 1) -> None:
        conv = nn.Conv2d(c_in, c_out, kernel, stride, kernel // 2, groups=groups, bias=False)
        super().__init__(conv, nn.BatchNorm2d(c_out), nn.ReLU6())


class InvertedResidual(nn.Module):
    def __init__(self, c_in: int, c_out: int, stride: int, expansion: int) -> None:
        super().__init__()
        hidden = c_in * expansion
        expand = [ConvBnRelu6(c_in, hidden, 1)] if expansion > 1 else []
        depthwise = ConvBnRelu6(hidden, hidden, 3, stride, groups=hidden)
        project = nn.Conv2d(hidden, c_out, 1, bias=False)
        self.branch = nn.Sequential(*expand, depthwise, project, nn.BatchNorm2d(c_out))
        self.residual = stride == 1 and c_in == c_out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.branch(x) if self.residual else self.branch(x)


def mobilenet_v2() -> nn.Module:
    """Input [N, 3, 224, 224], output [N, 1000]."""
    rows = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
    layers: list[nn.Module] = [ConvBnRelu6(3, 32, 3, 2)]
    channels = 32
    for expansion, width, blocks, stride in rows:
        for block in range(blocks):
            layers.append(InvertedResidual(channels, width, stride if block == 0 else 1, expansion))
            channels = width
    pool = (nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return nn.Sequential(*layers, ConvBnRelu6(channels, 1280, 1), *pool, nn.Linear(1280, 1000))


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        batch, length, width = x.shape
        split = [each(x).view(batch, length, self.heads, -1).transpose(1, 2) for each in (self.q, self.k, self.v)]
        mixed = functional.scaled_dot_product_attention(*split, attn_mask=mask)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Mlp(nn.Sequential):
    def __init__(self, width: int) -> None:
        super().__init__(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


class VitBlock(nn.Module):
    """Normalisation before attention and MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.mlp = Attention(width, heads), Mlp(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Vit(nn.Module):
    """ViT-B/16: input [N, 3, 224, 224], output [N, 1000]."""

    def __init__(self, width: int = 768, depth: int = 12, heads: int = 12, patch: int = 16) -> None:
        super().__init__()
        tokens = (224 // patch) ** 2 + 1
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.position = nn.Parameter(torch.randn(1, tokens, width) * 0.02)
        self.blocks = nn.Sequential(*(VitBlock(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.token.expand(x.shape[0], -1, -1), x), dim=1) + self.position
        return self.head(self.norm(self.blocks(x))[:, 0])


class BertBlock(nn.Module):
    """Normalisation after each residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.mlp = Attention(width, heads), Mlp(width)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.norm1(x + self.attention(x, mask))
        return self.norm2(x + self.mlp(x))


class Bert(nn.Module):
    """BERT-base: token numbers and mask [N, S], output [N, S, 768]."""

    def __init__(self, width: int = 768, depth: int = 12, heads: int = 12, vocabulary: int = 30522) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(512, width)
        self.norm = nn.LayerNorm(width)
        self.blocks = nn.ModuleList(BertBlock(width, heads) for _ in range(depth))

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.words(input_ids) + self.positions.weight[: input_ids.shape[1]])
        mask = (1.0 - attention_mask[:, None, None, :].to(x.dtype)) * -10000.0
        for block in self.blocks:
            x = block(x, mask)
        return x


class ConvNeXtBlock(nn.Module):
    """The channels are last between the two permutations, as in the original code."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm, self.mlp = nn.LayerNorm(width), Mlp(width)
        self.scale = nn.Parameter(torch.full((width,), 0.1))  # of a trained network; it starts at 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.mlp(self.norm(self.depthwise(x).permute(0, 2, 3, 1))) * self.scale
        return x + y.permute(0, 3, 1, 2)


class ChannelNorm(nn.LayerNorm):
    """LayerNorm over the channels of [N, C, H, W]."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def convnext_t() -> nn.Module:
    """Input [N, 3, 224, 224], output [N, 1000]."""
    layers: list[nn.Module] = [nn.Conv2d(3, 96, 4, 4), ChannelNorm(96)]
    widths = (96, 192, 384, 768)
    for stage, (width, depth) in enumerate(zip(widths, (3, 3, 9, 3), strict=True)):
        if stage:
            layers += [ChannelNorm(widths[stage - 1]), nn.Conv2d(widths[stage - 1], width, 2, 2)]
        layers += [ConvNeXtBlock(width) for _ in range(depth)]
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LayerNorm(768), nn.Linear(768, 1000))
    return nn.Sequential(*layers, *head)
