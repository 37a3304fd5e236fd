"""A case of the contract suite: a model, and what a recipe must do with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx
import onnx.parser

from trtopt.graph.artifact import ModelArtifact
from trtopt.rewrite.protocol import Target
from trtopt.source.onnx_file import load


@dataclass(frozen=True)
class Case:
    """A model, and how often the recipe must change and refuse something in it.

    Attributes:
        recipe: The recipe's name.
        label: What the case shows.
        graph: The graph as ONNX text.
        weights: Shapes of weights to fill with random numbers, by name; one named ``v`` is positive.
        values: Weights given as they are.
        changes: Matches that must be rewritten.
        refusals: Refusals that must be reported.
        tolerance: Largest difference over the largest output.
        opset: The opset of the model.
        target: What the recipe is told.
    """

    recipe: str
    label: str
    graph: str
    weights: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    values: Mapping[str, np.ndarray] = field(default_factory=dict)
    changes: int = 1
    refusals: int = 0
    tolerance: float = 0.0
    opset: int = 17
    target: Target = field(default_factory=Target)


def load_case(case: Case, folder: Path) -> ModelArtifact:
    """The model of a case, from a file in ``folder``."""
    header = f'<ir_version: 8, opset_import: ["" : {case.opset}]>'
    model = onnx.parser.parse_model(header + case.graph)
    rng = np.random.default_rng(7)
    for name, shape in case.weights.items():
        array = rng.standard_normal(shape, dtype=np.float32)
        # A variance is positive.
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.abs(array) if name == "v" else array, name))
    for name, array in case.values.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    onnx.save(model, folder / "m.onnx")
    return load(folder / "m.onnx")
