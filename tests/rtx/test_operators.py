"""The table of operator costs against what the parser of TensorRT for RTX accepts."""

from __future__ import annotations

import onnx.defs
import onnx_ir as ir
import pytest

from trtopt.graph.cost import has_cost

trt = pytest.importorskip("tensorrt_rtx", reason="needs TensorRT for RTX")


def test_every_operator_the_parser_accepts_has_a_cost() -> None:
    builder = trt.Builder(trt.Logger(trt.Logger.ERROR))
    parser = trt.OnnxParser(builder.create_network(0), trt.Logger(trt.Logger.ERROR))
    names = {schema.name for schema in onnx.defs.get_all_schemas() if schema.domain == ""}
    accepted = {name for name in names if parser.supports_operator(name)}
    assert len(accepted) > 100
    assert {name for name in accepted if not has_cost(ir.node(name, []))} == set()
