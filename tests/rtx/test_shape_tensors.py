"""Inputs that the compiler reads as shapes: their values are in the profile."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest

import trtopt
from trtopt.analysis import profile
from trtopt.config import ShapeMap
from trtopt.engine.manifest import VerifiedEngine
from trtopt.errors import EngineBuildError
from trtopt.hardware.probe import Probe
from trtopt.hardware.spec import find_gpu
from trtopt.profiling import gpu
from trtopt.report.schema.manifest import ShapeRange

pytest.importorskip("tensorrt_rtx", reason="needs TensorRT for RTX")

RESHAPE = "g (float[N,8] x, int64[2] s) => (float[A,B] y) {e = Relu(x) y = Reshape(e, s)}"
RESIZE = 'g (float[1,3,H,W] x, int64[4] s) => (float[A,B,C,D] y) {e = Relu(x) y = Resize<mode="linear">(e,,,s)}'
X, K = np.ones((4, 8), np.float32), np.ones(1, np.int64)
TOP_K = "g (float[4,8] x, int64[1] s) => (float[4,A] y, int64[4,A] i) {y, i = TopK(x, s)}"


def saved(text: str, folder: Path) -> Path:
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> {text}')
    onnx.save(model, folder / "m.onnx")
    return folder / "m.onnx"


@pytest.mark.parametrize(
    ("text", "low", "best", "high"),
    [
        (RESHAPE, {"x": (1, 8), "s": (1, 8)}, {"x": (4, 8), "s": (4, 8)}, {"x": (16, 8), "s": (16, 8)}),
        (
            RESIZE,
            {"x": (1, 3, 8, 8), "s": (1, 3, 16, 16)},
            {"x": (1, 3, 16, 16), "s": (1, 3, 32, 32)},
            {"x": (1, 3, 32, 32), "s": (1, 3, 64, 64)},
        ),
        (TOP_K, {"s": (1,)}, {"s": (3,)}, {"s": (5,)}),
    ],
)
def test_an_engine_with_a_shape_tensor_is_built_and_verified(
    text: str,
    low: dict[str, tuple[int, ...]],
    best: dict[str, tuple[int, ...]],
    high: dict[str, tuple[int, ...]],
    tmp_path: Path,
) -> None:
    report = trtopt.build(
        saved(text, tmp_path),
        gpu="L4",
        min_shapes=(low,),
        opt_shapes=(best,),
        max_shapes=(high,),
        output=str(tmp_path / "m.rtx.engine"),
    )
    assert report.engine is not None and report.accuracy is not None
    values = report.engine.profiles[0]["s"]
    assert [tuple(values[f"{end}_values"]) for end in ("min", "opt", "max")] == [low["s"], best["s"], high["s"]]
    assert all(output.sqnr_db > 50 for output in report.accuracy.outputs.values())
    assert not any("cannot be judged" in text for text in report.warnings)
    assert trtopt.verify(tmp_path / "m.rtx.engine").inputs[-1].name == "s"


def test_without_values_the_remedy_names_the_input_and_the_options(tmp_path: Path) -> None:
    with pytest.raises(EngineBuildError, match="'s' as a shape") as caught:
        trtopt.build(saved(TOP_K, tmp_path), gpu="L4", calib={"x": X, "s": K}, output=str(tmp_path / "m.rtx.engine"))
    assert "--opt-shapes s:N " in caught.value.remedy


class _BuiltError(Exception):
    """Carries an engine that was about to be measured."""


@pytest.mark.parametrize("is_in_file", [True, False])
def test_a_model_that_is_profiled_is_built_at_what_it_is_run_on(
    is_in_file: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a GPU, up to where it would be measured. Without the values of ``s`` there is no engine."""

    def measure(engine: VerifiedEngine, shapes: ShapeMap, *, inputs: str | None, **_: object) -> None:
        raise _BuiltError(engine, shapes, inputs)

    monkeypatch.setattr(profile, "probe", lambda: Probe(find_gpu("L4"), "NVIDIA L4"))
    monkeypatch.setattr(gpu, "measure_engine", measure)
    file, asked = str(tmp_path / "in.npz"), {"x": (3, 8), "s": (6, 4)}
    np.savez(file, x=np.ones((3, 8), np.float32), s=np.array([6, 4]))
    run = functools.partial(trtopt.profile, saved(RESHAPE, tmp_path), backend="tensorrt-rtx")
    with pytest.raises(_BuiltError) as caught:
        run(load_inputs=file) if is_in_file else run(shapes=(asked,))
    engine, shapes, inputs = caught.value.args
    assert engine.manifest.inputs[0].ranges == (ShapeRange((3, 8), (3, 8), (3, 8)),)
    assert (shapes, inputs) == (({}, file) if is_in_file else (asked, None))
