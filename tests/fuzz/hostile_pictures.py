"""Pictures and files of labels that are damaged or made to do harm, read in a process of its own.

    python tests/fuzz/hostile_pictures.py FOLDER COUNT SEED

prints what came of each as a line of JSON: ``refused`` or ``read``, seconds of processor time, and the most resident
memory so far in MiB. Any other exception ends it with a traceback.
"""

from __future__ import annotations

import io
import json
import shutil
import struct
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

from trtopt.errors import UsageError
from trtopt.graph.artifact import InputSpec
from trtopt.images import placed
from trtopt.images.labels import Labels
from trtopt.precision.observe.calibrate import peak_rss_bytes
from trtopt.precision.observe.pictures import PictureOptions
from trtopt.precision.observe.samples import open_samples

SPEC = InputSpec("x", np.dtype(np.float32), ("N", 3, 32, 32))
Rng = np.random.Generator


def whole(rng: Rng, kind: str | None = None) -> bytes:
    """A small picture of any format and mode."""
    kind = kind or str(rng.choice(["JPEG", "PNG", "WEBP"]))
    mode = str(
        rng.choice({"JPEG": ["RGB", "L", "CMYK"], "PNG": ["RGB", "RGBA", "P", "L", "LA", "1"], "WEBP": ["RGB"]}[kind])
    )
    pixels = rng.integers(0, 256, (int(rng.integers(1, 70)), int(rng.integers(1, 70)), 3), dtype=np.uint8)
    stream, exif = io.BytesIO(), Image.Exif()
    exif[274] = int(rng.integers(0, 12))
    Image.fromarray(pixels).convert(mode).save(stream, kind, exif=exif)
    return stream.getvalue()


def flipped(rng: Rng) -> bytes:
    """Bytes exchanged anywhere, most at the front, where the headers are."""
    data = bytearray(whole(rng))
    for _ in range(int(rng.integers(1, 20))):
        data[int(len(data) * rng.random() ** 3)] = int(rng.integers(0, 256))
    return bytes(data)


def cut(rng: Rng) -> bytes:
    data = whole(rng)
    return data[: int(rng.integers(0, len(data)))]


def spliced(rng: Rng) -> bytes:
    first, second = whole(rng), whole(rng)
    return first[: int(rng.integers(0, len(first)))] + second[int(rng.integers(0, len(second))) :]


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def bomb(rng: Rng) -> bytes:
    """A PNG that declares sizes of its own, with checksums that are right."""
    sides = [int(2 ** rng.uniform(0, 32)) % (1 << 32) for _ in range(2)]
    depth, color = int(rng.choice([1, 2, 4, 8, 16, 77])), int(rng.choice([0, 2, 3, 4, 6, 9]))
    header = struct.pack(">IIBBBBB", *sides, depth, color, 0, 0, int(rng.integers(0, 2)))
    data = zlib.compress(bytes(int(rng.integers(0, 1 << 22))))
    text = chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(1 << 24))) if rng.random() < 0.3 else b""
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + text + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def patched_size(rng: Rng) -> bytes:
    """A JPEG whose frame declares 65535 pixels a side."""
    data = bytearray(whole(rng, "JPEG"))
    for marker in (b"\xff\xc0", b"\xff\xc2"):
        place = data.find(marker)
        if place > 0:
            data[place + 5 : place + 9] = struct.pack(">HH", *(int(2 ** rng.uniform(0, 16)) for _ in range(2)))
    return bytes(data)


def exif(rng: Rng) -> bytes:
    """A JPEG with noise for EXIF."""
    data, noise = whole(rng, "JPEG"), b"Exif\0\0" + rng.bytes(int(rng.integers(0, 200)))
    if rng.random() < 0.7:
        noise = b"Exif\0\0" + (b"II*\0\x08\0\0\0" if rng.random() < 0.5 else b"MM\0*\0\0\0\x08") + noise[6:]
    return data[:2] + b"\xff\xe1" + struct.pack(">H", len(noise) + 2) + noise + data[2:]


def noise(rng: Rng) -> bytes:
    return rng.bytes(int(rng.integers(0, 2000)))


PICTURES: tuple[Callable[[Rng], bytes], ...] = (flipped, cut, spliced, bomb, patched_size, exif, noise, whole)
CSV = "file,class\na.png,1\nb.png,2\n"
YOLO = "0 0.5 0.5 0.25 0.25\n1 0.5 0.5 1 1\n"
COCO = json.dumps(
    {
        "images": [{"id": 1, "file_name": "a.png", "width": 64, "height": 64}],
        "annotations": [{"image_id": 1, "category_id": 2, "bbox": [1, 2, 30, 40], "iscrowd": 0}],
        "categories": [{"id": 2, "name": "car"}],
    }
)
WORDS = ["nan", "1e999", "-1", "9" * 400, '"', "\0", "[" * 3000, "\u202e", "../../etc/passwd", "", "null", "{}", "0x10"]


def label_text(rng: Rng) -> tuple[str, bytes]:
    """A file of labels with words exchanged, characters lost, or bytes that are no text."""
    name, text = [("labels.csv", CSV), ("a.txt", YOLO), ("labels.json", COCO)][int(rng.integers(0, 3))]
    for _ in range(int(rng.integers(1, 5))):
        place = int(rng.integers(0, len(text)))
        text = text[:place] + WORDS[int(rng.integers(0, len(WORDS)))] + text[place + int(rng.integers(0, 6)) :]
    data = text.encode(errors="replace")
    return name, data + rng.bytes(3) if rng.random() < 0.2 else data


def prepare_case(folder: Path, rng: Rng) -> PictureOptions:
    """Two pictures and their labels, one of the files hostile."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / "b.png").write_bytes(whole(rng, "PNG"))
    is_label = rng.random() < 0.4
    (folder / "a.png").write_bytes(
        whole(rng, "PNG") if is_label else PICTURES[int(rng.integers(0, len(PICTURES)))](rng)
    )
    name, data = (
        label_text(rng) if is_label else [("labels.csv", CSV.encode()), ("a.txt", YOLO.encode())][rng.integers(0, 2)]
    )
    (folder / name).write_bytes(data)
    preprocess = str(rng.choice(["imagenet", "yolo", "clip", "crop=32", "resize=40,crop=32"]))
    return PictureOptions(preprocess, skip_bad=rng.random() < 0.3)


def read_case(folder: Path, options: PictureOptions) -> str:
    """Read a folder as a build does."""
    try:
        samples = open_samples(folder, (SPEC,), pictures=options)
        for array in samples:
            if array["x"].shape != (1, 3, 32, 32) or not np.isfinite(array["x"]).all():
                raise AssertionError(array["x"].shape)
        labels = samples.labels
        if isinstance(labels, Labels):
            for index in range(len(labels)):
                placed.boxes(labels, index)
        return "read"
    except UsageError as error:
        if not error.where or not error.remedy:
            raise
        return "refused"


def main() -> None:
    folder, count, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    for index in range(count):
        options = prepare_case(folder, np.random.default_rng((seed, index)))
        began = time.process_time()
        outcome = read_case(folder, options)
        memory = peak_rss_bytes() >> 20
        print(json.dumps({"case": index, "outcome": outcome, "seconds": time.process_time() - began, "mib": memory}))


if __name__ == "__main__":
    main()
