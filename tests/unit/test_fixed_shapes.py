"""Axes that every profile fixes: the graph, and the samples for it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest

from trtopt.accuracy.batches import BatchRunner
from trtopt.engine.request import ShapeProfile, fixed_sizes
from trtopt.errors import UsageError
from trtopt.graph.artifact import ModelArtifact
from trtopt.graph.edit import dims_of_value
from trtopt.graph.shapes import with_sizes
from trtopt.precision.observe.batches import BatchedSamples, fixed_axes
from trtopt.precision.observe.samples import open_samples
from trtopt.precision.observe.stream import SomeSamples
from trtopt.source.onnx_file import load
from trtopt.support.ort_session import OrtSession

HEADS = """
<ir_version: 8, opset_import: ["" : 17]>
g (float[N, S, 8] x) => (float[N, A, 2, 4] y)
<int64 i0 = {0}, int64 i1 = {1}, int64[1] a = {0}, int64[1] less = {-1}, int64[1] four = {4}> {
  s = Shape(x) d0 = Gather(s, i0) d1 = Gather(s, i1) n = Unsqueeze(d0, a) m = Unsqueeze(d1, a)
  h = Concat <axis = 0> (n, m, less, four) y = Reshape(x, h)
}
"""
TWO = """
<ir_version: 8, opset_import: ["" : 17]>
g (float[N, 4] image, float[M, 4] text) => (float[N, M] y) { t = Transpose(text) y = MatMul(image, t) }
"""


def model(folder: Path, text: str) -> ModelArtifact:
    onnx.save(onnx.parser.parse_model(text), folder / "m.onnx")
    return load(folder / "m.onnx")


def profile(low: Mapping[str, tuple[int, ...]], high: Mapping[str, tuple[int, ...]]) -> ShapeProfile:
    return ShapeProfile({name: (low[name], high[name], high[name]) for name in low})


def test_an_axis_is_fixed_where_all_profiles_agree(tmp_path: Path) -> None:
    inputs = model(tmp_path, HEADS).inputs
    one, two = profile({"x": (4, 1, 8)}, {"x": (4, 9, 8)}), profile({"x": (4, 9, 8)}, {"x": (4, 20, 8)})
    assert fixed_sizes(inputs, (one, two)) == {"x": {0: 4}}
    assert fixed_sizes(inputs, (profile({"x": (4, 9, 8)}, {"x": (4, 9, 8)}),)) == {"x": {0: 4, 1: 9}}
    assert fixed_sizes(inputs, (one, profile({"x": (2, 3, 8)}, {"x": (2, 3, 8)}))) == {}


def test_what_follows_from_the_sizes_is_constant(tmp_path: Path) -> None:
    loaded = model(tmp_path, HEADS).model
    whole = with_sizes(loaded, {"x": {0: 4, 1: 9}})
    assert [node.op_type for node in whole.graph] == ["Reshape"]
    assert dims_of_value(whole.graph.outputs[0]) == (4, 9, 2, 4)
    part = with_sizes(loaded, {"x": {0: 4}})
    assert dims_of_value(part.graph.inputs[0]) == (4, "S", 8)
    assert (dims_of_value(part.graph.outputs[0]) or ())[0] == 4
    for size in (1, 2, 3, 5, 9):
        x = np.random.default_rng(size).standard_normal((4, size, 8), np.float32)
        with OrtSession(loaded) as before, OrtSession(part) as after:
            np.testing.assert_array_equal(before.run({"x": x})[0], after.run({"x": x})[0])


def test_samples_are_joined_and_filled_up(tmp_path: Path) -> None:
    artifact = model(tmp_path, HEADS)
    rows = np.arange(10 * 3 * 8, dtype=np.float32).reshape(10, 3, 8)
    axes = fixed_axes(artifact.model, artifact.inputs, {"x": {0: 4, 1: 3}})
    samples = open_samples({"x": rows, "__labels__": np.arange(10)}, artifact.inputs)
    left, full = (BatchedSamples(samples, axes, filled=filled) for filled in (False, True))
    assert [len(item["x"]) for item in left] == [4, 4, 2] and [len(item["x"]) for item in full] == [4, 4, 4]
    np.testing.assert_array_equal(np.concatenate([item["x"] for item in left]), rows)
    np.testing.assert_array_equal(list(full)[2]["x"], rows[[8, 9, 4, 5]])
    assert left.count == 3 and left.sha256 == samples.sha256 and left.labels is not None and len(left.labels) == 10
    assert [len(item["x"]) for item in BatchedSamples(left, axes, filled=True)] == [4, 4, 4]
    assert [rows for _, rows in full.with_rows()] == [4, 4, 2]
    assert [rows for _, rows in SomeSamples(full, 4).with_rows()] == [4]


def test_a_sample_alone_is_repeated(tmp_path: Path) -> None:
    artifact = model(tmp_path, HEADS)
    axes = fixed_axes(artifact.model, artifact.inputs, {"x": {0: 4, 1: 3}})
    samples = open_samples({"x": np.ones((1, 3, 8), np.float32)}, artifact.inputs)
    assert [item["x"].shape for item in BatchedSamples(samples, axes, filled=True)] == [(4, 3, 8)]


def test_samples_of_another_length_are_refused(tmp_path: Path) -> None:
    artifact = model(tmp_path, HEADS)
    axes = fixed_axes(artifact.model, artifact.inputs, {"x": {0: 4, 1: 3}})
    samples = open_samples({"x": np.ones((2, 5, 8), np.float32)}, artifact.inputs)
    with pytest.raises(UsageError, match=r"\[1, 5, 8\].*fix its axis 1 to 3"):
        list(BatchedSamples(samples, axes, filled=False))


def test_any_number_of_rows_runs_on_a_graph_of_one_batch(tmp_path: Path) -> None:
    artifact = model(tmp_path, HEADS)
    fixed = with_sizes(artifact.model, {"x": {0: 4}})
    axes = fixed_axes(artifact.model, artifact.inputs, {"x": {0: 4}})
    with OrtSession(artifact.model) as before, OrtSession(fixed) as session:
        after = BatchRunner(session, axes)
        for rows in (1, 3, 4, 5, 11):
            x = np.random.default_rng(rows).standard_normal((rows, 3, 8), np.float32)
            np.testing.assert_array_equal(before.run({"x": x})[0], after.run({"x": x})[0])


def test_inputs_of_different_batches_are_cut_and_repeated_one_by_one(tmp_path: Path) -> None:
    artifact = model(tmp_path, TWO)
    axes = fixed_axes(artifact.model, artifact.inputs, {"image": {0: 1}, "text": {0: 3}})
    samples = open_samples("synthetic", artifact.inputs, count=2)
    assert axes.rows is None
    found = [{name: array.shape for name, array in item.items()} for item in BatchedSamples(samples, axes, filled=True)]
    assert found == [{"image": (1, 4), "text": (3, 4)}] * 2
    assert [rows for _, rows in BatchedSamples(samples, axes, filled=True).with_rows()] == [1, 1]
