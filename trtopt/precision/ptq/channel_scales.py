"""Which channels of a network may be scaled, and which constants take up the scales.

Multiplying the rows of the weight that computes a channel by a positive number, and dividing the columns of the
weights that read it by the same number, changes nothing else where everything between commutes with the
multiplication: activations such as ReLU, pooling, moves of elements, sums of values that are scaled alike. Each
channel of each layer starts with a scale of its own; operators tie scales to each other, or fix them at 1.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from trtopt.graph import edit
from trtopt.graph.views import Sizes, one_per
from trtopt.precision.plan import WEIGHTED

FIXED = 0
"""The scale that is always 1."""


@dataclass(frozen=True)
class ScaledConstant:
    """A constant input of a node that takes up scales: it is multiplied by those it makes, divided by those it sums.

    Attributes:
        node: The node that reads it.
        index: Which of its inputs it is.
        makes: int64, broadcastable to the constant: the scale of what each entry computes. None where it computes
            nothing that is scaled by itself.
        sums: The same for what each entry is multiplied with.
    """

    node: ir.Node
    index: int
    makes: np.ndarray | None
    sums: np.ndarray | None = None

    @property
    def name(self) -> str:
        """The node's name."""
        return str(self.node.name)

    @property
    def is_weight(self) -> bool:
        """Whether it is what a product multiplies its data with."""
        return self.index == 1 and self.node.op_type in WEIGHTED


@dataclass(frozen=True)
class ChannelScales:
    """The scales that a network leaves free; the fixed one counts.

    Attributes:
        constants: Constants that take them up, in the order of the graph.
        reads: For each product, by name: int64 ``[channels]``, the scales of its data input.
        why_not_read: Why no channel that a product reads can be scaled, by node; only where none can.
        why_not_written: The same for what a product or a normalization makes.
        values: Where all channels of a value have one scale, that scale, by value; those that are fixed left out.
        epsilons: The scale of what a normalization reads, by node: its epsilon takes up the square.
    """

    count: int
    constants: tuple[ScaledConstant, ...]
    reads: Mapping[str, np.ndarray]
    why_not_read: Mapping[str, str]
    why_not_written: Mapping[str, str]
    values: Mapping[str, int]
    epsilons: Mapping[str, int]


class Tracker:
    """Scales of values while the nodes of a graph are walked in order; what rules of operators work on.

    The scales of a value are int64 numbers in an array of its rank, with length 1 along axes where they are alike.
    Those of ``fixed`` values are known not to be scaled, whatever their producers say. With ``alike`` all channels of a
    value have one scale.
    """

    def __init__(self, model: ir.Model, fixed: Collection[ir.Value] = (), *, alike: bool = False) -> None:
        self.graph = model.graph
        self.alike = alike
        self.sizes = Sizes()
        self._fixed = fixed
        self._made: list[ir.Value] = []
        self._scales: dict[ir.Value, np.ndarray] = {}
        self._parent = [FIXED]
        self._size = [1]
        self._reasons: dict[int, str] = {}
        self._constants: list[ScaledConstant] = []
        self._epsilons: dict[str, np.ndarray] = {}
        self._reads: dict[str, np.ndarray] = {}
        self._writes: dict[str, np.ndarray] = {}
        self._sources: dict[str, str] = {}

    def of(self, value: ir.Value | None) -> np.ndarray:
        """The scales of a value, as tied so far."""
        known = self._scales.get(value) if value is not None else None
        if known is None:
            rank = 0 if value is None or value.shape is None else len(value.shape)
            return np.zeros((1,) * rank, np.int64)
        return self._roots(known)

    def is_free(self, value: ir.Value | None) -> bool:
        """Whether any channel of a value may be scaled."""
        return bool(self.of(value).any())

    def set(self, value: ir.Value, scales: np.ndarray) -> None:
        """Say what the scales of a new value are. Readers in nested graphs are not followed: they fix them."""
        if value.shape is None or scales.ndim != len(value.shape):
            self.fix(scales, f"the shape of {value.name} is not known")
            return
        self._scales[value] = scales
        if self.alike:
            self.tie(scales, scales.reshape(-1)[:1], f"a part of {value.name} cannot be scaled")
        if value.is_graph_output():
            self.fix(scales, f"{value.name} leaves the network")
        elif any(user.graph is not self.graph for user, _ in value.uses()):
            self.fix(scales, f"{value.name} is read in a nested graph")
        elif value in self._fixed:
            self.fix(scales, f"{value.name} cannot be scaled")

    def fixed(self) -> frozenset[ir.Value]:
        """The outputs of those makers of which no channel is free after all."""
        return frozenset(value for value in self._made if not self.is_free(value))

    def fresh(self, count: int) -> np.ndarray:
        """New scales, ``[count]``."""
        start = len(self._parent)
        self._parent.extend(range(start, start + count))
        self._size.extend([1] * count)
        return np.arange(start, start + count)

    def fix(self, scales: np.ndarray, reason: str) -> None:
        """These scales are 1."""
        for root in np.unique(self._roots(scales)).tolist():
            if root != FIXED:
                self._parent[root] = FIXED
                self._reasons[root] = reason

    def fix_inputs(self, node: ir.Node, reason: str) -> None:
        """The scales of everything a node reads are 1."""
        for value in node.inputs:
            self.fix(self.of(value), reason)

    def tie(self, first: np.ndarray, second: np.ndarray, reason: str) -> np.ndarray:
        """Make two arrays of scales the same where they meet when broadcast; where one is fixed, both are. Returns the
        scales in the broadcast shape.
        """
        one, two = np.broadcast_arrays(self._roots(first), self._roots(second))
        pairs = np.unique(np.stack([one.ravel(), two.ravel()]), axis=1)
        for left, right in pairs.T.tolist():
            a, b = self._root(left), self._root(right)
            if FIXED in (a, b):
                self.fix(np.array([a, b]), reason)
            elif a != b:
                large, small = (a, b) if self._size[a] >= self._size[b] else (b, a)
                self._parent[small] = large
                self._size[large] += self._size[small]
        return one.copy()

    def along(self, value: ir.Value, axis: int, size: int, reason: str) -> np.ndarray:
        """The scales along one axis, ``[size]``; where they differ along others, all are fixed."""
        scales = self.of(value)
        axis %= max(scales.ndim, 1)
        if scales.ndim <= axis or scales.size not in (1, scales.shape[axis]) or scales.shape[axis] not in (1, size):
            self.fix(scales, reason)
            return np.zeros(size, np.int64)
        return np.broadcast_to(scales.reshape(-1), (size,))

    def constant(
        self, node: ir.Node, index: int, makes: np.ndarray | None = None, sums: np.ndarray | None = None
    ) -> None:
        """A constant input of a node takes up scales."""
        if self.alike:
            makes, sums = (None if each is None else each.reshape(-1)[0].reshape(()) for each in (makes, sums))
        self._constants.append(ScaledConstant(node, index, makes, sums))

    def epsilon(self, node: ir.Node, reads: np.ndarray) -> None:
        """A normalization takes up the one scale of what it reads."""
        self._epsilons[str(node.name)] = reads

    def product(self, node: ir.Node, reads: np.ndarray, writes: np.ndarray) -> None:
        """The scales of the channels that a product reads, and of those it makes."""
        self._reads[str(node.name)] = reads
        self._sources[str(node.name)] = _source(node.inputs[0])
        self.maker(node, writes)

    def maker(self, node: ir.Node, writes: np.ndarray) -> None:
        """The scales of what a node makes with its constants."""
        self._made.append(node.outputs[0])
        self._writes[str(node.name)] = writes

    def finish(self) -> ChannelScales:
        """What remained free."""
        roots = np.array([self._root(number) for number in range(len(self._parent))], np.int64)
        free = np.unique(roots[roots != FIXED])
        number = np.zeros(len(roots), np.int64)
        number[free] = np.arange(1, len(free) + 1)
        final = number[roots]

        def renamed(scales: np.ndarray | None) -> np.ndarray | None:
            found = None if scales is None else final[scales]
            return None if found is None or not found.any() else found

        constants = []
        for item in self._constants:
            makes, sums = renamed(item.makes), renamed(item.sums)
            if makes is not None or sums is not None:
                constants.append(ScaledConstant(item.node, item.index, makes, sums))
        reads = {name: final[scales] for name, scales in self._reads.items()}
        alike = self._scales.items() if self.alike else ()
        values = {str(value.name): int(final[scales.flat[0]]) for value, scales in alike if final[scales].any()}
        return ChannelScales(
            len(free) + 1,
            tuple(constants),
            reads,
            {
                name: self._reason(self._reads[name]) or self._sources[name]
                for name, scales in reads.items()
                if not scales.any()
            },
            {name: self._reason(scales) for name, scales in self._writes.items() if not final[scales].any()},
            values,
            {name: int(final[scales.flat[0]]) for name, scales in self._epsilons.items() if final[scales].any()},
        )

    def _roots(self, scales: np.ndarray) -> np.ndarray:
        unique, inverse = np.unique(scales, return_inverse=True)
        roots = np.array([self._root(number) for number in unique.tolist()], np.int64)
        return one_per(roots[inverse].reshape(scales.shape)) if scales.ndim else roots[inverse].reshape(())

    def _root(self, number: int) -> int:
        # Paths are not shortened: the last step before the fixed scale is where the reason is.
        while (above := self._parent[number]) != number:
            number = above
        return number

    def _reason(self, scales: np.ndarray) -> str:
        """Why the first of these scales that ever was free is fixed; empty when none was."""
        number = next((found for found in scales.flat if found != FIXED), FIXED)
        while (above := self._parent[number]) not in (number, FIXED):
            number = above
        return self._reasons.get(number, "")


def _source(value: ir.Value | None) -> str:
    node = edit.maker_of(value)
    if node is None:
        return "it reads an input of the network"
    return f"its input comes from {node.name} ({node.op_type}), which takes up no scales"


def constant_dims(node: ir.Node, index: int) -> tuple[int, ...] | None:
    """The shape of a constant input; None where it is none, or not of floats."""
    tensor = edit.constant_tensor_of(edit.input_of(node, index))
    return None if tensor is None or tensor.dtype is not ir.DataType.FLOAT else edit.dims_of(tensor)
