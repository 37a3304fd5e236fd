"""What sizes the open axes of a judged form take, carried by its values (:mod:`trtopt.judge.form`)."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from trtopt.graph.edit import dims_of_value

_SHAPES = "trtopt.shapes"

Shapes = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""The smallest, the optimal and the largest shape of a value."""


def carry(value: ir.Value, shapes: Shapes) -> None:
    """Let a value carry its shapes."""
    value.meta[_SHAPES] = shapes


def shapes_of(value: ir.Value) -> Shapes | None:
    """The smallest, optimal and largest shape of a value of a judged form; None where its shape depends on data."""
    dims = dims_of_value(value)
    if dims is not None and all(isinstance(dim, int) for dim in dims):
        fixed = tuple(dim for dim in dims if isinstance(dim, int))
        return fixed, fixed, fixed
    found: Shapes | None = value.meta.get(_SHAPES)
    if found is None or dims is None:
        return found
    # What stands in the graph may have changed since: channels that were padded.
    low, best, high = (
        tuple(dim if isinstance(dim, int) else size for dim, size in zip(dims, shape, strict=True)) for shape in found
    )
    return low, best, high


def open_input(value: ir.Value, source: ir.Value, symbols: Mapping[tuple[int, int, int], str]) -> None:
    """Give an input of a subgraph the shape of the value it stands for.

    Axes that take the same sizes are the same axis to a compiler.

    Args:
        value: The input.
        source: A value of a judged form, whose shapes are known.
        symbols: The names of axes by their sizes, where they have one.
    """
    found = shapes_of(source)
    if found is None:
        raise ValueError(f"the shapes of {source.name} are not known")
    ranges = list(zip(*found, strict=True))
    value.shape = ir.Shape(
        [low if low == high else symbols.get((low, best, high), f"s{low}_{best}_{high}") for low, best, high in ranges]
    )
    value.meta[_SHAPES] = found


def symbols_of(model: ir.Model) -> dict[tuple[int, int, int], str]:
    """The names of a judged form's open axes, by the sizes they take."""
    found: dict[tuple[int, int, int], str] = {}
    for value in model.graph.inputs:
        for dim, sizes in zip(dims_of_value(value) or (), zip(*(shapes_of(value) or ()), strict=True), strict=False):
            if isinstance(dim, str):
                found.setdefault(sizes, dim)
    return found
