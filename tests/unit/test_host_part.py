"""The end of a model that a compiler refuses: what is refused, where the cut goes, what passes."""

from __future__ import annotations

from pathlib import Path

import detectors
import numpy as np
import onnx
import onnx.defs
import onnx.parser
import onnx_ir as ir
import pytest
from test_cost_operators import NOT_RUN

import trtopt
from trtopt.engine.backend import TENSORRT, TENSORRT_RTX, Backend
from trtopt.engine.request import ShapeProfile
from trtopt.engine.unsupported import why_unsupported
from trtopt.errors import InvalidModelError
from trtopt.graph.shapes import infer_shapes
from trtopt.pipeline.host import Cut, cut, host_path
from trtopt.rewrite.host_part import sizes_vary
from trtopt.source.onnx_file import load
from trtopt.support.clock import Clock
from trtopt.support.ort_session import Feeds, OrtSession

RESULTS = detectors.NMS_OUTPUTS


def cut_of(
    proto: onnx.ModelProto,
    folder: Path,
    backend: Backend = TENSORRT_RTX,
    shapes: dict[str, tuple[int, ...]] | None = None,
    *,
    plugins: bool = False,
) -> Cut:
    onnx.save(proto, folder / "model.onnx")
    return cut(load(folder / "model.onnx"), backend, shapes or {}, Clock(lambda event: None), plugins=plugins)


def both(found: Cut, feeds: Feeds) -> dict[str, np.ndarray]:
    """The outputs of the two parts, run one after the other as a user would."""
    assert found.host is not None
    engine, host = found.artifact.model, found.host.model
    first = OrtSession(engine).run({str(value.name): feeds[str(value.name)] for value in engine.graph.inputs})
    known = {**feeds, **dict(zip((str(value.name) for value in engine.graph.outputs), first, strict=True))}
    second = OrtSession(host).run({str(value.name): known[str(value.name)] for value in host.graph.inputs})
    return {**known, **dict(zip((str(value.name) for value in host.graph.outputs), second, strict=True))}


def check_same(proto: onnx.ModelProto, found: Cut, feeds: Feeds) -> None:
    """The two parts give what the whole gives, bit for bit."""
    whole = OrtSession(ir.from_proto(proto))
    together = both(found, feeds)
    for name, value in zip(whole.output_names, whole.run(feeds), strict=True):
        assert np.array_equal(together[name], value), name


def ops(model: ir.Model) -> list[str]:
    return [node.op_type for node in model.graph]


def image(batch: int = 1) -> dict[str, np.ndarray]:
    return {"image": detectors.images(batch)}


@pytest.mark.parametrize("backend", [TENSORRT, TENSORRT_RTX])
def test_the_table_names_what_the_parser_refuses_and_what_no_build_implements(backend: Backend) -> None:
    names = {schema.name for schema in onnx.defs.get_all_schemas() if schema.domain == ""}
    refused = {name for name in names if why_unsupported(ir.node(name, []), backend, plugins=False)}
    beside = {"NonZero", "NonMaxSuppression", "RoiAlign", "CausalConvWithState", "LinearAttention", "FlexAttention"}
    wanted = NOT_RUN | beside if backend == TENSORRT_RTX else (NOT_RUN - {"DeformConv"}) | {"FlexAttention"}
    assert refused == wanted & names


@pytest.mark.parametrize(
    ("op", "domain", "backend", "plugins", "runs"),
    [
        ("EfficientNMS_TRT", "TRT", TENSORRT_RTX, False, False),
        ("EfficientNMS_TRT", "TRT", TENSORRT_RTX, True, True),
        ("EfficientNMS_TRT", "TRT", TENSORRT, False, True),
        ("Fancy", "com.acme", TENSORRT, False, False),
        ("Gelu", "com.microsoft", TENSORRT_RTX, False, True),
        ("FusedGelu", "com.microsoft", TENSORRT_RTX, False, False),
        ("NonMaxSuppression", "", TENSORRT_RTX, True, False),
        ("TRT_MXFP8DequantizeLinear", "trt", TENSORRT_RTX, True, False),
    ],
)
def test_operators_of_custom_domains_need_a_plugin(
    op: str, domain: str, backend: Backend, plugins: bool, runs: bool
) -> None:
    why = why_unsupported(ir.node(op, [], domain=domain), backend, plugins=plugins)
    assert (why is None) == runs
    assert why is None or (why.reason and why.remedy)


def test_a_detector_is_cut_at_the_boxes_and_scores(tmp_path: Path) -> None:
    found = cut_of(detectors.detector(), tmp_path)
    assert found.host is not None and found.record is not None
    assert [(item.name, item.dtype, item.shape) for item in found.record.between] == [
        ("boxes", "float32", (1, 64, 4)),
        ("scores", "float32", (1, 3, 64)),
    ]
    assert ops(found.host.model) == ["NonMaxSuppression", "Slice", "Squeeze", "Squeeze", "Gather"]
    assert [value.name for value in found.artifact.model.graph.outputs] == ["scores", "boxes"]
    assert found.record.outputs == ("detections", "selected")
    assert "does not run NonMaxSuppression (nonmaxsuppression_selected)" in found.record.reasons[0]
    check_same(detectors.detector(), found, image())


def test_tensorrt_has_a_layer_for_it_and_gets_the_whole_model(tmp_path: Path) -> None:
    found = cut_of(detectors.detector(), tmp_path, TENSORRT)
    assert found.host is None and "NonMaxSuppression" in ops(found.artifact.model)


def test_a_model_that_runs_is_given_back_as_it_is(tmp_path: Path) -> None:
    best = "values, places = TopK <axis = 2> (scores, one)"
    proto = detectors.model(
        detectors.BACKBONE, detectors.HEADS, best, outputs="float[1,3,1] values, int64[1,3,1] places"
    )
    onnx.save(proto, tmp_path / "model.onnx")
    loaded = load(tmp_path / "model.onnx")
    found = cut(loaded, TENSORRT_RTX, {}, Clock(lambda event: None))
    assert found.artifact is loaded and found.host is None


def test_a_dynamic_batch_stays_dynamic_in_both_parts(tmp_path: Path) -> None:
    rows = """
        selected = NonMaxSuppression(boxes, scores, most, iou, least)
        pairs = Gather <axis = 1> (selected, pick)
        detections = GatherND(boxes, pairs)
    """
    more = {"pick": np.array([0, 2], np.int64)}
    proto = detectors.model(detectors.BACKBONE, detectors.HEADS, rows, outputs=RESULTS, batch="N", more=more)
    found = cut_of(proto, tmp_path, shapes={"image": (2, 3, 32, 32)})
    assert found.record is not None
    assert [item.shape for item in found.record.between] == [("N", 64, 4), ("N", 3, 64)]
    for batch in (1, 3):
        check_same(proto, found, image(batch))


def test_shapes_are_computed_on_both_sides_and_do_not_pass(tmp_path: Path) -> None:
    tail = """
        selected = NonMaxSuppression(boxes, scores, most, iou, least)
        dims = Shape(boxes)
        count = Gather <axis = 0> (dims, one)
        free = Div(count, two)
        whole = Mul(free, two)
        target = Concat <axis = 0> (last, whole)
        flat = Reshape(scores, target)
        places = Gather <axis = 1> (selected, two)
        names = Squeeze(places, one)
        detections = Gather <axis = 1> (flat, names)
    """
    proto = detectors.model(
        detectors.BACKBONE, detectors.HEADS, tail, outputs="float[a, b] detections, int64[found, 3] selected", batch="N"
    )
    found = cut_of(proto, tmp_path, shapes={"image": (1, 3, 32, 32)})
    assert found.host is not None and found.host.between == ("boxes", "scores")
    check_same(proto, found, image(2))


def test_what_only_moves_data_goes_where_fewer_bytes_pass(tmp_path: Path) -> None:
    """YOLO's [1, 64, 7] rows: the host needs them whole anyway, so their slices do not pass beside them."""
    more: dict[str, np.ndarray] = {
        "wr": np.random.default_rng(3).standard_normal((7, 16, 1, 1)).astype(np.float32),
        "row_shape": np.array([1, 7, 64], np.int64),
        "four": np.array([4], np.int64),
        "seven": np.array([7], np.int64),
    }
    rows = """
        row_map = Conv (features, wr)
        flat = Reshape (row_map, row_shape)
        rows = Transpose <perm = [0, 2, 1]> (flat)
        boxes = Slice (rows, zero, four, two_axis)
        class_rows = Slice (rows, four, seven, two_axis)
        wide = Concat <axis = 2> (class_rows, class_rows)
        scores = Transpose <perm = [0, 2, 1]> (wide)
        selected = NonMaxSuppression(boxes, scores, most, iou, least)
        index = Slice(selected, two, three, one)
        places = Squeeze(index, one)
        list = Squeeze(rows, zero)
        detections = Gather <axis = 0> (list, places)
    """
    proto = detectors.model(
        detectors.BACKBONE, rows, outputs="float[found, 7] detections, int64[found, 3] selected",
        more={**more, "two_axis": np.array([2], np.int64)},
    )  # fmt: skip
    found = cut_of(proto, tmp_path)
    assert found.host is not None and found.host.between in (("flat",), ("rows",))
    check_same(proto, found, image())


def test_a_product_with_a_small_matrix_after_it_is_no_layer(tmp_path: Path) -> None:
    more = {"corners": np.eye(4, dtype=np.float32) * 2}
    tail = detectors.NMS.replace("detections =", "raw =") + "detections = MatMul(raw, corners)"
    proto = detectors.model(detectors.BACKBONE, detectors.HEADS, tail, outputs=RESULTS, more=more)
    found = cut_of(proto, tmp_path)
    assert found.host is not None and ops(found.host.model)[-1] == "MatMul"
    check_same(proto, found, image())


CLASSES = "".join(
    f"""
    class_{number} = Slice(scores, at_{number}, at_{number + 1}, one)
    chosen_{number} = NonMaxSuppression(boxes, class_{number}, most, iou, least)
    """
    for number in range(3)
)


def test_several_suppressions_make_one_tail(tmp_path: Path) -> None:
    """As torchvision's batched suppression per level: each chosen list joined, then the boxes gathered."""
    joined = "selected = Concat <axis = 0> (chosen_0, chosen_1, chosen_2)" + detectors.NMS.split("least)")[1]
    more = {f"at_{number}": np.array([number], np.int64) for number in range(4)}
    proto = detectors.model(detectors.BACKBONE, detectors.HEADS, CLASSES, joined, outputs=RESULTS, more=more)
    found = cut_of(proto, tmp_path)
    assert found.host is not None and set(found.host.between) == {"boxes", "scores"}
    assert ops(found.host.model).count("NonMaxSuppression") == 3
    check_same(proto, found, image())


IF_TAIL = """
    any = ReduceMax <keepdims = 0> (scores)
    some = Greater(any, least_one)
    selected = If (some) <
        then_branch = then_graph () => (int64[a, 3] found_t) {
            found_t = NonMaxSuppression(boxes, scores, most, iou, least)
        },
        else_branch = else_graph () => (int64[b, 3] found_e) {
            found_e = Constant <value = int64[1, 3] {0, 0, 0}> ()
        }
    >
"""


def test_a_node_that_holds_a_refused_one_is_refused_with_it(tmp_path: Path) -> None:
    more = {"least_one": np.array(0.5, np.float32)}
    names = ("most", "iou", "least")
    proto = detectors.model(
        detectors.BACKBONE, detectors.HEADS, IF_TAIL, detectors.NMS.split("least)")[1], outputs=RESULTS, more=more
    )
    arrays = detectors.constants()
    proto.graph.initializer.extend(onnx.numpy_helper.from_array(arrays[name], name) for name in names)
    found = cut_of(proto, tmp_path)
    assert found.host is not None and "If" in ops(found.host.model) and "If" not in ops(found.artifact.model)
    assert set(found.host.between) <= {"boxes", "scores", "some", "any"}
    check_same(proto, found, image())


def test_a_branch_never_taken_and_constants_refuse_nothing(tmp_path: Path) -> None:
    branch = IF_TAIL.split("some = Greater")[1].split("\n", 1)[1]
    more = {"some": np.array(False)}
    proto = detectors.model(
        detectors.BACKBONE,
        detectors.HEADS,
        branch,
        'bits = BitShift <direction = "LEFT"> (flags, flags) wide = Cast <to = 7> (bits) total = Add(selected, wide)',
        outputs="int64[a, 3] total, float[1, 3, 64] scores",
        more={**more, "flags": np.array([1, 2, 3], np.uint8)},
    )
    arrays = detectors.constants()
    proto.graph.initializer.extend(
        onnx.numpy_helper.from_array(arrays[name], name) for name in ("most", "iou", "least")
    )
    found = cut_of(proto, tmp_path)
    assert found.host is None and {"If", "BitShift"}.isdisjoint(ops(found.artifact.model))


def test_an_input_that_only_the_host_reads_leaves_the_engine_and_its_profiles(tmp_path: Path) -> None:
    tail = detectors.NMS.replace("least)", "threshold)").replace("detections =", "found_boxes =")
    proto = detectors.model(
        detectors.BACKBONE,
        detectors.HEADS,
        tail,
        "detections = Mul(found_boxes, image_scale)",
        outputs=RESULTS,
        inputs=("float[1] threshold", "float[M, 4] image_scale"),
    )
    found = cut_of(proto, tmp_path)
    assert found.record is not None
    assert [item.name for item in found.artifact.inputs] == ["image"]
    assert found.record.inputs == ("boxes", "scores", "threshold", "image_scale")
    whole = ShapeProfile({"image_scale": ((1, 4), (1, 4), (1, 4))})
    assert found.profiles((whole,)) == ()
    feeds = {**image(), "threshold": np.array([0.6], np.float32), "image_scale": np.full((1, 4), 2, np.float32)}
    check_same(proto, found, feeds)


def test_fp16_models_get_a_host_part_that_computes_in_fp32(tmp_path: Path) -> None:
    tail = "once = Unique <sorted = 1> (flat) twice = Add(once, once)"
    flat = "flat = Cast <to = 10> (scores)"
    proto = detectors.model(detectors.BACKBONE, detectors.HEADS, flat, tail, outputs="float16[found] twice")
    found = cut_of(proto, tmp_path)
    assert found.host is not None
    assert all(node.op_type != "Add" or node.outputs[0].dtype == ir.DataType.FLOAT for node in found.host.model.graph)
    assert found.host.model.graph.outputs[0].dtype == ir.DataType.FLOAT16


@pytest.mark.parametrize(
    ("parts", "outputs", "named", "said"),
    [
        (
            (detectors.BACKBONE, detectors.HEADS, detectors.NMS, "again = Gemm(detections, big)"),
            "float[found, 128] again",
            "nonmaxsuppression_selected",
            "the layer gemm_again (Gemm) needs it",
        ),
        (
            ("turned = BitwiseNot(bits) image_2 = Cast <to = 1> (turned) y = Conv(image_2, w1)",),
            "float[1, 8, a, b] y",
            "bitwisenot_turned",
            "the layer conv_y (Conv) needs it",
        ),
        (
            (detectors.BACKBONE, "y = DeformConv(features, wd, places)"),
            "float[1, 2, 8, 8] y",
            "deformconv_y",
            "it is a layer of the network",
        ),
        (("y = Unique <sorted = 1> (image)",), "float[found] y", "unique_y", "nothing before it is left to compile"),
    ],
)
def test_a_refused_node_elsewhere_is_one_error_with_its_remedy(
    parts: tuple[str, ...], outputs: str, named: str, said: str, tmp_path: Path
) -> None:
    more = {"big": np.ones((4, 128), np.float32), "wd": np.ones((2, 16, 1, 1), np.float32)}
    inputs = {"bits": "uint8[1, 3, 32, 32] bits", "places": "float[1, 2, 8, 8] places"}
    used = [text for name, text in inputs.items() if any(f"({name}" in part or f", {name}" in part for part in parts)]
    if named != "deformconv_y":
        used = [text for text in used if "places" not in text]
    proto = detectors.model(*parts, outputs=outputs, more=more, inputs=used)
    with pytest.raises(InvalidModelError) as caught:
        cut_of(proto, tmp_path)
    assert said in caught.value.what and "TensorRT for RTX does not run" in caught.value.what
    assert named in caught.value.where and caught.value.remedy
    assert caught.value.exit_code == 3


def plugin_detector(plugin: str = "EfficientNMS_TRT", decode: str = "") -> onnx.ModelProto:
    """YOLO's export for TensorRT."""
    tail = f"columns = Transpose <perm = [0, 2, 1]> (scores) {decode}"
    tail += f"number, found_boxes, found_scores, classes = TRT.{plugin} <score_threshold = 0.5> (boxes, columns)"
    outputs = "int32[1, 1] number, float[1, 100, 4] found_boxes, float[1, 100] found_scores, int32[1, 100] classes"
    return detectors.model(detectors.BACKBONE, detectors.HEADS, tail, outputs=outputs)


def test_a_plugin_that_selects_boxes_is_written_out_for_the_host(tmp_path: Path) -> None:
    """Where its compiler does not bring it along; its file is one that any ONNX Runtime loads."""
    found = cut_of(plugin_detector(), tmp_path)
    assert found.host is not None and found.record is not None and found.host.between == ("boxes", "columns")
    assert "does not come with the plugin EfficientNMS_TRT" in found.record.reasons[0]
    assert {node.domain for node in found.host.model.graph} == {""}
    assert "NonMaxSuppression" in ops(found.host.model) and "EfficientNMS_TRT" not in ops(found.artifact.model)
    assert cut_of(plugin_detector(), tmp_path, plugins=True).host is None
    assert cut_of(plugin_detector(), tmp_path, TENSORRT).host is None


def test_boxes_are_decoded_before_the_cut(tmp_path: Path) -> None:
    """A plugin that takes centres and sizes: the engine gives corners, under a name that the reference has too."""
    proto = plugin_detector()
    proto.graph.node[-1].attribute.append(onnx.helper.make_attribute("box_coding", 1))
    found = cut_of(proto, tmp_path)
    assert found.host is not None and "decoded" in found.host.between[0]
    check_same(proto, found, image())


def test_tensorrt_keeps_a_plugin_that_is_verified_in_operators_of_onnx(tmp_path: Path) -> None:
    """What is chosen says little of the network: its rounding puts nothing back to FP32."""
    onnx.save(plugin_detector(), tmp_path / "m.onnx")
    calib = {"image": detectors.images(4)}
    out = tmp_path / "o.onnx"
    report = trtopt.optimize(
        tmp_path / "m.onnx",
        precision="fp16",
        backend="tensorrt",
        recipes="none",
        gpu="L4",
        calib=calib,
        output=str(out),
    )
    model = load(out).model
    assert "EfficientNMS_TRT" in ops(model) and report.host is None
    assert any(node.op_type == "Conv" and node.inputs[1].dtype == ir.DataType.FLOAT16 for node in model.graph)
    assert report.accuracy is not None and report.accuracy.outputs["number"].sqnr_db > 20


def test_a_plugin_of_half_precision_goes_to_the_host(tmp_path: Path) -> None:
    text = """<ir_version: 10, opset_import: ["": 21, "TRT": 1]>
        g (float16[1, 3, 8, 8] x) => (int32[1, 1] n, float16[1, 100, 4] b, float16[1, 100] s, int32[1, 100] c) {
            a = Conv (x, w) r = Reshape (a, shape) t = Transpose <perm = [0, 2, 1]> (r)
            boxes, logits = Split <axis = 2> (t, parts) shares = Sigmoid (logits)
            n, b, s, c = TRT.EfficientNMS_TRT <box_coding = 1> (boxes, shares)
        }"""
    proto = onnx.parser.parse_model(text)
    weight = np.random.default_rng(0).standard_normal((6, 3, 1, 1)).astype(np.float16)
    for name, array in (("w", weight), ("shape", np.array([1, 6, 64])), ("parts", np.array([4, 2]))):
        proto.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    found = cut_of(proto, tmp_path)
    check_same(proto, found, {"x": np.random.default_rng(1).random((1, 3, 8, 8)).astype(np.float16)})


def test_a_plugin_nobody_knows_is_an_error_that_names_the_option(tmp_path: Path) -> None:
    with pytest.raises(InvalidModelError, match="FancyNMS_TRT of the domain TRT") as caught:
        cut_of(plugin_detector("FancyNMS_TRT"), tmp_path)
    assert "--plugins" in caught.value.remedy
    assert cut_of(plugin_detector("FancyNMS_TRT"), tmp_path, TENSORRT).host is None


def test_refused_nodes_that_no_output_needs_are_left_to_the_recipes(tmp_path: Path) -> None:
    unused = "unused = Unique <sorted = 1> (features) more = com.microsoft.FusedGelu(features) own = TRT.Own(features)"
    proto = detectors.model(detectors.BACKBONE, unused, outputs="float[1, 16, 8, 8] features")
    assert cut_of(proto, tmp_path).host is None
    proto = detectors.model(detectors.BACKBONE, unused, detectors.HEADS, detectors.NMS, outputs=RESULTS)
    found = cut_of(proto, tmp_path)
    assert found.record is not None and len(found.record.reasons) == 1


def test_outputs_whose_size_depends_on_data_are_known(tmp_path: Path) -> None:
    model = infer_shapes(ir.from_proto(detectors.detector()))
    assert sizes_vary(model) == ("detections", "selected")
    proto = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 17]>
        g (float[1, 9] x) => (float[1, K] best, float[1, T] rest, float[1, 4] same)
        <int64[1] one = {1}, int64[1] zero = {0}> {
            is_high = Greater (x, least) numbers = Cast <to = 7> (is_high) count = ReduceSum (numbers, one)
            k = Reshape (count, one) best, places = TopK (x, k) rest = Slice (x, zero, k, one)
            shape = Shape (x) all = Gather (shape, one) four = Sub (all, five) same, where_they_are = TopK (x, four)
        }""")
    constants = {"least": np.float32(0.5), "five": np.array([5])}
    proto.graph.initializer.extend(
        onnx.numpy_helper.from_array(np.asarray(each), name) for name, each in constants.items()
    )
    assert sizes_vary(infer_shapes(ir.from_proto(proto))) == ("best", "rest")


@pytest.mark.parametrize(
    ("main", "backend", "host"),
    [
        ("det.rtx.engine", TENSORRT_RTX, "det.host.onnx"),
        ("det.engine", TENSORRT, "det.host.onnx"),
        ("det.plan", TENSORRT_RTX, "det.host.onnx"),
        ("det.int8.onnx", TENSORRT_RTX, "det.int8.host.onnx"),
    ],
)
def test_the_part_for_the_host_goes_beside_the_engine(main: str, backend: Backend, host: str) -> None:
    assert host_path(Path("out") / main, backend) == Path("out") / host


def test_thresholds_and_constants_stay_with_the_host(tmp_path: Path) -> None:
    """The engine passes scores, not which of them are high; what no input changes is computed on both sides."""
    tail = """
        grid_a = CumSum (cells, zero_scalar)
        is_high = Greater (scores, least)
        places = NonZero (is_high)
        rows = Transpose <perm = [1, 0]> (places)
        best = GatherND (scores, rows)
        moved = Add (boxes, grid_a)
        detections = Concat <axis = 2> (moved, grid_a)
        found = NonZero (detections)
    """
    more = {"cells": np.ones((1, 64, 4), np.float32), "zero_scalar": np.asarray(1, np.int64)}
    proto = detectors.model(
        detectors.BACKBONE,
        detectors.HEADS.replace("cells", "cell_centres"),
        tail,
        outputs="float[K] best, int64[3, L] found",
        more={**more, "cell_centres": detectors.constants()["cells"]},
    )
    found = cut_of(proto, tmp_path)
    assert found.host is not None and sorted(found.host.between) == ["moved", "scores"]
    check_same(proto, found, image())


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('y = Resize <mode = "linear", antialias = 1> (x, , , sizes)', "antialias = 1"),
        ('y = Resize <keep_aspect_ratio_policy = "not_larger"> (x, , , sizes)', "not_larger"),
        ('y = Resize <coordinate_transformation_mode = "tf_crop_and_resize"> (x, roi, , sizes)', "tf_crop_and_resize"),
        ("y, i = TopK (x, four_thousand)", "at most 3840, and here k is 4000"),
        (
            "m = Greater (x, half) n = Cast <to = 7> (m) s = ReduceSum (n) k = Reshape (s, one) y, i = TopK (x, k)",
            "data",
        ),
        ("s = Shape <start = 3> (x) k = Min (s, sizes_1) y, i = TopK (x, k)", ""),
        ("y, i = TopK (x, given)", ""),
        ('y = Resize <mode = "cubic", exclude_outside = 1> (x, , , sizes)', ""),
    ],
)
def test_forms_of_operators_that_no_compiler_runs(text: str, reason: str) -> None:
    constants = {"sizes": [1, 3, 8, 8], "four_thousand": [4000], "one": [1], "sizes_1": [5]}
    proto = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 21]> g (float[1, 3, N, 9] x, int64[1] given) => (y) {{ {text} }}'
    )
    proto.graph.initializer.extend(onnx.numpy_helper.from_array(np.asarray(v), n) for n, v in constants.items())
    for name, value in (("roi", np.zeros(8)), ("half", np.asarray(0.5))):
        proto.graph.initializer.append(onnx.numpy_helper.from_array(value.astype(np.float32), name))
    node = next(node for node in ir.from_proto(proto).graph if node.op_type in ("Resize", "TopK"))
    for backend in (TENSORRT, TENSORRT_RTX):
        why = why_unsupported(node, backend, plugins=False)
        assert why is None if not reason else why is not None and reason in why.reason and why.remedy


@pytest.mark.parametrize("op", ["ScatterElements", "ScatterND"])
def test_scatter_with_a_reduction_is_refused_with_its_name(op: str) -> None:
    for reduction in ("add", "none"):
        node = ir.node(op, [], attributes={"reduction": reduction})
        why = why_unsupported(node, TENSORRT_RTX, plugins=False)
        assert why is None if reduction == "none" else why is not None and f"reduction = {reduction}" in why.reason
        assert why_unsupported(node, TENSORRT, plugins=False) is None
