"""Where the Casts around FP32 nodes go: at the borders of what a compiler computes in one kernel.

A Cast inside such a pattern parts it. TensorRT for RTX 1.7.1 has one kernel for group normalization and SiLU, as
exporters write it: Reshape - InstanceNormalization - Reshape - Mul - Add - Sigmoid - Mul. With Casts right around
InstanceNormalization it makes three kernels and two tensors in FP32 of it; with Casts around the whole pattern the one
kernel takes them in. Which border is cheapest the judge of the target says.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import onnx_ir as ir

from trtopt.graph import edit
from trtopt.precision.fp16.cast_to_half import why_fp32
from trtopt.precision.fp16.repair import widened
from trtopt.precision.observe.ranges import LAYOUT_OPS, is_float
from trtopt.precision.plan import PrecisionPlan

_ELEMENTWISE = frozenset(
    "Add Sub Mul Div Neg Sqrt Exp Relu LeakyRelu Clip Sigmoid HardSigmoid HardSwish Swish Gelu Erf Tanh Elu "
    "Softplus".split()
)
_NORMALIZATIONS = frozenset({"InstanceNormalization", "GroupNormalization"})
"""Operators whose kernel takes in what stands around them."""

_KINDS = _NORMALIZATIONS | {"LayerNormalization", "RMSNormalization"}
"""Operators that a compiler may compute faster where all of a kind are alike."""

_LAYOUT = LAYOUT_OPS - {"Gather", "GatherElements", "GatherND"}


def grown(base: ir.Model, plan: PrecisionPlan, put_back: Collection[str] = ()) -> tuple[PrecisionPlan, ...]:
    """The plan with its FP32 regions grown: to the operators that only move values, to whole patterns, and to all
    normalizations of a kind.

    Regions grow from normalizations that stay FP32 and from the nodes that were put back. More nodes in FP32 never
    round more. Plans that would be equal are left out.
    """
    if plan.narrow is None:
        return ()
    taken = {op.node for op in plan.quantized} | set(plan.wide)
    seeds = [
        node
        for node in base.graph
        if node.name in plan.wide and (node.op_type in _NORMALIZATIONS or node.name in put_back)
    ]
    found: list[PrecisionPlan] = []
    for joins in (_LAYOUT, _LAYOUT | _ELEMENTWISE):
        more: dict[str, str] = {}
        for seed in seeds:
            reason = f"around an operator {seed.op_type} in FP32: a Cast between them would part their kernel"
            for node in _around(seed, joins):
                if node.name not in taken and why_fp32(node, plan.narrow) is None:
                    more.setdefault(str(node.name), reason)
        if more and (not found or len(more) > len(found[-1].wide) - len(plan.wide)):
            found.append(widened(base, plan, more))
    kinds = {node.op_type for node in base.graph if node.name in plan.wide and node.op_type in _KINDS}
    alike = {
        str(node.name): f"FP32 as others of {node.op_type} are: a compiler may be faster where all of them are alike"
        for node in base.graph
        if node.op_type in kinds and node.name not in taken and why_fp32(node, plan.narrow) is None
    }
    if alike:
        found.append(widened(base, found[-1] if found else plan, alike))
    return tuple(found)


def _around(seed: ir.Node, joins: Collection[str]) -> Iterator[ir.Node]:
    """The nodes of the same pattern: what lays its input out, and what reads only it, constants and itself."""
    source = edit.maker_of(edit.input_of(seed, 0))
    if source is not None and source.op_type in _LAYOUT and len(source.outputs[0].uses()) == 1:
        yield source
    inside, front = {seed}, [seed]
    while front:
        for value in front.pop().outputs:
            for reader, _ in value.uses():
                if reader in inside or reader.op_type not in joins or reader.graph is not seed.graph:
                    continue
                if all(_is_inside(operand, inside) for operand in reader.inputs):
                    inside.add(reader)
                    front.append(reader)
                    yield reader


def _is_inside(value: ir.Value | None, inside: Collection[ir.Node]) -> bool:
    if value is None or not is_float(value) or edit.constant_tensor_of(value) is not None:
        return True
    return value.producer() in inside
