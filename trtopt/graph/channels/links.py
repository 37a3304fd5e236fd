"""What an operator says about channels: which of them are the same, and which constants go with them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import onnx_ir as ir


class Dim(NamedTuple):
    """One axis of one value; the axis counts from 0."""

    value: ir.Value
    axis: int


class Link(NamedTuple):
    """``length`` elements of one dim are the same channels as ``other_length`` elements of another.

    The lengths differ where a channel covers several elements on one side: Flatten makes H*W of each.
    """

    first: Dim
    second: Dim
    length: int
    other_length: int
    start: int = 0
    other_start: int = 0


@dataclass(frozen=True)
class Param:
    """A constant input of a node that has one entry per element of ``dim`` along ``axis``.

    Attributes:
        node: The node that reads it.
        index: Which of its inputs it is.
        axis: The axis of the constant.
        dim: The channels.
        kind: ``makes``: rows of weights (or bias) that compute the channel; ``sums``: columns that consume it;
            ``each``: applied channel by channel.
        fill: The entry that a channel of zeros gets, so that it stays finite.
        blocks: ``axis`` holds the first of this many equal parts of ``dim``; the parts are alike.
    """

    node: ir.Node
    index: int
    axis: int
    dim: Dim
    kind: Literal["makes", "sums", "each"]
    fill: float = 0.0
    blocks: int = 1


@dataclass(frozen=True)
class Count:
    """A number in a node that says where channels of ``dim`` begin or end: sizes, starts, ends, group counts.

    Attributes:
        node: The node.
        place: The index of its constant input, or the name of its attribute.
        position: Which entry of it.
        dim: The channels.
        number: The element of ``dim`` it stands for.
    """

    node: ir.Node
    place: int | str
    position: int
    dim: Dim
    number: int


class Block(NamedTuple):
    """Why these channels have to stay as they are; ``length`` None means the whole dim."""

    dim: Dim
    reason: str
    start: int = 0
    length: int | None = None


class Role(NamedTuple):
    """What one node says about one of its dims."""

    links: tuple[Link, ...] = ()
    params: tuple[Param, ...] = ()
    counts: tuple[Count, ...] = ()
    blocks: tuple[Block, ...] = ()


def refused(dim: Dim, reason: str) -> Role:
    """A role that keeps ``dim`` as it is."""
    return Role(blocks=(Block(dim, reason),))


def size_of(dim: Dim) -> int | None:
    """Elements along the axis; None where that is not a known number."""
    shape = dim.value.shape
    if shape is None or dim.axis >= len(shape):
        return None
    size = shape[dim.axis]
    return size if isinstance(size, int) else None


def rank_of(value: ir.Value | None) -> int:
    """How many axes; 0 where that is not known."""
    return 0 if value is None or value.shape is None else len(value.shape)


def dims_of_value(value: ir.Value | None) -> tuple[int | str | None, ...] | None:
    """The shape, symbols as text; None where even the rank is not known."""
    if value is None or value.shape is None:
        return None
    return tuple(dim if isinstance(dim, int) else dim.value for dim in value.shape)


def same(node: ir.Node, first: ir.Value, second: ir.Value, axis: int) -> Role:
    """The channels of both values are the same ones."""
    one, two = Dim(first, axis), Dim(second, axis)
    size = size_of(one)
    if size is None or size_of(two) != size:
        return refused(one, f"the sizes around {node.name} are not known")
    return Role((Link(one, two, size, size),))
