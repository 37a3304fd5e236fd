"""TensorRT's plugins that select boxes, written out for ONNX Runtime: against loops that follow their documentation."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from onnx import helper

from trtopt.errors import InvalidModelError
from trtopt.support.nms_plugins import decode_boxes, write_out
from trtopt.support.ort_session import OrtSession

Detections = list[tuple[float, int, np.ndarray]]


def plugin(op_type: str, shapes: list[list[int]], **settings: Any) -> ir.Model:
    """A model of one plugin, its inputs ``i0``, ``i1`` and so on."""
    names = [f"i{index}" for index in range(len(shapes))]
    node = helper.make_node(op_type, names, ["n", "b", "s", "c"], "nms", domain="TRT", plugin_version="1", **settings)
    inputs = [helper.make_tensor_value_info(n, 1, s) for n, s in zip(names, shapes, strict=True)]
    classes = 6 if op_type.startswith("Efficient") else 1
    outputs = [helper.make_tensor_value_info(n, t, None) for n, t in (("n", 6), ("b", 1), ("s", 1), ("c", classes))]
    graph = helper.make_graph([node], "g", inputs, outputs)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("TRT", 1)]
    return ir.from_proto(helper.make_model(graph, opset_imports=opsets, ir_version=10))


def run(model: ir.Model, *arrays: np.ndarray) -> list[np.ndarray]:
    with OrtSession(model) as session:
        return session.run({f"i{index}": array for index, array in enumerate(arrays)})


def newest_opset() -> int:
    """The newest opset that the installed ONNX Runtime takes."""
    model = ir.from_onnx_text('<ir_version: 8, opset_import: ["" : 99]> g (float[1] x) => (float[1] y) { y = Relu(x) }')
    with pytest.raises(InvalidModelError, match=r"knows opsets up to \d+, and the model has 99") as caught:
        OrtSession(model)
    assert "newer onnxruntime" in str(caught.value.remedy)
    return int(str(caught.value).split("up to ")[1].split(",")[0])


def iou(a: np.ndarray, b: np.ndarray, one: float = 0.0) -> float:
    def area(low: np.ndarray, high: np.ndarray) -> float:
        return float(np.prod(np.maximum(high - low + one, 0)))

    a_low, a_high = np.minimum(a[:2], a[2:]), np.maximum(a[:2], a[2:])
    b_low, b_high = np.minimum(b[:2], b[2:]), np.maximum(b[:2], b[2:])
    both = area(np.maximum(a_low, b_low), np.minimum(a_high, b_high))
    union = area(a_low, a_high) + area(b_low, b_high) - both
    return both / union if union > 0 else 0.0


def suppressed(found: Detections, threshold: float, by_class: bool, one: float = 0.0) -> Detections:
    kept: Detections = []
    for score, label, box in sorted(found, key=lambda item: -item[0]):
        others = (item for item in kept if not by_class or item[1] == label)
        if all(iou(box, item[2], one) <= threshold for item in others):
            kept.append((score, label, box))
    return kept


def check(outputs: list[np.ndarray], image: int, expected: Detections, no_class: int) -> None:
    number, boxes, scores, classes = (output[image] for output in outputs)
    count = len(expected)
    assert number.tolist() == [count]
    np.testing.assert_array_equal(classes[:count], [label for _, label, _ in expected])
    np.testing.assert_allclose(scores[:count], [score for score, _, _ in expected], rtol=1e-6)
    np.testing.assert_allclose(boxes[:count], np.reshape([box for *_, box in expected], (count, 4)), rtol=1e-6)
    assert not boxes[count:].any() and not scores[count:].any()
    assert (classes[count:] == no_class).all()


def made(seed: int, images: int, boxes: int, classes: int, *, by_class: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Corners of overlapping boxes, every fifth one with its ends exchanged, and scores that all differ."""
    rng = np.random.default_rng(seed)
    low = rng.uniform(0, 6, (images, boxes, *([classes] if by_class else []), 2))
    corners = np.concatenate([low, low + rng.uniform(1, 4, low.shape)], -1)
    corners[:, ::5] = corners[:, ::5][..., [2, 3, 0, 1]]
    scores = rng.permutation(images * boxes * classes).reshape(images, boxes, classes) / (images * boxes * classes)
    return corners.astype(np.float32), scores.astype(np.float32)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"class_agnostic": 1},
        {"background_class": 1},
        {"max_output_boxes": 3},
        {"max_output_boxes": 700},
        {"score_threshold": 0.0, "iou_threshold": 0.9},
        {"score_threshold": 2.0},
    ],
)
@pytest.mark.parametrize("by_class", [False, True])
def test_efficient_nms(settings: dict[str, Any], by_class: bool) -> None:
    corners, scores = made(0, 2, 40, 3, by_class=by_class)
    wanted = {"score_threshold": 0.25, "iou_threshold": 0.3, "max_output_boxes": 20, "background_class": -1, **settings}
    model = plugin("EfficientNMS_TRT", [list(corners.shape), list(scores.shape)], box_coding=0, **wanted)
    outputs = run(model, corners, scores)
    assert [output.shape for output in outputs[:2]] == [(2, 1), (2, wanted["max_output_boxes"], 4)]
    assert [output.dtype for output in outputs] == [np.int32, np.float32, np.float32, np.int32]
    for image in range(2):
        found = [
            (
                float(scores[image, place, label]),
                label,
                corners[image, place, label] if by_class else corners[image, place],
            )
            for place in range(40)
            for label in range(3)
            if scores[image, place, label] >= wanted["score_threshold"] and label != wanted["background_class"]
        ]
        kept = suppressed(found, wanted["iou_threshold"], not wanted.get("class_agnostic"))
        check(outputs, image, kept[: wanted["max_output_boxes"]], 0)


def test_efficient_nms_takes_logits() -> None:
    corners, shares = made(1, 1, 30, 2)
    shares = np.clip(shares, 0.01, 0.99)
    model = plugin(
        "EfficientNMS_TRT", [[1, 30, 4], [1, 30, 2]], score_activation=1, score_threshold=0.4, iou_threshold=0.3
    )
    number, _, scores, _ = run(model, corners, np.log(shares / (1 - shares)))
    kept = [item for item in scores[0] if item]
    assert len(kept) == number[0, 0] > 3 and min(kept) >= 0.4 and scores.max() == pytest.approx(shares.max())


def test_efficient_nms_looks_at_the_best_4096_pairs_only() -> None:
    """Boxes that do not touch: without that limit all would be kept."""
    places = np.arange(5000, dtype=np.float32)
    corners = np.stack([places * 2, places * 0, places * 2 + 1, places * 0 + 1], 1)[None]
    scores = (1 - places / 5000)[None, :, None]
    model = plugin("EfficientNMS_TRT", [[1, 5000, 4], [1, 5000, 1]], score_threshold=0.0, max_output_boxes=6000)
    number, _, found, _ = run(model, corners, scores)
    assert number[0, 0] == 4096 and found[0, 4095] == scores[0, 4095, 0]


@pytest.mark.parametrize("coding", [0, 1])
@pytest.mark.parametrize("anchored", [0, 1, 2])
@pytest.mark.parametrize("rank", [3, 4])
def test_boxes_are_decoded(coding: int, anchored: int, rank: int) -> None:
    """By anchors of all images, of each image, or none; the decoding alone leaves a plugin that takes corners."""
    rng = np.random.default_rng(2)
    boxes = rng.uniform(0.1, 1, (2, 6, *([3] if rank == 4 else []), 4)).astype(np.float32)
    anchors = rng.uniform(0.5, 2, (anchored, 6, 4)).astype(np.float32)
    scores = rng.uniform(0.5, 1, (2, 6, 3)).astype(np.float32)
    arrays = [boxes, scores, anchors] if anchored else [boxes, scores]
    wide = anchors[:, :, None] if rank == 4 and anchored else anchors
    if coding == 1:
        centre, size = boxes[..., :2], boxes[..., 2:]
        if anchored:
            centre, size = centre * wide[..., 2:] + wide[..., :2], wide[..., 2:] * np.exp(size)
        corners = np.concatenate([centre - size / 2, centre + size / 2], -1)
    else:
        corners = boxes

        def ordered(array: np.ndarray) -> np.ndarray:
            a, b = array[..., :2], array[..., 2:]
            return np.concatenate([np.minimum(a, b), np.maximum(a, b)], -1)

        corners = ordered(boxes) + ordered(wide) if anchored else boxes
    settings = {"iou_threshold": 1.0, "score_threshold": 0.0, "max_output_boxes": 18, "box_coding": coding}
    model = plugin("EfficientNMS_TRT", [list(array.shape) for array in arrays], **settings)
    outputs = run(model, *arrays)
    assert (outputs[0] == 18).all()
    for image in range(2):
        order = np.argsort(-scores[image].ravel())
        every = corners[image] if rank == 4 else np.repeat(corners[image][:, None], 3, 1)
        np.testing.assert_allclose(outputs[1][image], every.reshape(-1, 4)[order], rtol=1e-5)
    decode_boxes(model)
    left = next(node for node in model.graph if node.op_type == "EfficientNMS_TRT")
    assert len(left.inputs) == 2 and left.attributes["box_coding"].as_int() == 0
    for output, again in zip(outputs, run(model, *arrays), strict=True):
        np.testing.assert_array_equal(again, output)


@pytest.mark.parametrize(
    "settings",
    [{}, {"isNormalized": 0}, {"clipBoxes": 1}, {"backgroundLabelId": 0}, {"topK": 7}, {"keepTopK": 4}, {"topK": 900}],
)
@pytest.mark.parametrize("shared", [True, False])
def test_batched_nms(settings: dict[str, Any], shared: bool) -> None:
    corners, scores = made(3, 2, 40, 3, by_class=not shared)
    boxes = corners[:, :, None] if shared else corners
    wanted: dict[str, Any] = {"scoreThreshold": 0.25, "iouThreshold": 0.3, "topK": 30, "keepTopK": 50, "clipBoxes": 0}
    wanted |= {"backgroundLabelId": -1, "isNormalized": 1, "shareLocation": int(shared), "numClasses": 3, **settings}
    model = plugin("BatchedNMSDynamic_TRT", [list(boxes.shape), list(scores.shape)], **wanted)
    outputs = run(model, boxes, scores)
    assert [output.dtype for output in outputs] == [np.int32, np.float32, np.float32, np.float32]
    one = 0.0 if wanted["isNormalized"] else 1.0
    for image in range(2):
        kept: Detections = []
        for label in range(3):
            of_class = [
                (float(scores[image, place, label]), label, boxes[image, place, 0 if shared else label])
                for place in range(40)
                if scores[image, place, label] >= 0.25 and label != wanted["backgroundLabelId"]
            ]
            best = sorted(of_class, key=lambda item: -item[0])[: wanted["topK"]]
            kept += suppressed(best, 0.3, True, one)
        kept = sorted(kept, key=lambda item: -item[0])[: wanted["keepTopK"]]
        if wanted["clipBoxes"]:
            kept = [(score, label, np.clip(box, 0, 1)) for score, label, box in kept]
        check(outputs, image, kept, -1)


def test_what_has_no_form_is_refused_with_the_node() -> None:
    shapes = [[1, 8, 4], [1, 8, 2]]
    wrong = [
        ("EfficientNMS_TRT", shapes, {"max_output_boxes": 10**9}, "max_output_boxes is 1e"),
        ("EfficientNMS_TRT", shapes, {"box_coding": 7}, "box_coding is 7"),
        ("EfficientNMS_TRT", [[8, 4], [1, 8, 2]], {}, "2 axes"),
        ("EfficientNMS_TRT", [[1, 8, 4]], {}, "1 inputs"),
        ("BatchedNMS_TRT", [[1, 8, 1, 4], [1, 8, 2]], {}, "no attribute keepTopK"),
        ("EfficientNMS_TRT", shapes, {"score_threshold": float("nan")}, "score_threshold is nan"),
        ("EfficientNMS_TRT", shapes, {"score_threshold": "x"}, "score_threshold is no number"),
    ]
    for op_type, dims, settings, said in wrong:
        with pytest.raises(InvalidModelError, match=said) as caught:
            write_out(plugin(op_type, dims, **settings))
        assert caught.value.where == "node nms"


@pytest.mark.parametrize("opset", [18, 24])
def test_the_form_is_of_the_opset_of_the_model(opset: int) -> None:
    if opset > (known := newest_opset()):
        pytest.skip(f"this ONNX Runtime knows opsets up to {known}")
    model = plugin("EfficientNMS_TRT", [[1, 8, 4], [1, 8, 2]], box_coding=1)
    corners, scores = made(0, 1, 8, 2)
    expected = run(model, corners, scores)
    model.graph.opset_imports[""] = opset
    for value, other in zip(run(model, corners, scores), expected, strict=True):
        np.testing.assert_array_equal(value, other)


def test_half_precision_stays_and_nothing_of_the_plugin_is_left() -> None:
    model = plugin("EfficientNMS_TRT", [[1, 8, 4], [1, 8, 2]], box_coding=1)
    for value in (*model.graph.inputs, *model.graph.outputs[1:3]):
        value.type = ir.TensorType(ir.DataType.FLOAT16)
    write_out(model)
    assert set(model.graph.opset_imports) == {""} and not model.functions
    rng = np.random.default_rng(0)
    outputs = run(model, rng.random((1, 8, 4)).astype(np.float16), rng.random((1, 8, 2)).astype(np.float16))
    assert [output.dtype for output in outputs] == [np.int32, np.float16, np.float16, np.int32]
