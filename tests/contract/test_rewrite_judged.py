"""What the driver does with a judge: a place is rewritten only when it pays, computes the same, and the whole gains."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest

from trtopt.engine.request import ShapeProfile
from trtopt.errors import EngineBuildError, RecipeError
from trtopt.graph.artifact import ModelArtifact
from trtopt.graph.edit import all_nodes
from trtopt.judge.protocol import Priced
from trtopt.report.schema.steps import Cost, Refusal, StepRecord
from trtopt.rewrite import equal, sweeps
from trtopt.rewrite.driver import Rewritten, apply
from trtopt.rewrite.protocol import Findings, Match, Recipe, Stage, Target
from trtopt.rewrite.sweeps import Judging
from trtopt.source.onnx_file import load

Price = Callable[[ir.Node], float]

FIXED = (ShapeProfile({"x": ((4, 8),) * 3}),)


@dataclass
class Judge:
    """Prices nodes; a piece costs the sum. Counts how often it is asked."""

    of: Price
    inner: list[int] = field(default_factory=list)
    whole: list[int] = field(default_factory=list)
    name: str = "stub"

    def price(self, model: ir.Model, *, inner: bool) -> Priced:
        nodes = list(all_nodes(model.graph))
        (self.inner if inner else self.whole).append(len(nodes))
        total = Cost(len(nodes), 0, 0, sum(self.of(node) for node in nodes))
        return Priced(total, tuple((frozenset({str(node.name)}), 0, self.of(node)) for node in nodes))


@dataclass(frozen=True)
class Replace:
    """Replaces Relu nodes by chains of other operators, one alternative per entry of ``ways``."""

    ways: tuple[tuple[str, ...], ...]
    name: str = "replace"
    stage: Stage = Stage.FUSE
    lossless: bool = True
    only_in: int = 0

    def find(self, model: ir.Model, target: Target) -> Findings:
        relus = [node for node in all_nodes(model.graph) if node.op_type == "Relu"]
        if len(list(model.graph)) < self.only_in:
            return Findings()
        return Findings(tuple(Match((node,), choice="+".join(way)) for node in relus for way in self.ways))

    def rewrite(self, model: ir.Model, match: Match) -> Refusal | None:
        (node,) = match.nodes
        *before, last = match.choice.split("+")
        value = node.inputs[0]
        for number, op in enumerate(before):
            new = ir.node(op, [value], name=f"{node.name}_{number}")
            new.outputs[0].name = f"{node.name}_{number}_out"
            node.graph.insert_before(node, new)
            value = new.outputs[0]
        node.op_type = last
        node.replace_input_with(0, value)
        return None


def price(**prices: float) -> Price:
    return lambda node: prices.get(node.op_type, 1.0)


def model_of(tmp_path: Path, graph: str, **weights: tuple[int, ...]) -> ModelArtifact:
    model = onnx.parser.parse_model('<ir_version: 8, opset_import: ["" : 17]>' + graph)
    for name, shape in weights.items():
        array = np.random.default_rng(1).standard_normal(shape, dtype=np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    onnx.save(model, tmp_path / "m.onnx")
    return load(tmp_path / "m.onnx")


@pytest.fixture
def chain(tmp_path: Path) -> ModelArtifact:
    return model_of(
        tmp_path,
        "g (float[N, 8] x) => (float[N, 8] y) {"
        "a = MatMul(x, w) b = Relu(a) c = MatMul(b, w) d = Relu(c) e = MatMul(d, w) f = Relu(e) y = MatMul(f, w) }",
        w=(8, 8),
    )


def judged(artifact: ModelArtifact, judge: Judge, *recipes: Recipe) -> Rewritten:
    return apply(artifact, recipes, target=Target(), judging=Judging(judge, FIXED))


def ops(result: Rewritten) -> list[str]:
    return [node.op_type for node in result.artifact.model.graph if node.op_type != "MatMul"]


def step(result: Rewritten) -> StepRecord:
    return next(step for step in result.artifact.steps if step.name == "replace")


def test_what_does_not_pay_is_left_with_the_figures(chain: ModelArtifact) -> None:
    result = judged(chain, Judge(price()), Replace((("Neg", "Neg", "Relu"),)))
    assert ops(result) == ["Relu"] * 3
    assert all(not region.kept and region.before and region.after for region in step(result).regions)
    assert "it does not pay: 3 -> 5 kernels" in step(result).refusals[0].reason


def test_what_computes_something_else_is_left(chain: ModelArtifact) -> None:
    result = judged(chain, Judge(price(Relu=2.0, Identity=0.5)), Replace((("Identity",),)))
    assert ops(result) == ["Relu"] * 3 and "the results differ" in step(result).refusals[0].reason


def test_a_piece_is_run_where_its_rewrite_pays_only(chain: ModelArtifact) -> None:
    wrong = Replace((("Identity",),))
    slower = judged(chain, Judge(price()), wrong)
    assert ops(slower) == ["Relu"] * 3 and "it does not pay" in step(slower).refusals[0].reason
    faster = judged(chain, Judge(price(Relu=2.0, Identity=0.5)), wrong)
    assert ops(faster) == ["Relu"] * 3 and "the results differ" in step(faster).refusals[0].reason


def test_the_best_way_that_is_right_is_taken(chain: ModelArtifact) -> None:
    ways = (("Clip",), ("Neg", "Neg", "Relu"), ("Abs", "Relu"))
    result = judged(chain, Judge(price(Relu=4.0, Clip=1.0, Neg=0.1)), Replace(ways))
    assert ops(result) == ["Relu"] * 3
    assert {region.choice for region in step(result).regions} <= {"Clip", "Neg+Neg+Relu"}


def test_ways_that_save_less_than_one_that_is_right_are_not_run(
    chain: ModelArtifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = list[list[str]]()

    def difference(expected: ir.Model, found: ir.Model, *more: Mapping[str, tuple[int, ...]]) -> str:
        ran.append([node.op_type for node in found.graph])
        return equal.difference(expected, found, *more)

    def cheap_behind_relu(node: ir.Node) -> float:
        producer = node.inputs[0].producer() if node.inputs[0] is not None else None
        return 1.0 if producer is not None and producer.op_type == "Relu" and node.op_type == "Relu" else 9.0

    monkeypatch.setattr(sweeps, "difference", difference)
    ways = (("Identity",), ("Relu", "Relu"))
    result = judged(chain, Judge(lambda node: cheap_behind_relu(node) - 8 * (node.op_type == "Relu")), Replace(ways))
    assert ran and all("Identity" not in ops for ops in ran)
    assert not any(region.kept and region.choice == "Identity" for region in step(result).regions)


def test_equal_places_are_judged_once(chain: ModelArtifact) -> None:
    judge = Judge(price())
    result = judged(chain, judge, Replace((("Neg", "Neg", "Relu"),)))
    assert len(step(result).refusals) == 3
    assert len(judge.inner) <= 2 * 3, "the places at the ends differ from the one in the middle"
    assert len(judge.whole) == 1


def test_equal_blocks_are_judged_once_along_residuals(tmp_path: Path) -> None:
    """A piece shows up to eight residuals on each side, so that those of ten blocks differ; what their places fuse with
    does not, but at the ends."""
    blocks = "".join(f"n{i} = Relu(x{i}) m{i} = MatMul(n{i}, w) x{i + 1} = Add(x{i}, m{i}) " for i in range(10))
    found = model_of(tmp_path, f"g (float[N, 8] x0) => (float[N, 8] x10) {{ {blocks} }}", w=(8, 8))
    judge = Judge(price())
    result = apply(
        found,
        (Replace((("Neg", "Neg", "Relu"),)),),
        target=Target(),
        judging=Judging(judge, (ShapeProfile({"x0": ((4, 8),) * 3}),)),
    )
    assert len(step(result).refusals) == 10
    assert len(judge.inner) <= 2 * 3


def test_a_piece_reaches_to_the_next_products_only(chain: ModelArtifact) -> None:
    judge = Judge(price())
    judged(chain, judge, Replace((("Neg", "Neg", "Relu"),)))
    assert set(judge.inner) == {3, 5}, "MatMul, Relu, MatMul; and with two Neg more"


@dataclass(frozen=True)
class OfMany(Replace):
    """Finds nothing where there is one row, as in the step of a decoder."""

    def find(self, model: ir.Model, target: Target) -> Findings:
        shape = model.graph.inputs[0].shape
        return Findings() if shape is not None and shape[0] == 1 else super().find(model, target)


@pytest.mark.parametrize(("rows", "operators"), [((1, 64), 9), ((1, 1), 3), ((1, 1, 64), 3)])
def test_a_place_that_the_first_profile_does_not_have_is_judged_by_the_second(
    chain: ModelArtifact, rows: tuple[int, ...], operators: int
) -> None:
    profiles = tuple(ShapeProfile({"x": ((size, 8),) * 3}) for size in rows)

    def cost(node: ir.Node) -> float:
        behind = node.inputs[0].producer() if node.inputs[0] is not None else None
        return 0.1 if node.op_type == "Neg" or (behind is not None and behind.op_type == "Neg") else 1.0

    recipe = OfMany((("Neg", "Neg", "Relu"),))
    result = apply(chain, (recipe,), target=Target(), judging=Judging(Judge(cost), profiles))
    assert len(ops(result)) == operators


def test_what_a_piece_does_not_show_is_judged_on_the_whole(chain: ModelArtifact) -> None:
    judge = Judge(price())
    result = judged(chain, judge, Replace((("Neg", "Neg", "Relu"),), only_in=6))
    assert judge.inner == [] and sorted(set(judge.whole)) == [7, 9]
    assert "it does not pay" in step(result).refusals[0].reason


def test_an_open_piece_that_does_not_show_the_place_is_not_priced(chain: ModelArtifact) -> None:
    judge, recipe = Judge(price()), Replace((("Neg", "Neg", "Relu"),), only_in=6)
    profiles = (ShapeProfile({"x": ((1, 8), (4, 8), (8, 8))}),)
    apply(chain, (recipe,), target=Target(), judging=Judging(judge, profiles))
    assert judge.inner == [] and judge.whole


def test_a_piece_and_its_rewritten_form_are_priced_at_once(chain: ModelArtifact) -> None:
    both = threading.Barrier(2, timeout=60)

    class Meeting(Judge):
        def price(self, model: ir.Model, *, inner: bool) -> Priced:
            if inner:
                both.wait()
            return super().price(model, inner=inner)

    judge = Meeting(price())
    result = judged(chain, judge, Replace((("Neg", "Neg", "Relu"),)))
    assert len(judge.inner) % 2 == 0 and "it does not pay" in step(result).refusals[0].reason


def test_a_judge_that_fails_refuses_the_place(chain: ModelArtifact) -> None:
    class Failing(Judge):
        def price(self, model: ir.Model, *, inner: bool) -> Priced:
            raise EngineBuildError("no kernel")

    result = judged(chain, Failing(price()), Replace((("Neg", "Neg", "Relu"),)))
    assert result.before is None and ops(result) == ["Relu"] * 3
    assert step(result).refusals[0].reason == "it cannot be judged: no kernel"


@dataclass(frozen=True)
class DropDouble(Replace):
    """Replaces Relu(Relu(x)) by Relu(x): exact, and one node less."""

    ways: tuple[tuple[str, ...], ...] = ()

    def find(self, model: ir.Model, target: Target) -> Findings:
        found = [
            node
            for node in all_nodes(model.graph)
            if node.op_type == "Relu" and (first := node.inputs[0].producer()) is not None and first.op_type == "Relu"
        ]
        return Findings(tuple(Match((node, node.inputs[0].producer())) for node in found))

    def rewrite(self, model: ir.Model, match: Match) -> Refusal | None:
        second, first = match.nodes
        second.replace_input_with(0, first.inputs[0])
        if not first.outputs[0].uses():
            first.graph.remove(first, safe=True)
        return None


@pytest.fixture
def doubled(tmp_path: Path) -> ModelArtifact:
    return model_of(
        tmp_path,
        "g (float[N, 8] x) => (float[N, 8] y) {"
        "a = MatMul(x, w) b = Relu(a) c = Relu(b) d = MatMul(c, w) e = Relu(d) f = Relu(e) y = MatMul(f, w) }",
        w=(8, 8),
    )


def test_a_gain_is_kept_and_counted(doubled: ModelArtifact) -> None:
    result = judged(doubled, Judge(price()), DropDouble())
    assert ops(result) == ["Relu", "Relu"] and step(result).changes == 2
    assert result.before == Cost(7, 0, 0, 7.0) and result.after == Cost(5, 0, 0, 5.0) and result.judge == "stub"
    for region in step(result).regions:
        assert region.kept and region.before is not None and region.after is not None
        assert (region.before.kernels, region.after.kernels) == (4, 3)


@dataclass
class Slight(Judge):
    """A node less is a gain of 1 %, or of a ``part`` of it, and ``more`` bytes."""

    more: int = 0
    part: float = 1.0

    def price(self, model: ir.Model, *, inner: bool) -> Priced:
        nodes = len(list(model.graph))
        return Priced(Cost(nodes, 0, 100 - self.more * nodes, 100.0 + self.part * nodes), ())


def test_a_gain_below_two_percent_is_refused_where_bytes_grow(doubled: ModelArtifact) -> None:
    result = judged(doubled, Slight(price(), more=1), DropDouble())
    assert ops(result) == ["Relu"] * 4
    assert "it does not pay: 4 -> 3 kernels" in step(result).refusals[0].reason


def test_a_gain_below_two_percent_is_taken_where_nothing_grows(doubled: ModelArtifact) -> None:
    assert ops(judged(doubled, Slight(price()), DropDouble())) == ["Relu"] * 2


@pytest.mark.parametrize(("part", "left"), [(0.01, 2), (-0.01, 4)])
def test_a_kernel_less_is_taken_where_it_gains_anything(doubled: ModelArtifact, part: float, left: int) -> None:
    assert ops(judged(doubled, Slight(price(), part=part), DropDouble())) == ["Relu"] * left


@dataclass(frozen=True)
class OneAtATime:
    """Of the doubled Relus it takes one away in each round."""

    name: str = "one-at-a-time"
    stage: Stage = Stage.CLEAN
    lossless: bool = True

    def find(self, model: ir.Model, target: Target) -> Findings:
        return Findings(DropDouble().find(model, target).matches[:1])

    def rewrite(self, model: ir.Model, match: Match) -> Refusal | None:
        return DropDouble().rewrite(model, match)


def test_what_is_judged_waits_for_the_one_form(doubled: ModelArtifact) -> None:
    result = judged(doubled, Judge(price()), OneAtATime(), DropDouble())
    assert ops(result) == ["Relu"] * 2
    assert [step.changes for step in result.artifact.steps if step.name == "one-at-a-time"] == [2]


def test_what_makes_the_whole_slower_is_taken_back(doubled: ModelArtifact) -> None:
    class Whole(Judge):
        def price(self, model: ir.Model, *, inner: bool) -> Priced:
            nodes = len(list(model.graph))
            return Priced(Cost(nodes, 0, 0, float(nodes if inner else 100 - nodes)), ())

    result = judged(doubled, Whole(price()), DropDouble())
    assert ops(result) == ["Relu"] * 4 and step(result).changes == 0
    assert step(result).refusals[0].reason == "the whole network is slower with it: 93.0 -> 95.0 us"


def test_a_wrong_rewrite_that_no_piece_shows_is_taken_back(doubled: ModelArtifact) -> None:
    """A recipe of a stage that nobody judges is caught on the whole."""
    wrong = Replace((("Neg",),), stage=Stage.FOLD)
    result = judged(doubled, Judge(price()), wrong)
    assert ops(result) == ["Relu"] * 4 and step(result).refusals[0].reason.startswith("taken back: ")


def test_a_wrong_recipe_does_not_take_others_with_it(doubled: ModelArtifact) -> None:
    wrong = Replace((("Neg",),), name="wrong", stage=Stage.FOLD)
    result = judged(doubled, Judge(price()), wrong, DropDouble())
    assert ops(result) == ["Relu", "Relu"] and step(result).changes == 2
    (refused,) = [step for step in result.artifact.steps if step.name == "wrong"]
    assert refused.changes == 0 and refused.refusals[0].reason.startswith("taken back: the outputs differ with it")


def test_a_wrong_recipe_is_an_error_when_strict(doubled: ModelArtifact) -> None:
    wrong = Replace((("Neg",),), name="wrong", stage=Stage.FOLD)
    with pytest.raises(RecipeError) as caught:
        apply(doubled, (wrong,), strict=True, target=Target(), judging=Judging(Judge(price()), FIXED))
    assert caught.value.where == "recipe wrong" and caught.value.exit_code == 5


@pytest.mark.parametrize("stage", [Stage.CLEAN, Stage.FOLD])
def test_a_recipe_nobody_judges_is_taken_back_where_the_whole_is_slower(doubled: ModelArtifact, stage: Stage) -> None:
    slow = Replace((("Neg", "Neg", "Relu"),), name="slow", stage=stage)
    once = OnlyOnce(slow)
    result = judged(doubled, Judge(price()), once, DropDouble())
    assert ops(result) == ["Relu", "Relu"] and result.after == Cost(5, 0, 0, 5.0)
    (refused,) = [step for step in result.artifact.steps if step.name == "slow"]
    assert refused.refusals[0].reason == "the whole network is slower with it: 5.0 -> 15.0 us"


def test_one_of_many_recipes_that_is_to_blame_is_found_by_halving(tmp_path: Path) -> None:
    """Eight recipes with one change each: the whole is asked about without, with all, three times while halving, and
    without the one to blame; not once per recipe."""
    chain = "".join(f" m{i} = MatMul({f'r{i - 1}' if i else 'x'}, w) r{i} = Relu(m{i})" for i in range(8))
    artifact = model_of(tmp_path, f"g (float[N, 8] x) => (float[N, 8] y) {{{chain} y = MatMul(r7, w) }}", w=(8, 8))
    judge = Judge(price(ThresholdedRelu=5.0))
    result = judged(artifact, judge, *(Turn(i, "ThresholdedRelu" if i == 5 else "LeakyRelu") for i in range(8)))
    assert ops(result) == ["LeakyRelu"] * 5 + ["Relu"] + ["LeakyRelu"] * 2
    (refused,) = [step for step in result.artifact.steps if step.refusals]
    assert refused.name == "turn-5" and refused.refusals[0].reason.endswith("slower with it: 17.0 -> 21.0 us")
    assert len(judge.whole) <= 6


def test_what_is_faster_and_wrong_without_a_recipe_does_not_take_it_back(doubled: ModelArtifact) -> None:
    """Without ``mend`` the network is fastest, and computes something else."""
    wrong = OnlyOnce(Replace((("Abs",),), name="wrong", stage=Stage.CLEAN))
    result = judged(doubled, Judge(price(Abs=0.1)), wrong, Mend())
    assert ops(result) == ["Relu"] * 4 and result.after == result.before
    (refused,) = [step for step in result.artifact.steps if step.name == "wrong"]
    assert refused.refusals[0].reason.startswith("the whole network is slower with it")


def test_where_every_choice_of_recipes_is_slower_none_is_left(doubled: ModelArtifact) -> None:
    """Leaving out either of two does not help: nothing is rewritten."""

    class Touched(Judge):
        def price(self, model: ir.Model, *, inner: bool) -> Priced:
            count = len(list(model.graph))
            return Priced(Cost(count, 0, 0, float(count if inner else 7.0 if count == 7 else 9.0)), ())

    first, second = (Replace((("Neg", "Neg", "Relu"),), name=name, stage=Stage.FOLD) for name in ("first", "second"))
    result = judged(doubled, Touched(price()), OnlyOnce(first), OnlyOnce(second), DropDouble())
    assert ops(result) == ["Relu"] * 4 and result.after == result.before == Cost(7, 0, 0, 7.0)
    assert sum(step.changes for step in result.artifact.steps) == sum(step.changes for step in doubled.steps)
    reasons = [refusal.reason for step in result.artifact.steps for refusal in step.refusals]
    assert any("the whole network is slower with" in reason for reason in reasons)


def test_a_network_that_only_recipes_make_judgeable_has_a_price_with_them(doubled: ModelArtifact) -> None:
    class Refusing(Judge):
        def price(self, model: ir.Model, *, inner: bool) -> Priced:
            if len(list(model.graph)) == 7 and not inner:
                raise EngineBuildError("The parser refuses it", where="there", remedy="none")
            return super().price(model, inner=inner)

    result = judged(doubled, Refusing(price()), DropDouble())
    assert result.before is None and result.after == Cost(5, 0, 0, 5.0)


@dataclass(frozen=True)
class Mend:
    """Replaces Abs by what a Relu is, in three operators."""

    name: str = "mend"
    stage: Stage = Stage.CLEAN
    lossless: bool = True

    def find(self, model: ir.Model, target: Target) -> Findings:
        return Findings(tuple(Match((node,), choice="Neg+Neg+Relu") for node in model.graph if node.op_type == "Abs"))

    def rewrite(self, model: ir.Model, match: Match) -> Refusal | None:
        return Replace(()).rewrite(model, match)


@dataclass(frozen=True)
class Turn:
    """Writes one Relu, counted from the input, as another operator that equals it."""

    place: int
    op_type: str
    stage: Stage = Stage.CLEAN
    lossless: bool = True

    @property
    def name(self) -> str:
        return f"turn-{self.place}"

    def find(self, model: ir.Model, target: Target) -> Findings:
        node = [node for node in model.graph if node.op_type != "MatMul"][self.place]
        return Findings((Match((node,)),) if node.op_type == "Relu" else ())

    def rewrite(self, model: ir.Model, match: Match) -> Refusal | None:
        (node,) = match.nodes
        node.op_type = self.op_type
        node.attributes["alpha"] = ir.AttrFloat32("alpha", 0.0)
        return None


@dataclass(frozen=True)
class OnlyOnce:
    """A recipe that finds nothing where it was before."""

    recipe: Replace
    lossless: bool = True

    @property
    def name(self) -> str:
        return self.recipe.name

    @property
    def stage(self) -> Stage:
        return self.recipe.stage

    def find(self, model: ir.Model, target: Target) -> Findings:
        seen = any(node.op_type == "Neg" for node in model.graph)
        return Findings() if seen else self.recipe.find(model, target)

    def rewrite(self, model: ir.Model, match: Match) -> Refusal | None:
        return self.recipe.rewrite(model, match)


def test_without_a_judge_every_first_way_is_taken(chain: ModelArtifact) -> None:
    result = apply(chain, (Replace((("Abs",), ("Neg",))),), target=Target())
    assert ops(result) == ["Abs"] * 3 and result.before is None and step(result).regions == ()


def test_a_place_in_a_nested_graph_is_judged_with_the_node_around_it(tmp_path: Path) -> None:
    artifact = model_of(
        tmp_path,
        "g (bool c, float[4, 8] x) => (float[4, 8] y) { r = MatMul(x, w) t = MatMul(r, w) y = If (c) <"
        "then_branch = a () => (float[4, 8] p) { q = Relu(t) p = Relu(q) },"
        "else_branch = b () => (float[4, 8] s) { s = Identity(t) }> }",
        w=(8, 8),
    )
    judge = Judge(price())
    result = apply(artifact, (DropDouble(),), target=Target(), judging=Judging(judge, ()))
    assert [node.op_type for node in all_nodes(result.artifact.model.graph)].count("Relu") == 1
    assert judge.inner, "it was cut out with its If"
