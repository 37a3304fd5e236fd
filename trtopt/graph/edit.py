"""Small helpers for reading and editing graphs: names, constants, new nodes, replaced values.

Every function that edits changes the graph it is given: callers pass a clone of the artifact's model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeGuard

import numpy as np
import onnx_ir as ir

RECIPE_KEY = "trtopt.recipe"
"""Key in a node's ``metadata_props``: the recipe that made the node."""

_CONSTANT_DTYPES = {
    "value_float": np.float32,
    "value_floats": np.float32,
    "value_int": np.int64,
    "value_ints": np.int64,
}

_LONG = (ir.DataType.INT64, ir.DataType.UINT64)
"""Integers of more digits than any float has; NumPy calls that cast safe."""

BROADCAST = frozenset(
    "Add And Div Equal Greater GreaterOrEqual Less LessOrEqual Max Mean Min Mod Mul Or Pow Sub Sum Where Xor".split()
)
"""Operators whose operands are all repeated to one shape."""

ELEMENTWISE = frozenset(
    "Abs Add Cast Celu Clip Cos Div Elu Erf Exp Gelu HardSigmoid HardSwish Identity LeakyRelu Log Max Min Mish Mul Neg "
    "Pow Reciprocal Relu Selu Sigmoid Sin Softplus Softsign Sqrt Sub Swish Tanh".split()
)
"""Arithmetic that treats every element alike, so that it may run on any layout."""


def all_graphs(graph: ir.Graph) -> Iterator[ir.Graph]:
    """``graph`` and every graph nested in its nodes, outer graphs first."""
    yield graph
    for node in graph:
        if node.attributes.data:
            for subgraph in subgraphs_of(node):
                yield from all_graphs(subgraph)


def all_nodes(graph: ir.Graph) -> Iterator[ir.Node]:
    """Every node of ``graph`` and of the graphs nested in it."""
    nested: list[ir.Graph] = []
    for node in graph:
        yield node
        if node.attributes.data:
            nested += subgraphs_of(node)
    for item in nested:
        yield from all_nodes(item)


def subgraphs_of(node: ir.Node) -> list[ir.Graph]:
    """The graphs a node holds as attributes (``If``, ``Loop``, ``Scan``, ...), one level down."""
    found: list[ir.Graph] = []
    for attribute in node.attributes.data.values():  # the dict behind: this is asked of every node, many times
        kind = attribute.type
        if kind == ir.AttributeType.GRAPH and not attribute.is_ref():
            found.append(attribute.as_graph())
        elif kind == ir.AttributeType.GRAPHS and not attribute.is_ref():
            found.extend(attribute.as_graphs())
    return found


def captured(node: ir.Node) -> list[ir.Value]:
    """The values of graphs around a node that the graphs nested in it read."""
    found: list[ir.Value] = []
    for nested in subgraphs_of(node):
        graphs = list(all_graphs(nested))
        own = {value for graph in graphs for value in (*graph.inputs, *graph.initializers.values())}
        own |= {value for graph in graphs for inner in graph for value in inner.outputs}
        read = [value for graph in graphs for inner in graph for value in inner.inputs if value is not None]
        read += [value for graph in graphs for value in graph.outputs]
        found += [value for value in read if value not in own]
    return found


def values_read(node: ir.Node) -> list[ir.Value]:
    """What a node reads, the values its nested graphs capture included."""
    return [*(value for value in node.inputs if value is not None), *captured(node)]


def is_op(node: ir.Node | None, *op_types: str) -> TypeGuard[ir.Node]:
    """Whether ``node`` is one of these operators of the default ONNX domain."""
    return node is not None and node.domain == "" and node.op_type in op_types


def maker_of(value: ir.Value | None) -> ir.Node | None:
    """The node that makes a value; None where there is none."""
    return None if value is None else value.producer()


def only_user(value: ir.Value | None) -> ir.Node | None:
    """The node that uses ``value``, None where it has none or several uses, or is a graph output."""
    users = () if value is None or value.is_graph_output() else tuple(value.uses())
    return users[0].node if len(users) == 1 else None


def only_maker(value: ir.Value | None) -> ir.Node | None:
    """The node that makes a value which is used once and is no graph output; None where there is none."""
    return None if value is None or only_user(value) is None else value.producer()


def int_attribute(node: ir.Node, name: str, default: int) -> int:
    """An integer attribute, ``default`` where there is none."""
    attribute = node.attributes.get(name)
    return default if attribute is None else attribute.as_int()


def float_attribute(node: ir.Node, name: str, default: float) -> float:
    """A float attribute, ``default`` where there is none."""
    attribute = node.attributes.get(name)
    return default if attribute is None else attribute.as_float()


def string_attribute(node: ir.Node, name: str, default: str) -> str:
    """A string attribute, ``default`` where there is none."""
    attribute = node.attributes.get(name)
    return default if attribute is None else attribute.as_string()


def ints_attribute(node: ir.Node, name: str) -> tuple[int, ...] | None:
    """An attribute that is a list of integers, or None where the node does not have it."""
    attribute = node.attributes.get(name)
    return None if attribute is None else tuple(attribute.as_ints())


def axes_of(node: ir.Node) -> tuple[int, ...] | None:
    """The axes that a reduction, Squeeze or Unsqueeze names as attribute or second input; None where not known."""
    array = constant_of(input_of(node, 1))
    return ints_attribute(node, "axes") if array is None else tuple(int(axis) for axis in array.reshape(-1))


def holds(wide: ir.DataType, narrow: ir.DataType) -> bool:
    """Whether every number of the type ``narrow`` is one of ``wide``."""
    if ir.DataType.STRING in (wide, narrow) or (wide.is_floating_point() and narrow in _LONG):
        return False
    return bool(np.can_cast(narrow.numpy(), wide.numpy()))


def input_of(node: ir.Node, index: int) -> ir.Value | None:
    """Input ``index`` of a node, None where it is left out."""
    return node.inputs[index] if index < len(node.inputs) else None


def static_shape(value: ir.Value | None) -> tuple[int, ...] | None:
    """The shape of a value when every dimension is known, else None."""
    return None if value is None or value.shape is None else numbers_of(tuple(value.shape))


def numbers_of(dims: Sequence[object]) -> tuple[int, ...] | None:
    """Dimensions when every one is known, else None."""
    sizes = tuple(int(dim) for dim in dims if isinstance(dim, int))
    return sizes if len(sizes) == len(dims) else None


def dims_of_value(value: ir.Value | None) -> tuple[int | str | None, ...] | None:
    """The shape, symbols as text; None where even the rank is not known."""
    if value is None or value.shape is None:
        return None
    return tuple(dim if isinstance(dim, int) else dim.value for dim in value.shape)


def dims_of(tensor: ir.TensorProtocol) -> tuple[int, ...]:
    """The shape of a tensor, whose dimensions are all known."""
    return tuple(int(dim) for dim in tensor.shape if isinstance(dim, int))


def constant_tensor_of(value: ir.Value | None) -> ir.TensorProtocol | None:
    """The tensor behind an initializer or a ``Constant`` node, not read yet; None for everything else.

    Strings and sparse constants count as not constant.
    """
    if value is None:
        return None
    if value.is_initializer():
        tensor = value.const_value
        return None if tensor is None or tensor.dtype == ir.DataType.STRING else tensor
    node = value.producer()
    if not is_op(node, "Constant") or len(node.attributes) != 1:
        return None
    attribute = next(iter(node.attributes.values()))
    if attribute.is_ref():
        return None
    if attribute.name == "value":
        tensor = attribute.as_tensor()
        return None if tensor.dtype == ir.DataType.STRING else tensor
    dtype = _CONSTANT_DTYPES.get(attribute.name)
    return None if dtype is None else ir.tensor(np.asarray(attribute.value, dtype=dtype), name=value.name)


def constant_of(value: ir.Value | None) -> np.ndarray | None:
    """The array behind an initializer or a ``Constant`` node, None for everything else.

    The array may be a read-only view of a memory-mapped file: never write into it. Types numpy lacks (bfloat16,
    float8, int4) come as ``ml_dtypes``.
    """
    tensor = constant_tensor_of(value)
    return None if tensor is None else tensor.numpy()


def array_of(value: ir.Value | None) -> np.ndarray:
    """As :func:`constant_of`, of what is known to be a constant; raises ValueError where it is none."""
    array = constant_of(value)
    if array is None:
        raise ValueError(f"{'nothing' if value is None else value.name} is no constant")
    return array


def add_initializer(graph: ir.Graph, name: str, array: np.ndarray | ir.TensorProtocol) -> ir.Value:
    """Add a constant to ``graph``, whose nested graphs may use it too, and return its value.

    ``name`` is one that no other value of the model has (see :class:`Names`). The array is not copied.
    """
    tensor = ir.Tensor(array, name=name) if isinstance(array, np.ndarray) else array
    shape = ir.Shape(dims_of(tensor))
    value = ir.Value(name=name, shape=shape, type=ir.TensorType(tensor.dtype), const_value=tensor)
    graph.register_initializer(value)
    return value


_shared: ContextVar[tuple[ir.Model, Names] | None] = ContextVar("shared", default=None)


@contextmanager
def shared_names(model: ir.Model) -> Iterator[None]:
    """Read the names of ``model`` once: inside, every :class:`Names` of it knows what the others gave out.

    For thousands of edits in a row, none of which names anything by itself.
    """
    token = _shared.set((model, Names(model)))
    try:
        yield
    finally:
        _shared.reset(token)


class Names:
    """The names taken in a model, and new ones that no other value or node has.

    All graphs of the model are read once, so keep the object while adding many.
    """

    def __init__(self, model: ir.Model) -> None:
        self._values: set[str] = set()
        self._nodes: set[str] = set()
        shared = _shared.get()
        if shared is not None and shared[0] is model:
            self._values, self._nodes = shared[1]._values, shared[1]._nodes
            return
        for graph in all_graphs(model.graph):
            self._values.update(str(value.name) for value in graph.inputs)
            self._values.update(graph.initializers)
            for node in graph:
                self._nodes.add(str(node.name))
                self._values.update(str(value.name) for value in node.outputs)

    def value(self, base: str) -> str:
        """A name for a value: ``base`` itself when it is free, else with a number."""
        return free_name(base, self._values)

    def node(self, base: str) -> str:
        """A name for a node: ``base`` itself when it is free, else with a number."""
        return free_name(base, self._nodes)


def free_name(base: str, taken: set[str], wanted: Collection[str] = ()) -> str:
    """``base`` the first time; then the first numbered form that nothing has or, of ``wanted``, is about to keep."""
    name, number = base, 0
    while name in taken or (number > 0 and name in wanted):
        number += 1
        name = f"{base}_{number}"
    taken.add(name)
    return name


def new_node(
    op_type: str,
    inputs: Sequence[ir.Value | None],
    *,
    name: str,
    output: str,
    attributes: dict[str, ir.Attr | int | float | str | Sequence[int] | Sequence[float]] | None = None,
    like: ir.Value | None = None,
) -> ir.Node:
    """A node of the default domain, not yet in a graph, with one output that has the type and shape of ``like``."""
    node = ir.node(op_type, list(inputs), attributes=attributes or {}, name=name)
    value = node.outputs[0]
    value.name = output
    if like is not None:
        value.type, value.shape = like.type, None if like.shape is None else like.shape.copy()
    return node


def tag(node: ir.Node, recipe: str) -> None:
    """Mark ``node`` as made by ``recipe``."""
    node.metadata_props[RECIPE_KEY] = recipe


def can_replace(old: ir.Value, new: ir.Value) -> bool:
    """Whether every use of ``old`` can become a use of ``new`` with the graph's outputs keeping their names.

    A graph output must be computed by a node of that same graph, and can carry one name only.
    """
    if not old.is_graph_output():
        return True
    producer, owner = new.producer(), old.producer()
    same_graph = producer is not None and owner is not None and producer.graph is owner.graph
    return same_graph and not new.is_graph_output()


def replace_value(old: ir.Value, new: ir.Value) -> None:
    """Make every use of ``old`` a use of ``new``; where ``old`` is a graph output, ``new`` takes its name.

    The node that makes ``old`` is left in place, unused. Ask :func:`can_replace` first.
    """
    if not old.is_graph_output():
        old.replace_all_uses_with(new)
        return
    name = old.name
    old.replace_all_uses_with(new, replace_graph_outputs=True)
    old.name = f"{name}__replaced"
    new.name = name
    new.doc_string = old.doc_string
    if old.shape is not None:
        new.shape = old.shape.copy()


def graph_of(node: ir.Node) -> ir.Graph:
    """The graph that holds a node; raises ValueError where none does."""
    if not isinstance(node.graph, ir.Graph):
        raise ValueError(f"node {node.name} is in no graph")
    return node.graph


def remove_node(node: ir.Node) -> None:
    """Remove a node whose outputs nothing uses from its graph; what its nested graphs use is no longer used by them."""
    graph_of(node).remove(node, safe=True)
    for subgraph in subgraphs_of(node):
        for inner in all_nodes(subgraph):
            for index in range(len(inner.inputs)):
                inner.replace_input_with(index, None)


NARROW_FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
"""The float types TensorRT computes in."""

Attributes = Mapping[str, float | int | str | Sequence[int]]


class Splice:
    """Replaces nodes of a graph; all new nodes are tagged with ``recipe``, and named after what they stand for.

    New nodes go in front of ``node``, unless said otherwise. ``names`` are those of the model.
    """

    def __init__(self, model: ir.Model, node: ir.Node, recipe: str) -> None:
        self.names = Names(model)
        self._node = node
        self._graph = graph_of(node)
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

    def fresh(
        self,
        op_type: str,
        *inputs: ir.Value | None,
        attributes: Attributes | None = None,
        like: ir.Value | None = None,
        before: ir.Node | None = None,
    ) -> ir.Value:
        """As :meth:`op`, of a shape that is left to inference."""
        value = self.op(op_type, *inputs, attributes=attributes, like=like, before=before)
        value.shape = None
        return value

    def number(self, content: float) -> ir.Value:
        """A constant of the element type of the first node's output."""
        output = self._node.outputs[0]
        if output.dtype is None:
            raise ValueError(f"{output.name} has no type")
        return self.constant(np.asarray(content, output.dtype.numpy()), output, "constant")

    def constant(self, array: np.ndarray, like: ir.Value, suffix: str) -> ir.Value:
        """A constant named after ``like``."""
        return add_initializer(self._graph, self.names.value(f"{like.name}_{suffix}"), array)

    def ints(self, numbers: Sequence[object] | np.ndarray, like: ir.Value, suffix: str) -> ir.Value:
        """A constant of integers, as shapes and axes are."""
        return self.constant(np.asarray(numbers, np.int64), like, suffix)

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
    ) -> ir.Value:
        """Give users of ``value`` outside ``inside`` the output of a new node behind it, which takes its name.

        Returns:
            That output; ``value`` where there are no such users.
        """
        own = [(user, index) for user, index in value.uses() if user in inside]
        producer = value.producer()
        if producer is None or (len(own) == len(value.uses()) and not value.is_graph_output()):
            return value
        name = str(value.name)
        node = self._new(op_type, [value, *inputs], producer, attributes, value)
        self._graph.insert_after(producer, node)
        replace_value(value, node.outputs[0])
        for user, index in [*own, (node, 0)]:
            user.replace_input_with(index, value)
        value.name = self.names.value(f"{name}_moved")
        node.outputs[0].name = name
        return node.outputs[0]

    def behind(
        self, value: ir.Value, op_type: str, *inputs: ir.Value | None, attributes: Attributes | None = None
    ) -> ir.Value:
        """The output of a new node that reads ``value`` first, right behind its maker or else first in the graph."""
        node = self._new(op_type, [value, *inputs], self._node, attributes, value)
        insert_behind(self._graph, value, [node])
        return node.outputs[0]

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
            name=self.names.node(f"{after.name}_{op_type}"),
            output=self.names.value(f"{like.name}_{op_type.lower()}"),
            attributes=dict(attributes or {}),
            like=like,
        )
        tag(node, self._recipe)
        return node


CAST_PREFIX = "trtopt/cast/"
"""Names of inserted Cast nodes start with it."""


def cast_node(value: ir.Value, dtype: ir.DataType, names: Names, output: str) -> ir.Node:
    """A Cast of ``value`` to ``dtype``, not yet in a graph. ``output`` is taken as it is: ask ``names`` for it."""
    name = names.node(f"{CAST_PREFIX}{output}")
    node = new_node("Cast", [value], name=name, output=output, attributes={"to": int(dtype)}, like=value)
    node.outputs[0].type = ir.TensorType(dtype)
    return node


def insert_behind(graph: ir.Graph, value: ir.Value, nodes: list[ir.Node]) -> None:
    """Put ``nodes`` right behind the producer of ``value``, or first in the graph when it has none there."""
    producer = value.producer()
    if producer is not None and producer.graph is graph:
        graph.insert_after(producer, nodes)
    elif len(graph) == 0:
        graph.extend(nodes)
    else:
        graph.insert_before(graph[0], nodes)


def cast_for_readers(
    graph: ir.Graph,
    value: ir.Value,
    dtype: ir.DataType,
    names: Names,
    label: str,
    readers: Collection[tuple[ir.Node, int]] | None = None,
) -> None:
    """Let ``readers`` (all, by default) read ``value`` as ``dtype``: behind a Cast, named after it and ``label``."""
    uses = list(value.uses()) if readers is None else readers
    cast = cast_node(value, dtype, names, names.value(f"{value.name}_{label}"))
    insert_behind(graph, value, [cast])
    for node, index in uses:
        node.replace_input_with(index, cast.outputs[0])


def cast_output(graph: ir.Graph, value: ir.Value, dtype: ir.DataType, names: Names, label: str) -> ir.Value:
    """An output of ``graph`` as ``dtype``: the Cast takes over its name, to which ``label`` is added for itself."""
    name = str(value.name)
    value.name = names.value(f"{name}_{label}")
    cast = cast_node(value, dtype, names, name)
    graph.append(cast)
    return cast.outputs[0]


def chain_behind(value: ir.Value, chain: Sequence[ir.Node], names: Names, label: str) -> None:
    """Insert ``chain``, whose first node reads ``value``, behind the node that makes it.

    The last output of the chain takes over the name of ``value``, to which ``label`` is added, its other readers, and
    its place among the outputs of the graph.
    """
    producer, last, name = value.producer(), chain[-1].outputs[0], str(value.name)
    if producer is None:
        raise ValueError(f"no node makes {name}")
    graph = graph_of(producer)
    readers = [(reader, index) for reader, index in value.uses() if reader is not chain[0]]
    value.name, last.name = names.value(f"{name}_{label}"), name
    graph.insert_after(producer, chain)
    for reader, index in readers:
        reader.replace_input_with(index, last)
    for position, output in enumerate(graph.outputs):
        if output is value:
            graph.outputs[position] = last


LIMIT = 64
"""Nodes looked at: more than the branches of known blocks have."""


def nodes_until(starts: Iterable[ir.Value], is_end: Callable[[ir.Node], bool]) -> tuple[ir.Node, ...]:
    """The nodes on every path from ``starts`` to the nearest nodes that satisfy ``is_end``, those included.

    A subgraph that holds them shows what the tensors are used for, instead of ending where they branch. There are none
    where no end is reached, or more than :data:`LIMIT` nodes lie on the way.
    """
    came_from: dict[ir.Node, list[ir.Node | None]] = {}
    ends: list[ir.Node] = []
    front = list(starts)
    while front:
        value = front.pop(0)
        for user, _ in value.uses():
            if user in came_from:
                came_from[user].append(value.producer())
                continue
            came_from[user] = [value.producer()]
            if len(came_from) > LIMIT:
                return ()
            if is_end(user):
                ends.append(user)
            else:
                front += user.outputs
    kept: set[ir.Node | None] = set()
    stack: list[ir.Node | None] = [*ends]
    while stack:
        node = stack.pop()
        if node is not None and node in came_from and node not in kept:
            kept.add(node)
            stack += came_from[node]
    return tuple(node for node in came_from if node in kept)
