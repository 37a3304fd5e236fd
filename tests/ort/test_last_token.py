"""A decoder that gives the scores of its last token in place of those of all."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from decoder_nets import VOCABULARY, concat_decoder, concat_shapes

from trtopt.errors import UsageError
from trtopt.graph.artifact import ModelArtifact
from trtopt.precision.observe.decode import Decoder
from trtopt.source.last_token import of_last_token
from trtopt.source.onnx_file import load
from trtopt.support.ort_session import OrtSession


def test_the_scores_are_those_of_the_last_token_under_the_same_name(tmp_path: Path) -> None:
    before = load(concat_decoder(tmp_path / "decoder.onnx"))
    after = of_last_token(before)
    assert [value.name for value in after.model.graph.outputs] == ["logits", "present_k", "present_v"]
    assert list(after.model.graph.outputs[0].shape or ())[1:] == [1, VOCABULARY]
    assert after.steps[-1].name == "last-token"
    rng = np.random.default_rng(0)
    feeds = {
        name: rng.standard_normal(shape, np.float32) if "past" in name else rng.integers(0, VOCABULARY, shape)
        for name, shape in concat_shapes(2, 6, 3).items()
    }
    with OrtSession(before.model) as first, OrtSession(after.model) as second:
        wanted, found = first.run(feeds), second.run(feeds)
    assert np.array_equal(wanted[0][:, -1:], found[0])
    assert all(np.array_equal(one, other) for one, other in zip(wanted[1:], found[1:], strict=True))
    assert Decoder(after.model, ["input_ids"]).scores == "logits"


def test_all_outputs_of_scores_are_cut(tmp_path: Path) -> None:
    table = "<float[8, 8] table = {" + ", ".join(map(str, range(64))) + "}>"
    model = ir.from_onnx_text(
        '<ir_version: 10, opset_import: ["" : 21]> g (int64[B, S] ids) => (float[B, S, 8] y, float[B, S, 8] z) '
        f"{table} {{ y = Gather(table, ids) z = Neg(y) }}"
    )
    after = of_last_token(ModelArtifact(model, None, "0"))
    with OrtSession(after.model) as session:
        y, z = session.run({"ids": np.array([[3, 5]])})
    assert after.steps[-1].changes == 2 and y.tolist() == [[list(range(40, 48))]]
    assert np.array_equal(z, -y)


@pytest.mark.parametrize(
    "graph",
    [
        "g (int64[B, S] ids) => (float[B, S, 7] y) { y = Gather(table, ids) }",
        "g (float[B, S, 8] x) => (float[B, S, 8] y) { y = Relu(x) }",
        "g (int64[B, 1] ids) => (float[B, 1, 8] y) { y = Gather(table, ids) }",
    ],
)
def test_a_model_without_scores_of_several_tokens_says_so(graph: str) -> None:
    table = "<float[8, 8] table = {" + ", ".join(["1"] * 64) + "}>"
    model = ir.from_onnx_text(f'<ir_version: 10, opset_import: ["" : 21]> {graph.replace("{", table + " {", 1)}')
    with pytest.raises(UsageError, match="No output of the model holds a score for each token"):
        of_last_token(ModelArtifact(model, None, "0"))
