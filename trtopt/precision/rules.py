"""Where INT8 goes, per backend: one table, with the reason of each entry.

Measured for TensorRT for RTX 1.7 by looking at its kernels and the bytes they move (docs/architecture.md); for
TensorRT from its documented fusions, not run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import onnx_ir as ir

from trtopt.graph import edit

Granularity = Literal["per-tensor", "per-channel"]

SMALLEST_INPUT_SQNR_DB = 20.0
"""Below it a tensor is too heavy-tailed for INT8: the nodes that read it stay 16-bit. Chosen on FastestDet, where two
convolutions below 20 dB cost more output SQNR than the other forty (benchmarks/accuracy)."""

LARGEST_SHARE_LEFT_OUT = 0.2
"""Share of the flop of eligible nodes that heavy tails may keep out of INT8, the worst first: INT8 was asked for."""

SMALLEST_WEIGHT_SQNR_DB = 42.0
"""Below it one scale per tensor is too coarse for a convolution's weight, and scales per channel are written as one
scale and a multiplication, which joins the kernel that quantizes the result. Chosen on FastestDet and SqueezeNet
(benchmarks/accuracy)."""


@dataclass(frozen=True)
class Placement:
    """The verdict on one node: ``granularity`` of its weight's scales, or None to keep it out of INT8."""

    granularity: Granularity | None
    reason: str


@dataclass(frozen=True)
class Rule:
    """One row of the table.

    Attributes:
        ops: The operator types it speaks of.
        applies: A condition's name, one of ``_CONDITIONS``.
        placement: The verdict.
    """

    ops: frozenset[str]
    applies: str
    placement: Placement


def _rule(ops: str, applies: str, granularity: Granularity | None, reason: str) -> Rule:
    return Rule(frozenset(ops.split()), applies, Placement(granularity, reason))


RULES: dict[str, tuple[Rule, ...]] = {
    "tensorrt-rtx": (
        _rule("ConvTranspose", "always", None, "the compiler dequantizes it and runs FP16"),
        _rule("Conv", "depthwise", None, "INT8 depthwise pads every channel to four: four times the bytes of FP16"),
        _rule("Conv", "thin-groups", None, "INT8 groups of a size that is no multiple of four are padded one by one"),
        _rule(
            "Conv",
            "always",
            "per-tensor",
            "scales per channel inside the convolution leave FP32 outputs and one more kernel",
        ),
        _rule("MatMul Gemm", "merged-qkv", "per-tensor", "a merged QKV with scales per channel becomes weight-only"),
        _rule("MatMul Gemm", "always", "per-channel", "scales per channel fold into the GEMM's epilogue"),
    ),
    "tensorrt": (
        _rule("ConvTranspose", "grouped", None, "no INT8 kernel for grouped transposed convolutions"),
        _rule("Conv", "depthwise", None, "INT8 depthwise kernels are slower than FP16 on most shapes"),
        _rule("Conv ConvTranspose", "always", "per-channel", "scales per channel fold into the convolution's epilogue"),
        _rule("MatMul Gemm", "always", "per-channel", "scales per channel fold into the GEMM's epilogue"),
    ),
}


def placement(node: ir.Node, backend: str) -> Placement:
    """The first row of ``backend``'s table that speaks of ``node``.

    Args:
        node: A Conv, ConvTranspose, Gemm or MatMul with a constant weight.
        backend: ``tensorrt-rtx`` or ``tensorrt``.
    """
    for rule in RULES[backend]:
        if node.op_type in rule.ops and _CONDITIONS[rule.applies](node):
            return rule.placement
    return Placement(None, f"no INT8 rule for {node.op_type}")


def _groups(node: ir.Node) -> int:
    return edit.int_attribute(node, "group", 1)


def _weight_shape(node: ir.Node) -> tuple[int, ...]:
    weight = edit.constant_of(node.inputs[1])
    return np.shape(weight) if weight is not None else ()


def _is_depthwise(node: ir.Node) -> bool:
    return _groups(node) > 1 and _weight_shape(node)[1] == 1


def _has_thin_groups(node: ir.Node) -> bool:
    return _groups(node) > 1 and _weight_shape(node)[1] % 4 != 0


def _is_merged_qkv(node: ir.Node) -> bool:
    """Whether the product is cut into parts downstream, through operators that only move values or add a bias."""
    through = {"Add", "Reshape", "Transpose", "Squeeze", "Unsqueeze"}
    front = [node.outputs[0]]
    for _ in range(6):
        consumers = [consumer for value in front for consumer, _ in value.uses()]
        cuts = [consumer for consumer in consumers if consumer.op_type in ("Split", "Slice", "Gather")]
        if any(cut.op_type == "Split" for cut in cuts) or len(cuts) > 1:
            return True
        front = [consumer.outputs[0] for consumer in consumers if consumer.op_type in through]
        if not front:
            return False
    return False


_CONDITIONS = {
    "always": lambda node: True,
    "grouped": lambda node: _groups(node) > 1,
    "depthwise": _is_depthwise,
    "thin-groups": _has_thin_groups,
    "merged-qkv": _is_merged_qkv,
}
