"""The second form of the recipe rank-4-linear on its contract cases, and which forms it offers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from cases_linear import CASES
from contract_case import Case, load_case

from trtopt.graph import invariants
from trtopt.graph.edit import all_nodes
from trtopt.rewrite.driver import apply
from trtopt.rewrite.protocol import Target
from trtopt.support.ort_session import OrtSession
from trtopt_recipes.rank_4_linear import Rank4Linear

RANK_4 = [pytest.param(case, id=case.label) for case in CASES if case.recipe == "rank-4-linear" and case.changes]
TOKENS = Rank4Linear(forms=("tokens",))
RTX = Target("tensorrt-rtx", "fp16")


@pytest.mark.parametrize("case", RANK_4)
def test_tokens_give_the_same_results(case: Case, tmp_path: Path) -> None:
    before = load_case(case, tmp_path)
    after = apply(before, (TOKENS,), strict=True, target=Target()).artifact
    step = after.steps[-1]
    if case.label == "unknown-sizes":
        assert (step.changes, len(step.refusals)) == (0, 1)
    else:
        assert (step.changes, len(step.refusals)) == (case.changes, 0)
        products = [node for node in all_nodes(after.model.graph) if node.op_type == "MatMul"]
        shapes = [node.inputs[0].shape for node in products if node.inputs[0] is not None]
        assert shapes and all(shape is None or len(shape) == 2 for shape in shapes)
    invariants.check(after.model, invariants.signature(before.model))
    assert apply(after, (TOKENS,), strict=True, target=Target()).artifact.steps[-1].changes == step.changes
    rng = np.random.default_rng(0)
    feed = {}
    for spec in before.inputs:
        data = rng.standard_normal([dim if isinstance(dim, int) else 3 for dim in spec.shape])
        feed[spec.name] = np.asarray(data > 0 if spec.dtype == np.bool_ else data, dtype=spec.dtype)
    with OrtSession(before.model) as reference, OrtSession(after.model) as optimized:
        for expected, found in zip(reference.run(feed), optimized.run(feed), strict=True):
            bound = case.tolerance * max(1.0, float(np.abs(expected).max()))
            np.testing.assert_allclose(found, expected, rtol=0, atol=bound)


@pytest.mark.parametrize(
    ("channels", "shape", "target", "forms"),
    [
        (96, "N, 14, 14", RTX, ["conv", "tokens"]),
        (256, "N, 14, 14", RTX, ["tokens"]),
        (256, "N, H, W", RTX, ["conv"]),
        (256, "N, 14, 14", Target("tensorrt-rtx", "fp32"), ["conv", "tokens"]),
        (256, "N, 14, 14", Target("tensorrt", "fp16"), ["conv", "tokens"]),
    ],
)
def test_convolutions_that_become_products_again_are_not_offered(
    channels: int, shape: str, target: Target, forms: list[str], tmp_path: Path
) -> None:
    graph = f"g (float[{shape}, {channels}] x) => (float[{shape}, {channels}] y) {{ m = MatMul(x, w) y = Relu(m) }}"
    artifact = load_case(Case("rank-4-linear", "", graph, {"w": (channels, channels)}), tmp_path)
    findings = Rank4Linear().find(artifact.model, target)
    assert [match.choice for match in findings.matches] == forms and not findings.refusals
