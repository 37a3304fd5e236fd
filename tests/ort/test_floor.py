"""INT8 and FP8 on a caller's samples keep a floor, or the build fails: they are never silently wrong."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from log_front_ends import BINS, FRAMES, save_keywords, spectra
from onnx import TensorProto, helper, numpy_helper

from trtopt import api
from trtopt.config import BuildConfig, Floor
from trtopt.config.budget import RANDOM_DB, RANDOM_FLOOR
from trtopt.events import ignore
from trtopt.graph.artifact import InputSpec
from trtopt.pipeline.settings import DataSources, read_inputs, settle
from trtopt.pipeline.verify import Verification, verify
from trtopt.precision.observe.samples import SYNTHETIC, open_samples
from trtopt.report.schema.build import BuildReport
from trtopt.source.onnx_file import load
from trtopt.support.clock import Clock


def keywords(folder: Path, count: int = 100, **options: Any) -> BuildReport:
    """TensorRT's regions are judged by the model, and need no compiler."""
    save_keywords(folder / "model.onnx")
    given: dict[str, Any] = {"precision": "int8", "calib": {"x": spectra(count)}, **options}
    return api.optimize(
        folder / "model.onnx",
        backend="tensorrt",
        output=str(folder / "out.onnx"),
        cache_dir=str(folder / "cache"),
        **given,
    )


def agreement(report: BuildReport) -> float:
    assert report.accuracy is not None and report.accuracy.outputs["y"].top1_agreement is not None
    return report.accuracy.outputs["y"].top1_agreement


def test_plain_int8_of_a_logarithm_is_no_build(tmp_path: Path) -> None:
    report = keywords(tmp_path, keep_all_int8=True)
    assert agreement(report) < 0.9
    assert any("--min-agreement" in failure for failure in report.gate_failures)
    assert not (tmp_path / "out.onnx").exists()


def test_regions_go_back_until_the_floor_holds(tmp_path: Path) -> None:
    report = keywords(tmp_path)
    assert agreement(report) >= 0.98 and not report.gate_failures
    assert report.accuracy is not None and report.accuracy.floor is not None
    assert report.accuracy.floor.outputs == {"y": "agreement"} and report.accuracy.floor.agreement == 0.98
    assert (tmp_path / "out.onnx").exists()


def selected(folder: Path, **options: Any) -> BuildReport:
    """The two best words, with their scores."""
    path = folder / "model.onnx"
    save_keywords(path)
    proto = onnx.load(path)
    graph = proto.graph
    scores = str(graph.output[0].name)
    graph.initializer.append(numpy_helper.from_array(np.array([2]), "two"))
    graph.node.append(helper.make_node("TopK", [scores, "two"], ["best", "words"], name="select"))
    del graph.output[:]
    graph.output.append(helper.make_tensor_value_info("best", TensorProto.FLOAT, ["batch", 2]))
    graph.output.append(helper.make_tensor_value_info("words", TensorProto.INT64, ["batch", 2]))
    onnx.save(proto, path)
    return api.optimize(
        path,
        backend="tensorrt",
        precision="int8",
        calib={"x": spectra(100)},
        output=str(folder / "out.onnx"),
        cache_dir=str(folder / "cache"),
        **options,
    )


def test_what_a_selection_ranks_keeps_the_floor_for_it(tmp_path: Path) -> None:
    bad = selected(tmp_path, keep_all_int8=True)
    assert any("y, from which outputs are selected: SQNR" in failure for failure in bad.gate_failures)
    good = selected(tmp_path)
    assert good.accuracy is not None and good.accuracy.floor is not None and not good.gate_failures
    assert good.accuracy.floor.outputs == {"best": "none", "words": "none", "y": "sqnr"}
    assert good.accuracy.selections == ("best", "words") and list(good.accuracy.outputs) == ["best", "words"]
    assert good.accuracy.ranked["y"].sqnr_db >= 20 and good.accuracy.ranked["y"].top1_agreement is None


def test_allowed_loss_is_a_warning(tmp_path: Path) -> None:
    report = keywords(tmp_path, keep_all_int8=True, allow_accuracy_loss=True)
    assert any("--min-agreement" in warning for warning in report.warnings)
    assert (tmp_path / "out.onnx").exists()


def test_zero_is_no_floor(tmp_path: Path) -> None:
    report = keywords(tmp_path, keep_all_int8=True, min_agreement=0.0)
    assert agreement(report) < 0.9 and not report.gate_failures


def test_a_metric_that_is_content_does_not_lower_the_floor(tmp_path: Path) -> None:
    report = keywords(tmp_path, keep_all_int8=True, metric="agreement", max_accuracy_drop=0.9)
    assert any("--min-agreement" in failure for failure in report.gate_failures)


def test_few_samples_say_their_own_noise(tmp_path: Path) -> None:
    report = keywords(tmp_path, count=16)
    assert report.accuracy is not None
    assert report.accuracy.notes == ("16 samples: one that disagrees is 6 %",)


def lossy(folder: Path, **options: Any) -> BuildReport:
    """The smaller half of a product is all that is left of it: in 8 bits that is noise, on random data too."""
    rng = np.random.default_rng(0)
    model = onnx.parser.parse_model(
        """
        <ir_version: 8, opset_import: ["" : 17]>
        net (float[N, 512] x) => (float[N, 512] y) {
            loud = MatMul (x, w1)
            near = MatMul (x, w2)
            y = Sub (loud, near)
        }
        """
    )
    w1 = rng.standard_normal((512, 512)) * 4
    weights = {"w1": w1, "w2": w1 + rng.standard_normal((512, 512)) / 4}
    for name, array in weights.items():
        model.graph.initializer.append(numpy_helper.from_array(array.astype(np.float32), name))
    onnx.save(model, folder / "model.onnx")
    given: dict[str, Any] = {"precision": "int8", "opt_shapes": ({"x": (2048, 512)},), **options}
    return api.optimize(
        folder / "model.onnx", backend="tensorrt", output=str(folder / "out.onnx"), cache_dir=str(folder), **given
    )


def test_regions_go_back_on_random_data_too(tmp_path: Path) -> None:
    report = lossy(tmp_path)
    assert report.accuracy is not None and report.accuracy.floor is not None and not report.gate_failures
    assert report.accuracy.floor.sqnr_db == RANDOM_DB and report.accuracy.outputs["y"].sqnr_db >= RANDOM_DB
    assert any("taken back for the accuracy floor" in item.reason for item in report.guard)
    assert "nothing was checked on real data" in report.accuracy.notes[0]


def test_what_has_to_be_int8_on_random_data_is_warned_of(tmp_path: Path) -> None:
    report = lossy(tmp_path, keep_all_int8=True)
    assert report.accuracy is not None and report.accuracy.floor is None and not report.gate_failures
    assert any("y keeps" in text and "on random data, less than the floor of 20" in text for text in report.warnings)


def test_what_16_bits_do_not_keep_takes_nothing_back_on_random_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in ("config.budget", "pipeline.settings", "pipeline.verify"):
        monkeypatch.setattr(f"trtopt.{place}.RANDOM_FLOOR", Floor(None, 60.0))
    report = lossy(tmp_path)
    assert not report.gate_failures and any(item.kept for item in report.guard)
    assert any("y keeps" in text and "on random data, less than the floor of 20" in text for text in report.warnings)
    assert (tmp_path / "out.onnx").exists()


@pytest.mark.parametrize(("least", "warned"), [(60.0, True), (None, False)])
def test_too_much_noise_on_random_data_is_said(
    least: float | None, warned: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if least is not None:
        monkeypatch.setattr("trtopt.pipeline.shipped.LEAST_DB", least)
    report = keywords(tmp_path, calib=None)
    said = [text for text in report.warnings if "on random data, less than the floor of 60" in text]
    assert bool(said) is warned and not report.gate_failures
    assert not warned or ("y keeps" in said[0] and "--calib" in said[0])


@pytest.mark.parametrize(("precision", "alike"), [("int8", False), ("auto", False), ("fp16", True)])
def test_8_bits_are_checked_on_random_data_that_gave_no_range(tmp_path: Path, precision: str, alike: bool) -> None:
    save_keywords(tmp_path / "model.onnx")
    config = BuildConfig(precision=precision, output="out.onnx", backend="tensorrt")
    settings = settle(tmp_path / "model.onnx", config, None, Clock(ignore), make_engine=False)
    inputs = read_inputs(settings, DataSources(), Clock(ignore))
    assert inputs.source == inputs.calibration.source == inputs.check.source == SYNTHETIC
    assert inputs.calibration.count == inputs.check.count and (inputs.check is inputs.calibration) is alike
    fitted, checked = ({sample["x"].tobytes() for sample in each} for each in (inputs.calibration, inputs.check))
    assert bool(fitted & checked) is alike


@pytest.mark.parametrize("precision", ["fp16", "auto"])
def test_other_precisions_have_no_floor_unless_asked(tmp_path: Path, precision: str) -> None:
    report = keywords(tmp_path, precision=precision)
    assert report.accuracy is not None and report.accuracy.floor is None


def test_random_data_is_run_for_a_time_only(tmp_path: Path) -> None:
    save_keywords(tmp_path / "model.onnx")
    loaded = load(tmp_path / "model.onnx")
    samples = open_samples(SYNTHETIC, loaded.inputs)
    job = Verification(loaded.model, loaded.model, samples, "synthetic", None, False, most_seconds=0.0)
    record = verify(job, Clock(ignore))
    assert record.samples == 1
    assert record.notes[1] == "1 of 16 synthetic samples were run: they may take 0 s"
    given = open_samples({"x": spectra(40)}, loaded.inputs)
    assert verify(replace(job, samples=given, source="eval"), Clock(ignore)).samples == 40


@pytest.mark.parametrize(
    ("options", "floor"),
    [
        ({}, Floor(0.98, 20.0)),
        ({"precision": "fp8", "gpu": "L4"}, Floor(0.98, 20.0)),
        ({"min_agreement": 0.9}, Floor(0.9, 20.0)),
        ({"min_agreement": 0.0}, Floor(None, 20.0)),
        ({"min_sqnr_db": 10.0}, Floor(0.98, None)),
        ({"min_agreement": 0.0, "min_sqnr_db": 10.0}, None),
        ({"precision": "fp16"}, None),
        ({"precision": "fp16", "min_agreement": 0.9}, Floor(0.9, None)),
        ({"precision": "auto"}, None),
    ],
)
def test_what_was_given_takes_the_place_of_the_default(options: dict[str, Any], floor: Floor | None) -> None:
    config = BuildConfig(**{"precision": "int8", "output": "out.onnx", "backend": "tensorrt", **options})
    settings = settle(Path("model.onnx"), config, None, Clock(ignore), make_engine=False)
    samples = open_samples({"x": spectra(1)}, [InputSpec("x", np.dtype(np.float32), (1, FRAMES, BINS))])
    assert settings.checked_on(samples).budget.floor == floor


def test_random_data_has_no_floor_where_anything_is_asked_or_classes_come_out(tmp_path: Path) -> None:
    save_keywords(tmp_path / "model.onnx")
    loaded = load(tmp_path / "model.onnx")
    samples = open_samples(SYNTHETIC, loaded.inputs)

    def floor(model: Any, **options: Any) -> Floor | None:
        config = BuildConfig(precision="int8", output="out.onnx", backend="tensorrt", **options)
        settings = settle(tmp_path / "model.onnx", config, None, Clock(ignore), make_engine=False)
        return settings.checked_on(samples, model).budget.floor

    assert floor(loaded.model) == RANDOM_FLOOR
    assert floor(None) is floor(loaded.model, keep_all_int8=True) is floor(loaded.model, min_sqnr_db=10.0) is None
    assert floor(loaded.model, max_accuracy_drop=0.1) is None and floor(loaded.model, min_agreement=0.9) == Floor(0.9)
    named = onnx.load(tmp_path / "model.onnx")
    named.graph.node.append(helper.make_node("ArgMax", ["y"], ["word"], name="word"))
    named.graph.output[0].CopyFrom(helper.make_tensor_value_info("word", TensorProto.INT64, None))
    onnx.save(named, tmp_path / "named.onnx")
    assert floor(load(tmp_path / "named.onnx").model) is None


def test_auto_holds_the_noise_of_outputs_on_random_data_and_answers_on_real_data(tmp_path: Path) -> None:
    budgets = {}
    real = {"x": spectra(8)}
    for source, calib, sqnr_db in (("random", None, None), ("random, 30 dB", None, 30.0), ("real", real, None)):
        save_keywords(tmp_path / "model.onnx")
        config = BuildConfig(precision="auto", output="out.onnx", backend="tensorrt", gpu="L4", min_sqnr_db=sqnr_db)
        settings = settle(tmp_path / "model.onnx", config, calib, Clock(ignore), make_engine=False)
        loaded = load(tmp_path / "model.onnx")
        samples = open_samples(calib if calib is not None else SYNTHETIC, loaded.inputs)
        budgets[source] = settings.checked_on(samples, loaded.model).budget
        assert settings.checked_on(samples).budget.drop == 0.01  # with a metric
    assert (budgets["random"].drop, budgets["random"].sqnr_db) == (None, RANDOM_DB)
    assert (budgets["random, 30 dB"].drop, budgets["random, 30 dB"].sqnr_db) == (None, 30.0)
    assert (budgets["real"].drop, budgets["real"].sqnr_db) == (0.01, None)


def test_the_nearer_to_the_floor_the_smaller_the_excess() -> None:
    floor = Floor(0.98, 20.0)
    assert floor.excess(0.02, 0.01) == 1.0
    assert 1.0 < floor.excess(0.04, 0.0) < floor.excess(0.04, 0.1) < floor.excess(1.0, 0.1)
