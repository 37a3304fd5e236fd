"""What is done to a picture before a network sees it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

Layout = Literal["nchw", "nhwc"]
Color = Literal["rgb", "bgr", "gray"]
Resample = Literal["bilinear", "bicubic", "nearest"]
Size = tuple[int, int]
"""Height and width, in pixels."""


@dataclass(frozen=True)
class Preprocess:
    """How the pixels of a picture (0 to 255) become a network's input.

    In this order: resized or letterboxed, cropped in the middle, put in the order of ``color``; then in FP32
    ``(pixel / scale - mean) / std`` for each channel; put in ``layout`` and cast to ``dtype``.

    Attributes:
        size: Height and width of the network's input, in pixels.
        resize: The length that the shorter side is resized to, or height and width; None to leave the size.
        crop: Whether the middle of ``size`` is cut out, where the resized picture is larger.
        letterbox: Whether the whole picture is fitted into ``size``, its sides in proportion, and centred on ``fill``.
        scale: Divides the pixels: 255 for a range of 0 to 1.
        mean: Of each channel, in the order of ``color`` and the unit after ``scale``.
        std: Likewise.
        layout: Where the channels are in the input.
        color: The order of the channels.
        dtype: The input's type.
        resample: How pixels are interpolated; Pillow's filters, which are antialiased where a picture gets smaller.
        fill: The pixel around a picture that is smaller than ``size``, 0 to 255.
        function: ``FILE.py:FUNCTION`` that takes the picture (``PIL.Image``, RGB) and returns the array in place of
            all this; empty without one.

    Example:
        >>> Preprocess((224, 224), resize=256, crop=True, mean=(0.5,) * 3, std=(0.5,) * 3).affine()
        (array([0.00784314, 0.00784314, 0.00784314]), array([-1., -1., -1.]))
    """

    size: Size
    resize: int | Size | None = None
    crop: bool = False
    letterbox: bool = False
    scale: float = 255.0
    mean: tuple[float, ...] = (0.0, 0.0, 0.0)
    std: tuple[float, ...] = (1.0, 1.0, 1.0)
    layout: Layout = "nchw"
    color: Color = "rgb"
    dtype: str = "float32"
    resample: Resample = "bilinear"
    fill: int = 0
    function: str = ""

    @property
    def channels(self) -> int:
        """1 of gray pictures, else 3."""
        return 1 if self.color == "gray" else 3

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The network's input for one picture."""
        height, width = self.size
        return (1, self.channels, height, width) if self.layout == "nchw" else (1, height, width, self.channels)

    def affine(self) -> tuple[np.ndarray, np.ndarray]:
        """``multiplier`` and ``offset``, FP64 ``[channels]``, with which ``input = pixel * multiplier + offset``."""
        std = np.array(self.std)
        return 1.0 / (self.scale * std), -np.array(self.mean) / std

    def resized(self, height: int, width: int) -> Size:
        """The size that a picture of ``height`` and ``width`` pixels is resized to, before it is cropped or filled up.

        The longer side is rounded down, as torchvision's ``Resize`` does, and to the nearest in a letterbox, as YOLO's
        does.
        """
        if self.letterbox:
            ratio = min(self.size[0] / height, self.size[1] / width)
            return max(1, round(height * ratio)), max(1, round(width * ratio))
        if isinstance(self.resize, int):
            shorter = min(height, width)
            return max(1, self.resize * height // shorter), max(1, self.resize * width // shorter)
        return self.resize or (height, width)

    def corner(self, resized: Size) -> tuple[int, int]:
        """Where the upper left pixel of the resized picture comes to lie in the input: row and column, negative where
        it is cut off. Odd pixels go below and to the right in a letterbox; a crop is torchvision's ``CenterCrop``."""
        gaps = [want - has for want, has in zip(self.size, resized, strict=True)]
        if self.letterbox:
            return gaps[0] // 2, gaps[1] // 2
        return -round(-gaps[0] / 2), -round(-gaps[1] / 2)

    def describe(self) -> str:
        """The description in one line, as ``--preprocess`` takes it."""
        if self.function:
            return self.function
        side = f"{self.size[0]}x{self.size[1]}"
        parts = [f"letterbox={side}"] if self.letterbox else []
        if self.resize is not None:
            parts.append(f"resize={self.resize if isinstance(self.resize, int) else 'x'.join(map(str, self.resize))}")
        parts += [f"crop={side}"] if self.crop else []
        if any(self.mean):
            parts.append(f"mean={','.join(f'{value:.9g}' for value in self.mean)}")
        if any(value != 1 for value in self.std):
            parts.append(f"std={','.join(f'{value:.9g}' for value in self.std)}")
        parts += [f"scale={self.scale:.9g}", f"color={self.color}", f"layout={self.layout}"]
        if self.resample != "bilinear":
            parts.append(f"resample={self.resample}")
        if self.fill != (114 if self.letterbox else 0):
            parts.append(f"fill={self.fill}")
        return ",".join(parts)
