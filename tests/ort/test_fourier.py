"""DFT as a product computes what ONNX Runtime computes, and STFT keeps its default."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from test_attention_written import check, floats

from trtopt.graph.shapes import static_shapes
from trtopt.source.onnx_file import load


@pytest.mark.parametrize("opset", [17, 20])
@pytest.mark.parametrize(
    ("parts", "attributes"), [(1, ""), (2, ""), (1, "inverse = 1"), (2, "inverse = 1"), (1, "onesided = 1")]
)
@pytest.mark.parametrize(("axis", "length"), [(-2, None), (-2, 8), (-2, 16), (1, None)])
def test_dft(tmp_path: Path, opset: int, parts: int, attributes: str, axis: int, length: int | None) -> None:
    constants = f"int64 n = {{{length or 0}}}, int64 a = {{{axis}}}"
    inputs = ["x", "n" if length else ""] + (["a"] if opset == 20 else [])
    attributes = ", ".join(filter(None, (attributes, f"axis = {axis}" if opset == 17 else "")))
    text = f"""g (float[B, 5, 12, {parts}] x) => (float[B, M, K, 2] y) <{constants}>
        {{ y = DFT<{attributes}>({", ".join(inputs).rstrip(", ")}) }}""".replace("<>(", "(")
    assert "DFT" not in check(tmp_path, text, opset=opset, x=floats(2, 5, 12, parts))


def test_a_length_that_is_not_known_stays(tmp_path: Path) -> None:
    text = "g (float[B, T, 1] x) => (float[B, U, 2] y) { y = DFT(x) }"
    assert check(tmp_path, text, opset=20, x=floats(2, 6, 1)) == ["DFT"]


def test_stft_is_one_sided_where_nothing_is_said(tmp_path: Path) -> None:
    text = """<ir_version: 10, opset_import: ["" : 17]> g (float[B, N] x) => (float[a, b, c, d] y)
        <int64 step = {160}, int64 n = {320}> { y = STFT(x, step, , n) }"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "m.onnx")
    assert static_shapes(load(tmp_path / "m.onnx").model, {"x": (2, 1600)})["y"] == (2, 9, 161, 2)
    check(tmp_path, text[text.index("g (") :], opset=17, x=np.tile(floats(1600), (2, 1)))
