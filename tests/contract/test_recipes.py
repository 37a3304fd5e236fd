"""One contract for every recipe; the cases are in ``cases_*.py`` beside this file."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest
from contract_case import Case, load_case

from trtopt.graph import invariants
from trtopt.graph.artifact import ModelArtifact
from trtopt.graph.edit import RECIPE_KEY, all_nodes
from trtopt.report.schema.steps import StepRecord
from trtopt.rewrite import driver
from trtopt.rewrite.protocol import Recipe, Target
from trtopt.rewrite.registry import all_recipes
from trtopt.source.onnx_file import load
from trtopt.support.ort_session import OrtSession

MODULES = sorted(path.stem for path in Path(__file__).parent.glob("cases_*.py"))
CASES: tuple[Case, ...] = tuple(case for name in MODULES for case in importlib.import_module(name).CASES)
EVERY = [pytest.param(case, id=f"{case.recipe}-{case.label}") for case in CASES]


RECIPES = {recipe.name: recipe for recipe in all_recipes()}


def apply(artifact: ModelArtifact, case: Case) -> ModelArtifact:
    return driver.apply(artifact, (RECIPES[case.recipe],), strict=True, target=case.target).artifact


def step_of(artifact: ModelArtifact, recipe: str) -> StepRecord | None:
    return next((step for step in artifact.steps if step.name == recipe), None)


def feeds(artifact: ModelArtifact) -> Iterator[dict[str, np.ndarray]]:
    """Random inputs, then zeros, large and small ones; conditions both ways."""
    rng = np.random.default_rng(3)
    for scale in (1.0, 0.0, 1e4, 1e-30):
        result = {}
        for spec in artifact.inputs:
            shape = [dim if isinstance(dim, int) else 2 for dim in spec.shape]
            data = rng.standard_normal(shape) * scale
            result[spec.name] = np.asarray(data > 0 if spec.dtype == np.bool_ else data, dtype=spec.dtype)
        yield result


def text_of(model: ir.Model) -> bytes:
    return bytes(ir.to_proto(model).SerializeToString(deterministic=True))


def test_every_recipe_has_cases_that_match_and_cases_that_do_not() -> None:
    for recipe in all_recipes():
        changes = [case.changes for case in CASES if case.recipe == recipe.name]
        assert any(changes), recipe.name
        if recipe.name != "dead-node":
            assert not all(changes), recipe.name


@pytest.mark.parametrize("case", EVERY)
def test_a_recipe_keeps_the_contract(case: Case, tmp_path: Path) -> None:
    """One application of the recipe; every property of the contract is checked on it."""
    before = load_case(case, tmp_path)
    text = text_of(before.model)
    after = apply(before, case)
    it_changes_and_refuses_what_it_should(case, after)
    the_original_is_unchanged_and_the_signature_kept(text, before, after)
    nodes_it_makes_are_tagged(case, before, after)
    results_are_equal_within_the_stated_bound(case, before, after)
    if case.changes:
        it_is_idempotent(case, after)


def it_changes_and_refuses_what_it_should(case: Case, after: ModelArtifact) -> None:
    step = step_of(after, case.recipe)
    assert (step.changes if step else 0) == case.changes
    assert len(step.refusals if step else ()) == case.refusals
    for refusal in step.refusals if step else ():
        assert refusal.node and refusal.reason


def the_original_is_unchanged_and_the_signature_kept(text: bytes, before: ModelArtifact, after: ModelArtifact) -> None:
    assert text_of(before.model) == text, "the recipe changed the model that it was given"
    invariants.check(after.model, invariants.signature(before.model))


def nodes_it_makes_are_tagged(case: Case, before: ModelArtifact, after: ModelArtifact) -> None:
    old = {(node.name, node.op_type) for node in all_nodes(before.model.graph)}
    for node in all_nodes(after.model.graph):
        if (node.name, node.op_type) not in old:
            assert node.metadata_props.get(RECIPE_KEY) == case.recipe, f"{node.name} has no tag of the recipe"


def results_are_equal_within_the_stated_bound(case: Case, before: ModelArtifact, after: ModelArtifact) -> None:
    if "training" in case.label or case.label in ("bomb", "random"):
        return  # ONNX Runtime cannot run it, or it is too large, or not deterministic.
    with OrtSession(before.model) as reference, OrtSession(after.model) as optimized:
        for inputs in feeds(before):
            for expected, found in zip(reference.run(inputs), optimized.run(inputs), strict=True):
                assert expected.dtype == found.dtype
                bound = case.tolerance * max(1.0, float(np.abs(expected).max(initial=0)))
                np.testing.assert_allclose(found, expected, rtol=0, atol=bound)


def it_is_idempotent(case: Case, once: ModelArtifact) -> None:
    twice = apply(once, case)
    assert len(twice.steps) == len(once.steps) or twice.steps[-1].changes == 0
    assert text_of(twice.model) == text_of(once.model), "applied again, the recipe makes another model"


@pytest.mark.parametrize("recipe", all_recipes(), ids=lambda recipe: recipe.name)
def test_a_model_without_its_pattern_is_left_alone(recipe: Recipe, tmp_path: Path) -> None:
    onnx.save(
        onnx.parser.parse_model(
            '<ir_version: 8, opset_import: ["" : 17]> g (float[N, 4] x) => (float[N, 4] y) { a = Cos(x) y = Neg(a) }'
        ),
        tmp_path / "m.onnx",
    )
    artifact = load(tmp_path / "m.onnx")
    findings = recipe.find(artifact.model, Target())
    assert not findings.matches and not findings.refusals
    assert driver.run(artifact, recipes=recipe.name).artifact is artifact


@pytest.mark.parametrize("recipe", all_recipes(), ids=lambda recipe: recipe.name)
def test_its_documentation_has_the_headings(recipe: Recipe) -> None:
    headings = ["Rewrite:", "Requires:", "Why faster:", "Numerics:", "Refuses when:"]
    places = [(type(recipe).__doc__ or "").find(heading) for heading in headings]
    assert min(places) > 0 and places == sorted(places)
    assert recipe.name == recipe.name.lower().replace("_", "-")


def test_new_weights_are_named_after_the_output_they_serve(tmp_path: Path) -> None:
    case = next(case for case in CASES if (case.recipe, case.label) == ("batch-norm", "shared-weight"))
    model = apply(load_case(case, tmp_path), case).model
    assert {"n_weight", "n_bias", "w"} <= set(model.graph.initializers)
