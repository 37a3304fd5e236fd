"""The scores of a decoder's last token in place of those of all its tokens: who decodes reads no others.

A step of one token is the same model. In prefill the product with the vocabulary, mostly the largest of a small
decoder, and the output are as many times smaller as the prompt has tokens; the recipe ``late-selection`` takes the
token earlier, in front of the last block's products.
"""

from __future__ import annotations

import time

import numpy as np
import onnx_ir as ir

from trtopt.errors import UsageError
from trtopt.graph import edit
from trtopt.graph.artifact import ModelArtifact
from trtopt.graph.states import tokens_and_scores
from trtopt.report.schema.steps import StepRecord


def of_last_token(artifact: ModelArtifact) -> ModelArtifact:
    """The model whose scores ``[batch, tokens, vocabulary]`` are ``[batch, 1, vocabulary]``, under the same names.

    Raises:
        UsageError: No output holds a score for each of the tokens.
    """
    began = time.perf_counter()
    model = artifact.model.clone()
    names = {name for _, name in tokens_and_scores(model)}
    scores = [value for value in model.graph.outputs if value.name in names and value.producer() is not None]
    scores = [value for value in scores if len(dims := edit.dims_of_value(value) or ()) == 3 and dims[1] != 1]
    if not scores:
        raise UsageError(
            "No output of the model holds a score for each token of an input and each word it knows",
            where=f"--last-token, outputs {', '.join(str(value.name) for value in model.graph.outputs)}",
            remedy="leave --last-token out",
        )
    details = tuple(f"{value.name}: {list(edit.dims_of_value(value) or ())}" for value in scores)
    for value in scores:
        _cut(model, value)
    step = StepRecord("last-token", "LOAD", len(scores), time.perf_counter() - began, details=details)
    return artifact.with_step(model, step)


def _cut(model: ir.Model, scores: ir.Value) -> None:
    """Let the output be its last row of axis 1."""
    graph, names, name = model.graph, edit.Names(model), str(scores.name)
    dims = edit.dims_of_value(scores) or ()
    scores.name = names.value(f"{name}_of_all")
    numbers = {"start": -1, "stop": np.iinfo(np.int64).max, "axis": 1}
    operands = [
        edit.add_initializer(graph, names.value(f"{name}_{word}"), np.array([number], np.int64))
        for word, number in numbers.items()
    ]
    made = edit.new_node("Slice", [scores, *operands], name=names.node(f"{name}_last"), output=name, like=scores)
    made.outputs[0].shape = ir.Shape([dims[0], 1, dims[2]])
    graph.append(made)
    graph.outputs[list(graph.outputs).index(scores)] = made.outputs[0]
