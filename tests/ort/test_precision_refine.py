"""Weights rounded and biases corrected along a network that ONNX Runtime runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
import pytest

from trtopt.events import Event
from trtopt.graph import edit
from trtopt.graph.shapes import infer_shapes
from trtopt.precision.observe.feeds import Sample
from trtopt.precision.plan import FP16, PrecisionPlan, QuantizedOp
from trtopt.precision.ptq.correct import Goal, correct, mean_error
from trtopt.precision.ptq.layer_walk import samples_held, walk
from trtopt.precision.ptq.refine import Refined, refine
from trtopt.precision.write import quantize
from trtopt.support.ort_session import OrtSession
from trtopt.support.precision import Precision

RNG = np.random.default_rng(3)

NETWORK = """g (float[N,4,12,12] x, bool go) => (float[N,6] out)
  <float[8,4,3,3] w1, float[8] b1, float[8,4,3,3] w2, float[8,6] w3, float[6] b3> {
    a = Conv <pads = [1, 1, 1, 1]> (x, w1, b1)
    r = Relu (a)
    c = Conv <group = 2, pads = [1, 1, 1, 1]> (r, w2)
    two = Constant <value_float = 2.0> ()
    i = If (go) <then_branch = t () => (float s) { s = Mul (c, two) }, else_branch = e () => (float n) { n = Neg (c) }>
    d = Add (i, r)
    m = GlobalAveragePool (d)
    f = Flatten (m)
    p = MatMul (f, w3)
    out = Add (p, b3)
}"""


def network() -> ir.Model:
    rng = np.random.default_rng(5)
    found = ir.from_onnx_text(f'<ir_version: 10, opset_import: ["" : 21]>\n{NETWORK}')
    for name, shape in {"w1": (8, 4, 3, 3), "b1": (8,), "w2": (8, 4, 3, 3), "w3": (8, 6), "b3": (6,)}.items():
        value = edit.add_initializer(found.graph, f"{name}_", rng.standard_normal(shape).astype(np.float32))
        for node in found.graph:
            for index, old in enumerate(node.inputs):
                if old is not None and old.name == name:
                    node.replace_input_with(index, value)
    found = infer_shapes(ir.from_proto(ir.to_proto(found)))
    for node in edit.all_nodes(found.graph):
        node.name = str(node.outputs[0].name)
    return found


def samples(count: int, seed: int = 0) -> list[Sample]:
    """Smooth images with offsets of their own, so that inputs are correlated and means are not zero."""
    rng = np.random.default_rng(seed)
    images = rng.standard_normal((count, 1, 4, 12, 12)).cumsum(axis=-1) / 3 + rng.standard_normal((count, 1, 4, 1, 1))
    return [{"x": image.astype(np.float32), "go": np.array(True)} for image in images]


def coarse_plan() -> PrecisionPlan:
    """Clipped activations and one scale per weight: enough error for a correction to show."""
    ops = (
        QuantizedOp("a", "x", 5.0, None, "max"),
        QuantizedOp("c", "r", 60.0, 0, "max", multiply=True),
        QuantizedOp("p", "f", 250.0, 1, "max"),
    )
    return PrecisionPlan(Precision.INT8, FP16, quantized=ops)


def plan_of(plan: PrecisionPlan, node: ir.Node) -> PrecisionPlan:
    """What a plan says of one node."""
    return dataclasses.replace(plan, quantized=tuple(op for op in plan.quantized if op.node == node.name))


class Errors:
    """``error_of`` as a build has it: noise over signal at the outputs, on samples that nothing is fitted to."""

    def __init__(self, base: ir.Model) -> None:
        self.base, self.judged = base, samples(60, seed=4)
        self.calls = 0

    def __call__(self, plan: PrecisionPlan, chosen: Sequence[Sample] = ()) -> float:
        self.calls += 1
        signal = noise = 0.0
        with OrtSession(self.base) as exact, OrtSession(quantize(self.base, plan).model, keep_qdq=True) as rounded:
            for sample in chosen or self.judged:
                wanted, found = exact.run(sample)[0], rounded.run(sample)[0]
                signal += float(np.square(wanted).sum())
                noise += float(np.square(found - wanted).sum())
        return noise / signal


def refined(base: ir.Model, seed: int = 0) -> Refined:
    return refine(base, coarse_plan(), samples(60), Errors(base), seed=seed)


def test_the_error_falls_on_samples_that_were_not_looked_at() -> None:
    base = network()
    before = ir.to_proto(base).SerializeToString()
    errors, events = Errors(base), list[Event]()
    found = refine(base, coarse_plan(), samples(60), errors, on_event=events.append)
    fresh = samples(40, seed=9)
    assert found.kept != "none" and errors.calls <= 6
    assert errors(found.plan, fresh) < 0.8 * errors(coarse_plan(), fresh)
    assert min(trial.error for trial in found.trials) == {t.name: t.error for t in found.trials}[found.kept]
    assert ir.to_proto(base).SerializeToString() == before
    assert all(values.dtype == np.int8 and np.abs(values).max() <= 127 for values in found.plan.rounded.values())
    passes = [event for event in events if event.kind == "start"]
    assert sum(event.kind == "advance" for event in events) == 3 * len(passes) > 0


def test_the_same_seed_gives_the_same_plan() -> None:
    base = network()
    one, two = refined(base), refined(base)
    assert one.trials == two.trials and one.kept == two.kept
    for name in ("rounded", "bias"):
        first, second = getattr(one.plan, name), getattr(two.plan, name)
        assert first.keys() == second.keys() and all(np.array_equal(first[key], second[key]) for key in first)


def test_nothing_is_kept_that_does_not_lower_the_error() -> None:
    base, calls = network(), list[tuple[int, int]]()

    def error_of(plan: PrecisionPlan) -> float:
        calls.append((len(plan.rounded), len(plan.bias)))
        return 1.0

    found = refine(base, coarse_plan(), samples(20), error_of)
    assert found.kept == "none" and not found.plan.rounded and not found.plan.bias
    assert calls[0] == (0, 0) and len(calls) == len(found.trials) == 4


@pytest.mark.parametrize(("both", "tried"), [(1.1, True), (1.5, False)])
def test_rounding_alone_is_tried_where_rounding_and_biases_are_nearly_the_best(both: float, tried: bool) -> None:
    def error_of(plan: PrecisionPlan) -> float:
        return both if plan.rounded and plan.bias else 0.5 if plan.rounded else 1.0

    found = refine(network(), coarse_plan(), samples(20), error_of)
    assert ("rounding" in [trial.name for trial in found.trials]) == tried == (found.kept == "rounding")
    assert bool(found.plan.rounded) == tried and not found.plan.bias


def test_an_error_that_the_caller_knows_is_not_measured_again() -> None:
    base = network()
    errors, plan = Errors(base), coarse_plan()
    known = errors(plan)
    found = refine(base, plan, samples(60), errors, error=known)
    assert found.trials[0].error == known and errors.calls == len(found.trials)


def test_too_few_samples_change_nothing() -> None:
    base = network()
    found = refine(base, coarse_plan(), samples(5), Errors(base))
    assert found.kept == "none" and "fewer than" in found.reason and not found.trials
    empty = dataclasses.replace(coarse_plan(), quantized=())
    assert refine(base, empty, samples(20), Errors(base)).reason == "no node is quantized"


def test_the_walk_computes_what_the_whole_networks_compute() -> None:
    base, plan, given = network(), coarse_plan(), samples(3)
    names = [op.node for op in plan.quantized]
    with (
        OrtSession(base, names) as exact,
        OrtSession(quantize(base, plan).model, names, keep_qdq=True) as rounded,
    ):
        expected = [(exact.run(sample), rounded.run(sample)) for sample in given]
    for index, stop in enumerate(walk(base, names, given)):
        outputs = stop.run(quantize(stop.subgraph, plan_of(plan, stop.node)).model)
        for side in (0, 1):
            for sample, array in enumerate(outputs[side]):
                assert np.allclose(array, expected[sample][side][index], rtol=1e-3, atol=1e-3)


def test_networks_of_one_walk_do_not_see_each_other() -> None:
    base, plan, given = network(), coarse_plan(), samples(3)
    names = [op.node for op in plan.quantized]
    alone = [stop.run(quantize(stop.subgraph, plan_of(plan, stop.node)).model) for stop in walk(base, names, given)]
    together = []
    for stop in walk(base, names, given, networks=2):
        if stop.network == 0:
            together.append(stop.run(quantize(stop.subgraph, plan_of(plan, stop.node)).model))
        else:  # this one is not quantized at all
            exact, noisy = stop.run(stop.subgraph)
            assert all(np.array_equal(one, other) for one, other in zip(exact, noisy, strict=True))
    for one, other in zip(alone, together, strict=True):
        for side in (0, 1):
            assert all(np.array_equal(first, second) for first, second in zip(one[side], other[side], strict=True))


def test_wishes_of_one_walk_find_what_they_find_alone() -> None:
    base, plan, given = network(), coarse_plan(), samples(12)
    wishes = (Goal(rounding=False, bias=True), Goal(rounding=True, bias=True))
    for wish, found in zip(wishes, correct(base, plan, given, wishes), strict=True):
        (alone,) = correct(base, plan, given, (wish,))
        assert found.bias.keys() == alone.bias.keys() == {"a", "c", "p"}
        assert found.rounded.keys() == alone.rounded.keys() and bool(found.rounded) == wish.rounding
        assert all(np.array_equal(values, alone.bias[name]) for name, values in found.bias.items())
        assert all(np.array_equal(values, alone.rounded[name]) for name, values in found.rounded.items())


def test_fewer_samples_are_held_where_tensors_are_larger() -> None:
    base = network()
    small = {"a": (1, 8, 12, 12), "r": (1, 8, 12, 12), "c": (1, 8, 12, 12)}
    large = dict.fromkeys(small, (1, 8, 2000, 2000))
    assert samples_held(base, small, 128) == 128 and samples_held(base, large, 128) == 4


def test_some_weights_keep_their_nearest_values() -> None:
    base = network()
    ops = list(coarse_plan().quantized)
    ops[0] = dataclasses.replace(ops[0], dtype="fp8")
    found = correct(base, dataclasses.replace(coarse_plan(), quantized=tuple(ops)), samples(8), (Goal(True, False),))[0]
    assert found.rounded and "a" not in found.rounded
    text = """g (float[N,4] x) => (float[N,4] z) <float[4,4] w = {1,2,3,4,5,6,7,8,9,1,2,3,4,5,6,7}> {
        y = MatMul (x, w) z = MatMul (y, w) }"""
    twice = infer_shapes(ir.from_onnx_text(f'<ir_version: 10, opset_import: ["" : 21]>\n{text}'))
    for node in twice.graph:
        node.name = str(node.outputs[0].name)
    both = tuple(QuantizedOp(name, data, 4.0, 1, "max") for name, data in (("y", "x"), ("z", "y")))
    rows = [{"x": RNG.standard_normal((1, 4)).astype(np.float32)} for _ in range(8)]
    found = correct(twice, PrecisionPlan(Precision.INT8, FP16, quantized=both), rows, (Goal(True, True),))[0]
    assert not found.rounded and not found.bias


@pytest.mark.parametrize("relu", [False, True])
def test_the_mean_error_is_what_is_more_than_chance(relu: bool) -> None:
    text = "g (float[N,2] x) => (float[N,2] z) <float[2,2] w = {1,2,3,4}> { y = MatMul (x, w) z = Relu (y) }"
    found = ir.from_onnx_text(f'<ir_version: 10, opset_import: ["" : 21]>\n{text}')
    node = found.graph[0]
    if not relu:
        found.graph[1].op_type = "Sigmoid"
    exact = [RNG.standard_normal((50, 2)).astype(np.float32) for _ in range(20)]
    noise = [RNG.standard_normal((50, 2)).astype(np.float32) * 1e-3 for _ in range(20)]
    # The first channel is off by 0.1 where it is positive, the second by chance only.
    noisy = [a + b + np.array([0.1, 0], np.float32) * (a > 0) for a, b in zip(exact, noise, strict=True)]
    mean = mean_error(node, exact, noisy)
    assert mean[0] == pytest.approx(0.1 if relu else 0.05, rel=0.1)
    assert abs(mean[1]) < 1e-4
