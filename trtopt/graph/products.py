"""The matrix products a node computes: convolutions, GEMMs, attention, recurrent layers.

One multiply-add is 2 flop. A product [m, k] x [k, n] is 2mnk; a convolution is one with m = N*P*Q (output pixels),
n = K (output channels) and k = C*R*S (taps), as NVIDIA's deep learning performance guide maps it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import onnx_ir as ir

from trtopt.graph.edit import input_of, int_attribute, string_attribute

Shapes = Mapping[str, tuple[int, ...]]
"""Static shapes by value name (see :func:`trtopt.graph.shapes.static_shapes`)."""

GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
"""Gates per hidden unit, in the order of their rows in W and R: input, output, forget, cell; update, reset, hidden;
hidden."""


class Product(NamedTuple):
    """``batch`` products [m, k] x [k, n], computed ``steps`` times one after the other."""

    m: int
    n: int
    k: int
    batch: int = 1
    steps: int = 1

    @property
    def flop(self) -> int:
        """2mnk each."""
        return 2 * self.m * self.n * self.k * self.batch * self.steps


class Heads(NamedTuple):
    """The sizes of an attention: batch, query heads, key heads, query and key length, head sizes of keys and values."""

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    key_size: int
    value_size: int

    @property
    def scores(self) -> int:
        """Elements of Q K^T."""
        return self.batch * self.heads * self.queries * self.keys


def products_of(node: ir.Node, shapes: Shapes) -> tuple[Product, ...] | None:
    """The matrix products a node computes, in the order it computes them; None where not known, or it is none.

    A recurrent layer has two: the input product of all time steps at once, and the recurrent one, step by step.
    """
    rule = PRODUCTS.get(node.op_type) if node.domain == "" else None
    return None if rule is None else rule(node, shapes)


def shape_of_input(node: ir.Node, index: int, shapes: Shapes) -> tuple[int, ...] | None:
    """The shape of an input; None where it is left out or not known."""
    value = input_of(node, index)
    return None if value is None else shapes.get(str(value.name))


def shape_of_output(node: ir.Node, shapes: Shapes) -> tuple[int, ...] | None:
    """The shape of the first output that is there."""
    value = next((value for value in node.outputs if value.name), None)
    return None if value is None else shapes.get(str(value.name))


def heads_of(node: ir.Node, shapes: Shapes) -> Heads | None:
    """The sizes of an Attention or LinearAttention: Q, K, V are [batch, heads, length, size], or [batch, length,
    heads * size] with the heads as attributes; a key cache lengthens the keys."""
    query, key, value = (shape_of_input(node, index, shapes) for index in range(3))
    if query is None or key is None or value is None:
        return None
    if len(query) == 4:
        return Heads(query[0], query[1], key[1], query[2], key[2] + _cached(node, shapes), key[3], value[3])
    heads, kv_heads = int_attribute(node, "q_num_heads", 0), int_attribute(node, "kv_num_heads", 0)
    if len(query) != 3 or heads <= 0 or kv_heads <= 0:
        return None
    keys = key[1] + _cached(node, shapes)
    return Heads(query[0], heads, kv_heads, query[1], keys, key[2] // kv_heads, value[2] // kv_heads)


def _cached(node: ir.Node, shapes: Shapes) -> int:
    past = shape_of_input(node, 4, shapes) if node.op_type == "Attention" else None
    return past[2] if past else 0


def _conv(node: ir.Node, shapes: Shapes) -> tuple[Product, ...] | None:
    weight, out = shape_of_input(node, 1, shapes), shape_of_output(node, shapes)
    if weight is None or out is None:
        return None
    group = int_attribute(node, "group", 1)
    return (Product(out[0] * math.prod(out[2:]), weight[0] // group, math.prod(weight[1:]), group),)


def _conv_transpose(node: ir.Node, shapes: Shapes) -> tuple[Product, ...] | None:
    """Every input pixel goes to the kernel times the output channels of its group."""
    data, weight = shape_of_input(node, 0, shapes), shape_of_input(node, 1, shapes)
    if data is None or weight is None:
        return None
    group = int_attribute(node, "group", 1)
    return (Product(data[0] * math.prod(data[2:]), math.prod(weight[1:]), weight[0] // group, group),)


def _gemm(node: ir.Node, shapes: Shapes) -> tuple[Product, ...] | None:
    left, out = shape_of_input(node, 0, shapes), shape_of_output(node, shapes)
    if left is None or out is None:
        return None
    return (Product(out[0], out[1], left[0 if int_attribute(node, "transA", 0) else 1]),)


def _matmul(node: ir.Node, shapes: Shapes) -> tuple[Product, ...] | None:
    """A right operand that is one matrix serves all rows of the left one: the batch becomes rows."""
    left, right = shape_of_input(node, 0, shapes), shape_of_input(node, 1, shapes)
    if not left or not right:
        return None
    m = left[-2] if len(left) > 1 else 1
    n = right[-1] if len(right) > 1 else 1
    before, beside = left[:-2], right[:-2]
    if math.prod(beside) == 1:
        return (Product(math.prod(before) * m, n, left[-1]),)
    return (Product(m, n, left[-1], _broadcast_size(before, beside)),)


def _broadcast_size(left: Sequence[int], right: Sequence[int]) -> int:
    rank = max(len(left), len(right))
    first, second = ((1,) * (rank - len(dims)) + tuple(dims) for dims in (left, right))
    return math.prod(a if b == 1 else b for a, b in zip(first, second, strict=True))


def _einsum(node: ir.Node, shapes: Shapes) -> tuple[Product, ...] | None:
    """The operands from left to right, two at a time; an index that is needed no more is summed away."""
    found = [shape_of_input(node, index, shapes) for index in range(len(node.inputs))]
    equation = string_attribute(node, "equation", "").replace(" ", "")
    terms, arrow, result = equation.partition("->")
    operands = terms.split(",")
    if any(shape is None for shape in found) or len(operands) != len(found):
        return None
    labels = [_labels(term, len(shape or ())) for term, shape in zip(operands, found, strict=True)]
    sizes: dict[str, int] = {}
    for names, shape in zip(labels, found, strict=True):
        sizes.update((name, max(size, sizes.get(name, 1))) for name, size in zip(names, shape or (), strict=True))
    every = [name for names in labels for name in names]
    hidden = {name for name in every if name.startswith(".")}
    kept = {*result.replace(".", ""), *hidden} if arrow else {n for n in every if every.count(n) == 1} | hidden
    done, products = set(labels[0]), []
    for index, names in enumerate(labels[1:], start=1):
        later = kept.union(*labels[index + 1 :])
        products.append(_contraction(done, set(names), later, sizes))
        done = (done | set(names)) & later
    return tuple(products)


def _contraction(left: set[str], right: set[str], later: set[str], sizes: Mapping[str, int]) -> Product:
    def size(names: set[str]) -> int:
        return math.prod(sizes[name] for name in names)

    shared = left & right
    return Product(size(left - shared), size(right - shared), size(shared - later), size(shared & later))


def _labels(term: str, rank: int) -> list[str]:
    """One label per axis; those of an ellipsis are counted from the right so that operands share them."""
    before, ellipsis, after = term.partition("...")
    if not ellipsis:
        return list(term)
    hidden = rank - len(before) - len(after)
    return [*before, *(f".{hidden - index}" for index in range(hidden)), *after]


def _recurrent(node: ir.Node, shapes: Shapes) -> tuple[Product, ...] | None:
    """X is [sequence, batch, inputs] (batch first with layout 1), W [directions, gates * hidden, inputs]."""
    data, weight = shape_of_input(node, 0, shapes), shape_of_input(node, 1, shapes)
    if data is None or weight is None:
        return None
    length, batch = data[:2] if int_attribute(node, "layout", 0) == 0 else (data[1], data[0])
    directions, rows, inputs = weight
    hoisted = Product(length * batch, rows, inputs, directions)
    return hoisted, Product(batch, rows, rows // GATES[node.op_type], directions, length)


def _attention(node: ir.Node, shapes: Shapes) -> tuple[Product, ...] | None:
    """Q K^T, then the probabilities times V."""
    sizes = heads_of(node, shapes)
    if sizes is None:
        return None
    batch = sizes.batch * sizes.heads
    scores = Product(sizes.queries, sizes.keys, sizes.key_size, batch)
    return scores, Product(sizes.queries, sizes.value_size, sizes.keys, batch)


def _linear_attention(node: ir.Node, shapes: Shapes) -> tuple[Product, ...] | None:
    """Per token: the state is updated by an outer product and read by the query (and once more by a delta rule)."""
    sizes = heads_of(node, shapes)
    if sizes is None:
        return None
    rank_one = Product(1, sizes.value_size, sizes.key_size, sizes.batch * sizes.kv_heads, sizes.queries)
    read = Product(1, sizes.value_size, sizes.key_size, sizes.batch * sizes.heads, sizes.queries)
    delta = "delta" in string_attribute(node, "update_rule", "gated_delta")
    return (rank_one, rank_one, read) if delta else (rank_one, read)


def _causal_conv(node: ir.Node, shapes: Shapes) -> tuple[Product, ...] | None:
    """Depthwise: input [batch, channels, length], weight [channels, 1, k]."""
    data, weight = shape_of_input(node, 0, shapes), shape_of_input(node, 1, shapes)
    if data is None or weight is None:
        return None
    return (Product(data[0] * data[2], 1, weight[2], data[1]),)


PRODUCTS: dict[str, Callable[[ir.Node, Shapes], tuple[Product, ...] | None]] = {
    "Attention": _attention,
    "CausalConvWithState": _causal_conv,
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "Einsum": _einsum,
    "Gemm": _gemm,
    "LinearAttention": _linear_attention,
    "MatMul": _matmul,
    **dict.fromkeys(GATES, _recurrent),
}
"""The operators that are matrix products, and their sizes."""
