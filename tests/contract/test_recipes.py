"""One contract for every recipe. Each case is a model, with how often the recipe must change or refuse something."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest

from trtopt.graph import invariants
from trtopt.graph.artifact import ModelArtifact
from trtopt.graph.edit import RECIPE_KEY, all_nodes
from trtopt.report.records import StepRecord
from trtopt.rewrite.driver import run
from trtopt.rewrite.protocol import Recipe, Target
from trtopt.rewrite.registry import all_recipes
from trtopt.runtime import OrtSession
from trtopt.source.onnx_file import load

HEADER = '<ir_version: 8, opset_import: ["" : 17]>'


@dataclass(frozen=True)
class Case:
    """A model, and how often the recipe must change and refuse something in it."""

    recipe: str
    label: str
    graph: str
    weights: dict[str, tuple[int, ...]] = field(default_factory=dict)
    changes: int = 1
    refusals: int = 0
    tolerance: float = 0.0


BN_WEIGHTS = {"g": (4,), "b": (4,), "m": (4,), "v": (4,)}
X = "float[N, 3, 8, 8] x"
BN = "BatchNormalization (c, g, b, m, v)"

CASES = (
    Case(
        "identity",
        "chain",
        f"g ({X}) => ({X[:-1]}y) {{ a = Relu(x) c = Identity(a) d = Identity(c) y = Neg(d) }}",
        changes=2,
    ),
    Case("identity", "before-output", f"g ({X}) => ({X[:-1]}y) {{ a = Relu(x) y = Identity(a) }}"),
    Case("identity", "input-to-output", f"g ({X}) => ({X[:-1]}y) {{ y = Identity(x) }}", changes=0),
    Case("identity", "two-outputs", f"g ({X}) => ({X[:-1]}y, {X[:-1]}z) {{ y = Relu(x) z = Identity(y) }}", changes=0),
    Case("identity", "dropout", f"g ({X}) => ({X[:-1]}y) {{ a = Relu(x) d = Dropout(a) y = Neg(d) }}"),
    Case(
        "identity",
        "dropout-training",
        f"g ({X}, bool t) => ({X[:-1]}y) <float r = {{0}}> {{ a = Relu(x) d = Dropout(a, r, t) y = Neg(d) }}",
        changes=0,
        refusals=1,
    ),
    Case(
        "identity",
        "dropout-mask",
        f"g ({X}) => ({X[:-1]}y, bool[N, 3, 8, 8] k) {{ a = Relu(x) y, k = Dropout(a) }}",
        changes=0,
        refusals=1,
    ),
    Case(
        "identity",
        "nested",
        "g (bool c, float[4] x) => (float[4] y) { t = Relu(x) y = If (c) <"
        "then_branch = a () => (float[4] p) { q = Identity(t) p = Neg(q) },"
        "else_branch = b () => (float[4] s) { s = Identity(t) }> }",
    ),
    Case("no-op", "cast", f"g ({X}) => ({X[:-1]}y) {{ a = Relu(x) d = Cast <to = 1> (a) y = Neg(d) }}"),
    Case("no-op", "cast-that-converts", f"g ({X}) => (float16[N, 3, 8, 8] y) {{ y = Cast <to = 10> (x) }}", changes=0),
    Case("no-op", "transpose", f"g ({X}) => ({X[:-1]}y) {{ d = Transpose <perm = [0, 1, 2, 3]> (x) y = Neg(d) }}"),
    Case(
        "no-op",
        "transpose-that-moves",
        f"g ({X}) => (float[N, 8, 8, 3] y) {{ y = Transpose <perm = [0, 2, 3, 1]> (x) }}",
        changes=0,
    ),
    Case(
        "no-op",
        "pad",
        f"g ({X}) => ({X[:-1]}y) <int64[8] p = {{0, 0, 0, 0, 0, 0, 0, 0}}> {{ d = Pad(x, p) y = Neg(d) }}",
    ),
    Case(
        "no-op",
        "pad-one",
        f"g ({X}) => (float[N, 3, 8, 9] y) <int64[8] p = {{0, 0, 0, 0, 0, 0, 0, 1}}> {{ y = Pad(x, p) }}",
        changes=0,
    ),
    Case(
        "no-op",
        "slice",
        f"g ({X}) => ({X[:-1]}y) "
        "<int64[2] s = {0, 0}, int64[2] e = {3, 9223372036854775807}, int64[2] a = {1, 3}> "
        "{ d = Slice(x, s, e, a) y = Neg(d) }",
    ),
    Case(
        "no-op",
        "slice-of-a-part",
        f"g ({X}) => (float[N, 2, 8, 8] y) <int64[1] s = {{0}}, int64[1] e = {{2}}, int64[1] a = {{1}}> "
        "{ y = Slice(x, s, e, a) }",
        changes=0,
    ),
    Case(
        "no-op",
        "slice-backwards",
        f"g ({X}) => (float[N, M, 8, 8] y) "
        "<int64[1] s = {0}, int64[1] e = {9}, int64[1] a = {1}, int64[1] t = {2}> "
        "{ y = Slice(x, s, e, a, t) }",
        changes=0,
    ),
    Case(
        "no-op",
        "reshape",
        "g (float[N, 6] x) => (float[N, 6] y) <int64[2] s = {-1, 6}> { r = Relu(x) d = Reshape(r, s) y = Neg(d) }",
    ),
    Case(
        "no-op",
        "reshape-that-changes",
        "g (float[N, 6] x) => (float[M, 3] y) <int64[2] s = {-1, 3}> { y = Reshape(x, s) }",
        changes=0,
    ),
    Case("no-op", "concat-of-one", f"g ({X}) => ({X[:-1]}y) {{ d = Concat <axis = 1> (x) y = Neg(d) }}"),
    Case("dead-node", "chain", f"g ({X}) => ({X[:-1]}y) {{ y = Relu(x) a = Neg(x) d = Abs(a) }}", changes=2),
    Case("dead-node", "weight", "g (float[4] x) => (float[4] y) <float[4] w = {1, 2, 3, 4}> { y = Relu(x) }"),
    Case(
        "dead-node",
        "used-inside-only",
        "g (bool c, float[4] x) => (float[4] y) { t = Relu(x) u = Abs(x) y = If (c) <"
        "then_branch = a () => (float[4] p) { d = Exp(t) p = Neg(t) },"
        "else_branch = b () => (float[4] s) { s = Sin(t) }> }",
        changes=2,
    ),
    Case(
        "constant-expression",
        "weight-behind-nodes",
        "g (float[N, 6] x) => (float[N, 4] y) <int64[2] s = {4, 6}> "
        "{ r = Reshape(w, s) t = Transpose(r) y = MatMul(x, t) }",
        {"w": (24,)},
        changes=2,
    ),
    Case(
        "constant-expression", "shape", "g (float[2, 3] x) => (int64[2] y, float[2, 3] z) { z = Relu(x) y = Shape(x) }"
    ),
    Case("constant-expression", "dynamic-shape", "g (float[N, 3] x) => (int64[2] y) { y = Shape(x) }", changes=0),
    Case(
        "constant-expression",
        "bomb",
        "g (float[1] x) => (float[20000, 20000] y) <float[1] o = {1}, int64[2] s = {20000, 20000}> "
        "{ e = Expand(o, s) y = Mul(x, e) }",
        changes=0,
        refusals=1,
    ),
    Case(
        "constant-expression",
        "quantized-weight",
        "g (float[N, 4] x) => (float[N, 2] y) <int8[4, 2] w = {1, 2, 3, 4, 5, 6, 7, 8}, float s = {0.5}> "
        "{ d = DequantizeLinear(w, s) y = MatMul(x, d) }",
        changes=0,
    ),
    Case(
        "constant-expression",
        "random",
        "g (float[2] x) => (float[2] y) "
        "{ r = RandomNormal <shape = [2]> () z = Mul(r, r) q = Sub(z, z) y = Add(x, q) }",
        changes=0,
    ),
    Case(
        "constant-expression",
        "constant-output",
        "g (float[2] x) => (float[2] y, float[2] z) <float[2] w = {1, 2}> { y = Relu(x) z = Neg(w) }",
    ),
    Case(
        "constant-expression",
        "nested",
        "g (bool c, float[2] x) => (float[2] y) <float[2] w = {1, 2}> { y = If (c) <"
        "then_branch = a () => (float[2] p) { n = Neg(w) p = Add(x, n) },"
        "else_branch = b () => (float[2] s) { s = Constant <value = float[2] {3, 4}> () }> }",
    ),
    Case(
        "constant-branch",
        "nested-twice",
        "g (float[2] x) => (float[2] y) <bool t = {1}, bool f = {0}> { i = If (t) <"
        "then_branch = a () => (float[2] p) { p = If (f) <"
        "then_branch = c () => (float[2] q) { q = Exp(x) }, else_branch = d () => (float[2] r) { r = Sin(x) }> },"
        "else_branch = b () => (float[2] s) { s = Cos(x) }> y = Neg(i) }",
        changes=2,
    ),
    Case(
        "constant-branch",
        "output-is-a-weight",
        "g (float[2] x) => (float[2] y, float[2] z) <bool t = {0}, float[2] w = {1, 2}> { z = Relu(x) y = If (t) <"
        "then_branch = a () => (float[2] p) { p = Neg(x) }, else_branch = b () => (float[2] w) { k = Neg(x) }> }",
    ),
    Case(
        "constant-branch",
        "computed",
        "g (bool c, float[2] x) => (float[2] y) { y = If (c) <"
        "then_branch = a () => (float[2] p) { p = Exp(x) }, else_branch = b () => (float[2] s) { s = Cos(x) }> }",
        changes=0,
    ),
    Case(
        "batch-norm",
        "conv",
        f"g ({X}) => (float[N, 4, 6, 6] y) {{ c = Conv(x, w) n = {BN} y = Relu(n) }}",
        {"w": (4, 3, 3, 3), **BN_WEIGHTS},
        tolerance=1e-5,
    ),
    Case(
        "batch-norm",
        "conv-bias-output",
        f"g ({X}) => (float[N, 4, 6, 6] y) {{ c = Conv(x, w, a) y = {BN} }}",
        {"w": (4, 3, 3, 3), "a": (4,), **BN_WEIGHTS},
        tolerance=1e-5,
    ),
    Case(
        "batch-norm",
        "grouped",
        f"g (float[N, 4, 8, 8] x) => (float[N, 4, 6, 6] y) {{ c = Conv <group = 2> (x, w) y = {BN} }}",
        {"w": (4, 2, 3, 3), **BN_WEIGHTS},
        tolerance=1e-5,
    ),
    Case(
        "batch-norm",
        "shared-weight",
        f"g ({X}) => (float[N, 4, 6, 6] y) {{ c = Conv(x, w) d = Conv(x, w) n = {BN} y = Add(n, d) }}",
        {"w": (4, 3, 3, 3), **BN_WEIGHTS},
        tolerance=1e-5,
    ),
    Case(
        "batch-norm",
        "transposed-grouped",
        f"g (float[N, 6, 5, 5] x) => (float[N, 4, 7, 7] y) {{ c = ConvTranspose <group = 2> (x, w) y = {BN} }}",
        {"w": (6, 2, 3, 3), **BN_WEIGHTS},
        tolerance=1e-5,
    ),
    Case(
        "batch-norm",
        "gemm",
        f"g (float[N, 6] x) => (float[N, 4] y) {{ c = Gemm <alpha = 0.5, beta = 2.0, transB = 1> (x, w, a) y = {BN} }}",
        {"w": (4, 6), "a": (4,), **BN_WEIGHTS},
        tolerance=1e-5,
    ),
    Case(
        "batch-norm",
        "gemm-without-bias",
        f"g (float[N, 6] x) => (float[N, 4] y) {{ c = Gemm (x, w) y = {BN} }}",
        {"w": (6, 4), **BN_WEIGHTS},
        tolerance=1e-5,
    ),
    Case(
        "batch-norm",
        "used-elsewhere",
        f"g ({X}) => (float[N, 4, 6, 6] y) {{ c = Conv(x, w) n = {BN} y = Add(n, c) }}",
        {"w": (4, 3, 3, 3), **BN_WEIGHTS},
        changes=0,
        refusals=1,
    ),
    Case(
        "batch-norm",
        "conv-is-output",
        f"g ({X}) => (float[N, 4, 6, 6] y, float[N, 4, 6, 6] c) {{ c = Conv(x, w) y = {BN} }}",
        {"w": (4, 3, 3, 3), **BN_WEIGHTS},
        changes=0,
        refusals=1,
    ),
    Case(
        "batch-norm",
        "computed-weight",
        f"g ({X}, float[4, 3, 3, 3] w) => (float[N, 4, 6, 6] y) {{ c = Conv(x, w) y = {BN} }}",
        BN_WEIGHTS,
        changes=0,
        refusals=1,
    ),
    Case(
        "batch-norm",
        "training",
        "g (float[N, 3, 8, 8] x) => (float[N, 4, 6, 6] y) { c = Conv(x, w) "
        "y, p, q = BatchNormalization <training_mode = 1> (c, g, b, m, v) }",
        {"w": (4, 3, 3, 3), **BN_WEIGHTS},
        changes=0,
        refusals=1,
    ),
    Case(
        "batch-norm",
        "nested",
        "g (bool k, float[N, 3, 8, 8] x) => (float[N, 4, 6, 6] y) { y = If (k) <"
        "then_branch = t () => (float[N, 4, 6, 6] p) { c = Conv(x, w) p = BatchNormalization(c, g, b, m, v) },"
        "else_branch = e () => (float[N, 4, 6, 6] q) { q = Conv(x, w) }> }",
        {"w": (4, 3, 3, 3), **BN_WEIGHTS},
        tolerance=1e-5,
    ),
)

EVERY = [pytest.param(case, id=f"{case.recipe}-{case.label}") for case in CASES]
CHANGING = [pytest.param(case, id=f"{case.recipe}-{case.label}") for case in CASES if case.changes]


def load_case(case: Case, folder: Path) -> ModelArtifact:
    model = onnx.parser.parse_model(HEADER + case.graph)
    rng = np.random.default_rng(7)
    for name, shape in case.weights.items():
        array = rng.standard_normal(shape, dtype=np.float32)
        # A variance is positive.
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.abs(array) if name == "v" else array, name))
    onnx.save(model, folder / "m.onnx")
    return load(folder / "m.onnx")


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
def test_it_changes_and_refuses_what_it_should(case: Case, tmp_path: Path) -> None:
    step = step_of(run(load_case(case, tmp_path), recipes=case.recipe, strict=True), case.recipe)
    assert (step.changes if step else 0) == case.changes
    assert len(step.refusals if step else ()) == case.refusals
    for refusal in step.refusals if step else ():
        assert refusal.node and refusal.reason


@pytest.mark.parametrize("case", EVERY)
def test_results_are_equal_within_the_stated_bound(case: Case, tmp_path: Path) -> None:
    if "training" in case.label or case.label in ("bomb", "random"):
        pytest.skip("ONNX Runtime cannot run it, or it is too large, or not deterministic")
    before = load_case(case, tmp_path)
    after = run(before, recipes=case.recipe, strict=True)
    with OrtSession(before.model) as reference, OrtSession(after.model) as optimized:
        for inputs in feeds(before):
            for expected, found in zip(reference.run(inputs), optimized.run(inputs), strict=True):
                assert expected.dtype == found.dtype
                bound = case.tolerance * max(1.0, float(np.abs(expected).max(initial=0)))
                np.testing.assert_allclose(found, expected, rtol=0, atol=bound)


@pytest.mark.parametrize("case", CHANGING)
def test_it_is_idempotent(case: Case, tmp_path: Path) -> None:
    once = run(load_case(case, tmp_path), recipes=case.recipe, strict=True)
    twice = run(once, recipes=case.recipe, strict=True)
    assert len(twice.steps) == len(once.steps) or twice.steps[-1].changes == 0
    assert text_of(twice.model) == text_of(once.model)


@pytest.mark.parametrize("case", EVERY)
def test_the_original_is_unchanged_and_the_signature_kept(case: Case, tmp_path: Path) -> None:
    before = load_case(case, tmp_path)
    text = text_of(before.model)
    after = run(before, recipes=case.recipe, strict=True)
    assert text_of(before.model) == text
    invariants.check(after.model, invariants.signature(before.model))


@pytest.mark.parametrize("case", EVERY)
def test_nodes_it_makes_are_tagged(case: Case, tmp_path: Path) -> None:
    before = load_case(case, tmp_path)
    old = {(node.name, node.op_type) for node in all_nodes(before.model.graph)}
    for node in all_nodes(run(before, recipes=case.recipe, strict=True).model.graph):
        if (node.name, node.op_type) not in old:
            assert node.metadata_props.get(RECIPE_KEY) == case.recipe


@pytest.mark.parametrize("recipe", all_recipes(), ids=lambda recipe: recipe.name)
def test_a_model_without_its_pattern_is_left_alone(recipe: Recipe, tmp_path: Path) -> None:
    onnx.save(
        onnx.parser.parse_model(HEADER + f"g ({X}) => ({X[:-1]}y) {{ a = Relu(x) y = Neg(a) }}"), tmp_path / "m.onnx"
    )
    artifact = load(tmp_path / "m.onnx")
    findings = recipe.find(artifact.model, Target())
    assert not findings.matches and not findings.refusals
    assert run(artifact, recipes=recipe.name) is artifact


@pytest.mark.parametrize("recipe", all_recipes(), ids=lambda recipe: recipe.name)
def test_its_documentation_has_the_headings(recipe: Recipe) -> None:
    headings = ["Rewrite:", "Requires:", "Why faster:", "Numerics:", "Refuses when:"]
    places = [(type(recipe).__doc__ or "").find(heading) for heading in headings]
    assert min(places) > 0 and places == sorted(places)
    assert recipe.name == recipe.name.lower().replace("_", "-")


def test_new_weights_are_named_after_the_output_they_serve(tmp_path: Path) -> None:
    case = next(case for case in CASES if case.label == "shared-weight")
    model = run(load_case(case, tmp_path), recipes="batch-norm").model
    assert {"n_weight", "n_bias", "w"} <= set(model.graph.initializers)
