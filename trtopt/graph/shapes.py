"""Shape inference that raises when it fails."""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterator, Mapping, Sequence
from functools import partial

import onnx
import onnx.checker
import onnx.helper
import onnx.shape_inference
import onnx_ir as ir

from trtopt.errors import InvalidModelError, UsageError
from trtopt.graph.dims import name_dimensions
from trtopt.graph.edit import (
    Names,
    all_graphs,
    all_nodes,
    constant_tensor_of,
    dims_of_value,
    is_op,
    remove_node,
    static_shape,
    subgraphs_of,
)
from trtopt.graph.fold import constant_branches, fold_shapes, inline_branch
from trtopt.graph.skeleton import flat_skeleton, skeleton
from trtopt.support import dynamic_fp4

_SWEEPS = 16
"""Rounds of inference and constant evaluation before shapes that depend on data are given up."""

_SHAPE_OF_INPUT = frozenset({"GroupNormalization", "MeanVarianceNormalization"})
"""Operators that ONNX infers no shape for, or fails on (onnx 1.23); theirs is that of the first input."""

_INFERABLE = ("", "ai.onnx.ml")
"""Domains of operators that ONNX has shape inference for."""

_FAILURES = (onnx.shape_inference.InferenceError, onnx.checker.ValidationError, RuntimeError, ValueError, IndexError)
"""What ONNX's inference raises."""

dynamic_fp4.register()

_Dims = tuple[int | str | None, ...]


def infer_shapes(model: ir.Model) -> ir.Model:
    """A clone of ``model`` in which every value has the dtype and shape ONNX can infer.

    Dimensions that ONNX leaves open have the name of the input's dimension that they are provably equal to.

    What the file says about values inside the graph is inferred anew; only for outputs of custom operators, which
    ONNX cannot infer, is it kept. What it says about the shapes of the graph's outputs fills what inference leaves
    open; where the two contradict each other, it is stale.

    Raises:
        InvalidModelError: Inference fails, or a graph output is declared with another dtype.
    """
    clone = model.clone()
    infer_in_place(clone)
    return clone


def infer_in_place(model: ir.Model) -> None:
    """As :func:`infer_shapes`, on a model that the caller owns, which an error leaves half done."""
    declared = {value: dims_of_value(value) for value in model.graph.outputs}
    _forget(model)
    _infer(model, flat_skeleton(model, _custom(model)) if _is_flat(model) else skeleton(model))
    for value, dims in declared.items():
        _merge_declared(value, dims)
    name_dimensions(model)


def static_shapes(model: ir.Model, input_shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """The shape of every value when the inputs have the given shapes.

    Shape computations inside the graph (``Shape``, ``Gather``, ``Concat``, ... to ``Reshape``) are evaluated on the
    way. Values of nested graphs are included where they can be inferred.

    Args:
        model: The model; not changed.
        input_shapes: A shape for each input with a dynamic dimension; static inputs may be left out.

    Returns:
        Shapes by value name, initializers and inputs included; values whose shape depends on data are absent.

    Raises:
        UsageError: An input is unknown or missing, or its rank or a fixed dimension differs.
        InvalidModelError: The model cannot run at these shapes.
    """
    fixed = _checked_inputs(model, input_shapes)
    with _named(fixed):
        if not _is_flat(model):
            return _collect(_fixed(model, fixed))
        shapes, left = _quick_shapes(model, fixed)
        return shapes if not left else shapes | _collect(_fixed(_around(model, left, shapes), shapes))


def at_shapes(model: ir.Model, input_shapes: Mapping[str, tuple[int, ...]]) -> ir.Model:
    """A clone of ``model`` for inputs of the given shapes only; arguments and errors as :func:`static_shapes`.

    Every value's shape is static, but for what depends on data, and shape computations are constants.
    """
    fixed = _checked_inputs(model, input_shapes)
    with _named(fixed):
        return _fixed(model, fixed)


@contextlib.contextmanager
def _named(shapes: Mapping[str, tuple[int, ...]]) -> Iterator[None]:
    """Let an error say at which shapes the model does not run."""
    try:
        yield
    except InvalidModelError as error:
        at = ", ".join(f"{name}:{'x'.join(map(str, shape))}" for name, shape in shapes.items() if shape)
        raise InvalidModelError(
            error.what,
            where=f"{error.where} at {at}",
            remedy="choose shapes that the model runs at; what follows no input (a constant, an input of a fixed size) "
            "may be in the way of others",
        ) from error


def with_sizes(model: ir.Model, sizes: Mapping[str, Mapping[int, int]]) -> ir.Model:
    """A clone of ``model`` in which some axes of inputs have one size, and what follows from it is constant.

    Args:
        model: The model; not changed.
        sizes: By input name and axis, the size. Other axes stay as they are.

    Raises:
        InvalidModelError: The model cannot run at these sizes.
    """
    dims = {str(value.name): dims_of_value(value) or () for value in model.graph.inputs}
    wanted = {name: tuple(sizes.get(name, {}).get(axis, dim) for axis, dim in enumerate(dims[name])) for name in dims}
    free = {dim for shape in wanted.values() for dim in shape}
    gone = {dim for shape in dims.values() for dim in shape if isinstance(dim, str)} - free
    clone = _fixed(model, wanted)
    for value, declared in zip(clone.graph.outputs, map(dims_of_value, model.graph.outputs), strict=True):
        _merge_declared(value, declared and tuple(None if dim in gone else dim for dim in declared))
    _remove_dead(clone.graph)
    return clone


def _remove_dead(graph: ir.Graph) -> None:
    """Remove the nodes that computed what is constant now, and the constants that only those read."""
    for node in reversed(graph):
        if not any(value.uses() or value.is_graph_output() for value in node.outputs):
            remove_node(node)
    for name, value in list(graph.initializers.items()):
        if not (value.uses() or value.is_graph_output() or value.is_graph_input()):
            graph.initializers.pop(name)


def _fixed(model: ir.Model, shapes: Mapping[str, _Dims]) -> ir.Model:
    clone = model.clone()
    for value in clone.graph.inputs:
        value.shape = ir.Shape(shapes[str(value.name)])
    _forget(clone)
    known = -1
    for _ in range(_SWEEPS):
        _infer(clone, skeleton(clone))
        count = len(_collect(clone))
        if count == known:
            break
        known = count
        folded, taken = fold_shapes(clone), list(constant_branches(clone.graph))
        for node, branch in taken:
            inline_branch(node, branch, Names(clone))
        if not folded and not taken:
            break
    return clone


def _quick_shapes(
    model: ir.Model, inputs: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, tuple[int, ...]], list[ir.Node]]:
    """The shapes that one inference on a protobuf finds in a flat model, and the nodes it leaves open."""
    proto = flat_skeleton(model, _custom(model))
    for info in proto.graph.input:
        info.type.tensor_type.shape.Clear()
        info.type.tensor_type.shape.dim.extend(onnx.TensorShapeProto.Dimension(dim_value=n) for n in inputs[info.name])
    inferable = {name for node in proto.graph.node if _is_inferable(node) for name in node.output}
    for info in proto.graph.output:
        if info.name in inferable and info.type.HasField("tensor_type"):
            info.type.tensor_type.ClearField("shape")
    inferred = _inferred(proto).graph
    shapes = dict(inputs)
    for name, value in model.graph.initializers.items():
        shapes[name] = static_shape(value) or ()
    for info in (*inferred.value_info, *inferred.output):
        dims = info.type.tensor_type.shape.dim
        if info.type.tensor_type.HasField("shape") and all(dim.HasField("dim_value") for dim in dims):
            shapes[info.name] = tuple(dim.dim_value for dim in dims)
    return shapes, [n for n in model.graph if any(v.name and v.name not in shapes for v in n.outputs)]


def _around(model: ir.Model, left: Sequence[ir.Node], shapes: Mapping[str, tuple[int, ...]]) -> ir.Model:
    """A model of the nodes that are left open, of what reads them or numbers computed from them, and of what computes
    the numbers they read: sizes are found there, and do not fit, as in the whole, which may be many times as large. The
    whole, where a value at its border has no type."""
    numbers = _numbers(model)
    chosen = set(left)
    border: dict[ir.Value, None] = {}
    stack = list(left)
    while stack:
        made = stack.pop().outputs
        readers = {user for value in made for user, _ in value.uses()} - chosen
        chosen |= readers
        stack += [reader for reader in readers if not numbers.isdisjoint(reader.outputs)]
    stack = list(chosen)
    while stack:
        for value in stack.pop().inputs:
            producer = None if value is None else value.producer()
            if value is None or producer is None or producer in chosen:
                continue
            if value in numbers:
                chosen.add(producer)
                stack.append(producer)
            else:
                border[value] = None
    kept = [node for node in model.graph if node in chosen]
    weights = dict.fromkeys(v for node in kept for v in node.inputs if v is not None and v.is_initializer())
    outputs = [v for node in kept for v in node.outputs if v.name and not any(user in chosen for user, _ in v.uses())]
    if any(value.type is None for value in (*border, *outputs)):
        return model
    graph = ir.GraphView(
        [*model.graph.inputs, *(value for value in border if value.producer() not in chosen)],
        outputs,
        nodes=kept,
        initializers=list(weights),
        opset_imports=dict(model.graph.opset_imports),
        name=model.graph.name,
    ).clone()
    return ir.Model(graph, ir_version=model.ir_version)


def _numbers(model: ir.Model) -> set[ir.Value]:
    """The values that sizes may be computed from: integers, and what follows from constants and shapes alone."""
    found: set[ir.Value] = set()
    for node in model.graph:
        read = (value for value in node.inputs if value is not None)
        is_constant = is_op(node, "Shape", "Size") or all(v in found or constant_tensor_of(v) is not None for v in read)
        found.update(
            v
            for v in node.outputs
            if is_constant or v.dtype is None or v.dtype.is_integer() or v.dtype == ir.DataType.BOOL
        )
    return found


def _is_flat(model: ir.Model) -> bool:
    return not model.functions and not any(subgraphs_of(node) for node in model.graph)


def _custom(model: ir.Model) -> list[ir.Value]:
    """The outputs of operators that ONNX has no inference for."""
    return [value for node in model.graph if not _is_inferable(node) for value in node.outputs if value.name]


def _is_inferable(node: ir.Node | onnx.NodeProto) -> bool:
    return node.domain in _INFERABLE or (node.domain, node.op_type) == dynamic_fp4.OPERATOR


def _checked_inputs(model: ir.Model, input_shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    inputs = {str(value.name): value for value in model.graph.inputs}
    unknown = sorted(set(input_shapes) - set(inputs))
    if unknown:
        raise UsageError(
            f"The model has no input named {unknown[0]}",
            where="shapes",
            remedy=f"its inputs are: {', '.join(sorted(inputs))}",
        )
    shapes: dict[str, tuple[int, ...]] = {}
    for name, value in inputs.items():
        old = dims_of_value(value) or ()
        if name not in input_shapes:
            if any(not isinstance(dim, int) for dim in old):
                raise UsageError(
                    "An input with dynamic dimensions has no shape",
                    where=f"{name}: {_text(old)}",
                    remedy=f"give one with --opt-shapes {name}:{'x'.join(str(d) for d in old)}",
                )
            shapes[name] = tuple(dim for dim in old if isinstance(dim, int))
            continue
        new = tuple(input_shapes[name])
        if len(new) != len(old) or any(isinstance(o, int) and o != n for o, n in zip(old, new, strict=True)):
            raise UsageError(
                f"The shape {'x'.join(map(str, new))} does not fit an input of the model",
                where=f"{name}: {_text(old)}",
                remedy="keep the rank and the fixed dimensions",
            )
        shapes[name] = new
    return shapes


def _forget(model: ir.Model) -> None:
    """Drop what is said about values that ONNX can infer, but for the types of the outputs."""
    types = {value: value.type for value in model.graph.outputs}
    for node in all_nodes(model.graph):
        if _is_inferable(node):
            for value in node.outputs:
                value.shape, value.type = None, None
    for value, type_ in types.items():
        value.type = type_


def _infer(model: ir.Model, proto: onnx.ModelProto) -> None:
    """Give ``model`` what ONNX infers on its skeleton."""
    inferred = _inferred(proto)
    known = {dim for value in model.graph.inputs for dim in dims_of_value(value) or ()}
    _merge(model.graph, inferred.graph, known)


def _stand_in(graph: onnx.GraphProto) -> None:
    """Put an Identity in the place of operators ONNX cannot infer the shape of."""
    for node in graph.node:
        if node.domain in ("", "ai.onnx") and node.op_type in _SHAPE_OF_INPUT:
            node.op_type = "Identity"
            del node.attribute[:], node.input[1:]
        for subgraph in _nested(node):
            _stand_in(subgraph)


def _hide_unread(graph: onnx.GraphProto, main: onnx.GraphProto) -> None:
    """Make inputs of long integer vectors without data: ONNX reads such constants for their numbers, and fails."""
    for index in reversed(range(len(graph.initializer))):
        if _is_unread(graph.initializer[index]):
            _add_input(main, graph.initializer[index])
            del graph.initializer[index]
    for node in graph.node:
        tensor = node.attribute[0].t if node.op_type == "Constant" and len(node.attribute) == 1 else None
        if tensor is not None and _is_unread(tensor):
            tensor.name = f"{node.output[0]}__unread"
            _add_input(main, tensor)
            node.op_type, node.input[:] = "Identity", [tensor.name]
            del node.attribute[:]
        for subgraph in _nested(node):
            _hide_unread(subgraph, main)


def _is_unread(tensor: onnx.TensorProto) -> bool:
    is_vector = len(tensor.dims) < 2 and tensor.data_type in (onnx.TensorProto.INT64, onnx.TensorProto.INT32)
    return is_vector and tensor.data_location == onnx.TensorProto.EXTERNAL


def _hand_down(graph: onnx.GraphProto, outer: Mapping[str, onnx.TensorProto]) -> None:
    """Give nested graphs the constants that they read of the graphs around them: ONNX knows their shapes there, not
    their numbers, and without the numbers of pads and slices no shape."""
    own = {item.name for item in (*graph.initializer, *graph.input)}
    own |= {name for node in graph.node for name in node.output}
    read = {name for node in graph.node for name in node.input} - own
    graph.initializer.extend(outer[name] for name in sorted(read & outer.keys()))
    known = {name: tensor for name, tensor in outer.items() if name not in own}
    known |= {tensor.name: tensor for tensor in graph.initializer if tensor.data_location != onnx.TensorProto.EXTERNAL}
    for node in graph.node:
        for subgraph in _nested(node):
            _hand_down(subgraph, known)


def _nested(node: onnx.NodeProto) -> list[onnx.GraphProto]:
    return [graph for item in node.attribute for graph in ([item.g] if item.HasField("g") else item.graphs)]


def _add_input(graph: onnx.GraphProto, tensor: onnx.TensorProto) -> None:
    graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))


def _inferred(proto: onnx.ModelProto) -> onnx.ModelProto:
    """What ONNX infers; ``proto`` is changed.

    ONNX follows the values of integer tensors as if they had one axis, and then refuses sums that broadcast
    (``[320, 1] + [1, 459]``). What fails so is inferred from shapes alone.
    """
    _stand_in(proto.graph)
    _hide_unread(proto.graph, proto.graph)
    infer = partial(onnx.shape_inference.infer_shapes, check_type=True, strict_mode=True)
    if any(_nested(node) for node in proto.graph.node):
        told = onnx.ModelProto()
        told.CopyFrom(proto)
        _hand_down(told.graph, {})
        with contextlib.suppress(*_FAILURES):  # in a branch that these shapes never take
            return infer(told, data_prop=True)
    try:
        try:
            return infer(proto, data_prop=True)
        except onnx.shape_inference.InferenceError:
            return infer(proto, data_prop=False)
    except _FAILURES as error:
        raise InvalidModelError(
            f"Shape inference fails: {' '.join(str(error).split())[:400]}",
            where=proto.graph.name or "graph",
            remedy="check the shapes of the node it names; export the model again with matching input shapes",
        ) from error


def _merge(graph: ir.Graph, proto: onnx.GraphProto, known: Container[int | str | None]) -> None:
    types = {info.name: info.type for info in (*proto.value_info, *proto.output)}
    for node, node_proto in zip(graph, proto.node, strict=True):
        for value in node.outputs:
            if value.name in types:
                _set_type(value, types[str(value.name)], known)
        for subgraph, subgraph_proto in zip(subgraphs_of(node), _nested(node_proto), strict=True):
            _merge(subgraph, subgraph_proto, known)


def _set_type(value: ir.Value, proto: onnx.TypeProto, known: Container[int | str | None]) -> None:
    """Take over type and shape; symbols that inference made up (``unk__0``) say no more than "unknown"."""
    if proto.HasField("tensor_type"):
        _set_tensor_type(value, proto.tensor_type, known)
        return
    found = ir.serde.deserialize_type_proto_for_type(proto)
    if found is not None and found.dtype != ir.DataType.UNDEFINED:
        value.type = found
    shape = ir.serde.deserialize_type_proto_for_shape(proto)
    if shape is not None:
        dims = (dim if isinstance(dim, int) else dim.value for dim in shape)
        value.shape = ir.Shape([None if _is_made_up(dim) and dim not in known else dim for dim in dims])


def _set_tensor_type(value: ir.Value, proto: onnx.TypeProto.Tensor, known: Container[int | str | None]) -> None:
    """As :func:`_set_type` for tensors, without the detour that is most of its time on large graphs."""
    if proto.elem_type:
        value.type = ir.TensorType(ir.DataType(proto.elem_type))
    if not proto.HasField("shape"):
        return
    dims: list[int | str | None] = []
    for dim in proto.shape.dim:
        if dim.HasField("dim_value"):
            dims.append(dim.dim_value)
        else:
            symbol = dim.dim_param or None
            dims.append(None if _is_made_up(symbol) and symbol not in known else symbol)
    value.shape = ir.Shape(dims)


def _is_made_up(dim: int | str | None) -> bool:
    return isinstance(dim, str) and dim.startswith("unk__")


def _merge_declared(value: ir.Value, declared: _Dims | None) -> None:
    """Take from the declared shape of a graph output what inference could not find, unless it is stale.

    A dimension inferred as a named symbol wins over a declared number: files edited to a dynamic batch, and exporters
    that write the sizes of their example, leave stale output shapes.
    """
    inferred = dims_of_value(value)
    if declared is None:
        return
    if inferred is None:
        value.shape = ir.Shape(declared)
        return
    if not is_stale(declared, inferred):
        value.shape = ir.Shape([b if a is None else a for a, b in zip(inferred, declared, strict=True)])


def is_stale(declared: _Dims, computed: _Dims) -> bool:
    """Whether a declared shape contradicts the one that the nodes compute."""
    return len(computed) != len(declared) or any(
        isinstance(a, int) and isinstance(b, int) and a != b for a, b in zip(computed, declared, strict=True)
    )


def _collect(model: ir.Model) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for graph in all_graphs(model.graph):
        values = [*graph.inputs, *graph.initializers.values()]
        values += [value for node in graph for value in node.outputs if value.name]
        for value in values:
            shape = static_shape(value)
            if shape is not None:
                shapes[str(value.name)] = shape
    return shapes


def _text(dims: _Dims) -> str:
    return "[" + ", ".join("?" if dim is None else str(dim) for dim in dims) + "]"
