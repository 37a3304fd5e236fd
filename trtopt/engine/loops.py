"""How often the kernels inside an engine's loops run."""

from __future__ import annotations

import re
from collections.abc import Sequence

from trtopt.report.schema.layers import LayerInfo

_LITERAL = re.compile(r"__d\^(M?)(\d+)i(?:32|64)(?:_myl\d+)?\Z")
"""A constant of the host: ``__d^64i32_myl0`` is 64, ``__d^M1i32_myl0`` is -1."""


def trip_counts(layers: Sequence[LayerInfo]) -> tuple[int | None, ...]:
    """How often each layer runs: 1 outside of loops, else the trip count of the loop, nested ones multiplied.

    As seen in the lists of TensorRT for RTX 1.7: a ``memset`` sets a counter (or a ``copy`` from the GPU), the body
    follows, an ``add`` advances the counter and a ``cjmp`` compares it with a constant. The compiler unrolls bodies, so
    a recurrent layer of 64 steps may be 8 trips of 8 kernels. Kernels before the body that write the initial values of
    what the body writes again run once.

    Returns:
        In the order of the layers; None where the trip count is not a constant. Where not even the body is known, it is
        the branch (``cjmp``) that has None.
    """
    counts: list[int | None] = [1] * len(layers)
    for end, layer in enumerate(layers):
        if layer.type != "cjmp":
            continue
        counter = next((item.name for item in layer.inputs if _literal(item.name) is None), None)
        start = max((i for i in range(end) if _sets(layers[i], counter)), default=None)
        step = None if start is None else _step(layers[start:end], counter)
        if start is None or step is None:
            counts[end] = None
            continue
        trips = _trips(layers, end, step)
        for index in _body(layers, start + 1, end):
            known = counts[index]
            counts[index] = None if known is None or trips is None else known * trips
    return tuple(counts)


def _literal(name: str) -> int | None:
    match = _LITERAL.match(name)
    return None if match is None else int(match[2]) * (-1 if match[1] else 1)


def _sets(layer: LayerInfo, counter: str | None) -> bool:
    return layer.type in ("memset", "copy") and any(item.name == counter for item in layer.outputs)


def _body(layers: Sequence[LayerInfo], start: int, end: int) -> range:
    """The layers that are repeated: those of the range, but for leading ones that write initial values."""
    while start < end and _writes_initial_values(layers, start, end):
        start += 1
    return range(start, end)


def _writes_initial_values(layers: Sequence[LayerInfo], index: int, end: int) -> bool:
    if not layers[index].is_kernel:
        return True
    later = {item.name for layer in layers[index + 1 : end] if layer.is_kernel for item in layer.outputs}
    return bool(layers[index].outputs) and all(item.name in later for item in layers[index].outputs)


def _trips(layers: Sequence[LayerInfo], end: int, step: int) -> int | None:
    """A counter that rises does so from 0 to the constant it is compared with; one that falls, to it from a constant
    that no other layer reads."""
    limit = next((value for value in (_literal(item.name) for item in layers[end].inputs) if value is not None), None)
    if limit is None:
        return None
    if step > 0:
        return max(-(-limit // step), 1)
    read = {item.name for layer in layers for item in layer.inputs}
    unread = [_literal(item.name) for layer in layers for item in layer.outputs if item.name not in read]
    starts = [value for value in unread if value is not None and value > limit]
    return -((limit - starts[0]) // -step) if len(starts) == 1 else None


def _step(layers: Sequence[LayerInfo], counter: str | None) -> int | None:
    """What the body adds to the counter."""
    for layer in layers:
        names = [item.name for item in layer.inputs]
        if layer.type == "add" and counter in names and any(item.name == counter for item in layer.outputs):
            return next((value for value in map(_literal, names) if value), None)
    return None
