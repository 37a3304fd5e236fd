"""FP32 regions grow to the borders of fused patterns, and no further."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir

from trtopt.graph.shapes import infer_shapes
from trtopt.precision.fp16.borders import grown
from trtopt.precision.plan import FP16, PrecisionPlan
from trtopt.support.precision import Precision

GROUPS = """(float[2,64,8,8] x) => (float[2,64,8,8] y) { c = Conv <pads = [1,1,1,1]> (x, w) r = Reshape(c, three)
    i = InstanceNormalization(r, one, zero) u = Reshape(i, four) m = Mul(u, g) a = Add(m, g) s = Sigmoid(a)
    k = Mul(a, s) d = Conv <pads = [1,1,1,1]> (k, w) y = Add(c, d) }"""
WEIGHTS = {
    **{"w": np.ones((64, 64, 3, 3), "f4"), "g": np.ones((64, 1, 1), "f4"), "one": np.ones(32, "f4")},
    **{"zero": np.zeros(32, "f4"), "three": np.array([2, 32, -1]), "four": np.array([2, 64, 8, 8])},
}


def network(text: str, **weights: np.ndarray) -> ir.Model:
    proto = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]>\ng {text}')
    proto.graph.initializer.extend(onnx.numpy_helper.from_array(a, name) for name, a in weights.items())
    for node in proto.graph.node:
        node.name = node.output[0]
    return infer_shapes(ir.from_proto(proto))


def regions(base: ir.Model, *wide: str, put_back: tuple[str, ...] = ()) -> list[set[str]]:
    plan = PrecisionPlan(Precision.FP16, FP16, dict.fromkeys(wide, "because"))
    return [set(form.wide) for form in grown(base, plan, put_back)]


def test_a_group_normalization_grows_to_its_reshapes_and_to_its_silu() -> None:
    base = network(GROUPS, **WEIGHTS)
    assert regions(base, "i") == [{"r", "i", "u"}, {"r", "i", "u", "m", "a", "s", "k"}]
    assert regions(base, "i", "r", "u", "m", "a", "s", "k") == []


def test_normalizations_give_their_surroundings_one_reason_and_not_one_each() -> None:
    again = "t = Reshape(d, three) j = InstanceNormalization(t, one, zero) v = Reshape(j, four) y = Add(c, v)"
    base = network(GROUPS.replace("y = Add(c, d)", again), **WEIGHTS)
    first, *_ = grown(base, PrecisionPlan(Precision.FP16, FP16, dict.fromkeys(("i", "j"), "because")))
    assert {"r", "u", "t", "v"} <= first.wide.keys()
    (reason,) = {why for name, why in first.wide.items() if name not in ("i", "j")}
    assert "InstanceNormalization" in reason


def test_other_nodes_grow_only_where_they_were_put_back() -> None:
    base = network("(float[4,8] x) => (float[4,8] y) { a = Exp(x) b = Tanh(a) c = Add(b, x) y = Relu(c) }")
    assert regions(base, "a") == []
    assert regions(base, "a", put_back=("a",)) == [{"a", "b"}]


def test_a_reshape_that_others_read_too_stays_where_it_is() -> None:
    text = GROUPS.replace("y = Add(c, d)", "f = Reshape(r, four) y = Add(f, d)")
    assert regions(network(text, **WEIGHTS), "i")[0] == {"i", "u"}


def test_normalizations_of_one_kind_go_together() -> None:
    text = "a = LayerNormalization(x, s) b = Exp(a) c = LayerNormalization(b, s) e = Tanh(c) y = LpNormalization(e)"
    base = network(f"(float[4,8] x) => (float[4,8] y) {{ {text} }}", s=np.ones(8, "f4"))
    assert regions(base, "a") == [{"a", "c"}]
    assert regions(base, "b") == regions(base, "a", "c") == []


def test_a_plan_without_16_bit_types_has_no_regions() -> None:
    assert grown(network(GROUPS, **WEIGHTS), PrecisionPlan(Precision.FP32)) == ()
