"""The PyTorch module that a user names: ``package.module:attribute``, ``file.py:attribute`` or ``program.pt2``."""

from __future__ import annotations

import importlib
import inspect
import re
import shlex
import sys
from pathlib import Path
from typing import Any

from trtopt.errors import TrtoptError, UsageError
from trtopt.support._lazy import require
from trtopt.support._script import is_script, load_object

_WEIGHT_FILES = (".pt", ".pth", ".bin", ".ckpt", ".safetensors", ".pkl", ".torchscript", ".ts")
_PROGRAM = ".pt2"
_IMAGES, _TOKENS = "float32:1x3x224x224", "int64:1x128"
_TOKEN_NAMES = re.compile("ids|mask|token|index|indices|position|length")


def resolve_target(target: str) -> Any:
    """The ``torch.nn.Module`` or ``torch.export.ExportedProgram`` that ``target`` names.

    ``package.module:attribute`` and ``file.py:attribute`` may name a module, a class or a function; the latter two are
    called without arguments. ``file.pt2`` is an exported program. All of them are code of the user's and run here, a
    ``.pt2`` file included (its loader unpickles, and evaluates expressions): name only what you trust.

    Raises:
        UsageError: Nothing of that name, a file of weights only, or it gives no module.
    """
    torch = require("torch", "torch", "export PyTorch models")
    suffix = Path(target).suffix.lower()
    if suffix == _PROGRAM:
        return _load_program(torch, Path(target))
    if suffix in _WEIGHT_FILES:
        raise _weights(target)
    found = _build(target, load_object(target, target, "module or function") if is_script(target) else _import(target))
    if not isinstance(found, torch.nn.Module):
        raise UsageError(
            f"The target is no torch.nn.Module but {type(found).__name__}",
            where=target,
            remedy="name a module, or a class or function that takes no arguments and gives one",
        )
    return found


def check_no_pytorch(path: Path) -> None:
    """Refuse a file of PyTorch's where an ONNX file belongs, by its name: nothing of it is read, let alone unpickled.

    Raises:
        UsageError: It is one; the remedy is the line that makes an ONNX file of it.
    """
    suffix = path.suffix.lower()
    if suffix in _WEIGHT_FILES:
        raise _weights(str(path))
    if suffix == ".py":
        what = "The file is Python code: the module or function in it is not named"
        raise UsageError(what, where=str(path), remedy=f"give {path.name}:NAME --input INPUT:{_IMAGES}")
    if suffix == _PROGRAM:
        line = shlex.join(["trtopt", "export", path.name, "-o", path.with_suffix(".onnx").name])
        raise UsageError("The file is an exported program of PyTorch, not an ONNX model", where=str(path), remedy=line)


def _weights(path: str) -> UsageError:
    name = Path(path).name
    stem = Path(path).stem if Path(path).stem.isidentifier() else "net"
    return UsageError(
        "The file holds weights or TorchScript of PyTorch, not a program that can be exported, nor an ONNX model",
        where=path,
        remedy=f"trtopt export nets.py:{stem} -o {stem}.onnx --input image:{_IMAGES}, where {stem}() in nets.py makes "
        f"the module and loads {name}, and the input is yours",
    )


def no_inputs(target: str, module: Any) -> UsageError:
    """The error for a module that is named without example inputs, with the line to run: its inputs by name."""
    parameters = inspect.signature(module.forward).parameters.values()
    needed = [item.name for item in parameters if item.default is item.empty and item.kind is not item.VAR_KEYWORD]
    inputs = [f"--input {name}:{_TOKENS if _TOKEN_NAMES.search(name) else _IMAGES}" for name in needed]
    name = target.rpartition(":")[2].rpartition(".")[2]
    return UsageError(
        "A PyTorch module needs example inputs to be exported",
        where=f"{target}: forward({', '.join(item.name for item in parameters)})",
        remedy=f"trtopt export {shlex.quote(target)} -o {name}.onnx {' '.join(inputs)}, with the types and shapes of "
        "your inputs; or give these --input here",
    )


def _load_program(torch: Any, path: Path) -> Any:
    if not path.is_file():
        raise UsageError("The file does not exist", where=str(path), remedy="check the path")
    try:
        return torch.export.load(str(path))
    except Exception as error:
        raise UsageError(
            f"The file is no exported program: {' '.join(str(error).split())[:300]}",
            where=str(path),
            remedy="save it with torch.export.save, by the version of torch that is installed here",
        ) from error


def _import(target: str) -> Any:
    """The object ``package.module:attribute`` names, looked for in the current folder too."""
    module_name, _, attribute = target.partition(":")
    if not attribute or not all(part.isidentifier() for part in f"{module_name}.{attribute}".split(".")):
        raise UsageError(
            "The target is not understood",
            where=target,
            remedy="package.module:attribute, file.py:function, or an exported program file.pt2",
        )
    try:
        sys.path.insert(0, folder := str(Path.cwd()))
        try:
            found: Any = importlib.import_module(module_name)
        finally:
            sys.path.remove(folder)
        for part in attribute.split("."):
            found = getattr(found, part)
    except Exception as error:
        raise UsageError(
            f"The target cannot be imported: {type(error).__name__}: {error}",
            where=target,
            remedy=f'python -c "from {module_name} import {attribute}" shows the whole error',
        ) from error
    return found


def _build(target: str, found: Any) -> Any:
    """``found``, or what it returns when it is a class or a function."""
    torch = require("torch", "torch", "export PyTorch models")
    if isinstance(found, torch.nn.Module) or not callable(found):
        return found
    try:
        return found()
    except TrtoptError:
        raise
    except Exception as error:
        raise UsageError(
            f"The target failed: {type(error).__name__}: {error}",
            where=target,
            remedy="it is called without arguments and must give a torch.nn.Module",
        ) from error
