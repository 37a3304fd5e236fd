"""One shape for each input: what a prediction is made at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trtopt.config import ShapeMap
from trtopt.engine.profiles import BATCH_RANGE, axis_key, check_shape
from trtopt.errors import UsageError
from trtopt.graph.artifact import InputSpec

_OPTION = "--shapes"


@dataclass(frozen=True)
class InputShapes:
    """A shape for every input, and what was decided that the user did not say."""

    shapes: ShapeMap
    notes: tuple[str, ...]


def input_shapes(inputs: Sequence[InputSpec], given: Sequence[ShapeMap]) -> InputShapes:
    """Decide every input's shape.

    A dynamic axis takes the size the user gave it, or gave another axis of the same symbol; else a first axis takes the
    optimum that a build takes without samples, and so does every axis of its symbol.

    Args:
        inputs: The network's inputs.
        given: Of ``--shapes``; several are taken together.

    Raises:
        UsageError: A shape is given for an unknown input, twice, or does not fit; or an axis has no size.
    """
    asked = _merged(given)
    for name, shape in asked.items():
        check_shape({item.name: item for item in inputs}, name, shape, _OPTION)
    sizes: dict[str, int] = {}
    for item in inputs:
        for axis, size in enumerate(asked.get(item.name, ())):
            if not isinstance(item.shape[axis], int) and sizes.setdefault(axis_key(item, axis), size) != size:
                raise UsageError(
                    f"The axis {item.shape[axis]} has two sizes: {sizes[axis_key(item, axis)]} and {size}",
                    where=_OPTION,
                    remedy="give it the same size in every input",
                )
    notes = []
    for item in inputs:
        if item.shape and not isinstance(item.shape[0], int) and axis_key(item, 0) not in sizes:
            sizes[axis_key(item, 0)] = BATCH_RANGE[1]
            notes.append(
                f"{item.name} axis 0 ({item.shape[0]}) is taken as {BATCH_RANGE[1]}, the default of a dynamic first "
                f"axis; {_OPTION} sets another"
            )
    return InputShapes({item.name: _sized(item, sizes) for item in inputs}, tuple(notes))


def _merged(given: Sequence[ShapeMap]) -> ShapeMap:
    merged: ShapeMap = {}
    for shapes in given:
        for name, shape in shapes.items():
            if merged.setdefault(name, shape) != shape:
                raise UsageError(
                    f"The input {name!r} has two shapes", where=_OPTION, remedy="give each input one shape"
                )
    return merged


def _sized(item: InputSpec, sizes: dict[str, int]) -> tuple[int, ...]:
    dims = [
        dim if isinstance(dim, int) else sizes.get(axis_key(item, axis), dim) for axis, dim in enumerate(item.shape)
    ]
    missing = {axis: dim for axis, dim in enumerate(dims) if not isinstance(dim, int)}
    if missing:
        axes = " and ".join(f"{axis} ({dim})" for axis, dim in missing.items())
        raise UsageError(
            f"No size is known for the dynamic axis {axes} of the input {item.name!r}",
            where=f"input {item.name}: {'x'.join(str(dim) for dim in item.shape)}",
            remedy=f"give {_OPTION} {item.name}:{'x'.join(str(dim) for dim in dims)} "
            f"with a number for {' and '.join(dict.fromkeys(str(dim) for dim in missing.values()))}",
        )
    return tuple(dim for dim in dims if isinstance(dim, int))
