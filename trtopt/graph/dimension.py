"""What a dimension is, and how dimensions are multiplied."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import onnx_ir as ir


@dataclass(frozen=True)
class Product:
    """A number times dimensions, each with the power it is raised to."""

    number: int
    powers: frozenset[tuple[str | tuple[ir.Value, int] | AtMost, int]]


@dataclass(frozen=True)
class AtMost:
    """A dimension, or ``number`` (2 or more) where that is less: what is taken of a table of so many rows."""

    dim: str | tuple[ir.Value, int] | Product
    number: int


Dim = int | str | tuple[ir.Value, int] | Product | AtMost
"""A number, a dimension the model names or a floor of one, dimension ``i`` of a value, or a product of those. Those
that compare equal are equal. Floors have one spelling, ``floor((samples-80)/320)``: see :meth:`Dimensions.floor`."""


def reshaped(dims: Sequence[Dim] | None, target: Sequence[Dim | None]) -> list[Dim | None]:
    """The dimensions of a tensor of ``dims`` reshaped to ``target``, in which 0 copies and -1 is what is left."""
    found: list[Dim | None] = []
    for axis, dim in enumerate(target):
        if dim == 0:
            found.append(dims[axis] if dims is not None and axis < len(dims) else None)
        else:
            found.append(None if dim == -1 else dim)
    known = [dim for dim in found if dim is not None]
    if -1 in target and dims is not None and len(known) == len(found) - 1:
        found[list(target).index(-1)] = _left(dims, known)
    return found


def _left(dims: Sequence[Dim], taken: Sequence[Dim]) -> Dim | None:
    """The dimension which, times those ``taken``, has as many elements as ``dims``."""
    whole, names = factors_of(dims)
    part, others = factors_of(taken)
    if others - names or whole <= 0 or part <= 0 or whole % part:
        return None
    return product_of(whole // part, names - others)


def factors_of(dims: Iterable[Dim]) -> tuple[int, Counter[str | tuple[ir.Value, int] | AtMost]]:
    """The product of ``dims`` as a number, and how often each dimension that is none is in it."""
    number, names = 1, Counter[str | tuple[ir.Value, int] | AtMost]()
    for dim in dims:
        if isinstance(dim, int):
            number *= dim
        elif isinstance(dim, Product):
            number *= dim.number
            names.update(dict(dim.powers))
        else:
            names[dim] += 1
    return number, names


def product_of(number: int, names: Counter[str | tuple[ir.Value, int] | AtMost]) -> Dim:
    """The dimension that a number times named ones is."""
    if not names:
        return number
    if number == 1 and names.total() == 1:
        return next(iter(names))
    return Product(number, frozenset(names.items()))


_FLOOR = re.compile(r"floor\(\((.*)([+-]\d+)\)/(\d+)\)")


def parts_of(dim: Dim | None) -> tuple[str, int, int] | None:
    """Of a named dimension, or a floor((name + add) / by) of one: name, add and by."""
    if not isinstance(dim, str):
        return None
    found = _FLOOR.fullmatch(dim)
    return (dim, 0, 1) if found is None else (found[1], int(found[2]), int(found[3]))
