"""A graph in two: what the compiler runs, and the end of the model that it refuses, which the host runs."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

import onnx_ir as ir

from trtopt.engine.unsupported import is_size
from trtopt.graph.edit import all_nodes, constant_tensor_of, input_of, static_shape, subgraphs_of, values_read

_LAYERS = frozenset(
    """
    Attention CausalConvWithState Conv ConvInteger ConvTranspose DeformConv FlexAttention GRU LSTM LinearAttention
    MultiHeadAttention QLinearConv RNN
    """.split()
)
_PRODUCTS = frozenset({"Einsum", "Gemm", "MatMul", "MatMulInteger", "QLinearMatMul"})

_SMALL_MATRIX = 256
"""Elements of a constant factor up to which a product is a change of coordinates (boxes times a 4x4 matrix), no layer
of the network."""

_MOVES = frozenset(
    """
    Cast Concat Constant ConstantOfShape Expand Flatten Gather GatherElements GatherND Identity Reshape Shape Size Slice
    Split Squeeze Tile Transpose Unsqueeze
    """.split()
)
"""Operators that compute nothing: on which side they run is decided by the bytes that pass between the parts."""

_COMPARISONS = frozenset({"Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"})
"""Likewise, with a constant: the scores that pass say which of them are above a threshold."""

_SHAPE_ARITHMETIC = _MOVES | {
    *("Add", "Div", "Equal", "Greater", "Less", "Max", "Min", "Mod", "Mul", "Range", "ReduceProd", "Sub", "Where")
}
_INTEGERS = (ir.DataType.INT64, ir.DataType.INT32, ir.DataType.BOOL)

_MOST_SOURCES = 100
"""Tensors at which a cut is tried: each try looks at the whole tail."""

_RANDOM_SIZE = frozenset({"Compress", "NonMaxSuppression", "NonZero", "Unique"})
_SIZED_BY = {"ConstantOfShape": 0, "Expand": 1, "Range": 1, "Slice": 2, "Tile": 1, "TopK": 1}
"""Operators that have results of the size that an input says, and which."""


class NoTailError(ValueError):
    """The refused nodes are not the end of the model.

    Attributes:
        node: The refused node of the main graph.
        layer: The layer that needs it; None when nothing would be left for the compiler.
    """

    def __init__(self, node: ir.Node, layer: ir.Node | None) -> None:
        super().__init__(f"node {node.name} is not in the tail")
        self.node = node
        self.layer = layer


@dataclass(frozen=True)
class Parts:
    """A model in two parts, to be run one after the other.

    Attributes:
        engine: What the compiler gets. Its outputs: those of the whole that do not need the host, then ``between``.
        host: The rest. Its inputs: ``between``, then the inputs of the whole it needs itself.
        between: Names of the tensors passed from ``engine`` to ``host``.
    """

    engine: ir.Model
    host: ir.Model
    between: tuple[str, ...]


def split(model: ir.Model, refused: Collection[ir.Node], shapes: Mapping[str, tuple[int, ...]]) -> Parts | None:
    """Cut off the end of a model: refused nodes and all that depends on them.

    Nodes before the refused ones stay with the compiler, but for those that only move data and whose move lowers the
    bytes that pass. Shape arithmetic that starts at tensors the host has anyway is in both parts.

    Args:
        refused: Nodes of the main graph of ``model``, which is sorted and not changed.
        shapes: Static shapes by value name, as far as known.

    Returns:
        None when no output needs a refused node.

    Raises:
        NoTailError: A layer of the network needs a refused node, or nothing would be left for the compiler.
    """
    cut = _Cut(model, shapes)
    blamed = cut.tail_of(refused)
    if not blamed:
        return None
    for node, cause in blamed.items():
        if cut.is_layer(node):
            raise NoTailError(cause, node)
    tail = set(blamed)
    if not any(node not in tail and node.op_type not in _MOVES for node in cut.live):
        raise NoTailError(next(iter(blamed.values())), None)
    cut.move_cheap(tail)
    return cut.parts(tail)


def sizes_vary(model: ir.Model) -> tuple[str, ...]:
    """Names of the outputs whose shape may depend on the values: they need a node such as NonMaxSuppression, or TopK of
    as many as are above a threshold."""
    cut = _Cut(model, {})
    tail = cut.tail_of({node for node in model.graph if any(_varies_in_size(inner) for inner in inner_nodes(node))})
    return tuple(str(value.name) for value in model.graph.outputs if value.producer() in tail)


def _varies_in_size(node: ir.Node) -> bool:
    sized_by = _SIZED_BY.get(node.op_type)
    return node.op_type in _RANDOM_SIZE or (sized_by is not None and not is_size(input_of(node, sized_by)))


def inner_nodes(node: ir.Node) -> Iterator[ir.Node]:
    """``node`` and the nodes of the graphs nested in it."""
    yield node
    for graph in subgraphs_of(node):
        yield from all_nodes(graph)


class _Cut:
    """What is asked of one model while it is cut."""

    def __init__(self, model: ir.Model, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._model = model
        self._shapes = shapes
        self._reads = {node: dict.fromkeys(values_read(node)) for node in model.graph}
        self._readers: dict[ir.Value, list[ir.Node]] = {}
        for node, values in self._reads.items():
            for value in values:
                self._readers.setdefault(value, []).append(node)
        self._outputs = {value for value in model.graph.outputs if value is not None}
        self.live = self._needed_for(model.graph.outputs)
        self._varies = set(model.graph.inputs)
        for node, values in self._reads.items():
            if any(value in self._varies for value in values):
                self._varies.update(node.outputs)

    def _needed_for(self, values: Iterable[ir.Value]) -> dict[ir.Node, None]:
        """The nodes that compute ``values``, in graph order."""
        found: set[ir.Node] = set()
        waiting = [value.producer() for value in values]
        while waiting:
            node = waiting.pop()
            if node is not None and node not in found:
                found.add(node)
                waiting.extend(value.producer() for value in self._reads[node])
        return {node: None for node in self._reads if node in found}

    def tail_of(self, refused: Collection[ir.Node]) -> dict[ir.Node, ir.Node]:
        """The refused nodes and all behind them, in graph order, each with the refused node it depends on."""
        tail: dict[ir.Node, ir.Node] = {}
        for node in self.live:
            before = (value.producer() for value in self._reads[node])
            cause = next((tail[other] for other in before if other is not None and other in tail), None)
            if node in refused or cause is not None:
                tail[node] = cause or node
        return tail

    def is_layer(self, node: ir.Node) -> bool:
        """Whether a node is, or holds, a layer of the network: work that belongs on the GPU."""
        for inner in inner_nodes(node):
            if inner.op_type in _LAYERS:
                return True
            if inner.op_type in _PRODUCTS and any(self._is_weight(value) for value in inner.inputs):
                return True
        return False

    def _is_weight(self, value: ir.Value | None) -> bool:
        if value is None or value in self._varies or (value.producer() is None and not value.is_initializer()):
            return False
        producer = value.producer()
        if producer is not None and producer.graph is not self._model.graph and constant_tensor_of(value) is None:
            return False
        shape = static_shape(value)
        return shape is None or math.prod(shape) > _SMALL_MATRIX

    def move_cheap(self, tail: set[ir.Node]) -> None:
        """Move nodes that compute nothing into ``tail`` where fewer bytes pass then, or as many in fewer tensors.

        Tried are, for tensors that such nodes read, all of them behind it.
        """
        movable = self._movable(tail)
        nodes = (node for node in reversed(self.live) if node in movable)
        read = dict.fromkeys(value for node in nodes for value in self._reads[node] if self._passes(value))
        sources = sorted(read, key=lambda value: value.producer() in movable)[:_MOST_SOURCES]
        cost = self._cost(tail)
        while True:
            moves = [move for source in sources if (move := self._behind(source, movable) - tail)]
            tried = [(self._cost(tail | move), len(move), move) for move in moves]
            best = min(tried, key=lambda item: item[:2], default=None)
            if best is None or not best[0] < cost:
                return
            cost = best[0]
            tail |= best[2]

    def _movable(self, tail: Collection[ir.Node]) -> set[ir.Node]:
        """The nodes that compute nothing and that only ``tail`` or other such nodes read."""
        found: set[ir.Node] = set()
        for node in reversed(self.live):
            readers = [
                reader for value in node.outputs for reader in self._readers.get(value, ()) if reader in self.live
            ]
            if (
                node not in tail
                and node.domain == ""
                and (node.op_type in _MOVES or self._compares_with_constant(node))
                and all(reader in tail or reader in found for reader in readers)
                and self._outputs.isdisjoint(node.outputs)
            ):
                found.add(node)
        return found

    def _compares_with_constant(self, node: ir.Node) -> bool:
        return node.op_type in _COMPARISONS and any(value not in self._varies for value in node.inputs)

    def _behind(self, source: ir.Value, movable: Collection[ir.Node]) -> set[ir.Node]:
        found: set[ir.Node] = set()
        waiting = list(self._readers[source])
        while waiting:
            node = waiting.pop()
            if node in movable and node not in found:
                found.add(node)
                waiting.extend(reader for value in node.outputs for reader in self._readers.get(value, ()))
        return found

    def _cost(self, tail: Collection[ir.Node]) -> tuple[float, int]:
        """Bytes that pass, and in how many tensors."""
        border = {value for node in tail for value in self._reads[node] if self._passes(value)}
        passed = [value for value in border if value.producer() not in tail]
        return sum(self._bytes(value) for value in passed), len(passed)

    def _bytes(self, value: ir.Value) -> float:
        shape = self._shapes.get(str(value.name), static_shape(value))
        return math.inf if shape is None or value.dtype is None else math.prod(shape) * value.dtype.itemsize

    def _passes(self, value: ir.Value) -> bool:
        return value.producer() is not None and constant_tensor_of(value) is None

    def _border(self, tail: Collection[ir.Node]) -> dict[ir.Value, None]:
        """Values that pass from the engine to ``tail``, in graph order."""
        return {
            value: None
            for node in self.live
            if node in tail
            for value in self._reads[node]
            if self._passes(value) and value.producer() not in tail
        }

    def parts(self, tail: set[ir.Node]) -> Parts:
        """The two models."""
        graph = self._model.graph
        host = tail | self._copied(tail)
        between = list(self._border(host))
        host_outputs = [value for value in graph.outputs if value.producer() in tail]
        own_outputs = [value for value in graph.outputs if value.producer() not in tail]
        engine_outputs = [*own_outputs, *(value for value in between if value not in self._outputs)]
        engine = set(self._needed_for(engine_outputs))
        host_reads = {value for node in host for value in self._reads[node]}
        engine_reads = {value for node in engine for value in self._reads[node]} | set(engine_outputs)
        engine_inputs = [value for value in graph.inputs if value in engine_reads or value not in host_reads]
        host_inputs = [value for value in graph.inputs if value in host_reads]
        return Parts(
            self._part(engine, engine_inputs, engine_outputs),
            self._part(host, [*between, *host_inputs], host_outputs),
            tuple(str(value.name) for value in between),
        )

    def _copied(self, tail: Collection[ir.Node]) -> set[ir.Node]:
        """Nodes outside of ``tail`` that the host computes itself: constants, and shapes of what it has anyway."""
        border = self._border(tail)
        large = {value for value in border if value.dtype not in _INTEGERS} | set(self._model.graph.inputs)
        nodes = {
            producer
            for node in tail
            for value in self._reads[node]
            if (producer := value.producer()) is not None and producer not in tail and producer.op_type == "Constant"
        }
        for value in border:
            if value not in self._varies:
                nodes |= self._needed_for([value]).keys()
            elif value.dtype in _INTEGERS:
                nodes |= self._shape_arithmetic(value, large) or set()
        return nodes

    def _shape_arithmetic(self, value: ir.Value, known: Collection[ir.Value]) -> set[ir.Node] | None:
        """The nodes that compute ``value`` from shapes of ``known`` and constants; None where more is needed."""
        found: set[ir.Node] = set()
        waiting = [value]
        while waiting:
            current = waiting.pop()
            node = current.producer()
            if node is None:
                if not current.is_initializer():
                    return None
            elif node.domain != "" or node.op_type not in _SHAPE_ARITHMETIC:
                return None
            elif node not in found:
                found.add(node)
                if node.op_type not in ("Shape", "Size"):
                    waiting.extend(self._reads[node])
                elif node.inputs[0] not in known:
                    return None
        return found

    def _part(self, nodes: Collection[ir.Node], inputs: list[ir.Value], outputs: list[ir.Value]) -> ir.Model:
        graph = self._model.graph
        ordered = [node for node in self._reads if node in nodes]
        domains = {inner.domain for node in ordered for inner in inner_nodes(node)} | {""}
        read = dict.fromkeys(value for node in ordered for value in self._reads[node]) | dict.fromkeys(outputs)
        part = ir.GraphView(
            inputs,
            outputs,
            nodes=ordered,
            initializers=[value for value in read if value.is_initializer()],
            opset_imports={domain: graph.opset_imports[domain] for domain in graph.opset_imports if domain in domains},
            name=graph.name,
        ).clone()
        return ir.Model(part, ir_version=self._model.ir_version, producer_name=self._model.producer_name)
