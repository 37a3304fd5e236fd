"""Folders of pictures as samples: what is decoded, how it is prepared, and what is refused or left out."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("PIL", reason="pictures are read by Pillow: pip install 'trtopt[images]'")
from PIL import Image

from trtopt.errors import UsageError
from trtopt.graph.artifact import InputSpec
from trtopt.images import placed
from trtopt.images.decode import picture_size, prepare, read_mask, read_picture
from trtopt.images.labels import Labels, read_labels
from trtopt.images.parse import parse_preprocess
from trtopt.precision.observe.pictures import PictureOptions, PictureSamples, find_pictures
from trtopt.precision.observe.samples import open_samples

F32 = np.dtype(np.float32)
SPEC = InputSpec("x", F32, ("N", 3, 8, 8))
RED = np.zeros((8, 8, 3), np.uint8) + np.array([200, 100, 50], np.uint8)


def save(path: Path, pixels: np.ndarray = RED, mode: str | None = None, **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(pixels)
    (image if mode is None else image.convert(mode)).save(path, **options)
    return path


def opened(folder: Path, spec: InputSpec = SPEC, **options: Any) -> PictureSamples:
    samples = open_samples(folder, (spec,), pictures=PictureOptions(**options))
    assert isinstance(samples, PictureSamples)
    return samples


def labels_of(samples: PictureSamples) -> Labels:
    assert isinstance(samples.labels, Labels)
    return samples.labels


def test_pictures_are_samples_in_the_order_of_their_paths(tmp_path: Path) -> None:
    for name in ("b.PNG", "a.jpg", "deep/c.webp", ".hidden.png", "d.txt"):
        save(tmp_path / name, RED, format="PNG")
    samples = opened(tmp_path, preprocess="scale=255")
    assert [path.name for path in find_pictures(tmp_path)] == ["a.jpg", "b.PNG", "c.webp"]
    found = list(samples)
    assert samples.count == 3 and [array["x"].shape for array in found] == [(1, 3, 8, 8)] * 3
    np.testing.assert_allclose(found[0]["x"][0, :, 0, 0], np.array([200, 100, 50]) / 255, rtol=1e-6)
    assert all(np.array_equal(one["x"], other["x"]) for one, other in zip(found, samples, strict=True))


def test_a_network_of_a_fixed_batch_takes_so_many_at_once(tmp_path: Path) -> None:
    for index in range(5):
        save(tmp_path / f"{index % 2}" / f"{index}.png", RED + np.uint8(index))
    samples = opened(tmp_path, InputSpec("x", F32, (2, 3, 8, 8)), preprocess="scale=1")
    assert [array["x"][:, 0, 0, 0].tolist() for array in samples] == [[200, 202], [204, 201]]
    assert np.array_equal(samples.labels, [[0, 0], [0, 1]])
    assert samples.notes[-1] == "1 pictures are left out, since the network takes 2 at a time"


def test_a_network_may_take_pictures_without_a_batch(tmp_path: Path) -> None:
    """As torchvision's detectors."""
    for index in range(2):
        save(tmp_path / f"{index}.png", RED + np.uint8(index))
    (tmp_path / "p.py").write_text(
        "import numpy as np\ndef f(image):\n    return np.float32(image).transpose(2, 0, 1)\n"
    )
    for how in ("scale=1", f"{tmp_path / 'p.py'}:f"):
        samples = opened(tmp_path, InputSpec("x", F32, (3, 8, "w")), preprocess=how, shapes={"x": (3, 8, 8)})
        assert [(array["x"].shape, array["x"][2, 0, 0]) for array in samples] == [((3, 8, 8), 50), ((3, 8, 8), 51)]
    last = opened(tmp_path, InputSpec("x", F32, (8, 8, 3)), preprocess="scale=1")
    assert next(iter(last))["x"][0, 0].tolist() == [200, 100, 50]
    with pytest.raises(UsageError, match="takes no pictures"):
        opened(tmp_path, InputSpec("x", F32, (1, 80, 300)))


def test_the_sizes_asked_for_hold_where_nothing_else_says_one(tmp_path: Path) -> None:
    save(tmp_path / "a.png", RED)
    spec, shapes = InputSpec("x", F32, ("n", 3, "h", "w")), {"x": (4, 3, 32, 48)}
    (found,) = opened(tmp_path, spec, preprocess="imagenet", shapes=shapes)
    assert found["x"].shape == (1, 3, 32, 48)
    (found,) = opened(tmp_path, spec, shapes={"x": (4, 3, 352, 640)})
    assert found["x"].shape == (1, 3, 352, 640)
    (found,) = opened(tmp_path, spec, preprocess="resize=16x24", shapes=shapes)
    assert found["x"].shape == (1, 3, 16, 24)
    with pytest.raises(UsageError, match="does not say the size") as caught:
        opened(tmp_path, spec, shapes={"x": (1, 3)})
    assert "--opt-shapes" in caught.value.remedy
    with pytest.raises(UsageError, match="sides are from 1"):
        opened(tmp_path, spec, shapes={"x": (1, 3, 32, 999_999)})


@pytest.mark.parametrize("mode", ["L", "LA", "P", "RGBA", "CMYK", "1"])
def test_every_mode_becomes_rgb(tmp_path: Path, mode: str) -> None:
    suffix = "jpg" if mode == "CMYK" else "png"
    path = save(tmp_path / f"a.{suffix}", np.full((8, 8, 3), 255, np.uint8), mode)
    assert np.asarray(read_picture(path)).min() >= 250
    assert prepare(path, parse_preprocess("scale=255", SPEC)).shape == (1, 3, 8, 8)


def test_of_16_bits_the_upper_8_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    Image.fromarray(np.full((4, 4), 0x8012, np.uint16)).save(path)
    assert np.unique(np.asarray(read_picture(path))).tolist() == [0x80]


def test_a_picture_is_turned_as_its_camera_says(tmp_path: Path) -> None:
    pixels = np.zeros((4, 8, 3), np.uint8)
    pixels[:, :4] = 255
    exif = Image.Exif()
    exif[274] = 6  # the camera was turned by 90 degrees
    path = save(tmp_path / "a.png", pixels, exif=exif)
    assert picture_size(path) == (8, 4)
    upright = np.asarray(read_picture(path))
    assert upright.shape == (8, 4, 3) and upright[0, 0, 0] == 255 and upright[-1, 0, 0] == 0


def test_the_pixels_are_those_of_pillow_and_numpy(tmp_path: Path) -> None:
    """The preparation of torchvision's classifiers, written out."""
    rng = np.random.default_rng(0)
    path = save(tmp_path / "a.png", rng.integers(0, 256, (60, 90, 3), dtype=np.uint8))
    how = parse_preprocess(
        "resize=40,crop=32,mean=0.485,0.456,0.406,std=0.229,0.224,0.225", InputSpec("x", F32, (1, 3, 32, 32))
    )
    small = Image.open(path).resize((60, 40), Image.Resampling.BILINEAR).crop((14, 4, 46, 36))
    expected = (np.asarray(small) / np.float32(255) - np.float32([0.485, 0.456, 0.406])) / np.float32(
        [0.229, 0.224, 0.225]
    )
    np.testing.assert_allclose(prepare(path, how)[0].transpose(1, 2, 0), expected, atol=1e-6)


def test_a_letterbox_fills_up_and_channels_may_be_last_and_turned(tmp_path: Path) -> None:
    path = save(tmp_path / "a.png", np.broadcast_to(RED[:1], (4, 8, 3)).copy())
    found = prepare(path, parse_preprocess("letterbox=16,scale=1,color=bgr", InputSpec("x", F32, (1, 16, 16, 3))))
    assert found.shape == (1, 16, 16, 3)
    assert found[0, 0, 0].tolist() == [114] * 3 and found[0, 8, 8].tolist() == [50, 100, 200]
    assert found[0, 3, 0, 0] == 114 and found[0, 4, 0, 0] == 50 and found[0, 12, 0, 0] == 114
    small = prepare(path, parse_preprocess("crop=8x8,color=gray", InputSpec("x", F32, (1, 1, 8, 8))))
    assert small.shape == (1, 1, 8, 8) and small[0, 0, 0, 0] == 0 and small[0, 0, 4, 4] > 0


def test_an_input_of_bytes_gets_the_pixels(tmp_path: Path) -> None:
    save(tmp_path / "a.png")
    (found,) = opened(tmp_path, InputSpec("x", np.dtype(np.uint8), (1, 8, 8, 3)))
    assert found["x"].dtype == np.uint8 and found["x"][0, 0, 0].tolist() == [200, 100, 50]


def test_a_function_prepares_pictures_in_its_own_way(tmp_path: Path) -> None:
    save(tmp_path / "pictures/a.png")
    script = tmp_path / "prepare.py"
    script.write_text(
        "import numpy as np\ndef f(image):\n    return np.asarray(image, np.float32).transpose(2, 0, 1)\n"
    )
    samples = opened(tmp_path / "pictures", preprocess=f"{script}:f")
    assert next(iter(samples))["x"][0, :, 0, 0].tolist() == [200, 100, 50]
    script.write_text("def f(image):\n    return 1 / 0\n")
    with pytest.raises(UsageError, match="the function failed: ZeroDivisionError"):
        list(opened(tmp_path / "pictures", preprocess=f"{script}:f"))
    (tmp_path / "pictures/a.txt").write_text("0 0.5 0.5 1 1\n")
    with pytest.raises(UsageError, match="cannot be placed"):
        opened(tmp_path / "pictures", preprocess=f"{script}:f")


def test_what_nobody_said_is_guessed(tmp_path: Path) -> None:
    save(tmp_path / "a.png")
    large = InputSpec("x", F32, (1, 3, 640, 640))
    assert opened(tmp_path).is_guessed and opened(tmp_path).how.mean == (0.485, 0.456, 0.406)
    assert opened(tmp_path, large).how.letterbox
    assert not opened(tmp_path, preprocess="scale=255").is_guessed
    (tmp_path / "a.txt").write_text("0 0.5 0.5 1 1\n")
    assert opened(tmp_path).how.letterbox


def test_the_hash_is_of_pictures_labels_and_what_is_done_to_them(tmp_path: Path) -> None:
    save(tmp_path / "a.png")
    (tmp_path / "a.txt").write_text("0 0.5 0.5 1 1\n")
    first = opened(tmp_path).sha256
    assert opened(tmp_path).sha256 == first
    seen = {first, opened(tmp_path, preprocess="scale=1").sha256}
    (tmp_path / "a.txt").write_text("0 0.5 0.5 1 0.5\n")
    seen.add(opened(tmp_path).sha256)
    save(tmp_path / "a.png", RED[::-1] + np.uint8(1))
    seen.add(opened(tmp_path).sha256)
    assert len(seen) == 4


def test_folders_say_the_class(tmp_path: Path) -> None:
    for name in ("dog/a.png", "cat/b.png", "cat/deep/c.png"):
        save(tmp_path / name)
    samples = opened(tmp_path)
    assert np.array_equal(samples.labels, [0, 0, 1])
    assert "0 is cat, 1 is dog" in samples.notes[0]
    (tmp_path / "classes.txt").write_text("bird\ndog\ncat\n")
    assert np.array_equal(opened(tmp_path).labels, [2, 2, 1])
    (tmp_path / "classes.txt").write_text("dog\n")
    with pytest.raises(UsageError, match="'cat' is not listed"):
        opened(tmp_path)


def test_folders_named_by_numbers_are_indices(tmp_path: Path) -> None:
    for name in ("007/a.png", "12/b.png"):
        save(tmp_path / name)
    assert np.array_equal(opened(tmp_path).labels, [7, 12])
    (tmp_path / "classes.txt").write_text("shoe\nhat\n")
    assert np.array_equal(opened(tmp_path).labels, [7, 12])
    (tmp_path / "classes.txt").write_text("12\n007\n")
    assert np.array_equal(opened(tmp_path).labels, [1, 0])


def test_the_parts_of_a_data_set_are_no_classes(tmp_path: Path) -> None:
    for name in ("train/cat/a.png", "Val/dog/b.png"):
        save(tmp_path / name)
    assert opened(tmp_path).labels is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("file,class\na.png,3\nb.png,1\n", [3, 1]),
        ("b.png,1\na.png,3\n", [3, 1]),
        ("label;image\n3;x/a.png\n1;y/b.png\n", [3, 1]),
        ("file,value\na,0.5\nb,1\n", [0.5, 1.0]),
        ("file,class\na.png,dog\nb.png,cat\n", [1, 0]),
        ("breed,id\ndog,a\ncat,b\n", [1, 0]),
        ("3,a.png\n1,b.png\n", [3, 1]),
        (",species,target,photo\n0,x,3,C:\\val\\a.png\n1,y,1,b.png\n", [3, 1]),
        ("file,class\na.png,dog\nb.png,cat\na.png,dog\nb.png,\n", [1, 0]),
    ],
)
def test_a_table_says_the_label(tmp_path: Path, text: str, expected: list[float]) -> None:
    save(tmp_path / "a.png"), save(tmp_path / "b.png")
    (tmp_path / "labels.csv").write_text(text)
    assert np.array_equal(opened(tmp_path).labels, expected)


def test_a_list_as_imagenet_has_them_is_a_table_too(tmp_path: Path) -> None:
    save(tmp_path / "val/a.png"), save(tmp_path / "val/b.png")
    (tmp_path / "val.txt").write_text("a.png 65\nval/b.png 970\n")
    assert np.array_equal(opened(tmp_path / "val", labels=tmp_path / "val.txt").labels, [65, 970])
    (tmp_path / "val.tsv").write_text("image\tlabel\na\tblack bear\nb\tant\n")
    assert np.array_equal(opened(tmp_path / "val", labels=tmp_path / "val.tsv").labels, [1, 0])


def test_a_table_of_other_pictures_is_said_to_be_one(tmp_path: Path) -> None:
    save(tmp_path / "a.png")
    (tmp_path / "labels.csv").write_text("photo,species,site\nx.png,cat,1\n")
    with pytest.raises(UsageError, match="None of the labels is of a picture"):
        opened(tmp_path)


def test_pictures_without_a_label_are_left_out(tmp_path: Path) -> None:
    save(tmp_path / "a.png"), save(tmp_path / "b.png")
    (tmp_path / "labels.csv").write_text("file,class\nb.png,1\nelsewhere.png,2\n")
    samples = opened(tmp_path)
    assert np.array_equal(samples.labels, [1]) and samples.count == 1
    assert samples.notes[0].startswith("1 of 2 pictures have no label")


def coco(width: int = 16, height: int = 8, **changes: Any) -> dict[str, Any]:
    return {
        "images": [{"id": 5, "file_name": "a.png", "width": width, "height": height}],
        "categories": [{"id": 3, "name": "car"}, {"id": 1, "name": "person"}],
        "annotations": [{"image_id": 5, "category_id": 3, "bbox": [4, 2, 8, 4], "iscrowd": 1, "segmentation": [[1]]}],
        **changes,
    }


def test_boxes_of_coco_and_yolo_are_placed_in_the_input(tmp_path: Path) -> None:
    save(tmp_path / "a.png", np.zeros((8, 16, 3), np.uint8))
    spec = InputSpec("x", F32, (1, 3, 32, 32))
    (tmp_path / "instances.json").write_text(json.dumps(coco()))
    found = labels_of(opened(tmp_path, spec, preprocess="letterbox=32"))
    assert found.ids == (1, 3) and found.classes == ("person", "car")
    assert placed.boxes(found, 0).tolist() == [[1, 8, 12, 24, 20, 1]]
    (tmp_path / "instances.json").unlink()
    (tmp_path / "labels").mkdir()
    (tmp_path / "labels/a.txt").write_text("1 0.5 0.5 0.5 0.5\n2 0 0 0.5 0 0.5 0.25\n")
    found = labels_of(opened(tmp_path, spec, preprocess="resize=32x32"))
    assert placed.boxes(found, 0).tolist() == [[1, 8, 8, 24, 24, 0], [2, 0, 0, 16, 8, 0]]


@pytest.mark.parametrize("points", [1, 2, 4, 17])
def test_keypoints_behind_a_box_are_passed_over(tmp_path: Path, points: int) -> None:
    save(tmp_path / "a.png")
    (tmp_path / "a.txt").write_text("0 0.5 0.5 0.5 0.5" + " 0.1 0.9 2" * points + "\n")
    assert np.asarray(labels_of(opened(tmp_path)).values[0]).tolist() == [[0, 0.25, 0.25, 0.75, 0.75, 0]]


def test_a_closed_polygon_in_the_corner_has_no_keypoints(tmp_path: Path) -> None:
    save(tmp_path / "a.png")
    (tmp_path / "a.txt").write_text("0 0 0 0.5 0 0.5 0.25 0 0.25 0 0\n")
    assert np.asarray(labels_of(opened(tmp_path)).values[0]).tolist() == [[0, 0, 0, 0.5, 0.25, 0]]


def test_what_coco_s_categories_are_kinds_of_is_no_class(tmp_path: Path) -> None:
    save(tmp_path / "a.png")
    pets: list[dict[str, Any]] = [
        {"id": 0, "name": "pets", "supercategory": "none"},
        {"id": 1, "name": "cat", "supercategory": "pets"},
        {"id": 3, "name": "dog", "supercategory": "pets"},
    ]
    (tmp_path / "instances.json").write_text(json.dumps(coco(categories=pets)))
    assert labels_of(opened(tmp_path)).ids == (1, 3)
    pets[0] = {"id": 0, "name": "pets", "supercategory": "pets"}
    pets[1]["supercategory"] = pets[2]["supercategory"] = "animal"
    (tmp_path / "instances.json").write_text(json.dumps(coco(categories=pets)))
    assert labels_of(opened(tmp_path)).ids == (0, 1, 3)


def test_boxes_that_do_not_heed_how_a_picture_is_turned_are_refused(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[274] = 6
    save(tmp_path / "a.png", np.zeros((8, 16, 3), np.uint8), exif=exif)
    (tmp_path / "instances.json").write_text(json.dumps(coco()))
    with pytest.raises(UsageError, match="8x16 as it is seen, and 16x8 by its labels") as caught:
        placed.boxes(labels_of(opened(tmp_path)), 0)
    assert "EXIF" in caught.value.remedy
    (tmp_path / "instances.json").write_text(json.dumps(coco(8, 16)))
    assert len(placed.boxes(labels_of(opened(tmp_path)), 0)) == 1


def test_a_picture_that_coco_lists_twice_has_the_boxes_of_both(tmp_path: Path) -> None:
    save(tmp_path / "a.png")
    twice = coco()
    twice["images"].append({**twice["images"][0], "id": 6, "file_name": "val\\a.png"})
    twice["annotations"].append({**twice["annotations"][0], "image_id": 6})
    (tmp_path / "instances.json").write_text(json.dumps(twice))
    assert len(np.asarray(labels_of(opened(tmp_path)).values[0])) == 2


def test_an_image_that_coco_lists_twice_has_its_boxes_once(tmp_path: Path) -> None:
    save(tmp_path / "a.png")
    twice = coco()
    twice["images"] *= 2
    (tmp_path / "instances.json").write_text(json.dumps(twice))
    assert len(np.asarray(labels_of(opened(tmp_path)).values[0])) == 1
    save(tmp_path / "b.png")
    twice["images"][1] = {**twice["images"][0], "file_name": "b.png"}
    (tmp_path / "instances.json").write_text(json.dumps(twice))
    with pytest.raises(UsageError, match="id 5"):
        opened(tmp_path)


def test_yolo_s_two_folders_are_known(tmp_path: Path) -> None:
    save(tmp_path / "images/val/a.png"), save(tmp_path / "images/val/b.png")
    (tmp_path / "labels/val").mkdir(parents=True)
    (tmp_path / "labels/val/a.txt").write_text("0 0.5 0.5 1 1\n")
    found = labels_of(opened(tmp_path / "images/val"))
    assert [len(placed.boxes(found, index)) for index in range(2)] == [1, 0]


def test_masks_keep_their_indices_and_targets_are_prepared(tmp_path: Path) -> None:
    save(tmp_path / "val/a.png", np.zeros((4, 8, 3), np.uint8))
    mask = np.repeat(np.array([[3, 250, 3, 0]], np.uint8), 2, axis=0)
    (tmp_path / "masks").mkdir()
    Image.fromarray(mask).save(tmp_path / "masks/a.png")
    found = labels_of(opened(tmp_path / "val", preprocess="letterbox=8,scale=1", labels=tmp_path / "masks"))
    placed_mask = placed.mask(found, 0)
    assert placed_mask[0].tolist() == [255] * 8
    assert placed_mask[2].tolist() == [3, 3, 250, 250, 3, 3, 0, 0]
    target = placed.target(found, 0, (16, 16))
    assert target.shape == (1, 3, 16, 16) and target[0, 0, 8, 0] == 3
    save(tmp_path / "masks/a.png")
    with pytest.raises(UsageError, match="a mask has one index for each pixel"):
        read_mask(tmp_path / "masks/a.png", found.how or parse_preprocess("scale=1", SPEC))


def test_a_bad_picture_is_named_or_left_out_and_counted(tmp_path: Path) -> None:
    for name in ("0/a.png", "1/b.png", "1/c.png"):
        save(tmp_path / name)
    whole = (tmp_path / "1/b.png").read_bytes()
    (tmp_path / "1/b.png").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UsageError, match="cannot be decoded") as caught:
        list(opened(tmp_path))
    assert caught.value.where.endswith("b.png") and "--skip-bad" in caught.value.remedy
    samples = opened(tmp_path, skip_bad=True)
    assert len(list(samples)) == 2 and np.array_equal(samples.labels, [0, 1])
    assert "1 of 3 pictures cannot be decoded and are left out" in samples.notes


def test_pictures_none_of_which_can_be_decoded_are_not_called_too_few(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_text("no picture")
    with pytest.raises(UsageError, match="1 of 1 pictures cannot be decoded, and fewer are left than"):
        opened(tmp_path, skip_bad=True)


def test_a_bomb_is_refused_by_its_header(tmp_path: Path) -> None:
    """A PNG that declares 10^10 pixels in a few bytes."""
    import struct
    import zlib

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 100_000, 100_000, 8, 2, 0, 0, 0)
    path = tmp_path / "a.png"
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"") + chunk(b"IEND", b""))
    with pytest.raises(UsageError, match="pixels"):
        read_picture(path)
    thin = save(tmp_path / "thin.png", np.zeros((1, 100_000, 3), np.uint8))
    with pytest.raises(UsageError, match="resized to"):
        prepare(thin, parse_preprocess("imagenet", InputSpec("x", F32, (1, 3, 224, 224))))


def test_other_formats_are_not_even_tried(tmp_path: Path) -> None:
    stream = io.BytesIO()
    Image.fromarray(RED).save(stream, "TIFF")
    (tmp_path / "a.png").write_bytes(stream.getvalue())
    with pytest.raises(UsageError, match="cannot be decoded"):
        read_picture(tmp_path / "a.png")


BAD_LABELS = [
    ("labels.csv", "file,class\n"),
    ("labels.csv", "nothing"),
    ("labels.csv", "file,class\nb.png,1\n"),
    ("labels.csv", 'file,class\n"a.png,1\n'),
    ("labels.csv", "file,class\na.png\n"),
    ("labels.csv", "file,class\na.png,\n"),
    ("labels.csv", "file,class\na.png,cat\na.png,dog\n"),
    ("labels.csv", "file,class\ncat/a.png,0\ndog/a.png,1\n"),
    ("labels.csv", "file,cat,dog\na.png,0,1\n"),
    ("a.txt", "0 0.5 0.5 1\n"),
    ("a.txt", "0 0.5 0.5 1 1 0.9\n"),
    ("a.txt", "0 0.5 0.5 1 1 0.2 0.2 0.7\n"),
    ("a.txt", "person 0.5 0.5 1 1\n"),
    ("a.txt", "0 nan 0.5 1 1\n"),
    ("a.txt", "0 0.5 0.5 -1 1\n"),
    ("a.txt", "0 500 0.5 1 1\n"),
    ("a.txt", "-1 0.5 0.5 1 1\n"),
    ("coco.json", "[]"),
    ("coco.json", "[" * 100_000),
    ("coco.json", json.dumps(coco(images=[]))),
    ("coco.json", json.dumps(coco(categories=[]))),
    ("coco.json", json.dumps(coco(width=0))),
    ("coco.json", json.dumps(coco(annotations=[{"image_id": 5, "category_id": 3, "bbox": [1, 2]}]))),
    ("coco.json", json.dumps(coco()).replace("a.png", "../../etc/passwd")),
]


@pytest.mark.parametrize(("name", "text"), BAD_LABELS)
def test_labels_that_are_none_are_refused_with_their_place(tmp_path: Path, name: str, text: str) -> None:
    save(tmp_path / "a.png")
    (tmp_path / name).write_text(text)
    with pytest.raises(UsageError) as caught:
        read_labels(tmp_path, find_pictures(tmp_path), None)
    assert name in caught.value.where and caught.value.remedy


def test_labels_that_are_named_have_to_be_there(tmp_path: Path) -> None:
    save(tmp_path / "val/a.png")
    (tmp_path / "empty").mkdir()
    for given in ("missing.csv", "empty", "val/a.png"):
        with pytest.raises(UsageError):
            opened(tmp_path / "val", labels=tmp_path / given)


def test_a_network_with_two_inputs_takes_no_folder_of_pictures(tmp_path: Path) -> None:
    save(tmp_path / "a.png")
    with pytest.raises(UsageError, match="and the model has 2"):
        open_samples(tmp_path, (SPEC, InputSpec("size", F32, (1, 2))))
