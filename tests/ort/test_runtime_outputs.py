"""What a session gives for values inside a quantized graph."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir

from trtopt.support.ort_session import OrtSession

CODE = """
<ir_version: 8, opset_import: ["" : 17]>
net (float[2, 3, 4] x) => (float[2, 3, 4] a, float[2, 4, 3] y)
<float scale = {0.5}, int8 zero = {0}>
{
    a = Relu (x)
    t = Transpose <perm = [0, 2, 1]> (a)
    q = QuantizeLinear (t, scale, zero)
    y = DequantizeLinear (q, scale, zero)
}
"""


def test_an_output_in_front_of_a_quantizer_is_not_quantized() -> None:
    x = np.random.default_rng(0).standard_normal((2, 3, 4)).astype(np.float32)
    model = ir.from_proto(onnx.parser.parse_model(CODE))
    for names in (None, ["a", "t", "y"]):
        with OrtSession(model, names, keep_qdq=True) as session:
            found = dict(zip(session.output_names, session.run({"x": x}), strict=True))
        np.testing.assert_array_equal(found["a"], np.maximum(x, 0))
        np.testing.assert_array_equal(found["y"], np.rint(np.maximum(x, 0).transpose(0, 2, 1) * 2) / 2)
