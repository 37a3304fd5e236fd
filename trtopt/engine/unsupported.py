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
    """Why a node does not run.

    Attributes:
        reason: What the compiler does not run.
        remedy: The nearest form that runs.
    """

    reason: str
    remedy: str


_BITS = "compute on bool with And, Or, Not and Xor, or with Mul and Div by powers of two"
_INTEGER_PRODUCT = "use Conv or MatMul between QuantizeLinear and DequantizeLinear (a Q/DQ model)"
_SEQUENCE = "use tensors: Concat and Split in place of a sequence, Slice and Gather in place of its elements"
_OPTIONAL = "make the input or output a plain tensor"
_STRINGS = "take texts out of the model: map them to integers before it and after it"
_TRAINING = "export the model for inference, without its loss"
_RANDOM = "take random numbers as an input of the model, or use RandomUniformLike and a comparison"
_FOURIER = "use STFT with a constant window, or a MatMul with the matrix of the transform"
_SAMPLING = "use GridSample"
_PLACES = "use Where, or ScatterElements and TopK of a constant k: results of a fixed size"
_SELECTION = "use TopK of a constant k: a result of a fixed size"
_PRODUCTS = "write it as MatMul, Mul and Add over chunks of the sequence"

_NOWHERE = {
    "AffineGrid": "compute the grid with MatMul of the matrices and constant coordinates, then GridSample",
    "Bernoulli": _RANDOM,
    "BitCast": "use Cast",
    "BitShift": _BITS,
    "BitwiseAnd": _BITS,
    "BitwiseNot": _BITS,
    "BitwiseOr": _BITS,
    "BitwiseXor": _BITS,
    "CenterCropPad": "use Slice and Pad",
    "Col2Im": "use ConvTranspose with a constant kernel of ones",
    "Compress": _PLACES,
    "ConcatFromSequence": _SEQUENCE,
    "ConvInteger": _INTEGER_PRODUCT,
    "CumProd": "use Exp of CumSum of Log where the factors are positive",
    "DFT": _FOURIER,
    "Det": "write the determinant of small matrices out with Mul and Sub",
    "DynamicQuantizeLinear": "use QuantizeLinear with a constant scale and the zero point 0",
    "FlexAttention": "use Attention, or MatMul, Softmax and MatMul",
    "ImageDecoder": "decode images before the model",
    "MatMulInteger": _INTEGER_PRODUCT,
    "MaxRoiPool": "use GridSample and MaxPool",
    "MaxUnpool": "use ScatterElements into zeros",
    "MelWeightMatrix": "make the matrix a constant of the model",
    "Multinomial": _RANDOM,
    "NegativeLogLikelihoodLoss": _TRAINING,
    "Optional": _OPTIONAL,
    "OptionalGetElement": _OPTIONAL,
    "OptionalHasElement": _OPTIONAL,
    "QLinearConv": _INTEGER_PRODUCT,
    "QLinearMatMul": _INTEGER_PRODUCT,
    "RegexFullMatch": _STRINGS,
    "SequenceAt": _SEQUENCE,
    "SequenceConstruct": _SEQUENCE,
    "SequenceEmpty": _SEQUENCE,
    "SequenceErase": _SEQUENCE,
    "SequenceInsert": _SEQUENCE,
    "SequenceLength": _SEQUENCE,
    "SequenceMap": _SEQUENCE,
    "SoftmaxCrossEntropyLoss": _TRAINING,
    "SplitToSequence": _SEQUENCE,
    "StringConcat": _STRINGS,
    "StringNormalizer": _STRINGS,
    "StringSplit": _STRINGS,
    "SwiGLU": "use Split, Sigmoid and Mul",
    "TfIdfVectorizer": _STRINGS,
    "Unique": _PLACES,
}
"""Neither compiler runs these operators of ONNX."""

_NOT_ON_RTX = {
    "CausalConvWithState": "use Concat of the state and Conv",
    "DeformConv": f"{_SAMPLING} for each tap of the kernel, and a 1x1 Conv; or build with --backend tensorrt",
    "LinearAttention": _PRODUCTS,
    "NonMaxSuppression": f"{_SELECTION}; or build with --backend tensorrt, which has a layer for it",
    "NonZero": f"{_PLACES}; or build with --backend tensorrt, which has a layer for it",
    "RoiAlign": f"{_SAMPLING} and AveragePool; or build with --backend tensorrt, which has a plugin for it",
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
        node: The node; graphs nested in it are not looked at.
        backend: The compiler.
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
