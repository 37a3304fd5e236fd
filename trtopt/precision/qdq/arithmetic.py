"""A quantizer as plain arithmetic, which TensorRT for RTX fuses into the 16-bit product before it.

The compiler writes ``QuantizeLinear`` to INT8 behind a convolution or product in FP16 as a kernel of its own: it splits
the operator into a scaling, a clip, a rounding and a cast, and its fused kernels take in all but the rounding. Rounded
by an addition, the same quantizer joins the kernel (TensorRT for RTX 1.7.1: ``CorrCastMulMinMaxAddAddCast``), which
saves a kernel that reads and writes the tensor. QuantizeLinear to FP8 has no rounding and joins as it is.

    y = min(max(x / s, -127), 127)          in FP32
    q = int8((y + 1.5 * 2^23) - 1.5 * 2^23)

The sum has no bits below one, so FP32 arithmetic rounds it to an integer, ties to even; taking the number away again is
exact. The cast then has nothing left to round, whatever its mode. QuantizeLinear alone has -128 for what is below.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import onnx_ir as ir

from trtopt.graph import edit
from trtopt.precision.observe.ranges import LEVELS
from trtopt.precision.plan import WEIGHTED
from trtopt.precision.qdq.canonicalize import QdqEditor, Quantizer, existing_nodes, quantizer_of

_MIDDLE = 1.5 * 2**23
"""From 2^23 to 2^24 neighbouring FP32 numbers are one apart (IEEE 754); the middle leaves room for either sign."""

_EPILOGUE = frozenset(
    {"Add", "Sub", "Mul", "Div", "Relu", "LeakyRelu", "Clip", "Sigmoid", "HardSigmoid", "HardSwish", "Swish", "Tanh"}
    | {"Gelu", "Erf", "Elu", "Exp", "Log", "Min", "Max", "Abs", "Neg", "Identity"}
)
_STEPS = 8

_ROUNDING: tuple[tuple[str, str, float], ...] = (
    ("Min", "below", LEVELS),
    ("Max", "clipped", -LEVELS),
    ("Add", "raised", _MIDDLE),
    ("Sub", "rounded", _MIDDLE),
)
"""What follows the division by the scale: operator, what its result is called, and its constant."""

_OPS = tuple(op_type for op_type, _, _ in _ROUNDING)

HALVES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def follows_product(value: ir.Value, others: Collection[str]) -> bool:
    """Whether a product computes ``value``, elementwise operators apart.

    The products ``others`` do not count: an 8-bit one writes 16-bit and takes in no quantizer.
    """
    front = [value]
    for _ in range(_STEPS):
        nodes = [node for item in front if (node := item.producer()) is not None]
        if any(node.op_type in WEIGHTED and node.name not in others for node in nodes):
            return True
        front = [item for node in nodes if node.op_type in _EPILOGUE for item in node.inputs if item is not None]
    return False


def fusible(model: ir.Model) -> list[ir.Node]:
    """The quantizers to INT8, one scale each, behind products that are not 8-bit themselves."""
    others = existing_nodes(model)
    return [
        node
        for node in model.graph
        if edit.is_op(node, "QuantizeLinear")
        and node.inputs[0] is not None
        and not node.outputs[0].is_graph_output()
        and (how := quantizer_of(node)) is not None
        and (how.dtype, how.axis, bool(how.zero.any())) == (ir.DataType.INT8, None, False)
        and follows_product(node.inputs[0], others)
    ]


def write_arithmetic(model: ir.Model, quantizers: Collection[ir.Node]) -> frozenset[str]:
    """Write quantizers of ``model`` as arithmetic, in place; returns the names of the new nodes, which stay FP32."""
    names, made = edit.Names(model), set[str]()
    for quantizer in quantizers:
        scale = quantizer.inputs[1]
        nodes = _arithmetic(model.graph, quantizer, names)
        name, last = quantizer.outputs[0].name, nodes[-1]
        model.graph.insert_before(quantizer, nodes)
        edit.replace_value(quantizer.outputs[0], last.outputs[0])
        edit.remove_node(quantizer)
        last.outputs[0].name = name
        if scale is not None and scale.is_initializer() and not scale.uses():
            model.graph.initializers.pop(str(scale.name), None)
        made.update(str(node.name) for node in nodes)
    return frozenset(made)


def _arithmetic(graph: ir.Graph, quantizer: ir.Node, names: edit.Names) -> list[ir.Node]:
    """The nodes, not in the graph yet; the last one's output is to take over the name of the quantizer's."""
    value, how = quantizer.inputs[0], quantizer_of(quantizer)
    if value is None or how is None:
        raise ValueError(f"{quantizer.name} has no constant scale")
    base, nodes = str(value.name), list[ir.Node]()
    if value.dtype in HALVES:
        nodes.append(edit.cast_node(value, ir.DataType.FLOAT, names, names.value(f"{base}_fp32")))
    for op_type, text, number in (("Div", "scaled", float(how.scale)), *_ROUNDING):
        by = names.value(f"{base}_divisor" if op_type == "Div" else f"{base}_{text}_by")
        constant = edit.add_initializer(graph, by, np.array(number, np.float32))
        output = names.value(f"{base}_{text}")
        inputs = [nodes[-1].outputs[0] if nodes else value, constant]
        nodes.append(
            edit.new_node(op_type, inputs, name=names.node(f"trtopt/{op_type}/{output}"), output=output, like=value)
        )
        nodes[-1].outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
    output = str(quantizer.outputs[0].name)
    cast = edit.new_node(
        "Cast", nodes[-1].outputs, name=names.node(f"trtopt/Cast/{output}"), output=f"{output}_cast", like=value
    )
    cast.attributes["to"] = ir.AttrInt64("to", int(ir.DataType.INT8))
    cast.outputs[0].type = ir.TensorType(ir.DataType.INT8)
    return [*nodes, cast]


def read_arithmetic(work: QdqEditor) -> None:
    """Write such arithmetic of a model as QuantizeLinear again, in place: what is below -127 becomes -128."""
    found = []
    for cast in work.nodes("Cast"):
        known = _quantized(cast)
        if known is not None:
            source, how = known
            quantizer = work.quantize(source, how)
            work.graph.insert_before(cast, quantizer)
            edit.replace_value(cast.outputs[0], quantizer.outputs[0])
            _remove_idle(cast)
            found.append(str(source.name))
    work.say(found, "quantizers read as Q/DQ that were written as arithmetic")
    work.drop_unused()


def _remove_idle(node: ir.Node | None) -> None:
    """Take a node out that nothing reads, and those that only it read, back to what is quantized."""
    while edit.is_op(node, "Cast", "Div", *_OPS) and not node.outputs[0].uses():
        value = node.inputs[0]
        edit.remove_node(node)
        if value is None or value.is_graph_output():
            return
        node = value.producer()


def _quantized(cast: ir.Node) -> tuple[ir.Value, Quantizer] | None:
    """What a Cast to INT8 ends the quantization of, and how; None for others."""
    if cast.outputs[0].dtype is not ir.DataType.INT8 or cast.outputs[0].is_graph_output():
        return None
    value = cast.inputs[0]
    for op_type, _, number in reversed(_ROUNDING):
        value = _operand(value, op_type, number)
    divide = edit.maker_of(value)
    scale = None if not edit.is_op(divide, "Div") else edit.constant_of(divide.inputs[1])
    source = None if divide is None else divide.inputs[0]
    if source is None or scale is None or scale.size != 1 or not float(scale) > 0:
        return None
    return _narrow(source, float(scale)), Quantizer(
        np.asarray(scale, np.float32).reshape(()), np.zeros((), np.int32), ir.DataType.INT8, None
    )


def _operand(value: ir.Value | None, op_type: str, number: float) -> ir.Value | None:
    """What ``op_type`` computes ``value`` from with ``number``, and nothing else reads."""
    node = None if value is None or len(value.uses()) != 1 or value.is_graph_output() else value.producer()
    constant = edit.constant_of(node.inputs[1]) if edit.is_op(node, op_type) else None
    if node is None or constant is None or constant.size != 1 or float(constant) != number:
        return None
    return node.inputs[0]


def _narrow(value: ir.Value, scale: float) -> ir.Value:
    """The 16-bit tensor that ``value`` is cast from, where its type holds the scale."""
    cast = value.producer()
    source = cast.inputs[0] if edit.is_op(cast, "Cast") else None
    if source is None or source.dtype not in HALVES or value.dtype is not ir.DataType.FLOAT:
        return value
    return source if float(source.dtype.numpy().type(scale)) == scale else value
