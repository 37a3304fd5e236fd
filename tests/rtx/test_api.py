"""The Python API, with the real compiler."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest
import rtx_nets

import trtopt
from trtopt.events import Event

SAMPLES = {"x": np.random.default_rng(0).standard_normal((4, 16, 16, 16)).astype(np.float32)}
ALL_INT8: dict[str, Any] = {"precision": "int8", "keep_all_int8": True, "recipes": "none"}
"""Nothing is judged, which takes most of the time of a build."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "net.onnx"
    onnx.save(rtx_nets.conv_net(batch="n"), file)
    return file


def test_the_engine_lies_beside_the_model_and_its_name_says_which_runtime_loads_it(path: Path) -> None:
    report = trtopt.build(path, calib=SAMPLES)
    assert report.engine is not None
    assert report.engine.path == str(path.with_name("net.rtx.engine"))
    assert Path(report.engine.path).stat().st_size == report.engine.bytes


def test_the_achieved_precision_is_what_the_layers_say(path: Path) -> None:
    report = trtopt.build(path, calib=SAMPLES, **ALL_INT8)
    assert report.precision.int8_flop_share is not None and report.precision.int8_flop_share > 0.9
    assert report.precision.achieved["int8"].flop_share > 0.9
    assert sum(share.flop_share for share in report.precision.achieved.values()) == pytest.approx(1.0)
    fp32 = trtopt.build(path, calib=SAMPLES, precision="fp32", recipes="none")
    assert set(fp32.precision.achieved) == {"fp32"}


def test_a_build_predicts_the_time_of_its_kernels_at_the_optimum(path: Path) -> None:
    report = trtopt.build(path, calib=SAMPLES, precision="int8")
    found = report.analysis
    assert found is not None and report.engine is not None and found.gpu == "L4"
    assert len(found.layers) == report.engine.kernels and not found.uncosted
    assert found.totals.predicted_us == pytest.approx(sum(row.predicted_us for row in found.layers))
    written = report.to_json_dict()
    assert written["prediction"]["predicted_us"] == found.totals.predicted_us
    assert report.sixteen_bit is not None
    assert written["prediction"]["baseline_fp16_us"] == report.sixteen_bit.predicted_us
    assert written["analysis"]["layers"][0]["limiter"] in ("math", "memory", "latency")
    shares = [share.time_share for share in report.precision.achieved.values()]
    assert sum(share for share in shares if share is not None) == pytest.approx(1.0)


def test_a_portable_engine_has_no_predicted_time(path: Path) -> None:
    report = trtopt.build(path, calib=SAMPLES, gpu="portable", recipes="none")
    assert report.analysis is None and report.to_json_dict()["prediction"] is None


def test_tf32_for_a_gpu_without_it_is_predicted_in_fp32(path: Path) -> None:
    inputs = "float[1, 16, 8, 8] x, float[16, 16, 3, 3] w"
    net = f'<ir_version: 8, opset_import: ["" : 17]> g ({inputs}) => (float[1, 16, 6, 6] y) {{ y = Conv(x, w) }}'
    onnx.save(onnx.parser.parse_model(net), path)
    report = trtopt.build(path, precision="tf32", gpu="T4")
    assert report.analysis is not None
    assert "tf32" not in {row.dtype for row in report.analysis.layers}


@pytest.mark.parametrize("kind", ["proto", "ir"])
def test_a_model_in_memory_is_built_and_needs_an_output(path: Path, kind: str, tmp_path: Path) -> None:
    model = onnx.load(path) if kind == "proto" else ir.load(path)
    with pytest.raises(trtopt.TrtoptError, match="needs an output file"):
        trtopt.build(model, calib=SAMPLES)
    report = trtopt.build(model, calib=SAMPLES, output=str(tmp_path / "memory.engine"), recipes="none")
    assert report.engine is not None and report.engine.kernels > 0


def test_samples_come_from_a_function_or_an_iterable(path: Path) -> None:
    def feeds() -> Iterator[dict[str, np.ndarray]]:
        for row in SAMPLES["x"]:
            yield {"x": row[None]}

    from_function = trtopt.optimize(path, calib=feeds, output=str(path.with_name("a.onnx")), **ALL_INT8)
    from_list = trtopt.optimize(path, calib=list(feeds()), output=str(path.with_name("b.onnx")), **ALL_INT8)
    assert from_function.calibration is not None and from_list.calibration is not None
    assert from_function.calibration.samples == from_list.calibration.samples == 4
    assert path.with_name("a.onnx").read_bytes() == path.with_name("b.onnx").read_bytes()


def test_changing_an_option_does_not_calibrate_again_and_changing_the_data_does(path: Path, tmp_path: Path) -> None:
    def run(method: str, samples: dict[str, np.ndarray]) -> bool:
        report = trtopt.optimize(
            path, calib=samples, calib_method=method, cache_dir=str(tmp_path / "cache"),
            output=str(tmp_path / "out.onnx"), **ALL_INT8,
        )  # fmt: skip
        assert report.calibration is not None
        return report.calibration.cached

    assert not run("max", SAMPLES)
    assert run("entropy", SAMPLES)
    assert not run("entropy", {"x": SAMPLES["x"] + 1})


def test_a_failed_gate_writes_the_report_and_nothing_else(path: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    report = trtopt.build(
        path, calib=SAMPLES, min_sqnr_db=200.0, output=str(out / "m.engine"),
        save_onnx=str(out / "m.onnx"), report=str(out / "m.json"), **ALL_INT8,
    )  # fmt: skip
    assert report.gate_failures and report.engine is None
    assert [file.name for file in out.iterdir()] == ["m.json"]
    assert json.loads((out / "m.json").read_text())["gate_failures"]


def test_allowing_the_loss_turns_the_gate_into_a_warning(path: Path) -> None:
    report = trtopt.build(path, calib=SAMPLES, min_sqnr_db=200.0, allow_accuracy_loss=True, **ALL_INT8)
    assert report.engine is not None and report.gate_failures
    assert any("SQNR" in warning for warning in report.warnings)


def test_without_samples_the_warning_is_an_event_and_in_the_report(path: Path) -> None:
    events: list[Event] = []
    report = trtopt.build(path, on_event=events.append, **ALL_INT8)
    assert report.calibration is not None and report.calibration.source == "synthetic"
    loud = [event.text for event in events if event.kind == "warning" and "SYNTHETIC" in event.text]
    assert loud and loud[0] in report.warnings


def test_an_unknown_option_is_refused_with_the_nearest_one(path: Path) -> None:
    with pytest.raises(trtopt.TrtoptError, match="calib_methd"):
        trtopt.build(path, calib_methd="max")


def test_intermediate_tensors_are_compared_by_name_in_graph_order(path: Path) -> None:
    report = trtopt.optimize(
        path, calib=SAMPLES, compare_tensors=True, output=str(path.with_name("o.onnx")), **ALL_INT8
    )
    assert report.accuracy is not None and report.accuracy.tensors is not None
    names = list(report.accuracy.tensors)
    assert names.index("r1") < names.index("r2")
    assert report.accuracy.tensors["r1"].sqnr_db > report.accuracy.tensors["r2"].sqnr_db


def test_a_module_is_exported_on_the_way(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Module:
        def forward(self) -> None: ...

    def export(module: object, to: Path, example_inputs: object, **options: object) -> None:
        asked.append((module, example_inputs))
        to.write_bytes(path.read_bytes())

    asked: list[tuple[object, object]] = []
    monkeypatch.setattr("trtopt.source.pytorch.export", export)
    module, inputs, output = Module(), (1, 2), path.with_name("m.engine")
    report = trtopt.build(module, example_inputs=inputs, calib=SAMPLES, recipes="none", output=str(output))
    assert report.engine is not None and output.stat().st_size == report.engine.bytes
    assert asked == [(module, inputs)]


@pytest.mark.long
def test_a_pytorch_module_is_exported_on_the_way(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    module = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(288, 4))
    report = trtopt.build(module, example_inputs=(torch.zeros(1, 3, 8, 8),), output=str(tmp_path / "m.engine"))
    assert report.engine is not None
    with pytest.raises(trtopt.TrtoptError, match="example inputs"):
        trtopt.build(module, output=str(tmp_path / "n.engine"))


def test_one_input_takes_an_array_and_a_metric_may_be_a_function(path: Path) -> None:
    def scale(run: Any) -> float:
        return -float(np.abs(run(SAMPLES)[0]).mean())

    report = trtopt.optimize(path, output=path.with_name("o.onnx"), calib=SAMPLES["x"], metric=scale, recipes="none")
    assert report.calibration is None and report.accuracy is not None and report.accuracy.metric is not None
    assert report.accuracy.samples == 4 and report.accuracy.source == "calibration"
    assert report.accuracy.metric.name.endswith("scale") and report.accuracy.metric.baseline < 0


def test_a_metric_that_is_a_text_is_an_option(path: Path) -> None:
    report = trtopt.optimize(path, output=path.with_name("o.onnx"), calib=SAMPLES, metric="sqnr", recipes="none")
    assert report.config["metric"] == "sqnr"
