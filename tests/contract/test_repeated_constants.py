"""Which folded constants the recipe constant-expression stores once along an axis where they repeat themselves."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from contract_case import Case, load_case

from trtopt.rewrite.driver import apply
from trtopt.rewrite.protocol import Target
from trtopt.support.ort_session import OrtSession
from trtopt_recipes.constant_expression import ConstantExpression

ROW = "<float[1, 1, 4] c = {1, 2, 3, 4}, int64[3] s = {2, 3, 4}> { e = Expand(c, s) "


@pytest.mark.parametrize(
    ("graph", "stored"),
    [
        ("g (float[2, 3, 4] x) => (float[2, 3, 4] y) " + ROW + "y = Add(x, e) }", (1, 1, 4)),
        ("g (float[2, 3, 4] x) => (float[2, 3, 4] y) " + ROW + "z = Mul(e, x) y = Sub(z, e) }", (1, 1, 4)),
        ("g (float[3, 4] x) => (float[2, 3, 4] y) " + ROW + "y = Add(x, e) }", (2, 1, 4)),
        ("g (float[2, 1, 4] x) => (float[2, 3, 4] y) " + ROW + "y = Add(x, e) }", (1, 3, 4)),
        ("g (float[N, 3, 4] x) => (float[N, 3, 4] y) " + ROW + "y = Add(x, e) }", (2, 1, 4)),
        ("g (float[2, 3, 4] x) => (float[4, 3, 4] y) " + ROW + "y = Concat <axis = 0> (x, e) }", (2, 3, 4)),
        ("g (float[2, 3, 4] x) => (float[2, 3, 4] y, float[2, 3, 4] e) " + ROW + "y = Add(x, e) }", None),
    ],
    ids=["broadcast", "two-readers", "adds-an-axis", "stretches-an-axis", "unknown-size", "concat", "output"],
)
def test_an_axis_is_stored_once_where_the_other_operand_has_its_size(
    graph: str, stored: tuple[int, ...] | None, tmp_path: Path
) -> None:
    before = load_case(Case("constant-expression", "repeated", graph), tmp_path)
    after = apply(before, (ConstantExpression(),), strict=True, target=Target()).artifact
    assert after.steps[-1].changes == 1
    constant = after.model.graph.initializers.get("e")
    assert (None if constant is None else tuple(constant.const_value.shape)) == stored  # type: ignore[union-attr]
    x = [dim if isinstance(dim, int) else 2 for dim in before.inputs[0].shape]
    feed = {"x": np.random.default_rng(0).standard_normal(x, dtype=np.float32)}
    with OrtSession(before.model) as reference, OrtSession(after.model) as folded:
        for expected, found in zip(reference.run(feed), folded.run(feed), strict=True):
            np.testing.assert_array_equal(found, expected)
