"""Batch normalization after a convolution or matrix product."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from trtopt.graph import edit
from trtopt.graph.conv import (
    norm_affine,
    output_channels,
    scale_outputs,
    set_weights,
    trains,
    weight_and_bias,
    why_not_behind,
    why_not_constant,
)
from trtopt.rewrite.protocol import Findings, Match, Refusal, Stage, Target

_PRODUCERS = ("Conv", "ConvTranspose", "Gemm")


@dataclass(frozen=True)
class BatchNorm:
    """Folds BatchNormalization into the Conv, ConvTranspose or Gemm before it.

    Rewrite:
        BN(W x + b) = (s W) x + s (b - mean) + beta with s = gamma / sqrt(variance + epsilon), per output channel.
    Requires:
        Inference mode; the statistics, the weights and the bias are constants. Weights used by other nodes too are
        left to them: the folded ones are new.
    Why faster:
        One multiplication and one addition per element less, and convolution, bias and activation become one kernel.
        Quantized weights must contain the scale, or the quantizer sees another range than the kernel.
    Numerics:
        The same sum with factors multiplied beforehand, in FP64, and rounded once to the weights' type.
    Refuses when:
        The output before normalization is used elsewhere or is a graph output; training mode; weights or statistics
        that are not constants (quantized weights are not); a folded weight beyond the range of its type; a Gemm whose
        bias differs per row.
    """

    name: str = "batch-norm"
    stage: Stage = Stage.FOLD
    lossless: bool = True

    def find(self, model: ir.Model, target: Target) -> Findings:
        """BatchNormalization nodes right after a Conv, ConvTranspose or Gemm."""
        places = []
        for node in edit.all_nodes(model.graph):
            producer = edit.maker_of(node.inputs[0]) if edit.is_op(node, "BatchNormalization") else None
            if not edit.is_op(producer, *_PRODUCERS):
                continue
            places.append((Match((node, producer)), _why_not(node, producer)))
        return Findings.of(places)

    def rewrite(self, model: ir.Model, match: Match) -> Refusal | None:
        """Fold one node."""
        norm, producer = match.nodes
        (weight, bias), affine = weight_and_bias(producer), norm_affine(norm)
        if affine is None:
            return Refusal(match.label, "it has changed since it was found")
        scale, shift = affine
        folded = scale_outputs(producer, weight, scale), bias * scale + shift
        dtype = edit.array_of(producer.inputs[1]).dtype
        with np.errstate(over="ignore"):
            if not all(np.isfinite(array.astype(dtype).astype(np.float64)).all() for array in folded):
                return Refusal(match.label, f"a folded weight does not fit {dtype}")
        # The surviving tensor holds what the normalization put out, so it goes by that name.
        names, output = edit.Names(model), str(norm.outputs[0].name)
        edit.replace_value(norm.outputs[0], producer.outputs[0])
        edit.remove_node(norm)
        producer.outputs[0].name = output
        set_weights(names, producer, *folded)
        edit.tag(producer, self.name)
        return None


def _why_not(norm: ir.Node, producer: ir.Node) -> str:
    if hindrance := why_not_behind(norm, producer):
        return hindrance
    if trains(norm):
        return "it is in training mode"
    if any(edit.constant_of(v) is None for v in norm.inputs[1:5]):
        return "its statistics are not constants"
    if hindrance := why_not_constant(producer):
        return hindrance
    affine, channels = norm_affine(norm), output_channels(producer, edit.array_of(producer.inputs[1]))
    if affine is None or affine[0].shape != (channels,):
        return f"its statistics are not one per channel of {producer.name}"
    return ""
