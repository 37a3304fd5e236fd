"""Random inputs for comparing two graphs leave every row of a mask a key."""

from __future__ import annotations

import onnx.parser
import onnx_ir as ir
import pytest

from trtopt.rewrite.equal import difference


def masked(low: str, factor: str) -> ir.Model:
    """Rows of two keys: a random mask would leave a quarter of them none."""
    return ir.from_proto(
        onnx.parser.parse_model(
            '<ir_version: 8, opset_import: ["" : 17]> g (float[64, 2] x, int64[64, 2] m) => (float[64, 2] y) '
            f"<float low = {{{low}}}, float one = {{1}}> {{ f = Cast <to = 1> (m) k = Sub(one, f) "
            f"b = Mul({factor}, low) s = Add(x, b) y = Softmax <axis = -1> (s) }}"
        )
    )


@pytest.mark.parametrize("factor", ["f", "k"])
def test_a_clamped_mask_is_equal_whichever_number_masks(factor: str) -> None:
    assert difference(masked("-3.4e38", factor), masked("-3e4", factor)) == ""


def test_a_mask_that_masks_too_little_is_not() -> None:
    assert difference(masked("-3.4e38", "k"), masked("-1.0", "k"))
