"""A PyTorch module and a call of it, as a user names them: example inputs, dynamic axes, other inputs of their kind."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from trtopt.errors import GateError, TrtoptError, UsageError
from trtopt.support._lazy import require
from trtopt.support._script import is_script, load_object
from trtopt.support.ort_session import OrtSession

_TOLERANCE = {"float64": 1e-4, "float32": 1e-4, "float16": 2e-2}
"""Largest error of an output over its largest value, by dtype. FP32 kernels differ in the order of their sums (1e-6 to
1e-5 in networks of a hundred layers), FP16 besides in where they round (2^-11 each time). Integers must be equal."""


@dataclass(frozen=True)
class ExportCheck:
    """One comparison of the exported graph with PyTorch.

    Attributes:
        inputs: What was fed: ``example``, ``random``, or the sizes of the dynamic axes.
        max_abs: Largest absolute difference over all outputs.
        max_ratio: Largest difference of an output over the largest value of that output.
    """

    inputs: str
    max_abs: float
    max_ratio: float


@dataclass(frozen=True)
class Call:
    """A module and its arguments, of which the tensors become graph inputs.

    Attributes:
        args: Positional arguments; empty where all of them can be given by name.
        dynamic: Axes of tensors among ``kwargs``.
    """

    module: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    dynamic: tuple[DynamicAxis, ...] = ()

    def dynamic_shapes(self) -> dict[str, Any] | None:
        """The dynamic axes as ``torch.export`` wants them."""
        if not self.dynamic:
            return None
        torch = require("torch", "torch", "export PyTorch models")
        bounds: dict[str, tuple[int | None, int | None]] = {}
        for axis in self.dynamic:
            low, high = bounds.get(axis.symbol, (None, None))
            bounds[axis.symbol] = (axis.low or low, axis.high or high)
        dims = {symbol: torch.export.Dim(symbol, min=low, max=high) for symbol, (low, high) in bounds.items()}
        shapes: dict[str, Any] = dict.fromkeys(self.kwargs)
        for axis in self.dynamic:
            shapes[axis.name] = {**(shapes[axis.name] or {}), axis.axis: dims[axis.symbol]}
        return shapes

    def sizes(self) -> dict[str, int]:
        """The size of each dynamic axis in this call, by symbol."""
        return {axis.symbol: int(self.kwargs[axis.name].shape[axis.axis]) for axis in self.dynamic}

    def resampled(self, sizes: Mapping[str, int]) -> Call:
        """The call with other tensors, and with the dynamic axes in ``sizes``.

        Elements are drawn from the example's, which keeps token numbers, masks and lengths valid. Floating-point
        tensors of one value give normally distributed ones instead, as they would check little.
        """
        torch = require("torch", "torch", "export PyTorch models")
        generator = torch.Generator().manual_seed(1)

        def draw(value: Any, shape: list[int]) -> Any:
            flat = value.detach().flatten()
            if flat.numel() == 0 or (value.is_floating_point() and bool((flat == flat[0]).all())):
                return torch.randn(shape, generator=generator).to(value.dtype)
            return flat[torch.randint(0, flat.numel(), shape, generator=generator)]

        def shape(name: str, value: Any) -> list[int]:
            dims = [int(size) for size in value.shape]
            for axis in self.dynamic:
                if axis.name == name:
                    dims[axis.axis] = sizes.get(axis.symbol, dims[axis.axis])
            return dims

        args = tuple(draw(value, list(value.shape)) if is_tensor(value) else value for value in self.args)
        kwargs = {
            name: draw(value, shape(name, value)) if is_tensor(value) else value for name, value in self.kwargs.items()
        }
        return replace(self, args=args, kwargs=kwargs)


def is_tensor(value: Any) -> bool:
    return isinstance(value, require("torch", "torch", "export PyTorch models").Tensor)


def bind(module: Any, example: tuple[Any, ...] | Mapping[str, Any] | None, dynamic: tuple[DynamicAxis, ...]) -> Call:
    """Bind example inputs to the parameters of ``forward``, and check the dynamic axes against them.

    Raises:
        UsageError: They do not fit.
    """
    signature = inspect.signature(module.forward)
    names = ", ".join(signature.parameters)
    if not example:
        raise UsageError(
            "No example inputs", where=f"forward({names})", remedy="give --input NAME:DTYPE:SHAPE or example_inputs"
        )
    args, kwargs = ((), dict(example)) if isinstance(example, Mapping) else (tuple(example), {})
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise UsageError(
            f"The example inputs do not fit the module: {error}",
            where=f"forward({names})",
            remedy="name the inputs after the parameters of forward",
        ) from error
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    if all(signature.parameters[name].kind in by_name for name in bound.arguments):
        args, kwargs = (), dict(bound.arguments)
    for axis in dynamic:
        if not is_tensor(kwargs.get(axis.name)) or axis.axis >= kwargs[axis.name].dim():
            raise UsageError(
                f"--dynamic: {axis.name} is no input with an axis {axis.axis}",
                where=f"forward({names})",
                remedy="name an input and an axis of it, from 0",
            )
    return Call(module, args, kwargs, dynamic)


def enlarged(call: Call) -> Call:
    """The call with dynamic axes of size 1 enlarged: ``torch.export`` takes a size of 1 for a constant."""
    sizes = {symbol: size for symbol, size in call.sizes().items() if size == 1}
    lowest = {axis.symbol: max(2, axis.low or 2) for axis in call.dynamic}
    return call.resampled({symbol: lowest[symbol] for symbol in sizes}) if sizes else call


def check(call: Call, model: ir.Model) -> tuple[ExportCheck, ...]:
    """Compare the graph with PyTorch on the example inputs, on others, and on other sizes of the dynamic axes.

    Inputs other than the example that PyTorch itself refuses are left out.

    Raises:
        GateError: The outputs differ by more than rounding.
        UsageError: PyTorch fails on the example inputs.
    """
    names = [str(value.name) for value in model.graph.inputs]
    checks = []
    with OrtSession(model) as session:
        for label, one in [("example", call), ("random", call.resampled({})), *_other_sizes(call)]:
            try:
                wanted = _tensors(one.module(*one.args, **one.kwargs))
            except (RuntimeError, ValueError, IndexError, AssertionError) as error:
                if label != "example":
                    continue
                raise UsageError(
                    f"PyTorch fails on the example inputs: {' '.join(str(error).split())[:300]}",
                    where=", ".join(names),
                    remedy="give example inputs that the module accepts",
                ) from error
            feeds = {name: value.numpy() for name, value in zip(names, _tensors((one.args, one.kwargs)), strict=True)}
            checks.append(_compare(label, session, [value.numpy() for value in wanted], session.run(feeds)))
    return tuple(checks)


def _other_sizes(call: Call) -> Iterator[tuple[str, Call]]:
    """The smallest and one larger size of the dynamic axes."""
    example = call.sizes()
    smallest = {axis.symbol: axis.low or 1 for axis in call.dynamic}
    highest = {axis.symbol: axis.high for axis in call.dynamic}
    larger = {symbol: min(size + 1, highest[symbol] or size + 1) for symbol, size in example.items()}
    for sizes in (smallest, larger):
        if sizes != example:
            yield ", ".join(f"{symbol}={size}" for symbol, size in sizes.items()), call.resampled(sizes)


def _tensors(tree: Any) -> list[Any]:
    """The tensors of nested tuples, lists, dicts and dataclasses that torch knows, in torch's order."""
    pytree = require("torch.utils._pytree", "torch", "export PyTorch models")
    return [leaf.detach() for leaf in pytree.tree_leaves(tree) if is_tensor(leaf)]


def _compare(label: str, session: OrtSession, wanted: list[np.ndarray], found: list[np.ndarray]) -> ExportCheck:
    largest = ratio = 0.0
    for name, expected, value in zip(session.output_names, wanted, found, strict=True):
        error, share = _difference(expected, value)
        tolerance = _TOLERANCE.get(expected.dtype.name, 0.0)
        if not share <= tolerance:
            raise GateError(
                f"The exported graph differs from PyTorch: output {name} by {error:.3g}, which is {share:.3g} of its "
                "largest value",
                where=f"inputs: {label}; allowed: {tolerance:g}",
                remedy="look for randomness or kept state in forward; nothing was written",
            )
        largest, ratio = max(largest, error), max(ratio, share)
    return ExportCheck(label, largest, ratio)


def _difference(expected: np.ndarray, found: np.ndarray) -> tuple[float, float]:
    """Largest difference, and its share of the largest expected value; NaN and infinities must be in place."""
    if expected.shape != found.shape:
        return np.inf, np.inf
    first, second = expected.astype(np.float64), found.astype(np.float64)
    finite = np.isfinite(first)
    if not np.array_equal(first[~finite], second[~finite], equal_nan=True):
        return np.inf, np.inf
    error = float(np.abs(first[finite] - second[finite]).max(initial=0.0))
    scale = float(np.abs(first[finite]).max(initial=0.0))
    return error, error / scale if scale else (np.inf if error else 0.0)


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
        symbol: The dimension's name in the ONNX graph.
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


def parse_inputs(texts: Sequence[str]) -> dict[str, Any]:
    """Example inputs by name; see :func:`parse_input`. Raises UsageError: a name is given twice."""
    inputs: dict[str, Any] = {}
    for text in texts:
        name, tensor = parse_input(text)
        if name in inputs:
            raise UsageError(f"--input: {name} is given twice", where=text, remedy="give each input once")
        inputs[name] = tensor
    return inputs
