"""The engine inspector's JSON (TensorRT 8 to 11), read into the same layers as the builder's log.

Tested on files that other builds left; the inspector itself was never run from here, since it needs a GPU.
"""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Sequence
from typing import Any

from trtopt.engine.layers import BITS, CLAIM, NOT_KERNELS, kind_of, parse_metadata
from trtopt.errors import EngineBuildError
from trtopt.report.schema.layers import LayerInfo, TensorInfo

_FORMAT_DTYPES = (
    (re.compile(r"\bFP32\b|\bFLOAT\b", re.IGNORECASE), "Float"),
    (re.compile(r"\bFP16\b|\bHALF\b", re.IGNORECASE), "Half"),
    (re.compile(r"\bBF16\b|\bBFLOAT16\b", re.IGNORECASE), "BFloat16"),
    (re.compile(r"\bFP8(?:E4M3)?\b", re.IGNORECASE), "FP8"),
    (re.compile(r"\bE8M0\b", re.IGNORECASE), "E8M0"),
    (re.compile(r"\bFP4(?:E2M1)?\b", re.IGNORECASE), "FP4"),
    (re.compile(r"\bUINT8\b", re.IGNORECASE), "UInt8"),
    (re.compile(r"\bINT8\b", re.IGNORECASE), "Int8"),
    (re.compile(r"\bINT4\b", re.IGNORECASE), "Int4"),
    (re.compile(r"\bINT32\b", re.IGNORECASE), "Int32"),
    (re.compile(r"\bINT64\b", re.IGNORECASE), "Int64"),
    (re.compile(r"\bBOOL\b", re.IGNORECASE), "Bool"),
)
_UNTOLD = re.compile("due to dynamic shapes")
"""What stands for the format of a tensor whose shape is known at run time only."""

_WEIGHTS = ("Weights", "Bias", "ConvWeights", "ConvBias")
_LARGEST = 2**40
"""More than any dimension or number of weights: a damaged file must not become a number that nothing can hold."""

_COPY = "Reformatting CopyNode for "
_PROFILE = re.compile(r" \[profile \d+\]")
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
        raise _not_understood(f"not JSON: {error}") from error
    entries = data.get("Layers") if isinstance(data, dict) else None
    if not isinstance(entries, list):
        raise _not_understood("there is no list 'Layers'")
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
            inputs=tuple(_tensor(item) for item in entry.get("Inputs") or ()),
            outputs=tuple(_tensor(item) for item in entry.get("Outputs") or ()),
            constants=_constants(name, entry),
            tactic=_text(entry.get("TacticName", "")),
            is_kernel=kind not in NOT_KERNELS,
            kind=kind_of(name, kind),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise _not_understood(f"{type(error).__name__} {error} in {reprlib.repr(entry)}") from error


def _nodes(name: str, kind: str, metadata: Any) -> tuple[str, ...]:
    if metadata is not None and (not _text(metadata) or CLAIM in metadata):
        return parse_metadata(metadata)
    return () if kind in NOT_KERNELS else _nodes_in_name(name)


def _nodes_in_name(name: str) -> tuple[str, ...]:
    """The ONNX nodes in ``a + b``, ``a || b``, ``PWN(a, b)`` and ``{ForeignNode[first...last]}``."""
    if name.startswith(_COPY):
        return ()
    plain = _PROFILE.sub("", name)
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


def _tensor(item: dict[str, Any]) -> TensorInfo:
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
    listed = [_tensor(item) for item in entry.get("Constants") or ()]
    for key in _WEIGHTS:
        weights = entry.get(key)
        if weights and _count(weights["Count"]):
            dtype = _text(weights["Type"])
            if dtype not in BITS:
                raise _not_understood(f"datatype {dtype!r} of the {key} of {name!r}")
            listed.append(TensorInfo(f"{name} {key}", (weights["Count"],), dtype))
    return tuple(listed)


def _not_understood(detail: str) -> EngineBuildError:
    return EngineBuildError(
        "trtopt does not understand the engine's layer information",
        where=detail,
        remedy="report it with the file; `trtopt doctor` prints the versions to add",
    )
