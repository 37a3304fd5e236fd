"""The sizes that an engine of dynamic shapes does not tell: its layers at one shape of the inputs.

A compiler lists a dynamic dimension as -1. The graph knows the sizes of its own values; a tensor of the engine is one
of them, a view of one, or as large as what stands beside it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import onnx_ir as ir

from trtopt.engine.layers import own_name
from trtopt.engine.request import ShapeProfile
from trtopt.graph import edit
from trtopt.graph.products import Shapes
from trtopt.graph.shapes import static_shapes
from trtopt.report.schema.layers import LayerInfo, TensorInfo

_LOWERED = re.compile(r"_myl\d+_\d+$")
_COPY = re.compile(r"\.\d+$")

_COUNTING = ("InstanceNormalization", "GroupNormalization", "LayerNormalization")
"""Operators whose fused kernel counts the parts of a group that are summed up."""

_Shape = tuple[int, ...]
_Rule = Callable[[LayerInfo, TensorInfo, bool], Iterable[_Shape]]
"""The shapes that a tensor of a layer, written or read, may be a view of."""
_Fit = Callable[[_Shape, _Shape], _Shape | None]


def sized(
    layers: Sequence[LayerInfo],
    model: ir.Model,
    shapes: Shapes,
    profiles: Sequence[ShapeProfile],
    static: Sequence[LayerInfo] = (),
) -> tuple[LayerInfo, ...] | None:
    """The layers with all their dimensions.

    Args:
        layers: Those of one profile of an engine; one of static shapes is given back as it is.
        model: The model that was compiled.
        shapes: Static shapes of its values at the first profile's optimum, by name.
        profiles: Those of the engine; none for static shapes.
        static: The layers of the same model compiled at the optimum, for what the graph does not tell surely.

    Returns:
        None where nothing tells the size of some tensor; without ``static``, where nothing tells it surely.
    """
    every = [item for layer in layers for item in (*layer.inputs, *layer.outputs)]
    if not profiles or all(-1 not in item.shape for item in every):
        return tuple(layers)
    elsewhere = static_shapes(model, _elsewhere(profiles[0]))
    # A value that is as large elsewhere is no tensor of open size: a table of positions is not the rows of a batch.
    vary = {name: dims for name, dims in shapes.items() if elsewhere.get(name) != dims}
    return _Sizes(layers, model, vary, static).layers()


def _elsewhere(profile: ShapeProfile) -> dict[str, _Shape]:
    """Shapes that differ from the optimum along every axis that is open."""
    return {
        name: tuple(a if a != b else c for a, b, c in zip(low, best, high, strict=True))
        for name, (low, best, high) in profile.shapes.items()
    }


class _Sizes:
    """What is known of the tensors of one engine, from the values whose shapes vary."""

    def __init__(
        self, layers: Sequence[LayerInfo], model: ir.Model, shapes: Shapes, static: Sequence[LayerInfo]
    ) -> None:
        self._layers, self._shapes = layers, shapes
        self._static: dict[tuple[str, ...], list[LayerInfo]] = {}
        for layer in static:
            self._static.setdefault(_computes(layer), []).append(layer)
        self._nodes = {str(node.name): node for node in edit.all_nodes(model.graph)}
        self._known: dict[tuple[str, _Shape], _Shape] = {}
        self._by_name: dict[str, list[tuple[_Shape, _Shape]]] = {}

    def layers(self) -> tuple[LayerInfo, ...] | None:
        """All layers, sized."""
        sure: tuple[_Rule, ...] = (self._own, self._as_static, self._same_buffer, self._border, self._beside)
        ways = [(_viewed, rule) for rule in sure]
        if self._static:  # guesses, which count for what that engine does not hold
            rules: tuple[_Rule, ...] = (*sure, self._inside, self._near)
            ways = [(fit, rule) for fit in (_viewed, _counted) for rule in rules]
        self._count()
        while any(self._tells(fit, rule) for fit, rule in ways):
            pass
        found = tuple(self._sized(layer) for layer in self._layers)
        tensors = (item for layer in found for item in (*layer.inputs, *layer.outputs))
        return None if any(-1 in item.shape for item in tensors) else found

    def _count(self) -> None:
        """The counters of a fused normalization, which a layer of its own clears: one a row and channel at most.

        No value of the graph is one of them: they are not as large as the map that is normalized.
        """
        for layer in self._layers:
            norms = [node for node in self._of(layer) if edit.is_op(node, *_COUNTING)] if not layer.inputs else []
            operands = self._computed(node.inputs[0] for node in norms)
            for item in layer.outputs:
                if item.dtype == "Int32" and item.shape == (-1,) and (dims := next(operands, None)) is not None:
                    self._learn(item, (math.prod(dims[:2]),))

    def _tells(self, fit: _Fit, rule: _Rule) -> bool:
        """Whether a rule tells something that was not known."""
        found = False
        for layer in self._layers:
            for is_output, tensors in ((True, layer.outputs), (False, layer.inputs)):
                for item in tensors:
                    if -1 not in item.shape or (item.name, item.shape) in self._known:
                        continue
                    fitting = [dims for other in rule(layer, item, is_output) if (dims := fit(item.shape, other))]
                    if fitting:
                        self._learn(item, max(fitting, key=math.prod))
                        found = True
        return found

    def _learn(self, item: TensorInfo, dims: _Shape) -> None:
        self._known[item.name, item.shape] = dims
        self._by_name.setdefault(item.name, []).append((item.shape, dims))

    def _sized(self, layer: LayerInfo) -> LayerInfo:
        def all_of(tensors: Sequence[TensorInfo]) -> tuple[TensorInfo, ...]:
            return tuple(replace(t, shape=self._known.get((t.name, t.shape), t.shape)) for t in tensors)

        constants = tuple(replace(t, shape=tuple(max(dim, 1) for dim in t.shape)) for t in layer.constants)
        return replace(layer, inputs=all_of(layer.inputs), outputs=all_of(layer.outputs), constants=constants)

    def _own(self, _layer: LayerInfo, item: TensorInfo, _is_output: bool) -> Iterator[_Shape]:
        """The value of the graph that it has the name of."""
        name = own_name(item)
        for each in (name, _COPY.sub("", name)):
            if each in self._shapes:
                yield self._shapes[each]
                return

    def _as_static(self, layer: LayerInfo, item: TensorInfo, is_output: bool) -> Iterator[_Shape]:
        """What a layer of the static engine for the same nodes has in its place."""
        mine = layer.outputs if is_output else layer.inputs
        for other in self._static.get(_computes(layer), ()):
            theirs = other.outputs if is_output else other.inputs
            if len(theirs) == len(mine):
                yield theirs[mine.index(item)].shape

    def _same_buffer(self, _layer: LayerInfo, item: TensorInfo, _is_output: bool) -> Iterator[_Shape]:
        """The same buffer seen in another shape, or a slice of it."""
        for shape, dims in self._by_name.get(item.name, ()):
            yield dims
            yield from _slice(item.shape, shape, dims)

    def _border(self, layer: LayerInfo, item: TensorInfo, is_output: bool) -> Iterator[_Shape]:
        """What the layer's nodes take from other layers, or give to them."""
        mine = self._of(layer)
        for node in mine:
            for value in node.outputs if is_output else node.inputs:
                users = [user for user, _ in value.uses()] if value is not None else []
                leaves = value is not None and (value.is_graph_output() or any(user not in mine for user in users))
                if leaves if is_output else value is not None and value.producer() not in mine:
                    yield from self._computed((value,))

    def _inside(self, layer: LayerInfo, _item: TensorInfo, _is_output: bool) -> Iterator[_Shape]:
        """What the layer's nodes compute."""
        for node in self._of(layer):
            yield from self._computed((*node.inputs, *node.outputs))

    def _beside(self, layer: LayerInfo, item: TensorInfo, _is_output: bool) -> Iterator[_Shape]:
        """What the layer reads or writes beside it: the rows of a product, or of several in one, are those of its
        operand."""
        products = sum(node.op_type in ("MatMul", "Gemm") for node in self._of(layer))
        for other in (*layer.inputs, *layer.outputs):
            dims = self._known.get((other.name, other.shape))
            if dims is not None:
                yield dims
                yield from _slice(item.shape, other.shape, dims)
                if products > 1 and item.shape[0] == products:
                    yield from ((products, *rows) for rows in _slice(item.shape[1:], other.shape, dims))

    def _near(self, layer: LayerInfo, _item: TensorInfo, _is_output: bool) -> Iterator[_Shape]:
        """What the nodes before and behind the layer's compute."""
        for node in self._of(layer):
            for value in node.inputs:
                producer = edit.maker_of(value)
                yield from self._computed(producer.inputs if producer is not None else ())
            for value in node.outputs:
                for user, _ in value.uses():
                    yield from self._computed(user.outputs)

    def _computed(self, values: Iterable[ir.Value | None]) -> Iterator[_Shape]:
        """The shapes of values that are no constants."""
        for value in values:
            if value is not None and str(value.name) in self._shapes and edit.constant_tensor_of(value) is None:
                yield self._shapes[str(value.name)]

    def _of(self, layer: LayerInfo) -> list[ir.Node]:
        return [self._nodes[name] for name in layer.onnx_nodes if name in self._nodes]


def _computes(layer: LayerInfo) -> tuple[str, ...]:
    """What two layers that compute the same agree in: their nodes, else the operations that the compiler names."""
    return tuple(sorted(layer.onnx_nodes)) or (_LOWERED.sub("", layer.name),)


def _slice(shape: _Shape, other: _Shape, dims: _Shape) -> Iterator[_Shape]:
    """More or fewer columns of ``other``, which has these dimensions, open along the same axes.

    What is in front of the first open axis is the same in both: rows of one matrix are not those of each of 128. Of
    maps, whose height and width are open, that is the first axis alone: channels are padded.
    """
    if [dim == -1 for dim in shape] != [dim == -1 for dim in other]:
        return
    front = shape.index(-1) if -1 in shape else 0
    front = min(front, 1) if shape.count(-1) > 1 else front
    if shape[:front] == other[:front]:
        yield tuple(b if a == -1 else a for a, b in zip(shape, dims, strict=True))


def _viewed(shape: _Shape, other: _Shape) -> _Shape | None:
    """``shape``, in which -1 stands for any number, as ``other`` or a view of it; None where it is neither."""
    return _exact(shape, other) or _grouped(shape, other)


def _exact(shape: _Shape, other: _Shape) -> _Shape | None:
    """``other`` where ``shape`` is the same; else None."""
    same = len(shape) == len(other) and all(a in (-1, b) for a, b in zip(shape, other, strict=True))
    return other if same else None


def _grouped(shape: _Shape, other: _Shape) -> _Shape | None:
    """``shape`` as a view in which axes of ``other`` fall together, the last first; None where it is none."""
    if len(shape) == len(other):
        return None
    left, found = [dim for dim in other if dim != 1], []
    for position, dim in enumerate(reversed(shape)):
        if dim == -1:
            before = sum(item != 1 for item in shape[: len(shape) - position - 1])
            taken = max(len(left) - before, min(len(left), 1))
        else:
            taken = next((n for n in range(len(left) + 1) if math.prod(left[len(left) - n :]) == dim), len(left) + 1)
        if taken > len(left):
            return None
        found.append(math.prod(left[len(left) - taken :]))
        del left[len(left) - taken :]
    return None if left else tuple(reversed(found))


def _counted(shape: _Shape, other: _Shape) -> _Shape | None:
    """``shape`` of as many elements as ``other``, where one -1 is left to tell; None where none fits."""
    known, elements = math.prod(dim for dim in shape if dim != -1), math.prod(other)
    if shape.count(-1) != 1 or not known or elements % known:
        return None
    return tuple(elements // known if dim == -1 else dim for dim in shape)
