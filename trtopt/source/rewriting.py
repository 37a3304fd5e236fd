"""Operators of ONNX Runtime, and fused ones of ONNX, in operators that every stage and every compiler knows."""

from __future__ import annotations

import struct
from collections.abc import Callable

import onnx
import onnx_ir as ir

from trtopt.graph import edit
from trtopt.graph.shapes import infer_in_place
from trtopt.source import attention, columns, contributed, fourier, scatter
from trtopt.source.written import Writer, WritingError

_Rule = Callable[[Writer], None]

_MICROSOFT = "com.microsoft"
_TENSORRT = "trt"
_QUANTIZERS = {prefix + name: name for name in ("QuantizeLinear", "DequantizeLinear") for prefix in ("", "TRT_FP8")}
"""What Model Optimizer writes in TensorRT's domain, and what it is in ONNX."""
_BYTE = 8


def _cast_like(w: Writer) -> None:
    """``CastLike`` as Cast, or as nothing: dynamo without its optimizations writes one in front of most operands."""
    kind = w.needed(1).dtype
    if kind is None:
        raise WritingError("the type that it casts to is not known")
    if kind == w.needed(0).dtype:
        w.replace(w.op("Identity", w.needed(0)))
        return
    saturate = {"saturate": w.int_of("saturate", 1)} if kind.is_floating_point() and kind.bitwidth <= _BYTE else {}
    w.replace(w.op("Cast", w.needed(0), to=int(kind), **saturate))


_RULES: dict[tuple[str, str], _Rule] = {
    ("", "Attention"): attention.standard,
    ("", "CastLike"): _cast_like,
    ("", "Col2Im"): columns.col2im,
    ("", "DFT"): fourier.dft,
    ("", "RotaryEmbedding"): contributed.standard_rotary,
    ("", "ScatterElements"): scatter.scatter_elements,
    ("", "ScatterND"): scatter.scatter_nd,
    **{
        (_MICROSOFT, name): rule
        for name, rule in {
            "Attention": contributed.fused_attention,
            "BiasGelu": contributed.gelu,
            "FastGelu": contributed.fast_gelu,
            "FusedMatMul": contributed.fused_matmul,
            "GatherBlockQuantized": contributed.gather_blocks,
            "Gelu": contributed.gelu,
            "GroupQueryAttention": contributed.group_query,
            "MultiHeadAttention": contributed.multi_head,
            "QuickGelu": contributed.quick_gelu,
            "RotaryEmbedding": contributed.rotary,
            "SimplifiedLayerNormalization": contributed.simplified_norm,
            "SkipLayerNormalization": contributed.skip_norm,
            "SkipSimplifiedLayerNormalization": contributed.skip_simplified_norm,
        }.items()
    },
}
"""By domain and operator."""


def mend_spelling(proto: onnx.ModelProto) -> None:
    """What exporters write and ONNX does not define, or does not infer, as ONNX has it; in place."""
    fourier.say_one_sided(proto)
    _give_domains(proto)
    _take_quantizers(proto)
    _open_negative_dimensions(proto)
    _leave_long_axes(proto)


def _give_domains(proto: onnx.ModelProto) -> None:
    """Operators of ONNX Runtime that it writes without a domain get theirs."""
    found = [node for node in proto.graph.node if node.op_type == "SimplifiedLayerNormalization" and not node.domain]
    for node in found:
        node.domain = _MICROSOFT
    if found and all(item.domain != _MICROSOFT for item in proto.opset_import):
        proto.opset_import.add(domain=_MICROSOFT, version=1)


def _take_quantizers(proto: onnx.ModelProto) -> None:
    """Quantizers of TensorRT's domain are those of ONNX, to E4M3 where no zero point says another type."""
    graph, outputs, zero = proto.graph, set[str](), "trt_fp8_zero"
    for node in graph.node:
        if node.domain != _TENSORRT or node.op_type not in _QUANTIZERS:
            continue
        node.domain, node.op_type = "", _QUANTIZERS[node.op_type]
        if node.op_type == "QuantizeLinear":
            outputs.update(node.output)
            if not any(node.input[2:]):
                node.input[2:] = [zero]
    if outputs and any(zero in node.input for node in graph.node):
        graph.initializer.append(onnx.TensorProto(name=zero, data_type=onnx.TensorProto.FLOAT8E4M3FN, raw_data=b"\0"))
    for index in reversed(range(len(graph.value_info) if outputs else 0)):
        if graph.value_info[index].name in outputs:
            del graph.value_info[index]  # it says bytes of E4M3


def _open_negative_dimensions(proto: onnx.ModelProto) -> None:
    """Dimensions of -1 (paddle2onnx, old exporters) are open, as ONNX Runtime takes them."""
    for value in (*proto.graph.input, *proto.graph.output, *proto.graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_value < 0:
                dim.ClearField("dim_value")


def _leave_long_axes(proto: onnx.ModelProto) -> None:
    """``squeeze(dim)`` of PyTorch leaves an axis that is longer than 1, for which ONNX has no Squeeze; torch 2.13
    exports it as one all the same (PixArt of diffusers). It is known by the shapes that the exporter declares, of what
    goes in and of what comes out: that of one alone may be stale."""
    graph = proto.graph
    values = (*graph.input, *graph.output, *graph.value_info)
    shapes = {value.name: value.type.tensor_type.shape.dim for value in values}
    named = {tensor.name: _int64_of(tensor) for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type == "Constant" and node.output and node.attribute:
            named[node.output[0]] = _int64_of(node.attribute[0].t)
        if node.op_type != "Squeeze" or node.domain or len(node.input) != 2 or len(node.output) != 1:
            continue
        dims, axes = shapes.get(node.input[0], ()), named.get(node.input[1], [])
        stays = len(shapes.get(node.output[0], ())) == len(dims)
        if stays and axes and all(-len(dims) <= axis < len(dims) and dims[axis].dim_value > 1 for axis in axes):
            node.op_type = "Identity"
            del node.input[1:]


def _int64_of(tensor: onnx.TensorProto) -> list[int]:
    """A list of axes; empty for what is none."""
    is_short = tensor.data_type == onnx.TensorProto.INT64 and len(tensor.raw_data) in range(8, 65, 8)
    return list(struct.unpack(f"<{len(tensor.raw_data) // 8}q", tensor.raw_data)) if is_short else []


def _has_rule(node: ir.Node) -> bool:
    is_known = (node.domain, node.op_type) in _RULES
    return is_known and (not node.op_type.startswith("Scatter") or scatter.is_sum(node))


def write_out(model: ir.Model) -> list[str]:
    """Replace the nodes that have a rule, in place; what was replaced, in words.

    A node that its rule cannot write stays as it is: whether a backend takes it is for the backend to say.
    """
    nodes = [node for node in edit.all_nodes(model.graph) if _has_rule(node)]
    if not nodes:
        return []
    infer_in_place(model)
    written, kept = dict[str, int](), list[str]()
    for node in nodes:
        if any(value is not None and value.shape is None for value in node.inputs):  # behind one that is written now
            infer_in_place(model)
        writer = Writer(node)
        try:
            _RULES[node.domain, node.op_type](writer)
        except (TypeError, ValueError) as error:  # nothing has checked attributes of its domain
            writer.take_back()
            kept.append(f"{node.op_type} {node.name or node.outputs[0].name} stays: {error}")
            continue
        written[node.op_type] = written.get(node.op_type, 0) + 1
    return [*(f"{count} {op_type} written in other operators" for op_type, count in written.items()), *kept]
