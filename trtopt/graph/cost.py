"""Arithmetic of ONNX nodes: one table, by operator.

Conventions: 1 multiply-add = 2 flop; pooling and element-wise operators count 1 per element visited, as NVIDIA's tables
do; normalisations and softmax count the operations of their definition; moving values counts nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import onnx_ir as ir

from trtopt.graph import edit
from trtopt.graph.products import PRODUCTS, Shapes, heads_of, products_of, shape_of_input, shape_of_output

VIEWS = frozenset({"Dropout", "Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"})
"""The output is the input under another shape: nothing is computed and nothing moves."""

CONTROL_FLOW = frozenset({"If", "Loop", "Scan"})
"""Nothing of their own: their nested nodes are counted."""

FREE = VIEWS | CONTROL_FLOW | {"Constant", "Shape", "Size"}
"""Operators that launch no kernel; the host knows shapes."""

HOST_ELEMENTS = 64
"""Integer tensors of rank 0 or 1 and up to this many elements are shape arithmetic, which TensorRT does on the host
(its shape tensors hold 64 elements)."""

_MOVES = (
    "Cast CastLike Concat ConstantOfShape DepthToSpace DequantizeLinear Expand EyeLike Gather GatherElements GatherND "
    "OneHot Pad Range ReverseSequence Scatter ScatterElements ScatterND Slice SpaceToDepth Split TensorScatter Tile "
    "Transpose Trilu"
)
"""No arithmetic of their own; a DequantizeLinear's scale becomes a factor in the kernel that reads it."""

POINTWISE = frozenset(
    (
        "Abs Acos Acosh Add And Asin Asinh Atan Atanh Ceil Celu Clip Cos Cosh Div Elu Equal Erf Exp Floor Gelu Greater "
        "GreaterOrEqual HardSigmoid HardSwish IsInf IsNaN LeakyRelu Less LessOrEqual Log Mish Mod Mul Neg Not Or PRelu "
        "Pow QuantizeLinear Reciprocal Relu Round Selu Shrink Sigmoid Sign Sin Sinh Softplus Softsign Sqrt Sub Swish "
        "Tan Tanh ThresholdedRelu Where Xor"
    ).split()
)
"""Functions of the elements at one place; one operation each."""

RANDOM = frozenset({"RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"})
_ONE_PER_OUTPUT = POINTWISE | RANDOM | {"BlackmanWindow", "CumSum", "HammingWindow", "HannWindow"}
_ONE_PER_INPUT = (
    "ArgMax ArgMin GlobalAveragePool GlobalMaxPool NonMaxSuppression NonZero ReduceLogSum ReduceMax ReduceMean "
    "ReduceMin ReduceProd ReduceSum TopK"
)

_PER_OUTPUT: dict[str, int] = {
    **dict.fromkeys(_MOVES.split(), 0),
    **dict.fromkeys(_ONE_PER_OUTPUT, 1),
    "BatchNormalization": 2,  # a scale and a shift
    "RotaryEmbedding": 3,  # two products and a sum
}
"""Operations per element of the output."""

_PER_INPUT: dict[str, int] = {
    **dict.fromkeys(_ONE_PER_INPUT.split(), 1),
    **dict.fromkeys(("GlobalLpPool", "ReduceL1", "ReduceL2", "ReduceSumSquare"), 2),
    "ReduceLogSumExp": 3,  # largest, exponential, sum
    "LpNormalization": 3,  # square, sum, scale
    **dict.fromkeys(("Softmax", "LogSoftmax", "Hardmax"), 5),  # largest, difference, exponential, sum, quotient
    "RMSNormalization": 4,  # square, sum, scale, weight
    "MeanVarianceNormalization": 5,  # mean, difference, square, sum, scale
    **dict.fromkeys(("GroupNormalization", "InstanceNormalization", "LayerNormalization"), 7),  # and weight, bias
}
"""Operations per element of the first input."""

SOFTMAX_FLOP = _PER_INPUT["Softmax"]

_INDICES = (ir.DataType.INT32, ir.DataType.INT64, ir.DataType.BOOL, ir.DataType.STRING)


def flop_of(node: ir.Node, shapes: Shapes) -> int | None:
    """Floating-point operations of one node, nested graphs not included.

    None when the operator has no cost here (:func:`has_cost`) or a shape is not known.
    """
    op = node.op_type
    if not has_cost(node):
        return None
    if op in FREE or is_host_arithmetic(node, shapes):
        return 0
    if op in _SPECIAL:
        return _SPECIAL[op](node, shapes)
    if op in PRODUCTS:
        return _product(node, shapes)
    table, shape = (
        (_PER_OUTPUT, shape_of_output(node, shapes))
        if op in _PER_OUTPUT
        else (_PER_INPUT, shape_of_input(node, 0, shapes))
    )
    return None if shape is None else table[op] * math.prod(shape)


def has_cost(node: ir.Node) -> bool:
    """Whether the operator is in the tables. Those of the default domain that TensorRT runs are."""
    known = (FREE, _PER_OUTPUT, _PER_INPUT, PRODUCTS, _SPECIAL)
    return node.domain == "" and any(node.op_type in table for table in known)


def is_host_arithmetic(node: ir.Node, shapes: Shapes) -> bool:
    """Whether everything a node reads and writes is a small integer: see :data:`HOST_ELEMENTS`."""
    found = False
    for value in (*node.outputs, *node.inputs):
        if value is not None and value.name:
            dtype, found = value.dtype, True
            if dtype is None or not dtype.is_integer() or not _is_small(shapes.get(value.name)):
                return False
    return found


def _is_small(shape: tuple[int, ...] | None) -> bool:
    return shape is not None and len(shape) <= 1 and math.prod(shape) <= HOST_ELEMENTS


def flop_by_node(model: ir.Model, shapes: Shapes) -> dict[str, int]:
    """Floating-point operations by node name, nested graphs included, once per iteration (see :func:`iterations`).

    A node whose cost or shapes are not known is absent.
    """
    found = ((str(node.name), flop_of(node, shapes), times) for node, times in nodes_with_counts(model.graph, shapes))
    return {name: flop * times for name, flop, times in found if flop is not None}


def parameters(model: ir.Model) -> int:
    """How many weights a model has: elements of its constants that are no shapes, axes or positions."""
    tensors = (value.const_value for graph in edit.all_graphs(model.graph) for value in graph.initializers.values())
    return sum(tensor.size for tensor in tensors if tensor is not None and tensor.dtype not in _INDICES)


def nodes_with_counts(graph: ir.Graph, shapes: Shapes, times: int = 1) -> Iterator[tuple[ir.Node, int]]:
    """Every node of ``graph`` and of the graphs nested in it, each with how often it runs; nested ones come right after
    their operator."""
    for node in graph:
        yield node, times
        inner = times * iterations(node, shapes)
        for subgraph in edit.subgraphs_of(node):
            yield from nodes_with_counts(subgraph, shapes, inner)


def iterations(node: ir.Node, shapes: Shapes) -> int:
    """How often the nested graphs of a node run: the trip count of a ``Loop`` where it is constant, the length a
    ``Scan`` runs over, else once."""
    if edit.is_op(node, "Loop"):
        limit = edit.input_of(node, 0)
        tensor = edit.constant_tensor_of(limit)
        array = edit.constant_of(limit) if tensor is not None and tensor.size == 1 else None
        return 1 if array is None else max(int(array.reshape(())), 0)
    if edit.is_op(node, "Scan"):
        count = edit.int_attribute(node, "num_scan_inputs", 1)
        axes = edit.ints_attribute(node, "scan_input_axes") or (0,)
        shape = shape_of_input(node, len(node.inputs) - count, shapes)
        return shape[axes[0]] if shape else 1
    return 1


def is_eligible_for_int8(node: ir.Node) -> bool:
    """Whether a node can run in INT8 for a gain: Conv, Gemm, MatMul with constant weights, not depthwise.

    Weights behind a DequantizeLinear count as constant. A convolution is depthwise when each group has one input
    channel.
    """
    if not edit.is_op(node, "Conv", "Gemm", "MatMul"):
        return False
    weight = constant_weight(node)
    depthwise = node.op_type == "Conv" and edit.int_attribute(node, "group", 1) > 1
    return weight is not None and not (depthwise and weight.shape[1] == 1)


def constant_weight(node: ir.Node) -> ir.TensorProtocol | None:
    """The constant weight of a Conv, ConvTranspose, Gemm or MatMul (its second input), through DequantizeLinear."""
    value = edit.input_of(node, 1)
    producer = edit.maker_of(value)
    while edit.is_op(producer, "DequantizeLinear", "QuantizeLinear"):
        value = producer.inputs[0]
        producer = edit.maker_of(value)
    return edit.constant_tensor_of(value)


def _product(node: ir.Node, shapes: Shapes) -> int | None:
    """The products, and one addition per output for the bias of a convolution or GEMM."""
    products, out = products_of(node, shapes), shape_of_output(node, shapes)
    if products is None or out is None:
        return None
    has_bias = (
        edit.is_op(node, "CausalConvWithState", "Conv", "ConvTranspose", "Gemm") and edit.input_of(node, 2) is not None
    )
    return sum(product.flop for product in products) + (math.prod(out) if has_bias else 0)


def _einsum(node: ir.Node, shapes: Shapes) -> int | None:
    """Products; a single operand is summed or only moved."""
    if len(node.inputs) > 1:
        return _product(node, shapes)
    data, out = shape_of_input(node, 0, shapes), shape_of_output(node, shapes)
    if data is None or out is None:
        return None
    return math.prod(data) if math.prod(out) < math.prod(data) else 0


def _attention(node: ir.Node, shapes: Shapes) -> int | None:
    """Both products; scale, mask and softmax of the scores between them."""
    products, sizes = products_of(node, shapes), heads_of(node, shapes)
    if products is None or sizes is None:
        return None
    masks = int(edit.input_of(node, 3) is not None) + int(edit.int_attribute(node, "is_causal", 0) != 0)
    return sum(product.flop for product in products) + sizes.scores * (SOFTMAX_FLOP + 1 + masks)


def _variadic(node: ir.Node, shapes: Shapes) -> int | None:
    out = shape_of_output(node, shapes)
    count = max(len(node.inputs) - 1, 1) + int(node.op_type == "Mean")
    return None if out is None else count * math.prod(out)


def _pool(node: ir.Node, shapes: Shapes) -> int | None:
    out, kernel = shape_of_output(node, shapes), edit.ints_attribute(node, "kernel_shape") or ()
    per_element = 2 if node.op_type == "LpPool" else 1
    return None if out is None else per_element * math.prod(out) * math.prod(kernel)


def _local_response(node: ir.Node, shapes: Shapes) -> int | None:
    """Per element: squares and their sum over the window; then scale, shift, power, quotient."""
    out = shape_of_output(node, shapes)
    return None if out is None else (2 * edit.int_attribute(node, "size", 1) + 4) * math.prod(out)


def _resize(node: ir.Node, shapes: Shapes) -> int | None:
    """A multiply-add for each of the 2 (linear) or 4 (cubic) neighbours along every resized axis."""
    data, out = shape_of_input(node, 0, shapes), shape_of_output(node, shapes)
    if data is None or out is None:
        return None
    taps = _TAPS[edit.string_attribute(node, "mode", "nearest")]
    resized = sum(a != b for a, b in zip(data, out, strict=True))
    return 0 if taps == 1 else 2 * taps**resized * math.prod(out)


def _grid_sample(node: ir.Node, shapes: Shapes) -> int | None:
    data, out = shape_of_input(node, 0, shapes), shape_of_output(node, shapes)
    if data is None or out is None:
        return None
    taps = _TAPS[edit.string_attribute(node, "mode", "linear")]
    return 0 if taps == 1 else 2 * taps ** (len(data) - 2) * math.prod(out)


def _roi_align(node: ir.Node, shapes: Shapes) -> int | None:
    """Four neighbours per sample. ``sampling_ratio`` 0 adapts to each box: taken as 2, the value detectors are trained
    with (torchvision's MultiScaleRoIAlign)."""
    out = shape_of_output(node, shapes)
    ratio = edit.int_attribute(node, "sampling_ratio", 0) or 2
    return None if out is None else 2 * 4 * ratio**2 * math.prod(out)


def _fourier(node: ir.Node, shapes: Shapes) -> int | None:
    """A real FFT of length N per frame, 2.5 N log2 N: half of a complex one (Cooley-Tukey).

    The output is [batch, frames, bins, 2]; bins is N/2 + 1 when one-sided.
    """
    out = shape_of_output(node, shapes)
    if out is None:
        return None
    length = 2 * (out[2] - 1) if edit.int_attribute(node, "onesided", 1) else out[2]
    return round(out[0] * out[1] * 2.5 * length * math.log2(max(length, 1)))


_TAPS = {"nearest": 1, "linear": 2, "bilinear": 2, "cubic": 4, "bicubic": 4}
"""Neighbours along one axis by interpolation mode."""

_SPECIAL: dict[str, Callable[[ir.Node, Shapes], int | None]] = {
    "Attention": _attention,
    **dict.fromkeys(("AveragePool", "LpPool", "MaxPool"), _pool),
    **dict.fromkeys(("Max", "Mean", "Min", "Sum"), _variadic),
    **dict.fromkeys(("Resize", "Upsample"), _resize),
    "Einsum": _einsum,
    "GridSample": _grid_sample,
    "LRN": _local_response,
    "RoiAlign": _roi_align,
    "STFT": _fourier,
}
"""Operators whose cost depends on more than a count per element."""


def graphs_with_counts(graph: ir.Graph, shapes: Shapes, times: int = 1) -> Iterator[tuple[ir.Graph, int]]:
    """``graph`` and every graph nested in it, each with how often it runs."""
    yield graph, times
    for node in graph:
        for nested in edit.subgraphs_of(node):
            yield from graphs_with_counts(nested, shapes, times * iterations(node, shapes))
