"""What a rule looks at, and what it says."""

from __future__ import annotations

import collections
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import onnx_ir as ir

from trtopt.graph.edit import all_nodes, constant_tensor_of, input_of, maker_of
from trtopt.graph.products import Shapes
from trtopt.hardware.spec import GpuSpec
from trtopt.report.schema.analysis import LayerRow, Severity
from trtopt.roofline.constants import constants_for
from trtopt.roofline.layer import layer_times
from trtopt.roofline.work import Layer, Work

POINTWISE = frozenset(
    {
        "Abs", "Add", "Cast", "Clip", "Div", "Dropout", "Elu", "Erf", "Gelu", "HardSigmoid", "HardSwish", "Identity",
        "LeakyRelu", "Mul", "Neg", "Pow", "PRelu", "Relu", "Sigmoid", "Softplus", "Sqrt", "Sub", "Tanh", "Where",
        "QuantizeLinear", "DequantizeLinear", "BatchNormalization",
    }
)  # fmt: skip
"""Operators of one element each, which keep the shape and order of their data."""

_UNKNOWN = 0.1
"""Share of layers without a cost from which on nothing is said about the whole network."""

_LONGEST_CHAIN = 12
"""Nodes a walk along pointwise operators takes at the most, so that a rule stays linear in the graph."""


@dataclass(frozen=True)
class Proposal:
    """What a rule found, with one cause and one remedy.

    Attributes:
        severity: As in a finding; one without gain becomes a hint unless it is information.
        message: What is so, with the figures.
        remedy: What to change.
        nodes: ONNX nodes, or layers where there are none.
        gains: Predicted microseconds won by layer name: a layer counts once in the sum.
        act: What to type, where it is not that of the rule (:data:`trtopt.roofline.rules.registry.ACTS`).
    """

    severity: Severity
    message: str
    remedy: str
    nodes: tuple[str, ...]
    gains: Mapping[str, float] = field(default_factory=dict)
    act: tuple[str, ...] = ()


@dataclass(frozen=True)
class Subject:
    """A network on a GPU, as the rules see it.

    Attributes:
        model: The ONNX model.
        shapes: Static shapes by value name.
        layers: The layers of the ONNX level, in execution order; names are unique.
        rows: The predictions of those layers whose cost is known.
        gpu: The GPU.
        batch: The size of the first axis that the inputs share; None when there is none.
        int8_us: Where it is in 16 bits, the layers of the same network in INT8, by name: their predicted microseconds.
    """

    model: ir.Model
    shapes: Shapes
    layers: tuple[Layer, ...]
    rows: tuple[LayerRow, ...]
    gpu: GpuSpec
    batch: int | None = None
    int8_us: Mapping[str, float] = field(default_factory=dict)
    _times: dict[Work, float] = field(default_factory=dict, init=False, repr=False, compare=False)

    def predict(self, work: Work) -> float:
        """Microseconds of a kernel on this GPU; remembered, since networks repeat their layers."""
        us = self._times.get(work)
        return self.predict_all((work,))[0] if us is None else us

    def predict_all(self, works: Sequence[Work]) -> list[float]:
        """Microseconds of many kernels: predicted together, which is many times as fast as one by one."""
        missing = [work for work in dict.fromkeys(works) if work not in self._times]
        times = layer_times(missing, self.gpu, constants_for(self.gpu))
        self._times.update((work, time.predicted_us) for work, time in zip(missing, times, strict=True))
        return [self._times[work] for work in works]

    def gain(self, layer: Layer, *instead: Work) -> float:
        """Microseconds won when kernels with other work take the place of a layer; 0 when it would lose."""
        if layer.work is None:
            return 0.0
        return max(0.0, self.predict(layer.work) - sum(self.predict(work) for work in instead))

    @functools.cached_property
    def row(self) -> dict[str, LayerRow]:
        """The predictions by layer name."""
        return {row.name: row for row in self.rows}

    @functools.cached_property
    def node(self) -> dict[str, ir.Node]:
        """The nodes by name, those of nested graphs included."""
        return {str(node.name): node for node in all_nodes(self.model.graph)}

    @functools.cached_property
    def layer_of(self) -> dict[str, Layer]:
        """The layer that computes a node, by node name."""
        return {name: layer for layer in self.layers for name in layer.onnx_nodes}

    @functools.cached_property
    def distinct(self) -> dict[Work, int]:
        """How many layers have the same work."""
        return dict(collections.Counter(work for _, work in self.costed()))

    @functools.cached_property
    def is_partial(self) -> bool:
        """Whether so many layers have no cost that shares of the whole cannot be said."""
        unknown = sum(1 for layer in self.layers if layer.work is None)
        return unknown > _UNKNOWN * len(self.layers)

    @functools.cached_property
    def total_us(self) -> float:
        """The predicted time of all layers."""
        return sum(row.predicted_us for row in self.rows)

    def main(self, layer: Layer) -> ir.Node | None:
        """The node of a layer that does its work: the one with the layer's operator, else its first."""
        return self._mains.get(layer.name)

    @functools.cached_property
    def _mains(self) -> dict[str, ir.Node]:
        found = {}
        for layer in self.layers:
            nodes = [self.node[name] for name in layer.onnx_nodes if name in self.node]
            if nodes:
                found[layer.name] = next((node for node in nodes if node.op_type == layer.op), nodes[0])
        return found

    def names(self, layers: Iterable[Layer]) -> tuple[str, ...]:
        """The node that does the work of each layer, or the layer's name where it has no nodes; each once."""
        return tuple(
            dict.fromkeys(
                str(self._mains[item.name].name) if item.name in self._mains else item.name for item in layers
            )
        )

    def costed(self) -> Iterator[tuple[Layer, Work]]:
        """The layers whose work is known."""
        return ((layer, layer.work) for layer in self.layers if layer.work is not None)

    def products(self) -> Iterator[tuple[Layer, Work]]:
        """The matrix products and convolutions with weights of their own; no depthwise and no transposed ones."""
        for layer, work in self.costed():
            transposed = work.window is not None and work.window.transposed
            if work.kind in ("gemm", "conv") and work.gemm is not None and work.weight_bytes > 0 and not transposed:
                yield layer, work

    def shape(self, value: ir.Value | None) -> tuple[int, ...] | None:
        """The shape of a value, None where it is not known."""
        return None if value is None else self.shapes.get(str(value.name))

    def us(self, layers: Iterable[Layer]) -> dict[str, float]:
        """The predicted time of layers by name."""
        return {layer.name: self.row[layer.name].predicted_us for layer in layers if layer.name in self.row}


def source(value: ir.Value | None, through: frozenset[str] = POINTWISE) -> ir.Value | None:
    """Where data comes from: back over nodes of ``through``, along the first input that is no constant."""
    for _ in range(_LONGEST_CHAIN):
        node = maker_of(value)
        if node is None or node.domain != "" or node.op_type not in through:
            return value
        value = next((item for item in node.inputs if item is not None and constant_tensor_of(item) is None), None)
    return value


def sinks(value: ir.Value, through: frozenset[str] = POINTWISE) -> tuple[list[ir.Node], bool]:
    """The nodes that read a value, directly or over nodes of ``through``, and whether it leaves the network so."""
    found: list[ir.Node] = []
    leaves = False
    waiting, seen = [value], {value}
    while waiting and len(seen) <= _LONGEST_CHAIN:
        item = waiting.pop()
        leaves = leaves or item.is_graph_output()
        for node in dict.fromkeys(node for node, _ in item.uses()):
            if node.domain == "" and node.op_type in through:
                fresh = [output for output in node.outputs if output not in seen]
                waiting += fresh
                seen.update(fresh)
            else:
                found.append(node)
    return found, leaves


def interleaved(subject: Subject, name: str) -> tuple[str, ...]:
    """What to type to feed the image that a convolution reads interleaved, in 16 bits."""
    node = subject.node[name]
    origin = source(input_of(node, 0), POINTWISE | {"Pad"})
    shape = subject.shape(origin)
    layout = "hwc4" if shape is not None and len(shape) == 4 and shape[1] <= 4 else "hwc8"
    if origin is None or not origin.is_graph_input():
        return ("needs a new export",)
    return ("build", "--io", f"{origin.name}:fp16:{layout}")


def reads_network_input(node: ir.Node, through: frozenset[str] = POINTWISE) -> bool:
    """Whether the data a node works on is a network input, perhaps scaled or cast."""
    origin = source(input_of(node, 0), through)
    return origin is not None and origin.is_graph_input()
