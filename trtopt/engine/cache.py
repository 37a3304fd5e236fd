"""Engines that were built before: one file per engine, found by its key, safe with many builders at once.

An entry is written under another name and renamed, so readers see whole files or none, on a shared file system too.
Locks only keep two processes from building the same engine at once: where the file system has none, or a lock is lost,
an engine is built twice and both give the same entry.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from trtopt.cache.code import code_hash
from trtopt.cache.folder import DEFAULT_BYTES, ENGINES, TIMES, TIMING, Blobs, held, make_cache_folder
from trtopt.engine.backend import TENSORRT_RTX
from trtopt.engine.process import START
from trtopt.engine.request import BuildRequest
from trtopt.errors import UsageError
from trtopt.events import Event, OnEvent
from trtopt.hardware.probe import probe
from trtopt.support.files import hash_file, read_file
from trtopt.support.json_text import converted

_LENGTH_BYTES = 8
_MOST_OF_TIMES = 1 << 16
_LARGEST_HEAD_BYTES = 4 << 20
_TASK = "build engine"
_BUSY = "another process builds this engine"

_T = TypeVar("_T")


@dataclass(frozen=True)
class Compiled:
    """What the compiler left.

    Attributes:
        messages: Warnings and errors: severity and text.
        sized: The list of layers of a static build at the optimum, where ``layers`` does not tell sizes.
    """

    engine: bytes
    layers: str
    messages: tuple[tuple[str, str], ...]
    version: str
    seconds: float
    timing_cache: bytes | None = None
    sized: str | None = None

    def to_parts(self) -> list[bytes]:
        """As the content of a file, in parts."""
        texts = {"layers": self.layers, "sized": self.sized}
        parts = {"engine": self.engine, "timing_cache": self.timing_cache}
        parts.update((name, None if text is None else text.encode()) for name, text in texts.items())
        held = {name: part for name, part in parts.items() if part is not None}
        sizes = {name: len(part) for name, part in held.items()}
        head = json.dumps(asdict(_Head(self.messages, self.version, self.seconds, sizes))).encode()
        return [len(head).to_bytes(_LENGTH_BYTES, "little"), head, *held.values()]

    @classmethod
    def from_content(cls, content: memoryview) -> Compiled:
        """Read what :meth:`to_parts` wrote. Raises ValueError: it is something else."""
        at = _LENGTH_BYTES + int.from_bytes(content[:_LENGTH_BYTES], "little")
        if at > _LARGEST_HEAD_BYTES:
            raise ValueError("its head is too large")
        head = converted(bytes(content[_LENGTH_BYTES:at]), _Head, any_text=True)
        parts: dict[str, bytes] = {}
        for name, size in head.sizes.items():
            if size < 0 or size > len(content) - at:
                raise ValueError(f"its part {name} is not whole")
            parts[name] = bytes(content[at : at + size])
            at += size
        if at != len(content) or not {"engine", "layers"} <= parts.keys():
            raise ValueError("its parts are not those of an engine")
        layers, sized = (parts[name].decode() if name in parts else None for name in ("layers", "sized"))
        timing = parts.get("timing_cache")
        return cls(parts["engine"], layers or "", head.messages, head.version, head.seconds, timing, sized)


@dataclass(frozen=True)
class _Head:
    """What an entry holds beside its parts, and their sizes in their order."""

    messages: tuple[tuple[str, str], ...]
    version: str
    seconds: float
    sizes: dict[str, int]


_LONGEST_WAIT_S = 1800.0
"""For another builder of the same engine: one that hangs must not stop a CI. Two that build it at once do no harm."""


class EngineCache:
    """The engines and timing caches of a cache folder.

    Args:
        folder: The folder; made when missing, and only read where it cannot be written. None for ``~/.cache/trtopt``.

    Raises:
        UsageError: The folder was asked for, is not there and cannot be made.
    """

    def __init__(self, folder: str | Path | None, on_event: OnEvent, *, max_bytes: int = DEFAULT_BYTES) -> None:
        make_cache_folder(folder)
        self._on_event = on_event
        words = (_TASK, "cached engine", "it is built anew")
        self._engines = Blobs(ENGINES, folder, on_event, words, max_bytes)
        words = (_TASK, "timing cache", "kernels are timed anew")
        self._timing = Blobs(TIMING, folder, on_event, words, max_bytes)
        words = (_TASK, "times of an engine", "they are measured anew")
        self.times = Blobs(TIMES, folder, on_event, words, _MOST_OF_TIMES)
        self.path = self._engines.path
        self._writes = self._engines.can_be_written()

    def obtain(self, key: str, make: Callable[[], Compiled], use: Callable[[Compiled], _T]) -> tuple[_T, bool]:
        """What ``use`` makes of the entry, or of what ``make`` gives, which is then kept.

        Where another process is at it, this one waits and takes what that one kept.

        Returns:
            What ``use`` gave, and whether it came from the cache.
        """

        def read(content: memoryview) -> _T:
            return use(Compiled.from_content(content))

        known = self._engines.load(key, read, warns=False)
        if known is not None:
            return known, True
        with self._locked(key):
            known = self._engines.load(key, read)
            if known is not None:
                return known, True
            compiled = make()
            result = use(compiled)
            self._engines.store(key, compiled.to_parts())
            return result, False

    def timing(self, name: str) -> bytes:
        """The timing cache of a GPU and a version; empty where there is none."""
        return self._timing.load(_file_name(name), bytes) or b""

    def keep_timing(self, name: str, content: bytes) -> None:
        """Replace the timing cache of a GPU and a version, which :func:`held_timing` holds."""
        self._timing.store(_file_name(name), [content])

    def timing_lock(self, name: str) -> Path:
        """The lock of the timing cache of a GPU and a version."""
        return self._timing.lock_of(_file_name(name))

    @contextmanager
    def _locked(self, key: str) -> Iterator[None]:
        """Keep others from building an engine; not where the cache cannot be written, or has no locks."""
        if not self._writes:
            yield
            return
        with self._engines.locked(key, _LONGEST_WAIT_S, lambda: self._warn(f"{_BUSY}: waiting for it")) as refused:
            if refused:
                self._warn(f"no lock of this engine ({refused}): others may build it meanwhile")
            yield

    def _warn(self, text: str) -> None:
        self._on_event(Event("warning", _TASK, text=text))


def _file_name(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "-", name)


_MOST_TIMING_BYTES = 1 << 30


@dataclass(frozen=True)
class TimingCache:
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


def timing_for(request: BuildRequest, version: str, cache: EngineCache | None) -> TimingCache:
    """The timing cache to build with: the user's file, else the one of the cache folder.

    Raises:
        UsageError: There is none, and it must not be missed.
    """
    must_hit = request.error_on_timing_cache_miss
    if request.backend == TENSORRT_RTX:
        return TimingCache()
    if request.timing_cache is not None:
        content = _of_user(request)
        return TimingCache(content, decides=hashlib.sha256(content).hexdigest() if must_hit else "a file")
    if cache is not None:
        name = f"{probe().name} {request.gpu.compute_capability if request.gpu else ''} {version}"
        content = cache.timing(name)
        return TimingCache(content, name, hashlib.sha256(content).hexdigest() if must_hit else "")
    if must_hit:
        raise UsageError(
            "There is no timing cache that could be missed",
            where="--error-on-timing-cache-miss",
            remedy="give --timing-cache FILE, or leave --no-cache out",
        )
    return TimingCache()


@contextmanager
def held_timing(
    timing: TimingCache, request: BuildRequest, cache: EngineCache | None, on_event: OnEvent
) -> Iterator[TimingCache]:
    """The timing cache as it is now, which no other build reads or writes meanwhile.

    A build adds to what it read, so that of two at once one would lose what the other added; and two that time kernels
    on one GPU time each other. trtexec has a lock of the same name beside the user's file.
    """
    if timing.content is None:
        yield timing
        return
    kept = cache if timing.name else None
    lock = Path(f"{request.timing_cache}.lock") if kept is None else kept.timing_lock(timing.name)

    def said(text: str) -> None:
        on_event(Event("warning", _TASK, text=text))

    with held(lock, _LONGEST_WAIT_S, lambda: said("another build has this timing cache: waiting for it")) as refused:
        if refused:
            said(f"no lock of the timing cache ({refused}): what another build adds to it may be lost")
        if request.error_on_timing_cache_miss:  # the engine's key holds what it was
            yield timing
        else:
            yield replace(timing, content=_of_user(request) if kept is None else kept.timing(timing.name))


def _of_user(request: BuildRequest) -> bytes:
    path = request.timing_cache
    if path is None or not os.path.lexists(path):
        return b""
    return read_file(path, "The timing cache", _MOST_TIMING_BYTES)


_DRIVER = "trtopt.engine.worker"
"""The module that runs the compiler: what it sets beside the request changes engines too."""

_NOT_OF_THE_ENGINE = ("onnx", "plugins", "timing_cache", "keep_engine")
"""Fields of a request that are paths, whose content counts, or that only say what to leave behind."""

_ON_BY_DEFAULT = frozenset({"TF32"})
"""Flags that a new builder configuration has set (TensorRT's ``BuilderFlag``); clearing another changes nothing."""


def engine_key(
    asked: Sequence[Mapping[str, Any]], model: Iterable[Path], *, version: str, gpu: str, timing: str
) -> str:
    """The key of the entry that workers would make: everything that changes the engine, and nothing else.

    What reaches the compiler is the workers' requests, so the key is a hash of them, their paths replaced by the
    content of the files, with the compiler, its machine, and the code that drives it. What is not in a request (paths,
    reports, samples, how a precision was chosen) cannot change the engine but through the model.

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
