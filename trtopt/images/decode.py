"""A picture decoded, whoever made the file, and prepared for a network."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from trtopt.errors import TrtoptError, UsageError
from trtopt.images.preprocess import Preprocess, Size
from trtopt.support._lazy import require
from trtopt.support.files import open_file

MOST_BYTES = 256 << 20
"""Of a file."""

MOST_PIXELS = 1 << 26
"""Of a picture, whatever its file says: 67 million (8192 x 8192) take 0.6 GB as they are decoded and converted."""

_FORMATS = ("JPEG", "PNG", "WEBP")
_DEEP = ("I;16", "I;16B", "I;16L", "I;16N")
"""Pillow's modes of 16-bit gray."""


def pillow() -> Any:
    """Pillow's ``PIL.Image``. Raises MissingDependencyError: it is not installed."""
    return require("PIL.Image", "images", "read pictures")


def picture_size(path: Path) -> Size:
    """Height and width of a picture as it is seen, from its header. Raises UsageError as :func:`read_picture`."""
    height, width = _opened(path, lambda image: _turned(image, image.size))
    return height, width


def read_picture(path: Path) -> Any:
    """A picture as ``PIL.Image`` in RGB, turned as its EXIF orientation says.

    Palettes, gray, CMYK and YCbCr are converted, transparency is dropped (as torchvision's loader does it), of 16 bits
    the upper 8 are kept, and of an animation the first picture.

    Args:
        path: A JPEG, PNG or WebP file.

    Raises:
        UsageError: It cannot be read or decoded, is of another format or has too many pixels or values that are no
            pixels (32-bit integers and floats).
    """
    return _opened(path, lambda image: _converted(image, "RGB"))


def prepare(path: Path, how: Preprocess) -> np.ndarray:
    """The network's input for one picture, ``how.shape`` in ``how.dtype``.

    Example:
        >>> prepare(Path("cat.jpg"), Preprocess((224, 224), resize=256, crop=True)).shape
        (1, 3, 224, 224)

    Raises:
        UsageError: As of :func:`read_picture`.
    """
    pixels = _opened(path, lambda image: placed(_converted(image, "L" if how.channels == 1 else "RGB"), how))
    if how.channels == 1:
        pixels = pixels[..., None]
    elif how.color == "bgr":
        pixels = pixels[..., ::-1]
    if how.layout == "nchw":
        pixels = pixels.transpose(2, 0, 1)
    if how.dtype == "uint8":
        return np.ascontiguousarray(pixels[None])
    shape = (-1, 1, 1) if how.layout == "nchw" else (-1,)
    mean, std = (np.array(values, np.float32).reshape(shape) for values in (how.mean, how.std))
    found = (pixels / np.float32(how.scale) - mean) / std
    return np.ascontiguousarray(found[None], dtype=np.dtype(how.dtype))


def prepare_by(function: Callable[[Any], Any], path: Path, where: str) -> np.ndarray:
    """What the user's function, which is at ``where``, makes of a picture.

    Raises:
        UsageError: As of :func:`read_picture`; or the function fails.
    """
    image = read_picture(path)
    try:
        return np.asarray(function(image))
    except TrtoptError:
        raise
    except (Exception, SystemExit) as error:
        raise UsageError(
            f"--preprocess: the function failed: {type(error).__name__}: {' '.join(str(error).split())[:200]}",
            where=f"{where}, picture {path}",
            remedy="it takes a PIL.Image in RGB and returns the array that the network takes",
        ) from error


def placed(image: Any, how: Preprocess, *, nearest: bool = False) -> np.ndarray:
    """The pixels of a picture, uint8 ``[height, width]`` or ``[height, width, 3]``, as large as the network's input.

    Args:
        image: ``PIL.Image``.
        how: Says how it is resized, cropped and filled up.
        nearest: Whether no pixel is interpolated, as of a mask of classes, whose fill is then 255.

    Raises:
        ValueError: Resized it would have too many pixels.
    """
    height, width = how.resized(image.height, image.width)
    if (height, width) != (image.height, image.width):
        kind = pillow().Resampling["NEAREST" if nearest else how.resample.upper()]
        if height * width > MOST_PIXELS:  # of a picture that is long and thin
            raise ValueError(f"resized to {width}x{height} it would have more than {MOST_PIXELS} pixels")
        image = image.resize((width, height), kind)
    pixels = np.asarray(image)
    top, left = how.corner((height, width))
    pixels = pixels[max(0, -top) : how.size[0] - top, max(0, -left) : how.size[1] - left]
    if pixels.shape[:2] == how.size:
        return pixels
    whole = np.full((*how.size, *pixels.shape[2:]), 255 if nearest else how.fill, pixels.dtype)
    row, column = max(0, top), max(0, left)
    whole[row : row + pixels.shape[0], column : column + pixels.shape[1]] = pixels
    return whole


def _opened(path: Path, use: Callable[[Any], Any]) -> Any:
    """What ``use`` makes of the picture in a file."""
    image_module = pillow()
    with open_file(path, "The picture", MOST_BYTES) as file:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of Pillow on sizes and damaged EXIF
                with image_module.open(file, formats=_FORMATS) as image:
                    if image.width * image.height > MOST_PIXELS:
                        raise ValueError(f"it has {image.width}x{image.height} pixels, more than {MOST_PIXELS}")
                    return use(image)
        except (TrtoptError, MemoryError):
            raise
        except Exception as error:  # Pillow's decoders raise a dozen kinds, SyntaxError and struct.error among them
            text = " ".join(str(error).replace(f" {file!r}", "").split())[:200]
            raise UsageError(
                f"The picture cannot be decoded: {text or type(error).__name__}",
                where=str(path),
                remedy="give a JPEG, PNG or WebP file that is whole, or leave out such pictures with --skip-bad",
            ) from error


def _converted(image: Any, mode: str) -> Any:
    image.load()
    if image.mode in _DEEP:
        image = pillow().fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise ValueError(f"its mode is {image.mode}: 32-bit values are no pixels from 0 to 255")
    turned = require("PIL.ImageOps", "images", "read pictures").exif_transpose(image)
    return turned if turned.mode == mode else turned.convert(mode)


def _turned(image: Any, size: tuple[int, int]) -> Size:
    """Height and width once the picture is turned: orientations 5 to 8 of EXIF (tag 274) exchange them."""
    width, height = size
    return (width, height) if image.getexif().get(274, 1) in (5, 6, 7, 8) else (height, width)


def read_mask(path: Path, how: Preprocess, *, is_binary: bool = False) -> np.ndarray:
    """The class of each pixel, integers of ``how.size``, without interpolation; 255 around the picture.

    Args:
        path: A picture of indices.
        how: What is done to the picture that it belongs to.
        is_binary: Whether black and white (0 and 255 alone) stand for 0 and 1.

    Raises:
        UsageError: As of :func:`read_picture`; or it has colours: the pixels of a mask are indices (gray, or of a
            palette).
    """

    def indices(image: Any) -> np.ndarray:
        image.load()
        if image.mode not in ("P", "L", "1", *_DEEP):
            raise ValueError(f"its mode is {image.mode}, and a mask has one index for each pixel")
        values = np.asarray(image).astype(np.int32)
        values = black_and_white(values) if is_binary else values
        found = pillow().fromarray(values, mode="I")
        return placed(found, how, nearest=True)

    return np.asarray(_opened(path, indices))


def black_and_white(mask: np.ndarray) -> np.ndarray:
    """A mask of 0 and 255 alone as one of 0 and 1; others as they are."""
    return np.asarray(mask // 255) if np.isin(mask, (0, 255)).all() else mask
