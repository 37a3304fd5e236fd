"""Forms of quantized operators that ONNX Runtime does not mistake for others.

Biases that it cannot write as INT32 become additions behind the product. ONNX Runtime (1.31,
``WeightBiasQuantization``, from its basic level on) writes the constant bias of a convolution or Gemm that reads a
dequantized tensor and is quantized again as INT32, with the product of the two scales as its scale. In FP16 that
product is often too small, or the bias in units of it beyond 65504: the outputs are wrong. Compilers add a constant
behind a product in its kernel as they add a bias.

Between a product of FP8 and the dequantizer of its first operand a multiplication by one half stands. ONNX Runtime
takes the product of two dequantized tensors for one of INT8 (``MatMulIntegerToFloat``, ``QLinearMatMul``, ``QGemm``)
and refuses that operator itself, as its operands are FP8. Between a Relu or Clip and a quantizer to FP8 a Max with the
lowest number stands: ``ReluQuantRewrite`` and ``ClipQuantRewrite`` take the zero point 0 of FP8 for the lowest of UINT8
and drop what is before it, and the outputs are wrong. It stands behind Squeeze, Unsqueeze, Slice and MaxPool too:
``QDQPropagation`` moves the quantizer before them, and there are no kernels of these for FP8. TensorRT for RTX (1.7.1)
builds the same kernels with these two and without (seven networks of ``benchmarks/zoo``, FP8 wherever it goes).
"""

from __future__ import annotations

from collections.abc import Iterator

import ml_dtypes
import numpy as np
import onnx_ir as ir

from trtopt.graph import edit
from trtopt.precision.qdq.arithmetic import HALVES, fusible, write_arithmetic
from trtopt.precision.qdq.canonicalize import FP8

_HALF = np.finfo(np.float16)


def apart(model: ir.Model, backend: str) -> ir.Model:
    """A model whose FP8 is written in these forms, and whose quantizers are arithmetic where the compiler fuses that
    (:mod:`trtopt.precision.qdq.arithmetic`), for a ``backend`` that takes them: a clone if anything changes."""
    nodes = list(edit.all_nodes(model.graph)) if backend == "tensorrt-rtx" else []
    is_fused = bool(nodes) and bool(_fusible(model))
    if not is_fused and not any(is_fp8_product(node) or is_moved_wrong(node) for node in nodes):
        return model
    clone = model.clone()
    fp8_apart(clone)
    write_arithmetic(clone, _fusible(clone))
    return clone


def _fusible(model: ir.Model) -> list[ir.Node]:
    """The quantizers of 16-bit tensors that the compiler fuses as arithmetic."""
    return [node for node in fusible(model) if node.inputs[0] is not None and node.inputs[0].dtype in HALVES]


def fp8_apart(model: ir.Model) -> None:
    """Write products of FP8 and activations before FP8 in these forms, in place."""
    _products_apart(model)
    _activations_apart(model)


def together(model: ir.Model) -> None:
    """Undo :func:`fp8_apart` in place, so that Q/DQ stands at the operators that it belongs to."""
    names = edit.Names(model)
    for node in list(model.graph):
        value = node.inputs[0] if edit.is_op(node, "Max", "Mul") else None
        number = None if value is None else edit.constant_of(edit.input_of(node, 1))
        if value is None or number is None or number.ndim or node.outputs[0].is_graph_output():
            continue
        readers = [user for user, _ in node.outputs[0].uses()]
        if node.op_type == "Max":
            is_before = bool(readers) and all(map(_quantizes_to_fp8, readers))
            if is_before and number == ml_dtypes.finfo(number.dtype).min:
                edit.replace_value(node.outputs[0], value)
        elif number in (0.5, 2.0) and len(value.uses()) == 1 and _scale_by(model.graph, value, number, names):
            edit.replace_value(node.outputs[0], value)
        if not node.outputs[0].uses():
            _remove(node)


def _remove(node: ir.Node) -> None:
    """Take an unused node out, and the constants that nobody else reads."""
    graph, given = edit.graph_of(node), [value for value in node.inputs if value is not None]
    edit.remove_node(node)
    _drop(graph, *given)


def _drop(graph: ir.Graph, *values: ir.Value) -> None:
    for value in values:
        if value.is_initializer() and not value.uses() and not value.is_graph_output():
            graph.initializers.pop(str(value.name), None)


def _scale_by(graph: ir.Graph, value: ir.Value, number: np.ndarray, names: edit.Names) -> bool:
    """Multiply what is dequantized from FP8 by a power of two; False for others, for outputs of the graph, and where
    the scale is computed, or cannot be halved or doubled."""
    node = value.producer()
    old = node.inputs[1] if node is not None and _is_fp8(value) else None
    scale = edit.constant_of(old)
    if node is None or old is None or scale is None or value.is_graph_output():
        return False
    factor = number.astype(scale.dtype)
    with np.errstate(over="ignore"):
        array = np.asarray(scale * factor, scale.dtype)
    if not np.array_equal(array / factor, scale):
        return False
    node.replace_input_with(1, edit.add_initializer(graph, names.value(f"{value.name}_scale"), array))
    _drop(graph, old)
    return True


def _products_apart(model: ir.Model) -> None:
    """Let products of FP8 read half of what is dequantized with twice the scale, in place; exact but for subnormals."""
    graph, names = model.graph, edit.Names(model)
    halves: dict[ir.Value, ir.Value] = {}
    for node in list(graph):
        if is_fp8_product(node) and (value := node.inputs[0]) is not None:
            if value not in halves and (half := _half(graph, value, names)) is not None:
                halves[value] = half
            if value in halves:
                node.replace_input_with(0, halves[value])
    for value in halves:
        maker = value.producer()
        if maker is not None and not value.uses() and not value.is_graph_output():
            _remove(maker)


def _activations_apart(model: ir.Model) -> None:
    """Put a Max that changes nothing before quantizers to FP8 that ONNX Runtime would move or take wrong, in place."""
    graph, names = model.graph, edit.Names(model)
    for node in list(graph):
        value = node.inputs[0] if is_moved_wrong(node) else None
        if value is not None and value.dtype is not None:
            base = str(value.name)
            lowest = np.asarray(ml_dtypes.finfo(value.dtype.numpy()).min)
            constant = edit.add_initializer(graph, names.value(f"{base}_lowest"), lowest)
            name, output = names.node(f"trtopt/Max/{base}"), names.value(f"{base}_kept")
            kept = edit.new_node("Max", [value, constant], name=name, output=output, like=value)
            graph.insert_before(node, kept)
            node.replace_input_with(0, kept.outputs[0])


def loses_its_activation(node: ir.Node) -> bool:
    """Whether a node quantizes the output of a Relu or Clip to FP8, also behind what the quantizer is moved over."""
    return any(edit.is_op(maker, "Relu", "Clip") for maker in _moved_over(node))


def is_moved_wrong(node: ir.Node) -> bool:
    """Whether a quantizer to FP8 loses an activation, or is moved before what has no kernel for FP8."""
    return any(edit.is_op(maker, "Relu", "Clip", *_NOT_IN_FP8) for maker in _moved_over(node))


def _moved_over(node: ir.Node) -> Iterator[ir.Node]:
    """What makes what a node quantizes to FP8, the last first, as far as the quantizer is moved, and one more."""
    value = node.inputs[0] if _quantizes_to_fp8(node) else None
    while value is not None and (maker := value.producer()) is not None:
        yield maker
        value = maker.inputs[0] if edit.is_op(maker, *_QUANTIZED_BEFORE) else None


def is_fp8_product(node: ir.Node) -> bool:
    """Whether both operands of a MatMul or Gemm are dequantized from FP8."""
    return edit.is_op(node, "MatMul", "Gemm") and all(map(_is_fp8, node.inputs[:2]))


def _quantizes_to_fp8(node: ir.Node) -> bool:
    return edit.is_op(node, "QuantizeLinear") and node.outputs[0].dtype in FP8


def _is_fp8(value: ir.Value | None) -> bool:
    """Whether a value is dequantized from FP8."""
    node = edit.maker_of(value)
    if not edit.is_op(node, "DequantizeLinear") or node.inputs[0] is None:
        return False
    return node.inputs[0].dtype in FP8


def _half(graph: ir.Graph, value: ir.Value, names: edit.Names) -> ir.Value | None:
    """``value`` as half of what is dequantized with twice its scale; None where that is computed, or one of many."""
    node = value.producer()
    scale = None if node is None else edit.constant_of(node.inputs[1])
    stored = None if node is None else node.inputs[0]
    if node is None or scale is None or scale.size != 1 or stored is None or stored.dtype is None:
        return None
    kinds = (scale.dtype, scale.dtype if value.dtype is None else value.dtype.numpy())
    largest = min(float(ml_dtypes.finfo(kind).max) for kind in kinds)
    factor = 0.5 if 2 * float(scale.max()) * FP8[stored.dtype] <= largest else 2.0
    base = str(value.name)
    constants = [
        edit.add_initializer(graph, names.value(f"{base}_{text}"), np.asarray(array, kind))
        for text, array, kind in (
            ("scale_apart", scale / scale.dtype.type(factor), kinds[0]),
            ("factor", factor, kinds[1]),
        )
    ]
    nodes: list[ir.Node] = []
    inputs = [node.inputs[0], constants[0], *node.inputs[2:]]
    for op_type, text in (("DequantizeLinear", "apart"), ("Mul", "product")):
        name, output = names.node(f"trtopt/{op_type}/{base}_{text}"), names.value(f"{base}_{text}")
        nodes.append(edit.new_node(op_type, inputs, name=name, output=output, like=value))
        inputs = [nodes[0].outputs[0], constants[1]]
    nodes[0].attributes.update(node.attributes)
    edit.insert_behind(graph, value, nodes)
    return nodes[-1].outputs[0]


def biases_apart(model: ir.Model) -> None:
    """Move such biases in a graph of FP16, in place."""
    names = edit.Names(model)
    for node in list(model.graph):
        if edit.is_op(node, "Conv", "ConvTranspose", "Gemm") and _would_be_wrong(node):
            _move(model.graph, node, names)


def _would_be_wrong(node: ir.Node) -> bool:
    bias = edit.constant_of(edit.input_of(node, 2))
    left, right = (_stored(edit.input_of(node, index)) for index in (0, 1))
    if bias is None or bias.ndim != 1 or left is None or right is None or not _is_quantized(node.outputs[0]):
        return False
    scale = left[1] * right[1]
    if scale.size not in (1, bias.size):
        scale = scale.min()  # of a transposed convolution with groups
    largest = np.abs(bias.astype(np.float32)) / np.maximum(scale, np.float32(1e-30))
    return bool(scale.min() < _HALF.smallest_normal or largest.max() > _HALF.max)


def _stored(value: ir.Value | None) -> tuple[ir.Value, np.ndarray] | None:
    """What a value is dequantized from, and the FP16 scale in FP32; None for others."""
    node = edit.maker_of(value)
    if not edit.is_op(node, "DequantizeLinear") or node.inputs[0] is None:
        return None
    scale = edit.constant_of(node.inputs[1])
    return None if scale is None or scale.dtype != np.float16 else (node.inputs[0], scale.astype(np.float32))


_QUANTIZED_BEFORE = ("MaxPool", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Slice")
"""What ``QDQPropagation`` of ONNX Runtime moves a quantizer over."""

_NOT_IN_FP8 = ("MaxPool", "Squeeze", "Unsqueeze", "Slice")
"""Those of them that ONNX Runtime (1.31) has no kernel for in FP8."""


def _is_quantized(value: ir.Value) -> bool:
    """Whether nothing but a quantizer reads a value, behind a Relu, a Clip and what the quantizer may move over."""
    while True:
        readers = [node for node, _ in value.uses()]
        if readers and all(edit.is_op(reader, "QuantizeLinear") for reader in readers):
            return True  # equal ones become one
        if len(readers) != 1 or readers[0].inputs[0] is not value:
            return False
        if not edit.is_op(readers[0], "Relu", "Clip", "Identity", *_QUANTIZED_BEFORE):
            return False
        value = readers[0].outputs[0]


def _move(graph: ir.Graph, node: ir.Node, names: edit.Names) -> None:
    output, bias, weight = node.outputs[0], node.inputs[2], _stored(node.inputs[1])
    array, dims = edit.constant_of(bias), None if weight is None else edit.dims_of_value(weight[0])
    if bias is None or array is None or dims is None:
        raise ValueError(f"{node.name} has no constant bias, or no constant weight")
    if node.op_type == "Gemm":
        array = (array.astype(np.float32) * edit.float_attribute(node, "beta", 1.0)).astype(array.dtype)
    else:
        array = array.reshape(-1, *[1] * (len(dims) - 2))
    base = str(output.name)
    constant = edit.add_initializer(graph, names.value(f"{base}_bias"), array)
    name, result = names.node(f"trtopt/Add/{base}"), names.value(f"{base}_biased")
    addition = edit.new_node("Add", [output, constant], name=name, output=result, like=output)
    node.resize_inputs(2)
    edit.chain_behind(output, [addition], names, "unbiased")
    _drop(graph, bias)
