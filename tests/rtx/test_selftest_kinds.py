"""The networks of the self-test build, and ONNX Runtime runs them: only the runs need a GPU."""

from __future__ import annotations

from pathlib import Path

import onnx
import onnx_ir as ir
import pytest

from trtopt.engine.backend import TENSORRT_RTX
from trtopt.engine.build import build_engine
from trtopt.engine.request import BuildRequest
from trtopt.hardware.spec import find_gpu
from trtopt.serve.selftest import engine_kinds
from trtopt.support.ort_session import OrtSession

pytest.importorskip("tensorrt_rtx", reason="needs TensorRT for RTX")


@pytest.mark.parametrize("name", [name for name, kind in engine_kinds().items() if TENSORRT_RTX in kind.backends])
def test_a_kind_is_built_and_computed(name: str, tmp_path: Path) -> None:
    kind = engine_kinds()[name]
    onnx.save(kind.model, tmp_path / "m.onnx")
    nodes = tuple(node.name for node in kind.model.graph.node)
    asked = BuildRequest(tmp_path / "m.onnx", TENSORRT_RTX, find_gpu("L4"), nodes, kind.profiles, formats=kind.formats)
    assert build_engine(asked).data[:4] == b"vtrt"
    with OrtSession(ir.serde.deserialize_model(kind.model)) as session:
        assert all(len(session.run(feeds)) == len(kind.model.graph.output) for feeds in kind.calls)
