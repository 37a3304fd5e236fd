"""What flows between the kernels of a graph: operators that launch nothing are looked through.

Reshapes, slices read in place, transposes a matrix product takes in and DequantizeLinear are views: the kernel that
reads one reads the tensor behind it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator

import onnx_ir as ir

from trtopt.graph import cost
from trtopt.graph.edit import captured, constant_tensor_of, is_op
from trtopt.graph.products import Shapes, products_of
from trtopt.roofline.node_work import (
    READ_AS_WRITTEN,
    GraphTypes,
    dequantized,
    quantized_inputs,
    read,
    written,
)
from trtopt.support.precision import ELEMENT_BYTES, Precision

GEMM_OPS = ("MatMul", "Gemm", "Attention", "Einsum")
"""Matrix products whose kernels read and write their operands transposed at no cost."""

_LONGEST_EPILOGUE = 8
"""How far up a chain of element-wise operators a transpose looks for the product that writes it."""

POINTWISE = cost.POINTWISE | {"BatchNormalization", "Cast", "CastLike", "Max", "Mean", "Min", "Sum"}
"""Operators that compute each output element from the input elements at its place."""

_NEVER_CONSTANT = cost.RANDOM | cost.CONTROL_FLOW


class Flow:
    """One graph (without those nested in it) as kernels and the tensors between them.

    Attributes:
        shapes: Static shapes by value name.
        precision: The types it runs in.
        nodes: The nodes that are no views and no constants, in topological order.
        free: Those of ``nodes`` that launch no kernel of their own: shape arithmetic on the host, and control flow.
        position: The place of each of ``nodes``.
        users: For each tensor, the nodes that read it, itself or through views, in order.
        kept: Tensors that have to be there at the end.
    """

    def __init__(self, graph: ir.Graph, shapes: Shapes, precision: GraphTypes) -> None:
        self.shapes = shapes
        self.precision = precision
        self.nodes: list[ir.Node] = []
        self.free: set[ir.Node] = set()
        self.users: dict[ir.Value, list[ir.Node]] = {}
        self.kept: set[ir.Value] = set()
        self._behind: dict[ir.Value, ir.Value] = {}
        self._known: dict[ir.Value, bool] = {}
        self._inputs: dict[ir.Node, list[ir.Value]] = {}
        self._quantized: dict[ir.Node, Precision | None] = {}
        for node in graph:
            self._add(node)
        self.position = {node: index for index, node in enumerate(self.nodes)}
        self.kept.update(self.behind(value) for value in graph.outputs)

    def in_types(self, precision: GraphTypes) -> Flow:
        """The same flow in other types."""
        other = copy.copy(self)
        other.precision, other._quantized = precision, {}
        return other

    def behind(self, value: ir.Value) -> ir.Value:
        """The tensor a view shows; the value itself when it is none."""
        return self._behind.get(value, value)

    def is_constant(self, value: ir.Value) -> bool:
        """Whether a value is known when the engine is built."""
        found = self._known.get(value)
        if found is None:
            found = self._known[value] = constant_tensor_of(value) is not None
        return found

    def inputs(self, node: ir.Node) -> list[ir.Value]:
        """The distinct tensors a node reads that are not constant, behind their views; and what nested graphs read."""
        found = self._inputs.get(node)
        if found is None:
            values = [*read(node), *captured(node)]
            found = list(dict.fromkeys(self.behind(value) for value in values if not self.is_constant(value)))
            self._inputs[node] = found
        return found

    def elements(self, value: ir.Value) -> int | None:
        """Elements of a value; None when its shape is not known, or it cannot be on a GPU (strings)."""
        if value.dtype == ir.DataType.STRING:
            return None
        shape = self.shapes.get(str(value.name))
        return None if shape is None else math.prod(shape)

    def quantized(self, node: ir.Node) -> Precision | None:
        """The type a product's operands are quantized to; None when they are not, or it is no product."""
        if node not in self._quantized:
            self._quantized[node] = quantized_inputs(node, self.precision)
        return self._quantized[node]

    def read_bytes(self, node: ir.Node, value: ir.Value) -> int | None:
        """Bytes of ``value`` that ``node`` reads: a view costs what it shows, at the type of the tensor behind it."""
        elements = self.elements(value)
        if elements is None:
            return None
        source = self.behind(value)
        if self.is_constant(value):
            source = dequantized(value) or value
        per_element = self.precision.element_bytes(source)
        narrow = self.quantized(node)
        if narrow is not None and any(value is item for item in node.inputs[:2]):
            per_element = min(per_element, ELEMENT_BYTES[narrow])
        if node.inputs[0] is value and node.op_type in READ_AS_WRITTEN:
            elements = min(elements, sum(self.elements(item) or 0 for item in written(node)))
        shown = self.elements(source)
        return math.ceil(min(elements, elements if shown is None else shown) * per_element)

    def write_bytes(self, value: ir.Value) -> int | None:
        """Bytes of a tensor as written for its users: quantized for products that read it so, once more in its own
        type where others read it."""
        elements = self.elements(value)
        if elements is None:
            return None
        per_element = self.precision.element_bytes(value)
        narrow = {self._narrow_use(node, value) for node in self.users.get(value, ())}
        sizes = {ELEMENT_BYTES[item] for item in narrow if item is not None}
        if None in narrow or not narrow or value in self.kept:
            sizes.add(per_element)
        return math.ceil(elements * sum(size for size in sizes if size <= per_element))

    def _narrow_use(self, node: ir.Node, value: ir.Value) -> Precision | None:
        narrow = self.quantized(node)
        if narrow is None:
            return None
        return narrow if any(item is not None and self.behind(item) is value for item in node.inputs[:2]) else None

    def _add(self, node: ir.Node) -> None:
        if is_op(node, "Shape", "Size"):  # known to the host, and when the engine is built where no axis is open
            self._known.update(dict.fromkeys(node.outputs, not _is_open(node.inputs[0])))
        elif self._is_constant_node(node):
            self._known.update(dict.fromkeys(node.outputs, True))
        elif self._is_view(node):
            first = node.inputs[0]
            if first is not None:
                self._behind.update((value, self.behind(first)) for value in node.outputs)
        else:
            self.nodes.append(node)
            if node.op_type in cost.CONTROL_FLOW or cost.is_host_arithmetic(node, self.shapes):
                self.free.add(node)
            for value in self.inputs(node):
                self.users.setdefault(value, []).append(node)

    def _is_constant_node(self, node: ir.Node) -> bool:
        if node.domain != "" or node.op_type in _NEVER_CONSTANT:
            return False
        if is_op(node, "Constant"):
            return True
        return all(value is None or self.is_constant(value) for value in node.inputs)

    def _is_view(self, node: ir.Node) -> bool:
        if node.domain != "":
            return False
        if node.op_type in cost.VIEWS:
            return True
        shown = any(value.is_graph_output() for value in node.outputs)
        if is_op(node, "Slice", "Split", "Expand", "DequantizeLinear"):
            return not shown and all(self.elements(value) is not None for value in node.outputs)
        return is_op(node, "Transpose") and (self._is_read_by_products(node) or self._is_written_by_product(node))

    def _is_read_by_products(self, node: ir.Node) -> bool:
        users = list(_users_through_views(node.outputs[0]))
        return bool(users) and all(is_op(user, *GEMM_OPS) for user in users)

    def _is_written_by_product(self, node: ir.Node) -> bool:
        value = node.inputs[0]
        for _ in range(_LONGEST_EPILOGUE):
            producer = None if value is None else self.behind(value).producer()
            if producer is None:
                return False
            if products_of(producer, self.shapes) and is_op(producer, *GEMM_OPS):
                return True
            chain = [item for item in producer.inputs if item is not None and not self.is_constant(item)]
            if not is_pointwise(producer) or len(chain) != 1:
                return False
            value = chain[0]
        return False


def _users_through_views(value: ir.Value) -> Iterator[ir.Node]:
    for user, _ in value.uses():
        if is_op(user, *cost.VIEWS):
            yield from _users_through_views(user.outputs[0])
        else:
            yield user


def is_pointwise(node: ir.Node) -> bool:
    """Whether a node is one of :data:`POINTWISE`."""
    return node.domain == "" and node.op_type in POINTWISE


def _is_open(value: ir.Value | None) -> bool:
    """Whether a graph leaves an axis of a value open."""
    shape = None if value is None else value.shape
    return shape is not None and not all(isinstance(dim, int) for dim in shape)
