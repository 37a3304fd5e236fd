"""The key of an engine in the cache: everything that changes the engine, and nothing else.

What reaches the compiler is the worker's request, so the key is a hash of that request, its paths replaced by the
content of the files, with the compiler, its machine, and the code that drives it. What is not in the request (paths,
reports, samples, how a precision was chosen) cannot change the engine but through the model.
"""

from __future__ import annotations

import functools
import hashlib
import json
import platform
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from trtopt.engine import worker

_NOT_OF_THE_ENGINE = ("onnx", "plugins", "timing_cache", "keep_engine")
"""Fields of the request that are paths, whose content counts, or that only say what to leave behind."""

_ON_BY_DEFAULT = frozenset({"TF32"})
"""Flags that a new builder configuration has set (TensorRT's ``BuilderFlag``); clearing another changes nothing."""

_CHUNK_BYTES = 4 << 20


def engine_key(
    asked: Mapping[str, Any], model: Iterable[Path], *, version: str, gpu: str, timing_cache: bytes | None
) -> str:
    """The key of the engine that a worker would build.

    Args:
        asked: The worker's request.
        model: The files the compiler reads as the model: the ONNX file, and its weights.
        version: The version of the compiler's package.
        gpu: The name of the GPU that the compiler times kernels on; empty where it times none.
        timing_cache: The timing cache that decides which kernels are taken: one that the user named, or that must not
            be missed; ``b""`` for one that is not there yet. None without one, and for the one of the cache, which
            only saves time.

    Raises:
        OSError: A file cannot be read.
    """
    parts = {name: value for name, value in asked.items() if name not in _NOT_OF_THE_ENGINE}
    parts["flags"] = {name: on for name, on in asked["flags"].items() if on or name in _ON_BY_DEFAULT}
    parts["model"] = sorted(_sha256(path) for path in model)
    parts["plugins"] = [_sha256(Path(path)) for path in asked["plugins"]]
    parts["timing_cache"] = None if timing_cache is None else hashlib.sha256(timing_cache).hexdigest()
    parts["compiler"] = [version, gpu, platform.system(), platform.machine(), _driver()]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


@functools.cache
def _driver() -> str:
    """A hash of the code that runs the compiler: what it sets beside the request changes engines too."""
    return _sha256(Path(worker.__file__))
