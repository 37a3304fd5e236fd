"""An exported graph, run by ONNX Runtime, against the PyTorch module it comes from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from trtopt.errors import GateError, UsageError
from trtopt.source.torch_call import Call, leaves
from trtopt.support._lazy import require
from trtopt.support.ort_session import OrtSession

_TOLERANCE = {"float64": 1e-4, "float32": 1e-4, "float16": 2e-2}
"""Largest error of an output over its largest value, by dtype. FP32 kernels differ in the order of their sums (1e-6 to
1e-5 in networks of a hundred layers), FP16 besides in where they round (2^-11 each time). Integers must be equal."""

_NUDGE = 1e-5
"""By this share inputs are changed to see whether an output jumps: what rounding adds up to within a network."""

_BOUNDS = ", or bound the sizes that it is meant for (--dynamic NAME:AXIS=SYMBOL:MIN..MAX)"


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


def check(call: Call, model: ir.Model, example: Any) -> tuple[ExportCheck, ...]:
    """Compare the graph with PyTorch on the example inputs, on others, and on other sizes of the dynamic axes.

    Inputs other than the example that PyTorch itself refuses are left out. So are those at which PyTorch's outputs
    jump: a selection of boxes takes others where two scores are nearly equal.

    Args:
        example: What the module gives on the example inputs.

    Raises:
        GateError: The outputs differ by more than rounding, or jump on all inputs.
    """
    names = [str(value.name) for value in model.graph.inputs]
    with OrtSession(model) as session:
        checks = [_compared(session, names, ("example", call, example))]
        for attempts in _others(call):
            for label, one in attempts:
                try:
                    wanted = one.run()
                except UsageError:
                    continue
                checks.append(_compared(session, names, (label, one, wanted)))
                break
    done = tuple(item for item in checks if item is not None)
    if not done:
        raise GateError(
            "The exported graph cannot be compared with PyTorch, whose outputs jump at every input that was tried",
            where=", ".join(session.output_names),
            remedy="give example inputs that are like real ones; nothing was written",
        )
    return done


def _others(call: Call) -> Iterator[list[tuple[str, Call]]]:
    """Random inputs; the smallest size of the dynamic axes; a larger one or, where PyTorch refuses it, the double."""
    yield [("random", call.resampled({}))]
    example = call.sizes()
    highest = {axis.symbol: axis.high for axis in call.dynamic}

    def at(sizes: dict[str, int]) -> list[tuple[str, Call]]:
        bound = {symbol: min(size, highest[symbol] or size) for symbol, size in sizes.items()}
        label = ", ".join(f"{symbol}={size}" for symbol, size in bound.items())
        return [(label, call.resampled(bound))] if bound != example else []

    yield at({axis.symbol: 1 if axis.low is None else axis.low for axis in call.dynamic})
    yield [
        *at({symbol: size + 1 for symbol, size in example.items()}),
        *at({symbol: size * 2 for symbol, size in example.items()}),
    ]


def _compared(session: OrtSession, names: list[str], case: tuple[str, Call, Any]) -> ExportCheck | None:
    """The graph, whose inputs are ``names``, against what PyTorch gives; None where PyTorch's outputs jump there.

    Raises:
        GateError: They differ by more than rounding.
    """
    label, call, output = case
    wanted = [value.detach().numpy() for value in leaves(output)]
    feeds = {name: value.detach().numpy() for name, value in zip(names, leaves((call.args, call.kwargs)), strict=True)}
    found = session.run(feeds)
    differences = [_difference(*pair) for pair in zip(wanted, found, strict=True)]
    for place, (error, share) in enumerate(differences):
        tolerance = _TOLERANCE.get(wanted[place].dtype.name, 0.0)
        if share <= tolerance:
            continue
        if _moves(call, place, wanted, 0.0) <= tolerance < _moves(call, place, wanted, _NUDGE):
            return None
        bounds = _BOUNDS if "=" in label else ""
        raise GateError(
            f"The exported graph differs from PyTorch: output {session.output_names[place]} by {error:.3g}, which is "
            f"{share:.3g} of its largest value",
            where=f"inputs: {label}; allowed: {tolerance:g}",
            remedy=f"look for randomness or kept state in forward{bounds}; nothing was written",
        )
    largest, ratio = (max((item[part] for item in differences), default=0.0) for part in (0, 1))
    return ExportCheck(label, largest, ratio)


def _moves(call: Call, place: int, wanted: list[np.ndarray], nudge: float) -> float:
    """By what share an output of PyTorch changes when the inputs change by the share ``nudge``."""
    torch = require("torch", "torch", "export PyTorch models")
    generator = torch.Generator().manual_seed(2)

    def nudged(value: Any) -> Any:
        if not value.is_floating_point():
            return value
        return value * (1 + nudge * torch.randn(value.shape, generator=generator)).to(value.dtype)

    again = leaves(call.mapped(nudged).run())
    return _difference(wanted[place], again[place].detach().numpy())[1]


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
