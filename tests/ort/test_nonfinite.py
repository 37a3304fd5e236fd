"""What is said of tensors that are not finite in FP32."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from onnx import helper, numpy_helper

from trtopt.events import Event
from trtopt.graph.artifact import input_spec
from trtopt.graph.shapes import infer_shapes
from trtopt.precision.observe.calibrate import collect
from trtopt.precision.observe.samples import open_samples


def model(end: str) -> ir.Model:
    """x -> Log -> Mul -> Cast to INT64 and back, or straight on -> y."""
    nodes = [helper.make_node("Log", ["x"], ["l"]), helper.make_node("Mul", ["l", "two"], ["m"])]
    if end == "Cast":
        nodes += [
            helper.make_node("Cast", ["m"], ["i"], to=7),
            helper.make_node("Less", ["i", "limit"], ["small"]),
            helper.make_node("Where", ["small", "x", "two"], ["y"]),
        ]
    else:
        nodes.append(helper.make_node("Neg", ["m"], ["y"]))
    graph = helper.make_graph(
        nodes,
        "log",
        [helper.make_tensor_value_info("x", 1, [4])],
        [helper.make_tensor_value_info("y", 1, [4])],
        [numpy_helper.from_array(np.array(2, np.float32), "two"), numpy_helper.from_array(np.array(9), "limit")],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    return infer_shapes(ir.from_proto(made))


@pytest.mark.parametrize(
    ("end", "said"), [("Cast", "they end in Cast"), ("Neg", "the model or the samples are at fault")]
)
def test_the_warning_says_where_it_comes_from_and_whether_it_matters(end: str, said: str) -> None:
    events: list[Event] = []
    network = model(end)
    samples = open_samples({"x": np.arange(4, dtype=np.float32)}, [input_spec(network.graph.inputs[0])])
    names = ["l", "m"] if end == "Cast" else ["l", "m", "y"]
    collect(network, samples, histogram=set(), ranges=set(names), on_event=events.append)
    texts = [event.text for event in events if event.kind == "warning"]
    assert len(texts) == 1 and "the first l (Log): 1 of 4 elements" in texts[0] and said in texts[0]
