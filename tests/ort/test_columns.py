"""Columns put back into an image compute what ONNX Runtime's Col2Im computes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from test_attention_written import check, floats

from trtopt.source.onnx_file import load

# image, block, strides, dilations, pads: side by side; overlapping; with gaps; dilated; padded, and a row left over
FORMS = [
    ((4, 6), (2, 3), (2, 3), (1, 1), (0, 0, 0, 0)),
    ((5, 7), (3, 3), (1, 2), (1, 1), (0, 0, 0, 0)),
    ((7, 7), (2, 2), (3, 3), (1, 1), (0, 0, 0, 0)),
    ((7, 8), (2, 3), (1, 1), (2, 2), (0, 0, 0, 0)),
    ((6, 6), (3, 3), (2, 2), (1, 1), (1, 0, 1, 2)),
    ((4, 4), (2, 2), (2, 2), (2, 2), (1, 1, 1, 1)),
]


@pytest.mark.parametrize(("image", "block", "strides", "dilations", "pads"), FORMS)
def test_columns_are_put_where_onnx_runtime_puts_them(
    tmp_path: Path,
    image: tuple[int, ...],
    block: tuple[int, ...],
    strides: tuple[int, ...],
    dilations: tuple[int, ...],
    pads: tuple[int, ...],
) -> None:
    counts = [(image[i] + pads[i] + pads[i + 2] - dilations[i] * (block[i] - 1) - 1) // strides[i] + 1 for i in (0, 1)]
    rows, columns = 3 * block[0] * block[1], counts[0] * counts[1]
    text = f"""g (float[B, {rows}, {columns}] x) => (float[B, C, H, W] y)
        <int64[2] image = {{{image[0]}, {image[1]}}}, int64[2] block = {{{block[0]}, {block[1]}}}>
        {{ y = Col2Im<strides = {list(strides)}, dilations = {list(dilations)},
                      pads = {list(pads)}>(x, image, block) }}"""
    found = check(tmp_path, text, opset=18, x=floats(2, rows, columns))
    assert "Col2Im" not in found
    assert ("ConvTranspose" in found) == (image != (4, 6))


def test_a_computed_size_stays(tmp_path: Path) -> None:
    text = """g (float[B, 12, 4] x, int64[2] image) => (float[B, C, H, W] y) <int64[2] block = {2, 2}>
        { y = Col2Im<strides = [2, 2]>(x, image, block) }"""
    assert check(tmp_path, text, opset=18, x=floats(2, 12, 4), image=np.array([4, 4])) == ["Col2Im"]


def test_strides_of_zero_stay(tmp_path: Path) -> None:
    """A file may hold any numbers: what no image has is for others to refuse."""
    graph = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["" : 18]>
        g (float[2, 12, 4] x) => (float[2, 3, 4, 4] y)
        <int64[2] image = {4, 4}, int64[2] block = {2, 2}> { y = Col2Im<strides = [0, 0]>(x, image, block) }""")
    onnx.save(graph, tmp_path / "m.onnx")
    assert [node.op_type for node in load(tmp_path / "m.onnx").model.graph] == ["Col2Im"]
