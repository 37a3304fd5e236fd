"""The process that builds engines: one and ends, or one after the other until one fails.

A failed build can poison the next one in its process (seen with TensorRT for RTX 1.7: after a failure for compute
capability 7.5 the next engine was lowered for it too), and native code can crash: hence a process of its own, and a
new one after a failure. Engines that are kept get a process each; those built to be looked at share one. The
request and the results are files in a folder; progress is JSON lines on standard output. What this
module imports is small: the process starts for every build.

What runs here is TensorRT for RTX without a GPU. What only the backend ``tensorrt`` uses (its flags and enums, the
timing cache, the inspector) is written to the documented API of TensorRT 10.3 to 11 and was never run; nor were memory
formats of inputs and outputs with it.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import queue
import shutil
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from trtopt.engine.native_log import Sink, heard, logger_of
from trtopt.engine.process import is_driver_failure
from trtopt.support.limits import limit_memory

REQUEST, RESULT, ENGINE, LAYERS = "request.json", "result.json", "engine", "layers"
TIMING_CACHE = "timing-cache"
_STACK_BYTES = 1 << 30
_KEPT_BYTES = 256 << 20
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's mallopt (malloc.h)."""


class _RefusedError(Exception):
    """The build failed in a way the result file describes."""

    def __init__(self, stage: str, details: list[dict[str, Any]] | None = None) -> None:
        super().__init__(stage)
        self.stage = stage
        self.details = details or []


def main(folder: str) -> None:
    """Build what ``folder`` asks for and leave the results there."""
    events = _events()
    limit_memory()
    _allow_deep_recursion()
    threading.Thread(target=_die_with_parent, args=(Path(folder),), daemon=True).start()
    _build_one(Path(folder), events)


def serve() -> None:
    """Build in one folder after the other, their paths read from standard input, and say so after each.

    Ends with the input, or after a build that failed: what it leaves behind may change the next.
    """
    events = _events()
    limit_memory()
    _allow_deep_recursion()
    _keep_memory()
    folders: queue.Queue[str] = queue.Queue()
    current: list[Path] = []
    threading.Thread(target=_take_requests, args=(folders, current), daemon=True).start()
    built = True
    while built:
        current[:] = [Path(folders.get())]
        built = _build_one(current[0], events)
        print(json.dumps({"kind": "done", "total": None}), file=events, flush=True)


def _keep_memory() -> None:
    """Let the allocator keep what one build frees for the next.

    TensorRT for RTX 1.7.1 asks for some 140 MB for a small model and gives them back: of the CPU time of eleven builds
    of a transformer block, 1.2 of 2.5 seconds went into clearing those pages.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES)


def _events() -> TextIO:
    """Where progress goes; what native code prints must not mix with it."""
    events = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return events


def _take_requests(folders: queue.Queue[str], current: list[Path]) -> None:
    """Pass on requests; end with the parent, however it ends, and leave no folder without an owner."""
    for line in sys.stdin:
        folders.put(line.rstrip("\n"))
    for folder in current:
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def _build_one(folder: Path, events: TextIO) -> bool:
    """Build what ``folder`` asks for, leave the results there, and say whether it went well."""
    request = json.loads(Path(folder, REQUEST).read_text(encoding="utf-8"))
    messages: list[tuple[str, str]] = []
    result: dict[str, Any] = {"ok": True}
    start = time.perf_counter()
    try:
        result.update(_build(request, folder, messages, events))
    except _RefusedError as refused:
        result.update(ok=False, stage=refused.stage, details=refused.details)
    result["seconds"] = time.perf_counter() - start
    result["messages"] = messages
    Path(folder, RESULT).write_text(json.dumps(result), encoding="utf-8")
    return bool(result["ok"])


def _allow_deep_recursion() -> None:
    """Let this thread's stack grow: the compiler recurses along chains of nodes, and thousands of them do not fit the
    usual 8 MiB (TensorRT for RTX 1.7 dies of SIGSEGV on a chain of 3500)."""
    if sys.platform == "win32":
        return
    resource = importlib.import_module("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_STACK)
    wanted = _STACK_BYTES if hard == resource.RLIM_INFINITY else min(_STACK_BYTES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_STACK, (wanted, hard))


def _die_with_parent(folder: Path) -> None:
    """End with the parent, however it ends: its end of the pipe closes. The folder has no owner then."""
    os.read(0, 1)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def _build(request: dict[str, Any], folder: Path, messages: list[tuple[str, str]], events: TextIO) -> dict[str, Any]:
    try:
        trt = importlib.import_module(request["module"])
    except ImportError as error:
        raise _RefusedError("import", [{"text": str(error)}]) from error
    with heard(_sink(trt, folder, messages)):
        return _built(trt, request, folder, messages, events)


def _built(
    trt: Any, request: dict[str, Any], folder: Path, messages: list[tuple[str, str]], events: TextIO
) -> dict[str, Any]:
    logger = logger_of(trt)
    builder = _started(lambda: trt.Builder(logger))  # first: the registry of plugins has no logger before
    _load_plugins(trt, logger, request["plugins"])
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(request["onnx"]):
        raise _RefusedError("parse", [_parser_error(parser.get_error(i)) for i in range(parser.num_errors)])
    if network.num_outputs == 0:  # the parser takes an empty file for a model with nothing in it
        raise _RefusedError("parse", [])
    if request["parse_only"]:
        return {"version": trt.__version__}
    _set_formats(trt, network, request["formats"])
    config = _configure(trt, builder, network, request)
    monitor = _monitor(trt, events)  # the config does not keep it alive
    config.progress_monitor = monitor
    cache = _timing_cache(config, request, folder)
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise _RefusedError("build")
    if request["keep_engine"]:
        Path(folder, ENGINE).write_bytes(plan)
    if cache is not None:
        Path(folder, TIMING_CACHE).write_bytes(config.get_timing_cache().serialize())
    if request["inspect"]:
        try:
            _inspect(trt, bytes(plan), folder, host_code=request["flags"].get("VERSION_COMPATIBLE", False))
        except (_RefusedError, AttributeError, RuntimeError, TypeError, ValueError) as error:  # the engine is made
            messages.append(("WARNING", f"the layers of the engine cannot be listed: {error}"))
    return {"version": trt.__version__}


def _started(make: Callable[[], Any]) -> Any:
    """A ``Builder`` or ``Runtime``; refused where the driver does not start."""
    try:
        return make()
    except TypeError as error:
        if not is_driver_failure(error):
            raise
        raise _RefusedError("driver") from error


def _sink(trt: Any, folder: Path, messages: list[tuple[str, str]]) -> Sink:
    def take(severity: Any, message: str) -> None:
        if message.startswith("Layers:"):
            Path(folder, LAYERS).write_bytes(message.encode())
        elif severity.value <= trt.ILogger.Severity.WARNING.value:
            messages.append((severity.name, message))

    return take


def _load_plugins(trt: Any, logger: Any, plugins: list[str]) -> None:
    trt.init_libnvinfer_plugins(logger, "")
    registry = trt.get_plugin_registry()
    for library in plugins:
        if registry.load_library(library) is None:
            raise _RefusedError("plugin", [{"library": library}])


def _parser_error(error: Any) -> dict[str, Any]:
    return {
        "code": error.code().name,
        "index": error.node(),
        "name": error.node_name(),
        "op": error.node_operator(),
        "text": error.desc(),
        "stack": list(error.local_function_stack()),
    }


def _configure(trt: Any, builder: Any, network: Any, request: dict[str, Any]) -> Any:
    config = builder.create_builder_config()
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    targets = request["compute_capabilities"]
    if targets:
        config.num_compute_capabilities = len(targets)
        for index, capability in enumerate(targets):
            config.set_compute_capability(getattr(trt.ComputeCapability, capability), index)
    for name, value in request["flags"].items():
        flag = _member(trt.BuilderFlag, name)
        if value:
            config.set_flag(flag)
        else:
            config.clear_flag(flag)
    for name, value in request["attributes"].items():
        _member(config, name)
        setattr(config, name, value)
    for name, (enum, member) in request["enums"].items():
        _member(config, name)
        setattr(config, name, _member(_member(trt, enum), member))
    for name, (enum, members) in request["masks"].items():
        bits = sum(1 << int(_member(_member(trt, enum), member)) for member in members)
        if not _member(config, f"set_{name}")(bits):
            raise _RefusedError("option", [{"name": name}])
    for pool, limit in request["pools"].items():
        config.set_memory_pool_limit(getattr(trt.MemoryPoolType, pool), limit)
    for given in request["profiles"] or [{"shapes": {}, "values": {}}]:
        profile = _profile(builder, network, given)
        if request["profiles"]:
            config.add_optimization_profile(profile)
    return config


def _set_formats(trt: Any, network: Any, formats: dict[str, str]) -> None:
    """Memory formats of the network's inputs and outputs; those that are not named have the usual one."""
    tensors = [network.get_input(index) for index in range(network.num_inputs)]
    tensors += [network.get_output(index) for index in range(network.num_outputs)]
    for tensor in tensors:
        if tensor.name in formats:
            tensor.allowed_formats = 1 << int(_member(trt.TensorFormat, formats[tensor.name]))


def _member(owner: Any, name: str) -> Any:
    """``owner.name``; what the backend's version lacks is a matter of its options, not a crash."""
    try:
        return getattr(owner, name)
    except AttributeError as error:
        raise _RefusedError("option", [{"name": name}]) from error


def _profile(builder: Any, network: Any, given: dict[str, dict[str, list[list[int]]]]) -> Any:
    """A profile; refused where nothing says the values of an input that is read as a shape."""
    profile, shapes, values = builder.create_optimization_profile(), given["shapes"], given["values"]
    for index in range(network.num_inputs):
        tensor = network.get_input(index)
        if tensor.is_shape_tensor and tensor.name not in values:
            raise _RefusedError("shape-input", [{"name": tensor.name, "shape": list(tensor.shape)}])
        if tensor.is_shape_tensor:
            profile.set_shape_input(tensor.name, *values[tensor.name])
        elif tensor.name in shapes:
            profile.set_shape(tensor.name, *shapes[tensor.name])
    return profile


def _monitor(trt: Any, events: TextIO) -> Any:
    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        """Passes on the start and the steps of the outermost phase: those within it are many and short."""

        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.outermost: str | None = None

        def phase_start(self, phase: str, parent: str | None, steps: int) -> None:
            if parent is None:
                self.outermost = phase
                self.send("start", steps)

        def step_complete(self, phase: str, step: int) -> bool:
            if phase == self.outermost:
                self.send("advance")
            return True

        def phase_finish(self, phase: str) -> None:
            pass

        def send(self, kind: str, total: int | None = None) -> None:
            print(json.dumps({"kind": kind, "total": total}), file=events, flush=True)

    return Monitor()


def _timing_cache(config: Any, request: dict[str, Any], folder: Path) -> Any:
    """The timing cache left in the folder; None where there is none to use.

    The user's file has to fit the GPU and the version; the one of trtopt's own cache is begun anew where it does not.
    """
    named = request["timing_cache"]
    if named is None:
        return None
    cache = config.create_timing_cache(Path(folder, TIMING_CACHE).read_bytes())
    if cache is None or not config.set_timing_cache(cache, ignore_mismatch=False):
        if named:
            raise _RefusedError("timing-cache", [{"path": named}])
        cache = config.create_timing_cache(b"")
        config.set_timing_cache(cache, ignore_mismatch=False)
    return cache


def _inspect(trt: Any, plan: bytes, folder: Path, *, host_code: bool) -> None:
    """Write the inspector's JSON, with the shapes of the first profile's optimum where they are dynamic.

    The context gets no memory for activations: nothing runs in it.
    """
    runtime = _started(lambda: trt.Runtime(logger_of(trt)))
    if host_code:
        runtime.engine_host_code_allowed = True
    engine = runtime.deserialize_cuda_engine(plan)
    if engine is None:
        raise _RefusedError("the runtime does not load the engine")
    inspector = engine.create_engine_inspector()
    context = engine.create_execution_context(trt.ExecutionContextAllocationStrategy.USER_MANAGED)
    if context is None:
        raise _RefusedError("the runtime gives no context")
    held = [_set_optimum(trt, engine, context, engine.get_tensor_name(at)) for at in range(engine.num_io_tensors)]
    inspector.execution_context = context
    text = inspector.get_engine_information(trt.LayerInformationFormat.JSON)
    del held  # the context reads the values of shape tensors until here
    Path(folder, LAYERS).write_text(text, encoding="utf-8")


def _set_optimum(trt: Any, engine: Any, context: Any, name: str) -> Any:
    """Give an input the first profile's optimum; the memory of the values of a shape tensor, None of others."""
    if engine.get_tensor_mode(name) != trt.TensorIOMode.INPUT:
        return None
    if not engine.is_shape_inference_io(name):
        context.set_input_shape(name, engine.get_tensor_profile_shape(name, 0)[1])
        return None
    ranges = engine.get_tensor_profile_values(0, name)  # the interface calls its arguments by each other's names
    if not ranges:
        raise _RefusedError(f"the engine does not say the values of {name!r}")
    numbers = ranges[1]
    kind = ctypes.c_int64 if engine.get_tensor_dtype(name) == trt.DataType.INT64 else ctypes.c_int32
    memory = (kind * len(numbers))(*numbers)
    if not context.set_tensor_address(name, ctypes.addressof(memory)):
        raise _RefusedError(f"the runtime refuses the values {numbers} of {name!r}")
    return memory


if __name__ == "__main__":
    main(sys.argv[1])
