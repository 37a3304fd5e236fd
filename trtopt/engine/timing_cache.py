"""The timing cache that an engine of TensorRT is built with, and what of it the key of the engine holds."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass

from trtopt.engine.backend import TENSORRT_RTX
from trtopt.engine.cache import EngineCache
from trtopt.engine.request import BuildRequest
from trtopt.errors import UsageError
from trtopt.hardware.probe import probe
from trtopt.support.files import read_file

_MOST_BYTES = 1 << 30


@dataclass(frozen=True)
class Timing:
    """The timing cache of a build.

    Attributes:
        content: What is in it before; None without one.
        name: Its GPU and version, where it is the one of the cache folder; empty for the user's file.
        decides: What of it is in the key of the engine: the hash of its content where it must not be missed; of a
            user's file else that there is one, since the entry then holds what a file that is missing gets. Each build
            adds to the file, so with its content in the key no engine would be found again.
    """

    content: bytes | None = None
    name: str = ""
    decides: str = ""


def timing_for(request: BuildRequest, version: str, cache: EngineCache | None) -> Timing:
    """The timing cache to build with: the user's file, else the one of the cache folder.

    Raises:
        UsageError: There is none, and it must not be missed.
    """
    must_hit = request.error_on_timing_cache_miss
    if request.backend == TENSORRT_RTX:
        return Timing()
    if request.timing_cache is not None:
        is_there = os.path.lexists(request.timing_cache)
        content = read_file(request.timing_cache, "The timing cache", _MOST_BYTES) if is_there else b""
        return Timing(content, decides=hashlib.sha256(content).hexdigest() if must_hit else "a file")
    if cache is not None:
        name = f"{probe().name} {request.gpu.compute_capability if request.gpu else ''} {version}"
        content = cache.timing(name)
        return Timing(content, name, hashlib.sha256(content).hexdigest() if must_hit else "")
    if must_hit:
        raise UsageError(
            "There is no timing cache that could be missed",
            where="--error-on-timing-cache-miss",
            remedy="give --timing-cache FILE, or leave --no-cache out",
        )
    return Timing()
