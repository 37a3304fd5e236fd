"""Activations in NVFP4: ``TRT_FP4DynamicQuantize``, which Model Optimizer exports and the compilers read.

Of 16 elements along the last axis, ``largest`` the largest magnitude among them, and ``tensor`` the second input, one
FP32 scale::

    scale = E4M3(largest / 6 / tensor)
    number = E2M1(x / (scale * tensor))

Both are rounded to the nearest, ties to the even one, and what is too large becomes the largest. The outputs are the
numbers and the scales ``[..., K / 16]``, which two DequantizeLinear multiply again. Sources: TensorRT's documentation,
operator DynamicQuantize and Working with Quantized Types; Open Compute Project, MX Specification 1.0, section 5.3
(E2M1). The order of the two divisions is Model Optimizer's.
"""

from __future__ import annotations

import atexit
from collections.abc import Sequence

import numpy as np
import onnx
import onnx_ir as ir

from trtopt.errors import InvalidModelError
from trtopt.support.dequantize import int_of

OPERATOR = ("trt", "TRT_FP4DynamicQuantize")
"""Its domain and name."""
_DOMAIN, _NAME = OPERATOR
_BLOCK = 16
_LARGEST = 6.0


def is_dynamic_fp4(node: ir.Node) -> bool:
    """Whether a node quantizes to NVFP4 with scales that it computes."""
    return (node.domain, node.op_type) == OPERATOR


def register() -> None:
    """Let ONNX infer types and shapes of the operator, in this process."""
    if onnx.defs.has(_NAME, _DOMAIN):
        return
    schema = onnx.defs.OpSchema
    floats = ["tensor(float)", "tensor(float16)", "tensor(bfloat16)"]
    made = schema(
        _NAME,
        _DOMAIN,
        1,
        inputs=[schema.FormalParameter("x", "T"), schema.FormalParameter("tensor_scale", "S")],
        outputs=[
            schema.FormalParameter("numbers", "tensor(float4e2m1)"),
            schema.FormalParameter("scales", "tensor(float8e4m3fn)"),
        ],
        type_constraints=[("T", floats, ""), ("S", floats, "")],
        attributes=[
            schema.Attribute(name, schema.AttrType.INT, "", required=False)
            for name in ("axis", "block_size", "output_type", "scale_type")
        ],
    )
    made.set_type_and_shape_inference_function(_infer)
    onnx.defs.register_schema(made)
    # ONNX 1.19 keeps the function in a static table, which outlives Python: the process would end in a crash.
    atexit.register(_unregister)


def _unregister() -> None:
    if onnx.defs.has(_NAME, _DOMAIN):
        onnx.defs.deregister_schema(_NAME, 1, _DOMAIN)


def _infer(context: onnx.shape_inference.InferenceContext) -> None:
    given = context.get_input_type(0)
    for place, dtype in enumerate((onnx.TensorProto.FLOAT4E2M1, onnx.TensorProto.FLOAT8E4M3FN)):
        result = onnx.TypeProto()
        result.tensor_type.elem_type = dtype
        if given is not None and given.tensor_type.HasField("shape"):
            result.tensor_type.shape.CopyFrom(given.tensor_type.shape)
            dims = result.tensor_type.shape.dim
            if place and dims:
                size = dims[-1].dim_value
                dims[-1].Clear()
                if size:
                    dims[-1].dim_value = size // _BLOCK
        context.set_output_type(place, result)


def write_out_dynamic_fp4(model: ir.Model) -> None:
    """Replace the quantizers and what dequantizes their results, in place, by operators that ONNX Runtime has.

    Raises:
        InvalidModelError: One has other blocks, or something else reads its results.
    """
    for node in list(model.graph):
        if is_dynamic_fp4(node):
            _write_out(node)


def _write_out(node: ir.Node) -> None:
    x, tensor = node.inputs[:2]
    numbers, scales = node.outputs
    if numbers.is_graph_output() or scales.is_graph_output():
        raise _refused(node, "its results are outputs of the network")
    scalers = _dequantizers(node, scales, 0)
    pairs = [(scaler, reader) for scaler in scalers for reader in _dequantizers(node, scaler.outputs[0], 1)]
    if int_of(node, "axis", -1) not in (-1, _rank(x) - 1) or int_of(node, "block_size", _BLOCK) != _BLOCK:
        raise _refused(node, f"its blocks are not {_BLOCK} elements of the last axis")
    if {reader for _, reader in pairs} != set(_dequantizers(node, numbers, 0)):
        raise _refused(node, "its numbers are dequantized with other scales than its own")
    work = _Chain(node)
    blocks = work.op("Reshape", work.cast(x, ir.DataType.FLOAT), work.constant(np.array([-1, _BLOCK], np.int64)))
    tensor = work.cast(tensor, ir.DataType.FLOAT)
    largest = work.op("ReduceMax", work.op("Abs", blocks), work.constant(np.array([1], np.int64)), keepdims=1)
    wanted = work.op("Div", work.op("Div", largest, work.number(_LARGEST)), tensor)
    scale = work.cast(work.cast(wanted, ir.DataType.FLOAT8E4M3FN), ir.DataType.FLOAT)
    whole = work.op("Mul", scale, tensor)
    is_zero = work.op("Equal", whole, work.number(0))
    ratio = work.op("Where", is_zero, work.number(0), work.op("Div", blocks, whole))
    narrow = _to_e2m1(work, ratio)
    shape, minus_one = work.op("Shape", x), work.constant(np.array([-1], np.int64))
    outer = work.op("Concat", work.op("Shape", x, end=-1), minus_one, axis=0)
    for scaler in scalers:
        spread = work.op("Mul", scale, work.cast(scaler.inputs[1], ir.DataType.FLOAT))
        _become_cast(scaler, work.op("Reshape", spread, outer))
        for _, reader in (pair for pair in pairs if pair[0] is scaler):
            _become_cast(reader, work.op("Reshape", work.op("Mul", narrow, spread), shape))
    if node.graph is not None:
        node.graph.remove(node, safe=True)


def _become_cast(node: ir.Node, value: ir.Value) -> None:
    """Let a node hand on a value in the type that it had."""
    node.op_type, node.domain = "Cast", ""
    node.resize_inputs(1)
    node.replace_input_with(0, value)
    node.attributes.clear()
    node.attributes["to"] = ir.AttrInt64("to", int(node.outputs[0].dtype or ir.DataType.FLOAT))


def _to_e2m1(work: _Chain, ratio: ir.Value) -> ir.Value:
    """The number of 0, 0.5, 1, 1.5, 2, 3, 4 and 6 that is nearest to each, with its sign."""
    clipped = work.op("Clip", ratio, work.number(-_LARGEST), work.number(_LARGEST))
    size = work.op("Abs", clipped)
    fine = work.op("Where", work.op("Less", size, work.number(2)), work.number(0.5), work.number(1))
    step = work.op("Where", work.op("Less", size, work.number(4)), fine, work.number(2))
    return work.op("Mul", work.op("Round", work.op("Div", clipped, step)), step)


class _Chain:
    """Writes nodes in front of one."""

    def __init__(self, node: ir.Node) -> None:
        self._node, self._made = node, 0

    def op(self, op_type: str, *inputs: ir.Value | None, **attributes: int) -> ir.Value:
        """A node of one output."""
        made = ir.node(op_type, inputs, attributes, name=self._name(op_type))
        made.outputs[0].name = f"{made.name}_out"
        if self._node.graph is not None:
            self._node.graph.insert_before(self._node, made)
        return made.outputs[0]

    def cast(self, value: ir.Value | None, dtype: ir.DataType) -> ir.Value:
        """A value in another type."""
        return self.op("Cast", value, to=int(dtype))

    def constant(self, array: np.ndarray) -> ir.Value:
        """A constant."""
        made = ir.node("Constant", [], {"value": ir.Tensor(array)}, name=self._name("Constant"))
        made.outputs[0].name = f"{made.name}_out"
        if self._node.graph is not None:
            self._node.graph.insert_before(self._node, made)
        return made.outputs[0]

    def number(self, value: float) -> ir.Value:
        """A constant of FP32."""
        return self.constant(np.array(value, np.float32))

    def _name(self, op_type: str) -> str:
        self._made += 1
        return f"{self._node.outputs[0].name}/fp4/{op_type}_{self._made}"


def _dequantizers(node: ir.Node, value: ir.Value, place: int) -> Sequence[ir.Node]:
    """What reads a value, all of it DequantizeLinear."""
    readers = [reader for reader, index in value.uses() if reader.op_type == "DequantizeLinear" and index == place]
    if len(readers) != len(value.uses()) or not readers:
        raise _refused(node, f"{value.name} is read by something else than DequantizeLinear")
    return readers


def _rank(value: ir.Value | None) -> int:
    return -1 if value is None or value.shape is None else len(value.shape)


def _refused(node: ir.Node, reason: str) -> InvalidModelError:
    return InvalidModelError(
        f"{_NAME} cannot be computed on the CPU: {reason}",
        where=f"node {node.name}",
        remedy=f"export it as Model Optimizer does: {_BLOCK} elements of the last axis, dequantized with its scales",
    )
