"""Guards of softmax against rows that are masked throughout."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from trtopt.graph.attention import is_over_last
from trtopt.graph.edit import (
    all_nodes,
    axes_of,
    can_replace,
    constant_of,
    input_of,
    int_attribute,
    is_op,
    maker_of,
    remove_node,
    replace_value,
)
from trtopt.graph.scores import Scores, is_nothing
from trtopt.rewrite.protocol import Findings, Match, Refusal, Stage, Target


@dataclass(frozen=True)
class NanGuard:
    """Removes what replaces the NaN of rows that are masked throughout, where no row can be.

    Rewrite:
        p = Softmax(s), Where(IsNaN(p), 0, p) becomes p; likewise Where(all(s == -inf), 0, p).
    Requires:
        Softmax over the last axis. Every row of s has a number: its masks are finite and do not overflow when they are
        added up, or hold -inf only where a boolean leaves one key per row (causal masks, constant or from Range).
    Why faster:
        The fused attention kernel of TensorRT for RTX does not know the guard, which PyTorch's exporters write behind
        the softmax of every scaled_dot_product_attention with a mask: a ViT of four blocks, batch 8, 52 -> 33
        kernels together with merged-transpose.
    Numerics:
        Exact for scores that are numbers below 1e30 (3e4 in FP16) before the mask. NaN in the inputs stays NaN, where
        the guard turned it into 0.
    Refuses when:
        A row may be masked throughout: a mask of -inf is an input or is selected by one. A finite mask in its place
        would give such a row equal weights, and not 0 (see masked-rows).
    """

    name: str = "nan-guard"
    stage: Stage = Stage.CLEAN
    lossless: bool = True

    def find(self, model: ir.Model, target: Target) -> Findings:
        """The selections behind softmax."""
        matches, refusals = [], []
        scores, opset = Scores(), model.graph.opset_imports.get("", 1)
        for node in all_nodes(model.graph):
            softmax = guarded(node, opset)
            masked = softmax.inputs[0] if softmax is not None else None
            if softmax is None or masked is None:
                continue
            if scores.of(masked) is None:
                reason = f"a row may be masked throughout: nothing says that {scores.doubt(masked)} leaves a key"
                refusals.append(Refusal(str(node.name), reason))
            elif can_replace(node.outputs[0], softmax.outputs[0]):
                matches.append(Match((node, softmax)))
        return Findings(tuple(matches), tuple(refusals))

    def rewrite(self, model: ir.Model, match: Match) -> Refusal | None:
        """Remove one guard; its condition is left to dead-node."""
        guard, softmax = match.nodes
        replace_value(guard.outputs[0], softmax.outputs[0])
        remove_node(guard)
        return None


def guarded(node: ir.Node, opset: int) -> ir.Node | None:
    """The softmax whose NaN ``node`` replaces by 0."""
    if not is_op(node, "Where"):
        return None
    condition, first, second = node.inputs
    inverse = maker_of(condition)
    if is_op(inverse, "Not"):
        condition, first, second = inverse.inputs[0], second, first
    zero, softmax = constant_of(first), maker_of(second)
    if zero is None or zero.size != 1 or zero.any() or not is_op(softmax, "Softmax"):
        return None
    shape = softmax.inputs[0].shape if softmax.inputs[0] is not None else None
    if shape is None or zero.ndim > len(shape) or not is_over_last(softmax, opset):
        return None
    maker = maker_of(condition)
    if maker is None:
        return None
    if is_op(maker, "IsNaN"):
        return softmax if maker.inputs[0] is second else None
    return softmax if _all_masked(maker, softmax.inputs[0], len(shape)) else None


def _all_masked(node: ir.Node, scores: ir.Value | None, rank: int) -> bool:
    """Whether ``node`` says of each row of ``scores`` that it is -inf throughout."""
    reduction = _behind_casts(node)
    if not is_op(reduction, "ReduceMin") or not int_attribute(reduction, "keepdims", 1):
        return False
    axes = axes_of(reduction)
    if axes is None or [axis % rank for axis in axes] != [rank - 1]:
        return False
    source = input_of(reduction, 0)
    equal = _behind_casts(maker_of(source))
    return is_op(equal, "Equal") and equal.inputs[0] is scores and is_nothing(equal.inputs[1])


def _behind_casts(node: ir.Node | None) -> ir.Node | None:
    while is_op(node, "Cast") and node.inputs[0] is not None:
        node = node.inputs[0].producer()
    return node
