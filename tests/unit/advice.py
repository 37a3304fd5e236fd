"""Networks for the rules, and what the rules say about them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from trtopt.analysis.advice import int8_times
from trtopt.graph.shapes import infer_shapes, static_shapes
from trtopt.hardware.spec import find_gpu
from trtopt.report.schema.analysis import Finding
from trtopt.roofline.layer import predict
from trtopt.roofline.node_work import GraphTypes
from trtopt.roofline.onnx_layers import FusedModel
from trtopt.roofline.rules.registry import advise
from trtopt.roofline.rules.subject import Subject
from trtopt.support.precision import Precision


class Net:
    """A network that is written down operator by operator; weights are zero, since only sizes matter."""

    def __init__(self) -> None:
        self._nodes: list[onnx.NodeProto] = []
        self._weights: list[onnx.TensorProto] = []
        self._inputs: list[onnx.ValueInfoProto] = []
        self._outputs: list[onnx.ValueInfoProto] = []

    def input(self, name: str, *shape: int, dtype: int = onnx.TensorProto.FLOAT) -> str:
        """A network input."""
        self._inputs.append(onnx.helper.make_tensor_value_info(name, dtype, shape))
        return name

    def weight(self, *shape: int, dtype: type = np.float32) -> str:
        """A constant."""
        name = f"w{len(self._weights)}"
        self._weights.append(onnx.numpy_helper.from_array(np.zeros(shape, dtype), name))
        return name

    def ints(self, *values: int) -> str:
        """A constant of int64, for shapes and axes."""
        name = f"w{len(self._weights)}"
        self._weights.append(onnx.numpy_helper.from_array(np.array(values, np.int64), name))
        return name

    def op(self, op_type: str, *inputs: str, name: str = "", outputs: int = 1, **attributes: Any) -> str:
        """A node; returns its first output, which is named after it."""
        name = name or f"{op_type.lower()}{len(self._nodes)}"
        names = [name, *(f"{name}_{index}" for index in range(1, outputs))]
        self._nodes.append(onnx.helper.make_node(op_type, inputs, names, name=name, **attributes))
        return name

    def conv(self, x: str, c: int, k: int, *, kernel: int = 3, stride: int = 1, group: int = 1, name: str = "") -> str:
        """A convolution of ``c`` to ``k`` channels that keeps the size of the map at stride 1."""
        weight = self.weight(k, c // group, kernel, kernel)
        pads = [kernel // 2] * 4
        return self.op("Conv", x, weight, name=name, strides=[stride] * 2, pads=pads, group=group)

    def linear(self, x: str, k: int, n: int, *, name: str = "") -> str:
        """A product with a weight."""
        return self.op("MatMul", x, self.weight(k, n), name=name)

    def output(self, *names: str) -> Net:
        """Let values leave the network."""
        self._outputs += [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in names]
        return self

    def model(self) -> ir.Model:
        """The network, with the types of its values."""
        graph = onnx.helper.make_graph(self._nodes, "net", self._inputs, self._outputs, self._weights)
        proto = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=9)
        return infer_shapes(ir.from_proto(proto))


def subject_of(
    net: Net,
    gpu: str = "A100",
    base: Precision = Precision.FP16,
    *,
    quantized: Sequence[str] = (),
    batch: int | None = None,
) -> Subject:
    """The network as the rules see it."""
    model = net.model()
    shapes = static_shapes(model, {})
    types = GraphTypes(Precision(base), frozenset(quantized))
    fused = FusedModel(model, shapes, types)
    layers = fused.layers()
    spec = find_gpu(gpu)
    rows, _ = predict(layers, spec)
    return Subject(model, shapes, layers, rows, spec, batch, int8_times(fused, spec))


def findings(
    rule: str,
    net: Net,
    gpu: str = "A100",
    base: Precision = Precision.FP16,
    *,
    quantized: Sequence[str] = (),
    batch: int | None = None,
) -> list[Finding]:
    """What one rule finds in a network."""
    return [item for item in advise(subject_of(net, gpu, base, quantized=quantized, batch=batch)) if item.rule == rule]
