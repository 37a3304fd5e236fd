"""Which regions stay in 8-bit, with judges whose prices are rules."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from trtopt.errors import EngineBuildError
from trtopt.events import Event, ignore
from trtopt.graph import edit
from trtopt.graph.shapes import infer_shapes, static_shapes
from trtopt.judge.protocol import Priced, PriceFile, Prices
from trtopt.judge.selection import Guard, Guarded, subgraph_of
from trtopt.judge.subgraph import between
from trtopt.pipeline.guard import without_results
from trtopt.precision.decide import plan_for, wanted_tensors
from trtopt.precision.observe.statistics import StatsBuilder
from trtopt.precision.plan import FP16, PrecisionPlan
from trtopt.precision.qdq.existing import canonicalize_qdq
from trtopt.precision.regions import Problem, find_candidates
from trtopt.precision.write import apply_plan, cast_borders
from trtopt.report.schema.steps import Cost
from trtopt.support.precision import Precision

RNG = np.random.default_rng(0)


def model(text: str, **weights: tuple[int, ...]) -> ir.Model:
    """A model of the text of a graph, its weights random; a node is called as its first output."""
    found = ir.from_onnx_text(f'<ir_version: 10, opset_import: ["" : 21]>\n{text}')
    for name, shape in weights.items():
        array = (RNG.uniform(-1, 1, shape) / np.prod(shape[1:]) ** 0.5).astype(np.float32)
        edit.add_initializer(found.graph, name, array)
        for node in found.graph:
            for index, value in enumerate(node.inputs):
                if value is not None and value.name == name:
                    node.replace_input_with(index, found.graph.initializers[name])
    found = infer_shapes(ir.from_proto(ir.to_proto(found)))
    for node in found.graph:
        node.name = str(node.outputs[0].name)
    return found


def quantizer_of(node: ir.Node) -> ir.Node | None:
    """The node that writes the 8-bit form of what a product reads; None for a product in 16-bit."""
    value = node.inputs[0]
    dequantize = value.producer() if value is not None else None
    if dequantize is None or dequantize.op_type != "DequantizeLinear" or dequantize.inputs[0] is None:
        return None
    return dequantize.inputs[0].producer()


class RuleJudge:
    """A product costs 10 us, in 8-bit what the rule says; a quantizer 2 us; all else nothing.

    Args:
        time_of: Microseconds of a product in 8-bit.
        whole_us: Microseconds added to a whole network that has 8-bit nodes.
    """

    name = "rules"

    def __init__(self, time_of: Callable[[ir.Node], float], whole_us: float = 0.0) -> None:
        self._time_of, self._whole_us = time_of, whole_us
        self.asked: list[tuple[bool, int]] = []

    def price(self, model: ir.Model, *, inner: bool) -> Priced:
        self.asked.append((inner, len(model.graph)))
        kernels, writers = [], set()
        for node in model.graph:
            if node.op_type in ("Conv", "MatMul"):
                writer = quantizer_of(node)
                kernels.append((str(node.name), 10.0 if writer is None else self._time_of(node)))
                writers.add(writer)
        kernels += [(str(writer.name), 2.0) for writer in writers if writer is not None]
        time = sum(time for _, time in kernels)
        if len(writers) > 1 and not inner:
            time += self._whole_us
        return Priced(
            Cost(len(kernels), 0, 100 * len(kernels), time), tuple((frozenset({name}), 100, us) for name, us in kernels)
        )


def is_wide(node: ir.Node) -> bool:
    """Whether a convolution has a window of 3x3."""
    return "3" in str(node.attributes.get("kernel_shape") or "") or bool(edit.dims_of(node.inputs[1])[-1] == 3)  # type: ignore[index, union-attr]


def problem_of(source: ir.Model, dtype: Precision = Precision.INT8) -> Problem:
    stats, rng = {}, np.random.default_rng(0)
    wanted = wanted_tensors(source, Precision(dtype), "tensorrt-rtx")
    for name in sorted(wanted.histogram | wanted.results | wanted.ranges):
        builder = StatsBuilder(histogram=True)
        builder.update(rng.uniform(-1, 1, 4096).astype(np.float32))
        stats[name] = builder.finish()
    return Problem(source, "tensorrt-rtx", stats, static_shapes(source, {}), "max", FP16)


def guard_of(source: ir.Model, judge: RuleJudge, **options: object) -> Guard:
    problem = problem_of(source)
    return Guard(problem, find_candidates(problem, ("int8",)), source, judge, ignore, **options)  # type: ignore[arg-type]


CHAIN = """g (float[2,32,16,16] x) => (float[2,32,16,16] y) { a = Conv <pads = [1,1,1,1]> (x, w3) ra = Relu(a)
    b = Conv (ra, w1) rb = Relu(b) c = Conv <pads = [1,1,1,1]> (rb, w3) rc = Relu(c) d = Conv (rc, w1) y = Relu(d) }"""
"""Convolutions of 3x3 (a, c) and 1x1 (b, d) in turn."""


def chain() -> ir.Model:
    return model(CHAIN, w3=(32, 32, 3, 3), w1=(32, 32, 1, 1))


def window(node: ir.Node) -> int:
    """The window of a convolution in 8-bit: its weight stands behind a DequantizeLinear."""
    weight = node.inputs[1]
    assert weight is not None and weight.producer() is not None
    stored = weight.producer().inputs[0]  # type: ignore[union-attr]
    return int(edit.constant_of(stored).shape[-1])  # type: ignore[union-attr]


def wide_pay(node: ir.Node) -> float:
    """3x3 gains 6 us by 8-bit, less 2 for its quantizer; 1x1 gains 0.1 us, and its quantizer costs 2."""
    return 4.0 if window(node) == 3 else 9.9


def kept(found: Guarded) -> set[str]:
    return set(found.choice)


def test_regions_that_pay_are_kept_and_the_others_say_what_they_cost() -> None:
    found = guard_of(chain(), RuleJudge(wide_pay)).choose()
    assert kept(found) == {"a", "c"}
    assert [(verdict.region.nodes, bool(verdict.kept)) for verdict in found.verdicts] == [
        (("a",), True),
        (("b",), False),
        (("c",), True),
        (("d",), False),
    ]
    good, bad = found.verdicts[:2]
    assert good.reason == "" and good.before is not None and good.after is not None
    assert (good.before.predicted_us, good.after.predicted_us) == (20.0, 16.0)  # with the convolution behind it
    assert good.saved_us == 4.0
    assert bad.before is not None and bad.after is not None
    assert bad.after.predicted_us == pytest.approx(23.9) and "22.0 -> 23.9 us" in bad.reason
    assert found.before is not None and found.after is not None
    assert (found.before.predicted_us, found.after.predicted_us) == (40.0, 32.0)


@pytest.mark.parametrize(("time", "is_kept"), [(7.85, False), (7.75, True)])
def test_two_per_cent_is_the_least_gain(time: float, is_kept: bool) -> None:
    found = guard_of(chain(), RuleJudge(lambda node: time)).choose()  # 9.85 us and 9.75 us with the quantizer
    assert (kept(found) == {"a", "b", "c", "d"}) is is_kept
    assert bool(kept(found)) is is_kept


@pytest.mark.parametrize(("added_us", "is_kept"), [(1.7, True), (3.9, False), (5.0, False)])
def test_a_gain_that_the_added_bytes_would_eat_from_memory_is_none(added_us: float, is_kept: bool) -> None:
    """Each 3x3 wins 4 us, 2 % of 10 us is the least, and its quantizer adds 100 bytes, half of them from memory."""
    found = guard_of(chain(), RuleJudge(wide_pay), memory_gbs=0.5 * 100 / (added_us * 1e3)).choose()
    assert kept(found) == ({"a", "c"} if is_kept else set())
    reason = found.verdicts[0].reason
    assert is_kept or (
        f"half of the bytes it adds take {added_us:.1f} us from memory" in reason and "20.0 -> 16.0" in reason
    )


def test_the_whole_network_pays_for_the_bytes_it_adds() -> None:
    """Two regions win 4 us each, and 1 us for half of their bytes; all take 4 us on the whole network."""
    memory_gbs = 0.5 * 100 / (1.0 * 1e3)
    assert kept(guard_of(chain(), RuleJudge(wide_pay, whole_us=2.5), memory_gbs=memory_gbs).choose())
    found = guard_of(chain(), RuleJudge(wide_pay, whole_us=6.5), memory_gbs=memory_gbs).choose()
    assert not kept(found)
    assert any("with 4.0 us for the bytes that it adds" in verdict.reason for verdict in found.verdicts)


UNEVEN = "g (float[2,32,16,16] x) => (float[2,64,14,14] y) { r = Relu(x) c = Conv (r, w) y = Relu(c) }"


def uneven() -> ir.Model:
    """One convolution whose weight is too coarse for one scale: its accurate form has scales per channel."""
    found = model(UNEVEN, w=(64, 32, 3, 3))
    weight = next(node for node in found.graph if node.name == "c").inputs[1]
    assert weight is not None
    array = np.array(edit.constant_of(weight)) * np.where(np.arange(64) < 6, 1.0, 0.02)[:, None, None, None]
    weight.const_value = ir.tensor(array.astype(np.float32), name=weight.name)
    return found


@pytest.mark.parametrize(("penalty", "multiplies"), [(0.0, True), (0.15, True), (0.5, False), (50.0, False)])
def test_the_more_accurate_form_is_taken_where_it_costs_little(penalty: float, multiplies: bool) -> None:
    def time_of(node: ir.Node) -> float:
        follows = [user.op_type for user, _ in node.outputs[0].uses()]
        return 4.0 + (penalty if follows == ["Mul"] else 0.0)

    guard = guard_of(uneven(), RuleJudge(time_of))
    forms = guard.candidates.ops["c"]
    assert [form.multiply for form in forms] == [True, False]
    found = guard.choose()
    assert found.choice["c"].multiply is multiplies


class JointJudge(RuleJudge):
    """Two products in a row pay, one alone does not: what lies between is written in 8-bit by the first."""

    def __init__(self) -> None:
        super().__init__(lambda node: 9.0)

    def price(self, model: ir.Model, *, inner: bool) -> Priced:
        priced = super().price(model, inner=inner)
        eight = {node for node in model.graph if node.op_type == "Conv" and quantizer_of(node) is not None}
        pairs = 0
        for node in eight:
            back = node
            while back is not None and (back is node or back.op_type != "Conv"):
                value = back.inputs[0]
                back = value.producer() if value is not None else None  # type: ignore[assignment]
            pairs += back in eight
        total = priced.total
        return Priced(Cost(total.kernels, 0, total.bytes, total.predicted_us - 4.0 * pairs), priced.kernels)


def test_regions_that_pay_only_together_are_found() -> None:
    found = guard_of(chain(), JointJudge()).choose()
    assert {"b", "c", "d"} <= kept(found)
    assert found.before is not None and found.after is not None
    assert found.after.predicted_us < found.before.predicted_us


def test_the_whole_network_decides() -> None:
    found = guard_of(chain(), RuleJudge(lambda node: 7.7, whole_us=9.0)).choose()
    assert not found.choice
    assert found.after == found.before
    assert all(not verdict.kept for verdict in found.verdicts)
    assert all("the whole network gains less than 2.0%" in verdict.reason for verdict in found.verdicts)


class FirstIsFreeJudge(RuleJudge):
    """The first product gains 0.3 us and adds nothing; the third gains 0.45 us and adds a kernel."""

    def __init__(self) -> None:
        super().__init__(lambda node: {"a": 9.7, "c": 7.55}.get(str(node.name), 9.9))

    def price(self, model: ir.Model, *, inner: bool) -> Priced:
        priced = super().price(model, inner=inner)
        first = next((node for node in model.graph if node.name == "a"), None)
        if first is None or quantizer_of(first) is None:
            return priced
        total = priced.total
        return Priced(Cost(total.kernels - 1, 0, total.bytes - 100, total.predicted_us - 2.0), priced.kernels)


def test_where_a_little_is_gained_only_what_adds_nothing_stays() -> None:
    """Both together gain 0.75 of 40 us, less than 2 %, and a kernel is added; the first alone adds none."""
    found = guard_of(chain(), FirstIsFreeJudge()).choose()
    assert kept(found) == {"a"}
    assert found.before is not None and found.after is not None
    assert (found.before.predicted_us, found.after.predicted_us) == (40.0, pytest.approx(39.7))
    assert ["less than 2.0%" in verdict.reason for verdict in found.verdicts] == [False, False, True, False]


def test_a_network_without_regions_is_one_without_verdicts() -> None:
    """--auto asks for it all the same, to choose between types of 16 bits."""
    found = guard_of(model("g (float[2,8] x) => (float[2,8] y) { y = Relu(x) }"), RuleJudge(wide_pay)).choose()
    assert not found.choice and not found.verdicts and found.after == found.before


class RefusingJudge(RuleJudge):
    """Refuses models that hold these products in 8-bit, all of them together."""

    def __init__(self, *together: str, whole_only: bool = False) -> None:
        super().__init__(lambda node: 4.0)
        self._together, self._whole_only = set(together), whole_only

    def price(self, model: ir.Model, *, inner: bool) -> Priced:
        eight = {node.name for node in model.graph if node.op_type == "Conv" and quantizer_of(node) is not None}
        if self._together <= eight and not (inner and self._whole_only):
            raise EngineBuildError("The builder failed: no tactic", where="there", remedy="none")
        return super().price(model, inner=inner)


STEPS = """g (float[2,32,16,16] x) => (float[2,32,16,16] y) { a = Conv <pads = [1,1,1,1]> (x, wa) ra = Relu(a)
    b = Conv (ra, wb) rb = Relu(b) c = Conv <pads = [1,1,1,1]> (rb, wc) rc = Relu(c) d = Conv (rc, wd) y = Relu(d) }"""


def steps() -> ir.Model:
    """As the chain, but no two layers are alike: what is refused for one is not for another."""
    return model(
        STEPS.replace("32,16,16] y", "56,16,16] y"),
        wa=(40, 32, 3, 3),
        wb=(48, 40, 1, 1),
        wc=(32, 48, 3, 3),
        wd=(56, 32, 1, 1),
    )


def test_a_region_that_cannot_be_built_goes_back_with_the_reason() -> None:
    found = guard_of(steps(), RefusingJudge("b")).choose()
    assert kept(found) == {"a", "c", "d"}
    reason = next(verdict.reason for verdict in found.verdicts if verdict.region.nodes == ("b",))
    assert reason == "it cannot be built in 8-bit: The builder failed: no tactic"


@pytest.mark.parametrize("together", [("c",), ("a", "d")])
def test_what_only_the_whole_network_refuses_is_found_by_halving(together: tuple[str, ...]) -> None:
    guard = guard_of(steps(), RefusingJudge(*together, whole_only=True))
    found = guard.choose()
    assert kept(found) == {"a", "b", "c", "d"} - {together[-1]}
    reason = next(verdict.reason for verdict in found.verdicts if verdict.region.nodes == together[-1:])
    assert "cannot be built in 8-bit" in reason and found.after is not None


@pytest.mark.parametrize(
    ("judge", "nodes"),
    [
        (RefusingJudge("b"), {"b"}),
        (RefusingJudge("b", "c"), {"b"}),
        (RefusingJudge("b", whole_only=True), {"b"}),
        (RefusingJudge("no such node"), set()),
        (RefusingJudge(), set()),  # not even in 16-bit: 8-bit is not to blame
    ],
)
def test_the_nodes_that_cannot_be_built_are_found_among_all(judge: RefusingJudge, nodes: set[str]) -> None:
    guard = guard_of(steps(), judge)
    found = guard.culprits(guard.candidates.all)
    assert set(found) == nodes
    assert all(reason.startswith("it cannot be built in 8-bit: ") for reason in found.values())


def repeated(blocks: int) -> ir.Model:
    """Equal residual blocks one behind the other."""
    lines = []
    for index in range(blocks):
        source = f"y{index - 1}" if index else "x"
        lines.append(f"a{index} = Conv <pads = [1,1,1,1]> ({source}, w3) r{index} = Relu(a{index})")
        lines.append(f"b{index} = Conv (r{index}, w1) s{index} = Add(b{index}, {source}) y{index} = Relu(s{index})")
    text = f"g (float[2,32,16,16] x) => (float[2,32,16,16] y{blocks - 1}) {{ {' '.join(lines)} }}"
    return model(text, w3=(32, 32, 3, 3), w1=(32, 32, 1, 1))


def test_equal_blocks_are_judged_once() -> None:
    judges = [RuleJudge(wide_pay) for _ in range(2)]
    few, many = (guard_of(repeated(blocks), judge).choose() for blocks, judge in zip((5, 12), judges, strict=True))
    assert kept(few) == {f"a{index}" for index in range(5)}
    assert kept(many) == {f"a{index}" for index in range(12)}
    assert len(judges[0].asked) == len(judges[1].asked)


@pytest.mark.parametrize(("steps", "regions"), [(16, 17), (17, 2), (40, 2)])
def test_the_many_readers_of_one_weight_are_one_region(steps: int, regions: int) -> None:
    lines = [f"a{i} = MatMul(h{i}, w) h{i + 1} = Tanh(a{i})" for i in range(steps)]
    text = f"g (float[8,32] h0) => (float[8,32] y) {{ {' '.join(lines)} y = MatMul(h{steps}, v) }}"
    source = model(text, w=(32, 32), v=(32, 32))
    found = find_candidates(problem_of(source), (Precision.INT8,)).regions
    assert len(found) == regions
    assert [node for region in found for node in region.nodes] == [*(f"a{i}" for i in range(steps)), "y"]
    judge = RuleJudge(lambda _: 3.0)
    assert len(guard_of(source, judge).choose().choice) == steps + 1
    assert len(judge.asked) < 40


@pytest.mark.parametrize(
    ("first", "last", "found"),
    [
        ({"q", "k"}, {"s"}, ("q", "k", "rq", "p", "o", "s")),
        ({"k"}, {"s"}, ("k", "p", "o", "s")),
        ({"k"}, {"y"}, ("k", "p", "o", "s", "y")),
        ({"s"}, {"q"}, ()),
        ({"q"}, (), ()),
    ],
)
def test_what_lies_between_nodes(first: set[str], last: set[str], found: tuple[str, ...]) -> None:
    source = model(
        """g (float[2,32,32] x) => (float[2,32,32] y, float[2,32,32] z) { q = MatMul (x, w) k = MatMul (x, w)
        z = MatMul (x, w) rq = Relu (q) p = MatMul (rq, k) o = MatMul (p, w) s = Add (o, x) y = Relu (s) }""",
        w=(32, 32),
    )
    assert between(source, first, last) == found


def test_pieces_leave_the_model_as_it_is_and_the_choice_is_the_same_again() -> None:
    source = repeated(3)
    before = ir.to_proto(source).SerializeToString()
    first, second = (guard_of(source, RuleJudge(wide_pay)).choose() for _ in range(2))
    assert ir.to_proto(source).SerializeToString() == before
    assert first.verdicts == second.verdicts and first.choice == second.choice


def file_of(folder: Path, *keys: str) -> PriceFile:
    return PriceFile(keys or ("judge",), folder, ignore)


def test_a_second_run_takes_its_prices_from_the_file(tmp_path: Path) -> None:
    first, second, third = (RuleJudge(wide_pay) for _ in range(3))
    found = guard_of(steps(), first, file=file_of(tmp_path)).choose()
    again = guard_of(steps(), second, file=file_of(tmp_path)).choose()
    assert first.asked and not second.asked
    assert again.choice.keys() == found.choice.keys()
    assert [(v.reason, v.before, v.after) for v in again.verdicts] == [
        (v.reason, v.before, v.after) for v in found.verdicts
    ]
    guard_of(steps(), third, file=file_of(tmp_path, "another GPU")).choose()
    assert sorted(third.asked) == sorted(first.asked)  # two are asked at once


def test_a_file_with_broken_lines_keeps_the_others(tmp_path: Path) -> None:
    first, second = (RuleJudge(wide_pay) for _ in range(2))
    file = file_of(tmp_path)
    guard_of(steps(), first, file=file).choose()
    lines = file.path.read_bytes().splitlines(keepends=True)
    broken = [b"\xff\n", b"{}\n", b"[1]\n", b'{"key": "k", "total": [1], "of": []}\n', lines[0][:40]]
    file.path.write_bytes(b"".join([*lines[1:], *broken]))
    guard_of(steps(), second, file=file_of(tmp_path)).choose()
    assert len(second.asked) == 1


def test_what_was_refused_is_asked_again(tmp_path: Path) -> None:
    guard_of(steps(), RefusingJudge("b"), file=file_of(tmp_path)).choose()
    second = RuleJudge(lambda node: 4.0)
    found = guard_of(steps(), second, file=file_of(tmp_path)).choose()
    assert "b" in kept(found) and second.asked


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "prices").write_text("")
    events: list[Event] = []
    found = guard_of(steps(), RuleJudge(wide_pay), file=PriceFile(("judge",), tmp_path, events.append)).choose()
    assert found.choice and [event.kind for event in events] == ["warning"] and "not kept" in events[0].text


class WaitingJudge(RuleJudge):
    """Says when it was asked, and answers when it may."""

    def __init__(self) -> None:
        super().__init__(wide_pay)
        self.is_asked, self.may_answer = threading.Event(), threading.Event()

    def price(self, model: ir.Model, *, inner: bool) -> Priced:
        self.is_asked.set()
        self.may_answer.wait()
        return super().price(model, inner=inner)


def test_what_was_begun_is_priced_beside_other_work_and_once() -> None:
    judge, source = WaitingJudge(), chain()
    prices = Prices(judge)
    prices.begin(source, inner=True)
    prices.begin(source, inner=True)
    judge.is_asked.wait()  # nobody has asked for the price by now
    judge.may_answer.set()
    found = prices.price(source, inner=True)
    prices.begin(source, inner=True)
    prices.close()
    assert found == prices.price(source, inner=True) == Prices(RuleJudge(wide_pay)).price(source, inner=True)
    assert len(judge.asked) == 1


def test_what_was_begun_and_nobody_waited_for_is_kept(tmp_path: Path) -> None:
    judge, source = WaitingJudge(), chain()
    prices = Prices(judge, file_of(tmp_path))
    prices.begin(source, inner=True)
    judge.is_asked.wait()
    judge.may_answer.set()
    prices.close()
    again = RuleJudge(wide_pay)
    Prices(again, file_of(tmp_path)).price(source, inner=True)
    assert len(judge.asked) == 1 and not again.asked


def test_what_the_judge_refuses_beside_other_work_is_raised_where_its_price_is_asked() -> None:
    class Refusing(RuleJudge):
        def price(self, model: ir.Model, *, inner: bool) -> Priced:
            raise EngineBuildError("The builder failed: no tactic", where="there", remedy="none")

    prices, source = Prices(Refusing(wide_pay)), chain()
    prices.begin(source, inner=True)
    with pytest.raises(EngineBuildError, match="no tactic"):
        prices.price(source, inner=True)
    prices.begin(source, inner=False)
    prices.close()


def test_the_guard_asks_for_no_form_twice() -> None:
    judge = RuleJudge(wide_pay)
    guard = guard_of(steps(), judge)
    found = guard.choose()
    guard.close()
    assert found == guard_of(steps(), RuleJudge(wide_pay)).choose()
    known = len(judge.asked)
    guard.choose()
    assert len(judge.asked) == known


def test_names_follow_the_order_of_the_nodes() -> None:
    prices = Prices(RuleJudge(wide_pay))
    first, second = chain(), chain()
    for node in second.graph:
        node.name = f"other_{node.name}"
    assert {name for nodes, _, _ in prices.price(first, inner=True).kernels for name in nodes} == {"a", "b", "c", "d"}
    names = {name for nodes, _, _ in prices.price(second, inner=True).kernels for name in nodes}
    assert names == {"other_a", "other_b", "other_c", "other_d"}


def test_a_scale_that_one_type_underflows_at_is_priced_as_it_is_built() -> None:
    """A largest value of 0.014 has a normal FP16 scale in INT8 (1/127 of it), and none in FP8 (1/448)."""
    source = chain()
    problem = problem_of(source, "auto")
    rng = np.random.default_rng(0)
    stats = {}
    for name in problem.stats:
        builder = StatsBuilder(histogram=True)
        builder.update(rng.uniform(-0.014, 0.014, 4096).astype(np.float32))
        stats[name] = builder.finish()
    problem = replace(problem, stats=stats)
    scales: dict[ir.DataType | None, set[ir.DataType | None]] = {}

    class Judge(RuleJudge):
        def price(self, model: ir.Model, *, inner: bool) -> Priced:
            for node in model.graph:
                if node.op_type == "DequantizeLinear" and edit.constant_of(node.inputs[0]) is not None:
                    scale = node.inputs[1]
                    assert node.inputs[0] is not None and scale is not None
                    scales.setdefault(node.inputs[0].dtype, set()).add(scale.dtype)
            return super().price(model, inner=inner)

    candidates = find_candidates(problem, ("int8", "fp8"))
    Guard(problem, candidates, source, Judge(lambda node: 4.0), ignore).choose()
    assert scales == {ir.DataType.INT8: {ir.DataType.FLOAT16}, ir.DataType.FLOAT8E4M3FN: {ir.DataType.FLOAT}}


def test_the_scale_at_the_border_of_a_piece_stays_above_zero() -> None:
    """The compiler takes no other."""
    text = """<ir_version: 10, opset_import: ["" : 21]>
    g (float[4] x) => (int8[4] y) <float s = {1e-12}, int8 z = {0}> { y = QuantizeLinear (x, s, z) }"""
    for dtype in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16):
        found = cast_borders(ir.from_onnx_text(text), dtype)
        (node,) = found.graph
        assert found.graph.inputs[0].dtype is dtype and float(np.asarray(edit.constant_of(node.inputs[1]))) > 0


LOGITS = "g (float[4,32] x) => (float[4,64] y) { h = Relu(x) m = MatMul(h, w) n = Relu(m) y = MatMul(n, v) }"


def test_the_form_with_one_scale_of_a_product_that_ends_the_network_writes_fp32() -> None:
    source = model(LOGITS, w=(32, 32), v=(32, 64))
    problem = problem_of(source)
    forms = {ends: find_candidates(replace(problem, ends=ends), ("int8",)).ops for ends in ((), ("y",))}
    found = {ends: [(op.weight_axis, op.ends) for op in ops["y"]] for ends, ops in forms.items()}
    assert found == {(): [(1, False), (None, False)], ("y",): [(1, False), (None, True)]}
    assert not any(op.ends for op in forms[("y",)]["m"])
    written = apply_plan(source, plan_for(problem, Precision.INT8, (forms[("y",)]["y"][1],)))
    last = written.graph.outputs[0].producer()
    assert (
        last is not None
        and last.op_type == "MatMul"
        and {value.dtype for value in last.inputs if value} == {ir.DataType.FLOAT}
    )


def test_a_piece_keeps_the_cast_to_an_output_of_the_network() -> None:
    source = model(LOGITS, w=(32, 32), v=(32, 64))
    for ends, dtype in (((), ir.DataType.FLOAT16), (("y",), ir.DataType.FLOAT)):
        piece = cast_borders(apply_plan(source, PrecisionPlan(Precision.FP16, FP16)), FP16.dtype, ends)
        assert piece.graph.outputs[0].dtype is dtype
    assert subgraph_of(source, ("y",)).key != subgraph_of(source).key


def test_regions_that_slow_the_whole_network_are_taken_back_and_the_others_stay() -> None:
    """Only the second of two is slower in the network than in its subgraph."""

    class Whole(RuleJudge):
        def price(self, model: ir.Model, *, inner: bool) -> Priced:
            priced = super().price(model, inner=inner)
            eight = {node.name for node in model.graph if node.op_type == "Conv" and quantizer_of(node) is not None}
            extra = 9.0 if "c" in eight and not inner else 0.0
            return Priced(replace(priced.total, predicted_us=priced.total.predicted_us + extra), priced.kernels)

    found = guard_of(steps(), Whole(wide_pay)).choose()
    assert kept(found) == {"a"} and found.before is not None and found.after is not None
    assert (found.before.predicted_us, found.after.predicted_us) == (40.0, 36.0)
    (taken,) = [verdict for verdict in found.verdicts if verdict.region.nodes == ("c",)]
    assert not taken.kept and taken.reason == "the whole network is faster without it: 41.0 -> 36.0 us"


def test_what_the_whole_network_is_faster_without_is_no_option_of_a_type_that_loses() -> None:
    """INT8 of the second product is slower in the network than in its subgraph; FP8 of all is the fastest."""

    def is_int8(node: ir.Node) -> bool:
        writer = quantizer_of(node)
        return writer is not None and writer.outputs[0].dtype is ir.DataType.INT8

    class Whole(RuleJudge):
        def price(self, model: ir.Model, *, inner: bool) -> Priced:
            priced = super().price(model, inner=inner)
            extra = 30.0 if not inner and any(node.name == "y" and is_int8(node) for node in model.graph) else 0.0
            fp8 = [n for n in model.graph if n.outputs[0].dtype is ir.DataType.FLOAT8E4M3FN]
            extra -= 4.0 * sum(n.op_type == "QuantizeLinear" for n in fp8)
            return Priced(replace(priced.total, predicted_us=priced.total.predicted_us + extra), priced.kernels)

    source = model(LOGITS, w=(32, 32), v=(32, 64))
    problem = problem_of(source, Precision.FP8)
    candidates = find_candidates(problem, ("int8", Precision.FP8))
    judge = Whole(lambda _: 5.0)
    found = Guard(problem, candidates, source, judge, ignore).choose()
    assert {node: op.dtype for node, op in found.choice.items()} == dict.fromkeys("my", Precision.FP8)
    options = {(v.region.nodes, op.dtype) for v in found.verdicts for o in v.options for op in o.kept.values()}
    assert {nodes for nodes, dtype in options if dtype == Precision.INT8} == {("m",)}


def test_the_whole_network_is_asked_a_bounded_number_of_times() -> None:
    judge = RuleJudge(wide_pay, whole_us=1000.0)
    guard_of(repeated(60), judge).choose()
    assert sum(not inner for inner, _ in judge.asked) <= 12 + 4


@pytest.mark.parametrize(("largest", "found"), [(1.0, 1.0), (2e-3, 448 * 2.0**-14), (1e-4, None)])
def test_weights_of_many_keys_in_fp8_have_the_least_scale_that_fp16_holds(largest: float, found: float | None) -> None:
    """2e-3 is the largest of 1500 keys: it fills 0.07 of the range of E4M3 then, whose exponents make up for that."""
    source = model("""g (float[1,2,64,64] q, float[1,2,64,64] k, float[1,2,64,64] v) => (float[1,2,64,64] y) {
        s = MatMul (q, k) w = Softmax <axis = -1> (s) y = MatMul (w, v) }""")
    problem = problem_of(source, Precision.FP8)
    builder = StatsBuilder(histogram=True)
    builder.update(np.linspace(0, largest, 4096, dtype=np.float32))
    problem = replace(problem, stats={**problem.stats, "w": builder.finish()})
    candidates = find_candidates(problem, (Precision.FP8,))
    ranges = [op.activation_amax for op in candidates.all.values() if op.activation == "w"]
    assert ranges == ([] if found is None else [pytest.approx(found)])
    assert any("so small" in item.reason for item in candidates.refused) is (found is None)


FEED = """g (float[2,64] x) => (float[2,64] y) { a = MatMul (x, w1) b = Add (a, c) g = Gelu (b) y = MatMul (g, w2) }"""


class ReadingJudge(RuleJudge):
    """Elementwise operators cost 10 us, 4 where they read what a product wrote in 8 bits."""

    def price(self, model: ir.Model, *, inner: bool) -> Priced:
        found = super().price(model, inner=inner)
        sums = [node for node in model.graph if node.op_type == "Add"]
        read = [producer for node in sums if (producer := node.inputs[0].producer()) is not None]  # type: ignore[union-attr]
        us = sum(4.0 if node.op_type in ("DequantizeLinear", "Mul") else 10.0 for node in read)
        return replace(found, total=replace(found.total, predicted_us=found.total.predicted_us + us))


def feed() -> ir.Model:
    return model(FEED, w1=(64, 256), c=(256,), w2=(256, 64))


def test_a_product_writes_8_bits_for_elementwise_operators_where_that_pays() -> None:
    found = guard_of(feed(), ReadingJudge(lambda _: 5.0)).choose()
    assert {node: op.writes for node, op in found.choice.items()} == {"a": True, "y": False}
    assert found.choice["a"].weight_axis is None and found.choice["a"].result_amax > 0
    wider = without_results(found, guard_of(feed(), ReadingJudge(lambda _: 5.0)))
    assert set(wider.choice) == {"a", "y"} and not any(op.writes for op in wider.choice.values())
    assert not any(op.writes for v in wider.verdicts for each in (v, *v.options) for op in each.kept.values())
    still = guard_of(feed(), RuleJudge(lambda _: 5.0)).choose()
    assert not any(op.writes for op in still.choice.values())


@pytest.mark.parametrize(
    ("text", "writes"),
    [
        (FEED, True),
        (FEED.replace("Gelu (b)", "Softmax (b)"), True),
        (FEED.replace("b = Add (a, c) g = Gelu (b)", "g = Softmax (a)"), False),
        (FEED.replace("b = Add (a, c) g = Gelu (b)", "b = Add (a, c) t = Softmax (a) g = Mul (b, t)"), False),
        (FEED.replace("(float[2,64] y)", "(float[2,64] y, float[2,256] a)"), False),
    ],
)
def test_only_elementwise_operators_read_what_a_product_writes_in_8_bits(text: str, writes: bool) -> None:
    source = model(text, w1=(64, 256), c=(256,), w2=(256, 64))
    forms = find_candidates(problem_of(source), ("int8", "fp8")).ops["a"]
    able = [(op.dtype, op.weight_axis) for op in forms if op.result_amax > 0]
    assert able == ([("int8", None)] if writes else [])
    assert "a" not in wanted_tensors(source, Precision.FP8, "tensorrt-rtx").results
    assert "a" not in wanted_tensors(source, Precision.INT8, "tensorrt").results


def outlier_feed(text: str = FEED) -> ir.Model:
    """The same with one element of the first weight that one scale does not hold beside the others."""
    found = model(text, w1=(64, 256), c=(256,), w2=(256, 64))
    weight = next(node for node in found.graph if node.name == "a").inputs[1]
    assert weight is not None
    array = np.array(edit.constant_of(weight))
    array[3, 7] = 100.0
    weight.const_value = ir.tensor(array, name=weight.name)
    return found


def test_a_product_whose_weight_is_too_uneven_for_one_scale_writes_8_bits_with_even_channels() -> None:
    source = outlier_feed()
    op = guard_of(source, ReadingJudge(lambda _: 5.0)).choose().choice["a"]
    assert (op.writes, op.multiply, op.weight_axis) == (True, True, 1)
    written = apply_plan(source, PrecisionPlan(Precision.INT8, FP16, {}, (op,), fused_quantizers=True))
    values = written.graph.initializers
    powers, weight, scale = (np.asarray(edit.constant_of(values[f"a_{name}"]), np.float32) for name in EVEN)
    assert set(powers) == {1.0, powers[7]} and powers[7] > 256
    exact = np.asarray(edit.constant_of(source.graph.initializers["w1"]))[:, :7]
    noise = (weight * scale * powers)[:, :7] - exact
    assert 10 * np.log10((exact**2).sum() / (noise**2).sum()) > 35
    still = guard_of(source, RuleJudge(lambda _: 5.0)).choose()
    assert not any(op.writes or op.multiply for op in still.choice.values())
    unread = find_candidates(problem_of(outlier_feed(FEED.replace("Add (a, c)", "Softmax(a)"))), ("int8",))
    assert len(unread.ops["a"]) == 1


EVEN = ("ratio_fp16", "weight_int8", "weight_scale_fp16")
HEADS = """g (float[2,40,64] x) => (float[2,40,64] y) <int64[4] four = {2, 40, 2, 32}, int64[3] flat = {2, 40, 64}>
    { q1 = MatMul(x, w1) q2 = Reshape(q1, four) q = Transpose <perm = [0,2,1,3]> (q2) k1 = MatMul(x, w2)
    k2 = Reshape(k1, four) k = Transpose <perm = [0,2,3,1]> (k2) s = MatMul(q, k) p = Softmax(s) v1 = MatMul(x, w3)
    v2 = Reshape(v1, four) v = Transpose <perm = [0,2,1,3]> (v2) m = MatMul(p, v) o1 = Transpose <perm = [0,2,1,3]> (m)
    o2 = Reshape(o1, flat) o = MatMul(o2, w4) r = Reshape(o, flat) y = MatMul(r, w4) }"""


def test_attention_reads_what_a_product_writes_in_8_bits_where_it_is_moved_before() -> None:
    source = model(HEADS, w1=(64, 64), w2=(64, 64), w3=(64, 64), w4=(64, 64))
    forms = find_candidates(problem_of(source), ("int8",)).ops
    able = {node: op for node, ops in forms.items() for op in ops if op.result_amax > 0}
    assert able.keys() == {"q1", "k1", "v1"}
    ops = tuple(replace(op, writes=True) for op in able.values())
    saved = apply_plan(source, PrecisionPlan(Precision.INT8, FP16, {}, ops, fused_quantizers=True))
    found = canonicalize_qdq(saved, "tensorrt-rtx")
    assert sum(node.op_type == "QuantizeLinear" for node in (found.model if found else saved).graph) == 4


def test_what_a_product_writes_in_8_bits_keeps_its_name_for_its_readers() -> None:
    source = feed()
    op = replace(find_candidates(problem_of(source), ("int8",)).ops["a"][-1], writes=True)
    written = apply_plan(source, PrecisionPlan(Precision.INT8, FP16, {}, (op,), fused_quantizers=True))
    nodes = {str(node.name): node for node in written.graph}
    dequantize = next(value for value in nodes["b"].inputs if value is not None and value.name == "a").producer()
    assert dequantize is not None and dequantize.op_type == "DequantizeLinear"
    quantizer = dequantize.inputs[0].producer()  # type: ignore[union-attr]
    assert (
        quantizer is not None and quantizer.op_type == "QuantizeLinear" and quantizer.inputs[0] is nodes["a"].outputs[0]
    )


@pytest.mark.parametrize(("axis", "kept"), [(None, 1), (1, 0)])
def test_a_saved_product_that_writes_8_bits_with_one_scale_does_so_again(axis: int | None, kept: int) -> None:
    forms = find_candidates(problem_of(feed()), ("int8",)).ops
    ops = (replace(forms["a"][-1], weight_axis=axis, writes=True), forms["y"][-1])
    saved = apply_plan(feed(), PrecisionPlan(Precision.INT8, FP16, {}, ops, fused_quantizers=True))
    found = canonicalize_qdq(saved, "tensorrt-rtx")
    again = saved if found is None else found.model
    products = {node.outputs[0] for node in again.graph if node.op_type == "MatMul"}
    quantizers = [node for node in again.graph if node.op_type == "QuantizeLinear" and node.inputs[0] in products]
    assert len(quantizers) == kept
