"""Samples of Python objects: feeds, pairs with labels or bare arrays, from a list, a loader, a generator or a function.

They are read once, and kept on disk for the run: a loader that shuffles or augments gives every stage the same samples
and labels, and a generator, which can be read once only, serves like a list. Memory holds one item at a time.
"""

from __future__ import annotations

import hashlib
import itertools
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy_format

from trtopt.errors import TrtoptError, UsageError
from trtopt.graph.artifact import InputSpec
from trtopt.precision.observe.feeds import LABELS, SampleGroup, group, in_memory, open_arrays
from trtopt.precision.observe.stream import hash_arrays
from trtopt.support.temporary import TemporaryFolder

MOST_BYTES = 16 << 30
"""What is kept of a source at most: one that never ends must not fill the disk."""

_LABEL_KEYS = (LABELS, "labels", "label")
"""Keys of a feed that hold labels, unless the model has an input of that name; those of Hugging Face's data sets."""


@dataclass(frozen=True)
class Taken:
    """What was read of a source.

    Attributes:
        groups: A group for each item.
        sha256: Hash of the data, hex.
        text: One line: what was taken for what.
        folder: Where the arrays lie until this is forgotten; None where they are in memory.
    """

    groups: tuple[SampleGroup, ...]
    sha256: str
    text: str = ""
    folder: TemporaryFolder | None = None


@dataclass(frozen=True)
class _Item:
    """One item of a source: its arrays by input name, its labels, and in words what was taken for what."""

    arrays: dict[str, np.ndarray]
    labels: np.ndarray | None
    how: str


def is_whole(src: Any) -> bool:
    """Whether ``src`` holds all samples at once: an array, a tensor, or arrays by input name."""
    return isinstance(src, (np.ndarray, Mapping)) or hasattr(src, "detach")


def take_whole(src: Any, inputs: Sequence[InputSpec], where: str) -> Taken:
    """All samples at once, which stay where they are in memory.

    Raises:
        UsageError: They do not fit the inputs.
    """
    item = _item(src, inputs, where)
    arrays = item.arrays if item.labels is None else {**item.arrays, LABELS: item.labels}
    digest = hashlib.sha256()
    hash_arrays(digest, arrays)
    return Taken((_group(item, inputs, where),), digest.hexdigest())


def take(src: Any, inputs: Sequence[InputSpec], where: str, most: int | None = None) -> Taken:
    """Read an iterable of items, or what a function without arguments returns, once, and keep the items on disk; only
    the first ``most`` where that is given.

    An item is a dict of arrays by input name; a tuple or list of arrays, in the order of the inputs, labels behind
    them; such a dict with labels; or, for a model with one input, an array. Arrays are whatever NumPy takes, and
    PyTorch's tensors; one sample may lack its batch axis. What comes in a tuple where labels would be and is no array,
    as the boxes of a detection data set, is left out.

    Raises:
        UsageError: It cannot be iterated, fails, holds nothing or too much, or an item does not fit the inputs.
    """
    folder = TemporaryFolder("samples-")
    digest, groups, size, how = hashlib.sha256(), [], 0, ""
    for index, given in enumerate(itertools.islice(_items(src, where), most)):
        place = f"{where}, item {index}"
        item = _one(_item(given, inputs, place), inputs)
        arrays = item.arrays if item.labels is None else {**item.arrays, LABELS: item.labels}
        hash_arrays(digest, arrays)
        size += sum(array.nbytes for array in arrays.values())
        if size > MOST_BYTES:
            raise UsageError(
                f"The samples are more than {MOST_BYTES >> 30} GiB, if they end at all",
                where=place,
                remedy="give fewer: some hundred are enough to calibrate, itertools.islice(loader, 64)",
            )
        groups.append(_kept(arrays, inputs, Path(folder.name) / f"{index}.npz", place))
        how = how or item.how
    if not groups:
        raise UsageError("There are no samples", where=where, remedy="give at least one sample")
    kind = type(src).__name__ if not callable(src) else f"{getattr(src, '__name__', type(src).__name__)}()"
    count = sum(item.count for item in groups)
    text = f"{where} ({kind}): {count} samples in {len(groups)} items, {how}"
    return Taken(tuple(groups), digest.hexdigest(), text, folder)


def _kept(arrays: Mapping[str, np.ndarray], inputs: Sequence[InputSpec], path: Path, where: str) -> SampleGroup:
    try:
        with zipfile.ZipFile(path, "w") as archive:
            for name, array in arrays.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                    npy_format.write_array(file, array, version=(1, 0), allow_pickle=False)
    except OSError as error:
        raise UsageError(
            f"The samples cannot be kept for the run: {error.strerror}",
            where=str(path.parent),
            remedy="give fewer, or name a folder with room in TMPDIR",
        ) from error
    readers = open_arrays(path)
    labels = readers.pop(LABELS, None)
    return group(readers, inputs, where, None if labels is None else labels.read())


def _group(item: _Item, inputs: Sequence[InputSpec], where: str) -> SampleGroup:
    return group({name: in_memory(array) for name, array in item.arrays.items()}, inputs, where, item.labels)


def _items(src: Any, where: str) -> Iterator[Any]:
    """The items of a source; exceptions of the user's code become usage errors that keep the cause."""
    try:
        made = src() if callable(src) and (isinstance(src, type) or not hasattr(src, "__iter__")) else src
        if is_whole(made):  # a function that returns all samples
            items = iter((made,))
        elif not hasattr(made, "__iter__") and hasattr(made, "__len__") and hasattr(made, "__getitem__"):
            items = (made[index] for index in range(len(made)))  # a data set of PyTorch
        else:
            items = iter(made)
    except TrtoptError:
        raise
    except (Exception, SystemExit) as error:
        raise _failed(error, where) from error
    while True:
        try:
            item = next(items)
        except StopIteration:
            return
        except TrtoptError:
            raise
        except (Exception, SystemExit) as error:
            raise _failed(error, where) from error
        yield item


def _failed(error: BaseException, where: str) -> UsageError:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    line = f", {trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}" if trace is not None else ""
    return UsageError(
        f"The samples' function failed: {type(error).__name__}: {' '.join(str(error).split())[:300]}",
        where=f"{where}{line}",
        remedy="it is a function without arguments, or an iterable, of arrays; run it on its own first",
    )


def _item(given: Any, inputs: Sequence[InputSpec], where: str) -> _Item:
    names = [spec.name for spec in inputs]
    if isinstance(given, Mapping):
        key = next((key for key in _LABEL_KEYS if key in given and key not in names), None)
        feeds = {str(name): value for name, value in given.items() if name != key}
        labels, how = None if key is None else given[key], f"inputs by name{'' if key is None else f', labels: {key}'}"
    elif isinstance(given, (tuple, list)) and len(given) == 2 and isinstance(given[0], Mapping):
        first = _item(given[0], inputs, where)
        feeds, labels, how = first.arrays, given[1], "inputs by name, labels: the second of each pair"
    elif isinstance(given, (tuple, list)) and given and (hasattr(given[0], "shape") or len(names) > 1):
        if not len(names) <= len(given) <= len(names) + 1:
            raise UsageError(
                f"A sample is {len(given)} arrays, the model has {len(names)} inputs",
                where=where,
                remedy=f"give ({', '.join(names)}), or these and labels, or a dict by input name",
            )
        feeds = dict(zip(names, given, strict=False))
        labels = given[len(names)] if len(given) > len(names) else None
        how = f"in this order: {', '.join(names)}{'' if labels is None else ', labels'}"
    elif len(names) == 1:
        feeds, labels, how = {names[0]: given}, None, f"each is {names[0]}"
    else:
        raise UsageError(
            f"A sample is one {type(given).__name__}, the model has {len(names)} inputs",
            where=where,
            remedy=f"give a dict of arrays by input name: {', '.join(names)}",
        )
    arrays = {name: _array(value, name, where) for name, value in feeds.items()}
    target = None if labels is None else _target(labels)
    if labels is not None and target is None:
        how += ", which are no arrays and are left out"
    return _Item(arrays, target, how)


def _one(item: _Item, inputs: Sequence[InputSpec]) -> _Item:
    """The item; one sample without the batch axis, as a data set gives it, gets one, and its label too."""
    arrays = _batched(item.arrays, inputs)
    is_same, labels = arrays is item.arrays, item.labels
    return item if is_same else _Item(arrays, None if labels is None else labels[None], item.how)


def _array(value: Any, name: str, where: str) -> np.ndarray:
    """A NumPy array of what has elements; bfloat16, which NumPy's files do not have, as float32."""
    try:
        if hasattr(value, "detach"):
            value = value.detach().cpu()
            value = value.float() if str(value.dtype) == "torch.bfloat16" else value
        array = np.asarray(value)
    except (ValueError, TypeError, RuntimeError) as error:
        raise UsageError(
            f"{name!r} is not an array: {error}", where=where, remedy="convert it with numpy.asarray"
        ) from error
    if array.dtype.hasobject:
        remedy = f"give arrays for {name!r}, or a dict of arrays by input name"
        raise UsageError(f"{name!r} is a {type(value).__name__} of objects, not an array", where=where, remedy=remedy)
    return array.astype(np.float32) if array.dtype.name == "bfloat16" else array


def _target(labels: Any) -> np.ndarray | None:
    """Labels as an array; None where they are none."""
    try:
        found = _array(labels, LABELS, "")
    except UsageError:
        return None
    return found if found.dtype.kind in "iufb" else None


def _batched(arrays: dict[str, np.ndarray], inputs: Sequence[InputSpec]) -> dict[str, np.ndarray]:
    """The arrays with the batch axis, where they are one sample and all of them lack it; else as they are."""
    specs = {spec.name: spec for spec in inputs if spec.shape and spec.name in arrays}
    lack = all(_lacks_batch(arrays[name], spec) for name, spec in specs.items())
    return {**arrays, **{name: arrays[name][None] for name in specs}} if lack else arrays


def _lacks_batch(array: np.ndarray, spec: InputSpec) -> bool:
    first, *rest = spec.shape
    return (
        (first == 1 or isinstance(first, str))
        and array.ndim == len(rest)
        and all(size == dim for dim, size in zip(array.shape, rest, strict=True) if isinstance(size, int))
    )
