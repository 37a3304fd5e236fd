"""A loop that cannot end is refused when the model is loaded; one that may end is not."""

from __future__ import annotations

from pathlib import Path

import onnx
import onnx.parser
import pytest

from trtopt.errors import InvalidModelError
from trtopt.source.onnx_file import load

ON, NEGATED, TRUE = "o = Identity(on)", "o = Not(on)", "o = Constant<value: tensor = bool {1}>()"


def saved(folder: Path, loop: str, keeps: str) -> Path:
    model = f"""<ir_version: 8, opset_import: ["": 17]>
        loops (float[1] x, int64 n) => (float[1] y)
        <bool yes = {{1}}, bool no = {{0}}, int64 ten = {{10}}, int64 most = {{9223372036854775807}}> {{
            y = Loop({loop}, x) <body: graph = body (int64 i, bool on, float[1] v) => (bool o, float[1] w) {{
                {keeps}
                w = Add(v, v)
            }}>
        }}"""
    onnx.save(onnx.parser.parse_model(model), folder / "loops.onnx")
    return folder / "loops.onnx"


@pytest.mark.parametrize("keeps", [ON, TRUE])
@pytest.mark.parametrize("loop", ["most, yes", ", yes", "most,", ","])
def test_a_loop_without_an_end_is_refused(tmp_path: Path, loop: str, keeps: str) -> None:
    with pytest.raises(InvalidModelError, match="The loop never ends") as caught:
        load(saved(tmp_path, loop, keeps))
    assert "node" in caught.value.where and "trip count" in caught.value.remedy


@pytest.mark.parametrize(
    ("loop", "keeps"), [("most, yes", NEGATED), ("most, no", ON), ("ten, yes", ON), ("n, yes", ON), ("n,", TRUE)]
)
def test_a_loop_that_may_end_is_taken(tmp_path: Path, loop: str, keeps: str) -> None:
    assert load(saved(tmp_path, loop, keeps)).model.graph.name == "loops"
