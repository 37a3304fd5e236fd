"""Biases of 8-bit products that ONNX Runtime cannot write as INT32, as additions behind the product.

ONNX Runtime (1.31, ``WeightBiasQuantization``, from its basic level on) writes the constant bias of a convolution or
Gemm that reads a dequantized tensor and is quantized again as INT32, with the product of the two scales as its scale.
In FP16 that product is often too small, or the bias in units of it beyond 65504: the outputs are wrong. Compilers add a
constant behind a product in its kernel as they add a bias.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from trtopt.graph import edit

_HALF = np.finfo(np.float16)


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
    node = None if value is None else value.producer()
    if node is None or not edit.is_op(node, "DequantizeLinear") or node.inputs[0] is None:
        return None
    scale = edit.constant_of(node.inputs[1])
    return None if scale is None or scale.dtype != np.float16 else (node.inputs[0], scale.astype(np.float32))


def _is_quantized(value: ir.Value) -> bool:
    """Whether nothing but a quantizer reads a value, Relu and Clip apart."""
    while True:
        readers = [node for node, _ in value.uses()]
        if len(readers) != 1 or not edit.is_op(readers[0], "QuantizeLinear", "Relu", "Clip"):
            return False
        if readers[0].op_type == "QuantizeLinear":
            return True
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
    if not bias.uses() and bias.is_initializer():
        graph.initializers.pop(str(bias.name), None)
