"""Synthetic samples: seeded random feeds for a model whose user gives no data."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from trtopt.errors import UsageError
from trtopt.graph.artifact import InputSpec
from trtopt.precision.observe.arrays import ArrayReader, in_memory
from trtopt.precision.observe.feeds import Group

SYNTHETIC = "synthetic"
SYNTHETIC_COUNT = 16
"""Enough for the ranges of random data to settle, few enough to take seconds."""

_ROWS = 8
"""So many rows are enough where a sample is a batch of several."""

_MOST_ELEMENTS = 1 << 40
"""Of an input: 4 TiB, more than a machine without a GPU has memory for."""

Shapes = Mapping[str, Sequence[int]]
"""Shapes by input name."""


def default_count(inputs: Sequence[InputSpec]) -> int:
    """How many samples are enough: of a network of static batch 8, each is 8 rows."""
    first = {spec.shape[0] if spec.shape else None for spec in inputs}
    size = first.pop() if len(first) == 1 else None
    return max(1, _ROWS // size) if isinstance(size, int) and size > 1 else SYNTHETIC_COUNT


def synthetic_groups(
    inputs: Sequence[InputSpec], shapes: Shapes, count: int
) -> tuple[Callable[[], Iterator[Group]], tuple[Group, ...]]:
    """Random samples: floats are standard normal, integers and bools 0 or 1 (valid as token, mask and type ids).

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

    def make() -> Iterator[Group]:
        for index in range(count):
            rng = np.random.default_rng(index)
            arrays = {spec.name: _random(rng, spec, resolved[spec.name]) for spec in inputs}
            yield _whole({name: in_memory(array) for name, array in arrays.items()}, inputs)

    header = _whole({spec.name: ArrayReader(resolved[spec.name], spec.dtype) for spec in inputs}, inputs)
    return make, (header,) * count


def _whole(readers: Mapping[str, ArrayReader], inputs: Sequence[InputSpec]) -> Group:
    specs = {spec.name: spec for spec in inputs}
    return Group(readers, specs, 1, dict.fromkeys(readers, 1), frozenset(), SYNTHETIC)


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
                where=SYNTHETIC,
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
                where=SYNTHETIC,
                remedy=f"give --opt-shapes {spec.name}:" + "x".join(str(dim) for dim in spec.shape) + " with numbers",
            )
    return tuple(dims)


def _random(rng: np.random.Generator, spec: InputSpec, shape: tuple[int, ...]) -> np.ndarray:
    if spec.dtype.kind in "iub":
        return rng.integers(0, 2, size=shape).astype(spec.dtype)
    return rng.standard_normal(shape, dtype=np.float32).astype(spec.dtype)
