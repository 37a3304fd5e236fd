"""Detectors that end in NonMaxSuppression, built by TensorRT for RTX: an engine and a part for the host."""

from __future__ import annotations

from pathlib import Path

import detectors
import numpy as np
import onnx
import pytest
from rich.console import Console

import trtopt
from trtopt.analysis.compiled import compile_level
from trtopt.graph.edit import all_nodes
from trtopt.hardware.spec import find_gpu
from trtopt.report.schema.build import BuildReport
from trtopt.report.text.build import view
from trtopt.source.onnx_file import load
from trtopt.support.clock import Clock
from trtopt.support.ort_session import OrtSession
from trtopt.support.precision import Precision

pytest.importorskip("tensorrt_rtx", reason="needs TensorRT for RTX")


@pytest.fixture
def detector(tmp_path: Path) -> Path:
    onnx.save(detectors.detector(), tmp_path / "det.onnx")
    return tmp_path / "det.onnx"


def run_file(path: Path, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    with OrtSession(load(path).model) as session:
        return dict(zip(session.output_names, session.run(feeds), strict=True))


def printed(report: BuildReport) -> str:
    console = Console(width=100)
    with console.capture() as capture:
        console.print(view(report, verbose=True))
    return capture.get()


@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8"])
def test_a_detector_builds_in_every_precision(precision: str, detector: Path) -> None:
    report = trtopt.build(detector, precision=precision, calib={"image": detectors.images(8)})
    assert report.engine is not None and report.engine.path is not None and Path(report.engine.path).exists()
    assert report.host is not None and report.host.path == str(detector.with_name("det.host.onnx"))
    assert [item.name for item in report.host.between] == ["boxes", "scores"]
    assert report.accuracy is not None
    outputs = report.accuracy.outputs
    assert list(outputs) == ["detections", "selected", "scores", "boxes"]
    assert outputs["boxes"].sqnr_db > (20 if precision == "int8" else 50)
    assert report.accuracy.host_outputs == ("detections", "selected")
    json = report.to_json_dict()["host"]
    assert json["outputs"] == ["detections", "selected"] and json["between"][0]["shape"] == [1, 64, 4]
    assert any("the model is cut in two" in warning for warning in report.warnings)


def test_a_detector_that_ends_in_a_plugin_gives_the_boxes_of_the_original(tmp_path: Path) -> None:
    """EfficientNMS_TRT behind boxes of centre and size: engine and host, exactly."""
    tail = """
        columns = Transpose <perm = [0, 2, 1]> (scores)
        number, found_boxes, found_scores, classes =
            TRT.EfficientNMS_TRT <box_coding = 1, score_threshold = 0.5, max_output_boxes = 20> (boxes, columns)
    """
    outputs = "int32[1, 1] number, float[1, 20, 4] found_boxes, float[1, 20] found_scores, int32[1, 20] classes"
    onnx.save(detectors.model(detectors.BACKBONE, detectors.HEADS, tail, outputs=outputs), tmp_path / "det.onnx")
    report = trtopt.build(
        tmp_path / "det.onnx",
        precision="fp32",
        calib={"image": detectors.images(4)},
        save_onnx=str(tmp_path / "o.onnx"),
    )
    assert report.host is not None and report.host.path == str(tmp_path / "det.host.onnx")
    feeds = {"image": detectors.images(1, seed=7)}
    passed = run_file(tmp_path / "o.onnx", feeds)
    together = {**passed, **run_file(tmp_path / "det.host.onnx", passed)}
    whole = run_file(tmp_path / "det.onnx", feeds)
    assert whole["number"][0, 0] > 3
    for name, value in whole.items():
        np.testing.assert_allclose(together[name], value, rtol=1e-4, atol=1e-5)


def test_the_two_files_give_the_boxes_of_the_original_exactly(detector: Path, tmp_path: Path) -> None:
    report = trtopt.optimize(detector, output=str(tmp_path / "out.onnx"))
    assert report.host is not None and report.host.path == str(tmp_path / "out.host.onnx")
    for image in detectors.images(4, seed=7):
        feeds = {"image": image[None]}
        whole = run_file(detector, feeds)
        engine = run_file(tmp_path / "out.onnx", feeds)
        together = {**engine, **run_file(tmp_path / "out.host.onnx", engine)}
        assert whole["selected"].shape[0] > 5
        for name in whole:
            np.testing.assert_array_equal(together[name], whole[name])


def test_a_dynamic_batch_is_built_with_the_parts_shapes(tmp_path: Path) -> None:
    rows = """
        selected = NonMaxSuppression(boxes, scores, most, iou, least)
        pairs = Gather <axis = 1> (selected, pick)
        shape = Shape(boxes)
        count = Gather <axis = 0> (shape, one)
        raw = GatherND(boxes, pairs)
        width = Cast <to = 1> (count)
        scaled = Div(raw, width)
        detections = Mul(scaled, scale)
    """
    proto = detectors.model(
        detectors.BACKBONE,
        detectors.HEADS,
        rows,
        outputs=detectors.NMS_OUTPUTS,
        batch="N",
        more={"pick": np.array([0, 2], np.int64)},
        inputs=("float[1, 4] scale",),
    )
    onnx.save(proto, tmp_path / "det.onnx")
    calib = {"image": detectors.images(4), "scale": np.ones((1, 4), np.float32)}
    report = trtopt.build(
        tmp_path / "det.onnx",
        precision="int8",
        keep_all_int8=True,
        calib=calib,
        min_shapes=[{"image": (1, 3, 32, 32)}],
        opt_shapes=[{"image": (4, 3, 32, 32)}],
        max_shapes=[{"image": (8, 3, 32, 32)}],
        compare_tensors=True,
    )
    assert report.host is not None and report.host.inputs == ("boxes", "scores", "scale")
    assert report.engine is not None and [list(profile) for profile in report.engine.profiles] == [["image"]]
    assert report.accuracy is not None and report.accuracy.tensors


def test_a_metric_sees_the_whole_model(detector: Path, tmp_path: Path) -> None:
    (tmp_path / "metric.py").write_text(
        "import numpy as np\n"
        "def boxes(run):\n"
        "    outputs = run({'image': np.ones((1, 3, 32, 32), np.float32)})\n"
        "    assert [len(item.shape) for item in outputs] == [2, 2, 3]\n"
        "    return float(outputs[0].sum())\n"
    )
    report = trtopt.optimize(detector, output=str(tmp_path / "o.onnx"), metric=f"{tmp_path / 'metric.py'}:boxes")
    assert report.accuracy is not None and report.accuracy.metric is not None
    assert report.accuracy.metric.drop == 0


def test_a_selection_that_changes_is_reported_and_fails_no_gate_of_noise(tmp_path: Path) -> None:
    """Scores on the threshold: FP16 finds another number of boxes."""
    proto = detectors.detector()
    onnx.save(proto, tmp_path / "det.onnx")
    scores = np.sort(run_file(tmp_path / "det.onnx", {"image": detectors.images(1)})["scores"].ravel())
    changed = 0
    for place in (20, 30, 40):
        least = next(item for item in proto.graph.initializer if item.name == "least")
        least.CopyFrom(onnx.numpy_helper.from_array(scores[[-place]], "least"))
        onnx.save(proto, tmp_path / "det.onnx")
        report = trtopt.optimize(
            tmp_path / "det.onnx",
            precision="int8",
            keep_all_int8=True,
            recipes="none",
            calib={"image": detectors.images(1)},
            min_sqnr_db=15,
            output=str(tmp_path / "o.onnx"),
        )
        assert report.gate_failures == () and report.accuracy is not None
        found = report.accuracy.outputs["detections"]
        changed += found.shapes_differ
        assert not found.shapes_differ or np.isnan(found.sqnr_db)
        assert not found.shapes_differ or "other shape in 1 sample" in printed(report)
    assert changed


def test_many_forms_of_the_same_end_are_built(tmp_path: Path) -> None:
    """A suppression in a branch, as torchvision writes it for images without boxes."""
    tail = """
        any = ReduceMax <keepdims = 0> (scores)
        some = Greater(any, half)
        selected = If (some) <
            then_branch = then_graph () => (int64[a, 3] found_t) {
                found_t = NonMaxSuppression(boxes, scores, most, iou, least)
            },
            else_branch = else_graph () => (int64[b, 3] found_e) {
                found_e = Constant <value = int64[1, 3] {0, 0, 0}> ()
            }
        >
    """.replace("half", "limit")
    proto = detectors.model(
        detectors.BACKBONE, detectors.HEADS, tail, detectors.NMS.split("least)")[1], outputs=detectors.NMS_OUTPUTS,
        more={"limit": np.array(0.5, np.float32)},
    )  # fmt: skip
    arrays = detectors.constants()
    names = ("most", "iou", "least")
    proto.graph.initializer.extend(onnx.numpy_helper.from_array(arrays[name], name) for name in names)
    onnx.save(proto, tmp_path / "det.onnx")
    report = trtopt.build(tmp_path / "det.onnx", calib={"image": detectors.images()})
    assert report.engine is not None and report.host is not None
    with OrtSession(load(tmp_path / "det.host.onnx").model) as session:
        assert session.output_names == ("detections", "selected")


def test_an_analysis_compiles_what_a_build_would(detector: Path) -> None:
    clock = Clock(lambda event: None)
    level = compile_level(load(detector), find_gpu("L4"), Precision.FP16, {}, clock)
    assert len(level.layers) >= 4
    assert "NonMaxSuppression" not in {node.op_type for node in all_nodes(level.model.graph)}
    assert any("cut in two" in text for text in clock.warnings)


def test_bags_that_pytorch_exports_as_a_loop_are_compiled(tmp_path: Path) -> None:
    """Both exporters, a dynamic number of bags; nothing is left to the host."""
    torch = pytest.importorskip("torch", reason="exports a module")
    pytest.importorskip("onnxscript", reason="exports a module")
    net = torch.nn.Sequential(torch.nn.EmbeddingBag(20, 8, mode="mean"), torch.nn.Linear(8, 4)).eval()
    ids = torch.randint(0, 20, (6, 3))
    batch = torch.export.Dim("batch", min=1, max=16)
    torch.onnx.export(net, (ids,), tmp_path / "graph.onnx", dynamo=True, dynamic_shapes=({0: batch},))
    torch.onnx.export(
        net, (ids,), tmp_path / "script.onnx", dynamo=False, input_names=["input"], dynamic_axes={"input": {0: "batch"}}
    )
    for name in ("graph", "script"):
        shapes = {limit: {"input": (size, 3)} for limit, size in zip(("min", "opt", "max"), (1, 6, 12), strict=True)}
        report = trtopt.build(
            tmp_path / f"{name}.onnx",
            precision="fp32",
            **{f"{limit}_shapes": each for limit, each in shapes.items()},
            save_onnx=str(tmp_path / "made.onnx"),
        )
        assert report.host is None and report.engine is not None
        found = run_file(tmp_path / "made.onnx", {"input": ids.numpy()})
        np.testing.assert_allclose(next(iter(found.values())), net(ids).detach().numpy(), atol=1e-5)
