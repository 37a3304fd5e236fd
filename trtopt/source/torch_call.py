"""A PyTorch module and a call of it, as a user names them: example inputs, dynamic axes, other inputs of their kind."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trtopt.errors import UsageError
from trtopt.support._lazy import require


@dataclass(frozen=True)
class Call:
    """A module and its arguments, of which the tensors become graph inputs.

    Attributes:
        args: Positional arguments; empty where all of them can be given by name.
        dynamic: Axes of tensors among the arguments, by the names of :func:`named_tensors`.
    """

    module: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    dynamic: tuple[DynamicAxis, ...] = ()

    def arguments(self) -> dict[str, Any]:
        """The arguments by parameter of ``forward``; those of ``*inputs`` are one tuple."""
        return dict(inspect.signature(self.module.forward).bind(*self.args, **self.kwargs).arguments)

    def inputs(self) -> dict[str, Any]:
        """The tensors among the arguments by name, in the order of the graph's inputs."""
        return dict(named_tensors(self.arguments()))

    def run(self) -> Any:
        """What the module gives.

        Raises:
            UsageError: It fails.
        """
        try:
            return self.module(*self.args, **self.kwargs)
        except (RuntimeError, ValueError, IndexError, AssertionError) as error:
            raise UsageError(
                f"PyTorch fails on the example inputs: {' '.join(str(error).split())[:300]}",
                where=type(self.module).__name__,
                remedy="give example inputs that the module accepts",
            ) from error

    def dynamic_shapes(self) -> dict[str, Any] | None:
        """The dynamic axes as ``torch.onnx.export`` wants them: the arguments with axes in place of tensors."""
        if not self.dynamic:
            return None
        axes: dict[str, dict[int, str]] = {}
        for axis in self.dynamic:
            axes.setdefault(axis.name, {})[axis.axis] = axis.symbol
        return {name: _axes_of(value, name, axes) for name, value in self.arguments().items()}

    def sizes(self) -> dict[str, int]:
        """The size of each dynamic axis in this call, by symbol."""
        inputs = self.inputs() if self.dynamic else {}
        return {axis.symbol: int(inputs[axis.name].shape[axis.axis]) for axis in self.dynamic}

    def resampled(self, sizes: Mapping[str, int]) -> Call:
        """The call with other tensors, and with the dynamic axes in ``sizes``.

        Elements are drawn from the example's, which keeps token numbers, masks and lengths valid; integers that ascend
        (positions, offsets) ascend again. Floating-point tensors of one value give normally distributed ones instead,
        as they would check little.
        """
        torch = require("torch", "torch", "export PyTorch models")
        generator = torch.Generator().manual_seed(1)
        names = iter(self.inputs() if self.dynamic else ())

        def draw(value: Any) -> Any:
            name, shape = next(names, None), [int(size) for size in value.shape]
            for axis in self.dynamic:
                if axis.name == name:
                    shape[axis.axis] = sizes.get(axis.symbol, shape[axis.axis])
            flat = value.detach().flatten()
            if flat.numel() == 0 or (value.is_floating_point() and bool((flat == flat[0]).all())):
                return torch.randn(shape, generator=generator).to(value.dtype)
            drawn = flat[torch.randint(0, flat.numel(), shape, generator=generator)]
            ordered = value.dim() and drawn.dtype in (torch.int32, torch.int64) and bool((value.diff() >= 0).all())
            return drawn.sort().values if ordered else drawn

        return self.mapped(draw)

    def mapped(self, change: Callable[[Any], Any]) -> Call:
        """The call with each of its tensors changed, one after the other."""
        pytree = require("torch.utils._pytree", "torch", "export PyTorch models")
        leaves, spec = pytree.tree_flatten((self.args, self.kwargs))
        args, kwargs = pytree.tree_unflatten([change(leaf) if is_tensor(leaf) else leaf for leaf in leaves], spec)
        return replace(self, args=args, kwargs=kwargs)


def is_tensor(value: Any) -> bool:
    return isinstance(value, require("torch", "torch", "export PyTorch models").Tensor)


def leaves(tree: Any) -> list[Any]:
    """The tensors of nested tuples, lists, dicts and dataclasses that torch knows, in torch's order."""
    pytree = require("torch.utils._pytree", "torch", "export PyTorch models")
    return [leaf for leaf in pytree.tree_leaves(tree) if is_tensor(leaf)]


def named_tensors(tree: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The tensors of nested arguments or outputs with their names: keys, fields and places, joined by ``_``.

    Example:
        ``{"ids": a, "past": ((b, c), {"k": d})}`` gives ``ids``, ``past_0_0``, ``past_0_1`` and ``past_1_k``, as
        PyTorch's exporter calls them.
    """
    if is_tensor(tree):
        yield name, tree
        return
    for key, value in _children(tree):
        yield from named_tensors(value, f"{name}_{key}" if name else str(key))


def _children(tree: Any) -> list[tuple[Any, Any]]:
    """What is in a container, with its keys; of one that only torch knows, all that is nested in it."""
    if isinstance(tree, Mapping):
        return list(tree.items())
    if dataclasses.is_dataclass(tree):
        return [(field.name, getattr(tree, field.name)) for field in dataclasses.fields(tree)]
    if isinstance(tree, (tuple, list)):
        return list(zip(getattr(tree, "_fields", range(len(tree))), tree, strict=True))
    leaves = require("torch.utils._pytree", "torch", "export PyTorch models").tree_leaves(tree)
    return [] if len(leaves) == 1 and leaves[0] is tree else list(enumerate(leaves))


def _axes_of(tree: Any, name: str, axes: Mapping[str, dict[int, str]]) -> Any:
    """``tree`` with the dynamic axes in place of its tensors, and None in that of others."""
    if is_tensor(tree):
        return axes.get(name)
    children = _children(tree)
    if not children:
        return type(tree)() if isinstance(tree, (tuple, list, Mapping)) else None
    inside = {key: _axes_of(value, f"{name}_{key}", axes) for key, value in children}
    if isinstance(tree, Mapping):
        return inside
    return tuple(inside.values()) if isinstance(tree, tuple) else list(inside.values())


def _renamed(signature: inspect.Signature, given: Mapping[str, Any]) -> str:
    """The inputs that were given, in their order, by the names of the parameters."""
    pairs = zip(signature.parameters, given.values(), strict=False)
    options = [
        f"--input {name}:{str(item.dtype).removeprefix('torch.')}:{'x'.join(map(str, item.shape))}"
        for name, item in pairs
        if hasattr(item, "shape")
    ]
    return f": {' '.join(options)}" if options else ""


def bind(module: Any, example: tuple[Any, ...] | Mapping[str, Any] | None, dynamic: tuple[DynamicAxis, ...]) -> Call:
    """Bind example inputs to the parameters of ``forward``, and check the dynamic axes against them.

    Raises:
        UsageError: They do not fit.
    """
    signature = inspect.signature(module.forward)
    names = ", ".join(signature.parameters)
    if not example:
        raise UsageError(
            "A PyTorch module needs example inputs to be exported",
            where=f"forward({names})",
            remedy="pass example_inputs=(tensor, ...), or inputs=['NAME:DTYPE:SHAPE', ...]",
        )
    args, kwargs = ((), dict(example)) if isinstance(example, Mapping) else (tuple(example), {})
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise UsageError(
            f"The example inputs do not fit the module: {error}",
            where=f"forward({names})",
            remedy=f"name the inputs after the parameters of forward{_renamed(signature, kwargs)}",
        ) from error
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    if all(signature.parameters[name].kind in by_name for name in bound.arguments):
        call = Call(module, (), dict(bound.arguments), dynamic)
    else:
        call = Call(module, bound.args, bound.kwargs, dynamic)
    inputs = call.inputs()
    for axis in dynamic:
        if axis.name not in inputs or axis.axis >= inputs[axis.name].dim():
            raise UsageError(
                f"--dynamic: {axis.name} is no input with an axis {axis.axis}",
                where=f"forward({names})",
                remedy=f"name an input and an axis of it, from 0; the inputs: {', '.join(inputs)}",
            )
    return call


def enlarged(call: Call) -> Call:
    """The call with dynamic axes of size 1 enlarged: ``torch.export`` takes a size of 1 for a constant."""
    sizes = {symbol: size for symbol, size in call.sizes().items() if size == 1}
    lowest = {axis.symbol: max(2, axis.low or 2) for axis in call.dynamic}
    return call.resampled({symbol: lowest[symbol] for symbol in sizes}) if sizes else call


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
    least = 0 if int(match["axis"]) else 1  # a cache may be empty, a batch not
    if low is not None and high is not None and not least <= low < high:
        raise UsageError("--dynamic: the bounds are no range", where=text, remedy=f"give {least} <= MIN < MAX")
    return DynamicAxis(match["name"], int(match["axis"]), match["symbol"], low, high)


def bounds_of(dynamic: Sequence[str]) -> dict[tuple[str, int], tuple[int, int]]:
    """The smallest and the largest size by input and axis, of the axes of ``--dynamic`` that have bounds."""
    axes = map(parse_dynamic, dynamic)
    return {(a.name, a.axis): (a.low, a.high) for a in axes if a.low is not None and a.high is not None}


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


def parse_inputs(texts: Sequence[str]) -> dict[str, Any]:
    """Example inputs by name; see :func:`parse_input`. Raises UsageError: a name is given twice."""
    inputs: dict[str, Any] = {}
    for text in texts:
        name, tensor = parse_input(text)
        if name in inputs:
            raise UsageError(f"--input: {name} is given twice", where=text, remedy="give each input once")
        inputs[name] = tensor
    return inputs
