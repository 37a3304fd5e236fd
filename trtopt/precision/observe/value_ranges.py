"""What is known of the magnitudes of a model's tensors: from statistics, from constants, and through operators."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from trtopt.graph import edit
from trtopt.precision.observe.ranges import finite_range
from trtopt.precision.observe.statistics import TensorStats

LAYOUT_OPS = frozenset(
    "Reshape Transpose Squeeze Unsqueeze Flatten Identity Slice Split Gather GatherElements GatherND Expand Dropout "
    "DepthToSpace SpaceToDepth Tile ReverseSequence".split()
)
"""Operators that move their first input's values without changing them."""


@dataclass(frozen=True)
class ValueRange:
    """The finite values of a tensor: the lowest, the highest, and the smallest magnitude that is not zero.

    ``smallest`` is None when all are zero or nothing is known of it.
    """

    low: float
    high: float
    smallest: float | None

    @property
    def largest(self) -> float:
        """The largest magnitude."""
        return max(abs(self.low), abs(self.high))


class ValueRanges:
    """Spans of values. Everything is computed once per value.

    Args:
        stats: Observed statistics by tensor name.
        shapes: Static shapes by tensor name, at the largest input shapes.
    """

    def __init__(self, stats: Mapping[str, TensorStats], shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._stats = stats
        self._shapes = shapes
        self._constants: dict[ir.Value, np.ndarray | None] = {}
        self._ranges: dict[ir.Value, ValueRange | None] = {}

    def shape(self, value: ir.Value) -> tuple[int, ...] | None:
        """The largest shape of ``value``; None when it depends on data."""
        return self._shapes.get(str(value.name))

    def constant(self, value: ir.Value | None) -> np.ndarray | None:
        """The FP32 constant that ``value`` is, or whose values reach it through layout operators; else None."""
        if value is None or not is_float(value):
            return None
        if value not in self._constants:
            found = edit.constant_of(value)
            node = value.producer()
            if found is None and node is not None and node.op_type in LAYOUT_OPS:
                found = self.constant(node.inputs[0])
            self._constants[value] = found
        return self._constants[value]

    def of(self, value: ir.Value | None) -> ValueRange | None:
        """The span of ``value``; None when it was not observed."""
        if value is None:
            return None
        if value not in self._ranges:
            self._ranges[value] = None  # ends the recursion between an unobserved value and its activation
            self._ranges[value] = self._find(value)
        return self._ranges[value]

    def _find(self, value: ir.Value) -> ValueRange | None:
        constant = self.constant(value)
        if constant is not None:
            return _constant_range(constant)
        found = self._stats.get(str(value.name))
        if found is not None:
            return ValueRange(found.minimum, found.maximum, found.smallest_nonzero or None)
        node = value.producer()
        if node is not None and node.op_type in LAYOUT_OPS:
            return self.of(node.inputs[0])
        return self._before_activation(value)

    def _before_activation(self, value: ir.Value) -> ValueRange | None:
        """A value that only a ReLU or Clip reads: what they let through is as large as what they were given.

        What they cut off may be anything, and may overflow: the result is the same.
        """
        uses = list(value.uses())
        if len(uses) != 1 or value.is_graph_output() or uses[0][1] != 0:
            return None
        reader = uses[0][0]
        behind = self.of(reader.outputs[0]) if reader.op_type in ("Relu", "Clip") else None
        return None if behind is None else ValueRange(behind.low, behind.high, None)


def is_float(value: ir.Value) -> bool:
    """Whether ``value`` is an FP32 tensor (the only float type of a widened model)."""
    return value.dtype is ir.DataType.FLOAT


def ranking_readers(node: ir.Node) -> list[str]:
    """Names of the nodes that only compare or rank what ``node`` computes.

    They gain nothing from a narrow operand, and rounding it makes ties: they take the type of whoever computes it.
    """
    found = []
    for value in node.outputs:
        for user, _ in value.uses():
            floats = any(is_float(output) for output in user.outputs)
            if user.graph is node.graph and is_float(value) and (not floats or user.op_type == "TopK"):
                found.append(str(user.name))
    return found


def _constant_range(array: np.ndarray) -> ValueRange:
    low, high = finite_range(array)
    if array.size > 1 << 16:
        return ValueRange(low, high, None)  # weights; the smallest magnitude matters of operands of a division, say
    absolute = np.abs(array[np.isfinite(array)])
    nonzero = absolute[absolute > 0]
    return ValueRange(low, high, float(nonzero.min()) if nonzero.size else None)
