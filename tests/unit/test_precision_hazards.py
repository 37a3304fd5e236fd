"""Which nodes stay FP32, and that the others do not."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir
import pytest

from trtopt.graph import edit
from trtopt.graph.shapes import infer_shapes, static_shapes
from trtopt.precision.fp16.cast_to_half import cast_to_half, why_fp32
from trtopt.precision.fp16.hazards import are_settled, shows_on_a_cpu, wide_nodes
from trtopt.precision.observe.ranges import ValueRanges
from trtopt.precision.observe.statistics import TensorStats
from trtopt.precision.plan import BF16, FP16, NarrowType


def seen(low: float, high: float, smallest: float = 1e-3) -> TensorStats:
    return TensorStats(count=64, minimum=low, maximum=high, zeros=0, nonfinite=0, smallest_nonzero=smallest)


def model(text: str, **weights: np.ndarray) -> ir.Model:
    found = ir.from_onnx_text(f'<ir_version: 10, opset_import: ["" : 21]>\n{text}')
    for name, array in weights.items():
        value = found.graph.initializers[name]
        value.const_value = ir.Tensor(array.astype(np.float32), name=name)
        value.shape = ir.Shape(array.shape)
    found = infer_shapes(found)
    for node in edit.all_nodes(found.graph):
        node.name = str(node.outputs[0].name)
    return found


def wide(
    text: str | ir.Model,
    stats: Mapping[str, TensorStats] | None = None,
    narrow: NarrowType = FP16,
    integer: frozenset[str] = frozenset(),
) -> dict[str, str]:
    source = model(text) if isinstance(text, str) else text
    return wide_nodes(source, ValueRanges(stats or {}, static_shapes(source, {})), narrow, integer)


ORDINARY = seen(-8, 8)


def test_an_ordinary_network_keeps_nothing_wide() -> None:
    rng = np.random.default_rng(0)
    source = model(
        """g (float[1,8,8,8] x) => (float[1,10] y)
        <float[16,8,3,3] w = {0}, float[16] b = {0}, float[16,10] f = {0}, float[10] c = {0}, float half = {0.5}> {
            a = Conv <pads = [1,1,1,1]> (x, w, b) r = Relu(a) p = GlobalAveragePool(r) q = Flatten(p)
            d = Gemm(q, f, c) e = Mul(d, half) s = Softmax(e) y = LayerNormalization(s, c)
        }""",
        w=rng.standard_normal((16, 8, 3, 3)) / 9,
        b=np.array([1e-9, 0.1] * 8),
        f=rng.standard_normal((16, 10)) / 4,
        c=rng.standard_normal(10),
    )
    names = ["x", "r", "p", "d", "e", "s", "y"]
    assert wide(source, dict.fromkeys(names, ORDINARY)) == {}


def test_values_beyond_half_the_limit_keep_who_makes_and_who_reads_them() -> None:
    text = "g (float[4] x) => (float[4] y) { a = Exp(x) b = Neg(a) c = Tanh(b) y = Neg(c) }"
    stats = {"x": seen(0, 1), "a": seen(1, 4e4), "b": seen(-4e4, -1), "c": seen(-1, -0.7), "y": seen(0.7, 1)}
    assert set(wide(text, stats)) == {"a", "b", "c"}
    assert wide(text, stats)["a"].startswith("values up to 4e+04 in a")
    assert wide(text, stats, BF16) == {}
    assert wide(text, stats | {"a": seen(1, 3e4), "b": seen(-3e4, -1)}) == {}


def test_values_all_too_small_stay_wide() -> None:
    text = "g (float[4] x) => (float[4] y) { a = Tanh(x) y = Neg(a) }"
    assert set(wide(text, {"a": seen(0, 1e-5)})) == {"a", "y"}


@pytest.mark.parametrize(("largest", "kept"), [(1.0, set()), (1e-4, {"a", "y"})])
def test_small_values_that_are_added_to_large_ones_need_no_more_than_fp16(largest: float, kept: set[str]) -> None:
    """A branch behind a layer scale: its rounding is finer than that of the sum."""
    text = "g (float[4] x, float[4] z) => (float[4] y) { a = Tanh(x) y = Add(z, a) }"
    stats = {"a": seen(0, 1e-5), "y": seen(-largest, largest)}
    assert set(wide(text, stats)) == kept


def test_operators_that_move_values_stay_wide_between_hazards() -> None:
    text = """g (float[4] x) => (float[2] y) <int64[2] s = {2, 2}, int64 i = {0}> {
        a = Neg(x) b = Reshape(a, s) c = Transpose(b) d = Gather(c, i) e = Concat <axis = 0> (d, d) f, h = Split
        <num_outputs = 2> (e) y = Tanh(f) }"""
    assert set(wide(text, {"a": seen(0, 1e5), "e": seen(0, 1e5)})) == {"a", "b", "c", "d", "e", "f", "y"}


def test_what_a_relu_lets_through_counts_for_the_convolution_before_it() -> None:
    text = """g (float[1,4,4,4] x) => (float[1,4,4,4] y) <float[4,4,1,1] w = {0}> {
        c = Conv(x, w) r = Relu(c) t = Tanh(r) y = Neg(t) }"""
    source = model(text, w=np.ones((4, 4, 1, 1)))
    assert set(wide(source, {"x": ORDINARY, "r": seen(0, 5e4)})) == {"c", "r", "t"}
    assert wide(source, {"x": ORDINARY, "r": seen(0, 2e4)}) == {}


@pytest.mark.parametrize(
    ("form", "kept"),
    [
        ("a = Add(x, low)", "a"),
        ("a = Where(c, x, low)", "a"),
        ("m = Sub(one, x) a = Mul(m, low)", "a"),
        ("l = Reshape(low, s) a = Add(x, l)", "a"),
    ],
)
def test_a_mask_constant_keeps_its_node_wide(form: str, kept: str) -> None:
    text = f"""g (float[4] x, bool[4] c) => (float[4] y)
        <float low = {{-3.4e38}}, float one = {{1}}, int64[1] s = {{1}}> {{ {form} y = Softmax(a) }}"""
    assert "3.4e+38 in" in wide(text)[kept]


@pytest.mark.parametrize(
    "chain",
    [
        "a = Add(x, e) y = Log(a)",
        "a = Max(x, e) y = Log(a)",
        "a = Clip(x, e) y = Log(a)",
        "a = Where(c, x, e) y = Log(a)",
        "l = Reshape(e, s) a = Add(x, l) y = Log(a)",
        "a = Add(x, e) b = Reshape(a, t) d = Sqrt(b) k = Reshape(d, t) y = Div(x, k)",
        "a = Add(x, e) b = Sqrt(a) d = Mul(b, b) y = Reciprocal(d)",
        "a = Add(x, e) y = Pow(a, n)",
        "a = Max(x, e) b = Concat <axis = 0> (a, x) d = Log(b) y = Slice(d, z, t)",
    ],
)
def test_a_floor_keeps_everything_up_to_what_it_protects_though_no_sample_reaches_it(chain: str) -> None:
    text = f"""g (float[4] x, bool[4] c) => (float[4] y)
        <float e = {{1e-10}}, float n = {{-0.5}}, int64[1] s = {{1}}, int64[1] t = {{4}}, int64[1] z = {{0}}>
        {{ {chain} }}"""
    source = model(text)
    found = wide(source, {str(value.name): seen(1, 9) for node in source.graph for value in node.outputs})
    protected = next(
        i
        for i, node in enumerate(source.graph)
        if node.op_type in ("Log", "Reciprocal", "Pow") or node.op_type == "Div"
    )
    floor = next(i for i, node in enumerate(source.graph) if node.outputs[0].name == "a")
    names = [str(node.name) for node in source.graph]
    assert set(names[floor : protected + 1]) <= set(found)


def test_a_floor_that_protects_nothing_keeps_only_itself() -> None:
    text = "g (float[4] x) => (float[4] y) <float e = {1e-10}> { a = Add(x, e) b = Sqrt(a) d = Mul(b, x) y = Neg(d) }"
    assert set(wide(text)) == {"a"}


def test_small_operands_of_a_logarithm_are_kept_back_to_where_they_are_made() -> None:
    text = """g (float[4] x) => (float[4] y) <int64[2] s = {2, 2}, int64[1] t = {4}> {
        p = Softmax(x) r = Reshape(p, s) q = Mul(r, r) f = Reshape(q, t) y = Log(f) }"""
    stats = {"x": ORDINARY, "p": seen(0, 1, 1e-6), "q": seen(0, 1, 1e-12), "y": seen(-27, 0)}
    assert set(wide(text, stats)) == {"p", "r", "q", "f", "y"}
    stats |= {"p": seen(0, 1, 1e-2), "q": seen(0, 1, 1e-4)}
    assert wide(text, stats) == {}


def test_a_small_denominator_stays_wide_and_a_small_numerator_does_not() -> None:
    text = "g (float[4] x, float[4] d) => (float[4] y) { a = Abs(d) y = Div(x, a) }"
    assert set(wide(text, {"x": ORDINARY, "a": seen(0, 1, 1e-7)})) == {"a", "y"}
    assert wide(text, {"x": seen(-1, 1, 1e-7), "a": seen(0, 1, 1e-2)}) == {}


def test_an_epsilon_that_is_zero_in_fp16_stays_wide_where_the_kernel_may_compute_in_fp16() -> None:
    text = "g (float[1,4,4] x) => (float[1,4,4] y) <float[4] s = {1, 1, 1, 1}> { y = %s }"
    instance = text % "InstanceNormalization <epsilon = %s> (x, s, s)"
    assert "epsilon 1.0e-12 is 0 in fp16" in wide(instance % "1e-12")["y"]
    assert "epsilon" not in wide(instance % "1e-12", narrow=BF16).get("y", "")
    assert wide(instance % "1e-5") == {}


NORM = "r = ReduceL2(x, axes) c = %s e = Expand(c, shape) y = Div(%s, e)"


@pytest.mark.parametrize("floor", ["Clip(r, least)", "Max(r, least)"])
def test_a_floor_under_the_norm_of_what_it_divides_stays_fp16(floor: str) -> None:
    text = """g (float[4,8] x, float[4,8] z) => (float[4,8] y)
        <float least = {1e-12}, int64[1] axes = {1}, int64[2] shape = {4, 8}> { %s }"""
    stats = {"x": ORDINARY, "r": seen(1, 9), "y": seen(-1, 1)}
    source = model(text % (NORM % (floor, "x")))
    assert wide(source, stats) == {}
    assert set(wide(text % (NORM % (floor, "z")), stats)) == {"c", "e", "y"}
    stored = cast_to_half(source, FP16, ()).graph.initializers["least_fp16"].const_value
    assert stored is not None and stored.numpy() == np.float16(2.0**-24)


@pytest.mark.parametrize(
    ("node", "size"),
    [("LayerNormalization <epsilon = 1e-12> (x, s)", 1024), ("ReduceL2(x, axes)", 1), ("LpNormalization(x)", 1024)],
)
def test_what_squares_and_sums_in_fp32_inside_its_kernel_stays_fp16(node: str, size: int) -> None:
    text = "g (float[4,1024] x) => (float[4,%d] y) <float[1024] s = {%s}, int64[1] axes = {1}> { y = %s }"
    ones = ", ".join(["1"] * 1024)
    source = text % (size, ones, node)
    assert wide(source, {"x": seen(-1000, 1000), "y": seen(-30, 3000)}) == {}
    assert "y" in wide(source, {"x": seen(-1000, 1000), "y": seen(0, 40000)})  # the result leaves it in FP16


@pytest.mark.parametrize(
    ("node", "low", "high", "result", "hazard"),
    [
        ("ReduceSum(x, axes)", -100, 100, seen(-5, 5), True),  # 1024 terms of either sign up to 100
        ("ReduceSum(x, axes)", -10, 10, seen(-5, 5), False),
        ("ReduceSum(x, axes)", 0, 100, seen(0, 2e4), False),  # terms of one sign: the result is the largest sum
        ("ReduceMean(x, axes)", 0, 100, seen(0, 20), False),
        ("ReduceMean(x, axes)", 0, 100, seen(0, 50), True),
        ("ReduceMean(x, axes)", -100, 100, seen(0, 20), True),
        ("GlobalAveragePool(x)", -100, 100, seen(0, 1), True),
        ("GlobalAveragePool(x)", -10, 10, seen(0, 1), False),
        ("ReduceSumSquare(x, axes)", -9, 9, seen(0, 99), True),
        ("ReduceSumSquare(x, axes)", -2, 2, seen(0, 9), False),
        ("ReduceLogSumExp(x, axes)", 0, 6, seen(0, 12), True),
        ("ReduceLogSumExp(x, axes)", 0, 1, seen(0, 7), False),
    ],
)
def test_sums_inside_a_kernel_are_bounded(
    node: str, low: float, high: float, result: TensorStats, hazard: bool
) -> None:
    text = f"g (float[1,2,32,32] x) => (float[1,2,1,1] y) <int64[2] axes = {{2, 3}}> {{ y = {node} }}"
    assert bool(wide(text, {"x": seen(low, high), "y": result})) is hazard


def test_a_softmax_longer_than_fp16_counts_stays_wide() -> None:
    text = "g (float[1,%d] x) => (float[1,%d] y) { s = Softmax(x) y = Neg(s) }"
    assert "70000 exponentials" in wide(text % (70000, 70000), {"x": ORDINARY})["s"]
    assert wide(text % (60000, 60000), {"x": ORDINARY}) == {}


DOTS = {
    "Conv": ("g (float[1,64,2,2] x) => (float[1,2,2,2] y) <float[2,64,1,1] w = {0}> { y = Conv(x, w) }", (2, 64, 1, 1)),
    "ConvTranspose": (
        "g (float[1,64,2,2] x) => (float[1,2,2,2] y) <float[64,2,1,1] w = {0}> { y = ConvTranspose(x, w) }",
        (64, 2, 1, 1),
    ),
    "Gemm": ("g (float[2,64] x) => (float[2,2] y) <float[64,2] w = {0}> { y = Gemm(x, w) }", (64, 2)),
    "Gemm transposed": (
        "g (float[2,64] x) => (float[2,2] y) <float[2,64] w = {0}> { y = Gemm <transB = 1> (x, w) }",
        (2, 64),
    ),
    "MatMul": ("g (float[1,2,64] x) => (float[3,2,2] y) <float[3,64,2] w = {0}> { y = MatMul(x, w) }", (3, 64, 2)),
    "MatMul with weights first": (
        "g (float[64,2] x) => (float[2,2] y) <float[2,64] w = {0}> { y = MatMul(w, x) }",
        (2, 64),
    ),
}


@pytest.mark.parametrize("name", DOTS)
def test_partial_sums_of_a_dot_product_are_bounded_with_their_signs(name: str) -> None:
    text, shape = DOTS[name]
    weights = np.where(np.arange(64) % 2 == 0, 10.0, -10.0)
    axis = shape.index(64)
    source = model(text, w=np.broadcast_to(weights.reshape([-1 if i == axis else 1 for i in range(len(shape))]), shape))
    assert "partial sum of the dot product may reach 8.32e+04" in wide(source, {"x": seen(-130, 130)})["y"]
    assert wide(source, {"x": seen(0, 130)}) == {}, "32 terms of 10 * 130 in either direction"
    assert "y" in wide(source, {"x": seen(0, 210)})
    with np.errstate(all="raise"):
        assert "y" in wide(source, {"x": seen(-3e38, 3e38)}, BF16), "a bound beyond FP32"
    assert wide(source, {"x": seen(-130, 130), "y": ORDINARY}, integer=frozenset({"y"})) == {}, "INT32 accumulators"
    assert "y" in wide(source, {"x": seen(-130, 130)}, integer=frozenset({"y"})), "its output was not observed"


@pytest.mark.parametrize(
    ("node", "shape", "value", "hazard"),
    [
        ("Mul(x, k)", (), 1e-9, True),
        ("Mul(x, k)", (4,), [1, 1, 1, 1e-9], True),  # every factor counts by itself
        ("Add(x, k)", (4,), [1, 1, 1, 1e-9], False),
        ("Add(x, k)", (4,), [1e-9] * 4, False),  # a bias of a new network: the sum is seen to be large
        ("Add(x, k)", (), 1e-9, True),  # a floor
        ("BatchNormalization(x, o, o, o, k)", (4,), [1, 1, 1, 1e-9], True),
        ("MatMul(x, k)", (4, 4), [[1e-9] * 4] * 4, True),
        ("MatMul(x, k)", (4, 4), [[1, 1e-9, 0, 0]] * 4, False),
        ("Gemm(x, i, k)", (1,), 1e-9, False),  # a small bias
    ],
)
def test_constants_that_underflow(node: str, shape: tuple[int, ...], value: object, hazard: bool) -> None:
    dims = ",".join(map(str, shape))
    source = model(
        f"g (float[4,4] x) => (float[4,4] y) <float[{dims}] k = {{0}}, float[4] o = {{1, 1, 1, 1}}, "
        f"float[4,4] i = {{0}}> {{ y = {node} }}".replace("float[]", "float"),
        k=np.broadcast_to(np.asarray(value), shape),
        i=np.eye(4),
    )
    found = wide(source, {"x": ORDINARY, "y": ORDINARY})
    assert bool(found) is hazard
    assert not hazard or "underflow" in found["y"]
    assert not hazard or shows_on_a_cpu(found["y"]) is bool(shape), (
        "a number alone may be a floor that no sample reaches"
    )


@pytest.mark.parametrize("op", ["Mul(r, r)", "Pow(r, two)", "Mul(r, two)"])
def test_of_an_embedding_the_table_counts_and_not_each_entry(op: str) -> None:
    """Random and trained tables hold numbers next to zero; RMS normalization squares them, others scale them."""
    given = "<float[8,8] k = {0}, float two = {2}>"
    text = f"g (int64[4] i) => (float[4,8] y) {given} {{ r = Gather(k, i) y = {op} }}"
    table = np.ones((8, 8), np.float32)
    table[3, 5] = -8.5e-9
    assert wide(model(text, k=table), {"y": ORDINARY}) == {}
    assert wide(model(text, k=table * 1e-9), {"y": ORDINARY}), "no entry is held"
    scale = text.replace("Gather(k, i)", "Cast <to = 1> (i)").replace("int64[4] i", "int64[4,8] i")
    assert wide(
        model(scale.replace(op, "Mul(r, k)").replace("[4,8]", "[8,8]"), k=table), {"r": ORDINARY, "y": ORDINARY}
    )


def test_growth_counts_the_headroom_of_the_operand() -> None:
    text = "g (float[4] x) => (float[4] y) <float n = {3}> { y = %s }"
    assert "exponentials" in wide(text % "Exp(x)", {"x": seen(0, 6), "y": seen(0, 400)})["y"]
    assert wide(text % "Exp(x)", {"x": seen(-90, 0), "y": seen(0, 1)}) == {}, "a softmax written out"
    assert "power of 2" in wide(text % "Mul(x, x)", {"x": seen(0, 150), "y": seen(0, 22500)})["y"]
    assert "power of 3" in wide(text % "Pow(x, n)", {"x": seen(0, 25), "y": seen(0, 15625)})["y"]
    assert wide(text % "Pow(x, n)", {"x": seen(-18, 18), "y": seen(-5832, 5832)}) == {}


def test_integers_that_pass_as_floats_stay_exact() -> None:
    text = "g (int64[4] i, float[4] t) => (float[4] y) { a = Cast <to = 1> (i) b = Add(a, t) c = Tanh(b) y = Neg(c) }"
    assert set(wide(text, {"a": seen(0, 3000)})) == {"a", "b"}
    assert wide(text, {"a": seen(0, 2000)}) == {}
    assert set(wide(text, {"a": seen(0, 300)}, BF16)) == {"a", "b"}
    text = "g (float[4] x) => (int64[4] y) { a = Mul(x, x) b = Floor(a) y = Cast <to = 7> (b) }"
    assert {"b", "y"} <= set(wide(text, {"b": seen(0, 3000)}))


def test_control_flow_and_foreign_operators_say_why() -> None:
    text = """g (float[4] x, bool c) => (float[4] y) {
        y = If (c) < then_branch = t () => (float[4] a) { a = Neg(x) },
                     else_branch = e () => (float[4] b) { b = Abs(x) } > }"""
    assert wide(text) == {"y": "control flow: ranges inside its subgraphs are not observed"}
    boxes = """g (float[1,6,4] x, float[1,1,6] s) => (int64[K,3] y) { y = NonMaxSuppression(x, s) }"""
    assert wide(boxes) == {"y": "NonMaxSuppression has no fp16 form in ONNX"}


def test_a_mask_that_no_sample_shows_keeps_its_softmax_wide() -> None:
    text = """g (float[1,4] x, float[1,4] keep) => (float[1,4] y) <float[1] one = {1}, float[1] huge = {-3.4e38}> {
        a = Sub(one, keep) b = Mul(a, huge) c = Add(x, b) d = Softmax(c) y = Mul(d, d)
    }"""
    stats = dict.fromkeys(["x", "keep", "a", "b", "c", "d", "y"], seen(0, 1))
    assert set(wide(text, stats)) == {"b", "c", "d"}
    assert wide(text, stats)["d"] == "behind a mask too large for fp16"


@pytest.mark.parametrize("op", ["Sigmoid", "Softmax", "LogSoftmax", "Tanh"])
def test_scores_that_leave_the_network_are_not_rounded_to_ties(op: str) -> None:
    assert set(wide(f"g (float[1,4] x) => (float[1,4] y) {{ a = Neg(x) y = {op}(a) }}", {"a": ORDINARY})) == {"y"}
    assert wide(f"g (float[1,4] x) => (float[1,4] y) {{ a = {op}(x) y = Neg(a) }}", {"a": ORDINARY}) == {}


def test_a_small_head_before_final_scores_stays_fp32_and_a_large_one_does_not() -> None:
    text = (
        "g (float[1,8] x) => (float[1,N] y) <float[8,N] w = {0}, float[N] b = {0}> { a = Gemm(x, w, b) y = Sigmoid(a) }"
    )
    small = model(text.replace("N", "4"), w=np.ones((8, 4)), b=np.ones(4))
    large = model(text.replace("N", "70000"), w=np.ones((8, 70000)), b=np.ones(70000))
    stats = {"x": ORDINARY, "a": ORDINARY, "y": seen(0, 1)}
    assert set(wide(small, stats)) == {"a", "y"}
    assert set(wide(small, stats, integer=frozenset({"a"}))) == {"y"}
    assert set(wide(large, stats)) == {"y"}


@pytest.mark.parametrize(
    ("stats", "settled"),
    [
        (seen(-8, 8), True),
        (seen(-1000, 1000), False),  # 64 times that overflows
        (seen(-1e-4, 1e-4), False),  # too small, and may not be on other samples
        (seen(-1e6, 1e6), True),  # wide whatever follows
        (TensorStats(count=64, minimum=-8, maximum=8, zeros=0, nonfinite=1, smallest_nonzero=1e-3), False),
    ],
)
def test_few_samples_settle_what_larger_values_do_not_change(stats: TensorStats, settled: bool) -> None:
    source = model("g (float[1,8,4,4] x) => (float[1,8,4,4] y) { r = Relu(x) y = Tanh(r) }")
    assert are_settled(source, {"x": stats}, static_shapes(source, {}), FP16) is settled


def test_few_samples_do_not_settle_a_small_denominator() -> None:
    source = model("g (float[1,8] x, float[1,8] z) => (float[1,8] y) { d = Abs(z) y = Div(x, d) }")
    table = {"x": seen(-8, 8), "z": seen(-8, 8, 1e-3), "d": seen(0, 8, 1e-3), "y": seen(-8, 8)}
    assert not are_settled(source, table, static_shapes(source, {}), FP16)


@pytest.mark.parametrize("narrow", [FP16, BF16], ids=["fp16", "bf16"])
@pytest.mark.parametrize(("op", "gates"), [("LSTM", 4), ("GRU", 3), ("RNN", 1)])
@pytest.mark.parametrize("has_lengths", [True, False])
def test_recurrent_layers_with_lengths_stay_fp32(op: str, gates: int, narrow: NarrowType, has_lengths: bool) -> None:
    rows, lengths = 4 * gates, ", , n" if has_lengths else ""
    source = model(
        f"g (float[6,2,4] x, int32[2] n, float[1,{rows},4] w, float[1,{rows},4] r) => (float[6,1,2,4] y)"
        f" {{ y = {op} <hidden_size = 4> (x, w, r{lengths}) }}"
    )
    (node,) = (node for node in source.graph if node.op_type == op)
    reason = why_fp32(node, narrow)
    has_form = (op, narrow) != ("GRU", BF16)
    assert (reason is None) == (has_form and not has_lengths)
