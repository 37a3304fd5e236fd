"""GELU spelled out in an error function or a hyperbolic tangent."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from trtopt.graph.edit import NARROW_FLOATS, Splice, all_nodes, constant_of, is_op, remove_node
from trtopt.rewrite.protocol import Findings, Match, Refusal, Stage, Target

Powers = tuple[int, int]
Polynomial = Mapping[Powers, float]
"""Coefficients by the powers of x and of t, the value of the Erf or Tanh."""

_SLOPE = math.sqrt(2 / math.pi)
_INSIDE: Mapping[str, Polynomial] = {
    "Erf": {(1, 0): math.sqrt(0.5)},
    "Tanh": {(1, 0): _SLOPE, (3, 0): 0.044715 * _SLOPE},
}
_WHOLE: Polynomial = {(1, 0): 0.5, (1, 1): 0.5}
_ARITHMETIC = ("Add", "Sub", "Mul", "Div", "Pow")
_DEEPEST, _DEGREE = 8, 4


@dataclass(frozen=True)
class DecomposedGelu:
    """Puts a GELU that an exporter spelled out back into one operator.

    Rewrite:
        0.5 x (1 + erf(x / sqrt(2))) = Gelu(x); 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) = Gelu(x), by tanh.
        Sums, products and powers are multiplied out first, so that their order and grouping do not matter.
    Requires:
        A float type of 16 or 32 bits, opset 20; constants of one element, right to the precision of the type.
    Why faster:
        TensorRT for RTX runs the operator as part of the convolution before it, and what is spelled out in a kernel of
        its own (Whisper's encoder of two layers, FP16, exported by TorchScript: 19 -> 18 kernels). Its inner values
        are not rounded to 16 bits, and ``constant-affine`` leaves the factor 0.5 where it is.
    Numerics:
        The same function; the products are in another order.
    Refuses when:
        An inner value is used elsewhere or is a graph output.
    """

    name: str = "decomposed-gelu"
    stage: Stage = Stage.FOLD
    lossless: bool = True

    def find(self, model: ir.Model, target: Target) -> Findings:
        """Error functions and tangents with what stands around them."""
        if model.graph.opset_imports.get("", 0) < 20:
            return Findings((), ())
        places = []
        for node in all_nodes(model.graph):
            form = _form(node)
            if form is not None:
                inner = [item.outputs[0] for item in form[1][1:]]
                closed = all(
                    not value.is_graph_output() and all(user in form[1] for user, _ in value.uses()) for value in inner
                )
                places.append((Match(form[1]), "" if closed else "one of its inner values is used elsewhere"))
        return Findings.of(places)

    def rewrite(self, model: ir.Model, match: Match) -> Refusal | None:
        """Replace one GELU."""
        root = next(node for node in match.nodes if node.op_type in _INSIDE)
        form = _form(root)
        if form is None:
            return Refusal(match.label, "it was changed by a rewrite before")
        x, (last, *unused) = form
        splice = Splice(model, last, self.name)
        kind = "tanh" if root.op_type == "Tanh" else "none"
        splice.finish(splice.op("Gelu", x, attributes={"approximate": kind}))
        while unused:
            ready = [node for node in unused if not node.outputs[0].uses()]
            for node in ready:
                remove_node(node)
            unused = [node for node in unused if node not in ready]
        return None


def _form(root: ir.Node) -> tuple[ir.Value, tuple[ir.Node, ...]] | None:
    """What a GELU around ``root`` is of, and its nodes, the last one first."""
    inside = _INSIDE.get(root.op_type) if root.domain == "" else None
    if inside is None or (argument := root.inputs[0]) is None or root.outputs[0].dtype not in NARROW_FLOATS:
        return None
    value = root.outputs[0]
    x = next((each for each in _operands(argument) if _is(_multiplied(each, None, argument), inside, value)), None)
    if x is None:
        return None
    for _ in range(_DEEPEST):
        readers = {user for user, _ in value.uses()}
        if len(readers) != 1 or not is_op(last := readers.pop(), *_ARITHMETIC) or last.graph is not root.graph:
            return None
        value = last.outputs[0]
        if _is(_multiplied(x, root.outputs[0], value), _WHOLE, value):
            nodes = (*_between(value, (x, root.outputs[0])), root, *_between(argument, (x,)))
            return x, tuple(dict.fromkeys(nodes))
    return None


def _operands(value: ir.Value) -> Iterator[ir.Value]:
    """Values that arithmetic makes ``value`` of, the nearest first."""
    front, seen = [value], {value}
    for _ in range(_DEEPEST):
        makers = [maker for each in front if is_op(maker := each.producer(), *_ARITHMETIC) and maker is not None]
        front = [each for maker in makers for each in maker.inputs if each is not None and each not in seen]
        seen.update(front)
        yield from (each for each in front if constant_of(each) is None)


def _between(value: ir.Value, ends: tuple[ir.Value, ...]) -> Iterator[ir.Node]:
    """The nodes that make ``value`` of ``ends`` and constants, the last first."""
    node = value.producer()
    if value in ends or node is None or constant_of(value) is not None:
        return
    yield node
    for operand in node.inputs:
        if operand is not None:
            yield from _between(operand, ends)


def _is(found: Polynomial | None, wanted: Polynomial, like: ir.Value) -> bool:
    """Whether a polynomial is another one but for the rounding of its constants."""
    error = {ir.DataType.FLOAT: 1e-6, ir.DataType.FLOAT16: 2e-3}.get(like.dtype or ir.DataType.FLOAT, 2e-2)
    if found is None or found.keys() != wanted.keys():
        return False
    return all(math.isclose(found[key], wanted[key], rel_tol=error) for key in wanted)


def _multiplied(x: ir.Value | None, t: ir.Value | None, value: ir.Value | None, depth: int = 0) -> Polynomial | None:
    """``value`` as a polynomial in ``x`` and ``t``; None where it is none, or one of more degrees than a GELU has."""
    if value is None or depth > _DEEPEST:
        return None
    if value is x or value is t:
        return {(1, 0) if value is x else (0, 1): 1.0}
    constant = constant_of(value)
    if constant is not None:
        is_number = constant.size == 1 and constant.ndim <= len(x.shape if x is not None and x.shape else ())
        return {(0, 0): float(np.asarray(constant, np.float64).item())} if is_number else None
    node = value.producer()
    if not is_op(node, *_ARITHMETIC):
        return None
    a, b = (_multiplied(x, t, operand, depth + 1) for operand in node.inputs)
    return None if a is None or b is None else _combined(node.op_type, a, b)


def _combined(operator: str, a: Polynomial, b: Polynomial) -> Polynomial | None:
    number = b.get((0, 0), 0.0) if b.keys() <= {(0, 0)} else None
    if operator in ("Add", "Sub"):
        sign = 1 if operator == "Add" else -1
        return {key: a.get(key, 0.0) + sign * b.get(key, 0.0) for key in {**a, **b}}
    if operator == "Mul":
        return _product(a, b)
    if not number:
        return None
    if operator == "Div":
        return {key: each / number for key, each in a.items()}
    if number not in range(1, _DEGREE):
        return None
    power: Polynomial | None = a
    for _ in range(int(number) - 1):
        power = None if power is None else _product(power, a)
    return power


def _product(a: Polynomial, b: Polynomial) -> Polynomial | None:
    found: dict[Powers, float] = {}
    for (i, j), left in a.items():
        for (k, m), right in b.items():
            found[i + k, j + m] = found.get((i + k, j + m), 0.0) + left * right
    return found if all(i + j <= _DEGREE for i, j in found) else None
