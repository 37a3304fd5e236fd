"""What the real compiler lists of a layer gives the same products as the graph it compiled."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx.parser
import onnx_ir as ir
from rtx_nets import constant, request

from trtopt.engine.build import build_engine
from trtopt.engine.work import layers_of_engine
from trtopt.graph.shapes import infer_shapes, static_shapes
from trtopt.profiling.engine_layers import layer_work

WEIGHTS = {"v": (32, 16, 3, 3), "w": (64, 32, 1, 1), "d": (64, 1, 3, 3), "g": (64, 16, 5, 5), "t": (64, 16, 2, 2)}
NETWORK = """<ir_version: 9, opset_import: ["" : 17]> g (float16[2, 16, 32, 32] x) => (float16[2, 16, 8, 8] y) {
    a = Conv<pads = [1, 1, 1, 1], strides = [2, 2]>(x, v)  ra = Relu(a)
    b = Conv<strides = [2, 2]>(ra, w)  rb = Relu(b)
    c = Conv<pads = [1, 1, 1, 1], group = 64>(rb, d)  rc = Relu(c)
    e = Conv<group = 4>(rc, g)  re = Relu(e)
    f = ConvTranspose<strides = [2, 2]>(re, t)  y = Relu(f)
}"""


def test_products_from_shapes_are_those_of_the_graph(tmp_path: Path) -> None:
    proto = onnx.parser.parse_model(NETWORK)
    rng = np.random.default_rng(0)
    arrays = {name: rng.standard_normal(shape).astype(np.float16) for name, shape in WEIGHTS.items()}
    proto.graph.initializer.extend(constant(name, array) for name, array in arrays.items())
    for node in proto.graph.node:
        node.name = node.output[0]
    layers = build_engine(request(proto, tmp_path)).record.layers
    model = infer_shapes(ir.from_proto(proto))
    counted = layers_of_engine(layers, model, static_shapes(model, {})).layers
    of_graph = {layer.name: layer.work for layer in counted if layer.work is not None and layer.work.window}
    assert len(of_graph) == len(WEIGHTS)
    told = 0
    for layer in layers:
        found, expected = layer_work(layer, {}), of_graph.get(layer.name)
        if layer.kind == "fused":
            assert found is None, "what a fusion made at run time holds is not told"
        elif expected is not None:
            assert found is not None, layer.name
            assert (found.kind, found.gemm, found.window) == (expected.kind, expected.gemm, expected.window)
            assert (found.weight_bytes, found.write_bytes) == (expected.weight_bytes, expected.write_bytes)
            told += 1
    assert told >= 4
