"""Collects the nodes and weights of a random network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

Shape = tuple[int | str, ...]


@dataclass(frozen=True)
class Value:
    """A tensor of the network; the batch is a number or the name of a dynamic axis."""

    name: str
    shape: Shape

    @property
    def channels(self) -> int:
        return self.dim(1)

    @property
    def width(self) -> int:
        return self.dim(-1)

    def dim(self, axis: int) -> int:
        size = self.shape[axis]
        assert isinstance(size, int)
        return size


class NetBuilder:
    """Nodes, weights and random choices; one generator of random numbers decides everything.

    Args:
        rng: The generator.
        opset: The opset of the network.
    """

    def __init__(self, rng: np.random.Generator, opset: int) -> None:
        self.rng, self.opset = rng, opset
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []
        self._weights: dict[tuple[int, ...], list[str]] = {}
        self._count = 0

    def chance(self, share: float = 0.5) -> bool:
        return bool(self.rng.random() < share)

    def pick(self, *choices: Any) -> Any:
        return choices[int(self.rng.integers(len(choices)))]

    def size(self, low: int, high: int) -> int:
        return int(self.rng.integers(low, high + 1))

    def name(self, hint: str) -> str:
        self._count += 1
        return f"{hint}_{self._count}"

    def const(self, array: Any, dtype: Any = np.float32) -> str:
        """A constant: an initializer, or the output of a node."""
        tensor = numpy_helper.from_array(np.asarray(array, dtype), self.name("const"))
        if self.chance(0.15):
            self.nodes.append(
                helper.make_node("Constant", [], [tensor.name], name=f"Constant_{tensor.name}", value=tensor)
            )
        else:
            self.constants.append(tensor)
        return tensor.name

    def ints(self, *values: int) -> str:
        return self.const(list(values), np.int64)

    def scalar(self, value: float) -> str:
        """A number as a tensor of rank 0, or of one element."""
        return self.const(value if self.chance() else [value])

    def weight(self, shape: tuple[int, ...], fan_in: int) -> str:
        """Random weights that keep the scale of what they multiply; now and then those of another layer."""
        known = self._weights.setdefault(shape, [])
        if known and self.chance(0.15):
            return str(self.pick(*known))
        array = self.rng.standard_normal(shape) * np.sqrt(1.2 / fan_in)
        if self.chance(0.1):  # as pruning leaves them
            array[self.rng.random(shape[0]) < 0.3] = 0
        known.append(self.const(array))
        return known[-1]

    def vector(self, shape: tuple[int, ...], *, positive: bool = False) -> str:
        """A random bias, scale or slope."""
        array = self.rng.standard_normal(shape) * 0.5
        if positive:
            array = np.abs(array) + 0.3
        if self.chance(0.15):  # zeros and small and large numbers among the others
            array = np.where(self.rng.random(shape) < 0.3, array * self.pick(0.0, 1e-6, 8.0) + 1e-6 * positive, array)
        return self.const(array)

    def op(self, kind: str, inputs: Sequence[str], shape: Sequence[int | str] = (), **attributes: Any) -> Value:
        """Add a node with one output."""
        output = self.name(kind.lower())
        self.nodes.append(helper.make_node(kind, list(inputs), [output], name=f"{kind}_{output}", **attributes))
        return Value(output, tuple(shape))

    def many(self, kind: str, inputs: Sequence[str], shapes: Sequence[Shape], **attributes: Any) -> list[Value]:
        """Add a node with several outputs."""
        outputs = [self.name(kind.lower()) for _ in shapes]
        self.nodes.append(helper.make_node(kind, list(inputs), outputs, name=f"{kind}_{outputs[0]}", **attributes))
        return [Value(output, shape) for output, shape in zip(outputs, shapes, strict=True)]

    def unary(self, kind: str, x: Value, **attributes: Any) -> Value:
        return self.op(kind, [x.name], x.shape, **attributes)

    def binary(self, kind: str, x: Value, other: Value | str) -> Value:
        """An element-wise node that keeps the shape of ``x``; a constant stands on either side where order is free."""
        operands = [x.name, other if isinstance(other, str) else other.name]
        if kind in ("Add", "Mul") and self.chance(0.3):
            operands.reverse()
        return self.op(kind, operands, x.shape)

    def transpose(self, x: Value, *perm: int) -> Value:
        return self.op("Transpose", [x.name], [x.shape[axis] for axis in perm], perm=list(perm))

    def reshape(self, x: Value, *shape: int | str) -> Value:
        """Reshape to a shape that starts with the batch."""
        sizes = [0 if isinstance(size, str) else size for size in shape]
        if self.chance(0.3) and len(sizes) > 1:
            sizes[1:] = [-1 if axis == len(sizes) - 2 else size for axis, size in enumerate(sizes[1:])]
        return self.op("Reshape", [x.name, self.ints(*sizes)], shape)

    def reduce(self, kind: str, x: Value, axes: Sequence[int], keep: bool) -> Value:
        """ReduceMean, ReduceSum, from opset 18 on ReduceMax; up to opset 17 the axes of the first are an attribute."""
        gone = {axis % len(x.shape) for axis in axes}
        shape = [1 if axis in gone else size for axis, size in enumerate(x.shape) if keep or axis not in gone]
        if kind == "ReduceMean" and self.opset < 18:
            return self.op(kind, [x.name], shape, axes=list(axes), keepdims=int(keep))
        return self.op(kind, [x.name, self.ints(*axes)], shape, keepdims=int(keep))

    def split(self, x: Value, sizes: Sequence[int]) -> list[Value]:
        """Along the channels."""
        shapes = [(x.shape[0], size, *x.shape[2:]) for size in sizes]
        return self.many("Split", [x.name, self.ints(*sizes)], shapes, axis=1)

    def model(self, inputs: Sequence[Value], outputs: Sequence[Value]) -> onnx.ModelProto:
        def info(value: Value) -> onnx.ValueInfoProto:
            return helper.make_tensor_value_info(value.name, TensorProto.FLOAT, list(value.shape))

        graph = helper.make_graph(
            self.nodes, "random", [info(value) for value in inputs], [info(value) for value in outputs], self.constants
        )
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", self.opset)], ir_version=8)
