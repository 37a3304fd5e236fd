"""What each compiler does not run, and the nearest form it does.

TensorRT for RTX: asked and seen, version 1.7.1 (what its parser refuses, and what it takes and no build implements).
TensorRT: the table in the documentation of its ONNX parser (onnx-tensorrt, ``docs/operators.md`` for 10.15), not run.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from trtopt.engine.backend import TENSORRT, Backend
from trtopt.graph import edit
from trtopt.graph.resize import is_antialiased
from trtopt.support.dynamic_fp4 import is_dynamic_fp4
from trtopt.support.nms_plugins import is_written_out


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
    "give the image and its blocks constant sizes: trtopt writes it as ConvTranspose then": "Col2Im",
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

_MXFP8 = "TRT_MXFP8"
"""Beginning of the operators of Model Optimizer's exports in MXFP8: the compiler reads them, trtopt does not."""

_OWN_PLUGIN = "_TRT"
"""Ending of the operators whose plugins come with TensorRT (``EfficientNMS_TRT``)."""


_SCATTERS = ("ScatterElements", "ScatterND")
_REDUCED = "use MatMul with a one-hot matrix for sums, Where and ReduceMax or ReduceMin for the others"

_MOST_K = 3840
"""What TopK may take, by the compilers' message."""

_SIZES = frozenset(
    """
    Abs Add Cast Ceil Concat Constant ConstantOfShape Div Equal Expand Floor Gather Greater GreaterOrEqual Identity Less
    LessOrEqual Max Min Mod Mul Neg Not Range ReduceMax ReduceMin ReduceProd ReduceSum Reshape Slice Split Squeeze Sub
    Unsqueeze Where
    """.split()
)
"""Operators that computations of sizes consist of, from Shape on."""


def _form_unsupported(node: ir.Node) -> Unsupported | None:
    """Why the form of an operator does not run that runs in others."""
    if node.op_type == "Resize":
        return _resize_unsupported(node)
    if node.op_type == "TopK":
        k = edit.constant_of(edit.input_of(node, 1))
        if k is not None and k.size == 1 and int(k.reshape(-1)[0]) > _MOST_K:
            return Unsupported(f"TopK takes at most {_MOST_K}, and here k is {int(k.reshape(-1)[0])}", "lower k")
        if k is None and not is_size(edit.input_of(node, 1)):
            return Unsupported("no compiler runs TopK with a k that is computed from data", "give k as a constant")
    return None


def _resize_unsupported(node: ir.Node) -> Unsupported | None:
    if is_antialiased(node):
        return Unsupported(
            "no compiler runs Resize with antialias = 1, and it is written out as products only where height and "
            "width are known before and behind it, of linear or cubic interpolation",
            "fix height and width with --shapes, or resize before the model",
        )
    policy = edit.string_attribute(node, "keep_aspect_ratio_policy", "stretch")
    if policy != "stretch":
        return Unsupported(
            f"no compiler runs Resize with keep_aspect_ratio_policy = {policy}", "give the sizes it leads to"
        )
    if edit.string_attribute(node, "coordinate_transformation_mode", "") == "tf_crop_and_resize":
        return Unsupported("no compiler runs Resize with tf_crop_and_resize", "use Slice and Resize, or GridSample")
    return None


def is_size(value: ir.Value | None) -> bool:
    """Whether a value follows from shapes, constants and inputs of whole numbers alone."""
    seen: set[ir.Node] = set()
    waiting = [value]
    while waiting:
        current = waiting.pop()
        if current is None or edit.constant_tensor_of(current) is not None:
            continue
        node = current.producer()
        if node is None:
            if current.dtype not in (ir.DataType.INT32, ir.DataType.INT64):
                return False
        elif node not in seen and not edit.is_op(node, "Shape", "Size"):
            seen.add(node)
            if node.domain != "" or node.op_type not in _SIZES:
                return False
            waiting.extend(node.inputs)
    return True


def why_unsupported(node: ir.Node, backend: Backend, *, plugins: bool) -> Unsupported | None:
    """Why ``backend`` does not run a node; None where it does, as far as operator, attributes and constants tell.

    Args:
        plugins: Whether libraries of plugins are loaded: then every operator of a custom domain counts as supported.
    """
    name = backend.runtime.split(",")[0]
    if node.domain == "":
        remedy = _NOWHERE.get(node.op_type)
        if remedy is None and backend != TENSORRT:
            remedy = _NOT_ON_RTX.get(node.op_type)
        if remedy is None and node.op_type in _SCATTERS and backend != TENSORRT:
            reduction = edit.string_attribute(node, "reduction", "none")
            if reduction != "none":
                return Unsupported(f"{name} does not run {node.op_type} with reduction = {reduction}", _REDUCED)
        return _form_unsupported(node) if remedy is None else Unsupported(f"{name} does not run {node.op_type}", remedy)
    if node.op_type.startswith(_MXFP8):
        remedy = "give the model before it was quantized, with --weights mxfp8 or --fp8; or quantize it to NVFP4 or FP8"
        return Unsupported(f"trtopt does not read {node.op_type}, and so no model in MXFP8 of Model Optimizer", remedy)
    if plugins or is_dynamic_fp4(node) or (node.domain == "com.microsoft" and node.op_type in _CONTRIBUTED):
        return None
    if backend == TENSORRT and node.op_type.endswith(_OWN_PLUGIN):
        return None
    remedy = "replace it with operators of ONNX, or name the library of its plugin with --plugins"
    if is_written_out(node):
        return Unsupported(f"{name} does not come with the plugin {node.op_type}", remedy)
    reason = f"{node.op_type} of the domain {node.domain} is no operator of ONNX, and no plugin is given"
    return Unsupported(reason, remedy)
