"""Rows of scores that are masked throughout, set to zero behind attention instead of in it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from trtopt.graph import edit
from trtopt.graph.scores import Bounds, Scores, moderate
from trtopt.graph.views import is_pass
from trtopt.rewrite.protocol import Findings, Match, Refusal, Stage, Target
from trtopt_recipes.nan_guard import guarded


@dataclass(frozen=True)
class MaskedRows:
    """Takes the guard against rows that are masked throughout out of attention, where a row may be.

    Rewrite:
        Where(IsNaN(p), 0, p) V for p = softmax(s + m) becomes (softmax(s + m') V) * alive with
        alive = max(m) > -inf, row by row, and m' = Where(alive, m, 0).
    Requires:
        One mask m that is added to scores that are numbers and may hold -inf; other masks are finite. The guarded
        weights are multiplied by the values and used nowhere else.
    Why faster:
        The fused attention kernel of TensorRT for RTX does not know the guard, but a mask that leaves every row a key.
        m' and alive are small and the same for all layers.
    Numerics:
        Exact for scores and values that are numbers below 1e30 (3e4 in FP16): rows masked throughout are 0 as before.
    Refuses when:
        The weights are used elsewhere, several masks may hold -inf (together they may mask a row that none of them
        masks), or the mask is multiplied by what may be negative or zero.
    """

    name: str = "masked-rows"
    stage: Stage = Stage.FUSE
    lossless: bool = True

    def find(self, model: ir.Model, target: Target) -> Findings:
        """The guards that nan-guard has to leave."""
        matches, refusals = [], []
        scores, opset = Scores(), model.graph.opset_imports.get("", 1)
        for node in edit.all_nodes(model.graph):
            softmax = guarded(node, opset)
            if softmax is None or opset < 13 or scores.of(softmax.inputs[0]) is not None:
                continue
            add, mix = _addition(softmax, scores), _product(node)
            if mix is None:
                refusals.append(Refusal(str(node.name), "its weights are used for something else than one product"))
            elif add is None:
                refusals.append(Refusal(str(node.name), "not one mask alone is added to scores that are numbers"))
            elif len({each.graph for each in (node, softmax, add, mix)}) == 1:
                matches.append(Match((node, softmax, add, mix)))
        return Findings(tuple(matches), tuple(refusals))

    def rewrite(self, model: ir.Model, match: Match) -> Refusal | None:
        """Rewrite one attention; the guard's condition is left to dead-node."""
        guard, softmax, add, mix = match.nodes
        index = _mask_index(add, Scores())
        mask, dtype = None if index is None else add.inputs[index], mix.outputs[0].dtype
        if index is None or mask is None or mask.dtype is None or mask.shape is None or dtype is None:
            return Refusal(match.label, "it has no mask any more")
        splice = edit.Splice(model, add, self.name)
        row = ir.Value(name=mask.name, type=mask.type, shape=ir.Shape([*list(mask.shape)[:-1], 1]))
        nothing, zero = (
            splice.constant(np.asarray(number, mask.dtype.numpy()), mask, suffix)
            for number, suffix in ((-np.inf, "nothing"), (0, "zero"))
        )
        if model.graph.opset_imports[""] < 18:
            most = splice.op("ReduceMax", mask, attributes={"axes": [-1]}, like=row)
        else:
            most = splice.op("ReduceMax", mask, splice.constant(np.asarray([-1]), mask, "axes"), like=row)
        row.type = ir.TensorType(ir.DataType.BOOL)
        alive = splice.op("Greater", most, nothing, like=row)
        add.replace_input_with(index, splice.op("Where", alive, mask, zero, like=mask))
        row.type = ir.TensorType(dtype)
        factor = splice.op("Cast", alive, attributes={"to": int(dtype)}, like=row)
        splice.restore(mix.outputs[0], "Mul", (), factor)
        edit.replace_value(guard.outputs[0], softmax.outputs[0])
        edit.remove_node(guard)
        return None


def _product(guard: ir.Node) -> ir.Node | None:
    """The product that alone uses the guarded weights, as its first operand."""
    value = guard.outputs[0]
    node = edit.only_user(value)
    while node is not None and is_pass(node):
        value, node = node.outputs[0], edit.only_user(node.outputs[0])
    if not edit.is_op(node, "MatMul") or node.inputs[0] is not value:
        return None
    values = node.inputs[1]
    return node if values is not None and values.shape is not None and len(values.shape) > 1 else None


def _addition(softmax: ir.Node, scores: Scores) -> ir.Node | None:
    """What adds the one mask that may hold -inf in a whole row; None where that is not all that is the matter."""
    value, add = softmax.inputs[0], None
    while value is not None and edit.only_user(value) is not None:
        node = value.producer()
        if node is None or not (is_pass(node) or edit.is_op(node, "Add", "Mul", "Div")):
            break
        index = _mask_index(node, scores)
        if index is None:
            break
        if add is not None and edit.is_op(node, "Mul", "Div"):
            factor = scores.of(node.inputs[1 - index])
            if factor is None or factor.low <= 0:  # -inf becomes +inf, or NaN
                return None
        add, value = node if edit.is_op(node, "Add") else add, node.inputs[index]
    index = None if add is None else _mask_index(add, scores)
    mask = None if add is None or index is None else add.inputs[index]
    if mask is None or mask.dtype is None:
        return None
    most = moderate(mask.dtype)
    given = {} if most is None else {mask: Bounds(most.low, most.high, gaps=True)}
    return add if Scores(given).of(softmax.inputs[0]) is not None else None


def _mask_index(node: ir.Node, scores: Scores) -> int | None:
    """Which operand alone is not known to leave each row a number."""
    unknown = [index for index, value in enumerate(node.inputs) if scores.of(value) is None]
    return unknown[0] if len(unknown) == 1 else None
