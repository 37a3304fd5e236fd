"""The selection of boxes that comes with TensorRT as plugins, written out in operators of ONNX.

``EfficientNMS_TRT`` and ``BatchedNMS_TRT`` (and ``BatchedNMSDynamic_TRT``), after their documentation: README.md of
``plugin/efficientNMSPlugin`` and ``plugin/batchedNMSPlugin`` in the repository NVIDIA/TensorRT.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx.parser
import onnx_ir as ir
import onnx_ir.passes.common as common_passes

from trtopt.errors import InvalidModelError

_EFFICIENT = "EfficientNMS_TRT"
PLUGINS = frozenset({_EFFICIENT, "BatchedNMS_TRT", "BatchedNMSDynamic_TRT"})

_DOMAIN = "trtopt.written_out"

_MOST_SORTED = 4096
"""Pairs of box and class, the best of an image, that EfficientNMS_TRT looks at."""

_MOST_KEPT = 1 << 16
"""Boxes that a node may give: a file may ask for any number."""

_LOWEST = float(np.finfo(np.float32).min)


def is_written_out(node: ir.Node) -> bool:
    """Whether :func:`write_out` knows a node; its domain is whatever the exporter gave the plugins."""
    return node.domain != "" and node.op_type in PLUGINS


def write_out(model: ir.Model) -> None:
    """Replace the plugins of a model, of opset 18 or later, in place by operators that ONNX Runtime runs.

    What a node gives: the number of boxes of each image [N, 1], corners [N, most, 4], scores [N, most], classes
    [N, most]; rows behind the number hold zeros, and the class -1 of ``BatchedNMS``. Nodes in nested graphs are left.

    Raises:
        InvalidModelError: A node has attributes or inputs with which it has no such form.
    """
    decode_boxes(model)
    _inline(model, {node: _selection(node) for node in model.graph if is_written_out(node)})


def written_out(model: ir.Model) -> ir.Model:
    """A clone after :func:`write_out`; the model itself where it has nothing to write out."""
    if not any(is_written_out(node) for node in model.graph):
        return model
    clone = model.clone()
    write_out(clone)
    return clone


def decode_boxes(model: ir.Model) -> None:
    """Write out, in place, only the decoding of boxes: what is left of a plugin takes corners and no anchors.

    Raises:
        InvalidModelError: A node has attributes or inputs with which it has no such form.
    """
    decoded: dict[ir.Node, str] = {}
    for node in list(model.graph):
        if not is_written_out(node) or node.op_type != _EFFICIENT:
            continue
        _check_inputs(node, (2, 3))
        coding = _number(node, "box_coding", 0, (0, 1))
        anchors = node.inputs[2] if len(node.inputs) == 3 else None
        boxes = node.inputs[0]
        if boxes is None or (not coding and anchors is None):
            continue
        operands = [boxes] if anchors is None else [boxes, anchors]
        decoder = ir.node(node.op_type, operands, name=f"{node.name}_boxes")
        decoder.outputs[0].name = f"{boxes.name}_decoded_for_{node.name}"
        decoder.outputs[0].type = boxes.type
        _check_rank(node)
        model.graph.insert_before(node, decoder)
        node.replace_input_with(0, decoder.outputs[0])
        node.resize_inputs(2)
        node.attributes["box_coding"] = ir.AttrInt64("box_coding", 0)
        decoded[decoder] = _decoder(coding, has_anchors=anchors is not None)
    _inline(model, decoded)


def _inline(model: ir.Model, texts: dict[ir.Node, str]) -> None:
    """Put bodies of functions, whose parameters are the inputs and outputs of nodes, in the place of the nodes."""
    if not texts:
        return
    opset = model.graph.opset_imports.get("", 21)
    for number, (node, text) in enumerate(texts.items()):
        header = f'<opset_import: ["": {opset}], domain: "{_DOMAIN}"> form_{number}'
        inputs = ", ".join(f"input_{index}" for index in range(len(node.inputs)))
        outputs = ", ".join(_OUTPUTS[: len(node.outputs)])
        function = onnx.parser.parse_function(f"{header} ({inputs}) => ({outputs}) {{ {text} }}")
        model.functions[_DOMAIN, function.name, ""] = ir.serde.deserialize_function(function)
        node.domain, node.op_type = _DOMAIN, function.name
        node.attributes.clear()
    model.graph.opset_imports[_DOMAIN] = 1
    common_passes.InlinePass()(model)
    model.functions.clear()
    used = {node.domain for node in model.graph.all_nodes()} | {""}
    for domain in set(model.graph.opset_imports) - used:
        del model.graph.opset_imports[domain]


_OUTPUTS = ("number", "boxes", "scores", "classes")


def _decoder(coding: int, *, has_anchors: bool) -> str:
    """Corners of the boxes ``input_0``, which are given relative to the anchors ``input_1`` where there are any.

    As centre and size: ``x = x w_a + x_a, w = w_a exp(w)``; as corners: their sum.
    """
    text = "pair = Constant <value_ints = [2, 2]> () "
    if has_anchors:
        text += """
            two = Constant <value_ints = [2]> () anchors = Unsqueeze (input_1, two)
            images = Shape <end = 1> (input_0) places = Shape <start = 1, end = 2> (input_0)
            box = Constant <value_ints = [-1, 4]> () grid = Concat <axis = 0> (images, places, box)
            every_box = Reshape (input_0, grid)
        """
    else:
        text += "every_box = Identity (input_0) "
    text += "a, b = Split <axis = -1> (every_box, pair) "
    if has_anchors:
        text += "a_anchor, b_anchor = Split <axis = -1> (anchors, pair) "
    if coding == 0:
        return text + (
            "low_a = Min (a, b) high_a = Max (a, b) "
            "low_b = Min (a_anchor, b_anchor) high_b = Max (a_anchor, b_anchor) "
            "low = Add (low_a, low_b) high = Add (high_a, high_b) number = Concat <axis = -1> (low, high)"
        )
    if has_anchors:
        text += "moved = Mul (a, b_anchor) centre = Add (moved, a_anchor) grown = Exp (b) size = Mul (b_anchor, grown) "
    else:
        text += "centre = Identity (a) size = Identity (b) "
    return text + (
        "half_float = Constant <value_float = 0.5> () half = CastLike (half_float, size) by = Mul (size, half) "
        "low = Sub (centre, by) high = Add (centre, by) number = Concat <axis = -1> (low, high)"
    )


def _selection(node: ir.Node) -> str:
    """The body of a plugin whose boxes are corners."""
    if len(node.outputs) != len(_OUTPUTS):
        raise _refused(node, f"it has {len(node.outputs)} outputs, not {len(_OUTPUTS)}")
    _check_inputs(node, (2,))
    _check_rank(node)
    return _efficient(node) if node.op_type == _EFFICIENT else _batched(node)


_START = """
    none = Constant <value_ints = [0]> () one = Constant <value_ints = [1]> () last = Constant <value_ints = [-1]> ()
    lowest = Constant <value_floats = [{lowest}]> ()
    zero_float = Constant <value_floats = [0.0]> () one_float = Constant <value_floats = [1.0]> ()
    all_boxes = Cast <to = 1> (input_0)
    all_scores = Cast <to = 1> (input_1)
    box_counts = Shape <start = 0, end = 2> (all_scores)
    of_box = Constant <value_ints = [-1, 4]> ()
    box_grid_shape = Concat <axis = 0> (box_counts, of_box)
    box_grid = Reshape (all_boxes, box_grid_shape)
    columns = Shape <start = 2, end = 3> (all_scores)
    least = Constant <value_floats = [{threshold}]> ()
    overlap = Constant <value_floats = [{iou}]> ()
    most = Constant <value_ints = [{most}]> ()
"""

_WITHOUT_BACKGROUND = """
    class_range = Constant <value_int = {background}> ()
    columns_scalar = Squeeze (columns, none)
    zero_scalar = Constant <value_int = 0> () one_scalar = Constant <value_int = 1> ()
    every_class = Range (zero_scalar, columns_scalar, one_scalar)
    is_background = Equal (every_class, class_range)
    usable_scores = Where (is_background, lowest, all_scores)
"""

_CHOICE = """
    pick = Constant <value_ints = [0, 2]> ()
    chosen_places = Gather <axis = 1> (selected, pick)
    chosen_count = Shape <start = 0, end = 1> (selected)
    chosen_ones = Expand (one_float, chosen_count)
    is_chosen_float = ScatterND (nothing, chosen_places, chosen_ones)
"""

_END = """
    is_chosen = Greater (chosen_float, zero_float)
    kept_scores = Where (is_chosen, best, lowest)
    margin = Constant <value_ints = [0, 0, 0, {most}]> ()
    lowest_scalar = Squeeze (lowest, none)
    padded = Pad (kept_scores, margin, lowest_scalar)
    top, top_place = TopK <axis = 1> (padded, most)
    is_found = Greater (top, lowest)
    width = Shape <start = 1, end = 2> (best)
    last_place = Sub (width, one)
    place = Min (top_place, last_place)
    place_rows = Unsqueeze (place, last)
    top_boxes = GatherND <batch_dims = 1> (best_boxes, place_rows)
    is_found_rows = Unsqueeze (is_found, last)
    found_boxes = Where (is_found_rows, top_boxes, zero_float)
    top_classes = GatherElements <axis = 1> (best_classes, place)
    no_class = Constant <value_ints = [{no_class}]> ()
    found_classes = Where (is_found, top_classes, no_class)
    top_scores = {scores}
    found_scores = Where (is_found, top_scores, zero_float)
    boxes = CastLike (found_boxes, input_0)
    scores = CastLike (found_scores, input_1)
    found = Cast <to = 6> (is_found)
    number = ReduceSum <keepdims = 1> (found, one)
"""


_BEST_PAIRS = """
    row_shape = Constant <value_ints = [0, -1, 4]> () pair_shape = Constant <value_ints = [0, -1]> ()
    box_rows = Reshape (all_boxes, row_shape)
    box_columns = Shape <start = 2, end = 3> (box_grid)
    pairs = Reshape (usable_scores, pair_shape)
    pair_count = Shape <start = 1, end = 2> (pairs)
    limit = Constant <value_ints = [{limit}]> ()
    sorted_count = Min (pair_count, limit)
    best, pair = TopK <axis = 1> (pairs, sorted_count)
    best_anchor = Div (pair, columns)
    best_classes = Mod (pair, columns)
    first_row = Mul (best_anchor, box_columns)
    box_column = Mod (best_classes, box_columns)
    row = Add (first_row, box_column)
    row_places = Unsqueeze (row, last)
    best_boxes = GatherND <batch_dims = 1> (box_rows, row_places)
    best_rows = Unsqueeze (best, one)
    best_shape = Shape (best)
    nothing = ConstantOfShape (best_shape)
"""

_SCORES_OF_CLASSES = """
    class_stop = Squeeze (columns, none)
    class_start = Constant <value_int = 0> () class_step = Constant <value_int = 1> ()
    class_names = Range (class_start, class_stop, class_step)
    class_upright = Constant <value_ints = [1, -1, 1]> ()
    class_rows = Reshape (class_names, class_upright)
    best_class_rows = Unsqueeze (best_classes, one)
    is_of_class = Equal (class_rows, best_class_rows)
    class_scores = Where (is_of_class, best_rows, lowest)
"""


def _efficient(node: ir.Node) -> str:
    """The best 4096 pairs of box and class of each image, then NMS, by class or of all, then the best that are left."""
    most = _number(node, "max_output_boxes", 100, (1, _MOST_KEPT))
    background = _number(node, "background_class", -1, (-1, 1 << 31))
    threshold, iou = _share(node, "score_threshold", 0.25), _share(node, "iou_threshold", 0.5)
    activates = bool(_number(node, "score_activation", 0, (0, 1)))
    if activates:  # the scores are logits, and are compared as such
        threshold = _logit(threshold)
    text = _START.format(lowest=_LOWEST, threshold=_before(threshold), iou=_text(iou), most=most)
    text += _usable(background) + _BEST_PAIRS.format(limit=_MOST_SORTED)
    is_agnostic = _number(node, "class_agnostic", 0, (0, 1))
    text += "class_scores = Identity (best_rows)" if is_agnostic else _SCORES_OF_CLASSES
    text += "selected = NonMaxSuppression (best_boxes, class_scores, most, overlap, least)"
    text += _CHOICE + "chosen_float = Identity (is_chosen_float)"
    text += _END.format(most=most, no_class=0, scores="Sigmoid (top)" if activates else "Identity (top)")
    return text + "classes = Cast <to = 6> (found_classes)"


_SORTED_BY_CLASS = """
    by_class = Transpose <perm = [0, 2, 1]> (usable_scores)
    anchors = Shape <start = 1, end = 2> (all_scores)
    limit = Constant <value_ints = [{sorted_most}]> ()
    sorted_count = Min (anchors, limit)
    class_best, class_place = TopK <axis = 2> (by_class, sorted_count)
    class_boxes = Transpose <perm = [0, 2, 1, 3]> (box_grid)
    four = Constant <value_ints = [4]> ()
    images = Shape <start = 0, end = 1> (all_scores)
    full_shape = Concat <axis = 0> (images, columns, anchors, four)
    every_box = Expand (class_boxes, full_shape)
    class_rows = Unsqueeze (class_place, last)
    sorted_boxes = GatherND <batch_dims = 2> (every_box, class_rows)
    flat_shape = Concat <axis = 0> (last, sorted_count, four)
    flat_boxes = Reshape (sorted_boxes, flat_shape)
    flat_score_shape = Concat <axis = 0> (last, one, sorted_count)
    flat_scores = Reshape (class_best, flat_score_shape)
"""
"""Each class of each image becomes an image of one class: its boxes [N classes, sorted, 4]."""

_BOTH_ENDS_INCLUDED = """
    halves = Constant <value_ints = [2, 2]> ()
    end_a, end_b = Split <axis = -1> (flat_boxes, halves)
    compared_low = Min (end_a, end_b) end_high = Max (end_a, end_b)
    compared_high = Add (end_high, one_float)
    compared = Concat <axis = -1> (compared_low, compared_high)
"""
"""A box of pixels holds those at both of its ends."""

_CLASSES_SELECTED = """
    selected = NonMaxSuppression (compared, flat_scores, most, overlap, least)
    nothing_shape = Concat <axis = 0> (last, sorted_count)
    nothing_like = Reshape (flat_scores, nothing_shape)
    nothing_dims = Shape (nothing_like)
    nothing = ConstantOfShape (nothing_dims)
"""

_CLASSES_JOINED = """
    image_shape = Constant <value_ints = [0, -1]> ()
    image_rows = Concat <axis = 0> (images, last)
    best = Reshape (class_best, image_shape)
    chosen_float = Reshape (is_chosen_float, image_rows)
    box_shape = Constant <value_ints = [0, -1, 4]> ()
    plain_boxes = Reshape (sorted_boxes, box_shape)
    class_count = Shape <start = 1, end = 2> (class_best)
    class_stop = Squeeze (class_count, none)
    class_start = Constant <value_int = 0> () class_step = Constant <value_int = 1> ()
    class_names = Range (class_start, class_stop, class_step)
    class_upright = Constant <value_ints = [1, -1, 1]> ()
    class_column = Reshape (class_names, class_upright)
    class_shape = Shape (class_best)
    class_grid = Expand (class_column, class_shape)
    best_classes = Reshape (class_grid, image_shape)
"""

_CLIPPED = """
    zero_clip = Squeeze (zero_float, none) one_clip = Squeeze (one_float, none)
    best_boxes = Clip (plain_boxes, zero_clip, one_clip)
"""


def _batched(node: ir.Node) -> str:
    """The best boxes of each class, NMS of each class, then the best of all that are left."""
    most = _number(node, "keepTopK", None, (1, _MOST_KEPT))
    sorted_most = _number(node, "topK", None, (1, 1 << 31))
    background = _number(node, "backgroundLabelId", -1, (-1, 1 << 31))
    threshold, iou = _share(node, "scoreThreshold", None), _share(node, "iouThreshold", None)
    is_normalized = _number(node, "isNormalized", 1, (0, 1))
    if not is_normalized and not _number(node, "caffeSemantics", 1, (0, 1)):
        raise _refused(node, "isNormalized = 0 with caffeSemantics = 0 counts areas in two ways")
    text = _START.format(lowest=_LOWEST, threshold=_before(threshold), iou=_text(iou), most=most)
    text += _usable(background) + _SORTED_BY_CLASS.format(sorted_most=sorted_most)
    text += "compared = Identity (flat_boxes)" if is_normalized else _BOTH_ENDS_INCLUDED
    text += _CLASSES_SELECTED + _CHOICE + _CLASSES_JOINED
    text += _CLIPPED if _number(node, "clipBoxes", 1, (0, 1)) else "best_boxes = Identity (plain_boxes)"
    return (
        text
        + _END.format(most=most, no_class=-1, scores="Identity (top)")
        + "classes = CastLike (found_classes, input_1)"
    )


def _usable(background: int) -> str:
    return (
        "usable_scores = Identity (all_scores)" if background < 0 else _WITHOUT_BACKGROUND.format(background=background)
    )


def _logit(share: float) -> float:
    """What a sigmoid makes ``share`` of; the plugin's own bound where there is none."""
    return float(np.log(share / (1 - share))) if 0 < share < 1 else math.copysign(32768.0, share - 0.5)


def _text(number: float) -> str:
    """A float as ONNX's text holds it."""
    return f"{np.float32(number):.9e}"


def _before(number: float) -> str:
    """The largest float below: NonMaxSuppression wants scores above its threshold, the plugins take those at theirs.

    Not a denormal one, which onnx before 1.23 cannot read.
    """
    below, tiny = float(np.nextafter(np.float32(number), np.float32(-np.inf))), float(np.finfo(np.float32).tiny)
    return _text(-tiny if abs(below) < tiny else below)


def _check_inputs(node: ir.Node, allowed: Sequence[int]) -> None:
    if len(node.inputs) not in allowed or any(value is None for value in node.inputs):
        raise _refused(node, f"it has {len(node.inputs)} inputs, not {' or '.join(map(str, allowed))}")


def _check_rank(node: ir.Node) -> None:
    """The boxes are [N, boxes, 4] or [N, boxes, classes, 4], where that is known."""
    boxes = node.inputs[0]
    if boxes is not None and boxes.shape is not None and len(boxes.shape) not in (3, 4):
        raise _refused(node, f"its boxes have {len(boxes.shape)} axes")


def _attribute(node: ir.Node, name: str, default: float | None) -> float:
    """A number; old exporters write some of them as lists of one."""
    attribute = node.attributes.get(name)
    if attribute is None:
        if default is None:
            raise _refused(node, f"it has no attribute {name}")
        return default
    value = attribute.value
    if isinstance(value, (list, tuple)) and len(value) == 1:
        value = value[0]
    if not isinstance(value, (int, float)):
        raise _refused(node, f"its attribute {name} is no number")
    return value


def _number(node: ir.Node, name: str, default: int | None, bounds: tuple[int, int]) -> int:
    value = _attribute(node, name, default)
    if value != int(value) or not bounds[0] <= value <= bounds[1]:
        raise _refused(node, f"its attribute {name} is {value:g}, not from {bounds[0]} to {bounds[1]}")
    return int(value)


def _share(node: ir.Node, name: str, default: float | None) -> float:
    value = _attribute(node, name, default)
    if not abs(value) <= 1e6:
        raise _refused(node, f"its attribute {name} is {value}")
    return value


def _refused(node: ir.Node, reason: str) -> InvalidModelError:
    return InvalidModelError(
        f"{node.op_type} cannot be written out in operators of ONNX: {reason}",
        where=f"node {node.name}",
        remedy="export with ONNX's NonMaxSuppression in its place",
    )
