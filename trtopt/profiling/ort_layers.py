"""The nodes of a model as layers, as ONNX Runtime ran them: with the types and shapes of that run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import onnx_ir as ir

from trtopt.graph import cost
from trtopt.graph.edit import constant_tensor_of
from trtopt.profiling.ort_events import Kernel, Tensor
from trtopt.report.schema.layers import LayerInfo, TensorInfo
from trtopt.roofline.node_work import PRODUCT_KINDS, GraphTypes, dequantized, work_of_node
from trtopt.roofline.onnx_layers import repeated
from trtopt.roofline.work import Work
from trtopt.support.precision import Precision

_DTYPES = {
    ir.DataType.FLOAT: "Float",
    ir.DataType.FLOAT16: "Half",
    ir.DataType.BFLOAT16: "BFloat16",
    ir.DataType.FLOAT8E4M3FN: "FP8",
    ir.DataType.FLOAT8E5M2: "FP8",
    ir.DataType.FLOAT8E8M0: "E8M0",
    ir.DataType.FLOAT4E2M1: "FP4",
    ir.DataType.UINT8: "UInt8",
}
"""The names that compilers give types, where they are not those of ONNX with a capital letter."""

_KINDS = {"gemm": "gemm", "conv": "conv", "attention": "mha"}
_FP32 = GraphTypes(Precision.FP32)


class NodeLayers:
    """Describes the nodes of a model that ran.

    Args:
        model: A model that the caller owns: its values get the types and shapes of the run. Every node has a unique
            name.
        shapes: Static shapes by value name, as far as they are known; those of the run are added.
        kernels: By node name, what ran; an operator that ran by its parts is left out.
    """

    def __init__(self, model: ir.Model, shapes: Mapping[str, tuple[int, ...]], kernels: Mapping[str, Kernel]) -> None:
        self._nodes = {str(node.name): node for node, _ in cost.nodes_with_counts(model.graph, {})}
        self._shapes = dict(shapes)
        self._kernels = kernels
        for name, kernel in kernels.items():
            values = [value for value in self._nodes[name].outputs if value.name]
            if len(values) == len(kernel.outputs):  # values that are no tensors are not listed
                for value, (text, shape) in zip(values, kernel.outputs, strict=True):
                    self._shapes[str(value.name)] = shape
                    dtype = _data_type(text)
                    value.type = value.type if dtype is None else ir.TensorType(dtype)

    def work(self, name: str, executions: int) -> Work | None:
        """What a node had to do, as it ran, in all its executions; None where its cost or a shape is not known.

        ONNX Runtime computes in FP32 what it has no FP16 kernel for, behind casts of its own, and, its fusions being
        off, what stands behind a DequantizeLinear.
        """
        node = self._nodes[name]
        given = list(node.inputs)
        for index, value in self._widened(node).items():
            node.replace_input_with(index, value)
        found = work_of_node(node, self._shapes, _FP32)
        for index, original in enumerate(given):
            node.replace_input_with(index, original)
        return None if found is None else repeated(found, executions)

    def info(self, name: str, *, runs: bool) -> LayerInfo:
        """The layer of a node.

        Args:
            name: The node.
            runs: Whether it ran.
        """
        node = self._nodes[name]
        read = [value for value in dict.fromkeys(node.inputs) if value is not None and value.name]
        constant = [value for value in read if constant_tensor_of(value) is not None]
        return LayerInfo(
            name=name,
            type=node.op_type,
            onnx_nodes=(name,),
            inputs=self._tensors(value for value in read if value not in constant),
            outputs=self._tensors(value for value in node.outputs if value.name),
            constants=self._tensors(constant),
            is_kernel=runs,
            kind=_kind(node) if runs else "none",
        )

    def _tensors(self, values: Iterable[ir.Value]) -> tuple[TensorInfo, ...]:
        return tuple(self._tensor(value) for value in values)

    def _tensor(self, value: ir.Value) -> TensorInfo:
        name = str(value.name)
        shape = self._shapes[name] if name in self._shapes else _declared(value)
        return TensorInfo(name, shape, _dtype_name(value.dtype))

    def _widened(self, node: ir.Node) -> dict[int, ir.Value]:
        """Stand-ins for the inputs that the node reads in FP32 although the graph has them in another type."""
        kernel = self._kernels.get(str(node.name))
        types = {text for text, _ in kernel.inputs} if kernel is not None else set()
        no_fp16 = "float" in types and "float16" not in types
        return {
            index: ir.Value(name=value.name, type=ir.TensorType(ir.DataType.FLOAT), shape=value.shape)
            for index, value in enumerate(node.inputs)
            if value is not None
            and (dequantized(value) is not None or (no_fp16 and value.dtype is ir.DataType.FLOAT16))
        }


def added_layer(name: str, kernel: Kernel, executions: int) -> tuple[LayerInfo, Work]:
    """A node that is not the model's: one that ONNX Runtime added, as a rule a Cast around what it computes in FP32.

    Args:
        name: A name for it.
        kernel: What ran.
        executions: How often it ran.
    """
    info = LayerInfo(
        name=name,
        type=kernel.op,
        onnx_nodes=(),
        inputs=tuple(_seen_tensor(tensor) for tensor in kernel.inputs),
        outputs=tuple(_seen_tensor(tensor) for tensor in kernel.outputs),
        kind="pointwise" if kernel.op == "Cast" else "other",
    )
    work = Work("memory", 0, _bytes(kernel.inputs), 0, _bytes(kernel.outputs), Precision.FP32)
    return info, repeated(work, executions)


def _seen_tensor(tensor: Tensor) -> TensorInfo:
    text, shape = tensor
    return TensorInfo("", shape, _dtype_name(_data_type(text)))


def _bytes(tensors: Sequence[Tensor]) -> int:
    sized = [(dtype, shape) for text, shape in tensors if (dtype := _data_type(text)) not in (None, ir.DataType.STRING)]
    return sum(math.ceil(math.prod(shape) * dtype.bitwidth / 8) for dtype, shape in sized if dtype is not None)


def _data_type(text: str) -> ir.DataType | None:
    """The type that ONNX Runtime calls ``text``."""
    return ir.DataType.__members__.get(text.upper())


def _dtype_name(dtype: ir.DataType | None) -> str:
    return "" if dtype is None else _DTYPES.get(dtype, dtype.name.capitalize())


def _declared(value: ir.Value) -> tuple[int, ...]:
    """The shape that the model gives a value, -1 where it does not say."""
    return tuple(dim if isinstance(dim, int) else -1 for dim in value.shape or ())


def _kind(node: ir.Node) -> str:
    kind = PRODUCT_KINDS.get(node.op_type) if node.domain == "" else None
    if kind is not None:
        return _KINDS.get(kind, "other")
    return "pointwise" if node.op_type in cost.POINTWISE else "other"
