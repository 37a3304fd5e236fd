"""Networks whose libraries are not Python packages that can be installed here, written after their papers and code."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional


class ConvUnit(nn.Sequential):
    """Convolution, BatchNorm, SiLU."""

    def __init__(self, inside: int, outside: int, size: int = 1, stride: int = 1) -> None:
        conv = nn.Conv2d(inside, outside, size, stride, size // 2, bias=False)
        super().__init__(conv, nn.BatchNorm2d(outside, eps=1e-3), nn.SiLU(inplace=True))


class C2f(nn.Module):
    def __init__(self, inside: int, outside: int, repeats: int, shortcut: bool) -> None:
        super().__init__()
        half = outside // 2
        self.first, self.last = ConvUnit(inside, outside), ConvUnit((2 + repeats) * half, outside)
        pair = [nn.Sequential(ConvUnit(half, half, 3), ConvUnit(half, half, 3)) for _ in range(repeats)]
        self.blocks, self.shortcut = nn.ModuleList(pair), shortcut

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = list(self.first(x).chunk(2, 1))
        for block in self.blocks:
            made = block(parts[-1])
            parts.append(parts[-1] + made if self.shortcut else made)
        return self.last(torch.cat(parts, 1))


class SPPF(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.last = ConvUnit(width, width // 2), ConvUnit(width * 2, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = [self.first(x)]
        for _ in range(3):
            parts.append(functional.max_pool2d(parts[-1], 5, 1, 2))
        return self.last(torch.cat(parts, 1))


class YoloV8(nn.Module):
    """YOLOv8n: boxes and scores of 80 classes at three strides, decoded."""

    def __init__(self, classes: int = 80, bins: int = 16) -> None:
        super().__init__()
        self.classes, self.bins = classes, bins
        self.stem = nn.Sequential(ConvUnit(3, 16, 3, 2), ConvUnit(16, 32, 3, 2), C2f(32, 32, 1, True))
        self.p3 = nn.Sequential(ConvUnit(32, 64, 3, 2), C2f(64, 64, 2, True))
        self.p4 = nn.Sequential(ConvUnit(64, 128, 3, 2), C2f(128, 128, 2, True))
        self.p5 = nn.Sequential(ConvUnit(128, 256, 3, 2), C2f(256, 256, 1, True), SPPF(256))
        self.up4, self.up3 = C2f(384, 128, 1, False), C2f(192, 64, 1, False)
        self.down3, self.down4 = ConvUnit(64, 64, 3, 2), ConvUnit(128, 128, 3, 2)
        self.out4, self.out5 = C2f(192, 128, 1, False), C2f(384, 256, 1, False)
        widths = (64, 128, 256)
        self.boxes = nn.ModuleList(
            nn.Sequential(ConvUnit(w, 64, 3), ConvUnit(64, 64, 3), nn.Conv2d(64, 4 * bins, 1)) for w in widths
        )
        self.scores = nn.ModuleList(
            nn.Sequential(ConvUnit(w, 80, 3), ConvUnit(80, 80, 3), nn.Conv2d(80, classes, 1)) for w in widths
        )
        self.register_buffer("places", torch.arange(bins, dtype=torch.float32).view(1, 1, bins, 1))

    def deepest(self, x: torch.Tensor) -> torch.Tensor:
        """The coarsest level of the backbone."""
        return self.p5(x)

    def levels(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Features at strides 8, 16 and 32."""
        p3 = self.p3(self.stem(x))
        p4 = self.p4(p3)
        p5 = self.deepest(p4)
        n4 = self.up4(torch.cat([functional.interpolate(p5, scale_factor=2.0), p4], 1))
        n3 = self.up3(torch.cat([functional.interpolate(n4, scale_factor=2.0), p3], 1))
        n4 = self.out4(torch.cat([self.down3(n3), n4], 1))
        return n3, n4, self.out5(torch.cat([self.down4(n4), p5], 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        boxes, scores, centres, strides = [], [], [], []
        for index, level in enumerate(self.levels(x)):
            boxes.append(self.boxes[index](level).flatten(2))
            scores.append(self.scores[index](level).flatten(2))
            height, width = level.shape[-2:]
            rows = (torch.arange(height) + 0.5).view(-1, 1).expand(height, width)
            columns = (torch.arange(width) + 0.5).view(1, -1).expand(height, width)
            centres.append(torch.stack([columns.flatten(), rows.flatten()]))
            strides.append(torch.full((1, height * width), 8.0 * 2**index))
        found = torch.cat(boxes, 2)
        spread = found.view(found.shape[0], 4, self.bins, -1).softmax(2)
        left, right = (spread * self.places).sum(2).chunk(2, 1)
        centre = torch.cat(centres, 1).unsqueeze(0)
        box = torch.cat([centre + (right - left) / 2, left + right], 1) * torch.cat(strides, 1)
        return torch.cat([box, torch.cat(scores, 2).sigmoid()], 1)


class UNet(nn.Module):
    """The classic one, of 32 to 256 channels."""

    def __init__(self, widths: tuple[int, ...] = (32, 64, 128, 256)) -> None:
        super().__init__()
        self.down = nn.ModuleList(self._pair(a, b) for a, b in zip((3, *widths), widths, strict=False))
        back = list(zip(widths[:0:-1], widths[-2::-1], strict=True))
        self.grow = nn.ModuleList(nn.ConvTranspose2d(a, b, 2, 2) for a, b in back)
        self.up = nn.ModuleList(self._pair(2 * b, b) for _, b in back)
        self.last = nn.Conv2d(widths[0], 2, 1)

    @staticmethod
    def _pair(inside: int, outside: int) -> nn.Sequential:
        units = []
        for width in (inside, outside):
            units += [nn.Conv2d(width, outside, 3, padding=1, bias=False), nn.BatchNorm2d(outside), nn.ReLU()]
        return nn.Sequential(*units)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = []
        for index, block in enumerate(self.down):
            x = block(functional.max_pool2d(x, 2) if index else x)
            kept.append(x)
        kept.pop()
        for grow, block in zip(self.grow, self.up, strict=True):
            x = block(torch.cat([kept.pop(), grow(x)], 1))
        return self.last(x)


class EDSR(nn.Module):
    """The baseline of 64 channels, eight of its sixteen blocks, twice the size."""

    def __init__(self, width: int = 64, blocks: int = 8) -> None:
        super().__init__()
        self.head = nn.Conv2d(3, width, 3, padding=1)
        conv = lambda: nn.Conv2d(width, width, 3, padding=1)  # noqa: E731
        self.body = nn.ModuleList(nn.Sequential(conv(), nn.ReLU(), conv()) for _ in range(blocks))
        self.join = conv()
        self.tail = nn.Sequential(
            nn.Conv2d(width, 4 * width, 3, padding=1), nn.PixelShuffle(2), nn.Conv2d(width, 3, 3, padding=1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.head(x)
        x = first
        for block in self.body:
            x = x + 0.1 * block(x)
        return self.tail(first + self.join(x))


class HifiGan(nn.Module):
    """HiFi-GAN's generator V1 at half its width: transposed convolutions, residual blocks of three dilations."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.first = nn.Conv1d(80, width, 7, padding=3)
        self.ups, self.blocks = nn.ModuleList(), nn.ModuleList()
        for index, (rate, size) in enumerate(((8, 16), (8, 16), (2, 4), (2, 4))):
            inside, outside = width >> index, width >> (index + 1)
            self.ups.append(nn.ConvTranspose1d(inside, outside, size, rate, (size - rate) // 2))
            self.blocks.append(nn.ModuleList(self._block(outside, kernel) for kernel in (3, 7, 11)))
        self.last = nn.Conv1d(width >> 4, 1, 7, padding=3)

    @staticmethod
    def _block(width: int, size: int) -> nn.ModuleList:
        def conv(step: int) -> nn.Conv1d:
            return nn.Conv1d(width, width, size, dilation=step, padding=(size - 1) * step // 2)

        return nn.ModuleList(nn.ModuleList([conv(step), conv(1)]) for step in (1, 3, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for grow, blocks in zip(self.ups, self.blocks, strict=True):
            x = grow(functional.leaky_relu(x, 0.1))
            found = []
            for block in blocks:
                y = x
                for dilated, conv in block:
                    y = y + conv(functional.leaky_relu(dilated(functional.leaky_relu(y, 0.1)), 0.1))
                found.append(y)
            x = (found[0] + found[1] + found[2]) / 3
        return torch.tanh(self.last(functional.leaky_relu(x)))


class Recurrent(nn.Module):
    """A tagger: embeddings, two recurrent layers in both directions, scores."""

    def __init__(self, kind: type[nn.RNNBase], vocabulary: int = 4000, width: int = 256) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = kind(width, width, num_layers=2, batch_first=True, bidirectional=True)
        self.scores = nn.Linear(2 * width, 32)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.scores(self.layers(self.embed(ids))[0])


class DLRM(nn.Module):
    """Dense features and 26 tables, their products in pairs. ``bags``: EmbeddingBag, else Embedding and sum."""

    def __init__(self, bags: bool, tables: int = 26, rows: int = 4000, width: int = 64) -> None:
        super().__init__()
        kind = nn.EmbeddingBag if bags else nn.Embedding
        settings = {"mode": "sum"} if bags else {}
        self.tables, self.bags = nn.ModuleList(kind(rows, width, **settings) for _ in range(tables)), bags
        self.bottom = self._mlp(13, 512, 256, width)
        self.top = self._mlp(width + (tables + 1) * tables // 2, 512, 256, 1)
        rows_, columns = torch.tril_indices(tables + 1, tables + 1, -1)
        self.register_buffer("pairs", rows_ * (tables + 1) + columns)

    @staticmethod
    def _mlp(*widths: int) -> nn.Sequential:
        layers: list[nn.Module] = []
        for inside, outside in pairwise(widths):
            layers += [nn.Linear(inside, outside), nn.ReLU()]
        return nn.Sequential(*layers[:-1])

    def forward(self, dense: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        x = self.bottom(dense)
        found = [table(ids[:, index]) for index, table in enumerate(self.tables)]
        found = found if self.bags else [each.sum(1) for each in found]
        rows = torch.stack([x, *found], 1)
        products = torch.bmm(rows, rows.transpose(1, 2)).flatten(1)
        return torch.sigmoid(self.top(torch.cat([x, products[:, self.pairs]], 1)))
