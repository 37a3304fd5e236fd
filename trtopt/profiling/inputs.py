"""What an engine is timed on: random inputs, or files, as trtexec (``--loadInputs``) and Polygraphy have them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from trtopt.config import ShapeMap
from trtopt.engine.request import axis_key, check_shape, split_values
from trtopt.errors import UsageError
from trtopt.graph.artifact import InputSpec
from trtopt.graph.input_values import InputValues
from trtopt.precision.observe.feeds import LABELS, ArrayReader, in_memory, open_arrays
from trtopt.precision.observe.polygraphy import SUFFIX, read_inputs
from trtopt.precision.observe.samples import open_samples, random_feeds
from trtopt.support.files import open_file
from trtopt.support.ort_session import Feeds

_OPTION = "--load-inputs"


def feeds_of(
    inputs: Sequence[InputSpec],
    shapes: ShapeMap,
    optimum: Callable[[str], tuple[int, ...]],
    files: str | None = None,
    values: ShapeMap | None = None,
) -> Feeds:
    """Inputs for an engine, at the shapes that were asked for; ``optimum`` gives those that were not.

    Args:
        inputs: The engine's inputs. Dynamic dimensions of one name have one size.
        shapes: Shapes by input name, and values of shape tensors.
        optimum: The shape of a dynamic input that the engine is tuned for.
        files: ``name:file,...``, an ``.npz``, inputs that Polygraphy saved (``.json``), or a folder or script of
            samples (:func:`~trtopt.precision.observe.samples.open_samples`), of which the first inference counts. An
            input that a file leaves out is random. An array brings its shape.
        values: Those of shape tensors, where neither ``shapes`` nor ``files`` has them.

    Raises:
        UsageError: A shape or a file is of no input, or does not fit; or both give the values of a shape tensor.
    """
    known, values = {item.name: item for item in inputs}, values or {}
    asked, given = split_values([known[name] for name in values], shapes)
    for name, shape in asked.items():
        check_shape(known, name, shape, "--shapes")
    found = {} if files is None else read_values(files, inputs, asked, given, optimum)
    fixed = {**asked, **{name: array.shape for name, array in found.items()}}
    sizes = {
        axis_key(item, axis): size
        for item in inputs
        for axis, size in enumerate(fixed.get(item.name, ()))
        if not isinstance(item.shape[axis], int)
    }
    for item in inputs:
        if item.name not in fixed:
            best = _static(item) if item.is_static else optimum(item.name)
            fixed[item.name] = tuple(sizes.get(axis_key(item, axis), size) for axis, size in enumerate(best))
    numbers = {**values, **given}
    drawn = random_feeds(inputs, fixed, {name: InputValues("given", numbers=each) for name, each in numbers.items()})
    return {**drawn, **found}


def read_values(
    files: str,
    inputs: Sequence[InputSpec],
    asked: ShapeMap,
    given: ShapeMap,
    optimum: Callable[[str], tuple[int, ...]] | None = None,
) -> dict[str, np.ndarray]:
    """The values that files hold, by input, in the inputs' types; see :func:`feeds_of`.

    Args:
        files: As in :func:`feeds_of`.
        inputs: Those of an engine or a model.
        asked: Shapes by input name, which arrays have to have.
        given: Values of shape tensors that were asked for, which no file may have too.
        optimum: The shape of raw values of a dynamic input, where none was asked for; None where nothing says it.

    Raises:
        UsageError: A file cannot be read, is of no input, does not fit, or has values that ``given`` has.
    """
    where, found = f"{_OPTION} {files}", {}
    known = {item.name: item for item in inputs}
    for name, source in _sources(files, known).items():
        if name not in known:
            remedy = f"the inputs are {', '.join(known)}"
            raise UsageError(f"There is no input {name!r}", where=where, remedy=remedy)
        spec = known[name]
        if isinstance(source, Path):
            found[name] = _raw(source, spec, asked.get(name), optimum)
            continue
        if not np.can_cast(source.dtype, spec.dtype, "same_kind"):
            what = f"The values of {name!r} are {source.dtype}, the input is {spec.dtype}"
            raise UsageError(what, where=where, remedy="convert them")
        check_shape(known, name, source.shape, _OPTION)
        if name in asked and source.shape != tuple(asked[name]):
            what = f"The values of {name!r} have the shape {list(source.shape)}, --shapes says {list(asked[name])}"
            raise UsageError(what, where=where, remedy="leave one of them out")
        found[name] = source.read().astype(spec.dtype)
    if twice := found.keys() & given.keys():
        what = f"The values of {', '.join(sorted(twice))} are in --shapes and in a file"
        raise UsageError(what, where=where, remedy="leave one of them out")
    return found


def _static(item: InputSpec) -> tuple[int, ...]:
    return tuple(dim for dim in item.shape if isinstance(dim, int))


def _sources(text: str, inputs: Mapping[str, InputSpec]) -> dict[str, ArrayReader | Path]:
    """What holds the values of each input: an array, or a file of raw values."""
    path, is_path = Path(text), ":" not in text
    if is_path and path.suffix == ".npz":
        return {name: array for name, array in open_arrays(path).items() if name != LABELS}
    if is_path and path.suffix == SUFFIX and not path.is_dir():
        feeds = read_inputs(path)
        if not feeds:
            raise UsageError("The file holds no feed", where=f"{_OPTION} {text}", remedy="save an iteration at least")
        return {name: in_memory(array) for name, array in feeds[0].items()}
    if path.is_dir() or (is_path and path.suffix == ".py") or ".py:" in text:
        samples = open_samples(path if path.is_dir() else text, tuple(inputs.values()), most=1).undivided()
        return {name: in_memory(array) for name, array in next(iter(samples)).items()}
    found: dict[str, ArrayReader | Path] = {}
    for pair in text.split(","):
        quoted, _, file = pair.rpartition(":")
        name = quoted.strip("'")
        if not name or not file:
            remedy = (
                "give a .npz with an array for each input, Polygraphy's .json, a folder of these, script.py:function,"
                " or name:file,other:file with raw values or an .npy"
            )
            raise UsageError(f"{pair!r} names no input and its file", where=f"{_OPTION} {text}", remedy=remedy)
        found[name] = open_arrays(Path(file))[""] if file.endswith(".npy") else Path(file)
    return found


def _raw(
    path: Path, spec: InputSpec, asked: tuple[int, ...] | None, optimum: Callable[[str], tuple[int, ...]] | None
) -> np.ndarray:
    """The bytes of a tensor in C order, as trtexec reads them."""
    shape = _static(spec) if spec.is_static else asked
    if shape is None and optimum is not None:
        shape = optimum(spec.name)
    remedy = "give the shape of its values with --shapes, and values of the input's type"
    if shape is None:
        what = f"The file of {spec.name!r} has values without a shape, and the input is dynamic"
        raise UsageError(what, where=f"{_OPTION} {path}", remedy=remedy)
    size = math.prod(shape) * spec.dtype.itemsize
    with open_file(path, f"The values of {spec.name!r}") as file:
        data = file.read(size + 1)
    if len(data) != size:
        raise UsageError(
            f"The file of {spec.name!r} has {'more' if len(data) > size else 'less'} than the {size} bytes of"
            f" {spec.dtype} {list(shape)}",
            where=f"{_OPTION} {path}",
            remedy=remedy,
        )
    return np.frombuffer(data, spec.dtype).reshape(shape)
