"""The driver and the registry: order, fixpoint, roll-back, selection."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import onnx
import onnx.parser
import onnx_ir as ir
import pytest

from trtopt.errors import RecipeError, UsageError
from trtopt.events import Event
from trtopt.graph.artifact import ModelArtifact
from trtopt.report.schema.steps import Refusal
from trtopt.rewrite.driver import apply, run
from trtopt.rewrite.protocol import Findings, Match, Recipe, Stage, Target
from trtopt.rewrite.registry import all_recipes, select
from trtopt.source.onnx_file import load


@pytest.fixture
def artifact(tmp_path: Path) -> ModelArtifact:
    text = '<ir_version: 8, opset_import: ["" : 17]>g (float[N, 4] x) => (float[N, 4] y) '
    onnx.save(onnx.parser.parse_model(text + "{ a = Relu(x) b = Identity(a) y = Neg(b) }"), tmp_path / "m.onnx")
    return load(tmp_path / "m.onnx")


@dataclass(frozen=True)
class Probe:
    """Finds the Relu and does to the model what the test says."""

    action: Callable[[ir.Model, ir.Node], Refusal | None]
    name: str = "probe"
    stage: Stage = Stage.CLEAN
    lossless: bool = True
    seen: list[Target] = field(default_factory=list)

    def find(self, model: ir.Model, target: Target) -> Findings:
        self.seen.append(target)
        return Findings(tuple(Match((node,)) for node in model.graph if node.op_type == "Relu"))

    def rewrite(self, model: ir.Model, match: Match) -> Refusal | None:
        return self.action(model, match.nodes[0])


def raises(model: ir.Model, node: ir.Node) -> Refusal | None:
    node.op_type = "Abs"
    raise KeyError("oops")


def breaks(model: ir.Model, node: ir.Node) -> Refusal | None:
    node.outputs[0].name = "x"
    return None


def changes_the_signature(model: ir.Model, node: ir.Node) -> Refusal | None:
    model.graph.outputs[0].name = "z"
    return None


def breaks_the_types(model: ir.Model, node: ir.Node) -> Refusal | None:
    node.op_type = "Not"
    return None


def refuses(model: ir.Model, node: ir.Node) -> Refusal | None:
    return Refusal(str(node.name), "not today")


def to_abs(model: ir.Model, node: ir.Node) -> Refusal | None:
    node.op_type = "Abs"
    return None


def flips_forever(model: ir.Model, node: ir.Node) -> Refusal | None:
    node.metadata_props["seen"] = "again"
    return None


def ops(artifact: ModelArtifact) -> list[str]:
    return [node.op_type for node in artifact.model.graph]


FAILURES = [raises, breaks, changes_the_signature, breaks_the_types]


@pytest.mark.parametrize("action", FAILURES)
def test_a_recipe_that_fails_is_rolled_back_and_the_others_go_on(artifact: ModelArtifact, action: Callable) -> None:
    (identity,) = select("identity")
    result = apply(artifact, (Probe(action), identity), target=Target()).artifact
    assert ops(result) == ["Relu", "Neg"]
    step = next(step for step in result.steps if step.name == "probe")
    assert step.changes == 0 and step.refusals[0].reason.startswith("rolled back: ")


@pytest.mark.parametrize("action", FAILURES)
def test_a_recipe_that_fails_raises_when_strict(artifact: ModelArtifact, action: Callable) -> None:
    with pytest.raises(RecipeError) as caught:
        apply(artifact, (Probe(action),), strict=True, target=Target())
    assert caught.value.where == "recipe probe" and caught.value.exit_code == 5 and caught.value.remedy
    assert ops(artifact) == ["Relu", "Identity", "Neg"]


def test_a_refusal_is_recorded_once_and_changes_nothing(artifact: ModelArtifact) -> None:
    result = apply(artifact, (Probe(refuses), *select("identity")), target=Target()).artifact
    step = next(step for step in result.steps if step.name == "probe")
    assert [refusal.reason for refusal in step.refusals] == ["not today"] and step.changes == 0


def test_a_change_is_counted_and_timed(artifact: ModelArtifact) -> None:
    result = apply(artifact, (Probe(to_abs),), target=Target()).artifact
    assert ops(result) == ["Abs", "Identity", "Neg"] and ops(artifact) == ["Relu", "Identity", "Neg"]
    assert (result.steps[-1].name, result.steps[-1].stage, result.steps[-1].changes) == ("probe", "CLEAN", 1)
    assert result.steps[-1].seconds > 0 and result.sha256 == artifact.sha256


def test_recipes_that_never_end_are_stopped_with_a_warning(artifact: ModelArtifact) -> None:
    events: list[Event] = []
    apply(artifact, (Probe(flips_forever),), target=Target(), on_event=events.append)
    assert events[0].kind == "start" and events[-1].kind == "end"
    assert any(event.kind == "warning" for event in events)


def test_recipes_are_told_the_target(artifact: ModelArtifact) -> None:
    probe = Probe(refuses)
    apply(artifact, (probe,), target=Target(precision="int8"))
    assert {target.precision for target in probe.seen} == {"int8"}


def test_nothing_found_is_the_same_artifact(artifact: ModelArtifact) -> None:
    assert run(artifact, recipes="none").artifact is artifact


def test_all_recipes_run_to_a_fixpoint(artifact: ModelArtifact) -> None:
    once = run(artifact).artifact
    assert ops(once) == ["Relu", "Neg"]
    assert run(once).artifact.model is once.model


def test_the_pack_is_found_in_order_of_stage() -> None:
    recipes = all_recipes()
    assert [recipe.stage for recipe in recipes] == sorted(recipe.stage for recipe in recipes)
    assert all(isinstance(recipe, Recipe) for recipe in recipes)
    assert {"identity", "no-op", "dead-node", "constant-expression", "batch-norm"} <= {r.name for r in recipes}


def test_recipes_named_by_the_user_run_in_their_own_order() -> None:
    assert [recipe.name for recipe in select("batch-norm, identity")] == ["identity", "batch-norm"]


def test_an_unknown_recipe_is_a_usage_error_with_the_nearest_name() -> None:
    with pytest.raises(UsageError) as caught:
        select("batchnorm")
    assert "did you mean batch-norm?" in caught.value.remedy
