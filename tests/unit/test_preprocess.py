"""What ``--preprocess`` says, and what follows from the input where it says nothing."""

from __future__ import annotations

import numpy as np
import pytest

from trtopt.errors import UsageError
from trtopt.graph.artifact import InputSpec
from trtopt.images.parse import parse_preprocess
from trtopt.images.preprocess import Preprocess

IMAGENET = InputSpec("x", np.dtype("float32"), ("N", 3, 224, 224))


def spec(*shape: int | str, dtype: str = "float32") -> InputSpec:
    return InputSpec("x", np.dtype(dtype), shape)


def test_imagenet_is_what_torchvision_does() -> None:
    found = parse_preprocess("imagenet", IMAGENET)
    assert (found.size, found.resize, found.crop, found.letterbox) == ((224, 224), 256, True, False)
    assert found.resized(480, 640) == (256, 341)
    assert found.corner((256, 341)) == (-16, -58)
    multiplier, offset = found.affine()
    pixel = np.array([10.0, 20.0, 30.0])
    expected = (pixel / 255 - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]
    np.testing.assert_allclose(pixel * multiplier + offset, expected, rtol=1e-12)


def test_the_mean_of_a_name_follows_the_order_of_the_channels() -> None:
    assert parse_preprocess("imagenet,color=bgr", IMAGENET).mean == (0.406, 0.456, 0.485)
    assert parse_preprocess("mean=104,117,123,color=bgr,scale=1", IMAGENET).mean == (104, 117, 123)
    assert parse_preprocess("imagenet", spec(1, 1, 224, 224)).mean == pytest.approx((0.449,), abs=1e-3)


def test_small_networks_and_oblong_ones_see_the_whole_picture() -> None:
    for size in ((32, 32), (256, 128)):
        found = parse_preprocess("imagenet", spec(1, 3, *size))
        assert (found.resize, found.crop) == (size, False)


def test_a_letterbox_keeps_the_sides_in_proportion() -> None:
    found = parse_preprocess("yolo", spec(1, 3, 640, 640))
    assert found.letterbox and found.fill == 114 and found.scale == 255
    assert found.resized(480, 1280) == (240, 640)
    assert found.corner((240, 640)) == (200, 0)


def test_clip_crops_the_shorter_side_by_cubic_interpolation() -> None:
    found = parse_preprocess("clip", IMAGENET)
    assert (found.resize, found.crop, found.resample) == (224, True, "bicubic")


def test_keys_say_all_of_it() -> None:
    text = "resize=256,crop=224,mean=0.5,std=0.25,0.5,1,layout=nchw,color=rgb,scale=255"
    found = parse_preprocess(text, IMAGENET)
    assert found == Preprocess((224, 224), 256, crop=True, mean=(0.5, 0.5, 0.5), std=(0.25, 0.5, 1.0))
    assert parse_preprocess(found.describe(), IMAGENET) == found


def test_the_input_says_layout_and_type() -> None:
    found = parse_preprocess("imagenet", spec(1, 224, 224, 3, dtype="float16"))
    assert (found.layout, found.dtype, found.shape) == ("nhwc", "float16", (1, 224, 224, 3))
    assert parse_preprocess("imagenet", spec(1, 3, 224, 224, dtype="uint8")).affine()[0].tolist() == [1, 1, 1]


def test_a_dynamic_size_is_said() -> None:
    dynamic = spec("N", 3, "H", "W")
    assert parse_preprocess("letterbox=640", dynamic).size == (640, 640)
    assert parse_preprocess("resize=480x640", dynamic).size == (480, 640)
    with pytest.raises(UsageError, match="does not say the size"):
        parse_preprocess("imagenet", dynamic)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "imagnet",
        "resize",
        "resize=0",
        "resize=256x224x3",
        "resize=99999999999",
        "resize=128",
        "crop=256",
        "crop=224,crop=224",
        "letterbox=224,crop=224",
        "mean=a",
        "mean=nan",
        "mean=0.1,0.2",
        "mean=104,117,123",
        "std=0",
        "scale=0",
        "fill=256",
        "layout=nhwc",
        "color=gray",
        "color=cmyk",
        "resample=magic",
        "sharpen=1",
    ],
)
def test_what_contradicts_itself_or_the_input_is_refused(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_preprocess(text, IMAGENET)
    assert caught.value.where == "--preprocess" and caught.value.remedy


@pytest.mark.parametrize("text", ["nv12", "layout=NV12", "yolo,color=yuv420"])
def test_brightness_and_colour_of_video_are_refused_with_the_reason(text: str) -> None:
    with pytest.raises(UsageError, match="codes them as brightness and colour") as caught:
        parse_preprocess(text, IMAGENET)
    assert "before the network" in caught.value.remedy and "BT.601" in caught.value.remedy


@pytest.mark.parametrize("shape", [(1, 10), (1, 4, 224, 224), (1, 224, 224), (1, "C", 224, 224)])
def test_an_input_that_takes_no_pictures_is_named(shape: tuple[int | str, ...]) -> None:
    with pytest.raises(UsageError, match="'x' takes no pictures"):
        parse_preprocess("imagenet", spec(*shape))
    with pytest.raises(UsageError, match="'x' takes no pictures"):
        parse_preprocess("imagenet", spec(1, 3, 8, 8, dtype="int64"))
