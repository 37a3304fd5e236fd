"""Products of rows with weights that are gathered for each row: mixtures of experts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from trtopt.graph import edit
from trtopt.graph.dimension import Dim
from trtopt.graph.dims import Dimensions
from trtopt.rewrite.protocol import Findings, Match, Refusal, Stage, Target

_BATCHED, _AXES = 12, 13
"""The opset from which on GatherND has batch dimensions, and that from which on the axes of Unsqueeze are an input."""
_COLUMN, _STACK = 2, 3
"""The rank of an index of GatherND, and that of the experts' weights and of the operands of their products."""


@dataclass(frozen=True)
class GatheredWeights:
    """Multiplies rows by the weights of all experts and selects, in place of gathering weights for each row.

    Rewrite:
        MatMul(Gather(W, index), x) = GatherND(Reshape(MatMul(x, W'), [rows, experts, columns]), index), W' being the
        experts' weights side by side; also where x is the first operand. Rows that an Expand repeats for their experts
        are multiplied once and repeated behind the product.
    Requires:
        Constant weights of rank 3, an int64 index that is a row of numbers (or, for GatherND, a column), one vector a
        row and provably as many rows as indices; opset 13. The gathered weights are used once.
    Why faster:
        The compiler writes the weights of an expert for each row and reads them again: OLMoE's blocks (two of width
        512, eight experts of which two are taken, 256 tokens) in FP16 move 3.3 GB, 13.8 ms -> 0.1 GB, 0.41 ms by a
        plain roofline of an L4. Few rows beside many experts read more weights
        than are selected; two rows of four experts gain still (a token of Mixtral: 52.9 -> 40.6 us, predicted).
    Numerics:
        The same sums of products. What is not selected may overflow in FP16, and is not read.
    Refuses when:
        Never: what else is gathered does not match.
    """

    name: str = "gathered-weights"
    stage: Stage = Stage.FUSE
    lossless: bool = True

    def find(self, model: ir.Model, target: Target) -> Findings:
        """Products with gathered constants."""
        if model.graph.opset_imports.get("", 1) < max(_BATCHED, _AXES):
            return Findings(())
        nodes = [node for node in model.graph if edit.is_op(node, "MatMul") and _gathers(node)]
        known = Dimensions(model) if nodes else None
        places = [(node, _place(known, node)) for node in nodes if known is not None]
        return Findings(tuple(Match((node, found.gather)) for node, found in places if found))

    def rewrite(self, model: ir.Model, match: Match) -> Refusal | None:
        """Multiply by all weights and select."""
        node = match.nodes[0]
        found = _place(Dimensions(model), node)
        weights = edit.constant_of(found.gather.inputs[0]) if found is not None else None
        if found is None or weights is None:
            return Refusal(match.label, "it was changed by a rewrite before")
        splice, like = edit.Splice(model, node, self.name), node.outputs[0]

        def reshaped(value: ir.Value, *sizes: int) -> ir.Value:
            return splice.fresh("Reshape", value, splice.ints(sizes, like, "shape"), like=like)

        experts, (rows, columns) = len(weights), weights.shape[1:][:: -1 if found.first else 1]
        side = np.moveaxis(weights, -1 if found.first else 1, 0).reshape(rows, experts * columns)
        wide = splice.constant(np.ascontiguousarray(side), like, "experts")
        made = splice.fresh("MatMul", reshaped(found.rows, -1, rows), wide, like=like)
        if found.repeats > 1:
            shape = splice.ints([1, found.repeats, 1], like, "shape")
            made = splice.fresh("Expand", reshaped(made, -1, 1, experts * columns), shape, like=like)
        axis = splice.ints([-1], like, "axis")
        index = found.gather.inputs[1]
        if found.gather.op_type == "Gather":
            index = splice.fresh("Unsqueeze", index, axis, like=index)
        made = splice.fresh(
            "GatherND", reshaped(made, -1, experts, columns), index, attributes={"batch_dims": 1}, like=like
        )
        splice.finish(reshaped(made, *((-1, columns, 1) if found.first else (-1, 1, columns))))
        return None


@dataclass(frozen=True)
class _Place:
    """What gathers weights, whether they are the first operand, the rows, and how often each of them is repeated."""

    gather: ir.Node
    first: bool
    rows: ir.Value
    repeats: int


def _gathers(node: ir.Node) -> list[tuple[int, ir.Node]]:
    """The operands of a product that are constants gathered by rows, and what gathers them."""
    makers = [
        (at, value.producer())
        for at, value in enumerate(node.inputs)
        if value is not None and edit.only_user(value) is not None
    ]
    return [(at, maker) for at, maker in makers if maker is not None and _is_of_rows(maker)]


def _is_of_rows(node: ir.Node) -> bool:
    if not edit.is_op(node, "Gather", "GatherND") or edit.constant_tensor_of(node.inputs[0]) is None:
        return False
    weights, index = edit.static_shape(node.inputs[0]) or (), edit.dims_of_value(node.inputs[1]) or ()
    if node.op_type == "Gather":
        by_row = len(index) == 1 and edit.int_attribute(node, "axis", 0) in (0, -_STACK)
    else:
        by_row = len(index) == _COLUMN and index[-1] == 1 and edit.int_attribute(node, "batch_dims", 0) == 0
    return by_row and len(weights) == _STACK and 0 not in weights


def _place(known: Dimensions, node: ir.Node) -> _Place | None:
    found = _gathers(node)
    if len(found) != 1:
        return None
    at, gather = found[0]
    index, rows = gather.inputs[1], node.inputs[1 - at]
    dims, indices = known.of(rows), known.of(index)
    if rows is None or index is None or not dims or not indices or len(dims) != _STACK:
        return None
    if dims[1 if at else 2] != 1 or dims[0] != indices[0] or index.dtype != ir.DataType.INT64:
        return None
    source, repeats = _repeated(known, rows, dims[2 if at else 1])
    return _Place(gather, at == 0, source, repeats)


def _repeated(known: Dimensions, rows: ir.Value, width: Dim) -> tuple[ir.Value, int]:
    """What an Expand [tokens, 1, width] -> [tokens, repeats, width] makes rows of, and its repeats; or the rows, 1."""
    maker = rows.producer()
    while edit.is_op(maker, "Reshape", "Squeeze", "Unsqueeze") and maker.inputs[0] is not None:
        maker = maker.inputs[0].producer()
    source = maker.inputs[0] if edit.is_op(maker, "Expand") else None
    before, after = known.of(source) or (), known.of(maker.outputs[0] if maker is not None else None) or ()
    if source is None or len(before) != _STACK or len(after) != _STACK or not isinstance(after[1], int):
        return rows, 1
    is_known = before == (after[0], 1, width) and after[2] == width and after[1] > 1
    return (source, after[1]) if is_known else (rows, 1)
