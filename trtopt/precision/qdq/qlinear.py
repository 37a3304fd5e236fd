"""Operators on quantized tensors (QLinearConv, ...) as the operator itself between DequantizeLinear and QuantizeLinear.

That is how ONNX and ONNX Runtime define them; sums are rounded in FP32 instead of kept in INT32, which can move a
result by one step where it lies between two.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from trtopt.errors import InvalidModelError
from trtopt.graph import edit
from trtopt.precision.qdq.canonicalize import QdqEditor

_MS = "com.microsoft"
_DYNAMIC = ("DynamicQuantizeLinear", "MatMulInteger", "ConvInteger", "DynamicQuantizeMatMul", "MatMulIntegerToFloat")
_FLOAT = ir.DataType.FLOAT


@dataclass(frozen=True)
class _Form:
    """Where an operator has its operands.

    Attributes:
        op_type: The floating operator.
        operands: The position of each quantized operand; its scale and zero point follow it.
        output: The position of the output's scale; its zero point follows.
        bias: The position of an INT32 bias, whose scale is the product of the operands' scales.
        axis: The second operand's axis with a scale per index, for a scale that is no scalar.
    """

    op_type: str
    operands: tuple[int, ...]
    output: int
    bias: int | None = None
    axis: int | None = None


_FORMS = {
    ("", "QLinearConv"): _Form("Conv", (0, 3), 6, bias=8, axis=0),
    ("", "QLinearMatMul"): _Form("MatMul", (0, 3), 6, axis=-1),
    (_MS, "QLinearConv"): _Form("Conv", (0, 3), 6, bias=8, axis=0),
    (_MS, "QGemm"): _Form("Gemm", (0, 3), 7, bias=6, axis=-1),
    (_MS, "QLinearAdd"): _Form("Add", (0, 3), 6),
    (_MS, "QLinearMul"): _Form("Mul", (0, 3), 6),
    (_MS, "QLinearSigmoid"): _Form("Sigmoid", (0,), 3),
    (_MS, "QLinearLeakyRelu"): _Form("LeakyRelu", (0,), 3),
    (_MS, "QLinearGlobalAveragePool"): _Form("GlobalAveragePool", (0,), 3),
    (_MS, "QLinearAveragePool"): _Form("AveragePool", (0,), 3),
    (_MS, "QLinearSoftmax"): _Form("Softmax", (0,), 3),
}
_FORMS_CONCAT = (_MS, "QLinearConcat")


def expand(work: QdqEditor) -> None:
    """Write every quantized operator of the main graph as DequantizeLinear, the operator, and QuantizeLinear.

    Raises:
        InvalidModelError: Scales are computed at run time (dynamic quantization), or a form is not known.
    """
    refuse_dynamic(work)
    done = []
    for node in list(work.graph):
        form = _FORMS.get((node.domain, node.op_type))
        if (node.domain, node.op_type) == _FORMS_CONCAT:
            form = _Form("Concat", tuple(range(2, len(node.inputs), 3)), 0)
        if form is not None:
            done.append(f"{node.name} ({node.op_type})")
            _expand(work, node, form)
    work.say(done, "quantized operators written as Q/DQ")


def refuse_dynamic(work: QdqEditor) -> None:
    """Stop at operators whose scales are computed from each input at run time.

    Raises:
        InvalidModelError: There is one.
    """
    for node in edit.all_nodes(work.graph):
        if node.op_type in _DYNAMIC and node.domain in ("", _MS):
            raise InvalidModelError(
                f"{node.op_type} is dynamic quantization: it takes its scales from each input at run time, which "
                "TensorRT does not run in INT8, and no constant scale is equal to it",
                where=f"node {node.name}",
                remedy="export the model before it was quantized and give --int8 --calib SAMPLES, or quantize it "
                "statically to Q/DQ (onnxruntime.quantization.quantize_static, symmetric INT8)",
            )


def _expand(work: QdqEditor, node: ir.Node, form: _Form) -> None:
    _check(node, form)
    made: list[ir.Node] = []
    inputs: list[ir.Value | None] = []
    for number, position in enumerate(form.operands):
        inputs.append(_operand(work, node, position, form.axis if number else None, made))
    bias = None if form.bias is None else edit.input_of(node, form.bias)
    if bias is not None:
        inputs.append(_bias(work, node, form, bias))
    result = node.outputs[0]
    core = work.node(form.op_type, inputs, f"{result.name}_float", result, _FLOAT)
    core.attributes.update({name: value for name, value in node.attributes.items() if name in _kept(form.op_type)})
    made.append(core)
    scale = edit.input_of(node, form.output)
    if scale is not None:
        parameters = [scale, edit.input_of(node, form.output + 1)]
        made.append(
            work.node("QuantizeLinear", [core.outputs[0], *parameters], f"{result.name}_q", result, result.dtype)
        )
        zero = parameters[1]
        dtype = None if zero is None else zero.dtype
        made[-1].outputs[0].type = ir.TensorType(dtype or ir.DataType.UINT8)
    for item in made[:-1]:
        work.graph.insert_before(node, item)
    name = node.name
    work.replace(node, made[-1])
    core.name = name


def _check(node: ir.Node, form: _Form) -> None:
    """Raises InvalidModelError for variants that have no floating form here."""
    scaled = form.op_type == "Gemm" and edit.float_attribute(node, "alpha", 1.0) != 1.0
    old = form.op_type == "Softmax" and edit.int_attribute(node, "opset", 13) < 13
    if edit.int_attribute(node, "channels_last", 0) or scaled or old:
        raise InvalidModelError(
            f"This form of {node.op_type} (channels_last, alpha, or the Softmax of opset 12) is not supported",
            where=f"node {node.name}",
            remedy="quantize the model to Q/DQ instead (quant_format=QuantFormat.QDQ), or give the FP32 model",
        )


def _operand(work: QdqEditor, node: ir.Node, position: int, axis: int | None, made: list[ir.Node]) -> ir.Value:
    """The operand at ``position``, dequantized."""
    data, scale, zero = (edit.input_of(node, position + offset) for offset in range(3))
    if data is None or scale is None:
        raise _broken(node, f"input {position} or its scale is missing")
    dequantize = work.node("DequantizeLinear", [data, scale, zero], f"{data.name}_dequantized", data, _FLOAT)
    if scale.shape is not None and len(scale.shape) == 1 and scale.shape[0] != 1:
        rank = None if data.shape is None else len(data.shape)
        if axis is None or rank is None:
            raise _broken(node, f"the scale of {data.name} is no scalar")
        if node.op_type == "QGemm" and edit.int_attribute(node, "transB", 0):
            axis = 0
        dequantize.attributes["axis"] = ir.AttrInt64("axis", axis % rank)
    made.append(dequantize)
    return dequantize.outputs[0]


def _bias(work: QdqEditor, node: ir.Node, form: _Form, bias: ir.Value) -> ir.Value:
    """The INT32 bias as an FP32 constant."""
    values = edit.constant_of(bias)
    scales = [edit.constant_of(edit.input_of(node, position + 1)) for position in form.operands]
    if values is None or scales[0] is None or scales[1] is None:
        raise _broken(node, f"its bias {bias.name} or a scale is not constant")
    exact = values.astype(np.float64) * scales[0].astype(np.float64) * scales[1].astype(np.float64)
    return work.constant(f"{bias.name}_float", exact.astype(np.float32))


def _kept(op_type: str) -> frozenset[str]:
    schemas: dict[str, str] = {
        "Conv": "auto_pad dilations group kernel_shape pads strides",
        "Gemm": "transA transB",
        "LeakyRelu": "alpha",
        "AveragePool": "auto_pad ceil_mode count_include_pad kernel_shape pads strides",
        "Softmax": "axis",
        "Concat": "axis",
    }
    return frozenset(schemas.get(op_type, "").split())


def _broken(node: ir.Node, what: str) -> InvalidModelError:
    return InvalidModelError(
        f"{node.op_type} cannot be written as Q/DQ: {what}",
        where=f"node {node.name}",
        remedy="quantize the model with constant scales to Q/DQ (quant_format=QuantFormat.QDQ), or give the FP32 model",
    )
