"""Networks that ONNX Runtime runs, pruned to 2:4 and recovered from samples."""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from trtopt.events import Event
from trtopt.graph import edit
from trtopt.graph.shapes import infer_shapes
from trtopt.precision.fp16.to_fp32 import to_fp32
from trtopt.precision.observe.feeds import Sample
from trtopt.rewrite.driver import run
from trtopt.source.onnx_file import load
from trtopt.sparsity.layers import by_magnitude, candidates, is_sparse, with_pruned
from trtopt.sparsity.prune import PrunedModel, prune, recover
from trtopt.support.ort_session import OrtSession

MODELS = Path(__file__).resolve().parents[3] / "shared" / "models"

NETWORK = """g (float[N,8,10,10] x) => (float[N,8] out) {
    a = Conv <pads = [1, 1, 1, 1]> (x, w1, b1)
    r = Relu (a)
    c = Conv <group = 2, strides = [2, 2]> (r, w2)
    s = Sigmoid (c)
    m = GlobalAveragePool (s)
    f = Flatten (m)
    g = Gemm <transB = 1> (f, w3)
    t = Tanh (g)
    p = MatMul (t, w4)
    q = Add (p, b4)
    u = Tanh (q)
    out = MatMul (u, w4)
}"""
SHAPES = {"w1": (16, 8, 3, 3), "b1": (16,), "w2": (16, 8, 3, 3), "w3": (8, 16), "w4": (8, 8), "b4": (8,)}
PRODUCTS = {"a": 1, "c": 1, "g": 1, "p": 0, "out": 0}
"""The nodes with weights, and the weights' reduction axes."""


def network() -> ir.Model:
    """Convolutions with and without groups, products of both directions, and a weight that two of them share."""
    rng = np.random.default_rng(5)
    found = ir.from_onnx_text(f'<ir_version: 10, opset_import: ["" : 21]>\n{NETWORK}')
    for name, shape in SHAPES.items():
        array = rng.standard_normal(shape) / np.sqrt(np.prod(shape[1:])) * 3
        value = edit.add_initializer(found.graph, f"{name}_", array.astype(np.float32))
        for node in found.graph:
            for index, old in enumerate(node.inputs):
                if old is not None and old.name == name:
                    node.replace_input_with(index, value)
    found = infer_shapes(ir.from_proto(ir.to_proto(found)))
    for node in found.graph:
        node.name = str(node.outputs[0].name)
    return found


def samples(count: int, seed: int = 0) -> list[Sample]:
    """Smooth images with offsets of their own, so that inputs are correlated and means are not zero."""
    rng = np.random.default_rng(seed)
    images = rng.standard_normal((count, 1, 8, 10, 10)).cumsum(axis=-1) / 3 + rng.standard_normal((count, 1, 8, 1, 1))
    return [{"x": image.astype(np.float32)} for image in images]


class Judge:
    """The error of a model's outputs against another's: noise over signal."""

    def __init__(self, reference: ir.Model) -> None:
        self._reference = reference
        self.asked = 0

    def __call__(self, model: ir.Model, judged: Sequence[Sample]) -> float:
        self.asked += 1
        noise = signal = 0.0
        with OrtSession(self._reference) as exact, OrtSession(model) as other:
            for sample in judged:
                for one, two in zip(exact.run(sample), other.run(sample), strict=True):
                    noise, signal = noise + float(np.square(one - two).sum()), signal + float(np.square(one).sum())
        return noise / signal


def pruned(model: ir.Model, count: int = 40, seed: int = 0) -> PrunedModel:
    return prune(model, candidates(model).layers, samples(count), Judge(model), seed=seed)


def weights(model: ir.Model) -> dict[str, np.ndarray]:
    return {
        str(node.name): np.asarray(edit.constant_of(node.inputs[1])) for node in model.graph if node.name in PRODUCTS
    }


def test_all_layers_become_sparse_and_the_outputs_keep_much_more_than_with_magnitude() -> None:
    model = network()
    result = pruned(model)
    assert {name: is_sparse(array, PRODUCTS[name]) for name, array in weights(result.model).items()} == dict.fromkeys(
        PRODUCTS, True
    )
    plain = with_pruned(model, [by_magnitude(model, layer) for layer in candidates(model).layers])
    unseen, judge = samples(20, seed=9), Judge(model)
    assert judge(result.model, unseen) < 0.5 * judge(plain, unseen)
    assert [trial.name for trial in result.trials] == ["magnitude", "recovered"]
    assert result.trials[1].error < result.trials[0].error and not result.reason


def test_each_layer_says_what_became_of_it() -> None:
    model = network()
    result = pruned(model)
    written = weights(result.model)
    assert [layer.nodes for layer in result.layers] == [("a",), ("c",), ("g",), ("p", "out")]
    for layer in result.layers:
        dense = np.abs(weights(model)[layer.nodes[0]])
        assert layer.method == "recovered"
        assert layer.errors is not None and layer.errors[1] < layer.errors[0]
        assert layer.kept == pytest.approx(dense.sum(where=layer.values != 0) / dense.sum(), rel=1e-5)
        for node in layer.nodes:
            np.testing.assert_array_equal(written[node], layer.values)
    # The last MatMul has no constant to add a bias to.
    assert [sorted(layer.bias) for layer in result.layers] == [["a"], ["c"], ["g"], ["p"]]


def test_the_model_is_not_changed_and_the_result_depends_on_the_seed_alone() -> None:
    model = network()
    before = {name: np.array(array) for name, array in weights(model).items()}
    one, two = pruned(model), pruned(model)
    for name, array in weights(model).items():
        np.testing.assert_array_equal(array, before[name])
        np.testing.assert_array_equal(weights(one.model)[name], weights(two.model)[name])


def test_some_of_the_layers_can_be_written() -> None:
    model = network()
    result = pruned(model)
    part = weights(with_pruned(model, [layer for layer in result.layers if layer.nodes == ("c",)]))
    assert [name for name in PRODUCTS if is_sparse(part[name], PRODUCTS[name])] == ["c"]


def test_layers_that_are_not_named_stay_dense() -> None:
    model = network()
    chosen = [layer for layer in candidates(model).layers if layer.nodes == ("a",)]
    result = prune(model, chosen, samples(40), Judge(model))
    assert [name for name in PRODUCTS if is_sparse(weights(result.model)[name], PRODUCTS[name])] == ["a"]


@pytest.mark.parametrize("count", [None, 0, 5])
def test_with_too_few_samples_weights_are_pruned_by_magnitude(count: int | None) -> None:
    model, judge = network(), Judge(network())
    result = prune(model, candidates(model).layers, None if count is None else samples(count), judge)
    assert {layer.method for layer in result.layers} == {"magnitude"}
    assert result.reason == "fewer than 6 samples" and result.trials == () and judge.asked == 0
    assert all(is_sparse(array, PRODUCTS[name]) for name, array in weights(result.model).items())


def test_a_sparse_model_stays_as_it_is() -> None:
    model = pruned(network()).model
    result = pruned(model)
    assert result.reason == "no weight is left to prune"
    assert {layer.method for layer in result.layers} == {"was sparse"}
    for name, array in weights(model).items():
        np.testing.assert_array_equal(weights(result.model)[name], array)


def test_what_was_sparse_stays_beside_what_is_recovered() -> None:
    model = network()
    model = with_pruned(
        model, [by_magnitude(model, layer) for layer in candidates(model).layers if layer.nodes == ("c",)]
    )
    result = pruned(model)
    assert [layer.method for layer in result.layers] == ["recovered", "was sparse", "recovered", "recovered"]
    np.testing.assert_array_equal(weights(result.model)["c"], weights(model)["c"])


def test_magnitude_stays_where_the_outputs_are_better_with_it() -> None:
    model, errors = network(), iter([0.1, 0.2])
    result = prune(model, candidates(model).layers, samples(12), lambda _, __: next(errors))
    assert {layer.method for layer in result.layers} == {"magnitude"}
    assert result.reason == "magnitude is better at the outputs, on samples kept from the fit"
    assert [(trial.name, trial.error) for trial in result.trials] == [("magnitude", 0.1), ("recovered", 0.2)]


def test_a_layer_whose_fit_does_not_hold_on_other_samples_keeps_magnitude() -> None:
    """Inputs come in pairs that are equal in what is fitted, and of opposite sign in every fourth sample."""
    text = "g (float[N,16] x) => (float[N,8] y) { y = MatMul (x, w) }"
    model = ir.from_onnx_text(f'<ir_version: 10, opset_import: ["" : 21]>\n{text}')
    rng = np.random.default_rng(2)
    weight = edit.add_initializer(model.graph, "weight", rng.standard_normal((16, 8)).astype(np.float32))
    model.graph[0].replace_input_with(1, weight)
    model.graph[0].name = "y"
    halves = rng.standard_normal((16, 30, 8)).astype(np.float32)
    signs = [-1 if index % 4 == 3 else 1 for index in range(16)]
    feeds = [{"x": np.stack([half, sign * half], -1).reshape(30, 16)} for half, sign in zip(halves, signs, strict=True)]
    [layer] = recover(model, candidates(model).layers, feeds)
    assert layer.method == "magnitude"
    [fair] = recover(model, candidates(model).layers, [feed for index, feed in enumerate(feeds) if index % 4 != 3])
    assert fair.method == "recovered"


def test_inputs_that_are_not_finite_leave_a_layer_to_magnitude() -> None:
    model = network()
    largest = np.full((16,), 3e38, np.float32)
    next(node for node in model.graph if node.name == "a").inputs[2].const_value = ir.tensor(largest)  # type: ignore[union-attr]
    errors = iter([1.0, 0.5])
    result = prune(model, candidates(model).layers, samples(12), lambda _, __: next(errors))
    layers = {layer.nodes[0]: layer for layer in result.layers}
    assert layers["c"].method == "magnitude"
    assert all(np.isfinite(bias).all() for layer in result.layers for bias in layer.bias.values())


def test_progress_counts_the_nodes() -> None:
    model, events = network(), list[Event]()
    prune(model, candidates(model).layers, samples(12), Judge(model), on_event=events.append)
    assert events[0] == Event("start", "prune", total=len(PRODUCTS))
    assert [event.kind for event in events[1:]] == ["advance"] * len(PRODUCTS) + ["end"]


def unpacked(path: Path, header: int) -> np.ndarray:
    return np.frombuffer(gzip.decompress(path.read_bytes()), np.uint8)[header:]


@pytest.mark.shared
def test_digits_are_read_almost_as_well_as_before() -> None:
    """Of 9800 digits that were not calibrated with, as the model's top class has it."""
    folder = MODELS / "mnist_cntk"
    if not folder.exists():
        pytest.skip(f"{folder} is not there")
    model = to_fp32(run(load(folder / "model.onnx")).artifact.model)
    images = unpacked(folder / "t10k-images-idx3-ubyte.gz", 16)
    digits = [{"Input3": image.astype(np.float32)} for image in images.reshape(-1, 1, 1, 28, 28)]
    labels = unpacked(folder / "t10k-labels-idx1-ubyte.gz", 8)
    result = prune(model, candidates(model).layers, digits[:200], Judge(model))
    assert {layer.method for layer in result.layers} == {"recovered"}
    right = []
    for each in (model, result.model):
        with OrtSession(each) as session:
            found = [int(session.run(digit)[0].argmax()) for digit in digits[200:]]
        right.append(float(np.mean(np.array(found) == labels[200:])))
    assert right[1] > right[0] - 0.0025
