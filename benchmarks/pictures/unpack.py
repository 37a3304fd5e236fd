"""Unpacks the pictures of the shared models into folders, as a user has them.

    python benchmarks/pictures/unpack.py ../shared/models pictures

writes ``pictures/NAME/calib`` and ``pictures/NAME/val`` of three models, with labels in forms that trtopt reads:
sub-folders by class (ResNet-20), a CSV (SqueezeNet), text files of YOLO (FastestDet).
"""

from __future__ import annotations

import csv
import json
import sys
import zipfile
from pathlib import Path


def classes(source: Path, to: Path, *, by_folder: bool) -> None:
    """Pictures with one class each: folders named by its index, or a CSV beside them."""
    with open(source / "labels.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    tables: dict[str, list[str]] = {"calib": [], "val": []}
    with zipfile.ZipFile(source / "images.zip") as archive:
        for row in rows:
            split = "val" if row["split"] == "eval" else "calib"
            name = row["file"].replace("/", "_")
            place = to / split / (f"{int(row['class_index']):03d}" if by_folder and split == "val" else "") / name
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(archive.read(row["file"]))
            tables[split].append(f'"{name}",{row["class_index"]}')
    if not by_folder:
        (to / "val" / "labels.csv").write_text("\n".join(["file,class", *tables["val"]]) + "\n", encoding="utf-8")


def boxes(source: Path, to: Path) -> None:
    """Pictures with boxes: every second one to calibrate, all to verify on, as ``evaluate.py`` takes them."""
    labels = json.loads((source / "labels.json").read_text())
    with zipfile.ZipFile(source / "images.zip") as archive:
        for number, name in enumerate(sorted(archive.namelist())):
            for split in ("val", "calib")[: 2 - number % 2]:
                place = to / split / name
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_bytes(archive.read(name))
            rows = [labels[name][index : index + 5] for index in range(0, len(labels[name]), 5)]
            rows = labels[name] if labels[name] and isinstance(labels[name][0], list) else rows
            lines = [" ".join([str(int(row[0])), *(repr(float(value)) for value in row[1:])]) for row in rows]
            (to / "val" / name).with_suffix(".txt").write_text("\n".join(lines) + "\n")


def unpack(models: Path, to: Path) -> None:
    """All three."""
    classes(models / "cifar10_dev", to / "resnet20", by_folder=True)
    classes(models / "imagenet_dev", to / "squeezenet", by_folder=False)
    boxes(models / "fastestdet_coco", to / "fastestdet")


if __name__ == "__main__":
    unpack(Path(sys.argv[1]), Path(sys.argv[2]))
