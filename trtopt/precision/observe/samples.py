"""Samples for calibration and verification: a stream of single samples that can be read again and again."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from trtopt.errors import TrtoptError, UsageError
from trtopt.graph.artifact import InputSpec
from trtopt.graph.input_values import InputValues
from trtopt.precision.observe import polygraphy
from trtopt.precision.observe.feeds import LABELS, ArrayReader, SampleGroup, group, in_memory, open_arrays
from trtopt.precision.observe.pictures import UNSAID, PictureOptions, find_pictures, open_pictures
from trtopt.precision.observe.stream import Samples, hash_arrays
from trtopt.support._script import load_object, script_hash
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
"""What integer and boolean inputs may hold, by name; see :func:`~trtopt.graph.input_values.input_values`."""

NO_VALUES: Values = MappingProxyType({})


def default_count(inputs: Sequence[InputSpec]) -> int:
    """How many samples are enough: of a network of static batch 8, each is 8 rows."""
    first = {spec.shape[0] if spec.shape else None for spec in inputs}
    size = first.pop() if len(first) == 1 else None
    return max(1, _ROWS // size) if isinstance(size, int) and size > 1 else SYNTHETIC_COUNT


def synthetic_groups(
    inputs: Sequence[InputSpec], shapes: Shapes, count: int, values: Values = NO_VALUES
) -> tuple[Callable[[], Iterator[SampleGroup]], tuple[SampleGroup, ...]]:
    """Random samples: floats are standard normal, integers and bools what ``values`` says, else 0 or 1.

    A dynamic first dimension is 1, and so is every dimension of the same symbol; other dynamic dimensions come from
    ``shapes``. Sample ``i`` does not depend on ``count``.

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

    def make() -> Iterator[SampleGroup]:
        for index in range(count):
            rng = np.random.default_rng(index)
            arrays = {spec.name: _random(rng, spec, resolved[spec.name], values.get(spec.name)) for spec in inputs}
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


def _random(
    rng: np.random.Generator, spec: InputSpec, shape: tuple[int, ...], values: InputValues | None
) -> np.ndarray:
    if spec.dtype.kind in "iub" and values is not None:
        if values.kind == "mask":
            return np.ones(shape, spec.dtype)
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
    return rng.standard_normal(shape, dtype=np.float32).astype(spec.dtype)


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
) -> Samples:
    """Open calibration or evaluation samples.

    Args:
        src: A path to an ``.npz`` (arrays by input name, first axis = samples, labels under ``__labels__``), an
            ``.npy`` for a single input, inputs that Polygraphy saved (``.json``), or a folder of either, read in the
            order of the names; a folder of pictures, and of folders of them; ``script.py:function`` yielding feed
            dicts, or ``script.py:name`` of a list or a generator of them, ``script.py`` alone for its ``load_data``;
            ``"synthetic"``; in Python also a dict of arrays by input name, one array for a single input, an iterable of
            feed dicts that can be iterated again, a function returning one, or ``Samples`` as they are.
        inputs: The network's inputs. Arrays of the same kind (float, integer, bool) are converted to their dtypes.
        shapes: For synthetic samples, shapes by input name: they give the dynamic dimensions after the first.
        count: Number of synthetic samples; by default 16, fewer where each is a batch by itself.
        values: For synthetic samples, what integers and booleans may be.
        pictures: What is said of a folder of pictures.

    Returns:
        The samples, split as :func:`trtopt.precision.observe.feeds.group` describes. Names, shapes and dtypes of files
        and arrays are checked here, from the headers; values are checked as they are read.

    Raises:
        UsageError: The source is missing, empty or malformed, or does not fit the inputs.
    """
    if isinstance(src, Samples):
        return src
    if isinstance(src, (str, Path)) and str(src).endswith(".py"):
        return _open_script(f"{src}:{_LOADER}", inputs)
    if isinstance(src, Path):
        return _open_path(src, inputs, pictures)
    if isinstance(src, str):
        if src == SYNTHETIC:
            return _synthetic(inputs, shapes or {}, default_count(inputs) if count is None else count, values)
        if not Path(src).exists() and ".py:" in src:
            return _open_script(src, inputs)
        return _open_path(Path(src), inputs, pictures)
    if isinstance(src, np.ndarray):
        src = {_single(inputs, "An array alone is for one input", "the array given").name: src}
    if isinstance(src, Mapping):
        item = _feed_group(src, inputs, "the arrays given")
        digest = hashlib.sha256()
        hash_arrays(digest, {str(name): np.asarray(value) for name, value in src.items()})
        return Samples(lambda: iter((item,)), where="the arrays given", sha256=digest.hexdigest(), known=(item,))
    return _open_python(src, inputs)


def _synthetic(inputs: Sequence[InputSpec], shapes: Shapes, count: int, values: Values) -> Samples:
    make, known = synthetic_groups(inputs, shapes, count, values)
    digest = hashlib.sha256(repr((count, sorted(known[0].shapes().items()), inputs, sorted(values.items()))).encode())
    return Samples(make, where=SYNTHETIC, source="synthetic", sha256=digest.hexdigest(), known=known)


def _open_path(path: Path, inputs: Sequence[InputSpec], options: PictureOptions) -> Samples:
    path = path.absolute()
    if not path.exists():
        raise UsageError("The samples do not exist", where=str(path), remedy=_REMEDY)
    files, is_streamed = [path], False
    if path.is_dir():
        files = sorted(
            item
            for item in path.iterdir()
            if item.suffix in (".npz", ".npy") and item.name[0] != "." and item.is_file()
        )
        if not files and (pictures := find_pictures(path)):
            return open_pictures(path, pictures, inputs, options)
        files = files or polygraphy.iteration_files(path)
        is_streamed = bool(files) and files[0].suffix == polygraphy.SUFFIX
        if not files:
            raise UsageError(
                "The folder holds no .npz, .npy or .json file and no picture", where=str(path), remedy=_REMEDY
            )
    hashes = [hash_file(file, "The samples")[1] for file in files]
    sha256 = hashes[0]
    if path.is_dir():
        # Their names give the order; that of a single file says nothing.
        named = [(file.name, found) for file, found in zip(files, hashes, strict=True)]
        sha256 = hashlib.sha256(json.dumps(named).encode()).hexdigest()

    def read() -> Iterator[SampleGroup]:
        return (item for file in files for item in _file_groups(file, inputs))

    if is_streamed:
        return Samples(read, where=str(path), sha256=sha256)
    groups = tuple(read())
    return Samples(lambda: iter(groups), where=str(path), sha256=sha256, known=groups)


def _file_groups(path: Path, inputs: Sequence[InputSpec]) -> list[SampleGroup]:
    if path.suffix not in (".npz", ".npy", polygraphy.SUFFIX):
        raise UsageError("The samples are in no known format", where=str(path), remedy=_REMEDY)
    if path.stat().st_size == 0:
        raise UsageError("The file is empty", where=str(path), remedy=_REMEDY)
    if path.suffix == polygraphy.SUFFIX:
        feeds = polygraphy.read_inputs(path)
        return [_feed_group(feed, inputs, f"{path}, item {index}") for index, feed in enumerate(feeds)]
    arrays = open_arrays(path)
    if path.suffix == ".npy":
        arrays = {_single(inputs, "An .npy holds one array", str(path)).name: arrays[""]}
    labels = arrays.pop(LABELS, None)
    return [group(arrays, inputs, str(path), None if labels is None else labels.read())]


def _single(inputs: Sequence[InputSpec], what: str, where: str) -> InputSpec:
    """The model's only input."""
    if len(inputs) != 1:
        raise UsageError(
            f"{what}, the model has {len(inputs)} inputs",
            where=where,
            remedy=f"give an .npz, or a dict, with the arrays {', '.join(spec.name for spec in inputs)}",
        )
    return inputs[0]


def _feed_group(feed: Any, inputs: Sequence[InputSpec], where: str) -> SampleGroup:
    if not isinstance(feed, Mapping):
        raise UsageError(
            f"A sample is a {type(feed).__name__}, not a dict of arrays by input name",
            where=where,
            remedy=f"yield {{{', '.join(repr(spec.name) + ': array' for spec in inputs)}}}",
        )
    arrays: dict[str, ArrayReader] = {}
    for name, value in feed.items():
        try:
            arrays[str(name)] = in_memory(np.asarray(value))
        except (ValueError, TypeError) as error:
            raise UsageError(
                f"{name!r} is not an array: {error}", where=where, remedy="convert it with numpy.asarray"
            ) from error
    labels = arrays.pop(LABELS, None)
    return group(arrays, inputs, where, None if labels is None else labels.read())


def _open_python(src: Any, inputs: Sequence[InputSpec]) -> Samples:
    """Samples from an iterable of feeds, or from a function returning one."""
    make = src if callable(src) else lambda: src
    if not callable(src) and (not isinstance(src, Iterable) or isinstance(src, Iterator)):
        raise UsageError(
            f"A {type(src).__name__} cannot be read twice, and samples are",
            where="the samples given",
            remedy="give a list of feed dicts, or the function that returns the iterator",
        )
    return Samples(lambda: _call(make, inputs, "the samples given"), where="the samples given")


def _open_script(src: str, inputs: Sequence[InputSpec]) -> Samples:
    path = Path(src.rpartition(":")[0]).absolute()
    if not path.is_file():
        raise UsageError("The script does not exist", where=str(path), remedy=_REMEDY)
    loaded: list[Any] = []

    def make() -> Any:
        if not loaded or isinstance(loaded[0], Iterator):  # a generator is used up: running the file makes another
            loaded[:] = [load_object(src, "samples", "function")]
        return loaded[0]() if callable(loaded[0]) else loaded[0]

    return Samples(lambda: _call(make, inputs, src), where=src, sha256=script_hash(src))


def _call(make: Callable[[], Any], inputs: Sequence[InputSpec], where: str) -> Iterator[SampleGroup]:
    """The feeds of a user's function; its exceptions become usage errors that keep the cause."""
    try:
        feeds = iter(make())
    except TrtoptError:
        raise
    except (Exception, SystemExit) as error:
        raise _failed(error, where) from error
    index = 0
    while True:
        try:
            feed = next(feeds)
        except StopIteration:
            return
        except TrtoptError:
            raise
        except (Exception, SystemExit) as error:
            raise _failed(error, where) from error
        yield _feed_group(feed, inputs, f"{where}, item {index}")
        index += 1


def _failed(error: BaseException, where: str) -> UsageError:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    line = f", {trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}" if trace is not None else ""
    return UsageError(
        f"The samples' function failed: {type(error).__name__}: {' '.join(str(error).split())[:300]}",
        where=f"{where}{line}",
        remedy="it takes no argument and yields dicts of arrays by input name; run it on its own first",
    )


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
