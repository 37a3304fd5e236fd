"""Random networks: where rows are said to be alone, other rows change nothing of a row."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from random_networks import DIALECTS, WINDOWS, random_network

from trtopt.graph.rows import are_alone
from trtopt.graph.shapes import at_shapes
from trtopt.source.onnx_file import load
from trtopt.support.ort_session import OrtSession

ROWS = 3
FEW = (*range(20), *range(DIALECTS, DIALECTS + 6), *range(WINDOWS, WINDOWS + 6))
MANY = (*range(400), *range(DIALECTS, DIALECTS + 100), *range(WINDOWS, WINDOWS + 100))


@pytest.mark.parametrize(
    ("seeds", "least"), [pytest.param(FEW, 8, id="few"), pytest.param(MANY, 200, id="many", marks=pytest.mark.long)]
)
def test_rows_that_are_said_to_be_alone_are(seeds: Sequence[int], least: int, tmp_path: Path) -> None:
    """The first row is compared, with the others once drawn and once all NaN; ``least`` networks have such rows."""
    alone = 0
    for seed in seeds:
        onnx.save(random_network(seed), tmp_path / "m.onnx")
        artifact = load(tmp_path / "m.onnx")
        (item,) = artifact.inputs
        if isinstance(item.shape[0], int):
            continue
        shape = (ROWS, *(dim for dim in item.shape[1:] if isinstance(dim, int)))
        fixed = at_shapes(artifact.model, {item.name: shape})
        if not are_alone(fixed, ROWS):
            continue
        alone += 1
        feed = np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)
        other = feed.copy()
        other[1:] = np.nan
        with OrtSession(fixed, threads=1) as session:
            for one, two in zip(session.run({item.name: feed}), session.run({item.name: other}), strict=True):
                np.testing.assert_allclose(one[:1], two[:1], rtol=1e-5, atol=1e-6, err_msg=f"seed {seed}")
    assert alone >= least
