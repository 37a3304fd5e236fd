"""What synthetic inputs hold: what the graph does with them tells."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx.parser
import onnx_ir as ir
import pytest
from onnx import numpy_helper

from trtopt.graph.artifact import input_spec
from trtopt.graph.input_values import InputValues, input_values
from trtopt.precision.observe.samples import SYNTHETIC, open_samples
from trtopt.precision.observe.stream import Samples


def net(inputs: str, body: str, **weights: Any) -> ir.Model:
    found = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : 17]> g ({inputs}) => (float[A, B, C] y) {{ {body} }}'
    )
    for name, array in weights.items():
        found.graph.initializer.append(numpy_helper.from_array(np.asarray(array), name))
    return ir.serde.deserialize_model(found)


def table(rows: int) -> np.ndarray:
    return np.zeros((rows, 4), np.float32)


IDS = "int64[N, S] ids"


@pytest.mark.parametrize(
    ("inputs", "body", "weights", "expected"),
    [
        (IDS, "y = Gather(t, ids)", {"t": table(300)}, {"ids": InputValues("ids", 300)}),
        ("int64[N, 1] ids", "y = GatherND(t, ids)", {"t": table(300)}, {"ids": InputValues("ids", 300)}),
        ("int64[N, 2] ids", "y = GatherND(t, ids)", {"t": table(300)}, {"ids": InputValues("ids", 4)}),
        (
            "int64[N, 1] ids, float[N, 4] u",
            'y = ScatterND <reduction: string = "add"> (t, ids, u)',
            {"t": table(300)},
            {"ids": InputValues("ids", 300)},
        ),
        (
            "int64[N, 1] ids",
            "low = Less(ids, zero) up = Add(ids, most) i = Where(low, up, ids) e = Equal(i, all) y = Cast <to = 1> (e)",
            {"zero": np.int64(0), "most": np.int64(7), "all": np.arange(7)[None]},
            {"ids": InputValues("ids", 7)},
        ),
        ("float[A, B, 8] x, float[8, 4] w", "y = MatMul(x, w)", {}, {"w": InputValues("weight", 8)}),
        ("float[A, B, 8] x, float[8, 4] w", "z = MatMul(x, w) y = Mul(z, w)", {}, {}),
        (
            "float[N] t",
            "u = Unsqueeze(t, one) a = Mul(u, f) s = Sin(a) c = Cos(a) y = Concat <axis=1> (s, c)",
            {"one": np.int64([1]), "f": np.float32([[1.0, 0.01]])},
            {"t": InputValues("times", 1000)},
        ),
        (
            "int64[N] t",
            "u = Cast <to=1> (t) b = Unsqueeze(u, one) a = Mul(f, b) m = Mul(a, k) y = Sin(m)",
            {"one": np.int64([1]), "f": np.float32([[-0.5, 0.01]]), "k": np.float32(4)},
            {"t": InputValues("times", 500)},
        ),
        ("float[A, B, C] t", "a = Mul(t, k) s = Sin(a) y = Add(t, s)", {"k": np.float32(2)}, {}),
        ("float[N] t", "a = Div(t, k) y = Cos(a)", {"k": np.float32([1, 1e4])}, {"t": InputValues("times", 1000)}),
        ("float[N] t", "a = Mul(t, k) y = Cos(a)", {"k": np.float32(1e-5)}, {"t": InputValues("times", 65504)}),
        (
            "float[N] t, float[N, 4] x",
            "n = Shape <end = 1> (x) k = Expand(one, n) a = Mul(t, k) y = Cos(a)",
            {"one": np.float32(1)},
            {"t": InputValues("times", 1000)},
        ),
        *(
            ("float[N] t", f"a = {op}(t, k) y = Cos(a)", {"k": np.float32(number)}, {})
            for op, number in (("Mul", 0), ("Mul", np.nan), ("Mul", np.inf), ("Div", 0))
        ),
        (
            "int32[N, S] ids",
            "a = Cast <to=7> (ids) f = Reshape(a, s) y = Gather(t, f)",
            {"t": table(300), "s": np.int64([0, -1])},
            {"ids": InputValues("ids", 300)},
        ),
        (
            IDS,
            "i = Gather(t, ids) b = Gather(u, ids) y = Add(i, b)",
            {"t": table(300), "u": table(20)},
            {"ids": InputValues("ids", 20)},
        ),
        (
            "int64[N, S] position_ids",
            "p = Add(position_ids, two) y = Gather(t, p)",
            {"t": table(66), "two": np.int64(2)},
            {"position_ids": InputValues("positions", 64)},
        ),
        (
            "int64[N, S] keep, float[N, S, C] x",
            "u = Unsqueeze(keep, a) f = Cast <to=1> (u) d = Sub(one, f) m = Mul(d, low) y = Add(x, m)",
            {"a": np.int64([2]), "one": np.float32(1), "low": np.float32(-1e4)},
            {"keep": InputValues("mask")},
        ),
        (
            "bool[N, S] keep, float[N, S, C] x",
            "u = Unsqueeze(keep, a) y = Where(u, x, low)",
            {"a": np.int64([2]), "low": np.float32(-1e4)},
            {"keep": InputValues("mask")},
        ),
        (
            "float[N, S] keep, float[N, S, C] x",
            "u = Unsqueeze(keep, a) d = Sub(one, u) m = Mul(d, low) y = Add(x, m)",
            {"a": np.int64([2]), "one": np.float32(1), "low": np.float32(-3.4e38)},
            {"keep": InputValues("mask")},
        ),
        (
            "float[N, S] keep, float[N, S, C] x",
            "u = Unsqueeze(keep, a) d = Sub(u, one) m = Mul(high, d) y = Add(x, m)",
            {"a": np.int64([2]), "one": np.float32([1]), "high": np.float32(1e5)},
            {"keep": InputValues("mask")},
        ),
        (
            "float[N, S] pad, float[N, S, C] x",
            "u = Unsqueeze(pad, a) n = Neg(u) m = Mul(n, high) y = Add(x, m)",
            {"a": np.int64([2]), "high": np.float32(1e9)},
            {"pad": InputValues("padding")},
        ),
        (
            "float[N, S, C] x",
            "d = Sub(half, x) y = Mul(d, low)",
            {"half": np.float32(0.5), "low": np.float32(-1e9)},
            {},
        ),
        ("float[N, S, C] x", "y = Mul(x, low)", {"low": np.float32(255)}, {}),
        ("float[N, S, C] x", "y = Relu(x)", {}, {}),
        (
            "float[N, C, S] x, int64[N] x_lens",
            "l = Unsqueeze(x_lens, a) k = Less(p, l) y = Where(k, x, low)",
            {"a": np.int64([1, 2]), "p": np.arange(64), "low": np.float32(0)},
            {"x_lens": InputValues("lengths")},
        ),
        (
            "float[N, C, S] x, int32[D] to",
            "c = Cast <to=7> (to) y = Resize(x, , , c)",
            {},
            {"to": InputValues("sizes")},
        ),
        ("float[N, S, C] x, int64[N] past_len", "a = Cast <to=1> (past_len) y = Add(x, a)", {}, {}),
        ("float[N, S, C] x, int64[N] silence", "a = Cast <to=1> (silence) y = Add(x, a)", {}, {}),
        ("int64[N, S, C] n", "a = Cast <to=1> (n) y = Relu(a)", {}, {}),
    ],
)
def test_what_the_graph_does_tells(inputs: str, body: str, weights: dict[str, Any], expected: Any) -> None:
    assert input_values(net(inputs, body, **weights)) == expected


def drawn(model: ir.Model, count: int | None = None) -> Samples:
    specs = [input_spec(value) for value in model.graph.inputs]
    shapes = {spec.name: [1, 64, 4][: len(spec.shape)] for spec in specs}
    return open_samples(SYNTHETIC, specs, shapes=shapes, count=count, values=input_values(model))


def test_ids_range_over_the_whole_table() -> None:
    ids = np.concatenate([sample["ids"].ravel() for sample in drawn(net(IDS, "y = Gather(t, ids)", t=table(300)))])
    assert ids.min() >= 0 and ids.max() < 300 and len(np.unique(ids)) > 250
    first = [sample["ids"] for sample in drawn(net(IDS, "y = Gather(t, ids)", t=table(300)), count=2)]
    np.testing.assert_array_equal(np.concatenate(first).ravel(), ids[: 2 * 64])


def test_positions_count_and_stay_within_their_table() -> None:
    (sample,) = drawn(net("int64[N, S] position_ids", "y = Gather(t, position_ids)", t=table(50)), count=1)
    np.testing.assert_array_equal(sample["position_ids"], np.arange(64)[None] % 50)


def test_lengths_are_full_and_sizes_those_of_the_picture() -> None:
    model = net("float[N, 3, H, W] x, int64[2] to, int64[N] x_lens", "a = Cast <to=1> (x_lens) y = Resize(x, , , to)")
    specs = [input_spec(value) for value in model.graph.inputs]
    shapes = {"x": [1, 3, 48, 64]}
    (sample,) = open_samples(SYNTHETIC, specs, shapes=shapes, count=1, values=input_values(model))
    assert sample["to"].tolist() == [48, 64] and sample["x_lens"].tolist() == [64]


def test_lengths_of_ids_and_of_nothing_are_within_reach() -> None:
    body = "i = Gather(t, ids) a = Cast <to=1> (id_lens) y = Add(i, a)"
    (sample,) = drawn(net(f"{IDS}, int64[N] id_lens", body, t=table(300)), count=1)
    assert sample["id_lens"].tolist() == [64]
    (sample,) = drawn(net("int64[N] id_lens", "y = Cast <to=1> (id_lens)"), count=1)
    assert sample["id_lens"].tolist() == [1]


@pytest.mark.parametrize(
    ("inputs", "lengths"),
    [
        ("float[4, 2, 16] x, int32[2] lengths", [1, 1]),  # steps first, or features last: nobody says
        ("float[T, N, 16] x, int32[N] lengths", [1]),
        ("float[N, T, 16] x, float[64, 48] lora_a, int32[N] lengths", [64]),
        ("float[N, T, 16] x, float[L, N, 2, P, 64] past_kv, int32[N] lengths", [64]),
        ("float[N, T] x, uint8[N] lengths", [255]),
    ],
)
def test_lengths_are_those_of_an_input_of_the_same_batch(inputs: str, lengths: list[int]) -> None:
    model = net(inputs, "y = Cast <to=1> (lengths)")
    specs = [input_spec(value) for value in model.graph.inputs]
    long = {"x": [1, 300 if "uint8" in inputs else 64, 16][: len(specs[0].shape)], "past_kv": [1, 1, 2, 0, 64]}
    shapes = {spec.name: long[spec.name] for spec in specs if spec.name in long and not spec.is_static}
    (sample,) = open_samples(SYNTHETIC, specs, shapes=shapes, count=1, values=input_values(model))
    assert sample["lengths"].tolist() == lengths


def test_masks_are_true() -> None:
    body = "u = Unsqueeze(keep, a) y = Where(u, x, low)"
    model = net("bool[N, S] keep, float[N, S, C] x", body, a=np.int64([2]), low=np.float32(0))
    (sample,) = drawn(model, count=1)
    assert sample["keep"].dtype == np.bool_ and sample["keep"].all()


def test_the_table_decides_what_samples_are_called() -> None:
    small, large = (drawn(net(IDS, "y = Gather(t, ids)", t=table(rows))).sha256 for rows in (20, 300))
    assert small != large


def test_ways_that_part_and_meet_are_followed_once() -> None:
    """There are 16**7 ways to the sine; to follow each does not end."""
    body = ""
    for n in range(7):
        ways = [f"x{n}{letter}" for letter in "abcdefghijklmnop"]
        body += " ".join(f"{way} = Mul(x{n}, k)" for way in ways) + f" x{n + 1} = Concat <axis=0> ({', '.join(ways)}) "
    model = net("float[N] x0", f"{body} y = Sin(x7)", k=np.float32(1))
    assert input_values(model) == {"x0": InputValues("times", 1000)}


def test_masks_are_followed_once_however_often_their_ways_meet() -> None:
    body = " ".join(f"p{n + 1} = And(p{n}, p{n})" for n in range(60))
    model = net("bool[N, S, C] p0, float[N, S, C] x", f"{body} y = Where(p60, low, x)", low=np.float32(-1e9))
    assert input_values(model) == {"p0": InputValues("padding")}


def test_times_are_spread_over_their_range() -> None:
    model = net("float[64] t", "a = Mul(t, k) y = Sin(a)", k=np.float32(2))
    (sample,) = open_samples(SYNTHETIC, [input_spec(model.graph.inputs[0])], count=1, values=input_values(model))
    assert 0 <= sample["t"].min() < 100 and 400 < sample["t"].max() <= 500


@pytest.mark.parametrize(("made", "least"), [("Sub(one, keep)", 1.0), ("Identity(keep)", 0.0)])
def test_a_mask_of_floats_takes_nothing_away(made: str, least: float) -> None:
    body = f"d = {made} m = Mul(d, low) y = Add(x, m)"
    model = net("float[N, S, C] keep, float[N, S, C] x", body, one=np.float32(1), low=np.float32(-3.4e38))
    specs = [input_spec(value) for value in model.graph.inputs]
    samples = open_samples(SYNTHETIC, specs, shapes={"keep": (1, 3, 2), "x": (1, 3, 2)}, values=input_values(model))
    assert all((sample["keep"] == least).all() for sample in samples)
