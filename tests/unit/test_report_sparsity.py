"""What a person reads about the 2:4 sparsity of a build, and what its record adds up to."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import onnx_ir as ir
from rich.console import Console, Group

from trtopt.pipeline.sparse import record_of
from trtopt.report.schema.analysis import SparseLayer, Sparsity
from trtopt.report.schema.decisions import SparsityBudget, SparsityRecord
from trtopt.report.text.decisions import sparsity_section
from trtopt.report.text.names import Labels
from trtopt.sparsity.layers import PrunedWeight, SparseCandidate, SparseCandidates
from trtopt.sparsity.prune import PrunedModel


def record() -> SparsityRecord:
    """One layer that pays, and one that cannot be 2:4."""
    found = SparseCandidates((SparseCandidate("w", ("wide",), 0, False),), {"odd": "its weight is not constant"})
    rows = (
        SparseLayer(("wide",), "w", False, True, "it pays", 20.0, 15.0),
        SparseLayer(("odd",), "", False, False, "its weight is not constant", 30.0, 30.0),
    )
    verdict = Sparsity("tensorrt", rows, 60.0, 55.0, "predicted")
    layer = PrunedWeight("w", ("wide",), "recovered", np.zeros((8, 8), np.float32), 0.7)
    pruned = PrunedModel(ir.Model(ir.Graph([], [], nodes=[]), ir_version=10), (layer,))
    return record_of("tensorrt", found, verdict, pruned, pruned)


def test_the_gains_of_the_layers_add_up_to_that_of_the_network() -> None:
    made = record()
    assert made.dense_us == 60.0 and made.sparse_us == 55.0
    assert sum(layer.dense_us - layer.sparse_us for layer in made.layers) == 5.0


def test_a_budget_of_sqnr_alone_is_named_as_one() -> None:
    budget = SparsityBudget(math.inf, math.inf, 0.25, True, (), 1, False)
    console = Console(width=150, no_color=True)
    with console.capture() as capture:
        console.print(
            Group(*sparsity_section(dataclasses.replace(record(), metric="1 - cosine", budget=budget), Labels({})))
        )
    assert "the SQNR of --min-sqnr-db: at a drop of 0.2500 (1 - cosine)" in capture.get()
