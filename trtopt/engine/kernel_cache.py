"""The kernels that TensorRT for RTX compiled as an engine ran, kept for the next process that runs it.

Such an engine holds no kernels: its runtime compiles them for the GPU that is there when a shape comes first. An
``IRuntimeCache`` collects them; all contexts of an engine share one. They are found again by the engine's content, the
GPU, its driver and the runtime's version. An entry is code: it is taken from the user's cache folder only. Written to
the API of TensorRT for RTX 1.7; it was never run.
"""

from __future__ import annotations

import hashlib
import json
import logging
import platform
from pathlib import Path
from typing import Any

from trtopt.cache.folder import KERNELS, Blobs, make_cache_folder
from trtopt.errors import UsageError
from trtopt.events import Event
from trtopt.hardware.probe import probe

_MOST_BYTES = 1 << 30
_LOG = logging.getLogger("trtopt.engine")


def kernels_folder(asked: str | Path | None) -> Path | None:
    """The cache folder for kernels; None where none was asked for and there is no home folder.

    Raises:
        UsageError: It was asked for, is not there and cannot be made.
    """
    try:
        return make_cache_folder(asked)
    except UsageError:
        if asked is not None:
            raise
        return None


def kernel_key(engine: bytes, version: str) -> str:
    """The key of an engine's kernels, 64 hexadecimal digits: they are compiled for this GPU by this runtime."""
    here = probe()
    capability = "" if here.gpu is None else here.gpu.compute_capability
    parts = [hashlib.sha256(engine).hexdigest(), here.name, capability, here.driver, version]
    return hashlib.sha256(json.dumps([*parts, platform.system(), platform.machine()]).encode()).hexdigest()


class KernelCache:
    """The compiled kernels of one engine.

    Args:
        folder: The cache folder; what is not there, damaged, or refused by the runtime is compiled anew, and a folder
            that cannot be written ends no run. Both are logged (``trtopt.engine``).
        engine: The engine file's content.
        version: The version of the runtime.
    """

    def __init__(self, folder: Path, engine: bytes, version: str) -> None:
        words = ("run engine", "compiled kernels", "they are compiled anew")
        self._entries = Blobs(KERNELS, folder, _log, words, _MOST_BYTES)
        self._key = kernel_key(engine, version)
        self._cache: Any = None
        self._content = b""

    def attach(self, config: Any) -> None:
        """Have the context of an ``IRuntimeConfig`` read and add to the cache, which is loaded for the first one."""
        if self._cache is None:
            self._cache = config.create_runtime_cache()
            if self._cache is None:
                _LOG.warning("the runtime gives no cache of kernels: they are compiled anew in every process")
                return
            self._content = self._entries.load(self._key, self._read) or b""
        config.set_runtime_cache(self._cache)

    def _read(self, content: memoryview) -> bytes:
        data = bytes(content)
        if not self._cache.deserialize(data):
            self._cache.reset()
            raise ValueError("the runtime does not take them")
        return data

    def keep(self) -> None:
        """Write the kernels where some were added. Call it when no context is left, before the engine goes."""
        cache, self._cache = self._cache, None
        if cache is None:
            return
        try:
            content = bytes(cache.serialize())
        except (AttributeError, RuntimeError, TypeError, ValueError) as error:  # the engine has run: it closes
            _LOG.warning("the kernels that were compiled cannot be kept: %s", str(error))
            return
        if content != self._content:
            with self._entries.locked(self._key):  # without a lock too: an entry is replaced whole
                self._entries.store(self._key, [content])


def _log(event: Event) -> None:
    _LOG.warning("%s", event.text)
