"""Batch normalization of tokens' features."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from trtopt.graph import edit
from trtopt.graph.conv import norm_affine, trains, why_not_fit
from trtopt.rewrite.protocol import Findings, Match, Refusal, Stage, Target

_ROWS = 2
"""Axes of a tensor of rows."""


@dataclass(frozen=True)
class TokenBatchNorm:
    """Writes BatchNormalization of tokens, transposed or flattened for it, as a multiplication and an addition.

    Rewrite:
        BN(Transpose(x)) = s Transpose(x) + (beta - s mean) per channel with s = gamma / sqrt(variance + epsilon), where
        the Transpose brings the channels to axis 1; BN(Reshape(x, [-1, channels])) = Reshape(s x + (beta - s mean)).
    Requires:
        Inference mode; constant statistics; a known rank.
    Why faster:
        BatchNormalization has its channels on axis 1, so that transformers which normalize their features by it
        transpose all tokens before and behind; a multiplication works in either layout, and transpose-push takes both
        away, or flatten them to rows: then layer-scale folds the factor into the product before. PatchTST of three
        layers in FP16: 37 kernels and 1684 us -> 26 and 1304 by a plain roofline of an L4; LeViT-128,
        whose attention is fused then: 196 and 1304 -> 141 and 963.
    Numerics:
        The same sum with factors multiplied beforehand, in FP64, and rounded once to the type of the input.
    Refuses when:
        Training mode; statistics that are not constants; a factor that does not fit the type of the input.
    """

    name: str = "token-batch-norm"
    stage: Stage = Stage.FOLD
    lossless: bool = True

    def find(self, model: ir.Model, target: Target) -> Findings:
        """BatchNormalization nodes behind a Transpose that moves their channels, or a Reshape to rows."""
        nodes = [node for node in edit.all_nodes(model.graph) if _matches(node)]
        return Findings.of([(Match((node,)), _why_not(node)) for node in nodes])

    def rewrite(self, model: ir.Model, match: Match) -> Refusal | None:
        """Write one node in arithmetic."""
        (norm,) = match.nodes
        affine, data, output, flat = norm_affine(norm), norm.inputs[0], norm.outputs[0], _flattening(norm)
        if affine is None or data is None or data.shape is None or data.dtype is None:
            return Refusal(match.label, "it was changed by a rewrite before")
        shape = (-1, *[1] * (len(data.shape) - 2)) if flat is None else (-1,)
        splice, source = edit.Splice(model, norm, self.name), data if flat is None else flat.inputs[0]
        dtype = data.dtype.numpy()
        factor, summand = (splice.constant(each.astype(dtype).reshape(shape), output, "affine") for each in affine)
        made = splice.op("Add", splice.op("Mul", source, factor, like=source), summand, like=source)
        splice.finish(made if flat is None else splice.op("Reshape", made, flat.inputs[1]))
        return None


def _matches(norm: ir.Node) -> bool:
    data = norm.inputs[0] if edit.is_op(norm, "BatchNormalization") else None
    if data is None or data.shape is None or data.dtype is None:
        return False
    producer = data.producer()
    perm = edit.ints_attribute(producer, "perm") if edit.is_op(producer, "Transpose") else None
    return (perm is not None and len(perm) > 1 and perm[1] != 1) or _flattening(norm) is not None


def _flattening(norm: ir.Node) -> ir.Node | None:
    """The Reshape before a BatchNormalization that merges all axes but the last, which are the channels."""
    data = norm.inputs[0]
    node = edit.maker_of(data)
    source = node.inputs[0] if edit.is_op(node, "Reshape") else None
    before, after = edit.dims_of_value(source) or (), edit.dims_of_value(data) or ()
    is_flat = len(after) == _ROWS < len(before) and before[-1] == after[-1] and isinstance(after[-1], int)
    return node if is_flat else None


def _why_not(norm: ir.Node) -> str:
    if trains(norm):
        return "it is in training mode"
    affine, dtype = norm_affine(norm), norm.inputs[0].dtype if norm.inputs[0] is not None else None
    if affine is None or dtype is None:
        return "its statistics are not constants"
    return next(filter(None, (why_not_fit(array, dtype.numpy()) for array in affine)), "")
