"""A model pruned by trtopt: what ``build --sparse-all`` does before it builds, in whole or in part.

    python ours.py magnitude|recovery MODEL.onnx SAMPLES OUT.onnx FIGURES.json

SAMPLES is a folder of feeds.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import onnx_ir as ir
import onnxruntime  # noqa: F401 - imported here, so that no import is timed
from usage import measured

from trtopt.accuracy.compare import decibels
from trtopt.graph.artifact import ModelArtifact
from trtopt.graph.shapes import infer_shapes
from trtopt.pipeline.improve import OutputErrorMeter
from trtopt.precision.fp16.to_fp32 import to_fp32
from trtopt.precision.observe.samples import open_samples
from trtopt.precision.observe.stream import Samples
from trtopt.rewrite import driver
from trtopt.rewrite.protocol import Stage, Target
from trtopt.rewrite.registry import select
from trtopt.source.onnx_file import load
from trtopt.source.save import save_model
from trtopt.sparsity.layers import by_magnitude, candidates, with_pruned
from trtopt.sparsity.prune import prune


def cleaned(path: str | Path) -> ModelArtifact:
    """A file as a build has it before it prunes, without the rewrites that a compiler has to judge."""
    recipes = tuple(recipe for recipe in select("all") if recipe.stage in (Stage.CLEAN, Stage.FOLD))
    return driver.apply(load(path), recipes, target=Target()).artifact


def pruned(artifact: ModelArtifact, samples: Samples, method: str) -> tuple[ir.Model, dict[str, Any]]:
    """The pruned model, and what became of its layers."""
    model = infer_shapes(to_fp32(artifact.model))
    layers = candidates(model).layers
    if method == "magnitude":
        return with_pruned(model, [by_magnitude(model, layer) for layer in layers]), {}
    result = prune(model, layers, samples, OutputErrorMeter(model, samples).of_model)
    trials = {trial.name: round(decibels(trial.error), 2) for trial in result.trials}
    recovered = sum(layer.method == "recovered" for layer in result.layers)
    return result.model, {"layers_recovered": recovered, "held_out_sqnr_db": trials, "reason": result.reason}


def main(method: str, source: str, folder: str, out: str, figures: str) -> None:
    artifact = cleaned(source)
    samples = open_samples(folder, artifact.inputs)
    results = []
    found: dict[str, Any] = measured(lambda: results.append(pruned(artifact, samples, method)))
    model, said = results[0]
    save_model(model, out)
    Path(figures).write_text(json.dumps(found | said))


if __name__ == "__main__":
    main(*sys.argv[1:])
