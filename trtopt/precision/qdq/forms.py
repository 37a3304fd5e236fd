"""Q/DQ of all kinds brought to the one form both compilers read.

That form: constant scales, signed 8-bit integers with the zero point 0 (or FP8), a DequantizeLinear right behind each
QuantizeLinear, weights stored as 8-bit constants, biases in floating point.

Operators on quantized tensors (QLinearConv, ...) become the operator itself between DequantizeLinear and
QuantizeLinear, as ONNX and ONNX Runtime define them; sums are rounded in FP32 instead of kept in INT32, which can move
a result by one step where it lies between two.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from trtopt.errors import InvalidModelError
from trtopt.graph import edit
from trtopt.precision.observe.ranges import LEVELS
from trtopt.precision.qdq.canonicalize import (
    EIGHT_BITS,
    FP8,
    INTEGERS,
    QdqEditor,
    Quantizer,
    dequantized,
    limits,
    quantizer_of,
)

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


_QDQ = ("QuantizeLinear", "DequantizeLinear")

_SMALLEST_SHARE = np.float32(2.0**-10)
"""Of a channel's scale to the largest of its weight. Scales of channels without weights lie below, round to 0 in FP16,
and are refused as 0; raising them to this share costs half of 1/1024 of the other channels' step."""


def check_scales(work: QdqEditor) -> None:
    """Raises InvalidModelError where a constant scale is no number above zero (for a weight's channels, or zero)."""
    for node in work.nodes(*_QDQ):
        how = quantizer_of(node)
        if how is None or (np.isfinite(how.scale).all() and (how.scale > 0).all()):
            continue
        channels = how.axis is not None and np.isfinite(how.scale).all() and (how.scale >= 0).all() and how.scale.any()
        if not channels:
            raise InvalidModelError(
                f"A scale is {how.scale.min():g}: scales are numbers above zero",
                where=f"node {node.name}",
                remedy="calibrate and quantize the model again, or give the FP32 model and --int8 --calib SAMPLES",
            )


def fold_constants(work: QdqEditor) -> None:
    """Biases that are dequantized become floating constants, and weights that are quantized 8-bit constants."""
    biases, weights = [], []
    for node in work.nodes(*_QDQ):
        value = node.inputs[0]
        exact = edit.constant_of(value)
        how = quantizer_of(node)
        if exact is None or how is None or value is None:
            continue
        if node.op_type == "DequantizeLinear" and value.dtype is ir.DataType.INT32:
            _become_constant(work, node, dequantized(exact, how))
            biases.append(str(node.outputs[0].name))
        elif node.op_type == "QuantizeLinear" and how.dtype in EIGHT_BITS:
            _become_constant(work, node, _quantized(exact, how))
            weights.append(str(value.name))
    work.say(biases, "INT32 biases are stored in FP32")
    work.say(weights, "weights that were quantized at run time are stored as they come out")


def _quantized(exact: np.ndarray, how: Quantizer) -> np.ndarray:
    """As QuantizeLinear: divided in FP32, rounded half to even, clipped to the type."""
    scale, zero = how.column(exact.ndim)
    numbers = np.asarray(exact, np.float32)
    ratio = np.divide(numbers, scale, out=np.zeros_like(numbers), where=scale > 0)
    if how.dtype in FP8:
        low, high = -FP8[how.dtype], FP8[how.dtype]
    else:
        low, high = limits(how.dtype)
        ratio = np.rint(ratio) + zero
    return np.asarray(np.clip(ratio, low, high).astype(how.dtype.numpy()))


def _become_constant(work: QdqEditor, node: ir.Node, array: np.ndarray) -> None:
    """Replace a node by a constant; one that is an output of the network stays."""
    value = node.outputs[0]
    if value.is_graph_output():
        return
    constant = work.constant(f"{value.name}_constant", array)
    if value.dtype is not None and value.dtype is not constant.dtype and value.dtype.is_floating_point():
        stored = array.astype(value.dtype.numpy())
        constant.const_value, constant.type = ir.tensor(stored, name=constant.name), ir.TensorType(value.dtype)
    value.replace_all_uses_with(constant)
    edit.remove_node(node)


def transpose_weights(work: QdqEditor) -> None:
    """A transposed 8-bit weight is stored transposed, so that the product reads its DequantizeLinear itself."""
    done = []
    for node in work.nodes("Transpose"):
        dequantize = edit.maker_of(node.inputs[0])
        if not edit.is_op(dequantize, "DequantizeLinear") or node.outputs[0].is_graph_output():
            continue
        values, how = edit.constant_of(dequantize.inputs[0]), quantizer_of(dequantize)
        perm = edit.ints_attribute(node, "perm")
        if values is None or how is None or values.ndim < 2:
            continue
        order = tuple(reversed(range(values.ndim))) if perm is None else perm
        name = str(dequantize.inputs[0].name)  # type: ignore[union-attr]
        weight = work.constant(f"{name}_transposed", np.ascontiguousarray(values.transpose(order)))
        inputs = [weight, *dequantize.inputs[1:]]
        new = work.node("DequantizeLinear", inputs, f"{name}_transposed_dequantized", node.outputs[0])
        if how.axis is not None:
            new.attributes["axis"] = ir.AttrInt64("axis", order.index(how.axis))
        work.replace(node, new)
        done.append(name)
    work.say(done, "transposed weights are stored transposed")
    work.drop_unused()


def make_weights_symmetric(work: QdqEditor) -> None:
    """Weights with a zero point become INT8 without. Exact where they fit, else with a coarser step (up to twice)."""
    done = [name for node in work.nodes("DequantizeLinear") if (name := _symmetric_weight(work, node))]
    work.say(done, "weights with a zero point are symmetric INT8 now")
    work.drop_unused()


def _symmetric_weight(work: QdqEditor, node: ir.Node) -> str:
    """Re-centre the constant behind a DequantizeLinear; its name, empty when there was nothing to do."""
    values, how = edit.constant_of(node.inputs[0]), quantizer_of(node)
    if values is None or how is None or how.dtype not in INTEGERS or how.is_symmetric:
        return ""
    whole = values.astype(np.int32) - how.column(values.ndim)[1]
    step = how.scale
    if whole.max(initial=0) > LEVELS or whole.min(initial=0) < -LEVELS - 1:
        others = tuple(axis for axis in range(whole.ndim) if axis != how.axis)
        excess = np.maximum(np.abs(whole).max(axis=others, keepdims=True) / LEVELS, 1)
        whole = np.rint(whole / excess).astype(np.int32)
        step = how.scale * excess.reshape(how.scale.shape).astype(np.float32)
    new = Quantizer(np.asarray(step, np.float32), np.zeros_like(how.zero), ir.DataType.INT8, how.axis)
    name = str(node.inputs[0].name)  # type: ignore[union-attr]
    weight = work.constant(f"{name}_symmetric", whole.astype(np.int8))
    work.replace(node, work.dequantize(weight, new, node.outputs[0].dtype))
    return name


def raise_scales(work: QdqEditor) -> None:
    """Scales of channels without weights that matter, which FP16 would round to 0, are raised."""
    done = []
    for node in work.nodes("DequantizeLinear"):
        values, how = edit.constant_of(node.inputs[0]), quantizer_of(node)
        if values is None or how is None or how.axis is None or how.dtype is not ir.DataType.INT8:
            continue
        floor = how.scale.max() * _SMALLEST_SHARE
        if (how.scale >= floor).all():
            continue
        new = Quantizer(np.maximum(how.scale, floor), how.zero, how.dtype, how.axis)
        ratio = Quantizer(how.scale / new.scale, how.zero, how.dtype, how.axis).column(values.ndim)[0]
        name = str(node.inputs[0].name)  # type: ignore[union-attr]
        weight = work.constant(f"{name}_raised", np.rint(values * ratio).astype(np.int8))
        work.replace(node, work.dequantize(weight, new, node.outputs[0].dtype))
        done.append(name)
    work.say(done, "weights with nearly empty channels have larger scales there")
    work.drop_unused()


_MOVES = frozenset(
    "Reshape Transpose Flatten Squeeze Unsqueeze Identity Slice Split Gather Expand Tile MaxPool DepthToSpace "
    "SpaceToDepth".split()
)
"""Operators that quantizing commutes with, where there is one scale: they move values, or pick the largest."""

_NEVER_NEGATIVE = frozenset("Relu Sigmoid Softmax HardSigmoid Abs Exp Sqrt ReduceL2 ReduceL1 ReduceSumSquare".split())


def standard_domain(work: QdqEditor) -> None:
    """Q/DQ of the domain com.microsoft mean what those of ONNX mean."""
    done = []
    for node in work.graph:
        if node.domain == "com.microsoft" and node.op_type in _QDQ:
            node.domain = ""
            done.append(str(node.name))
    work.say(done, "Q/DQ of the domain com.microsoft are now ONNX's")


def drop_wide_types(work: QdqEditor) -> None:
    """Q/DQ to 16-bit integers only round and clip: no compiler computes with them, and the tensor itself is exact."""
    done = []
    for node in work.nodes("QuantizeLinear"):
        how, value = quantizer_of(node), node.inputs[0]
        readers = [reader for reader, _ in node.outputs[0].uses()]
        if how is None or value is None or how.dtype not in (ir.DataType.INT16, ir.DataType.UINT16):
            continue
        if not readers or not all(edit.is_op(reader, "DequantizeLinear") for reader in readers):
            continue
        done.append(str(value.name))
        if how.axis is None and (how.zero != 0 or how.dtype is ir.DataType.UINT16):
            value = _clamped(work, node, value, how)
        for reader in readers:
            if edit.can_replace(reader.outputs[0], value):
                edit.replace_value(reader.outputs[0], value)
    work.say(done, "tensors in 16-bit integers are left in floating point")
    work.drop_unused()


def pair_up(work: QdqEditor) -> None:
    """Put every QuantizeLinear right before its DequantizeLinear: copies between them act on the tensor itself.

    Raises:
        InvalidModelError: An operator between the two cannot change places with quantizing.
    """
    source: dict[ir.Value, tuple[ir.Value, Quantizer]] = {}
    moved = []
    for node in list(work.graph):
        if edit.is_op(node, "QuantizeLinear"):
            how, value = quantizer_of(node), node.inputs[0]
            if how is not None and value is not None and how.dtype in EIGHT_BITS:
                source[node.outputs[0]] = (value, how)
        elif edit.is_op(node, "DequantizeLinear"):
            known = source.get(node.inputs[0]) if node.inputs[0] is not None else None
            if known is not None and not edit.is_op(node.inputs[0].producer(), "QuantizeLinear"):  # type: ignore[union-attr]
                _quantize_here(work, node, *known)
                moved.append(str(node.inputs[0].name))  # type: ignore[union-attr]
        elif any(value in source for value in node.inputs if value is not None):
            _act_on_source(node, source)
    _requantize_outputs(work, source)
    work.say(moved, "QuantizeLinear moved behind the operators that copy or pool their result")


def _quantize_here(work: QdqEditor, node: ir.Node, value: ir.Value, how: Quantizer) -> None:
    quantize = work.quantize(value, how)
    work.graph.insert_before(node, quantize)
    node.replace_input_with(0, quantize.outputs[0])


def _act_on_source(node: ir.Node, source: dict[ir.Value, tuple[ir.Value, Quantizer]]) -> None:
    """Let an operator between Q and DQ read the tensor before Q; its result stands for the quantized one."""
    data = list(node.inputs) if edit.is_op(node, "Concat") else node.inputs[:1]
    known = [source.get(value) for value in data if value is not None]
    first = known[0]
    if not (edit.is_op(node, "Concat") or (node.domain == "" and node.op_type in _MOVES)):
        raise InvalidModelError(
            f"{node.op_type} computes with 8-bit integers between QuantizeLinear and DequantizeLinear",
            where=f"node {node.name}",
            remedy="dequantize before it (a Q/DQ model), or give the FP32 model and quantize it with --int8 --calib",
        )
    if first is None or first[1].axis is not None or not all(each and each[1].equals(first[1]) for each in known):
        raise InvalidModelError(
            f"{node.op_type} joins or moves 8-bit tensors of different scales, or of scales per channel",
            where=f"node {node.name}",
            remedy="put QuantizeLinear and DequantizeLinear next to each other when exporting",
        )
    for index, each in enumerate(known):
        if each is not None:
            node.replace_input_with(index, each[0])
    for value in node.outputs:
        if value.dtype in (None, first[1].dtype):
            value.type = None if first[0].dtype is None else ir.TensorType(first[0].dtype)
            source[value] = (value, first[1])


def _requantize_outputs(work: QdqEditor, source: dict[ir.Value, tuple[ir.Value, Quantizer]]) -> None:
    """Outputs of the network that are 8-bit and behind such an operator get a QuantizeLinear of their own."""
    for position, value in enumerate(work.graph.outputs):
        known = source.get(value)
        if known is None or edit.is_op(value.producer(), "QuantizeLinear"):
            continue
        quantize = work.quantize(known[0], known[1])
        work.graph.append(quantize)
        name = str(value.name)
        value.name = work.names.value(f"{name}_float")
        quantize.outputs[0].name = name
        work.graph.outputs[position] = quantize.outputs[0]


def make_symmetric(work: QdqEditor) -> None:
    """Zero points become 0 and unsigned types signed.

    Exact where the zero point is the middle of the type (UINT8 with 128). Elsewhere the range stays and the step grows,
    to at most 255 / 127 of what it was; the tensor is clipped to its range by a Clip, since exporters leave out a ReLU
    in front of such a quantizer. TensorRT for RTX takes UINT8 with the zero point 0 for INT8 without a word, and clips
    at half of the range.

    Raises:
        InvalidModelError: A QuantizeLinear and its DequantizeLinear do not belong together.
    """
    exact: list[str] = []
    coarser: list[str] = []
    for node in work.nodes("QuantizeLinear"):
        how = quantizer_of(node)
        if how is None:
            work.leave(node, "its scale or zero point is computed at run time, or in blocks: left as it is")
        elif how.dtype in INTEGERS and not how.is_symmetric and not node.outputs[0].is_graph_output():
            name = str(node.inputs[0].name)  # type: ignore[union-attr]
            (exact if _symmetric_pair(work, node, how) else coarser).append(name)
    work.say(exact, "activations with the zero point in the middle are INT8 with the zero point 0")
    text = "activations with another zero point are symmetric INT8 now, with a coarser step (up to twice)"
    work.say(coarser, text, costs_accuracy=True)
    work.drop_unused()


def _symmetric_pair(work: QdqEditor, node: ir.Node, how: Quantizer) -> bool:
    """Whether it could be done exactly."""
    low, high = limits(how.dtype)
    bottom, top = _range(how)
    is_exact = bool((how.zero == (low + high + 1) // 2).all())
    scale = how.scale if is_exact else np.maximum(-bottom, top) / np.float32(LEVELS)
    new = Quantizer(np.asarray(scale, np.float32), np.zeros_like(how.zero), ir.DataType.INT8, how.axis)
    value = node.inputs[0]
    if value is None:
        raise ValueError(f"{node.name} has no input")
    for reader, index in list(node.outputs[0].uses()):
        other = quantizer_of(reader) if edit.is_op(reader, "DequantizeLinear") and index == 0 else None
        if other is None or not other.equals(how):
            raise InvalidModelError(
                f"{reader.op_type} reads an 8-bit tensor with another scale or zero point than it was quantized with",
                where=f"node {reader.name}",
                remedy="quantize symmetrically (INT8, zero point 0), with one scale per pair of Q and DQ",
            )
    if not is_exact and how.axis is None:
        value = _clamped(work, node, value, how)
    quantize = work.quantize(value, new)
    work.graph.insert_before(node, quantize)
    for reader, _ in list(node.outputs[0].uses()):
        dequantize = work.dequantize(quantize.outputs[0], new, reader.outputs[0].dtype)
        work.replace(reader, dequantize)
    edit.remove_node(node)
    return is_exact


def _range(how: Quantizer) -> tuple[np.ndarray, np.ndarray]:
    """The lowest and highest numbers that a quantizer does not clip, of the scale's shape."""
    low, high = limits(how.dtype)
    return (low - how.zero) * how.scale, (high - how.zero) * how.scale


def _clamped(work: QdqEditor, node: ir.Node, value: ir.Value, how: Quantizer) -> ir.Value:
    """``value`` within the range of a quantizer with one scale that may stand for a ReLU or Clip as well.

    Exporters leave these out in front of a quantizer with a zero point, which clips as they would.
    """
    bottom, top = (float(bound) for bound in _range(how))
    producer = value.producer()
    if edit.is_op(producer, "Clip") or (bottom == 0 and edit.is_op(producer, *_NEVER_NEGATIVE)):
        return value
    floating = (value.dtype or ir.DataType.FLOAT).numpy()
    bounds = [work.constant(f"{value.name}_bound", np.asarray(bound, floating)) for bound in (bottom, top)]
    clamp = work.node("Clip", [value, *bounds], f"{value.name}_clipped", value)
    work.graph.insert_before(node, clamp)
    return clamp.outputs[0]


def plain_borders(work: QdqEditor) -> None:
    """8-bit inputs and outputs of the network with a zero point, or unsigned, are mapped by plain arithmetic. Exact."""
    inputs, outputs = [], []
    for node in work.nodes(*_QDQ):
        how, value = quantizer_of(node), node.inputs[0]
        if how is None or value is None or how.dtype not in INTEGERS or how.is_symmetric or how.axis is not None:
            continue
        if node.op_type == "DequantizeLinear" and value.is_graph_input():
            inputs.append(str(value.name))
            _from_integers(work, node, value, how)
        elif node.op_type == "QuantizeLinear" and node.outputs[0].is_graph_output() and not node.outputs[0].uses():
            outputs.append(str(node.outputs[0].name))
            _to_integers(work, node, value, how)
    work.say(inputs, "8-bit inputs with a zero point are converted by Cast, Sub and Mul")
    work.say(outputs, "8-bit outputs with a zero point are converted by Div, Round, Add, Clip and Cast")


def _from_integers(work: QdqEditor, node: ir.Node, value: ir.Value, how: Quantizer) -> None:
    dtype = node.outputs[0].dtype or ir.DataType.FLOAT
    name = str(value.name)
    zero = work.constant(f"{name}_zero", how.zero.astype(dtype.numpy()))
    scale = work.constant(f"{name}_step", how.scale.astype(dtype.numpy()))
    cast = work.node("Cast", [value], f"{name}_float", value, dtype)
    cast.attributes["to"] = ir.AttrInt64("to", int(dtype))
    shifted = work.node("Sub", [cast.outputs[0], zero], f"{name}_shifted", value, dtype)
    scaled = work.node("Mul", [shifted.outputs[0], scale], f"{name}_scaled", value, dtype)
    for item in (cast, shifted):
        work.graph.insert_before(node, item)
    work.replace(node, scaled)


def _to_integers(work: QdqEditor, node: ir.Node, value: ir.Value, how: Quantizer) -> None:
    dtype = value.dtype or ir.DataType.FLOAT
    name = str(node.outputs[0].name)
    low, high = limits(how.dtype)
    scale, zero, bottom, top = (
        work.constant(f"{name}_{label}", np.asarray(number, dtype.numpy()))
        for label, number in (("step", how.scale), ("zero", how.zero), ("low", low), ("high", high))
    )
    current, chain = value, []
    for op_type, others in (("Div", [scale]), ("Round", []), ("Add", [zero]), ("Clip", [bottom, top])):
        chain.append(work.node(op_type, [current, *others], f"{name}_{op_type.lower()}", value, dtype))
        current = chain[-1].outputs[0]
    cast = work.node("Cast", [current], f"{name}_cast", value, how.dtype)
    cast.attributes["to"] = ir.AttrInt64("to", int(how.dtype))
    for item in chain:
        work.graph.insert_before(node, item)
    work.replace(node, cast)


PASSES: tuple[Callable[[QdqEditor], None], ...] = (
    check_scales,
    fold_constants,
    drop_wide_types,
    transpose_weights,
    pair_up,
    plain_borders,
    make_symmetric,
    make_weights_symmetric,
    raise_scales,
)
"""In the order in which they run, once operators on quantized tensors are written as Q/DQ."""
