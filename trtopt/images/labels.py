"""Labels of pictures: folders by class, a CSV, COCO's JSON, YOLO's text files, or pictures (masks, targets)."""

from __future__ import annotations

import csv
import io
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from trtopt.errors import UsageError
from trtopt.images.preprocess import Preprocess
from trtopt.support.files import read_file

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")
"""Of the files that are taken for pictures, in lower case."""

MOST_LABEL_BYTES = 1 << 30
"""Of a CSV or a JSON: COCO's training pictures have 0.5 GB."""

_MOST_BOX_BYTES = 1 << 20
"""Of a text file of YOLO: more than 10,000 boxes."""

_MOST_COLUMNS = 64
"""Of a CSV that are looked at."""

Kind = Literal["class", "value", "boxes", "picture"]

_FILE_NAMES = ("file", "filename", "file_name", "image", "image_id", "path", "name")
_LABEL_NAMES = ("class_index", "class", "label", "class_id", "category", "target", "value", "score", "y")
_SPLITS = frozenset("train training val valid validation dev test testing eval".split())
CLASSES_FILE = "classes.txt"
_REMEDY = "labels are sub-folders by class, a .csv (file, label), COCO's .json, YOLO's .txt, or a folder of pictures"


@dataclass(frozen=True)
class Labels:
    """The pictures that have a label, and their labels.

    Attributes:
        kind: ``class`` (an index), ``value`` (a number), ``boxes`` or ``picture`` (a mask, or what the network should
            give).
        files: The pictures.
        values: For each of them its index or number; its boxes, FP32 ``[boxes, 6]`` of class, left, upper, right and
            lower edge as shares of the picture's width and height, and 1 where the box stands for a crowd; or the path
            of the picture.
        classes: What the indices stand for, where names say it: sub-folders, names in a CSV, COCO's categories.
        ids: Of COCO's categories, in their order; a network may give these in place of indices.
        where: Where the labels are.
        sizes: Height and width of each picture by COCO's file; empty where nothing says them.
        how: What is done to the pictures, once it is known: boxes, masks and targets go with it
            (:mod:`trtopt.images.placed`).
    """

    kind: Kind
    files: tuple[Path, ...]
    values: Sequence[int] | Sequence[float] | Sequence[np.ndarray] | Sequence[Path]
    where: str
    classes: tuple[str, ...] = ()
    ids: tuple[int, ...] = ()
    sizes: tuple[tuple[float, float], ...] = ()
    how: Preprocess | None = None

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, part: slice) -> Labels:
        """Those of some of the pictures."""
        return self.of(range(len(self))[part])

    def of(self, chosen: Sequence[int]) -> Labels:
        """Those of the pictures at the places ``chosen``."""
        values: Any = [self.values[index] for index in chosen]
        sizes = tuple(self.sizes[index] for index in chosen) if self.sizes else ()
        return replace(self, files=tuple(self.files[index] for index in chosen), values=values, sizes=sizes)


def read_labels(folder: Path, files: Sequence[Path], given: Path | None) -> Labels | None:
    """The labels of the pictures ``files`` in ``folder``; None where there are none.

    Args:
        folder: Holds the pictures.
        files: They, in order.
        given: The value of ``--labels``, also a table in a ``.tsv`` or ``.txt``; None to look in the folder: for one
            ``.csv``, one ``.json`` of COCO, ``.txt`` of YOLO beside the pictures or in ``labels/``, then for
            sub-folders by class.

    Raises:
        UsageError: A file of labels cannot be read, does not fit the pictures, or there are several.
    """
    if given is not None:
        return _given(folder, files, given)
    tables = sorted(item for item in folder.iterdir() if item.suffix.lower() in (".csv", ".json") and item.is_file())
    if len(tables) > 1:
        raise _wrong(
            "There are several files of labels", f"{folder}: {tables[0].name}, {tables[1].name}", "name one: --labels"
        )
    if tables:
        return _table(folder, files, tables[0])
    boxes = [_beside(file) for file in files]
    if any(text is not None for text in boxes):
        return _yolo(files, boxes, str(folder))
    return _by_folder(folder, files)


def _given(folder: Path, files: Sequence[Path], given: Path) -> Labels:
    if not given.exists():
        raise _wrong("The labels do not exist", str(given), _REMEDY)
    if not given.is_dir():
        return _table(folder, files, given)
    found: dict[Path, Path] = {}
    for root, _, names in os.walk(given):
        for name in sorted(names):
            item = Path(root, name)
            if item.suffix.lower() in (*SUFFIXES, ".txt") and item.name != CLASSES_FILE:
                found.setdefault(item.relative_to(given).with_suffix(""), item)
    if not found:
        raise _wrong("The folder of labels holds no picture and no .txt", str(given), _REMEDY)
    places = [found.get(file.relative_to(folder).with_suffix("")) for file in files]
    if any(item.suffix.lower() == ".txt" for item in found.values()):
        return _yolo(files, places, str(given))
    pairs = [(file, place) for file, place in zip(files, places, strict=True) if place is not None]
    if not pairs:
        raise _wrong("No picture there has the name of a picture to verify on", str(given), _REMEDY)
    return Labels("picture", tuple(file for file, _ in pairs), [place for _, place in pairs], str(given))


def _table(folder: Path, files: Sequence[Path], path: Path) -> Labels:
    content = read_file(path, "The file of labels", MOST_LABEL_BYTES)
    suffix = path.suffix.lower()
    if suffix == ".json":
        return _coco(folder, files, content, str(path))
    if suffix in (".csv", ".tsv", ".txt"):
        return _csv(folder, files, content, path)
    raise _wrong("The labels are in no known format", str(path), _REMEDY)


def _named(folder: Path, files: Sequence[Path]) -> dict[str, Path]:
    """The pictures by what a table may call them: the path in the folder, and the name where only one has it.

    Names are looked up and never opened: a table cannot name a file outside the folder.
    """
    names: dict[str, Path | None] = {}
    for file in files:
        for name in {file.name, file.stem}:
            names[name] = None if name in names else file
    found = {name: file for name, file in names.items() if file is not None}
    return {**found, **{file.relative_to(folder).as_posix(): file for file in files}}


def _by_folder(folder: Path, files: Sequence[Path]) -> Labels | None:
    """The class is the first sub-folder: its place in :data:`CLASSES_FILE`, else its number where all are numbers, else
    its place in the order of the names. Folders that are called as the parts of a data set are none."""
    places = [file.relative_to(folder).parts[:-1] for file in files]
    if not all(places) or len({place[0] for place in places}) < 2:
        return None
    names, where = sorted({place[0] for place in places}), f"the sub-folders of {folder}"
    if all(name.lower() in _SPLITS for name in names):
        return None
    listed = _class_names(folder)
    missing = next((name for name in names if name not in listed), None)
    if missing is not None and all(name.isascii() and name.isdecimal() and len(name) < 10 for name in names):
        return Labels("class", tuple(files), [int(place[0]) for place in places], where)
    if missing is not None and listed:
        raise _wrong(f"The class {missing!r} is not listed", str(folder / CLASSES_FILE), "list every class, one a line")
    listed = listed or tuple(names)
    indices = {name: index for index, name in enumerate(listed)}
    return Labels("class", tuple(files), [indices[place[0]] for place in places], where, listed)


def _class_names(folder: Path) -> tuple[str, ...]:
    path = folder / CLASSES_FILE
    if not path.is_file():
        return ()
    lines = _text(read_file(path, "The list of classes", _MOST_BOX_BYTES * 16), str(path)).splitlines()
    return tuple(line.strip() for line in lines if line.strip())


def _text(content: bytes, where: str) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _wrong("The labels are no text in UTF-8", where, "write the file again") from error


def _csv(folder: Path, files: Sequence[Path], content: bytes, path: Path) -> Labels:
    rows = _rows(_text(content, str(path)), str(path))
    named = _named(folder, files)
    first, second, is_titled = _columns(rows, named, str(path))
    found: dict[str, str] = {}
    for number, row in enumerate(rows[is_titled:], start=1 + is_titled):
        if len(row) <= max(first, second):
            raise _wrong(f"Line {number} has {len(row)} values", str(path), "write a file and its label in each line")
        name, label = row[first].strip().replace("\\", "/"), row[second].strip()
        if label and found.setdefault(name, label) != label:
            what = f"{name!r:.60} has the labels {found[name]!r:.30} and {label!r:.30}"
            raise _wrong(
                what, f"{path}, line {number}", "give a picture one label; boxes are COCO's .json or YOLO's .txt"
            )
    return _of_words(_chosen(named, found, str(path)), folder, str(path))


def _columns(rows: Sequence[Sequence[str]], named: Mapping[str, Path], where: str) -> tuple[int, int, bool]:
    """The columns of the pictures and of their labels, and whether the first line has titles.

    Pictures are in the column that names the most of them, labels in that of a known title, or in the only other one.
    """
    titles = [word.strip().lower() for word in rows[0][:_MOST_COLUMNS]]
    counts = [
        sum(_found(named, row[column].strip()) is not None for row in rows if column < len(row))
        for column in range(len(titles))
    ]
    known = [titles.index(name) for name in _FILE_NAMES if name in titles]
    first = max((*known, *range(len(titles))), key=lambda column: counts[column])
    is_titled = _found(named, rows[0][first].strip()) is None
    others = [column for column in range(len(titles)) if column != first]
    second = next((titles.index(name) for name in _LABEL_NAMES if name in titles and titles.index(name) != first), None)
    if second is None and len(others) > 1 and counts[first]:
        listed = ", ".join(rows[0][column].strip() or "(none)" for column in others)
        raise _wrong(
            f"Which column has the labels is not known: {listed:.200}", where, "title it class, label or value"
        )
    return first, others[0] if second is None else second, is_titled


def _found(named: Mapping[str, Path], name: str) -> Path | None:
    """The picture that a table calls so, whatever folder it says."""
    name = name.replace("\\", "/")
    return named.get(name) or named.get(name.rpartition("/")[2])


def _rows(text: str, where: str) -> list[list[str]]:
    try:
        sample = text[:65536]
        comma = max(",;\t", key=sample.count)
        comma = comma if comma in sample else " "  # lists of ImageNet and Caffe
        rows = [
            row
            for row in csv.reader(io.StringIO(text, newline=""), delimiter=comma, skipinitialspace=True, strict=True)
            if row
        ]
    except csv.Error as error:
        raise _wrong(f"The labels are no CSV: {error}", where, "write a file and its label in each line") from error
    if not rows or len(rows[0]) < 2:
        raise _wrong("The file of labels holds no row with a file and a label", where, _REMEDY)
    return rows


def _chosen(named: Mapping[str, Path], found: Mapping[str, str], where: str) -> dict[Path, str]:
    """Labels by picture, in the order of the pictures. What is listed and is not there is in another folder."""
    by_file = {named[name]: label for name, label in found.items() if name in named}
    others = {name: _found(named, name) for name in found if name not in named}
    exact = set(by_file)
    for name, file in others.items():
        if file is not None and file not in exact and by_file.setdefault(file, found[name]) != found[name]:
            what = f"{name!r:.60} and a file of that name in another folder have different labels"
            raise _wrong(what, where, "name the files as they are in the folder of pictures")
    if not by_file:
        raise _wrong(
            "None of the labels is of a picture in the folder",
            f"{where}, {next(iter(found), 'no line')}",
            "name the files as they are in the folder of pictures",
        )
    return {file: by_file[file] for file in dict.fromkeys(named.values()) if file in by_file}


def _of_words(chosen: Mapping[Path, str], folder: Path, where: str) -> Labels:
    """Labels that are written as words: whole numbers are indices, other numbers values, and names are counted."""
    words = list(chosen.values())
    files = tuple(chosen)
    numbers = [_number(word) for word in words]
    if all(number is not None for number in numbers):
        values = [float(number) for number in numbers if number is not None]
        if all(word.lstrip("+-").isdecimal() for word in words):
            return Labels("class", files, [int(value) for value in values], where)
        return Labels("value", files, values, where)
    listed = _class_names(folder) or tuple(sorted(set(words)))
    indices = {name: index for index, name in enumerate(listed)}
    missing = next((word for word in words if word not in indices), None)
    if missing is not None:
        raise _wrong(f"The class {missing!r:.60} is not listed", str(folder / CLASSES_FILE), "list every class")
    return Labels("class", files, [indices[word] for word in words], where, listed)


def _number(word: str) -> float | None:
    try:
        value = float(word)
    except ValueError:
        return None
    return value if math.isfinite(value) and abs(value) < 1e9 else None


class _Image(msgspec.Struct):
    id: int | str
    file_name: str
    width: float
    height: float


class _Annotation(msgspec.Struct):
    image_id: int | str
    category_id: int
    bbox: tuple[float, float, float, float]
    iscrowd: int = 0


class _Category(msgspec.Struct):
    id: int
    name: str = ""
    supercategory: str | None = None


class _Coco(msgspec.Struct):
    images: list[_Image]
    annotations: list[_Annotation]
    categories: list[_Category]


def _coco(folder: Path, files: Sequence[Path], content: bytes, where: str) -> Labels:
    try:
        data = msgspec.json.decode(content, type=_Coco)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise _wrong(
            f"The labels are no JSON of COCO: {' '.join(str(error).split())[:200]}",
            where,
            "write images (id, file_name, width, height), annotations (image_id, category_id, bbox) and categories",
        ) from error
    used = {item.category_id for item in data.annotations}
    above = {item.supercategory for item in data.categories if item.supercategory != item.name}
    # A category without boxes that the others are kinds of (Roboflow writes one, with the id 0) is no class.
    named_by_id = {item.id: item.name for item in data.categories if item.id in used or item.name not in above}
    categories = sorted(named_by_id.items())
    classes = {identity: index for index, (identity, _) in enumerate(categories)}
    rows: dict[int | str, list[tuple[float, ...]]] = {item.id: [] for item in data.images}
    sizes = {item.id: (item.width, item.height) for item in data.images}
    for item in data.annotations:
        if item.category_id not in classes or item.image_id not in rows:
            what = f"An annotation has the category {item.category_id} and the image {item.image_id!r:.40}"
            raise _wrong(f"{what}, which the file does not list", where, "list all categories and images")
        width, height = sizes[item.image_id]
        if width <= 0 or height <= 0:
            raise _wrong(f"The image {item.image_id!r:.40} has no size", where, "give width and height in pixels")
        left, upper, wide, high = item.bbox
        box = (left / width, upper / height, (left + wide) / width, (upper + high) / height)
        rows[item.image_id].append((classes[item.category_id], *box, float(item.iscrowd != 0)))
    named = _named(folder, files)
    by_file: dict[Path, list[tuple[float, ...]]] = {}
    by_size: dict[Path, tuple[float, float]] = {}
    for image in data.images:
        file = _found(named, image.file_name)
        if file is not None and image.id not in rows and file not in by_file:
            raise _wrong(f"Two images have the id {image.id!r:.40}", where, "give each an id of its own")
        if file is not None:
            by_file.setdefault(file, []).extend(rows.pop(image.id, ()))
            by_size[file] = (image.height, image.width)
    if not by_file:
        raise _wrong(
            "None of the labels is of a picture in the folder", where, "give the folder that the file_name are in"
        )
    chosen = tuple(file for file in files if file in by_file)
    names, ids = tuple(name for _, name in categories), tuple(identity for identity, _ in categories)
    boxes, shapes = [_boxes(by_file[file], where) for file in chosen], tuple(by_size[file] for file in chosen)
    return Labels("boxes", chosen, boxes, where, names, ids, shapes)


def _beside(file: Path) -> Path | None:
    """YOLO's text file of a picture: beside it, in ``labels/`` beside it, or in ``labels`` where its path has
    ``images``."""
    places = [file.with_suffix(".txt"), file.parent / "labels" / f"{file.stem}.txt"]
    parts = list(file.parts)
    if "images" in parts[:-1]:
        parts[len(parts) - 2 - parts[-2::-1].index("images")] = "labels"
        places.append(Path(*parts).with_suffix(".txt"))
    return next((place for place in places if place.is_file()), None)


def _yolo(files: Sequence[Path], places: Iterable[Path | None], where: str) -> Labels:
    """Boxes of text files: ``class x y width height`` in each line, of the middle, as shares of the picture; behind
    them keypoints, ``x y`` and 0, 1 or 2 each; other pairs behind the class are the corners of a polygon. A picture
    without a file has no box."""
    values = [np.zeros((0, 6), np.float32) if place is None else _yolo_boxes(place) for place in places]
    return Labels("boxes", tuple(files), values, where)


def _yolo_boxes(path: Path) -> np.ndarray:
    text = _text(read_file(path, "The file of boxes", _MOST_BOX_BYTES), str(path))
    rows = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.split()
        if not words:
            continue
        values = [_number(word) for word in words]
        numbers = [value for value in values if value is not None]
        count, points = len(numbers), numbers[5:]
        is_closed = count > 5 and numbers[1:3] == numbers[-2:]
        has_points = not is_closed and len(points) % 3 == 0 and all(value in (0, 1, 2) for value in points[2::3])
        if count < len(words) or count < 5 or not (has_points or count % 2) or numbers[0] % 1 or numbers[0] < 0:
            raise _wrong("A box is no class and four shares", f"{path}, line {number}", "write class x y width height")
        if has_points:
            label, x, y, width, height = numbers[:5]
            rows.append((label, x - width / 2, y - height / 2, x + width / 2, y + height / 2, 0.0))
        else:
            xs, ys = numbers[1::2], numbers[2::2]
            rows.append((numbers[0], min(xs), min(ys), max(xs), max(ys), 0.0))
    return _boxes(rows, str(path))


def _boxes(rows: Sequence[tuple[float, ...]], where: str) -> np.ndarray:
    found = np.array(rows, np.float64).reshape(-1, 6)
    corners = found[:, 1:5]
    if not np.isfinite(corners).all() or (np.abs(corners) > 16).any() or (corners[:, 2:] < corners[:, :2]).any():
        raise _wrong("A box is far outside its picture, or has a negative side", where, "correct that box")
    return found.astype(np.float32)


def _wrong(what: str, where: str, remedy: str) -> UsageError:
    return UsageError(what, where=where, remedy=remedy)
