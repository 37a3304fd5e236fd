"""What the outputs of a network hold, as far as its graph tells: scores of classes, other values, or a selection."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Literal

import onnx_ir as ir

from trtopt.graph import edit
from trtopt.support.nms_plugins import PLUGINS

Holds = Literal["scores", "values", "selection"]

_SELECTIONS = frozenset("TopK NonMaxSuppression NonZero Unique Multinomial Bernoulli".split()) | PLUGINS
_PICKS = ("ArgMax", "ArgMin")
_MOVES = ("Cast", "Identity", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Slice")
_ON_SCORES = frozenset(
    "Dropout Relu LeakyRelu Clip BatchNormalization Add Sub Mul Div GlobalAveragePool GlobalMaxPool AveragePool "
    "MaxPool ReduceMean ReduceMax QuantizeLinear DequantizeLinear".split()
)
_PRODUCTS = ("MatMul", "Gemm", "Conv", "Einsum", "MatMulInteger", "QLinearMatMul", "QLinearConv")


LEAST_PROBABILITY = 0.01
"""A probability that is smaller is none to any reader: the error of such outputs is held against this one."""


def least_size(output: ir.Value) -> float:
    """The root mean square below which an output's error is not held against the output itself, but against this.

    That is :data:`LEAST_PROBABILITY` for what comes out of a Sigmoid, and 0 elsewhere (the probabilities of a Softmax
    sum to 1). A network that looks for text in noise finds none: its map of probabilities is 1e-8 everywhere, which no
    16-bit type holds and nobody needs. Errors that turn some of them into 1e-4 are 40 dB, and any threshold ignores
    them.

    Example:
        >>> x, y = ir.Value(name="x"), ir.Value(name="y")
        >>> node = ir.Node("", "Sigmoid", [x], outputs=[y])
        >>> least_size(y), least_size(x)
        (0.01, 0.0)
    """
    front, found = [output], 0
    while front:
        node = front.pop().producer()
        if node is None or found > _LONGEST_WALK:
            return 0.0
        found += 1
        if edit.is_op(node, "Concat"):
            front += [value for value in node.inputs if value is not None]
        elif edit.is_op(node, *_MOVES):
            front += [value for value in node.inputs[:1] if value is not None]
        elif not edit.is_op(node, "Sigmoid", "HardSigmoid"):
            return 0.0
    return LEAST_PROBABILITY


_LONGEST_WALK = 64
"""Nodes looked at behind a Sigmoid."""


def held_by(model: ir.Model, names: Iterable[str]) -> dict[str, Holds]:
    """What tensors of the main graph hold, by name; what is not in it holds values.

    Scores come out of a product or a Softmax, and what follows changes no element but by constants, or pools: a
    Softmax, a bias, a Reshape. A normalized hidden state, a sum of two branches and boxes are values. A sigmoid gives
    scores where there is one set of them per sample; elsewhere boxes end in one too. Integers and booleans are taken
    for the answers themselves. What is behind a selection (TopK, boxes that were chosen) is one: the least rounding
    makes entries change places.
    """
    known = {str(value.name): value for node in model.graph for value in node.outputs}
    selected, _ = _selected(model.graph)
    found: dict[str, Holds] = {}
    for name in names:
        value = known.get(name)
        if value is None:
            found[name] = "values"
        elif value in selected:
            found[name] = "selection"
        else:
            found[name] = "scores" if _is_answer(value) or _is_scores(value) else "values"
    return found


def ranked_in(*models: ir.Model) -> tuple[str, ...]:
    """Names of the tensors whose numbers a selection ranks or takes, as far as all of these main graphs compute them.

    They are what is left to compare where an output is behind a selection: the scores and boxes that a
    NonMaxSuppression reads, what a TopK ranks, the scores whose ArgMax is used as an index, and what is gathered by an
    index that was selected; without the constants that mask them. Outputs of the first graph are none: they are
    compared as they are.

    Example:
        >>> x, scores, best = (ir.val(name, ir.DataType.FLOAT) for name in ("x", "scores", "best"))
        >>> k, at = (ir.val(name, ir.DataType.INT64) for name in ("k", "at"))
        >>> nodes = [ir.node("Relu", [x], outputs=[scores]), ir.node("TopK", [scores, k], outputs=[best, at])]
        >>> graph = ir.Graph([x, k], [best, at], nodes=nodes, opset_imports={"": 20})
        >>> ranked_in(ir.Model(graph, ir_version=10))
        ('scores',)
    """
    known = [{str(value.name) for node in model.graph for value in node.outputs} for model in models]
    sources = (_source(value, known) for value in _selected(models[0].graph)[1])
    return tuple(dict.fromkeys(str(it.name) for it in sources if it is not None and not it.is_graph_output()))


def holds_numbers(model: ir.Model) -> bool:
    """Whether the error of every output in dB says something: none is a class, a mask or behind a selection.

    Example:
        >>> x, y = ir.val("x", ir.DataType.FLOAT), ir.val("y", ir.DataType.INT64)
        >>> graph = ir.Graph([x], [y], nodes=[ir.node("ArgMax", [x], outputs=[y])], opset_imports={"": 20})
        >>> holds_numbers(ir.Model(graph, ir_version=10))
        False
    """
    held = held_by(model, (str(value.name) for value in model.graph.outputs))
    return "selection" not in held.values() and not any(map(_is_named, model.graph.outputs))


def _is_named(value: ir.Value) -> bool:
    """Whether a tensor is of no floats, or was before it was cast and moved."""
    while _may_be_float(value):
        node = value.producer()
        if not edit.is_op(node, *_MOVES) or node.inputs[0] is None:
            return False
        value = node.inputs[0]
    return True


def _source(value: ir.Value, known: Sequence[Collection[str]]) -> ir.Value | None:
    """The value without a mask, or where a graph has it no more, what it is a view, a copy or a multiple of."""
    while (node := value.producer()) is not None:
        is_masked = edit.is_op(node, "Where")
        if not is_masked and all(value.name in names for names in known):
            return value
        inputs = node.inputs[1:] if is_masked else node.inputs
        moving = [item for item in inputs if item is not None and edit.constant_tensor_of(item) is None]
        if len(moving) != 1 and not edit.is_op(node, *_MOVES):
            return value if all(value.name in names for names in known) else None
        if not moving:  # a constant
            return None
        if not is_masked and not edit.is_op(node, "Dropout", "Mul", "Div", *_MOVES):
            return None
        value = moving[0]
    return None


def _is_answer(value: ir.Value) -> bool:
    return value.dtype is not None and not value.dtype.is_floating_point()


def _is_scores(output: ir.Value) -> bool:
    rank = None if output.shape is None else len([dim for dim in output.shape if dim != 1])
    value: ir.Value | None = output
    while value is not None and (node := value.producer()) is not None:
        if edit.is_op(node, "Softmax", "LogSoftmax", *_PRODUCTS):
            return True
        if edit.is_op(node, "Sigmoid", "HardSigmoid"):
            if rank is not None and rank > 2:
                return False
        elif not edit.is_op(node, *_MOVES, *_ON_SCORES):
            return False
        value = _only_variable(node)
    return False


def _only_variable(node: ir.Node) -> ir.Value | None:
    """The input of a node that is no constant; None where there are several."""
    inputs = [value for value in node.inputs if value is not None and edit.constant_tensor_of(value) is None]
    if edit.is_op(node, "Add", "Sub", "Mul", "Div"):
        return inputs[0] if len(inputs) == 1 else None
    return inputs[0] if inputs else None


def _selected(graph: ir.Graph) -> tuple[set[ir.Value], dict[ir.Value, None]]:
    """What is behind a selection, and the floats that are ranked or taken there. The class that an ArgMax names is not
    behind one, what it is used for is."""
    selected: set[ir.Value] = set()
    picked: dict[ir.Value, ir.Value] = {}
    ranked: dict[ir.Value, None] = {}
    for node in graph:
        inputs = [value for value in node.inputs if value is not None]
        picks = [picked[value] for value in inputs if value in picked]
        is_behind = any(value in selected for value in edit.values_read(node))
        if node.op_type in _SELECTIONS or (node.op_type.startswith("Gather") and (picks or is_behind)):
            ranked.update(dict.fromkeys(value for value in inputs if value not in selected))
        if is_behind or node.op_type in _SELECTIONS:
            selected.update(node.outputs)
        elif edit.is_op(node, *_PICKS) and inputs and _may_be_float(inputs[0]):
            picked.update(dict.fromkeys(node.outputs, inputs[0]))
        elif picks and edit.is_op(node, *_MOVES):
            picked.update(dict.fromkeys(node.outputs, picks[0]))
        elif picks:
            selected.update(node.outputs)
            ranked.update(dict.fromkeys(picks))
    return selected, {value: None for value in ranked if value.producer() is not None and _is_float(value)}


def _may_be_float(value: ir.Value) -> bool:
    return value.dtype is None or value.dtype.is_floating_point()


def _is_float(value: ir.Value) -> bool:
    return value.dtype is not None and value.dtype.is_floating_point()
