"""Random networks that compute shapes: axes fixed, and computed shapes reduced, change no bit at any shape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from shape_networks import WIDTH, shape_network

from trtopt.graph.shapes import with_sizes
from trtopt.rewrite.driver import run
from trtopt.source.onnx_file import load
from trtopt.support.ort_session import OrtSession

SHAPES = ((1, 1), (2, 3), (3, 1), (1, 5), (4, 2))
EXACT = "computed-reshape,expanded-operand,no-op,dead-node,constant-expression"


@pytest.mark.parametrize(
    "seeds", [pytest.param(range(12), id="few"), pytest.param(range(150), id="many", marks=pytest.mark.long)]
)
def test_shapes_change_nothing_that_is_computed(seeds: Sequence[int], tmp_path: Path) -> None:
    fired: Counter[str] = Counter()
    for seed in seeds:
        onnx.save(shape_network(seed), tmp_path / "m.onnx")
        artifact = load(tmp_path / "m.onnx")
        reduced = run(artifact, recipes=EXACT, strict=True).artifact
        fired.update({step.name: step.changes for step in reduced.steps})
        check(artifact.model, reduced.model, SHAPES, f"seed {seed}")
        names = [str(value.name) for value in artifact.model.graph.inputs]
        for axes in ((0,), (1,), (0, 1)):
            n, s = SHAPES[1 + seed % 4]
            sizes = {name: {axis: (n, s)[axis] for axis in axes} for name in names}
            fitting = [(n if 0 in axes else a, s if 1 in axes else b) for a, b in SHAPES]
            check(artifact.model, with_sizes(artifact.model, sizes), fitting, f"seed {seed}, axes {axes} fixed")
            both = run(artifact.with_step(with_sizes(artifact.model, sizes), artifact.steps[-1]), recipes=EXACT)
            check(artifact.model, both.artifact.model, fitting, f"seed {seed}, axes {axes} fixed, and recipes")
    assert fired["computed-reshape"] and fired["expanded-operand"]


def check(before: ir.Model, after: ir.Model, shapes: Sequence[tuple[int, int]], where: str) -> None:
    with OrtSession(before, fuse=False) as one, OrtSession(after, fuse=False) as other:
        for n, s in shapes:
            rng = np.random.default_rng(n * 10 + s)
            feeds = {
                str(value.name): rng.standard_normal((n, s, WIDTH), dtype=np.float32) for value in before.graph.inputs
            }
            expected, found = one.run(feeds)[0], other.run(feeds)[0]
            np.testing.assert_array_equal(expected, found, err_msg=f"{where}, shape {(n, s)}")
