"""Samples for calibration and verification: a stream of single samples that can be read again and again."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from trtopt.errors import UsageError
from trtopt.graph.artifact import InputSpec
from trtopt.graph.input_values import InputValues
from trtopt.precision.observe import polygraphy
from trtopt.precision.observe.feeds import LABELS, ArrayReader, SampleGroup, group, in_memory, open_arrays
from trtopt.precision.observe.loaders import Taken, is_whole, take, take_whole
from trtopt.precision.observe.pictures import UNSAID, PictureOptions, find_pictures, open_pictures
from trtopt.precision.observe.stream import Samples
from trtopt.support._script import load_object
from trtopt.support.files import hash_file

SYNTHETIC = "synthetic"
SYNTHETIC_COUNT = 16
"""Enough for the ranges of random data to settle, few enough to take seconds."""

_ROWS = 8
"""So many rows are enough where a sample is a batch of several."""

_MOST_ELEMENTS = 1 << 40
"""Of an input: 4 TiB, more than a machine without a GPU has memory for."""


Shapes = Mapping[str, Sequence[int]]
"""Shapes by input name."""

Values = Mapping[str, InputValues]
"""What inputs may hold, by name; see :func:`~trtopt.graph.input_values.input_values`."""

NO_VALUES: Values = MappingProxyType({})


def default_count(inputs: Sequence[InputSpec]) -> int:
    """How many samples are enough: of a network of static batch 8, each is 8 rows."""
    first = {spec.shape[0] if spec.shape else None for spec in inputs}
    size = first.pop() if len(first) == 1 else None
    return max(1, _ROWS // size) if isinstance(size, int) and size > 1 else SYNTHETIC_COUNT


_TOLD = ("lengths", "sizes")


def synthetic_groups(
    inputs: Sequence[InputSpec], shapes: Shapes, count: int, values: Values = NO_VALUES, *, first: int = 0
) -> tuple[Callable[[], Iterator[SampleGroup]], tuple[SampleGroup, ...]]:
    """Random samples: floats are standard normal, integers and bools what ``values`` says, else 0 or 1.

    Lengths and sizes are those of another input (:func:`_sizes`).

    A dynamic first dimension is 1, and so is every dimension of the same symbol; other dynamic dimensions come from
    ``shapes``. Sample ``i`` does not depend on ``count``; ``first`` is the number of the first.

    Returns:
        A function that starts the stream, and for each sample its shapes without its data.

    Raises:
        UsageError: A dynamic dimension has no size, a shape does not fit its input, or is beyond any machine's memory.
    """
    if count < 1:
        raise UsageError("There are no samples", where=SYNTHETIC, remedy="give at least one sample")
    resolved = _resolve(inputs, shapes)
    for name, shape in resolved.items():
        if math.prod(shape) > _MOST_ELEMENTS:
            raise UsageError(
                f"A synthetic sample of the input {name!r} would hold {math.prod(shape)} numbers",
                where=f"shape {list(shape)}",
                remedy="give --opt-shapes with a smaller shape, or real samples with --calib",
            )

    known = {**values, **_sizes(inputs, resolved, values)}

    def make() -> Iterator[SampleGroup]:
        for index in range(first, first + count):
            rng = np.random.default_rng(index)
            arrays = {spec.name: _random(rng, spec, resolved[spec.name], known.get(spec.name)) for spec in inputs}
            yield _whole({name: in_memory(array) for name, array in arrays.items()}, inputs)

    header = _whole({spec.name: ArrayReader(resolved[spec.name], spec.dtype) for spec in inputs}, inputs)
    return make, (header,) * count


def _whole(readers: Mapping[str, ArrayReader], inputs: Sequence[InputSpec]) -> SampleGroup:
    specs = {spec.name: spec for spec in inputs}
    return SampleGroup(readers, specs, 1, dict.fromkeys(readers, 1), frozenset(), SYNTHETIC)


def _resolve(inputs: Sequence[InputSpec], shapes: Shapes) -> dict[str, tuple[int, ...]]:
    symbols: dict[str, int] = {}
    for spec in inputs:
        if spec.shape and isinstance(spec.shape[0], str) and spec.shape[0] != "?":
            symbols[spec.shape[0]] = 1
    for spec in inputs:
        given = shapes.get(spec.name)
        if given is None:
            continue
        if len(given) != len(spec.shape) or any(
            isinstance(want, int) and want != dim for dim, want in zip(given, spec.shape, strict=True)
        ):
            raise UsageError(
                f"The input {spec.name!r} has the shape {list(spec.shape)}, not {list(given)}",
                where=f"--opt-shapes {spec.name}:{'x'.join(map(str, given))}",
                remedy="give a shape that fits the input",
            )
        for dim, want in zip(given, spec.shape, strict=True):
            if isinstance(want, str) and want != "?":
                symbols.setdefault(want, int(dim))
    return {spec.name: _resolve_one(spec, symbols, shapes.get(spec.name)) for spec in inputs}


def _resolve_one(spec: InputSpec, symbols: Mapping[str, int], given: Sequence[int] | None) -> tuple[int, ...]:
    dims = []
    for axis, want in enumerate(spec.shape):
        if isinstance(want, int):
            dims.append(want)
        elif want in symbols:
            dims.append(symbols[want])
        elif axis == 0:
            dims.append(1)
        elif given is not None:
            dims.append(int(given[axis]))
        else:
            raise UsageError(
                f"Synthetic samples need a size for the dimension {want!r} of the input {spec.name!r}",
                where=f"input {spec.name}: {'x'.join(map(str, spec.shape))}",
                remedy=f"give --opt-shapes with the numbers you run it at, such as {spec.name}:{_example(spec)}",
            )
    return tuple(dims)


def _example(spec: InputSpec) -> str:
    """The shape with a number for each dimension that has none."""
    inner = 224 if len(spec.shape) == 4 else 128
    dims = (dim if isinstance(dim, int) else inner if axis else 8 for axis, dim in enumerate(spec.shape))
    return "x".join(map(str, dims))


def _sizes(
    inputs: Sequence[InputSpec], shapes: Mapping[str, tuple[int, ...]], values: Values
) -> dict[str, InputValues]:
    """The numbers of lengths and sizes.

    A length is the last open axis, behind the first, of the largest input with the same first axis; 1 where there is
    none. Sizes are the last ones of the largest input.
    """
    told = {name: known.kind for name, known in values.items() if known.kind in _TOLD}
    hosts = [spec for spec in inputs if spec.name not in values or values[spec.name].kind not in (*_TOLD, "weight")]
    hosts.sort(key=lambda spec: len(spec.shape), reverse=True)
    found = {}
    for spec in (spec for spec in inputs if spec.name in told):
        count = math.prod(shapes[spec.name])
        if told[spec.name] == "lengths":
            numbers = (_length(spec, hosts, shapes),) * count
        else:
            shape = next((shapes[host.name] for host in hosts if len(host.shape) >= count), (1,) * count)
            numbers = shape[len(shape) - count :]
        most = 1 if spec.dtype.kind == "b" else int(np.iinfo(spec.dtype).max)
        found[spec.name] = InputValues("given", numbers=tuple(min(number, most) for number in numbers))
    return found


def _length(spec: InputSpec, hosts: Sequence[InputSpec], shapes: Mapping[str, tuple[int, ...]]) -> int:
    alike = [host for host in hosts if not spec.shape or (host.shape[:1] == spec.shape[:1] != ("?",))]
    for host in alike:
        if axes := [axis for axis, dim in enumerate(host.shape) if axis and isinstance(dim, str)]:
            return shapes[host.name][axes[-1]]
    return 1


def _random(
    rng: np.random.Generator, spec: InputSpec, shape: tuple[int, ...], values: InputValues | None
) -> np.ndarray:
    if values is not None and values.kind in ("mask", "padding"):
        return np.full(shape, values.kind == "mask", spec.dtype)
    if spec.dtype.kind in "iub" and values is not None:
        if values.kind == "given":
            return np.array(values.numbers, spec.dtype).reshape(shape)
        largest = 1 if spec.dtype.kind == "b" else int(np.iinfo(spec.dtype).max)
        size = largest if values.size is None else min(values.size, largest)
        if values.kind == "positions":
            counted = np.arange(shape[-1] if shape else 1) % size
            return np.broadcast_to(counted if shape else counted[0], shape).astype(spec.dtype)
        return rng.integers(0, size, size=shape).astype(spec.dtype)
    if spec.dtype.kind in "iub":
        return rng.integers(0, 2, size=shape).astype(spec.dtype)
    if values is not None and values.kind == "times":
        return (rng.random(shape, dtype=np.float32) * np.float32(values.size or 1)).astype(spec.dtype)
    made = rng.standard_normal(shape, dtype=np.float32)
    return (made if values is None else made / np.float32(math.sqrt(values.size or 1))).astype(spec.dtype)


_REMEDY = (
    "give an .npz, .npy (single input), Polygraphy's .json, a folder of these or of pictures, script.py:function, or "
    "'synthetic'"
)
_LOADER = "load_data"
"""What Polygraphy calls the function of a data loader script that names none (``--data-loader-script``)."""


def open_samples(
    src: Any,
    inputs: Sequence[InputSpec],
    *,
    shapes: Shapes | None = None,
    count: int | None = None,
    values: Values = NO_VALUES,
    pictures: PictureOptions = UNSAID,
    most: int | None = None,
) -> Samples:
    """Open calibration or evaluation samples.

    Args:
        src: A path to an ``.npz`` (arrays by input name, first axis = samples, labels under ``__labels__``), an
            ``.npy`` for a single input, inputs that Polygraphy saved (``.json``), or a folder of either, read in the
            order of the names; a folder of pictures, and of folders of them; ``script.py:name`` of a function, a loader
            or another iterable (:func:`~trtopt.precision.observe.loaders.take`), ``script.py`` alone for its
            ``load_data``; ``"synthetic"``; in Python also such an object itself, a dict of arrays by input name, one
            array for a single input, or ``Samples`` as they are.
        inputs: The network's inputs. Arrays of the same kind (float, integer, bool) are converted to their dtypes.
        shapes: For synthetic samples, shapes by input name: they give the dynamic dimensions after the first.
        count: Number of synthetic samples; by default 16, fewer where each is a batch by itself.
        values: For synthetic samples, what integers and booleans may be.
        pictures: What is said of a folder of pictures.
        most: How many items of an iterable are read.

    Returns:
        The samples, split as :func:`trtopt.precision.observe.feeds.group` describes. Names, shapes and dtypes of files
        and arrays are checked here, from the headers; values are checked as they are read.

    Raises:
        UsageError: The source is missing, empty or malformed, or does not fit the inputs.
    """
    if isinstance(src, Samples):
        return src
    text, where = str(src) if isinstance(src, (str, Path)) else "", "the samples given"
    if text == SYNTHETIC:
        return _synthetic(inputs, shapes or {}, default_count(inputs) if count is None else count, values)
    if text.endswith(".py") or (".py:" in text and not Path(text).exists()):
        where = text if ".py:" in text else f"{text}:{_LOADER}"
        src = _script_object(where)
    elif text:
        return _open_path(Path(text), inputs, pictures)
    return of_taken(take_whole(src, inputs, where) if is_whole(src) else take(src, inputs, where, most), where)


def of_taken(taken: Taken, where: str) -> Samples:
    """Samples that an iterable gave."""
    groups = taken.groups
    return Samples(lambda: iter(groups), where=where, sha256=taken.sha256, known=groups, taken=taken.text, kept=taken)


def unseen_samples(inputs: Sequence[InputSpec], *, shapes: Shapes, values: Values = NO_VALUES) -> Samples:
    """Synthetic samples that :func:`open_samples` does not give, as many as it gives."""
    count = default_count(inputs)
    return _synthetic(inputs, shapes, count, values, first=count)


def _synthetic(inputs: Sequence[InputSpec], shapes: Shapes, count: int, values: Values, *, first: int = 0) -> Samples:
    make, known = synthetic_groups(inputs, shapes, count, values, first=first)
    numbers = count if first == 0 else (first, count)
    digest = hashlib.sha256(repr((numbers, sorted(known[0].shapes().items()), inputs, sorted(values.items()))).encode())
    return Samples(make, where=SYNTHETIC, source="synthetic", sha256=digest.hexdigest(), known=known)


def _open_path(path: Path, inputs: Sequence[InputSpec], options: PictureOptions) -> Samples:
    path = path.absolute()
    if not path.exists():
        raise UsageError("The samples do not exist", where=str(path), remedy=_REMEDY)
    files = [path]
    if path.is_dir():
        files = sorted(
            item
            for item in path.iterdir()
            if item.suffix in (".npz", ".npy") and item.name[0] != "." and item.is_file()
        )
        if not files and (pictures := find_pictures(path)):
            return open_pictures(path, pictures, inputs, options)
        files = files or polygraphy.iteration_files(path)
        if not files:
            raise UsageError(
                "The folder holds no .npz, .npy or .json file and no picture (.jpg, .png, .webp)",
                where=str(path),
                remedy=_REMEDY,
            )
    hashes = [hash_file(file, "The samples")[1] for file in files]
    sha256 = hashes[0]
    if path.is_dir():
        # Their names give the order; that of a single file says nothing.
        named = [(file.name, found) for file, found in zip(files, hashes, strict=True)]
        sha256 = hashlib.sha256(json.dumps(named).encode()).hexdigest()

    if files[0].suffix == polygraphy.SUFFIX:
        taken = take((feed for file in files for feed in _saved_feeds(file)), inputs, str(path))
        return of_taken(replace(taken, text="", sha256=sha256), str(path))
    groups = tuple(_file_group(file, inputs) for file in files)
    return Samples(lambda: iter(groups), where=str(path), sha256=sha256, known=groups)


def _saved_feeds(path: Path) -> list[dict[str, np.ndarray]]:
    _check_filled(path)
    return polygraphy.read_inputs(path)


def _check_filled(path: Path) -> None:
    if path.stat().st_size == 0:
        raise UsageError("The file is empty", where=str(path), remedy=_REMEDY)


def _file_group(path: Path, inputs: Sequence[InputSpec]) -> SampleGroup:
    if path.suffix not in (".npz", ".npy"):
        raise UsageError("The samples are in no known format", where=str(path), remedy=_REMEDY)
    _check_filled(path)
    arrays = open_arrays(path)
    if path.suffix == ".npy":
        arrays = {_single(inputs, str(path)).name: arrays[""]}
    labels = arrays.pop(LABELS, None)
    return group(arrays, inputs, str(path), None if labels is None else labels.read())


def _single(inputs: Sequence[InputSpec], where: str) -> InputSpec:
    """The model's only input."""
    if len(inputs) != 1:
        raise UsageError(
            f"An .npy holds one array, the model has {len(inputs)} inputs",
            where=where,
            remedy=f"give an .npz, or a dict, with the arrays {', '.join(spec.name for spec in inputs)}",
        )
    return inputs[0]


def _script_object(src: str) -> Any:
    """What ``script.py:name`` names, once the file has run."""
    path = Path(src.rpartition(":")[0]).absolute()
    if not path.is_file():
        raise UsageError("The script does not exist", where=str(path), remedy=_REMEDY)
    return load_object(src, "samples", "function or iterable")


def random_feeds(
    inputs: Sequence[InputSpec], shapes: Mapping[str, tuple[int, ...]], values: Values = NO_VALUES
) -> dict[str, np.ndarray]:
    """Arrays for a network's inputs, always the same: see :func:`synthetic_groups`.

    Args:
        inputs: The network's inputs.
        shapes: A shape for each of them.
        values: What integers and booleans may be.

    Raises:
        UsageError: A shape does not fit its input.
    """
    fixed = [replace(item, shape=tuple(shapes[item.name])) for item in inputs]
    return dict(next(iter(open_samples(SYNTHETIC, fixed, count=1, values=values))))
