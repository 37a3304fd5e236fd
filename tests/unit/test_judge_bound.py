"""No price is below the arithmetic and the weights that every engine of a graph needs."""

from __future__ import annotations

import onnx
import onnx.parser
import onnx_ir as ir
import pytest

from trtopt.graph.shapes import infer_shapes, static_shapes
from trtopt.hardware.spec import find_gpu
from trtopt.judge.bound import at_least
from trtopt.report.schema.steps import Cost


def bounded(cost: Cost, data: str = "x") -> Cost:
    text = f"g (float[1024, 1024] x) => (float[1024, 1024] y) {{ m = MatMul({data}, w) y = Add(m, x) }}"
    proto = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]>\n{text}')
    tensor = onnx.helper.make_tensor("w", onnx.TensorProto.FLOAT, (1024, 1024), bytes(4 << 20), raw=True)
    proto.graph.initializer.append(tensor)
    model = infer_shapes(ir.from_proto(proto))
    for node in model.graph:
        node.name = str(node.outputs[0].name)
    return at_least(cost, model, static_shapes(model, {}), find_gpu("L4"))


def test_what_costs_nothing_costs_its_products() -> None:
    found = bounded(Cost(1, 0, 0, 0.0))
    assert found.bytes == 1024 * 1024 // 2 and found.predicted_us == pytest.approx(2 * 1024**3 / 242e6 / 2, rel=0.05)


def test_more_than_that_stays() -> None:
    assert bounded(Cost(1, 2, 10**9, 1e3)) == Cost(1, 2, 10**9, 1e3)


def test_a_product_of_constants_costs_nothing() -> None:
    assert bounded(Cost(0, 0, 0, 0.0), "w") == Cost(0, 0, 0, 0.0)
