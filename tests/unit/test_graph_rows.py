"""Rows of a batch: a network whose rows are alone is known, and one that mixes them is never taken for one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper

from trtopt.graph.rows import are_alone
from trtopt.graph.shapes import infer_shapes

ROWS = 4
CONSTANTS = {
    "w": np.random.default_rng(0).normal(size=(6, 6)).astype(np.float32),
    "mask": np.zeros((1, 1, 1, 5), np.float32),
    "heads": np.array([ROWS, 5, 2, 3], np.int64),
    "merged": np.array([-1, 6], np.int64),
    "back": np.array([ROWS, 5, 6], np.int64),
    "flat": np.array([6, -1], np.int64),
    "one": np.array([1], np.int64),
    "zero": np.array([0], np.int64),
    "end": np.array([9], np.int64),
    "every": np.ones((ROWS, 5, 6), np.float32),
    "pads_time": np.array([0, 1, 0, 0, 1, 0], np.int64),
    "pads_rows": np.array([1, 0, 0, -1, 0, 0], np.int64),
    "repeats": np.array([2, 1, 1], np.int64),
    "scales": np.array([1, 1.5, 1], np.float32),
    "row_scales": np.array([1.1, 1, 1], np.float32),
    "reversed": np.array([-1], np.int64),
    "far": np.array([-99], np.int64),
    "kernel": np.ones((5, 5, 3), np.float32),
    "wi": np.full((1, 2, 6), 0.1, np.float32),
    "wh": np.full((1, 2, 2), 0.1, np.float32),
    "own": np.arange(5 * ROWS).reshape(ROWS, 5)[:, ::-1].copy(),
    "others": np.arange(5 * ROWS).reshape(ROWS, 5)[::-1].copy(),
    "table": np.ones((9, 6), np.float32),
    "square": np.arange(ROWS * ROWS, dtype=np.int8).reshape(ROWS, ROWS),
    "both": np.array([1, 2], np.int64),
}

Step = tuple[str, Sequence[str], str, dict[str, object]]


def model(*steps: Step, opset: int = 18) -> onnx.ModelProto:
    """``x`` [4, 5, 6] and ``y`` through ``steps``; the last one's output is that of the network."""
    nodes = [
        helper.make_node(kind, taken, [made, "s", "z"] if kind == "DynamicQuantizeLinear" else [made], **attributes)
        for kind, taken, made, attributes in steps
    ]
    used = {name for _, taken, _, _ in steps for name in taken}
    graph = helper.make_graph(
        nodes,
        "rows",
        [helper.make_tensor_value_info(name, 1, (ROWS, 5, 6)) for name in ("x", "y")],
        [helper.make_tensor_value_info(steps[-1][2], 1, None)],
        [onnx.numpy_helper.from_array(array, name) for name, array in CONSTANTS.items() if name in used],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def step(kind: str, taken: str, made: str = "out", **attributes: object) -> Step:
    return kind, taken.split(","), made, attributes


ATTENTION = [
    step("Reshape", "x,merged", "rows"), step("MatMul", "rows,w", "wide"), step("Reshape", "wide,heads", "split"),
    step("Transpose", "split", "q", perm=[0, 2, 1, 3]), step("Transpose", "split", "k", perm=[0, 2, 3, 1]),
    step("MatMul", "q,k", "scores"), step("Add", "scores,mask", "masked"), step("Softmax", "masked", "shares"),
    step("MatMul", "shares,q", "read"), step("Transpose", "read", "turned", perm=[0, 2, 1, 3]),
    step("Reshape", "turned,back"),
]  # fmt: skip

ALONE: dict[str, list[Step]] = {
    "attention": ATTENTION,
    "mean of a row": [step("ReduceMean", "x,one", keepdims=0)],
    "best of a row": [step("ArgMax", "x", "ids", axis=2, keepdims=0), step("Cast", "ids", to=1)],
    "a constant for each row": [step("Add", "x,every")],
    "both inputs": [step("Sub", "x,y")],
    "convolution": [step("Conv", "x,kernel")],
    "padded in time": [step("Pad", "x,pads_time")],
    "sliced in time": [step("Slice", "x,zero,one,one")],
    "resized in time": [step("Resize", "x,,scales", mode="linear")],
    "there and back": [step("Transpose", "x", "t", perm=[2, 1, 0]), step("Relu", "t", "r"), step("Transpose", "r")],
    "joined in time": [step("Concat", "x,y", axis=1)],
    "old softmax behind the rows": [step("Softmax", "x", axis=1)],
    "einsum": [step("Einsum", "x,w", equation="btc,cd->btd")],
    "token looked up": [step("ArgMax", "x", "ids", axis=2, keepdims=0), step("Gather", "table,ids")],
    "picked by place": [step("Reshape", "x,merged", "rows"), step("Gather", "rows,own", "p"), step("Relu", "p")],
    "recurrent": [step("Transpose", "x", "t", perm=[1, 0, 2]), step("RNN", "t,wi,wh", "h", hidden_size=2),
                  step("Transpose", "h", perm=[2, 0, 1, 3])],
    "sliced whole": [step("Slice", "x,zero,end,zero,one")],
    "softmax of merged rows": [step("Reshape", "x,merged", "rows"),
        step("Softmax", "rows", "s"), step("Reshape", "s,back")],
}  # fmt: skip

MIXED: dict[str, list[Step]] = {
    "mean of the batch": [step("ReduceMean", "x,zero", "m", keepdims=1), step("Sub", "x,m")],
    "mean of all": [step("ReduceMean", "x", "m", keepdims=1), step("Sub", "x,m")],
    "softmax over rows": [step("Softmax", "x", axis=0)],
    "rows merged otherwise": [
        step("Transpose", "x", "t", perm=[1, 0, 2]), step("Reshape", "t,merged", "m"), step("Reshape", "m,back")
    ],
    "columns of rows": [step("Reshape", "x,flat")],
    "joined rows": [step("Concat", "x,y", axis=0)],
    "shifted rows": [step("Pad", "x,pads_rows")],
    "reversed rows": [step("Slice", "x,reversed,far,zero,reversed")],
    "repeated rows": [step("Tile", "x,repeats")],
    "resized rows": [step("Resize", "x,,row_scales", mode="linear")],
    "sum over rows by product": [
        step("Transpose", "x", "t", perm=[1, 2, 0]), step("Transpose", "y", "u", perm=[1, 0, 2]), step("MatMul", "t,u")
    ],
    "sum over rows by einsum": [step("Einsum", "x,y", equation="btc,btd->tcd")],
    "picked elsewhere": [step("Reshape", "x,merged", "rows"), step("Gather", "rows,others", "p"), step("Relu", "p")],
    "recurrent over rows": [step("RNN", "x,wi,wh", "h", hidden_size=2), step("Relu", "h")],
    "first row": [step("Gather", "x,zero", axis=0)],
    "cumulative over rows": [step("CumSum", "x,zero")],
    "old softmax": [step("Softmax", "x", axis=0)],
    "output without rows": [step("Relu", "every")],
    "unknown operator": [step("DynamicQuantizeLinear", "x", "q"), step("Cast", "q", to=1)],
    "scales of another axis": [
        step("ReduceMean", "x,both", "m", keepdims=0), step("DequantizeLinear", "square,m", "d", axis=0),
        step("Transpose", "d")
    ],
    "crossed rows": [step("Einsum", "x,y", equation="btc,dtc->btd")],
}  # fmt: skip


def loaded(proto: onnx.ModelProto) -> ir.Model:
    return infer_shapes(ir.serde.deserialize_model(proto))


@pytest.mark.parametrize("name", ALONE)
def test_rows_that_are_alone_are_known_and_are(name: str) -> None:
    proto = model(*ALONE[name], opset=11 if "old" in name else 18)
    assert are_alone(loaded(proto), ROWS)
    run = pytest.importorskip("onnx.reference").ReferenceEvaluator(proto).run
    rng = np.random.default_rng(1)
    one, two = ({key: rng.normal(size=(ROWS, 5, 6)).astype(np.float32) for key in "xy"} for _ in range(2))
    for key in "xy":
        two[key][:2] = one[key][:2]
    first, second = run(None, one)[0], run(None, two)[0]
    assert first.shape[0] == ROWS
    np.testing.assert_array_equal(first[:2], second[:2])


@pytest.mark.parametrize("name", MIXED)
def test_mixed_rows_are_not_taken_for_alone(name: str) -> None:
    assert not are_alone(loaded(model(*MIXED[name], opset=11 if "old" in name else 18)), ROWS)
