"""The layers of an engine, read from the builder's detailed log or from the engine inspector's JSON (TensorRT 8 to 11),
and what they add up to.

The inspector's JSON is tested on files that other builds left; the inspector itself was never run from here, since it
needs a GPU.
"""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trtopt.errors import EngineBuildError, LayerListError
from trtopt.report.schema.layers import LayerInfo, TensorInfo
from trtopt.source.portable import ADDED

BITS = {
    "Int64": 64,
    **dict.fromkeys(("Float", "Int32"), 32),
    **dict.fromkeys(("Half", "BFloat16"), 16),
    **dict.fromkeys(("FP8", "E8M0", "Int8", "UInt8", "Bool"), 8),
    **dict.fromkeys(("FP4", "FP4E2M1", "Int4"), 4),
}
"""Bits of an element by the compiler's name of the dtype."""

NOT_KERNELS = frozenset(
    {
        "signal",  # stream synchronisation
        "wait",
        "cjmp",  # branches and loops, decided on the host
        "cbr",
        "jmp",
        "memset",  # initial values of loop counters and host variables
        "add",  # of 64-bit loop counters
        "copy",
        "shape_call",
        "ShapeHostToDevice",
        "ShapeDeviceToHost",
        "NoOp",
        "Constant",
    }
)
"""Layer types that run no kernel worth counting."""

_LISTS = ("Inputs", "Constants", "Outputs")
_HEAD = re.compile(r"Name: (?P<name>.*?), LayerType: (?P<type>\w+), (?=Inputs: \[)", re.DOTALL)
_TENSOR = re.compile(
    r" ?\{ Name: (?P<name>.*?), (?:Location: \w+, )?Dimensions: \[(?P<dims>[-\d,]*)\],"
    r"(?: Strides: \[[-\d,]*\], StrideOrder: \[[-\d,]*\],)?"
    r" (?:Datatype: (?P<dtype>\w+), Format: (?P<format>[^{}]*?)|Format/Datatype: (?P<both>\w+)) \}",
    re.DOTALL,
)
_END = re.compile(r"\n\n(?:I/O Tensors|Bindings):")
"""What follows the list; the second in TensorRT for RTX 1.4."""

_TAIL = re.compile(
    r"(?:TacticName: (?P<tactic>.*?), )?(?:.*?, )?StreamId: -?\d+, (?:.*?, )?Metadata: (?P<metadata>.*)", re.DOTALL
)
CLAIM = "[ONNX Layer: "
"""What begins the name of an ONNX node in a layer's metadata."""

_SEPARATORS = "\x1e\x1f"
_CLAIM_BORDER = re.compile(rf"\](?:__\w+)?[{_SEPARATORS}]?\[ONNX Layer: ")
_CLAIM_END = re.compile(rf"\](?:__\w+)?[{_SEPARATORS}]?\Z")
_PROFILE = re.compile(r" \[profile (\d{1,6})\]")
_GROUP = re.compile(r"_myl(\d+)_\d+$")


def parse_layers_log(text: str) -> tuple[LayerInfo, ...]:
    """Read the builder's ``Layers:`` message (detailed profiling verbosity).

    Node and tensor names may hold commas, brackets, braces and line breaks: what ends a name is the field that must
    follow it, never a single character.

    Returns:
        The layers in the order of the engine, those of all optimization profiles. ``onnx_nodes`` are the names as
        claimed; see :func:`resolve_nodes`.

    Raises:
        EngineBuildError: A line is not understood.
    """
    if not text.startswith("Layers:"):
        raise _not_understood(text[:200])
    block = _END.split(text.removeprefix("Layers:"), maxsplit=1)[0].strip("\n")
    if not block:
        return ()
    if not block.startswith("Name: "):
        raise _not_understood(block[:200])
    return tuple(_layer("Name: " + record) for record in block.removeprefix("Name: ").split("\nName: "))


def _layer(record: str) -> LayerInfo:
    head = _HEAD.match(record)
    if head is None:
        raise _not_understood(record)
    tensors: dict[str, tuple[TensorInfo, ...]] = {}
    at = head.end()
    for field in _LISTS:
        if record.startswith(f"{field}: [", at):
            tensors[field], at = _tensor_list(record, at + len(field) + 3)
    tail = _TAIL.fullmatch(record, at)
    if tail is None or "Inputs" not in tensors or "Outputs" not in tensors:
        raise _not_understood(record)
    name, kind = head["name"], head["type"]
    # A dimension of a dynamic shape moves into a variable of the host: one 64-bit number.
    moved = (item.dtype == "Int64" and item.shape in ((), (1,)) for item in (*tensors["Inputs"], *tensors["Outputs"]))
    on_host = kind in NOT_KERNELS or (kind in ("reshape", "cast") and all(moved))
    return LayerInfo(
        name=name,
        type=kind,
        onnx_nodes=parse_metadata(tail["metadata"]),
        inputs=tensors["Inputs"],
        outputs=tensors["Outputs"],
        constants=tensors.get("Constants", ()),
        tactic=tail["tactic"] or "",
        is_kernel=not on_host,
        kind="none" if on_host else kind_of(name, kind),
    )


def _tensor_list(record: str, at: int) -> tuple[tuple[TensorInfo, ...], int]:
    """The tensors from ``at`` up to the closing bracket, and where the next field begins."""
    found: list[TensorInfo] = []
    while not record.startswith("], ", at):
        match = _TENSOR.match(record, at)
        dtype = match and (match["dtype"] or match["both"])  # TensorRT for RTX 1.4 has no format apart
        if match is None or dtype not in BITS:
            raise _not_understood(record)
        shape = tuple(int(dim) for dim in match["dims"].split(",") if dim)
        found.append(TensorInfo(match["name"], shape, dtype, match["format"] or dtype))
        at = match.end()
        if record.startswith(",", at):
            at += 1
    return tuple(found), at + 3


def parse_metadata(metadata: str) -> tuple[str, ...]:
    """The ONNX node names of ``[ONNX Layer: a][ONNX Layer: b]``, with or without 0x1E or 0x1F between them.

    The compiler may add how it changed a node: ``[ONNX Layer: a]__gemm_from_conv1x1``.

    Raises:
        EngineBuildError: It does not have that form.
    """
    if not metadata.strip(_SEPARATORS):
        return ()
    last = _CLAIM_END.search(metadata)
    if last is None or not metadata.startswith(CLAIM):
        raise _not_understood(f"Metadata: {metadata}")
    return tuple(dict.fromkeys(_CLAIM_BORDER.split(metadata[len(CLAIM) : last.start()])))


def kind_of(name: str, layer_type: str) -> str:
    """What kind of kernel a layer is, from its name and the compiler's layer type (see ``LayerInfo.kind``)."""
    lowered = layer_type.lower()
    if layer_type in NOT_KERNELS:
        return "none"
    if "mha" in name.lower() and lowered in ("kgen", "runtime_fusion"):
        return "mha"
    if lowered in ("correlation", "deconvolution") or "conv" in lowered:
        return "conv"
    if "gemm" in lowered or "matrixmultiply" in lowered:
        return "gemm"
    if lowered == "runtime_fusion":
        return "fused"
    return "pointwise" if lowered in ("kgen", "pointwise", "pointwisev2", "reformat") else "other"


def _not_understood(line: str) -> LayerListError:
    return LayerListError(
        "The builder's list of layers holds a line trtopt does not understand",
        where=line if len(line) <= 600 else f"{line[:400]} ... {line[-200:]}",
        remedy="report it with the line above; `trtopt doctor` prints the versions to add",
    )


@dataclass(frozen=True)
class Resolved:
    """Layers whose ``onnx_nodes`` are names of the graph.

    Attributes:
        unclaimed: Nodes of the graph no layer says it computes, in graph order.
    """

    layers: tuple[LayerInfo, ...]
    unclaimed: tuple[str, ...]


def resolve_nodes(layers: Iterable[LayerInfo], nodes: Sequence[str]) -> Resolved:
    """Match the names layers claim with the nodes of the graph.

    TensorRT writes a node of a subgraph as ``name | graph (attribute) | owner (operator)``. Nodes that only the saved
    file has are left out.

    Args:
        nodes: The names of all nodes, those of subgraphs included.

    Raises:
        EngineBuildError: A layer claims a node the graph does not have: the layers do not add up to this graph.
    """
    known = dict.fromkeys(nodes)
    resolved = tuple(
        replace(layer, onnx_nodes=tuple(dict.fromkeys(_resolve(name, layer, known) for name in _claimed(layer, known))))
        for layer in layers
    )
    claimed = {name for layer in resolved for name in layer.onnx_nodes}
    return Resolved(resolved, tuple(name for name in known if name not in claimed))


def _claimed(layer: LayerInfo, known: Collection[str]) -> list[str]:
    return [name for name in layer.onnx_nodes if name in known or not name.startswith(ADDED)]


def _resolve(name: str, layer: LayerInfo, known: Collection[str]) -> str:
    for candidate in (name, name.split(" | ", 1)[0]):
        if candidate in known:
            return candidate
    raise LayerListError(
        f"The engine's layers do not add up to the graph: a layer claims the node {name!r}, which is not in it",
        where=f"layer {layer.name}",
        remedy="report it with the builder's log; node names must be unique",
    )


def layers_of_profile(layers: Sequence[LayerInfo], profile: int = 0) -> tuple[LayerInfo, ...]:
    """The layers of one optimization profile: an engine of k profiles lists its kernels k times."""
    return tuple(layer for layer, number in zip(layers, profiles_of(layers), strict=True) if number == profile)


def profiles_of(layers: Sequence[LayerInfo]) -> tuple[int, ...]:
    """The number of each layer's optimization profile.

    Layers of one lowering share the number in ``_myl<n>_``; a lowering belongs to profile k > 0 when one of its names
    carries ``[profile k]``.
    """
    groups: dict[str, int] = {}
    for layer in layers:
        key = _group(layer)
        names = (layer.name, *(tensor.name for tensor in (*layer.inputs, *layer.outputs)))
        groups[key] = max(groups.get(key, 0), *(int(number) for name in names for number in _PROFILE.findall(name)), 0)
    return tuple(groups[_group(layer)] for layer in layers)


def _group(layer: LayerInfo) -> str:
    match = _GROUP.search(layer.name)
    return f"_myl{match[1]}" if match else layer.name


def kernel_count(layers: Sequence[LayerInfo]) -> int:
    """Kernels of the first optimization profile; a loop's body counts once."""
    return sum(layer.is_kernel for layer in layers_of_profile(layers))


def tensor_bytes(tensor: TensorInfo) -> int:
    """Bytes of a tensor, packed; a dynamic dimension counts as 1."""
    elements = 1
    for dim in tensor.shape:
        elements *= max(dim, 1) if dim < 0 else dim
    return (elements * BITS[tensor.dtype] + 7) // 8


def activation_bytes(layers: Sequence[LayerInfo]) -> int:
    """Bytes of activations all kernels of the first profile read and write, each once.

    A buffer that one kernel lists several times (views of it) counts the sum of the views, at most its own size.
    Dynamic dimensions count as 1: take the layers of a static build.
    """
    mine = layers_of_profile(layers)
    sizes = buffer_sizes(mine)
    return sum(moved_bytes(layer, sizes) for layer in mine if layer.is_kernel)


def moved_bytes(layer: LayerInfo, sizes: Mapping[str, int]) -> int:
    """Bytes of activations one layer reads and writes; ``sizes`` of :func:`buffer_sizes`."""
    return views_bytes(layer.inputs, sizes) + views_bytes(layer.outputs, sizes)


def buffer_sizes(layers: Iterable[LayerInfo]) -> dict[str, int]:
    """Bytes of every activation, by name: as large as the largest output of that name."""
    sizes: dict[str, int] = {}
    for tensor in (item for layer in layers for item in layer.outputs):
        sizes[tensor.name] = max(sizes.get(tensor.name, 0), tensor_bytes(tensor))
    return sizes


def weight_bytes(layers: Sequence[LayerInfo]) -> int:
    """Bytes of constants all kernels of the first profile read, each kernel each constant once."""
    return sum(constant_bytes(layer) for layer in layers_of_profile(layers) if layer.is_kernel)


def constant_bytes(*layers: LayerInfo) -> int:
    """Bytes of the constants that one or several layers read, each once."""
    return sum({item.name: tensor_bytes(item) for layer in layers for item in layer.constants}.values())


def own_name(tensor: TensorInfo) -> str:
    """The name of the tensor in the graph, without what TensorRT for RTX puts behind it."""
    return _LOWERING.sub("", tensor.name)


def in_place(layer: LayerInfo) -> frozenset[str]:
    """The buffers that a layer reads and writes: of a ``TensorScatter``, a cache that it puts new entries into."""
    return frozenset({item.name for item in layer.inputs} & {item.name for item in layer.outputs})


def views_bytes(tensors: Iterable[TensorInfo], sizes: Mapping[str, int]) -> int:
    """Bytes a kernel moves of the tensors it lists: several views of one buffer together at most the buffer's size.

    Args:
        sizes: Of :func:`buffer_sizes`; a network input is in none and as large as its largest view.
    """
    listed: dict[str, int] = {}
    largest: dict[str, int] = {}
    for tensor in tensors:
        size = tensor_bytes(tensor)
        listed[tensor.name] = listed.get(tensor.name, 0) + size
        largest[tensor.name] = max(largest.get(tensor.name, 0), size)
    return sum(min(size, max(sizes.get(name, size), largest[name])) for name, size in listed.items())


_LOWERING = re.compile(r"_myl\d+\Z")
_FORMAT_NAMES = {
    **{"Float": "FP32|FLOAT", "Half": "FP16|HALF", "BFloat16": "BF16|BFLOAT16", "FP8": "FP8(?:E4M3)?", "E8M0": "E8M0"},
    **{"FP4": "FP4(?:E2M1)?", "UInt8": "UINT8", "Int8": "INT8", "Int4": "INT4", "Int32": "INT32", "Int64": "INT64"},
    "Bool": "BOOL",
}
_FORMAT_DTYPES = tuple(
    (re.compile(rf"\b(?:{names})\b", re.IGNORECASE), dtype) for dtype, names in _FORMAT_NAMES.items()
)
_UNTOLD = re.compile("due to dynamic shapes")
"""What stands for the format of a tensor whose shape is known at run time only."""

_WEIGHTS = ("Weights", "Bias", "ConvWeights", "ConvBias")
_LARGEST = 2**40
"""More than any dimension or number of weights: a damaged file must not become a number that nothing can hold."""

_COPY = "Reformatting CopyNode for "
_PROFILE_SUFFIX = re.compile(r" \[profile \d+\]")
_FOREIGN = ("{ForeignNode[", "]}")
_BETWEEN = re.compile(r" \+ | \|\| ")
_NO_NODE = re.compile(
    r"\(Unnamed Layer\*|onnx::|.*ONNXTRT_|(?:un)?squeeze_(?:node_)?after_|copied_|reshape_(?:after|before)_"
    r"|__my[el]|.*_myl\d+_\d+$|.*_output_\d+$|.*:\d+$|.*\.(?:weight|bias|running_mean|running_var)$",
    re.DOTALL,
)
"""Parts of a layer's name that are no ONNX nodes: layers the parser or the builder adds, Myelin's own kernels (whose
names are not quite the nodes'), and tensors and constants by the names that PyTorch and TensorFlow give them."""


def parse_inspector_json(text: str) -> tuple[LayerInfo, ...]:
    """Read what ``IEngineInspector.get_engine_information`` or ``trtexec --exportLayerInfo`` gives.

    See :func:`read_layer` for what a layer may look like, and :func:`check_detailed` for engines that tell too little.

    Raises:
        EngineBuildError: It is not that.
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _json_not_understood(f"not JSON: {error}") from error
    entries = data.get("Layers") if isinstance(data, dict) else None
    if not isinstance(entries, list):
        raise _json_not_understood("there is no list 'Layers'")
    return tuple(read_layer(entry) for entry in entries)


def check_detailed(layers: Sequence[LayerInfo]) -> None:
    """Refuse layers that do not tell what they read and write, and in which types.

    Raises:
        EngineBuildError: The engine was built without detailed profiling verbosity, or inspected without shapes.
    """
    if any(not layer.type for layer in layers):
        raise EngineBuildError(
            "The engine tells the names of its layers only",
            where="Layers",
            remedy="build it with detailed profiling verbosity (trtexec --profilingVerbosity=detailed)",
        )
    for layer in layers:
        untold = [item for item in (*layer.inputs, *layer.outputs) if not item.dtype]
        if untold:
            raise EngineBuildError(
                f"The engine does not tell the type of the tensor {untold[0].name!r}, or one that trtopt does not know",
                where=f"{layer.name}: {untold[0].format!r}",
                remedy="inspect it with an execution context in which the shapes of all inputs are set; a type that is "
                "missing: report it with the file",
            )


def read_layer(entry: Any) -> LayerInfo:
    """One entry of the list ``Layers``.

    Understood are TensorRT 8 to 10 (``Format/Datatype``) and 11 (``Format`` and ``Datatype`` apart), and the bare name
    of a layer, which is all an engine without detailed verbosity tells: then ``type`` is empty. A tensor of dynamic
    shape has no ``dtype``, nor has one of a type that is not known. Layers without ONNX metadata (before TensorRT 8.6,
    or of another front end) have the ONNX names in their own, joined by ``" + "``: ``onnx_nodes`` are then those of its
    parts that are nodes, as far as a name can tell. Copies that change a format are of no node.

    Raises:
        EngineBuildError: It is not understood.
    """
    if isinstance(entry, str):
        return LayerInfo(entry, "", _nodes_in_name(entry), (), ())
    try:
        name, kind = _text(entry["Name"]), _text(entry["LayerType"])
        return LayerInfo(
            name=name,
            type=kind,
            onnx_nodes=_nodes(name, kind, entry.get("Metadata")),
            inputs=tuple(_json_tensor(item) for item in entry.get("Inputs") or ()),
            outputs=tuple(_json_tensor(item) for item in entry.get("Outputs") or ()),
            constants=_constants(name, entry),
            tactic=_text(entry.get("TacticName", "")),
            is_kernel=kind not in NOT_KERNELS,
            kind=kind_of(name, kind),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise _json_not_understood(f"{type(error).__name__} {error} in {reprlib.repr(entry)}") from error


def _nodes(name: str, kind: str, metadata: Any) -> tuple[str, ...]:
    if metadata is not None and (not _text(metadata) or CLAIM in metadata):
        return parse_metadata(metadata)
    return () if kind in NOT_KERNELS else _nodes_in_name(name)


def _nodes_in_name(name: str) -> tuple[str, ...]:
    """The ONNX nodes in ``a + b``, ``a || b``, ``PWN(a, b)`` and ``{ForeignNode[first...last]}``."""
    if name.startswith(_COPY):
        return ()
    plain = _PROFILE_SUFFIX.sub("", name)
    if plain.startswith(_FOREIGN[0]) and plain.endswith(_FOREIGN[1]):
        plain = plain.removeprefix(_FOREIGN[0]).removesuffix(_FOREIGN[1]).replace("...", " + ", 1)
    found: list[str] = []
    for part in _BETWEEN.split(plain):
        pointwise = "PWN(" in part
        found += [item.rstrip(")") for item in part.replace("PWN(", "").split(", ")] if pointwise else [part]
    return tuple(dict.fromkeys(part for part in found if part and not _NO_NODE.match(part)))


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value


def _count(value: Any, least: int = 0) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < _LARGEST:
        raise TypeError(f"{value!r} is no size")
    return value


def _json_tensor(item: dict[str, Any]) -> TensorInfo:
    form = _text(item.get("Format/Datatype") or item.get("Format") or "")
    dtype = _text(item.get("Datatype") or item.get("DataType") or (form if form in BITS else _dtype_of(form)))
    known = dtype if dtype in BITS else ""
    return TensorInfo(_text(item["Name"]), tuple(_count(dim, -1) for dim in item["Dimensions"]), known, form or dtype)


def _dtype_of(form: str) -> str:
    if _UNTOLD.search(form):
        return ""
    return next((dtype for pattern, dtype in _FORMAT_DTYPES if pattern.search(form)), "")


def _constants(name: str, entry: dict[str, Any]) -> tuple[TensorInfo, ...]:
    """Constants, and the weights of layers that tell only their type and number of elements."""
    listed = [_json_tensor(item) for item in entry.get("Constants") or ()]
    for key in _WEIGHTS:
        weights = entry.get(key)
        if weights and _count(weights["Count"]):
            dtype = _text(weights["Type"])
            if dtype not in BITS:
                raise _json_not_understood(f"datatype {dtype!r} of the {key} of {name!r}")
            listed.append(TensorInfo(f"{name} {key}", (weights["Count"],), dtype))
    return tuple(listed)


def _json_not_understood(detail: str) -> EngineBuildError:
    return EngineBuildError(
        "trtopt does not understand the engine's layer information",
        where=detail,
        remedy="report it with the file; `trtopt doctor` prints the versions to add",
    )
