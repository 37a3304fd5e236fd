"""Reshapes to a shape that is computed from shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from trtopt.graph import edit
from trtopt.graph.dimension import Dim, reshaped
from trtopt.graph.dims import Dimensions
from trtopt.rewrite.protocol import Findings, Match, Refusal, Stage, Target


@dataclass(frozen=True)
class ComputedReshape:
    """Gives a Reshape a constant shape where it is computed from dimensions that its input has at the same places.

    Rewrite:
        Reshape(x, Concat(Shape(x)[0], Shape(x)[1], -1, 32)) becomes Reshape(x, [0, 0, 12, 32]) for x of [?, ?, 384]:
        0 copies a dimension, and -1 becomes a number where the dimensions known so leave one.
    Requires:
        A shape made by Shape, Gather, Slice, Concat and the like, of x or of a tensor whose dimension is provably that
        of x: x is made from it by operators that keep it (element-wise ones, normalizations, products, transposes,
        other reshapes), or both have the same name. At most one -1 is left. One dimension that x has not at its place,
        or that is computed, is -1, where all others are numbers, or where it is what is left beside dimensions of which
        none is 0: first ones of inputs, and sizes that windows fit into.
    Why faster:
        The number of heads is known, and the moves between projections and attention can be followed, by the recipes
        for attention among others; the arithmetic on shapes goes. The compiler of TensorRT for RTX, which gets a
        shape for each input, computes it while it builds.
    Numerics:
        Exact.
    Refuses when:
        More than one dimension is that of another tensor or of x at another place, or one is, beside others that are
        no numbers; allowzero is set and the shape holds 0.
    """

    name: str = "computed-reshape"
    stage: Stage = Stage.FOLD
    lossless: bool = True

    def find(self, model: ir.Model, target: Target) -> Findings:
        """Reshapes to a computed shape; the choice of a match is the shape."""
        nodes = [node for node in edit.all_nodes(model.graph) if _is_computed(node)]
        known = Dimensions(model) if nodes else None
        matches, refusals = [], []
        batches = {dims[0] for value in model.graph.inputs if known is not None and (dims := known.of(value))}

        def is_there(dim: Dim) -> bool:
            return known is not None and (dim in batches or _is_there(known, dim))

        for node in nodes:
            told = known.held(node.inputs[1]) if known is not None else None
            if known is None or not told:
                continue
            shape = _constant_shape(known.of(node.inputs[0]), told, is_there)
            if shape is None and None in told:
                continue
            if shape is None:
                reason = "its shape is computed from dimensions that are not provably those of its input"
                refusals.append(Refusal(str(node.name), reason))
            elif 0 in told and edit.int_attribute(node, "allowzero", 0):
                refusals.append(Refusal(str(node.name), "with allowzero, 0 does not copy a dimension"))
            else:
                matches.append(Match((node,), choice=",".join(map(str, shape))))
        return Findings(tuple(matches), tuple(refusals))

    def rewrite(self, model: ir.Model, match: Match) -> Refusal | None:
        """Put a constant in the place of the computed shape."""
        node = match.nodes[0]
        if node.graph is None or not _is_computed(node):
            return Refusal(match.label, "its shape is a constant by now")
        shape = np.asarray([int(dim) for dim in match.choice.split(",")], np.int64)
        constant = edit.add_initializer(node.graph, edit.Names(model).value(f"{node.outputs[0].name}_shape"), shape)
        node.replace_input_with(1, constant)
        node.attributes.pop("allowzero", None)
        edit.tag(node, self.name)
        return None


def _is_computed(node: ir.Node) -> bool:
    shape = edit.input_of(node, 1) if edit.is_op(node, "Reshape") else None
    return shape is not None and edit.constant_tensor_of(shape) is None


def _is_there(known: Dimensions, dim: Dim) -> bool:
    """Whether a dimension is 1 or more."""
    less = known.floor(dim, -1, 1)
    return less is not None and known.is_natural(less)


def _constant_shape(
    dims: Sequence[Dim] | None, parts: Sequence[Dim | None], is_there: Callable[[Dim], bool]
) -> list[int] | None:
    """The shape as numbers, -1 and 0; None where that cannot be said. Beside a 0, -1 stands for nothing."""
    if -1 in parts and dims is not None:
        left = reshaped(dims, parts)[parts.index(-1)]
        parts = [left if part == -1 and isinstance(left, int) else part for part in parts]
    dims = tuple(dims or ())
    shape: list[int] = []
    foreign = False
    for axis, part in enumerate(parts):
        if isinstance(part, int):
            shape.append(part)
        elif axis < len(dims) and dims[axis] == part:
            shape.append(0)
        else:
            foreign = True
            shape.append(-1)
    if shape.count(-1) > 1:
        return None
    if foreign:
        at = shape.index(-1)
        told = reshaped(dims, [*parts[:at], -1, *parts[at + 1 :]])[at]
        copied = [axis for axis, number in enumerate(shape) if number == 0]
        is_left = told == parts[at] and all(axis < len(dims) and is_there(dims[axis]) for axis in copied)
        return shape if is_left or not copied else None
    return shape
