"""Putting nodes back to FP32: finds who does harm, ends, never makes things worse."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
import onnx_ir as ir
import pytest
from drawn_cases import given
from hypothesis import strategies as st

from trtopt.graph import edit
from trtopt.graph.shapes import infer_shapes
from trtopt.precision.fp16.repair import MOST_EVALUATIONS, MOST_LEFT_OUT, Damage, Repaired, repair, smallest_sqnr_db
from trtopt.precision.plan import BF16, FP16, PrecisionPlan, QuantizedOp
from trtopt.support.precision import Precision

OPS = ["Relu", "Tanh", "Neg", "Exp", "Sigmoid", "Abs", "Erf", "Sqrt"]


def chain(count: int, ops: list[str] = OPS) -> ir.Model:
    """n0, n1, ... one behind the other; equal kinds every ``len(ops)`` nodes."""
    text = " ".join(f"n{i} = {ops[i % len(ops)]}({f'n{i - 1}' if i else 'x'})" for i in range(count))
    return _named(f"g (float[4] x) => (float[4] n{count - 1}) {{ {text} }}")


def _named(text: str) -> ir.Model:
    model = infer_shapes(ir.from_onnx_text(f'<ir_version: 10, opset_import: ["" : 21]>\n{text}'))
    for node in edit.all_nodes(model.graph):
        node.name = str(node.outputs[0].name)
    return model


class Bench:
    """Damage as a function of the nodes that are 16-bit; counts how often it is asked."""

    def __init__(self, model: ir.Model, excess: Callable[[frozenset[str]], float]) -> None:
        self.names = frozenset(str(node.name) for node in model.graph)
        self.excess, self.asked = excess, 0

    def __call__(self, plan: PrecisionPlan) -> Damage:
        assert not plan.quantized
        assert not set(plan.wide) & set(plan.bfloat)
        self.asked += 1
        found = self.excess(self.names - frozenset(plan.wide))
        return Damage(found, "y", 40 - 10 * math.log10(found) if 0 < found < math.inf else math.nan)


def added(noise: Mapping[str, float], rest: float = 0.0) -> Callable[[frozenset[str]], float]:
    return lambda narrow: sum(noise.get(name, rest) for name in narrow)


def mended(
    count: int, excess: Callable[[frozenset[str]], float], most: int = MOST_EVALUATIONS
) -> tuple[Repaired, Bench]:
    model = chain(count)
    bench = Bench(model, excess)
    found = repair(model, PrecisionPlan(Precision.FP16, FP16), bench, most)
    assert found.after == bench(found.plan)
    return found, bench


def test_a_good_plan_costs_one_evaluation() -> None:
    model, plan = chain(40), PrecisionPlan(Precision.FP16, FP16, {"n3": "because"})
    bench = Bench(model, added({}, 0.02))
    found = repair(model, plan, bench)
    assert found.plan is plan and found.fallbacks == {} and bench.asked == 1


@pytest.mark.parametrize("culprits", [{"n7"}, {"n0", "n39"}, {"n11", "n12", "n13"}])
def test_the_nodes_that_do_harm_are_found_and_the_others_stay(culprits: set[str]) -> None:
    found, bench = mended(40, added(dict.fromkeys(culprits, 1000.0), 0.001))
    assert set(found.fallbacks) == culprits == set(found.plan.wide)
    assert found.before.excess > 1 >= found.after.excess
    assert bench.asked <= MOST_EVALUATIONS
    assert all("put back to FP32" in reason and "keeps 10.0 dB" in reason for reason in found.fallbacks.values())


def test_what_is_infinite_or_nan_is_found_too() -> None:
    found, _ = mended(40, lambda narrow: math.inf if "n17" in narrow else 0.001)
    assert set(found.fallbacks) == {"n17"}
    assert "infinite or NaN" in found.fallbacks["n17"]


def test_the_same_light_operator_in_every_block_goes_back_as_one() -> None:
    """160 nodes, every eighth a culprit: halving by place would look at each of them."""
    culprits = {f"n{i}" for i in range(1, 160, 8)}
    found, bench = mended(160, added(dict.fromkeys(culprits, 50.0), 1e-4))
    assert set(found.fallbacks) == culprits
    assert bench.asked <= 12 + 1  # once more by the test


def test_noise_spread_over_all_nodes_takes_back_as_many_as_needed() -> None:
    found, _ = mended(64, added({}, 1 / 32))
    assert found.after.is_allowed
    assert 32 <= len(found.fallbacks) <= 56


def test_a_bound_missed_by_little_takes_few_evaluations() -> None:
    """Six hundred nodes that each add as much: *leave one in* would weigh all of them."""
    found, bench = mended(640, added({}, 1.04 / 640))
    assert found.after.is_allowed and len(found.fallbacks) == 25
    assert bench.asked <= MOST_EVALUATIONS


def test_a_bound_missed_by_little_for_nodes_far_apart_is_left_to_the_first_search() -> None:
    """The shortest stretch that holds three of the four is long: pruning it took the evaluations of the first search,
    and 149 nodes went back."""
    culprits = {"n5", "n100", "n200", "n290"}
    found, bench = mended(300, added(dict.fromkeys(culprits, 0.45), 0.2 / 300))
    assert found.after.is_allowed and set(found.fallbacks) < culprits
    assert bench.asked <= MOST_EVALUATIONS + 2 * math.ceil(math.log2(300))


def test_of_harm_that_only_all_together_do_a_part_goes_back() -> None:
    found, _ = mended(40, lambda narrow: 100.0 if len(narrow) > 30 else 0.0)
    assert found.after.is_allowed and len(found.fallbacks) == 10
    assert len(found.others[0].wide) == 10  # what is left of that of the first search


def test_a_front_end_whose_harm_appears_jointly_is_found_among_hundreds_of_nodes() -> None:
    """Seventeen nodes at the front, of which any three in 16 bits break the output, and none alone."""
    front = {f"n{i}" for i in range(3, 20)}
    found, bench = mended(799, lambda narrow: math.inf if len(narrow & front) > 2 else 1e-3 * len(narrow) / 799)
    assert found.after.is_allowed
    assert set(found.fallbacks) <= front and len(found.fallbacks) == 15
    assert bench.asked <= MOST_EVALUATIONS + 2 * MOST_LEFT_OUT


def test_joint_harm_at_both_ends_does_not_take_back_what_lies_between() -> None:
    ends = {"n0", "n1", "n398", "n399"}
    found, _ = mended(400, lambda narrow: 1000.0 if len(narrow & ends) > 1 else 0.0)
    assert found.after.is_allowed and len(found.fallbacks) < 60 and len(set(found.fallbacks) & ends) == 3


def test_too_many_single_culprits_to_look_for_do_not_take_the_network_back() -> None:
    """Forty neighbours of eight kinds that each make NaN: more than there is time for, one by one."""
    culprits = {f"n{i}" for i in range(60, 100)}
    found, bench = mended(799, lambda narrow: math.inf if narrow & culprits else 0.0)
    assert culprits <= set(found.fallbacks) and len(found.fallbacks) <= 60
    assert bench.asked <= MOST_EVALUATIONS + 2 * MOST_LEFT_OUT + 26


def test_too_few_evaluations_put_whole_groups_back() -> None:
    found, bench = mended(40, added({"n7": 1000.0, "n30": 1000.0}, 0.001), most=6)
    assert found.after.is_allowed and {"n7", "n30"} <= set(found.fallbacks)
    assert bench.asked <= 8 + 2 * MOST_LEFT_OUT + 12


def test_nothing_is_changed_where_nothing_helps() -> None:
    model, plan = chain(20), PrecisionPlan(Precision.FP16, FP16)
    found = repair(model, plan, Bench(model, lambda narrow: 5.0))
    assert found.plan is plan and found.fallbacks == {} and found.before.excess == 5.0


@given(
    noise=st.lists(st.sampled_from([0.0, 1e-3, 0.3, 2.0, 1e6, math.inf]), min_size=1, max_size=40),
    coherent=st.booleans(),
    most=st.integers(1, 64),
    many=60,
    seeded=True,
)
def test_it_ends_within_the_bound_or_as_good_as_before(noise: list[float], coherent: bool, most: int) -> None:
    """Amplitudes that add up make more noise together than apart."""
    table = {f"n{i}": value for i, value in enumerate(noise)}

    def excess(narrow: frozenset[str]) -> float:
        if coherent:
            return sum(math.sqrt(table[name]) for name in narrow) ** 2
        return sum(table[name] for name in narrow)

    found, bench = mended(len(noise), excess, most=most)
    assert found.after.is_allowed and found.after.excess <= found.before.excess
    assert bench.asked <= most + 8 + 2 * MOST_LEFT_OUT + 2 * len(noise).bit_length()
    if found.before.is_allowed:
        assert not found.fallbacks


def test_what_is_quantized_and_what_is_bf16_stays_so_unless_it_does_harm() -> None:
    model = chain(8)
    op = QuantizedOp("n1", "n0", 1.0, None, "max")
    plan = PrecisionPlan(Precision.INT8, FP16, {"n0": "because"}, (op,), bfloat={"n5": "range", "n6": "range"})
    found = repair(model, plan, Bench(model, added({"n6": 30.0, "n2": 30.0})))
    assert found.plan.quantized == (op,)
    assert set(found.plan.bfloat) == {"n5"}
    assert set(found.plan.wide) == {"n0", "n2", "n6"}
    assert "in bf16" in found.fallbacks["n6"] and "in fp16" in found.fallbacks["n2"]


def test_who_ranks_what_is_put_back_reads_it_in_fp32() -> None:
    model = _named("g (float[4, 8] x) => (int64[4, 1] i) { a = Tanh(x) b = Exp(a) i = ArgMax <axis = 1> (b) }")
    found = repair(model, PrecisionPlan(Precision.FP16, FP16), Bench(model, added({"b": 30.0})))
    assert set(found.fallbacks) == {"b", "i"}


def test_the_bound_follows_the_precision_of_the_type() -> None:
    assert smallest_sqnr_db(FP16) == 40
    assert smallest_sqnr_db(BF16) == pytest.approx(40 - 20 * np.log10(8))
