"""A folder of pictures as samples."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from trtopt.errors import UsageError
from trtopt.graph.artifact import InputSpec
from trtopt.images.decode import prepare, prepare_by, read_picture
from trtopt.images.labels import SUFFIXES, Labels, read_labels
from trtopt.images.parse import parse_preprocess, picture_axes
from trtopt.images.preprocess import Preprocess
from trtopt.precision.observe.feeds import ArrayReader, SampleGroup, check_dtype, group, in_memory
from trtopt.precision.observe.stream import Samples
from trtopt.support._script import load_function, script_hash
from trtopt.support.files import hash_file

MOST_PICTURES = 5_000_000
"""Of a folder; ImageNet has 1.3 million."""

_DETECTOR_SIDE = 320
"""Detectors of today take pictures of at least so many pixels a side, a multiple of 32; classifiers hardly ever."""


@dataclass(frozen=True)
class PictureOptions:
    """What is said of pictures.

    Attributes:
        preprocess: The value of ``--preprocess``, or what it was found to be; None to guess.
        labels: The value of ``--labels``; None to look in the folder.
        is_labelled: Whether labels are wanted.
        skip_bad: Whether pictures that cannot be decoded are left out.
        shapes: Of inputs, by name: the size that pictures get where neither the network nor ``preprocess`` says one.
    """

    preprocess: str | Preprocess | None = None
    labels: Path | None = None
    is_labelled: bool = True
    skip_bad: bool = False
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


UNSAID = PictureOptions()


class PictureSamples(Samples):
    """A folder of pictures, of which one batch is decoded at a time.

    Attributes:
        how: What is done to the pictures.
        is_guessed: Whether nobody said so.
        notes: What was assumed and left out, a sentence each.
    """

    def __init__(
        self,
        batches: Sequence[tuple[Path, ...]],
        spec: InputSpec,
        how: Preprocess,
        labels: np.ndarray | Labels | None,
        *,
        where: str,
        sha256: str,
    ) -> None:
        self._batches, self._spec, self._hash = batches, spec, sha256
        self.how, self.is_guessed = how, False
        self.notes: tuple[str, ...] = ()
        known = None if how.function else tuple(_group(batch, how, spec) for batch in batches)
        digest = hashlib.sha256(f"{sha256} {how.describe()} {how.dtype}".encode()).hexdigest()
        super().__init__(self._read if known is None else lambda: iter(known), where=where, sha256=digest, known=known)
        self.labels = replace(labels, how=how) if isinstance(labels, Labels) else labels

    def _read(self) -> Iterator[SampleGroup]:
        return _by_function(self._batches, self.how, self._spec)

    def otherwise(self, how: Preprocess, step: int = 1) -> PictureSamples:
        """Every ``step``-th sample, prepared in another way."""
        labels = None if self.labels is None else self.labels[::step]
        return PictureSamples(self._batches[::step], self._spec, how, labels, where=self.where, sha256=self._hash)


@dataclass(frozen=True)
class _PictureReader(ArrayReader):
    """Pictures that are decoded when they are read, one after the other along the first axis."""

    files: tuple[Path, ...] = ()
    how: Preprocess | None = None

    def blocks(self, count: int) -> Iterator[np.ndarray]:
        """The pictures as one block. Raises UsageError: one cannot be decoded."""
        if self.how is None:
            raise ValueError("pictures are read with what is done to them")
        parts = [prepare(file, self.how) for file in self.files]
        yield parts[0] if len(parts) == 1 else np.concatenate(parts)


def find_pictures(folder: Path) -> tuple[Path, ...]:
    """The pictures in a folder and its folders, sorted by path, without hidden ones; links to folders are not followed.

    Raises:
        UsageError: There are more than any data set has.
    """
    found: list[Path] = []
    for root, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name[0] != "."]
        found += [Path(root, name) for name in names if name.lower().endswith(SUFFIXES) and name[0] != "."]
        if len(found) > MOST_PICTURES:
            raise UsageError("There are too many pictures", where=str(folder), remedy=f"give at most {MOST_PICTURES}")
    return tuple(sorted(path for path in found if path.is_file()))


def open_pictures(
    folder: Path, files: Sequence[Path], inputs: Sequence[InputSpec], options: PictureOptions
) -> PictureSamples:
    """Look through the pictures ``files`` of ``folder``; headers and pixels are read later, but with ``skip_bad``.

    Raises:
        UsageError: The network takes no pictures, or several inputs; ``options`` do not fit it, or labels the pictures.
    """
    spec, notes = _input(inputs, str(folder)), []
    labels = read_labels(folder, files, options.labels) if options.is_labelled else None
    if labels is not None:
        notes += _about(labels, len(files))
        files = labels.files
    said = options.preprocess
    best = sized(spec, options.shapes)
    how = said if isinstance(said, Preprocess) else parse_preprocess(said or guessed(best, labels), spec, best)
    bad = ""
    if options.skip_bad:
        kept = _decodable(files)
        if len(kept) < len(files):
            bad = f"{len(files) - len(kept)} of {len(files)} pictures cannot be decoded"
            notes.append(f"{bad} and are left out")
        labels = None if labels is None else labels.of(kept)
        files = [files[index] for index in kept]
    first = spec.shape[0]
    rows = first if isinstance(first, int) and len(spec.shape) == 4 else 1
    if len(files) % rows:
        notes.append(f"{len(files) % rows} pictures are left out, since the network takes {rows} at a time")
    count = len(files) // rows
    if count == 0:
        what = f"{bad}, and fewer are left" if bad else "There are fewer pictures"
        raise UsageError(f"{what} than the {rows} of a batch", where=str(folder), remedy="give more")
    batches = [tuple(files[index * rows : (index + 1) * rows]) for index in range(count)]
    found = None if labels is None else _placed(labels[: count * rows], how, rows)
    samples = PictureSamples(batches, spec, how, found, where=str(folder), sha256=_hash(folder, files, labels, how))
    samples.is_guessed, samples.notes = said is None, tuple(notes)
    return samples


def sized(spec: InputSpec, shapes: Mapping[str, tuple[int, ...]]) -> InputSpec:
    """An input with the sizes that are asked for in place of dynamic ones."""
    given = shapes.get(spec.name, ())
    if len(given) != len(spec.shape):
        return spec
    pairs = zip(spec.shape, given, strict=True)
    return replace(spec, shape=tuple(dim if isinstance(dim, int) else int(size) for dim, size in pairs))


def guessed(spec: InputSpec, labels: Labels | None) -> str:
    """What ``--preprocess`` most likely is, from the input's shape and type and the kind of labels.

    Detectors letterbox their pictures and take 0 to 1; classifiers and networks for segmentation mostly have the mean
    and deviation of ImageNet; gray pictures, and those that are to become others, are from 0 to 1.
    """
    _, channels, size = picture_axes(spec)
    sides = size or (_DETECTOR_SIDE, _DETECTOR_SIDE)
    kind = None if labels is None else labels.kind
    if kind == "boxes" or (kind is None and all(side >= _DETECTOR_SIDE and side % 32 == 0 for side in sides)):
        return "yolo"
    return "scale=255" if channels == 1 else "imagenet"


def _input(inputs: Sequence[InputSpec], where: str) -> InputSpec:
    if len(inputs) == 1:
        picture_axes(inputs[0])
        return inputs[0]
    raise UsageError(
        f"Pictures are for networks with one input, and the model has {len(inputs)}",
        where=where,
        remedy="make the others constants of the model (initializers of their names), or give an .npz, or "
        f"script.py:function, with {', '.join(spec.name for spec in inputs)}",
    )


def _about(labels: Labels, count: int) -> list[str]:
    """What the user did not say of labels and cannot see elsewhere."""
    notes, last = [], len(labels.classes) - 1
    if labels.classes and not labels.ids:
        notes.append(f"classes are in the order of {labels.where}: 0 is {labels.classes[0]:.30}, ")
        notes[0] += f"{last} is {labels.classes[last]:.30}"
    if len(labels.files) < count:
        notes.append(f"{count - len(labels.files)} of {count} pictures have no label in {labels.where}: left out")
    return notes


def _decodable(files: Sequence[Path]) -> list[int]:
    kept = []
    for index, file in enumerate(files):
        try:
            read_picture(file)
        except UsageError:
            continue
        kept.append(index)
    return kept


def _placed(labels: Labels, how: Preprocess, rows: int) -> np.ndarray | Labels:
    """Labels as metrics take them: with the samples as first axis."""
    if labels.kind in ("class", "value"):
        values = np.array(labels.values, np.int64 if labels.kind == "class" else np.float64)
        return values.reshape(-1, rows) if rows > 1 else values
    if how.function:
        raise UsageError(
            "Boxes, masks and targets cannot be placed in pictures that a function prepares",
            where=f"--preprocess {how.function}",
            remedy="say it with keys (letterbox=640,scale=255), or give a metric of your own: FILE.py:FUNCTION",
        )
    return labels


def _group(files: tuple[Path, ...], how: Preprocess, spec: InputSpec) -> SampleGroup:
    shape = (len(files), *how.shape[1:])
    reader = _PictureReader(shape, np.dtype(how.dtype), files[0], files=files, how=how)
    alone = frozenset([spec.name] if len(spec.shape) == 3 else [])
    return SampleGroup({spec.name: reader}, {spec.name: spec}, 1, {spec.name: 1}, alone, str(files[0]))


def _by_function(batches: Sequence[tuple[Path, ...]], how: Preprocess, spec: InputSpec) -> Iterator[SampleGroup]:
    function = load_function(how.function, "--preprocess")
    for batch in batches:
        arrays = [prepare_by(function, file, how.function) for file in batch]
        for array in arrays:
            check_dtype(array.dtype, spec, f"--preprocess {how.function}")
        rank = len(spec.shape)
        joined = np.stack(arrays) if arrays[0].ndim == rank - 1 else np.concatenate(arrays)
        yield group({spec.name: in_memory(joined)}, [spec], f"--preprocess {how.function}, picture {batch[0]}")


def _hash(folder: Path, files: Sequence[Path], labels: Labels | None, how: Preprocess) -> str:
    """Of the pictures, the function that prepares them, and their labels."""
    digest = hashlib.sha256((script_hash(how.function) if how.function else "").encode())
    for file in files:
        digest.update(f"\0{file.relative_to(folder).as_posix()}\0{hash_file(file, 'The picture')[1]}".encode())
    for value in () if labels is None else labels.values:
        label = hash_file(value, "The label")[1] if isinstance(value, Path) else value
        digest.update(label.tobytes() if isinstance(label, np.ndarray) else f"\0{label}".encode())
    return digest.hexdigest()
