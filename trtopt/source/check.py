"""Checks of a parsed ONNX file before anything else touches it: versions, names, operators, tensors, weight files."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import onnx
import onnx.checker
import onnx.defs
import onnx_ir as ir

from trtopt.errors import InvalidModelError
from trtopt.graph import edit
from trtopt.graph.edit import all_nodes, constant_tensor_of
from trtopt.support.files import hash_file

MIN_OPSET = 7
MIN_IR_VERSION = 3

_CHECKED_BYTES = 1 << 16
"""Tensors in attributes above this size are not handed to ONNX's checker, which would copy them."""

_DEPRECATED_GROUP_NORM = range(18, 21)
"""Opsets whose GroupNormalization the checker calls deprecated; exporters wrote it, and it is converted."""

_MAX_VERSION = (1 << 31) - 1
"""ONNX's checker holds versions in 32 bits."""

_EXPORT_AGAIN = "export the model again; onnx.checker.check_model(path) checks a file by itself"

_TYPED_FIELDS = {
    "float_data": {"FLOAT": 1, "COMPLEX64": 2},
    "double_data": {"DOUBLE": 1, "COMPLEX128": 2},
    "int64_data": {"INT64": 1},
    "uint64_data": {"UINT64": 1, "UINT32": 1},
}
"""Field of ``TensorProto`` and how many of its entries one element takes; every other type uses ``int32_data``."""


def _invalid(what: str, where: str) -> InvalidModelError:
    return InvalidModelError(what, where=where, remedy=_EXPORT_AGAIN)


_QDQ, _BLOCKS = ("QuantizeLinear", "DequantizeLinear"), 21
"""Q/DQ in blocks came with opset 21. Model Optimizer 0.47 writes it into models of older ones, which no other operator
contradicts: they are converted to that opset as they are loaded."""


@dataclass(frozen=True)
class _Scope:
    """What the nodes of a graph or function are checked against."""

    ir_version: int
    opsets: dict[str, int]
    functions: frozenset[tuple[str, str]]

    @property
    def context(self) -> onnx.checker.C.CheckerContext:
        context = onnx.checker.C.CheckerContext()
        context.ir_version = self.ir_version
        context.opset_imports = self.opsets
        return context


def check_model(proto: onnx.ModelProto, where: str) -> None:
    """Check a model whose external data is not loaded.

    The order of nodes and the shapes of values are left to later steps.

    Raises:
        InvalidModelError: With the node, value or field at fault.
    """
    if not proto.HasField("graph") or not (proto.graph.node or proto.graph.output or proto.graph.input):
        raise InvalidModelError("The file holds no ONNX graph", where=where, remedy="give a model saved by onnx.save")
    opsets = _check_versions(proto, where)
    functions = frozenset((normal_domain(f.domain), f.name) for f in proto.functions)
    for function in proto.functions:
        name = f"function {function.domain}.{function.name}"
        imports = {**opsets, **_imports(function.opset_import, name)}
        _check_opset(imports.get(""), name)
        _check_nodes(function.node, set(function.input), _Scope(proto.ir_version, imports, functions))
    _check_graph(proto.graph, set(), _Scope(proto.ir_version, opsets, functions), where)
    if not proto.graph.output:
        raise _invalid("The graph has no outputs", where)
    _check_inputs(proto.graph)
    for tensor, owner in all_tensors(proto):
        _check_tensor(tensor, owner)


def normal_domain(domain: str) -> str:
    """The default domain has two spellings."""
    return "" if domain == "ai.onnx" else domain


def all_tensors(proto: onnx.ModelProto) -> Iterator[tuple[onnx.TensorProto, str]]:
    """Every tensor of the file (initializers and attributes, nested graphs, functions) and where it is."""
    for tensor in proto.graph.initializer:
        yield tensor, f"initializer {tensor.name}"
    yield from _tensors_of_nodes(proto.graph.node)
    for function in proto.functions:
        yield from _tensors_of_nodes(function.node)


def node_label(node: onnx.NodeProto) -> str:
    """A node as messages name it."""
    if node.name:
        return f"node {node.name} ({node.op_type})"
    return f"node {node.op_type} with output {node.output[0] if node.output else '?'}"


def _tensors_of_nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[tuple[onnx.TensorProto, str]]:
    for node in nodes:
        for attribute in node.attribute:
            for tensor in (*((attribute.t,) if attribute.HasField("t") else ()), *attribute.tensors):
                yield tensor, node_label(node)
            for graph in graphs_of(attribute):
                for tensor in graph.initializer:
                    yield tensor, f"initializer {tensor.name} in {node_label(node)}"
                yield from _tensors_of_nodes(graph.node)


def graphs_of(attribute: onnx.AttributeProto) -> list[onnx.GraphProto]:
    """The graphs an attribute holds."""
    return [*((attribute.g,) if attribute.HasField("g") else ()), *attribute.graphs]


def _check_versions(proto: onnx.ModelProto, where: str) -> dict[str, int]:
    if proto.ir_version < MIN_IR_VERSION:
        raise _invalid(f"The file has IR version {proto.ir_version}; {MIN_IR_VERSION} and later are supported", where)
    if proto.ir_version > onnx.IR_VERSION:
        raise InvalidModelError(
            f"The file has IR version {proto.ir_version}; the installed onnx knows up to {onnx.IR_VERSION}",
            where=where,
            remedy="pip install --upgrade onnx, or export for an older version",
        )
    opsets = _imports(proto.opset_import, where)
    if "" in opsets or any(normal_domain(node.domain) == "" for node in proto.graph.node):
        _check_opset(opsets.get(""), where)
    return opsets


def _imports(items: Iterable[onnx.OperatorSetIdProto], where: str) -> dict[str, int]:
    opsets: dict[str, int] = {}
    for item in items:
        _require_text(item.domain, where)
        domain = normal_domain(item.domain)
        if not 0 < item.version <= _MAX_VERSION:
            raise _invalid(f"The domain {domain!r} is imported in version {item.version}", where)
        if opsets.setdefault(domain, item.version) != item.version:
            raise _invalid(f"The domain {domain!r} is imported in versions {opsets[domain]} and {item.version}", where)
    return opsets


def _check_opset(version: int | None, where: str) -> None:
    newest = onnx.defs.onnx_opset_version()
    if version is None:
        raise _invalid("The file imports no version of the ONNX operators", where)
    if version < MIN_OPSET:
        raise InvalidModelError(
            f"Opset {version} is too old; {MIN_OPSET} and later are supported",
            where=where,
            remedy="export the model again with opset 13 or later, or try onnx.version_converter.convert_version",
        )
    if version > newest:
        raise InvalidModelError(
            f"Opset {version} is newer than the installed onnx knows ({newest})",
            where=where,
            remedy=f"pip install --upgrade onnx, or export with opset {newest} or earlier",
        )


def _check_graph(graph: onnx.GraphProto, outer: set[str], scope: _Scope, where: str) -> None:
    if graph.sparse_initializer:
        name = graph.sparse_initializer[0].values.name
        raise InvalidModelError(
            "Sparse initializers are not supported", where=f"initializer {name}", remedy="store the tensor as dense"
        )
    names: set[str] = set()
    for value in graph.input:
        _define(value.name, names, f"graph input in {where}")
    initializers: set[str] = set()
    for tensor in graph.initializer:
        _define(tensor.name, initializers, f"initializer in {where}")
    known = _check_nodes(graph.node, names | initializers, scope, outer)
    for output in graph.output:
        # A nested graph may hand out a value of the graph around it.
        if output.name not in known:
            raise _invalid("A graph output is not produced by any node", f"output {output.name}")


def _check_nodes(
    nodes: Iterable[onnx.NodeProto], defined: set[str], scope: _Scope, outer: set[str] | None = None
) -> set[str]:
    """Check names and operators; return every name that is visible."""
    own = set(defined)
    for node in nodes:
        for name in node.output:
            if name:
                _define(name, own, node_label(node))
    known = own | (outer or set())
    context = scope.context
    for node in nodes:
        for name in node.input:
            if name and name not in known:
                raise _invalid(f"An input is not defined anywhere: {name}", node_label(node))
        _check_operator(node, scope, context)
        for attribute in node.attribute:
            for graph in graphs_of(attribute):
                _check_graph(graph, known, scope, f"{attribute.name} of {node_label(node)}")
    return known


def _require_text(text: str | bytes, where: str) -> None:
    """Protobuf hands out text that is not valid UTF-8 as bytes."""
    if not isinstance(text, str):
        raise _invalid(f"The file is damaged: {text!r} is not text", where)


def _define(name: str, names: set[str], where: str) -> None:
    _require_text(name, where)
    if not name:
        raise _invalid("A value has no name", where)
    if name in names:
        raise _invalid(f"Two values have the same name: {name}", where)
    names.add(name)


def _check_operator(node: onnx.NodeProto, scope: _Scope, context: onnx.checker.C.CheckerContext) -> None:
    """The operator exists in its domain's version, with these attributes and this many inputs and outputs."""
    for text in (node.op_type, node.domain, node.name):
        _require_text(text, f"node with output {list(node.output)}")
    domain = normal_domain(node.domain)
    if (domain, node.op_type) in scope.functions:
        return
    if domain == "" and node.op_type == "GroupNormalization" and scope.opsets[""] in _DEPRECATED_GROUP_NORM:
        return
    if (domain, node.op_type) == ("com.microsoft", "EPContext"):
        raise InvalidModelError(
            "The model holds a compiled engine in place of operators",
            where=node_label(node),
            remedy="give the model that it was made from; the engine is loaded where its manifest lies beside it",
        )
    if domain not in scope.opsets:
        raise _invalid(f"The domain {domain!r} is used and not imported", node_label(node))
    if domain == "" and node.op_type in _QDQ and any(item.name == "block_size" for item in node.attribute):
        context = replace(scope, opsets={**scope.opsets, "": max(scope.opsets[""], _BLOCKS)}).context
    try:
        onnx.checker.check_node(_light(node), context)
    except onnx.checker.ValidationError as error:
        unknown = domain == "" and not onnx.defs.has(node.op_type, scope.opsets[""])
        version = scope.opsets[domain]
        message = str(error).split("==>")[0].strip()
        raise InvalidModelError(
            f"Opset {version} has no operator {node.op_type}" if unknown else f"The node is not valid: {message}",
            where=node_label(node),
            remedy="replace the operator, or give it the domain of its plugin" if unknown else _EXPORT_AGAIN,
        ) from error


def _light(node: onnx.NodeProto) -> onnx.NodeProto:
    """``node`` with empty nested graphs and without large tensors, which are checked on their own."""
    heavy = [a for a in node.attribute if graphs_of(a) or (a.HasField("t") and a.t.ByteSize() > _CHECKED_BYTES)]
    if not heavy:
        return node
    light = onnx.NodeProto(op_type=node.op_type, domain=node.domain, name=node.name)
    light.input.extend(node.input)
    light.output.extend(node.output)
    for attribute in node.attribute:
        copy = light.attribute.add(name=attribute.name, type=attribute.type)
        if attribute.HasField("g"):
            copy.g.name = "nested"
        elif attribute.graphs:
            for _ in attribute.graphs:
                copy.graphs.add(name="nested")
        elif attribute.HasField("t") and attribute.t.ByteSize() > _CHECKED_BYTES:
            copy.t.data_type, copy.t.raw_data = onnx.TensorProto.UINT8, b"\0"
            copy.t.dims.append(1)
        else:
            copy.CopyFrom(attribute)
    return light


def _check_inputs(graph: onnx.GraphProto) -> None:
    constants = {tensor.name for tensor in graph.initializer}
    for value in graph.input:
        if value.name in constants:
            continue
        if value.type.WhichOneof("value") != "tensor_type":
            kind = value.type.WhichOneof("value") or "no type"
            raise InvalidModelError(
                f"A graph input is not a tensor ({kind})",
                where=f"input {value.name}",
                remedy="export the model with tensors as inputs; sequences, maps and optionals are not supported",
            )
        tensor = value.type.tensor_type
        if tensor.elem_type not in onnx.TensorProto.DataType.values() or tensor.elem_type == 0:
            raise _invalid("A graph input has no type", f"input {value.name}")
        if not tensor.HasField("shape"):
            raise InvalidModelError(
                "A graph input has no rank",
                where=f"input {value.name}",
                remedy="export the model with example inputs; dimensions may be dynamic, their number may not",
            )


def _check_tensor(tensor: onnx.TensorProto, owner: str) -> None:
    """The tensor has a type, and as much data as its shape asks for (external data is checked with its file)."""
    if tensor.data_type == 0 or tensor.data_type not in onnx.TensorProto.DataType.values():
        raise _invalid("A tensor has no valid type", owner)
    if any(dim < 0 for dim in tensor.dims):
        raise _invalid("A tensor has a negative dimension", owner)
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        return
    elements = math.prod(tensor.dims)
    dtype = ir.DataType(tensor.data_type)
    if dtype == ir.DataType.STRING:
        found, expected = len(tensor.string_data), elements
    elif tensor.HasField("raw_data"):
        found, expected = len(tensor.raw_data), -(-elements * dtype.bitwidth // 8)
    else:
        typed = ((field, types[dtype.name]) for field, types in _TYPED_FIELDS.items() if dtype.name in types)
        field, per_element = next(typed, ("int32_data", 1))
        packed = max(1, 8 // dtype.bitwidth) if field == "int32_data" else 1
        found, expected = len(getattr(tensor, field)), -(-elements * per_element // packed)
    if found != expected:
        raise InvalidModelError(
            f"A tensor of shape {list(tensor.dims)} and type {dtype.name} has {found} bytes or entries, not {expected}",
            where=owner,
            remedy="the file is damaged: " + _EXPORT_AGAIN,
        )


_MOST_TRIPS = 1 << 30
"""A quarter of an hour, were a trip a microsecond. A larger trip count stands for none: exporters write the largest
INT64 for ``while`` loops, which have a condition."""


def check_loops(model: ir.Model) -> None:
    """Raise where a Loop has no trip count, or one that no run reaches, and a condition that is true at all times.

    A condition that is computed is believed: whether it becomes false is for a run to tell, whose time is limited.

    Raises:
        InvalidModelError: With the node.
    """
    for node in all_nodes(model.graph):
        if node.op_type != "Loop" or node.domain not in ("", "ai.onnx"):
            continue
        trips = node.inputs[0] if node.inputs else None
        count = _scalar(trips, ir.DataType.INT64)
        bounded = trips is not None and (count is None or count < _MOST_TRIPS)
        if not bounded and _always(node):
            raise InvalidModelError(
                "The loop never ends: its condition is always true, and "
                + ("it has no trip count" if count is None else f"its trip count is {count}"),
                where=f"node {node.name}",
                remedy="give it a trip count, or a condition that becomes false",
            )


def _always(node: ir.Node) -> bool:
    body = node.attributes["body"].as_graph()
    first = node.inputs[1] if len(node.inputs) > 1 else None
    begins = first is None or _is_true(first)
    if not body.outputs:
        return False
    kept = len(body.inputs) > 1 and _source(body.outputs[0]) is body.inputs[1]
    return begins and (kept or _is_true(body.outputs[0]))


def _is_true(value: ir.Value) -> bool:
    return bool(_scalar(_source(value), ir.DataType.BOOL))


def _scalar(value: ir.Value | None, dtype: ir.DataType) -> int | None:
    """The only entry of a constant; None for what is no constant, has more of them, or another type."""
    tensor = constant_tensor_of(value)
    return int(tensor.numpy().item()) if tensor is not None and tensor.dtype == dtype and tensor.size == 1 else None


def _source(value: ir.Value) -> ir.Value:
    while (node := value.producer()) is not None and node.op_type == "Identity" and node.inputs[0] is not None:
        value = node.inputs[0]
    return value


def check_external_data(proto: onnx.ModelProto, folder: Path) -> list[Path]:
    """Check every tensor whose data lies in another file.

    Args:
        folder: The model's folder, absolute: the only place such files may lie.

    Returns:
        The files, each once, sorted.

    Raises:
        InvalidModelError: A file is missing, lies outside the folder (by its name or by a symbolic link), or is
            shorter than the tensor needs.
    """
    sizes: dict[str, int] = {}
    files: set[Path] = set()
    for tensor, owner in all_tensors(proto):
        if tensor.data_location != onnx.TensorProto.EXTERNAL:
            continue
        entries = {item.key: item.value for item in tensor.external_data}
        location = entries.get("location", "")
        if location not in sizes:
            path = _resolve(location, folder, owner)
            files.add(path)
            sizes[location] = path.stat().st_size
        _check_range(tensor, entries, sizes[location], owner)
    return sorted(files)


def weight_files(model: ir.Model) -> dict[str, Path]:
    """The files that hold the model's external weights, by what messages call them."""
    values = [value for graph in edit.all_graphs(model.graph) for value in graph.initializers.values()]
    tensors = [value.const_value for value in values if isinstance(value.const_value, ir.ExternalTensor)]
    return {f"the weights of the model ({Path(item.path).name})": Path(item.path) for item in tensors}


def sha256_of(files: Iterable[Path]) -> str:
    """SHA-256, hex: of the only file, or of the concatenated hashes of several."""
    hashes = [hash_file(path, "The model")[1] for path in files]
    return hashes[0] if len(hashes) == 1 else hashlib.sha256(bytes.fromhex("".join(hashes))).hexdigest()


def _resolve(location: str, folder: Path, owner: str) -> Path:
    what = f"{owner}: {location}"
    if not location or "\0" in location:
        raise InvalidModelError("External data has no file name", where=what, remedy="save the model again")
    outside = (
        "keep the weights in the model's folder: onnx.save(model, path, save_as_external_data=True) writes them there"
    )
    if os.path.isabs(location) or "\\" in location or ":" in location:
        raise InvalidModelError("External data has an absolute or non-portable path", where=what, remedy=outside)
    path = Path(os.path.normpath(folder / location))
    if folder not in path.parents:
        raise InvalidModelError("External data lies outside the model's folder", where=what, remedy=outside)
    real = Path(os.path.realpath(path))  # not Path.resolve, to which a link to itself is an error before Python 3.13
    if Path(os.path.realpath(folder)) not in real.parents:
        raise InvalidModelError(
            "External data is a symbolic link out of the model's folder",
            where=f"{what} -> {real}",
            remedy="copy the file to where the link is (cp --dereference)",
        )
    if not path.is_file():
        raise InvalidModelError(
            "External data is missing", where=f"{owner}: {path}", remedy="put the weight file beside the model"
        )
    if not os.access(path, os.R_OK):
        raise InvalidModelError("External data cannot be read", where=f"{owner}: {path}", remedy=f"chmod +r {path}")
    if path.stat().st_nlink > 1:
        raise InvalidModelError(
            "External data has several hard links, so it may be a file from outside the folder",
            where=f"{owner}: {path}",
            remedy="replace it by a copy of its own (cp, then mv)",
        )
    return path


def _check_range(tensor: onnx.TensorProto, entries: dict[str, str], size: int, owner: str) -> None:
    dtype = ir.DataType(tensor.data_type)
    if dtype == ir.DataType.STRING:
        raise InvalidModelError("Strings cannot be external data", where=owner, remedy="save the model again")
    needed = -(-math.prod(tensor.dims) * dtype.bitwidth // 8)
    try:
        offset, length = int(entries.get("offset", "0")), int(entries.get("length", str(needed)))
    except ValueError as error:
        raise InvalidModelError(
            f"Offset or length of external data is not a number: {error}", where=owner, remedy="save the model again"
        ) from error
    if offset < 0 or length < 0 or length != needed:
        raise InvalidModelError(
            f"External data has offset {offset} and length {length}; shape {list(tensor.dims)} and type {dtype.name} "
            f"need {needed} bytes",
            where=owner,
            remedy="save the model again",
        )
    if offset + needed > size:
        raise InvalidModelError(
            f"External data is too short: bytes {offset} to {offset + needed} of a file of {size}",
            where=f"{owner}: {entries['location']}",
            remedy="the weight file is incomplete: copy or download it again",
        )
