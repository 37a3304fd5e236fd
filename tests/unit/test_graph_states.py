"""What counts as a state of a network."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from trtopt.errors import InvalidModelError
from trtopt.graph.states import find_read_caches, find_states
from trtopt.precision.fp16.cast_to_half import cast_to_half
from trtopt.precision.fp16.network_io import IoRequest
from trtopt.precision.fp16.states import check_states, fp32_outputs, state_requests
from trtopt.precision.plan import FP16


def model(graph: str, opset: int = 24) -> ir.Model:
    return ir.from_onnx_text(f'<ir_version: 10, opset_import: ["" : {opset}]> {graph}')


GROWN = """g (float[B, 2, P, 8] past, float[B, 2, 1, 8] k, float[B, 2, P, 8] other)
  => (float[B, 2, T, 8] present, float[B, 2, U, 8] y, float[B, 2, P, 8] kept)
{ present = Concat<axis = -2>(past, k) r = Relu(present) y = Concat<axis = 2>(r, k) kept = Identity(other) }"""


def test_a_cache_that_grows_and_what_is_handed_on_beside_it() -> None:
    found = find_states(model(GROWN))
    assert [(item.input.name, item.output.name, item.axis, item.in_place) for item in found] == [
        ("past", "present", 2, False),
        ("other", "kept", None, True),
    ]


def test_a_cache_that_is_updated_in_place() -> None:
    text = """g (float[B, 2, 9, 8] past, float[B, 2, 1, 8] k, int64[B] at)
      => (float[B, 2, 9, 8] present, float[B, 2, 9, 8] y)
      { present = TensorScatter<axis = 2>(past, k, at) y = Relu(present) }"""
    (found,) = find_states(model(text))
    assert (found.input.name, found.output.name, found.axis, found.in_place) == ("past", "present", 2, True)


@pytest.mark.parametrize(
    "graph",
    [
        # Nothing reads what is joined: an output with two parts, one of which the caller gave.
        "g (float[B, 2, P, 8] x, float[B, 2, 1, 8] k) => (float[B, 2, T, 8] y) { y = Concat<axis = 2>(x, k) }",
        # New entries come first.
        """g (float[B, 2, P, 8] x, float[B, 2, 1, 8] k) => (float[B, 2, T, 8] y, float[B, 2, T, 8] z)
          { r = Relu(k) y = Concat<axis = 2>(r, x) z = Relu(y) }""",
        # The output cannot be fed again.
        """g (float[B, 2, 4, 8] x, float[B, 2, 1, 8] k) => (float[B, 2, 5, 8] y, float[B, 5, 2, 8] z)
          { j = Concat<axis = 2>(x, k) y = Relu(j) z = Transpose<perm = [0, 2, 1, 3]>(j) }""",
        # An image that is an output, too.
        "g (float[B, 3, 8, 8] x) => (float[B, 3, 8, 8] y, float[B, 3, 8, 8] z) { y = Identity(x) z = Relu(x) }",
    ],
)
def test_what_is_no_state(graph: str) -> None:
    assert find_states(model(graph)) == ()


def test_in_fp16_a_state_is_fp16_unless_it_is_named() -> None:
    cast = cast_to_half(model(GROWN), FP16, ())
    asked = [(item.name, item.dtype) for item in state_requests(cast, {"kept"})]
    assert asked == [("past", "fp16"), ("present", "fp16")]
    assert state_requests(model(GROWN), ()) == ()


def test_no_state_leaves_in_fp32_nor_what_io_gives_another_type() -> None:
    assert fp32_outputs(model(GROWN)) == {"y"}
    assert fp32_outputs(model(GROWN), [IoRequest("y", "fp32", "chw")]) == {"y"}
    assert fp32_outputs(model(GROWN), [IoRequest("y", "fp16", "chw")]) == frozenset()


def test_the_keys_of_an_encoder_are_read_in_fp16() -> None:
    text = """g (float[B, 2, P, 8] past, float[B, 2, 1, 8] k, float[B, 2, 30, 8] encoded, float[B, 30, 16] x)
      => (float[B, 2, T, 8] present, float[B, 2, T, 8] r, float[B, 2, 30, 8] y, float[B, 30, 16] z)
    { present = Concat<axis = 2>(past, k) r = Relu(present) y = Relu(encoded) z = Relu(x) }"""
    decoder = model(text)
    read = find_read_caches(decoder, find_states(decoder))
    assert [value.name for value in read] == ["encoded"]
    asked = [item.name for item in state_requests(cast_to_half(model(text), FP16, ()), ())]
    assert asked == ["past", "present", "encoded"]


def test_a_cache_behind_an_operator_is_refused_by_name() -> None:
    text = """g (float[B, 2, 9, 8] past, float[B, 2, 1, 8] k, int64[B] at)
      => (float[B, 2, 9, 8] present)
      { r = Relu(past) present = TensorScatter<axis = 2>(r, k, at) }"""
    with pytest.raises(InvalidModelError, match="TensorScatter updates r, which Relu computes"):
        check_states(model(text))
