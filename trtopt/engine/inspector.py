"""The engine inspector's JSON (TensorRT 8 to 11), read into the same layers as the builder's log.

Tested on files that other builds left; the inspector itself was never run from here, since it needs a GPU.
"""

from __future__ import annotations

import json
import re
from typing import Any

from trtopt.engine.layers import BITS, NOT_KERNELS, kind_of, parse_metadata
from trtopt.errors import EngineBuildError
from trtopt.report.records import LayerInfo, TensorInfo

_FORMAT_DTYPES = (
    (re.compile(r"\bFP32\b|\bFLOAT\b", re.IGNORECASE), "Float"),
    (re.compile(r"\bFP16\b|\bHALF\b", re.IGNORECASE), "Half"),
    (re.compile(r"\bBF16\b|\bBFLOAT16\b", re.IGNORECASE), "BFloat16"),
    (re.compile(r"\bFP8\b", re.IGNORECASE), "FP8"),
    (re.compile(r"\bFP4\b", re.IGNORECASE), "FP4"),
    (re.compile(r"\bUINT8\b", re.IGNORECASE), "UInt8"),
    (re.compile(r"\bINT8\b", re.IGNORECASE), "Int8"),
    (re.compile(r"\bINT4\b", re.IGNORECASE), "Int4"),
    (re.compile(r"\bINT32\b", re.IGNORECASE), "Int32"),
    (re.compile(r"\bINT64\b", re.IGNORECASE), "Int64"),
    (re.compile(r"\bBOOL\b", re.IGNORECASE), "Bool"),
)
_WEIGHTS = ("Weights", "Bias", "ConvWeights", "ConvBias")


def parse_inspector_json(text: str) -> tuple[LayerInfo, ...]:
    """Read what ``IEngineInspector.get_engine_information`` or ``trtexec --exportLayerInfo`` gives.

    Understood are TensorRT 8 to 10 (``Bindings``, ``Format/Datatype``) and 11 (``I/O Tensors``, ``Format`` and
    ``Datatype`` apart). Engines of TensorRT 8 carry no metadata: their layers' names are the ONNX names joined by
    ``" + "``, which is what ``onnx_nodes`` is then made of.

    Raises:
        EngineBuildError: It is not that, or was built without detailed profiling verbosity.
    """
    try:
        data = json.loads(text)
    except ValueError as error:
        raise _not_understood(f"not JSON: {error}") from error
    entries = data.get("Layers") if isinstance(data, dict) else None
    if not isinstance(entries, list):
        raise _not_understood("there is no list 'Layers'")
    if any(isinstance(entry, str) for entry in entries):
        raise EngineBuildError(
            "The engine tells the names of its layers only",
            where="Layers",
            remedy="build it with detailed profiling verbosity (trtexec --profilingVerbosity=detailed)",
        )
    return tuple(_layer(entry) for entry in entries)


def _layer(entry: Any) -> LayerInfo:
    try:
        name, kind = entry["Name"], entry["LayerType"]
        metadata = entry.get("Metadata")
        nodes = parse_metadata(metadata) if metadata is not None else _names_joined(name, kind)
        return LayerInfo(
            name=name,
            type=kind,
            onnx_nodes=nodes,
            inputs=tuple(_tensor(item) for item in entry["Inputs"]),
            outputs=tuple(_tensor(item) for item in entry["Outputs"]),
            constants=_constants(entry),
            tactic=entry.get("TacticName", ""),
            is_kernel=kind not in NOT_KERNELS,
            kind=kind_of(name, kind),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise _not_understood(f"{type(error).__name__} {error} in {str(entry)[:400]}") from error


def _names_joined(name: str, kind: str) -> tuple[str, ...]:
    if kind in NOT_KERNELS or kind == "Reformat":
        return ()
    return tuple(part for part in name.split(" + ") if part)


def _tensor(item: dict[str, Any]) -> TensorInfo:
    form = item.get("Format/Datatype") or item.get("Format") or ""
    dtype = item.get("Datatype") or (form if form in BITS else _dtype_of(form))
    if dtype not in BITS:
        raise _not_understood(f"datatype {dtype!r} of the tensor {item['Name']!r}")
    return TensorInfo(item["Name"], tuple(int(dim) for dim in item["Dimensions"]), dtype, form)


def _dtype_of(form: str) -> str:
    for pattern, dtype in _FORMAT_DTYPES:
        if pattern.search(form):
            return dtype
    raise _not_understood(f"format {form!r}")


def _constants(entry: dict[str, Any]) -> tuple[TensorInfo, ...]:
    """Constants, and the weights of layers that tell only their type and number of elements."""
    listed = [_tensor(item) for item in entry.get("Constants") or ()]
    for key in _WEIGHTS:
        weights = entry.get(key)
        if weights and weights["Count"]:
            listed.append(TensorInfo(f"{entry['Name']} {key}", (int(weights["Count"]),), weights["Type"]))
    return tuple(listed)


def _not_understood(detail: str) -> EngineBuildError:
    return EngineBuildError(
        "trtopt does not understand the engine's layer information",
        where=detail,
        remedy="report it with the file; `trtopt doctor` prints the versions to add",
    )
