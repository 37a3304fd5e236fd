"""Whom a compiler's message blames."""

from __future__ import annotations

from typing import Any

import pytest

from trtopt.errors import EngineBuildError
from trtopt.pipeline.lower import blamed
from trtopt.pipeline.product import Lowered
from trtopt.report.schema.build import PrecisionRecord

ARTIFACT: Any = None
LOWERED = Lowered(
    ARTIFACT, None, PrecisionRecord("int8"), quantized={"conv/1": "input", "fc.2": "12", "c3": "relu_out"}
)


@pytest.mark.parametrize(
    ("what", "where", "names"),
    [
        ("The builder failed: no kernel for node fc.2", "m.onnx", ["fc.2"]),
        ("The parser refuses the operator MatMul", "node 4, 'fc.2' (MatMul)", ["fc.2"]),
        ("The builder failed: Mismatched type for tensor relu_out, f8", "m.onnx", ["c3"]),
        ("The builder failed: no kernel for xrelu_out, relu_out_2 and a/relu_out", "m.onnx", []),
        ("The builder failed: 12 tactics of 12 bytes", "m.onnx", []),
        ("The builder failed: it gave no reason", "/tmp/input/m.onnx", []),
    ],
)
def test_nodes_and_tensors_that_are_named_are_blamed(what: str, where: str, names: list[str]) -> None:
    error = EngineBuildError(what, where=where, remedy="make the input that decides it a constant")
    assert list(blamed(LOWERED, error)) == names
