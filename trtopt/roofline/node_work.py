"""What one ONNX node has to do when it is a kernel of its own."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import onnx_ir as ir

from trtopt.graph import cost
from trtopt.graph.edit import constant_tensor_of, input_of, int_attribute, ints_attribute, is_op, maker_of
from trtopt.graph.products import Product, Shapes, heads_of, products_of, shape_of_input, shape_of_output
from trtopt.roofline.row_work import rows_of
from trtopt.roofline.work import AttentionSizes, Gemm, Kind, Window, Work, alignment_of
from trtopt.support.precision import ELEMENT_BYTES, Precision

PRODUCT_KINDS: dict[str, Kind] = {
    "Attention": "attention",
    "CausalConvWithState": "depthwise",
    "Conv": "conv",
    "ConvTranspose": "conv",
    "Einsum": "gemm",
    "GRU": "recurrent",
    "Gemm": "gemm",
    "LSTM": "recurrent",
    "LinearAttention": "attention",
    "MatMul": "gemm",
    "RNN": "recurrent",
}

QUANTIZABLE = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})
"""Operators that have a kernel with INT8 or FP8 operands."""

READ_AS_WRITTEN = frozenset({"Gather", "GatherElements", "GatherND", "Slice", "Split"})
"""Operators that read of their first input only what they write."""

POOLS = frozenset({"AveragePool", "LpPool", "MaxPool"})
"""Operators that slide a window over their input."""

_DEVICE_INPUTS = {
    "Clip": 1, "CumSum": 1, "Expand": 1, "OneHot": 1, "Pad": 1, "Reshape": 1, "Resize": 1, "STFT": 1, "Slice": 1,
    "Split": 1, "Squeeze": 1, "Tile": 1, "TopK": 1, "Trilu": 1, "Unsqueeze": 1, "Upsample": 1, "NonMaxSuppression": 2,
    **dict.fromkeys(("ConstantOfShape", "EyeLike", "RandomNormalLike", "RandomUniformLike", "Range"), 0),
    **dict.fromkeys(("ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax"), 1),
    **dict.fromkeys(("ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum", "ReduceSumSquare"), 1),
}  # fmt: skip
"""How many leading inputs are tensors on the GPU; the rest are parameters the host knows. All, where not listed."""

_OWN_TYPES: dict[ir.DataType, Precision] = {
    ir.DataType.FLOAT16: Precision.FP16,
    ir.DataType.BFLOAT16: Precision.BF16,
    ir.DataType.INT8: Precision.INT8,
    ir.DataType.FLOAT8E4M3FN: Precision.FP8,
    ir.DataType.FLOAT8E5M2: Precision.FP8,
    ir.DataType.FLOAT4E2M1: Precision.FP4,
}


@dataclass(frozen=True)
class GraphTypes:
    """The types a graph runs in.

    Tensors that are FLOAT in the graph take the type ``base``, the network's inputs and outputs included; tensors that
    already have another type (FP16, BF16, INT8, FP8, integers) keep it.

    Attributes:
        base: The type of the arithmetic on FLOAT tensors: ``fp32``, ``tf32``, ``fp16`` or ``bf16``. TF32 is a type of
            matrix products; its tensors, and all other arithmetic, are FP32.
        quantized: Names of the Conv, ConvTranspose, Gemm and MatMul nodes that run on ``quantized_dtype``, besides
            those that read a DequantizeLinear in the graph.
        quantized_dtype: ``int8`` or ``fp8``.
    """

    base: Precision = Precision.FP32
    quantized: frozenset[str] = frozenset()
    quantized_dtype: Precision = Precision.INT8

    def math_type(self, values: Iterable[ir.Value | None]) -> Precision:
        """The type of element-wise arithmetic on ``values``: that of the first one that is a float."""
        for value in values:
            if value is not None and (value.dtype is None or value.dtype.is_floating_point()):
                found = self.base if value.dtype is None else _OWN_TYPES.get(value.dtype, self.base)
                return Precision.FP32 if found == Precision.TF32 else found
        return Precision.FP32 if self.base == Precision.TF32 else self.base

    def element_bytes(self, value: ir.Value) -> float:
        """Bytes of one element of a tensor. Unknown types and DOUBLE (which TensorRT narrows) count as FLOAT."""
        dtype = value.dtype
        if dtype is None or dtype in (ir.DataType.FLOAT, ir.DataType.DOUBLE):
            return ELEMENT_BYTES[self.base]
        return dtype.bitwidth / 8


def quantized_inputs(node: ir.Node, precision: GraphTypes) -> Precision | None:
    """The type a product's operands are quantized to; None when they are not.

    A product is quantized when the precision names it, or when both its operands come from a DequantizeLinear (through
    views and transposes).
    """
    if not is_op(node, *QUANTIZABLE):
        return None
    if str(node.name) in precision.quantized:
        return precision.quantized_dtype
    sources = [dequantized(input_of(node, index)) for index in range(2)]
    types = [_OWN_TYPES.get(value.dtype) for value in sources if value is not None and value.dtype is not None]
    return types[0] if len(types) == 2 else None


def dequantized(value: ir.Value | None) -> ir.Value | None:
    """The quantized tensor a value is made of by a DequantizeLinear, through views and transposes; None without one."""
    node = _dequantizer(value)
    return None if node is None else node.inputs[0]


def _dequantizer(value: ir.Value | None) -> ir.Node | None:
    node = maker_of(value)
    while is_op(node, "Transpose", *cost.VIEWS):
        first = node.inputs[0]
        node = maker_of(first)
    return node if is_op(node, "DequantizeLinear") else None


def narrow_weight(node: ir.Node, precision: GraphTypes) -> tuple[int, int]:
    """How the weight of a matrix product is quantized.

    Returns:
        The bits of its elements where a kernel turns them into the type of the activations (a DequantizeLinear of a
        constant, and activations that are not quantized), else 0; and the elements that share a scale, 0 where a whole
        tensor or channel does.
    """
    source = _dequantizer(input_of(node, 1)) if is_op(node, "Gemm", "MatMul") else None
    if source is None:
        return 0, 0
    block, stored = int_attribute(source, "block_size", 0), source.inputs[0]
    weight_only = quantized_inputs(node, precision) is None and constant_tensor_of(stored) is not None
    if not weight_only or stored is None or stored.dtype is None:
        return 0, block
    return int(stored.dtype.bitwidth), block


def work_of_node(node: ir.Node, shapes: Shapes, precision: GraphTypes) -> Work | None:
    """What a node has to do as a kernel of its own, unfused.

    Each distinct input and constant is read once and each used output written once. Gathers and slices read what they
    write; views, shape arithmetic and control flow (whose nested nodes are nodes of their own) move nothing.

    Returns:
        None when the operator has no cost (:func:`trtopt.graph.cost.has_cost`), a shape is not known, or a tensor
        holds strings.

        A product has the sizes of its largest matrix product. A recurrent layer's are those of one time step, repeated
        ``steps`` times; what its flop exceed that by is the input product of all steps, hoisted, and one kernel.
    """
    flop = cost.flop_of(node, shapes)
    if flop is None:
        return None
    quantized = quantized_inputs(node, precision)
    if node.op_type in cost.FREE or cost.is_host_arithmetic(node, shapes):
        return Work("memory", 0, 0, 0, 0, precision.math_type(node.inputs))
    moved = _bytes_of(node, shapes, precision, quantized)
    if moved is None:
        return None
    return shaped(node, shapes, precision, flop, moved)


def shaped(node: ir.Node, shapes: Shapes, precision: GraphTypes, flop: int, moved: tuple[int, int, int]) -> Work:
    """The work of a kernel that ``node`` gives its shape: its products, window, steps and alignment.

    Args:
        node: The node that does the kernel's arithmetic; its shapes are known.
        shapes: Static shapes by value name.
        precision: The types it runs in.
        flop: The kernel's arithmetic.
        moved: Bytes of activations read, of constants read, and of activations written.
    """
    products = [product for product in products_of(node, shapes) or () if product.flop]
    if not products:
        dtype = precision.math_type(node.inputs)
        if node.op_type != "Transpose":
            reduced, pooled = rows_of([node], shapes), is_op(node, *POOLS)
            return Work("memory", flop, *moved, dtype=dtype, rows=reduced, pooled=pooled)
        names = [str(value.name) for value in (*node.inputs, *node.outputs) if value is not None]
        rows = [shape[-1] for shape in map(shapes.get, names) if shape]
        return Work("layout", flop, *moved, dtype=dtype, alignment_bytes=alignment_of(*rows, dtype=dtype))
    dtype = product_type(node, precision)
    kind = PRODUCT_KINDS[node.op_type]
    largest = products[-1] if kind == "recurrent" else max(products, key=lambda product: product.flop)
    attention = _attention(node, shapes)
    if attention is not None:
        largest = products[0]
    window = window_of(node, shapes) if kind == "conv" else None
    if window is not None and window.group > 1 and _channels(node, shapes)[0] == window.group:
        kind = "depthwise"
    weight_bits, scale_block = narrow_weight(node, precision)
    return Work(
        kind,
        flop,
        *moved,
        dtype=dtype,
        accumulate_fp16=sums_in_fp16(kind, dtype),
        gemm=Gemm(largest.m, largest.n, largest.k, largest.batch),
        window=window,
        attention=attention,
        steps=largest.steps,
        alignment_bytes=alignment_of(*_rows(node, shapes, largest), dtype=dtype),
        weight_bits=weight_bits,
        scale_block=scale_block,
    )


def _attention(node: ir.Node, shapes: Shapes) -> AttentionSizes | None:
    sizes = heads_of(node, shapes) if is_op(node, "Attention") else None
    if sizes is None:
        return None
    heads, kv_heads = sizes.batch * sizes.heads, sizes.batch * sizes.kv_heads
    causal = bool(int_attribute(node, "is_causal", 0))
    return AttentionSizes(sizes.queries, sizes.keys, sizes.key_size, sizes.value_size, heads, kv_heads, causal)


def sums_in_fp16(kind: Kind, dtype: Precision) -> bool:
    """Whether TensorRT is expected to sum FP16 products in FP16, when no kernel tells.

    It does in convolutions: all 60 kernels of the TensorRT 10 layer profiles of an RTX 3060 (AlexNet, MobileNetV2,
    ResNet-18) have FP16 sums in their names, and none of the matrix products of the same engines.
    """
    return kind == "conv" and dtype == Precision.FP16


def product_type(node: ir.Node, precision: GraphTypes) -> Precision:
    """The type of the operands of a product."""
    quantized = quantized_inputs(node, precision)
    if quantized is not None:
        return quantized
    first = node.inputs[0]
    if precision.base == Precision.TF32 and (first is None or first.dtype in (None, ir.DataType.FLOAT)):
        return Precision.TF32
    return precision.math_type(node.inputs)


def window_of(node: ir.Node, shapes: Shapes) -> Window | None:
    """What a Conv or ConvTranspose slides over its input; None when the weight's shape is not known."""
    weight = shape_of_input(node, 1, shapes)
    if weight is None:
        return None
    rank = len(weight) - 2
    return Window(
        kernel=weight[2:],
        stride=ints_attribute(node, "strides") or (1,) * rank,
        dilation=ints_attribute(node, "dilations") or (1,) * rank,
        group=int_attribute(node, "group", 1),
        transposed=node.op_type == "ConvTranspose",
    )


def written(node: ir.Node) -> list[ir.Value]:
    """The outputs a kernel has to write: those that are used; the first one where none is."""
    named = [value for value in node.outputs if value.name]
    return [value for value in named if value.uses() or value.is_graph_output()] or named[:1]


def read(node: ir.Node) -> list[ir.Value]:
    """The distinct inputs that are tensors on the GPU."""
    count = _DEVICE_INPUTS.get(node.op_type) if node.domain == "" else None
    return list(dict.fromkeys(value for value in node.inputs[:count] if value is not None and value.name))


def _channels(node: ir.Node, shapes: Shapes) -> tuple[int, int]:
    """Input and output channels of a convolution."""
    weight = shape_of_input(node, 1, shapes) or (1, 1)
    group = int_attribute(node, "group", 1)
    if node.op_type == "ConvTranspose":
        return weight[0], weight[1] * group
    return weight[1] * group, weight[0]


def _rows(node: ir.Node, shapes: Shapes, product: Product) -> tuple[int, ...]:
    """Elements in the contiguous rows of a product's operands and result: channels of a convolution (channels last),
    the head size of an attention, k and n of a GEMM."""
    if is_op(node, "Conv", "ConvTranspose"):
        return _channels(node, shapes)
    heads = heads_of(node, shapes) if is_op(node, "Attention", "LinearAttention") else None
    if heads is not None:
        return heads.key_size, heads.value_size
    return product.k, product.n


def _bytes_of(
    node: ir.Node, shapes: Shapes, precision: GraphTypes, quantized: Precision | None
) -> tuple[int, int, int] | None:
    if any(value.dtype == ir.DataType.STRING for value in (*written(node), *read(node))):
        return None
    outputs = [_size(value, shapes, precision.element_bytes(value)) for value in written(node)]
    out = shape_of_output(node, shapes)
    if None in outputs or out is None:
        return None
    activations = constants = 0
    for index, value in enumerate(read(node)):
        source = value if quantized is None else dequantized(value) or value
        per_element = precision.element_bytes(source)
        if quantized is not None and index < 2 and source is value:
            per_element = ELEMENT_BYTES[quantized]
        size = _size(value, shapes, per_element)
        if size is None:
            return None
        if index == 0 and node.op_type in READ_AS_WRITTEN:
            total = sum(math.prod(shapes[str(item.name)]) for item in written(node))
            size = min(size, math.ceil(total * per_element))
        if constant_tensor_of(source) is not None:
            constants += size
        else:
            activations += size
    return activations, constants, sum(size for size in outputs if size is not None)


def _size(value: ir.Value, shapes: Shapes, per_element: float) -> int | None:
    shape = shapes.get(str(value.name))
    return None if shape is None else math.ceil(math.prod(shape) * per_element)
