"""``--preprocess`` read for the input of a network."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

from trtopt.errors import UsageError
from trtopt.graph.artifact import InputSpec
from trtopt.images.preprocess import Color, Layout, Preprocess, Resample, Size
from trtopt.support._script import is_script
from trtopt.support.words import did_you_mean

LARGEST_SIDE = 16384
"""Pixels; what networks take is far below."""

_WHERE = "--preprocess"
_REMEDY = (
    "write imagenet, clip, yolo, FILE.py:FUNCTION, or keys such as "
    "resize=256,crop=224,mean=0.485,0.456,0.406,std=0.229,0.224,0.225,scale=255,color=rgb (also behind a name)"
)
_LARGE = 128
"""From this side on, networks of ImageNet see the middle 224 of 256 pixels; below it, as of CIFAR, the whole."""

_PRESETS: Mapping[str, Mapping[str, Any]] = {
    # torchvision's references/classification/presets.py
    "imagenet": {"margin": 256 / 224, "mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)},
    # openai/CLIP, clip.py: Resize(n, BICUBIC), CenterCrop(n), Normalize
    "clip": {
        "margin": 1.0,
        "resample": "bicubic",
        "mean": (0.48145466, 0.4578275, 0.40821073),
        "std": (0.26862954, 0.26130258, 0.27577711),
    },
    "yolo": {"letterbox": True},
}
_CODED = frozenset("nv12 nv21 i420 yuv yuv420 yuv444 yuyv uyvy ycbcr".split())
"""How video decoders and cameras code pictures."""

_KEYS = ("resize", "crop", "letterbox", "scale", "mean", "std", "layout", "color", "resample", "fill")


def parse_preprocess(text: str, spec: InputSpec, best: InputSpec | None = None) -> Preprocess:
    """Read ``--preprocess`` for the input that takes pictures; what it does not say follows from the input.

    Args:
        text: ``imagenet``, ``clip``, ``yolo``, each with or without keys behind it, keys alone, or
            ``FILE.py:FUNCTION``. Sizes are ``224`` or ``HEIGHTxWIDTH``; ``mean`` and ``std`` have a number for each
            channel, or one for all.
        spec: The input: float or uint8, of rank 4 with 1 or 3 channels, or of rank 3 with 3.
        best: The input in the sizes that pictures get where neither it nor the text says them; None for none.

    Raises:
        UsageError: The text has another form, contradicts itself or the input, or the input takes no pictures.
    """
    layout, channels, size = picture_axes(spec)
    if is_script(text):
        return Preprocess(size or (0, 0), layout=layout, dtype=str(spec.dtype), function=text)
    coded = next((word for word in re.split("[,= ]", text) if word.lower() in _CODED), None)
    if coded is not None:
        raise UsageError(
            f"--preprocess: pixels are red, green and blue, and {coded} codes them as brightness and colour",
            where=_WHERE,
            remedy="convert frames before the network (NPP, CV-CUDA, OpenCV): decoders differ in roundings and weights "
            "(BT.601 or BT.709, full or limited range), and an engine would give other numbers than your samples",
        )
    name, keys = _split(text)
    said = {key: _value(key, words) for key, words in keys.items()}
    preset = _PRESETS[name] if name else {}
    if said.get("layout", layout) != layout:
        raise _wrong(f"layout={said['layout']}", f"the input {spec.name} of shape {_dims(spec)} is {layout}")
    color = said.get("color", "gray" if channels == 1 else "rgb")
    if (color == "gray") != (channels == 1):
        raise _wrong(f"color={color}", f"the input {spec.name} of shape {_dims(spec)} has {channels} channels")
    size = _size(said, size, spec, None if best is None else picture_axes(best)[2])
    base = Preprocess(size, layout=layout, color=color, dtype=str(spec.dtype))
    return replace(base, **_geometry(said, preset, size), **_values(said, preset, spec, color))


def picture_axes(spec: InputSpec) -> tuple[Layout, int, Size | None]:
    """Layout, channels, and height and width of an input that takes pictures; None for sizes that are dynamic.

    Raises:
        UsageError: It takes no pictures: not float or uint8, not of rank 4 and 1 or 3 channels, nor of rank 3 and 3.
    """
    shape, start = spec.shape, len(spec.shape) - 3
    layouts: tuple[tuple[Layout, int, int], ...] = (("nchw", start, start + 1), ("nhwc", start + 2, start))
    if start in (0, 1) and (spec.dtype.kind == "f" or spec.dtype.name in ("bfloat16", "uint8")):
        for layout, axis, first in layouts:
            channels, found = shape[axis], [side for side in shape[first : first + 2] if isinstance(side, int)]
            if channels == 3 or (channels == 1 and start == 1):
                return layout, int(channels), (found[0], found[1]) if len(found) == 2 else None
    raise UsageError(
        f"The input {spec.name!r} takes no pictures: it is {spec.dtype} {_dims(spec)}",
        where=f"input {spec.name}",
        remedy="pictures go to a float or uint8 input of rank 4 with 1 or 3 channels, or of rank 3 with 3; give other "
        "samples as .npz or script.py:function",
    )


def _split(text: str) -> tuple[str, dict[str, list[str]]]:
    """The name at the front, and the keys with their comma-separated values."""
    name, keys = "", dict[str, list[str]]()
    last: list[str] | None = None
    for index, part in enumerate(word.strip() for word in text.split(",")):
        key, equals, value = (word.strip() for word in part.partition("="))
        if equals:
            if key in keys or key not in _KEYS:
                hint = "is given twice" if key in keys else did_you_mean(key, _KEYS) or f"is none of {', '.join(_KEYS)}"
                raise _wrong(part, f"{key!r}: {hint}")
            last = keys[key] = [value]
        elif last is not None and part:
            last.append(part)
        elif index == 0 and part in _PRESETS:
            name = part
        else:
            raise _wrong(part or text, did_you_mean(part, _PRESETS) or "it is no name and no key=value")
    return name, keys


def _value(key: str, words: Sequence[str]) -> Any:
    if key in ("mean", "std"):
        return tuple(_number(key, word) for word in words)
    if len(words) > 1:
        raise _wrong(f"{key}={','.join(words)}", "it takes one value")
    word = words[0]
    choices: dict[str, tuple[str, ...]] = {
        "layout": get_args(Layout),
        "color": get_args(Color),
        "resample": get_args(Resample),
    }
    if key in choices:
        if word.lower() not in choices[key]:
            raise _wrong(f"{key}={word}", f"choose one of {', '.join(choices[key])}")
        return word.lower()
    if key in ("scale", "fill"):
        number = _number(key, word)
        if (key == "scale" and number <= 0) or (key == "fill" and (not 0 <= number <= 255 or number % 1)):
            raise _wrong(f"{key}={word}", "a scale is above 0, a fill a whole number from 0 to 255")
        return number if key == "scale" else int(number)
    sides = word.lower().split("x")
    if len(sides) > 2 or not all(side.isascii() and side.isdecimal() and len(side) < 6 for side in sides):
        raise _wrong(f"{key}={word}", "a size is 224 or HEIGHTxWIDTH")
    if not all(1 <= int(side) <= LARGEST_SIDE for side in sides):
        raise _wrong(f"{key}={word}", f"sides are from 1 to {LARGEST_SIDE} pixels")
    found = tuple(int(side) for side in sides)
    return found[0] if len(found) == 1 and key == "resize" else found * (3 - len(found))


def _number(key: str, word: str) -> float:
    try:
        number = float(word)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise _wrong(f"{key}={word}", "not a number")
    return number


def _size(said: Mapping[str, Any], size: Size | None, spec: InputSpec, best: Size | None) -> Size:
    """Height and width of the input, which a crop or a letterbox gives where they are dynamic, else ``best``."""
    if "letterbox" in said and ("crop" in said or "resize" in said):
        raise _wrong("letterbox", "it resizes the whole picture: leave out resize and crop")
    asked = said.get("letterbox", said.get("crop"))
    asked = said["resize"] if asked is None and isinstance(said.get("resize"), tuple) else asked
    found = size or asked or best
    if found is None:
        raise UsageError(
            f"The input {spec.name!r} of shape {_dims(spec)} does not say the size of its pictures",
            where=f"input {spec.name}",
            remedy="give it with --opt-shapes, or with --preprocess, such as crop=224x224, letterbox=640x640 or "
            "resize=480x640",
        )
    if not all(1 <= side <= LARGEST_SIDE for side in found):
        raise _wrong(f"{found[0]}x{found[1]}", f"sides are from 1 to {LARGEST_SIDE} pixels")
    if size is not None and asked is not None and asked != size:
        raise _wrong(
            f"{asked[0]}x{asked[1]}", f"the input {spec.name} of shape {_dims(spec)} takes {size[0]}x{size[1]}"
        )
    return found


def _geometry(said: Mapping[str, Any], preset: Mapping[str, Any], size: Size) -> dict[str, Any]:
    """How a picture gets its size. A crop without a resize takes the middle of the picture as it is."""
    found = {key: said.get(key, preset[key]) for key in ("resample", "fill") if key in said or key in preset}
    resize, is_cropped = said.get("resize"), "crop" in said
    if "letterbox" in said or (preset.get("letterbox") and resize is None and not is_cropped):
        return {"fill": 114, **found, "letterbox": True}
    if resize is None and not is_cropped:
        margin = preset.get("margin", 0.0) if size[0] == size[1] and min(size) >= _LARGE else 0.0
        resize = round(size[0] * margin) if margin else size
    least = (resize,) * 2 if isinstance(resize, int) else resize or size
    if least[0] < size[0] or least[1] < size[1]:
        raise _wrong(f"resize={said['resize']}", f"less than the {size[0]}x{size[1]} that the network takes")
    return {**found, "resize": resize, "crop": resize != size}


def _values(said: Mapping[str, Any], preset: Mapping[str, Any], spec: InputSpec, color: Color) -> dict[str, Any]:
    """What is done to the values: nothing where the input takes bytes, a range of 0 to 1 where nothing is said."""
    channels = 1 if color == "gray" else 3
    if spec.dtype.kind == "u":
        if {"mean", "std"} & said.keys() or said.get("scale", 1.0) != 1:
            raise _wrong("scale, mean or std", f"the input {spec.name} takes uint8: pixels from 0 to 255 as they are")
        return {"scale": 1.0, "mean": (0.0,) * channels, "std": (1.0,) * channels}
    scale = said.get("scale", 255.0)
    found = {}
    for key, neutral in (("mean", 0.0), ("std", 1.0)):
        values = said.get(key) or _in_order(preset.get(key, (neutral,)), color)
        if len(values) not in (1, channels):
            raise _wrong(f"{key} of {len(values)} values", f"the input {spec.name} has {channels} channels")
        found[key] = tuple(values) * (channels // len(values))
    if max(map(abs, found["mean"])) > 255 / scale:
        raise _wrong(f"mean={max(map(abs, found['mean'])):g}", f"pixels end at {255 / scale:g}; say scale=1")
    if min(found["std"]) <= 0:
        raise _wrong(f"std={min(found['std']):g}", "each value is above 0")
    return {"scale": scale, **found}


def _in_order(values: Sequence[float], color: Color) -> tuple[float, ...]:
    """Values of red, green and blue in the order of ``color``; for gray their mean."""
    if color == "gray":
        return (sum(values) / len(values),)
    return tuple(reversed(values)) if color == "bgr" else tuple(values)


def _dims(spec: InputSpec) -> str:
    return "[" + ", ".join(map(str, spec.shape)) + "]"


def _wrong(what: str, why: str) -> UsageError:
    return UsageError(f"{_WHERE} {what}: {why}", where=_WHERE, remedy=_REMEDY)
