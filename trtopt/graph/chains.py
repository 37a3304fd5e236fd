"""Nodes that take the place of others, in the same place of the graph."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from trtopt.graph.edit import Names, add_initializer, new_node, remove_node, replace_value, tag

NARROW_FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
"""The float types TensorRT computes in."""

Attributes = Mapping[str, float | int | str | Sequence[int]]


class Splice:
    """Replaces nodes of a graph; all new nodes are tagged, and named after what they stand for.

    Args:
        model: The model, which is edited.
        node: A node of a graph. New nodes go in front of it, unless said otherwise.
        recipe: Whose nodes these are.
    """

    def __init__(self, model: ir.Model, node: ir.Node, recipe: str) -> None:
        if not isinstance(node.graph, ir.Graph):
            raise ValueError(f"node {node.name} is in no graph")
        self._names = Names(model)
        self._node = node
        self._graph = node.graph
        self._recipe = recipe

    def op(
        self,
        op_type: str,
        *inputs: ir.Value | None,
        attributes: Attributes | None = None,
        like: ir.Value | None = None,
        before: ir.Node | None = None,
    ) -> ir.Value:
        """The output of a new node, with type, shape and name after ``like``, or else the output of the first node."""
        place = before or self._node
        node = self._new(op_type, inputs, place, attributes, like or self._node.outputs[0])
        self._graph.insert_before(place, node)
        return node.outputs[0]

    def number(self, content: float) -> ir.Value:
        """A constant of the element type of the first node's output."""
        output = self._node.outputs[0]
        if output.dtype is None:
            raise ValueError(f"{output.name} has no type")
        return self.constant(np.asarray(content, output.dtype.numpy()), output, "constant")

    def constant(self, array: np.ndarray, like: ir.Value, suffix: str) -> ir.Value:
        """A constant named after ``like``."""
        return add_initializer(self._graph, self._names.value(f"{like.name}_{suffix}"), array)

    def finish(self, value: ir.Value) -> None:
        """Put ``value`` in the place of the first node's output, whose name it takes, and remove that node."""
        self._take_over(self._node, value)

    def replace(
        self, node: ir.Node, op_type: str, inputs: Sequence[ir.Value | None], attributes: Attributes | None = None
    ) -> None:
        """Put a new node in the place of another; its output takes the other's name and shape."""
        new = self._new(op_type, inputs, node, attributes, node.outputs[0])
        self._graph.insert_before(node, new)
        self._take_over(node, new.outputs[0])

    def bypass(self, node: ir.Node) -> None:
        """Let the users of ``node`` use its first input, a value of this graph, which takes its name."""
        source = node.inputs[0]
        if source is None:
            raise ValueError(f"node {node.name} has no input")
        self._take_over(node, source)

    def restore(
        self,
        value: ir.Value,
        op_type: str,
        inside: Collection[ir.Node],
        *inputs: ir.Value | None,
        attributes: Attributes | None = None,
    ) -> None:
        """Give users of ``value`` outside ``inside`` the output of a new node behind it, which takes its name."""
        own = [(user, index) for user, index in value.uses() if user in inside]
        producer = value.producer()
        if producer is None or (len(own) == len(value.uses()) and not value.is_graph_output()):
            return
        name = str(value.name)
        node = self._new(op_type, [value, *inputs], producer, attributes, value)
        self._graph.insert_after(producer, node)
        replace_value(value, node.outputs[0])
        for user, index in [*own, (node, 0)]:
            user.replace_input_with(index, value)
        value.name = self._names.value(f"{name}_moved")
        node.outputs[0].name = name

    def _take_over(self, node: ir.Node, value: ir.Value) -> None:
        output = node.outputs[0]
        name = output.name
        keeps_name = value.is_graph_output()
        replace_value(output, value)
        remove_node(node)
        if not keeps_name:
            value.name = name

    def _new(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        after: ir.Node,
        attributes: Attributes | None,
        like: ir.Value,
    ) -> ir.Node:
        node = new_node(
            op_type,
            inputs,
            name=self._names.node(f"{after.name}_{op_type}"),
            output=self._names.value(f"{like.name}_{op_type.lower()}"),
            attributes=dict(attributes or {}),
            like=like,
        )
        tag(node, self._recipe)
        return node
