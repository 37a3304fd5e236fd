"""Graphs that are deep rather than wide."""

from __future__ import annotations

from pathlib import Path

import pytest
from onnx import TensorProto, helper

import trtopt

pytest.importorskip("tensorrt_rtx")


@pytest.mark.long
def test_a_chain_too_deep_for_the_usual_stack_is_built(tmp_path: Path) -> None:
    length = 3500
    kinds = ("Relu", "Sigmoid", "Tanh", "Neg")
    nodes = [helper.make_node(kinds[i % 4], [f"t{i}"], [f"t{i + 1}"], f"n{i}") for i in range(length)]
    graph = helper.make_graph(
        nodes,
        "chain",
        [helper.make_tensor_value_info("t0", TensorProto.FLOAT, [1, 64])],
        [helper.make_tensor_value_info(f"t{length}", TensorProto.FLOAT, [1, 64])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)

    report = trtopt.build(model, precision="fp32", recipes="none", output=tmp_path / "chain.rtx.engine")

    assert report.engine is not None
    assert report.engine.bytes == (tmp_path / "chain.rtx.engine").stat().st_size
