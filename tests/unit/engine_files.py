"""Made-up engines with real headers, and their manifests."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
import struct
from pathlib import Path
from typing import Any

from report_samples import ACCURACY

from trtopt.engine.manifest import Signer, manifest_path, write_manifest
from trtopt.report.schema.build import Achieved, KeptNode, PrecisionRecord
from trtopt.report.schema.manifest import (
    DIGEST,
    EngineTensor,
    FileHash,
    HostFiles,
    Manifest,
    SamplesHash,
    ShapeRange,
    canonical_sha256,
    with_digest,
)

OPTIONS = {"precision": "int8", "builder": ["workspace=1G"]}


def rtx_engine(size: int = 4096, *, seed: int = 0, targets: int = 8) -> bytes:
    """An engine of TensorRT for RTX 1.7.1.116, for compute capability 8.9 unless ``targets`` has other bits."""
    data = bytearray(random.Random(seed).randbytes(size))
    data[:4] = data[28:32] = b"vtrt"
    struct.pack_into("<Q", data, 16, size)
    data[24:28] = bytes((1, 7, 1, 116))
    data[32] = targets
    return bytes(data)


def tensorrt_engine(size: int = 4096) -> bytes:
    """An engine of TensorRT 10.3.0.26."""
    data = bytearray(random.Random(0).randbytes(size))
    data[:8] = b"ftrt" + bytes(4)
    data[24:28] = bytes((10, 3, 0, 26))
    return bytes(data)


def file_hash(name: str, data: bytes) -> FileHash:
    return FileHash(name, len(data), hashlib.sha256(data).hexdigest())


def manifest(data: bytes, *files: FileHash, **changes: Any) -> Manifest:
    """A manifest for an engine; ``files`` are those of its part for the host, ``changes`` other values of fields."""
    found = Manifest(
        trtopt="0.1.0",
        engine_bytes=len(data),
        engine_sha256=hashlib.sha256(data).hexdigest(),
        backend="tensorrt-rtx",
        backend_version="1.7.1.116",
        gpu="L4",
        compute_capabilities=("8.9",),
        hardware_compatibility="none",
        version_compatible=False,
        model_sha256="ab" * 32,
        calibration=SamplesHash("user", "cd" * 32),
        evaluation=SamplesHash("synthetic", "ef" * 32),
        files=(FileHash("metric.py:top5", 12, "01" * 32),),
        options=OPTIONS,
        options_sha256=canonical_sha256(OPTIONS),
        precision=PrecisionRecord("int8", {"int8": Achieved(3, 0.9)}, 0.95, (KeptNode("head", "fp16", "range"),)),
        eight_bit=("conv1", "conv2"),
        inputs=(
            EngineTensor(
                "x", "float16", ("N", 4, 8, 8), "hwc4", (ShapeRange((1, 4, 8, 8), (8, 4, 8, 8), (16, 4, 8, 8)),)
            ),
        ),
        outputs=(EngineTensor("y", "float32", None),),
        accuracy=dataclasses.replace(ACCURACY, tensors=None),
        host=HostFiles(files, ("y",), ("z",)) if files else None,
    )
    return dataclasses.replace(found, **changes)


def tensorrt_manifest(data: bytes, **changes: Any) -> Manifest:
    """A manifest for an engine of TensorRT, built on an A100."""
    own = {"backend": "tensorrt", "backend_version": "10.3.0.26", "gpu": "A100", "compute_capabilities": ("8.0",)}
    return manifest(data, **{**own, **changes})


def save(folder: Path, data: bytes, found: Manifest, *, signer: Signer | None = None, name: str = "m.engine") -> Path:
    """Write an engine and its manifest; gives the engine's path."""
    path = folder / name
    path.write_bytes(data)
    write_manifest(path, found, signer)
    return path


def reseal(path: Path, **changes: Any) -> None:
    """Change fields of an engine's manifest as somebody would who knows how it is written."""
    place = manifest_path(path)
    fields = {**json.loads(place.read_bytes()), **changes}
    fields.pop(DIGEST)
    place.write_bytes(with_digest(fields))
