"""The process of a compiler: how it starts, when it is ended because nothing comes of it, and what its failure says."""

from __future__ import annotations

import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any

from trtopt.errors import EngineBuildError, MissingDependencyError, TargetError, TrtoptError, UsageError

START = (
    "import os, sys; os.environ.pop('NVIDIA_TF32_OVERRIDE', None); "
    "sys.path[:] = [*filter(None, sys.path), sys.argv[1]]; "
)
"""What it runs first; its first argument is the folder that holds trtopt.

``''`` in ``sys.path`` is the folder that the user stands in: a ``json.py`` there is not Python's.

``NVIDIA_TF32_OVERRIDE`` turns TF32 on or off in every build, behind the options' back: ``--tf32`` is the option, and
the key of the cache knows no other. ``CUDA_MODULE_LOADING`` and ``TRT_INTERNAL_OPTIONS`` left the engines of TensorRT
for RTX 1.7.1 as they were, to the byte.
"""

STALL_S = 3600.0
"""Time without a step of progress after which a build is given up. TensorRT times kernels within one step, for minutes
on a large network; TensorRT for RTX, which times nothing, takes seconds for a whole one."""


class Stall:
    """Ends a process that makes no progress. Use it as a context manager around reading from the process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._ended = threading.Event()
        self._last = time.monotonic()
        self._expired = False

    def progress(self) -> None:
        """Wait anew."""
        self._last = time.monotonic()

    def check(self) -> None:
        """Raise EngineBuildError if the process was ended."""
        if self._expired:
            raise EngineBuildError(
                f"The compiler made no progress for {STALL_S:g} seconds and was stopped",
                where="the compiler's process",
                remedy="lower --builder builder_optimization_level, or make the model smaller",
            )

    def _watch(self) -> None:
        while not self._ended.wait(max(self._last + STALL_S - time.monotonic(), 0.0)):
            if time.monotonic() >= self._last + STALL_S:
                self._expired = True
                self._process.kill()
                return

    def __enter__(self) -> Stall:
        threading.Thread(target=self._watch, name="stall", daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()


_FACTORY = "factory function returned nullptr"
_CUDA_FAILURE = re.compile(r"CUDA initialization failure with error: (\d+)")
_DRIVER_REMEDIES = {
    "35": "the driver is older than the CUDA of the installed TensorRT: update it (CUDA 13 needs R580), or install "
    'TensorRT for CUDA 12: pip install "trtopt[gpu-cu12]"',
    "100": "CUDA sees no GPU: check nvidia-smi and CUDA_VISIBLE_DEVICES; in a container, run it with --gpus all",
    "101": "CUDA_VISIBLE_DEVICES names a GPU that is not there",
    "803": "the driver's library and its kernel module are of different versions: restart the machine",
    "804": "this GPU takes no newer CUDA than its driver: update the driver, or use an older container",
    "999": "load the kernel module nvidia_uvm, or restart the machine",
}
"""By the number of ``cudaError_t``."""


def is_driver_failure(error: TypeError) -> bool:
    """Whether ``Builder`` or ``Runtime`` of TensorRT failed to start: pybind11 knows no better word for it."""
    return _FACTORY in str(error)


def driver_failed(messages: Sequence[str]) -> TargetError:
    """The error for a ``Builder`` or ``Runtime`` that did not start, with what it logged."""
    text = "; ".join(dict.fromkeys(" ".join(message.split()) for message in messages))
    found = _CUDA_FAILURE.search(text)
    known = None if found is None else _DRIVER_REMEDIES.get(found[1])
    return TargetError(
        f"TensorRT cannot start: {text or 'it gave no reason'}",
        where="the NVIDIA driver",
        remedy=known or "check the driver with nvidia-smi, and free GPU memory",
    )


def plugin_refused(library: str, messages: Iterable[str]) -> UsageError:
    """The error for a library of plugins that the registry does not take, with what it logged."""
    return UsageError(
        f"The plugin library cannot be loaded: {_reasons(messages) or 'its plugins are registered already'}",
        where=library,
        remedy="check that it is built for this version of TensorRT, that it is named once, and with ldd what it needs",
    )


_NOISE = ("cudaError 35", "Network must have at least one output", "--- Begin node", "--- End node")
_NO_MEMORY = ("MemoryError", "std::bad_alloc")
_SOURCE = re.compile(
    r"(?:\s*In \S+ at /\S+:\d+\)?)+$"  # where in TensorRT's sources
    r"|^(?:\[\S+\] )?(?:\w+::\w+: )?(?:Error Code \d+: [\w ]+ \()?"
)


def crash(returncode: int, stderr: str) -> EngineBuildError:
    """The worker ended without leaving a result."""
    lines = [line for line in stderr.splitlines() if line.strip()]
    if any(word in stderr for word in _NO_MEMORY):
        what, remedy = "The compiler's process ran out of memory", "free some, or build a smaller profile"
    elif returncode < 0:
        number = -returncode
        name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
        what = f"The compiler's process was ended by {name}"
        remedy = "SIGKILL usually means that memory ran out: free some, or build a smaller profile"
        if name != "SIGKILL":
            remedy = "the compiler crashed: report it with the model; another precision or other shapes may avoid it"
    else:
        what = f"The compiler's process failed with exit code {returncode}"
        remedy = "run `trtopt doctor --selftest`, and report it with its output if that passes"
    return EngineBuildError(what, where=lines[-1][:400] if lines else "it printed nothing", remedy=remedy)


def refusal(
    stage: str, details: Sequence[dict[str, Any]], messages: Sequence[tuple[str, str]], model: str
) -> TrtoptError:
    """The error for a build the worker says failed in ``stage``."""
    if stage == "import":
        return MissingDependencyError(
            f"The backend's package cannot be imported: {details[0]['text']}",
            where="the compiler's process",
            remedy="install it again; `trtopt doctor` says what is installed",
        )
    if stage == "plugin":
        return plugin_refused(str(details[0]["library"]), _errors(messages))
    if stage == "driver":
        return driver_failed(_errors(messages))
    if stage == "timing-cache":
        return UsageError(
            "The timing cache does not belong to this GPU and version of TensorRT",
            where=str(details[0]["path"]),
            remedy="name another file; a new one is created",
        )
    if stage == "option":
        return UsageError(
            f"This version of the backend has no {details[0]['name']}", where="--builder", remedy="leave the option out"
        )
    if stage == "shape-input":
        name, shape = details[0]["name"], details[0]["shape"]
        numbers = "x".join("N" * (shape[0] if shape else 1))
        return EngineBuildError(
            f"The compiler reads the input {name!r} as a shape, and nothing says its values",
            where=f"{model}, input {name!r} of shape {shape}",
            remedy=f"give them as trtexec does, one number for each element: --min-shapes {name}:{numbers} "
            f"--opt-shapes {name}:{numbers} --max-shapes {name}:{numbers}",
        )
    if stage == "parse":
        return _parse_error(details, model)
    return _build_error(messages, model)


def _parse_error(details: Sequence[dict[str, Any]], model: str) -> EngineBuildError:
    if not details:
        return EngineBuildError(
            "The model has no nodes and no outputs", where=model, remedy="check that the file is a whole ONNX model"
        )
    first = details[0]
    more = f" (and {len(details) - 1} more nodes)" if len(details) > 1 else ""
    text = " ".join(line for line in first["text"].splitlines() if not any(noise in line for noise in _NOISE))
    if first["index"] < 0:
        return EngineBuildError(
            f"The parser cannot read the model: {text}", where=f"{model} ({first['code']})", remedy="check the file"
        )
    remedy = "change the model around this node"
    if "Plugin not found" in text:
        text = "no such operator, and no plugin of that name"
        remedy = "replace the operator, or name the library of its plugin with --plugins"
    elif first["code"].startswith("UNSUPPORTED"):
        text = "not supported" if text in ("", "false") else text
        remedy = "replace the operator with supported ones, or name the library of a plugin for it with --plugins"
    return EngineBuildError(
        f"The parser refuses the operator {first['op']}: {text}{more}",
        where=f"node {first['index']}, {first['name']!r} ({first['op']}), {first['code']}",
        remedy=remedy,
    )


def _errors(messages: Iterable[tuple[str, str]]) -> list[str]:
    return [text for severity, text in messages if severity in ("ERROR", "INTERNAL_ERROR")]


def _reasons(errors: Iterable[str]) -> str:
    """What was logged as errors, each once, without places in TensorRT's sources."""
    told = (text for text in errors if not any(noise in text for noise in _NOISE))
    return "; ".join(dict.fromkeys(_SOURCE.sub("", " ".join(text.split())) for text in told))


def _build_error(messages: Sequence[tuple[str, str]], model: str) -> EngineBuildError:
    text = _reasons(_errors(messages)) or "it gave no reason"
    remedy = "the message names the layer; change the model there, or keep it in another precision"
    if re.search("out ?of ?memory|workspace size", text, re.IGNORECASE):
        remedy = "raise --builder workspace, or lower the largest shapes"
    elif "errorOnMiss" in text:  # as TensorRT 10 says it; not seen here
        remedy = "a kernel's time is not in the timing cache: build once without --error-on-timing-cache-miss"
    elif "is not supported" in text:
        remedy = "choose another precision or another --gpu"
    elif "Assertion" in text:
        remedy = "an internal check of the compiler failed; control flow (If, Loop) is the usual cause: make the input "
        remedy += "that decides it a constant, or take the branch out of the model"
    elif "inherently false" in text:  # what the compiler says of sizes that contradict each other within a profile
        remedy = "the model does not run at all shapes of the profile: narrow --min-shapes and --max-shapes, or take "
        remedy += "one size by --opt-shapes alone; an input or a constant of a fixed size may not follow the others"
    elif "profile" in text.lower():
        remedy = "check --min-shapes, --opt-shapes and --max-shapes"
    return EngineBuildError(f"The builder failed: {text[:1500]}", where=model, remedy=remedy)
