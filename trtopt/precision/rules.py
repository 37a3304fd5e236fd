"""Where 8-bit goes, per backend and type: one table, with the reason of each entry.

Measured for TensorRT for RTX 1.7 by looking at its kernels and the bytes they move (docs/precision.md); for TensorRT
from its documented fusions, and from what Model Optimizer, the quantizer made for it, leaves out; not run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import onnx_ir as ir

from trtopt.graph import edit
from trtopt.precision.fp16.heads import is_prediction_head
from trtopt.support.precision import Precision

Granularity = Literal["per-tensor", "per-channel"]

SMALLEST_INPUT_SQNR_DB = 20.0
"""Below it a tensor is too heavy-tailed for INT8: the nodes that read it stay 16-bit. Chosen on FastestDet, where two
convolutions below 20 dB cost more output SQNR than the other forty (benchmarks/accuracy)."""

LARGEST_SHARE_LEFT_OUT = 0.2
"""Share of the flop of eligible nodes that first layers and heavy tails may keep out of INT8, the worst first: INT8 was
asked for."""

SMALLEST_WEIGHT_SQNR_DB = 42.0
"""Below it one scale per tensor is too coarse for a convolution's weight, and scales per channel are written as one
scale and a multiplication, which joins the kernel that quantizes the result. Chosen on FastestDet and SqueezeNet
(benchmarks/accuracy)."""

LEAST_WEIGHT_SQNR_DB = 30.0
"""From here to the value above, one scale is used where only it makes the engine faster: the noise of the weight is
then still that of a quantized activation."""

RESULT_SQNR_DB = 30.0
"""Signal to noise in INT8 that the result of a product has to keep: what its readers make of it has that noise, too."""

_ELEMENTWISE = frozenset(
    {"Add", "Sub", "Mul", "Div", "Relu", "LeakyRelu", "Clip", "Sigmoid", "HardSigmoid", "HardSwish", "Swish", "Tanh"}
    | {"Gelu", "Erf", "Elu", "Neg"}
)
_MOVING = frozenset({"Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Split", "Slice", "Gather"})
_THIN = 16
"""Channels, or rows and columns of a weight, below which Model Optimizer leaves a layer out (FP8: up to it)."""

_TAP_CHANNELS = 8
"""Channels of FP16 in the 16 bytes that a convolution's kernel reads at once; fewer are padded, in INT8 to 16."""

_LARGEST_FP8_WINDOW = 32
"""Elements of the largest window that Model Optimizer quantizes to FP8."""


@dataclass(frozen=True)
class Placement:
    """The verdict on one node: ``granularity`` of its weight's scales, or None to keep it out of 8-bit."""

    granularity: Granularity | None
    reason: str


@dataclass(frozen=True)
class PlacementRule:
    """One row of the table: the operator types and 8-bit types it speaks of, a condition of ``_CONDITIONS``, a
    verdict."""

    ops: frozenset[str]
    dtypes: frozenset[str]
    applies: str
    placement: Placement


def _rule(dtypes: str, ops: str, applies: str, granularity: Granularity | None, reason: str) -> PlacementRule:
    return PlacementRule(frozenset(ops.split()), frozenset(dtypes.split()), applies, Placement(granularity, reason))


_BOTH = "int8 fp8"

_HEAD = _rule(
    _BOTH,
    "Conv ConvTranspose MatMul Gemm",
    "prediction-head",
    None,
    "a detection head: its numbers are boxes and scores, and no layer behind it evens out their errors",
)

RULES: dict[str, tuple[PlacementRule, ...]] = {
    "tensorrt-rtx": (
        _HEAD,
        _rule(_BOTH, "ConvTranspose", "always", None, "the compiler dequantizes it and runs FP16"),
        _rule(_BOTH, "Conv", "depthwise", None, "8-bit depthwise pads every channel to four: twice the bytes of FP16"),
        _rule(
            _BOTH,
            "Conv",
            "thin-groups",
            None,
            "8-bit groups of a size that is no multiple of four are padded one by one",
        ),
        _rule(
            Precision.FP8,
            "Conv",
            "thin-first",
            None,
            "a first layer of few channels is bound by memory, and FP8 keeps 4 bits of an 8-bit image",
        ),
        _rule(
            Precision.INT8,
            "Conv",
            "always",
            "per-tensor",
            "scales per channel inside the convolution leave FP32 outputs and one more kernel",
        ),
        _rule(
            Precision.INT8,
            "MatMul Gemm",
            "merged-qkv",
            "per-tensor",
            "a merged QKV with scales per channel becomes weight-only",
        ),
        _rule(
            Precision.INT8,
            "MatMul Gemm",
            "always",
            "per-channel",
            "scales per channel are a multiplication in the kernel that adds the bias behind the product",
        ),
        _rule(
            Precision.FP8,
            "Conv MatMul Gemm",
            "always",
            "per-tensor",
            "FP8 is as precise at any size of number, so scales per channel gain little, and cost kernels",
        ),
    ),
    "tensorrt": (
        _HEAD,
        _rule(_BOTH, "ConvTranspose", "grouped", None, "no 8-bit kernel for grouped transposed convolutions"),
        _rule(Precision.FP8, "ConvTranspose", "always", None, "no FP8 kernel for transposed convolutions"),
        _rule(
            Precision.FP8,
            "Conv",
            "few-channels-fp8",
            None,
            "FP8 convolutions need more than 16 channels per group, in and out",
        ),
        _rule(Precision.FP8, "Conv", "large-window", None, "FP8 convolutions have windows of at most 32 elements"),
        _rule(
            Precision.INT8,
            "Conv",
            "thin-groups-trt",
            None,
            "no INT8 kernel for groups this thin, or windows below 3x3 on them",
        ),
        _rule(
            Precision.INT8,
            "Conv",
            "thin",
            None,
            "fewer than 16 channels: padding to a block of them costs more than INT8 gains",
        ),
        _rule(
            _BOTH,
            "MatMul Gemm",
            "vector",
            None,
            "a product with one row or column is no matrix product: it has no 8-bit kernel",
        ),
        _rule(_BOTH, "MatMul Gemm", "thin-product", None, "fewer than 16 rows or columns in the weight: no tile fills"),
        _rule(
            Precision.INT8,
            "Conv ConvTranspose",
            "always",
            "per-channel",
            "scales per channel fold into the convolution's epilogue",
        ),
        _rule(
            Precision.INT8, "MatMul Gemm", "always", "per-channel", "scales per channel fold into the GEMM's epilogue"
        ),
        _rule(
            Precision.FP8,
            "Conv MatMul Gemm",
            "always",
            "per-tensor",
            "FP8 is as precise at any size of number, so scales per channel gain little",
        ),
    ),
}
"""By backend, in order: the first row that speaks of a node and a type decides.

No row speaks of softmax, sigmoid, normalisations, pooling, additions, Concat or box decodes: they keep 16 bits (softmax
and sigmoid press together what 8 bits could then tell apart no more), and the quantizer sits behind them, at the input
of the product that reads them.
"""


def placement(node: ir.Node, backend: str, dtype: Precision = Precision.INT8) -> Placement:
    """The first row of ``backend``'s table that speaks of ``node``, a product with a constant weight, in ``dtype``."""
    for rule in RULES[backend]:
        if node.op_type in rule.ops and dtype in rule.dtypes and _CONDITIONS[rule.applies](node):
            return rule.placement
    return Placement(None, f"no {dtype.upper()} rule for {node.op_type}")


RESIDUALS: dict[str, Placement] = {
    "tensorrt-rtx": Placement(
        None, "the convolution adds a residual in 16 bits: a quantized one is dequantized and written for it once more"
    ),
    "tensorrt": Placement(
        "per-tensor", "with a 16-bit residual a convolution writes 16 bits, and its quantizer is a kernel of its own"
    ),
}
"""Whether a residual that is quantized for another reader is added in that form."""

FIRST_LAYERS: dict[str, Placement] = {
    "tensorrt-rtx": Placement(
        None,
        "a first layer of up to 8 channels: a tap takes 16 bytes in either type, so INT8 computes no faster, and its "
        "error passes through every layer",
    ),
    "tensorrt": Placement("per-channel", "there are INT8 kernels for a first layer of up to four channels"),
}
"""Whether a first convolution of few channels is INT8 though :data:`LARGEST_SHARE_LEFT_OUT` would let it stay out.

For the L4 and the RTX 4090 TensorRT for RTX compiles as many kernels either way, and their predicted times are equal.
"""

LARGEST_SHARED_RATIO: dict[str, float] = {"tensorrt-rtx": 1.25, "tensorrt": math.inf}
"""Up to which ratio of their ranges a quantized Concat and its quantized inputs share a scale.

TensorRT moves the quantizer before the Concat, where another scale of an input is one more kernel. TensorRT for RTX
copies an input that is already quantized with the scale of the result, and else quantizes it again from 16 bits: the
same kernels, a few bytes more, which are not worth more than a third of a bit.
"""


def is_first_of_few_channels(node: ir.Node) -> bool:
    """Whether a node is what :data:`FIRST_LAYERS` speaks of: a convolution of the network's input, not grouped."""
    few = node.op_type == "Conv" and _groups(node) == 1 and _weight_shape(node)[1] <= _TAP_CHANNELS
    return few and _is_first(node)


@dataclass(frozen=True)
class AttentionRule:
    """Sizes of heads and numbers of queries and keys that keep one fused kernel with all four operands in an 8-bit
    type."""

    heads: range | frozenset[int]
    queries: range
    keys: range


_ANY = range(1, 1 << 31)

ATTENTION_RULES: dict[tuple[str, Precision], AttentionRule] = {
    ("tensorrt-rtx", Precision.INT8): AttentionRule(frozenset({16, 32, 64}), range(2, _ANY.stop), range(2, 513)),
    ("tensorrt-rtx", Precision.FP8): AttentionRule(range(8, 257, 8), range(32, _ANY.stop), range(32, _ANY.stop)),
    ("tensorrt", Precision.INT8): AttentionRule(range(8, 257, 8), range(2, _ANY.stop), range(2, 513)),
    ("tensorrt", Precision.FP8): AttentionRule(range(16, 257, 8), range(2, _ANY.stop), range(2, _ANY.stop)),
}
"""For TensorRT for RTX as its compiler does it (compute capability 8.9); for TensorRT as Model Optimizer places it.

Predicted time of attention with its four projections (12 heads of 64, batch 8, RTX 4090): 128 tokens 48.5 us with the
projections in INT8, 45.5 with attention too; 197 tokens 81.9 and 67.5; 512 tokens 257 and 178. In FP8 it pays from 512
tokens on (301 and 284; 2048 tokens 2874 and 2554). Beyond 512 keys INT8 has no fused kernel: 2741 and 3646 at 2048.
"""


def may_write_8_bits(node: ir.Node) -> bool:
    """Whether a product may write its result in 8 bits: one without a bias of its own, whose result only elementwise
    operators read, or attention once it has other axes. Those are a kernel behind an 8-bit product, which else reads
    16 bits from memory; attention that reads the result in place has none, and judging it says so."""
    value = node.outputs[0]
    is_bare = edit.is_op(node, "MatMul") or (edit.is_op(node, "Gemm") and len(node.inputs) == 2)
    return is_bare and not value.is_graph_output() and _is_read_by_a_kernel(value, _ELEMENTWISE)


def _is_read_by_a_kernel(value: ir.Value, readers: frozenset[str]) -> bool:
    """Whether only such operators read a value, or behind what moves it, products of activations too."""
    uses = value.uses()
    return bool(uses) and all(_reads_from_memory(user, index, readers) for user, index in uses)


def _reads_from_memory(user: ir.Node, index: int, readers: frozenset[str]) -> bool:
    if user.op_type in _MOVING and index == 0:
        outputs = [value for value in user.outputs if value.uses() or value.is_graph_output()]
        moved = readers | {"MatMul"}
        return all(not value.is_graph_output() and _is_read_by_a_kernel(value, moved) for value in outputs)
    if user.op_type == "MatMul":
        return "MatMul" in readers and all(edit.constant_tensor_of(value) is None for value in user.inputs)
    return user.op_type in readers


def attention_placement(
    head: int | None, queries: int | None, keys: int | None, backend: str, dtype: Precision
) -> Placement:
    """Whether the products of activations in an attention of these sizes may be 8-bit; None is a size that fits."""
    rule = ATTENTION_RULES[backend, dtype]
    for name, size, fitting in (
        ("head", head, rule.heads),
        ("queries", queries, rule.queries),
        ("keys", keys, rule.keys),
    ):
        if size is not None and size not in fitting:
            what = f"heads of {size}" if name == "head" else f"{size} {name}"
            return Placement(None, f"no fused {dtype.upper()} attention for {what}: its scores would be written out")
    return Placement("per-tensor", "queries, keys, probabilities and values in 8 bits keep the fused kernel")


def _groups(node: ir.Node) -> int:
    return edit.int_attribute(node, "group", 1)


def _weight_shape(node: ir.Node) -> tuple[int, ...]:
    weight = edit.constant_of(node.inputs[1])
    return np.shape(weight) if weight is not None else ()


def _is_thin_grouped_for_tensorrt(node: ir.Node) -> bool:
    """Grouped with fewer than 16 channels in or out of a group's filters, and not of the one form that has kernels."""
    outputs, inputs, *window = _weight_shape(node)
    return _groups(node) > 1 and min(outputs, inputs) < _THIN and not (outputs % 8 == 0 and min(window) >= 3)


def _is_thin(node: ir.Node) -> bool:
    """Fewer than 16 channels in or out, unless they fill blocks of 8 on a side and one side has 16, or it is the first
    layer; then the window must be square."""
    outputs, inputs, *window = _weight_shape(node)
    if _groups(node) > 1 or min(outputs, inputs) >= _THIN:
        return False
    fills = outputs % 8 == 0 or inputs % 8 == 0
    return not (fills and (max(outputs, inputs) >= _THIN or _is_first(node)) and len(set(window)) == 1)


def _is_first(node: ir.Node) -> bool:
    """Whether it reads an input of the network, maybe through element-wise operators."""
    value = node.inputs[0]
    for _ in range(4):
        if value is None or value.is_graph_input():
            return value is not None
        producer = value.producer()
        if producer is None or producer.op_type not in ("Add", "Cast", "Div", "Mul", "Pad", "Sub", "Transpose"):
            return False
        value = producer.inputs[0]
    return False


def _is_vector_product(node: ir.Node) -> bool:
    """One column in the weight, or one row in the (static) input."""
    if _columns(node) == 1:
        return True
    value = node.inputs[0]
    if value is None or value.shape is None or not value.shape.is_static():
        return False
    dims = value.shape.numpy()
    if node.op_type == "Gemm":
        return dims[1 if edit.int_attribute(node, "transA", 0) else 0] == 1
    return math.prod(dims[:-1]) == 1


def _columns(node: ir.Node) -> int:
    transposed = node.op_type == "Gemm" and edit.int_attribute(node, "transB", 0)
    return _weight_shape(node)[-2 if transposed else -1]


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
    "prediction-head": is_prediction_head,
    "grouped": lambda node: _groups(node) > 1,
    "depthwise": lambda node: _groups(node) > 1 and _weight_shape(node)[1] == 1,
    "thin-groups": lambda node: _groups(node) > 1 and _weight_shape(node)[1] % 4 != 0,
    "thin-groups-trt": _is_thin_grouped_for_tensorrt,
    "thin": _is_thin,
    "thin-first": lambda node: _is_first(node) and _weight_shape(node)[1] < _THIN,
    "few-channels-fp8": lambda node: min(_weight_shape(node)[:2]) <= _THIN,
    "large-window": lambda node: math.prod(_weight_shape(node)[2:]) > _LARGEST_FP8_WINDOW,
    "vector": _is_vector_product,
    "thin-product": lambda node: min(_weight_shape(node)[-2:]) < _THIN,
    "merged-qkv": _is_merged_qkv,
}
