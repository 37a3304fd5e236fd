"""Forms of saved graphs that runtimes other than the compiler read too.

ONNX Runtime rewrites a graph when it loads it, and three of its rewritings fail on graphs that are valid (1.31):

- It moves Q/DQ over Reshape, Transpose, Squeeze and Unsqueeze, naming INT8 as the type of the quantizer that it writes,
  and then makes INT8 UINT8 with another zero point: the two contradict each other, and the model does not load. It
  leaves a DequantizeLinear without a zero point alone; INT8 with the zero point 0 says the same without it.
- It takes a Transpose of FP16 that moves the first axis into a product, drops it from the graph, finds that the
  operands differ in rank, and goes on with what it has dropped: SIGSEGV. Operands of one rank it takes in.
- It looks for attention of a map whose queries, one part of their projection, are multiplied by one number, and reads
  an FP16 number as FP32: the model does not load. It looks at scalars and vectors only.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from trtopt.graph import edit

ADDED = "trtopt/saved/"
"""What the names of nodes begin with that are in the saved file only; they compute nothing."""


def make_portable(model: ir.Model) -> None:
    """Bring ``model`` into these forms, in place. What it computes, the names of its nodes and its outputs stay."""
    nodes = list(edit.all_nodes(model.graph))
    idle = {value for node in nodes if edit.is_op(node, "DequantizeLinear") for value in _without_zero_point(node)}
    products = [node for node in nodes if edit.is_op(node, "MatMul")]
    found = [(node, place, rank) for node in products for place, rank in _lower_operands(node)]
    if found:
        idle |= _raise_ranks(model, found)
    idle |= _matrices_of_factors(model)
    for graph in edit.all_graphs(model.graph):
        for name, value in list(graph.initializers.items()):
            if value in idle and not value.uses() and not value.is_graph_output() and not value.is_graph_input():
                del graph.initializers[name]


def _without_zero_point(node: ir.Node) -> list[ir.Value]:
    """Take the INT8 zero point 0 off a DequantizeLinear; what it was."""
    zero = edit.input_of(node, 2)
    points = edit.constant_of(zero) if zero is not None and zero.dtype is ir.DataType.INT8 else None
    if zero is None or points is None or points.any():
        return []
    node.resize_inputs(2)
    return [zero]


def _lower_operands(node: ir.Node) -> list[tuple[int, int]]:
    """The operand of a product that has a lower rank than the other one, which is a Transpose of FP16 that moves its
    first axis; with the rank of that."""
    return [
        (place, len(perm))
        for place, other in ((0, 1), (1, 0))
        if (perm := _moved(edit.input_of(node, other))) is not None
        and (shape := edit.dims_of_value(edit.input_of(node, place))) is not None
        and len(shape) < len(perm)
    ]


def _moved(value: ir.Value | None) -> tuple[int, ...] | None:
    """The permutation of the Transpose of FP16 behind ``value`` and a Cast, if it moves the first axis."""
    node = edit.maker_of(value)
    if edit.is_op(node, "Cast") and node.inputs[0] is not None:
        node = node.inputs[0].producer()
    if not edit.is_op(node, "Transpose") or node.outputs[0].dtype is not ir.DataType.FLOAT16:
        return None
    perm = edit.ints_attribute(node, "perm")
    if perm is None and node.inputs[0] is not None and node.inputs[0].shape is not None:
        perm = tuple(reversed(range(len(node.inputs[0].shape))))
    return perm if perm is not None and len(perm) > 2 and perm[0] != 0 else None


def _raise_ranks(model: ir.Model, found: list[tuple[ir.Node, int, int]]) -> set[ir.Value]:
    """Give operands more axes of length one: a constant is stored so. The operands that were read before."""
    names, made, read = edit.Names(model), dict[tuple[ir.Value, int, int, ir.Graph], ir.Value](), set[ir.Value]()
    for node, place, rank in found:
        value = node.inputs[place]
        if value is None or value.shape is None:
            continue
        own = len(value.shape)
        axes = [*range(rank - max(own, 2)), *([rank - 1 if place else rank - 2] if own == 1 else [])]
        key = (value, place if own == 1 else 0, rank, edit.graph_of(node))
        if key not in made:
            made[key] = _with_axes(value, axes, node, names)
        node.replace_input_with(place, made[key])
        if own == 1:
            _squeeze(node, axes[-1], names)
        read.add(value)
    return read


def _matrices_of_factors(model: ir.Model) -> set[ir.Value]:
    """Store the FP16 number that a squeezed tensor of rank 4 is multiplied by as a matrix. The numbers that were read
    before."""
    names, made = edit.Names(model), dict[tuple[ir.Value, ir.Graph], ir.Value]()
    for node in list(edit.all_nodes(model.graph)):
        for place in (0, 1) if edit.is_op(node, "Mul") else ():
            value, other = edit.input_of(node, place), edit.input_of(node, 1 - place)
            if value is None or not _is_half_number(value) or not _is_squeezed(other):
                continue
            key = (value, edit.graph_of(node))
            if key not in made:
                made[key] = _with_axes(value, [*range(2 - len(edit.dims_of_value(value) or ()))], node, names)
            node.replace_input_with(place, made[key])
    return {value for value, _ in made}


def _is_half_number(value: ir.Value) -> bool:
    """Whether a value is one FP16 number, constant or made of one that is."""
    source: ir.Value | None = value
    while edit.is_op(node := edit.maker_of(source), "Cast", "Identity"):
        source = node.inputs[0]
    tensor = edit.constant_tensor_of(source)
    return value.dtype is ir.DataType.FLOAT16 and tensor is not None and tensor.size == 1 and len(tensor.shape) < 2


def _is_squeezed(value: ir.Value | None) -> bool:
    dims = None if value is None else edit.dims_of_value(value)
    return value is not None and edit.is_op(value.producer(), "Squeeze") and dims is not None and len(dims) == 4


def _with_axes(value: ir.Value, axes: list[int], node: ir.Node, names: edit.Names) -> ir.Value:
    graph, tensor, name = edit.graph_of(node), edit.constant_tensor_of(value), names.value(f"{value.name}_expanded")
    if tensor is not None:
        array = np.expand_dims(tensor.numpy(), axes)
        return edit.add_initializer(graph, name, ir.Tensor(array, name=name, dtype=tensor.dtype))
    places = edit.add_initializer(graph, names.value(f"{name}_axes"), np.array(axes, np.int64))
    new = edit.new_node("Unsqueeze", [value, places], name=names.node(f"{ADDED}Unsqueeze/{name}"), output=name)
    new.outputs[0].type = value.type
    graph.insert_before(node, new)
    return new.outputs[0]


def _squeeze(node: ir.Node, axis: int, names: edit.Names) -> None:
    """Take the axis off the output of a product whose operand was a vector."""
    value, graph = node.outputs[0], edit.graph_of(node)
    axes = edit.add_initializer(graph, names.value(f"{value.name}_axes"), np.array([axis], np.int64))
    name = names.node(f"{ADDED}Squeeze/{value.name}")
    last = edit.new_node("Squeeze", [value, axes], name=name, output=f"{value.name}", like=value)
    if value.shape is not None:
        value.shape = ir.Shape([*value.shape[:axis], 1, *value.shape[axis:]])
    edit.chain_behind(value, [last], names, "expanded")
