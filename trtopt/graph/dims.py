"""Which dimensions of a graph are equal, whatever the inputs' shapes are."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx_ir as ir

from trtopt.graph import edit
from trtopt.graph.dimension import AtMost, Dim, Product, factors_of, parts_of, product_of, reshaped

_Dims = tuple[Dim, ...]
_Found = Sequence[Dim | None] | None
_NO_END = 2**31 - 1
"""From here on, the end of a slice is that of its axis."""

_LONGEST = 16
"""Elements of a tensor that may be a shape."""

_SAME = frozenset(
    "Abs BatchNormalization Cast Celu Ceil Clip Cos CumSum DequantizeLinear Dropout Elu Erf Exp Floor Gelu "
    "GroupNormalization HardSigmoid HardSwish Identity InstanceNormalization IsInf IsNaN LayerNormalization LeakyRelu "
    "Log LogSoftmax LpNormalization Mish Neg Not PRelu QuantizeLinear RMSNormalization Reciprocal Relu RotaryEmbedding "
    "Round Selu Sigmoid Sign Sin Softmax Softplus Softsign Sqrt Swish Tanh ThresholdedRelu Trilu".split()
)
_REDUCTIONS = frozenset("ReduceL1 ReduceL2 ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare".split())
_PARTED = {"Split": 0, "TopK": -1}
"""Operators whose outputs are parts of an axis, or chosen along it, with the axis where none is said."""


class Dimensions:
    """The dimensions of all values of a model, and those that integer tensors hold.

    The model is read once; its nodes are in an order they can be computed in.
    """

    def __init__(self, model: ir.Model) -> None:
        self._main = model.graph
        self._dims: dict[ir.Value, _Dims] = {}
        self._held: dict[ir.Value, tuple[Dim | None, ...]] = {}
        self._least: dict[str, int] = {}
        self._products: dict[str, Product] = {}
        self._doubts = False
        nodes = [node for graph in edit.all_graphs(model.graph) for node in graph]
        for node in nodes:
            self._read(node)
        if self._doubts and self._least:  # sizes are computed before the windows that say how large they are
            for node in nodes:
                self._read(node)

    def of(self, value: ir.Value | None) -> _Dims | None:
        """The dimensions of ``value``; None where the rank is not known."""
        if value is None:
            return None
        return self._dims[value] if value in self._dims else self._told(value, None)

    def held(self, value: ir.Value | None) -> tuple[Dim | None, ...] | None:
        """What a tensor of integers holds, element by element; None for what no dimension is known to be equal to."""
        if value is None:
            return None
        if value not in self._held:
            tensor = edit.constant_tensor_of(value)
            if tensor is None or tensor.dtype not in (ir.DataType.INT64, ir.DataType.INT32) or tensor.size > _LONGEST:
                return None
            self._held[value] = tuple(int(item) for item in tensor.numpy().ravel())
        return self._held[value]

    def is_natural(self, dim: Dim) -> bool:
        """Whether a dimension, or a floor of one, is known not to be negative at sizes at which the model runs."""
        if isinstance(dim, int):
            return dim >= 0
        if isinstance(dim, Product):
            return all(self.is_natural(name) for name, _ in dim.powers)
        parts = parts_of(dim.dim if isinstance(dim, AtMost) else dim)
        if parts is None:
            return True
        factors = self._products.get(parts[0])
        if parts[1] >= -self._least.get(parts[0], 0) and (factors is None or self.is_natural(factors)):
            return True
        self._doubts = True
        return False

    def is_main(self, node: ir.Node) -> bool:
        """Whether a node runs whenever the model does."""
        return node.graph is self._main

    def name(self, dim: Dim) -> str | None:
        """What a dimension is called; None where a value's is in it."""
        if not isinstance(dim, Product):
            return dim if isinstance(dim, str) else None
        powers = sorted((str(name), power) for name, power in dim.powers if isinstance(name, str) and power > 0)
        if len(powers) < len(dim.powers):
            return None
        factors = [str(dim.number)] * (dim.number != 1) + [name for name, power in powers for _ in range(power)]
        found = f"product({', '.join(factors)})"
        self._products[found] = dim
        return found

    def floor(self, dim: Dim | None, add: int, by: int) -> Dim | None:
        """floor((dim + add) / by): floors of floors, and numbers added to them, are one floor of the same name."""
        if isinstance(dim, int):
            return (dim + add) // by
        parts = None if dim is None else parts_of(self.name(dim))
        if parts is None:
            return None
        base, first, step = parts
        total, step = first + add * step, step * by
        if (total, step) != (0, 1):
            return f"floor(({base}{total:+d})/{step})"
        return self._products.get(base, base)

    def windows(self, dim: Dim, whole: int, step: int, trusted: bool) -> Dim | None:
        """How many windows ``whole`` long fit into ``dim``, ``step`` apart: one at least where the model runs."""
        found = self.floor(self.floor(dim, -whole, step), 1, 1)
        parts = None if found is None else parts_of(found)
        if parts is not None and trusted:
            base, add, by = parts
            self._least[base] = max(self._least.get(base, 0), by - add)
        return found

    def _read(self, node: ir.Node) -> None:
        if node.domain != "" or not node.outputs:
            return
        rule = _RULES.get(node.op_type)
        found = rule(self, node) if rule is not None else None
        for value in node.outputs if node.op_type in _PARTED else node.outputs[:1]:
            dims = self._told(value, found)
            if dims is not None:
                self._dims[value] = dims
        reader = _READERS.get(node.op_type)
        held = reader(self, node) if reader is not None else None
        if held is not None and len(held) <= _LONGEST:
            self._held[node.outputs[0]] = tuple(held)

    def _told(self, value: ir.Value, found: _Found) -> _Dims | None:
        """The dimensions of ``value`` by its shape, and by what a rule found for those that are not numbers."""
        if value.shape is None:
            if found is None:
                return None
            return tuple((value, axis) if dim is None else dim for axis, dim in enumerate(found))
        if found is None or len(found) != len(value.shape):
            found = [None] * len(value.shape)
        # The file may name the dimensions of an output wrongly, and the names in a nested graph are its own.
        trusted = value.graph is self._main and not value.is_graph_output()
        dims: list[Dim] = []
        for axis, (told, dim) in enumerate(zip(value.shape, found, strict=True)):
            if isinstance(told, int):
                dims.append(told)
            elif dim is not None:
                dims.append(dim)
            else:
                name = told.value if trusted else None
                dims.append((value, axis) if name is None else self._products.get(name, name))
        return tuple(dims)


def name_dimensions(model: ir.Model) -> None:
    """Give dimensions inside the graph that have no name yet the name or number that they are provably equal to."""
    outputs = set(model.graph.outputs)
    open_ = [
        value
        for node in model.graph
        for value in node.outputs
        if value.shape is not None and value not in outputs and any(_is_open(dim) for dim in value.shape)
    ]
    known = Dimensions(model) if open_ else None
    for value in open_:
        found = known.of(value) if known is not None else None
        for axis, (dim, told) in enumerate(zip(found or (), value.shape or (), strict=False)):
            if known is None or value.shape is None or not _is_open(told):
                continue
            name = dim if isinstance(dim, int) else known.name(dim)
            if name is not None:
                value.shape[axis] = name


def _is_open(dim: int | ir.SymbolicDim) -> bool:
    return isinstance(dim, ir.SymbolicDim) and dim.value is None


def _windows(known: Dimensions, node: ir.Node) -> _Found:
    """Of a convolution or a pooling."""
    dims, weight = known.of(edit.input_of(node, 0)), known.of(edit.input_of(node, 1))
    if dims is None or edit.string_attribute(node, "auto_pad", "NOTSET") != "NOTSET":
        return None
    count = len(dims) - 2
    kernel = edit.ints_attribute(node, "kernel_shape") or (weight or ())[2:]
    steps, gaps, pads = (
        edit.ints_attribute(node, name) or (default,) * times
        for name, default, times in (("strides", 1, count), ("dilations", 1, count), ("pads", 0, 2 * count))
    )
    if edit.int_attribute(node, "ceil_mode", 0) or not len(kernel) == len(steps) == len(gaps) == count:
        return None
    found: list[Dim | None] = [dims[0], weight[0] if node.op_type == "Conv" and weight else dims[1]]
    for axis, (size, step, gap) in enumerate(zip(kernel, steps, gaps, strict=True)):
        whole = gap * (size - 1) + 1 - pads[axis] - pads[axis + count] if isinstance(size, int) else None
        found.append(None if whole is None else known.windows(dims[axis + 2], whole, step, known.is_main(node)))
    return found


def _pad(known: Dimensions, node: ir.Node) -> _Found:
    dims, pads = known.of(edit.input_of(node, 0)), edit.constant_of(edit.input_of(node, 1))
    if dims is None or pads is None or edit.input_of(node, 3) is not None or pads.size != 2 * len(dims):
        return None
    added = pads.reshape(2, -1).sum(axis=0)
    return [dim if not more else known.floor(dim, int(more), 1) for dim, more in zip(dims, added, strict=True)]


def _resize(known: Dimensions, node: ir.Node) -> _Found:
    sizes, plain = (
        edit.input_of(node, 3),
        edit.string_attribute(node, "keep_aspect_ratio_policy", "stretch") == "stretch",
    )
    return known.held(sizes) if plain and "axes" not in node.attributes else None


def _first(known: Dimensions, node: ir.Node) -> _Found:
    return known.of(edit.input_of(node, 0))


def _broadcast(known: Dimensions, node: ir.Node) -> _Found:
    operands = [known.of(value) for value in node.inputs]
    shapes = [dims for dims in operands if dims is not None]
    return _joined(shapes) if len(shapes) == len(operands) else None


def _joined(shapes: Sequence[Sequence[Dim]]) -> list[Dim | None]:
    rank = max(map(len, shapes))
    found: list[Dim | None] = []
    for axis in range(-rank, 0):
        dims = {dims[axis] for dims in shapes if -axis <= len(dims)} - {1}
        # Beside the dimension itself: were that larger than the table, the two could not be joined.
        dims -= {dim for dim in dims if isinstance(dim, AtMost) and dim.dim in dims}
        numbers = [dim for dim in dims if isinstance(dim, int)]
        found.append(1 if not dims else numbers[0] if numbers else dims.pop() if len(dims) == 1 else None)
    return found


def _product(known: Dimensions, node: ir.Node) -> _Found:
    left, right = known.of(edit.input_of(node, 0)), known.of(edit.input_of(node, 1))
    if left is None or right is None or len(left) < 2 or len(right) < 2:
        return None
    return (
        [*_joined([left[:-2], right[:-2]]), left[-2], right[-1]] if len(left) + len(right) > 4 else [left[0], right[1]]
    )


def _transpose(known: Dimensions, node: ir.Node) -> _Found:
    dims, perm = known.of(edit.input_of(node, 0)), edit.ints_attribute(node, "perm")
    return None if dims is None else dims[::-1] if perm is None else [dims[axis] for axis in perm]


def _reduction(known: Dimensions, node: ir.Node) -> _Found:
    dims, axes = known.of(edit.input_of(node, 0)), edit.axes_of(node)
    if dims is None or not axes:
        return None
    gone, keeps = {axis % len(dims) for axis in axes}, edit.int_attribute(node, "keepdims", 1)
    return [1 if axis in gone else dim for axis, dim in enumerate(dims) if keeps or axis not in gone]


def _reshape(known: Dimensions, node: ir.Node) -> _Found:
    target = known.held(edit.input_of(node, 1))
    if target is None or (0 in target and edit.int_attribute(node, "allowzero", 0)):
        return None
    return reshaped(known.of(edit.input_of(node, 0)), target)


def _expand(known: Dimensions, node: ir.Node) -> _Found:
    dims, target = known.of(edit.input_of(node, 0)), known.held(edit.input_of(node, 1))
    if dims is None or target is None or any(dim is None or (isinstance(dim, int) and dim < 1) for dim in target):
        return None
    return _joined([dims, [dim for dim in target if dim is not None]])


def _tile(known: Dimensions, node: ir.Node) -> _Found:
    dims, times = known.of(edit.input_of(node, 0)), known.held(edit.input_of(node, 1))
    if dims is None or times is None or len(times) != len(dims):
        return None
    return [_times(known, dim, number) for dim, number in zip(dims, times, strict=True)]


def _gather(known: Dimensions, node: ir.Node) -> _Found:
    dims, places = known.of(edit.input_of(node, 0)), known.of(edit.input_of(node, 1))
    if not dims or places is None:
        return None
    axis = edit.int_attribute(node, "axis", 0) % len(dims)
    return [*dims[:axis], *places, *dims[axis + 1 :]]


def _gather_nd(known: Dimensions, node: ir.Node) -> _Found:
    dims, places = known.of(edit.input_of(node, 0)), known.of(edit.input_of(node, 1))
    if dims is None or not places or not isinstance(places[-1], int):
        return None
    return [*places[:-1], *dims[edit.int_attribute(node, "batch_dims", 0) + places[-1] :]]


def _gather_elements(known: Dimensions, node: ir.Node) -> _Found:
    return known.of(edit.input_of(node, 1))


def _slice(known: Dimensions, node: ir.Node) -> _Found:
    """What is taken from the start, in steps of 1; the axes that nothing is taken of stay."""
    dims, ends = known.of(edit.input_of(node, 0)), known.held(edit.input_of(node, 2))
    starts, steps = known.held(edit.input_of(node, 1)), known.held(edit.input_of(node, 4))
    if dims is None or ends is None:
        return None
    axes = range(len(ends)) if edit.input_of(node, 3) is None else known.held(edit.input_of(node, 3))
    if edit.input_of(node, 4) is None:
        steps = (1,) * len(ends)
    if axes is None or len(axes) != len(ends):
        return None
    found: list[Dim | None] = list(dims)
    for place, (axis, end) in enumerate(zip(axes, ends, strict=True)):
        if not isinstance(axis, int):
            return None
        whole = starts is not None and starts[place] == 0 and steps is not None and steps[place] == 1
        found[axis] = _taken(known, dims[axis], end) if whole else None
    return found


def _taken(known: Dimensions, dim: Dim, end: Dim | None) -> Dim | None:
    """How many of ``dim`` come before ``end``."""
    if end == dim or (isinstance(end, int) and end >= _NO_END):
        return dim
    if end is None or isinstance(end, AtMost):
        return None
    if isinstance(end, int) and end < 0:
        rest = known.floor(dim, end, 1)
        return rest if rest is not None and known.is_natural(rest) else None
    if isinstance(end, int):
        return min(dim, end) if isinstance(dim, int) and end >= 0 else None
    return AtMost(end, dim) if isinstance(dim, int) and dim > 1 else None


def _concat(known: Dimensions, node: ir.Node) -> _Found:
    parts = [known.of(value) for value in node.inputs]
    first = parts[0]
    if not first:
        return None
    axis = edit.int_attribute(node, "axis", 0) % len(first)
    lengths = [dims[axis] for dims in parts if dims is not None and len(dims) == len(first)]
    numbers = [length for length in lengths if isinstance(length, int)]
    open_: list[Dim] = [length for length in lengths if not isinstance(length, int)]
    whole = len(lengths) == len(parts) and len(open_) < 2
    return [*first[:axis], known.floor(next(iter(open_), 0), sum(numbers), 1) if whole else None, *first[axis + 1 :]]


def _unsqueeze(known: Dimensions, node: ir.Node) -> _Found:
    dims, axes = known.of(edit.input_of(node, 0)), edit.axes_of(node)
    if dims is None or not axes:
        return None
    rank, rest = len(dims) + len(axes), iter(dims)
    new = {axis % rank for axis in axes}
    return [1 if axis in new else next(rest) for axis in range(rank)]


def _squeeze(known: Dimensions, node: ir.Node) -> _Found:
    dims, axes = known.of(edit.input_of(node, 0)), edit.axes_of(node)
    if dims is None or not axes:
        return None
    gone = {axis % len(dims) for axis in axes}
    return [dim for axis, dim in enumerate(dims) if axis not in gone]


def _parted(known: Dimensions, node: ir.Node) -> _Found:
    """Those of each output."""
    dims = known.of(edit.input_of(node, 0))
    if not dims:
        return None
    gone = edit.int_attribute(node, "axis", _PARTED[node.op_type]) % len(dims)
    return [None if axis == gone else dim for axis, dim in enumerate(dims)]


def _gemm(known: Dimensions, node: ir.Node) -> _Found:
    left, right = known.of(edit.input_of(node, 0)), known.of(edit.input_of(node, 1))
    if left is None or right is None or len(left) != 2 or len(right) != 2:
        return None
    return [left[edit.int_attribute(node, "transA", 0)], right[1 - edit.int_attribute(node, "transB", 0)]]


def _range(known: Dimensions, node: ir.Node) -> _Found:
    """From 0 to a dimension in steps that divide it."""
    start, limit, step = (known.held(value) for value in node.inputs)
    if start != (0,) or not step or not limit or limit[0] is None or not known.is_natural(limit[0]):
        return None
    (number, names), by = factors_of((limit[0],)), step[0]
    return [product_of(number // by, names)] if isinstance(by, int) and by > 0 and number % by == 0 else None


def _read_shape(known: Dimensions, node: ir.Node) -> _Found:
    dims = known.of(edit.input_of(node, 0))
    if dims is None:
        return None
    end = edit.int_attribute(node, "end", len(dims))
    return dims[edit.int_attribute(node, "start", 0) : end]


def _read_size(known: Dimensions, node: ir.Node) -> _Found:
    dims = known.of(edit.input_of(node, 0))
    return None if dims is None else [_multiplied(dims)]


def _read_product(known: Dimensions, node: ir.Node) -> _Found:
    """The product of all elements of a list."""
    held, dims = known.held(edit.input_of(node, 0)), known.of(edit.input_of(node, 0))
    axes = edit.axes_of(node)
    if (
        held is None
        or None in held
        or dims is None
        or len(dims) != 1
        or (axes is not None and axes not in ((0,), (-1,)))
    ):
        return None
    if axes is None and (edit.input_of(node, 1) is not None or edit.int_attribute(node, "noop_with_empty_axes", 0)):
        return None
    return [_multiplied([dim for dim in held if dim is not None])]


def _read_cast(known: Dimensions, node: ir.Node) -> _Found:
    whole = edit.int_attribute(node, "to", 0) in (ir.DataType.INT32, ir.DataType.INT64)
    return known.held(edit.input_of(node, 0)) if whole else None


def _read_gather(known: Dimensions, node: ir.Node) -> _Found:
    held, dims = known.held(edit.input_of(node, 0)), known.of(edit.input_of(node, 0))
    indices = edit.constant_of(edit.input_of(node, 1))
    if held is None or indices is None or dims is None or len(dims) != 1 or indices.size > _LONGEST:
        return None
    places = [int(index) for index in indices.ravel()]
    return [held[place] for place in places] if all(-len(held) <= place < len(held) for place in places) else None


def _read_slice(known: Dimensions, node: ir.Node) -> _Found:
    held, dims = known.held(edit.input_of(node, 0)), known.of(edit.input_of(node, 0))
    bounds = [edit.constant_of(edit.input_of(node, index)) for index in (1, 2)]
    step = edit.constant_of(edit.input_of(node, 4))
    if held is None or dims is None or len(dims) != 1 or (edit.input_of(node, 4) is not None and step is None):
        return None
    if step is not None and (step != 1).any():
        return None
    start, end = (None if bound is None or bound.size != 1 else int(bound.ravel()[0]) for bound in bounds)
    return None if start is None or end is None else held[start:end]


def _read_concat(known: Dimensions, node: ir.Node) -> _Found:
    parts: list[Dim | None] = []
    if edit.int_attribute(node, "axis", 0) != 0 and len(known.of(node.outputs[0]) or ()) != 1:
        return None
    for value in node.inputs:
        dims, held = known.of(value), known.held(value)
        if held is not None:
            parts += held
        elif dims is not None and len(dims) == 1 and isinstance(dims[0], int) and dims[0] <= _LONGEST:
            parts += [None] * dims[0]
        else:
            return None
    return parts


def _read_binary(known: Dimensions, node: ir.Node) -> _Found:
    """Numbers, and comparisons of dimensions with negative ones: a dimension is none."""
    left, right = known.held(edit.input_of(node, 0)), known.held(edit.input_of(node, 1))
    if left is None or right is None or len(node.inputs) != 2 or not _is_listed(known, node):  # Max takes many
        return None
    count = max(len(left), len(right))
    pairs = zip(*(held * count if len(held) == 1 else held for held in (left, right)), strict=True)
    return [_PAIRWISE[node.op_type](known, one, other) for one, other in pairs]


def _is_listed(known: Dimensions, node: ir.Node) -> bool:
    """Whether operands have at most one axis, and as many elements as the longest, or one."""
    shapes = [known.of(value) for value in node.inputs]
    sizes = {dims[0] if dims else 1 for dims in shapes if dims is not None and len(dims) < 2}
    is_short = None not in shapes and all(len(dims or ()) < 2 for dims in shapes)
    return is_short and 0 not in sizes and len(sizes - {1}) < 2


def _equal(known: Dimensions, one: Dim | None, other: Dim | None) -> Dim | None:
    if one is None or other is None:
        return None
    numbers = [dim for dim in (one, other) if isinstance(dim, int)]
    if one == other or len(numbers) == 2:
        return int(one == other)
    apart = any(number < 0 for number in numbers) and any(known.is_natural(dim) for dim in (one, other))
    return 0 if apart else None


def _plus(known: Dimensions, one: Dim | None, other: Dim | None) -> Dim | None:
    if isinstance(one, int):
        one, other = other, one
    return known.floor(one, other, 1) if isinstance(other, int) else None


def _minus(known: Dimensions, one: Dim | None, other: Dim | None) -> Dim | None:
    return known.floor(one, -other, 1) if isinstance(other, int) else None


def _times(known: Dimensions, one: Dim | None, other: Dim | None) -> Dim | None:
    if one is None or other is None:
        return None
    return _multiplied((one, other))


def _multiplied(dims: Sequence[Dim]) -> Dim | None:
    """The product of dimensions and numbers; None where it is a dimension's negative, or 0 in place of one."""
    number, names = factors_of(dims)
    return product_of(number, names) if number > 0 or not names else None


def _larger(known: Dimensions, one: Dim | None, other: Dim | None) -> Dim | None:
    """The larger of two numbers, or of two equal dimensions."""
    if isinstance(one, int) and isinstance(other, int):
        return max(one, other)
    return one if one == other else None


def _over(known: Dimensions, one: Dim | None, other: Dim | None) -> Dim | None:
    """A product divided by a number that divides it, or a floor: the operator rounds to 0, so that of no negative."""
    if one is None or not isinstance(other, int) or other <= 0:
        return None
    number, names = factors_of((one,))
    if number % other == 0:
        return product_of(number // other, names)
    return known.floor(one, 0, other) if known.is_natural(one) else None


def _read_where(known: Dimensions, node: ir.Node) -> _Found:
    parts = [known.held(value) for value in node.inputs]
    if None in parts or not _is_listed(known, node):
        return None
    held = [part for part in parts if part is not None]
    count = max(map(len, held))
    rows = zip(*(part * count if len(part) == 1 else part for part in held), strict=True)
    return [yes if yes == no else None if test is None else yes if test else no for test, yes, no in rows]


_PAIRWISE: dict[str, Callable[[Dimensions, Dim | None, Dim | None], Dim | None]] = {
    "Add": _plus,
    "Div": _over,
    "Equal": _equal,
    "Max": _larger,
    "Mul": _times,
    "Sub": _minus,
}
"""By operator: what one element of the output is."""

_Rule = Callable[[Dimensions, ir.Node], _Found]
_RULES: dict[str, _Rule] = {
    **dict.fromkeys(_SAME, _first),
    **dict.fromkeys(edit.BROADCAST, _broadcast),
    **dict.fromkeys(_REDUCTIONS, _reduction),
    **dict.fromkeys(_PARTED, _parted),
    **dict.fromkeys(("AveragePool", "Conv", "MaxPool"), _windows),
    "Concat": _concat,
    "Expand": _expand,
    "Gather": _gather,
    "GatherElements": _gather_elements,
    "GatherND": _gather_nd,
    "Gemm": _gemm,
    "MatMul": _product,
    "Pad": _pad,
    "Range": _range,
    "Reshape": _reshape,
    "Resize": _resize,
    "Slice": _slice,
    "Squeeze": _squeeze,
    "Tile": _tile,
    "Transpose": _transpose,
    "Unsqueeze": _unsqueeze,
}
"""By operator: the dimensions of the first output, those of each where ``_PARTED``."""

_READERS: dict[str, _Rule] = {
    **dict.fromkeys(_PAIRWISE, _read_binary),
    **dict.fromkeys(("Identity", "Reshape", "Squeeze", "Unsqueeze"), lambda known, node: known.held(node.inputs[0])),
    "Cast": _read_cast,
    "Concat": _read_concat,
    "Gather": _read_gather,
    "ReduceProd": _read_product,
    "Shape": _read_shape,
    "Size": _read_size,
    "Slice": _read_slice,
    "Where": _read_where,
}
"""By operator: what the first output holds."""
