"""Tables that embed tokens and score them: the product gets a weight of its own, which can be stored narrow; and a
weight with an odd number of columns is filled up.

Decoders tie both (GPT-2, Whisper, T5, BART): a Gather reads rows of the table, a MatMul its transpose. A step reads one
row of it and, for the scores, all of it, mostly more bytes than all other weights together.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import onnx_ir as ir

from trtopt.graph import edit
from trtopt.precision.weights.write import SMALLEST

_ALIGNED = 8
"""Columns are filled up to a multiple of this where they are odd: a compiler reads INT4 in pairs, and no vocabulary of
50257 words in the kernel of its product."""


def untied(model: ir.Model, only: Collection[str] | None = None) -> ir.Model:
    """A clone in which a MatMul with a transposed constant reads one of its own, and none has an odd number of columns.

    Args:
        model: A typed model; not changed.
        only: Names of the values that MatMul reads to do so for; None for all.
    """
    clone = model.clone()
    names = edit.Names(clone)
    for node in list(clone.graph):
        value = edit.input_of(node, 1)
        if not edit.is_op(node, "MatMul") or value is None or (only is not None and value.name not in only):
            continue
        weight = _odd(value) if value.is_initializer() else _transposed(value)
        if weight is not None and len(list(value.uses())) == 1:
            _untie(clone.graph, node, value, np.ascontiguousarray(weight), names)
    return clone


def _transposed(value: ir.Value) -> np.ndarray | None:
    """The constant of two axes that a value is the transpose of, transposed; None where it is none."""
    maker = value.producer()
    if not edit.is_op(maker, "Transpose") or value.is_graph_output():
        return None
    if edit.ints_attribute(maker, "perm") == (0, 1):
        return None
    source = edit.input_of(maker, 0)
    array = edit.constant_of(source) if source is not None and source.is_initializer() else None
    return array.T if array is not None and array.ndim == 2 and source is not None and _is_floating(source) else None


def _odd(value: ir.Value) -> np.ndarray | None:
    """A constant of two axes that is worth storing and has an odd number of columns; None where it is none."""
    array = edit.constant_of(value)
    fits = array is not None and array.ndim == 2 and array.shape[1] % 2 and array.size >= SMALLEST
    return array if fits and _is_floating(value) and not value.is_graph_output() else None


def _is_floating(value: ir.Value) -> bool:
    return value.dtype is not None and value.dtype.is_floating_point()


def _untie(graph: ir.Graph, node: ir.Node, value: ir.Value, weight: np.ndarray, names: edit.Names) -> None:
    maker, name, width = value.producer(), str(value.name), weight.shape[1]
    if maker is None:
        del graph.initializers[name]
    value.name = names.value(f"{name}_tied")
    fill = -width % _ALIGNED if width % 2 else 0
    node.replace_input_with(1, edit.add_initializer(graph, name, np.pad(weight, ((0, 0), (0, fill)))))
    table = maker.inputs[0] if maker is not None else None
    if maker is not None:
        edit.remove_node(maker)
    if table is not None and not table.uses() and table.name is not None and not table.is_graph_output():
        del graph.initializers[table.name]
    if fill:
        _cut(graph, node, width, fill, names)


def _cut(graph: ir.Graph, node: ir.Node, width: int, fill: int, names: edit.Names) -> None:
    """Take the columns of a product that are no filling."""
    wide = node.outputs[0]
    base = str(wide.name)
    numbers = {"start": 0, "stop": width, "axis": -1}
    operands = [
        edit.add_initializer(graph, names.value(f"{base}_{word}"), np.array([number], np.int64))
        for word, number in numbers.items()
    ]
    made = edit.new_node(
        "Slice", [None, *operands], name=names.node(f"{node.name}_cut"), output=names.value(f"{base}_cut"), like=wide
    )
    graph.insert_after(node, made)
    edit.replace_value(wide, made.outputs[0])
    made.replace_input_with(0, wide)
    if wide.shape is not None:
        wide.shape = ir.Shape([*wide.shape[:-1], width + fill])
