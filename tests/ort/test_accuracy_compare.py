"""Two models are compared over all samples at once, and the tensor where an error enters is named."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir
import pytest
from naive_fp16 import naive_fp16
from onnx_ir.passes import common as passes

from trtopt.accuracy.compare import compare, compare_tensors, first_bad, is_tie, sums_of, top1
from trtopt.accuracy.emulation import fp32_emulation
from trtopt.errors import InvalidModelError
from trtopt.support.ort_session import Feeds, OrtSession

HEAD = '<ir_version: 9, opset_import: ["" : 19]>\n'


def model(text: str) -> ir.Model:
    return passes.ShapeInferencePass()(ir.from_onnx_text(HEAD + text)).model


def compared(reference: str, optimized: str, samples: list[Feeds]) -> dict:
    with OrtSession(model(reference)) as first, OrtSession(model(optimized)) as second:
        return compare(first, second, samples)


def feeds(count: int, *shape: int, seed: int = 0) -> list[Feeds]:
    rng = np.random.default_rng(seed)
    return [{"x": rng.standard_normal(shape).astype(np.float32)} for _ in range(count)]


IDENTITY = "g (float[N,C] x) => (float[N,C] y) { y = Identity(x) }"
NOISY = "g (float[N,C] x) => (float[N,C] y) { a = Sin(x) y = Add(x, a) }"


def test_the_measures_are_those_of_all_samples_together() -> None:
    samples = feeds(7, 2, 5)
    result = compared(IDENTITY, NOISY, samples)["y"]
    x = np.concatenate([sample["x"] for sample in samples]).astype(np.float64)
    y = np.concatenate([sample["x"] + np.sin(sample["x"]) for sample in samples]).astype(np.float64)
    assert result.sqnr_db == pytest.approx(10 * math.log10((x**2).sum() / ((y - x) ** 2).sum()), abs=1e-4)
    assert result.cosine == pytest.approx((x * y).sum() / np.linalg.norm(x) / np.linalg.norm(y), abs=1e-6)
    assert result.max_abs == pytest.approx(np.abs(y - x).max(), abs=1e-6)
    assert result.top1_agreement == (x.argmax(1) == y.argmax(1)).mean()
    assert result.nonfinite == 0


def test_order_and_batching_of_the_samples_do_not_matter() -> None:
    rounded = "g (float[N,C] x) => (float[N,C] y) { y = Round(x) }"
    samples = feeds(8, 1, 5)
    one = compared(IDENTITY, rounded, samples)["y"]
    batched = compared(IDENTITY, rounded, [{"x": np.concatenate([sample["x"] for sample in reversed(samples)])}])["y"]
    assert batched.sqnr_db == pytest.approx(one.sqnr_db, abs=1e-9)
    assert (batched.top1_agreement, batched.max_abs) == (one.top1_agreement, one.max_abs)


def test_tokens_that_are_as_good_as_each_other_are_no_answers_of_a_decoder() -> None:
    """The two best scores of every other row are 0.05 apart, of a range of 9: less than 1 %."""
    scores = np.tile(np.arange(10, dtype=np.float32), (2, 4, 1))
    scores[:, ::2, 0], scores[:, 1::2, 0] = 9.05, 9.5
    assert is_tie(scores).tolist() == [[True, False, True, False]] * 2
    scores[0, 0, 3] = np.nan
    assert is_tie(scores)[0].tolist() == [False, False, True, False] and top1(scores)[0, 0] == -1
    flip = "g (float[N,S,C] x) => (float[N,S,C] y) { a = Constant<value_float = 9.2>() y = Min(x, a) }"
    kept = "g (float[N,S,C] x) => (float[N,S,C] y) { y = Identity(x) }"
    feeds = [{"x": scores[1:]}]
    with OrtSession(model(kept)) as first, OrtSession(model(flip)) as second:
        found, of_state = (compare(first, second, feeds, sums=sums_of(None, states))["y"] for states in ({"k"}, {"y"}))
    assert (found.top1_agreement, found.ties) == (1.0, 2)
    assert (of_state.top1_agreement, of_state.ties) == (None, 0)


def test_the_error_of_probabilities_is_held_against_one_that_somebody_would_act_on() -> None:
    text = "g (float[N,S] x) => (float[N,S] y) { a = Constant<value_float = %s>() s = Mul(x, a) y = Sigmoid(s) }"
    feeds = [{"x": np.full((1, 8), -12, np.float32)}, {"x": np.full((1, 8), -14, np.float32)}]
    first = model(text % "1.0")
    with OrtSession(first) as one, OrtSession(model(text % "2.0")) as other:
        plain = compare(one, other, feeds)["y"]
        found = compare(one, other, feeds, sums=sums_of(None, outputs=first.graph.outputs))["y"]
    assert plain.sqnr_db < 1 and plain.held_against is None
    assert found.sqnr_db > 60 and found.held_against == 0.01


def test_equal_outputs_have_infinite_sqnr() -> None:
    result = compared(IDENTITY, IDENTITY, feeds(2, 1, 5))["y"]
    assert (result.sqnr_db, result.cosine, result.max_abs, result.top1_agreement) == (math.inf, 1.0, 0.0, 1.0)


def test_nan_and_infinity_count_where_the_reference_is_finite_only() -> None:
    logarithm = "g (float[N,C] x) => (float[N,C] y) { y = Log(x) }"
    both = compared(logarithm, logarithm, [{"x": np.array([[1.0, 0.0, -1.0]], np.float32)}])["y"]
    assert (both.nonfinite, both.sqnr_db) == (0, math.inf)
    broken = compared(IDENTITY, logarithm, [{"x": np.array([[1.0, 0.0, -1.0]], np.float32)}])["y"]
    assert broken.nonfinite == 2
    assert math.isnan(broken.sqnr_db) and math.isnan(broken.cosine) and broken.max_abs == math.inf


@pytest.mark.parametrize(
    ("shape", "class_like"),
    [((4, 10), True), ((1, 10), True), ((1, 10, 1, 1), True), ((2, 6, 10), True), ((1, 1), False), ((4,), False),
     ((1, 85, 22, 22), False)],
)  # fmt: skip
def test_top1_is_of_outputs_whose_last_axis_holds_scores(shape: tuple[int, ...], class_like: bool) -> None:
    text = (
        f"g (float[{','.join('ABCD'[: len(shape)])}] x) => (float[{','.join('ABCD'[: len(shape)])}] y) {{ y = Neg(x) }}"
    )
    result = compared(text, text, feeds(1, *shape))["y"]
    assert (result.top1_agreement is not None) == class_like


def test_integer_outputs_agree_in_the_share_of_equal_elements() -> None:
    reference = "g (float[N,C] x) => (int64[N,C] y) { y = Cast <to = 7> (x) }"
    optimized = "g (float[N,C] x) => (int64[N,C] y) { a = Ceil(x) y = Cast <to = 7> (a) }"
    result = compared(reference, optimized, [{"x": np.array([[1.0, 2.0, 3.5, 4.0]], np.float32)}])["y"]
    assert result.top1_agreement == 0.75
    assert result.max_abs == 1.0
    assert result.sqnr_db == pytest.approx(10 * math.log10(1 + 4 + 9 + 16))


def test_other_outputs_are_an_error() -> None:
    with pytest.raises(InvalidModelError, match="no output y"):
        compared(IDENTITY, "g (float[N,C] x) => (float[N,C] z) { z = Neg(x) }", feeds(1, 1, 5))
    with pytest.raises(InvalidModelError, match=r"shape \[5\], the reference \[1, 5\]"):
        compared(IDENTITY, "g (float[N,C] x) => (float[C] y) <int64[1] a = {0}> { y = Squeeze(x, a) }", feeds(1, 1, 5))
    with pytest.raises(InvalidModelError, match="no samples"):
        compared(IDENTITY, IDENTITY, [])


CHAIN = """
g (float[N,C] x) => (float[N,C] y) <float k = {1.5}, float big = {@BIG@}> {
    a = Mul(x, k) b = Relu(a) c = Mul(b, big) d = Div(c, big) e = Add(d, x) y = Tanh(e)
}"""


def test_the_tensor_that_overflows_is_named() -> None:
    reference = model(CHAIN.replace("@BIG@", "60000.0"))
    twin = fp32_emulation(naive_fp16(reference))
    tensors = compare_tensors(reference, twin, feeds(20, 4, 8))
    assert list(tensors) == ["a", "b", "c", "d", "e", "y"]
    assert tensors["b"].sqnr_db > 60 and tensors["c"].nonfinite > 0
    assert first_bad(twin, tensors) == "c"


def test_the_tensor_where_precision_is_lost_is_named_and_not_what_follows_it() -> None:
    reference = model("g (float[N,C] x) => (float[N,C] y) { a = Relu(x) b = Tanh(a) c = Add(b, b) y = Sin(c) }")
    optimized = model(
        """g (float[N,C] x) => (float[N,C] y) <float coarse = {0.2}, int8 zero = {0}> {
            a = Relu(x) b0 = Tanh(a) q = QuantizeLinear(b0, coarse, zero) b = DequantizeLinear(q, coarse, zero)
            c = Add(b, b) y = Sin(c)
        }"""
    )
    tensors = compare_tensors(reference, optimized, feeds(4, 4, 64))
    assert tensors["a"].sqnr_db == math.inf and tensors["b"].sqnr_db < 25 and tensors["y"].sqnr_db < 25
    assert first_bad(optimized, tensors) == "b"


def test_an_infinite_mask_that_does_no_harm_is_not_called_bad() -> None:
    low = "-340000000000000000000000000000000000000.0"
    reference = model(
        f"""g (float[N,C] x) => (float[N,C] y) <float low = {{{low}}}, float zero = {{0.0}}> {{
            keep = Greater(x, zero) m = Where(keep, zero, low) c = Add(x, m) y = Softmax(c)
        }}"""
    )
    twin = fp32_emulation(naive_fp16(reference))
    tensors = compare_tensors(reference, twin, feeds(2, 4, 8))
    assert tensors["m"].nonfinite > 0 and tensors["y"].sqnr_db > 50
    assert first_bad(twin, tensors) is None


def test_ordinary_rounding_is_not_called_bad() -> None:
    reference = model(CHAIN.replace("@BIG@", "2.0"))
    twin = fp32_emulation(naive_fp16(reference))
    assert first_bad(twin, compare_tensors(reference, twin, feeds(2, 4, 8))) is None


def test_tensors_are_compared_in_passes_of_bounded_size() -> None:
    nodes = " ".join(f"t{i + 1} = Neg(t{i})" for i in range(100))
    chain = model(f"g (float[N,C] t0) => (float[N,C] t100) {{ {nodes} }}")
    tensors = compare_tensors(chain, chain, ({"t0": sample["x"]} for sample in feeds(30, 1, 4)), max_samples=3)
    assert list(tensors) == [f"t{i}" for i in range(1, 101)]
