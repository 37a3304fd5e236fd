"""Pieces of a graph: a match and its neighbourhood, cut out as a model of its own, and a key for equal structures."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial

import onnx_ir as ir

from trtopt.graph import edit
from trtopt.graph.edit import all_nodes, constant_tensor_of, dims_of, static_shape, subgraphs_of, values_read
from trtopt.judge.axes import open_input, shapes_of, symbols_of

_HEAVY = frozenset(
    {"Conv", "ConvTranspose", "Gemm", "MatMul", "Einsum", "LSTM", "GRU", "RNN", "Attention", "Loop", "Scan", "If"}
)
"""Operators that are a kernel of their own: what lies beyond them does not fuse with the match."""

_LIGHT_STEPS = 8
"""Neighbours without a heavy operator that a subgraph reaches over on each side."""

_MOST_NEIGHBOURS = 32
"""Where more nodes read what a neighbour gives, or it joins more tensors, these are stored, and a subgraph ends: behind
the input projection of a GRU that is written out lie all of its 64 steps, of which one compilation takes half a minute.
"""

_CONTENT_BYTES = 256
"""Constants up to this size count with their content in a structure's key; of larger ones type and shape count."""

_INTEGERS = frozenset({ir.DataType.INT64, ir.DataType.INT32, ir.DataType.BOOL})
_INTEGER_ELEMENTS = 64


class CutError(ValueError):
    """A subgraph cannot be cut out; the message says why."""


class Cutter:
    """Cuts subgraphs out of one model in the form in which it is judged (:mod:`trtopt.judge.form`).

    Args:
        model: The model; not changed, and not to be changed while the cutter is in use.
    """

    def __init__(self, model: ir.Model) -> None:
        self._model = model
        self._symbols = symbols_of(model)
        self._order = {node: index for index, node in enumerate(model.graph)}
        self._owners: dict[str, ir.Node] = {}
        self._waiting: dict[tuple[ir.Node, ir.Value], bool] = {}
        for node in model.graph:
            self._owners[str(node.name)] = node
            for graph in subgraphs_of(node):
                self._owners.update((str(inner.name), node) for inner in all_nodes(graph))

    def subgraph(self, names: Iterable[str], *, across_stored: bool = True) -> ir.Model:
        """The named nodes with their neighbourhood, as a model that shares the weights.

        Args:
            names: Names of nodes of the model; of a nested one, the node of the main graph around it is taken.
            across_stored: Whether the subgraph goes on beyond a tensor that a heavy operator reads, or that waits for
                one as a residual. Such a tensor is stored: nothing beyond it fuses with what is before it; but along
                residuals it shows more of the network, and of each of many equal blocks something else.

        Raises:
            CutError: A node is not there, or the shape of a value at the border depends on data.
        """
        chosen: set[ir.Node] = set()
        for name in names:
            if name not in self._owners:
                raise CutError(f"{name} is no node of the model as it is judged")
            chosen.add(self._owners[name])
        producers, consumers = (partial(step, across=across_stored) for step in (self._producers, self._consumers))
        chosen |= _reach(chosen, producers) | _reach(chosen, consumers)
        chosen |= self._between(chosen)
        _add_shape_arithmetic(chosen)
        return self._cut(chosen)

    def _cut(self, chosen: set[ir.Node]) -> ir.Model:
        model, nodes = self._model, sorted(chosen, key=self._order.__getitem__)
        made = {value for node in nodes for value in node.outputs}
        inputs: dict[ir.Value, None] = {}
        weights: dict[ir.Value, None] = {}
        for node in nodes:
            for value in values_read(node):
                if value.is_initializer():
                    weights[value] = None
                elif value not in made:
                    inputs[value] = None
        outputs = [v for n in nodes for v in n.outputs if v.is_graph_output() or self._is_used_outside(v, chosen)]
        for value in (*inputs, *outputs):
            if shapes_of(value) is None or value.dtype is None:
                raise CutError(f"the shape of {value.name} depends on data")
        graph = ir.GraphView(
            list(inputs),
            outputs,
            nodes=nodes,
            initializers=list(weights),
            opset_imports=dict(model.graph.opset_imports),
            name=model.graph.name,
        ).clone()
        for copy, value in zip(graph.inputs, inputs, strict=True):
            open_input(copy, value, self._symbols)
        return ir.Model(graph, ir_version=model.ir_version)

    def _producers(self, node: ir.Node, is_start: bool, across: bool = True) -> list[ir.Node]:
        values = values_read(node)
        if not is_start and len(values) > _MOST_NEIGHBOURS:
            return []
        if not (is_start or across):
            values = [value for value in values if not (_heavy_readers(value) or self._waits(node, value))]
        found = (value.producer() for value in values)
        return [producer for producer in found if producer is not None and producer.graph is node.graph]

    def _consumers(self, node: ir.Node, is_start: bool, across: bool = True) -> list[ir.Node]:
        found: list[ir.Node] = []
        if not is_start and sum(len(value.uses()) for value in node.outputs) > _MOST_NEIGHBOURS:
            return found
        for value in node.outputs:
            users = [user for user, _ in value.uses()]
            if not (is_start or across):
                users = _heavy_readers(value) or [user for user in users if not self._waits(user, value)]
            found += users
        return [self._owners[str(user.name)] for user in found]

    def _waits(self, reader: ir.Node, value: ir.Value) -> bool:
        """Whether a value waits for a heavy operator that computes another input of its reader from it: a residual."""
        if (reader, value) not in self._waiting:
            is_shared = value.producer() is not None and len(value.uses()) > 1
            self._waiting[reader, value] = is_shared and self._is_residual(reader, value)
        return self._waiting[reader, value]

    def _is_residual(self, reader: ir.Node, value: ir.Value) -> bool:
        first = self._order.get(value.producer(), -1)  # type: ignore[arg-type]
        stack, seen = [(reader, False)], {(reader, False)}
        while stack:
            node, is_behind = stack.pop()
            for read in values_read(node):
                if read is value and is_behind:
                    return True
                producer = read.producer()
                if producer is not None and self._order.get(producer, -1) > first:
                    following = (producer, is_behind or producer.op_type in _HEAVY)
                    if following not in seen:
                        seen.add(following)
                        stack.append(following)
        return False

    def _between(self, chosen: set[ir.Node]) -> set[ir.Node]:
        """Nodes on paths without a heavy operator from one chosen node to another, such as the Softmax of an attention:
        without them its products would not be one kernel."""
        behind = _light(chosen, lambda node: self._consumers(node, True))
        return behind & _light(chosen, lambda node: self._producers(node, True))

    def _is_used_outside(self, value: ir.Value, chosen: set[ir.Node]) -> bool:
        return any(self._owners[str(user.name)] not in chosen for user, _ in value.uses())


def structure_key(model: ir.Model) -> str:
    """A hash that models of equal structure share: names do not count, nor the content of large constants."""
    return _structure(model, ranges=True)


def _structure(model: ir.Model, *, ranges: bool) -> str:
    digest = hashlib.sha256(f"{sorted(model.graph.opset_imports.items())}\n".encode())
    for text in _describe(model.graph, {}, ranges):
        digest.update(text.encode())
        digest.update(b"\n")
    return digest.hexdigest()


def named_key(model: ir.Model) -> str:
    """A hash that models of equal structure and equal names share, whatever their open axes may be."""
    names = [[value.name for value in (*model.graph.inputs, *model.graph.initializers.values())]]
    names += [[node.name, *(value.name for value in node.outputs)] for node in all_nodes(model.graph)]
    return hashlib.sha256(f"{_structure(model, ranges=False)} {names}".encode()).hexdigest()


def _describe(graph: ir.Graph, numbers: dict[ir.Value, int], ranges: bool) -> Iterator[str]:
    def number(value: ir.Value | None) -> str:
        if value is None:
            return "-"
        tensor = constant_tensor_of(value)
        if tensor is not None:
            content = tensor.tobytes().hex() if tensor.nbytes <= _CONTENT_BYTES else ""
            shared = numbers.setdefault(value, len(numbers))
            return f"#{shared}{tensor.dtype}{dims_of(tensor)}{content}"
        return str(numbers.setdefault(value, len(numbers)))

    for value in graph.inputs:
        yield f"in {number(value)} {value.dtype} {value.shape} {shapes_of(value) if ranges else ''}"
    for node in graph:
        attributes = sorted(_attribute_text(attribute) for attribute in node.attributes.values())
        yield f"{node.domain}.{node.op_type} {[number(value) for value in node.inputs]} {attributes}"
        for nested in subgraphs_of(node):
            yield from _describe(nested, numbers, ranges)
        yield " ".join(f"{number(value)}:{value.dtype}{value.shape}" for value in node.outputs)
    yield f"out {[number(value) for value in graph.outputs]}"


def _attribute_text(attribute: ir.Attr) -> str:
    if attribute.is_ref() or attribute.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS):
        return f"{attribute.name}"
    if attribute.type == ir.AttributeType.TENSOR:
        tensor = attribute.as_tensor()
        content = tensor.tobytes().hex() if tensor.nbytes <= _CONTENT_BYTES else ""
        return f"{attribute.name}={tensor.dtype}{dims_of(tensor)}{content}"
    return f"{attribute.name}={attribute.value}"


def _heavy_readers(value: ir.Value) -> list[ir.Node]:
    return [user for user, _ in value.uses() if user.op_type in _HEAVY]


def _reach(start: set[ir.Node], step: Callable[[ir.Node, bool], list[ir.Node]]) -> set[ir.Node]:
    """Nodes reached from ``start`` in one direction, up to and with the next heavy operator."""
    found: set[ir.Node] = set()
    front = list(start)
    for _ in range(_LIGHT_STEPS):
        following: list[ir.Node] = []
        for node in front:
            for other in step(node, node in start):
                if other in start or other in found:
                    continue
                found.add(other)
                if other.op_type not in _HEAVY:
                    following.append(other)
        front = following
    return found


def _light(start: set[ir.Node], step: Callable[[ir.Node], list[ir.Node]]) -> set[ir.Node]:
    """Nodes outside ``start`` reached from it in one direction, up to the next heavy operator."""
    found: set[ir.Node] = set()
    stack = list(start)
    while stack:
        new = {other for other in step(stack.pop()) if other.op_type not in _HEAVY} - start - found
        found |= new
        stack += new
    return found


def _add_shape_arithmetic(chosen: set[ir.Node]) -> None:
    """Add the producers of small integers (shapes, axes): as inputs of a subgraph they would hide sizes."""
    stack = list(chosen)
    while stack:
        node = stack.pop()
        for value in values_read(node):
            producer, shape = value.producer(), static_shape(value)
            if (
                producer is None
                or producer in chosen
                or producer.graph is not node.graph
                or value.dtype not in _INTEGERS
            ):
                continue
            if shape is not None and math.prod(shape) <= _INTEGER_ELEMENTS:
                chosen.add(producer)
                stack.append(producer)


def additions(model: ir.Model) -> dict[str, tuple[str, ...]]:
    """The additions of two computed tensors, by the tensors they read."""
    found: dict[str, tuple[str, ...]] = {}
    for node in model.graph:
        values = [value for value in node.inputs if value is not None and edit.constant_tensor_of(value) is None]
        if node.op_type == "Add" and len({value.name for value in values}) == 2:
            for value in values:
                found[str(value.name)] = (*found.get(str(value.name), ()), str(node.name))
    return found


def between(model: ir.Model, first: Collection[str], last: Collection[str]) -> tuple[str, ...]:
    """Names of the nodes on the ways from ``first`` to ``last``, these among them, in graph order.

    In a subgraph that is cut between two of its nodes the compiler computes in one kernel what in the network waits
    for the product between them: of a residual around attention, it joins the normalizations before and behind it.
    """
    after: set[ir.Node] = set()
    for node in model.graph:
        if node.name in first or any(value is not None and value.producer() in after for value in node.inputs):
            after.add(node)
    before: set[ir.Node] = set()
    for node in reversed(model.graph):
        if node.name in last or any(user in before for value in node.outputs for user, _ in value.uses()):
            before.add(node)
    return tuple(str(node.name) for node in model.graph if node in after and node in before)
