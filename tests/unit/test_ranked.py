"""What outputs behind a selection are selected from."""

from __future__ import annotations

import onnx
import onnx_ir as ir
import pytest
from onnx import parser

from trtopt.accuracy.scores import holds_numbers, ranked_in
from trtopt.pipeline.verify import ranked_of
from trtopt.precision.observe.batches import FixedAxes

HEAD = '<ir_version: 10, opset_import: ["" : 20]>\n'


def network(body: str, outputs: str = "float[N,2] best") -> ir.Model:
    """Scores ``s`` of ten classes, and what ``body`` makes of them."""
    constants = "float[8,10] w, int64[1] two = {2}, float[1] low = {-1e9}, bool[1,10] mask, float[10,4] table"
    constants += ", int64[2] shape = {10, 4}"
    text = f"g (float[N,8] x) => ({outputs}) <{constants}> {{ s = MatMul(x, w) {body} }}"
    return ir.serde.deserialize_model(onnx.shape_inference.infer_shapes(parser.parse_model(HEAD + text)))


@pytest.mark.parametrize(
    ("body", "outputs", "expected"),
    [
        ("best, at = TopK(s, two)", "float[N,2] best", ("s",)),
        ("r = Relu(s) best, at = TopK(r, two) o = GatherElements<axis=1>(s, at)", "float[N,2] o", ("r", "s")),
        ("m = Where(mask, s, low) best, at = TopK(m, two)", "float[N,2] best", ("s",)),
        ("word = ArgMax<axis=1, keepdims=0>(s) row = Gather(table, word)", "float[N,4] row", ("s",)),
        ("word = ArgMax<axis=1, keepdims=0>(s)", "int64[N] word", ()),
        ("best, at = TopK(s, two)", "float[N,10] s, float[N,2] best", ()),
        ("best, at = TopK(x, two)", "float[N,2] best", ()),
    ],
    ids=["top", "gathered", "masked", "index", "answer", "output", "input"],
)
def test_scores_and_values_are_ranked(body: str, outputs: str, expected: tuple[str, ...]) -> None:
    assert ranked_in(network(body, outputs)) == expected


@pytest.mark.parametrize("copy", ["Identity(s)", "Mul(s, low)", "Unsqueeze(s, two)"])
def test_what_a_rewrite_removes_is_followed_to_what_it_copies(copy: str) -> None:
    rewritten = network("best, at = TopK(s, two)")
    assert ranked_in(network(f"t = {copy} best, at = TopK(t, two)"), rewritten) == ("s",)


def test_a_sum_that_a_rewrite_removes_is_not_followed() -> None:
    rewritten = network("best, at = TopK(s, two)")
    assert ranked_in(network("r = Relu(s) t = Add(s, r) best, at = TopK(t, two)"), rewritten) == ()


def test_a_constant_that_a_rewrite_folds_is_not_ranked() -> None:
    """Anchors, gathered by what was selected."""
    body = "best, at = TopK(s, two) flat = Reshape(table, shape) o = Gather(flat, at)"
    before, after = (
        network(text, "float[N,2,4] o")
        for text in (body, body.replace("flat = Reshape(table, shape) ", "").replace("flat", "table"))
    )
    assert ranked_in(before, after) == ("s",)


@pytest.mark.parametrize(
    ("body", "outputs", "holds"),
    [
        ("", "float[N,10] s", True),
        ("y = ArgMax<axis=1>(s)", "int64[N,1] y", False),
        ("a = ArgMax<axis=1>(s) y = Cast<to=1>(a)", "float[N,1] y", False),
        ("b = Greater(s, low) y = Cast<to=1>(b)", "float[N,10] y", False),
        ("best, at = TopK(s, two)", "float[N,10] s, float[N,2] best", False),
    ],
    ids=["scores", "class", "cast", "mask", "selection"],
)
def test_noise_says_something_of_numbers_only(body: str, outputs: str, holds: bool) -> None:
    assert holds_numbers(network(body, outputs)) is holds


def test_of_batches_only_what_begins_with_the_rows() -> None:
    turned = network("t = Transpose(s) best, at = TopK<axis=0>(t, two) o = GatherElements(t, at)", "float[2,N] o")
    plain = network("best, at = TopK(s, two)")
    four = FixedAxes({"x": {0: 4}}, {"x": (0,)}, 4, {})
    assert ranked_of(plain, plain, four) == ("s",)
    assert ranked_of(turned, turned, four) == ()
    assert ranked_of(turned, turned, None) == ("t",)
