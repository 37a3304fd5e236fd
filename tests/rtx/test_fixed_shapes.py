"""An engine for one batch: its graph, its manifest, its saved model and what is fed to it agree."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import rtx_nets
from onnx import helper

import trtopt
from trtopt.engine.manifest import load_engine
from trtopt.errors import UsageError

FOUR = {"x": (4, 16, 16, 16)}
SAMPLES = {"x": np.random.default_rng(0).standard_normal((6, 16, 16, 16)).astype(np.float32)}


def dims(path: Path) -> list[int | str]:
    shape = onnx.load(path).graph.input[0].type.tensor_type.shape
    return [dim.dim_param or dim.dim_value for dim in shape.dim]


def test_what_is_written_has_the_batch_of_the_engine(tmp_path: Path) -> None:
    onnx.save(rtx_nets.conv_net(batch="n"), tmp_path / "net.onnx")
    saved, rows = tmp_path / "saved.onnx", []

    def metric(run: object) -> float:
        for count in (1, 4, 5):
            rows.append(len(run({"x": SAMPLES["x"][:count]})[0]))  # type: ignore[operator]
        return 1.0

    options = {"calib": SAMPLES, "precision": "fp16", "gpu": "L4", "opt_shapes": FOUR, "save_onnx": saved}
    report = trtopt.build(tmp_path / "net.onnx", metric=metric, **options)
    assert dims(saved) == [4, 16, 16, 16]
    assert report.accuracy is not None and report.accuracy.samples == 6 and rows == [1, 4, 5] * 3  # FP32, judged, saved
    assert report.engine is not None and report.engine.path is not None
    manifest = load_engine(Path(report.engine.path)).manifest
    assert manifest is not None and manifest.inputs[0].shape == (4, 16, 16, 16)
    with trtopt.Engine.load(report.engine.path, fallback=saved) as engine:
        whole = engine.run({"x": SAMPLES["x"][:4]})
        fewer = engine.run({"x": SAMPLES["x"][:2]})  # filled up: no layer mixes rows
        assert [len(value) for value in fewer.values()] == [2] * len(fewer)
        assert all(np.array_equal(fewer[name], value[:2]) for name, value in whole.items())
        with pytest.raises(UsageError, match=r"is outside of what the engine was built for") as refused:
            engine.run({"x": np.ones((5, 16, 16, 16), np.float32)})
    assert "--min-shapes" in refused.value.remedy


def test_optimize_fixes_what_the_profile_fixes_unless_it_is_to_stay(tmp_path: Path) -> None:
    onnx.save(rtx_nets.conv_net(batch="n"), tmp_path / "net.onnx")
    out = tmp_path / "out.onnx"
    trtopt.optimize(tmp_path / "net.onnx", output=out, opt_shapes=FOUR, recipes="none")
    assert dims(out) == [4, 16, 16, 16]
    trtopt.optimize(tmp_path / "net.onnx", output=out, opt_shapes=FOUR, recipes="none", keep_dynamic=True)
    assert dims(out) == ["n", 16, 16, 16]
    trtopt.optimize(tmp_path / "net.onnx", output=out, recipes="none")
    assert dims(out) == ["n", 16, 16, 16]


def test_the_sizes_of_an_input_are_one_line_of_the_report(tmp_path: Path) -> None:
    node = helper.make_node("Relu", ["x"], ["y"], name="relu")
    onnx.save(rtx_nets.model([node], [("x", np.float32, ["n", "s"])], [("y", np.float32)], []), tmp_path / "net.onnx")
    out = tmp_path / "out.onnx"
    report = trtopt.optimize(tmp_path / "net.onnx", output=out, opt_shapes={"x": (4, 7)}, recipes="none")
    (step,) = (step for step in report.steps if step.name == "fixed-shapes")
    assert (step.changes, step.details) == (2, ("x axis 0: 4, axis 1: 7",))
