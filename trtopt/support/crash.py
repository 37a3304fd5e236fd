"""What the death of a process says: which library crashed on the model, by the signal and the trace it left."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

from trtopt.errors import EngineBuildError, InvalidModelError, ResourceError, TrtoptError, UsageError

_NATIVE = {
    "onnxruntime": ("ONNX Runtime", InvalidModelError),
    "onnx": ("ONNX's checks and shape inference", InvalidModelError),
    "google": ("Protobuf", InvalidModelError),
    "torch": ("PyTorch", InvalidModelError),
    "tensorrt": ("TensorRT", EngineBuildError),
    "tensorrt_rtx": ("TensorRT for RTX", EngineBuildError),
    "cuda": ("CUDA", EngineBuildError),
}
"""Packages that run native code on a model: what they are called, and which error their crash is."""

_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)


class CrashedError(TrtoptError):
    """trtopt's own code died in native code: a bug."""


def death(number: int, trace: str, where: str) -> TrtoptError:
    """The error for a process that a signal ended.

    Args:
        number: The signal.
        trace: What ``faulthandler`` wrote, which knows more than the signal; it may be empty.
        where: What the process was asked for: the command, or the call.
    """
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    if number == signal.SIGKILL:
        return ResourceError(
            "The process was killed (SIGKILL), which is what the system does when memory runs out",
            where=where,
            remedy="free memory, or give smaller shapes or fewer samples",
        )
    memory = ", or memory ran out" if number == signal.SIGABRT else ""
    found = _running(trace)
    if found is None or found[0] == "trtopt":
        return CrashedError(
            f"trtopt crashed ({name})", where=where, remedy=f"report it with the model and `trtopt doctor`{memory}"
        )
    package, place = found
    if package not in _NATIVE:
        return UsageError(f"A script crashed ({name})", where=place, remedy="mend the script")
    what, error = _NATIVE[package]
    remedy = f"the file is damaged or meets a fault of that library{memory}: check it with its own tools, or export it "
    return error(f"{what} crashed ({name}) on this model", where=where, remedy=f"{remedy}again")


def _running(trace: str) -> tuple[str, str] | None:
    """The package that ran, empty for a script of the user's, and the line of its caller; None where nothing tells.

    A thread of a library's own has no line of Python; then the call tells that some thread has under way.
    """
    parts = trace.split("\n\n")
    current = [frame for part in parts if "Current thread" in part for frame in _FRAME.findall(part)]
    for path, line, function in current or _FRAME.findall(trace):
        package = _package(path)
        if package in _NATIVE or (package == "trtopt" and current):
            return package, ""
        if package is None:
            return "", f"{path}, line {line}, in {function}"
    return None


def _package(path: str) -> str | None:
    """The package a source file belongs to, empty for the standard library; None for a file of the user's."""
    parts = Path(path).parts
    for folder in ("site-packages", "dist-packages"):
        if folder in parts:
            return parts[parts.index(folder) + 1]
    for name, file in (("trtopt", __file__), ("", os.__file__)):
        root = Path(file).parents[1] if name else Path(file).parent
        if Path(path).is_relative_to(root):
            return name
    return "" if path.startswith("<frozen") else None
