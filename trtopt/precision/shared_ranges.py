"""Inputs of one Concat that are quantized share the range of its result, where a backend quantizes before it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import onnx_ir as ir

from trtopt.graph.edit import is_op
from trtopt.precision.plan import QuantizedOp


def with_shared_ranges(
    model: ir.Model, ops: Sequence[QuantizedOp], largest_ratio: float, given: Collection[str] = ()
) -> list[QuantizedOp]:
    """``ops`` with one range for a quantized Concat and those of its inputs that are quantized for other readers.

    The quantizer of a Concat's result moves before it, to the kernels that write the inputs; an input that others
    read quantized with another scale would be written twice. The largest range of a group serves all of it: a smaller
    one would clip.

    Args:
        model: The model the ops are of.
        ops: Ops of one 8-bit type.
        largest_ratio: Ranges of an input and the result that differ by more stay apart.
        given: Tensors whose range somebody else has set.
    """
    ranges = {op.activation: (op.activation_amax, op.method) for op in ops if op.activation not in given}
    leader = {name: name for name in ranges}

    def top(name: str) -> str:
        while leader[name] != name:
            name = leader[name]
        return name

    for node in model.graph:
        result = str(node.outputs[0].name) if node.outputs else ""
        if is_op(node, "Concat") and result in ranges:
            for value in node.inputs:
                if value is None or value.name not in ranges:
                    continue
                low, high = sorted((ranges[str(value.name)][0], ranges[result][0]))
                if high <= low * largest_ratio:
                    leader[top(str(value.name))] = top(result)
    largest: dict[str, tuple[float, str]] = {}
    for name, found in ranges.items():
        largest[top(name)] = max(found, largest.get(top(name), found))
    shared = {name: largest[top(name)] for name in ranges}
    return [
        op
        if op.activation not in shared
        else replace(op, activation_amax=shared[op.activation][0], method=shared[op.activation][1])
        for op in ops
    ]
