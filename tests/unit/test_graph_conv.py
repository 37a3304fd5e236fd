"""Weights of convolutions, and where branches meet."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from trtopt.graph.conv import per_channel, scale_inputs, scale_outputs, survives_half, why_not_fit, window_of
from trtopt.graph.edit import LIMIT, nodes_until


def node(op_type: str, **attributes: int | list[int] | str) -> ir.Node:
    return ir.node(op_type, [ir.Value(name="x")], attributes=attributes)


@pytest.mark.parametrize(
    ("constant", "expected"),
    [
        (np.float32(2), [2, 2, 2]),
        (np.ones((3, 1, 1)), [1, 1, 1]),
        (np.ones((1, 3, 1, 1)), [1, 1, 1]),
        (np.ones(3), None),
        (np.ones((2, 1, 1, 1)), None),
        (np.ones((1, 1, 1, 1, 1)), None),
        (np.ones((2, 1, 1)), None),
    ],
)
def test_constants_per_channel(constant: np.ndarray, expected: list[float] | None) -> None:
    found = per_channel(np.asarray(constant), 3, 4)
    assert found is None if expected is None else found is not None and found.tolist() == expected


def test_factors_meet_the_channels_of_their_group() -> None:
    factors = np.arange(1.0, 5.0)
    conv, transposed = node("Conv", group=2), node("ConvTranspose", group=2)
    assert scale_outputs(conv, np.ones((4, 1, 1)), factors)[:, 0, 0].tolist() == [1, 2, 3, 4]
    assert scale_inputs(conv, np.ones((2, 2, 1)), factors)[:, :, 0].tolist() == [[1, 2], [3, 4]]
    assert scale_outputs(transposed, np.ones((2, 2, 1)), factors)[:, :, 0].tolist() == [[1, 2], [3, 4]]
    assert scale_inputs(transposed, np.ones((4, 1, 1)), factors)[:, 0, 0].tolist() == [1, 2, 3, 4]


def test_what_fits_half_precision() -> None:
    assert survives_half(np.zeros(3)) and survives_half(np.array([1.0, 1e-9])) and survives_half(np.array([6e4]))
    assert not survives_half(np.array([7e4])) and not survives_half(np.array([1e-9, 1e-9]))
    single = np.dtype(np.float32)
    assert "float32" in why_not_fit(np.array([1e39]), single)
    assert "float16" in why_not_fit(np.array([7e4]), single, np.ones(1))
    assert not why_not_fit(np.array([7e4]), single, np.array([8e4]))


def test_windows() -> None:
    window = window_of(node("MaxPool", kernel_shape=[3, 2], pads=[1, 0, 2, 1]))
    assert window is not None and window.begins == (1, 0) and window.ends == (2, 1) and window.strides == (1, 1)
    assert not window.is_pointwise
    assert window_of(node("MaxPool", kernel_shape=[3, 3], auto_pad="SAME_UPPER")) is None
    valid = window_of(node("AveragePool", kernel_shape=[1, 1], auto_pad="VALID"))
    assert valid is not None and valid.is_pointwise


def chain(start: ir.Value, length: int) -> list[ir.Node]:
    nodes = []
    for _ in range(length):
        nodes.append(ir.node("Relu", [start]))
        start = nodes[-1].outputs[0]
    return nodes


def test_paths_end_where_branches_meet() -> None:
    x = ir.Value(name="x")
    first, second, aside = chain(x, 3), chain(x, 1), chain(x, 2)
    join = ir.node("Concat", [first[-1].outputs[0], second[-1].outputs[0]])
    chain(join.outputs[0], 1)
    found = nodes_until([x], lambda each: each is join)
    assert set(found) == {*first, *second, join} and not set(found) & set(aside)
    assert nodes_until([x], lambda each: False) == ()
    long = chain(x, LIMIT + 1)
    assert nodes_until([x], lambda each: each is long[-1]) == ()
