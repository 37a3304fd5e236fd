"""What each compiler does not run, and the nearest form it does.

TensorRT for RTX: asked and seen, version 1.7.1 (what its parser refuses, and what it takes and no build implements).
TensorRT: the table in the documentation of its ONNX parser (onnx-tensorrt, ``docs/operators.md`` for 10.15), not run.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from trtopt.engine.backend import TENSORRT, Backend


@dataclass(frozen=True)
class Unsupported:
    """Why a node does not run."""

    reason: str
    remedy: str


_PLACES = "use Where, or ScatterElements and TopK of a constant k: results of a fixed size"

_NOWHERE_BY_REMEDY = {
    "compute on bool with And, Or, Not and Xor, or with Mul and Div by powers of two": (
        "BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor"
    ),
    "compute the grid with MatMul of the matrices and constant coordinates, then GridSample": "AffineGrid",
    "decode images before the model": "ImageDecoder",
    "export the model for inference, without its loss": "NegativeLogLikelihoodLoss SoftmaxCrossEntropyLoss",
    "make the input or output a plain tensor": "Optional OptionalGetElement OptionalHasElement",
    "make the matrix a constant of the model": "MelWeightMatrix",
    "take random numbers as an input of the model, or use RandomUniformLike and a comparison": "Bernoulli Multinomial",
    "take texts out of the model: map them to integers before it and after it": (
        "RegexFullMatch StringConcat StringNormalizer StringSplit TfIdfVectorizer"
    ),
    "use Attention, or MatMul, Softmax and MatMul": "FlexAttention",
    "use Cast": "BitCast",
    "use Conv or MatMul between QuantizeLinear and DequantizeLinear (a Q/DQ model)": (
        "ConvInteger MatMulInteger QLinearConv QLinearMatMul"
    ),
    "use ConvTranspose with a constant kernel of ones": "Col2Im",
    "use Exp of CumSum of Log where the factors are positive": "CumProd",
    "use GridSample and MaxPool": "MaxRoiPool",
    "use QuantizeLinear with a constant scale and the zero point 0": "DynamicQuantizeLinear",
    "use STFT with a constant window, or a MatMul with the matrix of the transform": "DFT",
    "use ScatterElements into zeros": "MaxUnpool",
    "use Slice and Pad": "CenterCropPad",
    "use Split, Sigmoid and Mul": "SwiGLU",
    "use tensors: Concat and Split in place of a sequence, Slice and Gather in place of its elements": (
        "ConcatFromSequence SequenceAt SequenceConstruct SequenceEmpty SequenceErase SequenceInsert SequenceLength "
        "SequenceMap SplitToSequence"
    ),
    "write the determinant of small matrices out with Mul and Sub": "Det",
    _PLACES: "Compress Unique",
}
_NOWHERE = {operator: remedy for remedy, operators in _NOWHERE_BY_REMEDY.items() for operator in operators.split()}
"""Neither compiler runs these operators of ONNX."""

_NOT_ON_RTX = {
    "CausalConvWithState": "use Concat of the state and Conv",
    "DeformConv": "use GridSample for each tap of the kernel, and a 1x1 Conv; or build with --backend tensorrt",
    "LinearAttention": "write it as MatMul, Mul and Add over chunks of the sequence",
    "NonMaxSuppression": "use TopK of a constant k: a result of a fixed size; "
    "or build with --backend tensorrt, which has a layer for it",
    "NonZero": f"{_PLACES}; or build with --backend tensorrt, which has a layer for it",
    "RoiAlign": "use GridSample and AveragePool; or build with --backend tensorrt, which has a plugin for it",
}
"""TensorRT has a layer or comes with a plugin for these; TensorRT for RTX refuses them: NonMaxSuppression in the build
("no runners"), the others for a plugin that the package does not hold."""

_CONTRIBUTED = frozenset(
    """
    Attention DequantizeLinear GatherND Gelu GridSample GroupQueryAttention MatMulNBits MultiHeadAttention Pad QMoE
    QuantizeLinear Range RotaryEmbedding SkipSimplifiedLayerNormalization Trilu
    """.split()
)
"""Operators of the domain com.microsoft whose names the parser knows."""

_OWN_PLUGIN = "_TRT"
"""Ending of the operators whose plugins come with TensorRT (``EfficientNMS_TRT``)."""


def why_unsupported(node: ir.Node, backend: Backend, *, plugins: bool) -> Unsupported | None:
    """Why ``backend`` does not run a node; None where it does, as far as the operator tells.

    Args:
        plugins: Whether libraries of plugins are loaded: then every operator of a custom domain counts as supported.
    """
    if node.domain == "":
        remedy = _NOWHERE.get(node.op_type)
        if remedy is None and backend != TENSORRT:
            remedy = _NOT_ON_RTX.get(node.op_type)
        name = backend.runtime.split(",")[0]
        return None if remedy is None else Unsupported(f"{name} does not run {node.op_type}", remedy)
    if plugins or (node.domain == "com.microsoft" and node.op_type in _CONTRIBUTED):
        return None
    if backend == TENSORRT and node.op_type.endswith(_OWN_PLUGIN):
        return None
    remedy = "replace it with operators of ONNX, or name the library of its plugin with --plugins"
    if "NMS" in node.op_type:
        remedy = f"export with ONNX's NonMaxSuppression in its place, which runs on the host; or {remedy}"
    reason = f"{node.op_type} of the domain {node.domain} is no operator of ONNX, and no plugin is given"
    return Unsupported(reason, remedy)
