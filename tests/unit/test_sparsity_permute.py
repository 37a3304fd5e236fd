"""Orders of channels for 2:4 masks: the search, which channels may move, and what is reported."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import onnx.parser
import onnx_ir as ir
import pytest

from trtopt.events import Event
from trtopt.graph.channels.links import Dim
from trtopt.graph.channels.orders import entries, orderable_groups, put_in_order
from trtopt.graph.edit import constant_of
from trtopt.graph.shapes import infer_shapes
from trtopt.sparsity.permute import permute
from trtopt.sparsity.stripes import best_order, rows_looked_at

X = "float[N, 8, 6, 6] x"


def kept(saliency: np.ndarray, order: np.ndarray) -> float:
    """What the best two of each four hold: ``[channels, rows]`` in some order."""
    fours = saliency[order].reshape(-1, 4, saliency.shape[1])
    return float(np.sort(fours, axis=1)[:, 2:].sum(dtype=np.float64))


def model_of(
    nodes: str, inputs: str = X, output: str = "N, A, B, C", **weights: tuple[int, ...] | np.ndarray
) -> ir.Model:
    """Weights given by shape are random; nodes are named after their first output."""
    proto = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : 18]> g ({inputs}) => (float[{output}] y) {{ {nodes} }}'
    )
    rng = np.random.default_rng(0)
    for name, given in weights.items():
        array = given if isinstance(given, np.ndarray) else rng.standard_normal(given).astype(np.float32)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    model = infer_shapes(ir.from_proto(proto))
    for node in model.graph:
        node.name = str(node.outputs[0].name)
    return model


def weight_of(model: ir.Model, name: str, index: int = 1) -> np.ndarray:
    array = constant_of(next(node for node in model.graph if node.name == name).inputs[index])
    assert array is not None
    return array


def test_heavy_channels_are_spread() -> None:
    """Eight heavy channels in two of four fours: a mask would drop half of them; spread, it drops none."""
    saliency = np.full((16, 5), 0.01, np.float32)
    saliency[4:12] = 1
    order = best_order(saliency, seed=0)
    assert sorted(order) == list(range(16))
    assert kept(saliency, order) == pytest.approx(8 * 5)


@pytest.mark.parametrize("seed", range(4))
def test_two_fours_are_split_in_the_best_of_35_ways(seed: int) -> None:
    saliency = np.random.default_rng(seed).random((8, 3)).astype(np.float32) ** 2
    splits = [(0, *rest) for rest in combinations(range(1, 8), 3)]
    best = max(kept(saliency, np.array([*one, *(set(range(8)) - set(one))])) for one in splits)
    found = max(kept(saliency, best_order(saliency, start)) for start in range(8))
    assert found == pytest.approx(best)


@pytest.mark.parametrize(("channels", "gain", "block"), [(8, 0.0, 128), (64, 0.05, 128), (64, 0.05, 4)])
def test_an_order_keeps_more_and_depends_on_the_seed_alone(
    channels: int, gain: float, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All fours exchange channels in one step, or a few of them in each."""
    monkeypatch.setattr("trtopt.sparsity.stripes._BLOCK", block)
    saliency = np.random.default_rng(channels).standard_normal((channels, 8)).astype(np.float32) ** 2
    order = best_order(saliency, seed=3)
    assert sorted(order) == list(range(channels))
    assert kept(saliency, order) >= (1 + gain) * kept(saliency, np.arange(channels))
    assert np.array_equal(order, best_order(saliency, seed=3))


def test_where_nothing_gains_the_order_stays() -> None:
    assert np.array_equal(best_order(np.ones((16, 3), np.float32), seed=0), np.arange(16))


def test_rows_are_bounded_however_many_channels() -> None:
    assert rows_looked_at(64) > 100_000 > rows_looked_at(4096) > 100


REFUSED = {
    "a = LRN <size = 3> (s)": "reads neighbouring channels",
    "a = GroupNormalization <num_groups = 2> (s, g, g)": "reads neighbouring channels",
    "a = DepthToSpace <blocksize = 2> (s)": "not followed through: DepthToSpace",
    "k = Constant <value_ints = [0, 2, 8, 6, 6]> () r = Reshape(s, k) "
    "t = Transpose <perm = [0, 2, 1, 3, 4]> (r) l = Constant <value_ints = [0, 16, 6, 6]> () "
    "a = Reshape(t, l)": "splits it",
    "k = Constant <value_ints = [3, 1]> () a = Gather <axis = 1> (s, k)": "picks entries",
    "k = Constant <value_ints = [0, 1, 0, 0, 0, 0, 0, 0]> () a = Pad <mode = \"edge\"> (s, k)": "pads it",
    "k = Constant <value_ints = [0]> () l = Constant <value_ints = [16]> () m = Constant <value_ints = [1]> () "
    "n = Constant <value_ints = [2]> () a = Slice(s, k, l, m, n)": "every n-th channel",
    "t = Transpose <perm = [0, 1, 3, 2]> (s) a = MatMul(t, s)": "multiplies two activations",
    "a = CumSum(s, one)": "not followed through: CumSum",
    "b = Identity(s) a = Add(b, v)": "is an input",
}  # fmt: skip


@pytest.mark.parametrize("nodes", REFUSED)
def test_what_is_not_certain_stays(nodes: str) -> None:
    """Channel 16 of ``s`` meets an operator to which their order matters, or may."""
    inputs = X + (", float[N, 16, 6, 6] v" if "v)" in nodes else "")
    one = np.asarray(1, np.int64)
    model = model_of(f"s = Conv(x, w0) {nodes} b1 = Relu(a) c = Conv(s, w1) p = GlobalAveragePool(b1) y = Add(c, c)",
                     inputs, w0=(16, 8, 1, 1), w1=(4, 16, 1, 1), g=(16,), one=one)  # fmt: skip
    result = permute(model, ["c"])
    assert result.model is model and not result.groups
    (refused,) = result.refused
    assert refused.nodes == ("c",) and refused.channels == 16 and REFUSED[nodes] in refused.reason


def test_outputs_and_inputs_stay() -> None:
    model = model_of("a = Conv(x, u) y = Conv(a, v) z = Conv(y, w)", u=(8, 8, 1, 1), v=(8, 8, 1, 1), w=(4, 8, 1, 1))
    result = permute(model, ["a", "y", "z"])
    assert [(item.nodes, item.reason) for item in result.refused] == [
        (("a",), "x is an input, which the caller shapes"),
        (("z",), "y leaves the network"),
    ]
    assert [group.nodes for group in result.groups] == [("y",)]
    before, after = (np.sort(weight_of(each, "z"), axis=None) for each in (model, result.model))
    assert np.array_equal(before, after)


def test_what_is_2_4_already_stays() -> None:
    sparse = np.random.default_rng(0).standard_normal((4, 16, 1, 1)).astype(np.float32)
    sparse[:, ::4] = sparse[:, 1::4] = 0
    model = model_of("a = Conv(x, u) b = Conv(a, v) c = Conv(a, w) y = Add(b, c)", u=(16, 8, 1, 1), v=(4, 16, 1, 1),
                     w=sparse)  # fmt: skip
    result = permute(model, ["b"])
    assert [item.reason for item in result.refused] == ["the weight of c is 2:4 as it is"]


def test_weights_shared_with_channels_that_stay_are_not_copied() -> None:
    model = model_of("a = Conv(x, u) b = Conv(a, v) t = Conv(x, u) d = DepthToSpace <blocksize = 2> (t) "
                     "p = GlobalAveragePool(d) y = Add(b, p)", u=(16, 8, 1, 1), v=(4, 16, 1, 1))  # fmt: skip
    result = permute(model, ["b"])
    assert [item.reason for item in result.refused] == ["u is shared with t, whose channels cannot move with them"]


def test_channels_in_no_fours_of_their_own_stay() -> None:
    model = model_of("a = Conv(x, u) b = Conv(x, v) k = Concat <axis = 1> (a, b) y = Conv(k, w)",
                     u=(6, 8, 1, 1), v=(18, 8, 1, 1), w=(4, 24, 1, 1))  # fmt: skip
    result = permute(model, ["y"])
    assert [item.reason for item in result.refused] == ["no weight has them in two or more fours of their own"] * 2


def test_a_layer_counts_by_its_inputs_where_they_are_known() -> None:
    """Two heavy inputs in one four with two heavy weights: the squares alone would leave them together."""
    weight = np.full((4, 8, 1, 1), 0.1, np.float32)
    weight[:, :4] = 1
    model = model_of("a = Conv(x, u) y = Conv(a, w)", u=(8, 8, 1, 1), w=weight)
    by_weights = permute(model, ["y"])
    assert by_weights.layers[0].after == pytest.approx(4 / 4.04, rel=1e-5)
    mean_square = np.array([1e-4] * 4 + [1.0] * 4)
    by_inputs = permute(model, ["y"], importance={"y": mean_square})
    worth = np.square(weight[0, :, 0, 0]) * mean_square
    assert by_inputs.layers[0].before == pytest.approx(np.sort(worth)[[2, 3, 6, 7]].sum() / worth.sum(), rel=1e-5)
    assert by_inputs.layers[0].after > by_inputs.layers[0].before


def test_the_mean_squares_of_a_grouped_convolution_are_those_of_its_groups() -> None:
    model = model_of("a = Conv(x, u) y = Conv <group = 2> (a, w)", u=(16, 8, 1, 1), w=(6, 8, 3, 3))
    mean_square = np.arange(1.0, 17.0)
    result = permute(model, ["y"], importance={"y": mean_square})
    worth = weight_of(model, "y") ** 2
    worth[:3] *= mean_square[:8, None, None]
    worth[3:] *= mean_square[8:, None, None]
    fours = np.sort(np.moveaxis(worth, 1, -1).reshape(-1, 4), axis=1)
    assert result.layers[0].before == pytest.approx(fours[:, 2:].sum() / fours.sum(), rel=1e-5)
    assert result.layers[0].after > result.layers[0].before


def test_a_search_looks_at_some_rows_where_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("a = Conv(x, u) y = Conv(a, w)", u=(64, 8, 1, 1), w=(96, 64, 3, 3))
    all_rows = permute(model, ["y"]).layers[0]
    monkeypatch.setattr("trtopt.sparsity.stripes._COMPARISONS", 1_000_000)
    assert 96 * 9 > rows_looked_at(64) == 325
    some_rows = permute(model, ["y"]).layers[0]
    assert some_rows.before == all_rows.before < some_rows.after < all_rows.after


def test_progress_and_names() -> None:
    model = model_of("a = Conv(x, u) b = Conv(a, v) y = Conv(b, w)", u=(16, 8, 1, 1), v=(16, 16, 1, 1),
                     w=(4, 16, 1, 1))  # fmt: skip
    events: list[Event] = []
    result = permute(model, ["b", "y"], on_event=events.append)
    assert [event.kind for event in events] == ["start", "advance", "advance", "end"] and events[0].total == 2
    assert {event.task for event in events} == {"permute"} and [event.text for event in events[1:3]] == ["b", "y"]
    assert sorted(result.model.graph.initializers) == ["a_ordered_1", "b_ordered_1", "y_ordered_1"]
    assert sorted(model.graph.initializers) == ["u", "v", "w"]
    again = permute(model, ["b", "y"])
    assert all(np.array_equal(weight_of(again.model, name), weight_of(result.model, name)) for name in "aby")


@pytest.mark.parametrize("name", ["s", "nobody", "m"])
def test_a_node_without_a_weight_is_an_error(name: str) -> None:
    model = model_of("a = Conv(x, u) s = Relu(a) m = MatMul(s, s) y = Add(m, m)", u=(8, 8, 1, 1))
    with pytest.raises(ValueError, match=name):
        permute(model, [name])


def test_a_slice_of_another_axis_may_be_computed() -> None:
    model = model_of("l = Shape <start = 2, end = 3> (x) a = Conv(x, u) s = Slice(a, zero, l, two) y = Conv(s, w)",
                     u=(8, 8, 1, 1), w=(4, 8, 1, 1), zero=np.array([0]), two=np.array([2]))  # fmt: skip
    model.graph.node("s").outputs[0].shape = ir.Shape(["N", 8, "H", 6])
    assert [group.nodes for group in permute(model, ["y"]).groups] == [("y",)]


def test_an_order_is_written_everywhere() -> None:
    """Channels of 36 elements behind Flatten, two spans behind Concat, a normalization, a depthwise convolution."""
    model = model_of(
        "a = Conv(x, u, c) n = BatchNormalization(a, g, h, m, r) d = Conv <group = 4> (n, e) "
        "k = Concat <axis = 1> (d, d) f = Flatten(k) y = Gemm <transB = 1> (f, w)",
        output="N, 3", u=(4, 8, 1, 1), c=(4,), g=(4,), h=(4,), m=(4,), r=np.ones(4, np.float32), e=(8, 1, 1, 1),
        w=(3, 576),
    )  # fmt: skip
    seed = next(node for node in model.graph if node.name == "a").outputs[0]
    (group,) = orderable_groups([Dim(seed, 1)])
    order, clone = np.array([2, 0, 3, 1]), model.clone()
    assert not group.reason and group.size == 4
    seed = next(node for node in clone.graph if node.name == "a").outputs[0]
    (group,) = orderable_groups([Dim(seed, 1)])
    put_in_order(clone, [(group, order)])
    for name, index in (("a", 1), ("a", 2), ("n", 1), ("n", 2), ("n", 3)):
        assert np.array_equal(weight_of(clone, name, index), weight_of(model, name, index)[order])
    assert np.array_equal(weight_of(clone, "d").reshape(4, 2), weight_of(model, "d").reshape(4, 2)[order])
    columns = [weight_of(each, "y").reshape(3, 2, 4, 72) for each in (model, clone)]
    assert np.array_equal(columns[1], columns[0][:, :, order])
    (rows,) = [param for param in group.params if param.node.name == "d"]
    assert entries(group, order, rows).tolist() == [4, 5, 0, 1, 6, 7, 2, 3]
