"""Biases of the query, key and value projections of an attention."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from trtopt.graph import edit
from trtopt.graph.attention import Attention, Path, attention_of, attentions_of, bias_of, path_to
from trtopt.graph.views import Sizes, is_move, is_pass, merged_rows, moved, one_per
from trtopt.rewrite.protocol import Findings, Match, Refusal, Stage, Target

_MOST_BETWEEN = 40
"""Nodes between a projection and attention that are looked at: a rotation in its longest spelling has about twenty."""


class _CannotError(ValueError):
    """A place that nearly matches; the message says what is in the way."""


@dataclass(frozen=True)
class _Plan:
    """One attention, and what happens to its biases.

    Attributes:
        roots: The nodes that add biases, each once.
        moved: The ways of biases that are added behind the split into heads, and the biases in that layout.
        after: The nodes from the mix to the output projection.
        projection: The output projection and the Add of its bias, if V has a bias.
        added: What V's bias adds to the output projection's bias.
        nodes: All nodes between the projections and the output.
    """

    roots: tuple[ir.Node, ...]
    moved: tuple[tuple[Path, np.ndarray], ...]
    projection: tuple[ir.Node, ir.Node | None] | None
    added: np.ndarray | None
    nodes: tuple[ir.Node, ...]


@dataclass(frozen=True)
class QkvBias:
    """Takes the biases of attention's query, key and value projections out of the way of the fused kernel.

    Rewrite:
        softmax((q + b_q) (k + b_k)^T + mask) (v + b_v) W_o + b_o
        = softmax((q + b_q) k^T + mask) v W_o + (b_o + b_v W_o): b_k adds one number to all scores of a query, which
        softmax does not see, and the weights that softmax gives sum to 1. b_q is added behind the split into heads, as
        [1, heads, 1, size]; so is b_k where positions are rotated into the keys, or something else lies between.
    Requires:
        Biases that are constants, one number per feature, with only moves (Reshape, Transpose, Split, Gather, ...) and
        a scale up to attention's products, or a Transpose of queries and keys before what else happens to them;
        projections apart or merged into one. Where no output projection takes the
        values' bias, as behind masked-rows, it stays. Between Q K^T and softmax only
        scales that are the same for all keys, added masks, and Where or Max with a number that vanishes (-1e4 and
        below).
    Why faster:
        TensorRT for RTX runs Q, K and V as one product whose output attention reads in place; a bias anywhere puts a
        transpose kernel before each operand: 10 -> 8 kernels and 77.5 -> 67.8 MB for a ViT-B block of batch 8. Where Q
        and K are rotated, V is read in place: DINOv3-S of four blocks 880 -> 831 us (L4, FP16, second judge).
    Numerics:
        The same real numbers. b_v W_o is computed in FP64 and rounded once.
    Refuses when:
        Something else uses a biased value (relative positions computed from q, attention weights as an output), the
        probabilities are changed after softmax, a nonlinearity lies before it, or a bias is not finite or overflows its
        type.
    """

    name: str = "qkv-bias"
    stage: Stage = Stage.FUSE
    lossless: bool = True

    def find(self, model: ir.Model, target: Target) -> Findings:
        """Attentions whose projections have a bias that is not in its place yet."""
        matches, refusals = [], []
        for found in attentions_of(model):
            try:
                plan = _plan(found)
            except _CannotError as error:
                refusals.append(Refusal(str(found.softmax.name), str(error)))
            else:
                if plan is not None:
                    matches.append(Match(plan.nodes))
        return Findings(tuple(matches), tuple(refusals))

    def rewrite(self, model: ir.Model, match: Match) -> Refusal | None:
        """Move the biases of one attention."""
        found = attention_of(match.nodes[0], model.graph.opset_imports.get("", 1))
        try:
            plan = None if found is None else _plan(found)
            if found is None or plan is None:
                return Refusal(match.label, "it is no attention with biases any more")
            projection = None if plan.projection is None else _projection_bias(plan)
        except _CannotError as error:
            return Refusal(match.label, str(error))
        for path, bias in plan.moved:
            last, value = path.steps[path.moves - 1]
            splice = edit.Splice(model, last, self.name)
            splice.restore(value, "Add", (), splice.constant(bias, path.root.outputs[0], "bias"))
        if plan.projection is not None and projection is not None:
            _set_bias(model, *plan.projection, projection, self.name)
        for root in plan.roots:
            _drop(root, self.name)
        return None


def _plan(found: Attention) -> _Plan | None:
    """What to do with one attention; None where it has no bias to move.

    Raises:
        _CannotError: It has, and something is in the way.
    """
    sizes = Sizes()
    query, key = (path_to(found.scores.inputs[index], sizes) for index in (0, 1))
    value = path_to(found.mix.inputs[1], sizes)
    if query is not None and not query.moves:
        if any(path is not None and path.root is query.root for path in (key, value)):
            return None
        query = None
    paths = [path for path in (query, key, value) if path is not None and one_per(path.bias).any()]
    own = {path.root for path in paths}
    split = {path.root: path for item in found.scores.inputs for path in _split_paths(item, sizes)}
    split = {root: path for root, path in split.items() if root not in own and _moves_bias(found, path, sizes)}
    if not paths and not split:
        return None
    if found.hindrance and paths:
        raise _CannotError(found.hindrance)
    for path in (*paths, *split.values()):
        if not np.isfinite(one_per(path.bias)).all():
            raise _CannotError(f"the bias of {path.root.name} is not finite")
    _check_uses(found, paths)
    if key in paths and not _is_same_for_all(key, sizes):
        raise _CannotError(f"the bias of {key.root.name} differs along the keys")
    behind = [*([query] if query is not None and query in paths else []), *split.values()]
    nodes = [*found.nodes]
    for path in (*paths, *split.values()):
        nodes += [path.root, *(node for node, _ in path.steps)]
    projection, added = None, None
    if value is not None and value in paths:
        try:
            projection, added, between = _value_bias(found, value, sizes)
        except _CannotError:
            paths.remove(value)
            # What adds the values' bias alone may stay.
            if not (paths or split) or any(path.root is value.root for path in paths):
                raise
            nodes = [node for node in nodes if node is not value.root]
        else:
            nodes += [*between, *(node for node in projection if node is not None)]
    return _Plan(
        tuple(dict.fromkeys(path.root for path in (*paths, *split.values()))),
        tuple((path, _moved_bias(found, path, sizes)) for path in behind),
        projection,
        added,
        tuple(dict.fromkeys(nodes)),
    )


def _check_uses(found: Attention, paths: list[Path]) -> None:
    """Every use of a biased value must lead to the products that the biases are moved around."""
    mine = {node for path in paths for node, _ in path.steps} | {found.scores, found.mix}
    for path in paths:
        for value in (v for node in (path.root, *(node for node, _ in path.steps)) for v in node.outputs):
            if value.is_graph_output():
                raise _CannotError(f"{value.name}, which has the bias of {path.root.name} in it, is a graph output")
            if any(user not in mine and not edit.is_op(user, "Shape", "Size") for user, _ in value.uses()):
                raise _CannotError(f"{value.name}, which has the bias of {path.root.name} in it, is used elsewhere")


def _split_paths(value: ir.Value | None, sizes: Sizes) -> Iterator[Path]:
    """The ways from biases of projections to where these are split into heads, behind which more than moves and a
    scale, such as a rotation, lies before an operand of attention."""
    seen = set[ir.Node]()
    queue = [] if path_to(value, sizes) is not None else [value]
    while queue and len(seen) < _MOST_BETWEEN:
        item = queue.pop(0)
        node = edit.maker_of(item)
        if node is None or node in seen:
            continue
        seen.add(node)
        data = [source for source in node.inputs if source is not None and edit.constant_tensor_of(source) is None]
        is_product = edit.is_op(node, "MatMul", "Gemm")
        behind_product = (
            len(data) == 1 and edit.is_op(data[0].producer(), "MatMul") if edit.is_op(node, "Add") else False
        )
        bias = bias_of(node, sizes) if is_product or behind_product else None
        if bias is not None and one_per(bias).any():
            steps = tuple(_moves_behind(node.outputs[0]))
            if any(edit.is_op(step, "Transpose") for step, _ in steps):
                yield Path(node, steps, bias)
        elif not is_product:
            queue += data


def _moves_behind(value: ir.Value) -> Iterator[tuple[ir.Node, ir.Value]]:
    """The moves that a value goes through alone and whole, each with its output."""
    while (node := edit.only_user(value)) is not None and is_move(node) and len(node.outputs) == 1:
        if node.inputs[0] is not value:
            return
        value = node.outputs[0]
        yield node, value


def _moved_bias(found: Attention, path: Path, sizes: Sizes) -> np.ndarray:
    """A bias after its last move, in the type of what it is added to."""
    value = path.steps[path.moves - 1][1]
    carried = path.carried(path.moves, sizes)
    bias = None if carried is None else one_per(carried)
    # Where it differs the query must have as many: a stand-in may have been split like a number.
    dims = tuple(value.shape) if value.shape is not None else ()
    if bias is None or value.dtype is None or bias.ndim != len(dims):
        raise _CannotError(f"the shapes between {path.root.name} and {found.scores.name} are not known")
    if any(size not in (1, dim) for size, dim in zip(bias.shape, dims, strict=True)):
        raise _CannotError(f"the shapes between {path.root.name} and {found.scores.name} are not known")
    return _narrowed(bias, value.dtype, path.root)


def _moves_bias(found: Attention, path: Path, sizes: Sizes) -> bool:
    try:
        return bool(_moved_bias(found, path, sizes).size)
    except _CannotError:
        return False


def _narrowed(array: np.ndarray, dtype: ir.DataType, node: ir.Node) -> np.ndarray:
    with np.errstate(over="ignore"):
        narrow: np.ndarray = array.astype(dtype.numpy())
    if not np.isfinite(narrow.astype(np.float64)).all():
        raise _CannotError(f"the new bias of {node.name} does not fit {dtype}")
    return narrow


def _is_same_for_all(path: Path, sizes: Sizes) -> bool:
    carried = path.carried(path.moves, sizes)
    return carried is not None and one_per(carried).shape[-1] == 1


def _value_bias(
    found: Attention, path: Path, sizes: Sizes
) -> tuple[tuple[ir.Node, ir.Node | None], np.ndarray, list[ir.Node]]:
    """The output projection (and the Add of its bias), what V's bias adds to that, and the nodes before it."""
    carried, mixed = path.carried(len(path.steps), sizes), sizes.of(found.mix.outputs[0])
    if carried is None or mixed is None:
        raise _CannotError(f"the shapes between {path.root.name} and {found.mix.name} are not known")
    row = one_per(carried)
    if row.ndim < 2 or row.shape[-2] != 1:
        raise _CannotError(f"the bias of {path.root.name} differs along the keys")
    try:
        array: np.ndarray | None = np.broadcast_to(row, mixed)
    except ValueError:
        raise _CannotError(f"the shape of {found.mix.outputs[0].name} is not known") from None
    value, between = found.mix.outputs[0], list[ir.Node]()
    node = edit.only_user(value)
    while node is not None and array is not None and (is_move(node) or is_pass(node)) and node.inputs[0] is value:
        between.append(node)
        value = node.outputs[0]
        user = edit.only_user(value)
        array = _merged(node, user, array, sizes) if _is_open(node) else moved(node, value, array, sizes)
        node = user
    weight = None if node is None or node.inputs[0] is not value else _weight(node)
    if node is None or weight is None:
        raise _CannotError("the bias of the values cannot be folded: no product with a constant weight follows")
    flat = None if array is None else one_per(array)
    if flat is None or flat.size not in (1, weight.shape[0]) or flat.shape[-1] != flat.size:
        raise _CannotError(f"the heads are not merged into the features of {node.name}")
    added = np.broadcast_to(flat.ravel(), weight.shape[:1]) @ weight
    return (node, _bias_node(node, weight.shape[1])), added, between


def _is_open(node: ir.Node) -> bool:
    """Whether ``node`` is a Reshape to a shape that is not a constant."""
    return edit.is_op(node, "Reshape") and edit.constant_of(edit.input_of(node, 1)) is None


def _merged(node: ir.Node, user: ir.Node | None, array: np.ndarray, sizes: Sizes) -> np.ndarray | None:
    """What a Reshape to a shape that is not known makes of ``array``; how long its rows are its user may tell."""
    output = node.outputs[0]
    weight = _weight(user) if user is not None and user.inputs[0] is output else None
    width = output.shape[-1] if output.shape is not None and len(output.shape) else None
    if weight is not None:
        width = weight.shape[0]
    return merged_rows(output, array, width, sizes) if isinstance(width, int) else moved(node, output, array, sizes)


def _weight(node: ir.Node) -> np.ndarray | None:
    """The constant that a product multiplies its first input by, [inputs, outputs], as float64."""
    if not edit.is_op(node, "MatMul", "Gemm") or edit.int_attribute(node, "transA", 0):
        return None
    array = edit.constant_of(edit.input_of(node, 1))
    if array is None or array.ndim != 2 or array.dtype.kind in "iub":
        return None
    weight = array.astype(np.float64) * edit.float_attribute(node, "alpha", 1.0)
    return weight.T if edit.int_attribute(node, "transB", 0) else weight


def _bias_node(node: ir.Node, width: int) -> ir.Node | None:
    """The Add of a constant bias after a MatMul."""
    user = edit.only_user(node.outputs[0]) if edit.is_op(node, "MatMul") else None
    if not edit.is_op(user, "Add"):
        return None
    arrays = [array for array in map(edit.constant_of, user.inputs) if array is not None]
    return user if len(arrays) == 1 and arrays[0].size in (1, width) and arrays[0].ndim < 2 else None


def _projection_bias(plan: _Plan) -> np.ndarray:
    """The new bias of the output projection, in the type of the product.

    Raises:
        _CannotError: It does not fit the type.
    """
    if plan.projection is None or plan.added is None:
        raise ValueError("the values have no bias")
    node, add = plan.projection
    bias = np.zeros(1)
    if add is not None:
        bias = next(array for array in map(edit.constant_of, add.inputs) if array is not None)
    elif edit.is_op(node, "Gemm") and edit.input_of(node, 2) is not None:
        array = edit.constant_of(edit.input_of(node, 2))
        if array is None or array.size not in (1, plan.added.size) or array.shape[-1:] not in ((), (array.size,)):
            raise _CannotError(f"the bias of {node.name} is not one constant per feature")
        bias = array.astype(np.float64) * edit.float_attribute(node, "beta", 1.0)
    dtype = node.outputs[0].dtype
    if dtype is None:
        raise _CannotError(f"the type of {node.outputs[0].name} is not known")
    return _narrowed(bias.astype(np.float64).ravel() + plan.added, dtype, node)


def _set_bias(model: ir.Model, node: ir.Node, add: ir.Node | None, bias: np.ndarray, recipe: str) -> None:
    """Give the output projection this bias."""
    splice = edit.Splice(model, node, recipe)
    constant = splice.constant(bias, (add or node).outputs[0], "bias")
    if add is not None:
        add.replace_input_with(0 if edit.constant_of(add.inputs[0]) is not None else 1, constant)
        edit.tag(add, recipe)
    elif edit.is_op(node, "Gemm"):
        if len(node.inputs) < 3:
            node.resize_inputs(3)
        node.replace_input_with(2, constant)
        node.attributes.pop("beta", None)
        edit.tag(node, recipe)
    else:
        splice.restore(node.outputs[0], "Add", (), constant)


def _drop(root: ir.Node, recipe: str) -> None:
    """Take the bias away from a node that adds it."""
    if edit.is_op(root, "Gemm"):
        root.resize_inputs(2)
        root.attributes.pop("beta", None)
        edit.tag(root, recipe)
        return
    data = next(value for value in root.inputs if value is not None and edit.constant_of(value) is None)
    edit.replace_value(root.outputs[0], data)
    edit.remove_node(root)
