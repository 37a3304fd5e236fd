"""Build an engine in a process of its own and read back what the compiler made of the graph.

The backend ``tensorrt`` was never run: it needs the target GPU. `trtopt doctor --selftest` is its first run.
"""

from __future__ import annotations

import hashlib
import json
import queue
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from trtopt.engine import worker
from trtopt.engine.backend import TENSORRT_RTX, Backend, check_target, installed_version, read_header
from trtopt.engine.cache import Compiled, EngineCache, TimingCache, engine_key, held_timing, timing_for
from trtopt.engine.layers import (
    Resolved,
    activation_bytes,
    check_detailed,
    kernel_count,
    parse_inspector_json,
    parse_layers_log,
    resolve_nodes,
    weight_bytes,
)
from trtopt.engine.options import BuilderSettings, parse_builder_options
from trtopt.engine.process import START, Stall, crash, refusal
from trtopt.engine.request import BuildRequest
from trtopt.errors import EngineBuildError, UsageError
from trtopt.events import Event, OnEvent, ignore
from trtopt.hardware.probe import present_gpu, probe
from trtopt.report.schema.build import EngineRecord
from trtopt.report.schema.layers import LayerInfo
from trtopt.support._lazy import is_available
from trtopt.support.files import atomic_write
from trtopt.support.temporary import TemporaryFolder
from trtopt.support.version import IMPORT_ROOT

TASK = "build engine"
"""The name of the progress events' task."""

_START = START + "from trtopt.engine.worker import main; main(sys.argv[2])"
_INT64_NOTE = "has Int64 binding"
_FP16_NORMS_NOTE = re.compile("^Detected layernorm nodes in FP16|^Running layernorm .* in FP16|INormalizationLayer")
_FP16_NORMS = (
    "the compiler finds normalizations in FP16, whose sums overflow where values are large: `trtopt build` keeps those"
    " in FP32 that overflow on the samples"
)
"""What TensorRT's note on them means here. Its advice, another opset, is none: an RMS normalization has no operator
before opset 23, and a model of opset 17 and more is advised the same."""


@dataclass(frozen=True)
class EngineArtifact:
    """An engine, what is known of it, and the compiler's own words.

    Attributes:
        record: What it is; ``path`` is None until it is written.
        raw_log: Warnings of the parser and builder, then the list of layers as they gave it.
        sized_layers: The layers with every size known: those of a static build at the first profile's optimum.
        without_layers: Why the record has no layers; empty where it has.
    """

    data: bytes
    record: EngineRecord
    raw_log: str
    sized_layers: tuple[LayerInfo, ...]
    without_layers: str = ""


def build_engine(request: BuildRequest, on_event: OnEvent = ignore, cache: EngineCache | None = None) -> EngineArtifact:
    """Build an engine in a fresh process, or take it from the cache.

    With TensorRT for RTX and dynamic shapes the bytes are counted on a second, static build at the first profile's
    optimum: a dynamic build's list of layers does not tell sizes.

    Args:
        cache: Where engines are kept; None to build anew and keep nothing.

    Raises:
        UsageError: A builder option or a file named by the request is wrong.
        TargetError: The backend cannot build for this target, or not here.
        MissingDependencyError: The backend is not installed.
        EngineBuildError: The parser or the builder refused the model, or the process crashed.
    """
    check_target(request.backend, request.gpu, present_gpu())
    settings = check_options(request.builder, request.plugins, request.backend)
    if not request.onnx.is_file():
        raise UsageError("There is no such file", where=str(request.onnx), remedy="check the path")
    version = installed_version(request.backend)
    if cache is not None and not version:
        text = f"the version of {request.backend.module} is not known: the engine is built anew and not kept"
        on_event(Event("warning", TASK, text=text))
        cache = None
    timing = timing_for(request, version, cache)
    made: list[Compiled] = []

    def make() -> Compiled:
        first, *static = _builds(request)
        with held_timing(timing, request, cache, on_event) as now, ThreadPoolExecutor(1) as beside:

            def begin() -> list[Future[Compiled]]:
                return [beside.submit(_run, item, settings, timing, ignore, keep_engine=False) for item in static]

            sizes = [] if request.is_large else begin()
            compiled = _run(first, settings, now, on_event)
            sizes = sizes or begin()  # two builds of more than a gigabyte of weights need not fit memory
            if compiled.timing_cache is not None and request.timing_cache is not None:
                atomic_write(request.timing_cache, compiled.timing_cache)
            elif cache is not None and timing.name and compiled.timing_cache is not None:
                cache.keep_timing(timing.name, compiled.timing_cache)
                compiled = replace(compiled, timing_cache=None)
            for item in sizes:
                compiled = replace(compiled, sized=item.result().layers)
        made.append(compiled)
        return compiled

    def use(compiled: Compiled) -> tuple[EngineArtifact, Compiled]:
        return _artifact(request, settings, compiled, is_new=bool(made)), compiled

    if cache is None:
        (artifact, compiled), cached = use(make()), False
    else:
        (artifact, compiled), cached = cache.obtain(cache_key(request, version, timing.decides), make, use)
    for warning in (*_warnings(compiled.messages), *filter(None, [artifact.without_layers])):
        on_event(Event("warning", TASK, text=warning))
    # A file that there is may know more by now than it did when the cached engine was built.
    if cached and compiled.timing_cache is not None and request.timing_cache is not None and not timing.content:
        atomic_write(request.timing_cache, compiled.timing_cache)
    on_event(Event("detail", TASK, text="taken from the cache") if cached else Event("end", TASK))
    return replace(artifact, record=replace(artifact.record, cached=cached))


def cache_key(request: BuildRequest, version: str, timing: str = "") -> str:
    """The key of the engine in the cache; ``timing`` as of :func:`~trtopt.engine.cache.engine_key`.

    Raises:
        UsageError: As :func:`build_engine`; or a file cannot be read.
    """
    settings = check_options(request.builder, request.plugins, request.backend)
    asked = [worker_request(item, settings) for item in _builds(request)]
    found = probe() if request.backend.needs_gpu else None
    gpu = f"{found.name} {found.gpu.compute_capability}" if found is not None and found.gpu is not None else ""
    return engine_key(asked, (request.onnx, *request.weights), version=version, gpu=gpu, timing=timing)


def _warnings(messages: Iterable[tuple[str, str]]) -> list[str]:
    """The first lines of warnings, each once; a forged entry of the cache may hold empty ones."""
    found = (text.strip().partition("\n")[0] for severity, text in messages if severity == "WARNING")
    lines = (_FP16_NORMS if _FP16_NORMS_NOTE.search(line) else line for line in found)
    return [line for line in dict.fromkeys(lines) if line and _INT64_NOTE not in line]


def _artifact(request: BuildRequest, settings: BuilderSettings, compiled: Compiled, *, is_new: bool) -> EngineArtifact:
    """What the compiler left, read; where that fails, the error names the log that is kept of a new build."""
    raw_log = "\n".join([*(f"{severity}: {message}" for severity, message in compiled.messages), compiled.layers])
    resolved, missing = None, ""
    try:
        resolved = _read_layers(request, compiled.layers, raw_log if is_new else "")
    except EngineBuildError as error:
        if request.backend == TENSORRT_RTX:  # which builds in seconds, and whose layers are what judges price
            raise
        missing = f"the engine is built, and its layers are not known: {error.what} ({error.where}); {error.remedy}"
    layers = None if resolved is None else resolved.layers
    sized = layers if compiled.sized is None else parse_layers_log(compiled.sized)
    record = EngineRecord(
        path=None,
        sha256=hashlib.sha256(compiled.engine).hexdigest(),
        bytes=len(compiled.engine),
        backend=request.backend.name,
        backend_version=compiled.version,
        compute_capabilities=_targets(request, compiled.engine),
        runtime=request.backend.runtime,
        kernels=None if layers is None else kernel_count(layers),
        activation_bytes=None if sized is None else activation_bytes(sized),
        weight_bytes=None if sized is None else weight_bytes(sized),
        build_seconds=compiled.seconds,
        layers=layers,
        unclaimed_nodes=() if resolved is None else resolved.unclaimed,
        ignored_options=settings.ignored + _ignored_timing(request),
        profiles=tuple(profile.to_json_dict() for profile in request.profiles),
    )
    return EngineArtifact(compiled.engine, record, raw_log, sized or (), missing)


def _ignored_timing(request: BuildRequest) -> tuple[str, ...]:
    if request.backend != TENSORRT_RTX:
        return ()
    cache = () if request.timing_cache is None else (f"timing_cache={request.timing_cache}",)
    return (*cache, *(("error_on_timing_cache_miss",) if request.error_on_timing_cache_miss else ()))


def check_options(builder: Sequence[str], plugins: Sequence[str | Path], backend: Backend) -> BuilderSettings:
    """The builder options, checked; before any work is done, so that a typing error costs no minutes.

    Raises:
        UsageError: An option is unknown or its value wrong, or a plugin library is not there.
        TargetError: An option needs a GPU, and there is none.
    """
    for path in plugins:
        if not Path(path).is_file():
            raise UsageError("There is no such plugin library", where=str(path), remedy="check the path of --plugins")
    return parse_builder_options(builder, backend, gpu_present=present_gpu() is not None)


def _targets(request: BuildRequest, engine: bytes) -> tuple[str, ...]:
    """The compute capabilities the engine runs on, from its own header where it says so."""
    if request.backend != TENSORRT_RTX:
        return (request.gpu.compute_capability,) if request.gpu is not None else ()
    try:
        header = read_header(engine)
    except UsageError as error:
        raise EngineBuildError(
            f"The builder returned something that is not an engine: {error.what}",
            where=error.where,
            remedy="report it; `trtopt doctor --selftest` builds a small network to compare with",
        ) from error
    if request.gpu is not None and request.gpu.compute_capability not in header.compute_capabilities:
        raise EngineBuildError(
            f"The engine was built for {', '.join(header.compute_capabilities)}, not for {request.gpu.name}",
            where="the engine's header",
            remedy="report it with the output of `trtopt doctor`",
        )
    return header.compute_capabilities


def _read_layers(request: BuildRequest, text: str, raw_log: str) -> Resolved:
    parse = parse_layers_log if request.backend == TENSORRT_RTX else parse_inspector_json
    try:
        layers = parse(text)
        check_detailed(layers)
        return resolve_nodes(layers, request.nodes)
    except EngineBuildError as error:
        if not raw_log:
            raise
        with tempfile.NamedTemporaryFile(
            "w", prefix="trtopt-layers-", suffix=".log", delete=False, encoding="utf-8"
        ) as kept:
            kept.write(raw_log)
        raise EngineBuildError(
            error.what, where=error.where, remedy=f"{error.remedy}; the whole log is kept in {kept.name}"
        ) from error


def _builds(request: BuildRequest) -> tuple[BuildRequest, ...]:
    """What the compiler is asked: the engine, and a static build for the sizes, where the first hides them."""
    if request.backend != TENSORRT_RTX or all(profile.is_static for profile in request.profiles[:1]):
        return (request,)
    return request, replace(request, profiles=(request.profiles[0].at_optimum(),))


def _run(
    request: BuildRequest,
    settings: BuilderSettings,
    timing: TimingCache,
    on_event: OnEvent,
    *,
    keep_engine: bool = True,
) -> Compiled:
    with TemporaryFolder("build-") as name:
        folder = Path(name)
        asked = worker_request(request, settings, keep_engine=keep_engine)
        cache = folder / worker.TIMING_CACHE
        if timing.content is not None:
            cache.write_bytes(timing.content)
            asked["timing_cache"] = "" if timing.name else str(request.timing_cache)
        result = _ask(folder, asked, on_event, request.name or str(request.onnx))
        layers = folder / worker.LAYERS
        return Compiled(
            engine=(folder / worker.ENGINE).read_bytes() if keep_engine else b"",
            layers=layers.read_bytes().decode() if layers.exists() else "",
            messages=tuple((severity, text) for severity, text in result["messages"]),
            version=result["version"],
            seconds=result["seconds"],
            timing_cache=cache.read_bytes() if cache.exists() else None,
        )


def _ask(folder: Path, asked: dict[str, Any], on_event: OnEvent, model: str) -> dict[str, Any]:
    """What a worker of its own says to a request; raises what it refuses."""
    (folder / worker.REQUEST).write_text(json.dumps(asked), encoding="utf-8")
    code = _start_worker(folder, on_event)
    result_file = folder / worker.RESULT
    if not result_file.exists():
        raise crash(code, (folder / "stderr").read_text(encoding="utf-8", errors="replace"))
    result: dict[str, Any] = json.loads(result_file.read_text(encoding="utf-8"))
    if not result["ok"]:
        messages = tuple((severity, text) for severity, text in result["messages"])
        raise refusal(result["stage"], result["details"], messages, model)
    return result


def _start_worker(folder: Path, on_event: OnEvent) -> int:
    """Run the worker to its end, passing on its progress; it never outlives this call or this process."""
    command = [sys.executable, "-c", _START, str(IMPORT_ROOT), str(folder)]
    with (
        open(folder / "stderr", "wb") as stderr,
        subprocess.Popen(
            command,
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            encoding="utf-8",
        ) as process,
    ):
        try:
            with Stall(process) as stall:
                for line in process.stdout or ():
                    stall.progress()
                    event = json.loads(line)
                    on_event(Event(event["kind"], TASK, total=event["total"]))
                code = process.wait()
            stall.check()
            return code
        finally:
            process.kill()


def worker_request(request: BuildRequest, settings: BuilderSettings, *, keep_engine: bool = True) -> dict[str, Any]:
    """What a worker is asked, as JSON. Without ``keep_engine`` it leaves the list of layers only."""
    rtx = request.backend == TENSORRT_RTX
    targets = [f"SM{request.gpu.compute_capability.replace('.', '')}"] if rtx and request.gpu is not None else []
    must_hit = {"ERROR_ON_TIMING_CACHE_MISS": True} if request.error_on_timing_cache_miss and not rtx else {}
    return {
        "module": request.backend.module,
        "onnx": str(request.onnx.absolute()),
        "compute_capabilities": targets,
        "flags": {**settings.flags, **must_hit, "TF32": request.tf32},
        "attributes": settings.attributes,
        "enums": settings.enums,
        "pools": settings.pools,
        "masks": settings.masks,
        "plugins": [str(path.absolute()) for path in request.plugins],
        "timing_cache": None,
        "profiles": [{"shapes": profile.shapes, "values": profile.values} for profile in request.profiles],
        "formats": dict(request.formats),
        "inspect": not rtx,
        "keep_engine": keep_engine,
        "parse_only": False,
    }


def parse_onnx(request: BuildRequest) -> None:
    """Have the compiler's parser read the file of ``request``, in a process of its own.

    Nothing is done where the backend is not installed.

    Raises:
        EngineBuildError: It refuses the model, with the node and the reason, or crashes.
    """
    if not is_available(request.backend.module):
        return
    settings = check_options(request.builder, request.plugins, request.backend)
    asked = worker_request(request, settings) | {"parse_only": True}
    with TemporaryFolder("parse-") as name:
        _ask(Path(name), asked, ignore, request.name)


_START_SERVER = START + "from trtopt.engine.worker import serve; serve()"


class Compiler:
    """TensorRT for RTX in a process of its own, started at the first request and again after a failed one.

    Use it as a context manager: the process ends with it.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._stderr: IO[bytes] | None = None

    def layers(self, request: BuildRequest) -> tuple[LayerInfo, ...]:
        """The layers of the engine that ``request`` would give.

        Args:
            request: A model of static shapes, or one profile; only the first profile's layers are meant to be read.

        Raises:
            EngineBuildError: The parser or the builder refused the model, or the process crashed.
            MissingDependencyError: TensorRT for RTX is not installed.
        """
        settings = check_options(request.builder, request.plugins, request.backend)
        with TemporaryFolder("look-") as name:
            folder = Path(name)
            content = worker_request(request, settings, keep_engine=False)
            (folder / worker.REQUEST).write_text(json.dumps(content), encoding="utf-8")
            self._build_in(folder)
            result = json.loads((folder / worker.RESULT).read_text(encoding="utf-8"))
            if not result["ok"]:
                self.close()
                messages = tuple((severity, text) for severity, text in result["messages"])
                raise refusal(result["stage"], result["details"], messages, request.name or str(request.onnx))
            found = parse_layers_log((folder / worker.LAYERS).read_bytes().decode())
            return resolve_nodes(found, request.nodes).layers

    def _build_in(self, folder: Path) -> None:
        process = self._process or self._start()
        if process.stdin is None or process.stdout is None:
            raise RuntimeError("the worker has no pipes")
        with suppress(BrokenPipeError):  # it has died; what it said is read below
            process.stdin.write(f"{folder}\n")
            process.stdin.flush()
        with Stall(process) as stall:
            for line in process.stdout:
                stall.progress()
                if json.loads(line)["kind"] == "done":
                    return
        code, said = process.wait(), self._said()
        self.close()
        stall.check()
        raise crash(code, said)

    def _start(self) -> subprocess.Popen[str]:
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the process
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START_SERVER, str(IMPORT_ROOT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            encoding="utf-8",
        )
        return self._process

    def _said(self) -> str:
        if self._stderr is None:
            return ""
        self._stderr.seek(0)
        return self._stderr.read().decode(errors="replace")

    def close(self) -> None:
        """End the process; the next request starts another."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    with suppress(BrokenPipeError):  # a request that it did not live to read
                        pipe.close()
            self._process = None
        if self._stderr is not None:
            self._stderr.close()
            self._stderr = None

    def __enter__(self) -> Compiler:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class CompilerPool:
    """Several compilers that threads share; one is started when all others are busy.

    What they said of a request with a key is remembered: a run asks for one network as it is judged and as it ships.
    """

    def __init__(self, size: int) -> None:
        self._known: dict[str, tuple[LayerInfo, ...]] = {}
        self._all = [Compiler() for _ in range(size)]
        self._idle: queue.LifoQueue[Compiler] = queue.LifoQueue()
        for compiler in self._all:
            self._idle.put(compiler)

    def layers(self, request: BuildRequest) -> tuple[LayerInfo, ...]:
        """As :meth:`Compiler.layers`."""
        settings = check_options(request.builder, request.plugins, request.backend)
        asked = f"{request.key} {worker_request(replace(request, onnx=Path()), settings)}" if request.key else ""
        if asked in self._known:
            return self._known[asked]
        compiler = self._idle.get()
        try:
            found = compiler.layers(request)
        finally:
            self._idle.put(compiler)
        if asked:
            self._known[asked] = found
        return found

    def ranged(self, request: BuildRequest) -> tuple[tuple[LayerInfo, ...], tuple[LayerInfo, ...]]:
        """The layers for the first profile of ``request``, and those of a static build at its optimum, made at once.

        A list of layers of open sizes does not tell them; the static one does. With more than a gigabyte of weights,
        one is made after the other.
        """
        static = replace(request, profiles=(request.profiles[0].at_optimum(),))
        if request.is_large:
            return self.layers(request), self.layers(static)
        with ThreadPoolExecutor(1) as other:
            begun = other.submit(self.layers, static)
            return self.layers(request), begun.result()

    def __enter__(self) -> CompilerPool:
        return self

    def __exit__(self, *error: object) -> None:
        for compiler in self._all:
            compiler.close()
