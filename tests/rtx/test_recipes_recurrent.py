"""The recipes of recurrent layers against the kernels of the real TensorRT for RTX builder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper
from rtx_nets import constant, model

import trtopt
from trtopt.engine.work import trip_counts
from trtopt.report.schema.build import BuildReport
from trtopt.report.schema.layers import LayerInfo

pytest.importorskip("tensorrt_rtx")

BATCH = 4
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}


def net(op: str, steps: int, direction: str = "forward", layers: int = 1, units: int = 64) -> onnx.ModelProto:
    """x [steps, 4, units] -> layers of so many units; a GRU applies its reset gate after the product, as in PyTorch."""
    rng = np.random.default_rng(0)
    count = 2 if direction == "bidirectional" else 1
    nodes, constants, value, size = [], [constant("axes", np.array([1]))], "x", units
    for index in range(layers):
        rows = GATES[op] * units
        shapes = {"w": (count, rows, size), "r": (count, rows, units), "b": (count, 2 * rows)}
        constants += [
            constant(f"{name}{index}", (rng.standard_normal(shape) / 8).astype(np.float32))
            for name, shape in shapes.items()
        ]
        inputs, last = [value, *(f"{name}{index}" for name in shapes)], index == layers - 1
        attributes: dict[str, Any] = {"linear_before_reset": 1} if op == "GRU" else {}
        nodes.append(
            helper.make_node(
                op,
                inputs,
                [f"y{index}"],
                name=f"layer{index}",
                hidden_size=units,
                direction=direction,
                **attributes,
            )
        )
        if not last:
            nodes.append(helper.make_node("Squeeze", [f"y{index}", "axes"], [f"s{index}"], name=f"squeeze{index}"))
        value, size = f"s{index}", units
    nodes.append(helper.make_node("Neg", [f"y{layers - 1}"], ["y"], name="neg"))
    return model(nodes, [("x", np.float32, [steps, BATCH, units])], [("y", np.float32)], constants)


def turned_net() -> onnx.ModelProto:
    """x [2, 1, 2] -> RNN, Squeeze and a Transpose of its axis of size one, read by a sum and by a product."""
    rng = np.random.default_rng(0)
    shapes = {"w": (1, 2, 2), "r": (1, 2, 2), "p": (2, 12)}
    nodes = [
        helper.make_node("RNN", ["x", "w", "r"], ["h"], name="layer", hidden_size=2),
        helper.make_node("Squeeze", ["h", "axes"], ["s"], name="squeeze"),
        helper.make_node("Transpose", ["s"], ["t"], name="turn", perm=[1, 0, 2]),
        helper.make_node("Add", ["t", "residual"], ["sum"], name="add"),
        helper.make_node("MatMul", ["t", "p"], ["product"], name="head"),
    ]
    inputs = [("x", np.float32, [2, 1, 2]), ("residual", np.float32, [1, 2, 2])]
    constants = [constant(name, rng.standard_normal(shape).astype(np.float32)) for name, shape in shapes.items()]
    outputs = [("sum", np.float32), ("product", np.float32)]
    return model(nodes, inputs, outputs, [constant("axes", np.array([1])), *constants])


def test_a_clean_recipe_that_makes_the_network_slower_is_taken_back(tmp_path: Path) -> None:
    """The compiler fuses Squeeze and Transpose with the sum, and the Reshape that stands for both with nothing."""
    report = trtopt.build(
        turned_net(),
        precision="fp16",
        recipes="reshape-chain,dead-node",
        output=tmp_path / "m.engine",
        backend="tensorrt-rtx",
        gpu="L4",
    )
    before, after = report.rewriting.before, report.rewriting.after
    assert before is not None and after is not None
    assert (after.kernels, after.predicted_us) == (before.kernels, before.predicted_us)
    (step,) = [step for step in report.steps if step.name == "reshape-chain"]
    assert step.changes == 0 and step.refusals[0].reason.startswith("the whole network is slower with it: ")


def built(proto: onnx.ModelProto, recipes: str, folder: Path) -> BuildReport:
    shape = [dim.dim_value for dim in proto.graph.input[0].type.tensor_type.shape.dim]
    x = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    return trtopt.build(
        proto,
        precision="fp16",
        calib={"x": x},
        recipes=recipes,
        output=folder / f"{recipes}.engine",
        backend="tensorrt-rtx",
        gpu="L4",
    )


def launched(report: BuildReport) -> int:
    """Kernels of one inference, those of a loop as often as it runs."""
    assert report.engine is not None
    layers: Sequence[LayerInfo] = report.engine.layers
    trips = trip_counts(layers)
    assert None not in trips
    return sum(count or 0 for layer, count in zip(layers, trips, strict=True) if layer.is_kernel)


def changes(report: BuildReport, recipe: str) -> int:
    return sum(step.changes for step in report.steps if step.name == recipe)


@pytest.mark.parametrize(
    ("op", "direction", "most"),
    [
        pytest.param("LSTM", "forward", 33, marks=pytest.mark.long),
        ("LSTM", "bidirectional", 33),
        pytest.param("GRU", "bidirectional", 33, marks=pytest.mark.long),
        ("RNN", "forward", 19),
    ],
)
def test_written_out_steps_launch_fewer_kernels(op: str, direction: str, most: int, tmp_path: Path) -> None:
    """Two kernels a step, one of an RNN, and the first step without a product."""
    plain = built(net(op, 16, direction), "none", tmp_path)
    ours = built(net(op, 16, direction), "static-recurrence", tmp_path)
    assert changes(ours, "static-recurrence") == 1
    assert launched(ours) <= most < launched(plain)
    assert ours.accuracy is not None and min(item.sqnr_db for item in ours.accuracy.outputs.values()) > 40


@pytest.mark.long
def test_two_layers_share_the_kernels_of_their_steps(tmp_path: Path) -> None:
    plain, ours = (built(net("LSTM", 24, layers=2), each, tmp_path) for each in ("none", "stacked-recurrence"))
    assert changes(ours, "stacked-recurrence") == 1
    # 24 steps of the first layer and eight more, two kernels each, against 2 x 24.
    assert launched(ours) <= 2 * 32 + 3 * 4 < 0.75 * launched(plain)


@pytest.mark.long
def test_a_backward_layer_multiplies_its_input_once(tmp_path: Path) -> None:
    plain, ours = (
        built(net("LSTM", 72, "bidirectional", units=512), each, tmp_path) for each in ("none", "backward-recurrence")
    )
    assert changes(ours, "backward-recurrence") == 1
    assert products(plain) == 4 * 72
    assert products(ours) <= 2 * 72 + 2


def products(report: BuildReport) -> int:
    """Matrix products of one inference; batched ones count as many as are in them."""
    assert report.engine is not None
    layers = report.engine.layers
    trips = trip_counts(layers)
    found = 0
    for layer, count in zip(layers, trips, strict=True):
        if layer.kind == "gemm":
            out = layer.outputs[0].shape
            found += (count or 0) * (out[0] if len(out) == 3 else 1)
    return found
