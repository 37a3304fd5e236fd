"""A model cut into segments, in each of which chosen nodes can be exchanged for their 8-bit form.

A run with few nodes exchanged computes only the segments that this changes, and takes the rest from an earlier run of
the same sample: half of the network on average. A segment is a session; with other nodes exchanged it is another
session of that segment alone, made when it is first needed, so that memory does not grow with the exchanges times the
weights.

Measured on ResNet-50 in ONNX Runtime 1.31, one core: 16 segments take 1.05 times as long as the whole, 25 segments
1.15 times, 54 (one per product) 1.2 to 1.3 times.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import TracebackType

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common as passes

from trtopt.graph import edit
from trtopt.graph.shapes import infer_shapes
from trtopt.support.ort_session import Feeds, OrtSession

_SEGMENTS = 24
"""Segments of a model of ordinary size: more of them cost time at the cuts, fewer make longer runs."""
_EXCHANGED_BYTES = 512 << 20
"""FP32 weights of the sessions with a node exchanged, all together; beyond it there are more segments."""


@dataclass(frozen=True)
class SegmentRun:
    """What a run with some nodes in 8 bits leaves behind: by name, what crosses the cuts, and the outputs of the
    model."""

    exchanged: frozenset[str]
    values: Mapping[str, np.ndarray]


@dataclass(frozen=True)
class _Form:
    """The 8-bit form of a node: nodes of the quantized model in its order, which read values of the base model.

    ``output`` is the value among theirs that stands for the node's output.
    """

    nodes: tuple[ir.Node, ...]
    output: ir.Value
    reads: frozenset[str]


@dataclass(frozen=True)
class _Segment:
    """Consecutive nodes of the base model, and what crosses their borders."""

    nodes: tuple[ir.Node, ...]
    inputs: tuple[ir.Value, ...]
    outputs: tuple[ir.Value, ...]


class _Place:
    """Where a session stands once it is made."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.session: OrtSession | None = None


class SegmentedModel:
    """A model whose nodes can be exchanged for their 8-bit form, run by run. Close it to free its sessions.

    Args:
        base: The model without 8-bit nodes.
        quantized: The same with all of ``nodes`` in 8 bits; what both compute alike has the same name in both. The
            8-bit form of a node is what computes its output there, back to values of ``base``.
        nodes: Names of the nodes that may be exchanged, in the main graph.
        segments: How many segments; None for a number that bounds time and memory.

    Attributes:
        output_names: The outputs of the model that its nodes compute.

    Raises:
        ValueError: One of ``nodes`` is not in the main graph, or has no 8-bit form.
    """

    def __init__(
        self, base: ir.Model, quantized: ir.Model, nodes: Collection[str], *, segments: int | None = None
    ) -> None:
        self._base = _prepared(base)
        self._forms = _forms(self._base, quantized, nodes)
        self._opset_imports = dict(quantized.graph.opset_imports)
        self.output_names = tuple(str(value.name) for value in base.graph.outputs if value.producer() is not None)
        self._segments = _Layout(self._base, self._forms).segments(segments)
        self._place = {str(node.name): index for index, part in enumerate(self._segments) for node in part.nodes}
        self._sessions: dict[tuple[int, frozenset[str]], _Place] = {}
        self._lock = threading.Lock()

    def run(self, feeds: Feeds, exchanged: Collection[str] = (), earlier: SegmentRun | None = None) -> SegmentRun:
        """Run one sample with the nodes of ``exchanged`` in 8 bits; several threads may do so, each run on one core.

        What does not depend on the difference is taken from ``earlier``, a run of the same sample.

        Raises:
            InvalidModelError: ONNX Runtime cannot load a segment, or it fails on this sample.
        """
        wanted = frozenset(exchanged)
        values = {**feeds, **({} if earlier is None else earlier.values)}
        differs = {self._place[name] for name in wanted ^ earlier.exchanged} if earlier is not None else set()
        changed: set[str] = set()
        kept: dict[str, np.ndarray] = {} if earlier is None else dict(earlier.values)
        for index, part in enumerate(self._segments):
            is_same = earlier is not None and index not in differs
            if not part.outputs or (is_same and not any(value.name in changed for value in part.inputs)):
                continue
            session = self._session(index, frozenset(name for name in wanted if self._place[name] == index))
            found = dict(zip(session.output_names, session.run(values), strict=True))
            values.update(found)
            kept.update(found)
            changed.update(found)
        return SegmentRun(wanted, kept)

    def outputs(self, run: SegmentRun) -> list[np.ndarray]:
        """The outputs of a run, in the order of ``output_names``."""
        return [run.values[name] for name in self.output_names]

    def close(self) -> None:
        """Free the memory of all sessions."""
        for place in self._sessions.values():
            if place.session is not None:
                place.session.close()
        self._sessions.clear()

    def __enter__(self) -> SegmentedModel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _session(self, index: int, exchanged: frozenset[str]) -> OrtSession:
        with self._lock:
            place = self._sessions.setdefault((index, exchanged), _Place())
        with place.lock:  # threads that want another one need not wait for this one to be made
            if place.session is None:
                model = self._written(self._segments[index], exchanged)
                place.session = OrtSession(model, keep_qdq=True, threads=1, arena=False)
            return place.session

    def _written(self, part: _Segment, exchanged: frozenset[str]) -> ir.Model:
        """A segment as a model of its own, with the 8-bit forms of some of its nodes."""
        read = {value for node in part.nodes for value in edit.values_read(node)}
        graph = ir.GraphView(
            list(part.inputs),
            list(part.outputs),
            nodes=list(part.nodes),
            initializers=[value for value in self._base.graph.initializers.values() if value in read],
            opset_imports=self._opset_imports,
            name=self._base.graph.name,
        ).clone()
        model = ir.Model(graph, ir_version=self._base.ir_version, functions=list(self._base.functions.values()))
        if exchanged:
            _exchange(model, {name: form for name, form in self._forms.items() if name in exchanged})
        return model


def _prepared(model: ir.Model) -> ir.Model:
    """``model``, with inferred types where some are missing, and constants as initializers, which need no cut."""
    if not all(value.type is not None for node in model.graph for value in node.outputs if value.name):
        model = infer_shapes(model)
    if any(edit.is_op(node, "Constant") for node in model.graph):
        model = passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model.clone()).model
    return model


def _forms(base: ir.Model, quantized: ir.Model, nodes: Collection[str]) -> dict[str, _Form]:
    """The 8-bit forms of ``nodes``, in graph order."""
    known = _computed(base)
    order = {node: index for index, node in enumerate(quantized.graph)}
    values = _computed(quantized)
    wanted = set(nodes)
    found = {}
    for node in base.graph:
        target = values.get(str(node.outputs[0].name)) if node.name in wanted else None
        if target is not None:
            found[str(node.name)] = _form(target, known, order)
    missing = sorted(wanted - found.keys())
    if missing:
        raise ValueError(f"{missing[0]!r} is no node of the main graph with an 8-bit form")
    return found


def _form(target: ir.Value, known: Collection[str], order: Mapping[ir.Node, int]) -> _Form:
    nodes: set[ir.Node] = set()
    reads: set[str] = set()
    front = [target]
    while front:
        node = front.pop().producer()
        if node is None or node in nodes:
            continue
        nodes.add(node)
        for value in node.inputs:
            if value is None or value.is_initializer():
                continue
            if value.name in known:
                reads.add(str(value.name))
            else:
                front.append(value)
    return _Form(tuple(sorted(nodes, key=order.__getitem__)), target, frozenset(reads))


def _computed(model: ir.Model) -> dict[str, ir.Value]:
    """The inputs of the main graph and what its nodes compute, by name."""
    found = {str(value.name): value for value in model.graph.inputs if not value.is_initializer()}
    found.update((str(value.name), value) for node in model.graph for value in node.outputs if value.name)
    return found


class _Layout:
    """The main graph of a typed model as a list of nodes, and what crosses each position in it.

    What an 8-bit form reads is read at its node's place.
    """

    def __init__(self, model: ir.Model, forms: Mapping[str, _Form]) -> None:
        self.nodes = tuple(model.graph)
        self._values = _computed(model)
        self._outputs = set(model.graph.outputs)
        self._reads: list[set[str]] = []
        for node in self.nodes:
            names = {str(value.name) for value in edit.values_read(node) if self._values.get(str(value.name)) is value}
            self._reads.append(names | forms[str(node.name)].reads if node.name in forms else names)
        self._spots = [index for index, node in enumerate(self.nodes) if node.name in forms]

    def segments(self, count: int | None) -> list[_Segment]:
        """About ``count`` segments with about equally many of the exchanged nodes each."""
        borders = [0, *self._cuts(min(count or self._count(), len(self._spots))), len(self.nodes)]
        found: list[_Segment] = []
        needed: set[str] = set()
        for start, end in reversed(list(itertools.pairwise(borders))):
            nodes = self.nodes[start:end]
            made = {str(value.name): value for node in nodes for value in node.outputs if value.name}
            read = set().union(*self._reads[start:end]) - made.keys()
            inputs = tuple(self._values[name] for name in sorted(read))
            outputs = tuple(value for name, value in made.items() if name in needed or value in self._outputs)
            needed |= read
            found.append(_Segment(nodes, inputs, outputs))
        return found[::-1]

    def _count(self) -> int:
        read = [edit.constant_tensor_of(value) for index in self._spots for value in self.nodes[index].inputs]
        total = sum(4 * tensor.size for tensor in read if tensor is not None)
        return max(_SEGMENTS, len(self._spots) * total // _EXCHANGED_BYTES)

    def _cuts(self, count: int) -> list[int]:
        """Positions to cut at, before the node of that index.

        Each lies between the last exchanged node of one segment and the first of the next, where the fewest values
        cross; of equal places the last, so that what follows a product (bias, activation) stays with it.
        """
        crossing = self._crossing()
        found = []
        for group in range(1, count):
            at = group * len(self._spots) // count
            places = range(self._spots[at - 1] + 1, self._spots[at] + 1)
            possible = [(crossed, -place) for place in places if (crossed := crossing[place]) is not None]
            if possible:
                found.append(-min(possible)[1])
        return found

    def _crossing(self) -> list[int | None]:
        """How many values cross each position; None where something crosses that is no tensor of a known type."""
        made = {str(value.name): value for node in self.nodes for value in node.outputs}
        last = {name: index for index, names in enumerate(self._reads) for name in names & made.keys()}
        ending: dict[int, list[str]] = {}
        for name, index in last.items():
            ending.setdefault(index, []).append(name)
        alive: set[str] = set()
        found: list[int | None] = []
        for index, node in enumerate(self.nodes):
            tensors = all(isinstance(made[name].type, ir.TensorType) for name in alive)
            found.append(len(alive) if tensors else None)
            alive.update(str(value.name) for value in node.outputs if value.name in last)
            alive.difference_update(ending.get(index, ()))
        return found


def _exchange(model: ir.Model, forms: Mapping[str, _Form]) -> None:
    """Write 8-bit forms into a segment, in place of its own nodes."""
    graph, names = model.graph, edit.Names(model)
    own = {str(node.name): node for node in graph}
    values = _computed(model)
    made: dict[ir.Value, ir.Value] = {}

    def counterpart(value: ir.Value | None) -> ir.Value | None:
        if value is None or value in made:
            return None if value is None else made[value]
        if value.is_initializer() and value.const_value is not None:
            made[value] = edit.add_initializer(graph, names.value(str(value.name)), value.const_value)
            return made[value]
        return values[str(value.name)]

    for name, form in forms.items():
        replaced = own[name]
        for node in form.nodes:
            if node.outputs[0] in made:
                continue
            new = ir.Node(
                node.domain,
                node.op_type,
                [counterpart(value) for value in node.inputs],
                list(node.attributes.values()),
                num_outputs=len(node.outputs),
                name=names.node(str(node.name)),
            )
            for old, output in zip(node.outputs, new.outputs, strict=True):
                output.name, output.type, made[old] = names.value(str(old.name)), old.type, output
            graph.insert_before(replaced, new)
        result = made[form.output]
        values[str(replaced.outputs[0].name)] = result
        edit.replace_value(replaced.outputs[0], result)
        edit.remove_node(replaced)
