"""What the outputs of a network hold, as far as its graph tells: scores of classes, other values, or a selection."""

from __future__ import annotations

from collections.abc import Iterable
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
    selected = _selected(model.graph)
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
    NonMaxSuppression reads, what a TopK ranks, and what is gathered by an index that was selected.

    Example:
        >>> x, scores, best = (ir.val(name, ir.DataType.FLOAT) for name in ("x", "scores", "best"))
        >>> k, at = (ir.val(name, ir.DataType.INT64) for name in ("k", "at"))
        >>> nodes = [ir.node("Relu", [x], outputs=[scores]), ir.node("TopK", [scores, k], outputs=[best, at])]
        >>> graph = ir.Graph([x, k], [best, at], nodes=nodes, opset_imports={"": 20})
        >>> ranked_in(ir.Model(graph, ir_version=10))
        ('scores',)
    """
    first, *others = ({str(value.name) for node in model.graph for value in node.outputs} for model in models)
    selected, found = _selected(models[0].graph), dict[str, None]()
    for node in models[0].graph:
        values = [value for value in node.inputs if value is not None and value not in selected]
        gathers = node.op_type.startswith("Gather") and any(value in selected for value in node.inputs)
        if node.op_type in _SELECTIONS or gathers:
            floats = (value for value in values if value.dtype is not None and value.dtype.is_floating_point())
            found.update(dict.fromkeys(str(value.name) for value in floats))
    return tuple(name for name in found if name in first and all(name in names for names in others))


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


def _selected(graph: ir.Graph) -> set[ir.Value]:
    """What is behind a selection; the class that an ArgMax names is not, what it is used for is."""
    selected: set[ir.Value] = set()
    picked: set[ir.Value] = set()
    for node in graph:
        inputs = [value for value in node.inputs if value is not None]
        is_float = bool(inputs) and (inputs[0].dtype is None or inputs[0].dtype.is_floating_point())
        if any(value in selected for value in edit.values_read(node)) or node.op_type in _SELECTIONS:
            selected.update(node.outputs)
        elif edit.is_op(node, *_PICKS) and is_float:
            picked.update(node.outputs)
        elif any(value in picked for value in inputs):
            (picked if edit.is_op(node, *_MOVES) else selected).update(node.outputs)
    return selected
