"""Attention between the positions of a map, by convolutions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from trtopt.graph import edit
from trtopt.graph.conv import per_channel, set_weights, weight_and_bias, why_not_constant, window_of
from trtopt.graph.views import Sizes, is_move, is_pass, moved, one_per, scaled_by
from trtopt.rewrite.protocol import Findings, Match, Refusal, Stage, Target
from trtopt_recipes.aligned_heads import wide_head

_DEPTH = 24
"""Nodes between a convolution and a product, or between a product and the softmax."""

_MOST = 256
"""The largest head that the fused kernel reads in place."""

_PART = 64
"""The size of head that values are divided into, where they are wider."""

_BEHIND = ("Relu", "MaxPool", "AveragePool")
"""What may follow a convolution before its map becomes tokens; zeros stay zeros."""


@dataclass(frozen=True)
class _Operand:
    """Queries, keys or values.

    Attributes:
        conv: The convolution that makes them.
        behind: What follows it as a map.
        columns: Its output channels, [heads, size].
        factor: What they are multiplied by.
        nodes: From the convolution to attention.
    """

    conv: ir.Node
    behind: tuple[ir.Node, ...]
    columns: np.ndarray
    factor: float
    nodes: tuple[ir.Node, ...]

    @property
    def is_product(self) -> bool:
        """Whether a product of tokens makes them, too."""
        window = window_of(self.conv)
        return window is not None and window.is_pointwise and not any(edit.is_op(n, *_BEHIND[1:]) for n in self.behind)

    @property
    def is_linear(self) -> bool:
        """Whether the bias of the convolution may be added last: to the largest of several numbers as to each."""
        return all(edit.is_op(node, "MaxPool") for node in self.behind)


@dataclass(frozen=True)
class _Frame:
    """Two products and the softmax between them.

    Attributes:
        scores: The product of queries and keys.
        scale: What scores are multiplied by.
        turned: Whether its first operand is the keys.
        mix: The product with the values; ``values_first`` where these are its first operand.
        result: What gives the result, the product or a Transpose behind it; ``features_first`` where that is
            [..., features, queries].
    """

    softmax: ir.Node
    scores: ir.Node
    scale: float
    turned: bool
    mix: ir.Node
    values_first: bool
    result: ir.Node
    features_first: bool
    nodes: tuple[ir.Node, ...]

    @property
    def last_two(self) -> list[int]:
        """Sizes of the last axes of the result, where they are numbers."""
        return [dim for dim in (self.result.outputs[0].shape or ())[-2:] if isinstance(dim, int)]

    @property
    def operands(self) -> tuple[tuple[ir.Value | None, bool], ...]:
        """Queries, keys and values, and whether their tokens are last."""
        first, second = self.scores.inputs
        queries, keys = ((second, True), (first, False)) if self.turned else ((first, False), (second, True))
        return queries, keys, (self.mix.inputs[0 if self.values_first else 1], self.values_first)


@dataclass(frozen=True)
class _Plan:
    frame: _Frame
    operands: tuple[_Operand, ...]

    @property
    def nodes(self) -> tuple[ir.Node, ...]:
        """All of them, the softmax first."""
        found = [self.frame.softmax, *self.frame.nodes, *(node for each in self.operands for node in each.nodes)]
        return tuple(dict.fromkeys(found))

    def sizes(self) -> list[tuple[int, int]]:
        """Into how many heads each may be divided, and the size of theirs."""
        size, values = self.operands[0].columns.shape[1], self.operands[2].columns.shape[1]
        parts = {1, max(values // max(_PART, size), 1)}
        found = [(count, wide_head(max(size, values // count))) for count in sorted(parts) if values % count == 0]
        return [(count, wide) for count, wide in found if wide <= _MOST]


@dataclass(frozen=True)
class MapAttention:
    """Computes attention between the positions of a map on tokens.

    Rewrite:
        V softmax(Q^T K)^T, with Q, K and V by convolutions of a map whose positions are flattened, becomes
        (softmax(q k^T) v)^T with q, k and v by products of [batch, positions, channels] with the same weights, split
        into heads and transposed. Scores may be transposed, softmax being over their other axis. Where queries and
        keys are of another size than values, zeros are appended to the smaller ones; values may be divided into
        several heads, which have the same queries and keys. What is pooled stays a convolution, one for keys and
        values. Softmax does not see the bias of keys, that of queries is added behind the split into heads, and that of
        values by a convolution that reads the result or is added to it.
    Requires:
        Constant weights without groups; only reshapes, transposes, cuts and scales above zero behind them. For TensorRT
        for RTX, but where FP32 or TF32 is asked for.
    Why faster:
        The compiler's fused kernel takes queries, keys and values of one size with their features last, in place where
        one product of tokens makes them, and none where channels are first: non-local blocks, SAGAN, DANet, YOLO11,
        autoencoders, diffusion. 64 channels, 32 x 32 positions, batch 8, FP16, on an L4 by a plain roofline: SAGAN's
        attention between convolutions 17 kernels and 438 us -> 12 and 175; of 128 channels, YOLO11's block of four
        heads 2106 -> 407 us, an autoencoder's 656 -> 324, a non-local block with pooled keys and values 349 -> 257.
    Numerics:
        The same sums, with terms of zero; scales of queries and keys are multiplied into the weights.
    Refuses when:
        The three have not as many heads, or heads larger than 256; heads are merged into the batch, with a number of
        positions that is not known. No match where anything else lies between, masks for one.
    """

    name: str = "map-attention"
    stage: Stage = Stage.FUSE
    lossless: bool = True

    def find(self, model: ir.Model, target: Target) -> Findings:
        """Attentions of maps, each named after its softmax."""
        if target.backend != "tensorrt-rtx" or target.precision in ("fp32", "tf32"):
            return Findings()
        matches, refusals = [], []
        for node in edit.all_nodes(model.graph):
            is_own = node.metadata_props.get(edit.RECIPE_KEY) == self.name
            plan = None if is_own else _plan(node, model.graph.opset_imports.get("", 1))
            if isinstance(plan, str):
                refusals.append(Refusal(str(node.name), plan))
            elif plan is not None:
                matches += [Match(plan.nodes, choice=f"{count} of {wide}") for count, wide in plan.sizes()]
        return Findings(tuple(matches), tuple(refusals))

    def rewrite(self, model: ir.Model, match: Match) -> Refusal | None:
        """Write one attention on tokens."""
        plan = _plan(match.nodes[0], model.graph.opset_imports.get("", 1))
        sizes = (
            {} if plan is None or isinstance(plan, str) else {f"{n} of {wide}": (n, wide) for n, wide in plan.sizes()}
        )
        if plan is None or isinstance(plan, str) or match.choice not in sizes:
            return Refusal(match.label, "it has changed since it was found")
        _Writer(model, plan, *sizes[match.choice], self.name).write()
        for node in reversed(_in_order(plan.nodes)):
            if node.graph is not None and not any(value.uses() or value.is_graph_output() for value in node.outputs):
                edit.remove_node(node)
        return None


def _in_order(nodes: tuple[ir.Node, ...]) -> list[ir.Node]:
    mine = set(nodes)
    return [node for node in edit.graph_of(nodes[0]) if node in mine]


def _plan(softmax: ir.Node, opset: int) -> _Plan | str | None:
    """The attention of a map around a softmax; why it cannot be rewritten; None where there is none."""
    frame = _frame(softmax) if edit.is_op(softmax, "Softmax") and opset >= 13 else None
    if frame is None:
        return None
    found = [_operand(value, is_last, softmax) for value, is_last in frame.operands]
    plan = _Plan(frame, tuple(item for item in found if item is not None))
    if len(plan.operands) < 3:
        return None
    heads = {item.columns.shape[0] for item in plan.operands}
    if len(heads) > 1 or plan.operands[0].columns.shape != plan.operands[1].columns.shape:
        return "queries, keys and values have not as many heads"
    if heads != {1} and len(frame.result.outputs[0].shape or ()) == 3 and len(frame.last_two) < 2:
        return "heads are merged into the batch, and the number of positions is not known"
    if not plan.sizes():
        return f"heads would be larger than {_MOST}"
    return plan


def _frame(softmax: ir.Node) -> _Frame | None:
    """What a softmax over one of the last two axes is between."""
    source, output = softmax.inputs[0], softmax.outputs[0]
    rank = len(source.shape) if source is not None and source.shape is not None else 0
    axis = edit.int_attribute(softmax, "axis", -1)
    if rank not in (3, 4) or not -2 <= (axis if axis < 0 else axis - rank) <= -1:
        return None
    over_last = axis in (-1, rank - 1)
    value, keys_last, scale, nodes = source, over_last, 1.0, [softmax]
    while True:
        node = edit.only_maker(value)
        if node is None or len(nodes) > _DEPTH or node.graph is not softmax.graph:
            return None
        nodes.append(node)
        if edit.is_op(node, "MatMul"):
            scores = node
            break
        keys_last ^= _swaps(node)
        value, factor = _scaled(node) if not _swaps(node) else (node.inputs[0], 1.0)
        scale *= factor
    last, user = over_last, edit.only_user(output)
    while user is not None and (_swaps(user) or _passes(user)) and len(nodes) <= 2 * _DEPTH:
        nodes.append(user)
        last ^= _swaps(user)
        output = user.outputs[0]
        user = edit.only_user(output)
    if user is None or user.graph is not softmax.graph or not edit.is_op(user, "MatMul"):
        return None
    values_first = user.inputs[1] is output
    if values_first == last or user.inputs[0] is user.inputs[1]:
        return None
    turn = edit.only_user(user.outputs[0])
    result = turn if turn is not None and turn.graph is user.graph and _swaps(turn) else user
    features_first = values_first ^ (result is turn)
    nodes += dict.fromkeys((user, result))
    return _Frame(softmax, scores, scale, not keys_last, user, values_first, result, features_first, tuple(nodes))


def _swaps(node: ir.Node) -> bool:
    """Whether a node exchanges the last two axes."""
    perm = edit.ints_attribute(node, "perm") if edit.is_op(node, "Transpose") else None
    return perm is not None and perm == (*range(len(perm) - 2), len(perm) - 1, len(perm) - 2)


def _passes(node: ir.Node) -> bool:
    return is_pass(node) and not edit.is_op(node, "Cast")


def _scaled(node: ir.Node) -> tuple[ir.Value | None, float]:
    """What a node hands on times one number, and the number; None where it does something else."""
    if _passes(node):
        return node.inputs[0], 1.0
    data, number = scaled_by(node) or (None, np.zeros(0))
    if number.size != 1 or number.ndim > 1 or not np.isfinite(number) or not number.item():
        return None, 1.0
    return data, float(number.item()) if edit.is_op(node, "Mul") else 1 / float(number.item())


def _operand(value: ir.Value | None, is_last: bool, softmax: ir.Node) -> _Operand | None:
    """Where an operand comes from, whose tokens are its last axis or the one before."""
    steps, nodes, behind, factor = list[tuple[ir.Node, ir.Value]](), list[ir.Node](), list[ir.Node](), 1.0
    start, item = value, value
    while item is not None and len(nodes) < _DEPTH:
        node = item.producer()
        if node is None or node.graph is not softmax.graph:
            return None
        nodes.append(node)
        if edit.is_op(node, "Conv"):
            break
        if edit.is_op(node, *_BEHIND) and not any(each.uses() for each in node.outputs[1:]):
            behind.append(node)
            item = node.inputs[0]
            continue
        if behind:
            return None
        if is_move(node):
            steps.append((node, item))
            item = node.inputs[0]
        else:
            item, number = _scaled(node)
            factor *= number
        start = item
    if item is None or not edit.is_op(nodes[-1], "Conv") or item.dtype != softmax.outputs[0].dtype:
        return None
    if factor < 0:  # neither Relu nor MaxPool leaves that to be done first
        return None
    conv = nodes[-1]
    if why_not_constant(conv) or edit.int_attribute(conv, "group", 1) != 1 or window_of(conv) is None:
        return None
    columns = _columns(start, steps[::-1], len(softmax.outputs[0].shape or ()), is_last)
    return None if columns is None else _Operand(conv, tuple(behind[::-1]), columns, factor, tuple(nodes))


def _columns(
    start: ir.Value | None, steps: list[tuple[ir.Node, ir.Value]], rank: int, is_last: bool
) -> np.ndarray | None:
    """The channels of a map that are the features of an operand, [heads, size]; None where tokens are not its
    positions."""
    sizes = Sizes()
    shape = sizes.of(start)
    if shape is None or len(shape) < 3:
        return None
    spots = int(np.prod(shape[2:]))
    ones = (1,) * (len(shape) - 2)
    found = []
    for array in (
        np.arange(shape[0], dtype=np.int32).reshape(-1, 1, *ones),
        np.arange(shape[1], dtype=np.int32).reshape(1, -1, *ones),
        np.arange(spots, dtype=np.int32).reshape(1, 1, *shape[2:]),
    ):
        made: np.ndarray | None = np.broadcast_to(array, shape)
        for node, output in steps:
            made = None if made is None else moved(node, output, made, sizes)
        if made is None or made.ndim != rank:
            return None
        found.append(np.swapaxes(made, -1, -2) if is_last else made)
    if found[0].ndim == 4 and found[0].shape[0] != shape[0]:
        return None
    batch, channels, places = (each.reshape(-1, *each.shape[-2:]) for each in found)
    heads = len(batch) // shape[0]
    columns = channels[:heads, 0, :]
    is_known = (
        len(batch) == heads * shape[0]
        and batch.shape[1] == spots
        and (batch == np.repeat(np.arange(shape[0]), heads)[:, None, None]).all()
        and (places == np.arange(spots)[None, :, None]).all()
        and (channels == np.tile(columns, (shape[0], 1))[:, None, :]).all()
    )
    return columns if is_known else None


class _Writer:
    """Writes one attention on tokens.

    Args:
        count: Into how many heads each is divided.
        wide: The size of these.
    """

    def __init__(self, model: ir.Model, plan: _Plan, count: int, wide: int, recipe: str) -> None:
        self._plan, self._count, self._wide = plan, count, wide
        self._splice = edit.Splice(model, plan.frame.result, recipe)
        self._tokens: dict[ir.Value, ir.Value] = {}
        queries, keys, values = plan.operands
        factors = (queries.factor * keys.factor, 1.0, values.factor)
        self._layers = [self._layer(each, number) for each, number in zip(plan.operands, factors, strict=True)]
        # What is added last: not where it is added to a map that is activated.
        self._late = [layer[1] * each.is_linear for each, layer in zip(plan.operands, self._layers, strict=True)]
        if self._late[2].any() and _fold(model, plan):
            self._late[2][:] = 0

    def write(self) -> None:
        """Put it in the place of what was there."""
        frame, splice = self._plan.frame, self._splice
        made = self._operands()
        queries, values = (self._split(made[index], (0, 2, 1, 3)) for index in (0, 2))
        if self._late[0].any():
            bias = self._late[0].reshape(1, -1, 1, self._wide)
            queries = splice.fresh("Add", queries, self._constant(bias))
        scores = splice.fresh("MatMul", queries, self._split(made[1], (0, 2, 3, 1)))
        if frame.scale != 1.0:
            scores = splice.fresh("Mul", scores, splice.number(frame.scale))
        weights = splice.fresh("Softmax", scores, attributes={"axis": -1})
        splice.finish(self._result(splice.fresh("MatMul", weights, values)))

    def _layer(self, operand: _Operand, factor: float) -> tuple[np.ndarray, np.ndarray]:
        """Weight and bias, with zeros for what is appended."""
        weight, bias = weight_and_bias(operand.conv)
        heads, size = operand.columns.shape
        if operand is self._plan.operands[2]:
            columns = operand.columns.reshape(heads * self._count, size // self._count)
        else:
            columns = np.repeat(operand.columns, self._count, axis=0)
        room = ((0, 0), (0, self._wide - columns.shape[1]))
        order = np.pad(columns, room).ravel()
        kept = np.pad(np.full(columns.shape, factor), room).ravel()
        return weight[order] * kept.reshape(-1, *[1] * (weight.ndim - 1)), bias[order] * kept

    def _operands(self) -> list[ir.Value]:
        """Queries, keys and values, [batch, tokens, heads and sizes]."""
        made: dict[int, ir.Value] = {}
        maps: dict[tuple[object, ...], list[int]] = {}
        for index, operand in enumerate(self._plan.operands):
            if operand.is_product:
                made[index] = self._product(index)
            else:
                maps.setdefault(_kind(operand), []).append(index)
        for indices in maps.values():
            made.update(zip(indices, self._pooled(indices), strict=True))
        return [made[index] for index in range(3)]

    def _product(self, index: int) -> ir.Value:
        operand, (weight, bias) = self._plan.operands[index], self._layers[index]
        value = self._flat(operand.conv.inputs[0], weight.shape[1])
        value = self._splice.fresh("MatMul", value, self._constant(weight.reshape(weight.shape[:2]).T))
        if operand.is_linear:
            return self._biased(value, index)
        return self._splice.fresh("Relu", self._splice.fresh("Add", value, self._constant(bias)))

    def _pooled(self, indices: list[int]) -> list[ir.Value]:
        """What one convolution makes, pooled as a map."""
        splice, operand = self._splice, self._plan.operands[indices[0]]
        weights, biases = zip(*(self._layers[index] for index in indices), strict=True)
        bias = np.concatenate(biases)
        given = [self._constant(np.concatenate(weights))] + ([] if operand.is_linear else [self._constant(bias)])
        value = splice.fresh("Conv", operand.conv.inputs[0], *given, attributes=_attributes(operand.conv))
        for node in operand.behind:
            value = splice.fresh(node.op_type, value, attributes=_attributes(node))
        value = self._flat(value, len(bias), rank=weights[0].ndim)
        ends = np.cumsum([len(each) for each in biases])
        found = []
        for end, own, index in zip(ends, biases, indices, strict=True):
            places = [self._constant(np.asarray([place]), np.int64) for place in (end - len(own), end, 2)]
            part = value if len(indices) == 1 else splice.fresh("Slice", value, *places)
            found.append(self._biased(part, index))
        return found

    def _flat(self, value: ir.Value | None, channels: int, rank: int = 0) -> ir.Value:
        """The tokens of a map."""
        value = _unflattened(value)
        if value is None:
            raise ValueError("a convolution has no input")
        if value not in self._tokens:
            rank = rank or len(value.shape or ())
            turned = self._splice.fresh("Transpose", value, attributes={"perm": (0, *range(2, rank), 1)})
            shape = self._constant(np.asarray([0, -1, channels]), np.int64)
            self._tokens[value] = turned if rank == 3 else self._splice.fresh("Reshape", turned, shape)
        return self._tokens[value]

    def _biased(self, value: ir.Value, index: int) -> ir.Value:
        """Values with their bias; that of queries is added to heads, and of that of keys softmax sees nothing."""
        bias = self._late[index]
        return self._splice.fresh("Add", value, self._constant(bias)) if index == 2 and bias.any() else value

    def _split(self, value: ir.Value, perm: tuple[int, ...]) -> ir.Value:
        """Tokens as heads."""
        shape = self._constant(np.asarray([0, 0, -1, self._wide]), np.int64)
        return self._splice.fresh("Transpose", self._splice.fresh("Reshape", value, shape), attributes={"perm": perm})

    def _result(self, value: ir.Value) -> ir.Value:
        """The heads in the layout of the product that was there."""
        splice, frame, values = self._splice, self._plan.frame, self._plan.operands[2].columns
        size, output = values.shape[1] // self._count, frame.result.outputs[0]
        if size < self._wide:
            places = [self._constant(np.asarray([place]), np.int64) for place in (0, size, 3)]
            value = splice.fresh("Slice", value, *places)
        rank, perm = len(output.shape or ()), (0, 1, 3, 2) if frame.features_first else (0, 1, 2, 3)
        if self._count > 1:
            turned = splice.fresh("Transpose", value, attributes={"perm": (0, 2, 1, 3)})
            shape = self._constant(np.asarray([0, 0, *values.shape]), np.int64)
            value = splice.fresh("Reshape", turned, shape)
            perm = (0, 2, 3, 1) if frame.features_first else (0, 2, 1, 3)
        if perm != (0, 1, 2, 3):
            value = splice.fresh("Transpose", value, attributes={"perm": perm})
        if rank == 3 and len(values) == 1:
            value = splice.fresh("Squeeze", value, self._constant(np.asarray([1]), np.int64))
        elif rank == 3:
            shape = self._constant(np.asarray([-1, *frame.last_two]), np.int64)
            value = splice.fresh("Reshape", value, shape)
        value.shape = output.shape
        return value

    def _constant(self, array: np.ndarray, dtype: np.dtype | type | None = None) -> ir.Value:
        output = self._plan.frame.result.outputs[0]
        if output.dtype is None:
            raise ValueError(f"{output.name} has no type")
        return self._splice.constant(array.astype(dtype or output.dtype.numpy()), output, "constant")


def _unflattened(value: ir.Value | None) -> ir.Value | None:
    """The map whose positions a value is, or itself: maps are transposed with less copies before they are flattened."""
    node = edit.maker_of(value)
    source = node.inputs[0] if edit.is_op(node, "Reshape") else None
    before, after = (edit.dims_of_value(item) for item in (source, value))
    if before is None or after is None or (len(before), len(after)) != (4, 3) or None in after[:2]:
        return value
    return source if before[:2] == after[:2] else value


def _fold(model: ir.Model, plan: _Plan) -> bool:
    """Let a convolution behind attention add the bias of the values, as weights that sum to 1 leave it; whether one
    can."""
    operand = plan.operands[2]
    row = weight_and_bias(operand.conv)[1][operand.columns] * operand.factor
    conv, reads, channels = _behind(plan, row)
    if conv is None or channels is None or why_not_constant(conv):
        return False
    window, (weight, bias) = window_of(conv), weight_and_bias(conv)
    if reads and (window is None or any(window.pads) or edit.int_attribute(conv, "group", 1) > 1):
        return False
    if not reads and channels.size != bias.size:
        return False
    new = bias + (weight.reshape(*weight.shape[:2], -1).sum(axis=2) @ channels if reads else channels)
    dtype = conv.outputs[0].dtype
    if dtype is None or not np.isfinite(new.astype(dtype.numpy()).astype(np.float64)).all():
        return False
    set_weights(edit.Names(model), conv, weight, new)
    return True


def _behind(plan: _Plan, row: np.ndarray) -> tuple[ir.Node | None, bool, np.ndarray | None]:
    """The convolution that reads the result, or that is added to it, and what is added to each of its channels.

    Args:
        row: What is added to the result, [heads, size].
    """
    frame, sizes = plan.frame, Sizes()
    value = frame.result.outputs[0]
    batch, shape = sizes.of(plan.operands[2].conv.outputs[0]), sizes.of(value)
    if shape is None or batch is None:
        return None, False, None
    row = row[..., None] if frame.features_first else row[:, None]
    # Heads may be merged into the batch.
    lead = shape[:-2] if len(shape) == 4 else (batch[0], len(row))
    array: np.ndarray | None = np.broadcast_to(row, (*lead, *shape[-2:])).reshape(-1, *shape[-(len(shape) - 1) :])
    while (user := edit.only_user(value)) is not None and array is not None and user.graph is frame.mix.graph:
        source, factor = _scaled(user)
        if is_move(user) and user.inputs[0] is value and len(user.outputs) == 1:
            array = moved(user, user.outputs[0], array, sizes)
        elif source is value:
            array = array * factor
        else:
            other = next((each for each in user.inputs if each is not value), None) if edit.is_op(user, "Add") else None
            reads = edit.is_op(user, "Conv") and user.inputs[0] is value
            conv = user if reads else edit.only_maker(other)
            if not edit.is_op(conv, "Conv") or array.ndim != len(conv.outputs[0].shape or ()):
                return None, False, None
            return conv, reads, per_channel(one_per(array), array.shape[1], array.ndim)
        value = user.outputs[0]
    return None, False, None


def _attributes(node: ir.Node) -> dict[str, int | str | tuple[int, ...]]:
    return {name: attribute.value for name, attribute in node.attributes.items()}


def _kind(operand: _Operand) -> tuple[object, ...]:
    """What operands have in common that one convolution can make."""
    described = tuple((node.op_type, tuple(sorted(_attributes(node).items()))) for node in operand.behind)
    return operand.conv.inputs[0], window_of(operand.conv), described
