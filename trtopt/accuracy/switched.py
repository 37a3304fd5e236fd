"""One FP32 emulation for all plans that differ in which nodes run in 16 bits.

A search for nodes to put back to FP32 runs a network a hundred times, and to write a plan and load its emulation takes
0.2 s where the run takes 0.01. Here each node stands in an ``If`` (1.5 us in ONNX Runtime 1.31 on 2-core x86-64, where
a Where over its outputs would take as long as five Casts), whose condition is an input of the graph: it rounds, as
:func:`~trtopt.accuracy.emulation.fp32_emulation` does, or not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from trtopt.accuracy.emulation import EXACT_OPS
from trtopt.graph import edit
from trtopt.precision.fp16.cast_to_half import TYPE_ATTRIBUTES, FloatForm, stored, why_fp32
from trtopt.precision.plan import BF16, NarrowType, PrecisionPlan
from trtopt.support.ort_session import LARGE_BYTES

_FLOAT = ir.DataType.FLOAT


@dataclass(frozen=True)
class SwitchedEmulation:
    """An emulation of the plans that differ from ``plan`` in that more nodes are FP32.

    Attributes:
        plan: The one with the fewest nodes in FP32.
        model: The graph, with an input of type BOOL and no axes for each node that may run in 16 bits.
        switches: The names of these inputs, by node.
    """

    plan: PrecisionPlan
    model: ir.Model
    switches: Mapping[str, str]

    def feeds(self, plan: PrecisionPlan) -> dict[str, np.ndarray] | None:
        """What those inputs are for a plan, whose 8-bit part is left out; None for a plan that differs otherwise."""
        own = self.plan
        bfloat = own.bfloat.keys() - plan.wide.keys()
        if plan.narrow is not own.narrow or not own.wide.keys() <= plan.wide.keys() or plan.bfloat.keys() != bfloat:
            return None
        return {name: np.array(node not in plan.wide) for node, name in self.switches.items()}


def switched_emulation(base: ir.Model, plan: PrecisionPlan) -> SwitchedEmulation | None:
    """An emulation for plans with more nodes in FP32; None where weights that are held twice fill the memory.

    Args:
        base: The widened model: FP32 is its only float type, but for Casts at its border.
        plan: The plan with the fewest nodes in FP32; what it quantizes is left out.

    Example:
        >>> emulation = switched_emulation(base, plan)
        >>> with OrtSession(emulation.model, keep_qdq=True) as session:
        ...     session.run({**feeds, **emulation.feeds(another)})
    """
    weights = (value.const_value for value in base.graph.initializers.values())
    if sum(tensor.nbytes for tensor in weights if tensor is not None) > LARGE_BYTES:
        return None
    clone = base.clone()
    writer = _Writer(clone)
    for node in list(clone.graph):
        kind = BF16 if node.name in plan.bfloat else plan.narrow
        if kind is not None and node.name not in plan.wide and why_fp32(node, kind) is None:
            writer.switch(node, kind)
    return SwitchedEmulation(plan, clone, writer.switches)


class _Writer:
    def __init__(self, model: ir.Model) -> None:
        self.switches: dict[str, str] = {}
        self._graph, self._names = model.graph, edit.Names(model)
        self._weights: dict[tuple[ir.Value, NarrowType], ir.Value] = {}

    def switch(self, node: ir.Node, kind: NarrowType) -> None:
        """Run ``node`` in 16 bits or in FP32, as a new input says."""
        flag = ir.Value(name=self._names.value(f"{node.name}/is_narrow"), type=ir.TensorType(ir.DataType.BOOL))
        flag.shape = ir.Shape([])
        self._graph.inputs.append(flag)
        self.switches[str(node.name)] = str(flag.name)
        old = [value for value in node.outputs if value.name]
        branches = [
            ir.AttrGraph(branch, self._branch(node, form))
            for branch, form in (("then_branch", kind), ("else_branch", None))
        ]
        chosen = ir.Node("", "If", [flag], branches, num_outputs=len(old), name=self._names.node(f"{node.name}/if"))
        self._graph.insert_after(node, chosen)
        for value, new in zip(old, chosen.outputs, strict=True):
            new.name, new.type, new.shape = value.name, value.type, value.shape
            edit.replace_value(value, new)
        edit.remove_node(node)

    def _branch(self, node: ir.Node, kind: NarrowType | None) -> ir.Graph:
        """A graph of ``node`` alone, with the roundings of ``kind`` before and behind it."""
        inputs, before, narrowed = list(node.inputs), list[ir.Node](), set[str]()
        form = FloatForm(node, kind) if kind is not None else None
        for index, value in enumerate(inputs):
            if kind is None or form is None or value is None or value.dtype is not _FLOAT or not form.input(index)[1]:
                continue
            narrowed.add(form.input(index)[0])
            if value.is_initializer():
                inputs[index] = self._stored(value, kind)
            else:
                before += self._round(value, kind)
                inputs[index] = before[-1].outputs[0]
        copy = ir.Node(
            node.domain,
            node.op_type,
            inputs,
            node.attributes.values() if kind is None else _attributes(node, kind),
            version=node.version,
            num_outputs=len(node.outputs),
            name=self._names.node(f"{node.name}/inner"),
        )
        behind, results = list[ir.Node](), list[ir.Value]()
        for index, (value, inner) in enumerate(zip(node.outputs, copy.outputs, strict=True)):
            inner.name = self._names.value(f"{value.name}/inner") if value.name else ""
            inner.type, inner.shape = value.type, value.shape
            if kind is not None and form is not None and _rounds(node, index, form, narrowed):
                behind += self._round(inner, kind)
                inner = behind[-1].outputs[0]
            results += [inner] if value.name else []
        return ir.Graph([], results, nodes=[*before, copy, *behind], name=self._names.node(f"{node.name}/branch"))

    def _stored(self, value: ir.Value, kind: NarrowType) -> ir.Value:
        """A weight with the values that ``kind`` stores."""
        if (value, kind) not in self._weights:
            exact = edit.constant_of(value)
            if exact is None:
                raise ValueError(f"initializer {value.name} has no value")
            name, rounded = self._names.value(f"{value.name}_{kind.name}"), stored(exact, kind).astype(np.float32)
            self._weights[value, kind] = edit.add_initializer(self._graph, name, rounded)
        return self._weights[value, kind]

    def _round(self, value: ir.Value, kind: NarrowType) -> list[ir.Node]:
        """Nodes the last of which gives ``value`` as ``kind`` holds it."""
        chain: list[ir.Node] = []
        for dtype in (kind.dtype, _FLOAT):
            source = chain[-1].outputs[0] if chain else value
            chain.append(edit.cast_node(source, dtype, self._names, self._names.value(f"{value.name}/rounded")))
        return chain


def _attributes(node: ir.Node, kind: NarrowType) -> list[ir.Attr]:
    """The attributes of a node in 16 bits: what a ConstantOfShape fills with is stored in them."""
    fill = node.attributes.get("value")
    if not edit.is_op(node, "ConstantOfShape") or fill is None or node.outputs[0].dtype is not _FLOAT:
        return list(node.attributes.values())
    return [ir.AttrTensor("value", ir.tensor(kind.saturate(fill.as_tensor().numpy()).astype(np.float32)))]


def _rounds(node: ir.Node, index: int, form: FloatForm, narrowed: set[str]) -> bool:
    """Whether an output of a node in 16 bits is one, as ``cast_to_half`` decides, and may need more."""
    variable, fits = form.output(index)
    is_narrow = fits and (variable in narrowed or TYPE_ATTRIBUTES.get(node.op_type, "") in node.attributes)
    is_exact = node.op_type in EXACT_OPS and node.domain == ""
    return is_narrow and not is_exact and node.outputs[index].dtype is _FLOAT and bool(node.outputs[index].name)
