"""What the user names for export: the module, its example inputs, its dynamic axes."""

from __future__ import annotations

import contextlib
import importlib
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtopt.errors import TrtoptError, UsageError
from trtopt.support._lazy import require
from trtopt.support._script import is_script, load_object

_WEIGHT_FILES = (".pt", ".pth", ".bin", ".ckpt", ".safetensors", ".pkl", ".torchscript", ".ts")
_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "float": "float32", "half": "float16"}
_TORCH_DTYPES = (
    *("float64", "float32", "float16", "bfloat16"),
    *("int64", "int32", "int16", "int8", "uint8", "bool"),
)
_INPUT = re.compile(r"(?P<name>[^:]+):(?P<dtype>\w+):(?P<shape>(\d+(x\d+)*)?)")
_DYNAMIC = re.compile(r"(?P<name>[^:]+):(?P<axis>\d+)=(?P<symbol>[A-Za-z_]\w*)(:(?P<low>\d+)\.\.(?P<high>\d+))?")


@dataclass(frozen=True)
class DynamicAxis:
    """An input axis of any size within bounds; axes with the same symbol have the same size.

    Attributes:
        name: The input.
        axis: The axis, from 0.
        symbol: The dimension's name in the ONNX graph.
        low: Smallest size, or None.
        high: Largest size, or None.
    """

    name: str
    axis: int
    symbol: str
    low: int | None = None
    high: int | None = None


def parse_dynamic(text: str) -> DynamicAxis:
    """Parse ``NAME:AXIS=SYMBOL[:MIN..MAX]``.

    Raises:
        UsageError: The text has another form, or the bounds are no range.
    """
    match = _DYNAMIC.fullmatch(text)
    if match is None:
        raise UsageError(
            "--dynamic: not understood", where=text, remedy="NAME:AXIS=SYMBOL[:MIN..MAX], e.g. image:0=batch:1..16"
        )
    low, high = (int(match[key]) if match[key] else None for key in ("low", "high"))
    if low is not None and high is not None and not 1 <= low < high:
        raise UsageError("--dynamic: the bounds are no range", where=text, remedy="give 1 <= MIN < MAX")
    return DynamicAxis(match["name"], int(match["axis"]), match["symbol"], low, high)


def parse_input(text: str) -> tuple[str, Any]:
    """Make the example input that ``NAME:DTYPE:SHAPE`` describes.

    Floating-point elements are normally distributed; integers are 0 or 1, which every table and mask accepts.

    Returns:
        The name and a ``torch.Tensor``.

    Raises:
        UsageError: The text has another form, or the dtype is unknown.
    """
    match = _INPUT.fullmatch(text)
    if match is None:
        raise UsageError(
            "--input: not understood", where=text, remedy="NAME:DTYPE:SHAPE, e.g. image:float32:1x3x224x224"
        )
    name = _DTYPES.get(match["dtype"], match["dtype"])
    if name not in _TORCH_DTYPES:
        raise UsageError(
            f"--input: unknown dtype {match['dtype']}", where=text, remedy=f"one of {', '.join(_TORCH_DTYPES)}"
        )
    torch = require("torch", "torch", "export PyTorch models")
    dtype = getattr(torch, name)
    shape = [int(dim) for dim in match["shape"].split("x")] if match["shape"] else []
    generator = torch.Generator().manual_seed(0)
    if dtype.is_floating_point:
        return match["name"], torch.randn(shape, generator=generator).to(dtype)
    return match["name"], torch.randint(0, 2, shape, generator=generator).to(dtype)


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
    if suffix == ".pt2":
        return _load_program(torch, Path(target))
    if suffix in _WEIGHT_FILES:
        raise UsageError(
            "The file holds weights or TorchScript, not a program that can be exported",
            where=target,
            remedy="name a function that builds the module and loads the weights, file.py:function, "
            "or save a .pt2 with torch.export.save",
        )
    found = _build(
        target, load_object(target, "TARGET", "module or function") if is_script(target) else _import(target)
    )
    if not isinstance(found, torch.nn.Module):
        raise UsageError(
            f"The target is no torch.nn.Module but {type(found).__name__}",
            where=target,
            remedy="name a module, or a class or function that takes no arguments and gives one",
        )
    return found


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
        with _current_folder_importable():
            found: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            found = getattr(found, part)
    except Exception as error:
        raise UsageError(
            f"The target cannot be imported: {type(error).__name__}: {error}",
            where=target,
            remedy=f'python -c "from {module_name} import {attribute}" shows the whole error',
        ) from error
    return found


@contextlib.contextmanager
def _current_folder_importable() -> Iterator[None]:
    folder = str(Path.cwd())
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)


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


def parse_inputs(texts: Sequence[str]) -> dict[str, Any]:
    """Example inputs by name; see :func:`parse_input`.

    Raises:
        UsageError: A name is given twice.
    """
    inputs: dict[str, Any] = {}
    for text in texts:
        name, tensor = parse_input(text)
        if name in inputs:
            raise UsageError(f"--input: {name} is given twice", where=text, remedy="give each input once")
        inputs[name] = tensor
    return inputs
