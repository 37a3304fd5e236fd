"""ONNX files in: checked, converted to a current opset, shapes inferred, everything named."""

from __future__ import annotations

import graphlib
import mmap
import os
import re
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import onnx
import onnx_ir as ir
import onnx_ir.passes.common as common_passes
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from trtopt.errors import InvalidModelError, UsageError
from trtopt.graph.artifact import ModelArtifact
from trtopt.graph.edit import all_graphs, all_nodes, dims_of_value, free_name, subgraphs_of
from trtopt.graph.shapes import infer_in_place, infer_shapes, is_stale
from trtopt.report.schema.steps import StepRecord
from trtopt.source.check import all_tensors, check_external_data, check_loops, check_model, graphs_of, sha256_of
from trtopt.source.opset import TARGET, convert
from trtopt.source.rewriting import mend_spelling, write_out
from trtopt.source.torch_target import check_no_pytorch
from trtopt.support.temporary import TEMPORARY

_MAX_PROTOBUF_BYTES = (1 << 31) - 1
"""Protobuf's own limit for one message."""

_DOWNLOAD_AGAIN = "give an ONNX model; if it was downloaded, download it again"

_MOST_NODES = 1_000_000
"""Nodes after inlining: functions that call functions twice each double with every level."""

_DEEPEST_CALLS = 100

_IR_VERSION = 10
"""IR version that belongs to opset 21; newer files keep theirs."""


def load(path: str | os.PathLike[str], *, hash_weights: bool = True) -> ModelArtifact:
    """Load an ONNX model of opset 7 and later, IR version 3 and later.

    The model is checked, its functions are inlined, its nodes sorted and converted to opset 21 (newer ones stay), its
    shapes inferred, and every node and value named. Initializers listed as graph inputs become constants. Weights in
    external files stay there, memory-mapped.

    Args:
        path: The file. Weights in other files must lie in its folder.
        hash_weights: Whether the artifact's hash covers weights in other files, which are then read in full; without,
            it is that of the file alone.

    Returns:
        The model, with one step that tells what was changed.

    Raises:
        UsageError: The file is missing, a folder or not readable.
        InvalidModelError: Its content is invalid or not supported.
    """
    began = time.perf_counter()
    file = Path(os.path.abspath(os.fspath(path)))
    proto = _parse(file)
    try:
        mend_spelling(proto)
        check_model(proto, str(file))
        external = check_external_data(proto, file.parent)
        model = _deserialize(proto, file.parent)
        declared = {str(value.name): dims_of_value(value) for value in model.graph.outputs}
        details = _normalize(model, str(file))
        infer_in_place(model)
        details += _stale(declared, model)
    except (UnicodeDecodeError, ir.serde.SerdeError) as error:
        # Protobuf decodes text when it is read, not when the file is parsed.
        cause = error.__cause__ or error
        raise InvalidModelError(
            f"The file is damaged: {' '.join(str(cause).split())[:400]}", where=str(file), remedy=_DOWNLOAD_AGAIN
        ) from error
    sha256 = sha256_of([file, *external] if hash_weights else [file])
    step = StepRecord("load", "LOAD", len(details), time.perf_counter() - began, details=tuple(details))
    place = None if file.parent.name.startswith(TEMPORARY) else file  # it was written for this run, of one in memory
    return ModelArtifact(model=model, path=place, sha256=sha256, steps=(step,))


def _parse(file: Path) -> onnx.ModelProto:
    """The file as a protobuf, without external data."""
    remedy = "check the path"
    if not file.exists():
        raise UsageError("The model file does not exist", where=str(file), remedy=remedy)
    if not file.is_file():
        raise UsageError("The model path is not a file", where=str(file), remedy="name the .onnx file")
    check_no_pytorch(file)
    size = file.stat().st_size
    if size == 0:
        raise InvalidModelError("The model file is empty", where=str(file), remedy=_DOWNLOAD_AGAIN)
    if size > _MAX_PROTOBUF_BYTES:
        raise InvalidModelError(
            f"The file has {size} bytes; an ONNX file can have 2 GiB",
            where=str(file),
            remedy="save the weights beside the model: onnx.save(model, path, save_as_external_data=True)",
        )
    proto = onnx.ModelProto()
    try:
        with open(file, "rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
            view = memoryview(content)
            try:
                proto.ParseFromString(view)
            finally:
                view.release()
    except OSError as error:
        raise UsageError(
            f"The model file cannot be read: {error.strerror}", where=str(file), remedy=f"chmod +r {file}"
        ) from error
    except DecodeError as error:
        raise InvalidModelError(
            "The file is not an ONNX model, or it is cut off", where=str(file), remedy=_DOWNLOAD_AGAIN
        ) from error
    return proto


def _deserialize(proto: onnx.ModelProto, folder: Path) -> ir.Model:
    _own_nested_outputs(proto.graph.node)
    for function in proto.functions:
        _own_nested_outputs(function.node)
    for tensor, _ in all_tensors(proto):
        if tensor.data_location == onnx.TensorProto.EXTERNAL and 0 in tensor.dims:  # there is nothing to map
            tensor.data_location = onnx.TensorProto.DEFAULT
            del tensor.external_data[:]
    try:
        model = ir.from_proto(proto)
        _read_weights(model)
        _map_weights(model, folder)
    except OSError as error:
        raise UsageError(
            f"The weights cannot be read: {error.strerror}",
            where=str(error.filename or folder),
            remedy="check that they are readable, and that so many files can be open (ulimit -n)",
        ) from error
    except (ir.serde.SerdeError, ValueError, TypeError, KeyError, NotImplementedError) as error:
        cause = error.__cause__ or error
        raise InvalidModelError(
            f"The model cannot be read: {' '.join(str(cause).split())[:400]}",
            where=str(proto.graph.name or "graph"),
            remedy="export the model again; maps and sparse tensors are not supported",
        ) from error
    return model


def _map_weights(model: ir.Model, folder: Path) -> None:
    """Map weights in other files into memory, which reads nothing: two threads cannot map one of them at a time."""
    for tensor in _tensors(model):
        if isinstance(tensor, ir.ExternalTensor):
            # An absolute folder: with a relative one onnx_ir skips its check that the file lies inside it.
            tensor.base_dir = str(folder)
            tensor.numpy()


def _read_weights(model: ir.Model) -> None:
    """Hold initializers as arrays: as protobufs each use of one would copy it."""
    graphs = [*all_graphs(model.graph), *(g for item in model.functions.values() for g in all_graphs(item.graph))]
    for value in (value for graph in graphs for value in graph.initializers.values()):
        tensor = value.const_value
        if isinstance(tensor, ir.TensorProtoTensor) and tensor.dtype != ir.DataType.STRING:
            array = tensor.numpy()
            array.flags.writeable = False
            value.const_value = ir.Tensor(
                array, tensor.dtype, shape=tensor.shape, name=tensor.name, doc_string=tensor.doc_string
            )


def _tensors(model: ir.Model) -> list[ir.TensorProtocol]:
    graphs = list(all_graphs(model.graph))
    for function in model.functions.values():
        graphs += all_graphs(function.graph)
    tensors = [value.const_value for graph in graphs for value in graph.initializers.values() if value.const_value]
    for attribute in (a for graph in graphs for node in graph for a in node.attributes.values() if not a.is_ref()):
        if attribute.type == ir.AttributeType.TENSOR:
            tensors.append(attribute.as_tensor())
        elif attribute.type == ir.AttributeType.TENSORS:
            tensors.extend(attribute.as_tensors())
    return tensors


def _normalize(model: ir.Model, where: str) -> list[str]:
    """Bring the model, in place, to the form the rest of trtopt works on; what was changed, in words."""
    # A graph of custom operators alone need not import the default domain; rewrites may bring nodes of it.
    model.graph.opset_imports.setdefault("", TARGET)
    details = _drop_constant_inputs(model)
    _sort(model, where)
    details += _inline_functions(model, where)
    check_loops(model)
    opset = model.graph.opset_imports[""]
    if opset < TARGET:
        if not any(map(_is_ahead, all_nodes(model.graph))):
            _copy_types(infer_shapes(model), model)
        changed = convert(model.graph, opset, TARGET)
        model.graph.opset_imports[""] = TARGET
        details.append(f"opset {opset} -> {TARGET}: {changed} nodes rewritten")
    details += write_out(model)
    model.ir_version = max(model.ir_version, _IR_VERSION)
    used = {"", *(node.domain for node in all_nodes(model.graph))}
    for domain in set(model.graph.opset_imports) - used:
        del model.graph.opset_imports[domain]
    named = name_everything(model)
    if named:
        details.append(f"{named} nodes and values named")
    return details


def _is_ahead(node: ir.Node) -> bool:
    """Whether a node quantizes as no opset before 19 can: Model Optimizer writes such nodes into files of opset 17."""
    return "block_size" in node.attributes or any(
        value is not None and value.dtype == ir.DataType.FLOAT8E4M3FN for value in node.inputs
    )


def _stale(declared: dict[str, tuple[int | str | None, ...] | None], model: ir.Model) -> list[str]:
    """The outputs that the file declares in other shapes than its nodes compute."""
    found = ((value, declared[str(value.name)], dims_of_value(value)) for value in model.graph.outputs)
    return [
        f"output {value.name} is declared as {said} and computed as {value.shape}: the declared shape is left out"
        for value, said, dims in found
        if said is not None and dims is not None and is_stale(said, dims)
    ]


def _drop_constant_inputs(model: ir.Model) -> list[str]:
    """Initializers listed as inputs are constants; up to IR version 3 every initializer had to be listed."""
    listed = [value for value in model.graph.inputs if value.is_initializer()]
    if not listed:
        return []
    model.graph.inputs[:] = [value for value in model.graph.inputs if not value.is_initializer()]
    if model.ir_version <= 3:
        return [f"{len(listed)} initializers taken out of the inputs"]
    return [f"input {value.name} has a default value: it is now a constant" for value in listed]


def _sort(model: ir.Model, where: str) -> None:
    try:
        if not _is_sorted(model.graph):
            model.graph.sort()
        for function in model.functions.values():
            function.sort()
    except ValueError as error:
        raise InvalidModelError(
            "The graph has a cycle", where=_cycle(model) or where, remedy="export the model again"
        ) from error


def _is_sorted(graph: ir.Graph) -> bool:
    """Whether every node comes after those it reads; not asked of a graph with others nested in it."""
    before: set[ir.Node] = set()
    for node in graph:
        makers = (value.producer() for value in node.inputs if value is not None)
        if subgraphs_of(node) or not all(maker is None or maker in before for maker in makers):
            return False
        before.add(node)
    return True


def _cycle(model: ir.Model) -> str:
    nodes = list(all_nodes(model.graph))
    before: dict[ir.Node, list[ir.Node]] = {node: [] for node in nodes}
    for node in nodes:
        makers = [value.producer() for value in node.inputs if value is not None]
        before[node] += [maker for maker in makers if maker is not None and maker in before]
        before[node] += [inner for graph in subgraphs_of(node) for inner in graph]
    try:
        graphlib.TopologicalSorter(before).prepare()
    except graphlib.CycleError as error:
        labels = [f"{node.name or node.op_type}" for node in error.args[1]]
        return " <- ".join(labels[:8]) + (" <- ..." if len(labels) > 8 else "")
    return ""


def _own_nested_outputs(nodes: Iterable[onnx.NodeProto]) -> None:
    """Let every nested graph produce its outputs, in place: values handed through from outside get an ``Identity``.

    onnx_ir takes an output that its graph does not produce for a value without a maker.
    """
    for node in nodes:
        for attribute in node.attribute:
            for graph in graphs_of(attribute):
                own = {name for inner in graph.node for name in inner.output}
                own.update(value.name for value in graph.input)
                own.update(tensor.name for tensor in graph.initializer)
                for output in graph.output:
                    if output.name not in own:
                        outer, output.name = output.name, f"{output.name}_handed_to_{node.output[0]}"
                        graph.node.add(op_type="Identity", input=[outer], output=[output.name])
                        own.add(output.name)
                _own_nested_outputs(graph.node)


def _inline_functions(model: ir.Model, where: str) -> list[str]:
    """Inline the model's own functions, in place; first bring functions and graph to one opset."""
    if not model.functions:
        return []
    _check_functions(model, where)
    count = len(model.functions)
    opsets = {key: function.opset_imports.get("", 0) for key, function in model.functions.items()}
    common = max(model.graph.opset_imports[""], *opsets.values())
    if min(model.graph.opset_imports[""], *opsets.values()) < common:
        _copy_types(infer_shapes(model), model)
        convert(model.graph, model.graph.opset_imports[""], common)
        model.graph.opset_imports[""] = common
        for key, function in model.functions.items():
            convert(function.graph, opsets[key], common)
            function.opset_imports[""] = common
    try:
        common_passes.InlinePass()(model)
    except (ValueError, ir.passes.PassError) as error:
        raise InvalidModelError(
            f"The model's functions cannot be inlined: {' '.join(str(error.__cause__ or error).split())[:400]}",
            where=where,
            remedy="export the model without functions",
        ) from error
    model.functions.clear()
    return [f"{count} functions inlined"]


def _check_functions(model: ir.Model, where: str) -> None:
    """Refuse functions that cannot be inlined: they call themselves, or become too many nodes."""
    calls = {
        key: [node.op_identifier() for node in all_nodes(function.graph)] for key, function in model.functions.items()
    }
    inner = {key: {called for called in nodes if called in calls} for key, nodes in calls.items()}
    remedy = "export the model without functions"
    try:
        order = list(graphlib.TopologicalSorter(inner).static_order())
    except graphlib.CycleError as error:
        names = " <- ".join(key[1] for key in error.args[1][:8])
        raise InvalidModelError("A function of the model calls itself", where=names, remedy=remedy) from error
    sizes: dict[ir.OperatorIdentifier, int] = {}
    depths: dict[ir.OperatorIdentifier, int] = {}
    for key in order:
        sizes[key] = _inlined(calls[key], sizes)
        depths[key] = 1 + max((depths[called] for called in inner[key]), default=0)
    total = _inlined((node.op_identifier() for node in all_nodes(model.graph)), sizes)
    if total > _MOST_NODES or max(depths.values()) > _DEEPEST_CALLS:
        raise InvalidModelError(
            f"The model's functions are {total:.3g} nodes, in {max(depths.values())} levels",
            where=where,
            remedy=f"{remedy}; at most {_MOST_NODES} nodes in {_DEEPEST_CALLS} levels are inlined",
        )


def _inlined(nodes: Iterable[ir.OperatorIdentifier], sizes: Mapping[ir.OperatorIdentifier, int]) -> int:
    return sum(sizes.get(key, 1) for key in nodes)


def _copy_types(source: ir.Model, target: ir.Model) -> None:
    for from_graph, to_graph in zip(all_graphs(source.graph), all_graphs(target.graph), strict=True):
        for from_node, to_node in zip(from_graph, to_graph, strict=True):
            for from_value, to_value in zip(from_node.outputs, to_node.outputs, strict=True):
                to_value.type, to_value.shape = from_value.type, from_value.shape


_UNSAFE = re.compile(r"[\x00-\x1f\x7f\[\]]")
"""TensorRT writes node names into its layer list between brackets, one layer per line."""


def name_everything(model: ir.Model) -> int:
    """Give every node and every value of ``model`` a name no other has, in place; the number of names that changed.

    Names that are unique and readable stay. A node without a name gets TensorRT's own: ``node_of_`` and its first
    output. The names of the model's inputs and outputs never change. Node and value names are independent.
    """
    changed = 0
    fixed = {str(value.name) for value in (*model.graph.inputs, *model.graph.outputs)}
    values = _values(model)
    wanted = {str(value.name) for value in values if value.name}
    taken = set(fixed)
    for value in values:
        is_border = value.graph is model.graph and (value.is_graph_input() or value.is_graph_output())
        if value.name in fixed and is_border:
            continue
        name = free_name(_UNSAFE.sub("_", str(value.name or "value")), taken, wanted)
        if name != value.name:
            value.name = name
            changed += 1
    nodes = list(all_nodes(model.graph))
    wanted = {str(node.name) for node in nodes if node.name}
    taken = set()
    for node in nodes:
        first = next((str(value.name) for value in node.outputs if value.name), node.op_type)
        name = free_name(_UNSAFE.sub("_", node.name or f"node_of_{first}"), taken, wanted)
        if name != node.name:
            node.name = name
            changed += 1
    return changed


def _values(model: ir.Model) -> list[ir.Value]:
    """Values that need a name: outputs left out of a node have none and keep none."""
    values: dict[ir.Value, None] = {}
    for graph in all_graphs(model.graph):
        values.update(dict.fromkeys((*graph.inputs, *graph.initializers.values())))
        for node in graph:
            values.update(dict.fromkeys(v for v in node.outputs if v.name or v.uses() or v.is_graph_output()))
    return list(values)
