"""The key of an engine in the cache: everything that changes the engine, and nothing else.

What reaches the compiler is the worker's requests, so the key is a hash of them, their paths replaced by the content of
the files, with the compiler, its machine, and the code that drives it. What is not in a request (paths, reports,
samples, how a precision was chosen) cannot change the engine but through the model.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trtopt.cache.code import code_hash
from trtopt.engine.process import START
from trtopt.support.files import hash_file

_DRIVER = "trtopt.engine.worker"
"""The module that runs the compiler: what it sets beside the request changes engines too."""

_NOT_OF_THE_ENGINE = ("onnx", "plugins", "timing_cache", "keep_engine")
"""Fields of a request that are paths, whose content counts, or that only say what to leave behind."""

_ON_BY_DEFAULT = frozenset({"TF32"})
"""Flags that a new builder configuration has set (TensorRT's ``BuilderFlag``); clearing another changes nothing."""


def engine_key(
    asked: Sequence[Mapping[str, Any]], model: Iterable[Path], *, version: str, gpu: str, timing: str
) -> str:
    """The key of the entry that workers would make.

    Args:
        asked: Their requests: the engine's first, then that of the build that tells the sizes, where there is one.
        model: The files the compiler reads as the model: the ONNX file, and its weights.
        version: The version of the compiler's package.
        gpu: The name of the GPU that the compiler times kernels on; empty where it times none.
        timing: What of a timing cache the entry depends on.

    Raises:
        UsageError: A file cannot be read.
    """
    parts = {
        "asked": [_cleaned(item) for item in asked],
        "model": sorted(hash_file(path, "The model for the compiler")[1] for path in model),
        "plugins": [hash_file(Path(path), "The plugin library")[1] for path in asked[0]["plugins"]],
        "timing": timing,
        "compiler": [version, gpu, platform.system(), platform.machine(), code_hash(_DRIVER), START],
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _cleaned(asked: Mapping[str, Any]) -> dict[str, Any]:
    found = {name: value for name, value in asked.items() if name not in _NOT_OF_THE_ENGINE}
    return {**found, "flags": {name: on for name, on in asked["flags"].items() if on or name in _ON_BY_DEFAULT}}
