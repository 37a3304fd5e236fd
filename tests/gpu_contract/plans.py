"""Engines of every kind, as plans of ``fake_tensorrt``, with feeds and what they give."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from machine import Plan, Shape, Tensor

Arrays = Mapping[str, np.ndarray]
X = np.arange(24, dtype=np.float32).reshape(2, 3, 2, 2)


def doubling(**more: object) -> Plan:
    """y = 2 x, of [N, 3, 2, 2]."""
    shape = (-1, 3, 2, 2)
    profiles = (((1, 3, 2, 2), (2, 3, 2, 2), (4, 3, 2, 2)),)
    tensors = (Tensor("x", shape, profiles=profiles), Tensor("y", shape, is_input=False))
    return Plan(tensors, lambda feeds: {"y": 2 * feeds["x"]}, **more)  # type: ignore[arg-type]


def static() -> Plan:
    """y = 2 x, of [2, 3, 2, 2]."""
    tensors = (Tensor("x", (2, 3, 2, 2)), Tensor("y", (2, 3, 2, 2), is_input=False))
    return Plan(tensors, lambda feeds: {"y": 2 * feeds["x"]})


def two_profiles() -> Plan:
    """y = 2 x, for batches of 1 to 4 and of 5 to 16."""
    shape = (-1, 3, 2, 2)
    ends = [(1, 2, 4), (5, 8, 16)]
    low, high = (tuple((size, 3, 2, 2) for size in sizes) for sizes in ends)
    tensors = (Tensor("x", shape, profiles=(low, high)), Tensor("y", shape, is_input=False))  # type: ignore[arg-type]
    return Plan(tensors, lambda feeds: {"y": 2 * feeds["x"]})


def formatted(form: str, channels: int) -> Plan:
    """y = 2 x, held with channels in another order."""
    shape = (2, channels, 2, 2)
    tensors = (Tensor("x", shape, format=form), Tensor("y", shape, is_input=False, format=form))
    return Plan(tensors, lambda feeds: {"y": 2 * feeds["x"]})


def non_zero() -> Plan:
    """The indices of what is not 0, whose number depends on the data."""

    def shape_of(shapes: Mapping[str, Shape], values: Arrays, out: Tensor) -> Shape:
        return (-1,)

    tensors = (Tensor("x", (8,)), Tensor("i", (-1,), is_input=False, dtype="INT64"))
    return Plan(tensors, lambda feeds: {"i": np.flatnonzero(feeds["x"])}, shape_of)


def sized() -> Plan:
    """y = 2 x and the shape of x, which the runtime leaves in the host's memory."""
    profiles = (((1, 8), (4, 8), (16, 8)),)
    tensors = (
        Tensor("x", (-1, 8), profiles=profiles),
        Tensor("y", (-1, 8), is_input=False),
        Tensor("size", (2,), is_input=False, dtype="INT64", on_host=True),
    )
    return Plan(tensors, lambda feeds: {"y": 2 * feeds["x"], "size": np.array(feeds["x"].shape)})


def shaped() -> Plan:
    """x [N, 8] in the shape that ``s`` says: of two profiles, of up to 4 and of up to 16 rows."""

    def shape_of(shapes: Mapping[str, Shape], values: Arrays, out: Tensor) -> Shape:
        return tuple(int(value) for value in values["s"])

    rows = (((1, 8), (2, 8), (4, 8)), ((4, 8), (8, 8), (16, 8)))
    tensors = (
        Tensor("x", (-1, 8), profiles=rows),
        Tensor("s", (2,), dtype="INT64", on_host=True, profiles=rows),
        Tensor("y", (-1, -1), is_input=False),
    )
    return Plan(tensors, lambda feeds: {"y": feeds["x"].reshape(feeds["s"])}, shape_of)


def kept_cache() -> Plan:
    """A cache of keys that is written where it lies, and its sum."""
    tensors = (
        Tensor("cache", (2, 4)),
        Tensor("new", (2, 4), is_input=False, alias="cache"),
        Tensor("sum", (2,), is_input=False),
    )
    return Plan(tensors, lambda feeds: {"new": feeds["cache"] + 1, "sum": feeds["cache"].sum(1)})


@dataclass(frozen=True)
class Kind:
    """An engine with calls of it, and the outputs of each.

    Attributes:
        is_captured: Whether a service captures CUDA graphs of it.
    """

    plan: Plan
    calls: tuple[tuple[dict[str, np.ndarray], dict[str, np.ndarray]], ...]
    is_captured: bool = True


def _rows(count: int, width: int = 8) -> np.ndarray:
    return np.arange(count * width, dtype=np.float32).reshape(count, width)


def _doubled(*arrays: np.ndarray) -> tuple[tuple[dict[str, np.ndarray], dict[str, np.ndarray]], ...]:
    return tuple(({"x": array}, {"y": 2 * array}) for array in arrays)


def _images(count: int) -> np.ndarray:
    return np.arange(count * 12, dtype=np.float32).reshape(count, 3, 2, 2)


def _kinds() -> dict[str, Kind]:
    sparse = np.array([0, 1, 0, 2, 3, 0, 0, 4], np.float32)
    shapes = [np.array(shape, np.int64) for shape in ((2, 8), (4, 8), (8, 8))]
    wide = np.arange(64, dtype=np.float32).reshape(2, 8, 2, 2)
    return {
        "static": Kind(static(), _doubled(X, X + 1)),
        "dynamic": Kind(doubling(), _doubled(X, _images(4), _images(1))),
        "multi-profile": Kind(two_profiles(), _doubled(_images(2), _images(8), _images(16), _images(1))),
        "data-dependent": Kind(
            non_zero(),
            tuple(({"x": x}, {"i": np.flatnonzero(x)}) for x in (sparse, sparse[::-1].copy(), 0 * sparse)),
            False,
        ),
        "host-output": Kind(
            sized(), tuple(({"x": _rows(n)}, {"y": 2 * _rows(n), "size": np.array([n, 8])}) for n in (1, 5, 16)), False
        ),
        "shape-tensor": Kind(
            shaped(),
            tuple(
                ({"x": _rows(int(s.prod()) // 8), "s": s}, {"y": _rows(int(s.prod()) // 8).reshape(s)}) for s in shapes
            ),
            False,
        ),
        "aliased-output": Kind(
            kept_cache(),
            tuple(({"cache": c}, {"new": c + 1, "sum": c.sum(1)}) for c in (_rows(2, 4), 2 * _rows(2, 4))),
            False,
        ),
        "channels-last": Kind(formatted("HWC", 3), _doubled(X, X + 1)),
        "HWC8": Kind(formatted("HWC8", 8), _doubled(wide, wide + 1)),
    }


KINDS = _kinds()
"""Every kind of engine that is run, by its name."""
