"""The records of the JSON contract ``trtopt.manifest/1``: what an engine is, and what it was made from.

The same inputs give the same manifest to the byte: it holds no times, no paths, and not the name of its own engine, so
that engine and manifest may be copied and renamed together.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from trtopt.report.schema.build import AccuracyRecord, PrecisionRecord
from trtopt.support.json_text import plain

SCHEMA = "trtopt.manifest/1"

DIGEST = "digest"
"""The field that :func:`with_digest` adds."""

_SEAL = re.compile(rf',\n "{DIGEST}": "([0-9a-f]{{64}})"\n}}\n\Z'.encode())
_SEAL_BYTES = 96
"""At least as long as what :func:`sealed` adds, so that only the end of a file is searched."""


@dataclass(frozen=True)
class FileHash:
    """A file by its bare name (a script with its function, ``metric.py:top5``). ``sha256`` is hex, as elsewhere."""

    name: str
    bytes: int
    sha256: str


def content_hash(name: str, content: bytes) -> FileHash:
    """The hash of a file of this name and content."""
    return FileHash(name, len(content), hashlib.sha256(content).hexdigest())


@dataclass(frozen=True)
class SamplesHash:
    """Samples. ``sha256`` is that of :attr:`trtopt.precision.observe.samples.Samples.sha256`."""

    source: Literal["user", "synthetic"]
    sha256: str


@dataclass(frozen=True)
class ShapeRange:
    """The shapes that one optimization profile takes."""

    min: tuple[int, ...]
    opt: tuple[int, ...]
    max: tuple[int, ...]


@dataclass(frozen=True)
class EngineTensor:
    """An input or output of an engine.

    Attributes:
        name: Its name.
        dtype: ``float32``, ``float16``, ``bfloat16``, ``uint8``, ``int64``, ...
        shape: In the model's order, whatever the layout; a dynamic dimension is its symbol, or ``"?"``. None where the
            rank is not known.
        layout: How memory holds it: ``chw`` (in the order of the shape), or what ``--io`` asked for.
        ranges: Of an input, one for each optimization profile; none where every shape is static.
        state: Of an input that is a state, the output that is this input in the next step; else empty.
    """

    name: str
    dtype: str
    shape: tuple[int | str, ...] | None
    layout: str = "chw"
    ranges: tuple[ShapeRange, ...] = ()
    state: str = ""


@dataclass(frozen=True)
class HostFiles:
    """The end of the model that the host runs behind the engine.

    Attributes:
        files: The ONNX file beside the engine, then the files of its weights, if it has any.
        inputs: Names of its inputs, all of them outputs of the engine or inputs of the model.
        outputs: Names of its outputs.
        model_outputs: Names of the outputs of the whole model, in its order, each of the engine or of this part.
    """

    files: tuple[FileHash, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    model_outputs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Manifest:
    """What an engine is, and what it was made from.

    Attributes:
        trtopt: The version that built it.
        engine_bytes: The size of the engine.
        engine_sha256: Its hash.
        backend: ``tensorrt`` or ``tensorrt-rtx``.
        backend_version: The compiler's version.
        gpu: The GPU it was built for; ``portable`` for every one from Ampere on.
        compute_capabilities: Those it runs on.
        hardware_compatibility: ``none``; on TensorRT also ``ampere+`` or ``same_compute_capability``, as the builder
            option of that name.
        version_compatible: Whether later versions of TensorRT run it too.
        model_sha256: Hash of the model file; with weights in files of their own, of the hashes of all files.
        calibration: The samples it was calibrated on.
        evaluation: The samples it was verified on.
        files: What else was read: the script of ``--metric``, the libraries of ``--plugins``, a calibration cache of
            TensorRT.
        options: The options that are no paths and not at their default, by field name.
        options_sha256: Hash of ``options`` as canonical JSON: keys sorted, no spaces.
        precision: What was asked for, what the kernels compute in, and which nodes stay in a wider type and why.
        eight_bit: The nodes that are INT8 or FP8 in the graph.
        inputs: What the caller feeds.
        outputs: What the engine gives.
        accuracy: What verification found.
        host: What the host runs behind the engine; None where the engine is the whole model.
        onnx_sha256: Hash of the optimized model that was written with the engine, as ``model_sha256``; empty where none
            was.
        epcontext: The ONNX model that ONNX Runtime loads the engine from; None where none was written.
        filled_rows: The engine's least batch, where it is above 1 and the outputs of each row are proven to follow from
            that row alone, so that a call of fewer rows can be filled up to it; else 0.
    """

    trtopt: str
    engine_bytes: int
    engine_sha256: str
    backend: str
    backend_version: str
    gpu: str
    compute_capabilities: tuple[str, ...]
    hardware_compatibility: Literal["none", "ampere+", "same_compute_capability"]
    version_compatible: bool
    model_sha256: str
    calibration: SamplesHash
    evaluation: SamplesHash
    files: tuple[FileHash, ...]
    options: dict[str, Any]
    options_sha256: str
    precision: PrecisionRecord
    eight_bit: tuple[str, ...]
    inputs: tuple[EngineTensor, ...]
    outputs: tuple[EngineTensor, ...]
    accuracy: AccuracyRecord | None
    host: HostFiles | None
    onnx_sha256: str = ""
    epcontext: FileHash | None = None
    filled_rows: int = 0
    schema: str = SCHEMA

    def to_json_dict(self) -> dict[str, Any]:
        """The manifest as plain JSON values; a number that is not finite is None."""
        return {"schema": self.schema, **plain(dataclasses.asdict(self))}


def with_digest(fields: Mapping[str, Any]) -> bytes:
    """The content of a manifest file: ``fields`` (:meth:`Manifest.to_json_dict`) as JSON, and last their hash, so that
    damage is noticed.
    """
    body = json.dumps(fields, indent=1, allow_nan=False)
    seal = hashlib.sha256(body.encode()).hexdigest()
    return (json.dumps({**fields, DIGEST: seal}, indent=1, allow_nan=False) + "\n").encode()


def has_digest(content: bytes) -> bool:
    """Whether the content of a file is as :func:`with_digest` wrote it; nothing of it is parsed."""
    found = _SEAL.search(content, max(len(content) - _SEAL_BYTES, 0))
    return found is not None and hashlib.sha256(content[: found.start()] + b"\n}").hexdigest() == found[1].decode()


def canonical_sha256(value: Any) -> str:
    """The hash of a JSON value, written with sorted keys and without spaces."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()
