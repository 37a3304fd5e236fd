"""Labels of pictures in the terms of a network's input: boxes in its pixels, masks and targets as large as it.

They are read and computed when they are asked for, so that memory does not grow with the pictures.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from trtopt.errors import UsageError
from trtopt.images.decode import picture_size, prepare, read_mask
from trtopt.images.labels import Labels
from trtopt.images.preprocess import Preprocess, Size


def boxes(labels: Labels, index: int) -> np.ndarray:
    """FP32 ``[boxes, 6]``: class, left, upper, right and lower edge in pixels of the input, and 1 for a crowd.

    Stretching a picture changes no share in which boxes overlap: figures are those in the picture's own pixels.

    Raises:
        UsageError: The picture cannot be read; or it is upright and the labels say that it lies, or the other way
            round, as where they do not heed its EXIF orientation.
    """
    how, shares = _how(labels), np.asarray(labels.values[index])
    height, width = picture_size(labels.files[index])
    high, wide = labels.sizes[index] if labels.sizes else (height, width)
    if (height - width) * (high - wide) < 0:
        raise UsageError(
            f"The picture is {width}x{height} as it is seen, and {wide:g}x{high:g} by its labels",
            where=f"{labels.files[index]}, {labels.where}",
            remedy="turn the picture's file as its EXIF orientation says, or take that out, whichever the boxes fit",
        )
    height, width = how.resized(height, width)
    top, left = how.corner((height, width))
    found = shares.copy()
    found[:, 1:5] = shares[:, 1:5] * (width, height, width, height) + (left, top, left, top)
    return found


def mask(labels: Labels, index: int, *, is_binary: bool = False) -> np.ndarray:
    """The class of each pixel, int32 ``[height, width]`` of the input; 255 around the picture.

    Args:
        labels: Masks.
        index: The picture.
        is_binary: Whether black and white stand for 0 and 1.

    Raises:
        UsageError: The label is no mask.
    """
    return read_mask(Path(str(labels.values[index])), _how(labels), is_binary=is_binary)


def target(labels: Labels, index: int, size: Size) -> np.ndarray:
    """The picture that the network should give, as its input would be: FP32 ``[1, 3, *size]``, or channels last.

    Raises:
        UsageError: The label is no picture.
    """
    how = _how(labels)
    resize, (height, width) = how.resize, how.size
    if isinstance(resize, int):
        resize = round(resize * size[0] / height)
    elif resize is not None:
        resize = round(resize[0] * size[0] / height), round(resize[1] * size[1] / width)
    path = Path(str(labels.values[index]))
    return prepare(path, replace(how, size=size, resize=resize, dtype="float32"))


def _how(labels: Labels) -> Preprocess:
    if labels.how is None:
        raise ValueError("labels are placed in pictures that are prepared in a known way")
    return labels.how
