"""A run of ONNX Runtime that does not end is stopped."""

from __future__ import annotations

import numpy as np
import onnx.parser
import onnx_ir as ir
import pytest

import trtopt.runtime
from trtopt.errors import ResourceError
from trtopt.runtime import OrtSession

LOOP = ir.serde.deserialize_model(
    onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17]>
        loops (float[1] x, int64 n) => (float[1] y) {
            go = Constant <value: tensor = bool {1}> ()
            y = Loop (n, go, x) <body: graph = body (int64 i, bool on, float[1] v) => (bool on_out, float[1] v_out) {
                on_out = Identity (on)
                v_out = Add (v, v)
            }>
        }"""
    )
)
X = np.ones(1, np.float32)


def test_a_loop_that_does_not_end_is_stopped_and_the_session_runs_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trtopt.runtime, "RUN_LIMIT_S", 0.3)
    with OrtSession(LOOP) as session:
        assert session.run({"x": X, "n": np.array(3)})[0] == 8
        with pytest.raises(ResourceError, match="did not end within"):
            session.run({"x": X, "n": np.array(2**60)})
        assert session.run({"x": X, "n": np.array(3)})[0] == 8


def test_a_failure_is_no_timeout() -> None:
    with OrtSession(LOOP) as session, pytest.raises(trtopt.runtime.InvalidModelError, match="fails on an input"):
        session.run({"x": np.ones(2, np.float32), "n": np.array(3)})
